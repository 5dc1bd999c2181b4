"""What one fused Attention node asks for, and the small operators that its decomposition is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper

from graphsurgery.model.index import Scope
from graphsurgery.model.rewriter import Attribute, Place, Rewriter
from graphsurgery.model.shapes import Dim, Shape, Shapes
from graphsurgery.model.values import attribute, int_attribute

__all__ = ["Axis", "Call", "Emitter", "UnsupportedError", "read_call"]

FIRST_OPSET, LAST_OPSET, FIRST_WITH_WINDOWS, FIRST_WITH_SHORT_MASK = 23, 26, 25, 24
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_ATTRIBUTES: frozenset[str] = frozenset(
    "is_causal kv_num_heads q_num_heads qk_matmul_output_mode scale softcap softmax_precision".split()
)
_WINDOWS: frozenset[str] = frozenset({"left_window_size", "right_window_size"})
_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


class UnsupportedError(Exception):
    """The node is left as it is; the message names the attribute or the input."""


class Axis(NamedTuple):
    """One axis of a value."""

    value: str
    axis: int


@dataclass(frozen=True, slots=True)
class Call:
    """One Attention node with everything that is known about it before the graph changes.

    Dimensions are integers, names, or None where they are not known; so is `dtype`, the type of query and key.
    """

    scope: Scope
    node: NodeProto
    name: str
    rank: int
    dtype: int | None
    query: str
    key: str
    value: str
    mask: str
    past_key: str
    past_value: str
    valid_keys: str
    """`nonpad_kv_seqlen`: keys in use per batch, [B]."""

    outputs: tuple[str, str, str, str]
    heads: Dim
    kv_heads: Dim
    head_size: Dim
    query_length: Dim
    new_length: Dim
    past_length: Dim
    total_length: Dim
    scale: float | None
    softcap: float
    causal: bool
    left: int
    right: int
    softmax_dtype: int | None
    scores_mode: int
    mask_dtype: int | None
    mask_length: Dim

    @property
    def grouped(self) -> bool:
        """Whether several query heads read one key head (or it is not known that none do)."""
        return self.heads is None or self.heads != self.kv_heads


class Emitter:
    """Adds the nodes of one decomposition before its Attention node.

    `shared` nodes are made once per scope: later Attention nodes that ask for the same operator on the same values
    read the first result.
    """

    def __init__(self, rewriter: Rewriter, call: Call, made: dict[tuple[object, ...], str]) -> None:
        self.call = call
        self._rewriter = rewriter
        self._place = Place(call.scope, call.node)
        self._made = made

    def op(self, kind: str, inputs: Sequence[str], part: str, output: str = "", **attributes: Attribute) -> str:
        """Add an operator named `<attention>_<part>`; `output` is the tensor name it must produce, if any."""
        hint = f"{self.call.name}_{part}"
        return self._rewriter.add(self._place, kind, inputs, hint, outputs=[output] if output else 1, **attributes)

    def shared(self, kind: str, inputs: Sequence[str], part: str, **attributes: Attribute) -> str:
        """Add an operator, or return the output of an equal one that stands earlier in the scope."""
        key = (id(self.call.scope), kind, *inputs, *sorted(attributes.items()))
        if key not in self._made:
            self._made[key] = self.op(kind, inputs, part, "", **attributes)
        return self._made[key]

    def array(self, array: np.ndarray, hint: str) -> str:
        """A constant of the model."""
        return self._rewriter.constant(self.call.scope, array, hint)

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant."""
        return self.array(np.array(values, np.int64), "attention_shape")

    def number(self, value: float, hint: str) -> str:
        """A scalar in the type of the query."""
        if self.call.dtype is not None:
            return self.numbers(np.array(value), f"attention_{hint}")
        # a function without declared types: float64 only where float32 would lose digits
        exact = float(np.float32(value)) == value
        literal = self.array(np.array(value, np.float32 if exact else np.float64), f"attention_{hint}")
        return self.shared("CastLike", [literal, self.call.query], hint)

    def numbers(self, values: np.ndarray, hint: str) -> str:
        """A constant in the type of the query, which must be known."""
        if self.call.dtype is None:
            raise ValueError("the type of the query is not known")
        return self.array(values.astype(helper.tensor_dtype_to_np_dtype(self.call.dtype)), hint)

    def like_query(self, value: str, part: str, output: str = "") -> str:
        """Convert a value to the type of the query."""
        if self.call.dtype is not None:
            return self.op("Cast", [value], part, output, to=self.call.dtype)
        return self.op("CastLike", [value, self.call.query], part, output)

    def size(self, axis: Axis, dim: Dim, part: str) -> str:
        """The length of an axis as int64 [1]: a constant where it is known, read once per name otherwise."""
        if isinstance(dim, int):
            return self.ints(dim)
        key = (id(self.call.scope), "size", dim)
        if dim is not None and key in self._made:
            return self._made[key]
        made = self.shared("Shape", [axis.value], part, start=axis.axis, end=axis.axis + 1)
        if dim is not None:
            self._made[key] = made
        return made


