"""Numbers for a generated attention graph: feeds, masks and the float64 answer, inside the accuracy window."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from reference import LOWEST, Answer, Bias, Cap, Hide, Link, Scale, attend
from strategies import AttentionSpec

__all__ = ["Data", "answers", "hostile", "inside"]

_SPREADS = {"float16": 12.0, "float32": 60.0, "float64": 60.0}
"""Greatest distance from the least row maximum to the greatest log-sum-exp plus log max|v|."""
_LARGEST_SCORE = {"float16": 8.0, "float32": 50.0, "float64": 50.0}
"""Above, the rounding of a score shows in its probability."""
_MOST_STEPS = 40
_FILLS = {"-10000": -10000.0, "-100": -100.0, "-inf": -math.inf}


@dataclass(frozen=True, eq=False)
class Data:
    """Arrays of one graph with the layouts of plain attention, [B, H, ., .] or less; see `attention_graphs`."""

    query: NDArray[np.float64]
    key: NDArray[np.float64]
    value: NDArray[np.float64]
    factor: float
    """What the scores are multiplied with."""
    hidden: NDArray[np.bool_]
    """In the shape of the mask."""
    twice: NDArray[np.bool_]
    """Hidden by the second mask too."""
    bias: NDArray[np.float64]
    """Of the second Add where it is no mask, [H, 1, K] or less."""
    sink: NDArray[np.float64]


def inside(spec: AttentionSpec) -> Data:
    """Draw numbers and shrink the queries until every row lies well inside the window of the narrowest dtype."""
    rng = np.random.default_rng(spec.seed)
    lead = _lead(spec)
    pairs = (*lead[:-1], lead[-1] // spec.group) if lead else ()
    amplitude = float(rng.uniform(0.3, 3.0))
    key = rng.normal(size=(*pairs, spec.keys, spec.head_size))
    value = key if spec.tied else rng.uniform(-2, 2, size=(*pairs, spec.keys, spec.head_size))
    hidden = _hidden(spec, rng)
    data = Data(
        query=_rounded(amplitude * rng.normal(size=(*lead, spec.queries, spec.head_size)), spec.dtype),
        key=_rounded(np.clip(key, -2, 2), spec.dtype),
        value=_rounded(np.clip(value, -2, 2), spec.dtype),
        factor=_factor(spec, rng),
        hidden=hidden,
        twice=hidden & (rng.random(hidden.shape) < 0.5),
        bias=_rounded(rng.uniform(-1, 1, size=(*lead[-1:], 1, spec.keys)) + _offsets(spec), spec.mask_dtype),
        sink=_rounded(rng.uniform(-2, 2, size=(*lead, 1, 1)), spec.softmax_dtype),
    )
    for _ in range(_MOST_STEPS):
        small = _largest_score(spec, data) <= _LARGEST_SCORE[spec.narrowest]
        if small and all(_fits(spec, answer) for answer in answers(spec, data)):
            return data
        data = replace(data, query=_rounded(data.query * 0.6, spec.dtype))
    raise AssertionError(f"no queries fit the window: {spec!r}")


def hostile(spec: AttentionSpec, data: Data) -> Data:
    """Scores up to about 2000, both signs, and a row without a visible key where the mask is an input."""
    rng = np.random.default_rng(spec.seed + 1)
    raw = data.query @ np.swapaxes(_repeated(spec, data.key), -1, -2)
    limit = 2000.0 / data.factor
    grown = limit / max(float(np.abs(raw).max()), 1e-3)
    grown = min(grown, 20000.0 / max(float(np.abs(raw).max()), 1.0)) if spec.narrowest == "float16" else grown
    grown = min(grown, 20000.0 / max(float(np.abs(data.query).max()), 1e-3))
    hidden = data.hidden.copy()
    # Below the lowest float16 engines differ: -inf, or a number that they keep in float32.
    added = spec.mask_dtype == "float16" and not spec.mask.startswith("where")
    rounded = spec.fill == "lowest" and (added or spec.softmax_dtype == "float16" != spec.mask_dtype)
    if hidden.size and spec.mask_source != "constant" and not rounded:
        hidden[(*(int(rng.integers(n)) for n in hidden.shape[:-1]),)] = True
    return replace(data, query=_rounded(data.query * grown, spec.dtype), hidden=hidden)


def answers(spec: AttentionSpec, data: Data) -> tuple[Answer, ...]:
    """The float64 answer of every call: a function is called with the queries and with their negatives."""
    signs = (1.0, -1.0) if spec.place == "function" else (1.0,)
    key, value = _repeated(spec, data.key), _repeated(spec, data.value)
    links = [*_scale_links(spec, data), *_mask_links(spec, data)]
    sink = data.sink if spec.sink else None
    return tuple(attend(sign * data.query, key, value, links, sink=sink, guarded=spec.guard) for sign in signs)


def fill_value(spec: AttentionSpec) -> float:
    """What the mask writes, in its own dtype."""
    if spec.fill == "lowest":
        return float(np.finfo(spec.mask_dtype).min)
    return _FILLS[spec.fill]


def _scale_links(spec: AttentionSpec, data: Data) -> list[Link]:
    links: list[Link] = [] if spec.scale == "none" else [Scale(data.factor)]
    return [*links, Cap(spec.cap)] if spec.cap else links


def _mask_links(spec: AttentionSpec, data: Data) -> list[Link]:
    if spec.mask == "none":
        return []
    links = [_mask_link(spec, data.hidden)]
    if spec.mask == "two-adds":
        links.append(_mask_link(spec, data.twice) if second_is_mask(spec) else Bias(data.bias))
    return links


def second_is_mask(spec: AttentionSpec) -> bool:
    """Whether the second of two Adds is a mask as well, or an ordinary bias."""
    return spec.seed % 2 == 1 and not spec.head_offset


def _mask_link(spec: AttentionSpec, hidden: NDArray[np.bool_]) -> Link:
    if spec.fill == "-inf":
        return Hide(hidden, -math.inf)
    if spec.fill == "lowest":
        return Hide(hidden, LOWEST)
    if spec.mask.startswith("where"):
        return Hide(hidden, fill_value(spec))
    return Bias(np.where(hidden, fill_value(spec), 0.0))


def _offsets(spec: AttentionSpec) -> NDArray[np.float64]:
    """[H, 1, 1], evenly spread."""
    heads = spec.heads if spec.rank > 2 else 1
    return np.linspace(-spec.head_offset, spec.head_offset, heads).reshape(-1, 1, 1)


def _lead(spec: AttentionSpec) -> tuple[int, ...]:
    return (spec.batch, spec.heads)[4 - spec.rank :] if spec.rank > 2 else ()


def _repeated(spec: AttentionSpec, array: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.repeat(array, spec.group, axis=-3) if spec.group > 1 else array


def _rounded(array: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    return array.astype(dtype).astype(np.float64)


def _factor(spec: AttentionSpec, rng: np.random.Generator) -> float:
    if spec.scale == "none":
        return 1.0
    factor = 1 / math.sqrt(spec.head_size)
    if spec.scale_source != "computed":
        factor = float(rng.choice([factor, 0.5, 0.25]))
    return factor


def mask_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """The shape of the mask, at the rank of the scores but for QK."""
    heads, batch, queries = spec.heads, spec.batch, spec.queries
    four = {
        "BHQK": (batch, heads, queries),
        "BQK": (batch, 1, queries),
        "B1K": (batch, 1, 1),
        "11K": (1, 1, 1),
        "QK": (queries,),
    }[spec.mask_shape]
    return (*four[-(spec.rank - 1) :], spec.keys)


def _hidden(spec: AttentionSpec, rng: np.random.Generator) -> NDArray[np.bool_]:
    shape = mask_shape(spec)
    rows, keys = shape[:-1], spec.keys
    if spec.pattern == "causal":
        visible_until = np.arange(shape[-2]) + max(keys - spec.queries, 0)
        hidden = np.broadcast_to(np.arange(keys) > visible_until[:, None], shape).copy()
    elif spec.pattern == "padding":
        lengths = rng.integers(1, keys + 1, size=(*rows[:-1], 1, 1) if len(rows) > 1 else (1, 1))
        hidden = np.broadcast_to(np.arange(keys) >= lengths, shape).copy()
    else:
        hidden = rng.random(shape) < 0.3
        np.put_along_axis(hidden, rng.integers(keys, size=(*rows, 1)), False, axis=-1)
    if spec.hidden_row and math.prod(rows) > 1:  # a model in which nothing is visible has no evidence
        hidden[(*(int(rng.integers(n)) for n in rows),)] = True
    return hidden


def _largest_score(spec: AttentionSpec, data: Data) -> float:
    """Of all keys, hidden ones included: the lowest float16 absorbs no score of 16 or more."""
    scores = data.query @ np.swapaxes(_repeated(spec, data.key), -1, -2)
    for link in _scale_links(spec, data):
        scores = link.apply(scores)
    return float(np.abs(scores).max())


def _fits(spec: AttentionSpec, answer: Answer) -> bool:
    """Whether the rows, of each head where heads differ, lie inside one window."""
    if spec.head_offset:
        heads = [np.take([answer.visible, answer.log_sum_exp, answer.row_max], h, axis=-2) for h in range(spec.heads)]
    else:
        heads = [(answer.visible, answer.log_sum_exp, answer.row_max)]
    return all(_spread(*rows) + math.log(max(1.0, answer.largest_value)) <= _SPREADS[spec.narrowest] for rows in heads)


def _spread(visible: NDArray[np.int64], log_sum_exp: NDArray[np.float64], row_max: NDArray[np.float64]) -> float:
    shown = visible > 0
    return float(log_sum_exp[shown].max() - row_max[shown].min()) if shown.any() else 0.0
