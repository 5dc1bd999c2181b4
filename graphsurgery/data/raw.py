"""QNN input lists: a text file with one sample per line, each naming raw files.

A line is `name:=path name2:=path2`, or plain paths in the order of the graph inputs. Paths are relative to the list's
folder. Lines that start with `#` or `%` select outputs for the QNN tools and are passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphsurgery.data.signature import InputSpec, is_floating
from graphsurgery.errors import UsageError

__all__ = ["list_lines", "read_raw_line"]

_NEXT_NAME = re.compile(r"\s+(?=[^\s=]+:=)")


def list_lines(path: Path, shown: str) -> list[tuple[int, str]]:
    """The sample lines with their numbers; raises UsageError if the file is no text or holds no sample."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{shown}: is not a text file; give a QNN input list with one sample per line") from None
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read ({error.strerror}); check its permissions") from None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    samples = [(number, line) for number, line in lines if line and line[0] not in "#%"]
    if not samples:
        raise UsageError(f"{shown}: lists no sample; add lines like `name:=file.raw name2:=file2.raw`")
    return samples


def read_raw_line(line: str, folder: Path, where: str, specs: Sequence[InputSpec]) -> dict[str, NDArray[Any]]:
    """The arrays of one line by input name; raises UsageError."""
    return {spec.name: _read(folder, file, where, spec) for spec, file in _entries(line, where, specs)}


def _entries(line: str, where: str, specs: Sequence[InputSpec]) -> list[tuple[InputSpec, str]]:
    if ":=" not in line:
        files = line.split()
        required = [spec for spec in specs if not spec.optional]
        ordered = specs if len(files) > len(required) else required
        if len(files) != len(ordered):
            expected = " ".join(f"{spec.name}:=file.raw" for spec in required)
            raise UsageError(f"{where}: {len(files)} files for {len(ordered)} inputs; write `{expected}`")
        return list(zip(ordered, files, strict=True))
    by_name = {spec.name: spec for spec in specs}
    entries: dict[str, tuple[InputSpec, str]] = {}
    for part in _NEXT_NAME.split(line):
        name, separator, file = part.partition(":=")
        if not separator or not file:
            raise UsageError(f"{where}: `{part}` is no `name:=file.raw`; name every file of the line or none")
        if name not in by_name:
            known = ", ".join(f"'{other}'" for other in list(by_name)[:8])
            raise UsageError(
                f"{where}: '{name}' is not an input of the model; remove it or rename it (inputs are {known})"
            )
        if name in entries:
            raise UsageError(f"{where}: input '{name}' is given twice; remove one")
        entries[name] = (by_name[name], file)
    return list(entries.values())


def _read(folder: Path, file: str, where: str, spec: InputSpec) -> NDArray[Any]:
    place = f"{where}: input '{spec.name}'"
    shape = spec.static_shape
    if shape is None or not spec.is_tensor or spec.dtype.hasobject:
        raise UsageError(f"{place} is {spec}; raw files need a static shape and numbers, give this sample as .npz")
    path = folder / file
    if not path.is_file():
        raise UsageError(f"{place}: there is no file '{file}' (paths are relative to the list's folder); mend the path")
    count = math.prod(shape)
    size = path.stat().st_size
    stored = _stored_type(spec, size, count)
    if stored is None:
        raise UsageError(
            f"{place}: '{file}' has {size} bytes, {spec} takes {count * spec.dtype.itemsize}"
            f"{_other(spec, size, count)}; write it again with array.tofile"
        )
    try:
        array = np.fromfile(path, dtype=stored).reshape(shape)
    except (OSError, ValueError):
        raise UsageError(f"{place}: '{file}' cannot be read; check it and its permissions") from None
    with np.errstate(over="ignore"):  # a value beyond float16 becomes infinite, which the checks refuse by name
        return array.astype(spec.dtype, copy=False)


def _stored_type(spec: InputSpec, size: int, count: int) -> np.dtype[Any] | None:
    """The element type that the file's size stands for; the QNN tools take float32 for every 16-bit float."""
    if size == count * spec.dtype.itemsize:
        return spec.dtype
    narrow = is_floating(spec.dtype) and spec.dtype.itemsize == 2
    return np.dtype(np.float32) if narrow and size == count * 4 else None


def _other(spec: InputSpec, size: int, count: int) -> str:
    for name in ("float32", "float64", "int32", "int64"):
        if size == count * np.dtype(name).itemsize and np.dtype(name).kind == spec.dtype.kind:
            return f" (it would fit {name})"
    return ""
