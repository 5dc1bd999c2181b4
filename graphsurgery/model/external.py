"""Tensors whose data lives in files beside the model: find them and check where they point.

The data itself is never read to load or rewrite a model.  A location is a relative path with `/`, inside the folder
of the model; runtimes refuse anything else, and so does `check_locations`, by name.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto

from graphsurgery.errors import UsageError
from graphsurgery.model.atomic import one_line, reason

__all__ = ["check_locations", "external_tensors", "may_hold_external"]

# Operators of the default domain that hold a tensor or a graph as an attribute; for other domains every node is read.
_HOLDERS = frozenset({"Constant", "ConstantOfShape", "If", "Loop", "Scan", "SequenceMap"})
_BLOCK = 1 << 20
_DRIVE = re.compile(r"[A-Za-z]:")
_DIGITS = 18
_WIDTH = re.compile(r"[0-9]+")


class _Found(NamedTuple):
    """An external tensor and what holds it: nothing else (an initializer), a sparse tensor, or an attribute of a node.

    The words for a message are made when one is needed; a model may have tens of thousands of external tensors.
    """

    tensor: TensorProto
    holder: SparseTensorProto | NodeProto | FunctionProto | None = None
    attribute: str = ""


class _Refused(Exception):  # noqa: N818 - a refusal on its way to the caller that knows the tensor's name
    """What is wrong with one tensor, as the rest of a sentence that begins with its name."""


def external_tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every tensor with external data, in the order of the file.

    Initializers and sparse initializers of the main graph, of nested graphs and of training graphs, tensors in
    attributes (a Constant's `value` may be external), model-local functions and the defaults of their attributes.
    """
    for found in _found(proto):
        yield found.tensor


def may_hold_external(raw: bytes) -> bool:
    """Whether the bytes of a model can hold a tensor with a location; False is certain, True is not.

    `data_location = EXTERNAL` is written as the two bytes 0x70 0x01; looking for them costs a fraction of a walk over
    the nodes.  Weights stored in the file hold them by chance, so the key of a location is looked for too.
    """
    return _is_marked(raw) and b"location" in raw


def _is_marked(raw: bytes) -> bool:
    for start in range(0, len(raw), _BLOCK):
        for first in (start, start + 1):
            count = min(_BLOCK, len(raw) - first) // 2
            if count > 0 and bool((np.frombuffer(raw, "<u2", count, first) == 0x0170).any()):
                return True
    return False


def _found(proto: onnx.ModelProto) -> Iterator[_Found]:
    yield from _of_graph(proto.graph)
    for function in proto.functions:
        yield from _of_attributes(function, function.attribute_proto)
        yield from _of_nodes(function.node)
    for training in proto.training_info:
        yield from _of_graph(training.initialization)
        yield from _of_graph(training.algorithm)


def _of_graph(graph: GraphProto) -> Iterator[_Found]:
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            yield _Found(tensor)
    for sparse in graph.sparse_initializer:
        for tensor in (sparse.values, sparse.indices):
            if tensor.data_location == TensorProto.EXTERNAL:
                yield _Found(tensor, sparse)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[NodeProto]) -> Iterator[_Found]:
    for node in nodes:
        if node.op_type in _HOLDERS or node.domain:
            yield from _of_attributes(node, node.attribute)


def _of_attributes(holder: NodeProto | FunctionProto, attributes: Iterable[AttributeProto]) -> Iterator[_Found]:
    for attribute in attributes:
        kind = attribute.type
        if kind in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            for graph in (attribute.g, *attribute.graphs):
                yield from _of_graph(graph)
            continue
        if kind in (AttributeProto.TENSOR, AttributeProto.TENSORS):
            tensors = (attribute.t, *attribute.tensors)
        elif kind in (AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS):
            sparse = (attribute.sparse_tensor, *attribute.sparse_tensors)
            tensors = tuple(part for tensor in sparse for part in (tensor.values, tensor.indices))
        else:
            continue
        for tensor in tensors:
            if tensor.data_location == TensorProto.EXTERNAL:
                yield _Found(tensor, holder, attribute.name)


def _described(found: _Found) -> str:
    match found.holder:
        case None:
            return f"tensor '{one_line(found.tensor.name)}'"
        case SparseTensorProto():
            return f"sparse tensor '{one_line(found.holder.values.name)}'"
        case FunctionProto():
            owner = f"function '{one_line(found.holder.name)}'"
        case NodeProto():
            name = found.holder.name or next(iter(found.holder.output), "")
            owner = f"{one_line(found.holder.op_type)} node '{one_line(name)}'"
    return f"attribute '{one_line(found.attribute)}' of {owner}"


