"""What a change to a model is made of: places for new nodes, attributes, and the count of what was done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onnx import AttributeProto, NodeProto, helper

from graphsurgery.model.index import Scope

__all__ = ["Attribute", "Changes", "Place", "RewriteError", "set_attribute"]

Attribute = int | float | str | Sequence[int]


class RewriteError(Exception):
    """A change that would break the graph: a bug of the pass that asked for it."""


class Place(NamedTuple):
    """Where new nodes go: before or after a node of a scope, or at its start where `anchor` is None."""

    scope: Scope
    anchor: NodeProto | None
    after: bool = False


@dataclass(slots=True)
class Changes:
    """What one pass did."""

    added: Counter[str] = field(default_factory=Counter[str])
    removed: Counter[str] = field(default_factory=Counter[str])
    rewired: int = 0

    @property
    def any(self) -> bool:
        """Whether anything changed."""
        return bool(self.added or self.removed or self.rewired)


def set_attribute(attribute: AttributeProto, name: str, value: Attribute) -> None:
    """Give an attribute its name, type and value."""
    attribute.name = name
    if isinstance(value, int):
        attribute.type, attribute.i = AttributeProto.INT, value
    elif isinstance(value, float):
        attribute.type, attribute.f = AttributeProto.FLOAT, value
    else:
        made = helper.make_attribute(name, value)
        attribute.CopyFrom(made)
