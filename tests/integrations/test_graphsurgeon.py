from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from onnx import ModelProto, numpy_helper, parser

from graphsurgery.integrations.graphsurgeon import is_graph, to_graph, to_model

TEXT = """<ir_version: 10, opset_import: ["" : 17]>
agraph (float[B, 2] x) => (float[B, 2] y) <float[2] w = {1, 2}> { [add] h = Add(x, w)  [relu] y = Relu(h) }"""


def model() -> ModelProto:
    return parser.parse_model(TEXT)


@pytest.mark.parametrize("other", [None, "path.onnx", b"bytes", 3, model()])
def test_what_is_no_graph(other: object) -> None:
    assert not is_graph(other)


def test_a_graph_is_known() -> None:
    assert is_graph(gs.import_onnx(model()))


def test_a_graph_is_told_without_loading_the_library() -> None:
    code = (
        "import sys; from graphsurgery.integrations.graphsurgeon import is_graph; "
        "assert not is_graph(object()); assert 'onnx_graphsurgeon' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_there_and_back() -> None:
    back = to_model(to_graph(model()))
    assert [(node.name, node.op_type, list(node.input), list(node.output)) for node in back.graph.node] == [
        ("add", "Add", ["x", "w"], ["h"]),
        ("relu", "Relu", ["h"], ["y"]),
    ]
    assert [value.name for value in (*back.graph.input, *back.graph.output)] == ["x", "y"]
    assert back.opset_import[0].version == 17
    np.testing.assert_array_equal(numpy_helper.to_array(back.graph.initializer[0]), np.array([1, 2], np.float32))


def test_neither_way_modifies_what_was_given() -> None:
    proto = model()
    before = proto.SerializeToString()
    graph = to_graph(proto)
    assert proto.SerializeToString() == before
    counts = len(graph.nodes), sorted(graph.tensors())
    to_model(graph)
    assert (len(graph.nodes), sorted(graph.tensors())) == counts
