"""Errors that a user can mend; anything else that escapes is a bug of ours and keeps its traceback."""

from __future__ import annotations

__all__ = ["GraphSurgeryError", "NothingRewrittenError", "UsageError", "VerificationError"]


class GraphSurgeryError(Exception):
    """Base of all errors with a one-line message: what, where, how to mend it.

    `exit_status` is what the command line returns for it.
    """

    exit_status = 2


class UsageError(GraphSurgeryError):
    """The model, the data or an option is not usable as given."""

    exit_status = 2


class NothingRewrittenError(GraphSurgeryError):
    """No site was rewritten, or not as many as `--expect` asks for."""

    exit_status = 3


class VerificationError(GraphSurgeryError):
    """The rewritten model does not give the outputs of the original."""

    exit_status = 4
