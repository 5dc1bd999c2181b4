"""Every chain that exporters were seen to emit, each rebuilt as ten lines of text."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from chain_models import HALF, HALF_CONSTANTS, INPUTS, find, model
from onnx import TensorProto

from graphsurgery.attention import Dims, Site


class Case(NamedTuple):
    body: str
    chain: str
    kinds: str = ""
    """Kinds of the links before and after Softmax."""
    fills: frozenset[str] = frozenset()
    late: bool = True
    guarded: bool = False


QK = "s = MatMul(q, k)  "
PV = "  p = Softmax<axis = -1>(a)  y = MatMul(p, v)"
INF_MASK = "f = Where(t, nil, inf)  "
LOW_MASK = "f = Where(t, nil, low)  "
INF, FINITE, UNKNOWN = frozenset({"inf"}), frozenset({"lowest"}), frozenset({"unknown"})
SLICE = "i = Constant<value_ints = [0]>()  j = Constant<value_ints = [-1]>()  "

CASES = {
    "no_mask": Case("a = MatMul(q, k)" + PV, "MatMul>Softmax>MatMul"),
    "mask": Case(INF_MASK + QK + "a = Add(s, f)" + PV, "MatMul>Add>Softmax>MatMul", "mask |", INF),
    "mask_first": Case(LOW_MASK + QK + "a = Add(f, s)" + PV, "MatMul>Add>Softmax>MatMul", "mask |", FINITE),
    "mask_input": Case(QK + "a = Add(s, m)" + PV, "MatMul>Add>Softmax>MatMul", "mask |", UNKNOWN),
    "scale_mask": Case(
        LOW_MASK + QK + "r = Mul(s, d)  a = Add(r, f)" + PV, "MatMul>Mul>Add>Softmax>MatMul", "scale mask |", FINITE
    ),
    "guard": Case(
        INF_MASK
        + QK
        + "a = Add(s, f)  p = Softmax<axis = -1>(a)  u = IsNaN(p)  g = Where(u, nil, p)  y = MatMul(g, v)",
        "MatMul>Add>Softmax>Where>MatMul",
        "mask | guard",
        INF,
        guarded=True,
    ),
    "two_masks": Case(
        LOW_MASK + QK + "r = Add(s, n)  a = Add(r, f)" + PV,
        "MatMul>Add>Add>Softmax>MatMul",
        "mask mask |",
        UNKNOWN | FINITE,
    ),
    "scale_two_masks": Case(
        LOW_MASK + QK + "e = Mul(s, d)  r = Add(e, f)  a = Add(r, f)" + PV,
        "MatMul>Mul>Add>Add>Softmax>MatMul",
        "scale mask mask |",
        FINITE,
    ),
    "casts_to_the_same_type": Case(
        LOW_MASK
        + QK
        + "r = Mul(s, d)  a = Add(r, f)  p = Softmax(a)  g = Cast<to = 1>(p)  h = Cast<to = 1>(g)  y = MatMul(h, v)",
        "MatMul>Mul>Add>Softmax>Cast>Cast>MatMul",
        "scale mask | same same",
        FINITE,
    ),
    "sink": Case(
        LOW_MASK
        + QK
        + "r = Mul(s, d)  e = Add(r, f)  o = Concat<axis = -1>(e, sink)  w = ReduceMax<axes = [-1]>(o)  a = Sub(o, w)  "
        + SLICE
        + "p = Softmax(a)  z = Slice(p, i, j, j)  y = MatMul(z, v)",
        "MatMul>Mul>Add>Concat>Sub>Softmax>Slice>MatMul",
        "scale mask sink row-max | slice",
        FINITE,
    ),
    "soft_cap": Case(
        LOW_MASK + QK + "b = Mul(s, d)  c = Div(b, cap)  e = Tanh(c)  r = Mul(e, cap)  a = Add(r, f)" + PV,
        "MatMul>Mul>Div>Tanh>Mul>Add>Softmax>MatMul",
        "scale scale tanh scale mask |",
        FINITE,
    ),
    "scale_only": Case(QK + "a = Mul(s, d)" + PV, "MatMul>Mul>Softmax>MatMul", "scale |"),
    "scale_as_first_operand": Case(QK + "a = Mul(d, s)" + PV, "MatMul>Mul>Softmax>MatMul", "scale |"),
    "scale_casts": Case(
        QK + "a = Mul(s, d)  p = Softmax(a)  g = Cast<to = 1>(p)  h = Cast<to = 1>(g)  y = MatMul(h, v)",
        "MatMul>Mul>Softmax>Cast>Cast>MatMul",
        "scale | same same",
    ),
    "one_cast": Case(
        LOW_MASK + QK + "r = Mul(s, d)  a = Add(r, f)  p = Softmax(a)  g = Cast<to = 1>(p)  y = MatMul(g, v)",
        "MatMul>Mul>Add>Softmax>Cast>MatMul",
        "scale mask | same",
        FINITE,
    ),
    "identity_dropout_and_concat_of_one": Case(
        QK + "h = Identity(s)  a = Concat<axis = -1>(h)  p = Softmax(a)  g = Dropout(p)  y = MatMul(g, v)",
        "MatMul>Identity>Concat>Softmax>Dropout>MatMul",
        "same same | same",
    ),
    "head_mask": Case(
        QK + "a = Mul(s, d)  p = Softmax(a)  g = Mul(p, n)  y = MatMul(g, v)",
        "MatMul>Mul>Softmax>Mul>MatMul",
        "scale | weight",
    ),
    "row_max": Case(QK + "w = ReduceMax<axes = [-1]>(s)  a = Sub(s, w)" + PV, "MatMul>Sub>Softmax>MatMul", "row-max |"),
    "where_first": Case(QK + "a = Where(t, s, inf)" + PV, "MatMul>Where>Softmax>MatMul", "where |", INF),
}


def links(site: Site) -> str:
    return f"{' '.join(x.kind for x in site.before)} | {' '.join(x.kind for x in site.after)}".strip()


def the_site(body: str, **more: str) -> Site:
    found = find(model(body, **more))
    assert (found.refused, found.others) == ((), ())
    (site,) = found.sites
    return site


@pytest.mark.parametrize("name", CASES)
def test_chain(name: str) -> None:
    case = CASES[name]
    site = the_site(case.body)
    assert (site.chain, links(site)) == (case.chain, case.kinds or "|")
    assert (site.mask_fills, site.late_division, site.guarded) == (case.fills, case.late, case.guarded)
    assert site.dims.to_json() == {"B": "B", "H": 4, "Q": "S", "K": "K", "D": 16, "G": 1}
    assert (site.rank, site.dtype, site.product_dtype) == (4, TensorProto.FLOAT, TensorProto.FLOAT)
    assert site.id.startswith("main/Softmax_")
    assert (site.shared, site.values, site.output) == (False, "v", "y")
    assert site.qk.op_type == "MatMul" and list(site.qk.input) == ["q", "k"] and site.sum_after == 0


def test_the_row_maximum_is_passed_by() -> None:
    assert the_site(CASES["row_max"].body).scores == "s"
    assert the_site(CASES["sink"].body).scores == "o"
    assert the_site(CASES["mask"].body).scores == "a"
    other = QK + "w = ReduceMax<axes = [-1]>(m)  a = Sub(s, w)" + PV
    site = the_site(other)
    assert (links(site), site.scores) == ("mask |", "a"), "the maximum of another value is a mask"


def test_einsum_division_and_a_mask_that_fills() -> None:
    inputs = "float[2, 8, 4, 16] q, float[2, 8, 4, 16] k, float[2, 8, 4, 16] v, bool[2, 1, 8, 8] t"
    body = """s = Einsum<equation = "bqhd,bkhd->bhqk">(q, k)  r = Div(s, d)  u = Not(t)  a = Where(u, inf, r)
      p = Softmax(a)  y = Einsum<equation = "bhqk,bkhd->bqhd">(p, v)"""
    site = the_site(body, inputs=inputs, outputs="float[2, 8, 4, 16] y")
    assert (site.chain, links(site)) == ("Einsum>Div>Where>Softmax>Einsum", "scale where |")
    assert site.dims == Dims(2, 4, 8, 8, 16, 1) and site.mask_fills == INF and site.late_division


@pytest.mark.parametrize(
    ("values", "equation"),
    [("[2, 8, 4, 16]", "bhqk,bkhd->bqd"), ("[2, 8, 4, 16, 3]", "bhqk,bkhde->bqhde"), ("[2, 4, 16]", "bhqk,bhd->bhqd")],
    ids=["sums_over_heads", "two_axes_of_values", "keys_not_in_the_values"],
)
def test_einsum_that_does_not_keep_the_rows_divides_early(values: str, equation: str) -> None:
    inputs = f"float[2, 8, 4, 16] q, float[2, 8, 4, 16] k, float{values} v"
    body = (
        f"""a = Einsum<equation = "bqhd,bkhd->bhqk">(q, k)  p = Softmax(a)  y = Einsum<equation = "{equation}">(p, v)"""
    )
    assert not the_site(body, inputs=inputs, outputs="float y").late_division


DEBERTA = """s = MatMul(q, k)  e = Add(s, m)  i = Constant<value_ints = [-1, 4, 8, 8]>()  r = Reshape(e, i)
  a = Where(t, low, r)  p = Softmax(a)  j = Constant<value_ints = [-1, 8, {last}]>()  g = Reshape(p, j)
  y = MatMul(g, v)"""
RANK_3 = "float[8, 8, 16] q, float[8, 16, 8] k, float[8, 8, 16] v, float[8, 8, 8] m, bool[2, 1, 8, 8] t"


def test_reshapes_on_both_sides() -> None:
    site = the_site(DEBERTA.format(last=8), inputs=RANK_3, outputs="float[8, 8, 16] y")
    assert site.chain == "MatMul>Add>Reshape>Where>Softmax>Reshape>MatMul"
    assert links(site) == "mask reshape where | reshape"
    assert site.dims == Dims(2, 4, 8, 8, 16, 1) and site.rank == 4
    assert (site.late_division, site.sum_after) == (True, 1), "the sum is taken behind the Reshape"


def test_a_reshape_that_may_mix_rows_divides_early() -> None:
    site = the_site(DEBERTA.format(last=-1).replace("[-1, 8, -1]", "[2, -1, 16]"), inputs=RANK_3)
    assert not site.late_division


def test_rank_3() -> None:
    inputs = "float[8, 8, 16] q, float[8, 16, 8] k, float[8, 8, 16] v, float[8, 1, 8] m"
    site = the_site(CASES["mask_input"].body, inputs=inputs, outputs="float[8, 8, 16] y")
    assert (site.rank, site.dims) == (3, Dims(1, 8, 8, 8, 16, 1))


def test_half_precision_with_a_float32_softmax() -> None:
    body = """s = MatMul(q, k)  e = Cast<to = 1>(s)  f = Cast<to = 1>(m)  r = Add(e, f)  p = Softmax(r)
      u = Cast<to = 10>(p)  y = MatMul(u, v)"""
    site = the_site(body, inputs=HALF, constants=HALF_CONSTANTS, outputs="float16[B, 4, S, 16] y")
    assert (site.chain, links(site)) == ("MatMul>Cast>Add>Softmax>Cast>MatMul", "cast mask | cast")
    assert (site.dtype, site.product_dtype) == (TensorProto.FLOAT, TensorProto.FLOAT16) and site.late_division


def test_half_precision_cast_pair_and_sink() -> None:
    body = f"""s = MatMul(q, k)  r = Mul(s, d)  e = Add(r, m)  o = Concat<axis = 3>(e, sink)
      w = ReduceMax<axes = [-1]>(o)  a = Sub(o, w)  c = Cast<to = 1>(a)  p = Softmax(c)  g = Cast<to = 10>(p)
      {SLICE} z = Slice(g, i, j, j)  h = Cast<to = 10>(z)  y = MatMul(h, v)"""
    site = the_site(body, inputs=HALF, constants=HALF_CONSTANTS, outputs="float16[B, 4, S, 16] y")
    assert site.chain == "MatMul>Mul>Add>Concat>Sub>Cast>Softmax>Cast>Slice>Cast>MatMul"
    assert links(site) == "scale mask sink row-max cast | cast slice same"


def test_a_mask_in_float32_lifts_the_scores_of_half_precision() -> None:
    body = """s = MatMul(q, k)  c = Cast<to = 1>(s)  a = Add(c, b)  p = Softmax(a)  u = IsNaN(p)  g = Where(u, o, p)
      w = Cast<to = 1>(v)  y = MatMul(g, w)"""
    site = the_site(body, inputs=HALF + ", float[B, 1, S, K] b", constants="float o = {0}")
    assert (site.chain, site.guarded) == ("MatMul>Cast>Add>Softmax>Where>MatMul", True)


def test_grouped_queries_repeat_the_values() -> None:
    inputs = "float[2, 4, 8, 16] q, float[2, 4, 16, 8] k, float[2, 2, 8, 16] kv"
    body = """i = Constant<value_ints = [2]>()  w = Unsqueeze(kv, i)  j = Constant<value_ints = [2, 2, 2, 8, 16]>()
      x = Expand(w, j)  l = Constant<value_ints = [2, 4, 8, 16]>()  v = Reshape(x, l)
      a = MatMul(q, k)  p = Softmax(a)  y = MatMul(p, v)"""
    assert the_site(body, inputs=inputs, outputs="float[2, 4, 8, 16] y").dims.group == 2


def test_rank_known_from_a_transpose_only() -> None:
    body = """q1 = Transpose<perm = [0, 2, 1, 3]>(q)  k1 = Transpose<perm = [0, 2, 3, 1]>(k)  a = MatMul(q1, k1)
      p = Softmax<axis = 3>(a)  v1 = Transpose<perm = [0, 2, 1, 3]>(v)  y = MatMul(p, v1)"""
    proto = model(body)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    (site,) = find(proto).sites
    assert (site.rank, site.dims) == (4, Dims(None, None, None, None, None, 1))


def test_values_from_the_tensor_of_the_keys() -> None:
    body = "k1 = Transpose<perm = [0, 1, 3, 2]>(v)  a = MatMul(q, k1)  p = Softmax(a)  y = MatMul(p, v)"
    assert the_site(body).values == "v"


def test_probabilities_that_are_read_twice_are_divided_early() -> None:
    body = "a = MatMul(q, k)  p = Softmax(a)  z = Neg(p)  y = MatMul(p, v)"
    site = the_site(body)
    assert (site.shared, site.late_division) == (True, False)
    output = "float[B, 4, S, 16] y, float[B, 4, S, K] p"
    assert the_site("a = MatMul(q, k)  p = Softmax(a)  y = MatMul(p, v)", outputs=output).shared
    assert not the_site("a = MatMul(q, k)  p = Softmax(a)  z = Shape(p)  y = MatMul(p, v)").shared


def test_scales_that_are_no_constants() -> None:
    for scale in ("g = Sqrt(d)  a = Mul(s, g)", "a = Mul(s, given)"):
        site = the_site(QK + scale + PV, inputs=INPUTS + ", float given")
        assert links(site) == "scale |"


def test_einsum_with_the_values_first() -> None:
    inputs = "float[2, 8, 4, 16] q, float[2, 8, 4, 16] k, float[2, 8, 4, 16] v"
    body = """a = Einsum<equation = "bqhd,bkhd->bhqk">(q, k)  p = Softmax(a)
      y = Einsum<equation = "bkhd,bhqk->bqhd">(v, p)"""
    assert the_site(body, inputs=inputs, outputs="float[2, 8, 4, 16] y").values == "v"


TURNED = """a = MatMul(q, k)  p = Softmax(a)  h = Transpose<perm = [0, 1, 3, 2]>(p)
  vt = Transpose<perm = [0, 1, 3, 2]>(v)  y = MatMul(vt, h)"""


def test_a_product_of_transposed_probabilities() -> None:
    site = the_site(TURNED, outputs="float[B, 4, 16, S] y")
    assert (site.chain, links(site), site.late_division) == ("MatMul>Softmax>Transpose>MatMul", "| transpose", False)


def test_the_values_of_a_product_of_transposed_probabilities() -> None:
    site = the_site(TURNED, outputs="float[B, 4, 16, S] y")
    assert (site.values, site.dims.head_size) == ("vt", 16)
