"""Data sources: what a model takes, and samples for it."""

from __future__ import annotations

from graphsurgery.data.samples import Samples, open_samples
from graphsurgery.data.signature import InputSpec, signature

__all__ = ["InputSpec", "Samples", "open_samples", "signature"]
