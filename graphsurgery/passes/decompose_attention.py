"""Fused Attention operators become the standard chain that the other passes and the finder work on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import TensorProto

from graphsurgery.model.index import ModelIndex, is_standard
from graphsurgery.model.rewriter import Rewriter
from graphsurgery.model.shapes import Dim, Shapes
from graphsurgery.passes import PassResult
from graphsurgery.passes._attention_mask import Bias, add_bias, check_mask_length
from graphsurgery.passes._attention_parts import Axis, Call, Emitter, UnsupportedError, read_call

__all__ = ["DecomposeAttention"]

_SCORES, _CAPPED, _BIASED, _PROBABILITIES = range(4)


@dataclass(frozen=True)
class DecomposeAttention:
    """Attention (ONNX opset 23, 24, 25) -> MatMul > [Div > Tanh > Mul] > [Add] > Softmax > [IsNaN > Where] > MatMul.

    The scale goes on the query alone, key and value heads of grouped queries are repeated at rank 4, past keys and
    values are concatenated, and boolean masks, causal order, windows and `nonpad_kv_seqlen` become one added bias,
    made once for all nodes that share it.  Output names stay.  A row without any allowed key gives 0 as the operator
    defines it: by a guard after Softmax, left out where a row cannot be blocked.

    Differences: scores are scaled once and not by the square root twice, so half precision rounds otherwise; the
    guard also gives 0 for a NaN in the scores of a node that has it.

    Left as they are: the operators of other domains; a mask of integers, of another float type than the query or of
    unknown type; a mask shorter than the keys in opset 23; a negative scale; values of another type than the query;
    attributes that refer to a function's parameters; inputs of unknown rank with head counts given.
    """

    name: str = "decompose_attention"

    def apply(self, index: ModelIndex, rewriter: Rewriter) -> PassResult:
        """Decompose every Attention node of every scope."""
        shapes, made = Shapes(), dict[tuple[object, ...], str]()
        found = [(scope, n) for scope, n in index.walk() if n.op_type == "Attention" and is_standard(n)]
        skipped: list[tuple[str, str]] = []
        for scope, node in found:
            try:
                call = read_call(scope, node, shapes)
                check_mask_length(call)
            except UnsupportedError as reason:
                skipped.append((node.name or node.output[0], str(reason)))
                continue
            rewriter.start(self.name, f"{scope.id}/{call.name}")
            for position, value in enumerate(node.output):
                if value:
                    rewriter.rename_output(scope, node, position, f"{value}_fused")
            _decompose(call, Emitter(rewriter, call, made))
            rewriter.remove(scope, node)
        rewriter.commit()
        changes = rewriter.take_changes()
        return PassResult(
            self.name, len(found) - len(skipped), dict(changes.added), dict(changes.removed), tuple(skipped)
        )


def _decompose(call: Call, emit: Emitter) -> None:
    query = _split_heads(call, emit, call.query, call.heads, "query")
    transposed, keys = _key(call, emit)
    value = _cached(call, emit, call.value, call.past_value, call.outputs[2], "value")
    bias = add_bias(call, emit, keys)
    probabilities = _probabilities(call, emit, _scale(call, emit, query), transposed, bias)
    value = _repeat_heads(call, emit, value, "value")
    if call.rank == 4:
        emit.op("MatMul", [probabilities, value], "value", call.outputs[0])
        return
    result = emit.op("MatMul", [probabilities, value], "value")
    result = emit.op("Transpose", [result], "merge_transpose", perm=[0, 2, 1, 3])
    emit.op("Reshape", [result, emit.ints(0, 0, -1)], "merge_heads", call.outputs[0])


# -- query, key and value as [B, H, S, D]


def _split_heads(call: Call, emit: Emitter, value: str, heads: Dim, part: str, output: str = "") -> str:
    if call.rank == 4:
        return emit.op("Identity", [value], f"{part}_present", output) if output else value
    split = emit.op("Reshape", [value, emit.ints(0, 0, _known(heads), -1)], f"{part}_split")
    return emit.op("Transpose", [split], f"{part}_heads", output, perm=[0, 2, 1, 3])


def _cached(call: Call, emit: Emitter, value: str, past: str, present: str, part: str) -> str:
    """New and past entries as [B, Hkv, K, D]; this is also the `present` output where the node has one."""
    if not past:
        return _split_heads(call, emit, value, call.kv_heads, part, present)
    value = _split_heads(call, emit, value, call.kv_heads, part)
    return emit.op("Concat", [past, value], f"{part}_present", present, axis=2)


def _key(call: Call, emit: Emitter) -> tuple[str, Axis]:
    """The key as [B, H, D, K], and where its length can be read."""
    if call.rank == 3 and not (call.past_key or call.outputs[1] or call.grouped):
        split = emit.op("Reshape", [call.key, emit.ints(0, 0, _known(call.kv_heads), -1)], "key_split")
        return emit.op("Transpose", [split], "key_transpose", perm=[0, 2, 3, 1]), Axis(call.key, 1)
    key = _cached(call, emit, call.key, call.past_key, call.outputs[1], "key")
    repeated = _repeat_heads(call, emit, key, "key")
    return emit.op("Transpose", [repeated], "key_transpose", perm=[0, 1, 3, 2]), Axis(key, 2)


def _repeat_heads(call: Call, emit: Emitter, value: str, part: str) -> str:
    """Give every query head its key or value head: [B, Hkv, K, D] -> [B, H, K, D], never above rank 4."""
    if not call.grouped:
        return value
    heads, kv_heads = call.heads, call.kv_heads
    if isinstance(heads, int) and isinstance(kv_heads, int):
        if kv_heads == 1:
            return emit.op("Expand", [value, emit.ints(1, heads, 1, 1)], f"{part}_expand")
        repeats, joined = emit.ints(1, heads // kv_heads, 1, 1), emit.ints(-1, heads, 0, 0)
    else:
        whole = emit.size(Axis(call.query, 1), heads, "heads")
        part_of = emit.size(Axis(call.key, 1), kv_heads, "kv_heads")
        times = emit.shared("Div", [whole, part_of], "group_size")
        repeats = emit.shared("Concat", [emit.ints(1), times, emit.ints(1, 1)], "group_repeats", axis=0)
        joined = emit.shared("Concat", [emit.ints(-1), whole, emit.ints(0, 0)], "group_shape", axis=0)
    alone = emit.op("Reshape", [value, emit.ints(-1, 1, 0, 0)], f"{part}_fold")
    repeated = emit.op("Expand", [alone, repeats], f"{part}_expand")
    return emit.op("Reshape", [repeated, joined], f"{part}_repeat")


def _scale(call: Call, emit: Emitter, query: str) -> str:
    scale = call.scale
    if scale is None and isinstance(call.head_size, int) and call.head_size > 0:
        scale = 1 / math.sqrt(call.head_size)
    if scale is not None:
        return query if scale == 1 else emit.op("Mul", [query, emit.number(scale, "scale")], "scale")
    size = emit.shared("Shape", [query], "head_size", start=3, end=4)
    wide = TensorProto.DOUBLE if call.dtype in (None, TensorProto.DOUBLE) else TensorProto.FLOAT
    root = emit.shared("Sqrt", [emit.shared("Cast", [size], "head_size_cast", to=wide)], "head_size_root")
    factor = emit.shared("Reciprocal", [root], "scale_factor")
    return emit.op("Mul", [query, factor if call.dtype == wide else emit.like_query(factor, "scale_cast")], "scale")


# -- scores and probabilities


def _probabilities(call: Call, emit: Emitter, query: str, key: str, bias: Bias) -> str:
    """From the scaled query and the transposed key to the probabilities, each step under its old name if it has one."""
    stage = min(call.scores_mode, _PROBABILITIES)
    if stage == _BIASED and not bias.value:
        stage = _CAPPED
    if stage == _CAPPED and call.softcap <= 0:
        stage = _SCORES
    names = {stage: call.outputs[3]}
    scores = emit.op("MatMul", [query, key], "qk", names.get(_SCORES, ""))
    if call.softcap > 0:
        cap = emit.number(call.softcap, "softcap")
        capped = emit.op("Tanh", [emit.op("Div", [scores, cap], "softcap_div")], "softcap_tanh")
        scores = emit.op("Mul", [capped, cap], "softcap", names.get(_CAPPED, ""))
    if bias.value:
        scores = emit.op("Add", [scores, bias.value], "mask", names.get(_BIASED, ""))
    return _softmax(call, emit, scores, bias.may_block_rows, names.get(_PROBABILITIES, ""))


def _softmax(call: Call, emit: Emitter, scores: str, guarded: bool, output: str) -> str:
    precise = call.softmax_dtype is not None and call.softmax_dtype != call.dtype
    if precise:
        scores = emit.op("Cast", [scores], "softmax_cast", to=call.softmax_dtype or 0)
    probabilities = emit.op("Softmax", [scores], "softmax", "" if precise or guarded else output, axis=-1)
    if precise:
        probabilities = emit.like_query(probabilities, "softmax_cast_back", "" if guarded else output)
    if guarded:
        blocked = emit.op("IsNaN", [probabilities], "blocked")
        zero = emit.number(0.0, "attended")
        probabilities = emit.op("Where", [blocked, zero, probabilities], "guard", output)
    return probabilities


def _known(heads: Dim) -> int:
    if not isinstance(heads, int):
        raise TypeError("inputs of rank 3 come with head counts")
    return heads
