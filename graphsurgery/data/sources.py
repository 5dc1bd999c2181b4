"""Finds out what a data source is and lists its samples without reading them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from graphsurgery.data.npz import read_npz
from graphsurgery.data.raw import list_lines, read_raw_line
from graphsurgery.data.signature import InputSpec
from graphsurgery.data.synthetic import synthetic_sample
from graphsurgery.data.tensorproto import input_files, read_test_set
from graphsurgery.errors import UsageError

__all__ = ["ACCEPTED", "Record", "Source", "source_of_mappings", "source_of_path"]

ACCEPTED = (
    "a folder of .npz files, one .npz, an ONNX test_data_set_* folder or its parent, "
    "a QNN input_list.txt, or synthetic:N"
)
"""What `--data` takes, as messages say it."""

_MAX_SYNTHETIC = 1_000_000


@dataclass(frozen=True)
class Record:
    """One sample that has not been read yet; `where` names it in messages."""

    where: str
    load: Callable[[], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True)
class Source:
    """The samples of one `--data`; `description` holds no absolute path."""

    description: str
    records: tuple[Record, ...]
    synthetic: bool = False


def source_of_path(given: str | Path, specs: Sequence[InputSpec]) -> Source:
    """The samples behind a path or `synthetic:N`; raises UsageError that lists what is accepted."""
    text = str(given)
    if text.startswith("synthetic:"):
        return _synthetic(text, specs)
    path = Path(given)
    try:
        if path.is_dir():
            return _folder(path, text, specs)
        if path.is_file():
            return _file(path, text, specs)
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name too long, one with a NUL, a folder that may not be read
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"data source '{text[:200]}' cannot be read ({reason}); give {ACCEPTED}") from None
    problem = "is neither a file nor a folder" if exists else "does not exist"
    raise UsageError(f"data source '{text[:200]}' {problem}; give {ACCEPTED}")


def source_of_mappings(samples: Iterable[object]) -> Source:
    """Samples given in Python: mappings of input name to array.

    A list or tuple is kept as it is; what an iterator yields is copied, since generators like to reuse their buffers.
    """
    reused = not isinstance(samples, Sequence)
    records: list[Record] = []
    for index, sample in enumerate(samples):
        where = f"sample {index} of the given iterable"
        if not isinstance(sample, Mapping):
            raise UsageError(f"{where} is a {type(sample).__name__}; give mappings of input name to array, or paths")
        items = cast("Mapping[Any, object]", sample).items()
        arrays = {name: _as_array(where, name, value, copy=reused) for name, value in items}
        records.append(Record(where, partial(dict[str, NDArray[Any]], arrays)))
    return Source(f"iterable of {_count(records)}", tuple(records))


def _as_array(where: str, name: object, value: object, *, copy: bool) -> NDArray[Any]:
    if not isinstance(name, str):
        raise UsageError(f"{where}: the key {name!r} is no input name; give mappings of str to array")
    if not isinstance(value, np.ndarray | np.generic):
        kind = type(value).__name__
        raise UsageError(
            f"{where}: input '{name}' is a {kind}, no numpy array; wrap it in numpy.asarray(..., dtype=...)"
        )
    array = np.asarray(cast("object", value))
    return array.copy() if copy else array


def _synthetic(text: str, specs: Sequence[InputSpec]) -> Source:
    number = text.removeprefix("synthetic:")
    count = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
    if not 1 <= count <= _MAX_SYNTHETIC:
        raise UsageError(
            f"data source '{text[:200]}' needs a number of samples from 1 to {_MAX_SYNTHETIC}; write synthetic:8"
        )
    records = [Record(f"{text}, sample {index}", partial(synthetic_sample, specs, index)) for index in range(count)]
    return Source(text, tuple(records), synthetic=True)


def _file(path: Path, text: str, specs: Sequence[InputSpec]) -> Source:
    match path.suffix.lower():
        case ".npz":
            return Source(path.name, (_npz_record(path, text, specs),))
        case ".txt":
            return _input_list(path, text, specs)
        case ".npy":
            raise UsageError(f"data source '{text}' is a single array without a name; write np.savez(file, name=array)")
        case _:
            raise UsageError(f"data source '{text}' is of no known kind; give {ACCEPTED}")


def _folder(path: Path, text: str, specs: Sequence[InputSpec]) -> Source:
    npz = _visible(path.glob("*.npz"))
    sets = (
        [path] if input_files(path) else [child for child in _visible(path.glob("test_data_set_*")) if child.is_dir()]
    )
    lists = [path / "input_list.txt"] if (path / "input_list.txt").is_file() else []
    kinds = [kind for kind in (npz, sets, lists) if kind]
    if not kinds:
        raise UsageError(f"data folder '{text}' holds no samples; give {ACCEPTED}")
    if len(kinds) > 1:
        raise UsageError(
            f"data folder '{text}' holds samples of several kinds ({', '.join(kind[0].name for kind in kinds)}); "
            "point at one of them"
        )
    if lists:
        return _input_list(lists[0], f"{text}/input_list.txt", specs)
    if npz:
        records = [_npz_record(file, f"{text}/{file.name}", specs) for file in npz]
        return Source(f"folder of {_count(records)}, {npz[0].name} to {npz[-1].name}", tuple(records))
    shown = {child: text if child == path else f"{text}/{child.name}" for child in sets}
    empty = next((child for child in sets if not input_files(child)), None)
    if empty is not None:
        raise UsageError(f"data folder '{shown[empty]}' holds no input_0.pb; add the inputs or remove the folder")
    records = [Record(shown[child], partial(read_test_set, child, shown[child], specs)) for child in sets]
    return Source(f"test sets, {_count(records)}", tuple(records))


def _input_list(path: Path, text: str, specs: Sequence[InputSpec]) -> Source:
    places = [(f"{text}, line {number}", line) for number, line in list_lines(path, text)]
    records = [Record(where, partial(read_raw_line, line, path.parent, where, specs)) for where, line in places]
    return Source(f"{path.name}, {_count(records)}", tuple(records))


def _npz_record(path: Path, text: str, specs: Sequence[InputSpec]) -> Record:
    return Record(text, partial(read_npz, path, text, {spec.name: spec for spec in specs}))


def _visible(paths: Iterable[Path]) -> list[Path]:
    """Without hidden files, sorted so that 2.npz comes before 10.npz."""
    return sorted((path for path in paths if not path.name.startswith(".")), key=_natural)


def _natural(path: Path) -> tuple[list[tuple[int, str]], str]:
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part), "") if part.isdecimal() and part.isascii() else (-1, part) for part in parts], path.name


def _count(records: Sequence[Record]) -> str:
    return f"{len(records)} sample" + ("" if len(records) == 1 else "s")
