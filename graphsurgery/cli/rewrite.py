"""`graphsurgery rewrite`: the main job."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from graphsurgery.cli.args import DataOption, ModelArgument, OutputOption, QuietFlag
from graphsurgery.cli.output import check_writable, progress, say, warn_synthetic
from graphsurgery.errors import NothingRewrittenError, UsageError, VerificationError
from graphsurgery.options import External, RewriteOptions

if TYPE_CHECKING:
    from graphsurgery.api import RewriteResult
    from graphsurgery.data import Samples
    from graphsurgery.verify.models import VerifyResult

__all__ = ["rewrite"]

_DEFAULTS = RewriteOptions()


def rewrite(
    model: ModelArgument,
    /,
    *,
    output: OutputOption = None,
    data: DataOption = (),
    options: Annotated[RewriteOptions, Parameter(name="*")] = _DEFAULTS,
    expect: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    report: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    verify: Annotated[bool | None, Parameter(negative="--no-verify")] = None,
    keep_failed: bool = False,
    dry_run: bool = False,
    external: External = "keep",
    quiet: QuietFlag = False,
) -> int:
    """Rewrite the softmax of every attention, with evidence and proof.

    Calibrates on the data, verifies on held-out samples of it, and writes the model only if all went well.

    Parameters
    ----------
    expect
        Number of sites that must be rewritten; another number ends with status 3.
    report
        File for the report (JSON); - writes it to stdout.
    verify
        Compare with the original on the last quarter of the samples, held out of calibration (default: given data).
    keep_failed
        Write the model although verification failed.
    dry_run
        Write nothing but the report.
    external
        Data files of a model written to another folder: keep links to them, copy makes files of their own.
    """
    _check(model, output, report, data, verify, dry_run)
    written = None if dry_run else output
    for target in (written, report):
        check_writable(target)
    job = _Job(model, data, verify is not False and bool(data), quiet)
    result = job.rewrite(options)
    checked = job.verify(result)
    failure = _failure(result, checked, expect)
    with ExitStack() as stack:
        if report is not None:
            _write_report(stack, report, result)
        if written is not None and (failure is None or (isinstance(failure, VerificationError) and keep_failed)):
            _write_model(result, written, external, quiet)
    if not quiet:
        _summarise(result, checked, isinstance(failure, NothingRewrittenError), model, output)
    if failure is not None:
        raise failure
    return 0


def _check(
    model: str, output: str | None, report: str | None, data: tuple[str, ...], verify: bool | None, dry_run: bool
) -> None:
    if output is None and not dry_run:
        raise UsageError(f"rewrite needs an output: graphsurgery rewrite {model} -o OUT (or -o -, or --dry-run)")
    if verify and not data:
        raise UsageError("--verify needs data; add --data DIR")
    if output is None or dry_run:
        return
    if output == "-" and sys.stdout.isatty():
        raise UsageError("-o - writes a binary model to the terminal; redirect stdout, or give a file")
    if report is not None and (report == output or _same_file(report, output)):
        raise UsageError(f"-o and --report both write {output}; give them different names")


def _same_file(first: str, second: str) -> bool:
    return "-" not in (first, second) and Path(first).absolute() == Path(second).absolute()


class _Job:
    """One rewrite; the model is read once, also from stdin."""

    def __init__(self, model: str, data: tuple[str, ...], verifies: bool, silent: bool) -> None:
        from graphsurgery.api import open_data, open_model

        self._progress = progress(silent)
        self._source = open_model(model)
        self._calibration = samples = open_data(data or None, self._source)
        self._held_out: Samples | None = None
        if samples is None:
            return
        if verifies:
            self._calibration, self._held_out = samples.split()
        if samples.synthetic:
            warn_synthetic()

    def rewrite(self, options: RewriteOptions) -> RewriteResult:
        from graphsurgery import api

        return api.rewrite(self._source, data=self._calibration, options=options, progress=self._progress)

    def verify(self, result: RewriteResult) -> VerifyResult | None:
        """Compare with the original on the held-out samples; the report gets the figures."""
        if self._held_out is None or not result.changed:
            return None
        from graphsurgery.verify.models import verify

        checked = verify(result.original(), result.outcome(), data=self._held_out, progress=self._progress)
        result.report["verify"] = checked.to_json()
        return checked


def _failure(
    result: RewriteResult, checked: VerifyResult | None, expect: int | None
) -> NothingRewrittenError | VerificationError | None:
    from graphsurgery.report.text import nothing_done

    done = result.rewritten
    if expect is not None and done != expect:
        verb = "site was" if done == 1 else "sites were"
        return NothingRewrittenError(f"{done} {verb} rewritten, --expect asks for {expect}; the model was not written")
    if not done and expect is None:
        return NothingRewrittenError(nothing_done(result.report))
    if checked is not None and not checked.passed:
        return VerificationError(checked.summary())
    return None


def _summarise(
    result: RewriteResult, checked: VerifyResult | None, too_few: bool, model: str, output: str | None
) -> None:
    from graphsurgery.report.text import hints, summary

    lines = summary(result.report) if result.rewritten else []
    if checked is not None and checked.passed:
        lines.append(checked.summary())
    if too_few:
        lines += hints(result.report, model, output)
    for line in lines:
        say(line)


def _write_report(stack: ExitStack, target: str, result: RewriteResult) -> None:
    """Write the report; a file takes its name only when the model is written too."""
    from graphsurgery.model.atomic import atomic_file

    text = json.dumps(result.report, indent=1, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        stack.enter_context(atomic_file(target)).write(text.encode())


def _write_model(result: RewriteResult, output: str, external: External, silent: bool) -> None:
    from graphsurgery.model.files import save_model

    placed = save_model(result.proto, output, source=result.source, external=external, unchanged=not result.changed)
    for file in placed:
        if file.note is not None and not silent:
            say(file.note)
