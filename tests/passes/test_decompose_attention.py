"""The operator's own test cases are the oracle: every fused node must keep its outputs when it becomes a chain."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator

from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import PASS_KEY, SITE_KEY, Rewriter
from graphsurgery.passes import PassResult
from graphsurgery.passes.decompose_attention import DecomposeAttention

Values = dict[str, np.ndarray]

# largest absolute difference, from one rounding of results of magnitude 1 to 2 and of the scaled query
ATOL = {"float64": 1e-12, "float32": 5e-7, "float16": 2e-3, "bfloat16": 1.6e-2}
CASES_IN_ONNX = 93


@functools.cache
def node_cases() -> dict[str, tuple[ModelProto, Values, Values]]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # the generators of other operators divide by zero on purpose
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    cases: dict[str, tuple[ModelProto, Values, Values]] = {}
    for case in found:
        if case.name.startswith("test_attention") and "_expanded" not in case.name:
            model, (inputs, outputs) = case.model, case.data_sets[0]
            feed = dict(zip([v.name for v in model.graph.input], inputs, strict=True))
            want = dict(zip([v.name for v in model.graph.output], outputs, strict=True))
            cases[case.name.removeprefix("test_attention_")] = (model, feed, want)
    return cases


def decompose(model: ModelProto) -> tuple[ModelProto, PassResult]:
    copy = ModelProto()
    copy.CopyFrom(model)
    index = ModelIndex(copy)
    result = DecomposeAttention().apply(index, Rewriter(index))
    assert index.node_counts() == ModelIndex(copy).node_counts()
    return copy, result


def reference(model: ModelProto, feed: Mapping[str, np.ndarray]) -> Values:
    with np.errstate(invalid="ignore"):
        # a row of -inf gives NaN in its Softmax until the guard
        values = ReferenceEvaluator(model).run(None, dict(feed))
    return dict(zip([value.name for value in model.graph.output], values, strict=True))


def run(model: ModelProto, feed: Mapping[str, np.ndarray]) -> Values:
    names = [value.name for value in model.graph.output]
    if any(value.type.tensor_type.elem_type == TensorProto.BFLOAT16 for value in model.graph.input):
        # onnxruntime has no bfloat16 Mul and Where on the CPU
        return reference(model, feed)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, dict(feed)), strict=True))


def assert_same(got: Values, want: Values) -> None:
    assert list(got) == list(want)
    for name, expected in want.items():
        actual = got[name]
        assert (name, actual.shape, actual.dtype) == (name, expected.shape, expected.dtype)
        wide, reference = actual.astype(np.float64), expected.astype(np.float64)
        assert np.array_equal(np.isneginf(wide), np.isneginf(reference)), name
        finite = np.isfinite(reference)
        assert np.isfinite(wide[finite]).all(), name
        np.testing.assert_allclose(
            wide[finite], reference[finite], rtol=0, atol=ATOL[expected.dtype.name], err_msg=name
        )


def without_sizes(model: ModelProto, keep_rank: bool) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    for value in [*copy.graph.input, *copy.graph.output]:
        if not keep_rank:
            value.type.tensor_type.ClearField("shape")
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return copy


def operators(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def node(model: ModelProto, name: str) -> NodeProto:
    return next(entry for entry in model.graph.node if entry.name == name)


# -- the operator's test cases


def test_every_case_of_onnx_keeps_its_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    right: list[str] = []
    refused: dict[str, str] = {}
    for name, (model, feed, want) in node_cases().items():
        new, result = decompose(model)
        if not result.changed:
            refused[name] = result.skipped[0][1]
            continue
        assert "Attention" not in operators(new)
        onnx.checker.check_model(new, full_check=True)
        assert_same(run(new, feed), want)
        right.append(name)
    with capsys.disabled():
        sys.stdout.write(
            f"\ndecomposed and equal: {len(right)} of {len(node_cases())} cases of onnx {onnx.__version__}\n"
        )
    assert refused == {}
    assert len(right) >= CASES_IN_ONNX


def test_every_case_without_sizes_keeps_its_outputs() -> None:
    for model, feed, want in node_cases().values():
        new, result = decompose(without_sizes(model, keep_rank=True))
        assert result.changed == 1
        onnx.checker.check_model(new, full_check=True)
        assert_same(run(new, feed), want)


def test_without_any_shape_only_nodes_with_head_counts_are_skipped() -> None:
    for name, (model, feed, want) in node_cases().items():
        new, result = decompose(without_sizes(model, keep_rank=False))
        if name.startswith("3d"):
            assert [reason for _, reason in result.skipped] == ["input Q: rank unknown"], name
        else:
            assert result.changed == 1, name
            assert_same(run(new, feed), want)


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("4d", "Transpose Mul MatMul Softmax MatMul"),
        ("4d_softcap", "Transpose Mul MatMul Div Tanh Mul Softmax MatMul"),
        ("4d_causal", "Transpose Mul MatMul Add Softmax MatMul"),
        ("4d_attn_mask_bool", "Transpose Where Mul MatMul Add Softmax IsNaN Where MatMul"),
        ("3d_local_window", "Reshape Transpose Reshape Transpose Expand Transpose Reshape Transpose Mul MatMul Add "
         "Softmax Expand MatMul Transpose Reshape"),
    ],
)  # fmt: skip
def test_the_chain_is_the_standard_one(name: str, chain: str) -> None:
    assert operators(decompose(node_cases()[name][0])[0]) == chain.split()


def test_no_value_has_more_than_four_dimensions() -> None:
    for name, (model, _, _) in node_cases().items():
        inferred = onnx.shape_inference.infer_shapes(decompose(model)[0], strict_mode=True)
        ranks = {len(info.type.tensor_type.shape.dim) for info in inferred.graph.value_info}
        assert max(ranks) == 4, name


def test_the_scale_stands_on_the_query_alone() -> None:
    new, _ = decompose(named("q = Identity (q0) y = Attention (q, k, v)", lengths=("S", "K", "4")))
    scale = node(new, "y_attention_scale")
    assert scale.input[0] == "q"
    assert node(new, "y_attention_qk").input[0] == scale.output[0]
    (factor,) = [t for t in new.graph.initializer if t.name == scale.input[1]]
    assert onnx.numpy_helper.to_array(factor) == np.float32(1 / np.sqrt(8))
    assert [n.op_type for n in new.graph.node if n.name.startswith("y_attention_key")] == ["Transpose"]


# -- own models


def named(
    body: str,
    mask: str = "",
    opset: int = 23,
    lengths: tuple[str, str, str] = ("S", "K", "H"),
    extra: str = "",
    outputs: str = "float[B, 4, S, 8] y",
) -> ModelProto:
    s, k, h = lengths
    inputs = f"float[B, 4, {s}, 8] q0, float[B, {h}, {k}, 8] k, float[B, {h}, {k}, 8] v"
    text = f'<ir_version: 10, opset_import: ["" : {opset}, "local" : 1, "com.microsoft" : 1]>'
    return parser.parse_model(
        f"{text} agraph ({inputs}{', ' + mask if mask else ''}) => ({outputs}) {{{body}}} {extra}"
    )


def feeds(batch: int = 2, queries: int = 5, keys: int = 7, kv_heads: int = 4, **more: np.ndarray) -> Values:
    rng = np.random.default_rng(7)
    q = rng.normal(size=(batch, 4, queries, 8)).astype(np.float32)
    k, v = (rng.normal(size=(batch, kv_heads, keys, 8)).astype(np.float32) for _ in range(2))
    return {"q0": q, "k": k, "v": v, **more}


def visible(*shape: int) -> np.ndarray:
    mask = np.random.default_rng(3).random(shape) < 0.6
    mask[..., 0, :] = False
    return mask


def test_two_nodes_share_the_bias_of_one_mask() -> None:
    body = (
        "a = Attention (q0, k, v, m) y = Attention <is_causal = 1> (a, k, v, m)"
        "z = Attention <is_causal = 1> (y, k, v, m)"
    )
    model = named(body, "bool[B, 1, S, K] m", outputs="float[B, 4, S, 8] y, float[B, 4, S, 8] z")
    new, result = decompose(model)
    assert result.changed == 3
    biases = [entry for entry in new.graph.node if entry.op_type == "Where" and entry.name.endswith("_mask_bias")]
    assert [entry.name for entry in biases] == ["a_attention_mask_bias", "y_attention_mask_bias"]
    assert node(new, "y_attention_mask").input[1] == node(new, "z_attention_mask").input[1]
    assert operators(new).count("And") == operators(new).count("LessOrEqual") == 1
    feed = feeds(m=visible(2, 1, 5, 7))
    assert_same(run(new, feed), reference(model, feed))


def test_a_row_without_keys_gives_zero_and_only_such_nodes_are_guarded() -> None:
    body = "y = Attention (q0, k, v, m)"
    feed = feeds(m=visible(5, 7))
    new, _ = decompose(named(body, "bool[S, K] m"))
    got = run(new, feed)["y"]
    assert not got[:, :, 0].any()
    assert got[:, :, 1].all()
    assert "IsNaN" not in operators(decompose(named("y = Attention <is_causal = 1> (q0, k, v)"))[0])


@pytest.mark.parametrize(("low", "guards"), [("-1e9", 0), ("-inf", 1)])
def test_a_mask_that_cannot_be_infinite_needs_no_guard(low: str, guards: int) -> None:
    body = (
        f"zero = Constant <value = float {{0}}> () low = Constant <value = float {{{low}}}> ()"
        "chosen = Where (m, zero, low) axes = Constant <value = int64[2] {0, 1}> () bias = Unsqueeze (chosen, axes)"
        "y = Attention (q0, k, v, bias)"
    )
    model = named(body, "bool[S, K] m")
    new, _ = decompose(model)
    assert operators(new).count("IsNaN") == guards
    feed = feeds(m=visible(5, 7))
    assert_same(run(new, feed), reference(model, feed))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("declared", [True, False])
def test_grouped_heads(kv_heads: int, declared: bool) -> None:
    model = named("y = Attention (q0, k, v)", lengths=("S", "K", str(kv_heads) if declared else "H"))
    new, _ = decompose(model)
    repeats = {1: ["Expand"], 2: ["Reshape", "Expand", "Reshape"], 4: []}[kv_heads] if declared else None
    if repeats is not None:
        assert [op for op in operators(new) if op in ("Expand", "Reshape")] == repeats * 2
    feed = feeds(kv_heads=kv_heads)
    assert_same(run(new, feed), reference(model, feed))


def test_a_decode_step_sees_every_key() -> None:
    body = "y, pk, pv = Attention <is_causal = 1> (q0, k, v, , past_k, past_v)"
    cache = "float[B, 4, P, 8] past_k, float[B, 4, P, 8] past_v"
    outputs = "float[B, 4, 1, 8] y, float[B, 4, T, 8] pk, float[B, 4, T, 8] pv"
    model = named(body, cache, lengths=("1", "1", "4"), outputs=outputs)
    new, _ = decompose(model)
    assert operators(new) == "Concat Transpose Concat Mul MatMul Softmax MatMul".split()
    rng = np.random.default_rng(5)
    past = {name: rng.normal(size=(2, 4, 6, 8)).astype(np.float32) for name in ("past_k", "past_v")}
    feed = feeds(queries=1, keys=1, **past)
    assert_same(run(new, feed), reference(model, feed))


@pytest.mark.parametrize("window", ["", "left_window_size = 2", "left_window_size = 1, right_window_size = 1"])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("queries", [3, 9])
def test_positions_of_unknown_lengths(window: str, causal: int, queries: int) -> None:
    attributes = f"is_causal = {causal}" + (f", {window}" if window else "")
    model = named(f"y = Attention <{attributes}> (q0, k, v, m)", "float[S, T] m", opset=25)
    new, _ = decompose(model)
    mask = np.random.default_rng(11).normal(size=(queries, 4)).astype(np.float32)
    feed = feeds(queries=queries, keys=6, m=mask)
    assert_same(run(new, feed), reference(model, feed))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_the_fourth_output_in_each_mode_with_a_cap_and_without_a_mask(mode: int) -> None:
    body = f"y, pk, pv, s = Attention <softcap = 1.5, qk_matmul_output_mode = {mode}> (q0, k, v)"
    outputs = "float[B, 4, S, 8] y, float[B, H, K, 8] pk, float[B, H, K, 8] pv, float[B, 4, S, K] s"
    new, _ = decompose(named(body, outputs=outputs, lengths=("S", "K", "4")))
    feed = feeds()
    got = run(new, feed)
    scores = (feed["q0"] / np.sqrt(np.float32(8))) @ feed["k"].swapaxes(2, 3)
    capped = np.float32(1.5) * np.tanh(scores / np.float32(1.5))
    weights = np.exp(capped) / np.exp(capped).sum(axis=-1, keepdims=True)
    want = {"y": weights @ feed["v"], "pk": feed["k"], "pv": feed["v"], "s": (scores, capped, capped, weights)[mode]}
    np.testing.assert_allclose(got["s"], want["s"], rtol=0, atol=1e-6)
    assert_same({name: got[name] for name in ("y", "pk", "pv")}, {name: want[name] for name in ("y", "pk", "pv")})


def test_branches_read_what_they_captured() -> None:
    body = """
      y = If (c) <then_branch = t () => (float[B, 4, S, 8] a) { a = Attention (q0, k, v, m) },
                  else_branch = e () => (float[B, 4, S, 8] b) { b = Attention <is_causal = 1> (q0, k, v, m) }>
    """
    model = named(body, "bool[B, 1, S, K] m, bool c")
    new, result = decompose(model)
    assert result.changed == 2
    onnx.checker.check_model(new, full_check=True)
    for condition in (True, False):
        feed = feeds(m=visible(2, 1, 5, 7), c=np.array(condition))
        assert_same(run(new, feed), reference(model, feed))


@pytest.mark.parametrize(("call", "mask"), [("(q, k, v)", ""), ("<is_causal = 1> (q, k, v, bias)", "float[S, K] m")])
def test_function_bodies_without_declared_types(call: str, mask: str) -> None:
    prepare = "bias = CastLike (m, q)" if mask else ""
    function = f"""
      <domain: "local", opset_import: ["" : 23]> block (q, k, v{", m" if mask else ""}) => (r) {{
        {prepare} r = Attention {call} }}
    """
    model = named(f"y = local.block (q0, k, v{', m' if mask else ''})", mask, extra=function)
    new, result = decompose(model)
    if mask:
        assert result.skipped == (("r", "input attn_mask: type unknown"),)
        assert new.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
        return
    assert result.changed == 1
    assert not new.graph.initializer
    feed = feeds()
    assert_same(run(new, feed), reference(model, feed))


def test_new_nodes_have_names_and_say_where_they_come_from() -> None:
    model = named("y = Attention <is_causal = 1> (q0, k, v, m)", "bool[S, K] m")
    model.graph.node[0].name = "layer0/attn"
    new, result = decompose(model)
    names = [entry.name for entry in new.graph.node]
    assert len(set(names)) == len(names)
    assert all(name.startswith("layer0/attn_") for name in names)
    assert {"layer0/attn_qk", "layer0/attn_mask", "layer0/attn_softmax", "layer0/attn_value"} <= set(names)
    for entry in new.graph.node:
        origin = {prop.key: prop.value for prop in entry.metadata_props}
        assert origin == {PASS_KEY: "decompose_attention", SITE_KEY: "main/layer0/attn"}
    assert (result.name, result.changed, result.removed) == ("decompose_attention", 1, {"Attention": 1})
    assert sum(result.added.values()) == len(names)
    assert list(new.graph.input) == list(model.graph.input)
    assert list(new.graph.output) == list(model.graph.output)


@pytest.mark.parametrize(
    ("body", "mask", "opset", "reason"),
    [
        ("y = Attention (q0, k, v, m)", "int32[S, K] m", 23,
         "input attn_mask: INT32 is neither bool nor floating point"),
        ("y = Attention (q0, k, v, m)", "float[S, 1] m", 23, "input attn_mask: last dimension 1 for K keys"),
        ("y = Attention <scale = -1.0> (q0, k, v)", "", 23, "attribute scale: -1.0 has no square root"),
        ("y = Attention (q0, k, v, , m)", "float[B, H, P, 8] m", 23, "input past_value: missing beside the other"),
        ("y = Attention <left_window_size = 1> (q0, k, v)", "", 24,
         "attribute left_window_size: not known in opset 24"),
        ("y = Attention <softmax_precision = 7> (q0, k, v)", "", 23,
         "attribute softmax_precision: not a floating-point type"),
        ("y = Attention <qk_matmul_output_mode = 4> (q0, k, v)", "", 23,
         "attribute qk_matmul_output_mode: not 0, 1, 2 or 3"),
        ("y = Attention (q0, k, v)", "", 27, "opset 27: the meaning of Attention is known for 23 to 26"),
    ],
)  # fmt: skip
def test_what_is_not_covered_is_left_and_named(body: str, mask: str, opset: int, reason: str) -> None:
    model = named(body, mask, opset)
    new, result = decompose(model)
    assert result == PassResult("decompose_attention", 0, {}, {}, (("y", reason),))
    assert new.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)


def test_attention_of_another_domain_is_untouched() -> None:
    model = parser.parse_model("""
      <ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
      agraph (float[B, S, 32] x, float[32, 96] w, float[96] b) => (float[B, S, 32] y) {
        y = com.microsoft.Attention <num_heads = 4> (x, w, b)
      }
    """)
    new, result = decompose(model)
    assert result == PassResult("decompose_attention", 0)
    assert new.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)


def test_half_precision_scores_take_the_wider_softmax() -> None:
    model = parser.parse_model("""
      <ir_version: 10, opset_import: ["" : 24]>
      agraph (float16[1, 2, 3, 8] q, float16[1, 2, K, 8] k) => (float16[1, 2, 3, 8] y) {
        y = Attention <softmax_precision = 1> (q, k, k)
      }
    """)
    new, _ = decompose(model)
    assert operators(new) == "Transpose Mul MatMul Cast Softmax Cast MatMul".split()
    assert helper.get_node_attr_value(node(new, "y_attention_softmax_cast"), "to") == TensorProto.FLOAT
    rng = np.random.default_rng(1)
    feed = {name: rng.normal(size=(1, 2, size, 8)).astype(np.float16) for name, size in (("q", 3), ("k", 5))}
    assert_same(run(new, feed), reference(model, feed))
