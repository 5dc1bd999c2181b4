from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from sample_files import assert_same, refusal

from graphsurgery.data import InputSpec, open_samples

FLOAT, INT, BOOL = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.bool_)


def spec(name: str, dtype: np.dtype[np.generic], *shape: int | str | None) -> InputSpec:
    return InputSpec(name, dtype, shape, optional=False)


DECODER = (
    spec("input_ids", INT, "s23", 1),
    spec("attention_mask", INT, "s31", "s64"),
    spec("past_key", FLOAT, "s23", 2, "s18", 16),
    spec("past_value", FLOAT, "s23", 2, "s74", 16),
)


def test_is_seeded_and_said(specs: tuple[InputSpec, ...]) -> None:
    first, second = open_samples(["synthetic:4"], specs), open_samples(["synthetic:9"], specs)
    assert first.synthetic
    assert first.sources == ("synthetic:4",)
    assert len(first) == 4
    for index, got in enumerate(first):
        assert_same(got, second[index])
        assert_same(got, first[index])


def test_optional_inputs_are_left_to_their_defaults(specs: tuple[InputSpec, ...]) -> None:
    assert "scale" not in open_samples("synthetic:1", specs)[0]


def test_sizes_vary_and_a_name_has_one_size(specs: tuple[InputSpec, ...]) -> None:
    shapes = {got["input_ids"].shape for got in open_samples("synthetic:12", specs)}
    assert len(shapes) > 4
    assert max(max(shape) for shape in shapes) < 16


def test_mask_of_a_decoder_covers_cache_and_tokens_under_any_names() -> None:
    for got in open_samples("synthetic:12", DECODER):
        batch, _, past, _ = got["past_key"].shape
        assert got["past_value"].shape == got["past_key"].shape
        assert got["attention_mask"].shape == (batch, past + 1)
        assert got["input_ids"].shape == (batch, 1)


def test_encoder_and_decoder_masks_follow_their_own_tokens() -> None:
    specs = (
        spec("input_ids", INT, "a", "b"),
        spec("attention_mask", INT, "c", "d"),
        spec("decoder_input_ids", INT, "e", "f"),
        spec("decoder_attention_mask", INT, "g", "h"),
    )
    seen = list(open_samples("synthetic:12", specs))
    for got in seen:
        assert got["attention_mask"].shape == got["input_ids"].shape
        assert got["decoder_attention_mask"].shape == got["decoder_input_ids"].shape
    assert any(got["input_ids"].shape != got["decoder_input_ids"].shape for got in seen)


@pytest.mark.parametrize(
    ("name", "size"), [("past + 1", 1), ("past + new", 2), ("2*past - past", 0), ("past/2", None), ("a b", None)]
)
def test_dimensions_written_as_sums(name: str, size: int | None) -> None:
    specs = (spec("past_key", FLOAT, 1, 2, "past", 4), spec("new", INT, 1, "new"), spec("x", FLOAT, 1, name))
    for got in open_samples("synthetic:6", specs):
        past, new = got["past_key"].shape[2], got["new"].shape[1]
        if size is None:
            assert 2 <= got["x"].shape[1] < 10
        else:
            assert got["x"].shape[1] == past + {0: 0, 1: 1, 2: new}[size]


def test_values_suit_their_names() -> None:
    specs = (
        spec("input_ids", INT, 4, 50),
        spec("token_type_ids", INT, 4, 50),
        spec("position_ids", INT, 4, 50),
        spec("pixels", FLOAT, 4, 50),
        spec("flag", BOOL, 50),
        spec("nibbles", np.dtype(ml_dtypes.int4), 50),
    )
    got = open_samples("synthetic:1", specs)[0]
    assert 16 < got["input_ids"].max() < 32
    assert got["input_ids"].min() >= 0
    assert set(np.unique(got["token_type_ids"])) == {0, 1}
    np.testing.assert_array_equal(got["position_ids"], np.tile(np.arange(50), (4, 1)))
    assert abs(got["pixels"].mean()) < 0.3
    assert 0.8 < got["pixels"].std() < 1.2
    assert 0 < got["flag"].sum() < 50
    assert got["nibbles"].astype(int).max() <= 7


@pytest.mark.parametrize("dtype", [INT, BOOL, FLOAT])
def test_masks_are_ones_with_a_zero_tail(dtype: np.dtype[np.generic]) -> None:
    seen = list(open_samples("synthetic:8", (spec("mask", dtype, 3, 8),)))
    for got in seen:
        ones = got["mask"].astype(int)
        np.testing.assert_array_equal(ones, -np.sort(-ones, axis=-1))
        assert ones.sum(axis=-1).min() >= 4
        assert set(np.unique(ones)) <= {0, 1}
    assert any(got["mask"].astype(int).min() == 0 for got in seen)


@pytest.mark.parametrize("dtype", [FLOAT, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
def test_additive_masks_are_zeros_with_a_lowest_tail(dtype: np.dtype[np.generic]) -> None:
    seen = list(open_samples("synthetic:8", (spec("mask", dtype, 2, 1, 1, 8),)))
    lowest = ml_dtypes.finfo(dtype).min
    values = {float(value) for got in seen for value in got["mask"].astype(np.float64).flat}
    assert values == {0.0, float(lowest)}
    assert all((got["mask"].astype(np.float64)[..., :4] == 0).all() for got in seen)


def test_key_padding_mask_marks_what_to_leave_out() -> None:
    for got in open_samples("synthetic:8", (spec("key_padding_mask", BOOL, 2, 8),)):
        assert not got["key_padding_mask"][:, :4].any()


@pytest.mark.parametrize(
    "text", ["synthetic:", "synthetic:0", "synthetic:-1", "synthetic:x", "synthetic:9999999999999"]
)
def test_refuses_a_bad_number(specs: tuple[InputSpec, ...], text: str) -> None:
    assert f"'{text}' needs a number of samples from 1 to 1000000; write synthetic:8" in refusal(text, specs)


@pytest.mark.parametrize(
    "bad",
    [
        InputSpec("x", FLOAT, None, optional=False),
        InputSpec("x", np.dtype(object), (2,), optional=False),
        InputSpec("x", np.dtype(np.complex64), (2,), optional=False),
    ],
    ids=["rank", "string", "complex"],
)
def test_refuses_what_cannot_be_made_up(bad: InputSpec) -> None:
    assert f"input 'x' is {bad}, which cannot be made up; give --data" in refusal("synthetic:1", (bad,))
