from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from graphsurgery.errors import UsageError
from graphsurgery.verification.metrics import compare, merge
from graphsurgery.verification.tolerance import TOLERANCES, tolerance


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def test_equal_arrays() -> None:
    got = compare("y", f32(1, -2, 3), f32(1, -2, 3))
    assert (got.max_abs, got.max_rel, got.mean_abs, got.worst_index) == (0.0, 0.0, 0.0, None)
    assert (got.sqnr_db, got.cosine) == (math.inf, 1.0)
    assert (got.finite, got.nan_mismatches, got.within, got.reason) == (True, 0, True, None)
    assert (got.name, got.dtype, got.shape) == ("y", "float32", (3,))


def test_numbers_by_hand() -> None:
    got = compare("y", np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[3.0, 4.5], [0.0, 0.0]]))
    assert got.max_abs == 0.5
    assert got.mean_abs == 0.125
    assert got.max_rel == 0.125
    assert got.sqnr_db == pytest.approx(10 * math.log10(25 / 0.25))
    assert got.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert got.worst_index == (0, 1)
    assert not got.within
    assert got.reason == (
        "1 of 4 elements exceed rtol 1e-07, atol 1e-09, largest difference at [0, 1]: 4.5, the reference has 4"
    )


def test_zeros_do_not_rule_the_relative_error() -> None:
    assert compare("y", f32(0, 100), f32(0.01, 100)).max_rel == pytest.approx(0.1)
    assert compare("y", f32(0, 0), f32(0.01, 0)).max_rel == math.inf


def quantised(values: NDArray[np.float64], *, wrap: bool) -> NDArray[np.float64]:
    """Through int8 with a step of 0.05, where the cast saturates or wraps around."""
    steps = np.rint(values / 0.05).astype(np.int64)
    stored = steps.astype(np.int8) if wrap else np.clip(steps, -128, 127).astype(np.int8)
    return stored * 0.05


@pytest.mark.parametrize(("wrap", "error"), [(False, 121.15), (True, 128.0)])
def test_outlier_of_an_int8_quantisation(wrap: bool, error: float) -> None:
    values = np.array([0.01, -0.5, 3.9, -4.0, 127.5])
    got = compare("y", values, quantised(values, wrap=wrap))
    assert got.max_abs == pytest.approx(error, abs=1e-9)
    assert got.worst_index == (4,)
    assert not got.within
    inliers = compare("y", values[:4], quantised(values[:4], wrap=wrap))
    assert inliers.max_abs <= 0.01 + 1e-12
    assert got.sqnr_db < 1 < 40 < inliers.sqnr_db


@pytest.mark.parametrize("name", TOLERANCES)
def test_tolerance_of_each_type_is_a_limit(name: str) -> None:
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    rtol, atol = tolerance(dtype)
    reference = np.full(4, 8.0).astype(dtype)
    limit = atol + rtol * 8.0
    assert compare("y", reference, (np.full(4, 8.0) + 0.7 * limit).astype(dtype)).within
    assert not compare("y", reference, (np.full(4, 8.0) + 1.5 * limit).astype(dtype)).within


def test_explicit_tolerance_replaces_one_part() -> None:
    assert compare("y", f32(1), f32(1.4), atol=0.5).within
    assert not compare("y", f32(1), f32(1.4), rtol=0.3, atol=0).within
    assert compare("y", np.array([1], np.uint8), np.array([2], np.uint8), atol=1).within


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int8, np.bool_])
def test_integers_and_booleans_are_exact(dtype: type[np.generic]) -> None:
    reference = np.array([0, 1, 1], dtype)
    assert compare("y", reference, reference.copy()).within
    got = compare("y", reference, np.array([0, 1, 0], dtype))
    assert (got.within, got.max_abs, got.worst_index) == (False, 1.0, (2,))


def test_four_bit_integers_are_exact() -> None:
    assert tolerance(np.dtype(ml_dtypes.int4)) == (0.0, 0.0)
    values = np.array([1, 2], ml_dtypes.uint4)
    assert compare("y", values, values).within
    assert not compare("y", values, np.array([1, 3], ml_dtypes.uint4)).within


def test_integers_beyond_float64_differ() -> None:
    got = compare("y", np.array([2**60], np.int64), np.array([2**60 + 1], np.int64))
    assert (got.within, got.max_abs, got.worst_index) == (False, 1.0, (0,))


def test_shape_is_strict() -> None:
    got = compare("y", np.zeros((1, 3)), np.zeros(3))
    assert (got.within, got.max_abs) == (False, math.inf)
    assert got.reason == "shape is [3], the reference has [1, 3]"


def test_element_type_is_strict() -> None:
    got = compare("y", np.zeros(3), np.zeros(3, np.float32))
    assert (got.within, got.sqnr_db) == (False, -math.inf)
    assert got.reason == "element type is float32, the reference has float64"


def test_nan_and_infinity_of_the_reference() -> None:
    reference = f32(np.nan, np.inf, -np.inf, 1)
    assert compare("y", reference, f32(5, np.inf, -np.inf, 1)).within
    same = compare("y", reference, reference)
    assert (same.max_abs, same.nan_mismatches, same.within) == (0.0, 0, True)


