"""How long work tells that it goes on: a function that wraps what is iterated over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

__all__ = ["Progress", "quiet"]

T = TypeVar("T")


class Progress(Protocol):
    """`for item in progress(items, "calibrating", total)`."""

    def __call__(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """Yield the items and show how many of `total` are done."""
        ...


def quiet(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Show nothing."""
    del what, total
    return iter(items)
