from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphsurgery.errors import UsageError
from graphsurgery.model.atomic import atomic_file, one_line, write_bytes_atomically, write_text_atomically


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_a_new_file_under_the_umask(tmp_path: Path) -> None:
    with _umask(0o027):
        write_bytes_atomically(tmp_path / "r.json", b"{}")
    assert (tmp_path / "r.json").read_bytes() == b"{}"
    assert _mode(tmp_path / "r.json") == 0o640
    assert _names(tmp_path) == ["r.json"]


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    target.write_bytes(b"old and longer")
    target.chmod(0o604)
    write_bytes_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert _mode(target) == 0o604


def test_text_is_utf8_with_its_own_line_ends(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "r.txt", "φ\r\nΣ\n")
    assert (tmp_path / "r.txt").read_bytes() == "φ\r\nΣ\n".encode()


def test_a_name_of_the_longest_length(tmp_path: Path) -> None:
    target = tmp_path / ("m" * 255)
    write_bytes_atomically(target, b"x")
    assert target.read_bytes() == b"x"


def test_a_relative_name_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_bytes_atomically("r.json", b"x")
    assert _names(tmp_path) == ["r.json"]


@pytest.mark.parametrize("existing", [True, False])
def test_a_link_is_written_through(tmp_path: Path, existing: bool) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "m.onnx", tmp_path / "m.onnx"
    if existing:
        real.write_bytes(b"old")
    link.symlink_to("real/m.onnx")
    write_bytes_atomically(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert _names(tmp_path / "real") == ["m.onnx"]


def test_a_pipe_is_written_into_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "p"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_bytes_atomically(pipe, b"content")
    reader.join(timeout=10)
    assert received == [b"content"]
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("d", "it is a folder"),
        ("no/r.json", "does not exist; create it first"),
        ("f/r.json", "is not a folder; create it first"),
        ("loop", "Too many levels"),
        ("r\0.json", "NUL"),
        ("r" * 300, "File name too long"),
        ("r\n/r.json", r"r\n does not exist"),
    ],
)
def test_refuse_a_target_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError) as caught:
        write_bytes_atomically(tmp_path / name, b"x")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert _names(tmp_path) == ["d", "f", "loop"]


def test_refuse_a_folder_that_takes_no_files() -> None:
    with pytest.raises(UsageError, match="cannot write /proc/graphsurgery-test: "):
        write_bytes_atomically("/proc/graphsurgery-test", b"x")


def test_refuse_a_write_protected_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r.json"
    target.write_bytes(b"old")
    # The answer for a file of mode 0444; asked of the system it would be yes where the tests run as root.
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    with pytest.raises(UsageError, match="write-protected"):
        write_bytes_atomically(target, b"new")
    assert target.read_bytes() == b"old"


@contextmanager
def _full_disk() -> Iterator[None]:
    """A limit on the size of files: the kernel refuses the write itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("existing", [True, False])
def test_a_write_that_fails_changes_nothing(tmp_path: Path, existing: bool) -> None:
    target = tmp_path / "m.onnx"
    if existing:
        target.write_bytes(b"old")
    with _full_disk(), pytest.raises(UsageError, match=r"cannot write .*m.onnx: File too large; nothing was changed"):
        write_bytes_atomically(target, bytes(100_000))
    assert _names(tmp_path) == (["m.onnx"] if existing else [])
    assert not existing or target.read_bytes() == b"old"


def test_a_pipe_whose_reader_goes_away(tmp_path: Path) -> None:
    pipe = tmp_path / "p"
    os.mkfifo(pipe)

    def read_a_little() -> None:
        with pipe.open("rb", buffering=0) as stream:
            stream.read(10)

    reader = threading.Thread(target=read_a_little, daemon=True)
    reader.start()
    with pytest.raises(UsageError, match="Broken pipe"):
        write_bytes_atomically(pipe, bytes(1 << 21))
    reader.join(timeout=10)
    assert pipe.is_fifo()


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "expected"), [(OSError(errno.ENOSPC, "No space left on device"), UsageError), (KeyboardInterrupt(), None)]
)
def test_a_step_that_fails_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
    expected: type[BaseException] | None,
) -> None:
    target = tmp_path / "m.onnx"
    target.write_bytes(b"old")

    def fail(*_arguments: object) -> None:
        assert any(name.startswith(".graphsurgery-") for name in _names(tmp_path))
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(expected or type(error)):
        write_bytes_atomically(target, b"new")
    assert _names(tmp_path) == ["m.onnx"]
    assert target.read_bytes() == b"old"


def test_an_exception_of_the_writer_passes_and_changes_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_file(tmp_path / "m.onnx") as stream:
            stream.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert _names(tmp_path) == []


def test_one_line_escapes_and_shortens() -> None:
    assert one_line("layers.0/φ") == "layers.0/φ"
    assert one_line("a\nb\t\x1b[31m\u2028") == r"a\nb\t\x1b[31m\u2028"
    assert one_line("\udcff") == r"\udcff"
    assert one_line(b"\xff") == r"b'\xff'"
    assert one_line("a" * 200) == "a" * 200
    shortened = one_line(f"start{'a' * 500}end")
    assert len(shortened) == 201
    assert shortened.startswith("start")
    assert shortened.endswith("end")
