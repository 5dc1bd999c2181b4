"""The command line as a process of its own: streams, start-up, terminals."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_models import SENTINEL, Cli, write_model

PROGRAM = [sys.executable, "-m", "graphsurgery"]


def _run(*arguments: object, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, input=data, capture_output=True, check=False, timeout=60)


def test_rewrite_is_a_filter(cli: Cli, decoder: Path, samples: Path, out: Path) -> None:
    ran = _run("rewrite", "-", "-o", "-", "--data", samples, data=decoder.read_bytes())
    assert ran.returncode == 0
    assert b"<stdin>: 2 attentions, 2 rewritten" in ran.stderr
    assert cli("rewrite", decoder, "-o", out, "--data", samples).status == 0
    assert ran.stdout == out.read_bytes()


def test_a_filter_that_fails_writes_nothing(decoder: Path) -> None:
    ran = _run("rewrite", "-", "-o", "-", data=decoder.read_bytes())
    assert (ran.returncode, ran.stdout) == (3, b"")
    assert b"<stdin>: nothing was rewritten" in ran.stderr
    ran = _run("rewrite", "-", "-o", "-", data=b"no model")
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr.startswith(b"graphsurgery: error: <stdin>: ") and ran.stderr.count(b"\n") == 1


def test_two_filters_in_a_row(decoder: Path) -> None:
    first = _run("rewrite", "-", "-o", "-", "--guard", "exact", "--include", "204", data=decoder.read_bytes())
    second = _run("inspect", "-", data=first.stdout)
    assert (first.returncode, second.returncode) == (0, 0)
    assert b"1 attention, 1 supported" in second.stdout


@pytest.mark.parametrize(
    ("status", "arguments"),
    [(0, ["--guard", "exact"]), (2, ["--guard", "bad"]), (3, []), (3, ["--guard", "exact", "--expect", "7"])],
)
def test_exit_status(decoder: Path, out: Path, status: int, arguments: list[str]) -> None:
    ran = _run("rewrite", decoder, "-o", out, *arguments)
    assert ran.returncode == status
    assert (out.read_bytes() == SENTINEL) == (status != 0)
    assert b"Traceback" not in ran.stderr


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from graphsurgery.cli import main\n"
        "for verb in ([], ['inspect'], ['calibrate'], ['rewrite'], ['verify'], ['doctor']):\n"
        "    assert main([*verb, '--help']) == 0\n"
        "print([name for name in ('numpy', 'onnx', 'onnxruntime', 'rich.progress') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    assert ran.stdout.decode().splitlines()[-1] == "[]"


def test_names_of_the_package_are_loaded_when_used() -> None:
    script = (
        "import sys, graphsurgery\n"
        "assert 'numpy' not in sys.modules and 'onnx' not in sys.modules\n"
        "import graphsurgery.verification.models\n"
        "from graphsurgery.verification import metrics\n"
        "names = [name for name in graphsurgery.__all__ if name != '__version__']\n"
        "assert all(callable(getattr(graphsurgery, name)) for name in names), names\n"
        "assert graphsurgery.verify is graphsurgery.verify.__globals__['verify']\n"
        "assert set(graphsurgery.__all__) <= set(dir(graphsurgery)) and not hasattr(graphsurgery, 'absent')\n"
        "print(graphsurgery.__version__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout == b"0.1.0\n"


def test_a_reader_that_goes_away_is_no_bug(decoder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*PROGRAM, "inspect", str(decoder)]
        ran = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60)
    finally:
        os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_a_terminal_gets_a_table_and_never_a_binary(decoder: Path) -> None:
    status, shown = _on_terminal("inspect", str(decoder))
    assert status == 0
    assert "┃" in shown and "main/" in shown
    status, shown = _on_terminal("rewrite", str(decoder), "-o", "-", "--guard", "exact")
    assert status == 2
    assert shown.startswith("graphsurgery: error: ") and "terminal" in shown


def _on_terminal(*arguments: str) -> tuple[int, str]:
    control, terminal = pty.openpty()
    process = subprocess.Popen([*PROGRAM, *arguments], stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while block := os.read(control, 4096):
            shown += block
    except OSError:  # the end of a terminal on Linux
        pass
    finally:
        os.close(control)
    return process.wait(timeout=60), shown.decode()


SLOW = """
<ir_version: 10, opset_import: ["": 18]>
slow (float[1,8,1,64] x) => (float[1,8,1024,64] y)
<int64[4] shape = {1, 8, 1024, 64}> {
  q = Expand(x, shape)
  k = Transpose<perm = [0, 1, 3, 2]>(q)
  s = MatMul(q, k)
  p = Softmax(s)
  y = MatMul(p, q)
}
"""


def _heed_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("verb", ["calibrate", "rewrite"])
def test_ctrl_c_in_the_middle_of_a_calibration(tmp_path: Path, out: Path, verb: str) -> None:
    model = write_model(tmp_path / "slow.onnx", SLOW)
    command = [*PROGRAM, verb, str(model), "--data", "synthetic:1000", "-o", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell starts jobs in the background with SIGINT ignored, and its children inherit that.
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=_heed_sigint) as process:
        assert process.stderr and process.stdout
        try:
            seen = next(line for line in process.stderr if "WARNING" not in line)
            assert re.fullmatch(r"calibrating: \d+ of \d+, \d+ s\n", seen)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            shown, rest = process.stdout.read(), process.stderr.read().splitlines()
            status = process.wait(timeout=30)
        finally:
            process.kill()
    assert (status, shown) == (130, "")
    assert [line for line in rest if not line.startswith("calibrating: ")] == [
        "graphsurgery: interrupted; nothing was written"
    ]
    assert out.read_bytes() == SENTINEL
    assert list(out.parent.iterdir()) == [out]
