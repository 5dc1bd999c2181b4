"""Small models with fused Attention nodes, and how a decomposed one is run and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, TensorProto, parser

from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import Rewriter
from graphsurgery.passes import PassResult
from graphsurgery.passes.decompose_attention import DecomposeAttention

Values = dict[str, np.ndarray]

# largest absolute difference: a few roundings of scores up to 4 enter the exponent, results reach 3
ATOL = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
# packages without complete types
ONNXRUNTIME: Any = onnxruntime
REFERENCE: Any = onnx.reference

needs_the_operator = pytest.mark.skipif(
    tuple(int(part) for part in onnx.__version__.split(".")[:2]) < (1, 23),
    reason="rows without keys and causal offsets have their present meaning since onnx 1.23",
)


def decompose(model: ModelProto) -> tuple[ModelProto, PassResult]:
    copy = ModelProto()
    copy.CopyFrom(model)
    index = ModelIndex(copy)
    result = DecomposeAttention().apply(index, Rewriter(index))
    assert index.node_counts() == ModelIndex(copy).node_counts()
    return copy, result


def reference(model: ModelProto, feed: Mapping[str, np.ndarray]) -> Values:
    with np.errstate(invalid="ignore"):
        # a row of -inf gives NaN in its Softmax until the guard
        values = REFERENCE.ReferenceEvaluator(model).run(None, dict(feed))
    return dict(zip([value.name for value in model.graph.output], values, strict=True))


def run(model: ModelProto, feed: Mapping[str, np.ndarray]) -> Values:
    names = [value.name for value in model.graph.output]
    if any(value.type.tensor_type.elem_type == TensorProto.BFLOAT16 for value in model.graph.input):
        # onnxruntime has no bfloat16 Mul and Where on the CPU
        return reference(model, feed)
    options = ONNXRUNTIME.SessionOptions()
    options.graph_optimization_level = ONNXRUNTIME.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ONNXRUNTIME.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, dict(feed)), strict=True))


def assert_same(got: Values, want: Values) -> None:
    assert list(got) == list(want)
    for name, expected in want.items():
        actual = got[name]
        assert (name, actual.shape, actual.dtype) == (name, expected.shape, expected.dtype)
        wide, reference = actual.astype(np.float64), expected.astype(np.float64)
        assert np.array_equal(np.isneginf(wide), np.isneginf(reference)), name
        finite = np.isfinite(reference)
        assert np.isfinite(wide[finite]).all(), name
        np.testing.assert_allclose(
            wide[finite], reference[finite], rtol=0, atol=ATOL[expected.dtype.name], err_msg=name
        )


def operators(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def node(model: ModelProto, name: str) -> NodeProto:
    return next(entry for entry in model.graph.node if entry.name == name)


def named(
    body: str,
    mask: str = "",
    opset: int = 23,
    lengths: tuple[str, str, str] = ("S", "K", "H"),
    extra: str = "",
    outputs: str = "float[B, 4, S, 8] y",
) -> ModelProto:
    s, k, h = lengths
    inputs = f"float[B, 4, {s}, 8] q0, float[B, {h}, {k}, 8] k, float[B, {h}, {k}, 8] v"
    text = f'<ir_version: 10, opset_import: ["" : {opset}, "local" : 1, "com.microsoft" : 1]>'
    return parser.parse_model(
        f"{text} agraph ({inputs}{', ' + mask if mask else ''}) => ({outputs}) {{{body}}} {extra}"
    )


def feeds(batch: int = 2, queries: int = 5, keys: int = 7, kv_heads: int = 4, **more: np.ndarray) -> Values:
    rng = np.random.default_rng(7)
    q = rng.normal(size=(batch, 4, queries, 8)).astype(np.float32)
    k, v = (rng.normal(size=(batch, kv_heads, keys, 8)).astype(np.float32) for _ in range(2))
    return {"q0": q, "k": k, "v": v, **more}


def visible(*shape: int) -> np.ndarray:
    mask = np.random.default_rng(3).random(shape) < 0.6
    mask[..., 0, :] = False
    return mask
