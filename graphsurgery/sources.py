"""What the library calls take: models and data of any accepted kind, opened and checked."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import onnx
from numpy.typing import NDArray
from onnx import ModelProto

from graphsurgery.data import Samples, open_samples, signature
from graphsurgery.errors import GraphSurgeryError, UsageError
from graphsurgery.integrations.graphsurgeon import is_graph, to_model
from graphsurgery.model.external import external_tensors
from graphsurgery.model.files import SourceModel, load_model

__all__ = ["Data", "Model", "check_runnable", "malformed_is_refused", "open_data", "open_model"]

Model = Any
"""A path (`-` is stdin), a ModelProto, the bytes of a model, an `onnx_graphsurgeon.Graph`, or a SourceModel as read."""
Data = str | Path | Sequence[str | Path] | Iterable[Mapping[str, NDArray[Any]]] | Samples


def open_model(model: Model) -> SourceModel:
    """Read a model of any accepted kind; raises UsageError where it cannot be used."""
    if isinstance(model, SourceModel):
        return model
    given = cast("object", model)
    if not (isinstance(given, str | os.PathLike | bytes | ModelProto) or is_graph(given)):
        kind = type(given).__name__
        raise UsageError(
            f"a model of type {kind} is not known; give a path, a ModelProto or an onnx_graphsurgeon.Graph"
        )
    return load_model(to_model(model) if is_graph(model) else model)


def open_data(data: Data | None, source: SourceModel, max_samples: int | None = None) -> Samples | None:
    """Open data sources for a model; None stays None."""
    if data is None or isinstance(data, Samples):
        return data
    return open_samples(data, signature(source.proto), max_samples=max_samples)


@contextmanager
def malformed_is_refused(source: SourceModel) -> Generator[None]:
    """Where the work fails, ask the checker of onnx whether the model is to blame.

    Checking each model beforehand would take longer than the rewrite.  A model that passes is no excuse: the error is
    then a bug of ours and keeps its traceback.
    """
    try:
        yield
    except GraphSurgeryError:
        raise
    except Exception as error:
        reason = _fault(source)
        if reason is None:
            raise
        raise UsageError(f"{source.label}: is not a valid ONNX model ({reason}); export it again") from error


def _fault(source: SourceModel) -> str | None:
    pristine = source.proto if source.raw is None else ModelProto.FromString(source.raw)
    check = cast("Any", onnx.checker.check_model)  # pyright: ignore[reportUnknownMemberType]
    try:
        check(pristine, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, TypeError) as error:
        return " ".join(str(error).split())[:200]
    return None


def check_runnable(source: SourceModel) -> None:
    """A model from a stream or from memory cannot be run with data files that lie nobody knows where."""
    if source.folder is None and next(external_tensors(source.proto), None) is not None:
        raise UsageError(
            f"{source.label} keeps tensors in data files, which only a path can find: give the model as a file"
        )
