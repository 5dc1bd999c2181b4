"""Makes values of any scope outputs of the main graph, and cuts a model down to what some outputs need.

A value inside a function becomes one more output of the function and of each call; inside a branch of If one more
output of the If, with an empty tensor from the other branch; inside a Loop or Scan body one more scan output.
"""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from graphsurgery.model.index import ModelIndex, Scope
from graphsurgery.model.rewriter import Rewriter

__all__ = ["NotExposableError", "cut_to_outputs", "expose"]


class NotExposableError(Exception):
    """The value stands in a scope whose values cannot be led out; the message names the node."""


def expose(index: ModelIndex, rewriter: Rewriter, scope: Scope, name: str, elem_type: int) -> list[str]:
    """Lead a value out to the main graph; returns the names of the new graph outputs, one for each call.

    The shapes may gain leading axes: one for each Loop or Scan around the value.
    """
    if scope.kind == "main":
        if name not in scope.outputs:
            rewriter.add_graph_output(scope, name, elem_type)
        return [name]
    if scope.kind == "function":
        return _through_calls(index, rewriter, scope, name, elem_type)
    outer, node = _owner(scope)
    if node.op_type == "If":
        _prepare_branches(index, rewriter, outer, node, scope, elem_type)
    elif node.op_type not in ("Loop", "Scan") or any(a.name.startswith("scan_output_") for a in node.attribute):
        raise NotExposableError(f"{node.name or node.op_type} ({node.op_type}) does not let values of its body out")
    rewriter.add_graph_output(scope, name, elem_type)
    return expose(index, rewriter, outer, rewriter.add_output(outer, node, f"{name}_seen"), elem_type)


def _through_calls(index: ModelIndex, rewriter: Rewriter, scope: Scope, name: str, elem_type: int) -> list[str]:
    known = list(scope.body.output)
    if name not in scope.outputs:
        rewriter.add_graph_output(scope, name, elem_type)
        known.append(name)
    found: list[str] = []
    for caller, node in index.calls(scope):
        found += expose(index, rewriter, caller, _output(caller, node, known.index(name), rewriter), elem_type)
    return found


def _prepare_branches(
    index: ModelIndex, rewriter: Rewriter, outer: Scope, node: NodeProto, scope: Scope, elem_type: int
) -> None:
    """Give the other branch an output that stands for a value that was not computed."""
    if _collected(index, outer):
        label = node.name or node.op_type
        raise NotExposableError(f"{label} (If) stands in a Loop or Scan, which collects values of one shape only")
    for sibling in outer.children:
        if sibling is not scope and _owner(sibling)[1] is node:
            _add_empty(rewriter, sibling, elem_type)


def _collected(index: ModelIndex, scope: Scope) -> bool:
    """Whether a Loop or Scan stands around the scope, also around a call of the function it is part of."""
    while scope.kind == "subgraph":
        outer, node = _owner(scope)
        if node.op_type != "If":
            return True
        scope = outer
    return scope.kind == "function" and any(_collected(index, caller) for caller, _ in index.calls(scope))


def _output(scope: Scope, node: NodeProto, position: int, rewriter: Rewriter) -> str:
    """The name of one output of a call; an output that the call leaves out gets one."""
    while len(node.output) <= position:
        rewriter.add_output(scope, node, "seen")
    if not node.output[position]:
        node.output[position] = rewriter.fresh("seen")
        scope.producers[node.output[position]] = node
    return node.output[position]


def _owner(scope: Scope) -> tuple[Scope, NodeProto]:
    """The node whose attribute is the scope's graph."""
    outer = scope.parent
    if outer is None:
        raise ValueError(f"{scope.id} is not nested")
    for node in outer.nodes:
        for attribute in node.attribute:
            if any(graph is scope.body for graph in (attribute.g, *attribute.graphs)):
                return outer, node
    raise ValueError(f"no node of {outer.id} holds {scope.id}")


def _add_empty(rewriter: Rewriter, scope: Scope, elem_type: int) -> None:
    empty = rewriter.constant_node(scope, np.zeros((0,), helper.tensor_dtype_to_np_dtype(elem_type)), "not_seen")
    rewriter.add_graph_output(scope, empty, elem_type)


def cut_to_outputs(model: ModelProto, outputs: list[str]) -> None:
    """Keep only the nodes and initializers of the main graph that these outputs need."""
    graph = model.graph
    nodes = list(graph.node)  # held, so that the identity of a node stays its own
    producers = {name: node for node in nodes for name in node.output if name}
    needed: set[str] = set()
    waiting = list(outputs)
    kept: set[int] = set()
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        node = producers.get(name)
        if node is not None and id(node) not in kept:
            kept.add(id(node))
            waiting += _reads(node)
    wanted = set(outputs)
    needed.update(value.name for value in graph.input)  # the default of an input that may be left out
    for i in reversed([i for i, value in enumerate(graph.output) if value.name not in wanted]):
        del graph.output[i]
    for i in reversed([i for i, node in enumerate(nodes) if id(node) not in kept]):
        del graph.node[i]
    for i in reversed([i for i, tensor in enumerate(graph.initializer) if tensor.name not in needed]):
        del graph.initializer[i]


def _reads(node: NodeProto) -> list[str]:
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            names += _graph_reads(graph)
    return names


def _graph_reads(graph: GraphProto) -> list[str]:
    return [name for node in graph.node for name in _reads(node)] + [value.name for value in graph.output]