@pytest.mark.parametrize("wrong", [-np.inf, np.nan, 3e38])
def test_infinity_must_be_the_same(wrong: float) -> None:
    got = compare("y", f32(1, np.inf), f32(1, wrong))
    assert (got.within, got.finite, got.worst_index) == (False, False, (1,))
    assert got.nan_mismatches == int(np.isnan(wrong))
    assert got.reason is not None
    assert got.reason.startswith("not finite as the reference is, first at [1]: ")


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_finite_must_stay_finite_however_large_the_tolerance(wrong: float) -> None:
    got = compare("y", f32(1, 2, 3), f32(1, wrong, 300), rtol=1e9, atol=1e9)
    assert (got.within, got.finite, got.max_abs, got.worst_index) == (False, False, math.inf, (1,))
    assert got.nan_mismatches == int(np.isnan(wrong))


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    got = compare("y", np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    assert (got.within, got.max_abs, got.worst_index, got.cosine) == (True, 0.0, None, 1.0)


def test_scalars() -> None:
    assert compare("y", np.array(2.0), np.array(2.0)).within
    got = compare("y", np.array(2.0), np.array(3.0))
    assert (got.max_abs, got.worst_index, got.within) == (1.0, (), False)
    assert not compare("y", np.array(2.0), np.array(np.nan)).finite


def test_strings_are_exact() -> None:
    reference = np.array(["a", "b"], object)
    assert compare("y", reference, np.array(["a", "b"])).within
    got = compare("y", reference, np.array(["a", "c"], object))
    assert (got.within, got.mean_abs, got.worst_index) == (False, 0.5, (1,))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_ratios_do_not_depend_on_the_scale(scale: float) -> None:
    got = compare("y", np.array([3.0, 4.0]) * scale, np.array([3.0, 4.5]) * scale, rtol=1, atol=1)
    assert got.sqnr_db == pytest.approx(20.0)
    assert got.cosine == pytest.approx(0.998, abs=1e-3)
    assert got.max_rel == pytest.approx(0.125)


def test_ends_of_float64() -> None:
    got = compare("y", np.array([1.7e308]), np.array([-1.7e308]))
    assert (got.within, got.finite, got.max_abs) == (False, True, math.inf)
    assert got.cosine == -1.0


def test_cosine_of_zero_vectors() -> None:
    assert compare("y", f32(0, 0), f32(0, 0)).cosine == 1.0
    assert compare("y", f32(0, 0), f32(0, 1)).cosine == 0.0


def test_json_holds_no_infinity() -> None:
    for candidate in (f32(1, 2), f32(1, np.nan), f32(1)):
        text = json.dumps(compare("y", f32(1, 2), candidate).to_json(), allow_nan=False)
        assert json.loads(text)["name"] == "y"
    equal = compare("y", f32(1, 2), f32(1, 2)).to_json()
    assert equal["sqnr_db"] is None
    assert equal["shape"] == [2]
    assert equal["within"] is True


def test_merge_takes_the_worst_of_each() -> None:
    small = compare("y", f32(1, 1), f32(1, 1))
    large = compare("y", f32(1, 1, 1), f32(1, 1, 1.5))
    bad = compare("y", f32(1), f32(np.nan))
    got = merge([small, large])
    assert (got.max_abs, got.shape, got.worst_index, got.within) == (0.5, (3,), (2,), False)
    assert (got.sqnr_db, got.cosine, got.reason) == (large.sqnr_db, large.cosine, large.reason)
    got = merge([large, small, bad, bad])
    assert (got.finite, got.nan_mismatches, got.max_abs, got.shape) == (False, 2, math.inf, (1,))
    assert merge([small]) == small
    assert merge([small, small]).within


def test_merge_points_at_the_sample_out_of_tolerance() -> None:
    """A small difference of small values can fail where a larger one of large values is fine."""
    fine = compare("y", f32(1e6, 1e6), f32(1e6, 1e6 + 10))
    fails = compare("y", f32(1), f32(1.5))
    got = merge([fine, fails])
    assert (got.max_abs, got.within) == (10.0, False)
    assert (got.worst_index, got.shape) == ((0,), (1,))


def test_merge_refuses_a_mixture() -> None:
    for metrics in ([], [compare("y", f32(1), f32(1)), compare("z", f32(1), f32(1))]):
        with pytest.raises(ValueError, match="metrics of one output"):
            merge(metrics)


def test_types_without_a_tolerance() -> None:
    eight = np.ones(2, ml_dtypes.float8_e4m3fn)
    with pytest.raises(UsageError, match="no tolerance for float8_e4m3fn outputs; give --rtol and --atol"):
        compare("y", eight, eight)
    assert compare("y", eight, eight, rtol=0, atol=0).within
    with pytest.raises(UsageError, match="output 'y' is complex64; complex outputs are not compared"):
        compare("y", np.ones(2, np.complex64), np.ones(2, np.complex64))
