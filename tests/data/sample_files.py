"""Samples and files for the tests of data sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from graphsurgery.data import InputSpec, open_samples
from graphsurgery.errors import UsageError

Sample = dict[str, NDArray[Any]]


def sample(seed: int = 0, *, batch: int = 2, seq: int = 3) -> Sample:
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, 9, (batch, seq)),
        "attention_mask": np.ones((batch, seq), np.float32),
        "state": rng.standard_normal((batch, 4)).astype(np.float32),
    }


def folder_of(path: Path, *samples: Sample) -> Path:
    path.mkdir(exist_ok=True)
    for index, arrays in enumerate(samples):
        np.savez(path / f"{index}.npz", **arrays)
    return path


def refusal(source: object, specs: tuple[InputSpec, ...]) -> str:
    """The message with which a source is refused; one line, without a traceback in it."""
    with pytest.raises(UsageError) as caught:
        open_samples(source, specs)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_same(left: Sample, right: Sample) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        np.testing.assert_array_equal(array, right[name], strict=True)
