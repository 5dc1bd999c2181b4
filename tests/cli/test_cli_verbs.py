from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import CLASSIFIER, FUSED, NO_ATTENTION, SENTINEL, Cli, write_model
from onnx import numpy_helper, parser

from graphsurgery import api
from graphsurgery.cli import doctor as doctor_module
from graphsurgery.cli import output
from graphsurgery.cli.outcome import earlier_sites
from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import Rewriter
from graphsurgery.options import CalibrateOptions, RewriteOptions, VerifyOptions
from graphsurgery.passes.decompose_attention import DecomposeAttention
from graphsurgery.versions import versions


def test_inspect_prints_one_line_per_site(cli: Cli, decoder: Path) -> None:
    ran = cli("inspect", decoder)
    assert (ran.status, ran.err) == (0, "")
    sites = [line for line in ran.out.splitlines() if line.startswith("supported ")]
    assert len(sites) == 2
    assert all("MatMul>Mul>Add>Softmax>MatMul" in line and "H=4" in line for line in sites)
    assert all("float32" in line and "[-60, 60]" in line for line in sites)
    assert "2 attentions, 2 supported; opset ai.onnx 18" in ran.out
    assert "19 MatMul" in ran.out


def test_inspect_follows_the_target(cli: Cli, decoder: Path) -> None:
    document = json.loads(cli("inspect", decoder, "--target", "qnn-htp", "--json").out)
    assert {site["window"]["dtype"] for site in document["sites"]} == {"float16"}
    assert {site["dtype"]["executes"] for site in document["sites"]} == {"float16"}


def test_inspect_json_has_the_same_keys_for_every_site(cli: Cli, decoder: Path, refused: Path) -> None:
    documents = [json.loads(cli("inspect", model, "--json").out) for model in (decoder, refused)]
    assert {document["schema"] for document in documents} == {"graphsurgery/inspect/1"}
    keys = {tuple(site) for document in documents for site in document["sites"]}
    assert len(keys) == 1
    statuses = [[site["status"] for site in document["sites"]] for document in documents]
    assert statuses == [["supported", "supported"], ["refused"]]
    assert documents[0]["nodes"]["MatMul"] == 19
    assert documents[0] == json.loads(cli("inspect", decoder, "--json").out)


