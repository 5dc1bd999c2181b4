from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, parser

from graphsurgery.model.expose import NotExposableError, cut_to_outputs, expose
from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import Rewriter

HEADER = '<ir_version: 10, opset_import: ["" : 17, "local" : 1]>\n'
ORT: Any = onnxruntime
X = np.array([1.0, -2.0], np.float32)


def model(text: str) -> ModelProto:
    return parser.parse_model(HEADER + text)


def led_out(proto: ModelProto, *values: tuple[str, str]) -> list[list[str]]:
    """Lead (scope, value) out of the model and keep nothing else."""
    index = ModelIndex(proto)
    rewriter = Rewriter(index)
    scopes = {scope.id: scope for scope in index.scopes}
    found = [expose(index, rewriter, scopes[scope], name, TensorProto.FLOAT) for scope, name in values]
    rewriter.commit()
    cut_to_outputs(proto, [name for names in found for name in names])
    return found


def run(proto: ModelProto, **feed: Any) -> dict[str, np.ndarray]:
    options = ORT.SessionOptions()
    options.graph_optimization_level = ORT.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ORT.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    feed = {name: np.asarray(value) for name, value in feed.items()}
    return dict(zip(names, session.run(None, feed), strict=True))


CHAIN = """agraph (float[2] x, float[2] w, float[2] left) => (float[2] y, float[2] z)
<float[2] w = {1, 1}, float[2] u = {2, 2}, float[2] v = {3, 3}> {
  a = Add(x, w)
  b = Mul(a, u)
  y = Mul(b, v)
  z = Neg(left)
}"""


def test_a_value_of_the_main_graph_becomes_an_output() -> None:
    proto = model(CHAIN)
    assert led_out(proto, ("main", "b")) == [["b"]]
    assert [value.name for value in proto.graph.output] == ["b"]
    assert [node.output[0] for node in proto.graph.node] == ["a", "b"]
    np.testing.assert_array_equal(run(proto, x=X, left=X)["b"], (X + 1) * 2)


def test_an_output_is_not_led_out_twice() -> None:
    proto = model(CHAIN)
    assert led_out(proto, ("main", "y"), ("main", "b"), ("main", "b")) == [["y"], ["b"], ["b"]]
    assert [value.name for value in proto.graph.output] == ["y", "b"]


def test_cutting_keeps_inputs_and_what_a_caller_can_override() -> None:
    proto = model(CHAIN)
    cut_to_outputs(proto, ["z"])
    assert [value.name for value in proto.graph.input] == ["x", "w", "left"]
    assert [tensor.name for tensor in proto.graph.initializer] == ["w"], "the default of an input, not of a weight"
    assert [node.op_type for node in proto.graph.node] == ["Neg"]
    assert list(run(proto, x=X, left=X)) == ["z"]
    np.testing.assert_array_equal(run(proto, x=X, left=X, w=X)["z"], -X)


def test_cutting_to_nothing_leaves_nothing() -> None:
    proto = model(CHAIN)
    cut_to_outputs(proto, [])
    assert (len(proto.graph.node), len(proto.graph.output)) == (0, 0)


def test_cutting_to_all_outputs_changes_nothing() -> None:
    proto = model(CHAIN)
    before = proto.SerializeToString()
    cut_to_outputs(proto, ["y", "z"])
    assert proto.SerializeToString() == before


def test_cutting_keeps_what_a_branch_returns_from_outside() -> None:
    proto = model("""agraph (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 1}, float[2] u = {2, 2}> {
      a = Relu(x)
      b = Neg(x)
      y = If(c) <then_branch = yes () => (float[2] a) { }, else_branch = no () => (float[2] w) { }>
    }""")
    cut_to_outputs(proto, ["y"])
    assert [node.op_type for node in proto.graph.node] == ["Relu", "If"]
    assert [tensor.name for tensor in proto.graph.initializer] == ["w"]


BRANCH = """agraph (bool c, float[2] x) => (float[2] y) <float[2] u = {2, 2}> {
  outer = Abs(x)
  never = Exp(x)
  y = If(c) <then_branch = yes () => (float[2] t) { inside = Mul(outer, u)  t = Neg(inside) },
             else_branch = no () => (float[2] e) { e = Identity(x) }>
}"""


@pytest.mark.parametrize(("taken", "expected"), [(True, np.abs(X) * 2), (False, np.zeros(0, np.float32))])
def test_a_value_of_a_branch_is_empty_where_the_branch_is_not_taken(taken: bool, expected: np.ndarray) -> None:
    proto = model(BRANCH)
    ((name,),) = led_out(proto, ("main/If_2.then_branch", "inside"))
    assert [node.op_type for node in proto.graph.node] == ["Abs", "If"], "what a branch captures stays"
    found = run(proto, c=taken, x=X)
    assert list(found) == [name] and found[name].dtype == np.float32
    np.testing.assert_array_equal(found[name], expected)


def test_values_of_both_branches() -> None:
    proto = model(BRANCH)
    names = led_out(proto, ("main/If_2.then_branch", "inside"), ("main/If_2.else_branch", "e"))
    for taken, sizes in ((True, [2, 0]), (False, [0, 2])):
        found = run(proto, c=taken, x=X)
        assert [found[name].size for (name,) in names] == sizes


