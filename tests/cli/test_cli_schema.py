"""Reports of real runs are what the schema says, and the schema refuses what is not a report."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cli_models import CLASSIFIER, FIXTURES, FUSED, Cli, write_model

Report = dict[str, Any]

MODELS = sorted(path.stem for path in FIXTURES.glob("*.onnx"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(resources.files("graphsurgery.report").joinpath("schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", MODELS)
def test_reports_of_exported_models(
    cli: Cli, validator: jsonschema.Draft202012Validator, tmp_path: Path, name: str
) -> None:
    report = tmp_path / "report.json"
    model, data = FIXTURES / f"{name}.onnx", FIXTURES / "data" / name
    ran = cli("rewrite", model, "-o", tmp_path / "m.onnx", "--data", data, "--report", report, "--target", "qnn-htp")
    assert ran.status in (0, 3, 4), ran.err
    document = json.loads(report.read_text())
    validator.validate(document)
    expected = json.loads((FIXTURES / "fixtures.json").read_text())["models"][model.name]
    assert len(document["sites"]) == expected["attention_sites"]
    assert len(document["not_attention"]) == expected["not_attention"]


@pytest.mark.parametrize(
    "flags", [[], ["--guard", "exact"], ["--phi", "2.5", "--no-verify", "--form", "chunks", "--chunks", "2"]]
)
def test_reports_of_other_fates(
    cli: Cli, validator: jsonschema.Draft202012Validator, decoder: Path, refused: Path, tmp_path: Path, flags: list[str]
) -> None:
    fused = write_model(tmp_path / "fused.onnx", FUSED)
    classifier = write_model(tmp_path / "classifier.onnx", CLASSIFIER)
    seen: set[str] = set()
    for model in (decoder, refused, fused, classifier):
        ran = cli("rewrite", model, "--dry-run", "--report", "-", *flags)
        assert ran.status in (0, 3)
        document = json.loads(ran.out)
        validator.validate(document)
        seen |= {site["status"] for site in document["sites"]}
    assert seen == {"refused", "rewritten" if flags else "left"}


def _bad_status(report: Report) -> None:
    report["sites"][0]["status"] = "perhaps"


def _no_reason(report: Report) -> None:
    report["sites"][0]["status"] = "left"


def _left_with_phi(report: Report) -> None:
    report["sites"][0] |= {"status": "left", "code": "window", "reason": "too wide", "values": {}}


def _no_sha(report: Report) -> None:
    del report["model"]["sha256"]


def _extra(report: Report) -> None:
    report["surprise"] = 1


def _no_engine(report: Report) -> None:
    del report["verify"]["onnxruntime"]


def _no_metric(report: Report) -> None:
    del report["verify"]["onnxruntime"]["logits"]["cosine"]


def _both_phi(report: Report) -> None:
    report["sites"][0]["phi"]["per_head"] = [1.0]


@pytest.mark.parametrize(
    "damage",
    [_bad_status, _no_reason, _left_with_phi, _no_sha, _extra, _no_engine, _no_metric, _both_phi],
    ids=lambda damage: damage.__name__,
)
def test_the_schema_refuses(
    cli: Cli,
    validator: jsonschema.Draft202012Validator,
    decoder: Path,
    samples: Path,
    damage: Callable[[Report], None],
) -> None:
    good = json.loads(cli("rewrite", decoder, "--dry-run", "--data", samples, "--report", "-").out)
    validator.validate(good)
    bad = copy.deepcopy(good)
    damage(bad)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(bad)
