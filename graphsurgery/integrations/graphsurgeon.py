"""`onnx_graphsurgeon.Graph` in and out.

An adapter only: graphsurgeon drops metadata and some types on the way, so the core never passes through it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

from onnx import ModelProto

__all__ = ["is_graph", "to_graph", "to_model"]


def is_graph(model: object) -> bool:
    """Whether the object is a graph of onnx_graphsurgeon, without importing it."""
    module = sys.modules.get("onnx_graphsurgeon")
    return module is not None and isinstance(model, module.Graph)


def to_model(graph: Any) -> ModelProto:
    """A ModelProto of a `gs.Graph`; the graph is not modified."""
    import onnx_graphsurgeon as gs

    export = cast("Callable[[Any], ModelProto]", gs.export_onnx)  # pyright: ignore[reportUnknownMemberType]
    return export(graph)


def to_graph(model: ModelProto) -> Any:
    """A `gs.Graph` of a ModelProto."""
    import onnx_graphsurgeon as gs

    return gs.import_onnx(model)
