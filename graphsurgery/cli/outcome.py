"""The lines after a rewrite: what was done, what would help, what was verified and what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphsurgery.cli.typed import typed

if TYPE_CHECKING:
    from onnx import ModelProto

    from graphsurgery.model.index import ModelIndex
    from graphsurgery.options import RewriteOptions
    from graphsurgery.verification.models import VerifyResult

__all__ = ["already_done", "done_line", "earlier_sites", "phi_is_number", "remedies", "verified"]


def phi_is_number(options: RewriteOptions) -> bool:
    """Whether φ is given by hand; raises UsageError for one that is not finite."""
    from graphsurgery.softmax.decide import given_phi

    return given_phi(options) is not None


def remedies(options: RewriteOptions, has_data: bool) -> dict[str, str]:
    """For each reason code that another command line can mend, the one that was typed with the change."""
    line = typed()
    automatic, exact = options.phi == "auto", "exact" in (options.guard, options.otherwise)
    with_evidence = line if has_data or exact or not automatic else line.plus("--data", "DIR")
    otherwise = line.minus("--otherwise").plus("--otherwise", "exact")
    found = {
        "no-evidence": otherwise if has_data or not automatic else with_evidence,
        "window": otherwise.minus("--phi") if phi_is_number(options) else otherwise,
        "hidden-rows": otherwise,
        "excluded": with_evidence.minus("--include").minus("--exclude"),
    }
    if not options.decompose_attention:
        found["fused-attention"] = with_evidence.plus("--decompose-attention")
    return {code: str(command) for code, command in found.items()}


def verified(checked: VerifyResult | None, unasked: bool, target: str) -> str:
    """What is known of the outputs; a model nobody compared must not look like one that passed."""
    if checked is None:
        return f"NOT VERIFIED ({'--no-verify' if unasked else 'no --data given'})"
    seen = " (the sample calibration has seen: not held out)" if checked.reused else ""
    half = "; float16 execution on the target was not run" if target == "qnn-htp" else ""
    return f"{checked.summary()}{seen}{half}"


def earlier_sites(index: ModelIndex) -> list[str]:
    """The sites that an earlier rewrite marked on its nodes, in graph order."""
    from graphsurgery.model.rewriter import PASS_KEY, SITE_KEY

    found: dict[str, None] = {}
    for _, node in index.walk():
        marks: dict[str, Any] = {entry.key: entry.value for entry in node.metadata_props}
        if SITE_KEY in marks and marks.get(PASS_KEY) == "unified_max":
            found[marks[SITE_KEY]] = None
    return list(found)


def already_done(model: ModelProto) -> str | None:
    """A line for a model that an earlier rewrite has been through, else None."""
    from graphsurgery.model.index import ModelIndex

    return done_line(earlier_sites(ModelIndex(model)))


def done_line(sites: list[str]) -> str | None:
    """How many sites were rewritten before; None for no site."""
    if not sites:
        return None
    return f"{len(sites)} {'site' if len(sites) == 1 else 'sites'} already rewritten by graphsurgery"
