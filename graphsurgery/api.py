"""The library calls: a model goes in as a path, a ModelProto or a `gs.Graph`, and the same kind comes out."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from graphsurgery.attention import Findings, find_attention
from graphsurgery.data import Samples
from graphsurgery.errors import UsageError
from graphsurgery.integrations.graphsurgeon import is_graph, to_graph
from graphsurgery.model.files import SourceModel, load_model, save_model
from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import REWRITTEN, Rewriter
from graphsurgery.options import CalibrateOptions, External, RewriteOptions
from graphsurgery.passes import PassResult
from graphsurgery.passes.decompose_attention import DecomposeAttention
from graphsurgery.phi.choose import Interval, choose_phi, phi_interval
from graphsurgery.phi.collect import Evidence, collect
from graphsurgery.phi.table import PhiTable, load_table
from graphsurgery.phi.window import executing_dtype, window
from graphsurgery.progress import Progress, quiet
from graphsurgery.report.build import SCHEMA, method, site_entries
from graphsurgery.softmax.decide import decide, given_phi, selection
from graphsurgery.softmax.plan import SitePlan
from graphsurgery.softmax.rewrite import SoftmaxRewriter
from graphsurgery.sources import Data, Model, check_runnable, malformed_is_refused, open_data, open_model
from graphsurgery.versions import versions

__all__ = ["Data", "Model", "RewriteResult", "calibrate", "find", "open_data", "open_model", "rewrite"]


@dataclass(frozen=True)
class RewriteResult:
    """The rewritten model, of the kind that was given (a ModelProto for a path), and the report."""

    model: Any
    report: dict[str, Any]
    source: SourceModel
    proto: ModelProto
    changed: bool

    def original(self) -> SourceModel:
        """The model as it was given, read anew where the rewrite worked on the parsed file itself."""
        source = self.source
        if source.raw is None:
            return source if source.path is None else load_model(source.path)
        return replace(source, proto=ModelProto.FromString(source.raw))

    def outcome(self) -> SourceModel:
        """The rewritten model with the folder of its data files."""
        return SourceModel(self.proto, None, None, self.source.folder, "<rewritten>")

    def save(self, path: str | Path, *, external: External = "keep") -> None:
        """Write the rewritten model, whole or not at all, with its data files beside it.

        A model that did not change is written byte for byte.  Raises UsageError where it cannot be written.
        """
        save_model(self.proto, path, source=self.source, external=external, unchanged=not self.changed)

    @property
    def rewritten(self) -> int:
        """Number of sites rewritten."""
        return sum(site["status"] == "rewritten" for site in self.report["sites"])


def find(model: Model) -> Findings:
    """All attentions of a model, with the reasons for those that are not supported."""
    source = open_model(model)
    with malformed_is_refused(source):
        return find_attention(ModelIndex(source.proto))


def calibrate(
    model: Model, *, data: Data, options: CalibrateOptions | None = None, progress: Progress = quiet
) -> PhiTable:
    """Row statistics of each site over the data, and the φ that follows.

    Raises UsageError for unusable models and data, EngineError where the model does not run.
    """
    options = options or CalibrateOptions()
    source = open_model(model)
    samples = open_data(data, source, options.max_samples)
    if samples is None:
        raise UsageError("calibrate needs data; give --data DIR")
    check_runnable(source)
    with malformed_is_refused(source):
        evidence = collect(source.proto, source.folder, samples, progress=progress)
        findings = find_attention(ModelIndex(source.proto))
    return PhiTable(source.sha256, evidence, asdict(options), versions(), _table_choices(findings, evidence, options))


def _table_choices(findings: Findings, evidence: Evidence, options: CalibrateOptions) -> dict[str, dict[str, object]]:
    intervals: dict[str, Interval] = {}
    found: dict[str, dict[str, object]] = {}
    for site in findings.sites:
        seen = evidence.sites.get(site.id)
        if seen is None:
            continue
        limits = window(executing_dtype(site, options.target))
        margin = limits.kept(options.margin)
        interval = intervals[site.id] = phi_interval(seen.layer, limits, margin)
        admits = None if interval.empty else [round(interval.low, 6), round(interval.high, 6)]
        found[site.id] = {"window": limits.dtype, "margin": margin, "phi_admitted": admits, "phi": None}
    for site, phi in choose_phi(intervals).items():
        found[site]["phi"] = phi
    return found


def rewrite(
    model: Model, *, data: Data | None = None, options: RewriteOptions | None = None, progress: Progress = quiet
) -> RewriteResult:
    """Rewrite the softmax of every attention to the unified max form (FlashDecoding++, arXiv 2311.01282).

    Does not verify: `verify(model, result.outcome(), data=...)` does.  The model given is not modified.  Raises
    UsageError for unusable models, data and options, EngineError where calibration cannot run the model.
    """
    options = options or RewriteOptions()
    selection(options)
    source = open_model(model)
    samples = open_data(data, source)
    with malformed_is_refused(source), _collector_paused():
        proto, changed, report = _rewritten(source, samples, options, progress)
    return RewriteResult(to_graph(proto) if is_graph(model) else proto, report, source, proto, changed)


def _rewritten(
    source: SourceModel, samples: Samples | None, options: RewriteOptions, progress: Progress
) -> tuple[ModelProto, bool, dict[str, Any]]:
    proto = source.proto
    if source.raw is None and source.path is None:
        proto = ModelProto()
        proto.CopyFrom(source.proto)
    index = ModelIndex(proto)
    model_entry, before = _model_entry(source), index.node_counts()
    rewriter = Rewriter(index)
    passes: list[PassResult] = []
    if options.decompose_attention:
        passes.append(DecomposeAttention().apply(index, rewriter))
    findings = _explained(find_attention(index), passes)
    evidence = _evidence(source, proto, findings, samples, options, progress)
    plans = decide(findings.sites, evidence, options)
    passes.append(_write(rewriter, plans))
    report = {
        "schema": SCHEMA,
        "tool": versions(),
        "model": model_entry,
        "method": method(evidence, options, _margins(plans, options)),
        "sites": site_entries(findings, plans),
        "not_attention": [{"id": other.id, "chain": other.chain, "reason": other.reason} for other in findings.others],
        "passes": [asdict(result) for result in passes],
        "nodes": {"before": before, "after": _counts_after(before, passes)},
        "verify": None,
        "htp": None,
    }
    return proto, any(result.changed for result in passes), report


def _explained(findings: Findings, passes: list[PassResult]) -> Findings:
    """Fused operators that the decomposition skipped are refused with its reason."""
    skipped = {name: reason for result in passes for name, reason in result.skipped}
    refused = tuple(
        replace(site, refusal=replace(site.refusal, reason=f"{name} cannot be decomposed: {skipped[name]}"))
        if site.refusal.code == "fused-attention" and (name := site.softmax.name or site.softmax.output[0]) in skipped
        else site
        for site in findings.refused
    )
    return replace(findings, refused=refused)


def _evidence(
    source: SourceModel,
    proto: ModelProto,
    findings: Findings,
    samples: Samples | None,
    options: RewriteOptions,
    progress: Progress,
) -> Evidence:
    if options.phi != "auto" and given_phi(options) is None:
        return load_table(options.phi, source.sha256).evidence
    selected = selection(options)
    wanted = [site.id for site in findings.sites if selected(site.id)]
    if samples is None or not wanted:
        return Evidence()
    check_runnable(source)
    return collect(proto, source.folder, samples, wanted, progress=progress)


def _write(rewriter: Rewriter, plans: list[SitePlan]) -> PassResult:
    writer = SoftmaxRewriter(rewriter)
    todo = [plan for plan in plans if plan.left is None]
    for plan in todo:
        writer.write(plan)
    writer.finish()
    rewriter.commit()
    changes = rewriter.take_changes()
    return PassResult(REWRITTEN, len(todo), dict(sorted(changes.added.items())), dict(sorted(changes.removed.items())))


@contextmanager
def _collector_paused() -> Generator[None]:
    """Index and plans are long-lived: scanning them again and again for garbage costs as much as building them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _counts_after(before: dict[str, int], passes: list[PassResult]) -> dict[str, int]:
    counts = Counter(before)
    for result in passes:
        counts.update(result.added)
        counts.subtract(result.removed)
    return {kind: count for kind, count in sorted(counts.items()) if count}


def _margins(plans: list[SitePlan], options: RewriteOptions) -> dict[str, float]:
    windows = {plan.window.dtype: plan.window.kept(options.margin) for plan in plans}
    return dict(sorted(windows.items()))


def _model_entry(source: SourceModel) -> dict[str, Any]:
    proto = source.proto
    return {
        "path": source.label,
        "sha256": source.sha256,
        "nodes": len(proto.graph.node),
        "opset": {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import},
        "ir": proto.ir_version,
    }
