"""Samples made up from the signature: right in shape and type, without any claim about the values of real data."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphsurgery.data.signature import InputSpec, is_extension_dtype, is_floating
from graphsurgery.errors import UsageError

__all__ = ["SEED", "synthetic_sample"]

SEED = 20240101
"""Seed of all synthetic samples; sample i takes the stream (SEED, i)."""

_IDS = 32


def synthetic_sample(specs: Sequence[InputSpec], index: int) -> dict[str, NDArray[Any]]:
    """Sample number `index` of the endless seeded series; optional inputs are left to their defaults.

    Sizes are small and vary from sample to sample. Integers are ids below 32 (below 2 for token types, counted up
    for positions), masks are ones with a zero tail (additive ones: zeros with a tail of the lowest finite number),
    other floats are unit normal. Raises UsageError for inputs of unknown rank, for strings and for sequences.
    """
    rng = np.random.default_rng([SEED, index])
    required = [spec for spec in specs if not spec.optional]
    for spec in required:
        if spec.shape is None or not spec.is_tensor or spec.dtype.kind in "OUSc":
            raise UsageError(f"synthetic samples: input '{spec.name}' is {spec}, which cannot be made up; give --data")
    sizes = _Sizes(required, rng)
    return {spec.name: _array(spec, sizes.shape(spec), rng) for spec in required}


class _Sizes:
    """One size per symbolic dimension.

    Exports often give one and the same size several names (torch.export: s10 and s86 for a batch), so names are
    joined by the role that they play: batch, cached keys, keys of a mask.
    """

    def __init__(self, specs: Sequence[InputSpec], rng: np.random.Generator) -> None:
        self._rng = rng
        self._sizes: dict[str, int] = {}
        self._batch = int(rng.integers(1, 4))
        self._past = int(rng.integers(2, 10))
        caches = [spec for spec in specs if _is_cache(spec)]
        for spec in caches:
            self._join(spec, 0, self._batch)
            self._join(spec, 2, self._past)
        masks = [spec for spec in specs if "mask" in spec.name.lower()]
        others = [spec for spec in specs if spec not in caches and spec not in masks]
        for spec in [*others, *masks]:
            self._join(spec, 0, self._batch)
        for spec in others:
            self.shape(spec)
        for mask in masks:
            self._join(mask, -1, self._mask_keys(mask, others, has_cache=bool(caches)))

    def shape(self, spec: InputSpec) -> tuple[int, ...]:
        """The shape of one input in this sample."""
        return tuple(dim if isinstance(dim, int) else self._size(dim) for dim in spec.shape or ())

    def _join(self, spec: InputSpec, axis: int, size: int) -> None:
        dim = spec.shape[axis] if spec.shape and len(spec.shape) > 1 else None
        if isinstance(dim, str) and dim.isidentifier():
            self._sizes.setdefault(dim, size)

    def _mask_keys(self, mask: InputSpec, others: list[InputSpec], *, has_cache: bool) -> int:
        """Length of a mask: that of the tokens it belongs to, and of the cached keys before them."""
        tokens = [spec for spec in others if spec.shape and len(spec.shape) == 2 and spec.dtype.kind in "iu"]
        same_part = [spec for spec in tokens if spec.name.startswith("decoder") == mask.name.startswith("decoder")]
        length = self.shape((same_part or tokens)[0])[1] if tokens else int(self._rng.integers(2, 10))
        return length + (self._past if has_cache else 0)

    def _size(self, dim: str | None) -> int:
        if dim is None:
            return int(self._rng.integers(2, 10))
        if dim not in self._sizes:
            self._sizes[dim] = self._named(dim)
        return self._sizes[dim]

    def _named(self, dim: str) -> int:
        if "batch" in dim.lower() and dim.isidentifier():
            return self._batch
        if not dim.isidentifier():
            size = self._expression(dim)
            if size is not None and size >= 0:
                return size
        return int(self._rng.integers(2, 10))

    def _expression(self, dim: str) -> int | None:
        """Value of dimensions like `past_sequence_length + 1`, which exporters write as a name."""
        try:
            tree = ast.parse(dim.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return self._value(tree.body)

    def _value(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Name):
            return self._size(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if not isinstance(node, ast.BinOp):
            return None
        left, right = self._value(node.left), self._value(node.right)
        if left is None or right is None:
            return None
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case _:
                return None


def _is_cache(spec: InputSpec) -> bool:
    # [batch, heads, keys, head size] with symbolic keys; images are rank 4 too but have their sizes in axes 2 and 3.
    return (
        is_floating(spec.dtype)
        and spec.shape is not None
        and len(spec.shape) == 4
        and isinstance(spec.shape[2], str)
        and isinstance(spec.shape[3], int)
    )


def _array(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    name = spec.name.lower()
    if "mask" in name:
        return _mask(spec, shape, rng)
    if is_floating(spec.dtype):
        return rng.standard_normal(shape).astype(spec.dtype)
    if spec.dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if "position" in name or name.endswith("pos"):
        return _positions(shape).astype(spec.dtype)
    if "type" in name or "segment" in name:
        return rng.integers(0, 2, shape).astype(spec.dtype)
    # Eight values are what a signed 4-bit type can hold.
    return rng.integers(0, 8 if "int4" in spec.dtype.name else _IDS, shape).astype(spec.dtype)


def _positions(shape: tuple[int, ...]) -> NDArray[np.int64]:
    axis = next((axis for axis in reversed(range(len(shape))) if shape[axis] > 1), None)
    if axis is None:
        return np.zeros(shape, np.int64)
    counted = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(counted, shape).astype(np.int64)


def _mask(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Every row keeps at least half of its keys, so that no row is masked whole."""
    keys = shape[-1] if shape else 1
    rows = shape[0] if len(shape) > 1 else 1
    tails = rng.integers(0, keys // 2 + 1, (rows,) + (1,) * (max(len(shape), 1) - 1))
    kept = np.broadcast_to(np.arange(keys) < keys - tails, shape or (1,)).reshape(shape)
    if is_floating(spec.dtype) and len(shape) > 2:
        return np.where(kept, 0.0, _lowest(spec.dtype)).astype(spec.dtype)
    # torch marks the keys to leave out in a key_padding_mask, all others mark the keys to keep.
    kept = ~kept if "padding_mask" in spec.name.lower() and spec.dtype.kind == "b" else kept
    return kept.astype(spec.dtype)


def _lowest(dtype: np.dtype[Any]) -> float:
    if not is_extension_dtype(dtype):
        return float(np.finfo(dtype).min)
    ml_dtypes: Any = import_module("ml_dtypes")  # its finfo has no usable types
    return float(ml_dtypes.finfo(dtype).min)
