"""Single graphs that a rewrite is easily wrong on, and what it does not get right yet (those fail until it does).

`property_runs.supported` keeps the latter out of the generated graphs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from attention_graphs import build
from property_runs import rewritten
from rewrite_checks import check_answer, check_valid, run
from strategies import AttentionSpec

from graphsurgery.options import RewriteOptions

HIDDEN_BY_LOWEST = AttentionSpec(seed=2, mask="add", fill="lowest", hidden_row=True, guard=True)
SINK = AttentionSpec(sink=True, keys=6, reshape="product", types="symbolic")
BEHIND = AttentionSpec(batch=2, keys=6, reshape="softmax")
ROW_MAX = RewriteOptions(guard="exact")
TWO_CHUNKS = RewriteOptions(form="chunks", chunks=2)


def _check(spec: AttentionSpec, options: RewriteOptions) -> None:
    case = build(spec)
    result = rewritten(case, options)
    check_valid(result.model)
    check_answer(run(result.model, case.feeds), case.expected, spec.narrowest)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("guard", ["clip", "exact"])
def test_function_called_with_other_types(dtype: str, guard: str) -> None:
    _check(AttentionSpec(dtype=dtype, place="function"), RewriteOptions(guard=guard))  # type: ignore[arg-type]


def test_function_whose_mask_input_has_no_type() -> None:
    _check(AttentionSpec(cast="early", mask="add", mask_source="input", place="function"), RewriteOptions())


def test_row_maximum_of_a_row_of_the_lowest_float32_executed_in_float16() -> None:
    spec = AttentionSpec(seed=2, dtype="float16", cast="early", mask="where", fill="lowest", hidden_row=True)
    _check(spec, ROW_MAX)


def test_row_maximum_of_a_row_of_the_lowest_float32_behind_a_guard() -> None:
    _check(replace(HIDDEN_BY_LOWEST, mask_source="input"), ROW_MAX)


def test_clipped_row_of_the_lowest_float32_behind_a_guard() -> None:
    _check(replace(HIDDEN_BY_LOWEST, mask_source="input"), RewriteOptions())


@pytest.mark.parametrize("chunk_sum", ["reshape", "split"])
def test_chunks_count_the_sink_column(chunk_sum: str) -> None:
    _check(SINK, RewriteOptions(form="chunks", chunks=2, chunk_sum=chunk_sum))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sum_behind_a_cast_and_a_reshape(dtype: str) -> None:
    _check(AttentionSpec(dtype=dtype, cast="late", reshape="product"), RewriteOptions())


def test_chunks_below_a_scale_computed_from_the_shape() -> None:
    case = build(AttentionSpec(keys=6, scale="mul", scale_source="computed"))
    assert rewritten(case, TWO_CHUNKS).report["sites"][0]["chunks"] == 2


@pytest.mark.parametrize("spec", [BEHIND, replace(BEHIND, einsum_pv=True), replace(BEHIND, reshape="product")])
def test_chunks_behind_a_reshape(spec: AttentionSpec) -> None:
    _check(spec, TWO_CHUNKS)
