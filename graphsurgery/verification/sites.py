"""Compares each site on equal inputs.

The two versions of a site are put into one graph, side by side: the original model, plus the nodes that the other
model has between the tensors both know and the site's output.  A tensor name means the same in both models, so both
versions read the very same scores, masks and values, and no error of earlier layers enters.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import GraphProto, ModelProto

from graphsurgery.attention.finder import find_attention
from graphsurgery.attention.site import Site
from graphsurgery.model.expose import cut_to_outputs
from graphsurgery.model.index import ModelIndex, Scope, graphs_of

__all__ = ["SitePairs", "paired_sites"]

_PREFIX = "candidate::"


@dataclass(frozen=True)
class SitePairs:
    """One model that computes both versions of each site: (id, output of the original, output of the other)."""

    model: ModelProto
    pairs: tuple[tuple[str, str, str], ...]
    skipped: tuple[str, ...]
    """Sites in functions and subgraphs, which are compared through the graph outputs only."""


def paired_sites(original: ModelProto, other: ModelProto) -> SitePairs:
    """Join the rewritten sites of `other` to a copy of `original`."""
    both = ModelProto()
    both.CopyFrom(original)
    index, candidate = ModelIndex(both), ModelIndex(other).main
    pairs: list[tuple[str, str, str]] = []
    skipped: list[str] = []
    for site in find_attention(index).sites:
        if site.scope is not index.main:
            skipped.append(site.id)
        elif _differs(site, candidate):
            graft = _Graft(both, index.main, candidate, site)
            pairs.append((site.id, site.output, graft.value(site.output)))
    for _, first, second in pairs:
        for name in (first, second):
            if all(value.name != name for value in both.graph.output):
                both.graph.output.add().name = name
    cut_to_outputs(both, [name for pair in pairs for name in pair[1:]])
    return SitePairs(both, tuple(pairs), tuple(skipped))


def _differs(site: Site, candidate: Scope) -> bool:
    """Whether the other model has the site's output, computed without this Softmax."""
    softmax = candidate.producers.get(site.softmax.output[0])
    return site.output in candidate.producers and (softmax is None or softmax.op_type != "Softmax")


class _Graft:
    """Copies the nodes of the other model that lie between common tensors and the output of one site."""

    def __init__(self, both: ModelProto, main: Scope, candidate: Scope, site: Site) -> None:
        self.both, self.main, self.candidate = both, main, candidate
        self.own = {site.softmax.output[0], site.output, *(link.node.output[0] for link in site.after)}
        self.known: dict[str, str] = {}
        self.prefix = f"{_PREFIX}{site.id}::"

    def value(self, name: str) -> str:
        """The name under which the joined model has a value of the other model."""
        if not name:
            return name
        if name not in self.known:
            self.known[name] = self._value(name)
        return self.known[name]

    def _value(self, name: str) -> str:
        common = name in self.main.producers or name in self.main.inputs or name in self.main.initializers
        if common and name not in self.own:
            return name
        node = self.candidate.producers.get(name)
        if node is not None:
            inputs = [self.value(value) for value in node.input]
            copy = self.both.graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{self.prefix}{len(self.both.graph.node)}"
            del copy.input[:], copy.output[:]
            copy.input.extend(inputs)
            copy.output.extend(f"{self.prefix}{value}" for value in node.output)
            for graph in graphs_of(copy):
                self._reconnect(graph, frozenset())
            self.known.update({value: f"{self.prefix}{value}" for value in node.output})
            return f"{self.prefix}{name}"
        tensor = self.candidate.initializers.get(name)
        if tensor is None:
            return name
        copy_of = self.both.graph.initializer.add()
        copy_of.CopyFrom(tensor)
        copy_of.name = f"{self.prefix}{name}"
        return copy_of.name

    def _reconnect(self, graph: GraphProto, around: frozenset[str]) -> None:
        """Let a branch read what it takes from outside under the names of the joined model."""
        own = around | {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {name for node in graph.node for name in node.output}
        for node in graph.node:
            for position, name in enumerate(node.input):
                if name and name not in own:
                    node.input[position] = self.value(name)
            for inner in graphs_of(node):
                self._reconnect(inner, own)
        for value in graph.output:
            if value.name not in own:
                value.name = self.value(value.name)
