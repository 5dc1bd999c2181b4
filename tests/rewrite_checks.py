"""What every rewritten attention has to satisfy, one named check for each promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto

from graphsurgery.api import RewriteResult, rewrite
from graphsurgery.attention import Site, find_attention
from graphsurgery.engines.onnxruntime import OnnxRuntime
from graphsurgery.model.index import ModelIndex
from graphsurgery.options import RewriteOptions
from graphsurgery.verification.tolerance import TOLERANCES

__all__ = [
    "check_answer",
    "check_finite",
    "check_interface",
    "check_new_nodes",
    "check_products",
    "check_second_run",
    "check_untouched",
    "check_valid",
    "run",
]

Arrays = Mapping[str, np.ndarray]

PRODUCTS = ("MatMul", "Einsum", "Gemm")
ALLOWED = frozenset(
    "Add Cast Clip Concat Constant Div Exp Less Max Mul ReduceMax ReduceMean ReduceSum Reshape Split Sub Transpose "
    "Where".split()
)
PASS_KEY, SITE_KEY = "graphsurgery.pass", "graphsurgery.site"


def run(model: ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    """All outputs on onnxruntime without optimisations."""
    return OnnxRuntime(threads=1).open(model.SerializeToString()).run(feeds)


# -- the answer


def check_answer(found: Arrays, expected: Arrays, dtype: str) -> None:
    """Names, shapes, finiteness, then the table of the dtype; where NaN is expected, any finite number is right."""
    assert list(found) == list(expected)
    relative, absolute = TOLERANCES[dtype]
    for name, wanted in expected.items():
        got = found[name].astype(np.float64)
        assert got.shape == wanted.shape, f"shape of {name}"
        assert np.isfinite(got).all(), f"{name} is not finite"
        judged = ~np.isnan(wanted)
        np.testing.assert_allclose(got[judged], wanted[judged], rtol=relative, atol=absolute, err_msg=name)


def check_finite(found: Arrays, original: Arrays) -> None:
    """Finite wherever the original is."""
    assert list(found) == list(original)
    for name, before in original.items():
        lost = np.isfinite(before) & ~np.isfinite(found[name])
        assert not lost.any(), f"{name}: {int(lost.sum())} of {lost.size} entries are no longer finite"


# -- the graph


def check_valid(model: ModelProto) -> None:
    """The checker of onnx with shape inference, and no operand that nothing produces."""
    onnx.checker.check_model(model, full_check=True)
    for function in model.functions:
        _check_reads(function.node, set(function.input))
    _check_reads(model.graph.node, _given(model.graph))


def check_interface(before: ModelProto, after: ModelProto) -> None:
    """Everything of the file but nodes, constants and inner types is equal, byte by byte."""
    shells = [_shell(before), _shell(after)]
    assert shells[0] == shells[1]
    kept = {tensor.name: tensor.SerializeToString() for tensor in after.graph.initializer}
    missing = [tensor.name for tensor in before.graph.initializer if tensor.name not in kept]
    assert len(missing) <= 1, f"constants {missing} are gone, a guard has one"
    for tensor in before.graph.initializer:
        assert tensor.name in missing or kept[tensor.name] == tensor.SerializeToString(), tensor.name
    types = {info.name: info.SerializeToString() for info in before.graph.value_info}
    for info in after.graph.value_info:
        assert types[info.name] == info.SerializeToString(), info.name


def check_products(before: ModelProto, after: ModelProto) -> None:
    """Products keep name, type, attributes, operands and order, but for the tensors from the weights on."""
    sites = find_attention(ModelIndex(before)).sites
    values = {site.pv.name: list(site.pv.input).index(_weights(site)) for site in sites}
    pairs = list(zip(_products(before), _products(after), strict=True))
    assert pairs
    for old, new in pairs:
        if old.name not in values:
            assert old.SerializeToString() == new.SerializeToString(), old.name
            continue
        _check_same_but_names(old, new)
        for position, (was, now) in enumerate(zip(old.input, new.input, strict=True)):
            assert position == values[old.name] or was == now, f"operand {position} of {old.name}"


def check_untouched(before: ModelProto, after: ModelProto) -> None:
    """Nodes outside the chain are byte-equal and in their order; of the chain only what serves Softmax goes."""
    sites = find_attention(ModelIndex(before)).sites
    chain = {node.name for site in sites for node in _chain(site)}
    leaving = {name for site in sites for name in _may_leave(site)}
    new = {node.name: node for node in all_nodes(after)}
    for old in all_nodes(before):
        now = new.get(old.name)
        if now is None:
            assert old.name in leaving, f"{old.name} is gone"
        elif old.name in chain:
            _check_same_but_names(old, now)
        elif old.op_type == "If":
            assert (old.input, old.output) == (now.input, now.output)
        else:
            assert old.SerializeToString() == now.SerializeToString(), old.name
    kept = [node.name for node in all_nodes(after) if _origin(node) is None]
    assert kept == [node.name for node in all_nodes(before) if node.name in set(kept)], "the order changed"


def check_new_nodes(before: ModelProto, after: ModelProto, site: str) -> None:
    """New nodes have unique names, say where they come from, and are standard operators of the allowed kinds."""
    names = [node.name for node in all_nodes(after)]
    assert len(set(names)) == len(names)
    known = {node.name for node in all_nodes(before)}
    new = [node for node in all_nodes(after) if node.name not in known]
    assert new
    for node in new:
        assert node.name
        assert node.op_type in ALLOWED, node.op_type
        assert node.domain in ("", "ai.onnx")
        assert _origin(node) == {PASS_KEY: "unified_max", SITE_KEY: site}


def check_second_run(result: RewriteResult, feeds: Arrays, options: RewriteOptions) -> None:
    """The rewritten model has no site, and a second run gives its very bytes."""
    again = rewrite(result.model, data=[feeds], options=options)
    assert not again.changed
    assert again.report["sites"] == []
    assert again.model.SerializeToString() == result.model.SerializeToString()


# -- inside


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Every node, those of branches and functions too."""
    yield from _graph_nodes(model.graph.node)
    for function in model.functions:
        yield from _graph_nodes(function.node)


