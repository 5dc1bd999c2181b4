"""`graphsurgery doctor`: what is installed and which engines run."""

from __future__ import annotations

import platform
from importlib import metadata

from graphsurgery.cli.output import Table, show_table

__all__ = ["doctor"]

_PACKAGES = ("onnx", "onnxruntime", "numpy", "onnx-graphsurgeon", "cyclopts", "rich")


def doctor() -> int:
    """Show the versions of what is installed, which engines run a tiny model, and how to mend what is missing."""
    table = Table("name", "state", "mend")
    table.add("python", platform.python_version(), "")
    for name in ("graphsurgery", *_PACKAGES):
        version = _version(name)
        table.add(name, version or "missing", "" if version else _install(name))
    for name, problem in _engines().items():
        table.add(f"engine {name}", "runs" if problem is None else f"does not run: {problem}", _mend(name, problem))
    show_table(table)
    return 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _install(name: str) -> str:
    return f"pip install {name}"


def _mend(name: str, problem: str | None) -> str:
    return "" if problem is None else f"pip install --force-reinstall {name}"


def _engines() -> dict[str, str | None]:
    """Each engine with what keeps it from running, None where it runs."""
    try:
        from graphsurgery.engines import ENGINES
    except ImportError as error:
        return {"onnxruntime": str(error)}
    return {name: _try(name) for name in ENGINES}


def _try(name: str) -> str | None:
    """Let an engine add two numbers."""
    try:
        import numpy as np
        from onnx import parser

        from graphsurgery.engines import EngineError, engine
    except ImportError as error:
        return str(error)
    text = '<ir_version: 8, opset_import: ["": 13]> tiny (float[1] x) => (float[1] y) { y = Add(x, x) }'
    tiny = parser.parse_model(text).SerializeToString()
    try:
        found = engine(name).open(tiny).run({"x": np.ones(1, np.float32)})["y"]
    except (ImportError, EngineError) as error:
        return str(error)
    return None if found.tolist() == [2.0] else f"1 + 1 gives {found.tolist()}"
