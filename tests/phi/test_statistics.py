from __future__ import annotations

import math

import numpy as np
import pytest

from graphsurgery.phi.statistics import RowStatistics, SiteStatistics

INF = float("inf")


def rows(*entries: tuple[float, float, float, float]) -> np.ndarray:
    return np.array(entries, np.float32).reshape(-1, 4)


def test_no_rows() -> None:
    seen = RowStatistics.of(rows(), 2.0)
    assert seen == RowStatistics(value_high=2.0)
    assert (seen.rows, seen.hidden, seen.single) == (0, 0, 0)
    assert (seen.row_max_low, seen.row_max_high, seen.lse_high, seen.score_low) == (INF, -INF, -INF, INF)


def test_extremes_of_rows() -> None:
    seen = RowStatistics.of(rows((3, 4, 2, -1), (5, 5.5, 3, 0), (-2, -1.5, 4, -9)), 7.0)
    assert seen == RowStatistics(3, 0, 0, -2, 5, -2, INF, 5.5, -9, 7.0)


@pytest.mark.parametrize("top", [-3.0e38, -10000.0, -9000.0, -math.inf])
def test_hidden_rows_count_nowhere_else(top: float) -> None:
    seen = RowStatistics.of(rows((3, 4, 2, -1), (top, 900, 8, -5)), 1.0)
    assert seen == RowStatistics(1, 1, 0, 3, 3, 3, INF, 4, -1, 1.0, hidden_high=float(np.float32(top)))


@pytest.mark.parametrize("top", [-8999.0, -100.0])
def test_low_rows_are_not_hidden(top: float) -> None:
    seen = RowStatistics.of(rows((top, top, 2, top)), 1.0)
    assert (seen.rows, seen.hidden, seen.row_max_low) == (1, 0, top)


def test_rows_with_one_key_are_kept_apart() -> None:
    seen = RowStatistics.of(rows((-20, -20, 1, -20), (3, 4, 2, -1)), 1.0)
    assert (seen.rows, seen.single) == (2, 1)
    assert (seen.row_max_low, seen.several_low, seen.single_low) == (-20, 3, -20)
    only = RowStatistics.of(rows((-20, -20, 1, -20)), 1.0)
    assert (only.several_low, only.single_low) == (INF, -20)


def test_merge_takes_the_extremes_and_adds_the_counts() -> None:
    first = RowStatistics(3, 1, 1, -2, 5, -1, -2, 5.5, -9, 7.0)
    second = RowStatistics(2, 4, 0, -3, 4, -3, INF, 9.5, -8, 1.0)
    merged = RowStatistics(5, 5, 1, -3, 5, -3, -2, 9.5, -9, 7.0)
    assert first.merge(second) == merged == second.merge(first)
    assert first.merge(RowStatistics()) == first


def test_numbers_are_rounded_for_the_table_and_read_back() -> None:
    seen = RowStatistics(3, 0, 0, -1.23456789, 123456.789, 0.1, INF, 2.0, -INF, 7.0)
    entry = seen.to_json()
    assert entry["row_max_low"] == -1.23457 and entry["row_max_high"] == 123457.0
    assert entry["single_low"] is None and entry["rows"] == 3
    back = RowStatistics.from_json(entry)
    assert back.single_low == INF and back.row_max_low == -1.23457 and back.to_json() == entry


def observed(*heads: list[tuple[float, float, float, float]]) -> np.ndarray:
    return np.array(heads, np.float32)[None]


def test_heads_are_kept_apart() -> None:
    seen = SiteStatistics.of(
        observed([(1, 2, 2, 0), (3, 4, 2, 1)], [(-5, -4, 2, -6), (-7, -6, 2, -8)]),
        np.array([2.0, 8.0], np.float32).reshape(1, 2, 1, 1),
    )
    assert [(head.row_max_low, head.row_max_high, head.value_high) for head in seen.heads] == [(1, 3, 2), (-7, -5, 8)]
    layer = seen.layer
    assert (layer.rows, layer.row_max_low, layer.row_max_high, layer.lse_high, layer.value_high) == (4, -7, 3, 4, 8)


def test_values_that_heads_share_count_for_each_head() -> None:
    seen = SiteStatistics.of(observed([(1, 2, 2, 0)], [(2, 3, 2, 1)]), np.array([-4.0], np.float32).reshape(1, 1, 1, 1))
    assert [head.value_high for head in seen.heads] == [4, 4]


@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4), (1, 1, 2, 4)])
def test_one_head(shape: tuple[int, ...]) -> None:
    data = rows((1, 2, 2, 0), (3, 4, 2, 1)).reshape(shape)
    seen = SiteStatistics.of(data, np.ones((1, 1), np.float32))
    assert seen.heads == (RowStatistics.of(rows((1, 2, 2, 0), (3, 4, 2, 1)), 1.0),) and seen.samples == 1


def test_leading_axes_hold_more_rows_of_the_same_heads() -> None:
    data = np.arange(2 * 3 * 2 * 4, dtype=np.float32).reshape(2, 3, 2, 4)
    seen = SiteStatistics.of(data, np.ones((2, 3, 1, 1), np.float32))
    assert [head.rows for head in seen.heads] == [4, 4, 4]
    assert [(head.row_max_low, head.row_max_high) for head in seen.heads] == [(0, 28), (8, 36), (16, 44)]


def test_samples_merge_by_head() -> None:
    one = SiteStatistics((RowStatistics(rows=1, row_max_low=1.0), RowStatistics(rows=2, row_max_low=2.0)))
    merged = one.merge(one)
    assert [head.rows for head in merged.heads] == [2, 4] and merged.samples == 2


def test_samples_with_other_heads_merge_to_one_entry() -> None:
    two = SiteStatistics((RowStatistics(rows=1, row_max_low=1.0), RowStatistics(rows=2, row_max_low=2.0)))
    three = SiteStatistics((RowStatistics(rows=1, row_max_low=-1.0),) * 3, 2)
    for merged in (two.merge(three), three.merge(two)):
        (head,) = merged.heads
        assert (head.rows, head.row_max_low, merged.samples) == (6, -1.0, 3)
