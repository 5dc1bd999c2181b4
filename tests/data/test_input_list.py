from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from sample_files import Sample, assert_same, refusal

from graphsurgery.data import InputSpec, open_samples

IDS = InputSpec("ids", np.dtype(np.int64), (1, 3), optional=False)
HALF = InputSpec("half", np.dtype(np.float16), (2, 2), optional=False)
SCALE = InputSpec("scale", np.dtype(np.float32), (1,), optional=True)
SPECS = (IDS, HALF, SCALE)


def arrays(seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    return {"ids": rng.integers(0, 9, (1, 3)), "half": rng.standard_normal((2, 2)).astype(np.float16)}


def listed(folder: Path, *lines: str) -> Path:
    (folder / "raw").mkdir(exist_ok=True)
    for index in range(2):
        for name, array in arrays(index).items():
            array.tofile(folder / "raw" / f"{name}_{index}.raw")
    path = folder / "input_list.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


NAMED = ("ids:=raw/ids_0.raw half:=raw/half_0.raw", "half:=raw/half_1.raw\tids:=raw/ids_1.raw")


def test_named_lines_with_headers(tmp_path: Path) -> None:
    path = listed(tmp_path, "#logits", "%logits other", "", *NAMED, "")
    samples = open_samples([path], SPECS)
    assert samples.sources == ("input_list.txt, 2 samples",)
    for got, index in zip(samples, (0, 1), strict=True):
        assert_same(got, arrays(index))
    assert samples.sha256 == open_samples([arrays(0), arrays(1)], SPECS).sha256
    assert samples.sha256 == open_samples([tmp_path], SPECS).sha256


def test_plain_paths_in_input_order(tmp_path: Path) -> None:
    path = listed(tmp_path, "raw/ids_1.raw raw/half_1.raw")
    assert_same(open_samples(path, SPECS)[0], arrays(1))


def test_named_path_with_a_space(tmp_path: Path) -> None:
    path = listed(tmp_path, "ids:=my raw/i.raw half:=raw/half_0.raw")
    (tmp_path / "my raw").mkdir()
    arrays()["ids"].tofile(tmp_path / "my raw" / "i.raw")
    assert_same(open_samples(path, SPECS)[0], arrays())


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
def test_float32_files_serve_16_bit_inputs(tmp_path: Path, dtype: np.dtype[np.float16]) -> None:
    specs = (InputSpec("half", dtype, (2, 2), optional=False),)
    path = listed(tmp_path, "half:=wide.raw")
    wide = np.array([[1.5, -2.0], [0.1, 3.0]], np.float32)
    wide.tofile(tmp_path / "wide.raw")
    assert_same(open_samples(path, specs)[0], {"half": wide.astype(dtype)})


def test_float32_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    path = listed(tmp_path, "ids:=raw/ids_0.raw half:=wide.raw")
    np.full((2, 2), 1e6, np.float32).tofile(tmp_path / "wide.raw")
    assert f"{path}, line 1: input 'half' holds +Inf, first at index [0, 0]" in refusal(path, SPECS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ids:=raw/ids_0.raw", "input 'half' (float16[2,2]) is missing, it has 'ids'; add an array"),
        ("ids:=raw/no.raw half:=raw/half_0.raw", "input 'ids': there is no file 'raw/no.raw' (paths are relative"),
        (
            "ids:=raw/half_0.raw half:=raw/half_0.raw",
            "input 'ids': 'raw/half_0.raw' has 8 bytes, int64[1,3] takes 24; ",
        ),
        (
            "ids:=i32.raw half:=raw/half_0.raw",
            "'i32.raw' has 12 bytes, int64[1,3] takes 24 (it would fit int32); write",
        ),
        ("raw/ids_0.raw", "1 files for 2 inputs; write `ids:=file.raw half:=file.raw`"),
        ("idz:=raw/ids_0.raw", "'idz' is not an input of the model; remove it or rename it (inputs are 'ids', 'half'"),
        ("ids:=raw/ids_0.raw ids:=raw/ids_0.raw", "input 'ids' is given twice; remove one"),
        ("raw/ids_0.raw half:=raw/half_0.raw", "`raw/ids_0.raw` is no `name:=file.raw`; name every file"),
        ("ids:= half:=raw/half_0.raw", "`ids:=` is no `name:=file.raw`"),
    ],
)
def test_refuses_a_line_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = listed(tmp_path, "# header", NAMED[0], line)
    np.zeros(3, np.int32).tofile(tmp_path / "i32.raw")
    found = refusal(path, SPECS)
    assert message in found
    assert found.startswith(f"{path}, line 3: ")


def test_symbolic_shape_needs_another_format(tmp_path: Path) -> None:
    specs = (InputSpec("ids", np.dtype(np.int64), ("batch", 3), optional=False),)
    path = listed(tmp_path, "ids:=raw/ids_0.raw")
    assert (
        "input 'ids' is int64[batch,3]; raw files need a static shape and numbers, give this sample as .npz"
        in refusal(path, specs)
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"# only a header\n\n", "lists no sample; add lines like `name:=file.raw"),
        (b"\xff\xfe\x00x", "is not a text file"),
    ],
)
def test_refuses_a_list_without_samples(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "input_list.txt"
    path.write_bytes(data)
    assert f"{path}: {message}" in refusal(path, SPECS)
