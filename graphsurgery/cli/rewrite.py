"""`graphsurgery rewrite`: the main job."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from graphsurgery.cli.args import DataOption, ModelArgument, OutputOption, QuietFlag
from graphsurgery.cli.outcome import already_done, phi_is_number, remedies, verified
from graphsurgery.cli.output import check_apart, check_writable, files_of, progress, say, warn_synthetic
from graphsurgery.errors import NothingRewrittenError, UsageError, VerificationError
from graphsurgery.options import External, RewriteOptions

if TYPE_CHECKING:
    from graphsurgery.api import RewriteResult
    from graphsurgery.data import Samples
    from graphsurgery.verification.models import VerifyResult

__all__ = ["rewrite"]

_DEFAULTS = RewriteOptions()
_DRY = "dry run: nothing written"

_Failure = NothingRewrittenError | VerificationError


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
        Compare with the original on the last quarter of the samples, held out of calibration, or on all samples with
        a table of calibrate (default: given data).
    keep_failed
        Write the model although verification failed.
    dry_run
        Write nothing but the report.
    external
        Data files of a model written to another folder are copied beside it; keep says so, copy does not.
    """
    order = _Order(model, output, report, data, options, expect, verify, keep_failed, dry_run, external, quiet)
    order.check()
    job = _Job(order)
    result = job.rewrite()
    checked = job.verify(result)
    failure = _failure(order, result, checked)
    insists = isinstance(failure, VerificationError) and keep_failed
    with ExitStack() as stack:
        if report is not None:
            _write_report(stack, report, result)
        if order.written is not None and (failure is None or insists):
            _write_model(result, order.written, order)
    if not quiet:
        for line in _lines(order, result, checked, failure):
            say(line)
    if failure is not None:
        raise failure
    return 0


@dataclass(frozen=True)
class _Order:
    """The arguments of one rewrite."""

    model: str
    output: str | None
    report: str | None
    data: tuple[str, ...]
    options: RewriteOptions
    expect: int | None
    verify: bool | None
    keep_failed: bool
    dry_run: bool
    external: External
    quiet: bool

    @property
    def written(self) -> str | None:
        """Where the model goes."""
        return None if self.dry_run else self.output

    @property
    def verifies(self) -> bool:
        """Whether the outcome is compared with the original."""
        return self.verify is not False and bool(self.data)

    def check(self) -> None:
        """Refuse what cannot work, before the model is read."""
        if self.output is None and not self.dry_run:
            raise UsageError(
                f"rewrite needs an output: graphsurgery rewrite {self.model} -o OUT (or -o -, or --dry-run)"
            )
        if not self.data:
            self._check_without_data()
        self._check_outputs()
        for target in (self.written, self.report):
            check_writable(target)

    def _check_without_data(self) -> None:
        if self.verify:
            raise UsageError("--verify needs data; add --data DIR")
        if self.verify is None and self.options.guard != "exact" and phi_is_number(self.options):
            raise UsageError(
                f"--phi {self.options.phi} cannot be checked without data; add --data DIR, or --no-verify to insist"
            )

    def _check_outputs(self) -> None:
        if self.written == self.report == "-":
            raise UsageError("-o and --report both write -; give them different names")
        check_apart(self.report, (self.model, self.written, self.options.phi, *self.data))
        check_apart(self.written, (self.options.phi, *self.data))
        if self.written is None:
            return
        if self.written == "-" and sys.stdout.isatty():
            raise UsageError("-o - writes a binary model to the terminal; redirect stdout, or give a file")


class _Job:
    """One rewrite; the model is read once, also from stdin."""

    def __init__(self, order: _Order) -> None:
        from graphsurgery.api import open_data, open_model

        self._options = order.options
        self._progress = progress(order.quiet)
        self._source = open_model(order.model)
        check_apart(order.report, files_of(self._source))
        self._calibration = samples = open_data(order.data or None, self._source)
        self._held_out: Samples | None = None
        if samples is not None and order.verifies:
            self._calibration, self._held_out = self._parts(samples)

    def _parts(self, samples: Samples) -> tuple[Samples, Samples]:
        """The samples to calibrate on and those to verify on; a table is calibrated already, so all may verify."""
        from graphsurgery.phi.table import load_table

        if self._options.phi == "auto" or phi_is_number(self._options):
            return samples.split()
        seen = load_table(self._options.phi, self._source.sha256).evidence.data_sha256
        return samples, replace(samples, reused=seen == samples.sha256)

    def rewrite(self) -> RewriteResult:
        from graphsurgery import api

        result = api.rewrite(self._source, data=self._calibration, options=self._options, progress=self._progress)
        given = self._calibration
        if result.report["method"]["synthetic"] or (given is not None and given.synthetic):
            warn_synthetic()
        return result

    def verify(self, result: RewriteResult) -> VerifyResult | None:
        """Compare with the original on the held-out samples; the report gets the figures."""
        if self._held_out is None or not result.changed:
            return None
        from graphsurgery.verification.models import verify

        checked = verify(result.original(), result.outcome(), data=self._held_out, progress=self._progress)
        result.report["verify"] = checked.to_json()
        return checked


def _failure(order: _Order, result: RewriteResult, checked: VerifyResult | None) -> _Failure | None:
    from graphsurgery.report.text import nothing_done

    done, expect = result.rewritten, order.expect
    if expect is not None and done != expect:
        verb = "site was" if done == 1 else "sites were"
        return NothingRewrittenError(f"{done} {verb} rewritten, --expect asks for {expect}; the model was not written")
    if not done and expect is None:
        return NothingRewrittenError(nothing_done(result.report))
    if checked is None or checked.passed:
        return None
    kept = "written all the same (--keep-failed)" if order.keep_failed else "not written"
    return VerificationError(f"{checked.summary()}; {_DRY if order.dry_run else kept}")


def _lines(order: _Order, result: RewriteResult, checked: VerifyResult | None, failure: _Failure | None) -> list[str]:
    from graphsurgery.report.text import hints, nothing_done, summary

    commands = remedies(order.options, bool(order.data)) if isinstance(failure, NothingRewrittenError) else {}
    lines: list[str] = []
    if result.rewritten:
        lines += summary(result.report, commands)
    else:
        lines += hints(result.report, commands)
        lines += filter(None, [already_done(result.proto)])
    if failure is not None:
        return lines
    if not result.rewritten:
        lines.append(nothing_done(result.report))
    if result.changed:
        lines.append(verified(checked, order.verify is False, order.options.target))
    lines.append(_DRY if order.written is None else f"written to {'stdout' if order.written == '-' else order.written}")
    return lines


def _write_report(stack: ExitStack, target: str, result: RewriteResult) -> None:
    """Write the report; a file takes its name only when the model is written too."""
    from graphsurgery.model.atomic import atomic_file

    text = json.dumps(result.report, indent=1, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        stack.enter_context(atomic_file(target)).write(text.encode())


def _write_model(result: RewriteResult, output: str, order: _Order) -> None:
    from graphsurgery.model.files import save_model

    placed = save_model(
        result.proto, output, source=result.source, external=order.external, unchanged=not result.changed
    )
    for file in placed:
        if file.note is not None and not order.quiet:
            say(file.note)