def _graph_nodes(nodes: object) -> Iterator[NodeProto]:
    for node in nodes:  # type: ignore[attr-defined]
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graph_nodes(attribute.g.node)


def _products(model: ModelProto) -> list[NodeProto]:
    return [node for node in all_nodes(model) if node.op_type in PRODUCTS]


def _weights(site: Site) -> str:
    return site.after[-1].node.output[0] if site.after else site.softmax.output[0]


def _chain(site: Site) -> list[NodeProto]:
    return [*(link.node for link in site.before), site.softmax, *(link.node for link in site.after), site.pv]


def _may_leave(site: Site) -> set[str]:
    """Softmax, a subtraction of the row maximum, and an IsNaN guard with its 0."""
    leaving = {site.softmax.name}
    for link in (*site.before, *site.after):
        if link.kind in ("row-max", "guard"):
            producers = [site.scope.producer(name) for name in link.node.input]
            helpers = [node for node in producers if node is not None]
            kinds = ("ReduceMax", "IsNaN", "Constant")
            leaving |= {link.node.name, *(node.name for node in helpers if node.op_type in kinds)}
    return leaving


def _check_same_but_names(old: NodeProto, new: NodeProto) -> None:
    first, second = NodeProto(), NodeProto()
    first.CopyFrom(old)
    second.CopyFrom(new)
    for node in (first, second):
        node.input[:] = ["."] * len(node.input)
        node.output[:] = ["."] * len(node.output)
    assert first.SerializeToString() == second.SerializeToString(), old.name


def _origin(node: NodeProto) -> dict[str, str] | None:
    return {entry.key: entry.value for entry in node.metadata_props} or None


def _shell(model: ModelProto) -> bytes:
    shell = ModelProto()
    shell.CopyFrom(model)
    for field in ("node", "initializer", "value_info"):
        shell.graph.ClearField(field)
    for function in shell.functions:
        function.ClearField("node")
    return shell.SerializeToString(deterministic=True)


def _given(graph: GraphProto) -> set[str]:
    return {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}


def _check_reads(nodes: object, known: set[str]) -> None:
    known = {"", *known}
    for node in nodes:  # type: ignore[attr-defined]
        missing = [name for name in node.input if name not in known]
        assert not missing, f"{node.name} reads {missing}, which nothing above it produces"
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _check_reads(attribute.g.node, known | _given(attribute.g))
        known.update(node.output)