def check_locations(
    proto: onnx.ModelProto, folder: Path | None, label: str, *, model_path: Path | None = None
) -> tuple[str, ...]:
    """Check every external tensor of a model; the distinct locations, in the order of the file.

    `folder` is where the data files are; None (a model from a stream or from memory) checks the locations as text
    alone.  `model_path` is the model file: where it is itself a link, as in a download cache that keeps all files of a
    model in one folder of blobs, data files may be links into the folder that the model file really lies in.

    Raises UsageError, naming the tensor and the location, for a location that is empty, absolute, has `..`, a
    backslash or a NUL, is a link to outside, is missing or is no regular file, and for an offset or a length that is
    not a number or lies outside of the file.
    """
    sizes: dict[str, int] = {}
    for found in _found(proto):
        try:
            fields = _fields(found.tensor)
            location = fields.get("location", "")
            if location not in sizes:
                sizes[location] = _size(folder, location, model_path)
            _check_range(fields, found.tensor, sizes[location])
        except _Refused as refused:
            raise UsageError(f"{label}: {_described(found)} {refused}") from None
    return tuple(sizes)


def _fields(tensor: TensorProto) -> dict[str, str]:
    fields = {entry.key: entry.value for entry in tensor.external_data}
    # Readers differ in which of two entries they take: one could be checked and the other one opened.
    if len(fields) != len(tensor.external_data):
        keys = [entry.key for entry in tensor.external_data]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Refused(f"states the {one_line(twice)} of its data twice; export the model again")
    return fields


def _size(folder: Path | None, location: str, model_path: Path | None) -> int:
    """Size in bytes of a data file that is there, regular and inside the folder; -1 where the folder is unknown."""
    about = f"has its data in '{one_line(location)}'"
    fault = _fault(location)
    if fault is not None:
        raise _Refused(f"{about}: {fault}; the location must be a relative path inside the folder of the model")
    if folder is None:
        return -1
    path = folder / location
    real = Path(os.path.realpath(path))
    beside_model = None if model_path is None else Path(os.path.realpath(model_path)).parent
    if not real.is_relative_to(os.path.realpath(folder)) and real.parent != beside_model:
        raise _Refused(f"{about}: a link leads out of the folder of the model; put the file itself there")
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _Refused(f"{about}: no such file in {one_line(folder)}; put the file beside the model") from None
    except OSError as error:
        raise _Refused(f"{about}: the file cannot be read: {reason(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise _Refused(f"{about}: that is not a file")
    return status.st_size


def _fault(location: str) -> str | None:
    """Why a location is refused as text, or None."""
    if not location:
        return "the location is empty"
    if not isinstance(location, str):  # pyright: ignore[reportUnnecessaryIsInstance] - what protobuf makes of bad UTF-8
        return "the location is not UTF-8"
    if "\0" in location:
        return "the location has a NUL character"
    if "\\" in location:
        return "the location has a backslash (ONNX separates folders with /)"
    if location.startswith("/") or _DRIVE.match(location):
        return "the location is absolute"
    if ".." in location.split("/"):
        return "the location has '..'"
    return None


def _check_range(fields: dict[str, str], tensor: TensorProto, size: int) -> None:
    """Offset, length and declared shape against the `size` of the file in bytes (negative: unknown)."""
    offset = _number(fields, "offset") or 0
    length = _number(fields, "length")
    declared = _declared_bytes(tensor)
    if length is not None and length < declared:
        where = one_line(fields["location"])
        raise _Refused(f"needs {declared} bytes but its length in '{where}' is {length}; export the model again")
    end = offset + (declared if length is None else length)
    if 0 <= size < end:
        raise _Refused(
            f"needs bytes {offset} to {end} of '{one_line(fields['location'])}', which has {size}; "
            "the file is truncated or belongs to another model"
        )


def _number(fields: dict[str, str], key: str) -> int | None:
    text = fields.get(key)
    if text is None:
        return None
    # int() would also take signs, spaces, underscores and the digits of other scripts.
    if not (text.isdigit() and text.isascii() and len(text) <= _DIGITS):
        raise _Refused(f"has {key} '{one_line(text)}', which is not a non-negative integer; export the model again")
    return int(text)


def _bits(name: str) -> int:
    """Bits of one element, from the name of its type; 0 where there is no fixed size."""
    width = _WIDTH.search(name)
    return int(width.group()) if width else {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}.get(name, 0)


_BITS = {number: _bits(name) for name, number in TensorProto.DataType.items()}


def _declared_bytes(tensor: TensorProto) -> int:
    """Bytes that dims and element type ask for; 0 where the type has no fixed size or is unknown."""
    return (math.prod(tensor.dims) * _BITS.get(tensor.data_type, 0) + 7) // 8
