from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from sample_files import Sample, assert_same, folder_of, refusal, sample

from graphsurgery.data import InputSpec, open_samples

Specs = tuple[InputSpec, ...]


def test_reads_lazily_and_again(specs: Specs) -> None:
    given = [sample(0), sample(1, seq=5)]
    samples = open_samples(given, specs)
    assert len(samples) == 2
    assert not samples.synthetic
    assert samples.sources == ("iterable of 2 samples",)
    for _ in range(2):
        for got, wanted in zip(samples, given, strict=True):
            assert_same(got, wanted)
    assert_same(samples[1], given[1])
    assert_same(samples[-1], given[1])


def test_inputs_come_in_graph_order_and_optional_ones_may_be_given(specs: Specs) -> None:
    given = {"scale": np.ones(1, np.float32), **dict(reversed(sample().items()))}
    assert list(open_samples([given], specs)[0]) == ["input_ids", "attention_mask", "state", "scale"]


def test_generator_that_reuses_its_buffer_is_copied(specs: Specs) -> None:
    def reusing() -> Iterator[Sample]:
        arrays = sample()
        for value in range(3):
            arrays["state"][:] = value
            yield arrays

    samples = open_samples(reusing(), specs, max_samples=2)
    assert [float(got["state"][0, 0]) for got in samples] == [0.0, 1.0]


def test_endless_iterable_stops_at_max_samples(specs: Specs) -> None:
    def endless() -> Iterator[Sample]:
        for _ in range(3):
            yield sample()
        raise AssertionError("a fourth sample was asked for")

    assert len(open_samples(endless(), specs, max_samples=3)) == 3


def test_max_samples_counts_over_all_sources(specs: Specs, tmp_path: Path) -> None:
    first = folder_of(tmp_path / "a", sample(0), sample(1))
    second = folder_of(tmp_path / "b", sample(2), sample(3))
    samples = open_samples([first, str(second)], specs, max_samples=3)
    assert len(samples) == 3
    assert_same(samples[2], sample(2))
    assert samples.sources == ("folder of 2 samples, 0.npz to 1.npz",) * 2


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (3, 1), (7, 1), (8, 2), (12, 3)])
def test_split_holds_out_the_last_quarter(specs: Specs, count: int, held_out: int) -> None:
    given = [sample(seed) for seed in range(count)]
    calibration, rest = open_samples(given, specs).split()
    assert (len(calibration), len(rest)) == (count - held_out, held_out)
    for got, wanted in zip([*calibration, *rest], given, strict=True):
        assert_same(got, wanted)
    assert not rest.reused
    assert calibration.sha256 == open_samples(given[: count - held_out], specs).sha256


def test_split_of_a_single_sample_reuses_it_and_says_so(specs: Specs) -> None:
    calibration, held_out = open_samples([sample()], specs).split()
    assert (len(calibration), len(held_out)) == (1, 1)
    assert held_out.reused
    assert not calibration.reused


def test_sha256_sees_every_part(specs: Specs) -> None:
    changed = sample()
    changed["state"][1, 3] += 1
    zero = {**sample(), "scale": np.zeros(1, np.float32)}
    hashes = {open_samples(given, specs).sha256 for given in ([sample()], [changed], [zero], [sample(), sample()])}
    assert len(hashes) == 4
    assert open_samples([dict(reversed(sample().items()))], specs).sha256 == open_samples([sample()], specs).sha256


def test_sha256_does_not_depend_on_layout_or_byte_order(specs: Specs) -> None:
    given = sample()
    other = {
        "input_ids": np.asfortranarray(given["input_ids"]),
        "attention_mask": given["attention_mask"],
        "state": given["state"].astype(">f4"),
    }
    samples = open_samples([other], specs)
    assert samples.sha256 == open_samples([given], specs).sha256
    assert_same(samples[0], given)


def test_strings_and_scalars() -> None:
    text = (
        InputSpec("text", np.dtype(object), ("n",), optional=False),
        InputSpec("flag", np.dtype(np.bool_), (), optional=False),
    )
    samples = open_samples([{"text": np.array(["a", "bc"]), "flag": np.bool_(True)}], text)
    assert samples[0]["text"].tolist() == ["a", "bc"]
    assert samples[0]["text"].dtype == object
    assert samples[0]["flag"].shape == ()
    assert "holds objects that are no strings" in refusal([{"text": np.array([1], object), "flag": np.bool_(1)}], text)


