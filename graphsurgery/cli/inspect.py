"""`graphsurgery inspect`: what is in a model, without changing it."""

from __future__ import annotations

import json as _json
from typing import TYPE_CHECKING, Any

from graphsurgery.cli.args import JsonFlag, ModelArgument
from graphsurgery.cli.outcome import done_line, earlier_sites
from graphsurgery.cli.output import Table, show_table
from graphsurgery.options import Target

if TYPE_CHECKING:
    from graphsurgery.model.files import SourceModel

__all__ = ["SCHEMA", "inspect"]

SCHEMA = "graphsurgery/inspect/1"

_SITE_KEYS = ("id", "scope", "chain", "nodes", "dims", "status", "code", "reason", "dtype", "window", "values", "notes")


def inspect(model: ModelArgument, /, *, target: Target = "generic", json: JsonFlag = False) -> int:
    """List the attentions of a model: chain, shapes, executing type and window, and why one is refused.

    Softmax nodes that are no attention are listed with the place where the search ended.

    Columns:

    site: scope/name of the Softmax node

    dims: B batch, H query heads, Q queries, K keys, D head size, G query heads per key head, ? where unknown

    executes: type that the target computes in

    window: limits of row maximum minus phi in that type

    Parameters
    ----------
    target
        Engine that will execute the model; qnn-htp executes float32 graphs in float16.
    """
    document = _examine(model, target)
    if json:
        print(_json.dumps(document, indent=1, ensure_ascii=False))
    else:
        _show(document)
    return 0


def _examine(model: str, target: Target) -> dict[str, Any]:
    from graphsurgery.api import open_model
    from graphsurgery.attention import find_attention
    from graphsurgery.model.index import ModelIndex
    from graphsurgery.options import RewriteOptions
    from graphsurgery.phi.collect import Evidence
    from graphsurgery.report.build import site_entries
    from graphsurgery.softmax.decide import decide
    from graphsurgery.versions import versions

    source = open_model(model)
    index = ModelIndex(source.proto)
    findings = find_attention(index)
    # The exact guard needs no evidence, so its plan says what is known of the site alone.
    plans = decide(findings.sites, Evidence(), RewriteOptions(guard="exact", target=target))
    return {
        "schema": SCHEMA,
        "tool": versions(),
        "model": _model(source),
        "target": target,
        "sites": [_site(entry) for entry in site_entries(findings, plans)],
        "already_rewritten": earlier_sites(index),
        "not_attention": [{"id": other.id, "chain": other.chain, "reason": other.reason} for other in findings.others],
        "nodes": dict(sorted(index.node_counts().items())),
    }


def _model(source: SourceModel) -> dict[str, Any]:
    proto = source.proto
    opset = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    return {"path": source.label, "sha256": source.sha256, "opset": opset, "ir": proto.ir_version}


def _site(entry: dict[str, Any]) -> dict[str, Any]:
    shown = {key: entry.get(key) for key in _SITE_KEYS}
    if shown["status"] != "refused":
        shown["status"] = "supported"
    return {**shown, "values": shown["values"] or {}, "notes": shown["notes"] or []}


def _show(document: dict[str, Any]) -> None:
    sites, others, nodes = document["sites"], document["not_attention"], document["nodes"]
    model = document["model"]
    refused = sum(site["status"] == "refused" for site in sites)
    found = f"{len(sites)} attention{'' if len(sites) == 1 else 's'}, {len(sites) - refused} supported"
    opset = ", ".join(f"{domain} {version}" for domain, version in model["opset"].items())
    print(f"{model['path']}: {found if sites else 'no attention found'}; opset {opset}; IR {model['ir']}")
    earlier = done_line(document["already_rewritten"])
    if earlier is not None:
        print(earlier)
    table = Table("status", "site", "chain", "dims", "executes", "window", "reason")
    for site in sites:
        reason = "" if site["code"] is None else f"{site['code']}: {site['reason']}"
        table.add(site["status"], site["id"], site["chain"], _dims(site), *_window(site), reason)
    for other in others:
        table.add("no-attention", other["id"], other["chain"], "", "", "", f"nearest miss: {other['reason']}")
    show_table(table)
    counts = sorted(nodes.items(), key=lambda item: (-item[1], item[0]))
    print(f"nodes: {sum(nodes.values())} ({', '.join(f'{count} {op}' for op, count in counts)})")


def _dims(site: dict[str, Any]) -> str:
    return " ".join(f"{letter}={'?' if size is None else size}" for letter, size in site["dims"].items())


def _window(site: dict[str, Any]) -> tuple[str, str]:
    """The executing type, and the window of row statistics less φ."""
    window = site["window"]
    if window is None:
        return "", ""
    return window["dtype"], f"[{window['lower']:g}, {window['upper']:g}]"
