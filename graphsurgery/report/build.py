"""Builds the report (`graphsurgery/report/1`) from plans, refusals and passes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from onnx import TensorProto

from graphsurgery.attention.finder import Findings
from graphsurgery.attention.site import RefusedSite
from graphsurgery.phi.collect import Evidence
from graphsurgery.phi.window import Window
from graphsurgery.softmax.plan import SitePlan

__all__ = ["SCHEMA", "method", "refused_entry", "site_entries"]

SCHEMA = "graphsurgery/report/1"


def site_entries(findings: Findings, plans: list[SitePlan]) -> list[dict[str, Any]]:
    """One entry for each attention: rewritten and left sites first, then refused ones, each in graph order."""
    return [_planned_entry(plan) for plan in plans] + [refused_entry(site) for site in findings.refused]


def _planned_entry(plan: SitePlan) -> dict[str, Any]:
    site = plan.site
    entry: dict[str, Any] = {
        "id": site.id,
        "scope": site.scope.id,
        "chain": site.chain,
        "nodes": {"qk": site.qk.name, "softmax": site.softmax.name, "pv": site.pv.name},
        "dims": site.dims.to_json(),
        "status": "rewritten" if plan.left is None else "left",
        "code": None if plan.left is None else plan.left.code,
        "reason": None if plan.left is None else plan.left.reason,
        "form": None,
        "chunks": None,
        "guard": None,
        "phi": None,
        "dtype": {"softmax": TensorProto.DataType.Name(site.dtype).lower(), "executes": plan.window.dtype},
        "window": _window(plan.window),
        "row_max": None if plan.row_max is None else [_rounded(v) for v in plan.row_max],
        "notes": list(plan.notes),
    }
    if plan.left is not None:
        entry["values"] = {key: _rounded(value) for key, value in plan.left.values.items()}
        return entry
    chunked = "online" if plan.denominator.form == "online" else "chunks"
    entry["form"] = "sum" if plan.denominator.chunks == 1 else chunked
    entry["chunks"], entry["guard"] = plan.denominator.chunks, plan.guard
    entry["phi"] = _phi(plan)
    return entry


def _phi(plan: SitePlan) -> dict[str, Any]:
    row_max = None if plan.row_max is None else [_rounded(value) for value in plan.row_max]
    if plan.phi is None:
        return {"value": None, "source": plan.phi_source, "row_max": row_max, "window": None}
    if isinstance(plan.phi, tuple):
        return {"per_head": list(plan.phi), "source": plan.phi_source, "row_max": row_max, "window": None}
    limits = [plan.phi + plan.window.lower, plan.phi + plan.window.upper]
    return {"value": plan.phi, "source": plan.phi_source, "row_max": row_max, "window": limits}


def _window(limits: Window) -> dict[str, Any]:
    return {"dtype": limits.dtype, "lower": limits.lower, "upper": limits.upper, "clip": list(limits.clip)}


def refused_entry(site: RefusedSite) -> dict[str, Any]:
    """The entry of an attention that is not supported as it stands."""
    return {
        "id": site.id,
        "scope": site.scope.id,
        "chain": site.chain,
        "nodes": {"qk": site.qk, "softmax": site.softmax.name, "pv": site.pv},
        "dims": site.dims.to_json(),
        "status": "refused",
        "code": site.refusal.code,
        "reason": site.refusal.reason,
        "form": None,
        "chunks": None,
        "guard": None,
        "phi": None,
        "values": {key: _rounded(value) for key, value in site.refusal.values.items()},
    }


def method(evidence: Evidence, options: object, margin: dict[str, float]) -> dict[str, Any]:
    """What the figures depend on: data, options, margins kept from the upper end of each window."""
    return {
        "data_sha256": evidence.data_sha256 or None,
        "samples": evidence.samples,
        "sources": list(evidence.sources),
        "synthetic": evidence.synthetic,
        "seeds": {"synthetic": 0} if evidence.synthetic else {},
        "margin": margin,
        "options": asdict(options),  # type: ignore[call-overload]
    }


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
