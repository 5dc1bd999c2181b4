"""`graphsurgery calibrate`: row statistics of each attention, and the φ that follows from them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from graphsurgery.cli.args import ModelArgument, QuietFlag, RequiredData, RequiredOutput
from graphsurgery.cli.output import check_apart, check_writable, files_of, progress, say, warn_synthetic
from graphsurgery.errors import NothingRewrittenError
from graphsurgery.options import CalibrateOptions

if TYPE_CHECKING:
    from graphsurgery.phi.table import PhiTable

__all__ = ["calibrate"]

_DEFAULTS = CalibrateOptions()


def calibrate(
    model: ModelArgument,
    /,
    *,
    output: RequiredOutput,
    data: RequiredData,
    options: Annotated[CalibrateOptions, Parameter(name="*")] = _DEFAULTS,
    quiet: QuietFlag = False,
) -> int:
    """Run the attentions on samples and write a φ table for `rewrite --phi`.

    Only the part of the model that feeds the attentions runs.  The same model, data and options give the same bytes.
    """
    from graphsurgery import api
    from graphsurgery.model.atomic import write_text_atomically

    check_apart(output, (model, *data))
    check_writable(output)
    source = api.open_model(model)
    check_apart(output, files_of(source))
    table = api.calibrate(source, data=data, options=options, progress=progress(quiet))
    evidence = table.evidence
    if not evidence.sites and not evidence.unseen:
        raise NothingRewrittenError(
            f"{model}: no attention to calibrate; see graphsurgery inspect {model}; nothing was written"
        )
    if evidence.synthetic:
        warn_synthetic()
    if output == "-":
        sys.stdout.write(table.to_json())
    else:
        write_text_atomically(output, table.to_json())
    if not quiet:
        _show(table)
    return 0


def _show(table: PhiTable) -> None:
    for site, seen in sorted(table.evidence.sites.items()):
        rows, choice = seen.layer, table.choices.get(site, {})
        window = f"{choice.get('window')} window, margin {choice.get('margin'):g}"
        phi = choice.get("phi")
        verdict = f"no one phi fits the {window}" if phi is None else f"phi {phi:g} ({window})"
        say(f"{site}: row max [{rows.row_max_low:.4g}, {rows.row_max_high:.4g}] over {rows.rows} rows: {verdict}")
    for site, reason in sorted(table.evidence.unseen.items()):
        say(f"{site}: no statistics: {reason}")
