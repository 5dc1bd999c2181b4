"""What is decided for one site, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from graphsurgery.attention.site import Refusal, Site
from graphsurgery.options import Guard
from graphsurgery.phi.window import Window

__all__ = ["Denominator", "SitePlan"]


@dataclass(frozen=True, slots=True)
class Denominator:
    """How the row sum is taken: one sum, or `sizes` keys per chunk."""

    form: Literal["sum", "reshape", "split", "online"] = "sum"
    sizes: tuple[int, ...] = ()
    rows: int | None = None
    """Query rows, where the chunks are made by Reshape; None where they are not known."""

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return max(1, len(self.sizes))


@dataclass(frozen=True, slots=True)
class SitePlan:
    """One site with its fate: `rewritten` in a form, or `left` with a reason."""

    site: Site
    window: Window
    guard: Guard = "clip"
    phi: float | tuple[float, ...] | None = None
    """One φ, one per head, or None where the row maximum is kept."""
    phi_source: str = "none"
    offset: float = 0.0
    """Added to the row maximum so that float16 sums and products stay finite."""
    denominator: Denominator = Denominator()
    largest_value: float = 1.0
    """max|v| as far as it was seen: what the sums of a row may be multiplied by."""
    zero_hidden: bool = False
    """Whether a row without any visible key gives 0, as behind an IsNaN guard, and not a uniform row."""
    left: Refusal | None = None
    row_max: tuple[float, float] | None = None
    notes: tuple[str, ...] = field(default=())

    def heads_array(self, dtype: np.dtype) -> np.ndarray | None:
        """φ per head in the dtype of the scores: [H,1,1] (rank 3) or [1,H,1,1] (rank 4); None for one φ or none."""
        if not isinstance(self.phi, tuple):
            return None
        rank = max(3, self.site.rank or 3)
        shape = (1,) * (rank - 3) + (len(self.phi), 1, 1)
        return np.array(self.phi, np.float64).astype(dtype).reshape(shape)
