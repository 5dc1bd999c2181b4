"""`graphsurgery inspect`: what is in a model, without changing it."""

from __future__ import annotations

from graphsurgery.cli.args import JsonFlag, ModelArgument

__all__ = ["inspect"]


def inspect(model: ModelArgument, /, *, json: JsonFlag = False) -> int:
    """List the attentions of a model."""
    return 0
