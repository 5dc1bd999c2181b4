"""Writes that happen whole or not at all: a temporary file in the same folder, then a rename."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from graphsurgery.errors import UsageError

__all__ = ["atomic_file", "one_line", "reason", "write_bytes_atomically", "write_text_atomically"]

_LONGEST = 200


@contextmanager
def atomic_file(target: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """A binary stream whose content becomes the file `target` when the block ends without an exception.

    On any exception (also KeyboardInterrupt) the temporary file is removed and an existing target is untouched.  An
    existing target keeps its mode, a new file follows the umask, and a link is written through.  A device or a pipe is
    written directly, since it must not be replaced by a file.  The content is on the disk before the rename, so that a
    power failure leaves the old file or the new one.

    Raises UsageError for a folder that is missing or not writable, a target that is a folder or is write-protected,
    and for any failure of a write.
    """
    path = Path(target)
    try:
        status = _status(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            with path.open("wb") as stream:
                yield stream
            return
        with _replacing(Path(os.path.realpath(path)), status) as stream:
            yield stream
    except OSError as error:
        raise UsageError(f"cannot write {one_line(path)}: {reason(error)}; nothing was changed") from error


@contextmanager
def _replacing(path: Path, status: os.stat_result | None) -> Generator[BinaryIO]:
    # A name of its own length: the target's name may already be as long as the file system allows.
    temporary = path.with_name(f".graphsurgery-{secrets.token_hex(8)}.tmp")
    try:
        # Mode 0666 under the umask is what a plain open() gives; tempfile would leave 0600 behind.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            if status is not None:
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            yield stream
            stream.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 - the one call that interrupted-save tests stand in for
    finally:
        temporary.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    """What `target` is now, following links; None where nothing is there yet."""
    if "\0" in str(path):
        raise UsageError(f"cannot write {one_line(path)}: the name has a NUL character")
    if not path.parent.is_dir():
        problem = "is not a folder" if path.parent.exists() else "does not exist"
        raise UsageError(
            f"cannot write {one_line(path)}: the folder {one_line(path.parent)} {problem}; create it first"
        )
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"cannot write {one_line(path)}: it is a folder; give the name of a file in it")
    if not os.access(path, os.W_OK):
        raise UsageError(
            f"cannot write {one_line(path)}: it is write-protected; change its mode or choose another name"
        )
    return status


def write_bytes_atomically(target: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to the file `target`, whole or not at all; see `atomic_file` for modes, links and errors."""
    with atomic_file(target) as stream:
        stream.write(data)


def write_text_atomically(target: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8, with its line ends as they are, to the file `target`; see `atomic_file`."""
    write_bytes_atomically(target, text.encode())


def one_line(value: object) -> str:
    """`value` as a piece of a one-line message: control characters escaped, the middle of a long text left out."""
    text = str(value)
    if not text.isprintable():
        text = repr(text)[1:-1]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"


def reason(error: OSError) -> str:
    """The system's words for an error, without the path that they repeat."""
    return error.strerror or one_line(error)
