"""Entry points: parses the arguments, runs a verb and turns every end into an exit status."""

from __future__ import annotations

import os
import sys
import traceback

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import MissingArgumentError, UnusedCliTokensError

from graphsurgery.cli.calibrate import calibrate
from graphsurgery.cli.doctor import doctor
from graphsurgery.cli.inspect import inspect
from graphsurgery.cli.rewrite import rewrite
from graphsurgery.cli.typed import remember, typed
from graphsurgery.cli.verify import verify
from graphsurgery.errors import GraphSurgeryError

__all__ = ["main", "run"]

_COMPLETE = {
    "inspect": "inspect MODEL",
    "calibrate": "calibrate MODEL --data D -o phi.json",
    "rewrite": "rewrite MODEL -o OUT --data D",
    "verify": "verify A B --data D",
}
_NEEDED = {"MODEL": "a model", "A": "two models", "B": "a second model", "--data": "data", "--output": "an output"}

_BUG, _USAGE, _INTERRUPTED, _CLOSED_PIPE = 1, 2, 130, 141


def main(argv: list[str] | None = None) -> int:
    """Run the command line on `argv` (default: that of the process) and return the exit status.

    0 done, 1 a bug (its traceback is printed), 2 usage or bad input, 3 nothing rewritten or not as many sites as
    expected, 4 verification failed, 130 interrupted, 141 the reader of stdout went away.
    """
    try:
        words = sys.argv[1:] if argv is None else argv
        remember(words)
        status = _app()(words)
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(_parse_message(error), _USAGE)
    except GraphSurgeryError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", _INTERRUPTED)
    except BrokenPipeError:
        # What is still buffered has no reader; flushing it at exit would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except Exception:  # noqa: BLE001 - the last stop before the interpreter: a bug keeps its traceback
        traceback.print_exc()
        return _BUG
    return status if isinstance(status, int) else 0


def run() -> None:
    """The console script."""
    sys.exit(main())


def _app() -> App:
    app = App(
        name="graphsurgery",
        help="Rewrites the softmax of exported ONNX attention to the unified max form.",
        help_format="plaintext",
        version=_version,
        default_parameter=Parameter(negative=()),
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for verb in (inspect, calibrate, rewrite, verify, doctor):
        app.command(verb)
    return app


def _version() -> str:
    import graphsurgery

    return f"graphsurgery {graphsurgery.__version__}"


def _fail(message: str, status: int) -> int:
    kind = "error: " if status == _USAGE else ""
    print(f"graphsurgery: {kind}{' '.join(message.split())}", file=sys.stderr)
    return status


def _parse_message(error: CycloptsError) -> str:
    verb = " ".join(error.command_chain or ())
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return _missing(verb, error.argument.name, error.argument.names, error.unused_tokens or [])
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        message = f"unexpected argument '{error.unused_tokens[0]}'"
    else:
        message = str(error).rstrip(".")
    return f"{message}; see graphsurgery {verb + ' ' if verb else ''}--help"


def _missing(verb: str, name: str, spellings: tuple[str, ...], unused: list[str]) -> str:
    """What a verb needs, or which option was typed without its value or not as it is spelled."""
    option = next((word for word in reversed(typed().words) if word in spellings), None)
    if option is not None:
        return f"{option} needs a value; see graphsurgery {verb} --help"
    unknown = next((word for word in unused if word.startswith("-") and word != "-"), None)
    if unknown is not None:
        return f"unknown option {unknown}; see graphsurgery {verb} --help"
    return f"{verb} needs {_NEEDED.get(name, name)}: graphsurgery {_COMPLETE[verb]}"
