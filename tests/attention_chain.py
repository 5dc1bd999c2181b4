"""The nodes of a generated attention, as each opset spells them."""

from __future__ import annotations

import math

import numpy as np
from attention_data import Data, fill_value, mask_shape, second_is_mask
from onnx import NodeProto, TensorProto, helper, numpy_helper
from strategies import AttentionSpec

__all__ = ["Body", "attention_inputs", "emit_attention"]


class Body:
    """Nodes and constants of one graph or function; constants are nodes or initializers."""

    def __init__(self, opset: int, prefix: str, constant_nodes: bool) -> None:
        self.opset, self.prefix, self.constant_nodes = opset, prefix, constant_nodes
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._count = 0

    def name(self, hint: str) -> str:
        self._count += 1
        return f"{self.prefix}{hint}_{self._count}"

    def op(self, op_type: str, *inputs: str, output: str | None = None, **attributes: object) -> str:
        name = self.name(op_type.lower())
        output = output or f"{name}_out"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return output

    def const(self, array: np.ndarray | float, dtype: str | None = None) -> str:
        array = np.asarray(array, dtype)
        name = self.name("constant")
        if self.constant_nodes:
            return self.op("Constant", output=name, value=numpy_helper.from_array(array, name))
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64))

    def cast(self, value: str, dtype: str) -> str:
        return self.op("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def attention_inputs(spec: AttentionSpec, data: Data) -> dict[str, np.ndarray]:
    """The graph inputs of a spec in the layouts of its graph."""
    feeds = {
        "query": _laid_out(data.query, spec.einsum_qk).astype(spec.dtype),
        "key": _laid_out(data.key, spec.einsum_qk).astype(spec.dtype),
    }
    if not spec.tied:
        feeds["value"] = _laid_out(data.value, spec.einsum_pv).astype(spec.dtype)
    if spec.scale != "none" and spec.scale_source == "input":
        feeds["factor"] = np.array(_applied_factor(spec, data), spec.dtype)
    if spec.mask != "none" and spec.mask_source != "constant":
        feeds["mask"] = _mask_array(spec, data.hidden)
    return feeds


def emit_attention(body: Body, spec: AttentionSpec, data: Data, output: str, probabilities: str | None) -> None:
    """Append the chain from query, key and value to `output`."""
    scores = _scores(body, spec, data)
    scores = _masked(body, spec, data, scores)
    if spec.sink:
        column = body.const(data.sink.astype(spec.mask_dtype))
        target = body.ints(*_score_shape(spec)[:-1], 1)
        scores = body.op("Concat", scores, body.op("Expand", column, target), axis=-1)
    if spec.cast == "late":
        scores = body.cast(scores, spec.softmax_dtype)
    if spec.reshape == "softmax":
        keys = spec.keys + spec.sink
        scores = body.op("Reshape", scores, body.ints(spec.batch * spec.heads, spec.queries, keys))
    if spec.row_max:
        scores = body.op("Sub", scores, _row_max(body, scores))
    scores = _wrapped(body, spec.wrap_before, scores)
    weights = body.op("Softmax", scores, axis=-1)
    weights = _after(body, spec, weights, probabilities)
    _product(body, spec, weights, output)


def _scores(body: Body, spec: AttentionSpec, data: Data) -> str:
    query, key = "query", "key"
    if spec.scale in ("query", "both"):
        query = body.op("Mul", query, _factor(body, spec, data))
    if spec.scale in ("key", "both"):
        key = body.op("Mul", key, _factor(body, spec, data))
    if spec.einsum_qk:
        scores = body.op("Einsum", query, key, equation="bqhd,bkhd->bhqk")
    else:
        key = _grouped(body, spec, key)
        order = list(range(spec.rank))
        turned = body.op("Transpose", key, perm=[*order[:-2], order[-1], order[-2]])
        scores = body.op("MatMul", query, turned)
    if spec.reshape == "scores":
        flat = body.op("Reshape", scores, body.ints(-1, spec.queries, spec.keys))
        scores = body.op("Reshape", flat, body.ints(*_score_shape(spec)))
    if spec.scale in ("mul", "div"):
        scores = body.op(spec.scale.capitalize(), scores, _factor(body, spec, data))
    if spec.cap:
        limit = body.const(spec.cap, spec.dtype)
        scores = body.op("Mul", body.op("Tanh", body.op("Div", scores, limit)), limit)
    return scores


def _factor(body: Body, spec: AttentionSpec, data: Data) -> str:
    if spec.scale_source == "input":
        return "factor"
    if spec.scale_source == "constant":
        return body.const(_applied_factor(spec, data), spec.dtype)
    size = body.op("Gather", body.op("Shape", "query"), body.const(np.int64(-1)), axis=0)
    root = body.op("Sqrt", body.cast(size, spec.dtype))
    if spec.scale == "div":
        return root
    factor = body.op("Div", body.const(1.0, spec.dtype), root)
    return body.op("Sqrt", factor) if spec.scale == "both" else factor


def _applied_factor(spec: AttentionSpec, data: Data) -> float:
    if spec.scale == "div":
        return 1 / data.factor
    return math.sqrt(data.factor) if spec.scale == "both" else data.factor


def _masked(body: Body, spec: AttentionSpec, data: Data, scores: str) -> str:
    if spec.cast == "early":
        scores = body.cast(scores, spec.softmax_dtype)
    elif spec.cast == "same":
        scores = body.cast(scores, spec.dtype)
    if spec.mask == "none":
        return scores
    if spec.mask.startswith("where"):
        return _where(body, spec, data, scores)
    if spec.mask == "sub":
        return body.op("Sub", scores, _subtrahend(body, spec, data))
    mask = _additive(body, spec, data)
    if spec.mask == "add-swapped":
        return body.op("Add", mask, scores)
    scores = body.op("Add", scores, mask)
    if spec.mask == "two-adds":
        second = np.where(data.twice, fill_value(spec), 0.0) if second_is_mask(spec) else data.bias
        scores = body.op("Add", scores, body.const(second, spec.mask_dtype))
    return scores


def _where(body: Body, spec: AttentionSpec, data: Data, scores: str) -> str:
    fill = body.const(fill_value(spec), spec.mask_dtype)
    visible = body.const(~data.hidden) if spec.mask_source == "constant" else "mask"
    if spec.mask == "where":
        return body.op("Where", visible, scores, fill)
    return body.op("Where", body.op("Not", visible), fill, scores)


def _subtrahend(body: Body, spec: AttentionSpec, data: Data) -> str:
    """(1 - visible) * 10000"""
    visible = body.const((~data.hidden).astype(spec.mask_dtype)) if spec.mask_source == "constant" else "mask"
    if spec.mask_source == "bool":
        visible = body.cast(visible, spec.mask_dtype)
    inverted = body.op("Sub", body.const(1.0, spec.mask_dtype), visible)
    return body.op("Mul", inverted, body.const(-fill_value(spec), spec.mask_dtype))


def _additive(body: Body, spec: AttentionSpec, data: Data) -> str:
    if spec.mask_source == "constant":
        return body.const(_filled(spec, data.hidden))
    if spec.mask_source == "input":
        return "mask"
    zero, fill = body.const(0.0, spec.mask_dtype), body.const(fill_value(spec), spec.mask_dtype)
    return body.op("Where", "mask", zero, fill)


def _mask_array(spec: AttentionSpec, hidden: np.ndarray) -> np.ndarray:
    """The mask as a graph input: visible keys as booleans or 1, or the numbers to add."""
    if spec.mask_source == "bool" or spec.mask.startswith("where"):
        return ~hidden
    return (~hidden).astype(spec.mask_dtype) if spec.mask == "sub" else _filled(spec, hidden)


def _filled(spec: AttentionSpec, hidden: np.ndarray) -> np.ndarray:
    return np.where(hidden, fill_value(spec), 0.0).astype(spec.mask_dtype).reshape(mask_shape(spec))


def _row_max(body: Body, scores: str) -> str:
    if body.opset >= 18:
        return body.op("ReduceMax", scores, body.ints(-1), keepdims=1)
    return body.op("ReduceMax", scores, axes=[-1], keepdims=1)


def _wrapped(body: Body, kind: str, value: str, output: str | None = None) -> str:
    if kind == "none":
        return value
    return body.op(kind, value, output=output, **({"axis": 0} if kind == "Concat" else {}))


def _after(body: Body, spec: AttentionSpec, weights: str, probabilities: str | None) -> str:
    weights = _wrapped(body, spec.wrap_after, weights)
    if spec.guard:
        weights = body.op("Where", body.op("IsNaN", weights), body.const(0.0, spec.softmax_dtype), weights)
    if spec.reshape == "softmax":
        keys = spec.keys + spec.sink
        weights = body.op("Reshape", weights, body.ints(*_score_shape(spec)[:-1], keys))
    if spec.softmax_dtype != spec.dtype or spec.cast == "same":
        weights = body.cast(weights, spec.dtype)
    if spec.sink:
        weights = body.op("Slice", weights, body.ints(0), body.ints(-1), body.ints(-1), body.ints(1))
    if probabilities is not None:
        body.op("Identity", weights, output=probabilities)
    if spec.reshape == "product":
        weights = body.op("Reshape", weights, body.ints(spec.batch * spec.heads, spec.queries, spec.keys))
    return weights


def _product(body: Body, spec: AttentionSpec, weights: str, output: str) -> None:
    product = body.name("product") if spec.tail else output
    value = "key" if spec.tied else "value"
    if spec.einsum_pv:
        body.op("Einsum", weights, value, equation="bhqk,bkhd->bqhd", output=product)
    else:
        value = _grouped(body, spec, value)
        if spec.reshape == "product":
            value = body.op("Reshape", value, body.ints(spec.batch * spec.heads, spec.keys, spec.head_size))
        body.op("MatMul", weights, value, output=product)
    if spec.tail:
        body.op("Identity", product, output=output)


def _grouped(body: Body, spec: AttentionSpec, value: str) -> str:
    """Repeat key heads: [B, H/G, K, D] -> [B, H, K, D]."""
    if spec.group == 1:
        return value
    pairs = spec.heads // spec.group
    wide = body.op("Unsqueeze", value, body.ints(2)) if body.opset >= 13 else body.op("Unsqueeze", value, axes=[2])
    wide = body.op("Expand", wide, body.ints(spec.batch, pairs, spec.group, spec.keys, spec.head_size))
    return body.op("Reshape", wide, body.ints(spec.batch, spec.heads, spec.keys, spec.head_size))


def _score_shape(spec: AttentionSpec) -> tuple[int, ...]:
    return (spec.batch, spec.heads, spec.queries, spec.keys)[4 - spec.rank :]


def _laid_out(array: np.ndarray, einsum: bool) -> np.ndarray:
    return np.swapaxes(array, 1, 2) if einsum else array
