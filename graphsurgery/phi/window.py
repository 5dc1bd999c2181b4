"""The range of row statistics in which exp(s - φ) is accurate, by the dtype that executes.

With m the row maximum and lse the row's log-sum-exp: below the lower end terms fall under the smallest normal number
and accuracy is lost; above the upper end the denominator Σe or the unnormalised product Σe·v overflows and the row is
destroyed, so the margin belongs to the upper end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onnx import TensorProto

from graphsurgery.attention.site import Site

__all__ = ["Window", "executing_dtype", "window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Limits in units of the scores (natural logarithm)."""

    dtype: str
    lower: float
    """m - φ of a row with several visible keys is at least this."""
    lower_single: float
    """m - φ of a row with one visible key is at least this: its quotient is exact until the product loses its bits."""
    upper: float
    """lse - φ is at most this, less log max(1, max|v|)."""
    clip: tuple[float, float]
    """Arguments of the Clip before Exp."""
    margin: float
    """Default distance kept from the upper end."""
    masked_below: float
    """A denominator below this belongs to a row without a visible key."""
    sum_limits: tuple[float, float] | None = None
    """Where sums can reach 0 or Inf: the least and the greatest denominator to divide by."""

    def kept(self, margin: float | None) -> float:
        """The distance kept from the upper end: the one asked for, or the default of the type."""
        return self.margin if margin is None else margin

    def interval(
        self, lse: float, low: float, single: float, largest_value: float, margin: float
    ) -> tuple[float, float]:
        """The values of φ for which rows with these extremes lie inside: (least, greatest), empty where reversed.

        `lse`: greatest row log-sum-exp; `low`, `single`: least row maximum among rows with several and with one
        visible key (inf where there is none); `largest_value`: max|v|.
        """
        least = lse + math.log(max(1.0, largest_value)) - self.upper + margin
        greatest = min(low - self.lower, single - self.lower_single)
        return least, greatest


# float32 and bfloat16 share their exponent range: exp stays normal from -87 on.  Clipped at 64, a row far above the
# window still has finite sums for K * max|v| up to 5e10.  e^-66 separates the sum of 2^20 clipped terms from any row
# inside the window.
_WIDE = Window("float32", -60.0, -66.0, 60.0, (-87.0, 64.0), 10.0, math.exp(-66.0))
# Measured on the emulator of the Hexagon accelerator: usable from -8 on; sum and product end near e^10.
# A row without a visible key sums to 0 there, any row inside the window to at least e^-11 > 2^-17.
_HALF = Window("float16", -8.0, -11.0, 9.0, (-40.0, 10.0), 3.0, 2.0**-17, (2.0**-24, 65504.0))

_WINDOWS: dict[int, Window] = {
    TensorProto.FLOAT: _WIDE,
    TensorProto.BFLOAT16: replace(_WIDE, dtype="bfloat16"),
    TensorProto.FLOAT16: _HALF,
}


def executing_dtype(site: Site, target: str) -> int:
    """The narrowest type in which the exponentials and the value product of a site are computed.

    The Hexagon accelerator executes float32 graphs in float16.
    """
    if site.narrowest == TensorProto.FLOAT16 or target == "qnn-htp":
        return TensorProto.FLOAT16
    return TensorProto.BFLOAT16 if site.narrowest == TensorProto.BFLOAT16 else TensorProto.FLOAT


def window(dtype: int) -> Window:
    """The window of an executing dtype (a TensorProto.DataType)."""
    return _WINDOWS[dtype]
