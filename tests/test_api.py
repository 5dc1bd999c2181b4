from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, parser

import graphsurgery
from graphsurgery import CalibrateOptions, RewriteOptions
from graphsurgery.engines import engine
from graphsurgery.errors import UsageError

HEADER = '<ir_version: 10, opset_import: ["" : 17]>\n'
INPUTS = "float[B, 2, Q, 4] q, float[B, 2, 4, 6] k, float[B, 2, 6, 4] v"
TWO = """a1 = MatMul(q, k)  [soft1] p1 = Softmax(a1)  [pv1] h = MatMul(p1, v)
  a2 = MatMul(h, k)  [soft2] p2 = Softmax(a2)  [pv2] y = MatMul(p2, v)"""
EXACT = RewriteOptions(guard="exact")


def model(body: str = TWO, inputs: str = INPUTS) -> ModelProto:
    return parser.parse_model(f"{HEADER} agraph ({inputs}) => (float[B, 2, Q, 4] y) {{ {body} }}")


def feeds(count: int = 2, scale: float = 1.0) -> list[dict[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(2)
    shapes = {"q": (1, 2, 3, 4), "k": (1, 2, 4, 6), "v": (1, 2, 6, 4)}
    return [
        {name: rng.normal(0, scale if name == "q" else 1, shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(count)
    ]


def run(proto: ModelProto, feed: dict[str, NDArray[np.float32]]) -> NDArray[Any]:
    return engine("onnxruntime").open(proto.SerializeToString()).run(feed)["y"]


def assert_same(first: ModelProto, second: ModelProto, scale: float = 1.0) -> None:
    for feed in feeds(scale=scale):
        one, two = run(first, feed), run(second, feed)
        assert (one.shape, one.dtype) == (two.shape, two.dtype) and np.isfinite(two).all()
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)


def entries(result: graphsurgery.RewriteResult) -> list[tuple[str, str, str | None]]:
    return [(site["id"], site["status"], site["code"]) for site in result.report["sites"]]


def operators(proto: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node)


BOTH = [("main/soft1", "rewritten", None), ("main/soft2", "rewritten", None)]


# -- kinds of models


def test_a_model_in_memory_is_not_modified() -> None:
    proto = model()
    before = proto.SerializeToString()
    result = graphsurgery.rewrite(proto, data=feeds())
    assert proto.SerializeToString() == before
    assert isinstance(result.model, ModelProto) and result.model is not proto
    assert (entries(result), result.changed, result.rewritten) == (BOTH, True, 2)
    assert operators(result.model)["Softmax"] == 0 and operators(result.model)["MatMul"] == 4
    onnx.checker.check_model(result.model, full_check=True)
    assert_same(proto, result.model)


def test_nothing_to_do_gives_equal_bytes() -> None:
    proto = model("y = Relu(q)")
    result = graphsurgery.rewrite(proto, options=EXACT)
    assert not result.changed and result.rewritten == 0 and result.report["sites"] == []
    assert result.model.SerializeToString() == proto.SerializeToString()


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model().SerializeToString())
    result = graphsurgery.rewrite(kind(path), options=EXACT)
    assert isinstance(result.model, ModelProto) and entries(result) == BOTH
    assert path.read_bytes() == model().SerializeToString(), "the file stays"
    assert result.report["model"]["path"] == str(path) and result.report["model"]["nodes"] == 6
    assert result.model.SerializeToString() == graphsurgery.rewrite(model(), options=EXACT).model.SerializeToString()


def test_a_graph_of_graphsurgeon_goes_in_and_out() -> None:
    graph = gs.import_onnx(model())
    before = gs.export_onnx(graph).SerializeToString()
    result = graphsurgery.rewrite(graph, data=feeds())
    assert isinstance(result.model, gs.Graph) and result.model is not graph and entries(result) == BOTH
    assert gs.export_onnx(graph).SerializeToString() == before, "the graph is not modified"
    assert_same(model(), gs.export_onnx(result.model))


@pytest.mark.parametrize("bad", ["no such file.onnx", ""])
def test_no_model(bad: str) -> None:
    with pytest.raises(UsageError):
        graphsurgery.rewrite(bad, options=EXACT)


def test_find_attention() -> None:
    proto = model(TWO + "  [gate] g = Softmax(q)  [fused] f = Attention(q, k, v)")
    before = proto.SerializeToString()
    found = graphsurgery.find_attention(proto)
    assert [site.id for site in found.sites] == ["main/soft1", "main/soft2"]
    assert [site.refusal.code for site in found.refused] == ["fused-attention"]
    assert [other.id for other in found.others] == ["main/gate"]
    assert proto.SerializeToString() == before
    assert len(graphsurgery.find_attention(gs.import_onnx(model())).sites) == 2


# -- evidence


def test_without_evidence_every_site_is_left() -> None:
    proto = model()
    result = graphsurgery.rewrite(proto)
    assert [code for _, _, code in entries(result)] == ["no-evidence"] * 2 and not result.changed
    assert all("--data DIR" in site["reason"] for site in result.report["sites"])
    assert result.model.SerializeToString() == proto.SerializeToString()


def test_otherwise_exact_needs_no_evidence() -> None:
    result = graphsurgery.rewrite(model(), options=RewriteOptions(otherwise="exact"))
    assert entries(result) == BOTH and {site["guard"] for site in result.report["sites"]} == {"exact"}
    assert "ReduceMax" in operators(result.model)
    assert_same(model(), result.model, scale=200.0)


def test_calibrated_sites_keep_no_row_maximum() -> None:
    result = graphsurgery.rewrite(model(), data=feeds())
    assert {(site["guard"], site["phi"]["source"]) for site in result.report["sites"]} == {("clip", "calibrated")}
    assert operators(result.model)["Clip"] == 2 and "ReduceMax" not in operators(result.model)


def test_scores_too_wide_for_any_window() -> None:
    wide = feeds(scale=200.0)
    result = graphsurgery.rewrite(model(), data=wide)
    assert entries(result)[0] == ("main/soft1", "left", "window")
    mixed = graphsurgery.rewrite(model(), data=wide, options=RewriteOptions(otherwise="exact"))
    first, second = mixed.report["sites"]
    assert (first["status"], first["guard"], second["guard"]) == ("rewritten", "exact", "clip")
    assert_same(model(), mixed.model, scale=200.0)


def test_a_number_for_phi() -> None:
    result = graphsurgery.rewrite(model(), options=RewriteOptions(phi="2.5"))
    assert entries(result) == BOTH
    assert {(site["phi"]["value"], site["phi"]["source"]) for site in result.report["sites"]} == {(2.5, "given")}
    assert_same(model(), result.model)


def test_a_number_outside_of_the_evidence_is_left() -> None:
    proto = model()
    result = graphsurgery.rewrite(proto, data=feeds(), options=RewriteOptions(phi="200"))
    assert [code for _, _, code in entries(result)] == ["window"] * 2 and not result.changed
    assert all("φ = 200 puts rows of soft" in site["reason"] for site in result.report["sites"])
    assert result.model.SerializeToString() == proto.SerializeToString()
    inside = graphsurgery.rewrite(model(), data=feeds(), options=RewriteOptions(phi="20"))
    assert entries(inside) == BOTH
    assert_same(model(), inside.model)


@pytest.mark.parametrize("phi", ["inf", "nan", "-inf"])
def test_a_phi_that_is_not_finite(phi: str) -> None:
    with pytest.raises(UsageError, match=f"--phi {phi} is no score of an attention"):
        graphsurgery.rewrite(model(), options=RewriteOptions(phi=phi))


def test_a_table_for_phi(tmp_path: Path) -> None:
    table = graphsurgery.calibrate(model(), data=feeds())
    path = tmp_path / "phi.json"
    path.write_text(table.to_json(), encoding="utf-8")
    result = graphsurgery.rewrite(model(), options=RewriteOptions(phi=str(path)))
    direct = graphsurgery.rewrite(model(), data=feeds())
    assert result.model.SerializeToString() == direct.model.SerializeToString()
    with pytest.raises(UsageError, match="was made for another model"):
        graphsurgery.rewrite(model(TWO.replace("soft1", "other")), options=RewriteOptions(phi=str(path)))
    with pytest.raises(
        UsageError, match=r"cannot read .* as a φ table: .*; give auto, a number or a file of calibrate"
    ):
        graphsurgery.rewrite(model(), options=RewriteOptions(phi=str(tmp_path / "none.json")))


@pytest.mark.parametrize("value", ["high", float("nan")])
def test_a_table_with_damaged_numbers(tmp_path: Path, value: object) -> None:
    document = json.loads(graphsurgery.calibrate(model(), data=feeds()).to_json())
    document["sites"]["main/soft1"]["heads"][0]["lse_high"] = value
    path = tmp_path / "phi.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    try:
        graphsurgery.rewrite(model(), options=RewriteOptions(phi=str(path)))
    except UsageError:
        return
    raise AssertionError("used as if it were evidence")


@pytest.mark.parametrize(
    "bad",
    [
        [{"q": np.zeros((1, 2, 3, 4), np.float32)}],
        [{**feeds()[0], "more": np.zeros(1, np.float32)}],
        [{**feeds()[0], "q": np.zeros((1, 2, 3, 4), np.float64)}],
        [{**feeds()[0], "q": np.zeros((1, 2, 4), np.float32)}],
        [{**feeds()[0], "q": np.full((1, 2, 3, 4), np.nan, np.float32)}],
        [],
        "no such folder",
    ],
    ids=["missing", "extra", "dtype", "rank", "nan", "empty", "folder"],
)
def test_data_that_cannot_be_used(bad: Any) -> None:
    for call in (graphsurgery.rewrite, graphsurgery.calibrate):
        with pytest.raises(UsageError) as caught:
            call(model(), data=bad)
        assert "\n" not in str(caught.value)


def test_data_from_a_generator() -> None:
    def samples() -> Iterator[dict[str, NDArray[np.float32]]]:
        yield from feeds(3)

    assert graphsurgery.rewrite(model(), data=samples()).report["method"]["samples"] == 3
    table = graphsurgery.calibrate(model(), data=samples(), options=CalibrateOptions(max_samples=2))
    assert table.evidence.samples == 2


# -- which sites, which form


@pytest.mark.parametrize(
    ("options", "rewritten"),
    [
        ({"include": "soft1"}, ["main/soft1"]),
        ({"exclude": "soft1"}, ["main/soft2"]),
        ({"include": "soft", "exclude": "2$"}, ["main/soft1"]),
        ({"include": "^soft"}, []),
        ({"exclude": "main/"}, []),
    ],
)
def test_include_and_exclude(options: dict[str, str], rewritten: list[str]) -> None:
    proto = model()
    result = graphsurgery.rewrite(proto, options=RewriteOptions(guard="exact", **options))  # type: ignore[arg-type]
    found = entries(result)
    assert [label for label, status, _ in found if status == "rewritten"] == rewritten
    assert all(code == "excluded" for _, status, code in found if status == "left")
    assert operators(result.model)["Softmax"] == 2 - len(rewritten)
    assert result.changed == bool(rewritten)
    assert_same(proto, result.model)


@pytest.mark.parametrize("flag", ["include", "exclude"])
def test_a_pattern_that_is_none(flag: str) -> None:
    with pytest.raises(UsageError, match=rf"--{flag} '\(' is not a regular expression: .*; mend the pattern"):
        graphsurgery.rewrite(model(), options=RewriteOptions(guard="exact", **{flag: "("}))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_sum", ["reshape", "split"])
def test_chunks(chunk_sum: Any) -> None:
    options = RewriteOptions(phi="0", form="chunks", chunks=3, chunk_sum=chunk_sum)
    result = graphsurgery.rewrite(model(), options=options)
    assert [site["chunks"] for site in result.report["sites"]] == [3, 3]
    assert operators(result.model)["Split"] == (2 if chunk_sum == "split" else 0)
    assert_same(model(), result.model)


FUSED = "[fused] h = Attention(q, t, v)  a = MatMul(h, k)  [soft] p = Softmax(a)  y = MatMul(p, v)"


def test_decompose_attention() -> None:
    proto = model("t = Transpose<perm = [0, 1, 3, 2]>(k)  " + FUSED)
    proto.opset_import[0].version = 23
    left = graphsurgery.rewrite(proto, options=EXACT)
    assert entries(left) == [("main/soft", "rewritten", None), ("main/fused", "refused", "fused-attention")]
    result = graphsurgery.rewrite(proto, options=RewriteOptions(guard="exact", decompose_attention=True))
    assert result.rewritten == 2 and "Attention" not in operators(result.model)
    assert [entry["name"] for entry in result.report["passes"]] == ["decompose_attention", "unified_max"]
    assert_same(proto, result.model)


def test_decomposed_attention_is_calibrated() -> None:
    proto = model("t = Transpose<perm = [0, 1, 3, 2]>(k)  " + FUSED)
    proto.opset_import[0].version = 23
    result = graphsurgery.rewrite(proto, data=feeds(), options=RewriteOptions(decompose_attention=True))
    assert {site["guard"] for site in result.report["sites"]} == {"clip"} and result.rewritten == 2
    assert_same(proto, result.model)


def test_the_constant_of_a_guard_in_a_branch_goes() -> None:
    body = """n = Constant<value_float = 0.0>()
      y = If(c) <then_branch = yes () => (float t) {
        a = MatMul(q, k)  p = Softmax(a)  i = IsNaN(p)  w = Where(i, n, p)  t = MatMul(w, v)
      }, else_branch = no () => (float e) { e = Identity(q) }>"""
    result = graphsurgery.rewrite(model(body, INPUTS + ", bool c"), options=EXACT)
    assert result.rewritten == 1
    assert operators(result.model)["Constant"] == 0


def test_the_constant_of_a_guard_goes() -> None:
    body = """n = Constant<value_float = 0.0>()
      a = MatMul(q, k)  p = Softmax(a)  i = IsNaN(p)  w = Where(i, n, p)  y = MatMul(w, v)"""
    result = graphsurgery.rewrite(model(body), options=EXACT)
    assert result.rewritten == 1 and operators(result.model)["Constant"] == 0
    assert "IsNaN" not in operators(result.model)


# -- the report


def test_the_report_counts_what_is_in_the_model() -> None:
    result = graphsurgery.rewrite(model(), data=feeds())
    nodes = result.report["nodes"]
    assert nodes["before"] == dict(operators(model())) and nodes["after"] == dict(operators(result.model))
    (written,) = [entry for entry in result.report["passes"] if entry["name"] == "unified_max"]
    assert written["changed"] == 2 and written["removed"] == {"Softmax": 2}
    assert result.report["model"]["opset"] == {"ai.onnx": 17} and result.report["model"]["ir"] == 10
    assert result.report["model"]["sha256"] == graphsurgery.calibrate(model(), data=feeds()).model_sha256


def test_new_nodes_say_where_they_come_from() -> None:
    proto = model()
    result = graphsurgery.rewrite(proto, options=EXACT)
    old = {node.name for node in proto.graph.node if node.name}
    origins = Counter()
    for node in result.model.graph.node:
        if node.name not in old and node.name:
            origins[tuple(sorted((entry.key, entry.value) for entry in node.metadata_props))] += 1
    names = [node.name for node in result.model.graph.node if node.name]
    assert len(set(names)) == len(names)
    assert {dict(key)["graphsurgery.site"] for key in origins} == {"main/soft1", "main/soft2"}


def test_rewriting_twice_gives_the_same_bytes() -> None:
    first, second = (graphsurgery.rewrite(model(), data=feeds()) for _ in range(2))
    assert first.model.SerializeToString() == second.model.SerializeToString() and first.report == second.report
    again = graphsurgery.rewrite(first.model, options=EXACT)
    assert not again.changed, "a rewritten model has no Softmax left"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        graphsurgery.rewrite(model(), options=EXACT)
        assert gc.isenabled() is enabled
        with pytest.raises(UsageError):
            graphsurgery.rewrite(model(), options=RewriteOptions(phi="inf"))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_progress_is_told() -> None:
    steps: list[tuple[str, int]] = []

    def progress(items: Any, what: str, total: int) -> Any:
        steps.append((what, total))
        return items

    graphsurgery.rewrite(model(), data=feeds(3), progress=progress)
    assert steps == [("calibrating", 3)]
