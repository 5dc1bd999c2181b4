"""Distance between one output of two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from graphsurgery.data.signature import is_string
from graphsurgery.errors import UsageError
from graphsurgery.verification.tolerance import tolerance

__all__ = ["OutputMetrics", "compare", "merge"]

Floats = NDArray[np.float64]

_SMALL = 1e-3
"""Elements below this part of the largest reference value count as that large in `max_rel`, so zeros do not rule it."""


@dataclass(frozen=True)
class OutputMetrics:
    """Distance of a candidate output from its reference, over the elements whose reference is finite.

    `max_rel` is relative to the element, or to a thousandth of the largest reference value where that is larger.
    `sqnr_db` is signal to error power: infinite for equal arrays. `worst_index` is the element of `max_abs`, or the
    first one that is not finite as it should be; None where nothing differs. `finite` says that the candidate is
    finite where the reference is and has its infinities, `nan_mismatches` counts NaN where the reference has none.
    `reason` tells why the candidate is not `within` the tolerance. Arrays that cannot be compared at all (shape or
    type differ) have infinite distances.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    max_abs: float
    max_rel: float
    mean_abs: float
    sqnr_db: float
    cosine: float
    worst_index: tuple[int, ...] | None
    finite: bool
    nan_mismatches: int
    within: bool
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """The fields; numbers that JSON cannot hold (the SQNR of equal arrays, infinite distances) become None."""
        return {key: _json(value) for key, value in asdict(self).items()}


