"""Compares two models on data: outputs, sites on equal inputs, and the noise floor of the original."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from graphsurgery.data import Samples
from graphsurgery.engines import EngineError, Session
from graphsurgery.engines import engine as engine_named
from graphsurgery.errors import UsageError, VerificationError
from graphsurgery.model.files import SourceModel
from graphsurgery.options import VerifyOptions
from graphsurgery.progress import Progress, quiet
from graphsurgery.softmax.outside import FLAG_OUTPUT
from graphsurgery.sources import Data, Model, open_data, open_model
from graphsurgery.verification.metrics import OutputMetrics, compare, merge
from graphsurgery.verification.noise import noisy_twin
from graphsurgery.verification.sites import paired_sites
from graphsurgery.verification.tolerance import tolerance

__all__ = ["OutputCheck", "SiteCheck", "VerifyResult", "verify"]

FLOOR_FACTOR = 4.0
"""An output may differ by this many times the noise floor."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class OutputCheck:
    """One graph output over all samples; `floor_abs` is the original's own movement under one rounding step."""

    metrics: OutputMetrics
    floor_abs: float | None
    passed: bool
    note: str | None
    tolerance: tuple[float, float] = (0.0, 0.0)
    """Relative and absolute."""


@dataclass(frozen=True)
class SiteCheck:
    """One rewritten site on equal inputs, over all samples."""

    id: str
    metrics: OutputMetrics
    passed: bool


@dataclass(frozen=True)
class VerifyResult:
    """The verdict, with its figures."""

    engine: str
    outputs: tuple[OutputCheck, ...]
    sites: tuple[SiteCheck, ...]
    sites_not_compared: tuple[str, ...]
    samples: int
    synthetic: bool
    reused: bool

    @property
    def passed(self) -> bool:
        """Whether every output and every site is right."""
        return all(check.passed for check in (*self.outputs, *self.sites))

    def to_json(self) -> dict[str, Any]:
        """The report's `verify` entry."""
        outputs = {
            check.metrics.name: {
                **check.metrics.to_json(),
                "passed": check.passed,
                "floor_abs": check.floor_abs,
                "tolerance": list(check.tolerance),
                "note": check.note,
            }
            for check in self.outputs
        }
        sites = {check.id: {**check.metrics.to_json(), "passed": check.passed} for check in self.sites}
        return {
            self.engine: outputs,
            "sites": sites,
            "sites_not_compared": list(self.sites_not_compared),
            "samples": self.samples,
            "held_out": not self.reused,
            "synthetic": self.synthetic,
            "passed": self.passed,
        }

    def summary(self) -> str:
        """One line: the verdict and the worst output or site."""
        wrong = [f"{c.metrics.name}: {c.metrics.reason}" for c in self.outputs if not c.passed]
        wrong += [f"site {c.id}: {c.metrics.reason}" for c in self.sites if not c.passed]
        count = f"{self.samples} {'sample' if self.samples == 1 else 'samples'} on {self.engine}"
        if wrong:
            return f"verification failed on {count}: {wrong[0]}" + (
                f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
            )
        worst = max(self.outputs, key=lambda check: check.metrics.max_abs)
        floor = "" if worst.floor_abs is None else f", noise floor {worst.floor_abs:.2g}"
        return f"verified on {count}: worst output {worst.metrics.name}, max abs {worst.metrics.max_abs:.2g}{floor}"


def verify(
    a: Model,
    b: Model,
    *,
    data: Data,
    options: VerifyOptions | None = None,
    engine: str = "onnxruntime",
    progress: Progress = quiet,
) -> VerifyResult:
    """Compare model `b` with the original `a` on the samples.

    Strict on names, order, shapes, element types and finiteness; then within the tolerance of the element type, or
    within four times the noise floor.  Sites are compared on equal inputs with the absolute tolerance scaled by the
    site's largest output.  Raises UsageError for unusable models or data, EngineError where a model does
    not run, VerificationError where only `a` loads.
    """
    options = options or VerifyOptions()
    first, second = open_model(a), open_model(b)
    samples = open_data(data, first, options.max_samples)
    if samples is None:
        raise UsageError("verify needs data; give --data DIR")
    _check_names(first, second)
    runner = _Runner(engine)
    sessions = {"a": runner.open(first.proto, first)}
    try:
        sessions["b"] = runner.open(second.proto, second)
    except EngineError as error:
        raise VerificationError(f"{second.label} does not load where {first.label} does: {error}") from error
    twin = noisy_twin(first.proto)
    if twin is not None:
        sessions["noise"] = runner.open(twin, first)
    outputs: dict[str, list[OutputMetrics]] = {}
    floors: dict[str, float] = {}
    for sample in progress(samples, "verifying", len(samples)):
        results = {name: session.run(sample) for name, session in sessions.items()}
        _compare_outputs(results, options, outputs, floors)
    sites, skipped = _compare_sites(first, second, samples, runner, progress)
    checks = tuple(_output_check(merge(found), floors.get(name), options) for name, found in outputs.items())
    return VerifyResult(engine, checks, sites, skipped, len(samples), samples.synthetic, samples.reused)


