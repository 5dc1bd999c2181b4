"""Which nodes are products, and which of their operands are weights."""

from __future__ import annotations

from onnx import NodeProto

from graphsurgery.model.index import Scope, is_standard
from graphsurgery.model.shapes import Shape, Shapes
from graphsurgery.model.values import attribute, constant_tensor

__all__ = ["einsum_labels", "is_projection", "is_weight", "key_group", "product_operands"]

_THROUGH = frozenset({"Transpose", "Cast", "DequantizeLinear", "Identity", "Reshape", "Unsqueeze", "Squeeze"})
_WEIGHT_RANK = 2
_REPEATS = frozenset({"Reshape", "Expand", "Unsqueeze", "Transpose", "Tile", "Cast", "Identity", "Mul"})


def product_operands(node: NodeProto) -> tuple[str, str] | None:
    """The two factors of a MatMul, Gemm, FusedMatMul or two-operand Einsum, or None for other nodes."""
    if node.op_type in ("MatMul", "Gemm") and is_standard(node):
        return node.input[0], node.input[1]
    if node.op_type == "Einsum" and len(node.input) == 2:
        return node.input[0], node.input[1]
    if node.op_type == "FusedMatMul" and node.domain == "com.microsoft":
        return node.input[0], node.input[1]
    return None


def is_weight(scope: Scope, name: str) -> bool:
    """Whether a value is a matrix of weights: constant, and of rank 2 apart from axes of length 1.

    A constant of higher rank is a stored key, value or learned query and takes part in attention like any other.
    """
    for _ in range(8):
        tensor = constant_tensor(scope, name)
        if tensor is not None:
            return sum(dim != 1 for dim in tensor.dims) <= _WEIGHT_RANK
        node = scope.producer(name)
        if node is None or node.op_type not in _THROUGH:
            return node is not None and node.op_type == "Constant"
        name = node.input[0]
    return False


def is_projection(scope: Scope, node: NodeProto) -> bool:
    """Whether one factor of the product is a weight: a linear layer, not query times key."""
    factors = product_operands(node)
    return factors is not None and (is_weight(scope, factors[1]) or is_weight(scope, factors[0]))


def einsum_labels(node: NodeProto) -> tuple[str, str, str] | None:
    """The labels of an explicit two-operand equation without ellipsis: first, second, output."""
    equation = attribute(node, "equation")
    if not isinstance(equation, str) or "." in equation:
        return None
    left, arrow, out = equation.replace(" ", "").partition("->")
    factors = left.split(",")
    return (factors[0], factors[1], out) if arrow and len(factors) == 2 else None


def key_group(scope: Scope, values: str, shapes: Shapes) -> int:
    """Query heads per key head: the factor by which an Expand repeats the values; 1 where nothing repeats them."""
    name = values
    for _ in range(8):
        node = scope.producer(name)
        if node is None or node.op_type not in _REPEATS:
            return 1
        if node.op_type == "Expand":
            return _repeat(shapes.shape(scope, node.input[0]), shapes.shape(scope, node.output[0]))
        name = node.input[0]
    return 1


def _repeat(before: Shape | None, after: Shape | None) -> int:
    if before is None or after is None or len(before) != len(after):
        return 1
    factors = [b for a, b in zip(before[1:], after[1:], strict=True) if a == 1 and isinstance(b, int) and b > 1]
    return factors[0] if len(factors) == 1 else 1
