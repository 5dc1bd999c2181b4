"""From Softmax down to the value product PV, over optional links.

Most of these links commute with a division per row (a Cast, a mask that writes 0, a factor, a Slice along the keys),
so the division by the row sum may follow the value product, where the tensor is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from graphsurgery.attention.operands import einsum_labels, is_weight, product_operands
from graphsurgery.attention.site import Link, LinkKind
from graphsurgery.model.index import Scope, is_standard
from graphsurgery.model.shapes import Shape, Shapes
from graphsurgery.model.values import attribute, constant_value, int_attribute, ints_attribute

__all__ = ["ValuePath", "find_value_product"]

_LONGEST = 16
_LATE = frozenset({"same", "cast", "guard", "zero", "weight", "slice", "reshape"})


class ValuePath(NamedTuple):
    """The value product and the links from Softmax to it; `product` is None where none was found (see `end`)."""

    product: NodeProto | None
    links: tuple[Link, ...] = ()
    shared: bool = False
    end: str = ""


def _cast(scope: Scope, node: NodeProto, value: str, shapes: Shapes) -> LinkKind | None:
    return "same" if shapes.dtype(scope, value) == int_attribute(node, "to", 0) else "cast"


def _where(scope: Scope, node: NodeProto, value: str, shapes: Shapes) -> LinkKind | None:
    del shapes
    other = node.input[1] if node.input[2] == value else node.input[2]
    if not _is_zero(scope, other):
        return None
    test = scope.producer(node.input[0])
    if test is not None and test.op_type == "IsNaN" and test.input[0] == value and node.input[2] == value:
        return "guard"
    return "zero"


def _is_zero(scope: Scope, name: str) -> bool:
    """Whether a value is a constant 0, also behind a Cast, CastLike or Expand of the constant."""
    for _ in range(6):
        constant = constant_value(scope, name, 1024)
        if constant is not None:
            return bool(np.all(constant == 0))
        node = scope.producer(name)
        if node is None or node.op_type not in ("Cast", "CastLike", "Identity", "Expand", "ConstantOfShape"):
            return False
        if node.op_type == "ConstantOfShape":
            return attribute(node, "value") is None
        name = node.input[0]
    return False


def _concat(scope: Scope, node: NodeProto, value: str, shapes: Shapes) -> LinkKind | None:
    del scope, value, shapes
    return "same" if len(node.input) == 1 else None


def _fixed(kind: LinkKind, *, first: bool = True) -> Callable[[Scope, NodeProto, str, Shapes], LinkKind | None]:
    return lambda scope, node, value, shapes: kind if not first or node.input[0] == value else None


_STEPS: dict[str, Callable[[Scope, NodeProto, str, Shapes], LinkKind | None]] = {
    "Cast": _cast,
    "CastLike": _fixed("cast"),
    "Identity": _fixed("same"),
    "Dropout": _fixed("same"),
    "Concat": _concat,
    "Where": _where,
    "Mul": _fixed("weight", first=False),
    "Reshape": _fixed("reshape"),
    "Squeeze": _fixed("reshape"),
    "Unsqueeze": _fixed("reshape"),
    "Flatten": _fixed("reshape"),
    "Transpose": _fixed("transpose"),
    "Slice": _fixed("slice"),
    "Split": _fixed("split"),
    "QuantizeLinear": _fixed("quantise"),
    "DequantizeLinear": _fixed("quantise"),
}


def find_value_product(scope: Scope, softmax: NodeProto, shapes: Shapes) -> ValuePath:
    """Follow the output of a Softmax down to the MatMul, Einsum or Gemm that multiplies it with the values."""
    return _follow(scope, softmax.output[0], shapes, False, 0)


def _follow(scope: Scope, value: str, shapes: Shapes, turned: bool, depth: int) -> ValuePath:
    readers = _data_readers(scope, value)
    shared = len(readers) > 1 or scope.read_elsewhere(value)
    if not readers:
        end = "a graph output or a subgraph reads them" if shared else "nothing reads them"
        return ValuePath(None, end=f"the probabilities {value!r} feed no value product: {end}")
    misses: list[ValuePath] = []
    for node in readers:
        found = _through(scope, node, value, shapes, turned, depth)
        if found.product is not None:
            return ValuePath(found.product, found.links, found.shared or shared)
        misses.append(found)
    return misses[0]


def _through(scope: Scope, node: NodeProto, value: str, shapes: Shapes, turned: bool, depth: int) -> ValuePath:
    label = node.name or node.op_type
    factors = product_operands(node)
    if factors is not None:
        if factors[1 if turned else 0] != value or factors[0] == factors[1]:
            return ValuePath(None, end=f"{label} does not sum over the keys of the probabilities")
        if is_weight(scope, factors[0 if turned else 1]):
            return ValuePath(None, end=f"{label} multiplies the probabilities with a weight, not with values")
        return ValuePath(node)
    step = _STEPS.get(node.op_type) if is_standard(node) else None
    kind = step(scope, node, value, shapes) if step is not None and depth < _LONGEST else None
    if kind is None:
        return ValuePath(None, end=f"the probabilities go into {label} ({node.op_type}), not into a value product")
    link = Link(kind, node, list(node.input).index(value))
    turned = turned != (kind == "transpose" and _swaps_last(node))
    for output in node.output if kind == "split" else node.output[:1]:
        inner = _follow(scope, output, shapes, turned, depth + 1)
        if inner.product is not None:
            return ValuePath(inner.product, (link, *inner.links), inner.shared)
    return _follow(scope, node.output[0], shapes, turned, depth + 1)


def _swaps_last(node: NodeProto) -> bool:
    perm = ints_attribute(node, "perm")
    return perm is not None and len(perm) >= 2 and perm[-1] == len(perm) - 2


def _data_readers(scope: Scope, value: str) -> list[NodeProto]:
    """Readers that use the numbers: each node once, no Shape, no IsNaN that only serves a guard."""
    readers: list[NodeProto] = []
    for node in scope.readers(value):
        if node.op_type == "Shape" or any(node is known for known in readers):
            continue
        if node.op_type == "IsNaN" and _serves_guard(scope, node, value):
            continue
        readers.append(node)
    return readers


def _serves_guard(scope: Scope, test: NodeProto, value: str) -> bool:
    readers = scope.readers(test.output[0])
    return (
        len(readers) == 1
        and readers[0].op_type == "Where"
        and readers[0].input[2] == value
        and not scope.read_elsewhere(test.output[0])
    )


def division_place(scope: Scope, path: ValuePath, shapes: Shapes) -> tuple[bool, int]:
    """Whether the division may follow the value product, and behind how many links the row sum is to be taken.

    A Reshape between Softmax and the product is passed only where its last axis provably stays the last axis; the
    sum is then taken behind it and so has the rows of the product.
    """
    if path.shared or path.product is None or any(link.kind not in _LATE for link in path.links):
        return False, 0
    if not _late_product(path.product):
        return False, 0
    reshapes = [i for i, link in enumerate(path.links) if link.kind == "reshape"]
    if not reshapes:
        return True, 0
    if any(link.kind == "slice" for link in path.links):
        return False, 0
    for i in reshapes:
        node = path.links[i].node
        if not _keeps_last(
            scope, node, shapes.shape(scope, node.input[0]), shapes.shape(scope, node.output[0]), shapes
        ):
            return False, 0
    return True, reshapes[-1] + 1


def _keeps_last(scope: Scope, node: NodeProto, before: Shape | None, after: Shape | None, shapes: Shapes) -> bool:
    if not before or not after or len(after) < 2:
        return False
    if node.op_type == "Reshape":
        target = shapes.ints(scope, node.input[1]) if len(node.input) > 1 else None
        if target is not None and target[-1] == 0 and len(before) == len(after):
            return True
    elif node.op_type in ("Unsqueeze", "Squeeze") and after[-1] == 1:
        return False
    return before[-1] is not None and before[-1] == after[-1]


def _late_product(product: NodeProto) -> bool:
    """Whether rows of the product's output are the rows of the probabilities, times a number each."""
    if product.op_type == "MatMul":
        return True
    if product.op_type == "Gemm":
        return len(product.input) == 2 and not int_attribute(product, "transA", 0)
    labels = einsum_labels(product) if product.op_type == "Einsum" else None
    if labels is None:
        return False
    probabilities, values, out = labels
    rows, free = probabilities[:-1], [label for label in values if label not in probabilities]
    return (
        probabilities[-1] in values
        and probabilities[-1] not in out
        and len(free) == 1
        and sorted(out) == sorted([*rows, *free])
        and len(set(probabilities)) == len(probabilities)
    )
