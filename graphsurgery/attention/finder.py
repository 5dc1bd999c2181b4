"""Finds every attention of a model.

Anchored on Softmax: the walk upward looks for the score product, the walk downward for the value product.  What has
both is an attention and becomes a `Site` or, where it is not supported, a `RefusedSite`; what lacks one is listed as
no attention, with the place where the search ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from onnx import NodeProto, TensorProto

from graphsurgery.attention.downward import FLOATS, ValuePath, division_place, find_value_product, nan_tests
from graphsurgery.attention.masks import mask_fills
from graphsurgery.attention.operands import key_group
from graphsurgery.attention.site import Dims, Link, NotAttention, Refusal, RefusedSite, Site
from graphsurgery.attention.upward import ScorePath, find_score_product
from graphsurgery.model.index import ModelIndex, Scope, is_standard
from graphsurgery.model.rewriter import PASS_KEY, REWRITTEN
from graphsurgery.model.shapes import Dim, Shapes
from graphsurgery.model.values import int_attribute

__all__ = ["Findings", "find_attention"]

_FUSED_STANDARD = frozenset({"Attention"})
_FUSED_CONTRIB = frozenset(
    {"Attention", "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention", "PackedAttention"}
)
_OPSET_LAST_AXIS = 13
_OPSET_OLDEST = 9


@dataclass(frozen=True)
class Findings:
    """All Softmax nodes of a model, sorted into attention, refused attention and other things."""

    sites: tuple[Site, ...] = ()
    refused: tuple[RefusedSite, ...] = ()
    others: tuple[NotAttention, ...] = ()


@dataclass
class _Collector:
    sites: list[Site] = field(default_factory=list[Site])
    refused: list[RefusedSite] = field(default_factory=list[RefusedSite])
    others: list[NotAttention] = field(default_factory=list[NotAttention])
    ids: set[str] = field(default_factory=set[str])

    def unique(self, scope: Scope, node: NodeProto, position: int) -> str:
        name = base = f"{scope.id}/{node.name or f'{node.op_type}_{position}'}"
        count = 1
        while name in self.ids:
            count += 1
            name = f"{base}#{count}"
        self.ids.add(name)
        return name


def find_attention(index: ModelIndex, shapes: Shapes | None = None) -> Findings:
    """Find the attentions in the main graph, nested subgraphs and local functions.

    Follows Softmax of any opset (ai.onnx Softmax-1, -11, -13) and names fused Attention operators (ai.onnx 23, 24 and
    com.microsoft) as refused.  Reads no weights.
    """
    shapes = shapes or Shapes(index)
    found = _Collector()
    for scope, position, node in _anchors(index):
        label = found.unique(scope, node, position)
        if node.op_type == "Softmax":
            _examine(found, label, scope, node, shapes)
        else:
            found.refused.append(_fused(label, scope, node))
    return Findings(tuple(found.sites), tuple(found.refused), tuple(found.others))


def _anchors(index: ModelIndex) -> Iterator[tuple[Scope, int, NodeProto]]:
    kinds = {"Softmax"} | _FUSED_STANDARD | _FUSED_CONTRIB
    for scope in index.scopes:
        for position in [i for i, kind in enumerate(scope.op_types()) if kind in kinds]:
            node = scope.nodes[position]
            if any(entry.key == PASS_KEY and entry.value == REWRITTEN for entry in node.metadata_props):
                continue  # the original softmax of a site that is rewritten already, in the branch that recomputes it
            standard = is_standard(node)
            if (standard and (node.op_type == "Softmax" or node.op_type in _FUSED_STANDARD)) or (
                node.domain == "com.microsoft" and node.op_type in _FUSED_CONTRIB
            ):
                yield scope, position, node


def _fused(label: str, scope: Scope, node: NodeProto) -> RefusedSite:
    name = node.name or node.op_type
    if is_standard(node):
        code, mend = "fused-attention", "rewrite with --decompose-attention"
    else:
        code, mend = "fused-contrib", "export without this fusion, or decompose it first"
    kind = node.op_type if is_standard(node) else f"{node.domain}::{node.op_type}"
    reason = f"{name} is a fused {kind} operator; {mend}"
    return RefusedSite(label, scope, node, kind, Refusal(code, reason, name, {"op_type": kind}), dims=Dims())


def _examine(found: _Collector, label: str, scope: Scope, softmax: NodeProto, shapes: Shapes) -> None:
    up = find_score_product(scope, softmax, shapes)
    down = find_value_product(scope, softmax, shapes)
    chain = _chain(up, down)
    if up.product is None or down.product is None:
        found.others.append(NotAttention(label, scope, softmax, chain, up.end if up.product is None else down.end))
        return
    guarded, observed = nan_tests(scope, softmax, down)
    refusal = _refusal(scope, softmax, up, down, shapes) or _nan_observed(observed)
    dims = _dims(scope, softmax, down.product, down.operand, shapes)
    counted = _value_rows(scope, down, shapes) if dims.keys is None else None
    if isinstance(counted, str) or not any(link.kind == "sink" for link in up.links):
        dims = replace(dims, keys=dims.keys or counted)
    if refusal is not None:
        qk, pv = _label(up.product), _label(down.product)
        found.refused.append(RefusedSite(label, scope, softmax, chain, refusal, qk, pv, dims))
        return
    found.sites.append(_site(label, scope, softmax, chain, up, down, dims, guarded, shapes))


def _chain(up: ScorePath, down: ValuePath) -> str:
    products = [up.product.op_type if up.product is not None else "?"]
    middle = [link.node.op_type for link in up.links]
    after = [link.node.op_type for link in down.links]
    return ">".join([*products, *middle, "Softmax", *after, down.product.op_type if down.product is not None else "?"])


def _label(node: NodeProto) -> str:
    return node.name or node.op_type


def _refusal(scope: Scope, softmax: NodeProto, up: ScorePath, down: ValuePath, shapes: Shapes) -> Refusal | None:
    return (
        _quantised(up, down)
        or _split(scope, up, down, shapes)
        or _axis(scope, softmax, shapes)
        or _types(scope, softmax, down, shapes)
    )


def _quantised(up: ScorePath, down: ValuePath) -> Refusal | None:
    for link in (*up.links, *down.links):
        if link.kind == "quantise":
            name = _label(link.node)
            return Refusal(
                "quantised",
                f"{name} quantises the chain; sites with quantised scores or probabilities are not supported yet",
                name,
                {"op_type": link.node.op_type},
            )
    return None


def _split(scope: Scope, up: ScorePath, down: ValuePath, shapes: Shapes) -> Refusal | None:
    if up.parts > 1:
        node = next(link.node for link in up.links if link.kind == "sink")
        name = _label(node)
        return Refusal(
            "split-scores",
            f"{name} joins {up.parts} score products along the keys (a split key cache); not supported yet",
            name,
            {"parts": up.parts},
        )
    for link in down.links:
        if link.kind == "split" and _cuts_last(scope, link.node, shapes):
            name = _label(link.node)
            reason = (
                f"{name} cuts the probabilities into {len(link.node.output)} parts (a split cache); not supported yet"
            )
            return Refusal("split-scores", reason, name, {"parts": len(link.node.output)})
    return None


def _nan_observed(test: NodeProto | None) -> Refusal | None:
    """The unified form has no NaN: who asks for one for another purpose than a guard would get another answer."""
    if test is None:
        return None
    name = _label(test)
    return Refusal("nan-observed", f"the answer of {name} (IsNaN of the probabilities) does more than guard them", name)


def _cuts_last(scope: Scope, node: NodeProto, shapes: Shapes) -> bool:
    """Whether a Split may cut the keys; one along the heads only spreads the value products."""
    axis, rank = int_attribute(node, "axis", 0), shapes.rank(scope, node.input[0])
    return axis == -1 or rank is None or axis == rank - 1


def _axis(scope: Scope, softmax: NodeProto, shapes: Shapes) -> Refusal | None:
    axis = int_attribute(softmax, "axis", -1 if scope.opset >= _OPSET_LAST_AXIS else 1)
    if axis == -1:
        return None
    name, rank = _label(softmax), shapes.rank(scope, softmax.input[0])
    if rank is None:
        rank = shapes.rank(scope, softmax.output[0])
    values: dict[str, object] = {"axis": axis, "rank": rank, "opset": scope.opset}
    if rank is None:
        reason = f"the rank of the input of {name} is not known, so its axis {axis} cannot be checked"
        return Refusal("rank-unknown", f"{reason}; run shape inference on the model first", name, values)
    if axis == rank - 1:
        return None
    if scope.opset < _OPSET_LAST_AXIS:
        reason = (
            f"{name} at opset {scope.opset} normalises over all axes from {axis} on, not over the last of {rank} alone"
        )
        return Refusal("softmax-coerced", reason, name, values)
    return Refusal("axis-not-last", f"{name} normalises axis {axis} of {rank}, not the last one", name, values)


def _types(scope: Scope, softmax: NodeProto, down: ValuePath, shapes: Shapes) -> Refusal | None:
    name = _label(softmax)
    if scope.opset < _OPSET_OLDEST:
        reason = f"{name} is of opset {scope.opset}; convert the model to opset {_OPSET_OLDEST} or newer"
        return Refusal("opset-too-old", reason, name, {"opset": scope.opset})
    dtype = shapes.dtype(scope, softmax.input[0]) or shapes.dtype(scope, softmax.output[0])
    if dtype is None and down.product is not None:
        dtype = shapes.dtype(scope, down.product.output[0])
        dtype = dtype or shapes.dtype(scope, down.product.input[1 - down.operand])
    if dtype not in FLOATS:
        kind = "not known" if dtype is None else TensorProto.DataType.Name(dtype).lower()
        reason = f"the element type of {name} is {kind}; float32, float16, bfloat16 and float64 are supported"
        return Refusal("dtype", reason, name, {"dtype": kind})
    return None


def _dims(scope: Scope, softmax: NodeProto, pv: NodeProto, operand: int, shapes: Shapes) -> Dims:
    scores = shapes.shape(scope, softmax.input[0]) or shapes.shape(scope, softmax.output[0])
    values = shapes.shape(scope, pv.input[1 - operand])
    turned = operand == 1 and pv.op_type == "MatMul"
    head_size: Dim = None
    if values is not None and len(values) > 1:
        head_size = values[-2] if turned else values[-1]
    group = key_group(scope, pv.input[1 - operand], shapes)
    if scores is None or not scores:
        return Dims(head_size=head_size, group=group)
    keys, queries = scores[-1], scores[-2] if len(scores) > 1 else 1
    heads = scores[-3] if len(scores) > 2 else 1
    batch = scores[-4] if len(scores) > 3 else 1
    return Dims(batch, heads, queries, keys, head_size, group)


def _value_rows(scope: Scope, down: ValuePath, shapes: Shapes) -> Dim:
    """The keys as the values count them; sink columns have none."""
    product = down.product
    values = shapes.shape(scope, product.input[1]) if product is not None and product.op_type == "MatMul" else None
    return values[-2] if down.operand == 0 and values is not None and len(values) > 1 else None


def _site(
    label: str,
    scope: Scope,
    softmax: NodeProto,
    chain: str,
    up: ScorePath,
    down: ValuePath,
    dims: Dims,
    guarded: bool,
    shapes: Shapes,
) -> Site:
    qk, pv = up.product, down.product
    if qk is None or pv is None:
        raise ValueError("a site needs both products")
    rank = shapes.rank(scope, softmax.input[0]) or shapes.rank(scope, softmax.output[0])
    dtype = shapes.dtype(scope, softmax.input[0]) or shapes.dtype(scope, softmax.output[0])
    dtype = dtype or shapes.dtype(scope, pv.output[0]) or shapes.dtype(scope, pv.input[1 - down.operand])
    dtype = dtype or TensorProto.FLOAT
    passed = [shapes.dtype(scope, link.node.output[0]) or dtype for link in down.links]
    late, sum_after = division_place(scope, down, rank, shapes)
    return Site(
        id=label,
        scope=scope,
        softmax=softmax,
        chain=chain,
        qk=qk,
        pv=pv,
        before=up.links,
        after=down.links,
        scores=_scores(softmax, up.links),
        dims=dims,
        dtype=dtype,
        product_dtype=passed[-1] if passed else dtype,
        narrowest=_narrowest([dtype, *passed]),
        shared=down.shared,
        operand=down.operand,
        late_division=late,
        sum_after=sum_after,
        rank=rank,
        sum_rank=shapes.rank(scope, down.links[sum_after - 1].node.output[0]) if sum_after else rank,
        guarded=guarded,
        mask_fills=mask_fills(scope, up.links),
    )


def _narrowest(types: list[int]) -> int:
    """The type with the least range of exponents."""
    for narrow in (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT):
        if narrow in types:
            return narrow
    return types[0]


def _scores(softmax: NodeProto, links: tuple[Link, ...]) -> str:
    """The value whose softmax is taken: a subtraction of the row maximum right before Softmax is passed by."""
    for link in reversed(links):
        if link.kind == "row-max":
            return link.value
        if link.kind != "same":
            break
    return softmax.input[0]
