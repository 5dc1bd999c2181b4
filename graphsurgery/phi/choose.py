"""Chooses φ from evidence: as few different values as the windows allow, at a safe distance from their ends.

Each site (or head) admits an interval of φ.  Of each interval the outer quarters are given up where it is wide, so
that no site sits at the edge of its window; then the fewest points that meet all intervals are found by the greedy
rule for stabbing intervals (sort by right end, take it where no point chosen before lies inside).
"""

from __future__ import annotations

from dataclasses import dataclass

from graphsurgery.attention.site import Refusal
from graphsurgery.phi.statistics import RowStatistics, SiteStatistics
from graphsurgery.phi.window import Window

__all__ = ["Interval", "check_phi", "choose_per_head", "choose_phi", "phi_interval", "window_refusal"]

_INNER = 0.25
_STEP = 0.125
_SHARED_ZERO = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Values of φ for which every observed row lies inside the window; empty where low > high."""

    low: float
    high: float

    @property
    def empty(self) -> bool:
        """Whether no φ fits."""
        return self.low > self.high

    def inner(self) -> Interval:
        """The middle half."""
        width = self.high - self.low
        return Interval(self.low + _INNER * width, self.high - _INNER * width)


def phi_interval(rows: RowStatistics, window: Window, margin: float) -> Interval:
    """The admissible φ of observed rows; with no row seen, nothing is admissible."""
    if rows.rows == 0:
        return Interval(float("inf"), -float("inf"))
    low, high = window.interval(rows.lse_high, rows.several_low, rows.single_low, rows.value_high, margin)
    return Interval(low, high)


def choose_phi(intervals: dict[str, Interval]) -> dict[str, float]:
    """One φ for each non-empty interval, with the fewest different values; 0 where it serves a whole group."""
    inner = {key: interval.inner() for key, interval in intervals.items() if not interval.empty}
    groups: list[tuple[float, float, list[str]]] = []
    for key in sorted(inner, key=lambda k: (inner[k].high, inner[k].low, k)):
        interval = inner[key]
        if groups and groups[-1][1] >= interval.low:
            low, high, members = groups[-1]
            groups[-1] = (max(low, interval.low), min(high, interval.high), [*members, key])
        else:
            groups.append((interval.low, interval.high, [key]))
    return {key: _point(low, high) for low, high, members in groups for key in members}


def _point(low: float, high: float) -> float:
    """0 where it lies inside (no subtraction at all), else the middle on a grid that every dtype holds exactly."""
    if low <= _SHARED_ZERO <= high:
        return _SHARED_ZERO
    middle = (low + high) / 2
    stepped = round(middle / _STEP) * _STEP
    return stepped if low <= stepped <= high else middle


def choose_per_head(seen: SiteStatistics, window: Window, margin: float) -> tuple[float, ...] | None:
    """A φ for each head, or None where a head admits none or heads cannot be told apart."""
    if len(seen.heads) < 2:
        return None
    intervals = [phi_interval(head, window, margin) for head in seen.heads]
    if any(interval.empty for interval in intervals):
        return None
    return tuple(_point(i.low, i.high) for i in (interval.inner() for interval in intervals))


def window_refusal(seen: SiteStatistics, window: Window, margin: float, node: str) -> Refusal:
    """Why no φ fits, with the numbers."""
    rows = seen.layer
    if rows.rows == 0:
        return Refusal("no-evidence", f"{node} had no row with a visible key in the data; give data that uses it", node)
    interval = phi_interval(rows, window, margin)
    short = interval.low - interval.high
    reason = (
        f"row maxima of {node} run from {rows.row_max_low:.4g} to {rows.row_max_high:.4g} and row log-sum-exp up to "
        f"{rows.lse_high:.4g}, max|v| {rows.value_high:.3g}: {short:.3g} too wide for the {window.dtype} window "
        f"(margin {margin:g}); use --otherwise exact to keep the row maximum here"
    )
    return Refusal("window", reason, node, {**rows.to_json(), "dtype": window.dtype, "margin": margin, "short": short})


def check_phi(phi: float, seen: SiteStatistics, window: Window, node: str) -> Refusal | None:
    """Whether a φ given by hand keeps all observed rows inside the window (without margin)."""
    interval = phi_interval(seen.layer, window, 0.0)
    if interval.low <= phi <= interval.high:
        return None
    admits = "no φ" if interval.empty else f"φ from {interval.low:.4g} to {interval.high:.4g}"
    reason = (
        f"φ = {phi:g} puts rows of {node} outside the {window.dtype} window; the data admits {admits} (without margin)"
    )
    return Refusal("window", reason, node, {"phi": phi, "low": interval.low, "high": interval.high})
