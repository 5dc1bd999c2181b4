from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_pairs import LAYERS, feeds, model
from onnx import ModelProto, TensorProto

from graphsurgery.engines import engine
from graphsurgery.verification.noise import noisy_twin

STEPS = {"float": 2.0**-23, "float16": 2.0**-10, "double": 2.0**-52}


def run(proto: ModelProto, feed: dict[str, np.ndarray], output: str = "y") -> np.ndarray:
    return engine("onnxruntime").open(proto.SerializeToString()).run(feed)[output]


def one_layer(kind: str = "float") -> ModelProto:
    inputs = f"{kind}[B, 2, Q, 4] q, {kind}[B, 2, 4, Q] k, {kind}[B, 2, Q, 4] v"
    body = "a = MatMul(q, k)  [soft] p = Softmax(a)  y = MatMul(p, v)"
    return model(body, inputs=inputs, output=f"{kind}[B, 2, Q, 4] y, {kind}[B, 2, Q, Q] p")


def test_no_attention_no_twin() -> None:
    assert noisy_twin(model("y = Identity(q)")) is None


@pytest.mark.parametrize("kind", STEPS)
def test_probabilities_move_by_one_rounding_step(kind: str) -> None:
    proto = one_layer(kind)
    before = proto.SerializeToString()
    twin = noisy_twin(proto)
    assert twin is not None and proto.SerializeToString() == before
    feed = {
        name: value.astype(onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type))
        for name, value in feeds()[0].items()
    }
    first, second = (run(p, feed, "p").astype(np.float64) for p in (proto, twin))
    relative = (second - first) / first
    step = STEPS[kind]
    assert 0.4 * step <= np.abs(relative).max() <= 2.1 * step, "one step, rounded"
    assert (relative > 0).any() and (relative < 0).any(), "both signs"
    assert run(twin, feed).dtype == run(proto, feed).dtype


def test_bfloat16_has_a_twin() -> None:
    twin = noisy_twin(one_layer("bfloat16"))
    assert twin is not None
    onnx.checker.check_model(twin, full_check=True)


def test_every_site_is_disturbed_and_names_stay() -> None:
    proto = model()
    twin = noisy_twin(proto)
    assert twin is not None
    producers = {name: node.op_type for node in twin.graph.node for name in node.output}
    assert (producers["p1"], producers["p2"], producers["y"]) == ("Add", "Add", "MatMul")
    assert twin.graph.output == proto.graph.output and twin.graph.input == proto.graph.input
    onnx.checker.check_model(twin, full_check=True)


def test_sites_of_functions_and_branches_are_disturbed() -> None:
    more = """<domain: "local", opset_import: ["" : 17]>
    f (q, k, v) => (y) { a = MatMul(q, k)  p = Softmax(a)  y = MatMul(p, v) }"""
    twin = noisy_twin(model("y = local.f(q, k, v)", more=more))
    assert twin is not None and "Sin" in {node.op_type for node in twin.functions[0].node}
    assert run(twin, feeds()[0]).shape == (1, 2, 6, 4)


def test_the_disturbance_is_the_same_each_time() -> None:
    first, second = noisy_twin(model()), noisy_twin(model())
    assert first is not None and second is not None
    assert first.SerializeToString() == second.SerializeToString()
    assert LAYERS.count("Softmax") == sum(node.op_type == "Sin" for node in first.graph.node)
    assert first.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
