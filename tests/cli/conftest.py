from __future__ import annotations

from pathlib import Path

import pytest
from cli_models import ATTENTION, FIXTURES, SENTINEL, Cli, Ran, write_model

from graphsurgery.cli import main


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line in this process."""

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Ran(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def decoder() -> Path:
    return FIXTURES / "llama_decode_eager_dynamo.onnx"


@pytest.fixture(scope="session")
def samples() -> Path:
    return FIXTURES / "data" / "llama_decode_eager_dynamo"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output file that is there already: it must survive every run that fails."""
    path = tmp_path / "out" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(SENTINEL)
    return path


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    return write_model(tmp_path / "refused.onnx", ATTENTION.replace("AXIS", "2"))
