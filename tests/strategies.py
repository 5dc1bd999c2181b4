"""Hypothesis strategies for attention graphs.

A draw is an `AttentionSpec`: a frozen description whose `repr` rebuilds it, with the simplest choice of every field
first, so that failures shrink to a plain attention with one peculiarity.  `attention_graphs.build` turns it into a
model, feeds and the float64 answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import onnxruntime
from hypothesis import strategies as st

__all__ = ["AttentionSpec", "attention_specs", "per_head_specs"]

T = TypeVar("T")

DTYPES = ("float32", "float16", "float64")
OPSETS = (17, 11, 13, 18, 21)
SCALES = ("none", "mul", "div", "query", "key", "both")
SOURCES = ("constant", "computed", "input")
MASKS = ("none", "add", "add-swapped", "two-adds", "sub", "where", "where-swapped")
FILLS = ("-inf", "lowest", "-10000", "-100")
PATTERNS = ("padding", "causal", "holes")
WRAPS = ("none", "Identity", "Dropout", "Concat")
RESHAPES = ("none", "scores", "softmax", "product")
PLACES = ("main", "if", "function")
_EINSUM_OPSET = 12


OLD_RUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < (1, 30)
"""onnxruntime up to 1.28 was seen to fail on float16 behind a Cast, in branches and in functions."""


@dataclass(frozen=True)
class AttentionSpec:
    """One attention graph; fields in the order of the chain."""

    seed: int = 0
    dtype: str = "float32"
    opset: int = 17
    rank: int = 4
    batch: int = 1
    heads: int = 2
    queries: int = 3
    keys: int = 5
    head_size: int = 4
    group: int = 1
    """Query heads per key head; above 1 an Unsqueeze, Expand and Reshape repeat keys and values."""
    tied: bool = False
    """Keys and values are one tensor."""
    einsum_qk: bool = False
    einsum_pv: bool = False
    scale: str = "none"
    scale_source: str = "constant"
    cap: float = 0.0
    mask: str = "none"
    mask_source: str = "constant"
    mask_shape: str = "BHQK"
    pattern: str = "padding"
    fill: str = "-inf"
    hidden_row: bool = False
    """Whether a row has no visible key."""
    cast: str = "none"
    """none, same (a Cast to the type that is there), early (before the mask) or late (right before Softmax)."""
    wrap_before: str = "none"
    wrap_after: str = "none"
    row_max: bool = False
    sink: bool = False
    guard: bool = False
    reshape: str = "none"
    shared: bool = False
    """The probabilities are a graph output too."""
    tail: bool = False
    """A node reads the value product, which else is a graph output itself."""
    types: str = "interface"
    """interface, all (value_info of every value) or symbolic (batch, queries and keys are names)."""
    place: str = "main"
    head_offset: float = 0.0
    """Heads differ by up to twice this in their scores, from the second of two Adds."""

    @property
    def softmax_dtype(self) -> str:
        """The type in which Softmax runs."""
        if self.cast in ("none", "same"):
            return self.dtype
        return "float32" if self.dtype == "float16" else "float16"

    @property
    def narrowest(self) -> str:
        """The type whose tolerance the answer has."""
        return "float16" if "float16" in (self.dtype, self.softmax_dtype) else self.dtype

    @property
    def mask_dtype(self) -> str:
        """The type of the scores where the mask enters."""
        return self.softmax_dtype if self.cast == "early" else self.dtype


def _pick(draw: st.DrawFn, choices: Sequence[T], allowed: bool = True) -> T:
    """One of the choices, the first where the others are not allowed."""
    return draw(st.sampled_from(choices)) if allowed else choices[0]


@st.composite
def attention_specs(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    places: Sequence[str] = PLACES,
    long: bool = True,
) -> AttentionSpec:
    """Attention graphs whose rows lie inside the accuracy window of their dtype (see `attention_graphs.build`)."""
    somewhere = st.just("main") if OLD_RUNTIME else st.sampled_from(places)
    fields: dict[str, object] = {"seed": draw(st.integers(0, 2**16)), "place": draw(somewhere)}
    fields |= _shape(draw, dtypes, long)
    fields |= _products(draw, fields)
    fields |= _scale(draw)
    fields |= _middle(draw, fields)
    fields |= _mask(draw, fields, masks)
    fields |= _ends(draw, fields)
    return AttentionSpec(**fields)  # type: ignore[arg-type]


def _shape(draw: st.DrawFn, dtypes: Sequence[str], long: bool) -> dict[str, object]:
    rank = _pick(draw, (4, 3, 2))
    dtype = draw(st.sampled_from([name for name in dtypes if not (OLD_RUNTIME and name == "float16")] or dtypes))
    # onnxruntime has no Clip of float64 before opset 12.
    opsets = [opset for opset in OPSETS if dtype != "float64" or opset > 11]
    many = long and draw(st.integers(0, 7)) == 7
    return {
        "dtype": dtype,
        "opset": draw(st.sampled_from(opsets)),
        "rank": rank,
        "batch": draw(st.integers(1, 3)) if rank == 4 and not many else 1,
        "heads": draw(st.integers(1, 4)) if rank > 2 and not many else 1,
        "queries": draw(st.integers(1, 9)),
        "keys": draw(st.sampled_from((512, 1024, 700))) if many else draw(st.integers(1, 40)),
        "head_size": draw(st.integers(1, 8)),
    }


def _products(draw: st.DrawFn, fields: dict[str, object]) -> dict[str, object]:
    heads, four = int(str(fields["heads"])), fields["rank"] == 4
    # onnxruntime has no Einsum of float16 on the CPU.
    einsum = four and fields["dtype"] != "float16" and int(str(fields["opset"])) >= _EINSUM_OPSET
    qk, pv = _pick(draw, (False, True), einsum), _pick(draw, (False, True), einsum)
    groups = [n for n in range(1, heads + 1) if heads % n == 0]
    group = _pick(draw, groups, four and not qk and not pv)
    tied = _pick(draw, (False, True), not qk and not pv)
    return {"einsum_qk": qk, "einsum_pv": pv, "group": group, "tied": tied}


def _scale(draw: st.DrawFn) -> dict[str, object]:
    scale = draw(st.sampled_from(SCALES))
    return {
        "scale": scale,
        "scale_source": _pick(draw, SOURCES, scale != "none"),
        "cap": draw(st.sampled_from((0.0, 5.0, 30.0))),
    }


def _middle(draw: st.DrawFn, fields: dict[str, object]) -> dict[str, object]:
    single = fields["dtype"] == "float64" or OLD_RUNTIME
    casts = ("none", "same") if single else ("none", "same", "early", "late")
    cast = draw(st.sampled_from(casts))
    four = fields["rank"] == 4
    sink = _pick(draw, (False, True), fields["rank"] != 2)
    reshapes = [kind for kind in RESHAPES if not (kind == "product" and fields["einsum_pv"])]
    return {
        "cast": cast,
        "sink": sink,
        "reshape": _pick(draw, reshapes, four),
        "wrap_before": draw(st.sampled_from(WRAPS)),
        "wrap_after": draw(st.sampled_from(WRAPS)),
        "row_max": draw(st.booleans()),
    }


def _mask(draw: st.DrawFn, fields: dict[str, object], masks: Sequence[str]) -> dict[str, object]:
    mask = draw(st.sampled_from(masks))
    if mask == "none":
        return {"mask": mask, "guard": draw(st.booleans())}
    # (1 - m) * fill is NaN for -inf, and scores - (-lowest) has the sign turned: only ordinary numbers.
    fills = ("-10000", "-100") if mask == "sub" else FILLS
    shapes = {4: ("BHQK", "QK", "11K", "B1K", "BQK"), 3: ("BHQK", "QK", "11K"), 2: ("QK", "11K")}
    source = ("constant", "bool", "input")
    shape = draw(st.sampled_from(shapes[int(str(fields["rank"]))]))
    fill = draw(st.sampled_from(fills))
    return {
        "mask": mask,
        "mask_source": draw(st.sampled_from(source)),
        "mask_shape": shape,
        "pattern": draw(st.sampled_from(PATTERNS if "Q" in shape else ("padding", "holes"))),
        "fill": fill,
        "guard": draw(st.booleans()),
        "hidden_row": _pick(draw, (False, True), _may_hide_rows(mask, fill, fields)),
    }


def _may_hide_rows(mask: str, fill: str, fields: dict[str, object]) -> bool:
    """Whether a row without a visible key has an answer that float64 and the engine agree on.

    Added to -10000, scores lose the bits that the answer depends on, and so they do or do not beside the lowest
    float16, as the engine keeps float16 sums in float32 or not; -100 is an ordinary number, so such a row would be
    far below the window; the lowest float32 is -inf in float16; twice the lowest number is -inf.
    """
    where = mask.startswith("where")
    if fill == "lowest":
        early, half = fields["cast"] == "early", fields["dtype"] == "float16"
        added_in_half = not where and half != early
        narrowed = fields["cast"] == "late" and fields["dtype"] == "float32"
        return mask != "two-adds" and not narrowed and not added_in_half
    return fill == "-inf" or (fill == "-10000" and where)


def _ends(draw: st.DrawFn, fields: dict[str, object]) -> dict[str, object]:
    rare = draw(st.integers(0, 3)) == 3
    return {
        "shared": _pick(draw, (False, True), rare and fields["place"] == "main"),
        "tail": draw(st.booleans()),
        "types": _pick(draw, ("interface", "all", "symbolic")),
    }


@st.composite
def per_head_specs(draw: st.DrawFn) -> AttentionSpec:
    """Attention graphs whose heads lie too far apart for one maximum, but each inside the window of its own."""
    spec = draw(attention_specs(masks=("two-adds",), places=("main", "if"), long=False))
    offset = draw(st.sampled_from((12.0, 15.0) if spec.narrowest == "float16" else (75.0, 110.0)))
    rank = 4 if spec.rank == 2 else spec.rank
    return replace(
        spec,
        rank=rank,
        heads=draw(st.integers(2, 4)),
        group=1,
        # Every head has to have a visible row.
        hidden_row=spec.hidden_row and spec.queries > 1 and "Q" in spec.mask_shape,
        # A sink column is the same for all heads and draws their row maxima together.
        sink=False,
        types="all",
        head_offset=offset,
    )
