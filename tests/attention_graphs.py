"""Turns an `AttentionSpec` into an ONNX model with feeds and the float64 answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from attention_chain import Body, attention_inputs, emit_attention
from attention_data import Data, answers, hostile, inside
from onnx import ModelProto, TensorProto, ValueInfoProto, helper
from strategies import AttentionSpec

__all__ = ["Case", "build"]

Feeds = dict[str, np.ndarray]
_LOCAL = "local"
_OUTPUTS = ("output", "output_negative")


@dataclass(frozen=True, eq=False)
class Case:
    """A generated model with what it must give."""

    spec: AttentionSpec
    model: ModelProto
    feeds: Feeds
    expected: Feeds
    """float64, by output name; NaN where the original gives NaN."""
    data: Data

    def hostile(self) -> tuple[Feeds, Feeds]:
        """Feeds far outside the window, with hidden rows where the mask is an input, and their float64 answer."""
        data = hostile(self.spec, self.data)
        return _feeds(self.spec, data), _expected(self.spec, data)


def build(spec: AttentionSpec) -> Case:
    """The model of a description, with feeds inside the window and the answer."""
    data = inside(spec)
    feeds = _feeds(spec, data)
    graph_inputs = [_value(name, array, _dims(spec, name, array)) for name, array in feeds.items()]
    main = Body(spec.opset, "", spec.seed % 3 == 0)
    expected = _expected(spec, data)
    functions = []
    if spec.place == "function":
        functions = [_call_twice(main, spec, data, tuple(feeds))]
    elif spec.place == "if":
        _branch(main, spec, data, expected["output"].shape)
    else:
        emit_attention(main, spec, data, "output", "probabilities" if spec.shared else None)
    outputs = [_output(spec, name, array) for name, array in expected.items()]
    graph = helper.make_graph(main.nodes, "attention", graph_inputs, outputs, main.initializers)
    imports = [helper.make_opsetid("", spec.opset)]
    if functions:
        imports.append(helper.make_opsetid(_LOCAL, 1))
    ir = 10 if spec.opset > 18 else 8
    model = helper.make_model(
        graph, opset_imports=imports, ir_version=ir, functions=functions, producer_name="generated"
    )
    helper.set_model_props(model, {"made": "by a test"})
    if spec.types == "all":
        model = onnx.shape_inference.infer_shapes(model)
    return Case(spec, model, feeds, expected, data)


def _feeds(spec: AttentionSpec, data: Data) -> Feeds:
    feeds = attention_inputs(spec, data)
    if spec.place == "if":
        feeds["condition"] = np.array(True)
    return feeds


def _expected(spec: AttentionSpec, data: Data) -> Feeds:
    found = answers(spec, data)
    expected = {name: _layout(spec, answer.output) for name, answer in zip(_OUTPUTS, found, strict=False)}
    return expected | ({"probabilities": found[0].probabilities} if spec.shared else {})


def _layout(spec: AttentionSpec, output: np.ndarray) -> np.ndarray:
    if spec.einsum_pv:
        return np.swapaxes(output, 1, 2)
    if spec.reshape == "product":
        return output.reshape(-1, *output.shape[-2:])
    return output


def _call_twice(main: Body, spec: AttentionSpec, data: Data, names: tuple[str, ...]) -> onnx.FunctionProto:
    inner = Body(spec.opset, "", True)
    emit_attention(inner, spec, data, "output", None)
    negative = main.op("Neg", "query")
    for output, query in zip(_OUTPUTS, ("query", negative), strict=True):
        operands = [query if name == "query" else name for name in names]
        main.nodes.append(helper.make_node("attend", operands, [output], f"call_{output}", domain=_LOCAL))
    return helper.make_function(
        _LOCAL, "attend", list(names), ["output"], inner.nodes, [helper.make_opsetid("", spec.opset)]
    )


def _branch(main: Body, spec: AttentionSpec, data: Data, shape: tuple[int, ...]) -> None:
    then, other = Body(spec.opset, "then_", spec.seed % 2 == 0), Body(spec.opset, "else_", True)
    emit_attention(then, spec, data, "then_output", None)
    other.op("Identity", other.const(np.zeros(shape, spec.dtype)), output="else_output")
    graphs = [
        helper.make_graph(body.nodes, name, [], [_output_of(spec, f"{name}_output")], body.initializers)
        for name, body in (("then", then), ("else", other))
    ]
    main.nodes.append(
        helper.make_node("If", ["condition"], ["output"], "choose", then_branch=graphs[0], else_branch=graphs[1])
    )


def _output_of(spec: AttentionSpec, name: str) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), None)


def _output(spec: AttentionSpec, name: str, array: np.ndarray) -> ValueInfoProto:
    dims = [None] * array.ndim if spec.types == "symbolic" else list(array.shape)
    return helper.make_tensor_value_info(name, _code(np.dtype(spec.dtype)), dims)


def _value(name: str, array: np.ndarray, dims: list[str | int]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, _code(array.dtype), dims)


def _code(dtype: np.dtype) -> int:
    return TensorProto.BOOL if dtype == np.bool_ else helper.np_dtype_to_tensor_dtype(dtype)


def _dims(spec: AttentionSpec, name: str, array: np.ndarray) -> list[str | int]:
    dims: list[str | int] = list(array.shape)
    if spec.types != "symbolic" or array.ndim < 2:
        return dims
    letters = {"query": "Q", "key": "K", "value": "K"}
    if name in letters:
        einsum = spec.einsum_pv if name == "value" else spec.einsum_qk
        dims[1 if einsum else -2] = letters[name]
    elif dims[-1] == spec.keys:
        dims[-1] = "K"
    if array.ndim == 4 and dims[0] == spec.batch and spec.reshape == "none" and spec.group == 1:
        dims[0] = "B" if dims[0] != 1 else 1
    return dims
