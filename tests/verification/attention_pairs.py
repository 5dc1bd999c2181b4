"""A two-layer model of attention, versions of it with planted errors, and its inputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, parser

import graphsurgery
from graphsurgery import RewriteOptions

HEADER = '<ir_version: 10, opset_import: ["" : 17, "local" : 1]>\n'
INPUTS = "float[B, 2, Q, 4] q, float[B, 2, 4, Q] k, float[B, 2, Q, 4] v"
OUTPUT = "float[B, 2, Q, 4] y"
LAYERS = """a1 = MatMul(q, k)  [soft1] p1 = Softmax(a1)  [pv1] h = MatMul(p1, v)
  a2 = MatMul(h, k)  [soft2] p2 = Softmax(a2)  [pv2] y = MatMul(p2, v)"""
EARLY = LAYERS.replace("[pv1]", "seen1 = Neg(p1)  [pv1]").replace("[pv2]", "seen2 = Neg(p2)  [pv2]")
EXACT = RewriteOptions(guard="exact")


def model(
    body: str = LAYERS, *, inputs: str = INPUTS, output: str = "float[B, 2, Q, 4] y", more: str = ""
) -> ModelProto:
    return parser.parse_model(f"{HEADER} agraph ({inputs}) => ({output}) {{ {body} }} {more}")


def rewritten(proto: ModelProto) -> ModelProto:
    result = graphsurgery.rewrite(proto, options=EXACT)
    assert result.changed
    return result.model


def planted(proto: ModelProto, layer: int, number: float = 1.5, operator: str = "Mul") -> ModelProto:
    """The output of one layer's value product times (or plus) a number, under the same name."""
    wrong = ModelProto()
    wrong.CopyFrom(proto)
    name = "h" if layer == 1 else "y"
    position = next(i for i, node in enumerate(wrong.graph.node) if name in node.output)
    nodes = list(wrong.graph.node)
    constant = f"e = Constant<value_float = {number}>()"
    factored = parser.parse_graph(f"g (float x) => (float z) {{ {constant}  {name} = {operator}({name}_right, e) }}")
    del wrong.graph.node[:]
    nodes[position].output[0] = f"{name}_right"
    nodes[position + 1 : position + 1] = list(factored.node)
    wrong.graph.node.extend(nodes)
    return wrong


def feeds(count: int = 1, *, scale: float = 1.0, queries: int = 6) -> list[dict[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(4)
    shapes = {"q": (1, 2, queries, 4), "k": (1, 2, 4, queries), "v": (1, 2, queries, 4)}
    return [
        {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(count)
    ]
