"""The bias of a fused Attention node: attn_mask, causal order, windows and unused cache slots in one added tensor.

Everything that only allows or forbids keys stays boolean until one Where turns it into 0 (or the additive mask) and
-inf.  What follows from constant lengths is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from graphsurgery.model.index import Scope
from graphsurgery.model.values import constant_value
from graphsurgery.passes._attention_parts import FIRST_WITH_SHORT_MASK, Axis, Call, Emitter, UnsupportedError

__all__ = ["Bias", "add_bias", "check_mask_length"]

_LARGEST_CONSTANT = 1 << 20
_MOVES_ONLY = frozenset("Expand Unsqueeze Squeeze Reshape Identity Slice Transpose".split())
_DEEPEST_WALK = 16


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to the scores."""

    value: str
    """The tensor, broadcastable to [B, H, Q, K]; empty where nothing is added."""

    may_block_rows: bool
    """Whether a row may be -inf everywhere: the operator gives 0 there, Softmax alone NaN."""


def check_mask_length(call: Call) -> None:
    """Raise UnsupportedError for a mask longer than the keys, or shorter where the opset gives that no meaning."""
    mask, total = call.mask_length, call.total_length
    if isinstance(mask, int) and isinstance(total, int) and mask > total:
        raise UnsupportedError(f"input attn_mask: last dimension {mask} for {total} keys")
    if call.scope.opset >= FIRST_WITH_SHORT_MASK or not isinstance(mask, int) or mask == total:
        return
    if mask == 1 or isinstance(total, int):
        raise UnsupportedError(f"input attn_mask: last dimension {mask} for {total or 'an unknown number of'} keys")


def add_bias(call: Call, emit: Emitter, keys: Axis) -> Bias:
    """Add the nodes that make the bias; `keys` is an axis as long as the past and the new keys together."""
    blocks = _mask_may_block(call)
    if not (call.causal or call.left >= 0 or call.right >= 0 or call.valid_keys):
        return Bias(_join(call, emit, keys, []), blocks)
    fixed = _fixed_positions(call)
    if fixed is not None:
        return _with_fixed(call, emit, keys, fixed, blocks)
    allowed = _positions(call, emit, keys)
    return Bias(_join(call, emit, keys, allowed), blocks or _positions_may_block(call))


# -- the mask input


def _additive(call: Call, emit: Emitter, keys: Axis) -> str:
    """The mask as numbers to add, or nothing where there is no mask or it can stay boolean."""
    mask = call.mask
    padded = _needs_padding(call)
    if not mask or (call.mask_dtype == TensorProto.BOOL and not padded):
        return ""
    if call.mask_dtype == TensorProto.BOOL:
        mask = _select(emit, mask, "")
    return _pad(call, emit, mask, keys) if padded else mask


def _needs_padding(call: Call) -> bool:
    if call.scope.opset < FIRST_WITH_SHORT_MASK or call.mask_length is None or call.total_length is None:
        return call.scope.opset >= FIRST_WITH_SHORT_MASK
    return call.mask_length != call.total_length


def _pad(call: Call, emit: Emitter, mask: str, keys: Axis) -> str:
    total, length = call.total_length, call.mask_length
    if isinstance(total, int) and isinstance(length, int):
        pads = emit.ints(0, total - length)
    else:
        missing = emit.shared(
            "Sub",
            [emit.size(keys, total, "total_length"), emit.shared("Shape", [call.mask], "mask_length", start=-1)],
            "mask_missing",
        )
        pads = emit.shared("Concat", [emit.ints(0), missing], "mask_pads", axis=0)
    return emit.shared("Pad", [mask, pads, emit.number(-np.inf, "masked"), emit.ints(-1)], "mask_padded")


def _select(emit: Emitter, allowed: str, mask: str) -> str:
    return emit.shared(
        "Where", [allowed, mask or emit.number(0.0, "attended"), emit.number(-np.inf, "masked")], "mask_bias"
    )


def _join(call: Call, emit: Emitter, keys: Axis, allowed: list[str]) -> str:
    mask = _additive(call, emit, keys)
    if call.mask and not mask:
        allowed = [call.mask, *allowed]
    if not allowed:
        return mask
    joined = allowed[0]
    for other in allowed[1:]:
        joined = emit.shared("And", [joined, other], "mask_and")
    return _select(emit, joined, mask)


# -- positions: query i stands at i + offset among the keys


def _fixed_positions(call: Call) -> np.ndarray | None:
    """Which keys a query may see, [Q, K], where that follows from constant lengths."""
    q, total, past = call.query_length, call.total_length, call.past_length
    if call.valid_keys or not (isinstance(q, int) and isinstance(total, int) and isinstance(past, int)):
        return None
    if q * total > _LARGEST_CONSTANT:
        return None
    ahead = np.arange(total)[np.newaxis, :] - (np.arange(q)[:, np.newaxis] + past)
    allowed = np.ones((q, total), np.bool_)
    if call.causal:
        allowed &= ahead <= 0
    if call.right >= 0:
        allowed &= ahead <= call.right
    if call.left >= 0:
        allowed &= -ahead <= call.left
    return allowed


