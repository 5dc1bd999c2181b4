from __future__ import annotations

import math

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, parser

from graphsurgery.attention import find_attention
from graphsurgery.model.index import ModelIndex
from graphsurgery.phi.choose import (
    Interval,
    check_phi,
    choose_per_head,
    choose_phi,
    phi_interval,
    window_refusal,
)
from graphsurgery.phi.statistics import RowStatistics, SiteStatistics
from graphsurgery.phi.window import Window, executing_dtype, window

INF = float("inf")
WIDE, HALF = window(TensorProto.FLOAT), window(TensorProto.FLOAT16)


def rows(low: float, high: float, *, lse: float | None = None, value: float = 1.0) -> RowStatistics:
    """Rows whose maxima run from low to high."""
    return RowStatistics(4, 0, 0, low, high, low, INF, high if lse is None else lse, low, value)


# -- windows


def test_windows_of_the_executing_types() -> None:
    assert (WIDE.lower, WIDE.upper, HALF.lower, HALF.upper) == (-60.0, 60.0, -8.0, 9.0)
    bfloat16 = window(TensorProto.BFLOAT16)
    assert bfloat16.dtype == "bfloat16" and bfloat16.interval(1, 0, 0, 1, 0) == WIDE.interval(1, 0, 0, 1, 0)
    assert (WIDE.margin, HALF.margin) == (10.0, 3.0)


@pytest.mark.parametrize(
    ("limits", "lse", "low", "single", "value", "margin", "expected"),
    [
        # lse - φ <= 60 and m - φ >= -60
        (WIDE, 5.0, -3.0, INF, 1.0, 0.0, (-55.0, 57.0)),
        (WIDE, 5.0, -3.0, INF, 1.0, 10.0, (-45.0, 57.0)),
        # large values shrink the upper end by log max|v|, small ones do not widen it
        (WIDE, 5.0, -3.0, INF, math.e**2, 0.0, (-53.0, 57.0)),
        (WIDE, 5.0, -3.0, INF, 0.001, 0.0, (-55.0, 57.0)),
        # a row with one key may lie 66 below
        (WIDE, 5.0, INF, -3.0, 1.0, 0.0, (-55.0, 63.0)),
        (WIDE, 5.0, -3.0, -20.0, 1.0, 0.0, (-55.0, 46.0)),
        (HALF, 2.0, -3.0, INF, 1.0, 3.0, (-4.0, 5.0)),
        (HALF, 2.0, -3.0, -5.0, 1.0, 3.0, (-4.0, 5.0)),
        (HALF, 2.0, -3.0, -7.0, 1.0, 3.0, (-4.0, 4.0)),
        (HALF, 20.0, -20.0, INF, 1.0, 3.0, (14.0, -12.0)),
    ],
)
def test_admissible_interval(
    limits: Window,
    lse: float,
    low: float,
    single: float,
    value: float,
    margin: float,
    expected: tuple[float, float],
) -> None:
    assert limits.interval(lse, low, single, value, margin) == pytest.approx(expected, abs=1e-12)


def attention(kind: str) -> ModelProto:
    cast = "g = Cast<to = 10>(p)  y = MatMul(g, v)" if kind == "mixed" else "y = MatMul(p, v)"
    types = {"mixed": ("float", "float16"), "float16": ("float16",) * 2, "bfloat16": ("bfloat16",) * 2}
    first, second = types.get(kind, ("float", "float"))
    text = f"""<ir_version: 10, opset_import: ["" : 17]> agraph ({first}[2, 8] q, {first}[8, 3] k, {second}[3, 8] v)
      => ({second}[2, 8] y) {{ a = MatMul(q, k)  p = Softmax(a)  {cast} }}"""
    return parser.parse_model(text)


@pytest.mark.parametrize(
    ("kind", "target", "expected"),
    [
        ("float", "generic", TensorProto.FLOAT),
        ("float", "qnn-htp", TensorProto.FLOAT16),
        ("float", "ort-cpu", TensorProto.FLOAT),
        ("float16", "generic", TensorProto.FLOAT16),
        ("mixed", "generic", TensorProto.FLOAT16),
        ("bfloat16", "generic", TensorProto.BFLOAT16),
        ("bfloat16", "qnn-htp", TensorProto.FLOAT16),
    ],
)
def test_executing_dtype(kind: str, target: str, expected: int) -> None:
    (site,) = find_attention(ModelIndex(attention(kind))).sites
    assert executing_dtype(site, target) == expected


# -- one φ


def test_interval_of_rows() -> None:
    interval = phi_interval(rows(-3, 5, lse=6), WIDE, 10.0)
    assert interval == Interval(-44.0, 57.0) and not interval.empty
    assert interval.inner() == Interval(-18.75, 31.75)
    assert phi_interval(RowStatistics(), WIDE, 0.0).empty, "no row seen, nothing admissible"
    assert phi_interval(rows(-60, 61), WIDE, 0.0).empty and not phi_interval(rows(-59, 60), WIDE, 0.0).empty


def test_zero_where_it_serves() -> None:
    assert choose_phi({"a": Interval(-4.0, 4.0), "b": Interval(-4.0, 12.0)}) == {"a": 0.0, "b": 0.0}
    assert choose_phi({"a": Interval(-4.0, 4.0), "b": Interval(-1.0, 9.0)}) == {"a": 1.75, "b": 1.75}