def compare(
    name: str,
    reference: NDArray[Any],
    candidate: NDArray[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> OutputMetrics:
    """Compares in float64: element type and shape first, then NaN and infinities, then the tolerance.

    Elements whose reference is NaN are free: the original gives no answer there. An infinite reference must be met
    exactly. `rtol` and `atol` default to the table of the element type; raises UsageError for a type without entry.
    """
    structure = _structure(reference, candidate)
    if structure is not None:
        return _incomparable(name, reference, structure)
    if reference.dtype.kind == "c":
        raise UsageError(f"output '{name}' is {reference.dtype}; complex outputs are not compared, leave it out")
    default_rtol, default_atol = tolerance(reference.dtype) if rtol is None or atol is None else (0.0, 0.0)
    rtol = default_rtol if rtol is None else rtol
    atol = default_atol if atol is None else atol

    wanted, got = _as_float(reference, candidate)
    nan = np.isnan(got) & ~np.isnan(wanted)
    # NaN never equals, so a NaN candidate of an infinite reference is in both masks.
    bad = (np.isfinite(wanted) & ~np.isfinite(got)) | (np.isinf(wanted) & (got != wanted))
    measured = np.isfinite(wanted) & np.isfinite(got)
    error = np.zeros(wanted.shape)
    with np.errstate(over="ignore"):  # two values near the ends of float64 are infinitely far apart
        np.subtract(got, wanted, out=error, where=measured)
        error = np.abs(error, out=error)
    if reference.dtype.kind in "iu":
        # Integers beyond 2⁵³ can differ and still be one float64.
        error[(reference != candidate) & (error == 0)] = 1.0
    size = np.abs(np.where(measured, wanted, 0.0))
    over = measured & ~(error <= atol + rtol * size)
    metrics = OutputMetrics(
        name=name,
        dtype=reference.dtype.name,
        shape=reference.shape,
        max_abs=math.inf if bad.any() else float(error.max(initial=0.0)),
        max_rel=math.inf if bad.any() else _max_rel(error, size),
        mean_abs=float(error[measured].mean()) if measured.any() else 0.0,
        sqnr_db=-math.inf if bad.any() else _sqnr_db(size, error),
        cosine=_cosine(wanted[measured], got[measured]),
        worst_index=_worst(bad, error),
        finite=not bool(bad.any()),
        nan_mismatches=int(nan.sum()),
        within=not bool(bad.any() or over.any()),
        reason=None,
    )
    return metrics if metrics.within else replace(metrics, reason=_reason(metrics, wanted, got, over, rtol, atol))


def merge(metrics: Sequence[OutputMetrics]) -> OutputMetrics:
    """The worst of each number over samples of one output; raises ValueError if names differ or there are none.

    `shape` and `worst_index` are those of the worst sample (out of tolerance before within, then the largest error),
    `reason` is the first one.
    """
    if len({entry.name for entry in metrics}) != 1:
        raise ValueError("merge takes the metrics of one output")
    worst = max(metrics, key=lambda entry: (not entry.within, entry.max_abs))
    return replace(
        worst,
        max_abs=max(entry.max_abs for entry in metrics),
        max_rel=max(entry.max_rel for entry in metrics),
        mean_abs=max(entry.mean_abs for entry in metrics),
        sqnr_db=min(entry.sqnr_db for entry in metrics),
        cosine=min(entry.cosine for entry in metrics),
        finite=all(entry.finite for entry in metrics),
        nan_mismatches=sum(entry.nan_mismatches for entry in metrics),
        within=all(entry.within for entry in metrics),
        reason=next((entry.reason for entry in metrics if entry.reason is not None), None),
    )


def _structure(reference: NDArray[Any], candidate: NDArray[Any]) -> str | None:
    same_strings = is_string(reference.dtype) and is_string(candidate.dtype)
    if reference.dtype != candidate.dtype and not same_strings:
        return f"element type is {candidate.dtype}, the reference has {reference.dtype}"
    if reference.shape != candidate.shape:
        return f"shape is {list(candidate.shape)}, the reference has {list(reference.shape)}"
    return None


def _incomparable(name: str, reference: NDArray[Any], reason: str) -> OutputMetrics:
    return OutputMetrics(
        name=name,
        dtype=reference.dtype.name,
        shape=reference.shape,
        max_abs=math.inf,
        max_rel=math.inf,
        mean_abs=math.inf,
        sqnr_db=-math.inf,
        cosine=0.0,
        worst_index=None,
        finite=True,
        nan_mismatches=0,
        within=False,
        reason=reason,
    )


def _as_float(reference: NDArray[Any], candidate: NDArray[Any]) -> tuple[Floats, Floats]:
    if is_string(reference.dtype):
        # One for the reference, zero for a string that differs: the numbers then count strings.
        same = np.asarray(reference.astype(object) == candidate.astype(object), dtype=np.float64)
        return np.ones(reference.shape), same.reshape(reference.shape)
    return reference.astype(np.float64), candidate.astype(np.float64)


def _max_rel(error: Floats, size: Floats) -> float:
    peak = float(size.max(initial=0.0))
    if not error.any():
        return 0.0
    if peak == 0.0:
        return math.inf
    with np.errstate(over="ignore"):
        return float((error / np.maximum(size, peak * _SMALL)).max())


def _sqnr_db(size: Floats, error: Floats) -> float:
    """Powers are taken relative to the peaks: squares of values near the ends of float64 leave its range."""
    signal, noise = float(size.max(initial=0.0)), float(error.max(initial=0.0))
    if noise == 0.0:
        return math.inf
    if signal == 0.0 or math.isinf(noise):
        return -math.inf
    ratio = float(np.square(size / signal).sum() / np.square(error / noise).sum())
    return 20.0 * (math.log10(signal) - math.log10(noise)) + 10.0 * math.log10(ratio)


def _cosine(wanted: Floats, got: Floats) -> float:
    """1 for two zero vectors, 0 if only one is zero."""
    peaks = float(np.abs(wanted).max(initial=0.0)), float(np.abs(got).max(initial=0.0))
    if 0.0 in peaks:
        return float(peaks[0] == peaks[1])
    first, second = wanted / peaks[0], got / peaks[1]
    cosine = float(first @ second) / math.sqrt(float(first @ first) * float(second @ second))
    return min(1.0, max(-1.0, cosine))


def _worst(bad: NDArray[np.bool_], error: Floats) -> tuple[int, ...] | None:
    if not bad.any() and not error.any():
        return None
    position = int(np.argmax(bad) if bad.any() else np.argmax(error))
    return tuple(int(index) for index in np.unravel_index(position, bad.shape))


def _reason(
    metrics: OutputMetrics, wanted: Floats, got: Floats, over: NDArray[np.bool_], rtol: float, atol: float
) -> str:
    index = metrics.worst_index
    if index is None:
        raise AssertionError("an output out of tolerance has a worst element")
    place = f"at {list(index)}: {got[index]:.9g}, the reference has {wanted[index]:.9g}"
    if not metrics.finite:
        return f"not finite as the reference is, first {place}"
    return f"{int(over.sum())} of {over.size} elements exceed rtol {rtol:g}, atol {atol:g}, largest difference {place}"


def _json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
