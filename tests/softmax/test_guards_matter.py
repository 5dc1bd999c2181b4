"""Each safeguard of the rewrite, taken away, makes a named check fail: none of the checks is vacuous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from attention_graphs import Case, build
from rewrite_checks import check_answer, check_finite, run
from strategies import AttentionSpec

from graphsurgery import api
from graphsurgery.api import rewrite
from graphsurgery.model.emit import Emitter
from graphsurgery.options import RewriteOptions
from graphsurgery.softmax.plan import SitePlan

Patch = pytest.MonkeyPatch

PLAIN = AttentionSpec(seed=5, heads=2, queries=4, keys=12, head_size=8, scale="mul")
MASKED = AttentionSpec(seed=5, heads=2, queries=4, keys=12, head_size=8, mask="add", mask_source="input")
FAR = AttentionSpec(seed=5, heads=2, queries=4, keys=12, head_size=8, mask="two-adds", types="all", head_offset=110.0)
CLIP = RewriteOptions()
CHUNKS = [
    RewriteOptions(form="chunks", chunks=chunks, chunk_sum=chunk_sum)
    for chunks in (3, 4)
    for chunk_sum in ("reshape", "split")
]


def _check_inside(case: Case, options: RewriteOptions) -> None:
    result = rewrite(case.model, data=[case.feeds], options=options)
    assert result.rewritten == 1
    check_answer(run(result.model, case.feeds), case.expected, case.spec.narrowest)


def _check_outside(case: Case, options: RewriteOptions) -> None:
    result = rewrite(case.model, data=[case.feeds], options=options)
    assert result.rewritten == 1
    feeds, _ = case.hostile()
    original = run(case.model, feeds)
    assert any(np.isfinite(array).any() for array in original.values())
    check_finite(run(result.model, feeds), original)


def _without_clip(emit: Emitter, value: str, low: float, high: float, what: str) -> str:
    del emit, low, high, what
    return value


@pytest.mark.parametrize("spec", [PLAIN, MASKED])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_without_clip_large_scores_are_no_longer_finite(monkeypatch: Patch, spec: AttentionSpec, dtype: str) -> None:
    case = build(replace(spec, dtype=dtype))
    _check_outside(case, CLIP)
    monkeypatch.setattr(Emitter, "clip", _without_clip)
    _check_inside(case, CLIP)  # benign data does not show that the Clip is gone
    with pytest.raises(AssertionError, match="no longer finite"):
        _check_outside(case, CLIP)


def _plans_changed(monkeypatch: Patch, change: Callable[[SitePlan], SitePlan]) -> None:
    right = api.decide
    monkeypatch.setattr(api, "decide", lambda *given: [change(plan) for plan in right(*given)])


@pytest.mark.parametrize("shift", [200.0, -200.0])
@pytest.mark.parametrize("spec", [PLAIN, MASKED])
def test_a_maximum_outside_the_window_gives_another_answer(
    monkeypatch: Patch, spec: AttentionSpec, shift: float
) -> None:
    case = build(spec)
    _check_inside(case, CLIP)
    _plans_changed(monkeypatch, lambda plan: replace(plan, phi=plan.phi + shift))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _check_inside(case, CLIP)


def test_maxima_of_heads_exchanged_give_another_answer(monkeypatch: Patch) -> None:
    case = build(FAR)
    _check_inside(case, CLIP)
    _plans_changed(monkeypatch, lambda plan: replace(plan, phi=plan.phi[::-1]))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _check_inside(case, CLIP)


def _drops_last(reduce: Callable[..., str]) -> Callable[..., str]:
    """The last sum over the chunk sums, [..., Q, C], leaves out the last chunk."""

    def dropping(emit: Emitter, op_type: str, value: str, axis: int, what: str) -> str:
        if op_type == "ReduceSum" and what == "sum":
            ends = [emit.array(np.array([number], np.int64), "chunk_slice") for number in (0, -1, -1)]
            value = emit.op("Slice", value, *ends, what="chunks_but_one")
        return reduce(emit, op_type, value, axis, what)

    return dropping


@pytest.mark.parametrize("options", CHUNKS, ids=lambda options: f"{options.chunks}-{options.chunk_sum}")
def test_a_dropped_chunk_gives_another_answer(monkeypatch: Patch, options: RewriteOptions) -> None:
    case = build(PLAIN)
    _check_inside(case, options)
    monkeypatch.setattr(Emitter, "reduce", _drops_last(Emitter.reduce))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _check_inside(case, options)


def test_a_dropped_half_gives_another_answer(monkeypatch: Patch) -> None:
    options = RewriteOptions(form="chunks", chunks=2, chunk_sum="split")
    case, right = build(PLAIN), Emitter.op
    _check_inside(case, options)

    def dropping(emit: Emitter, op_type: str, *inputs: str, what: str, output: str | None = None) -> str:
        if op_type == "Add" and what == "sum":
            return inputs[0]
        return right(emit, op_type, *inputs, what=what, output=output)

    monkeypatch.setattr(Emitter, "op", dropping)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _check_inside(case, options)


@pytest.mark.parametrize("spec", [PLAIN, MASKED], ids=["from-the-scores", "in-the-mask"])
def test_a_maximum_subtracted_twice_gives_another_answer(monkeypatch: Patch, spec: AttentionSpec) -> None:
    """exp(s - 2φ) over its sum is softmax too, so φ has to be large for this to show."""
    case, options = build(spec), RewriteOptions(phi="55")
    _check_inside(case, options)
    right = Emitter.clip

    def twice(emit: Emitter, value: str, low: float, high: float, what: str) -> str:
        if what == "clip":
            value = emit.op("Sub", value, emit.scalar(55.0, "phi"), what="shift_again")
        return right(emit, value, low, high, what)

    monkeypatch.setattr(Emitter, "clip", twice)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _check_inside(case, options)
