from __future__ import annotations

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper

from graphsurgery.errors import UsageError
from graphsurgery.model import files
from graphsurgery.model.files import load_model, save_model

_WEIGHTS = np.arange(24, dtype=np.float32)


class _Streams:
    """Stands in for sys.stdin and sys.stdout."""

    def __init__(self, content: bytes = b"") -> None:
        self.buffer = io.BytesIO(content)


def _external(name: str, offset: int, location: str = "data/w.bin") -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[8], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", str(offset)), ("length", "32")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _model(*initializers: TensorProto) -> onnx.ModelProto:
    """y = x + a + b + c; c is the `value` of a Constant node."""
    a, b, c = initializers
    nodes = [
        helper.make_node("Constant", [], ["c"], name="constant", value=c),
        helper.make_node("Add", ["x", "a"], ["xa"], name="add_a"),
        helper.make_node("Add", ["xa", "b"], ["xab"], name="add_b"),
        helper.make_node("Add", ["xab", "c"], ["y"], name="add_c"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [8])], [value("y", TensorProto.FLOAT, [8])], [a, b]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.metadata_props.add(key="origin", value="tests")
    return model


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model with its weights inside."""
    tensors = [
        helper.make_tensor(name, TensorProto.FLOAT, [8], _WEIGHTS[i * 8 : i * 8 + 8]) for i, name in enumerate("abc")
    ]
    path = tmp_path / "in" / "m.onnx"
    path.parent.mkdir()
    path.write_bytes(_model(*tensors).SerializeToString())
    return path


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A model with three tensors in one file of a sub folder, at different offsets."""
    path = tmp_path / "split" / "m.onnx"
    (path.parent / "data").mkdir(parents=True)
    (path.parent / "data" / "w.bin").write_bytes(_WEIGHTS.tobytes())
    model = _model(_external("a", 64), _external("b", 0), _external("", 32))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _run(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.zeros(8, np.float32)})
    assert isinstance(result, np.ndarray)
    return result


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _renamed(proto: onnx.ModelProto) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    changed.producer_name = "renamed"
    return changed


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
    assert [entry.how for entry in save_model(model.proto, out / "m.onnx", source=model)] == ["linked"]
    assert np.array_equal(_run(out / "m.onnx"), _WEIGHTS.reshape(3, 8).sum(0))


