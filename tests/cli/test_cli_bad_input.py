"""Every bad input: one line, the right status, nothing written, and an existing output untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import SENTINEL, Cli
from onnx import TensorProto

Broken = Callable[[Path, Path], None]
Sample = dict[str, np.ndarray]


def _text(path: Path, _: Path) -> None:
    path.write_text("no model at all")


def _empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def _truncated(path: Path, good: Path) -> None:
    path.write_bytes(good.read_bytes()[:-1000])


def _external(path: Path, good: Path) -> None:
    model = onnx.load(good)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="gone.bin")
    path.write_bytes(model.SerializeToString())


def _opset(path: Path, good: Path) -> None:
    model = onnx.load(good)
    model.opset_import[0].version = 9999
    path.write_bytes(model.SerializeToString())


def _missing(_: Path, __: Path) -> None:
    pass


MODELS: dict[str, tuple[Broken, str]] = {
    "no-onnx": (_text, "not an ONNX model"),
    "empty": (_empty, "is empty"),
    "truncated": (_truncated, "truncated"),
    "missing-external": (_external, "gone.bin"),
    "unknown-opset": (_opset, "opset 9999"),
    "missing": (_missing, "no such file"),
}


@pytest.mark.parametrize("verb", ["inspect", "calibrate", "rewrite", "verify"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_bad_model(cli: Cli, decoder: Path, samples: Path, tmp_path: Path, out: Path, kind: str, verb: str) -> None:
    model = tmp_path / "bad.onnx"
    make, fragment = MODELS[kind]
    make(model, decoder)
    arguments: dict[str, list[object]] = {
        "inspect": [],
        "calibrate": ["-o", out, "--data", samples],
        "rewrite": ["-o", out, "--data", samples],
        "verify": [decoder, "--data", samples],
    }
    _refused(cli, out, fragment, verb, model, *arguments[verb])


def _nan(sample: Sample) -> None:
    next(value for value in sample.values() if value.dtype.kind == "f").flat[0] = np.nan


def _renamed(sample: Sample) -> None:
    sample["input_idz"] = sample.pop("input_ids")


def _dropped(sample: Sample) -> None:
    del sample["input_ids"]


def _int32(sample: Sample) -> None:
    sample["input_ids"] = sample["input_ids"].astype(np.int32)


def _flat(sample: Sample) -> None:
    sample["input_ids"] = sample["input_ids"].reshape(-1)


SAMPLES: dict[str, tuple[Callable[[Sample], None], str]] = {
    "nan": (_nan, "NaN"),
    "name": (_renamed, "'input_idz' is not an input"),
    "missing": (_dropped, "'input_ids'"),
    "dtype": (_int32, "'input_ids' is int32"),
    "shape": (_flat, "'input_ids' has shape"),
}


@pytest.mark.parametrize("verb", ["calibrate", "rewrite", "verify"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_bad_data(cli: Cli, decoder: Path, samples: Path, tmp_path: Path, out: Path, kind: str, verb: str) -> None:
    change, fragment = SAMPLES[kind]
    with np.load(samples / "0.npz") as stored:
        sample = dict(stored)
    change(sample)
    np.savez(tmp_path / "0.npz", **sample)
    target: list[object] = [decoder] if verb == "verify" else ["-o", out]
    _refused(cli, out, fragment, verb, decoder, *target, "--data", tmp_path / "0.npz")


@pytest.mark.parametrize("data", ["EMPTY", "nowhere", "synthetic:none"])
def test_a_bad_source(cli: Cli, decoder: Path, tmp_path: Path, out: Path, data: str) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    given = folder if data == "EMPTY" else data
    _refused(cli, out, str(given), "rewrite", decoder, "-o", out, "--data", given)


@pytest.mark.parametrize(("verb", "option"), [("calibrate", "-o"), ("rewrite", "-o"), ("rewrite", "--report")])
@pytest.mark.parametrize("place", ["missing-folder", "folder", "below-a-file"])
def test_a_place_that_cannot_be_written(
    cli: Cli, decoder: Path, samples: Path, out: Path, verb: str, option: str, place: str
) -> None:
    target = {"missing-folder": out.parent / "no" / "x", "folder": out.parent, "below-a-file": out / "x"}[place]
    outputs: list[object] = ["-o", target] if option == "-o" else ["-o", out, "--report", target]
    _refused(cli, out, "cannot write", verb, decoder, *outputs, "--data", samples)


CALIBRATE = "graphsurgery calibrate MODEL --data D -o phi.json\n"
VERIFY = "graphsurgery verify A B --data D\n"

USAGE: dict[str, tuple[list[object], str]] = {
    "verb": (["rewrit"], "rewrite"),
    "option": (["rewrite", "M", "-o", "OUT", "--gard", "clip"], "--guard"),
    "choice": (["rewrite", "M", "-o", "OUT", "--guard", "none"], "--guard"),
    "number": (["rewrite", "M", "-o", "OUT", "--chunks", "many"], "--chunks"),
    "negative": (["rewrite", "M", "-o", "OUT", "--expect", "-1"], "--expect"),
    "no-output": (["rewrite", "M"], "rewrite needs an output: graphsurgery rewrite M -o OUT (or -o -, or --dry-run)"),
    "no-model": (["rewrite", "-o", "OUT"], "rewrite needs a model: graphsurgery rewrite MODEL -o OUT --data D\n"),
    "inspect-no-model": (["inspect", "--json"], "inspect needs a model: graphsurgery inspect MODEL\n"),
    "no-value": (["rewrite", "M", "-o"], "-o needs a value; see graphsurgery rewrite --help\n"),
    "unknown-and-missing": (
        ["calibrate", "M", "--dta", "D"],
        "unknown option --dta; see graphsurgery calibrate --help\n",
    ),
    "extra": (["rewrite", "M", "N", "-o", "OUT"], "unexpected argument 'N'"),
    "verify-without-data": (["rewrite", "M", "-o", "OUT", "--verify"], "--data DIR"),
    "same-file": (["rewrite", "M", "-o", "OUT", "--guard", "exact", "--report", "OUT"], "choose another name"),
    "phi": (["rewrite", "M", "-o", "OUT", "--phi", "nan"], "--phi nan"),
    "no-table": (["rewrite", "M", "-o", "OUT", "--phi", "nowhere.json"], "nowhere.json"),
    "pattern": (["rewrite", "M", "-o", "OUT", "--include", "("], "--include"),
    "phi-without-data": (
        ["rewrite", "M", "-o", "OUT", "--phi", "500"],
        "--phi 500 cannot be checked without data; add --data DIR, or --no-verify to insist\n",
    ),
    "calibrate-no-model": (["calibrate", "--data", "D", "-o", "OUT"], f"calibrate needs a model: {CALIBRATE}"),
    "calibrate-no-data": (["calibrate", "M", "-o", "OUT"], f"calibrate needs data: {CALIBRATE}"),
    "calibrate-no-output": (["calibrate", "M", "--data", "synthetic:1"], f"calibrate needs an output: {CALIBRATE}"),
    "two-streams": (["verify", "-", "-", "--data", "synthetic:1"], "stdin"),
    "engine": (["verify", "M", "M", "--data", "synthetic:1", "--engine", "abacus"], "onnxruntime"),
    "no-models": (["verify", "--data", "synthetic:1"], f"verify needs two models: {VERIFY}"),
    "one-model": (["verify", "M", "--data", "synthetic:1"], f"verify needs a second model: {VERIFY}"),
    "verify-no-data": (["verify", "M", "M"], f"verify needs data: {VERIFY}"),
}


@pytest.mark.parametrize("kind", USAGE)
def test_a_wrong_command(cli: Cli, decoder: Path, out: Path, kind: str) -> None:
    arguments, fragment = USAGE[kind]
    places = {"M": decoder, "OUT": out}
    wanted = fragment.replace(" M ", f" {decoder} ")
    _refused(cli, out, wanted, *(places.get(str(argument), argument) for argument in arguments))


def _refused(cli: Cli, out: Path, fragment: str, *arguments: object) -> None:
    before = sorted(out.parent.iterdir())
    ran = cli(*arguments)
    assert (ran.status, ran.out, len(ran.lines)) == (2, "", 1), ran
    assert ran.err.startswith("graphsurgery: error: ")
    assert fragment in ran.err
    assert out.read_bytes() == SENTINEL
    assert sorted(out.parent.iterdir()) == before
