"""The φ table: row statistics and the φ that follows from them, as a file (`graphsurgery/phi/1`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from graphsurgery.errors import UsageError
from graphsurgery.phi.collect import Evidence
from graphsurgery.phi.statistics import RowStatistics, SiteStatistics

__all__ = ["PhiTable", "load_table"]

SCHEMA = "graphsurgery/phi/1"


@dataclass(frozen=True)
class PhiTable:
    """Evidence for one model; `choices` repeats what follows from it for readers and is not read back."""

    model_sha256: str
    evidence: Evidence
    options: dict[str, object]
    versions: dict[str, str]
    choices: dict[str, dict[str, object]]

    def to_json(self) -> str:
        """Deterministic text: the same model, data and options give the same bytes."""
        evidence = self.evidence
        sites = {
            site: {
                "samples": seen.samples,
                "heads": [head.to_json() for head in seen.heads],
                "layer": seen.layer.to_json(),
                **self.choices.get(site, {}),
            }
            for site, seen in sorted(evidence.sites.items())
        }
        document = {
            "schema": SCHEMA,
            "versions": self.versions,
            "model_sha256": self.model_sha256,
            "data": {
                "sha256": evidence.data_sha256,
                "samples": evidence.samples,
                "sources": list(evidence.sources),
                "synthetic": evidence.synthetic,
            },
            "options": self.options,
            "sites": sites,
            "unseen": dict(sorted(evidence.unseen.items())),
        }
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def load_table(path: str | Path, model_sha256: str) -> PhiTable:
    """Read a table written by `calibrate` for this very model; raises UsageError where it is not one."""
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path} as a φ table: {error.strerror or error}; give auto, a number or a file of calibrate"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not a φ table (no JSON: {error}); write one with calibrate") from error
    if not isinstance(document, dict) or cast("dict[str, Any]", document).get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a φ table of schema {SCHEMA}; write one with calibrate")
    table = cast("dict[str, Any]", document)
    if table.get("model_sha256") != model_sha256:
        raise UsageError(f"{path} was made for another model (its SHA-256 differs); run calibrate on this one")
    try:
        return _parsed(table)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{path} is damaged ({type(error).__name__}: {error}); write it again with calibrate"
        ) from error


def _parsed(table: dict[str, Any]) -> PhiTable:
    data = table["data"]
    sites = {
        site: SiteStatistics(tuple(RowStatistics.from_json(head) for head in entry["heads"]), int(entry["samples"]))
        for site, entry in table["sites"].items()
    }
    evidence = Evidence(
        sites,
        dict(table["unseen"]),
        str(data["sha256"]),
        int(data["samples"]),
        tuple(data["sources"]),
        bool(data["synthetic"]),
    )
    return PhiTable(str(table["model_sha256"]), evidence, dict(table["options"]), dict(table["versions"]), {})
