"""A copy of the model that computes the row statistics of its sites, and nothing else.

The reductions are part of the graph, so scores are never dumped: of each row leave four numbers (maximum,
log-sum-exp, number of visible keys, least visible score) and of the values their greatest magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto

from graphsurgery.attention.finder import find_attention
from graphsurgery.attention.masks import HIDDEN
from graphsurgery.attention.site import Site
from graphsurgery.model.emit import Emitter, lowest
from graphsurgery.model.expose import NotExposableError, cut_to_outputs, expose
from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import Place, Rewriter
from graphsurgery.phi.statistics import SiteStatistics

__all__ = ["Observation", "observation_model"]

_NEGLIGIBLE = -30.0
"""A key this far below the row maximum adds nothing to the row: e^-30."""


@dataclass(frozen=True)
class Observation:
    """The instrumented model and, for each site id, the pairs of outputs (rows, values) to read."""

    model: ModelProto
    outputs: dict[str, list[tuple[str, str]]]
    hidden: dict[str, float]
    """By site: a row maximum at or below this says that a mask hides the whole row."""
    unseen: dict[str, str]
    """Sites that cannot be observed, with the reason."""

    @property
    def names(self) -> list[str]:
        """All outputs to fetch."""
        return [name for pairs in self.outputs.values() for pair in pairs for name in pair]

    def statistics(self, results: dict[str, np.ndarray]) -> dict[str, SiteStatistics]:
        """The statistics of one run, by site; a site that did not run in it (a branch not taken) is absent."""
        found: dict[str, SiteStatistics] = {}
        for site, pairs in self.outputs.items():
            for rows, values in pairs:
                if results[rows].size == 0:
                    continue
                seen = SiteStatistics.of(results[rows], results[values], self.hidden[site])
                found[site] = found[site].merge(seen) if site in found else seen
        return {site: SiteStatistics(seen.heads, 1) for site, seen in found.items()}


def observation_model(model: ModelProto, wanted: Iterable[str] | None = None) -> Observation:
    """Instrument a copy of the model at its sites (all, or those whose ids are wanted)."""
    copy = ModelProto()
    copy.CopyFrom(model)
    index = ModelIndex(copy)
    rewriter = Rewriter(index)
    chosen = None if wanted is None else set(wanted)
    outputs: dict[str, list[tuple[str, str]]] = {}
    hidden: dict[str, float] = {}
    unseen: dict[str, str] = {}
    for site in find_attention(index).sites:
        if chosen is not None and site.id not in chosen:
            continue
        rewriter.start("observe", site.id)
        hidden[site.id] = HIDDEN if site.mask_fills else -math.inf
        rows, values = _statistics(rewriter, site)
        try:
            led = [expose(index, rewriter, site.scope, name, _type(site)) for name in (rows, values)]
            if led[0]:
                outputs[site.id] = list(zip(*led, strict=True))
            else:
                unseen[site.id] = "nothing calls the function it stands in"
        except NotExposableError as error:
            unseen[site.id] = str(error)
    rewriter.commit()
    cut_to_outputs(copy, [name for pairs in outputs.values() for pair in pairs for name in pair])
    return Observation(copy, outputs, hidden, unseen)


def _type(site: Site) -> int:
    return TensorProto.DOUBLE if site.dtype == TensorProto.DOUBLE else TensorProto.FLOAT


def _statistics(rewriter: Rewriter, site: Site) -> tuple[str, str]:
    """Rows [..., Q, 4] and max|v| [..., 1, 1], both float32 (float64 for a site of float64)."""
    wide = _type(site)
    emit = Emitter(rewriter, Place(site.scope, site.pv), "observed", wide)
    scores = emit.cast(site.scores, wide, "scores")
    top = emit.reduce("ReduceMax", scores, -1, "top")
    finite = emit.op("Max", top, emit.scalar(lowest(emit.dtype), "lowest"), what="finite_top")
    below = emit.op("Sub", scores, finite, what="below")
    total = emit.reduce("ReduceSum", emit.op("Exp", below, what="exp"), -1, "total")
    lse = emit.op("Add", finite, emit.op("Log", total, what="log"), what="lse")
    counts = emit.op("Greater", below, emit.scalar(_NEGLIGIBLE, "negligible"), what="counts")
    visible = emit.reduce("ReduceSum", emit.cast(counts, wide, "counts_number"), -1, "visible")
    shown = emit.op("Greater", scores, emit.scalar(HIDDEN, "hidden"), what="shown")
    least = emit.reduce("ReduceMin", emit.op("Where", shown, scores, finite, what="shown_scores"), -1, "least")
    rows = emit.concat([top, lse, visible, least], "rows")
    magnitude = emit.op("Abs", emit.cast(site.values, wide, "values"), what="magnitude")
    largest = emit.reduce("ReduceMax", emit.reduce("ReduceMax", magnitude, -1, "largest_row"), -2, "largest")
    return rows, largest
