"""What is known of the rows of a site: extremes of row maximum, log-sum-exp and values, per head."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from graphsurgery.attention.masks import HIDDEN

__all__ = ["RowStatistics", "SiteStatistics"]

_INF = float("inf")
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Extremes over rows, in units of the scores; infinities where no row of the kind was seen."""

    rows: int = 0
    """Rows with at least one visible key."""
    hidden: int = 0
    """Rows without a visible key (padding); they count nowhere else."""
    single: int = 0
    """Rows with one visible key."""
    row_max_low: float = _INF
    row_max_high: float = -_INF
    several_low: float = _INF
    """Least row maximum among rows with several visible keys."""
    single_low: float = _INF
    """Least row maximum among rows with one visible key."""
    lse_high: float = -_INF
    """Greatest row log-sum-exp."""
    score_low: float = _INF
    """Least visible score."""
    value_high: float = 0.0
    """Greatest absolute value."""
    hidden_high: float = -_INF
    """Greatest row maximum among rows without a visible key: what the mask left of their scores (-inf: nothing)."""

    @classmethod
    def of(cls, rows: np.ndarray, largest_value: float, hidden: float = HIDDEN) -> RowStatistics:
        """From observed rows [N, 4]: maximum, log-sum-exp, visible keys, least visible score.

        A row whose maximum is at most `hidden` sees no key.  Rows with +Inf or NaN (for which the original gives NaN)
        say nothing and are left out.
        """
        rows = rows.astype(np.float64)
        rows = rows[(rows < _INF).all(axis=1)]
        seen = rows[rows[:, 0] > hidden]
        one = seen[:, 2] <= 1
        return cls(
            rows=len(seen),
            hidden=len(rows) - len(seen),
            single=int(one.sum()),
            row_max_low=_low(seen[:, 0]),
            row_max_high=_high(seen[:, 0]),
            several_low=_low(seen[~one, 0]),
            single_low=_low(seen[one, 0]),
            lse_high=_high(seen[:, 1]),
            score_low=_low(seen[:, 3]),
            value_high=largest_value,
            hidden_high=_high(rows[rows[:, 0] <= hidden, 0]),
        )

    def merge(self, other: RowStatistics) -> RowStatistics:
        """The extremes over both."""
        return RowStatistics(
            self.rows + other.rows,
            self.hidden + other.hidden,
            self.single + other.single,
            min(self.row_max_low, other.row_max_low),
            max(self.row_max_high, other.row_max_high),
            min(self.several_low, other.several_low),
            min(self.single_low, other.single_low),
            max(self.lse_high, other.lse_high),
            min(self.score_low, other.score_low),
            max(self.value_high, other.value_high),
            max(self.hidden_high, other.hidden_high),
        )

    def to_json(self) -> dict[str, float | int | None]:
        """Rounded to six significant digits, None for what was not seen."""
        return {key: _number(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, entry: dict[str, float | int | None]) -> RowStatistics:
        """The inverse of `to_json`."""
        empty = asdict(cls())
        for key, value in entry.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and np.isfinite(value)):
                raise ValueError(f"{key} is {value!r}, not a finite number")
        return cls(**{key: empty[key] if value is None else value for key, value in entry.items()})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SiteStatistics:
    """The statistics of one site: each head by itself where all samples have the same heads, else one entry."""

    heads: tuple[RowStatistics, ...]
    samples: int = 1

    @property
    def layer(self) -> RowStatistics:
        """The extremes over all heads."""
        total = RowStatistics()
        for head in self.heads:
            total = total.merge(head)
        return total

    @classmethod
    def of(cls, rows: np.ndarray, values: np.ndarray, hidden: float = HIDDEN) -> SiteStatistics:
        """From rows [..., H, Q, 4] and max|v| [..., H or less, 1, 1] of one sample."""
        largest = float(np.abs(values.astype(np.float64)).max()) if values.size else 0.0
        heads = rows.shape[-3] if rows.ndim > 2 else 1
        if heads <= 1:
            return cls((RowStatistics.of(rows.reshape(-1, 4), largest, hidden),))
        by_head = np.moveaxis(rows, -3, 0).reshape(heads, -1, 4)
        per_head = _values_by_head(values, heads, largest)
        return cls(tuple(RowStatistics.of(head, value, hidden) for head, value in zip(by_head, per_head, strict=True)))

    def merge(self, other: SiteStatistics) -> SiteStatistics:
        """Over the samples of both; heads are kept apart only where both have the same number."""
        samples = self.samples + other.samples
        if len(self.heads) == len(other.heads):
            return SiteStatistics(tuple(a.merge(b) for a, b in zip(self.heads, other.heads, strict=True)), samples)
        return SiteStatistics((self.layer.merge(other.layer),), samples)


def _values_by_head(values: np.ndarray, heads: int, largest: float) -> list[float]:
    if values.ndim < 3 or values.shape[-3] != heads:
        return [largest] * heads
    flat = np.moveaxis(np.abs(values.astype(np.float64)), -3, 0).reshape(heads, -1)
    return [float(row.max()) for row in flat]


def _low(values: np.ndarray) -> float:
    return float(values.min()) if values.size else _INF


def _high(values: np.ndarray) -> float:
    return float(values.max()) if values.size else -_INF


def _number(value: float | int) -> float | int | None:
    if isinstance(value, int):
        return value
    return float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None
