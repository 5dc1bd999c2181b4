"""Load a model without its external data, and save it whole or not at all."""

from __future__ import annotations

import hashlib
import math
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import GraphProto, TensorProto

from graphsurgery.errors import UsageError
from graphsurgery.model.atomic import atomic_file, one_line, reason, write_bytes_atomically, write_text_atomically
from graphsurgery.model.external import check_locations, may_hold_external
from graphsurgery.model.placement import PlacedFile, Progress, place_external, remove_placed
from graphsurgery.options import External

__all__ = ["SourceModel", "load_model", "save_model", "write_bytes_atomically", "write_text_atomically"]

_LARGEST = (1 << 31) - 1
_RAW_KEPT = 1 << 26
_BLOCK = 1 << 24
_INITIALIZERS_CHECKED = 2000
_TEXT_SUFFIXES = frozenset({".json", ".onnxjson", ".textproto", ".prototxt", ".pbtxt", ".onnxtxt", ".onnxtext"})
_DEFAULT_DOMAINS = ("", "ai.onnx")
_STREAM = "-"


@dataclass(frozen=True)
class SourceModel:
    """A model as it was read."""

    proto: onnx.ModelProto
    """Parsed from the bytes; for a model from memory the caller's own object, not a copy."""

    raw: bytes | None
    """The bytes `proto` was parsed from; None for a model from memory, and for a file above 64 MiB, which is read
    again where its bytes are needed (keeping them would hold all weights twice)."""

    path: Path | None
    """The file, as it was given; None for a stream or memory."""

    folder: Path | None
    """Where the data files of the model are; None for a stream or memory."""

    label: str
    """Name for messages: the path as given, `<stdin>` or `<memory>`."""

    digest: str = ""
    """SHA-256 in hex where `raw` is None."""

    may_hold_external: bool = True
    """Whether tensors may have their data in files of their own; False is certain."""

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the bytes in hex; for a model from memory that of its serialised form as it was given."""
        return self.digest if self.raw is None else _sha256(self.raw)


def load_model(source: str | os.PathLike[str] | onnx.ModelProto | bytes) -> SourceModel:
    """Read a model from a file, from stdin (`-`), from bytes or from memory; external data is checked, not read.

    Raises UsageError where the file is missing, a folder, unreadable, empty, truncated, not binary ONNX or larger than
    2 GiB; where the model has no IR version, no opset of the default operators or a newer one than the installed onnx
    knows; where a tensor declares more elements than the file can hold; and for external data that
    `graphsurgery.model.external.check_locations` refuses.
    """
    if isinstance(source, onnx.ModelProto):
        raw = _serialised(source, "<memory>")
        model = SourceModel(source, None, None, None, "<memory>", _sha256(raw))
        _check(model, raw)
        return model
    if isinstance(source, bytes):
        return _parsed(source, None, "<memory>")
    name = os.fspath(source)
    if name == _STREAM:
        return _parsed(_read_stdin(), None, "<stdin>")
    path = Path(name)
    return _parsed(_read(path), path, one_line(name))


def _read(path: Path) -> bytes:
    label = one_line(path)
    # The readers of onnx take these suffixes for text, so a binary model under such a name is a mistake too.
    if path.suffix.lower() in _TEXT_SUFFIXES:
        raise UsageError(f"{label}: models as text ({path.suffix}) are not read; save it as binary .onnx first")
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_size > _LARGEST:
                raise _too_large(label)
            return stream.read() if stat.S_ISREG(status.st_mode) else _drained(stream)
    except FileNotFoundError:
        raise UsageError(f"{label}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"{label}: is a folder; give the .onnx file in it") from None
    except OSError as error:
        raise UsageError(f"{label}: cannot be read: {reason(error)}") from error
    except ValueError:
        raise UsageError(f"{label}: no such file (the name has a NUL character)") from None


def _read_stdin() -> bytes:
    try:
        return _drained(sys.stdin.buffer)
    except OSError as error:
        raise UsageError(f"<stdin>: cannot be read: {reason(error)}") from error


def _drained(stream: BinaryIO) -> bytes:
    """All bytes of a stream, up to the first beyond what protobuf parses (a device may have no end)."""
    first = stream.read(_BLOCK)
    if len(first) < _BLOCK:
        return first
    blocks = [first]
    total = len(first)
    while total <= _LARGEST and (block := stream.read(_BLOCK)):
        blocks.append(block)
        total += len(block)
    return b"".join(blocks)


def _too_large(label: str) -> UsageError:
    return UsageError(f"{label}: larger than 2 GiB, the limit of the format; store the weights as external data")


def _parsed(raw: bytes, path: Path | None, label: str) -> SourceModel:
    if not raw:
        raise UsageError(f"{label}: is empty; expected an ONNX model")
    if len(raw) > _LARGEST:
        raise _too_large(label)
    kept = path is None or len(raw) <= _RAW_KEPT or not path.is_file()
    # The digest of large weights takes as long as parsing them; hashlib lets go of the interpreter lock meanwhile.
    with ThreadPoolExecutor(1) as pool:
        pending = None if kept else pool.submit(_sha256, raw)
        try:
            proto = onnx.ModelProto.FromString(raw)
        except DecodeError:
            raise UsageError(f"{label}: {_damage(raw)}") from None
        digest = "" if pending is None else pending.result()
    folder = None if path is None else path.parent
    marked = may_hold_external(raw)
    model = SourceModel(proto, raw if kept else None, path, folder, label, digest, marked)
    _check(model, raw)
    return model


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _damage(raw: bytes) -> str:
    """Why bytes do not parse: a Git LFS pointer, a truncated model, or something else."""
    if raw.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the model; fetch the file with `git lfs pull`"
    missing = _missing_bytes(raw)
    if missing:
        return f"is truncated ({missing} or more bytes are missing at its end); copy or download it again"
    return "is not an ONNX model, or is damaged"


def _missing_bytes(raw: bytes) -> int:
    """How many bytes the last field of the message lacks, 0 where the bytes are no beginning of a model."""
    fields = onnx.ModelProto.DESCRIPTOR.fields_by_number
    position, complete = 0, 0
    while position < len(raw):
        key, position = _varint(raw, position)
        if key >> 3 not in fields or key & 7 not in (0, 2):
            return 0
        length, position = _varint(raw, position)
        if key & 7 == 2:
            position += length
        complete += position <= len(raw)
    return position - len(raw) if complete else 0


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """The protobuf number at `position` and the position behind it (beyond the end where bytes are missing)."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(raw):
            return value, len(raw) + 1
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, position


