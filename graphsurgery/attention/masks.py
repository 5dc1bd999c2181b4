"""What a mask writes in place of a hidden score.

Minus infinity makes a row without any visible key NaN (0 behind an IsNaN guard); a large finite number makes it
uniform.  The unified form must give the same, so the fill has to be known.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, numpy_helper

from graphsurgery.attention.site import Link, MaskFill
from graphsurgery.model.index import Scope
from graphsurgery.model.values import constant_value

__all__ = ["HIDDEN", "lost_below", "mask_fills"]

HIDDEN = -9000.0
"""Scores at or below this are hidden by a mask (-10000 and lower); -100 is an ordinary number."""

_LOST = {"float16": 6e4, "bfloat16": 1e6, "float32": 1e12, "float64": 1e21}

_DEEPEST = 12
_LARGEST = 1 << 20
_COMBINES = frozenset({"Add", "Sub", "Div", "Where", "Concat", "Max", "Min", "Sum"})
_PASSES = frozenset(
    "Identity Cast CastLike Expand Unsqueeze Squeeze Reshape Transpose Slice Gather GatherND GatherElements Tile Trilu "
    "ScatterND Neg".split()
)
_ORDINARY = frozenset(
    "Not And Or Equal Less Greater LessOrEqual GreaterOrEqual IsNaN Shape Range CumSum MatMul Gemm Einsum Tanh "
    "Sigmoid Softmax LayerNormalization".split()
)


def lost_below(dtype: str) -> float:
    """The magnitude of a fill from which on a score added to it is rounded away, so that a hidden row is uniform.

    The spacing of numbers there is above any range of scores (float16 ends at 65504, where it is 32).
    """
    return _LOST.get(dtype, _LOST["float32"])


def mask_fills(scope: Scope, links: tuple[Link, ...]) -> frozenset[MaskFill]:
    """The kinds of fill that the masks of a chain can write; empty where no row can be hidden as a whole."""
    masks: list[str] = []
    for link in links:
        if link.kind == "mask":
            masks += [value for i, value in enumerate(link.node.input) if i != link.operand]
        elif link.kind == "where":
            masks.append(link.node.input[3 - link.operand])
        elif link.kind == "clamp" and link.node.op_type == "Min":
            masks += [value for i, value in enumerate(link.node.input) if i != link.operand]
    if (
        len(masks) == 1
        and not any(link.kind in ("where", "clamp") for link in links)
        and _shows_every_row(constant_value(scope, masks[0], _LARGEST))
    ):
        return frozenset()
    found: set[MaskFill] = set()
    for name in masks:
        _explore(scope, name, found, 0)
    return frozenset(found)


def _shows_every_row(mask: np.ndarray | None) -> bool:
    """Whether a constant mask leaves at least one key visible in each of its rows."""
    if mask is None or mask.ndim == 0 or mask.dtype.kind not in "fV":
        return False
    return bool((mask.astype(np.float64) > HIDDEN).any(axis=-1).all())


def _explore(scope: Scope, name: str, found: set[MaskFill], depth: int) -> None:
    if scope.is_constant(name):
        value = constant_value(scope, name, _LARGEST)
        if value is not None:
            _classify(value, found)
        return
    node = scope.producer(name)
    if node is None or depth > _DEEPEST:
        found.add("unknown")
    elif node.op_type in _PASSES:
        _explore(scope, node.input[0], found, depth + 1)
    elif node.op_type == "Mul":
        _explore_product(scope, node.input[0], node.input[1], found, depth + 1)
    elif node.op_type in _COMBINES:
        for operand in node.input[1:] if node.op_type == "Where" else node.input:
            _explore(scope, operand, found, depth + 1)
    elif node.op_type == "ConstantOfShape":
        _explore_fill(node, found)
    elif node.op_type not in _ORDINARY:
        found.add("unknown")


def _explore_product(scope: Scope, first: str, second: str, found: set[MaskFill], depth: int) -> None:
    """(1 - mask) * fill: the constant factor is the fill and the other is 0 or 1; a factor 1 says nothing."""
    for name in (first, second):
        before = len(found)
        if scope.is_constant(name):
            _explore(scope, name, found, depth)
            if len(found) > before:
                return
    for name in (first, second):
        if not scope.is_constant(name):
            _explore(scope, name, found, depth)


def _explore_fill(node: NodeProto, found: set[MaskFill]) -> None:
    for entry in node.attribute:
        if entry.name == "value":
            _classify(numpy_helper.to_array(entry.t), found)


def _classify(value: np.ndarray, found: set[MaskFill]) -> None:
    if value.dtype.kind not in "fV" or value.size == 0:
        return
    numbers = value.astype(np.float64)
    if np.isinf(numbers).any():
        found.add("inf")
    finite = np.abs(numbers[np.isfinite(numbers)])
    lost = lost_below(value.dtype.name)
    if (finite >= lost).any():
        found.add("lowest")
    if ((finite >= -HIDDEN) & (finite < lost)).any():
        found.add("large")
