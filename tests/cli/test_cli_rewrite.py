from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import onnx
import pytest
from cli_models import CLASSIFIER, FUSED, NO_ATTENTION, SENTINEL, Cli, write_model

from graphsurgery import api
from graphsurgery.model import files


def test_calibrates_on_one_part_and_verifies_on_the_rest(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    report = out.with_name("report.json")
    ran = cli("rewrite", decoder, "-o", out, "--data", samples, "--report", report, "--expect", 2)
    assert (ran.status, ran.out) == (0, "")
    assert "2 attentions, 2 rewritten" in ran.err
    assert "forms: sum guarded by clip" in ran.err
    assert re.search(r"nodes: 173 -> \d+ \(\+", ran.err)
    assert "phi: 0 (2 sites)" in ran.lines
    assert ran.lines[-2].startswith("verified on 1 sample on onnxruntime: ")
    assert ran.lines[-1] == f"written to {out}"
    assert "NOT VERIFIED" not in ran.err and "not held out" not in ran.err
    document = json.loads(report.read_text())
    assert document["method"]["samples"] == 3
    assert document["verify"]["passed"] and document["verify"]["held_out"]
    outputs = {value.name for value in onnx.load(decoder, load_external_data=False).graph.output}
    assert set(document["verify"]["onnxruntime"]) == outputs
    operators = {node.op_type for node in onnx.load(out).graph.node}
    assert "Softmax" not in operators and "Exp" in operators


def test_without_verification_calibrates_on_all_samples(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--data", samples, "--no-verify", "--report", "-")
    document = json.loads(ran.out)
    assert ran.status == 0
    assert (document["method"]["samples"], document["verify"]) == (4, None)


def test_a_run_is_repeatable(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    other = out.with_name("again.onnx")
    for target in (out, other):
        assert cli("rewrite", decoder, "-o", target, "--data", samples, "--no-verify").status == 0
    assert out.read_bytes() == other.read_bytes()


def test_dry_run_writes_the_report_alone(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    report = out.with_name("report.json")
    assert cli("rewrite", decoder, "-o", out, "--data", samples, "--dry-run", "--report", report).status == 0
    assert out.read_bytes() == SENTINEL
    assert json.loads(report.read_text())["sites"][0]["status"] == "rewritten"
    assert cli("rewrite", decoder, "--dry-run", "--guard", "exact").status == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.onnx", "report.json"]


def test_nothing_rewritten_says_which_command_would_work(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    report = out.with_name("report.json")
    ran = cli("rewrite", decoder, "-o", out, "--report", report)
    assert (ran.status, out.read_bytes()) == (3, SENTINEL)
    assert [site["code"] for site in json.loads(report.read_text())["sites"]] == ["no-evidence", "no-evidence"]
    assert ran.lines[-1].startswith("graphsurgery: ") and "2 left (no-evidence)" in ran.lines[-1]
    _follow(cli, ran.lines, samples, out)


def test_the_hint_for_a_failing_window_works(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--data", samples, "--margin", 1000)
    assert (ran.status, out.read_bytes()) == (3, SENTINEL)
    assert "2 left (window)" in ran.lines[-1]
    _follow(cli, ran.lines, samples, out)


def test_the_hint_for_a_fused_operator_works(cli: Cli, tmp_path: Path, out: Path) -> None:
    model = write_model(tmp_path / "fused.onnx", FUSED)
    ran = cli("rewrite", model, "-o", out, "--guard", "exact")
    assert (ran.status, out.read_bytes()) == (3, SENTINEL)
    assert "1 refused (fused-attention)" in ran.lines[-1]
    _follow(cli, ran.lines, "synthetic:2", out)


def _follow(cli: Cli, lines: list[str], data: object, out: Path) -> None:
    """Do what the hint says."""
    (hint,) = [line for line in lines if line.startswith("  try: graphsurgery ")]
    arguments = [str(data) if word == "DIR" else word for word in shlex.split(hint.split("graphsurgery ", 1)[1])]
    assert cli(*arguments).status == 0
    assert out.read_bytes() != SENTINEL


@pytest.mark.parametrize("text", [NO_ATTENTION, CLASSIFIER], ids=["no-softmax", "classifier"])
def test_no_attention_is_one_line(cli: Cli, tmp_path: Path, out: Path, text: str) -> None:
    ran = cli("rewrite", write_model(tmp_path / "m.onnx", text), "-o", out, "--guard", "exact")
    assert (ran.status, len(ran.lines), out.read_bytes()) == (3, 1, SENTINEL)
    assert "no attention found" in ran.err
    assert ("the_Softmax_y" in ran.err) == (text is CLASSIFIER)


def test_expect_is_a_condition_for_writing(cli: Cli, decoder: Path, out: Path) -> None:
    report = out.with_name("report.json")
    arguments = ["rewrite", decoder, "-o", out, "--guard", "exact", "--report", report]
    ran = cli(*arguments, "--expect", 5)
    assert (ran.status, out.read_bytes()) == (3, SENTINEL)
    assert "2 sites were rewritten, --expect asks for 5" in ran.lines[-1]
    assert report.is_file()
    assert cli(*arguments, "--expect", 2).status == 0


def test_expecting_no_site_writes_the_same_bytes(cli: Cli, tmp_path: Path, out: Path) -> None:
    model = write_model(tmp_path / "m.onnx", CLASSIFIER)
    # The producer's name comes last here, so that writing the parsed model would give other bytes.
    model.write_bytes(model.read_bytes() + b"\x12\x04last")
    assert model.read_bytes() != onnx.load(model).SerializeToString()
    assert cli("rewrite", model, "-o", out, "--expect", 0).status == 0
    assert out.read_bytes() == model.read_bytes()


@pytest.fixture
def wrong_table(cli: Cli, decoder: Path, samples: Path, tmp_path: Path) -> Path:
    """A table whose row statistics are those of another model: its φ empties every row."""
    path = tmp_path / "phi.json"
    assert cli("calibrate", decoder, "--data", samples, "-o", path).status == 0
    table = json.loads(path.read_text())
    for site in table["sites"].values():
        for head in site["heads"]:
            head.update(row_max_low=300.0, row_max_high=305.0, several_low=300.0, single_low=300.0, lse_high=306.0)
    path.write_text(json.dumps(table))
    return path


def test_a_failed_verification_keeps_the_old_output(
    cli: Cli, decoder: Path, samples: Path, out: Path, wrong_table: Path
) -> None:
    report = out.with_name("report.json")
    arguments = ["rewrite", decoder, "-o", out, "--phi", wrong_table, "--data", samples, "--report", report]
    ran = cli(*arguments)
    assert (ran.status, out.read_bytes()) == (4, SENTINEL)
    assert ran.lines[-1].startswith("graphsurgery: verification failed on 4 samples")
    assert ran.lines[-1].endswith("; not written")
    assert json.loads(report.read_text())["verify"]["passed"] is False
    ran = cli(*arguments, "--keep-failed", "--dry-run")
    assert (ran.status, out.read_bytes()) == (4, SENTINEL)
    assert ran.lines[-1].endswith("; dry run: nothing written")
    ran = cli(*arguments, "--keep-failed")
    assert (ran.status, out.read_bytes() != SENTINEL) == (4, True)
    assert ran.lines[-1].endswith("; written all the same (--keep-failed)")
    assert "written to" not in ran.err
    ran = cli(*arguments, "--no-verify")
    assert (ran.status, ran.lines[-2:]) == (0, ["NOT VERIFIED (--no-verify)", f"written to {out}"])


def test_synthetic_data_is_said_loudly_even_when_quiet(cli: Cli, decoder: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--data", "synthetic:2", "--quiet")
    assert ran.status == 0
    assert ran.lines and all(line.startswith("graphsurgery: WARNING: ") for line in ran.lines)
    assert "SYNTHETIC" in ran.err


def test_quiet_says_nothing(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--data", samples, "--quiet")
    assert (ran.status, ran.out, ran.err) == (0, "", "")


@pytest.mark.parametrize("external", ["keep", "copy"])
def test_data_files_come_along(cli: Cli, decoder: Path, samples: Path, tmp_path: Path, external: str) -> None:
    source, target = tmp_path / "in" / "m.onnx", tmp_path / "elsewhere" / "m.onnx"
    source.parent.mkdir()
    target.parent.mkdir()
    onnx.save(onnx.load(decoder), source, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    ran = cli("rewrite", source, "-o", target, "--data", samples, "--external", external)
    assert ran.status == 0
    assert "verified on" in ran.err
    assert not target.with_name("weights.bin").samefile(source.with_name("weights.bin"))
    for path in (source, target):
        onnx.checker.check_model(path)
    assert cli("verify", source, target, "--data", samples).status == 0


def test_an_interrupt_leaves_nothing_behind(
    cli: Cli, decoder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "place_external", interrupted)
    monkeypatch.setattr(files, "may_hold_external", lambda _: True)
    ran = cli("rewrite", decoder, "-o", out, "--guard", "exact", "--report", out.with_name("report.json"))
    assert (ran.status, ran.lines) == (130, ["graphsurgery: interrupted; nothing was written"])
    assert [path.name for path in out.parent.iterdir()] == ["model.onnx"]
    assert out.read_bytes() == SENTINEL


def test_a_bug_keeps_its_traceback(cli: Cli, decoder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(api, "rewrite", broken)
    ran = cli("rewrite", decoder, "-o", out, "--guard", "exact")
    assert (ran.status, out.read_bytes()) == (1, SENTINEL)
    assert "Traceback" in ran.err and ran.lines[-1] == "ZeroDivisionError: of ours"
