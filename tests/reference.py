"""Attention in float64 with numpy: the answer that generated graphs are compared with.

Knows nothing of the package and of ONNX.  A description is a list of links that are applied to the scores in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["HIDDEN", "LOWEST", "Answer", "Bias", "Cap", "Hide", "Scale", "attend"]

Array = NDArray[np.float64]

LOWEST = -1.0e30
"""Stands for the lowest number of a narrower type: it absorbs the score that it is added to."""
HIDDEN = -9000.0
"""A score at or below this is no visible key."""


@dataclass(frozen=True)
class Scale:
    """Multiplies the scores."""

    factor: float

    def apply(self, scores: Array) -> Array:
        return scores * self.factor


@dataclass(frozen=True)
class Cap:
    """limit * tanh(scores / limit)."""

    limit: float

    def apply(self, scores: Array) -> Array:
        return self.limit * np.tanh(scores / self.limit)


@dataclass(frozen=True, eq=False)
class Bias:
    """Adds ordinary numbers, -100 and -10000 among them."""

    values: Array

    def apply(self, scores: Array) -> Array:
        return scores + self.values


@dataclass(frozen=True, eq=False)
class Hide:
    """Replaces the scores of hidden keys: by -inf, LOWEST, or a number that a Where writes."""

    hidden: NDArray[np.bool_]
    fill: float

    def apply(self, scores: Array) -> Array:
        return np.where(self.hidden, self.fill, scores)


Link = Scale | Cap | Bias | Hide


@dataclass(frozen=True, eq=False)
class Answer:
    """What an attention gives, and the statistics of its rows."""

    scores: Array
    """Scores as Softmax sees them, the sink column included, [..., Q, K]."""
    probabilities: Array
    """Behind the guard and without the sink column, [..., Q, K]; NaN in a row of -inf without a guard."""
    output: Array
    """[..., Q, D]; NaN likewise."""
    largest_value: float

    @property
    def visible(self) -> NDArray[np.int64]:
        """Number of keys of each row that are not hidden and count beside the greatest, [..., Q]."""
        near = self.scores > np.maximum(self.scores.max(axis=-1, keepdims=True), HIDDEN) - 30.0
        return (near & (self.scores > HIDDEN)).sum(axis=-1)

    @property
    def row_max(self) -> Array:
        """[..., Q]"""
        return self.scores.max(axis=-1)

    @property
    def log_sum_exp(self) -> Array:
        """[..., Q]; -inf where no key is visible."""
        top = np.maximum(self.row_max, -1e300)
        with np.errstate(divide="ignore"):
            return top + np.log(np.exp(self.scores - top[..., None]).sum(axis=-1))


def attend(
    query: Array, key: Array, value: Array, links: Sequence[Link], *, sink: Array | None = None, guarded: bool = False
) -> Answer:
    """query [..., Q, D], key [..., K, D], value [..., K, E], sink [..., 1, 1] -> output [..., Q, E]."""
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    scores = query @ np.swapaxes(key, -1, -2)
    for link in links:
        scores = link.apply(scores)
    if sink is not None:
        column = np.broadcast_to(sink.astype(np.float64), (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, column], axis=-1)
    probabilities = _softmax(scores)
    if guarded:
        probabilities = np.where(np.isnan(probabilities), 0.0, probabilities)
    if sink is not None:
        probabilities = probabilities[..., :-1]
    largest = float(np.abs(value).max()) if value.size else 0.0
    return Answer(scores, probabilities, probabilities @ value, largest)


def _softmax(scores: Array) -> Array:
    """Rows of -inf alone are NaN, as the operator has it; rows of one number are uniform."""
    top = scores.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(scores - top)
        return exponentials / exponentials.sum(axis=-1, keepdims=True)
