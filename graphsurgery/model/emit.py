"""Operators as each opset spells them (axes and limits moved from attributes to inputs over time)."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from graphsurgery.model.rewriter import Place, Rewriter

__all__ = ["Emitter", "lowest", "numpy_dtype"]

_CLIP_INPUTS, _CLIP_DOUBLE, _SUM_INPUTS, _MAX_INPUTS, _SPLIT_INPUTS = 11, 12, 13, 18, 13


def numpy_dtype(dtype: int) -> np.dtype:
    """The numpy dtype of a TensorProto.DataType (bfloat16 from ml_dtypes)."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(dtype))


def lowest(dtype: np.dtype) -> float:
    """The lowest finite number of a float dtype (ml_dtypes knows bfloat16 too)."""
    info = cast("Any", ml_dtypes.finfo)(dtype)
    return float(info.min)


class Emitter:
    """Adds operators of one site at one place; every method returns the name of the output."""

    def __init__(self, rewriter: Rewriter, place: Place, base: str, elem_type: int) -> None:
        self.rewriter, self.place, self.base, self.elem_type = rewriter, place, base, elem_type
        self.opset = place.scope.opset

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype of the site."""
        return numpy_dtype(self.elem_type)

    def at(self, place: Place, base: str | None = None, elem_type: int | None = None) -> Emitter:
        """The same emitter at another place."""
        base, elem_type = base or self.base, elem_type or self.elem_type
        return Emitter(self.rewriter, place, base, elem_type)

    def scalar(self, value: float, what: str) -> str:
        """A scalar constant in the dtype of the site."""
        return self.rewriter.scalar(self.place.scope, value, self.elem_type, what)

    def ints(self, values: tuple[int, ...], what: str) -> str:
        """A list of int64 as an input."""
        return self.rewriter.ints(self.place.scope, values, what)

    def array(self, value: np.ndarray, what: str) -> str:
        """A constant array."""
        return self.rewriter.constant(self.place.scope, value, what)

    def op(self, op_type: str, *inputs: str, what: str, output: str | None = None) -> str:
        """An operator without attributes."""
        outputs = 1 if output is None else [output]
        return self.rewriter.add(self.place, op_type, inputs, f"{self.base}_{what}", outputs=outputs)

    def clip(self, value: str, low: float, high: float, what: str) -> str:
        """Clip-6 (attributes) or Clip-11 and later (inputs); Max and Min for float64, which runtimes lack before 12."""
        if self.elem_type == TensorProto.DOUBLE and self.opset < _CLIP_DOUBLE:
            above = self.op("Max", value, self.scalar(low, "clip_low"), what=f"{what}_low")
            return self.op("Min", above, self.scalar(high, "clip_high"), what=what)
        if self.opset >= _CLIP_INPUTS:
            return self.op("Clip", value, self.scalar(low, "clip_low"), self.scalar(high, "clip_high"), what=what)
        return self.rewriter.add(self.place, "Clip", [value], f"{self.base}_{what}", min=float(low), max=float(high))

    def reduce(self, op_type: str, value: str, axis: int, what: str) -> str:
        """ReduceSum (axes are an input from opset 13), ReduceMax and ReduceMean (from opset 18), dimensions kept."""
        since = _SUM_INPUTS if op_type == "ReduceSum" else _MAX_INPUTS
        name = f"{self.base}_{what}"
        if self.opset >= since:
            return self.rewriter.add(self.place, op_type, [value, self.ints((axis,), "axis")], name, keepdims=1)
        return self.rewriter.add(self.place, op_type, [value], name, axes=[axis], keepdims=1)

    def reshape(self, value: str, shape: list[int], what: str) -> str:
        """Reshape-5 and later; 0 keeps a dimension, -1 takes the rest."""
        return self.op("Reshape", value, self.ints(tuple(shape), "shape"), what=what)

    def transpose(self, value: str, perm: list[int], what: str) -> str:
        """Transpose-1 and later."""
        return self.rewriter.add(self.place, "Transpose", [value], f"{self.base}_{what}", perm=perm)

    def cast(self, value: str, dtype: int, what: str) -> str:
        """Cast-6 and later."""
        return self.rewriter.add(self.place, "Cast", [value], f"{self.base}_{what}", to=dtype)

    def split(self, value: str, sizes: tuple[int, ...], what: str) -> list[str]:
        """Split along the last axis with explicit sizes (an input from opset 13, an attribute before)."""
        name = f"{self.base}_{what}"
        outputs = [self.rewriter.fresh(f"{name}_{i}") for i in range(len(sizes))]
        if self.opset >= _SPLIT_INPUTS:
            self.rewriter.add(
                self.place, "Split", [value, self.ints(sizes, "chunk_sizes")], name, outputs=outputs, axis=-1
            )
        else:
            self.rewriter.add(self.place, "Split", [value], name, outputs=outputs, axis=-1, split=sizes)
        return outputs

    def concat(self, values: list[str], what: str) -> str:
        """Concat-4 and later, along the last axis."""
        return self.rewriter.add(self.place, "Concat", values, f"{self.base}_{what}", axis=-1)
