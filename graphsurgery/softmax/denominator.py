"""The row sum of the exponentials, whole or in chunks, and what becomes of a row without any visible key.

Chunked: `reshape` sums [..., Q*C, K/C] and then over the chunks, at the rank of the scores; `split` cuts explicit
sizes, so the last chunk may be shorter.  No chunk depends on another before the last sum.
"""

from __future__ import annotations

from graphsurgery.model.emit import Emitter
from graphsurgery.softmax.plan import Denominator, SitePlan

__all__ = ["chunk_sizes", "guard_denominator", "row_sum"]

_SMALLEST, _LARGEST = 1.2e-38, 3.0e38
_TWO = 2


def chunk_sizes(keys: int, chunks: int) -> tuple[int, ...]:
    """Sizes of `chunks` chunks over `keys` keys: equal, the last one shorter where they do not divide."""
    size = -(-keys // chunks)
    full, rest = divmod(keys, size)
    return (size,) * full + ((rest,) if rest else ())


def row_sum(emit: Emitter, value: str, how: Denominator, rank: int | None) -> str:
    """Sum over the last axis, [..., Q, K] -> [..., Q, 1]."""
    if how.form == "reshape" and how.chunks > 1 and rank is not None:
        return _by_reshape(emit, value, how, rank)
    if how.form == "split" and how.chunks > 1:
        parts = [emit.reduce("ReduceSum", part, -1, "chunk_sum") for part in emit.split(value, how.sizes, "chunk")]
        if len(parts) == _TWO:
            return emit.op("Add", *parts, what="sum")
        return emit.reduce("ReduceSum", emit.concat(parts, "chunk_sums"), -1, "sum")
    return emit.reduce("ReduceSum", value, -1, "sum")


def _by_reshape(emit: Emitter, value: str, how: Denominator, rank: int) -> str:
    """Sizes are written out where they are known: a -1 beside a batch of 0 would have no answer."""
    kept = [0] * (rank - 2)
    chunked = emit.reshape(value, [*kept, -1 if how.rows is None else how.rows * how.chunks, how.sizes[0]], "chunks")
    sums = emit.reduce("ReduceSum", chunked, -1, "chunk_sums")
    if how.rows == 1:
        return emit.reduce("ReduceSum", sums, -2, "sum")
    rows = emit.reshape(sums, [*kept, -1 if how.rows is None else how.rows, how.chunks], "chunk_rows")
    return emit.reduce("ReduceSum", rows, -1, "sum")


def guard_denominator(emit: Emitter, value: str, plan: SitePlan) -> str:
    """Keep the quotient of rows without a visible key what it was: 0 behind an IsNaN guard, finite anywhere.

    In float16 their exponentials are exactly 0, so a positive floor under the sum gives 0 / floor = 0; above, the sum
    saturates instead of becoming Inf.  In float32 they are all e^-87 (uniform, as the original was for a finite
    mask); behind an IsNaN guard such a row divides by the largest number instead, which gives 0.  Without any key at
    all (an empty cache) the sum is 0, and a floor gives 0 as well.
    """
    if plan.window.sum_limits is not None:
        return emit.clip(value, *plan.window.sum_limits, "sum_floor")
    if not plan.zero_hidden:
        keys = plan.site.dims.keys
        if isinstance(keys, int) and keys > 0:
            return value
        return emit.op("Max", value, emit.scalar(_SMALLEST, "smallest"), what="sum_of_keys")
    hidden = emit.op("Less", value, emit.scalar(plan.window.masked_below, "masked_below"), what="hidden_row")
    return emit.op("Where", hidden, emit.scalar(_LARGEST, "largest"), value, what="sum_or_largest")
