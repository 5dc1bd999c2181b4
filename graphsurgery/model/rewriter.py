"""The one object that changes a model.

Every change goes through a method here, is counted, and keeps the index true, so "changed" is recorded by the hand
that changed it and never claimed by a pass.  New nodes are placed when `commit` is called: the order of untouched
nodes stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    NodeProto,
    StringStringEntryProto,
    TensorProto,
    TensorShapeProto,
    helper,
    numpy_helper,
)

from graphsurgery.model.changes import Attribute, Changes, Place, RewriteError, set_attribute
from graphsurgery.model.index import ModelIndex, Scope

__all__ = ["Changes", "Place", "RewriteError", "Rewriter"]

PASS_KEY, SITE_KEY = "graphsurgery.pass", "graphsurgery.site"
REWRITTEN = "unified_max"
"""Name of the pass that rewrites the softmax of a site."""
_FIRST_IR_WITH_PLAIN_INITIALIZERS = 4


class Rewriter:
    """Inserts, rewires and removes nodes of an indexed model.

    `origin` names the pass and the site that the next new nodes belong to; it is written into their
    `metadata_props`.
    """

    def __init__(self, index: ModelIndex) -> None:
        self.index = index
        self.changes = Changes()
        self._origin: list[StringStringEntryProto] = []
        self._place: dict[int, tuple[int, int, int]] = {}
        self._removed: set[int] = set()
        self._touched: dict[int, Scope] = {}
        self._order: dict[int, dict[int, int]] = {}
        self._sequence = 0
        self._gone: dict[int, set[str]] = {}
        self._constants: dict[tuple[int, str, tuple[int, ...], bytes], str] = {}
        self._literals: dict[tuple[int, int, str | tuple[int, ...]], str] = {}
        self._names: set[str] = set()

    def start(self, pass_name: str, site: str = "") -> None:
        """Name the pass and the site of the changes that follow."""
        self._origin = [StringStringEntryProto(key=PASS_KEY, value=pass_name)]
        if site:
            self._origin.append(StringStringEntryProto(key=SITE_KEY, value=site))

    def take_changes(self) -> Changes:
        """Return the changes since the last call and count anew."""
        changes, self.changes = self.changes, Changes()
        return changes

    # -- names

    def fresh(self, hint: str) -> str:
        """A name that no value and no node of the model has."""
        names = self._names
        if not names:
            for scope in self.index.scopes:
                names.update(scope.producers, scope.uses, scope.initializers, scope.inputs, scope.outputs, scope.sparse)
                names.update(scope.declared())
                names.update([node.name for node in scope.nodes])
        name, count = hint, 1
        while name in names:
            count += 1
            name = f"{hint}_{count}"
        names.add(name)
        return name

    # -- nodes

    def add(
        self,
        place: Place,
        op_type: str,
        inputs: Sequence[str],
        hint: str,
        *,
        outputs: Sequence[str] | int = 1,
        **attributes: Attribute,
    ) -> str:
        """Insert a standard operator and return its first output.

        `outputs` are names that become its outputs (free names only), or how many fresh ones to make.
        """
        scope = place.scope
        name = self.fresh(hint)
        if isinstance(outputs, int):
            outputs = [name] if outputs == 1 else [self.fresh(f"{hint}_output_{i}") for i in range(outputs)]
        node = scope.body.node.add(op_type=op_type, name=name, input=inputs, output=outputs)
        for key, value in attributes.items():
            set_attribute(node.attribute.add(), key, value)
        node.metadata_props.extend(self._origin)
        producers, uses = scope.producers, scope.uses
        for value in outputs:
            if value in producers:
                raise RewriteError(f"{value!r} already has a producer in {scope.id}")
            producers[value] = node
        for value in inputs:
            if value:
                uses[value].append(node)
                if scope.parent is not None and not scope.defines(value):
                    scope.capture(value, node)
        self._put(node, place)
        scope.nodes.append(node)
        added = self.changes.added
        added[op_type] = added.get(op_type, 0) + 1
        return outputs[0]

    def remove(self, scope: Scope, node: NodeProto) -> None:
        """Remove a node whose outputs nobody reads any more."""
        for value in node.output:
            left = scope.uses.get(value)
            if left or scope.read_elsewhere(value):
                users = ", ".join(n.name or n.op_type for n in left or []) or "a graph output or a subgraph"
                raise RewriteError(f"cannot remove {node.name or node.op_type}: {value!r} is still read by {users}")
            if scope.producers.get(value) is node:
                del scope.producers[value]
                self._gone.setdefault(id(scope), set()).add(value)
        for value in node.input:
            self._drop_use(scope, value, node)
        self._positions(scope)
        self._removed.add(id(node))
        self.changes.removed[node.op_type] += 1

    def remove_dead(self, scope: Scope, nodes: Sequence[NodeProto]) -> None:
        """Remove those of the nodes that nobody reads, readers before what they read."""
        waiting = list(nodes)
        while waiting:
            dead = [n for n in waiting if not any(scope.uses.get(v) or scope.read_elsewhere(v) for v in n.output)]
            if not dead:
                return
            for node in dead:
                self.remove(scope, node)
            gone = {id(node) for node in dead}
            waiting = [node for node in waiting if id(node) not in gone]

    def set_input(self, scope: Scope, node: NodeProto, position: int, value: str) -> None:
        """Make a node read another value."""
        old = node.input[position]
        if old == value:
            return
        self._drop_use(scope, old, node)
        node.input[position] = value
        scope.uses[value].append(node)
        if scope.parent is not None and not scope.defines(value):
            scope.capture(value, node)
        self.changes.rewired += 1

    def rename_output(self, scope: Scope, node: NodeProto, position: int, hint: str) -> str:
        """Give a node's output a fresh name; the old name is free for another producer, its readers keep it."""
        old = node.output[position]
        new = self.fresh(hint)
        self._positions(scope)
        del scope.producers[old]
        self._gone.setdefault(id(scope), set()).add(old)
        node.output[position] = new
        scope.producers[new] = node
        self.changes.rewired += 1
        return new

    def remove_unused_constant(self, scope: Scope, name: str) -> None:
        """Remove an initializer or Constant node that nothing reads any more; anything else is left alone."""
        home = scope.home(name)
        if home is None or home.uses.get(name) or home.read_elsewhere(name) or name in home.inputs:
            return
        for known in (self._constants, self._literals):
            for key in [key for key, value in known.items() if value == name]:
                del known[key]  # pyright: ignore[reportArgumentType]
        node = home.producers.get(name)
        if node is not None:
            if node.op_type == "Constant":
                self.remove(home, node)
            return
        tensor = home.initializers.pop(name, None)
        if tensor is not None and isinstance(home.body, GraphProto):
            home.body.initializer.remove(tensor)
            self.changes.rewired += 1

    def replace_uses(self, scope: Scope, old: str, new: str) -> None:
        """Let every reader inside the scope read `new`; graph outputs and captures keep `old`."""
        for node in list(scope.uses.get(old, [])):
            for position, value in enumerate(node.input):
                if value == old:
                    self.set_input(scope, node, position, new)

    def add_output(self, scope: Scope, node: NodeProto, hint: str) -> str:
        """Give a node one more output (a call, a control-flow node) and return its name."""
        name = self.fresh(hint)
        node.output.append(name)
        scope.producers[name] = node
        self.changes.rewired += 1
        return name

    def add_choice(
        self, place: Place, condition: str, then: GraphProto, otherwise: GraphProto, hint: str, output: str
    ) -> None:
        """Insert an If of one output; its branches read what they need from the scope around them."""
        self.add(place, "If", [condition], hint, outputs=[output])
        node = place.scope.producers[output]
        for name, graph in (("then_branch", then), ("else_branch", otherwise)):
            entry = node.attribute.add(name=name, type=AttributeProto.GRAPH)
            entry.g.CopyFrom(graph)
            for inner in entry.g.node:
                inner.metadata_props.extend(self._origin)
        self.index.adopt(place.scope, node)

    def add_graph_output(self, scope: Scope, name: str, elem_type: int, rank: int | None = None) -> None:
        """Make a value an output of its graph or function."""
        if isinstance(scope.body, GraphProto):
            value = scope.body.output.add()
            value.name = name
            value.type.tensor_type.elem_type = elem_type
            if rank is not None:
                value.type.tensor_type.shape.dim.extend(TensorShapeProto.Dimension() for _ in range(rank))
                value.type.tensor_type.shape.SetInParent()
        else:
            scope.body.output.append(name)
        scope.outputs |= {name}
        self.changes.rewired += 1

    # -- values

    def constant(self, scope: Scope, array: np.ndarray, hint: str) -> str:
        """A constant of the model: an initializer of the main graph, a Constant node inside functions."""
        root = scope.root
        key = (id(root), array.dtype.name, array.shape, array.tobytes())
        known = self._constants.get(key)
        if known is not None:
            return known
        name = self.fresh(hint)
        tensor = numpy_helper.from_array(array, name)
        plain = self.index.model.ir_version >= _FIRST_IR_WITH_PLAIN_INITIALIZERS
        if isinstance(root.body, GraphProto) and plain:
            root.body.initializer.append(tensor)
            root.initializers[name] = root.body.initializer[-1]
        else:
            self._add_constant_node(root, tensor)
        self._constants[key] = name
        return name

    def scalar(self, scope: Scope, value: float, elem_type: int, hint: str) -> str:
        """A constant of rank 0 and of a TensorProto.DataType."""
        key = (id(scope.root), elem_type, repr(value))
        known = self._literals.get(key)
        if known is None:
            array = np.array(value, np.float64).astype(helper.tensor_dtype_to_np_dtype(elem_type))
            known = self._literals[key] = self.constant(scope, array, hint)
        return known

    def ints(self, scope: Scope, values: tuple[int, ...], hint: str) -> str:
        """A constant list of int64: axes, sizes, a shape."""
        key = (id(scope.root), TensorProto.INT64, values)
        known = self._literals.get(key)
        if known is None:
            known = self._literals[key] = self.constant(scope, np.array(values, np.int64), hint)
        return known

    def constant_node(self, scope: Scope, array: np.ndarray, hint: str) -> str:
        """A Constant node at the start of this very scope (a branch may return it)."""
        name = self.fresh(hint)
        self._add_constant_node(scope, numpy_helper.from_array(array, name))
        return name

    # -- the end

    def commit(self) -> None:
        """Put the new nodes in their places and drop the removed ones, with their declared types."""
        for key, scope in self._touched.items():
            ordered, gone = self._ordered(scope, self._order[key])
            end = len(ordered)
            position = dict(zip(map(id, ordered), range(end), strict=True)).get
            body = scope.body
            body.node.sort(key=lambda node, position=position, end=end: position(id(node), end))
            if gone:
                del body.node[end:]
            scope.nodes = ordered
            scope.drop_value_info(self._gone.pop(key, set()))
        self._touched.clear()
        self._order.clear()
        self._place.clear()
        self._removed.clear()

    # -- inside

    def _ordered(self, scope: Scope, order: dict[int, int]) -> tuple[list[NodeProto], int]:
        """The nodes in their new order, new ones merged in and removed ones left out, and how many are gone."""
        before, nodes, removed = len(order), scope.nodes, self._removed
        new = [node for node in nodes[before:] if id(node) not in removed]
        events: list[tuple[int, int, int, NodeProto | None]] = [(*self._place[id(node)], node) for node in new]
        events += [(order[key], 0, 0, None) for key in removed if key in order]
        events.sort(key=_event_place)
        ordered: list[NodeProto] = []
        done = 0
        for position, side, _, node in events:
            upto = position + (node is not None and side > 0) if position >= 0 else 0
            if upto > done:
                ordered += nodes[done:upto]
                done = upto
            if node is not None:
                ordered.append(node)
            else:
                done = max(done, position + 1)
        ordered += nodes[done:before]
        return ordered, len(nodes) - len(ordered)

    def _add_constant_node(self, root: Scope, tensor: TensorProto) -> None:
        node = root.body.node.add()
        node.op_type, node.name = "Constant", self.fresh(f"{tensor.name}_constant")
        node.output.append(tensor.name)
        attribute = node.attribute.add()
        attribute.name, attribute.type = "value", AttributeProto.TENSOR
        attribute.t.CopyFrom(tensor)
        node.metadata_props.extend(self._origin)
        root.producers[tensor.name] = node
        self._positions(root)
        self._place[id(node)] = (-1, 0, self._sequence)
        root.nodes.append(node)
        self.changes.added["Constant"] += 1

    def _put(self, node: NodeProto, place: Place) -> None:
        order = self._positions(place.scope)
        self._sequence += 1
        if place.anchor is None:
            self._place[id(node)] = (-1, 1, self._sequence)
            return
        known = order.get(id(place.anchor))
        position, side = (known, 1 if place.after else -1) if known is not None else self._place[id(place.anchor)][:2]
        self._place[id(node)] = (position, side, self._sequence)

    def _positions(self, scope: Scope) -> dict[int, int]:
        order = self._order.get(id(scope))
        if order is None:
            order = dict(zip(map(id, scope.nodes), range(len(scope.nodes)), strict=True))
            scope.kinds = None
            self._order[id(scope)] = order
            self._touched[id(scope)] = scope
        return order

    def _drop_use(self, scope: Scope, value: str, node: NodeProto) -> None:
        readers = scope.uses.get(value)
        if readers is not None:
            for i, reader in enumerate(readers):
                if reader is node:
                    del readers[i]
                    if scope.parent is not None and not scope.defines(value):
                        scope.release(value, node)
                    break


def _event_place(event: tuple[int, int, int, NodeProto | None]) -> tuple[int, int, int]:
    return event[:3]
