"""Reads .npz files from strangers: nothing is unpickled, and no data is read before its header is believed."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from graphsurgery.data.checks import check_names, check_type
from graphsurgery.data.signature import InputSpec
from graphsurgery.errors import UsageError

__all__ = ["MAX_MEMBER_BYTES", "read_npz"]

MAX_MEMBER_BYTES = 4 << 30
"""Largest array that is read; an attack unpacks to more than that, a sample hardly ever."""

# zipfile and its decompressors report damage by all of these; RuntimeError and NotImplementedError stand for
# encrypted members and unknown compression methods.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)

# numpy parses a header as a Python literal, and once more by tokens if that fails.
_BAD_HEADER = (ValueError, SyntaxError, TypeError, tokenize.TokenError, RecursionError, MemoryError)


def read_npz(path: Path, shown: str, specs: Mapping[str, InputSpec]) -> dict[str, NDArray[Any]]:
    """The arrays of the file by name.

    Names, element types and shapes are compared with the inputs, and sizes with the directory of the zip file,
    before any array is unpacked. Raises UsageError.
    """
    with _damage_is_refused(shown):
        archive = zipfile.ZipFile(path)
    with archive:
        members = _members(archive, shown)
        check_names(shown, members, specs)
        for name, member in members.items():
            _check_header(archive, member, shown, specs[name])
        with _damage_is_refused(shown):
            return {name: _read(archive, member) for name, member in members.items()}


@contextmanager
def _damage_is_refused(shown: str) -> Generator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise UsageError(
            f"{shown}: is not a readable .npz file ({_reason(error)}); write it again with np.savez(file, name=array)"
        ) from None


def _members(archive: zipfile.ZipFile, shown: str) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name == member.filename:
            raise UsageError(f"{shown}: member '{name}' is not an .npy array; write the file with np.savez")
        if name in members:
            raise UsageError(f"{shown}: input '{name}' occurs twice; write the file again with np.savez")
        members[name] = member
    return members


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, shown: str, spec: InputSpec) -> None:
    place = f"{shown}: input '{spec.name}'"
    if member.file_size > MAX_MEMBER_BYTES:
        raise UsageError(
            f"{place} unpacks to {member.file_size} bytes, the limit is {MAX_MEMBER_BYTES}; give a smaller sample"
        )
    with _damage_is_refused(shown), archive.open(member) as file:
        try:
            shape, dtype, offset = _header(file)
        except _BAD_HEADER as error:
            raise UsageError(
                f"{place} has an unreadable .npy header ({_reason(error)}); save the array again with np.savez"
            ) from None
    if dtype.hasobject:
        raise UsageError(
            f"{place} is pickled (dtype object), which is never loaded; save it as a plain array of numbers"
        )
    declared = offset + dtype.itemsize * math.prod(shape)
    if min(shape, default=0) < 0 or declared != member.file_size:
        raise UsageError(
            f"{place} is {member.file_size} bytes in the zip directory but {declared} by its header "
            f"({dtype}{list(shape)}); the file is damaged or forged, write it again with np.savez"
        )
    check_type(shown, spec, dtype, shape)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, element type and the size of the header in bytes."""
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version[0]}.{version[1]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of headers that Python 2 wrote; they are read all the same
        shape, _, dtype = read(file)
    return shape, dtype, file.tell()


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return npy.read_array(file, allow_pickle=False)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
