from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

from graphsurgery.api import calibrate
from graphsurgery.errors import UsageError
from graphsurgery.options import CalibrateOptions
from graphsurgery.phi.collect import Evidence
from graphsurgery.phi.statistics import RowStatistics, SiteStatistics
from graphsurgery.phi.table import PhiTable, load_table

SHA = "0" * 64


def table() -> PhiTable:
    head = RowStatistics(3, 1, 0, -1.5, 2.5, -1.5, float("inf"), 3.0, -4.0, 2.0)
    other = RowStatistics(2, 0, 2, -1.0, 2.0, float("inf"), -1.0, 2.0, -1.0, 0.5)
    evidence = Evidence(
        {"main/b": SiteStatistics((head, other), 2), "main/a": SiteStatistics((other,))},
        {"main/c": "no sample ran this part of the graph"},
        "1" * 64,
        2,
        ("folder",),
        False,
    )
    return PhiTable(
        SHA, evidence, {"margin": None, "target": "generic"}, {"graphsurgery": "1"}, {"main/a": {"phi": 0.5}}
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "phi.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_round_trip(tmp_path: Path) -> None:
    first = table()
    back = load_table(written(tmp_path, first.to_json()), SHA)
    assert back.evidence == first.evidence
    assert (back.model_sha256, back.options, back.versions) == (SHA, first.options, first.versions)
    again = PhiTable(SHA, back.evidence, back.options, back.versions, first.choices)
    assert again.to_json() == first.to_json()


def test_what_the_text_says() -> None:
    document = json.loads(table().to_json())
    assert list(document) == ["schema", "versions", "model_sha256", "data", "options", "sites", "unseen"]
    assert document["schema"] == "graphsurgery/phi/1" and list(document["sites"]) == ["main/a", "main/b"]
    site = document["sites"]["main/b"]
    assert (site["samples"], len(site["heads"]), site["layer"]["rows"]) == (2, 2, 5)
    assert site["heads"][0]["single_low"] is None, "JSON has no infinity"
    assert document["sites"]["main/a"]["phi"] == 0.5
    assert "Infinity" not in table().to_json() and table().to_json().endswith("}\n")


def changed(**entries: Any) -> str:
    return json.dumps({**json.loads(table().to_json()), **entries})


def without(key: str) -> str:
    document = json.loads(table().to_json())
    del document[key]
    return json.dumps(document)


def damaged_head(**entries: Any) -> str:
    document = json.loads(table().to_json())
    document["sites"]["main/a"]["heads"][0].update(entries)
    return json.dumps(document)


NO_SCHEMA = "is not a φ table of schema graphsurgery/phi/1; write one with calibrate"
DAMAGED = {
    "empty": ("", "is not a φ table"),
    "cut_off": (table().to_json()[:200], "is not a φ table"),
    "number": ("1.5", NO_SCHEMA),
    "list": ("[]", NO_SCHEMA),
    "other_schema": (changed(schema="graphsurgery/report/1"), NO_SCHEMA),
    "other_model": (changed(model_sha256="2" * 64), "was made for another model"),
    "no_model": (without("model_sha256"), "was made for another model"),
    "no_data": (without("data"), "is damaged"),
    "no_sites": (without("sites"), "is damaged"),
    "no_unseen": (without("unseen"), "is damaged"),
    "sites_as_list": (changed(sites=[1]), "is damaged"),
    "site_as_number": (changed(sites={"a": 1}), "is damaged"),
    "samples_as_text": (changed(sites={"a": {"heads": [], "samples": "x"}}), "is damaged"),
    "unknown_statistic": (damaged_head(more=1), "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_tables(tmp_path: Path, name: str) -> None:
    text, message = DAMAGED[name]
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_table(path, SHA)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and "calibrate" in str(caught.value)


@pytest.mark.parametrize(
    "entry", [{"rows": "three"}, {"lse_high": "high"}, {"row_max_low": [1]}, {"lse_high": math.nan}]
)
def test_statistics_that_are_no_numbers(tmp_path: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is damaged"):
        load_table(written(tmp_path, damaged_head(**entry)), SHA)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "phi.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UsageError, match="is not a φ table"):
        load_table(path, SHA)


def test_a_missing_table_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match=r"cannot read .* as a φ table: .*; give auto, a number or"):
            load_table(path, SHA)


def attention(name: str = "soft") -> ModelProto:
    return parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 17]> agraph (float[B, 2, 4] q, float[B, 4, 3] k, float[B, 3, 4] v)
        => (float[B, 2, 4] y) {{ a = MatMul(q, k)  [{name}] p = Softmax(a)  y = MatMul(p, v) }}"""
    )


def feeds(count: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    shapes = {"q": (2, 2, 4), "k": (2, 4, 3), "v": (2, 3, 4)}
    return [{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(count)]


def test_calibrating_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(attention().SerializeToString())
    first, second = (calibrate(path, data=feeds()) for _ in range(2))
    assert first.to_json() == second.to_json()
    back = load_table(written(tmp_path, first.to_json()), first.model_sha256)
    assert back.evidence.samples == 2 and list(back.evidence.sites) == ["main/soft"]
    assert first.to_json() != calibrate(path, data=feeds(1)).to_json()


def test_choices_follow_the_target_and_the_margin() -> None:
    wide, half, margin = (
        calibrate(attention(), data=feeds(), options=options).choices["main/soft"]
        for options in (None, CalibrateOptions(target="qnn-htp"), CalibrateOptions(margin=1.0))
    )
    assert (wide["window"], wide["margin"], wide["phi"]) == ("float32", 10.0, 0.0)
    assert (half["window"], half["margin"]) == ("float16", 3.0)
    assert margin["margin"] == 1.0 and margin["phi_admitted"] != wide["phi_admitted"]


def test_calibrating_needs_data() -> None:
    with pytest.raises(UsageError, match="calibrate needs data; give --data DIR"):
        calibrate(attention(), data=None)  # type: ignore[arg-type]


def test_a_table_of_another_model(tmp_path: Path) -> None:
    first = calibrate(attention(), data=feeds())
    path = written(tmp_path, first.to_json())
    other = calibrate(attention("other"), data=feeds())
    with pytest.raises(UsageError, match="was made for another model"):
        load_table(path, other.model_sha256)
    assert load_table(path, first.model_sha256).model_sha256 == first.model_sha256
