"""Data files beside a saved model: left where they are or copied, never written over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import onnx

from graphsurgery.errors import UsageError
from graphsurgery.model.atomic import atomic_file, one_line, reason
from graphsurgery.model.external import check_locations
from graphsurgery.options import External

__all__ = ["PlacedFile", "Progress", "place_external", "remove_placed"]

Progress = Callable[[str, int, int], None]
"""Called while a file is copied with its location, the bytes done and the bytes in all."""

_BLOCK = 1 << 22


@dataclass(frozen=True)
class PlacedFile:
    """One data file beside a saved model."""

    path: Path

    how: Literal["present", "copied"]
    """present: was there already, with this content; copied: a file of its own."""

    note: str | None = None
    """A sentence for the user where something else was done than asked for."""

    folders: tuple[Path, ...] = ()
    """Folders that were created for it, outermost first."""


def place_external(
    proto: onnx.ModelProto,
    source_folder: Path | None,
    target: str | os.PathLike[str],
    mode: External,
    *,
    label: str = "model",
    model_path: Path | None = None,
    progress: Progress | None = None,
) -> list[PlacedFile]:
    """Bring the data files of `proto` beside the model file `target`; the locations in `proto` stay as they are.

    A target in the folder of the source needs nothing.  Elsewhere the files are copied, since a location cannot point
    out of the folder of the model and onnx refuses data files with more than one name (links of either kind); `keep`
    says so in the note, `copy` does not.  Files that are there with the same content are taken, unless they are hard
    links to the source, which become files of their own.

    `source_folder` None (a model from a stream or from memory) means that the files must already be beside the target.
    If this call fails, what it created is removed again.  Raises UsageError for all that `check_locations` refuses, for
    a different file that is in the way, for a target that is itself one of the data files, and for failing writes.
    """
    target_path = Path(target)
    folder = target_path.parent
    home = folder if source_folder is None else source_folder
    locations = check_locations(proto, home, label, model_path=model_path)
    for location in locations:
        _keep_clear(target_path, (home / location, folder / location))
    if not locations or os.path.realpath(home) == os.path.realpath(folder):
        return [PlacedFile(folder / location, "present") for location in locations]
    placed: list[PlacedFile] = []
    try:
        for location in locations:
            placed.append(_place(home, folder, location, mode, progress))  # noqa: PERF401 - the undo needs the part
    except BaseException:
        remove_placed(placed)
        raise
    return placed


def remove_placed(placed: Iterable[PlacedFile]) -> None:
    """Remove the files and folders that `place_external` created (those that were present stay)."""
    for entry in placed:
        if entry.how != "present":
            entry.path.unlink(missing_ok=True)
    for entry in placed:
        _remove_folders(entry.folders)


def _keep_clear(target: Path, data_files: Iterable[Path]) -> None:
    for path in data_files:
        if os.path.realpath(path) == os.path.realpath(target):
            raise UsageError(
                f"cannot write {one_line(target)}: the data of the model's tensors is in this file; choose another name"
            )


def _place(home: Path, folder: Path, location: str, mode: External, progress: Progress | None) -> PlacedFile:
    source, wanted = Path(os.path.realpath(home / location)), folder / location
    if not Path(os.path.realpath(wanted)).is_relative_to(os.path.realpath(folder)):
        raise UsageError(
            f"cannot place {one_line(wanted)}: a link leads out of {one_line(folder)}, where runtimes refuse to read; "
            "remove the link or choose another folder"
        )
    linked = os.path.lexists(wanted) and wanted.exists() and source.samefile(wanted)
    if os.path.lexists(wanted) and not linked:
        if _identical(source, wanted):
            return PlacedFile(wanted, "present")
        raise UsageError(
            f"cannot place {one_line(wanted)}: a different file is there; remove it or choose another folder"
        )
    folders = _make_folders(wanted.parent)
    try:
        _copy(source, wanted, location, progress)
    except BaseException:
        _remove_folders(folders)
        raise
    note = (
        None
        if mode == "copy"
        else f"{one_line(wanted)} is a copy: a model names data files of its own folder only, not of {one_line(home)}"
    )
    return PlacedFile(wanted, "copied", note, folders)


def _make_folders(path: Path) -> tuple[Path, ...]:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()][::-1]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_folders(missing)
        raise UsageError(f"cannot create the folder {one_line(path)}: {reason(error)}") from error
    return tuple(missing)


def _remove_folders(folders: Iterable[Path]) -> None:
    for folder in reversed(tuple(folders)):
        # Another file may have come into it meanwhile; then the folder is not ours alone.
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _copy(source: Path, wanted: Path, location: str, progress: Progress | None) -> None:
    with _opened(source) as stream, atomic_file(wanted) as copy:
        total = os.fstat(stream.fileno()).st_size
        done = 0
        while block := stream.read(_BLOCK):
            copy.write(block)
            done += len(block)
            if progress is not None:
                progress(location, done, total)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {one_line(path)}: {reason(error)}") from error


def _identical(source: Path, other: Path) -> bool:
    """Same size and same bytes."""
    if not other.is_file():
        return False
    if source.stat().st_size != other.stat().st_size:
        return False
    with _opened(source) as left, _opened(other) as right:
        while block := left.read(_BLOCK):
            if block != right.read(_BLOCK):
                return False
    return True
