"""Shapes and dtypes of values, worked out on demand.

Declared types are taken first; what is not declared follows from the producers, as far as a site needs it.  The
whole-model inference of onnx costs more than loading and saving the model, and exports without any shape
information keep the rank in a Transpose or a Reshape next to the attention.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import NodeProto, TensorProto, helper

from graphsurgery.model.index import ModelIndex, Scope, is_standard
from graphsurgery.model.values import attribute, constant_tensor, constant_value, int_attribute, ints_attribute

__all__ = ["Dim", "Shape", "Shapes"]

Dim = int | str | None
Shape = tuple[Dim, ...]

_DEEPEST = 120
_SAME = frozenset(
    "Identity Cast CastLike Softmax LogSoftmax Dropout Tanh Exp Relu Clip Sqrt Neg IsNaN IsInf Not Sigmoid Erf Gelu "
    "Abs LayerNormalization RMSNormalization SimplifiedLayerNormalization QuantizeLinear DequantizeLinear Log Trilu "
    "CumSum Cos Sin ScatterND ScatterElements RotaryEmbedding Reciprocal Floor Round Sign BatchNormalization".split()
)
_BROADCAST = frozenset(
    "Add Sub Mul Div Where Max Min Pow And Or Xor Equal Less Greater LessOrEqual GreaterOrEqual Mod Sum Mean".split()
)
_ONE_TYPE = frozenset("Add Sub Mul Div Max Min MatMul Gemm Concat Sum Mean".split())
_FIXED_TYPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Shape", "Size", "NonZero", "ArgMax", "ArgMin"), (TensorProto.INT64,)),
    "DynamicQuantizeLinear": (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8),
    "MatMulInteger": (TensorProto.INT32,),
    "ConvInteger": (TensorProto.INT32,),
}
_OWN_TYPE = frozenset(
    "If Loop Scan SequenceAt Optional OneHot EyeLike RandomNormal RandomUniform Multinomial TopK Unique".split()
)
_BOOL = frozenset("Equal Less Greater LessOrEqual GreaterOrEqual And Or Not Xor IsNaN IsInf".split())


class Shapes:
    """Shapes by scope and value name; None where the rank is not known, None or a name where a dimension is not."""

    def __init__(self, index: ModelIndex | None = None) -> None:
        self._index = index
        self._shapes: dict[tuple[int, str], Shape | None] = {}
        self._dtypes: dict[tuple[int, str], int | None] = {}

    def shape(self, scope: Scope, name: str, depth: int = 0) -> Shape | None:
        """The shape of a value as far as it is known."""
        key = (id(scope), name)
        if key in self._shapes:
            return self._shapes[key]
        if depth > _DEEPEST:
            return None
        home = scope.home(name)
        if home is None:
            return None
        if home is not scope:
            return self.shape(home, name, depth)
        found = self._declared(scope, name)
        node = scope.producers.get(name)
        if node is not None and (found is None or not all(isinstance(dim, int) for dim in found)):
            found = _better(found, self._inferred(scope, node, name, depth + 1))
        self._shapes[key] = found
        return found

    def rank(self, scope: Scope, name: str) -> int | None:
        """The number of dimensions, or None."""
        shape = self.shape(scope, name)
        return None if shape is None else len(shape)

    def dtype(self, scope: Scope, name: str) -> int | None:
        """The element type as a TensorProto.DataType, or None."""
        trail: list[tuple[int, str]] = []
        found: int | None = None
        current: str | None = name
        while current is not None:
            key = (id(scope), current)
            if key in self._dtypes:
                found = self._dtypes[key]
                break
            self._dtypes[key] = None  # also ends a walk around a cycle
            trail.append(key)
            home = scope if current in scope.producers else scope.home(current)
            if home is None:
                break
            scope = home
            found, current = self._own_dtype(scope, current)
        for key in trail:
            self._dtypes[key] = found
        return found

    def _own_dtype(self, scope: Scope, name: str) -> tuple[int | None, str | None]:
        """The element type that a value states itself, or else the value that it takes its type from."""
        info = scope.value_info(name)
        if info is not None and info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
            return info.type.tensor_type.elem_type, None
        node = scope.producers.get(name)
        if node is None and scope.kind == "function":
            return self._argument_dtype(scope, name), None
        if node is None or node.op_type == "Constant":
            tensor = constant_tensor(scope, name)
            if tensor is not None:
                return tensor.data_type, None
        return (None, None) if node is None else _dtype_rule(scope, node, name)

    def _argument_dtype(self, function: Scope, name: str) -> int | None:
        """The element type that every call of a function passes for an input; functions declare none."""
        names = list(function.body.input)
        if self._index is None or name not in names:
            return None
        position = names.index(name)
        passed = {
            self.dtype(caller, node.input[position]) if position < len(node.input) else None
            for caller, node in self._index.calls(function)
        }
        return passed.pop() if len(passed) == 1 else None

    def ints(self, scope: Scope, name: str, depth: int = 0) -> tuple[int | None, ...] | None:
        """The entries of a small 1-D integer value (a shape, say), None where one is computed."""
        value = constant_value(scope, name, 64)
        if value is not None:
            return tuple(int(v) for v in value.reshape(-1)) if value.dtype.kind in "iu" else None
        node = scope.producer(name)
        if node is None or depth > _DEEPEST:
            shape = self.shape(scope, name, depth)
            return (None,) * shape[0] if shape and len(shape) == 1 and isinstance(shape[0], int) else None
        if node.op_type in ("Cast", "Identity", "Unsqueeze", "Reshape", "Squeeze"):
            inner = self.ints(scope, node.input[0], depth + 1)
            return inner if inner is not None else ((None,) if node.op_type == "Unsqueeze" else None)
        if node.op_type == "Concat":
            parts = [self.ints(scope, part, depth + 1) for part in node.input]
            return None if any(p is None for p in parts) else tuple(v for p in parts if p is not None for v in p)
        if node.op_type == "Shape" and not node.attribute:
            shape = self.shape(scope, node.input[0], depth + 1)
            return None if shape is None else tuple(d if isinstance(d, int) else None for d in shape)
        shape = self.shape(scope, name, depth + 1)
        if shape is not None and len(shape) <= 1 and all(isinstance(d, int) for d in shape):
            return (None,) * (int(shape[0] or 0) if shape else 1)
        return None

    def _declared(self, scope: Scope, name: str) -> Shape | None:
        info = scope.value_info(name)
        if info is not None and info.type.HasField("tensor_type") and info.type.tensor_type.HasField("shape"):
            return tuple(
                dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None)
                for dim in info.type.tensor_type.shape.dim
            )
        tensor = constant_tensor(scope, name)
        return None if tensor is None else tuple(tensor.dims)

    def _inferred(self, scope: Scope, node: NodeProto, name: str, depth: int) -> Shape | None:
        if not is_standard(node):
            return None
        if node.op_type == "Split":
            return self._split(scope, node, name, depth)
        if node.output[0] != name and node.op_type not in ("Dropout",):
            return None
        if node.op_type in _SAME:
            return self.shape(scope, self._source(scope, node.input[0]), depth)
        if node.op_type in _BROADCAST:
            return _broadcast([self.shape(scope, value, depth) for value in node.input])
        if node.op_type == "Constant":
            value = constant_value(scope, name)
            return None if value is None else tuple(value.shape)
        rule = _RULES.get(node.op_type)
        return None if rule is None else rule(self, scope, node, depth)

    def _source(self, scope: Scope, name: str) -> str:
        """The value at the head of a run of operators that keep the shape; a declared or known value ends the run."""
        producers, declared, known, key = scope.producers, scope.declared(), self._shapes, id(scope)
        while name not in declared and (key, name) not in known:
            node = producers.get(name)
            if node is None or node.op_type not in _SAME:
                break
            name = node.input[0]
        return name

    def _split(self, scope: Scope, node: NodeProto, name: str, depth: int) -> Shape | None:
        source = self.shape(scope, node.input[0], depth)
        if source is None:
            return None
        axis = int_attribute(node, "axis", 0) % len(source)
        sizes = ints_attribute(node, "split")
        if sizes is None and len(node.input) > 1 and node.input[1]:
            known = self.ints(scope, node.input[1], depth)
            sizes = tuple(s for s in known if s is not None) if known else None
        position, size, whole = list(node.output).index(name), None, source[axis]
        if sizes is not None and len(sizes) == len(node.output):
            size = sizes[position]
        elif isinstance(whole, int) and whole % len(node.output) == 0:
            size = whole // len(node.output)
        return (*source[:axis], size, *source[axis + 1 :])


def _dtype_rule(scope: Scope, node: NodeProto, name: str) -> tuple[int | None, str | None]:
    op = node.op_type
    if op in _BOOL:
        return TensorProto.BOOL, None
    if op in _FIXED_TYPES:
        return _FIXED_TYPES[op][list(node.output).index(name)], None
    if op == "Cast":
        return int_attribute(node, "to", 0) or None, None
    if op == "Constant":
        value = constant_value(scope, node.output[0])
        return None if value is None else helper.np_dtype_to_tensor_dtype(value.dtype), None
    if op == "ConstantOfShape":
        return (TensorProto.FLOAT if attribute(node, "value") is None else None), None
    if op in _OWN_TYPE or not is_standard(node) or not node.input:
        return None, None
    if op in _ONE_TYPE and scope.kind != "function":
        # An operand that states its type ends the walk; the first one may hang on a long chain.
        for value in node.input:
            if value in scope.initializers or value in scope.inputs:
                return None, value
    operand = {"Where": 1, "CastLike": 1, "DequantizeLinear": 1, "QuantizeLinear": 2}.get(op, 0)
    return None, (node.input[operand] if operand < len(node.input) else None)


def _better(first: Shape | None, second: Shape | None) -> Shape | None:
    """Join two descriptions of one shape, dimension by dimension; the declared one wins where both know."""
    if first is None or second is None or len(first) != len(second):
        return first if first is not None else second
    return tuple(
        b if isinstance(b, int) and not isinstance(a, int) else (a or b) for a, b in zip(first, second, strict=True)
    )


def _broadcast(shapes: list[Shape | None]) -> Shape | None:
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


Rule = Callable[[Shapes, Scope, NodeProto, int], Shape | None]


def _matmul(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    a, b = (shapes.shape(scope, value, depth) for value in node.input[:2])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    batch = _broadcast([a[:-2], b[:-2]])
    return None if batch is None else (*batch, a[-2], b[-1])


def _gemm(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    a, b = (shapes.shape(scope, value, depth) for value in node.input[:2])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    return (a[1] if int_attribute(node, "transA", 0) else a[0], b[0] if int_attribute(node, "transB", 0) else b[1])


def _transpose(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, perm = shapes.shape(scope, node.input[0], depth), ints_attribute(node, "perm")
    if perm is None:
        return None if source is None else source[::-1]
    return (None,) * len(perm) if source is None or len(source) != len(perm) else tuple(source[p] for p in perm)


def _reshape(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
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


def _axes(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> tuple[int, ...] | None:
    axes = ints_attribute(node, "axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        known = shapes.ints(scope, node.input[1], depth)
        axes = None if known is None or None in known else tuple(a for a in known if a is not None)
    return axes


def _unsqueeze(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, axes = shapes.shape(scope, node.input[0], depth), _axes(shapes, scope, node, depth)
    if source is None or axes is None:
        return None
    rank, dims = len(source) + len(axes), list(source)
    for axis in sorted(a % rank for a in axes):
        dims.insert(axis, 1)
    return tuple(dims)


def _squeeze(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, axes = shapes.shape(scope, node.input[0], depth), _axes(shapes, scope, node, depth)
    if source is None or axes is None:
        return None
    drop = {a % len(source) for a in axes}
    return tuple(dim for i, dim in enumerate(source) if i not in drop)


def _reduce(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source, axes = shapes.shape(scope, node.input[0], depth), _axes(shapes, scope, node, depth)
    if source is None or axes is None:
        return None
    if not axes:
        axes = () if int_attribute(node, "noop_with_empty_axes", 0) else tuple(range(len(source)))
    drop, keep = {a % len(source) for a in axes}, int_attribute(node, "keepdims", 1)
    return tuple(1 if i in drop else dim for i, dim in enumerate(source) if keep or i not in drop)


def _concat(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
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


def _slice(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    source = shapes.shape(scope, node.input[0], depth)
    if source is None:
        return None
    axes = shapes.ints(scope, node.input[3], depth) if len(node.input) > 3 and node.input[3] else None
    cut = {a % len(source) for a in axes if a is not None} if axes and None not in axes else set(range(len(source)))
    return tuple(None if i in cut else dim for i, dim in enumerate(source))


def _gather(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    data, indices = (shapes.shape(scope, value, depth) for value in node.input[:2])
    if data is None or indices is None or not data:
        return None
    axis = int_attribute(node, "axis", 0) % len(data)
    return (*data[:axis], *indices, *data[axis + 1 :])


def _expand(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    return _broadcast([shapes.shape(scope, node.input[0], depth), shapes.ints(scope, node.input[1], depth)])


def _einsum(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
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


def _constant_of_shape(shapes: Shapes, scope: Scope, node: NodeProto, depth: int) -> Shape | None:
    return shapes.ints(scope, node.input[0], depth)


_RULES: dict[str, Rule] = {
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
