"""From Softmax down to the value product PV, over optional links.

Most of these links commute with a division per row (a Cast, a mask that writes 0, a factor, a Slice along the keys),
so the division by the row sum may follow the value product, where the tensor is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto

from graphsurgery.attention.operands import einsum_labels, is_weight, product_operands
from graphsurgery.attention.site import Link, LinkKind
from graphsurgery.model.index import Scope, is_standard
from graphsurgery.model.shapes import Shape, Shapes
from graphsurgery.model.values import attribute, constant_value, int_attribute, ints_attribute

__all__ = ["ValuePath", "division_place", "find_value_product", "nan_tests"]

_LONGEST = 16
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_LATE = frozenset({"same", "cast", "guard", "zero", "weight", "slice", "reshape"})


class ValuePath(NamedTuple):
    """The value product and the links from Softmax to it; `product` is None where none was found (see `end`)."""

    product: NodeProto | None
    links: tuple[Link, ...] = ()
    shared: bool = False
    end: str = ""
    operand: int = 0
    """Which input of the product the probabilities are."""


def _cast(scope: Scope, node: NodeProto, value: str, shapes: Shapes) -> LinkKind | None:
    target = int_attribute(node, "to", 0)
    if target not in FLOATS:
        return None
    return "same" if shapes.dtype(scope, value) == target else "cast"


def _where(scope: Scope, node: NodeProto, value: str, shapes: Shapes) -> LinkKind | None:
    del shapes
    if node.input[0] == value or node.input[1] == node.input[2]:
        return None
    swapped = node.input[1] == value
    if not _is_zero(scope, node.input[2 if swapped else 1]):
        return None
    test = scope.producer(node.input[0])
    if swapped and test is not None and test.op_type == "Not":
        test = scope.producer(test.input[0])
        swapped = False
    if test is not None and test.op_type == "IsNaN" and test.input[0] == value and not swapped:
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


def _weight(scope: Scope, node: NodeProto, value: str, shapes: Shapes) -> LinkKind | None:
    """Mul or Div by something else: linear in the probabilities."""
    del scope, shapes
    if list(node.input).count(value) != 1 or (node.op_type == "Div" and node.input[0] != value):
        return None
    return "weight"


def _concat(scope: Scope, node: NodeProto, value: str, shapes: Shapes) -> LinkKind | None:
    del scope, value, shapes
    return "same" if len(node.input) == 1 else None


def _fixed(kind: LinkKind) -> Callable[[Scope, NodeProto, str, Shapes], LinkKind | None]:
    return lambda scope, node, value, shapes: kind if node.input[0] == value else None


_STEPS: dict[str, Callable[[Scope, NodeProto, str, Shapes], LinkKind | None]] = {
    "Cast": _cast,
    "CastLike": _fixed("cast"),
    "Identity": _fixed("same"),
    "Dropout": _fixed("same"),
    "Concat": _concat,
    "Where": _where,
    "Mul": _weight,
    "Div": _weight,
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
    return _Search(scope, shapes).follow(softmax.output[0], False, 0)


class _Search:
    """One walk; a value that is reached on several ways is followed once."""

    def __init__(self, scope: Scope, shapes: Shapes) -> None:
        self.scope, self.shapes = scope, shapes
        self.known: dict[tuple[str, bool], ValuePath] = {}

    def follow(self, value: str, turned: bool, depth: int) -> ValuePath:
        """From a value down to the product."""
        key = (value, turned)
        if key not in self.known:
            self.known[key] = ValuePath(None, end=f"the chain below {value!r} leads back to itself")
            self.known[key] = self._follow(value, turned, depth)
        return self.known[key]

    def _follow(self, value: str, turned: bool, depth: int) -> ValuePath:
        readers = _data_readers(self.scope, value)
        shared = len(readers) > 1 or self.scope.read_elsewhere(value)
        if not readers:
            end = "a graph output or a subgraph reads them" if shared else "nothing reads them"
            return ValuePath(None, end=f"the probabilities {value!r} feed no value product: {end}")
        misses: list[ValuePath] = []
        for node in readers:
            found = self._through(node, value, turned, depth)
            if found.product is not None:
                return ValuePath(found.product, found.links, found.shared or shared, operand=found.operand)
            misses.append(found)
        return misses[0]

    def _through(self, node: NodeProto, value: str, turned: bool, depth: int) -> ValuePath:
        scope, label = self.scope, node.name or node.op_type
        factors = product_operands(node)
        if factors is not None:
            return _product(scope, node, value, turned)
        step = _STEPS.get(node.op_type) if is_standard(node) else None
        kind = step(scope, node, value, self.shapes) if step is not None and depth < _LONGEST else None
        if kind is None:
            return ValuePath(None, end=f"the probabilities go into {label} ({node.op_type}), not into a value product")
        link = Link(kind, node, list(node.input).index(value))
        turned = turned != (kind == "transpose" and _swaps_last(node))
        for output in node.output if kind == "split" else node.output[:1]:
            inner = self.follow(output, turned, depth + 1)
            if inner.product is not None:
                return ValuePath(inner.product, (link, *inner.links), inner.shared, operand=inner.operand)
        return self.follow(node.output[0], turned, depth + 1)


def _product(scope: Scope, node: NodeProto, value: str, turned: bool) -> ValuePath:
    """The end of the walk, if the product sums over the keys and multiplies with values."""
    if node.op_type == "Einsum":
        return _einsum(scope, node, value)
    label, factors = node.name or node.op_type, node.input[:2]
    if factors[1 if turned else 0] != value or factors[0] == factors[1]:
        return ValuePath(None, end=f"{label} does not sum over the keys of the probabilities")
    if is_weight(scope, factors[0 if turned else 1]):
        return ValuePath(None, end=f"{label} multiplies the probabilities with a weight, not with values")
    return ValuePath(node, operand=1 if turned else 0)


def _einsum(scope: Scope, node: NodeProto, value: str) -> ValuePath:
    """Probabilities on either side of an Einsum that sums over their last label."""
    operand = 0 if node.input[0] == value else 1
    labels = einsum_labels(node)
    if node.input[0] == node.input[1] or labels is None or labels[operand][-1:] in labels[2]:
        return ValuePath(None, end=f"{node.name or node.op_type} does not sum over the keys of the probabilities")
    if is_weight(scope, node.input[1 - operand]):
        end = f"{node.name or node.op_type} multiplies the probabilities with a weight, not with values"
        return ValuePath(None, end=end)
    return ValuePath(node, operand=operand)


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
    if len(readers) == 1 and readers[0].op_type == "Not" and not scope.read_elsewhere(test.output[0]):
        test = readers[0]
        readers = scope.readers(test.output[0])
    return (
        len(readers) == 1
        and readers[0].op_type == "Where"
        and value in readers[0].input[1:]
        and not scope.read_elsewhere(test.output[0])
    )


def division_place(scope: Scope, path: ValuePath, rank: int | None, shapes: Shapes) -> tuple[bool, int]:
    """Whether the division may follow the value product, and behind how many links the row sum is to be taken.

    A Reshape between Softmax and the product is passed only where its last axis provably stays the last axis; the
    sum is then taken behind it and so has the rows of the product.  What changes the probabilities (a mask, a
    factor, a Slice, a Cast) must come behind the sum, and a Slice must cut the keys.
    """
    if path.shared or path.product is None or any(link.kind not in _LATE for link in path.links):
        return False, 0
    if rank == 1 or not _late_product(scope, path.product, path.operand, shapes):
        return False, 0
    if not all(_cuts_keys(scope, link.node, shapes) for link in path.links if link.kind == "slice"):
        return False, 0
    reshapes = [i for i, link in enumerate(path.links) if link.kind == "reshape"]
    if not reshapes:
        return True, 0
    if any(link.kind in ("slice", "weight", "zero", "cast") for link in path.links[: reshapes[-1]]):
        return False, 0
    for i in reshapes:
        node = path.links[i].node
        if not _keeps_last(
            scope, node, shapes.shape(scope, node.input[0]), shapes.shape(scope, node.output[0]), shapes
        ):
            return False, 0
    return True, reshapes[-1] + 1


def _cuts_keys(scope: Scope, node: NodeProto, shapes: Shapes) -> bool:
    """Whether a Slice cuts the last axis and no other."""
    axes = ints_attribute(node, "axes")
    if axes is None and len(node.input) > 3:
        known = shapes.ints(scope, node.input[3])
        axes = None if known is None or None in known else tuple(a for a in known if a is not None)
    rank = shapes.rank(scope, node.input[0])
    return axes is not None and len(axes) == 1 and (axes[0] == -1 or (rank is not None and axes[0] == rank - 1))


def nan_tests(scope: Scope, softmax: NodeProto, path: ValuePath) -> tuple[bool, NodeProto | None]:
    """Whether an IsNaN reads the probabilities or the value product, and one whose answer does more than guard.

    Exporters write the guard (IsNaN > Where(nan, 0, p)) in several spellings and places; whichever it is, it stands
    for: a row without any visible key gives 0.
    """
    values = [softmax.output[0], *(link.node.output[0] for link in path.links)]
    if path.product is not None:
        values.append(path.product.output[0])
    found: list[NodeProto] = []
    for value in values:
        for node in scope.readers(value):
            nodes = scope.readers(node.output[0]) if node.op_type in ("Identity", "Cast") else [node]
            found += [test for test in nodes if test.op_type == "IsNaN"]
    return bool(found), next((test for test in found if not _only_guards(scope, test.output[0])), None)


def _only_guards(scope: Scope, value: str) -> bool:
    """Whether a truth value only chooses between a number and 0."""
    if scope.read_elsewhere(value):
        return False
    for node in scope.readers(value):
        if node.op_type == "Not":
            if not _only_guards(scope, node.output[0]):
                return False
        elif node.op_type != "Where" or not any(_is_zero(scope, name) for name in node.input[1:]):
            return False
    return True


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


def _late_product(scope: Scope, product: NodeProto, operand: int, shapes: Shapes) -> bool:
    """Whether rows of the product's output are the rows of the probabilities, times a number each."""
    if product.op_type == "MatMul":
        rank = shapes.rank(scope, product.input[1])
        return operand == 0 and rank is not None and rank >= 2
    if product.op_type == "Gemm":
        return operand == 0 and len(product.input) == 2 and not int_attribute(product, "transA", 0)
    labels = einsum_labels(product) if product.op_type == "Einsum" else None
    if labels is None:
        return False
    probabilities, values, out = labels[operand], labels[1 - operand], labels[2]
    rows, free = probabilities[:-1], [label for label in values if label not in probabilities]
    return (
        probabilities[-1] in values
        and len(free) == 1
        and sorted(out) == sorted([*rows, *free])
        and len(set(probabilities)) == len(probabilities)
    )
