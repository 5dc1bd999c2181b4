"""Small models to rewrite, and the check that the index stayed true."""

from __future__ import annotations

from collections import Counter

from onnx import ModelProto, NodeProto, parser

from graphsurgery.model.index import ModelIndex, Scope
from graphsurgery.model.rewriter import Rewriter

HEADER = '<ir_version: {ir}, opset_import: ["" : 17, "local" : 1]>\n'
CHAIN = """agraph (float[2] x) => (float[2] y) <float[2] a, float[2] b, float[2] unused_info> {
  [first] a = Relu(x)
  [second] b = Neg(a)
  [third] y = Exp(b)
}"""
BRANCH = """agraph (bool c, float[2] x) => (float[2] y) {
  [outer] a = Relu(x)
  [choose] y = If(c) <then_branch = yes () => (float[2] t) { [in] t = Neg(a) },
                      else_branch = no () => (float[2] e) { e = Identity(a) }>
}"""
FUNCTION = """agraph (float[2] x) => (float[2] y) { [call] y = local.f(x) }
<domain: "local", opset_import: ["" : 17]>
f (p) => (q) { [inner] q = Neg(p) }
"""


def model(text: str = CHAIN, ir: int = 10) -> ModelProto:
    return parser.parse_model(HEADER.format(ir=ir) + text)


def start(proto: ModelProto) -> tuple[Scope, Rewriter]:
    index = ModelIndex(proto)
    rewriter = Rewriter(index)
    rewriter.start("test", "main/site")
    return index.main, rewriter


def node(scope: Scope, name: str) -> NodeProto:
    return next(entry for entry in scope.nodes if entry.name == name)


def order(proto: ModelProto) -> list[str]:
    return [entry.name for entry in proto.graph.node]


def assert_index_true(rewriter: Rewriter) -> None:
    """The index that was kept is the one that is built anew."""
    for kept, built in zip(rewriter.index.scopes, ModelIndex(rewriter.index.model).scopes, strict=True):
        assert kept.id == built.id
        assert [id(entry) for entry in kept.nodes] == [id(entry) for entry in built.nodes]
        assert {k: id(v) for k, v in kept.producers.items()} == {k: id(v) for k, v in built.producers.items()}
        uses = [{k: Counter(map(id, v)) for k, v in scope.uses.items() if v} for scope in (kept, built)]
        assert uses[0] == uses[1]
        assert kept.outputs == built.outputs and sorted(kept.initializers) == sorted(built.initializers)
        assert kept.op_types() == built.op_types()
