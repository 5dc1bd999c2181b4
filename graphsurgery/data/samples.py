"""The samples of a run: opened and checked once, read again whenever they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from graphsurgery.data.checks import check_sample
from graphsurgery.data.signature import InputSpec, is_string
from graphsurgery.data.sources import ACCEPTED, Record, Source, source_of_mappings, source_of_path
from graphsurgery.errors import UsageError

__all__ = ["Samples", "open_samples"]


@dataclass(frozen=True)
class Samples:
    """Samples in order, each a dict of input name to array; files are read anew on each access, so memory stays flat.

    `sources` describes where they come from, without absolute paths. `synthetic` says that at least one source is
    made up. `reused` is set on the held-out part of a single sample, which calibration has seen as well.
    """

    sources: tuple[str, ...]
    synthetic: bool
    reused: bool
    _records: tuple[Record, ...]
    _digests: tuple[bytes, ...]
    _specs: Mapping[str, InputSpec]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._records)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """The samples in order, one in memory at a time."""
        return (self._load(record) for record in self._records)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """One sample."""
        return self._load(self._records[index])

    @property
    def sha256(self) -> str:
        """Hash over names, element types, shapes and bytes of all samples; the file format does not enter."""
        return hashlib.sha256(b"".join(self._digests)).hexdigest()

    def split(self) -> tuple[Samples, Samples]:
        """Calibration and held-out samples: the last quarter, at least one, is held out.

        A single sample serves for both, and the held-out part then has `reused` set.
        """
        count = len(self)
        if count == 1:
            return self, replace(self, reused=True)
        first_held_out = count - max(1, count // 4)
        return self._part(slice(None, first_held_out)), self._part(slice(first_held_out, None))

    def _part(self, part: slice) -> Samples:
        return replace(self, _records=self._records[part], _digests=self._digests[part])

    def _load(self, record: Record) -> dict[str, NDArray[Any]]:
        return check_sample(record.where, record.load(), self._specs)


def open_samples(
    sources: str | Path | Sequence[str | Path] | Iterable[Mapping[str, NDArray[Any]]],
    specs: tuple[InputSpec, ...],
    *,
    max_samples: int | None = None,
) -> Samples:
    """Opens data sources (paths, `synthetic:N`) or takes samples given in Python, at most `max_samples` in all.

    Every sample is read and checked once, so that a run does not stop at the last of many. Raises UsageError that
    names source, sample and input.
    """
    if max_samples is not None and max_samples < 1:
        raise UsageError(f"max_samples is {max_samples}; give at least 1")
    opened = _open(sources, specs, max_samples)
    records = tuple(islice((record for source in opened for record in source.records), max_samples))
    if not records:
        raise UsageError(f"there are no samples; give {ACCEPTED}")
    by_name = {spec.name: spec for spec in specs}
    digests = tuple(_digest(check_sample(record.where, record.load(), by_name)) for record in records)
    return Samples(
        sources=tuple(source.description for source in opened),
        synthetic=any(source.synthetic for source in opened),
        reused=False,
        _records=records,
        _digests=digests,
        _specs=by_name,
    )


def _open(sources: object, specs: tuple[InputSpec, ...], max_samples: int | None) -> list[Source]:
    if isinstance(sources, str | Path):
        return [source_of_path(sources, specs)]
    if isinstance(sources, Mapping):
        return [source_of_mappings([cast("object", sources)])]
    if not isinstance(sources, Iterable):
        raise UsageError(f"data is a {type(sources).__name__}; give {ACCEPTED}, or mappings of input name to array")
    items = cast("Iterable[object]", sources)
    if isinstance(items, Sequence):
        paths = [item for item in items if isinstance(item, str | Path)]
        if paths and len(paths) == len(items):
            return [source_of_path(path, specs) for path in paths]
        return [source_of_mappings(items[:max_samples])]
    return [source_of_mappings(islice(items, max_samples))]


def _digest(sample: Mapping[str, NDArray[Any]]) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(sample.items()):
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(repr((name, array.dtype.name, array.shape)).encode())
        if is_string(array.dtype):
            digest.update(repr([str(text) for text in array.flat]).encode())
        else:
            digest.update(np.asarray(little, order="C").tobytes())
    return digest.digest()
