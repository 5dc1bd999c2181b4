"""How each operator makes the shape of its output from those of its inputs; one function an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from onnx import NodeProto

from graphsurgery.model.index import Scope
from graphsurgery.model.values import attribute, int_attribute, ints_attribute

__all__ = ["RULES", "Dim", "Shape", "ShapeSource", "better", "broadcast"]

Dim = int | str | None
Shape = tuple[Dim, ...]


class ShapeSource(Protocol):
    """Where a rule asks for the shapes and the small integers that it needs."""

    def shape(self, scope: Scope, name: str, depth: int = 0) -> Shape | None:
        """The shape of a value as far as it is known."""
        ...

    def ints(self, scope: Scope, name: str, depth: int = 0) -> tuple[int | None, ...] | None:
        """The entries of a small 1-D integer value, None where one is computed."""
        ...


def better(first: Shape | None, second: Shape | None) -> Shape | None:
    """Join two descriptions of one shape, dimension by dimension; the declared one wins where both know."""
    if first is None or second is None or len(first) != len(second):
        return first if first is not None else second
    return tuple(
        b if isinstance(b, int) and not isinstance(a, int) else (a or b) for a, b in zip(first, second, strict=True)
    )


def broadcast(shapes: list[Shape | None]) -> Shape | None:
    """The shape that all of them broadcast to; None where one is not known."""
    result: Shape = ()
    for shape in shapes:
        if shape is None:
            return None
        if shape != result:
            short, long = (result, shape) if len(result) < len(shape) else (shape, result)
            lead = len(long) - len(short)
            result = (*long[:lead], *(_join(a, b) for a, b in zip(short, long[lead:], strict=True)))
    return result


def _join(a: Dim, b: Dim) -> Dim:
    """The dimension that both broadcast to; a number wins over a name, different names are not known."""
    if a == b or b == 1:
        return a
    if a == 1 or isinstance(b, int):
        return b
    return a if isinstance(a, int) else None


Rule = Callable[[ShapeSource, Scope, NodeProto, int], Shape | None]


def _matmul(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    a, b = (shapes.shape(scope, value, depth) for value in node.input[:2])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    batch = broadcast([a[:-2], b[:-2]])
    return None if batch is None else (*batch, a[-2], b[-1])


def _gemm(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    a, b = (shapes.shape(scope, value, depth) for value in node.input[:2])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    return (a[1] if int_attribute(node, "transA", 0) else a[0], b[0] if int_attribute(node, "transB", 0) else b[1])


def _transpose(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, perm = shapes.shape(scope, node.input[0], depth), ints_attribute(node, "perm")
    if perm is None:
        return None if source is None else source[::-1]
    return (None,) * len(perm) if source is None or len(source) != len(perm) else tuple(source[p] for p in perm)


def _reshape(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    target = shapes.ints(scope, node.input[1], depth) if len(node.input) > 1 else ints_attribute(node, "shape")
    if target is None:
        return None
    if int_attribute(node, "allowzero", 0):
        return tuple(size if size is not None and size >= 0 else None for size in target)
    source = shapes.shape(scope, node.input[0], depth)
    dims: list[Dim] = []
    for position, size in enumerate(target):
        if size == 0 and source is not None and position < len(source):
            dims.append(source[position])
        else:
            dims.append(size if size is not None and size > 0 else None)
    return tuple(_fill(dims, source, target))


def _fill(dims: list[Dim], source: Shape | None, target: tuple[int | None, ...]) -> list[Dim]:
    if source is None or not all(isinstance(d, int) for d in source) or target.count(-1) != 1 or dims.count(None) != 1:
        return dims
    whole = rest = 1
    for dim in source:
        whole *= int(dim or 0)
    for dim in dims:
        rest *= dim if isinstance(dim, int) else 1
    return [whole // rest if dim is None and rest else dim for dim in dims]


def _axes(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> tuple[int, ...] | None:
    axes = ints_attribute(node, "axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        known = shapes.ints(scope, node.input[1], depth)
        axes = None if known is None or None in known else tuple(a for a in known if a is not None)
    return axes


def _unsqueeze(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, axes = shapes.shape(scope, node.input[0], depth), _axes(shapes, scope, node, depth)
    if source is None or axes is None:
        return None
    rank, dims = len(source) + len(axes), list(source)
    for axis in sorted(a % rank for a in axes):
        dims.insert(axis, 1)
    return tuple(dims)


def _squeeze(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, axes = shapes.shape(scope, node.input[0], depth), _axes(shapes, scope, node, depth)
    if source is None or axes is None:
        return None
    drop = {a % len(source) for a in axes}
    return tuple(dim for i, dim in enumerate(source) if i not in drop)


def _reduce(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, axes = shapes.shape(scope, node.input[0], depth), _axes(shapes, scope, node, depth)
    if source is None or axes is None:
        return None
    if not axes:
        axes = () if int_attribute(node, "noop_with_empty_axes", 0) else tuple(range(len(source)))
    drop, keep = {a % len(source) for a in axes}, int_attribute(node, "keepdims", 1)
    return tuple(1 if i in drop else dim for i, dim in enumerate(source) if keep or i not in drop)


def _concat(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    parts = [shapes.shape(scope, value, depth) for value in node.input]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    axis = int_attribute(node, "axis", 0) % len(known[0])
    dims = list(known[0])
    for part in known[1:]:
        dims = [_join(a, b) for a, b in zip(dims, part, strict=True)]
    sizes = [part[axis] if part is not None else None for part in parts]
    dims[axis] = sum(s for s in sizes if isinstance(s, int)) if all(isinstance(s, int) for s in sizes) else None
    return tuple(dims)


def _slice(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source = shapes.shape(scope, node.input[0], depth)
    if source is None:
        return None
    axes = shapes.ints(scope, node.input[3], depth) if len(node.input) > 3 and node.input[3] else None
    cut = {a % len(source) for a in axes if a is not None} if axes and None not in axes else set(range(len(source)))
    return tuple(None if i in cut else dim for i, dim in enumerate(source))


def _gather(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    data, indices = (shapes.shape(scope, value, depth) for value in node.input[:2])
    if data is None or indices is None or not data:
        return None
    axis = int_attribute(node, "axis", 0) % len(data)
    return (*data[:axis], *indices, *data[axis + 1 :])


def _expand(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    return broadcast([shapes.shape(scope, node.input[0], depth), shapes.ints(scope, node.input[1], depth)])


def _einsum(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    equation = str(attribute(node, "equation") or "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        return None
    sizes: dict[str, Dim] = {}
    for labels, value in zip(left.split(","), node.input, strict=False):
        shape = shapes.shape(scope, value, depth)
        if shape is not None and len(shape) == len(labels):
            sizes.update({label: dim for label, dim in zip(labels, shape, strict=True) if sizes.get(label) is None})
    return tuple(sizes.get(label) for label in right)


def _constant_of_shape(shapes: ShapeSource, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    return shapes.ints(scope, node.input[0], depth)


RULES: dict[str, Rule] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
    "Expand": _expand,
    "Einsum": _einsum,
    "ConstantOfShape": _constant_of_shape,
    **dict.fromkeys(("ReduceMax", "ReduceSum", "ReduceMean", "ReduceMin"), _reduce),
}
