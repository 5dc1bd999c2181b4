"""Small constants of a model, read where a rule needs their value; weights are never read."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from graphsurgery.model.index import Scope

__all__ = ["attribute", "constant_tensor", "constant_value", "int_attribute", "ints_attribute"]

_LARGEST = 1 << 22


def constant_tensor(scope: Scope, name: str) -> TensorProto | None:
    """The tensor of an initializer (overridable or not) or of a Constant node's `value`."""
    home = scope.home(name)
    if home is None:
        return None
    node = home.producers.get(name)
    if node is None:
        return home.initializers.get(name)
    if node.op_type != "Constant":
        return None
    for entry in node.attribute:
        if entry.name == "value":
            return entry.t
    return None


def constant_value(scope: Scope, name: str, largest: int = _LARGEST) -> np.ndarray | None:
    """The value of a constant of at most `largest` elements, or None.

    None also for an initializer that a caller can override (it is a graph input too), for weights in external data
    and for values that are computed.
    """
    if not scope.is_constant(name):
        return None
    node = scope.producer(name)
    if node is not None:
        literal = _literal(node)
        if literal is not None:
            return literal
    tensor = constant_tensor(scope, name)
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return None
    size = 1
    for dim in tensor.dims:
        size *= dim
    return numpy_helper.to_array(tensor) if size <= largest else None


def _literal(node: NodeProto) -> np.ndarray | None:
    for entry in node.attribute:
        match entry.name:
            case "value_float":
                return np.array(entry.f, np.float32)
            case "value_floats":
                return np.array(list(entry.floats), np.float32)
            case "value_int":
                return np.array(entry.i, np.int64)
            case "value_ints":
                return np.array(list(entry.ints), np.int64)
            case _:
                continue
    return None


def attribute(node: NodeProto, name: str) -> object | None:
    """An integer, float or string attribute of a node (others as the proto), or None where it is not given."""
    for entry in node.attribute:
        if entry.name == name:
            if entry.type == entry.INT:
                return entry.i
            if entry.type == entry.FLOAT:
                return entry.f
            if entry.type == entry.STRING:
                return entry.s.decode()
            return entry
    return None


def int_attribute(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute, or the operator's default."""
    value = attribute(node, name)
    return value if isinstance(value, int) else default


def ints_attribute(node: NodeProto, name: str) -> tuple[int, ...] | None:
    """A list attribute, or None where it is not given."""
    for entry in node.attribute:
        if entry.name == name:
            return tuple(entry.ints)
    return None