@dataclass(frozen=True)
class _Runner:
    engine: str

    def open(self, model: ModelProto, source: SourceModel) -> Session:
        return engine_named(self.engine).open(model.SerializeToString(), external_folder=source.folder)


def _check_names(first: SourceModel, second: SourceModel) -> None:
    for kind in ("input", "output"):
        names = [
            [value.name for value in getattr(source.proto.graph, kind) if value.name != FLAG_OUTPUT]
            for source in (first, second)
        ]
        if names[0] != names[1]:
            raise UsageError(
                f"the {kind}s of {second.label} are {names[1]}, those of {first.label} are {names[0]}; "
                "compare models with the same signature"
            )


def _compare_outputs(
    results: dict[str, Arrays],
    options: VerifyOptions,
    outputs: dict[str, list[OutputMetrics]],
    floors: dict[str, float],
) -> None:
    for name, wanted in results["a"].items():
        metrics = compare(name, wanted, results["b"][name], rtol=options.rtol, atol=options.atol)
        outputs.setdefault(name, []).append(metrics)
        if "noise" in results and wanted.dtype.kind not in "OSU":
            moved = compare(name, wanted, results["noise"][name]).max_abs
            floors[name] = max(floors.get(name, 0.0), moved)


def _output_check(metrics: OutputMetrics, floor: float | None, options: VerifyOptions) -> OutputCheck:
    default = tolerance(np.dtype(metrics.dtype)) if options.rtol is None or options.atol is None else (0.0, 0.0)
    limits = (
        default[0] if options.rtol is None else options.rtol,
        default[1] if options.atol is None else options.atol,
    )
    if metrics.within:
        return OutputCheck(metrics, floor, True, None, limits)
    rescued = floor is not None and metrics.finite and 0 < metrics.max_abs <= FLOOR_FACTOR * floor < float("inf")
    note = None
    if rescued and floor is not None:
        note = (
            f"ill-conditioned: one rounding step in the original's probabilities moves it by {floor:.3g}, "
            f"the difference is {metrics.max_abs:.3g}"
        )
    return OutputCheck(metrics, floor, rescued, note, limits)


def _compare_sites(
    first: SourceModel, second: SourceModel, samples: Samples, runner: _Runner, progress: Progress
) -> tuple[tuple[SiteCheck, ...], tuple[str, ...]]:
    joined = paired_sites(first.proto, second.proto)
    if not joined.pairs:
        return (), joined.skipped
    session = runner.open(joined.model, first)
    names = list(dict.fromkeys(name for pair in joined.pairs for name in pair[1:]))
    found: dict[str, list[OutputMetrics]] = {}
    for sample in progress(samples, "comparing sites", len(samples)):
        results = session.run(sample, names)
        for site, own, other in joined.pairs:
            found.setdefault(site, []).append(_site_metrics(site, results[own], results[other]))
    checks = tuple(
        SiteCheck(site, metrics, metrics.within) for site, metrics in ((s, merge(m)) for s, m in found.items())
    )
    return checks, joined.skipped


def _site_metrics(site: str, own: NDArray[Any], other: NDArray[Any]) -> OutputMetrics:
    rtol, atol = tolerance(own.dtype)
    numbers = np.abs(own.astype(np.float64))
    largest = float(numbers[np.isfinite(numbers)].max(initial=0.0))
    metrics = compare(site, own, other, rtol=rtol, atol=atol * max(1.0, largest))
    return replace(metrics, name=site)
