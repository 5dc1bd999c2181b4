"""Tests of one sample against the model's inputs; a refusal names sample and input and says how to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphsurgery.data.signature import InputSpec, is_extension_dtype, is_floating, is_string
from graphsurgery.errors import UsageError

__all__ = ["check_names", "check_sample", "check_type"]

Specs = Mapping[str, InputSpec]


def check_names(where: str, names: Iterable[str], specs: Specs) -> None:
    """Raises UsageError if a required input is missing or a name is not an input."""
    given = set(names)
    missing = [spec for spec in specs.values() if spec.name not in given and not spec.optional]
    extra = sorted(given - specs.keys())
    if extra:
        raise UsageError(f"{where}: '{extra[0]}' is not an input of the model; {_rename(extra[0], specs, given)}")
    if missing:
        has = f"it has {_listed(sorted(given))}" if given else "it is empty"
        raise UsageError(
            f"{where}: input '{missing[0].name}' ({missing[0]}) is missing, {has}; add an array of that name"
        )


def check_type(where: str, spec: InputSpec, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raises UsageError if element type, rank or a static dimension is not the model's.

    Nothing is converted: an int32 array for an int64 input is most often a sign of data made for another model.
    """
    place = f"{where}: input '{spec.name}'"
    if not spec.is_tensor:
        raise UsageError(f"{place} is a sequence or map, which samples cannot hold; export the model with tensors")
    if not _same_type(spec, dtype):
        raise UsageError(f"{place} is {dtype}, the model takes {spec}; {_conversion(spec, dtype)}")
    if spec.shape is None:
        return
    shown = f"has shape {list(shape)}, the model takes {spec}"
    if len(shape) != len(spec.shape):
        raise UsageError(f"{place} {shown}; reshape it to rank {len(spec.shape)}")
    for axis, (size, dim) in enumerate(zip(shape, spec.shape, strict=True)):
        if isinstance(dim, int) and size != dim:
            raise UsageError(
                f"{place} {shown}; make axis {axis} {dim} long (pad or cut it) or export that axis as dynamic"
            )


def check_sample(where: str, sample: Mapping[str, NDArray[Any]], specs: Specs) -> dict[str, NDArray[Any]]:
    """The sample in the order of the graph inputs, in native byte order and the model's element types.

    Raises UsageError for wrong names, types, shapes, for one symbolic dimension with two sizes, and for values
    that no measurement can use: NaN anywhere, infinities outside masks and biases.
    """
    check_names(where, sample, specs)
    checked: dict[str, NDArray[Any]] = {}
    for name, spec in specs.items():
        if name in sample:
            array = sample[name]
            check_type(where, spec, array.dtype, array.shape)
            checked[name] = _as_type(where, spec, array)
            _check_values(where, spec, checked[name])
    _check_symbols(where, checked, specs)
    return checked


def _check_symbols(where: str, sample: Mapping[str, NDArray[Any]], specs: Specs) -> None:
    seen: dict[str, tuple[str, int]] = {}
    for name, array in sample.items():
        for size, dim in zip(array.shape, specs[name].shape or (), strict=False):
            if not isinstance(dim, str):
                continue
            other, other_size = seen.setdefault(dim, (name, size))
            if size != other_size:
                raise UsageError(
                    f"{where}: dimension '{dim}' is {size} in input '{name}' but {other_size} in input '{other}'; "
                    "give both the same size"
                )


def _check_values(where: str, spec: InputSpec, array: NDArray[Any]) -> None:
    if not is_floating(array.dtype) or bool(np.isfinite(array).all()):
        return
    place = f"{where}: input '{spec.name}'"
    nans = np.isnan(array)
    if bool(nans.any()):
        raise UsageError(f"{place} holds NaN, first at index {_first(nans)}; remove or replace these values")
    above = np.isposinf(array)
    if bool(above.any()):
        raise UsageError(
            f"{place} holds +Inf, first at index {_first(above)}; a mask hides with -Inf, replace these values"
        )


def _first(where: NDArray[np.bool_]) -> list[int]:
    return [int(index) for index in np.unravel_index(int(np.argmax(where)), where.shape)]


def _same_type(spec: InputSpec, dtype: np.dtype[Any]) -> bool:
    if is_string(spec.dtype):
        return is_string(dtype)
    if dtype.newbyteorder("=") == spec.dtype:
        return True
    # An .npy file keeps bfloat16 and float8 as anonymous bytes; unsigned integers of the same width are the usual bits.
    same_width = dtype.itemsize == spec.dtype.itemsize and dtype.names is None
    return is_extension_dtype(spec.dtype) and same_width and dtype.kind in "Vu" and not is_extension_dtype(dtype)


def _as_type(where: str, spec: InputSpec, array: NDArray[Any]) -> NDArray[Any]:
    if not is_string(spec.dtype):
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        return native if native.dtype == spec.dtype else np.asarray(native, order="C").view(spec.dtype)
    texts = array.astype(object)
    if not all(isinstance(text, str | bytes) for text in texts.flat):
        raise UsageError(f"{where}: input '{spec.name}' holds objects that are no strings; give an array of str")
    decoded = [text.decode(errors="replace") if isinstance(text, bytes) else text for text in texts.flat]
    result = np.empty(texts.shape, dtype=object)
    result.reshape(-1)[:] = decoded
    return result


def _conversion(spec: InputSpec, dtype: np.dtype[Any]) -> str:
    if is_string(spec.dtype):
        return "give an array of str"
    if is_string(dtype) or dtype.kind == "V":
        return f"save it again as {spec.dtype.name}"
    if is_extension_dtype(spec.dtype):
        return f"convert it with ml_dtypes: .astype(ml_dtypes.{spec.dtype.name})"
    name = "bool_" if spec.dtype.kind == "b" else spec.dtype.name
    return f"convert it with .astype(np.{name}) if that is what you mean"


def _rename(name: str, specs: Specs, given: set[str]) -> str:
    free = [other for other in specs if other not in given]
    close = difflib.get_close_matches(name, free, n=1, cutoff=0.5)
    if close:
        return f"rename it to '{close[0]}' or remove it"
    return f"remove it (inputs are {_listed(list(specs))})"


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
