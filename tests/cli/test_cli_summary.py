"""What the lines after a rewrite say, and what they must not keep quiet about."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_models import ATTENTION, CLASSIFIER, FIXTURES, SENTINEL, Cli, write_model

from graphsurgery.cli.typed import CommandLine
from graphsurgery.report.text import summary


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--guard", "exact"], "no --data given"),
        (["--otherwise", "exact"], "no --data given"),
        (["--phi", "2", "--no-verify"], "--no-verify"),
        (["--guard", "exact", "--data", "SAMPLES", "--no-verify"], "--no-verify"),
    ],
)
def test_a_model_nobody_compared_is_named_so(
    cli: Cli, decoder: Path, samples: Path, out: Path, flags: list[str], why: str
) -> None:
    ran = cli("rewrite", decoder, "-o", out, *(str(samples) if flag == "SAMPLES" else flag for flag in flags))
    assert (ran.status, ran.lines[-2:]) == (0, [f"NOT VERIFIED ({why})", f"written to {out}"])
    assert "verified on" not in ran.err


def test_a_phi_by_hand_is_checked_against_data(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--phi", "2.5", "--data", samples)
    assert ran.status == 0
    assert "phi: 2.5 (2 sites)" in ran.lines and ran.lines[-2].startswith("verified on 1 sample")
    assert cli("rewrite", decoder, "-o", out, "--phi", "2.5", "--guard", "exact").status == 0


def test_a_single_sample_is_not_held_out(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    report = out.with_name("report.json")
    ran = cli("rewrite", decoder, "-o", out, "--data", samples / "0.npz", "--report", report)
    assert ran.status == 0
    assert ran.lines[-2].startswith("verified on 1 sample on onnxruntime: ")
    assert ran.lines[-2].endswith(" (the sample calibration has seen: not held out)")
    assert json.loads(report.read_text())["verify"]["held_out"] is False


def test_float16_on_the_target_is_not_what_was_run(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--data", samples, "--target", "qnn-htp")
    assert ran.status == 0
    assert ran.lines[-2].startswith("verified on 1 sample")
    assert ran.lines[-2].endswith("; float16 execution on the target was not run")


def test_a_table_is_verified_on_all_samples(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    table = out.with_name("phi.json")
    for calibrated, held_out in ((samples, False), (samples / "1.npz", True)):
        assert cli("calibrate", decoder, "--data", calibrated, "-o", table).status == 0
        ran = cli("rewrite", decoder, "-o", out, "--phi", table, "--data", samples, "--report", "-")
        assert ran.status == 0
        verify = json.loads(ran.out)["verify"]
        assert (verify["samples"], verify["held_out"], verify["passed"]) == (4, held_out, True)
        assert ("not held out" in ran.lines[-2]) != held_out


def test_a_table_of_made_up_samples_is_said_loudly(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    table = out.with_name("phi.json")
    assert cli("calibrate", decoder, "--data", "synthetic:2", "-o", table).status == 0
    ran = cli("rewrite", decoder, "-o", out, "--phi", table, "--data", samples, "--quiet")
    assert ran.status == 0
    assert [line for line in ran.lines if "SYNTHETIC" in line] == ran.lines[:1]


def test_a_dry_run_says_so(cli: Cli, decoder: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--guard", "exact", "--dry-run")
    assert (ran.status, ran.lines[-1], out.read_bytes()) == (0, "dry run: nothing written", SENTINEL)
    assert "written to" not in ran.err


def test_nothing_to_do_as_expected(cli: Cli, tmp_path: Path, out: Path) -> None:
    ran = cli("rewrite", write_model(tmp_path / "m.onnx", CLASSIFIER), "-o", out, "--expect", 0)
    assert (ran.status, len(ran.lines), ran.lines[-1]) == (0, 2, f"written to {out}")
    assert "no attention found" in ran.lines[0]


def test_sites_left_are_explained_on_success(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    ran = cli("rewrite", decoder, "-o", out, "--data", samples, "--include", "204")
    assert ran.status == 0
    assert "2 attentions, 1 rewritten, 1 left (excluded)" in ran.lines[0]
    (line,) = [line for line in ran.lines if line.startswith("excluded: ")]
    assert "left out by --include or --exclude" in line
    assert "phi: 0 (1 site)" in ran.lines


def _site(status: str, **fields: Any) -> dict[str, Any]:
    phi = {"value": 0.0, "source": "calibrated"}
    base = {"status": status, "code": None, "reason": None, "form": "sum", "chunks": 1, "guard": "clip", "phi": phi}
    return {**base, "notes": [], **fields}


def test_summary_of_many_fates() -> None:
    sites = [
        _site("rewritten", notes=["one sum instead of chunks"]),
        _site("rewritten", notes=["one sum instead of chunks", "one sum instead of chunks"]),
        _site("rewritten", form="chunks", chunks=4, phi={"value": 13.5, "source": "calibrated"}),
        _site("rewritten", phi={"per_head": [1.0, 2.0], "source": "calibrated"}),
        _site("rewritten", phi={"value": None, "source": "row maximum"}, notes=["kept (window: a spans 30)"]),
        _site("rewritten", phi={"value": None, "source": "row maximum"}, notes=["kept (window: b spans 40)"]),
        _site("left", code="window", reason="c spans 50"),
        _site("left", code="window", reason="d spans 60"),
        _site("refused", code="quantised", reason="e is quantised"),
    ]
    del sites[-1]["notes"]
    report = {"model": {"path": "m.onnx"}, "sites": sites, "nodes": {"before": {"Add": 10}, "after": {"Add": 11}}}
    assert summary(report, {"window": "do this"}) == [
        "m.onnx: 9 attentions, 6 rewritten, 2 left (window), 1 refused (quantised)",
        "forms: 5 sum guarded by clip, 1 chunks=4 guarded by clip",
        "phi: 0 (2 sites), 13.5 (1 site), per head (1 site), row maximum (2 sites)",
        "nodes: 10 -> 11 (+10.0%)",
        "window (2 sites): c spans 50",
        "  try: do this",
        "quantised: e is quantised",
        "note (2 sites): one sum instead of chunks",
        "note (2 sites): kept (window: a spans 30)",
    ]


def test_notes_of_a_real_run(cli: Cli, out: Path) -> None:
    name = "gemma2_eager_dynamo"
    model, data = FIXTURES / f"{name}.onnx", FIXTURES / "data" / name
    ran = cli("rewrite", model, "-o", out, "--data", data, "--target", "qnn-htp", "--otherwise", "exact")
    assert ran.status == 0
    assert "phi: row maximum (2 sites)" in ran.lines
    assert sum(line.startswith("note (2 sites): row maximum kept (window: ") for line in ran.lines) == 1


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("-o OUT", "-o OUT --data DIR"),
        ("-o OUT --include Softmax", "-o OUT --include Softmax --data DIR"),
        ("-o OUT --data DIR --margin 1000", "-o OUT --data DIR --margin 1000 --otherwise exact"),
        (
            "--otherwise=leave --margin 1000 -o OUT --data DIR",
            "--margin 1000 -o OUT --data DIR --otherwise exact",
        ),
        ("-o OUT --data DIR --phi 500", "-o OUT --data DIR --otherwise exact"),
        ("-o OUT --exclude . --data DIR", "-o OUT --data DIR"),
        ("--include=nothing -o OUT", "-o OUT --data DIR"),
        ("--guard exact -o OUT --include nothing", "--guard exact -o OUT"),
    ],
)
def test_a_hint_is_the_command_that_was_typed_with_a_change(
    cli: Cli, decoder: Path, samples: Path, out: Path, flags: str, hint: str
) -> None:
    def words(text: str) -> list[str]:
        return [{"OUT": str(out), "DIR": str(samples)}.get(word, word) for word in text.split()]

    ran = cli("rewrite", decoder, *words(flags))
    assert (ran.status, out.read_bytes()) == (3, SENTINEL)
    (line,) = [line for line in ran.lines if line.startswith("  try: ")]
    typed = [str(samples) if word == "DIR" else word for word in shlex.split(line.removeprefix("  try: "))]
    assert typed == ["graphsurgery", "rewrite", str(decoder), *words(hint)]
    assert cli(*typed[1:]).status == 0
    assert out.read_bytes() != SENTINEL


def test_the_hint_for_rows_nobody_saw(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    table = out.with_name("phi.json")
    assert cli("calibrate", decoder, "--data", samples, "-o", table).status == 0
    document = json.loads(table.read_text())
    document["sites"] = {}
    table.write_text(json.dumps(document))
    ran = cli("rewrite", decoder, "-o", out, "--phi", table)
    assert ran.status == 3
    (line,) = [line for line in ran.lines if line.startswith("  try: ")]
    assert line == f"  try: graphsurgery rewrite {decoder} -o {out} --phi {table} --otherwise exact"
    assert cli(*shlex.split(line)[2:]).status == 0


def test_the_hint_for_rows_behind_a_finite_mask(cli: Cli, tmp_path: Path, out: Path) -> None:
    text = ATTENTION.replace("AXIS", "3").replace("s = MatMul(q, k)", "t = MatMul(q, k)\n  s = Add(t, mask)")
    model = write_model(tmp_path / "m.onnx", text.replace("attention (", "attention (float[1,1,4,4] mask, "))
    rng = np.random.default_rng(7)
    shapes = {"q": (1, 2, 4, 8), "k": (1, 2, 8, 4), "v": (1, 2, 4, 8)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    mask = np.zeros((1, 1, 4, 4), np.float32)
    mask[:, :, 2] = -10000
    np.savez(tmp_path / "0.npz", mask=mask, **arrays)
    ran = cli("rewrite", model, "-o", out, "--data", tmp_path / "0.npz")
    assert ran.status == 3
    assert any(line.startswith("hidden-rows: ") for line in ran.lines)
    (line,) = [line for line in ran.lines if line.startswith("  try: ")]
    assert line.endswith(" --otherwise exact")
    assert cli(*shlex.split(line)[2:]).status == 0


def test_command_lines_are_quoted_and_end_with_their_options() -> None:
    line = CommandLine(("rewrite", "--a", "b", "--a=c", "--ab", "d", "--", "my model"))
    assert str(line.minus("--a").plus("--x", "y z")) == "graphsurgery rewrite --ab d --x 'y z' -- 'my model'"
    assert CommandLine(("rewrite", "--a")).minus("--a") == CommandLine(("rewrite",))
