"""Decides for each site whether and how it is rewritten, from its description and its evidence alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from graphsurgery.attention.masks import lost_below
from graphsurgery.attention.site import Refusal, Site
from graphsurgery.errors import UsageError
from graphsurgery.model.emit import numpy_dtype
from graphsurgery.options import RewriteOptions
from graphsurgery.phi.choose import Interval, check_phi, choose_per_head, choose_phi, phi_interval, window_refusal
from graphsurgery.phi.collect import Evidence
from graphsurgery.phi.statistics import SiteStatistics
from graphsurgery.phi.window import executing_dtype, window
from graphsurgery.softmax.denominator import chunk_sizes
from graphsurgery.softmax.plan import Denominator, SitePlan

__all__ = ["decide", "denominator", "given_phi", "selection"]

_CHUNK_KEYS = 512
_SMALLEST_CHUNK = 128
_LARGEST_OFFSET = 8.0
_LARGEST_PHI = 1e4
_USUAL_VALUE = 4.0
"""max|v| where nothing is known of the values."""


def given_phi(options: RewriteOptions) -> float | None:
    """The number of `--phi NUMBER`; None for auto and for a table."""
    if options.phi == "auto":
        return None
    try:
        value = float(options.phi)
    except ValueError:
        return None
    if not abs(value) <= _LARGEST_PHI:
        raise UsageError(
            f"--phi {options.phi} is no score of an attention; give a number up to {_LARGEST_PHI:g}, auto or a table"
        )
    return value


@dataclass(frozen=True)
class _Context:
    options: RewriteOptions
    evidence: Evidence
    given: float | None
    chosen: dict[str, float]


def decide(sites: tuple[Site, ...], evidence: Evidence, options: RewriteOptions) -> list[SitePlan]:
    """A plan for each site, in order."""
    context = _Context(options, evidence, given_phi(options), _choices(sites, evidence, options))
    selected = selection(options)
    return [_plan(site, context) if selected(site.id) else _excluded(site, options) for site in sites]


def _choices(sites: tuple[Site, ...], evidence: Evidence, options: RewriteOptions) -> dict[str, float]:
    intervals: dict[str, Interval] = {}
    for site in sites:
        seen = evidence.sites.get(site.id)
        if seen is not None:
            limits = window(executing_dtype(site, options.target))
            intervals[site.id] = phi_interval(seen.layer, limits, limits.kept(options.margin))
    return choose_phi(intervals)


def selection(options: RewriteOptions) -> Callable[[str], bool]:
    """Whether `include` and `exclude` let a site through, by its id; raises UsageError for a bad pattern."""
    include, exclude = (
        _pattern(flag, text) for flag, text in (("include", options.include), ("exclude", options.exclude))
    )

    def selected(label: str) -> bool:
        return (include is None or bool(include.search(label))) and not (exclude is not None and exclude.search(label))

    return selected


def _pattern(flag: str, text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"--{flag} {text!r} is not a regular expression: {error}; mend the pattern") from error


def _excluded(site: Site, options: RewriteOptions) -> SitePlan:
    node = site.softmax.name
    reason = f"{site.id} is left out by --include or --exclude"
    return SitePlan(site, window(executing_dtype(site, options.target)), left=Refusal("excluded", reason, node))


def _plan(site: Site, context: _Context) -> SitePlan:
    options, limits = context.options, window(executing_dtype(site, context.options.target))
    seen = context.evidence.sites.get(site.id)
    how, notes = denominator(site, options)
    plan = SitePlan(site, limits, denominator=how, zero_hidden=_zero_hidden(site, seen, options.guard), notes=notes)
    if seen is not None and seen.layer.rows:
        rows = seen.layer
        plan = replace(plan, row_max=(rows.row_max_low, rows.row_max_high), largest_value=rows.value_high)
    if options.guard == "exact" or options.form == "online":
        return _exact(plan, seen, "row maximum")
    plan = _with_phi(plan, seen, context)
    plan = replace(plan, guard=options.guard)
    if options.guard == "flag" and plan.left is None and site.scope.kind != "main":
        plan = replace(plan, left=_flag_scope(site))
    if options.guard != "if" and plan.left is None:
        plan = replace(plan, left=_hidden_rows(site, seen), notes=(*notes, *_mask_notes(plan, seen)))
    if plan.left is not None and options.otherwise == "exact":
        kept = f"row maximum kept ({plan.left.code}: {plan.left.reason})"
        return _exact(replace(plan, left=None, notes=(*notes, kept)), seen, "row maximum")
    return plan if plan.left is None else replace(plan, notes=())


def _with_phi(plan: SitePlan, seen: SiteStatistics | None, context: _Context) -> SitePlan:
    site, limits = plan.site, plan.window
    margin, label = limits.kept(context.options.margin), site.softmax.name or site.id
    if context.given is not None:
        refusal = None if seen is None else check_phi(context.given, seen, limits, label)
        return replace(plan, phi=context.given, phi_source="given", left=refusal)
    if seen is None:
        return replace(plan, left=_no_evidence(site, context.evidence))
    if site.id in context.chosen:
        return replace(plan, phi=context.chosen[site.id], phi_source="calibrated")
    heads = choose_per_head(seen, limits, margin) if site.dims.heads == len(seen.heads) else None
    if heads is not None:
        return replace(plan, phi=heads, phi_source="calibrated")
    return replace(plan, left=window_refusal(seen, limits, margin, label))


def _no_evidence(site: Site, evidence: Evidence) -> Refusal:
    label = site.softmax.name or site.id
    why = evidence.unseen.get(site.id)
    if why is not None:
        reason = f"{label} has no row statistics: {why}; rewrite it with --otherwise exact, which needs none"
    else:
        reason = f"no evidence for the φ of {label}: add --data DIR (or --otherwise exact, which needs none)"
    return Refusal("no-evidence", reason, label)


def _exact(plan: SitePlan, seen: SiteStatistics | None, source: str) -> SitePlan:
    zero = _zero_hidden(plan.site, seen, "exact")
    return replace(plan, guard="exact", phi=None, phi_source=source, offset=_offset(plan, seen), zero_hidden=zero)


def _offset(plan: SitePlan, seen: SiteStatistics | None) -> float:
    """What to add to the row maximum so that K equal keys keep sums and products finite in float16.

    With the maximum itself the sum reaches K, and 66,000 > 65,504; adding c scales every term by e^-c, and e^-8 is
    still a normal number.
    """
    if plan.window.sum_limits is None:
        return 0.0
    keys = plan.site.dims.keys
    count = keys if isinstance(keys, int) else 4096
    largest = seen.layer.value_high if seen is not None and seen.layer.rows else _USUAL_VALUE
    needed = math.log(max(count, 1)) + math.log(max(1.0, largest)) - plan.window.upper
    return round(min(_LARGEST_OFFSET, max(0.0, needed)) * 8) / 8


def denominator(site: Site, options: RewriteOptions) -> tuple[Denominator, tuple[str, ...]]:
    """How the row sum is taken, with a note where it is not what was asked for."""
    keys = site.dims.keys
    if not isinstance(keys, int):
        asked = options.form in ("chunks", "online") or (options.form == "auto" and options.chunks is not None)
        return Denominator(), ("the number of keys is symbolic: one sum instead of chunks",) if asked else ()
    if options.form == "auto" and options.chunks is None:
        return _automatic(site, keys), ()
    if options.form == "sum":
        return Denominator(), ()
    sizes = chunk_sizes(keys, min(keys, options.chunks or max(2, -(-keys // _CHUNK_KEYS))))
    if options.form == "online":
        return Denominator("online", sizes), ()
    rows = _rows(site)
    even = len(set(sizes)) == 1 and _stands_in_rows(site) and (rows is not None or options.chunk_sum == "reshape")
    if options.chunk_sum == "split" or (options.chunk_sum == "auto" and not even):
        return Denominator("split", sizes), ()
    if even:
        return Denominator("reshape", sizes, rows), ()
    return Denominator("split", sizes), (f"{len(sizes)} chunks do not divide {keys} keys: split instead of reshape",)


def _automatic(site: Site, keys: int) -> Denominator:
    """Chunks of about 512 keys where they divide the keys, one sum otherwise."""
    rows = _rows(site)
    if keys <= _CHUNK_KEYS or rows is None:
        return Denominator()
    for chunks in range(-(-keys // _CHUNK_KEYS), keys // _SMALLEST_CHUNK + 1):
        if keys % chunks == 0:
            return Denominator("reshape", (keys // chunks,) * chunks, rows)
    return Denominator()


def _rows(site: Site) -> int | None:
    """Query rows in the second last axis of what is summed; None where a Reshape into chunks is not certain to fit."""
    queries = site.dims.queries
    return queries if _stands_in_rows(site) and isinstance(queries, int) else None


def _stands_in_rows(site: Site) -> bool:
    return site.sum_after == 0 and site.sum_rank is not None and site.sum_rank >= 2


def _flag_scope(site: Site) -> Refusal:
    label = site.softmax.name or site.id
    reason = f"{label} stands in {site.scope.id}, whose rows no graph output can count; use --guard exact or clip"
    return Refusal("flag-scope", reason, label, {"scope": site.scope.id})


def _zero_hidden(site: Site, seen: SiteStatistics | None, guard: str) -> bool:
    """Whether rows without a visible key are to give 0: behind an IsNaN guard, for a mask of -inf.

    The row maximum tells -inf from the lowest number; with φ both are clipped, and where the graph does not say what
    its mask writes, the rows seen do.
    """
    if not (site.guarded and site.mask_fills & {"inf", "unknown"}):
        return False
    if guard == "exact" or "inf" in site.mask_fills or seen is None or seen.layer.hidden == 0:
        return True
    return not math.isfinite(seen.layer.hidden_high)


def _hidden_rows(site: Site, seen: SiteStatistics | None) -> Refusal | None:
    """Rows hidden by a mask of about -10000, whose scores the original still told apart."""
    lost = lost_below(numpy_dtype(site.dtype).name)
    if seen is None or seen.layer.hidden == 0 or seen.layer.hidden_high < -lost or not _adds(site):
        return None
    label, rows = site.softmax.name or site.id, seen.layer
    reason = (
        f"{rows.hidden} rows of {label} see no key behind a mask of about {rows.hidden_high:.4g}; clip would make them "
        "uniform, the original takes the softmax below the mask: use --otherwise exact or --guard exact"
    )
    return Refusal("hidden-rows", reason, label, {"hidden": rows.hidden, "hidden_high": rows.hidden_high})


def _adds(site: Site) -> bool:
    """Whether a mask leaves the scores it hides under its fill; a Where writes over them."""
    return any(link.kind in ("mask", "clamp") for link in site.before)


def _mask_notes(plan: SitePlan, seen: SiteStatistics | None) -> tuple[str, ...]:
    """What would happen to rows without a visible key, where that is not what the original gave."""
    site = plan.site
    notes: list[str] = []
    if "large" in site.mask_fills and _adds(site):
        notes.append(
            "a row whose keys are all hidden by the mask of about -10000 would become uniform; the original takes the "
            "softmax of the scores below the mask (--guard exact does so too)"
        )
    known = seen is not None and seen.layer.hidden > 0
    if plan.zero_hidden and "inf" not in site.mask_fills and not known:
        notes.append(
            "a row whose keys are all hidden gives 0, as behind the IsNaN guard for -Inf; if the mask writes another "
            "number, the original gave a uniform row (--guard exact tells them apart)"
        )
    return tuple(notes)
