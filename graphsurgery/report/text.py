"""The lines that say what a rewrite did, from its report alone."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

__all__ = ["hints", "nothing_done", "summary"]

Report = dict[str, Any]


def summary(report: Report) -> list[str]:
    """Sites by fate, the forms used, and the nodes before and after."""
    sites: list[Report] = report["sites"]
    written = [site for site in sites if site["status"] == "rewritten"]
    lines = [f"{report['model']['path']}: {_fates(sites)}"]
    if written:
        lines.append(f"forms: {_counted(_form(site) for site in written)}")
        lines.append(f"phi: {_counted(_source(site) for site in written)}")
    lines.append(_nodes(report))
    return lines


def nothing_done(report: Report) -> str:
    """Why no site was rewritten, in one sentence."""
    label, sites = report["model"]["path"], report["sites"]
    if sites:
        return f"{label}: nothing was rewritten; {_fates(sites)}"
    others: list[Report] = report["not_attention"]
    if not others:
        return f"{label}: no attention found (it has no Softmax); nothing was rewritten"
    nearest = others[0]
    return (
        f"{label}: no attention found among {len(others)} Softmax nodes (nearest miss {nearest['id']}: "
        f"{nearest['reason']}); nothing was rewritten"
    )


def hints(report: Report, model: str, out: str | None) -> list[str]:
    """For each reason code of a site that was not rewritten, its first reason and the command that would work."""
    first: dict[str, Report] = {}
    counts: Counter[str] = Counter()
    for site in report["sites"]:
        if site["status"] != "rewritten":
            first.setdefault(site["code"], site)
            counts[site["code"]] += 1
    command = shlex.join(["graphsurgery", "rewrite", model, "-o", out or "OUT"])
    lines: list[str] = []
    for code, site in first.items():
        times = f" ({counts[code]} sites)" if counts[code] > 1 else ""
        lines.append(f"{code}{times}: {site['reason']}")
        flags = _REMEDIES.get(code)
        if flags is not None:
            lines.append(f"  try: {command} {flags}")
    return lines


_REMEDIES = {
    "no-evidence": "--data DIR",
    "window": "--data DIR --otherwise exact",
    "fused-attention": "--data DIR --decompose-attention",
}


def _fates(sites: list[Report]) -> str:
    parts: list[str] = []
    for status in ("rewritten", "left", "refused"):
        found = [site for site in sites if site["status"] == status]
        codes = f" ({_counted(site['code'] for site in found)})" if found and status != "rewritten" else ""
        if found or status == "rewritten":
            parts.append(f"{len(found)} {status}{codes}")
    plural = "attention" if len(sites) == 1 else "attentions"
    return f"{len(sites)} {plural}, {', '.join(parts)}"


def _form(site: Report) -> str:
    chunks = f"={site['chunks']}" if site["form"] == "chunks" else ""
    return f"{site['form']}{chunks} guarded by {site['guard']}"


def _source(site: Report) -> str:
    phi: Report = site["phi"] or {}
    return f"{phi.get('source', 'none')}{' per head' if 'per_head' in phi else ''}"


def _nodes(report: Report) -> str:
    before, after = (sum(report["nodes"][when].values()) for when in ("before", "after"))
    change = f" ({(after - before) / before:+.1%})" if before else ""
    return f"nodes: {before} -> {after}{change}"


def _counted(words: Any) -> str:
    counts: Counter[str] = Counter(words)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {word}" for word, count in counts.items())