def test_load_bytes_and_stdin(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = split.read_bytes()
    monkeypatch.setattr(sys, "stdin", _Streams(raw))
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
    monkeypatch.setattr(sys, "stdin", _Streams(content))
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
    monkeypatch.setattr(sys, "stdin", _Streams(plain.read_bytes()))
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
    stdin = _Streams()
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


@pytest.mark.parametrize("unchanged", [True, False])
def test_save_gives_what_was_asked_for(plain: Path, out: Path, unchanged: bool) -> None:
    # A field that the installed onnx does not know, and an order of fields that it would not write itself.
    raw = b"\xa2\x06\x03new" + plain.read_bytes()
    plain.write_bytes(raw)
    model = load_model(plain)
    assert save_model(_renamed(model.proto), out / "m.onnx", source=model, unchanged=unchanged) == []
    saved = (out / "m.onnx").read_bytes()
    assert (saved == raw) == unchanged
    assert b"\xa2\x06\x03new" in saved
    assert load_model(out / "m.onnx").proto.producer_name == ("" if unchanged else "renamed")
    assert _names(out) == ["m.onnx"]


def test_unchanged_bytes_of_a_large_file_are_read_again(
    plain: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_RAW_KEPT", 10)
    raw = b"\xa2\x06\x03new" + plain.read_bytes()
    plain.write_bytes(raw)
    model = load_model(plain)
    assert model.raw is None
    assert model.sha256 == hashlib.sha256(raw).hexdigest()
    save_model(model.proto, out / "m.onnx", source=model, unchanged=True)
    assert (out / "m.onnx").read_bytes() == raw
    save_model(model.proto, plain, source=model, unchanged=True)
    assert plain.read_bytes() == raw
    plain.write_bytes(raw + b"\xa2\x06\x03new")
    with pytest.raises(UsageError, match="has changed since it was read"):
        save_model(model.proto, out / "m.onnx", source=model, unchanged=True)
    assert (out / "m.onnx").read_bytes() == raw


def test_unchanged_from_memory_is_serialised(plain: Path, out: Path) -> None:
    model = load_model(onnx.load(plain))
    save_model(model.proto, out / "m.onnx", source=model, unchanged=True)
    assert load_model(out / "m.onnx").proto == model.proto


@pytest.mark.parametrize("unchanged", [True, False])
def test_save_over_the_input(split: Path, unchanged: bool) -> None:
    before, raw = _names(split.parent), split.read_bytes()
    for _ in range(2):
        model = load_model(split)
        save_model(model.proto, split, source=model, unchanged=unchanged, external="copy")
    assert split.read_bytes() == raw
    assert _names(split.parent) == before
    assert np.array_equal(_run(split), _WEIGHTS.reshape(3, 8).sum(0))


@pytest.mark.parametrize("external", ["keep", "copy"])
def test_save_elsewhere_runs_there(split: Path, out: Path, external: Literal["keep", "copy"]) -> None:
    model = load_model(split)
    for expected in (["linked" if external == "keep" else "copied"], ["present"]):
        placed = save_model(_renamed(model.proto), out / "m.onnx", source=model, external=external)
        assert [entry.how for entry in placed] == expected
        assert _names(out) == ["data", "data/w.bin", "m.onnx"]
        assert (out / "data" / "w.bin").samefile(split.parent / "data" / "w.bin") == (external == "keep")
        assert np.array_equal(_run(out / "m.onnx"), _WEIGHTS.reshape(3, 8).sum(0))
    (initializer, *_) = load_model(out / "m.onnx").proto.graph.initializer
    assert initializer == model.proto.graph.initializer[0]


def test_the_copy_does_not_need_the_original(split: Path, out: Path) -> None:
    model = load_model(split)
    save_model(model.proto, out / "m.onnx", source=model, external="copy")
    (split.parent / "data" / "w.bin").write_bytes(bytes(96))
    assert np.array_equal(_run(out / "m.onnx"), _WEIGHTS.reshape(3, 8).sum(0))


def test_a_different_data_file_beside_the_output_leaves_all_as_it_was(split: Path, out: Path) -> None:
    (out / "data").mkdir()
    (out / "data" / "w.bin").write_bytes(bytes(96))
    (out / "m.onnx").write_bytes(b"old")
    model = load_model(split)
    with pytest.raises(UsageError, match=r"w\.bin: a different file is there"):
        save_model(model.proto, out / "m.onnx", source=model)
    assert _names(out) == ["data", "data/w.bin", "m.onnx"]
    assert (out / "m.onnx").read_bytes() == b"old"


def test_the_model_is_not_saved_over_its_data(split: Path) -> None:
    model = load_model(split)
    with pytest.raises(UsageError, match="the data of the model's tensors is in this file"):
        save_model(model.proto, split.parent / "data" / "w.bin", source=model)
    assert (split.parent / "data" / "w.bin").read_bytes() == _WEIGHTS.tobytes()


def test_data_files_that_went_away_are_named(split: Path, out: Path) -> None:
    model = load_model(split)
    (split.parent / "data" / "w.bin").unlink()
    with pytest.raises(UsageError, match=r"tensor 'a' has its data in 'data/w\.bin': no such file"):
        save_model(model.proto, out / "m.onnx", source=model)
    assert _names(out) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_save_removes_the_data_it_placed(
    split: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (out / "m.onnx").write_bytes(b"old")
    model = load_model(split)

    def fail(*_arguments: object) -> None:
        assert (out / "data" / "w.bin").exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(UsageError, match="No space left on device; nothing was changed"):
        save_model(model.proto, out / "m.onnx", source=model, external="keep")
    assert _names(out) == ["m.onnx"]
    assert (out / "m.onnx").read_bytes() == b"old"
    assert (split.parent / "data" / "w.bin").read_bytes() == _WEIGHTS.tobytes()


def test_a_missing_output_folder_is_not_created_for_the_data(split: Path, out: Path) -> None:
    model = load_model(split)
    with pytest.raises(UsageError, match="does not exist"):
        save_model(model.proto, out / "no" / "m.onnx", source=model, external="copy")
    assert _names(out) == []


def test_stdout_gets_the_model_with_its_references(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = _Streams()
    monkeypatch.setattr(sys, "stdout", stdout)
    model = load_model(split)
    assert save_model(model.proto, "-", source=model, unchanged=True) == []
    assert stdout.buffer.getvalue() == split.read_bytes()
    assert _names(split.parent) == ["data", "data/w.bin", "m.onnx"]


def test_a_pipe_gets_the_model_alone(split: Path, out: Path) -> None:
    pipe = out / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    model = load_model(split)
    assert save_model(model.proto, pipe, source=model) == []
    reader.join(timeout=10)
    assert received == [split.read_bytes()]
    assert _names(out) == ["pipe"]


def test_a_model_from_a_stream_needs_its_data_beside_the_output(split: Path, out: Path) -> None:
    model = load_model(split.read_bytes())
    with pytest.raises(UsageError, match=r"<memory>: tensor 'a' has its data in 'data/w\.bin': no such file"):
        save_model(model.proto, out / "m.onnx", source=model)
    assert _names(out) == []
    save_model(model.proto, split.with_name("again.onnx"), source=model)
    assert np.array_equal(_run(split.with_name("again.onnx")), _WEIGHTS.reshape(3, 8).sum(0))


@pytest.mark.parametrize("name", ["m.json", "m.textproto", "M.PBTXT"])
def test_refuse_to_write_the_name_of_a_text_format(plain: Path, out: Path, name: str) -> None:
    model = load_model(plain)
    with pytest.raises(UsageError, match="models are not written as text"):
        save_model(model.proto, out / name, source=model)
    assert _names(out) == []


def test_refuse_a_folder_as_target(plain: Path, out: Path) -> None:
    model = load_model(plain)
    with pytest.raises(UsageError, match="it is a folder"):
        save_model(model.proto, out, source=model)


@pytest.mark.parametrize("how", ["measured", "by protobuf"])
def test_refuse_to_save_more_than_the_format_holds(
    plain: Path, out: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = load_model(plain)
    if how == "measured":
        monkeypatch.setattr(files, "_LARGEST", 100)
    else:

        def fail(_proto: onnx.ModelProto) -> bytes:
            raise EncodeError("Failed to serialize proto")

        monkeypatch.setattr(onnx.ModelProto, "SerializeToString", fail)
    with pytest.raises(UsageError, match=r"larger than 2 GiB.*store the weights as external data"):
        save_model(model.proto, out / "m.onnx", source=model)
    assert _names(out) == []


_SAVE_AND_STALL = """
import os, sys, time
from graphsurgery.model.files import load_model, save_model
sync = os.fsync
def stall(descriptor):
    sync(descriptor)
    print("on disk", flush=True)
    time.sleep(60)
os.fsync = stall
model = load_model(sys.argv[1])
model.proto.producer_name = "new"
save_model(model.proto, sys.argv[1], source=model)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_stopped_while_saving_leaves_the_old_file(plain: Path, sent: signal.Signals) -> None:
    raw = plain.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", _SAVE_AND_STALL, str(plain)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"on disk\n"
        assert len(_names(plain.parent)) == 2
        child.send_signal(sent)
        child.wait(timeout=20)
    assert plain.read_bytes() == raw
    if sent == signal.SIGINT:
        assert _names(plain.parent) == ["m.onnx"]
    assert load_model(plain).proto.producer_name == ""
