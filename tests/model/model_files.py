"""A small model with its weights inside or beside it, and what the tests of loading and saving do with it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

WEIGHTS = np.arange(24, dtype=np.float32)


class Streams:
    """Stands in for sys.stdin and sys.stdout."""

    def __init__(self, content: bytes = b"") -> None:
        self.buffer = io.BytesIO(content)


def external_tensor(name: str, offset: int, location: str = "data/w.bin") -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[8], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", str(offset)), ("length", "32")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def sum_model(*initializers: TensorProto) -> onnx.ModelProto:
    """y = x + a + b + c; c is the `value` of a Constant node."""
    a, b, c = initializers
    nodes = [
        helper.make_node("Constant", [], ["c"], name="constant", value=c),
        helper.make_node("Add", ["x", "a"], ["xa"], name="add_a"),
        helper.make_node("Add", ["xa", "b"], ["xab"], name="add_b"),
        helper.make_node("Add", ["xab", "c"], ["y"], name="add_c"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [8])], [value("y", TensorProto.FLOAT, [8])], [a, b]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.metadata_props.add(key="origin", value="tests")
    return model


def run(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.zeros(8, np.float32)})
    assert isinstance(result, np.ndarray)
    return result


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def renamed(proto: onnx.ModelProto) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    changed.producer_name = "renamed"
    return changed
