from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from model_files import WEIGHTS, Streams, names, renamed, run

from graphsurgery.errors import UsageError
from graphsurgery.model import files
from graphsurgery.model.files import load_model, save_model


@pytest.mark.parametrize("unchanged", [True, False])
def test_save_gives_what_was_asked_for(plain: Path, out: Path, unchanged: bool) -> None:
    # A field that the installed onnx does not know, and an order of fields that it would not write itself.
    raw = b"\xa2\x06\x03new" + plain.read_bytes()
    plain.write_bytes(raw)
    model = load_model(plain)
    assert save_model(renamed(model.proto), out / "m.onnx", source=model, unchanged=unchanged) == []
    saved = (out / "m.onnx").read_bytes()
    assert (saved == raw) == unchanged
    assert b"\xa2\x06\x03new" in saved
    assert load_model(out / "m.onnx").proto.producer_name == ("" if unchanged else "renamed")
    assert names(out) == ["m.onnx"]


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
    before, raw = names(split.parent), split.read_bytes()
    for _ in range(2):
        model = load_model(split)
        save_model(model.proto, split, source=model, unchanged=unchanged, external="copy")
    assert split.read_bytes() == raw
    assert names(split.parent) == before
    assert np.array_equal(run(split), WEIGHTS.reshape(3, 8).sum(0))


@pytest.mark.parametrize("external", ["keep", "copy"])
def test_save_elsewhere_runs_there(split: Path, out: Path, external: Literal["keep", "copy"]) -> None:
    model = load_model(split)
    for expected in (["copied"], ["present"]):
        placed = save_model(renamed(model.proto), out / "m.onnx", source=model, external=external)
        assert [entry.how for entry in placed] == expected
        assert names(out) == ["data", "data/w.bin", "m.onnx"]
        assert not (out / "data" / "w.bin").samefile(split.parent / "data" / "w.bin")
        onnx.checker.check_model(out / "m.onnx")
        assert np.array_equal(run(out / "m.onnx"), WEIGHTS.reshape(3, 8).sum(0))
    (initializer, *_) = load_model(out / "m.onnx").proto.graph.initializer
    assert initializer == model.proto.graph.initializer[0]


def test_the_copy_does_not_need_the_original(split: Path, out: Path) -> None:
    model = load_model(split)
    save_model(model.proto, out / "m.onnx", source=model, external="copy")
    (split.parent / "data" / "w.bin").write_bytes(bytes(96))
    assert np.array_equal(run(out / "m.onnx"), WEIGHTS.reshape(3, 8).sum(0))


def test_a_different_data_file_beside_the_output_leaves_all_as_it_was(split: Path, out: Path) -> None:
    (out / "data").mkdir()
    (out / "data" / "w.bin").write_bytes(bytes(96))
    (out / "m.onnx").write_bytes(b"old")
    model = load_model(split)
    with pytest.raises(UsageError, match=r"w\.bin: a different file is there"):
        save_model(model.proto, out / "m.onnx", source=model)
    assert names(out) == ["data", "data/w.bin", "m.onnx"]
    assert (out / "m.onnx").read_bytes() == b"old"


def test_the_model_is_not_saved_over_its_data(split: Path) -> None:
    model = load_model(split)
    with pytest.raises(UsageError, match="the data of the model's tensors is in this file"):
        save_model(model.proto, split.parent / "data" / "w.bin", source=model)
    assert (split.parent / "data" / "w.bin").read_bytes() == WEIGHTS.tobytes()


def test_data_files_that_went_away_are_named(split: Path, out: Path) -> None:
    model = load_model(split)
    (split.parent / "data" / "w.bin").unlink()
    with pytest.raises(UsageError, match=r"tensor 'a' has its data in 'data/w\.bin': no such file"):
        save_model(model.proto, out / "m.onnx", source=model)
    assert names(out) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_save_removes_the_data_it_placed(
    split: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (out / "m.onnx").write_bytes(b"old")
    model = load_model(split)

    real = getattr(os, step)

    def fail(*arguments: object) -> None:
        if not (out / "data" / "w.bin").exists():
            real(*arguments)
            return
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(UsageError, match="No space left on device; nothing was changed"):
        save_model(model.proto, out / "m.onnx", source=model, external="keep")
    assert names(out) == ["m.onnx"]
    assert (out / "m.onnx").read_bytes() == b"old"
    assert (split.parent / "data" / "w.bin").read_bytes() == WEIGHTS.tobytes()


def test_a_missing_output_folder_is_not_created_for_the_data(split: Path, out: Path) -> None:
    model = load_model(split)
    with pytest.raises(UsageError, match="does not exist"):
        save_model(model.proto, out / "no" / "m.onnx", source=model, external="copy")
    assert names(out) == []


def test_stdout_gets_the_model_with_its_references(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Streams()
    monkeypatch.setattr(sys, "stdout", stdout)
    model = load_model(split)
    assert save_model(model.proto, "-", source=model, unchanged=True) == []
    assert stdout.buffer.getvalue() == split.read_bytes()
    assert names(split.parent) == ["data", "data/w.bin", "m.onnx"]


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
    assert names(out) == ["pipe"]


def test_a_model_from_a_stream_needs_its_data_beside_the_output(split: Path, out: Path) -> None:
    model = load_model(split.read_bytes())
    with pytest.raises(UsageError, match=r"<memory>: tensor 'a' has its data in 'data/w\.bin': no such file"):
        save_model(model.proto, out / "m.onnx", source=model)
    assert names(out) == []
    save_model(model.proto, split.with_name("again.onnx"), source=model)
    assert np.array_equal(run(split.with_name("again.onnx")), WEIGHTS.reshape(3, 8).sum(0))


@pytest.mark.parametrize("name", ["m.json", "m.textproto", "M.PBTXT"])
def test_refuse_to_write_the_name_of_a_text_format(plain: Path, out: Path, name: str) -> None:
    model = load_model(plain)
    with pytest.raises(UsageError, match="models are not written as text"):
        save_model(model.proto, out / name, source=model)
    assert names(out) == []


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
    assert names(out) == []


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
        assert len(names(plain.parent)) == 2
        child.send_signal(sent)
        child.wait(timeout=20)
    assert plain.read_bytes() == raw
    if sent == signal.SIGINT:
        assert names(plain.parent) == ["m.onnx"]
    assert load_model(plain).proto.producer_name == ""
