"""The lines that say what a rewrite did, from its report alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["hints", "nothing_done", "summary"]

Report = dict[str, Any]


def summary(report: Report, commands: Mapping[str, str]) -> list[str]:
    """Sites by fate, forms, φ and nodes before and after; then the hints for the other sites, and the notes."""
    sites: list[Report] = report["sites"]
    written = [site for site in sites if site["status"] == "rewritten"]
    lines = [f"{report['model']['path']}: {_fates(sites)}"]
    if written:
        lines.append(f"forms: {_counted(_form(site) for site in written)}")
        lines.append(f"phi: {_phi_groups(written)}")
    return [*lines, _nodes(report), *hints(report, commands), *_notes(written)]


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


def hints(report: Report, commands: Mapping[str, str]) -> list[str]:
    """For each reason code of a site that was not rewritten, its first reason and the command that mends it, if any."""
    left = [site for site in report["sites"] if site["status"] != "rewritten"]
    lines: list[str] = []
    for code, (site, count) in _grouped((site["code"], site) for site in left).items():
        lines.append(f"{code}{f' ({count} sites)' if count > 1 else ''}: {site['reason']}")
        if code in commands:
            lines.append(f"  try: {commands[code]}")
    return lines


def _notes(sites: list[Report]) -> list[str]:
    """Each kind of note once: notes that begin alike differ in names and numbers only."""
    notes = [note for site in sites for note in dict.fromkeys(site.get("notes", []))]
    groups = _grouped((note.partition(": ")[0], note) for note in notes)
    return [f"note ({_sites(count)}): {note}" for note, count in groups.values()]


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, tuple[Any, int]]:
    """For each key, in order, its first value and how many there are."""
    groups: dict[str, tuple[Any, int]] = {}
    for key, value in pairs:
        first, count = groups.get(key, (value, 0))
        groups[key] = first, count + 1
    return groups


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


def _phi_groups(sites: list[Report]) -> str:
    counts = Counter(_phi(site["phi"]) for site in sites)
    return ", ".join(f"{phi} ({_sites(count)})" for phi, count in counts.items())


def _phi(phi: Report) -> str:
    if "per_head" in phi:
        return "per head"
    return phi["source"] if phi["value"] is None else f"{phi['value']:g}"


def _sites(count: int) -> str:
    return f"{count} site{'' if count == 1 else 's'}"


def _nodes(report: Report) -> str:
    before, after = (sum(report["nodes"][when].values()) for when in ("before", "after"))
    change = f" ({(after - before) / before:+.1%})" if before else ""
    return f"nodes: {before} -> {after}{change}"


def _counted(words: Iterable[str]) -> str:
    counts: Counter[str] = Counter(words)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {word}" for word, count in counts.items())
