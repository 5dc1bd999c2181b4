from __future__ import annotations

import errno
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_files import WEIGHTS, Streams, run
from onnx import TensorProto

from graphsurgery.errors import UsageError
from graphsurgery.model import files
from graphsurgery.model.files import load_model, save_model


def test_load_a_file(plain: Path) -> None:
    model = load_model(plain)
    raw = plain.read_bytes()
    assert model.proto == onnx.load(plain)
    assert (model.raw, model.path, model.folder, model.label) == (raw, plain, plain.parent, str(plain))
    assert model.sha256 == hashlib.sha256(raw).hexdigest()
    assert load_model(str(plain)).proto == model.proto


def test_load_leaves_external_data_alone(split: Path) -> None:
    model = load_model(split)
    assert [tensor.data_location for tensor in model.proto.graph.initializer] == [TensorProto.EXTERNAL] * 2
    assert model.proto.SerializeToString() == split.read_bytes()


def test_load_a_file_of_the_current_folder(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(split.parent)
    model = load_model("m.onnx")
    assert (model.folder, model.label) == (Path(), "m.onnx")


def test_load_and_save_from_a_download_cache(split: Path, tmp_path: Path, out: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    (snapshot / "data").mkdir(parents=True)
    split.rename(blobs / "1111")
    (split.parent / "data" / "w.bin").rename(blobs / "2222")
    (snapshot / "m.onnx").symlink_to("../../blobs/1111")
    (snapshot / "data" / "w.bin").symlink_to("../../../blobs/2222")
    model = load_model(snapshot / "m.onnx")
    assert model.folder == snapshot
    assert [entry.how for entry in save_model(model.proto, out / "m.onnx", source=model)] == ["copied"]
    assert np.array_equal(run(out / "m.onnx"), WEIGHTS.reshape(3, 8).sum(0))


def test_load_bytes_and_stdin(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = split.read_bytes()
    monkeypatch.setattr(sys, "stdin", Streams(raw))
    for model, label in ((load_model(raw), "<memory>"), (load_model("-"), "<stdin>")):
        assert (model.raw, model.path, model.folder, model.label) == (raw, None, None, label)
        assert model.sha256 == hashlib.sha256(raw).hexdigest()
        assert model.proto.SerializeToString() == raw


def test_load_from_memory_takes_the_object_itself(plain: Path) -> None:
    proto = onnx.load(plain)
    model = load_model(proto)
    assert model.proto is proto
    assert (model.raw, model.path, model.folder, model.label) == (None, None, None, "<memory>")
    digest = hashlib.sha256(proto.SerializeToString()).hexdigest()
    proto.producer_name = "changed later"
    assert model.sha256 == digest


@pytest.mark.parametrize(("content", "message"), [(b"", "<stdin>: is empty"), (b"abc", "<stdin>: is not an ONNX")])
def test_refuse_stdin_by_that_name(content: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Streams(content))
    with pytest.raises(UsageError, match=message):
        load_model("-")


def test_refuse_a_file_without_permission(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Asked of the system, the answer would be the content where the tests run as root.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"m\.onnx: cannot be read: Permission denied"):
        load_model(plain)


def test_refuse_more_than_protobuf_parses(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = plain.stat().st_size
    monkeypatch.setattr(files, "_LARGEST", size)
    model = load_model(plain)
    monkeypatch.setattr(files, "_LARGEST", size - 1)
    monkeypatch.setattr(sys, "stdin", Streams(plain.read_bytes()))
    for source in (plain, plain.read_bytes(), "-", model.proto):
        with pytest.raises(UsageError, match=r"larger than 2 GiB.*external data"):
            load_model(source)


class _Endless(io.BytesIO):
    """Zeros for as long as a reader with a bound of 1 MiB may ask."""

    given = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert size > 0
        assert self.given <= 1 << 20
        self.given += size
        return bytes(size)


def test_stop_reading_a_stream_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = Streams()
    stdin.buffer = _Endless()
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(files, "_BLOCK", 1 << 10)
    monkeypatch.setattr(files, "_LARGEST", 1 << 20)
    with pytest.raises(UsageError, match="<stdin>: larger than 2 GiB"):
        load_model("-")


def test_load_a_pipe_in_several_blocks(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK", 100)
    monkeypatch.setattr(files, "_RAW_KEPT", 10)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    raw = plain.read_bytes()
    with subprocess.Popen([sys.executable, "-c", _FEED, str(plain), str(pipe)]):
        model = load_model(pipe)
    assert (model.raw, model.path) == (raw, pipe)


_FEED = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_bytes(pathlib.Path(sys.argv[1]).read_bytes())"
