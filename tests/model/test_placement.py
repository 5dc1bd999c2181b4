from __future__ import annotations

import errno
import os
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from graphsurgery.errors import UsageError
from graphsurgery.model import placement
from graphsurgery.model.placement import PlacedFile, place_external, remove_placed

_CONTENT = {"w.bin": b"w" * 64, "sub/a.bin": b"a" * 32}


def _model(*locations: str) -> onnx.ModelProto:
    tensors: list[TensorProto] = []
    for index, location in enumerate(locations):
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[4])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        tensors.append(tensor)
    return helper.make_model(helper.make_graph([], "g", [], [], tensors))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, content in _CONTENT.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _identities(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """What changes when a file is replaced, written or linked (reading changes only the access time)."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (status.st_ino, status.st_mtime_ns, status.st_nlink) for path, status in found.items()}


@pytest.mark.parametrize("mode", ["keep", "copy"])
def test_in_the_same_folder_nothing_is_done(source: Path, mode: placement.External) -> None:
    before = _identities(source)
    placed = place_external(_model("w.bin", "sub/a.bin"), source, source / "out.onnx", mode)
    assert placed == [PlacedFile(source / "w.bin", "present"), PlacedFile(source / "sub/a.bin", "present")]
    assert _identities(source) == before


def test_in_the_same_folder_by_another_name_nothing_is_done(tmp_path: Path, source: Path) -> None:
    (tmp_path / "alias").symlink_to("source")
    placed = place_external(_model("w.bin"), source, tmp_path / "alias" / "out.onnx", "copy")
    assert [entry.how for entry in placed] == ["present"]
    assert _content(source) == _CONTENT


def test_keep_copies_to_another_folder_and_says_so(source: Path, out: Path) -> None:
    model = _model("w.bin", "sub/a.bin", "w.bin")
    serialised = model.SerializeToString()
    placed = place_external(model, source, out / "m.onnx", "keep")
    assert [(entry.path, entry.how, entry.folders) for entry in placed] == [
        (out / "w.bin", "copied", ()),
        (out / "sub/a.bin", "copied", (out / "sub",)),
    ]
    assert all("is a copy: a model names data files of its own folder only" in str(entry.note) for entry in placed)
    assert all((out / name).stat().st_nlink == (source / name).stat().st_nlink == 1 for name in _CONTENT)
    assert _content(out) == _CONTENT
    assert model.SerializeToString() == serialised


@pytest.mark.parametrize("mode", ["keep", "copy"])
def test_a_hard_link_to_the_source_becomes_a_file_of_its_own(source: Path, out: Path, mode: placement.External) -> None:
    (out / "w.bin").hardlink_to(source / "w.bin")
    assert place_external(_model("w.bin"), source, out / "m.onnx", mode)[0].how == "copied"
    assert (source / "w.bin").stat().st_nlink == 1
    assert _content(out) == {"w.bin": _CONTENT["w.bin"]}


def test_copy_makes_files_of_its_own(source: Path, out: Path) -> None:
    placed = place_external(_model("w.bin", "sub/a.bin"), source, out / "m.onnx", "copy")
    assert [(entry.how, entry.note) for entry in placed] == [("copied", None), ("copied", None)]
    assert _content(out) == _CONTENT
    assert not any((out / name).samefile(source / name) for name in _CONTENT)


@pytest.mark.parametrize("mode", ["keep", "copy"])
def test_a_second_run_finds_all_present(source: Path, out: Path, mode: placement.External) -> None:
    model = _model("w.bin", "sub/a.bin")
    place_external(model, source, out / "m.onnx", mode)
    before = _identities(out)
    placed = place_external(model, source, out / "m.onnx", mode)
    assert [entry.how for entry in placed] == ["present", "present"]
    assert _identities(out) == before


@pytest.mark.parametrize("mode", ["keep", "copy"])
@pytest.mark.parametrize("other", [b"x" * 64, b"w" * 63, b"w" * 65, b"w" * 63 + b"x", b""])
def test_a_different_file_is_never_written_over(
    source: Path, out: Path, mode: placement.External, other: bytes
) -> None:
    (out / "w.bin").write_bytes(other)
    with pytest.raises(UsageError, match=r"w\.bin: a different file is there"):
        place_external(_model("sub/a.bin", "w.bin"), source, out / "m.onnx", mode)
    assert _content(out) == {"w.bin": other}
    assert not (out / "sub").exists()


def test_equal_sizes_are_compared_beyond_the_first_block(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_BLOCK", 16)
    (out / "w.bin").write_bytes(_CONTENT["w.bin"])
    assert place_external(_model("w.bin"), source, out / "m.onnx", "copy")[0].how == "present"
    for other in (b"w" * 40 + b"x" + b"w" * 23, b"w" * 80):
        (out / "w.bin").write_bytes(other)
        with pytest.raises(UsageError, match="different file"):
            place_external(_model("w.bin"), source, out / "m.onnx", "copy")


def test_a_folder_of_that_name_is_in_the_way(source: Path, out: Path) -> None:
    (out / "w.bin").mkdir()
    with pytest.raises(UsageError, match="different file"):
        place_external(_model("w.bin"), source, out / "m.onnx", "copy")


def test_a_file_in_place_of_a_folder_is_in_the_way(source: Path, out: Path) -> None:
    (out / "sub").write_bytes(b"")
    with pytest.raises(UsageError, match=r"cannot create the folder .*sub"):
        place_external(_model("sub/a.bin"), source, out / "m.onnx", "copy")
    assert _content(out) == {"sub": b""}


@pytest.mark.parametrize("aim", ["../elsewhere", "../source/sub"])
def test_nothing_is_placed_through_a_link_out_of_the_output_folder(
    tmp_path: Path, source: Path, out: Path, aim: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (out / "sub").symlink_to(aim)
    with pytest.raises(UsageError, match=r"sub/a\.bin: a link leads out of"):
        place_external(_model("sub/a.bin"), source, out / "m.onnx", "copy")
    assert _content(tmp_path / "elsewhere") == {}
    assert _content(source) == _CONTENT


@pytest.mark.parametrize("target", ["source/w.bin", "out/w.bin", "out/alias.onnx"])
def test_the_model_is_not_written_over_its_data(tmp_path: Path, source: Path, out: Path, target: str) -> None:
    (out / "alias.onnx").symlink_to("../source/w.bin")
    with pytest.raises(UsageError, match="the data of the model's tensors is in this file"):
        place_external(_model("w.bin"), source, tmp_path / target, "keep")
    assert _content(source) == _CONTENT
    assert sorted(path.name for path in out.iterdir()) == ["alias.onnx"]


def test_progress_counts_the_bytes(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_BLOCK", 24)
    calls: list[tuple[str, int, int]] = []
    place_external(_model("w.bin"), source, out / "m.onnx", "copy", progress=lambda *call: calls.append(call))
    assert calls == [("w.bin", 24, 64), ("w.bin", 48, 64), ("w.bin", 64, 64)]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_copy_that_fails_removes_what_was_placed(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (source / "new" / "deep").mkdir(parents=True)
    (source / "new" / "deep" / "z.bin").write_bytes(bytes(16))
    sync = os.fsync
    count = iter(range(9))

    def fail_third(descriptor: int) -> None:
        if next(count) == 2:
            raise error
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_third)
    expected = UsageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        place_external(_model("w.bin", "sub/a.bin", "new/deep/z.bin"), source, out / "m.onnx", "copy")
    assert list(out.rglob("*")) == []


def test_remove_leaves_what_was_present_and_folders_in_use(source: Path, out: Path) -> None:
    (out / "w.bin").write_bytes(_CONTENT["w.bin"])
    placed = place_external(_model("w.bin", "sub/a.bin"), source, out / "m.onnx", "keep")
    (out / "sub" / "other").write_bytes(b"other")
    remove_placed(placed)
    assert _content(out) == {"w.bin": _CONTENT["w.bin"], "sub/other": b"other"}
    assert _content(source) == _CONTENT


def test_without_a_source_folder_the_data_must_be_beside_the_output(out: Path) -> None:
    model = _model("w.bin")
    with pytest.raises(UsageError, match=r"<stdin>: tensor 'w0' has its data in 'w\.bin': no such file in"):
        place_external(model, None, out / "m.onnx", "keep", label="<stdin>")
    (out / "w.bin").write_bytes(bytes(16))
    assert [entry.how for entry in place_external(model, None, out / "m.onnx", "copy")] == ["present"]


@pytest.mark.parametrize("mode", ["keep", "copy"])
def test_from_a_download_cache_the_file_itself_is_placed(tmp_path: Path, out: Path, mode: placement.External) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1111").write_bytes(b"model")
    (blobs / "2222").write_bytes(bytes(16))
    (snapshot / "m.onnx").symlink_to("../../blobs/1111")
    (snapshot / "m.onnx_data").symlink_to("../../blobs/2222")
    model = _model("m.onnx_data")
    placed = place_external(model, snapshot, out / "m.onnx", mode, model_path=snapshot / "m.onnx")
    assert placed[0].how == "copied"
    assert not (out / "m.onnx_data").is_symlink()
    assert not (out / "m.onnx_data").samefile(blobs / "2222")
    (tmp_path / "alias").symlink_to("snapshots/0a1b")
    for folder in (snapshot, tmp_path / "alias"):
        same = place_external(model, snapshot, folder / "out.onnx", mode, model_path=snapshot / "m.onnx")
        assert [entry.how for entry in same] == ["present"]
