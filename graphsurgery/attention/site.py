"""What the finder says of one attention: a frozen description, or a refusal with a reason.

Later steps (evidence, form, rewrite) decide on this description alone and never search the graph again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from onnx import NodeProto

from graphsurgery.model.index import Scope
from graphsurgery.model.shapes import Dim

__all__ = ["Dims", "Link", "LinkKind", "MaskFill", "NotAttention", "Refusal", "RefusedSite", "Site"]

LinkKind = Literal[
    "scale",  # Mul or Div
    "mask",  # Add, or Sub of something that is not the row maximum
    "where",  # Where(condition, fill, scores)
    "tanh",  # the middle of a soft-cap
    "clamp",  # Clip, Max, Min
    "row-max",  # Sub of ReduceMax of the same value: Softmax does not change by it
    "sink",  # Concat of the scores with extra columns
    "same",  # Cast, Identity, Dropout, Concat of one value
    "cast",  # Cast to another dtype
    "reshape",  # Reshape, Squeeze, Unsqueeze, Flatten
    "transpose",
    "quantise",  # QuantizeLinear or DequantizeLinear
    "guard",  # Where(IsNaN(p), 0, p)
    "zero",  # Where(condition, 0, p): a mask on the probabilities
    "weight",  # Mul of the probabilities (a head mask, an inference-time dropout)
    "slice",  # Slice along the keys: drops the sink columns
    "split",  # Split along the keys: value products per part
]

MaskFill = Literal["inf", "lowest", "large", "unknown"]
"""-inf; a number so low that a score added to it is lost; a large one (-10000) that it is not lost in; not known."""


class Link(NamedTuple):
    """One node between the products, with the input on which the scores (or probabilities) enter."""

    kind: LinkKind
    node: NodeProto
    operand: int

    @property
    def value(self) -> str:
        """The value that enters."""
        return self.node.input[self.operand]


@dataclass(frozen=True, slots=True)
class Dims:
    """Batch, query heads, query rows, keys, value head size, query heads per key head; None where unknown."""

    batch: Dim = None
    heads: Dim = None
    queries: Dim = None
    keys: Dim = None
    head_size: Dim = None
    group: int | None = None

    def to_json(self) -> dict[str, Dim]:
        """The dimensions under the letters of the report."""
        return {
            "B": self.batch,
            "H": self.heads,
            "Q": self.queries,
            "K": self.keys,
            "D": self.head_size,
            "G": self.group,
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is not done: a stable code, a sentence, the node and the values it speaks of."""

    code: str
    reason: str
    node: str = ""
    values: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A Softmax with the chain around it, as far as it was followed."""

    id: str
    scope: Scope
    softmax: NodeProto
    chain: str


@dataclass(frozen=True, slots=True)
class NotAttention(_Candidate):
    """A Softmax that is no attention (router, classifier, pooling), with the nearest miss."""

    reason: str


@dataclass(frozen=True, slots=True)
class RefusedSite(_Candidate):
    """An attention that is not supported as it stands."""

    refusal: Refusal
    qk: str = ""
    pv: str = ""
    dims: Dims = Dims()


@dataclass(frozen=True, slots=True)
class Site(_Candidate):
    """One attention.

    `before` leads from the score product to Softmax, `after` from Softmax to the value product.  `scores` is the
    value whose softmax is taken, below a subtraction of the row maximum where there is one.  `late_division` says
    that rows keep their identity from Softmax to the value product, so that the division may follow it;
    `sum_after` counts the links of `after` behind which a row sum has the shape of the value product's rows.
    """

    qk: NodeProto
    pv: NodeProto
    before: tuple[Link, ...]
    after: tuple[Link, ...]
    scores: str
    dims: Dims
    dtype: int
    """Element type of Softmax, a TensorProto.DataType."""
    product_dtype: int
    """Element type in which the probabilities enter the value product."""
    narrowest: int
    """The narrowest element type that the probabilities pass through on their way to the value product."""
    shared: bool
    """Whether the probabilities are read by anything but the value product."""
    operand: int
    """Which input of the value product the probabilities are."""
    late_division: bool
    sum_after: int
    rank: int | None
    sum_rank: int | None
    """Rank of the tensor whose rows are summed."""
    guarded: bool
    """Whether something behind Softmax turns NaN into 0, so that rows without a visible key give 0."""
    mask_fills: frozenset[MaskFill]
    """What masks put in place of a hidden score: minus infinity, a large finite number, or not known."""

    @property
    def values(self) -> str:
        """The value tensor, [..., K, D]."""
        return self.pv.input[1 - self.operand]

    @property
    def output(self) -> str:
        """The output of the value product."""
        return self.pv.output[0]
