"""From Softmax up to the score product QK, over optional links.

No pattern per combination: each operator that exporters put between the product and Softmax is one row of `_STEPS`,
and a walk over any sequence of them finds the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnx import NodeProto

from graphsurgery.attention.operands import is_projection, product_operands
from graphsurgery.attention.site import Link, LinkKind
from graphsurgery.model.index import Scope, is_standard
from graphsurgery.model.shapes import Shapes
from graphsurgery.model.values import int_attribute

__all__ = ["ScorePath", "find_score_product"]

_LONGEST = 40


class ScorePath(NamedTuple):
    """The score product and the links from it to Softmax; `product` is None where the search ended at `end`."""

    product: NodeProto | None
    links: tuple[Link, ...]
    end: str = ""
    """Why the search ended without a product."""
    parts: int = 1
    """Number of score products that a Concat joins along the keys."""


def _cast(scope: Scope, node: NodeProto, shapes: Shapes) -> list[tuple[LinkKind, int]]:
    same = shapes.dtype(scope, node.input[0]) == int_attribute(node, "to", 0)
    return [("same" if same else "cast", 0)]


def _sub(scope: Scope, node: NodeProto, shapes: Shapes) -> list[tuple[LinkKind, int]]:
    del shapes
    other = scope.producer(node.input[1])
    if other is not None and other.op_type == "ReduceMax" and other.input[0] == node.input[0]:
        return [("row-max", 0)]
    return [("mask", 0)]


def _concat(scope: Scope, node: NodeProto, shapes: Shapes) -> list[tuple[LinkKind, int]]:
    if len(node.input) == 1:
        return [("same", 0)]
    rank = shapes.rank(scope, node.output[0])
    axis = int_attribute(node, "axis", 0)
    last = axis == -1 or (rank is not None and axis == rank - 1)
    return [("sink", operand) for operand in range(len(node.input))] if last else []


Step = Callable[[Scope, NodeProto, Shapes], list[tuple[LinkKind, int]]]


def _fixed(kind: LinkKind, *operands: int) -> Step:
    return lambda scope, node, shapes: [(kind, operand) for operand in operands if operand < len(node.input)]


_STEPS: dict[str, Step] = {
    "Mul": _fixed("scale", 0, 1),
    "Div": _fixed("scale", 0),
    "Add": _fixed("mask", 0, 1),
    "Sum": lambda scope, node, shapes: [("mask", operand) for operand in range(len(node.input))],
    "Sub": _sub,
    "Where": _fixed("where", 2, 1),
    "Tanh": _fixed("tanh", 0),
    "Clip": _fixed("clamp", 0),
    "Max": _fixed("clamp", 0, 1),
    "Min": _fixed("clamp", 0, 1),
    "Cast": _cast,
    "CastLike": _fixed("cast", 0),
    "Identity": _fixed("same", 0),
    "Dropout": _fixed("same", 0),
    "Concat": _concat,
    "Reshape": _fixed("reshape", 0),
    "Squeeze": _fixed("reshape", 0),
    "Unsqueeze": _fixed("reshape", 0),
    "Flatten": _fixed("reshape", 0),
    "Transpose": _fixed("transpose", 0),
    "QuantizeLinear": _fixed("quantise", 0),
    "DequantizeLinear": _fixed("quantise", 0),
}


class _Search:
    def __init__(self, scope: Scope, shapes: Shapes) -> None:
        self.scope, self.shapes = scope, shapes
        self.known: dict[str, ScorePath] = {}

    def path(self, value: str, depth: int) -> ScorePath:
        found = self.known.get(value)
        if found is None:
            self.known[value] = ScorePath(None, (), f"the chain above {value!r} leads back to itself")
            found = self.known[value] = self._path(value, depth)
        return found

    def _path(self, value: str, depth: int) -> ScorePath:
        node = self.scope.producer(value)
        if node is None:
            return ScorePath(None, (), f"the scores come from {value!r}, which no node of the graph computes")
        label = node.name or node.op_type
        if depth > _LONGEST:
            return ScorePath(None, (), f"more than {_LONGEST} nodes lie above Softmax, the last is {label}")
        if product_operands(node) is not None:
            if is_projection(self.scope, node):
                return ScorePath(None, (), f"the scores come from {label}, a product with a weight")
            return ScorePath(node, ())
        step = _STEPS.get(node.op_type) if is_standard(node) else None
        if step is None:
            return ScorePath(None, (), f"the scores come from {label} ({node.op_type}), not from a product")
        return self._best(node, step(self.scope, node, self.shapes), depth)

    def _best(self, node: NodeProto, choices: list[tuple[LinkKind, int]], depth: int) -> ScorePath:
        best: ScorePath | None = None
        miss: ScorePath | None = None
        parts = 0
        for kind, operand in choices:
            inner = self.path(node.input[operand], depth + 1)
            if inner.product is None:
                miss = miss or inner
                continue
            parts += inner.parts if kind == "sink" else 0
            if best is None or len(inner.links) + 1 < len(best.links):
                best = ScorePath(inner.product, (*inner.links, Link(kind, node, operand)), parts=inner.parts)
                if kind != "sink" and not inner.links:
                    break  # no other operand can be nearer
        if best is None:
            return miss or ScorePath(None, (), f"no operand of {node.name or node.op_type} leads to a product")
        return ScorePath(best.product, best.links, parts=max(parts, best.parts))


def find_score_product(scope: Scope, softmax: NodeProto, shapes: Shapes) -> ScorePath:
    """Follow the input of a Softmax up to the MatMul, Einsum or Gemm of query and key."""
    return _Search(scope, shapes).path(softmax.input[0], 0)
