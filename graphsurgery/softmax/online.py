"""Form `online`: exact for any input, chunk by chunk (the merge of Flash-Decoding and of online softmax).

Each chunk takes its own maximum, exponentials and sum; the chunks meet in the greatest of the maxima M:

    mᵢ = max sᵢ    eᵢ = exp(sᵢ − mᵢ)    wᵢ = exp(mᵢ − M)    e = [wᵢ·eᵢ]    Σ = Σᵢ wᵢ·Σ eᵢ

so that no chunk waits for another before the merge.  The value product reads the joined exponentials as ever.
"""

from __future__ import annotations

from graphsurgery.model.emit import Emitter, lowest
from graphsurgery.softmax.plan import SitePlan

__all__ = ["online_exponentials"]


def online_exponentials(emit: Emitter, plan: SitePlan) -> tuple[str, str]:
    """The exponentials of all chunks on one scale, [..., Q, K], and their sums, [..., Q, 1].

    A chunk without any visible key has the lowest number for its maximum (-inf - -inf would be NaN) and so the
    weight 0 or next to it.  A sink column is one key of its chunk.
    """
    tops: list[str] = []
    terms: list[str] = []
    for part in emit.split(plan.site.scores, plan.denominator.sizes, "chunk"):
        top = emit.reduce("ReduceMax", part, -1, "chunk_max")
        top = emit.op("Max", top, emit.scalar(lowest(emit.dtype), "lowest"), what="chunk_max_finite")
        tops.append(top)
        terms.append(_exp(emit, plan, part, top, "chunk"))
    whole = emit.op("Max", *tops, what="row_max")
    if plan.offset:
        whole = emit.op("Add", whole, emit.scalar(plan.offset, "row_max_offset"), what="row_max_raised")
    weights = [_exp(emit, plan, top, whole, "weight") for top in tops]
    scaled = [emit.op("Mul", term, weight, what="chunk_scaled") for term, weight in zip(terms, weights, strict=True)]
    sums = [emit.reduce("ReduceSum", part, -1, "chunk_sum") for part in scaled]
    total = sums[0] if len(sums) == 1 else emit.reduce("ReduceSum", emit.concat(sums, "chunk_sums"), -1, "sum")
    return emit.concat(scaled, "exp"), total


def _exp(emit: Emitter, plan: SitePlan, value: str, top: str, what: str) -> str:
    below = emit.op("Sub", value, top, what=f"{what}_shift")
    return emit.op("Exp", emit.clip(below, *plan.window.clip, f"{what}_clip"), what=f"{what}_exp")
