"""Engines that execute models: one interface, so that a comparison can run on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from graphsurgery.errors import UsageError

__all__ = ["ENGINES", "Engine", "EngineError", "Session", "engine"]

ENGINES = ("onnxruntime",)
"""Names that `engine` knows."""


class EngineError(UsageError):
    """An engine cannot load or run a model."""


class Session(Protocol):
    """A loaded model."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph inputs in order, without those that have a default value."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs in order."""
        ...

    def run(self, feed: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """The named outputs (default: all) for one sample; raises EngineError."""
        ...


class Engine(Protocol):
    """Loads models."""

    @property
    def name(self) -> str:
        """The name as `--engine` takes it."""
        ...

    def open(self, model: Path | bytes, *, external_folder: Path | None = None) -> Session:
        """Loads a file or a serialized model whose external data lies in `external_folder`; raises EngineError."""
        ...


def engine(name: str) -> Engine:
    """The engine of that name with its default settings; raises UsageError for an unknown name."""
    if name == "onnxruntime":
        # An engine's runtime is loaded only when it is asked for.
        from graphsurgery.engines.onnxruntime import OnnxRuntime

        return OnnxRuntime()
    raise UsageError(f"there is no engine '{name}'; choose one of: {', '.join(ENGINES)}")