def read_call(scope: Scope, node: NodeProto, shapes: Shapes) -> Call:
    """Describe an Attention node.

    Raises UnsupportedError where the decomposition would not be certain to give the operator's results.
    """
    _check_attributes(scope, node)
    given: dict[str, str] = dict(zip(_INPUTS, [*node.input, *[""] * (len(_INPUTS) - len(node.input))], strict=True))
    _check_inputs(scope, given, shapes)
    rank = _rank(scope, node, given, shapes)
    q, k, past = (_shape(scope, given[name], shapes) for name in ("Q", "K", "past_key"))
    outputs = tuple([*node.output, "", "", ""][:4])
    heads, kv_heads = _heads(node, rank, q, k, past)
    axis = 2 if rank == 4 else 1
    new, cached = _dim(k, axis), (_dim(past, 2) if given["past_key"] else 0)
    present = _dim(_shape(scope, outputs[1], shapes), 2)
    scale, precision = attribute(node, "scale"), attribute(node, "softmax_precision")
    return Call(
        scope=scope,
        node=node,
        name=node.name or f"{node.output[0]}_attention",
        rank=rank,
        dtype=_dtype(scope, given, shapes),
        query=given["Q"],
        key=given["K"],
        value=given["V"],
        mask=given["attn_mask"],
        past_key=given["past_key"],
        past_value=given["past_value"],
        valid_keys=given["nonpad_kv_seqlen"],
        outputs=(outputs[0], outputs[1], outputs[2], outputs[3]),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_head_size(rank, (q, heads), (k, kv_heads), past),
        query_length=_dim(q, axis),
        new_length=new,
        past_length=cached,
        total_length=_total(new, cached, present),
        scale=scale if isinstance(scale, float) else None,
        softcap=_float(node, "softcap"),
        causal=bool(int_attribute(node, "is_causal", 0)),
        left=int_attribute(node, "left_window_size", -1),
        right=int_attribute(node, "right_window_size", -1),
        softmax_dtype=precision if isinstance(precision, int) else None,
        scores_mode=int_attribute(node, "qk_matmul_output_mode", 0),
        mask_dtype=shapes.dtype(scope, given["attn_mask"]) if given["attn_mask"] else None,
        mask_length=_dim(_shape(scope, given["attn_mask"], shapes), -1),
    )


def _check_attributes(scope: Scope, node: NodeProto) -> None:
    if not FIRST_OPSET <= scope.opset <= LAST_OPSET:
        raise UnsupportedError(
            f"opset {scope.opset}: the meaning of Attention is known for {FIRST_OPSET} to {LAST_OPSET}"
        )
    known = _ATTRIBUTES | (_WINDOWS if scope.opset >= FIRST_WITH_WINDOWS else frozenset[str]())
    for entry in node.attribute:
        if entry.name not in known:
            raise UnsupportedError(f"attribute {entry.name}: not known in opset {scope.opset}")
        if entry.ref_attr_name:
            raise UnsupportedError(f"attribute {entry.name}: its value is a parameter of the function")
    scale = attribute(node, "scale")
    if isinstance(scale, float) and not scale >= 0:
        raise UnsupportedError(f"attribute scale: {scale} has no square root")
    if int_attribute(node, "qk_matmul_output_mode", 0) not in (0, 1, 2, 3):
        raise UnsupportedError("attribute qk_matmul_output_mode: not 0, 1, 2 or 3")
    if int_attribute(node, "softmax_precision", TensorProto.FLOAT) not in _FLOATS:
        raise UnsupportedError("attribute softmax_precision: not a floating-point type")
    if any(int_attribute(node, name, -1) < -1 for name in _WINDOWS):
        raise UnsupportedError("attributes left_window_size and right_window_size: below -1")


