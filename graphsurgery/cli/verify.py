"""`graphsurgery verify`: compares two models."""

from __future__ import annotations

import json as _json
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from graphsurgery.cli.args import JsonFlag, ModelArgument, QuietFlag, RequiredData
from graphsurgery.cli.output import Table, progress, say, show_table, warn_synthetic
from graphsurgery.errors import UsageError, VerificationError
from graphsurgery.options import VerifyOptions

if TYPE_CHECKING:
    from graphsurgery.verification.metrics import OutputMetrics
    from graphsurgery.verification.models import VerifyResult

__all__ = ["SCHEMA", "verify"]

SCHEMA = "graphsurgery/verify/1"

_DEFAULTS = VerifyOptions()


def verify(
    a: ModelArgument,
    b: ModelArgument,
    /,
    *,
    data: RequiredData,
    engine: Literal["onnxruntime"] = "onnxruntime",
    options: Annotated[VerifyOptions, Parameter(name="*")] = _DEFAULTS,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> int:
    """Compare model B with the original A: outputs, and attentions on equal inputs.

    An output that moves as far when the original's probabilities change by one rounding step is no failure.

    Parameters
    ----------
    engine
        Engine that runs both models, without optimisations.
    """
    from graphsurgery.verification.models import verify as compare
    from graphsurgery.versions import versions

    if a == b == "-":
        raise UsageError("only one of the two models can come from stdin; give a file for the other")
    result = compare(a, b, data=data, options=options, engine=engine, progress=progress(quiet))
    if result.synthetic:
        warn_synthetic()
    if json:
        document = {"schema": SCHEMA, "tool": versions(), **result.to_json()}
        print(_json.dumps(document, indent=1, ensure_ascii=False))
    else:
        _show(result)
    if not result.passed:
        raise VerificationError(result.summary() if json else _failed(result))
    if not quiet:
        say(result.summary())
    return 0


def _failed(result: VerifyResult) -> str:
    """What failed, by name: the table has said why."""
    wrong = [check.metrics.name for check in result.outputs if not check.passed]
    wrong += [f"site {check.id}" for check in result.sites if not check.passed]
    more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
    samples = f"{result.samples} {'sample' if result.samples == 1 else 'samples'}"
    return f"verification failed on {samples} on {result.engine}: {wrong[0]}{more}, see the table"


def _show(result: VerifyResult) -> None:
    table = Table("verdict", "kind", "name", "dtype", "max abs", "max rel", "SQNR dB", "cosine", "floor", "note")
    for check in result.outputs:
        floor = "" if check.floor_abs is None else f"{check.floor_abs:.2g}"
        _add(table, "output", check.metrics.name, check.metrics, check.passed, floor, check.note)
    for site in result.sites:
        _add(table, "site", site.id, site.metrics, site.passed, "", None)
    show_table(table)
    for reason in result.sites_not_compared:
        say(f"site not compared: {reason}")


def _add(
    table: Table, kind: str, name: str, metrics: OutputMetrics, passed: bool, floor: str, note: str | None
) -> None:
    figures = (
        f"{metrics.max_abs:.2g}",
        f"{metrics.max_rel:.2g}",
        f"{metrics.sqnr_db:.1f}",
        f"{metrics.cosine:.9f}",
    )
    table.add(
        "passed" if passed else "FAILED", kind, name, metrics.dtype, *figures, floor, note or metrics.reason or ""
    )