def _with_fixed(call: Call, emit: Emitter, keys: Axis, allowed: np.ndarray, blocks: bool) -> Bias:
    if allowed.all():
        return Bias(_join(call, emit, keys, []), blocks)
    blocks = blocks or not bool(allowed.any(axis=-1).all())
    if call.mask or call.dtype is None:
        return Bias(_join(call, emit, keys, [emit.array(allowed, "attention_visible")]), blocks)
    return Bias(emit.numbers(np.where(allowed, 0.0, -np.inf), "attention_visible"), blocks)


def _positions(call: Call, emit: Emitter, keys: Axis) -> list[str]:
    bounds = _bounds(call)
    # the causal bound ends at the last valid key, so it covers the unused slots as well
    slots = bool(call.valid_keys) and not call.causal
    if not bounds and not slots:
        return []
    index = _indices(emit, emit.size(keys, call.total_length, "total_length"), call.total_length, "key_index")
    allowed: list[str] = []
    if bounds:
        position = _query_positions(call, emit)
        for kind, shift in bounds:
            limit = emit.shared("Add", [position, emit.ints(shift)], "window_edge") if shift else position
            allowed.append(emit.shared(kind, [index, limit], "visible"))
    if slots:
        valid = emit.shared("Reshape", [call.valid_keys, emit.ints(-1, 1, 1, 1)], "valid_keys")
        allowed.append(emit.shared("Less", [index, valid], "in_use"))
    return allowed


def _bounds(call: Call) -> list[tuple[str, int]]:
    """Comparisons of a key index with the query's position, and what is added to that position first."""
    bounds: list[tuple[str, int]] = []
    if call.causal:
        # one new key is the last one, and no query stands before it
        if call.valid_keys or call.new_length != 1:
            bounds.append(("LessOrEqual", 0))
    elif call.right >= 0:
        bounds.append(("LessOrEqual", call.right))
    if call.left >= 0:
        bounds.append(("GreaterOrEqual", -call.left))
    return bounds


def _query_positions(call: Call, emit: Emitter) -> str:
    """Positions of the queries among the keys, [Q, 1] or [B, 1, Q, 1]."""
    length = emit.size(Axis(call.query, 2 if call.rank == 4 else 1), call.query_length, "query_length")
    if isinstance(call.query_length, int):
        rows = emit.array(np.arange(call.query_length, dtype=np.int64)[:, np.newaxis], "attention_rows")
    else:
        index = _indices(emit, length, call.query_length, "query_index")
        rows = emit.shared("Unsqueeze", [index, emit.ints(1)], "query_rows")
    if call.valid_keys:
        valid = emit.shared("Reshape", [call.valid_keys, emit.ints(-1, 1, 1, 1)], "valid_keys")
        return emit.shared("Add", [rows, emit.shared("Sub", [valid, length], "offset")], "query_position")
    if not call.past_key:
        return rows
    past = emit.size(Axis(call.past_key, 2), call.past_length, "past_length")
    return emit.shared("Add", [rows, past], "query_position")


def _indices(emit: Emitter, length: str, dim: int | str | None, part: str) -> str:
    if isinstance(dim, int):
        return emit.array(np.arange(dim, dtype=np.int64), "attention_index")
    zero, one = (emit.array(np.array(value, np.int64), "attention_step") for value in (0, 1))
    return emit.shared("Range", [zero, emit.shared("Squeeze", [length], f"{part}_end"), one], part)


# -- rows without any key


def _positions_may_block(call: Call) -> bool:
    if call.valid_keys:
        return True
    # without a left bound every query sees the first key, otherwise its own as long as there is one
    q, new = call.query_length, call.new_length
    own_key = (isinstance(q, int) and isinstance(new, int) and q <= new) or (q is not None and q == new)
    return call.left >= 0 and not own_key


def _mask_may_block(call: Call) -> bool:
    if not call.mask:
        return False
    if call.left >= 0 and _needs_padding(call):
        # the window of a late query may hold nothing but padding
        return True
    value = constant_value(call.scope, call.mask)
    if value is None:
        return not _always_finite(call.scope, call.mask)
    open_keys = value if value.dtype == np.bool_ else ~np.isneginf(value.astype(np.float64))
    alone = not (call.causal or call.left >= 0 or call.right >= 0)
    return not (open_keys.any(axis=-1) if alone else open_keys).all()


def _always_finite(scope: Scope, mask: str) -> bool:
    """Whether an additive mask is chosen by a Where from two finite constants, as exporters write it."""
    name = mask
    for _ in range(_DEEPEST_WALK):
        node = scope.producer(name)
        if node is None:
            return False
        if node.op_type == "Where":
            values = [constant_value(scope, value) for value in node.input[1:3]]
            return all(v is not None and v.dtype != np.bool_ and bool(np.isfinite(v).all()) for v in values)
        if node.op_type not in _MOVES_ONLY:
            return False
        name = node.input[0]
    return False
