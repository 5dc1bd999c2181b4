"""What a rewrite leaves as it was in generated graphs, and what its new nodes look like."""

from __future__ import annotations

import pytest
from attention_graphs import build
from hypothesis import assume, given
from property_runs import FAST, SLOW, examples, option_sets, reproducible, rewritten, supported
from rewrite_checks import (
    check_interface,
    check_new_nodes,
    check_products,
    check_second_run,
    check_untouched,
    check_valid,
)
from strategies import AttentionSpec, attention_specs

from graphsurgery.api import RewriteResult, rewrite
from graphsurgery.attention import find_attention
from graphsurgery.model.index import ModelIndex
from graphsurgery.model.shapes import Shapes
from graphsurgery.options import RewriteOptions


def _check_graph(spec: AttentionSpec, options: RewriteOptions) -> None:
    assume(supported(spec, options))
    with reproducible(spec, options):
        case = build(spec)
        result = rewritten(case, options)
        check_valid(result.model)
        check_interface(case.model, result.model)
        check_products(case.model, result.model)
        check_untouched(case.model, result.model)
        check_new_nodes(case.model, result.model, result.report["sites"][0]["id"])


@examples(2 * FAST)
@given(attention_specs(), option_sets())
def test_the_rest_of_the_graph_stays(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_graph(spec, options)


@pytest.mark.slow
@examples(SLOW)
@given(attention_specs(), option_sets())
def test_the_rest_of_many_graphs_stays(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_graph(spec, options)


def _check_again(spec: AttentionSpec, options: RewriteOptions) -> None:
    assume(supported(spec, options))
    with reproducible(spec, options):
        case = build(spec)
        result = rewritten(case, options)
        check_second_run(result, case.feeds, options)
        same = rewritten(case, options)
        assert same.model.SerializeToString() == result.model.SerializeToString()
        assert same.report == result.report


@examples(FAST)
@given(attention_specs(), option_sets())
def test_a_second_run_changes_nothing_and_a_repeated_one_gives_the_same(
    spec: AttentionSpec, options: RewriteOptions
) -> None:
    _check_again(spec, options)


@examples(FAST)
@given(attention_specs(), option_sets())
def test_the_report_tells_the_nodes_that_are_there(spec: AttentionSpec, options: RewriteOptions) -> None:
    assume(supported(spec, options))
    with reproducible(spec, options):
        case = build(spec)
        result = rewritten(case, options)
        counts = result.report["nodes"]
        assert counts["before"] == ModelIndex(case.model).node_counts()
        assert counts["after"] == ModelIndex(result.model).node_counts()
        assert counts["after"].get("Softmax", 0) == 0
        _check_chunks(result, options)


def _check_chunks(result: RewriteResult, options: RewriteOptions) -> None:
    site = result.report["sites"][0]
    assert site["guard"] == options.guard
    kinds = [node.op_type for node in _new_nodes(result)]
    if any(node.name.endswith("exp_or_one") for node in _new_nodes(result)):
        kinds.remove("ReduceSum")  # the one that finds rows without a visible key
    if site["form"] == "sum":
        assert site["chunks"] == 1
        assert "Split" not in kinds
        assert kinds.count("ReduceSum") == 1
    elif site["form"] == "online":
        assert options.form == "online" and 1 < site["chunks"] <= (options.chunks or 8)
        assert kinds.count("Split") == 1
        assert kinds.count("Exp") == 2 * site["chunks"]
    else:
        assert options.form in ("chunks", "auto")
        assert 1 < site["chunks"] <= (options.chunks or 8)
        sizes = site["chunks"] if "Split" in kinds else 1
        assert kinds.count("ReduceSum") == sizes + (site["chunks"] > 2 or "Split" not in kinds)


def _new_nodes(result: RewriteResult) -> list[object]:
    index = ModelIndex(result.model)
    return [node for _, node in index.walk() if any(e.key == "graphsurgery.pass" for e in node.metadata_props)]


@examples(FAST)
@given(attention_specs(), option_sets())
def test_no_new_value_has_more_dimensions_than_the_scores(spec: AttentionSpec, options: RewriteOptions) -> None:
    assume(supported(spec, options) and spec.place != "function")
    with reproducible(spec, options):
        result = rewritten(build(spec), options)
        shapes, index = Shapes(), ModelIndex(result.model)
        for scope, node in index.walk():
            if any(entry.key == "graphsurgery.pass" for entry in node.metadata_props):
                rank = shapes.rank(scope, node.output[0])
                assert rank is None or rank <= spec.rank, node.name


@examples(FAST)
@given(attention_specs(), option_sets())
def test_left_out_sites_leave_every_byte(spec: AttentionSpec, options: RewriteOptions) -> None:
    case = build(spec)
    assert len(find_attention(ModelIndex(case.model)).sites) == 1
    left = rewrite(case.model, options=RewriteOptions(guard=options.guard, exclude=""))
    assert not left.changed
    assert left.rewritten == 0
    assert left.model.SerializeToString() == case.model.SerializeToString()
