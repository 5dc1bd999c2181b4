"""A light index over a ModelProto: who produces a value, who reads it, in which scope.

Built once, linear in the number of nodes.  The index holds the nodes of the model themselves, no copies; only
`graphsurgery.model.rewriter.Rewriter` changes them and keeps the index true.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
)

__all__ = ["Capture", "ModelIndex", "Scope", "graphs_of", "is_standard"]

_DEFAULT_DOMAINS = ("", "ai.onnx")
_WITH_SUBGRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(eq=False, slots=True)
class Capture:
    """A value of an outer scope that a nested scope reads."""

    scope: Scope
    node: NodeProto | None
    """The reading node, or None where the nested graph returns the value as its own output."""


@dataclass(eq=False)
class Scope:
    """One graph, subgraph or function body, with its values by name."""

    id: str
    body: GraphProto | FunctionProto
    kind: Literal["main", "subgraph", "function"]
    parent: Scope | None
    opset: int
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    kinds: list[str] | None = None
    """The operator of each node in order, until the nodes change."""
    producers: dict[str, NodeProto] = field(default_factory=dict[str, NodeProto])
    uses: defaultdict[str, list[NodeProto]] = field(default_factory=lambda: defaultdict[str, list[NodeProto]](list))
    captures: dict[str, list[Capture]] = field(default_factory=dict[str, list[Capture]])
    inputs: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    initializers: dict[str, TensorProto] = field(default_factory=dict[str, TensorProto])
    sparse: frozenset[str] = frozenset()
    """Names of sparse initializers."""
    children: list[Scope] = field(default_factory=list["Scope"])
    _declared: dict[str, int] | None = None
    _interface: dict[str, ValueInfoProto] = field(default_factory=dict[str, ValueInfoProto])

    @property
    def root(self) -> Scope:
        """The main graph or the function that holds this scope."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def op_types(self) -> list[str]:
        """The operator of each node, in order."""
        if self.kinds is None:
            self.kinds = [node.op_type for node in self.nodes]
        return self.kinds

    def defines(self, name: str) -> bool:
        """Whether the value is made here: by a node, as an input or as an initializer."""
        return name in self.producers or name in self.initializers or name in self.inputs or name in self.sparse

    def home(self, name: str) -> Scope | None:
        """The nearest scope, from here outwards, that defines the value."""
        scope: Scope | None = self
        while scope is not None:
            if scope.defines(name):
                return scope
            scope = scope.parent
        return None

    def producer(self, name: str) -> NodeProto | None:
        """The node that produces the value, here or in an outer scope."""
        node = self.producers.get(name)
        if node is not None or self.parent is None:
            return node
        home = self.home(name)
        return None if home is None else home.producers.get(name)

    def capture(self, name: str, node: NodeProto | None) -> None:
        """Enter that a node here (None: this graph's own output) reads a value of an outer scope."""
        home = self.parent.home(name) if self.parent is not None else None
        if home is not None:
            home.captures.setdefault(name, []).append(Capture(self, node))

    def release(self, name: str, node: NodeProto) -> None:
        """Enter that a node here reads a value of an outer scope no more."""
        home = self.parent.home(name) if self.parent is not None else None
        entries = [] if home is None else home.captures.get(name, [])
        for position, entry in enumerate(entries):
            if entry.scope is self and entry.node is node:
                del entries[position]
                return

    def readers(self, name: str) -> list[NodeProto]:
        """Nodes of this scope that read the value (a node once for each operand)."""
        return self.uses.get(name, [])

    def read_elsewhere(self, name: str) -> bool:
        """Whether the value is an output of its graph or is captured by a nested scope."""
        return name in self.outputs or bool(self.captures.get(name))

    def is_constant(self, name: str) -> bool:
        """Whether the value is an initializer that no caller can override, or a Constant node."""
        home = self.home(name)
        if home is None:
            return False
        node = home.producers.get(name)
        if node is not None:
            return node.op_type == "Constant"
        return name in home.initializers and name not in home.inputs

    def declared(self) -> dict[str, int]:
        """The values that value_info declares, with their positions there."""
        if self._declared is None:
            infos = self.body.value_info
            self._declared = dict(zip([info.name for info in infos], range(len(infos)), strict=True))
            if isinstance(self.body, GraphProto):
                self._interface = {info.name: info for info in (*self.body.output, *self.body.input)}
        return self._declared

    def value_info(self, name: str) -> ValueInfoProto | None:
        """Declared type of a value of this scope: value_info, graph input or graph output."""
        declared = self.declared()
        known = self._interface.get(name)
        if known is None:
            position = declared.get(name)
            known = None if position is None else self.body.value_info[position]
        return known

    def drop_value_info(self, names: set[str]) -> None:
        """Remove the declared types of values that no node produces any more, and read the rest anew at need."""
        declared, infos = self.declared(), self.body.value_info
        for position in sorted({declared[n] for n in names if n in declared and n not in self.producers}, reverse=True):
            del infos[position]
        self._declared = None
        if isinstance(self.body, GraphProto) and names:
            notes = self.body.quantization_annotation
            for position in reversed([i for i, note in enumerate(notes) if note.tensor_name in names]):
                if notes[position].tensor_name not in self.producers:
                    del notes[position]


