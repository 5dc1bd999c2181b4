"""Runs the sites of a model on samples and gathers their row statistics."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto

from graphsurgery.data import Samples
from graphsurgery.engines.onnxruntime import OnnxRuntime
from graphsurgery.phi.observe import observation_model
from graphsurgery.phi.statistics import SiteStatistics
from graphsurgery.progress import Progress, quiet

__all__ = ["Evidence", "collect"]


@dataclass(frozen=True)
class Evidence:
    """Row statistics by site, over all samples; `unseen` says why a site has none."""

    sites: dict[str, SiteStatistics] = field(default_factory=dict[str, SiteStatistics])
    unseen: dict[str, str] = field(default_factory=dict[str, str])
    data_sha256: str = ""
    samples: int = 0
    sources: tuple[str, ...] = ()
    synthetic: bool = False


def collect(
    model: ModelProto,
    folder: Path | None,
    samples: Samples,
    wanted: Collection[str] | None = None,
    progress: Progress = quiet,
) -> Evidence:
    """Gather the evidence of the wanted sites (default: all).

    Only the part of the graph that feeds the sites runs, on onnxruntime without optimisations.  Raises EngineError
    where the model does not run.
    """
    observed = observation_model(model, wanted)
    found: dict[str, SiteStatistics] = {}
    if observed.outputs:
        session = OnnxRuntime().open(observed.model.SerializeToString(), external_folder=folder)
        for sample in progress(samples, "calibrating", len(samples)):
            for site, seen in observed.statistics(session.run(sample, observed.names)).items():
                found[site] = found[site].merge(seen) if site in found else seen
    unseen = dict(observed.unseen)
    for site in observed.outputs:
        if site not in found:
            unseen[site] = "no sample ran this part of the graph"
    return Evidence(found, unseen, samples.sha256, len(samples), tuple(samples.sources), samples.synthetic)
