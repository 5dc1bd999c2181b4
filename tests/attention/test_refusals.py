"""Attention that is found and refused: code, sentence, node and values, each with a twin that is a site."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from chain_models import INPUTS, find, model

from graphsurgery.attention import Refusal

PLAIN = "[qk] a = MatMul(q, k)  [soft] p = Softmax{axis}(a)  [pv] y = MatMul(p, v)"
CUBE = "float[2, 4, 8, 16] q, float[2, 4, 16, 8] k, float[2, 4, 8, 16] v"
QUANT = "float e = {1}, uint8 z = {0}"
DQ = "[quant] {b} = QuantizeLinear({a}, e, z)  [dequant] {c} = DequantizeLinear({b}, e, z)  "
PAST = """[old] s = MatMul(q, k)  [new] r = MatMul(q, k)  [join] a = Concat<axis = {axis}>(s, r)  [soft] p = Softmax(a)
  [pv] y = MatMul(p, v)"""
CUT = """[qk] a = MatMul(q, k)  [soft] p = Softmax(a)  [cut] g, h = Split<axis = -1>(p)  [pv] e = MatMul(g, v)
  [pv2] f = MatMul(h, v)  y = Add(e, f)"""


class Case(NamedTuple):
    body: str
    code: str
    node: str
    values: dict[str, object]
    reason: str
    opset: int = 17
    inputs: str = CUBE
    constants: str = QUANT


CASES = {
    "axis_not_last": Case(
        PLAIN.format(axis="<axis = 1>"),
        "axis-not-last",
        "soft",
        {"axis": 1, "rank": 4, "opset": 17},
        "soft normalises axis 1 of 4, not the last one",
    ),
    "negative_axis": Case(
        PLAIN.format(axis="<axis = -2>"),
        "axis-not-last",
        "soft",
        {"axis": -2, "rank": 4, "opset": 17},
        "soft normalises axis -2 of 4, not the last one",
    ),
    "coerced": Case(
        PLAIN.format(axis=""),
        "softmax-coerced",
        "soft",
        {"axis": 1, "rank": 4, "opset": 12},
        "soft at opset 12 normalises over all axes from 1 on, not over the last of 4 alone",
        opset=12,
    ),
    "coerced_explicitly": Case(
        PLAIN.format(axis="<axis = 2>"),
        "softmax-coerced",
        "soft",
        {"axis": 2, "rank": 4, "opset": 11},
        "soft at opset 11 normalises over all axes from 2 on, not over the last of 4 alone",
        opset=11,
    ),
    "old": Case(
        PLAIN.format(axis="<axis = 3>"),
        "opset-too-old",
        "soft",
        {"opset": 8},
        "soft is of opset 8; convert the model to opset 9 or newer",
        opset=8,
    ),
    "integers": Case(
        PLAIN.format(axis=""),
        "dtype",
        "soft",
        {"dtype": "int32"},
        "the element type of soft is int32; float32, float16, bfloat16 and float64 are supported",
        inputs=CUBE.replace("float[", "int32["),
    ),
    "unknown_type": Case(
        "h = local.Some(q)  [qk] a = MatMul(h, h)  [soft] p = Softmax(a)  [pv] z = MatMul(p, h)  y = Identity(q)",
        "dtype",
        "soft",
        {"dtype": "not known"},
        "the element type of soft is not known; float32, float16, bfloat16 and float64 are supported",
    ),
    "quantised_scores": Case(
        "[qk] s = MatMul(q, k)  " + DQ.format(a="s", b="b", c="a") + "[soft] p = Softmax(a)  [pv] y = MatMul(p, v)",
        "quantised",
        "quant",
        {"op_type": "QuantizeLinear"},
        "quant quantises the chain; sites with quantised scores or probabilities are not supported yet",
    ),
    "quantised_probabilities": Case(
        "[qk] s = MatMul(q, k)  [soft] p = Softmax(s)  " + DQ.format(a="p", b="b", c="g") + "[pv] y = MatMul(g, v)",
        "quantised",
        "quant",
        {"op_type": "QuantizeLinear"},
        "quant quantises the chain; sites with quantised scores or probabilities are not supported yet",
    ),
    "split_keys": Case(
        PAST.format(axis=3),
        "split-scores",
        "join",
        {"parts": 2},
        "join joins 2 score products along the keys (a split key cache); not supported yet",
    ),
    "split_values": Case(
        CUT,
        "split-scores",
        "cut",
        {"parts": 2},
        "cut cuts the probabilities into 2 parts (a split cache); not supported yet",
    ),
}


def refusal(case: Case) -> tuple[Refusal, str, str, str]:
    found = find(model(case.body, inputs=case.inputs, constants=case.constants, opset=case.opset))
    assert (found.sites, found.others) == ((), ())
    (entry,) = found.refused
    return entry.refusal, entry.id, entry.qk, entry.pv


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    case = CASES[name]
    found, label, qk, pv = refusal(case)
    assert (found.code, found.node, found.values, found.reason) == (case.code, case.node, case.values, case.reason)
    assert label == "main/soft" and pv == "pv"
    assert qk in ("qk", "old")


@pytest.mark.parametrize(
    ("body", "opset"),
    [
        (PLAIN.format(axis="<axis = 3>"), 17),
        (PLAIN.format(axis="<axis = -1>"), 17),
        (PLAIN.format(axis=""), 13),
        (PLAIN.format(axis="<axis = 3>"), 12),
        (PLAIN.format(axis="<axis = -1>"), 11),
        (PLAIN.format(axis="<axis = 3>"), 9),
        (PAST.format(axis=3).replace("[new] r = MatMul(q, k)", "[new] r = Neg(q)"), 17),
    ],
    ids=["last", "minus_one", "default_13", "last_12", "minus_one_11", "oldest", "sink_instead_of_a_second_product"],
)
def test_supported_twins(body: str, opset: int) -> None:
    found = find(model(body, inputs=CUBE, constants=QUANT, opset=opset))
    assert (found.refused, found.others) == ((), ()) and [site.id for site in found.sites] == ["main/soft"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double"])
def test_supported_element_types(kind: str) -> None:
    inputs = CUBE.replace("float[", f"{kind}[")
    assert len(find(model(PLAIN.format(axis=""), inputs=inputs, constants=QUANT)).sites) == 1


@pytest.mark.parametrize(("axis", "code"), [("<axis = 2>", "rank-unknown"), ("<axis = -1>", None)])
def test_rank_unknown(axis: str, code: str | None) -> None:
    proto = model(PLAIN.format(axis=axis), constants=QUANT)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    found = find(proto)
    if code is None:
        (site,) = found.sites
        assert site.rank is None and site.dims.keys is None
        return
    (entry,) = found.refused
    assert (entry.refusal.code, entry.refusal.node) == (code, "soft")
    assert entry.refusal.values == {"axis": 2, "rank": None, "opset": 17}
    assert entry.refusal.reason == (
        "the rank of the input of soft is not known, so its axis 2 cannot be checked; run shape inference on the model "
        "first"
    )


def test_concat_along_another_axis_is_no_split_cache() -> None:
    found = find(model(PAST.format(axis=2), inputs=CUBE, constants=QUANT))
    assert found.sites == () and found.refused == () and len(found.others) == 1


FUSED = {
    "Attention": ("fused-attention", "Attention", "fused is a fused Attention operator; rewrite with"),
    "com.microsoft.Attention": ("fused-contrib", "com.microsoft::Attention", "fused is a fused com.microsoft::"),
    "com.microsoft.MultiHeadAttention": ("fused-contrib", "com.microsoft::MultiHeadAttention", "fused is a fused com."),
    "com.microsoft.GroupQueryAttention": ("fused-contrib", "com.microsoft::GroupQueryAttention", "fused is a fused "),
}


@pytest.mark.parametrize("operator", FUSED)
def test_fused_operators(operator: str) -> None:
    code, kind, reason = FUSED[operator]
    found = find(model(f"[fused] y = {operator}(q, k, v)", opset=23))
    assert (found.sites, found.others) == ((), ())
    (entry,) = found.refused
    assert (entry.refusal.code, entry.refusal.node, entry.refusal.values) == (code, "fused", {"op_type": kind})
    assert entry.refusal.reason.startswith(reason) and entry.chain == kind and entry.id == "main/fused"


@pytest.mark.parametrize("operator", ["MultiHeadAttention", "local.Attention", "com.microsoft.Softmax"])
def test_operators_of_other_domains_are_not_named(operator: str) -> None:
    found = find(model(f"[fused] y = {operator}(q, k, v)", opset=23))
    assert (found.sites, found.refused, found.others) == ((), (), ())


# -- ids and scopes

TWO = """a = MatMul(q, k)  {first} p = Softmax(a)  y = MatMul(p, v)
  b = MatMul(q, k)  {second} r = Softmax(b)  z = MatMul(r, v)"""


@pytest.mark.parametrize(
    ("first", "second", "ids"),
    [
        ("[one]", "[two]", ["main/one", "main/two"]),
        ("[same]", "[same]", ["main/same", "main/same#2"]),
        ("", "", ["main/Softmax_1", "main/Softmax_4"]),
        ("[Softmax_4]", "", ["main/Softmax_4", "main/Softmax_4#2"]),
    ],
)
def test_ids_are_unique(first: str, second: str, ids: list[str]) -> None:
    assert [site.id for site in find(model(TWO.format(first=first, second=second))).sites] == ids


SCOPES = """[call] x = local.f(q, k, v)
  [choose] y = If(c) <then_branch = yes () => (float u) {
      a = MatMul(q, k)  [soft] p = Softmax(a)  u = MatMul(p, v)
    }, else_branch = no () => (float e) {
      [loop] e = Loop("", c, q) <body = body (int64 i, bool on, float[B, 4, S, 16] h) => (bool go, float n) {
        go = Identity(on)  b = MatMul(h, k)  [soft] r = Softmax(b)  n = MatMul(r, v)
      }>
    }>"""
FUNCTION = """<domain: "local", opset_import: ["" : 17]>
  f (a, b, c) => (d) { s = MatMul(a, b)  [soft] p = Softmax(s)  d = MatMul(p, c) }"""


def test_functions_and_subgraphs() -> None:
    found = find(model(SCOPES, inputs=INPUTS + ", bool c", more=FUNCTION))
    assert (found.refused, found.others) == ((), ())
    assert [(site.id, site.scope.id) for site in found.sites] == [
        ("main/choose.then_branch/soft", "main/choose.then_branch"),
        ("main/choose.else_branch/loop.body/soft", "main/choose.else_branch/loop.body"),
        ("f/soft", "f"),
    ]
    assert [site.dims.heads for site in found.sites] == [4, 4, None], "a function declares nothing"


def test_products_outside_of_the_softmax_scope() -> None:
    """The score product may stand outside of the branch that holds Softmax and the value product."""
    body = """s = MatMul(q, k)
      y = If(c) <then_branch = yes () => (float u) { [soft] p = Softmax(s)  u = MatMul(p, v) },
                 else_branch = no () => (float e) { e = Identity(q) }>"""
    found = find(model(body, inputs=INPUTS + ", bool c"))
    assert [site.id for site in found.sites] == ["main/If_1.then_branch/soft"]
