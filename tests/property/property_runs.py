"""How the property tests run: profiles, options, and a note that reproduces a failure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from attention_graphs import Case
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from strategies import AttentionSpec

from graphsurgery.api import RewriteResult, rewrite
from graphsurgery.options import RewriteOptions

__all__ = ["SLOW", "examples", "option_sets", "reproducible", "rewritten", "supported"]

FAST, SLOW = 100, 2000

Test = Callable[..., Any]


def examples(count: int) -> Callable[[Test], Test]:
    """Always the same examples, and no database of failures: a run depends on the commit alone."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@st.composite
def option_sets(draw: st.DrawFn, guards: tuple[str, ...] = ("clip", "exact")) -> RewriteOptions:
    """Every guard with every form; chunk counts that divide the keys, do not, and exceed them."""
    guard = draw(st.sampled_from(guards))
    form = draw(st.sampled_from(("auto", "sum", "reshape", "split")))
    if form in ("auto", "sum"):
        return RewriteOptions(guard=guard, form=form)  # type: ignore[arg-type]
    chunks = draw(st.integers(1, 7))
    if guard == "exact" and draw(st.booleans()):
        return RewriteOptions(guard="exact", form="online", chunks=chunks)
    return RewriteOptions(guard=guard, form="chunks", chunks=chunks, chunk_sum=form)  # type: ignore[arg-type]


@contextmanager
def reproducible(spec: AttentionSpec, options: RewriteOptions) -> Generator[None]:
    """Adds what rebuilds the case to whatever goes wrong inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"to rebuild the case:\n    case = build({spec!r})\n    options = {options!r}")
        raise


def rewritten(case: Case, options: RewriteOptions) -> RewriteResult:
    """The rewritten model; the one site of the case must have been rewritten, and the model given left alone."""
    before = case.model.SerializeToString()
    result = rewrite(case.model, data=[case.feeds], options=options)
    assert case.model.SerializeToString() == before
    sites = [(site["status"], site["code"], site["reason"]) for site in result.report["sites"]]
    assert sites == [("rewritten", None, None)], (sites, result.report["not_attention"])
    assert result.changed
    return result


def supported(spec: AttentionSpec, options: RewriteOptions) -> bool:
    """Whether the site is to be rewritten, and is no gap that `test_pinned_graphs` lists."""
    if options.guard in ("exact", "if") or not spec.hidden_row:
        return True
    # Added to the scores, such numbers leave them apart: `test_rows_hidden_by_adding_a_large_number_are_left`.
    large = spec.fill == "-10000" or (spec.fill == "lowest" and spec.mask_dtype == "float16" != spec.softmax_dtype)
    return spec.mask.startswith("where") or not large
