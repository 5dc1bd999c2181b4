"""How far two right answers may lie apart: the one table of the package."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphsurgery.errors import UsageError

__all__ = ["TOLERANCES", "tolerance"]

TOLERANCES: dict[str, tuple[float, float]] = {
    "float64": (1e-7, 1e-9),
    "float32": (1e-4, 2e-5),
    "float16": (3e-2, 3e-2),
    "bfloat16": (6e-2, 6e-2),
}
"""Element type → (relative, absolute): a candidate is within if |difference| ≤ absolute + relative · |reference|."""


def tolerance(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Relative and absolute tolerance of an element type; integers, booleans and strings are exact.

    Raises UsageError for types without an entry (float8, complex).
    """
    if dtype.kind in "iubOUS" or "int" in dtype.name:
        return 0.0, 0.0
    if dtype.name not in TOLERANCES:
        raise UsageError(f"there is no tolerance for {dtype.name} outputs; give --rtol and --atol")
    return TOLERANCES[dtype.name]
