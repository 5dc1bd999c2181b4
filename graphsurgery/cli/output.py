"""What verbs print: messages and progress on stderr, results on stdout."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from graphsurgery.errors import UsageError
from graphsurgery.progress import Progress, quiet

if TYPE_CHECKING:
    from graphsurgery.model.files import SourceModel

__all__ = [
    "PlainProgress",
    "RichProgress",
    "Table",
    "check_apart",
    "check_writable",
    "files_of",
    "progress",
    "say",
    "show_table",
    "warn_synthetic",
]

T = TypeVar("T")

_SECONDS_BEFORE_LINES, _SECONDS_BETWEEN_LINES = 1.0, 5.0


def say(line: str) -> None:
    """One message for the user."""
    print(line, file=sys.stderr)


def warn_synthetic() -> None:
    """Synthetic data must not be missed; `--quiet` does not silence this."""
    say("graphsurgery: WARNING: SYNTHETIC DATA: made-up samples stand in for real inputs, and what follows from them")
    say("graphsurgery: WARNING: (row statistics, phi, verification) says little about yours; give recorded samples")


def progress(silent: bool) -> Progress:
    """A bar on a terminal, a line now and then elsewhere, nothing where silence is asked for."""
    if silent:
        return quiet
    return RichProgress() if sys.stderr.isatty() else PlainProgress()


class PlainProgress:
    """A line at most every five seconds and one at the end; none for what is done within a second."""

    def __call__(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """Yield the items; see `graphsurgery.progress.Progress`."""
        start, due = time.monotonic(), _SECONDS_BEFORE_LINES
        done = 0
        for item in items:
            yield item
            done += 1
            elapsed = time.monotonic() - start
            if done < total and elapsed >= due:
                say(f"{what}: {done} of {total}, {elapsed:.0f} s")
                due = elapsed + _SECONDS_BETWEEN_LINES
        elapsed = time.monotonic() - start
        if elapsed >= _SECONDS_BEFORE_LINES:
            say(f"{what}: {done} of {total} done in {elapsed:.1f} s")


class RichProgress:
    """A bar that disappears when it is full."""

    def __call__(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """Yield the items; see `graphsurgery.progress.Progress`."""
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description=what, total=total, console=Console(stderr=True), transient=True)


class _TrialError(Exception):
    """Ends a trial write."""


def _is_special(target: str) -> bool:
    try:
        mode = Path(target).stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_writable(target: str | None) -> None:
    """Raise UsageError for a file that cannot be written, before long work is done for it."""
    from graphsurgery.model.atomic import atomic_file

    # A pipe or a device is not tried: opening it would already be heard at its other end.
    if target is None or target == "-" or _is_special(target):
        return
    with suppress(_TrialError), atomic_file(target):
        raise _TrialError


def check_apart(target: str | None, others: Iterable[str | Path | None]) -> None:
    """Raise UsageError where a file to write is one of the files that the command reads or writes otherwise."""
    if target is None or target == "-" or _is_special(target):
        return
    for other in others:
        if other is not None and str(other) != "-" and os.path.realpath(other) == os.path.realpath(target):
            raise UsageError(f"cannot write {target}: it is also {other} of this command; choose another name")


def files_of(model: SourceModel) -> list[Path]:
    """The file of a model and its data files."""
    from graphsurgery.model.external import external_tensors

    folder = model.folder
    names = {
        entry.value
        for tensor in external_tensors(model.proto)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [*([model.path] if model.path else []), *(folder / name for name in sorted(names) if folder is not None)]


class Table:
    """Rows of text under one header."""

    def __init__(self, *header: str) -> None:
        self.header = header
        self.rows: list[Sequence[str]] = []

    def add(self, *row: str) -> None:
        """Add a row with as many cells as the header."""
        self.rows.append(row)


def show_table(table: Table) -> None:
    """On a terminal a table with borders, else one line per row with the columns aligned by spaces."""
    if not table.rows:
        return
    if sys.stdout.isatty():
        _show_rich(table)
        return
    widths = [max(len(row[column]) for row in (table.header, *table.rows)) for column in range(len(table.header))]
    for row in (table.header, *table.rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _show_rich(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable()
    used = [column for column in range(len(table.header)) if any(row[column] for row in table.rows)]
    for column in used:
        shown.add_column(table.header[column], overflow="fold")
    for row in table.rows:
        shown.add_row(*(row[column] for column in used))
    # Names of nodes hold brackets and numbers, which are neither markup nor to be coloured.
    Console(markup=False, highlight=False).print(shown)
