"""Graphs that an exporter may write and a rewrite may get wrong: same shapes, same numbers, for both guards."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from graphsurgery.api import rewrite
from graphsurgery.options import RewriteOptions

old_runtime = pytest.mark.skipif(
    tuple(int(part) for part in ort.__version__.split(".")[:2]) < (1, 30),
    reason="onnxruntime up to 1.28 does not divide tensors without elements",
)

RNG = np.random.default_rng(0)
FEED = {
    "q": RNG.standard_normal((2, 3, 4, 5)).astype(np.float32),
    "k": RNG.standard_normal((2, 3, 5, 8)).astype(np.float32),
    "v": RNG.standard_normal((2, 3, 8, 5)).astype(np.float32),
}
INPUTS = "float[2,3,4,5] q, float[2,3,5,8] k, float[2,3,8,5] v"
HIDDEN = np.zeros((4, 8), np.float32)
HIDDEN[2] = -np.inf
OPTIONS = [RewriteOptions(guard="exact"), RewriteOptions(phi="1"), RewriteOptions(phi="1", chunks=2)]


def built(
    body: str, inputs: str = INPUTS, opset: int = 17, output: str = "float[a,b,c,d] y", **constants: Any
) -> ModelProto:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g ({inputs}) => ({output}) {{ {body} }}'
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    return model


def run(model: ModelProto, feed: dict[str, Any]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


def assert_same(model: ModelProto, feed: dict[str, Any], options: RewriteOptions, status: str = "rewritten") -> None:
    result = rewrite(model, options=options)
    assert [site["status"] for site in result.report["sites"]] == [status]
    onnx.checker.check_model(result.proto, full_check=True)
    wanted, found = run(model, feed), run(result.proto, feed)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert np.isfinite(found[np.isfinite(wanted)]).all()
    np.testing.assert_allclose(found[np.isfinite(wanted)], wanted[np.isfinite(wanted)], rtol=1e-4, atol=2e-5)


SCORES = "s = MatMul(q, k)  p = Softmax<axis = -1>(s)  "
BEHIND: dict[str, tuple[str, dict[str, Any]]] = {
    "slice_turns_the_queries": (
        SCORES + "c = Slice(p, b, e, ax, st)  y = MatMul(c, v)",
        {"b": [-1], "e": [-1000], "ax": [2], "st": [-1]},
    ),
    "slice_cuts_the_queries": (SCORES + "c = Slice(p, b, e, ax)  y = MatMul(c, v)", {"b": [0], "e": [1], "ax": [2]}),
    "slice_of_the_heads": (
        SCORES + "c = Slice(p, b, e, ax)  w = Slice(v, b, e, ax)  y = MatMul(c, w)",
        {"b": [1], "e": [2], "ax": [1]},
    ),
    "quotient": (SCORES + "c = Div(p, w)  y = MatMul(c, v)", {"w": np.float32(2)}),
    "transposed_scores": (
        "a = Transpose<perm = [0, 1, 3, 2]>(k)  b = Transpose<perm = [0, 1, 3, 2]>(q)  t = MatMul(a, b)  "
        "s = Transpose<perm = [0, 1, 3, 2]>(t)  p = Softmax<axis = -1>(s)  y = MatMul(p, v)",
        {},
    ),
    "sum_of_three": ("t = MatMul(q, k)  s = Sum(m, t, n)  p = Softmax<axis = -1>(s)  y = MatMul(p, v)",
                     {"m": RNG.standard_normal((4, 8)).astype(np.float32), "n": np.float32(0.5)}),
    "einsum_with_the_values_first": (SCORES + 'y = Einsum<equation = "bhkd,bhqk->bhqd">(v, p)', {}),
    "per_head_split": (
        SCORES + "p1, p2, p3 = Split<axis = 1>(p)  v1, v2, v3 = Split<axis = 1>(v)  a = MatMul(p1, v1)  "
        "b = MatMul(p2, v2)  c = MatMul(p3, v3)  y = Concat<axis = 1>(a, b, c)",
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "clip", "chunks"])
@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_around_softmax(name: str, options: RewriteOptions) -> None:
    body, constants = BEHIND[name]
    assert_same(built(body, **constants), FEED, options)


@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "clip", "chunks"])
def test_values_of_rank_1(options: RewriteOptions) -> None:
    model = built(SCORES + "x = MatMul(p, w)  y = Unsqueeze(x, ax)", INPUTS + ", float[8] w", ax=[3])
    assert_same(model, {**FEED, "w": np.linspace(-1, 1, 8, dtype=np.float32)}, options)


def test_the_square_of_the_probabilities_is_no_attention() -> None:
    model = built(SCORES + "c = Mul(p, p)  y = MatMul(c, v)")
    result = rewrite(model, options=OPTIONS[0])
    assert result.report["sites"] == [] and not result.changed
    assert "the probabilities go into Mul (Mul)" in result.report["not_attention"][0]["reason"]
    assert result.proto.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "clip", "chunks"])
@pytest.mark.parametrize("mask", ["m = Mul(p, w)", "m = Where(c, p, z)"])
def test_a_mask_on_the_probabilities_in_front_of_a_reshape(mask: str, options: RewriteOptions) -> None:
    body = SCORES + mask + "  r = Reshape(m, sh)  u = Reshape(v, sv)  y = MatMul(r, u)"
    constants = {"w": np.linspace(0, 2, 8, dtype=np.float32), "c": np.arange(8) > 2, "z": np.float32(0)}
    model = built(body, output="float[a,b,c] y", sh=[6, 4, 8], sv=[6, 8, 5], **constants)
    assert_same(model, FEED, options)


GUARDS = {
    "not_and_swapped": "n = IsNaN(p)  w = Not(n)  g = Where(w, p, z)  y = MatMul(g, v)",
    "behind_a_cast": "n = IsNaN(p)  d = Cast<to = 11>(p)  h = Where(n, zd, d)  g = Cast<to = 1>(h)  y = MatMul(g, v)",
    "of_an_identity": "i = Identity(p)  n = IsNaN(i)  g = Where(n, z, p)  y = MatMul(g, v)",
    "behind_the_product": "x = MatMul(p, v)  n = IsNaN(x)  y = Where(n, z, x)",
}


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["exact", "clip"])
@pytest.mark.parametrize("mask", ["s = Add(t, m)", "s = Min(t, top)"])
@pytest.mark.parametrize("name", GUARDS)
def test_rows_without_keys_are_0_behind_every_spelling_of_the_guard(
    name: str, mask: str, options: RewriteOptions
) -> None:
    body = f"t = MatMul(q, k)  {mask}  p = Softmax<axis = -1>(s)  {GUARDS[name]}"
    constants = {"m": HIDDEN, "top": np.where(HIDDEN < 0, HIDDEN, 1e9), "z": np.float32(0), "zd": np.float64(0)}
    model = built(
        body, **{name: np.asarray(a, np.float64 if name == "zd" else np.float32) for name, a in constants.items()}
    )
    assert_same(model, FEED, options)


def test_an_isnan_that_does_more_than_guard_is_refused() -> None:
    body = (
        SCORES
        + "n = IsNaN(p)  g = Where(n, z, p)  x = MatMul(g, v)  f = Cast<to = 1>(n)  r = ReduceMax<axes = [-1]>(f)  "
        + "y = Add(x, r)"
    )
    model = built(body, z=np.float32(0))
    result = rewrite(model, options=OPTIONS[0])
    assert [(site["status"], site["code"]) for site in result.report["sites"]] == [("refused", "nan-observed")]
    assert not result.changed and result.proto.SerializeToString() == model.SerializeToString()


@old_runtime
@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "clip", "chunks"])
@pytest.mark.parametrize("batch", [0, 2])
def test_no_keys_and_no_batch(batch: int, options: RewriteOptions) -> None:
    inputs = "float[b,3,4,5] q, float[b,3,5,n] k, float[b,3,n,5] v"
    keys = 0 if batch else 8
    feed = {"q": np.ones((batch, 3, 4, 5)), "k": np.ones((batch, 3, 5, keys)), "v": np.ones((batch, 3, keys, 5))}
    assert_same(built(SCORES + "y = MatMul(p, v)", inputs), {n: a.astype(np.float32) for n, a in feed.items()}, options)


@old_runtime
def test_a_batch_of_0_with_chunks_of_known_size() -> None:
    inputs = "float[b,3,4,5] q, float[b,3,5,1024] k, float[b,3,1024,5] v"
    feed = {"q": np.ones((0, 3, 4, 5)), "k": np.ones((0, 3, 5, 1024)), "v": np.ones((0, 3, 1024, 5))}
    model = built(SCORES + "y = MatMul(p, v)", inputs)
    assert_same(model, {n: a.astype(np.float32) for n, a in feed.items()}, RewriteOptions(phi="1"))


@pytest.mark.parametrize("scale", [4.0, -6.0])
def test_the_narrowest_type_on_the_way_gives_the_window(scale: float) -> None:
    """float32 > float16 > float32 behind Softmax: exp(s - φ) passes through float16."""
    body = SCORES + "h = Cast<to = 10>(p)  w = Cast<to = 1>(h)  y = MatMul(w, v)"
    feed = {**FEED, "q": np.abs(FEED["q"]) * np.float32(scale), "k": np.abs(FEED["k"])}
    model = built(body)
    result = rewrite(model, data=[feed], options=RewriteOptions(otherwise="exact"))
    (site,) = result.report["sites"]
    assert site["dtype"]["executes"] == "float16"
    np.testing.assert_allclose(run(result.proto, feed), run(model, feed), atol=3e-3)


def test_branches_of_one_name_do_not_share_a_mask() -> None:
    branch = "s = MatMul(q, k)  x = Add(s, m)  p = Softmax<axis = -1>(x)  {out} = MatMul(p, v)"
    nodes = [
        f"{out} = If(c) <then_branch = t () => (float[2,3,4,5] t{i}) "
        f"{{ m = Mul(m0, m0)  {branch.format(out=f't{i}')} }}, "
        f"else_branch = e () => (float[2,3,4,5] e{i}) {{ e{i} = Identity(v0) }}>"
        for i, out in enumerate(("a", "b"))
    ]
    model = built(f"v0 = Identity(q)  {nodes[0]}  {nodes[1]}  y = Add(a, b)", INPUTS + ", bool c, float[4,8] m0")
    model.graph.node[1].name = "If_2"
    result = rewrite(model, options=RewriteOptions(phi="2"))
    assert len({site["scope"] for site in result.report["sites"]}) == result.rewritten == 2
    feed = {**FEED, "c": np.array(True), "m0": np.ones((4, 8), np.float32)}
    np.testing.assert_allclose(run(result.proto, feed), run(model, feed), rtol=1e-4, atol=2e-5)


def test_a_row_maximum_in_an_outer_scope_stays() -> None:
    body = """s = MatMul(q, k)  t = ReduceMax<axes = [-1]>(s)  d = Sub(s, t)
      a = If(c) <then_branch = yes () => (float[2,3,4,5] r) { p = Softmax<axis = -1>(d)  r = MatMul(p, v) },
                 else_branch = no () => (float[2,3,4,5] e) { e = Identity(q) }>
      x = ReduceSum<keepdims = 1>(d, ax)  y = Add(a, x)"""
    assert_same(built(body, INPUTS + ", bool c", ax=[-1]), {**FEED, "c": np.array(True)}, OPTIONS[0])


def test_new_names_avoid_declared_names_and_annotations_of_renamed_values_go() -> None:
    model = built(
        "s = MatMul(q, k)  x = Add(s, m)  p = Softmax<axis = -1>(x)  y = MatMul(p, v)", INPUTS + ", float[4,8] m"
    )
    model.graph.node[2].name = "Softmax"
    model.graph.value_info.append(helper.make_tensor_value_info("Softmax_exp", TensorProto.INT64, [1]))
    model.graph.quantization_annotation.add().tensor_name = "x"
    model.graph.quantization_annotation.add().tensor_name = "s"
    result = rewrite(model, options=RewriteOptions(phi="2"))
    feed = {**FEED, "m": np.zeros((4, 8), np.float32)}
    np.testing.assert_allclose(run(result.proto, feed), run(model, feed), rtol=1e-4, atol=2e-5)
    assert [note.tensor_name for note in result.proto.graph.quantization_annotation] == ["s"]


@pytest.mark.parametrize("opset", [9, 10, 11])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=["exact", "clip"])
def test_double_precision_before_clip_knew_it(opset: int, options: RewriteOptions) -> None:
    inputs = INPUTS.replace("float", "double")
    model = built("s = MatMul(q, k)  p = Softmax<axis = 3>(s)  y = MatMul(p, v)", inputs, opset, "double[2,3,4,5] y")
    assert_same(model, {name: array.astype(np.float64) for name, array in FEED.items()}, options)


@pytest.mark.parametrize("fill", [-2e7, -1e9])
def test_rows_hidden_by_a_number_in_which_scores_survive_are_left(fill: float) -> None:
    model = built(
        "t = MatMul(q, k)  s = Add(t, m)  p = Softmax<axis = -1>(s)  y = MatMul(p, v)",
        m=np.where(HIDDEN < 0, fill, 0).astype(np.float32),
    )
    (site,) = rewrite(model, data=[FEED]).report["sites"]
    assert (site["status"], site["code"]) == ("left", "hidden-rows")
    (site,) = rewrite(model, data=[FEED], options=RewriteOptions(otherwise="exact")).report["sites"]
    assert (site["status"], site["guard"]) == ("rewritten", "exact")


def test_a_low_row_of_a_site_without_mask_is_no_hidden_row() -> None:
    feed = {**FEED, "q": FEED["q"] * np.float32(0) - np.float32(1e4), "k": np.abs(FEED["k"]) + 1}
    (site,) = rewrite(built(SCORES + "y = MatMul(p, v)"), data=[feed]).report["sites"]
    assert site["row_max"] is not None and site["row_max"][1] < -9000


def test_rows_with_an_infinite_score_say_nothing() -> None:
    feed = {**FEED, "m": np.zeros((4, 8), np.float32)}
    model = built(
        "t = MatMul(q, k)  s = Mul(t, m)  p = Softmax<axis = -1>(s)  y = MatMul(p, v)", INPUTS + ", float[4,8] m"
    )
    feed["m"][0] = 3e38
    result = rewrite(model, data=[feed])
    (site,) = result.report["sites"]
    assert site["status"] == "rewritten" and np.isfinite(site["row_max"]).all()


@pytest.mark.parametrize("name", ["no_input", "one_factor", "cast_to_99", "permutation", "ranks"])
def test_malformed_models_are_refused_in_one_line(name: str) -> None:
    from graphsurgery.errors import UsageError

    bodies = {
        "no_input": "s = MatMul(q, k)  p = Softmax()  y = MatMul(p, v)",
        "one_factor": "s = MatMul(q)  p = Softmax<axis = -1>(s)  y = MatMul(p, v)",
        "cast_to_99": "s = MatMul(q, k)  c = Cast<to = 99>(s)  p = Softmax<axis = -1>(c)  y = MatMul(p, v)",
        "permutation": "t = Transpose<perm = [0, 1, 2, 7]>(k)  s = MatMul(q, t)  p = Softmax(s)  y = MatMul(p, v)",
        "ranks": "t = Concat<axis = -1>(k, w)  s = MatMul(q, t)  p = Softmax<axis = 3>(s)  y = MatMul(p, v)",
    }
    with pytest.raises(UsageError, match="is not a valid ONNX model") as caught:
        rewrite(built(bodies[name], w=np.ones(3, np.float32)), options=OPTIONS[0])
    assert "\n" not in str(caught.value)