def _check(model: SourceModel, raw: bytes) -> None:
    proto, label = model.proto, model.label
    # Bytes of another kind may parse: protobuf keeps what it does not know and calls the rest absent.
    graph = proto.graph
    if not (proto.HasField("graph") and (graph.node or graph.input or graph.initializer)):
        raise UsageError(f"{label}: is not an ONNX model (it holds no graph)")
    if proto.ir_version < 1:
        raise UsageError(f"{label}: states no IR version; it is damaged or no ONNX model, export it again")
    _check_opset(proto, label)
    _check_initializers(graph, len(raw), label)
    if model.may_hold_external:
        check_locations(proto, model.folder, label, model_path=model.path)


def _check_opset(proto: onnx.ModelProto, label: str) -> None:
    known = onnx.defs.onnx_opset_version()
    versions = {entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS}
    if not versions:
        raise UsageError(f"{label}: states no opset of the default ONNX operators; export it again")
    if len(versions) > 1:
        stated = ", ".join(str(version) for version in sorted(versions))
        raise UsageError(f"{label}: states several opsets of the default ONNX operators ({stated}); export it again")
    imports = (*proto.opset_import, *(entry for function in proto.functions for entry in function.opset_import))
    for entry in imports:
        if entry.domain in _DEFAULT_DOMAINS and not 1 <= entry.version <= known:
            raise UsageError(
                f"{label}: uses opset {entry.version} of the default ONNX operators; the installed onnx "
                f"{onnx.__version__} knows 1 to {known}; export with one of these or upgrade onnx"
            )


