"""ONNX test sets: folders of `input_0.pb`, `input_1.pb`, ... as the ONNX backend tests have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import numpy_helper

from graphsurgery.data.signature import InputSpec
from graphsurgery.errors import UsageError

__all__ = ["input_files", "read_test_set"]


def input_files(folder: Path) -> list[Path]:
    """The `input_N.pb` of a test set in the order of N; `output_N.pb` are not needed."""
    numbered = [(file.stem.removeprefix("input_"), file) for file in folder.glob("input_*.pb")]
    return [file for _, file in sorted((int(n), file) for n, file in numbered if n.isascii() and n.isdigit())]


def read_test_set(folder: Path, shown: str, specs: Sequence[InputSpec]) -> dict[str, NDArray[Any]]:
    """The arrays of one test set by input name.

    A tensor that carries the name of an input is taken for that input; the others follow the order of the graph
    inputs, where those with a default value count only if there are files for all. Raises UsageError.
    """
    files = input_files(folder)
    required = [spec for spec in specs if not spec.optional]
    ordered = specs if len(files) > len(required) else required
    names = {spec.name for spec in specs}
    sample: dict[str, NDArray[Any]] = {}
    for file in files:
        place = f"{shown}/{file.name}"
        tensor = _parse(file, place)
        position = int(file.stem.removeprefix("input_"))
        if tensor.name in names:
            name = tensor.name
        elif position < len(ordered):
            name = ordered[position].name
        else:
            raise UsageError(f"{place}: the model has only {len(ordered)} inputs; remove this file")
        if name in sample:
            raise UsageError(f"{place}: input '{name}' is given twice; name the tensors after the inputs")
        sample[name] = _array(tensor, place, name)
    return sample


def _parse(file: Path, place: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(file.read_bytes())
    except (DecodeError, OSError):
        raise UsageError(
            f"{place}: is not a readable TensorProto; write it again with onnx.numpy_helper.from_array"
        ) from None
    return tensor


def _array(tensor: onnx.TensorProto, place: str, name: str) -> NDArray[Any]:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise UsageError(f"{place}: input '{name}' keeps its data in another file; save it with the data inside")
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        raise UsageError(
            f"{place}: input '{name}' is damaged (type {tensor.data_type}, dims {list(tensor.dims)}, "
            f"{len(tensor.raw_data)} raw bytes); write it again with onnx.numpy_helper.from_array"
        ) from None
