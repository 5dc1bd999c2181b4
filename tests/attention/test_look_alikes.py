"""Softmax nodes that are no attention, each beside the attention it resembles."""

from __future__ import annotations

import re

import pytest
from chain_models import find, model

ONES = ", ".join(["1"] * 64)
CONSTANTS = (
    f"float[16, 4] w = {{{ONES}}}, float[4, 16] u = {{{ONES}}}, float[1, 16, 1] learned = {{{ONES[:46]}}}, "
    "float[4] bias = {1, 2, 3, 4}"
)
INPUTS = "float[B, S, 16] x, float[B, S, 16] v, float[B, 4, 8, 8] image, float[B, S, 1] t"

# name -> (body, chain, what the reason says)
LOOK_ALIKES = {
    "router": (
        "[gate] a = MatMul(x, w)  p = Softmax(a)  i = Constant<value_ints = [2]>()  y, z = TopK(p, i)",
        "?>Softmax>?",
        "the scores come from gate, a product with a weight",
    ),
    "classifier": (
        "[head] a = Gemm(x, w, bias)  y = Softmax<axis = 1>(a)",
        "?>Softmax>?",
        "the scores come from head, a product with a weight",
    ),
    "segmentation": (
        "[conv] a = Conv(image, image)  y = Softmax<axis = 1>(a)",
        "?>Softmax>?",
        r"the scores come from conv \(Conv\), not from a product",
    ),
    "pooling_with_a_learned_vector": (
        "[pool] a = MatMul(x, learned)  p = Softmax<axis = 1>(a)  h = Transpose<perm = [0, 2, 1]>(p)  y = MatMul(h, v)",
        "?>Softmax>?",
        "the scores come from pool, a product with a weight",
    ),
    "additive": (
        """h = Add(x, v)  e = Tanh(h)  [energy] s = MatMul(e, learned)  a = Transpose<perm = [0, 2, 1]>(s)
        p = Softmax(a)  y = MatMul(p, v)""",
        "?>Softmax>MatMul",
        "the scores come from energy, a product with a weight",
    ),
    "last_layer": (
        "k = Transpose<perm = [0, 2, 1]>(v)  a = MatMul(x, k)  y = Softmax(a)",
        "MatMul>Softmax>?",
        "the probabilities 'y' feed no value product: a graph output or a subgraph reads them",
    ),
    "nobody_reads": (
        "k = Transpose<perm = [0, 2, 1]>(v)  a = MatMul(x, k)  p = Softmax(a)  y = Neg(x)",
        "MatMul>Softmax>?",
        "the probabilities 'p' feed no value product: nothing reads them",
    ),
    "linear_layer_with_a_bias": (
        "[linear] s = MatMul(x, w)  a = Add(s, bias)  p = Softmax(a)  y = MatMul(p, t)",
        "?>Softmax>MatMul",
        "the scores come from linear, a product with a weight",
    ),
    "codebook": (
        "k = Transpose<perm = [0, 2, 1]>(v)  a = MatMul(x, k)  p = Softmax(a)  [book] y = MatMul(p, w)",
        "MatMul>Softmax>?",
        "book multiplies the probabilities with a weight, not with values",
    ),
    "values_on_the_left": (
        "k = Transpose<perm = [0, 2, 1]>(v)  a = MatMul(x, k)  p = Softmax(a)  [left] y = MatMul(t, p)",
        "MatMul>Softmax>?",
        "left does not sum over the keys of the probabilities",
    ),
    "an_input": (
        "p = Softmax(x)  y = MatMul(p, v)",
        "?>Softmax>MatMul",
        "the scores come from 'x', which no node of the graph computes",
    ),
    "entropy": (
        "k = Transpose<perm = [0, 2, 1]>(v)  a = MatMul(x, k)  p = Softmax(a)  [log] y = Log(p)",
        "MatMul>Softmax>?",
        r"the probabilities go into log \(Log\), not into a value product",
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_no_attention(name: str) -> None:
    body, chain, reason = LOOK_ALIKES[name]
    found = find(model(body, inputs=INPUTS, constants=CONSTANTS, outputs="float y"))
    assert (found.sites, found.refused) == ((), ())
    (other,) = found.others
    assert other.chain == chain
    assert other.scope.id == "main" and other.softmax.op_type == "Softmax" and other.id.startswith("main/Softmax_")
    assert re.fullmatch(reason, other.reason), other.reason


@pytest.mark.parametrize(
    "body",
    [
        "k = Transpose<perm = [0, 2, 1]>(v)  a = MatMul(x, k)  p = Softmax(a)  y = MatMul(p, v)",
        "k = Transpose<perm = [0, 2, 1]>(v)  s = MatMul(x, k)  a = Add(s, s)  p = Softmax(a)  y = MatMul(p, v)",
        "k = Transpose<perm = [0, 2, 1]>(v)  h = MatMul(x, w)  e = MatMul(h, u)  a = MatMul(e, k)  "
        "p = Softmax(a)  y = MatMul(p, v)",
    ],
    ids=["plain", "sum_of_scores", "projected_query"],
)
def test_the_attention_beside_them(body: str) -> None:
    found = find(model(body, inputs=INPUTS, constants=CONSTANTS, outputs="float y"))
    assert (found.refused, found.others) == ((), ()) and len(found.sites) == 1


def test_stored_keys_and_values_of_rank_3_are_no_weights() -> None:
    numbers = ", ".join(["1"] * 256)
    constants = f"float[2, 16, 8] k = {{{numbers}}}, float[2, 8, 16] v = {{{numbers}}}"
    body = "a = MatMul(q, k)  p = Softmax(a)  y = MatMul(p, v)"
    assert len(find(model(body, inputs="float[2, S, 16] q", constants=constants)).sites) == 1
    flat = constants.replace("[2, 16, 8] k", "[1, 16, 16] k")
    assert not find(model(body, inputs="float[2, S, 16] q", constants=flat)).sites


def test_a_softmax_of_another_domain_is_not_looked_at() -> None:
    body = "a = MatMul(q, k)  p = local.Softmax(a)  y = MatMul(p, v)"
    found = find(model(body))
    assert (found.sites, found.refused, found.others) == ((), (), ())


def test_a_router_beside_an_attention() -> None:
    body = "a = MatMul(q, k)  [s] p = Softmax(a)  y = MatMul(p, v)  [route] r = Softmax<axis = 1>(y)"
    found = find(model(body))
    assert [site.id for site in found.sites] == ["main/s"]
    assert [other.id for other in found.others] == ["main/route"]


def test_a_chain_that_never_ends() -> None:
    steps = "".join(f"s{i + 1} = Mul(s{i}, d)  " for i in range(60))
    found = find(model(f"s0 = MatMul(q, k)  {steps} p = Softmax(s60)  y = MatMul(p, v)"))
    (other,) = found.others
    assert other.reason == "more than 40 nodes lie above Softmax, the last is Mul"
    short = "".join(f"s{i + 1} = Mul(s{i}, d)  " for i in range(30))
    assert len(find(model(f"s0 = MatMul(q, k)  {short} p = Softmax(s30)  y = MatMul(p, v)")).sites) == 1