def _check_initializers(graph: GraphProto, size: int, label: str) -> None:
    """Refuse a tensor that has its data nowhere, or declares more than `size` bytes can hold (two bits each at least).

    Both are courtesies: nobody reads such a tensor, and readers of constants bound their size themselves.  Half a
    microsecond per tensor would slow the load of a large graph, so that is spared it.
    """
    if len(graph.initializer) > _INITIALIZERS_CHECKED:
        return
    for tensor in graph.initializer:
        outside = tensor.data_location == TensorProto.EXTERNAL
        if outside and not tensor.external_data:
            name = one_line(tensor.name)
            raise UsageError(f"{label}: tensor '{name}' has its data in '': the location is empty; export it again")
        if not outside and math.prod(tensor.dims) > 4 * size:
            dims = "x".join(str(dim) for dim in tensor.dims)
            raise UsageError(
                f"{label}: tensor '{one_line(tensor.name)}' declares {one_line(dims)} elements, "
                "more than the file holds; it is damaged, export it again"
            )


def save_model(
    proto: onnx.ModelProto,
    target: str | os.PathLike[str],
    *,
    source: SourceModel,
    external: External = "keep",
    unchanged: bool = False,
    progress: Progress | None = None,
) -> list[PlacedFile]:
    """Write a model whole or not at all, with its data files beside it; what became of each data file.

    `source` is what `proto` was made from: it says where the data files are.  `unchanged` writes the bytes of the
    source instead of serialising `proto`.  The target may be the source itself.  `external` and the data files: see
    `graphsurgery.model.placement.place_external`; they are placed first and removed again if the model cannot be
    written.  To stdout (`-`) and to devices the model goes alone, its references as they are.

    Raises UsageError where the target cannot be written (see `graphsurgery.model.atomic.atomic_file`), has the name of
    a text format, or is one of the data files; where a data file cannot be placed; where the model is larger than
    2 GiB; and where `unchanged` is asked for and the source file is no longer the one that was read.
    """
    data = _original(source) if unchanged else None
    if data is None:
        data = _serialised(proto, source.label)
    name = os.fspath(target)
    if name == _STREAM:
        _write_stdout(data)
        return []
    path = Path(name)
    if path.suffix.lower() in _TEXT_SUFFIXES:
        raise UsageError(
            f"cannot write {one_line(name)}: models are not written as text; use a name that ends in .onnx"
        )
    placed: list[PlacedFile] = []
    try:
        # The model's temporary file comes first: it shows that the folder can be written before weights are copied.
        with atomic_file(path) as stream:
            if source.may_hold_external and may_hold_external(data) and (path.is_file() or not path.exists()):
                placed += place_external(
                    proto,
                    source.folder,
                    path,
                    external,
                    label=source.label,
                    model_path=source.path,
                    progress=progress,
                )
            stream.write(data)
    except BaseException:
        remove_placed(placed)
        raise
    return placed


def _original(source: SourceModel) -> bytes | None:
    """The bytes the source was parsed from; None for a model from memory."""
    if source.raw is not None or source.path is None:
        return source.raw
    raw = _read(source.path)
    if _sha256(raw) != source.sha256:
        raise UsageError(f"{source.label}: the file has changed since it was read; start again")
    return raw


def _serialised(proto: onnx.ModelProto, label: str) -> bytes:
    try:
        data = proto.SerializeToString()
    except EncodeError:
        raise _too_large(label) from None
    if len(data) > _LARGEST:
        raise _too_large(label)
    return data


def _write_stdout(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise UsageError(f"cannot write to stdout: {reason(error)}") from error