def test_bits_of_bfloat16_are_taken_as_such() -> None:
    spec = (InputSpec("x", np.dtype(ml_dtypes.bfloat16), (3,), optional=False),)
    values = np.array([1, -2, 0.5], ml_dtypes.bfloat16)
    for stored in (values, values.view(np.uint16), values.view("V2")):
        assert_same(open_samples([{"x": stored}], spec)[0], {"x": values})
    message = refusal([{"x": values.astype(np.float32)}], spec)
    assert "input 'x' is float32, the model takes bfloat16[3]; convert it with ml_dtypes" in message
    assert "input 'x' is int16" in refusal([{"x": values.view(np.int16)}], spec)


def test_infinite_masks_are_allowed(specs: Specs) -> None:
    given = sample()
    given["attention_mask"][0, 2] = -np.inf
    assert_same(open_samples([given], specs)[0], given)


WRONG = [
    ("state", None, "input 'state' (float32[batch,4]) is missing, it has 'attention_mask', 'input_ids'; add an array"),
    ("input_ids", np.zeros((2, 3), np.int32), "input 'input_ids' is int32, the model takes int64[batch,seq]; convert"),
    ("state", np.zeros((2, 4)), "is float64, the model takes float32[batch,4]; convert it with .astype(np.float32)"),
    ("state", np.zeros((4,), np.float32), "input 'state' has shape [4], the model takes float32[batch,4]; reshape it"),
    (
        "state",
        np.zeros((2, 5), np.float32),
        "'state' has shape [2, 5], the model takes float32[batch,4]; make axis 1 4",
    ),
    ("state", np.zeros((3, 4), np.float32), "dimension 'batch' is 3 in input 'state' but 2 in input 'input_ids'; give"),
    ("state", np.full((2, 4), np.nan, np.float32), "input 'state' holds NaN, first at index [0, 0]; remove or replace"),
    (
        "state",
        np.full((2, 4), np.inf, np.float32),
        "input 'state' holds +Inf, first at index [0, 0]; a mask hides",
    ),
    ("attention_mask", np.full((2, 3), np.nan, np.float32), "input 'attention_mask' holds NaN"),
    ("state", np.array([["a"] * 4] * 2), "input 'state' is <U1, the model takes float32[batch,4]; save it again"),
    ("state", [[0.0] * 4] * 2, "input 'state' is a list, no numpy array; wrap it in numpy.asarray(..., dtype=...)"),
    (
        "scales",
        np.zeros((2, 4), np.float32),
        "'scales' is not an input of the model; rename it to 'scale' or remove it",
    ),
    ("zzz", np.zeros((2, 4), np.float32), "'zzz' is not an input of the model; remove it (inputs are 'input_ids'"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), WRONG, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(WRONG)]
)
def test_refuses_and_names_sample_and_input(specs: Specs, name: str, value: object, message: str) -> None:
    bad: dict[str, object] = {**sample(), name: value}
    if value is None:
        del bad[name]
    found = refusal([sample(), bad], specs)
    assert message in found
    assert found.startswith("sample 1 of the given iterable: ")


def test_misspelt_input_is_found_before_the_missing_one(specs: Specs) -> None:
    given = sample()
    given["attn_mask"] = given.pop("attention_mask")
    assert "'attn_mask' is not an input of the model; rename it to 'attention_mask'" in refusal([given], specs)


def test_refuses_a_sequence_input() -> None:
    spec = (InputSpec("many", np.dtype("V0"), None, optional=True),)
    assert "input 'many' is a sequence or map, which samples cannot hold" in refusal([{"many": np.zeros(2)}], spec)
    assert len(open_samples([{}], spec)) == 1


@pytest.mark.parametrize("given", [[], iter([])])
def test_refuses_no_samples(specs: Specs, given: object) -> None:
    assert "there are no samples; give a folder of .npz files" in refusal(given, specs)


@pytest.mark.parametrize("given", [7, [7], ["synthetic:1", 7], [sample(), "a"]])
def test_refuses_what_is_neither_path_nor_mapping(specs: Specs, given: object) -> None:
    assert "mapping" in refusal(given, specs)


def test_refuses_a_key_that_is_no_name(specs: Specs) -> None:
    assert "the key 3 is no input name" in refusal([{3: np.zeros(1)}], specs)


def test_one_mapping_is_one_sample(specs: Specs) -> None:
    assert len(open_samples(sample(), specs)) == 1  # type: ignore[arg-type]


def test_refuses_max_samples_below_one(specs: Specs) -> None:
    with pytest.raises(Exception, match="max_samples is 0; give at least 1"):
        open_samples([sample()], specs, max_samples=0)
