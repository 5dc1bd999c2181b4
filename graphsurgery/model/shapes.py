"""Shapes and dtypes of values, worked out on demand.

Declared types are taken first; what is not declared follows from the producers, as far as a site needs it.  The
whole-model inference of onnx costs more than loading and saving the model, and exports without any shape
information keep the rank in a Transpose or a Reshape next to the attention.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto, helper

from graphsurgery.model.index import ModelIndex, Scope, is_standard
from graphsurgery.model.shape_rules import RULES, Dim, Shape, better, broadcast
from graphsurgery.model.values import attribute, constant_tensor, constant_value, int_attribute, ints_attribute

__all__ = ["Dim", "Shape", "Shapes"]

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
        self._integers: dict[tuple[int, str], tuple[int | None, ...] | None] = {}
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
            self._shapes[key] = found  # ends a walk around a cycle
            found = better(found, self._inferred(scope, node, name, depth + 1))
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
        key = (id(scope), name)
        if key not in self._integers:
            self._integers[key] = None  # ends a walk around a cycle
            self._integers[key] = self._ints(scope, name, depth)
        return self._integers[key]

    def _ints(self, scope: Scope, name: str, depth: int) -> tuple[int | None, ...] | None:
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
            return broadcast([self.shape(scope, value, depth) for value in node.input])
        if node.op_type == "Constant":
            value = constant_value(scope, name)
            return None if value is None else tuple(value.shape)
        rule = RULES.get(node.op_type)
        return None if rule is None else rule(self, scope, node, depth)

    def _source(self, scope: Scope, name: str) -> str:
        """The value at the head of a run of operators that keep the shape; a declared or known value ends the run."""
        producers, declared, known, key = scope.producers, scope.declared(), self._shapes, id(scope)
        for _ in range(len(producers) + 1):
            node = producers.get(name)
            if name in declared or (key, name) in known or node is None or node.op_type not in _SAME:
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