class ModelIndex:
    """All scopes of a model: the main graph, its subgraphs, and the local functions with theirs."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.scopes: list[Scope] = []
        self.functions: dict[tuple[str, str, str], Scope] = {}
        self._ids = {"main"}
        opset = _opset(model.opset_import)
        self.main = self._scope("main", model.graph, "main", None, opset)
        for function in model.functions:
            taken = function.name in self._ids
            name = self._free(f"{function.domain}.{function.name}" if taken else function.name)
            scope = self._scope(name, function, "function", None, _opset(function.opset_import, opset))
            self.functions[function.domain, function.name, function.overload] = scope

    def _free(self, label: str) -> str:
        """The label, or with a number where a scope has it already."""
        name, count = label, 1
        while name in self._ids:
            count += 1
            name = f"{label}#{count}"
        self._ids.add(name)
        return name

    def adopt(self, scope: Scope, node: NodeProto, position: int | None = None) -> None:
        """Enter the graphs in a node's attributes as scopes of their own."""
        label = node.name or f"{node.op_type}_{len(scope.nodes) if position is None else position}"
        for attribute in node.attribute:
            for graph in _graphs(attribute):
                name = self._free(f"{scope.id}/{label}.{attribute.name}")
                child = self._scope(name, graph, "subgraph", scope, scope.opset)
                scope.children.append(child)
                _register_captures(child)

    def _scope(
        self,
        name: str,
        body: GraphProto | FunctionProto,
        kind: Literal["main", "subgraph", "function"],
        parent: Scope | None,
        opset: int,
    ) -> Scope:
        scope = Scope(name, body, kind, parent, opset)
        self.scopes.append(scope)
        if isinstance(body, GraphProto):
            scope.inputs = frozenset(value.name for value in body.input)
            scope.outputs = frozenset(value.name for value in body.output)
            scope.initializers = {tensor.name: tensor for tensor in body.initializer}
            scope.sparse = frozenset(tensor.values.name for tensor in body.sparse_initializer)
        else:
            scope.inputs = frozenset(body.input)
            scope.outputs = frozenset(body.output)
        nodes, producers, uses = list(body.node), scope.producers, scope.uses
        scope.nodes = nodes
        for node in nodes:
            for value in node.input:
                uses[value].append(node)
            for value in node.output:
                producers[value] = node
        uses.pop("", None)
        producers.pop("", None)
        kinds = [node.op_type for node in nodes]
        scope.kinds = kinds
        for position in [i for i, kind in enumerate(kinds) if kind in _WITH_SUBGRAPHS]:
            self.adopt(scope, nodes[position], position)
        return scope

    def walk(self) -> Iterator[tuple[Scope, NodeProto]]:
        """Every node with its scope."""
        for scope in self.scopes:
            for node in scope.nodes:
                yield scope, node

    def calls(self, function: Scope) -> list[tuple[Scope, NodeProto]]:
        """The nodes that call a local function."""
        domain, name, overload = next(key for key, scope in self.functions.items() if scope is function)
        return [
            (scope, node)
            for scope, node in self.walk()
            if node.op_type == name and node.domain == domain and node.overload == overload
        ]

    def node_counts(self) -> dict[str, int]:
        """Number of nodes by operator over all scopes; other domains as `domain::Op`."""
        plain = all(entry.domain in _DEFAULT_DOMAINS for entry in self.model.opset_import)
        counts: Counter[str] = Counter()
        for scope in self.scopes:
            if plain:
                counts.update(scope.op_types())
            else:
                counts.update(n.op_type if is_standard(n) else f"{n.domain}::{n.op_type}" for n in scope.nodes)
        return dict(sorted(counts.items()))


def is_standard(node: NodeProto) -> bool:
    """Whether the node is of the default ONNX operator set."""
    return node.domain in _DEFAULT_DOMAINS


def graphs_of(node: NodeProto) -> list[GraphProto]:
    """The graphs in the attributes of a node: branches, bodies."""
    return [graph for attribute in node.attribute for graph in _graphs(attribute)]


def _graphs(attribute: AttributeProto) -> list[GraphProto]:
    if attribute.type == AttributeProto.GRAPH:
        return [attribute.g]
    return list(attribute.graphs) if attribute.type == AttributeProto.GRAPHS else []


def _register_captures(child: Scope) -> None:
    """Enter what a nested scope reads from outside into the scopes around it."""
    reads: list[tuple[str, NodeProto | None]] = [(name, node) for name, nodes in child.uses.items() for node in nodes]
    reads += [(name, None) for name in child.outputs]
    for name, node in reads:
        if not child.defines(name):
            child.capture(name, node)


def _opset(imports: Iterable[OperatorSetIdProto], default: int = 1) -> int:
    for entry in imports:
        if entry.domain in _DEFAULT_DOMAINS:
            return int(entry.version)
    return default
