"""Generated attention graphs give the float64 answer after the rewrite, and stay finite outside the window."""

from __future__ import annotations

import numpy as np
import pytest
from attention_graphs import Case, build
from hypothesis import assume, given
from property_runs import FAST, SLOW, examples, option_sets, reproducible, rewritten, supported
from rewrite_checks import check_answer, check_finite, run
from strategies import AttentionSpec, attention_specs, per_head_specs

from graphsurgery.api import RewriteResult, rewrite
from graphsurgery.options import RewriteOptions
from graphsurgery.verification.tolerance import TOLERANCES


def _check_inside(spec: AttentionSpec, options: RewriteOptions) -> None:
    assume(supported(spec, options))
    with reproducible(spec, options):
        case = build(spec)
        result = rewritten(case, options)
        found = run(result.model, case.feeds)
        if options.guard == "if":  # the original's own NaN comes back
            found = {name: np.where(np.isnan(case.expected[name]), 0, array) for name, array in found.items()}
        check_answer(found, case.expected, spec.narrowest)


@examples(2 * FAST)
@given(attention_specs(), option_sets())
def test_rows_inside_the_window_give_the_float64_answer(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_inside(spec, options)


@pytest.mark.slow
@examples(SLOW)
@given(attention_specs(), option_sets())
def test_many_rows_inside_the_window_give_the_float64_answer(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_inside(spec, options)


def _check_outside(spec: AttentionSpec, options: RewriteOptions) -> None:
    assume(supported(spec, options))
    with reproducible(spec, options):
        case = build(spec)
        result = rewritten(case, options)
        feeds, _ = case.hostile()
        original, found = run(case.model, feeds), run(result.model, feeds)
        check_finite(found, original)
        # The branch of an If reads scores rounded to float16; onnxruntime keeps the original's in float32.
        if options.guard == "exact" or (options.guard == "if" and spec.narrowest != "float16"):
            _check_like_original(found, original, spec.narrowest)


def _check_like_original(found: dict[str, np.ndarray], original: dict[str, np.ndarray], dtype: str) -> None:
    """Scores of 2000 are rounded to 1e-4 before Softmax, the same way in both models."""
    relative, absolute = TOLERANCES[dtype]
    for name, before in original.items():
        finite = np.isfinite(before)
        wanted, got = before[finite].astype(np.float64), found[name][finite].astype(np.float64)
        np.testing.assert_allclose(got, wanted, rtol=relative, atol=absolute, err_msg=name)


@examples(FAST)
@given(attention_specs(), option_sets(("clip",)))
def test_clip_is_finite_far_outside_the_window(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_outside(spec, options)


@examples(FAST)
@given(attention_specs(), option_sets(("exact",)))
def test_exact_is_right_far_outside_the_window(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_outside(spec, options)


@examples(FAST)
@given(attention_specs(), option_sets(("if",)))
def test_if_is_right_inside_and_far_outside_the_window(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_inside(spec, options)
    _check_outside(spec, options)


@pytest.mark.slow
@examples(SLOW)
@given(attention_specs(), option_sets(("clip", "exact", "if")))
def test_many_rows_far_outside_the_window(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_outside(spec, options)


def _check_per_head(spec: AttentionSpec, options: RewriteOptions) -> None:
    assume(supported(spec, options))
    with reproducible(spec, options):
        case = build(spec)
        result = rewritten(case, options)
        phi = result.report["sites"][0]["phi"]["per_head"]
        heads = spec.heads * spec.batch if spec.reshape == "softmax" else spec.heads
        assert len(phi) == heads
        assert max(phi) - min(phi) > spec.head_offset / 2
        check_answer(run(result.model, case.feeds), case.expected, spec.narrowest)
        _check_hostile_heads(case, result)


def _check_hostile_heads(case: Case, result: RewriteResult) -> None:
    feeds, _ = case.hostile()
    check_finite(run(result.model, feeds), run(case.model, feeds))


@examples(FAST)
@given(per_head_specs(), option_sets(("clip",)))
def test_one_maximum_for_each_head(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_per_head(spec, options)


@pytest.mark.slow
@examples(SLOW)
@given(per_head_specs(), option_sets(("clip",)))
def test_many_with_one_maximum_for_each_head(spec: AttentionSpec, options: RewriteOptions) -> None:
    _check_per_head(spec, options)


@pytest.mark.parametrize("mask", ["where", "where-swapped"])
@pytest.mark.parametrize(("fill", "dtype", "cast"), [("-10000", "float32", "none"), ("lowest", "float16", "late")])
def test_rows_hidden_by_a_where_are_uniform_whatever_it_writes(mask: str, fill: str, dtype: str, cast: str) -> None:
    case = build(AttentionSpec(seed=2, mask=mask, fill=fill, hidden_row=True, dtype=dtype, cast=cast))
    result = rewrite(case.model, data=[case.feeds])
    assert [(site["status"], site["code"]) for site in result.report["sites"]] == [("rewritten", None)]
    check_answer(run(result.model, case.feeds), case.expected, case.spec.narrowest)


def test_rows_hidden_by_adding_a_large_number_are_left() -> None:
    case = build(AttentionSpec(seed=2, mask="add", fill="-10000", hidden_row=True))
    result = rewrite(case.model, data=[case.feeds])
    assert [(site["status"], site["code"]) for site in result.report["sites"]] == [("left", "hidden-rows")]
    assert not result.changed
    assert result.model.SerializeToString() == case.model.SerializeToString()