LOOP = """agraph (int64 n, float[2] x) => (float[2] y) {
  outer = Abs(x)
  go = Constant<value = bool {1}>()
  y = Loop(n, go, x) <body = b (int64 i, bool on, float[2] s) => (bool keep, float[2] next) {
    keep = Identity(on)
    inside = Mul(s, s)
    next = Add(inside, outer)
  }>
}"""


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_value_of_a_loop_has_an_axis_of_iterations(count: int) -> None:
    proto = model(LOOP)
    ((name,),) = led_out(proto, ("main/Loop_2.body", "inside"))
    found = run(proto, n=np.array(count), x=X)[name]
    state, expected = X, []
    for _ in range(count):
        expected.append(state * state)
        state = expected[-1] + np.abs(X)
    assert found.size == 2 * count
    np.testing.assert_array_equal(found.reshape(-1, 2), np.array(expected, np.float32).reshape(-1, 2))


SCAN = """agraph (float[2] x, float[3, 2] rows) => (float[2] y, float[3, 2] all) {
  y, all = Scan<num_scan_inputs = 1>(x, rows)
    <body = b (float[2] s, float[2] row) => (float[2] next, float[2] out) {
      inside = Mul(row, row)
      next = Add(s, inside)
      out = Neg(next)
    }>
}""".replace("Scan<num_scan_inputs = 1>(x, rows)\n    <body", "Scan(x, rows) <num_scan_inputs = 1, body")


def test_a_value_of_a_scan() -> None:
    proto = model(SCAN)
    ((name,),) = led_out(proto, ("main/Scan_0.body", "inside"))
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(run(proto, x=X, rows=rows)[name], rows * rows)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (SCAN.replace("num_scan_inputs = 1,", "num_scan_inputs = 1, scan_output_axes = [1],"), "main/Scan_0.body"),
        (
            """agraph (seq(float[2]) x) => (seq(float[2]) y) {
              y = SequenceMap(x) <body = b (float[2] s) => (float[2] out) { inside = Neg(s)  out = Neg(inside) }>
            }""",
            "main/SequenceMap_0.body",
        ),
    ],
    ids=["scan_with_axes", "sequence_map"],
)
def test_what_cannot_be_led_out_is_named(text: str, where: str) -> None:
    proto = model(text)
    before = proto.SerializeToString()
    with pytest.raises(NotExposableError, match=r"(Scan|SequenceMap).* does not let values of its body out"):
        index = ModelIndex(proto)
        expose(index, Rewriter(index), next(s for s in index.scopes if s.id == where), "inside", TensorProto.FLOAT)
    assert proto.SerializeToString() == before


FUNCTION = """agraph (bool c, float[2] x) => (float[2] y) {
  [one] a = local.f(c, x)
  [two] b = local.f(c, a)
  y = Neg(b)
}
<domain: "local", opset_import: ["" : 17]>
f (c, p) => (q, unused) { inside = Mul(p, p)  more = Abs(inside)  unused = Neg(p)  q = Add(inside, p) }
"""


def test_a_value_of_a_function_is_led_out_of_every_call() -> None:
    proto = model(FUNCTION)
    (names,) = led_out(proto, ("f", "inside"))
    assert len(names) == len(set(names)) == 2
    assert [len(node.output) for node in proto.graph.node] == [3, 3], "the output a call leaves out gets a name"
    found = run(proto, c=True, x=X)
    np.testing.assert_array_equal(found[names[0]], X * X)
    np.testing.assert_array_equal(found[names[1]], (X * X + X) ** 2)


def test_two_values_of_a_function() -> None:
    proto = model(FUNCTION)
    first, second = led_out(proto, ("f", "inside"), ("f", "more"))
    found = run(proto, c=True, x=X)
    np.testing.assert_array_equal(found[first[1]], (X * X + X) ** 2)
    np.testing.assert_array_equal(found[second[0]], X * X)


def test_an_output_of_a_function_is_not_led_out_twice() -> None:
    proto = model(FUNCTION)
    led_out(proto, ("f", "q"))
    outputs = list(proto.functions[0].output)
    assert len(set(outputs)) == len(outputs)


NESTED = """agraph (bool c, float[2] x) => (float[2] y) {
  y = If(c) <then_branch = yes () => (float[2] t) { [call] t = local.g(c, x) },
             else_branch = no () => (float[2] e) { [other] e = local.f(c, x) }>
}
<domain: "local", opset_import: ["" : 17, "local" : 1]>
g (c, p) => (q) { h = local.f(c, p)  q = local.f(c, h) }
<domain: "local", opset_import: ["" : 17]>
f (c, p) => (q) {
  q = If(c) <then_branch = yes () => (float[2] t) { inside = Mul(p, p)  t = Neg(inside) },
             else_branch = no () => (float[2] e) { e = Identity(p) }>
}
"""


def test_a_branch_in_a_function_that_functions_in_branches_call() -> None:
    proto = model(NESTED)
    (names,) = led_out(proto, ("f/If_0.then_branch", "inside"))
    assert len(set(names)) == len(names) == 3
    found = run(proto, c=True, x=X)
    values = sorted(tuple(found[name].tolist()) for name in names)
    assert values == sorted([(), tuple((X**2).tolist()), tuple((X**4).tolist())])
    assert all(run(proto, c=False, x=X)[name].size == 0 for name in names)


def test_a_branch_in_a_loop_is_refused() -> None:
    text = LOOP.replace(
        "next = Add(inside, outer)",
        """one = Constant<value = int64 {1}>()
    first = Less(i, one)
    next = If(first) <then_branch = yes () => (float[2] t) { deep = Neg(inside)  t = Neg(deep) },
                      else_branch = no () => (float[2] e) { e = Identity(outer) }>""",
    )
    proto = model(text)
    with pytest.raises(NotExposableError, match=r"\(If\) stands in a Loop or Scan"):
        led_out(proto, ("main/Loop_2.body/If_4.then_branch", "deep"))
