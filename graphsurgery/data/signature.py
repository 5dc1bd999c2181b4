"""What a model takes: name, element type and shape of every graph input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from graphsurgery.errors import UsageError

__all__ = ["InputSpec", "is_extension_dtype", "is_floating", "is_string", "signature"]

_NOT_A_TENSOR = np.dtype("V0")


@dataclass(frozen=True)
class InputSpec:
    """One graph input.

    `dtype` is the numpy type of an element (ml_dtypes for bfloat16, float8 and 4-bit types, object for strings).
    `shape` holds a number for a static dimension, a name for a symbolic one and None for an unknown one;
    it is None itself where the model does not state the rank.
    `optional` inputs may be missing from a sample: they have a default value, or are ONNX Optional or sequence types.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None
    optional: bool

    @property
    def is_tensor(self) -> bool:
        """False for sequences, maps and sparse tensors, which samples cannot hold."""
        return self.dtype != _NOT_A_TENSOR

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape, if all of its dimensions are numbers."""
        if self.shape is None:
            return None
        numbers = tuple(dim for dim in self.shape if isinstance(dim, int))
        return numbers if len(numbers) == len(self.shape) else None

    def __str__(self) -> str:
        """`float32[batch,4,?]`."""
        dims = "..." if self.shape is None else ",".join("?" if dim is None else str(dim) for dim in self.shape)
        kind = "string" if is_string(self.dtype) else self.dtype.name
        return f"{kind}[{dims}]"


def signature(model: onnx.ModelProto) -> tuple[InputSpec, ...]:
    """The graph inputs in order; raises UsageError for an input without an element type."""
    defaults = {tensor.name for tensor in model.graph.initializer}
    defaults.update(tensor.values.name for tensor in model.graph.sparse_initializer)
    return tuple(_spec(value, value.name in defaults) for value in model.graph.input)


def _spec(value: onnx.ValueInfoProto, has_default: bool) -> InputSpec:
    kind = value.type
    optional = has_default or not kind.HasField("tensor_type")
    if kind.HasField("optional_type"):
        kind = kind.optional_type.elem_type
    if not kind.HasField("tensor_type"):
        if kind.WhichOneof("value") is None:
            raise UsageError(
                f"input '{value.name}' has no type; export the model again or run onnx shape inference on it"
            )
        return InputSpec(value.name, _NOT_A_TENSOR, None, optional)
    tensor = kind.tensor_type
    try:
        dtype = tensor_dtype_to_np_dtype(tensor.elem_type)
    except KeyError:
        raise UsageError(
            f"input '{value.name}' has element type {tensor.elem_type}, unknown to onnx {onnx.__version__}; "
            "export the model again or install a newer onnx"
        ) from None
    shape = tuple(_dim(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return InputSpec(value.name, np.dtype(dtype), shape, optional)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        # Some exporters write -1 for a dimension that they do not know.
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None


def is_floating(dtype: np.dtype[Any]) -> bool:
    """True for all real floating point types, those of ml_dtypes included (numpy files them under void)."""
    return dtype.kind == "f" or "float" in dtype.name


def is_string(dtype: np.dtype[Any]) -> bool:
    """True for the numpy types that hold ONNX strings."""
    return dtype.kind in "OUS"


def is_extension_dtype(dtype: np.dtype[Any]) -> bool:
    """True for the types that come from ml_dtypes, which .npy files store as anonymous bytes."""
    return dtype.isbuiltin == 2
