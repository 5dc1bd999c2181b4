from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib import format as npy
from numpy.typing import NDArray
from sample_files import assert_same, folder_of, refusal, sample

from graphsurgery.data import InputSpec, open_samples

Specs = tuple[InputSpec, ...]


def member(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    buffer = io.BytesIO()
    npy.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    """The good sample with the given members replaced or added; underscores in the file's name stand for themselves."""
    arrays = {name: member(array) for name, array in sample().items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in {**arrays, **members}.items():
            file.writestr(f"{name}.npy", data)
    return path


def test_folder_is_sorted_naturally(specs: Specs, tmp_path: Path) -> None:
    for index in (10, 2, 1):
        np.savez(tmp_path / f"{index}.npz", **sample(index))
    (tmp_path / "._1.npz").write_bytes(b"a resource fork")
    (tmp_path / "notes.md").write_text("not a sample")
    samples = open_samples([tmp_path], specs)
    for got, index in zip(samples, (1, 2, 10), strict=True):
        assert_same(got, sample(index))
    assert samples.sources == ("folder of 3 samples, 1.npz to 10.npz",)


def test_files_are_read_when_asked_for(specs: Specs, tmp_path: Path) -> None:
    samples = open_samples([folder_of(tmp_path, sample(0))], specs)
    np.savez(tmp_path / "0.npz", **sample(5))
    assert_same(samples[0], sample(5))


def test_compressed_fortran_and_single_file(specs: Specs, tmp_path: Path) -> None:
    given = sample()
    np.savez_compressed(tmp_path / "s.npz", **{name: np.asfortranarray(array) for name, array in given.items()})
    samples = open_samples(tmp_path / "s.npz", specs)
    assert_same(samples[0], given)
    assert samples.sources == ("s.npz",)
    assert samples.sha256 == open_samples([given], specs).sha256


def test_names_with_slashes_and_bfloat16(tmp_path: Path) -> None:
    spec = (InputSpec("/model/x", np.dtype(ml_dtypes.bfloat16), (2,), optional=False),)
    values = np.array([1, 2], ml_dtypes.bfloat16)
    np.savez(tmp_path / "s.npz", **{"/model/x": values})
    assert_same(open_samples(tmp_path, spec)[0], {"/model/x": values})


def test_sources_hold_no_absolute_path(specs: Specs, tmp_path: Path) -> None:
    folder_of(tmp_path, sample())
    for source in (tmp_path, tmp_path / "0.npz"):
        assert str(tmp_path) not in " ".join(open_samples(source, specs).sources)


def test_empty_folder_says_what_is_accepted(specs: Specs, tmp_path: Path) -> None:
    message = refusal(tmp_path, specs)
    assert f"data folder '{tmp_path}' holds no samples; give a folder of .npz files, one .npz, an ONNX" in message
    assert "input_list.txt, or synthetic:N" in message


@pytest.mark.parametrize("name", ["nowhere", "x" * 5000, "nul\0byte"])
def test_missing_path(specs: Specs, tmp_path: Path, name: str) -> None:
    message = refusal(f"{tmp_path}/{name}", specs)
    assert "data source '" in message
    assert "; give a folder of .npz files" in message
    assert len(message) < 600


def test_fifo_is_not_read(specs: Specs, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    assert "is neither a file nor a folder; give" in refusal(tmp_path / "pipe.npz", specs)


def test_npy_and_unknown_suffix(specs: Specs, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(2))
    (tmp_path / "x.csv").write_text("1,2")
    assert "is a single array without a name; write np.savez" in refusal(tmp_path / "x.npy", specs)
    assert "is of no known kind; give a folder of .npz" in refusal(tmp_path / "x.csv", specs)


@pytest.mark.parametrize("keep", [0, 10, 200, 400])
def test_truncated(specs: Specs, tmp_path: Path, keep: int) -> None:
    path = folder_of(tmp_path, sample()) / "0.npz"
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(tmp_path, specs)
    assert message.startswith(f"{path}: is not a readable .npz file (")
    assert message.endswith("write it again with np.savez(file, name=array)")


def test_damaged_data_is_found_by_its_checksum(specs: Specs, tmp_path: Path) -> None:
    path = folder_of(tmp_path, sample()) / "0.npz"
    data = bytearray(path.read_bytes())
    data[data.index(sample()["state"].tobytes())] ^= 1
    path.write_bytes(data)
    assert "is not a readable .npz file (Bad CRC-32" in refusal(path, specs)


def test_damaged_compressed_data(specs: Specs, tmp_path: Path) -> None:
    path = archive(tmp_path / "s.npz", state=member(np.zeros((2, 4), np.float32)))
    data = bytearray(path.read_bytes())
    start = data.index(b"state.npy") + len(b"state.npy")
    data[start : start + 30] = b"\xff" * 30
    path.write_bytes(data)
    assert "is not a readable .npz file (" in refusal(path, specs)


def test_encrypted_member(specs: Specs, tmp_path: Path) -> None:
    path = archive(tmp_path / "s.npz")
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.index(signature)
        data[at + flags] |= 1
    path.write_bytes(data)
    assert "is not a readable .npz file (" in refusal(path, specs)


def test_pickled_array_is_never_loaded(specs: Specs, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    path = archive(tmp_path / "s.npz", state=member(np.array([[Bomb()] * 4] * 2, dtype=object)))
    message = refusal(path, specs)
    assert "input 'state' is pickled (dtype object), which is never loaded; save it as a plain array" in message
    assert not (tmp_path / "executed").exists()


def test_bomb_whose_header_lies_about_the_size(specs: Specs, tmp_path: Path) -> None:
    path = archive(tmp_path / "s.npz", state=header((2, 4)) + bytes(50_000_000))
    assert path.stat().st_size < 100_000
    message = refusal(path, specs)
    assert "input 'state' is 50000128 bytes in the zip directory but 160 by its header (float32[2, 4])" in message
    assert message.endswith("the file is damaged or forged, write it again with np.savez")


def test_bomb_of_a_wrong_shape_is_refused_by_its_header(specs: Specs, tmp_path: Path) -> None:
    path = archive(tmp_path / "s.npz", state=header((2, 10_000_000)) + bytes(80_000_000))
    assert "input 'state' has shape [2, 10000000], the model takes float32[batch,4]" in refusal(path, specs)


def test_member_above_the_limit(specs: Specs, tmp_path: Path) -> None:
    path = archive(tmp_path / "s.npz", state=header((2, 4)))
    data = bytearray(path.read_bytes())
    at = data.index(b"state.npy", data.index(b"PK\x01\x02")) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    # 5 GiB do not fit the field of four bytes: the size moves to a zip64 extra field.
    data[at + 24 : at + 28] = b"\xff" * 4
    data[at + 30 : at + 32] = struct.pack("<H", 12)
    end = at + 46 + len(b"state.npy")
    data[end:end] = struct.pack("<HHQ", 1, 8, 5 << 30)
    tail = data.rindex(b"PK\x05\x06")
    data[tail + 12 : tail + 16] = struct.pack("<I", struct.unpack("<I", data[tail + 12 : tail + 16])[0] + 12)
    path.write_bytes(data)
    message = refusal(path, specs)
    assert "input 'state' unpacks to 5368709120 bytes, the limit is 4294967296; give a smaller sample" in message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x01\x00\xff",
        b"\x93NUMPY\x09\x00" + bytes(100),
        b"not numpy at all",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f4'}",
        b"\x93NUMPY\x01\x00\x06\x00((((((",
        b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000,
        header((-2, -4)) + bytes(32),
        header((2, 4), "<f9"),
    ],
    ids=["empty", "cut", "version", "other", "keys", "syntax", "nested", "negative", "type"],
)
def test_broken_header(specs: Specs, tmp_path: Path, data: bytes) -> None:
    message = refusal(archive(tmp_path / "s.npz", state=data), specs)
    assert "input 'state' " in message
    assert message.endswith(("write it again with np.savez", "save the array again with np.savez"))


def test_wrong_type_and_name_are_found_in_the_header(specs: Specs, tmp_path: Path) -> None:
    wrong = archive(tmp_path / "s.npz", input_ids=member(np.zeros((2, 3), np.int32)))
    assert f"{wrong}: input 'input_ids' is int32, the model takes int64" in refusal(wrong, specs)
    extra = archive(tmp_path / "t.npz", pixels=member(np.zeros(2)))
    assert f"{extra}: 'pixels' is not an input of the model; remove it" in refusal(extra, specs)


def test_name_given_twice_and_foreign_member(specs: Specs, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive(tmp_path / "s.npz"), "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("state.npy", member(sample()["state"]))
    assert "input 'state' occurs twice" in refusal(tmp_path / "s.npz", specs)
    with zipfile.ZipFile(archive(tmp_path / "t.npz"), "a") as file:
        file.writestr("readme.txt", "hello")
    assert "member 'readme.txt' is not an .npy array" in refusal(tmp_path / "t.npz", specs)


def test_empty_npz(specs: Specs, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz")
    assert "input 'input_ids' (int64[batch,seq]) is missing, it is empty; add an array" in refusal(tmp_path, specs)


def test_nan_in_a_file_names_file_and_input(specs: Specs, tmp_path: Path) -> None:
    bad = sample()
    bad["state"][1, 2] = np.nan
    folder_of(tmp_path, sample(), bad)
    assert f"{tmp_path}/1.npz: input 'state' holds NaN, first at index [1, 2]" in refusal(tmp_path, specs)