def test_inspect_shows_unknown_dims_and_explains_the_letters(cli: Cli, tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    attention (float[] q, float[] k, float[] v) => (float[] y) {
      s = MatMul(q, k)
      p = Softmax(s)
      y = MatMul(p, v)
    }
    """
    model = parser.parse_model(text)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "m.onnx")
    ran = cli("inspect", tmp_path / "m.onnx")
    assert "  B=? H=? Q=? K=? D=? G=1  " in ran.out
    shown = " ".join(cli("inspect", "--help").out.split())
    assert "B batch, H query heads, Q queries, K keys, D head size, G query heads per key head, ?" in shown


def test_an_earlier_rewrite_is_named(cli: Cli, decoder: Path, samples: Path, tmp_path: Path) -> None:
    done, twice = tmp_path / "done.onnx", tmp_path / "twice.onnx"
    assert "already rewritten" not in cli("inspect", decoder).out
    assert json.loads(cli("inspect", decoder, "--json").out)["already_rewritten"] == []
    sites = [site["id"] for site in json.loads(cli("inspect", decoder, "--json").out)["sites"]]
    assert cli("rewrite", decoder, "-o", done, "--data", samples).status == 0
    assert "2 sites already rewritten by graphsurgery\n" in cli("inspect", done).out
    assert json.loads(cli("inspect", done, "--json").out)["already_rewritten"] == sites
    ran = cli("rewrite", done, "-o", twice, "--data", samples)
    assert (ran.status, twice.exists()) == (3, False)
    assert ran.lines[-2] == "2 sites already rewritten by graphsurgery"
    assert "no attention found" in ran.lines[-1]
    ran = cli("rewrite", done, "-o", twice, "--data", samples, "--expect", 0)
    assert (ran.status, twice.read_bytes()) == (0, done.read_bytes())
    assert "2 sites already rewritten by graphsurgery" in ran.lines and ran.lines[-1] == f"written to {twice}"


def test_a_decomposed_operator_is_no_rewritten_site(tmp_path: Path) -> None:
    model = onnx.load(write_model(tmp_path / "fused.onnx", FUSED))
    index = ModelIndex(model)
    rewriter = Rewriter(index)
    assert DecomposeAttention().apply(index, rewriter).changed
    rewriter.commit()
    assert any(node.metadata_props for node in model.graph.node)
    assert earlier_sites(ModelIndex(model)) == []


def test_inspect_says_why_a_site_is_refused(cli: Cli, refused: Path, tmp_path: Path) -> None:
    ran = cli("inspect", refused)
    (line,) = [line for line in ran.out.splitlines() if line.startswith("refused ")]
    assert "axis-not-last: the_Softmax_p normalises axis 2" in line
    assert "fused-attention" in cli("inspect", write_model(tmp_path / "f.onnx", FUSED)).out


def test_inspect_shows_the_nearest_miss(cli: Cli, tmp_path: Path) -> None:
    ran = cli("inspect", write_model(tmp_path / "m.onnx", CLASSIFIER))
    assert ran.status == 0
    assert "no attention found" in ran.out
    assert "no-attention" in ran.out and "nearest miss: " in ran.out


def test_inspect_of_a_model_without_softmax(cli: Cli, tmp_path: Path) -> None:
    ran = cli("inspect", write_model(tmp_path / "m.onnx", NO_ATTENTION))
    assert (ran.status, ran.err) == (0, "")
    assert "no attention found" in ran.out
    assert "1 Relu" in ran.out


def test_calibrate_writes_a_table_that_rewrite_takes(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    table, again = out.with_name("phi.json"), out.with_name("again.json")
    ran = cli("calibrate", decoder, "--data", samples, "-o", table)
    assert (ran.status, ran.out) == (0, "")
    document = json.loads(table.read_text())
    assert len(document["sites"]) == 2
    for site in document["sites"]:
        assert any(line.startswith(f"{site}: row max [") and "phi " in line for line in ran.lines)
    assert cli("calibrate", decoder, "--data", samples, "-o", again).status == 0
    assert table.read_bytes() == again.read_bytes()
    assert cli("rewrite", decoder, "-o", out, "--phi", table, "--expect", 2).status == 0


def test_calibrate_to_stdout(cli: Cli, decoder: Path) -> None:
    ran = cli("calibrate", decoder, "--data", "synthetic:3", "--max-samples", 2, "-o", "-", "--quiet")
    assert ran.status == 0
    assert json.loads(ran.out)["data"] == json.loads(ran.out)["data"] | {"samples": 2, "synthetic": True}
    assert "SYNTHETIC" in ran.err


def test_calibrate_without_attention_writes_nothing(cli: Cli, tmp_path: Path, out: Path) -> None:
    model = write_model(tmp_path / "m.onnx", CLASSIFIER)
    ran = cli("calibrate", model, "--data", "synthetic:1", "-o", out, "--quiet")
    assert (ran.status, len(ran.lines), out.read_bytes()) == (3, 1, SENTINEL)
    assert "no attention to calibrate" in ran.err


@pytest.fixture
def other(decoder: Path, tmp_path: Path) -> Path:
    """The decoder with one weight a tenth larger."""
    model = onnx.load(decoder)
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 2 and t.data_type == onnx.TensorProto.FLOAT)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.1), tensor.name))
    onnx.save(model, tmp_path / "other.onnx")
    return tmp_path / "other.onnx"


def test_verify_passes_equal_models(cli: Cli, decoder: Path, samples: Path) -> None:
    ran = cli("verify", decoder, decoder, "--data", samples, "--max-samples", 1)
    assert ran.status == 0
    rows = ran.out.splitlines()
    assert rows[0].startswith("verdict") and len(rows) > 5
    assert all(row.startswith("passed") for row in rows[1:])
    assert "verified on 1 sample" in ran.lines[-1]


def test_verify_fails_with_status_4(cli: Cli, decoder: Path, samples: Path, other: Path) -> None:
    ran = cli("verify", decoder, other, "--data", samples)
    assert ran.status == 4
    assert "FAILED   output  logits" in ran.out
    assert ran.lines[-1].startswith("graphsurgery: verification failed on 4 samples on onnxruntime: logits")
    (row,) = [line for line in ran.out.splitlines() if line.startswith("FAILED   output  logits")]
    why = row.split("  ")[-1].strip()
    assert "elements exceed" in why and (ran.out + ran.err).count(why) == 1
    ran = cli("verify", decoder, other, "--data", samples, "--json", "--quiet")
    document = json.loads(ran.out)
    assert (ran.status, document["passed"], len(ran.lines)) == (4, False, 1)
    assert document["onnxruntime"]["logits"]["passed"] is False
    assert why in ran.lines[0]
    assert (document["schema"], document["tool"]) == ("graphsurgery/verify/1", versions())
    wide = cli("verify", decoder, other, "--data", samples, "--rtol", 100, "--atol", 100)
    assert "passed   output  logits" in wide.out
    assert "FAILED   output" not in wide.out


def test_doctor_runs_an_engine(cli: Cli) -> None:
    ran = cli("doctor")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert any(line.split() == ["engine", "onnxruntime", "runs"] for line in lines)
    assert any(line.split() == ["onnx", onnx.__version__] for line in lines)


def test_doctor_says_how_to_get_what_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "_PACKAGES", ("no-such-package",))
    monkeypatch.setattr(doctor_module, "_try", lambda _: "cannot be loaded")
    ran = cli("doctor")
    assert ran.status == 0
    assert "pip install no-such-package" in ran.out
    assert "does not run: cannot be loaded" in ran.out


@pytest.mark.parametrize(
    ("verb", "options"), [("calibrate", CalibrateOptions), ("rewrite", RewriteOptions), ("verify", VerifyOptions)]
)
def test_every_option_is_a_flag_with_its_docstring(cli: Cli, verb: str, options: type) -> None:
    ran = cli(verb, "--help")
    assert ran.status == 0
    text = " ".join(ran.out.replace("│", " ").split())
    for field in fields(options):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "--no-decompose" not in text and "--empty" not in text


def test_flags_reach_the_library(cli: Cli, decoder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RewriteOptions] = []
    real = api.rewrite

    def recorded(*arguments: object, options: RewriteOptions, **rest: object) -> object:
        seen.append(options)
        return real(*arguments, options=options, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(api, "rewrite", recorded)
    wanted = RewriteOptions(
        phi="-3.5",
        guard="exact",
        otherwise="exact",
        form="chunks",
        chunks=3,
        chunk_sum="split",
        target="openvino",
        margin=2.5,
        include="Softmax",
        exclude="nothing",
        decompose_attention=True,
    )
    flags: list[object] = []
    for field in fields(wanted):
        value, name = getattr(wanted, field.name), f"--{field.name.replace('_', '-')}"
        assert value != getattr(RewriteOptions(), field.name), "a value that is the default shows nothing"
        flags += [name] if value is True else [name, value]
    assert cli("rewrite", decoder, "-o", out, *flags).status == 0
    assert seen == [wanted]


def test_version_and_bare_call(cli: Cli) -> None:
    assert cli("--version").out == "graphsurgery 0.1.0\n"
    ran = cli()
    assert ran.status == 0
    assert all(verb in ran.out for verb in ("inspect", "calibrate", "rewrite", "verify", "doctor"))


def test_plain_progress_is_at_most_one_line_in_five_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    assert list(output.PlainProgress()(range(10), "waiting", 10)) == list(range(10))
    shown = capsys.readouterr().err.splitlines()
    assert shown == [
        "waiting: 1 of 10, 2 s",
        "waiting: 4 of 10, 8 s",
        "waiting: 7 of 10, 14 s",
        "waiting: 10 of 10 done in 22.0 s",
    ]


def test_plain_progress_is_silent_below_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock) / 8)
    assert list(output.PlainProgress()(range(6), "waiting", 6)) == list(range(6))
    assert capsys.readouterr().err == ""
    assert list(output.PlainProgress()(range(7), "waiting", 7)) == list(range(7))
    assert capsys.readouterr().err == "waiting: 7 of 7 done in 1.0 s\n"
