"""What a mask writes in place of a hidden score, by the way the mask is made."""

from __future__ import annotations

import numpy as np
import pytest
from chain_models import find, model
from onnx import numpy_helper

from graphsurgery.attention import Site

INPUTS = "float[B, 4, S, 16] q, float[B, 4, 16, K] k, float[B, 4, K, 16] v, bool[B, 1, S, K] t, float[B, 1, 1, K] pad"
CONSTANTS = (
    "float inf = {-inf}, float low = {-3e38}, float ten = {-10000}, float small = {-100}, float nil = {0}, "
    "float one = {1}"
)
FILLED = "n = Shape(t)  e = ConstantOfShape<value = float[1] {-3e38}>(n)"
STEPS = "  ".join(f"e{i + 1} = Identity(e{i})" for i in range(13))
MASKS: dict[str, tuple[str, set[str]]] = {
    "where_inf": ("f = Where(t, nil, inf)", {"inf"}),
    "where_lowest": ("f = Where(t, nil, low)", {"lowest"}),
    "where_both": ("e = Where(t, nil, low)  f = Where(t, e, inf)", {"inf", "lowest"}),
    "a_bias_hides_nothing": ("f = Where(t, nil, small)", set()),
    "an_input": ("f = Identity(pad)", {"unknown"}),
    "inverted_times_a_fill": ("e = Sub(one, pad)  f = Mul(e, ten)", {"large"}),
    "fill_first": ("e = Sub(one, pad)  f = Mul(ten, e)", {"large"}),
    "factor_of_one": ("e = Where(t, nil, low)  f = Mul(e, one)", {"lowest"}),
    "product_of_computed_values": ("e = Where(t, nil, inf)  g = Abs(pad)  f = Mul(e, g)", {"inf", "unknown"}),
    "passed_on": (
        "c = Constant<value_ints = [1]>()  e = Where(t, nil, low)  g = Cast<to = 1>(e)  h = Unsqueeze(g, c)  "
        "f = Squeeze(h, c)",
        {"lowest"},
    ),
    "filled": (
        "n = Shape(t)  e = ConstantOfShape<value = float[1] {-3e38}>(n)  f = Where(t, pad, e)",
        {"lowest", "unknown"},
    ),
    "zeros": ("n = Shape(t)  f = ConstantOfShape(n)", set()),
    "triangle": (f"{FILLED}  f = Trilu<upper = 1>(e)", {"lowest"}),
    "positions": ("e = MatMul(q, k)  f = Tanh(e)", set()),
    "an_operator_without_a_rule": ("e = Where(t, nil, low)  f = Relu(e)", {"unknown"}),
    "deeper_than_it_looks": (f"e0 = Where(t, nil, low)  {STEPS}  f = Identity(e13)", {"unknown"}),
}


def masked(body: str) -> Site:
    chain = f"{body}  s = MatMul(q, k)  a = Add(s, f)  p = Softmax(a)  y = MatMul(p, v)"
    (site,) = find(model(chain, inputs=INPUTS, constants=CONSTANTS)).sites
    return site


@pytest.mark.parametrize("name", MASKS)
def test_fill(name: str) -> None:
    body, expected = MASKS[name]
    assert masked(body).mask_fills == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (np.where(np.tri(3, dtype=bool), 0, -np.inf), set()),
        (np.where(np.tri(3, dtype=bool), 0, -10000.0), set()),
        (np.where(np.tri(3, k=-1, dtype=bool), 0, -np.inf), {"inf"}),
        (np.where(np.tri(3, k=-1, dtype=bool), 0, -10000.0), {"large"}),
        (np.zeros((3, 3)), set()),
    ],
    ids=["causal", "causal_finite", "a_row_without_keys", "a_row_without_keys_finite", "bias"],
)
def test_constant_masks(mask: np.ndarray, expected: set[str]) -> None:
    """A constant mask that shows a key in each row hides no row, whatever it is filled with."""
    body = "s = MatMul(q, k)  a = Add(s, f)  p = Softmax(a)  y = MatMul(p, v)"
    proto = model(body, constants="float d = {0}")
    proto.graph.initializer.append(numpy_helper.from_array(mask.astype(np.float32), "f"))
    (site,) = find(proto).sites
    assert site.mask_fills == expected
    both = model(body.replace("a = Add(s, f)", "r = Add(s, f)  a = Add(r, f)"), constants="float d = {0}")
    both.graph.initializer.append(numpy_helper.from_array(mask.astype(np.float32), "f"))
    (site,) = find(both).sites
    assert bool(site.mask_fills) == bool((mask < -1).any()), "two masks may hide a row together"


@pytest.mark.parametrize(("operands", "expected"), [("t, inf, s", {"inf"}), ("t, s, low", {"lowest"})])
def test_a_fill_by_where(operands: str, expected: set[str]) -> None:
    body = f"s = MatMul(q, k)  a = Where({operands})  p = Softmax(a)  y = MatMul(p, v)"
    (site,) = find(model(body, inputs=INPUTS, constants=CONSTANTS)).sites
    assert site.mask_fills == expected


def test_no_mask_no_fill() -> None:
    (site,) = find(model("a = MatMul(q, k)  p = Softmax(a)  y = MatMul(p, v)")).sites
    assert site.mask_fills == frozenset()
