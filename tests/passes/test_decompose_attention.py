"""What a fused Attention node becomes and what is left as it is; shared, captured and grouped values stay right."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.checker
import pytest
from attention_nodes import (
    assert_same,
    decompose,
    feeds,
    named,
    needs_the_operator,
    node,
    operators,
    reference,
    run,
    visible,
)
from onnx import TensorProto, helper, parser

from graphsurgery.model.rewriter import PASS_KEY, SITE_KEY
from graphsurgery.passes import PassResult

CHECKER: Any = onnx.checker


def test_the_scale_stands_on_the_query_alone() -> None:
    new, _ = decompose(named("q = Identity (q0) y = Attention (q, k, v)", lengths=("S", "K", "4")))
    scale = node(new, "y_attention_scale")
    assert scale.input[0] == "q"
    assert node(new, "y_attention_qk").input[0] == scale.output[0]
    (factor,) = [t for t in new.graph.initializer if t.name == scale.input[1]]
    assert onnx.numpy_helper.to_array(factor) == np.float32(1 / np.sqrt(8))
    assert [n.op_type for n in new.graph.node if n.name.startswith("y_attention_key")] == ["Transpose"]


@needs_the_operator
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


@needs_the_operator
def test_a_row_without_keys_gives_zero_and_only_such_nodes_are_guarded() -> None:
    body = "y = Attention (q0, k, v, m)"
    feed = feeds(m=visible(5, 7))
    new, _ = decompose(named(body, "bool[S, K] m"))
    got = run(new, feed)["y"]
    assert not got[:, :, 0].any()
    assert got[:, :, 1].all()
    assert "IsNaN" not in operators(decompose(named("y = Attention <is_causal = 1> (q0, k, v)"))[0])


@needs_the_operator
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


@needs_the_operator
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


@needs_the_operator
def test_a_decode_step_sees_every_key() -> None:
    body = "y, pk, pv = Attention <is_causal = 1> (q0, k, v, , past_k, past_v)"
    cache = "float[B, 4, P, 8] past_k, float[B, 4, P, 8] past_v"
    outputs = "float[B, 4, 1, 8] y, float[B, 4, T, 8] pk, float[B, 4, T, 8] pv"
    model = named(body, cache, lengths=("1", "1", "4"), outputs=outputs)
    new, _ = decompose(model)
    assert operators(new) == "Concat Transpose Concat Mul MatMul Softmax MatMul".split()
    rng = np.random.default_rng(5)
    past = {name: rng.normal(size=(2, 4, 6, 8)).astype(np.float32) for name in ("past_k", "past_v")}
    feed = {**feeds(queries=1, keys=1), **past}
    assert_same(run(new, feed), reference(model, feed))


@needs_the_operator
@pytest.mark.parametrize("window", ["", "left_window_size = 2", "left_window_size = 1, right_window_size = 1"])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("queries", [3, 9])
@pytest.mark.parametrize("masked", [True, False])
def test_positions_of_unknown_lengths(window: str, causal: int, queries: int, masked: bool) -> None:
    attributes = f"is_causal = {causal}" + (f", {window}" if window else "")
    inputs, declared = ("q0, k, v, m", "float[S, T] m") if masked else ("q0, k, v", "")
    model = named(f"y = Attention <{attributes}> ({inputs})", declared, opset=25)
    new, _ = decompose(model)
    mask = np.random.default_rng(11).normal(size=(queries, 4)).astype(np.float32)
    feed = feeds(queries=queries, keys=6) | ({"m": mask} if masked else {})
    assert_same(run(new, feed), reference(model, feed))


@needs_the_operator
@pytest.mark.parametrize(
    ("attributes", "mask", "dtype", "value"),
    [
        # queries that stand after the last key see none through a window
        ("left_window_size = 1", "", np.float32, None),
        # the window of the last queries holds nothing but padding
        ("left_window_size = 1", "bool[6, 4] m", np.bool_, np.ones((6, 4))),
        # each row of the mask has a key, the first row none that the order allows
        ("is_causal = 1", "bool[9, 6] m", np.bool_, np.eye(9, 6, 5) + np.eye(9, 6, -1) + np.eye(9, 6, -5)),
        ("is_causal = 1, left_window_size = 3", "float[9, 6] m", np.float32, np.full((9, 6), 0.25)),
    ],
)
@pytest.mark.parametrize("constant", [True, False])
def test_known_lengths(
    attributes: str, mask: str, dtype: type[np.generic], value: np.ndarray | None, constant: bool
) -> None:
    body = f"y = Attention <{attributes}> (q0, k, v{', m' if mask else ''})"
    queries = 9 if value is None else len(value)
    lengths, outputs = (str(queries), "6", "4"), f"float[B, 4, {queries}, 8] y"
    model = named(body, "" if constant else mask, 25, lengths, outputs=outputs)
    feed = feeds(queries=queries, keys=6)
    if value is not None and constant:
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(dtype), "m"))
    elif value is not None:
        feed["m"] = value.astype(dtype)
    new, _ = decompose(model)
    assert "Range" not in operators(new)
    assert_same(run(new, feed), reference(model, feed))


@needs_the_operator
@pytest.mark.parametrize("blocked", [False, True])
def test_a_constant_mask_is_guarded_where_it_blocks_a_row(blocked: bool) -> None:
    mask = np.tri(5, 7, -int(blocked), dtype=np.bool_)
    model = named("y = Attention (q0, k, v, m)", lengths=("5", "7", "4"), outputs="float[B, 4, 5, 8] y")
    model.graph.initializer.append(onnx.numpy_helper.from_array(mask, "m"))
    new, _ = decompose(model)
    assert operators(new).count("IsNaN") == blocked
    feed = feeds()
    assert_same(run(new, feed), reference(model, feed))


def test_long_sequences_get_index_vectors_and_no_square_constant() -> None:
    lengths = ("2048", "2048", "4")
    new, _ = decompose(named("y = Attention <is_causal = 1> (q0, k, v)", lengths=lengths))
    assert max(np.prod(tensor.dims) for tensor in new.graph.initializer) == 2048
    assert operators(new) == "Transpose LessOrEqual Where Mul MatMul Add Softmax MatMul".split()


@needs_the_operator
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_the_fourth_output_in_each_mode_without_a_mask(mode: int, cap: float) -> None:
    body = f"y, pk, pv, s = Attention <softcap = {cap}, qk_matmul_output_mode = {mode}> (q0, k, v)"
    outputs = "float[B, 4, S, 8] y, float[B, H, K, 8] pk, float[B, H, K, 8] pv, float[B, 4, S, K] s"
    new, _ = decompose(named(body, outputs=outputs, lengths=("S", "K", "4")))
    feed = feeds()
    got = run(new, feed)
    scores = (feed["q0"] / np.sqrt(np.float32(8))) @ feed["k"].swapaxes(2, 3)
    capped = np.float32(cap) * np.tanh(scores / np.float32(cap)) if cap else scores
    weights = np.exp(capped) / np.exp(capped).sum(axis=-1, keepdims=True)
    want = {"y": weights @ feed["v"], "pk": feed["k"], "pv": feed["v"], "s": (scores, capped, capped, weights)[mode]}
    np.testing.assert_allclose(got["s"], want["s"], rtol=0, atol=1e-6)
    assert_same({name: got[name] for name in ("y", "pk", "pv")}, {name: want[name] for name in ("y", "pk", "pv")})


@needs_the_operator
def test_branches_read_what_they_captured() -> None:
    body = """
      y = If (c) <then_branch = t () => (float[B, 4, S, 8] a) { a = Attention (q0, k, v, m) },
                  else_branch = e () => (float[B, 4, S, 8] b) { b = Attention <is_causal = 1> (q0, k, v, m) }>
    """
    model = named(body, "bool[B, 1, S, K] m, bool c")
    new, result = decompose(model)
    assert result.changed == 2
    CHECKER.check_model(new, full_check=True)
    for condition in (True, False):
        feed = feeds(m=visible(2, 1, 5, 7), c=np.array(condition))
        assert_same(run(new, feed), reference(model, feed))


@needs_the_operator
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
        ("y = Attention (q0, k, v, m)", "double[S, K] m", 23, "input attn_mask: its type differs from that of Q"),
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


def test_a_mask_longer_than_the_keys_is_left_and_named() -> None:
    model = named("y = Attention (q0, k, v, m)", "float[4, 40] m", 24, lengths=("4", "8", "4"))
    new, result = decompose(model)
    assert result.skipped == (("y", "input attn_mask: last dimension 40 for 8 keys"),)
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


@needs_the_operator
@pytest.mark.parametrize("in_function", [True, False])
def test_double_precision_is_kept_where_type_or_head_size_is_not_known(in_function: bool) -> None:
    model = parser.parse_model(f"""
      <ir_version: 10, opset_import: ["" : 23, "local" : 1]>
      agraph (double[1, 2, 3, D] q, double[1, 2, 5, D] k) => (double[1, 2, 3, D] y) {{
        y = {"local.block" if in_function else "Attention"} (q, k, k)
      }}
      <domain: "local", opset_import: ["" : 23]> block (q, k, v) => (y) {{
        shape = Constant <value = int64[4] {{1, 2, -1, 6}}> ()
        q4 = Reshape (q, shape)
        y = Attention (q4, k, v)
      }}
    """)
    new, _ = decompose(model)
    rng = np.random.default_rng(2)
    feed = {name: rng.normal(size=(1, 2, size, 6)) for name, size in (("q", 3), ("k", 5))}
    assert_same(run(new, feed), reference(model, feed))


@needs_the_operator
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
