"""Structural passes: each is a small object with a name, usable alone, and returns what it really did."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PassResult"]


@dataclass(frozen=True, slots=True)
class PassResult:
    """What one pass did to a model."""

    name: str
    changed: int
    """Number of places rewritten."""

    added: dict[str, int] = field(default_factory=dict[str, int])
    """New nodes by operator."""

    removed: dict[str, int] = field(default_factory=dict[str, int])
    """Removed nodes by operator."""

    skipped: tuple[tuple[str, str], ...] = ()
    """Places looked at and left as they were: node name, and a reason that names the attribute or the input."""
