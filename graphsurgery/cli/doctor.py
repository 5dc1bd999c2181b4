"""`graphsurgery doctor`: what is installed and which engines run."""

from __future__ import annotations

__all__ = ["doctor"]


def doctor() -> int:
    """Show versions and which engines run."""
    return 0