def test_the_fewest_values() -> None:
    intervals = {"a": Interval(0, 40), "b": Interval(20, 40), "c": Interval(16, 60), "d": Interval(100, 140)}
    chosen = choose_phi(intervals)
    assert chosen == {"a": 28.5, "b": 28.5, "c": 28.5, "d": 120.0}
    for key, phi in chosen.items():
        inner = intervals[key].inner()
        assert inner.low <= phi <= inner.high, "never in the outer quarters"


def test_intervals_that_do_not_meet_have_values_of_their_own() -> None:
    chosen = choose_phi({"a": Interval(10, 12), "b": Interval(20, 22), "c": Interval(30, 32)})
    assert chosen == {"a": 11.0, "b": 21.0, "c": 31.0}


def test_no_value_where_nothing_is_admitted() -> None:
    assert choose_phi({"a": Interval(1, 0), "b": Interval(10, 10)}) == {"b": 10.0}
    assert choose_phi({}) == {}
    assert choose_phi({"a": phi_interval(RowStatistics(), WIDE, 0.0)}) == {}


def test_the_choice_does_not_depend_on_the_order_of_the_sites() -> None:
    rng = np.random.default_rng(5)
    entries = [(f"s{i}", Interval(low, low + rng.uniform(1, 40))) for i, low in enumerate(rng.uniform(-50, 50, 12))]
    first = choose_phi(dict(entries))
    assert len(first) == 12
    for _ in range(5):
        rng.shuffle(entries)
        assert choose_phi(dict(entries)) == first


def test_the_number_of_values_is_least() -> None:
    """Against all stabbing sets: no fewer points meet all inner intervals."""
    rng = np.random.default_rng(6)
    for _ in range(20):
        intervals = {f"s{i}": Interval(low, low + 12) for i, low in enumerate(rng.integers(10, 80, 6).astype(float))}
        inner = [interval.inner() for interval in intervals.values()]
        disjoint, end = 0, -INF
        for interval in sorted(inner, key=lambda i: i.high):
            if interval.low > end:
                disjoint, end = disjoint + 1, interval.high
        assert len(set(choose_phi(intervals).values())) == disjoint


def test_values_are_on_a_grid_that_every_type_holds() -> None:
    (phi,) = choose_phi({"a": Interval(10.01, 13.02)}).values()
    assert phi * 8 == round(phi * 8) and float(np.float16(phi)) == phi
    (narrow,) = choose_phi({"a": Interval(10.01, 10.03)}).values()
    assert 10.015 <= narrow <= 10.025


# -- per head


def test_a_value_for_each_head() -> None:
    seen = SiteStatistics((rows(0, 2), rows(30, 32), rows(-1, 1)))
    assert phi_interval(seen.layer, HALF, 3.0).empty
    assert choose_per_head(seen, HALF, 3.0) == (0.0, 32.0, 0.0)


def test_no_values_per_head_where_one_head_admits_none() -> None:
    assert choose_per_head(SiteStatistics((rows(0, 2), rows(0, 30))), HALF, 3.0) is None
    assert choose_per_head(SiteStatistics((rows(0, 2), RowStatistics())), HALF, 3.0) is None
    assert choose_per_head(SiteStatistics((rows(0, 2),)), HALF, 3.0) is None, "one entry tells no heads apart"


# -- refusals


def test_a_given_value_inside_the_window() -> None:
    seen = SiteStatistics((rows(-3, 5),))
    assert check_phi(0.0, seen, WIDE, "soft") is None
    for phi in (-55.0, 57.0):
        assert check_phi(phi, seen, WIDE, "soft") is None, "the ends, without a margin"


@pytest.mark.parametrize("phi", [-55.5, 57.5])
def test_a_given_value_outside_the_window(phi: float) -> None:
    refusal = check_phi(phi, SiteStatistics((rows(-3, 5),)), WIDE, "soft")
    assert refusal is not None
    assert (refusal.code, refusal.node, refusal.values) == ("window", "soft", {"phi": phi, "low": -55.0, "high": 57.0})
    assert refusal.reason == (
        f"φ = {phi:g} puts rows of soft outside the float32 window; the data admits φ from -55 to 57 (without margin)"
    )


def test_a_given_value_where_none_fits() -> None:
    refusal = check_phi(0.0, SiteStatistics((rows(-30, 30),)), HALF, "soft")
    assert refusal is not None and "the data admits no φ" in refusal.reason


def test_why_no_value_fits() -> None:
    refusal = window_refusal(SiteStatistics((rows(-30, 30, lse=31, value=2.0),)), HALF, 3.0, "soft")
    assert (refusal.code, refusal.node) == ("window", "soft")
    assert refusal.values["short"] == pytest.approx(31 + math.log(2) - 9 + 3 + 30 - 8)
    assert "row maxima of soft run from -30 to 30 and row log-sum-exp up to 31, max|v| 2" in refusal.reason
    assert "--otherwise exact" in refusal.reason and "float16 window (margin 3)" in refusal.reason


def test_no_row_with_a_visible_key() -> None:
    refusal = window_refusal(SiteStatistics((RowStatistics(hidden=3),)), HALF, 3.0, "soft")
    assert (refusal.code, refusal.node) == ("no-evidence", "soft") and "no row with a visible key" in refusal.reason
