"""No file that a command reads is written over by what it writes beside the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from conftest import Cli


@pytest.fixture
def model(decoder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "in" / "m.onnx"
    path.parent.mkdir()
    onnx.save(onnx.load(decoder), path, save_as_external_data=True, location="w.bin", size_threshold=1024)
    return path


@pytest.mark.parametrize("name", ["m.onnx", "w.bin", "x/../m.onnx", "link.onnx"])
@pytest.mark.parametrize("verb", ["rewrite", "calibrate"])
def test_the_model_and_its_data_are_not_written_over(
    cli: Cli, model: Path, samples: Path, tmp_path: Path, name: str, verb: str
) -> None:
    (model.parent / "x").mkdir()
    (model.parent / "link.onnx").symlink_to("m.onnx")
    before = {path.name: path.read_bytes() for path in (model, model.with_name("w.bin"))}
    target = str(model.parent) + "/" + name
    flags = ["-o", tmp_path / "out.onnx", "--report", target] if verb == "rewrite" else ["-o", target]
    ran = cli(verb, model, "--data", samples, *flags)
    assert ran.status == 2 and "choose another name" in ran.err
    assert {path.name: path.read_bytes() for path in (model, model.with_name("w.bin"))} == before
    assert not (tmp_path / "out.onnx").exists()


def test_the_report_is_not_the_output_in_another_spelling(cli: Cli, model: Path, samples: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    out, report = tmp_path / "o.onnx", str(tmp_path) + "/d/../o.onnx"
    ran = cli("rewrite", model, "-o", out, "--report", report, "--data", samples)
    assert ran.status == 2 and "choose another name" in ran.err
    assert not out.exists()


def test_samples_are_not_written_over(cli: Cli, model: Path, samples: Path, tmp_path: Path) -> None:
    sample = tmp_path / "0.npz"
    shutil.copy(sorted(samples.glob("*.npz"))[0], sample)
    before = sample.read_bytes()
    assert cli("rewrite", model, "-o", sample, "--data", sample).status == 2
    assert sample.read_bytes() == before


def test_the_model_itself_may_be_the_output(cli: Cli, model: Path, samples: Path) -> None:
    assert cli("rewrite", model, "-o", model, "--data", samples).status == 0
    assert cli("verify", model, model, "--data", samples).status == 0