def _check_inputs(scope: Scope, given: dict[str, str], shapes: Shapes) -> None:
    if bool(given["past_key"]) != bool(given["past_value"]):
        raise UnsupportedError(f"input {'past_key' if given['past_value'] else 'past_value'}: missing beside the other")
    if given["past_key"] and given["nonpad_kv_seqlen"]:
        raise UnsupportedError("input nonpad_kv_seqlen: given together with past_key")
    q, v = (shapes.dtype(scope, given[name]) for name in ("Q", "V"))
    if q is not None and v is not None and q != v:
        raise UnsupportedError("input V: its type differs from that of Q")
    if not given["attn_mask"]:
        return
    dtype, shape = shapes.dtype(scope, given["attn_mask"]), _shape(scope, given["attn_mask"], shapes)
    if dtype is None:
        raise UnsupportedError("input attn_mask: type unknown")
    if dtype != TensorProto.BOOL and dtype not in _FLOATS:
        raise UnsupportedError(
            f"input attn_mask: {TensorProto.DataType.Name(dtype)} is neither bool nor floating point"
        )
    if dtype != TensorProto.BOOL and q is not None and dtype != q:
        raise UnsupportedError("input attn_mask: its type differs from that of Q")
    if shape is not None and not 1 <= len(shape) <= 4:
        raise UnsupportedError(f"input attn_mask: rank {len(shape)}")


def _dtype(scope: Scope, given: dict[str, str], shapes: Shapes) -> int | None:
    found = next((t for t in (shapes.dtype(scope, given[name]) for name in ("Q", "K")) if t is not None), None)
    # onnx before 1.19 has no arrays of bfloat16: such constants are converted in the graph
    if found == TensorProto.BFLOAT16 and helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16).itemsize != 2:
        return None
    return found


def _rank(scope: Scope, node: NodeProto, given: dict[str, str], shapes: Shapes) -> int:
    ranks = {len(s) for s in (_shape(scope, given[name], shapes) for name in ("Q", "K", "V")) if s is not None}
    if len(ranks) > 1 or not ranks <= {3, 4}:
        raise UnsupportedError(f"inputs Q, K and V: ranks {sorted(ranks)}")
    named = [name for name in ("q_num_heads", "kv_num_heads") if int_attribute(node, name, 0) > 0]
    if not ranks:
        # rank 3 needs the head counts, so a node without them has rank 4
        if named:
            raise UnsupportedError("input Q: rank unknown")
        return 4
    if ranks == {3} and len(named) < 2:
        raise UnsupportedError("attributes q_num_heads and kv_num_heads: missing with inputs of rank 3")
    return ranks.pop()


def _heads(node: NodeProto, rank: int, q: Shape | None, k: Shape | None, past: Shape | None) -> tuple[Dim, Dim]:
    heads: Dim = int_attribute(node, "q_num_heads", 0) or None
    kv_heads: Dim = int_attribute(node, "kv_num_heads", 0) or None
    if rank == 4:
        heads = _first(_dim(q, 1), heads)
        kv_heads = _first(_dim(k, 1), _dim(past, 1), kv_heads)
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads == 0 or heads % kv_heads):
        raise UnsupportedError(f"input K: {kv_heads} key heads do not divide {heads} query heads")
    return heads, kv_heads


def _head_size(rank: int, q: tuple[Shape | None, Dim], k: tuple[Shape | None, Dim], past: Shape | None) -> Dim:
    known: list[Dim] = [_dim(past, 3)]
    for shape, heads in (q, k):
        width = _dim(shape, -1)
        if rank == 4:
            known.append(width)
        elif isinstance(width, int) and isinstance(heads, int):
            known.append(width // heads)
    return _first(*known)


def _total(new: Dim, past: Dim, present: Dim) -> Dim:
    if past == 0:
        return new
    return past + new if isinstance(past, int) and isinstance(new, int) else present


def _shape(scope: Scope, name: str, shapes: Shapes) -> Shape | None:
    return shapes.shape(scope, name) if name else None


def _dim(shape: Shape | None, axis: int) -> Dim:
    return None if shape is None or axis >= len(shape) else shape[axis]


def _first(*dims: Dim) -> Dim:
    """The most telling description of one dimension: a number before a name."""
    return next((d for d in dims if isinstance(d, int)), next((d for d in dims if d is not None), None))


def _float(node: NodeProto, name: str) -> float:
    value = attribute(node, name)
    return value if isinstance(value, float) else 0.0
