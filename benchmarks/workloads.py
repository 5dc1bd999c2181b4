"""Generated decoders of any size: many attention sites among many other nodes, no weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["decoder"]

_KEYS, _SIZE = 1024, 64
_TRACE = "".join(
    f'File "modeling_decoder.py", line {100 + 17 * depth}, in forward\n    hidden = self.module_{depth}(hidden, mask)\n'
    for depth in range(12)
)
_SCORES, _ROWS = [1, 1, 1, _KEYS], [1, 1, 1, _SIZE]


class _Builder:
    """Names and annotates nodes as exporters do.

    Measured on exports of torch 2.13: torchscript writes 150 bytes a node and declares no types; dynamo declares
    every type and adds five metadata entries, the stack trace among them, 1,500 bytes a node.
    """

    def __init__(self, style: str) -> None:
        self.style = style
        self.nodes: list[onnx.NodeProto] = []
        self.types: list[onnx.ValueInfoProto] = []

    def add(self, scope: str, op_type: str, inputs: list[str], shape: list[int], **attributes: int) -> str:
        name = f"/model/{scope}/{op_type}_{len(self.nodes)}"
        output = f"{name}_output_0"
        node = helper.make_node(op_type, inputs, [output], name=name, **attributes)
        if self.style == "dynamo":
            module = scope.replace("/", ".")
            for key, value in (
                ("namespace", f": DecoderForCausalLM/model: DecoderModel/{module}: Attention/{op_type.lower()}: aten"),
                ("pkg.torch.onnx.class_hierarchy", f"['DecoderForCausalLM', 'DecoderModel', 'Attention', '{op_type}']"),
                ("pkg.torch.onnx.name_scopes", f"['', 'model', '{module}', '{op_type.lower()}']"),
                (
                    "pkg.torch.onnx.fx_node",
                    f"%{op_type.lower()} : call_function[target=torch.ops.aten.{op_type.lower()}]",
                ),
                ("pkg.torch.onnx.stack_trace", _TRACE),
            ):
                node.metadata_props.add(key=key, value=value)
            self.types.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, shape))
        self.nodes.append(node)
        return output


def decoder(sites: int, nodes: int, style: str = "torchscript") -> onnx.ModelProto:
    """A chain of `sites` decode-step attentions with `nodes` nodes in all; `style` torchscript or dynamo."""
    build, value = _Builder(style), "hidden"
    filler = nodes // sites - 5
    for site in range(sites):
        scope = f"layers.{site // 32}/self_attn/head.{site % 32}"
        scores = build.add(scope, "MatMul", [value, "keys"], _SCORES)
        scores = build.add(scope, "Mul", [scores, "scale"], _SCORES)
        scores = build.add(scope, "Add", [scores, "mask"], _SCORES)
        scores = build.add(scope, "Softmax", [scores], _SCORES, axis=-1)
        value = build.add(scope, "MatMul", [scores, "values"], _ROWS)
        for _ in range(filler):
            value = build.add(scope, "Tanh", [value], _ROWS)
    initializers = [numpy_helper.from_array(np.array(0.125, np.float32), "scale")]
    inputs = [
        helper.make_tensor_value_info("hidden", TensorProto.FLOAT, _ROWS),
        helper.make_tensor_value_info("mask", TensorProto.FLOAT, _SCORES),
        helper.make_tensor_value_info("keys", TensorProto.FLOAT, [1, 1, _SIZE, _KEYS]),
        helper.make_tensor_value_info("values", TensorProto.FLOAT, [1, 1, _KEYS, _SIZE]),
    ]
    outputs = [helper.make_tensor_value_info(value, TensorProto.FLOAT, _ROWS)]
    if build.types:
        del build.types[-1]
    graph = helper.make_graph(build.nodes, "decoder", inputs, outputs, initializers, value_info=build.types)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--style", choices=("torchscript", "dynamo"), default="torchscript")
    args = parser.parse_args()
    onnx.save(decoder(args.sites, args.nodes, args.style), args.out)


if __name__ == "__main__":
    main()
