"""The generated attention graphs themselves: valid, right in float64, and of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import onnx
import pytest
import strategies
from attention_graphs import build
from hypothesis import HealthCheck, Phase, find, given, settings
from reference import LOWEST, Bias, Cap, Hide, Scale, attend
from strategies import OLD_RUNTIME, AttentionSpec, attention_specs

from graphsurgery.engines.onnxruntime import OnnxRuntime
from graphsurgery.verification.tolerance import TOLERANCES

SAMPLE = settings(
    max_examples=1200,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def sample() -> list[AttentionSpec]:
    specs: list[AttentionSpec] = []

    @SAMPLE
    @given(attention_specs())
    def collect(spec: AttentionSpec) -> None:
        specs.append(spec)

    collect()
    return specs


def _assert_close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert found.shape == expected.shape
    relative, absolute = TOLERANCES[dtype]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=relative, atol=absolute, equal_nan=True)


@settings(parent=SAMPLE, max_examples=150)
@given(attention_specs())
def test_generated_models_are_valid_and_give_the_float64_answer(spec: AttentionSpec) -> None:
    case = build(spec)
    onnx.checker.check_model(case.model, full_check=True)
    found = OnnxRuntime(threads=1).open(case.model.SerializeToString()).run(case.feeds)
    assert list(found) == list(case.expected)
    for name, expected in case.expected.items():
        assert found[name].dtype == spec.dtype
        _assert_close(found[name], expected, spec.narrowest)


def _choices() -> Iterator[tuple[str, object]]:
    by_field = {
        "dtype": strategies.DTYPES,
        "opset": strategies.OPSETS,
        "rank": (2, 3, 4),
        "scale": strategies.SCALES,
        "scale_source": strategies.SOURCES,
        "mask": strategies.MASKS,
        "mask_source": ("constant", "bool", "input"),
        "mask_shape": ("BHQK", "BQK", "B1K", "11K", "QK"),
        "pattern": strategies.PATTERNS,
        "fill": strategies.FILLS,
        "cast": ("none", "same", "early", "late"),
        "wrap_before": strategies.WRAPS,
        "wrap_after": strategies.WRAPS,
        "reshape": strategies.RESHAPES,
        "types": ("interface", "all", "symbolic"),
        "place": strategies.PLACES,
    }
    flags = ("tied", "einsum_qk", "einsum_pv", "row_max", "sink", "guard", "shared", "tail", "hidden_row")
    for name, values in (by_field | dict.fromkeys(flags, (False, True))).items():
        for value in values:
            yield name, value


@pytest.mark.skipif(OLD_RUNTIME, reason="an old onnxruntime runs a part of the graphs only")
@pytest.mark.parametrize(("name", "value"), list(_choices()))
def test_every_choice_of_every_field_is_drawn(sample: list[AttentionSpec], name: str, value: object) -> None:
    assert sum(getattr(spec, name) == value for spec in sample) >= 4


@pytest.mark.skipif(OLD_RUNTIME, reason="an old onnxruntime runs a part of the graphs only")
@pytest.mark.parametrize("dtype", strategies.DTYPES)
@pytest.mark.parametrize("mask", strategies.MASKS)
def test_every_mask_meets_every_dtype(sample: list[AttentionSpec], dtype: str, mask: str) -> None:
    assert any(spec.dtype == dtype and spec.mask == mask for spec in sample)


@pytest.mark.skipif(OLD_RUNTIME, reason="an old onnxruntime runs a part of the graphs only")
@pytest.mark.parametrize("fill", ["-inf", "lowest", "-10000"])
@pytest.mark.parametrize("guard", [False, True])
def test_rows_without_a_visible_key_are_drawn(sample: list[AttentionSpec], fill: str, guard: bool) -> None:
    assert any(spec.hidden_row and spec.fill == fill and spec.guard == guard for spec in sample)


def test_sizes_reach_long_rows_single_keys_and_groups(sample: list[AttentionSpec]) -> None:
    assert {spec.keys for spec in sample} >= {1, 512, 700, 1024}
    assert {spec.queries for spec in sample} >= {1, 9}
    assert {spec.group for spec in sample} >= {1, 2, 4}


@pytest.mark.skipif(OLD_RUNTIME, reason="an old onnxruntime runs a part of the graphs only")
def test_a_failure_shrinks_to_one_peculiarity() -> None:
    """What has nothing to do with the failure goes back to the first choice."""
    found = find(
        attention_specs(long=False),
        lambda spec: spec.sink and spec.dtype == "float16",
        settings=settings(max_examples=2000, derandomize=True, database=None),
    )
    # A lower rank takes fewer draws, and so counts as simpler.
    assert replace(found, rank=4) == AttentionSpec(dtype="float16", queries=1, keys=1, head_size=1, heads=1, sink=True)


def test_the_text_of_a_description_rebuilds_it(sample: list[AttentionSpec]) -> None:
    for spec in sample[:50]:
        assert eval(repr(spec), {"AttentionSpec": AttentionSpec}) == spec  # noqa: S307 - our own text
    assert {field.name for field in fields(AttentionSpec)} >= {"seed", "dtype", "mask"}


def test_equal_descriptions_build_equal_bytes() -> None:
    spec = AttentionSpec(seed=3, mask="two-adds", scale="mul", guard=True)
    assert build(spec).model.SerializeToString() == build(spec).model.SerializeToString()


def test_hostile_feeds_leave_the_window(sample: list[AttentionSpec]) -> None:
    for spec in [spec for spec in sample if spec.dtype == "float32" and spec.narrowest == "float32"][:20]:
        case = build(spec)
        feeds, expected = case.hostile()
        assert feeds.keys() == case.feeds.keys()
        assert expected.keys() == case.expected.keys()
        if spec.keys > 1 and spec.head_size > 1:
            assert np.abs(feeds["query"]).max() > 5 * np.abs(case.feeds["query"]).max()


# -- the reference


def test_reference_is_softmax_times_values() -> None:
    query, key, value = np.ones((1, 2)), np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[1.0], [3.0]])
    answer = attend(query, key, value, [Scale(0.5)])
    weight = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(answer.output, [[1 * (1 - weight) + 3 * weight]], rtol=1e-14)
    np.testing.assert_allclose(answer.log_sum_exp, [np.log(1 + np.e)], rtol=1e-14)


def test_reference_applies_links_in_order() -> None:
    query, key, value = np.ones((1, 1)), np.array([[4.0], [0.0]]), np.eye(2)
    capped = attend(query, key, value, [Scale(2.0), Cap(3.0), Bias(np.array([0.0, 1.0]))])
    np.testing.assert_allclose(capped.scores, [[3 * np.tanh(8 / 3), 1.0]], rtol=1e-14)


@pytest.mark.parametrize(
    ("fill", "guarded", "expected"),
    [(-np.inf, True, 0.0), (-np.inf, False, np.nan), (LOWEST, False, 2.0), (LOWEST, True, 2.0), (-1e4, False, 2.0)],
)
def test_reference_of_a_row_without_a_visible_key(fill: float, guarded: bool, expected: float) -> None:
    hidden = np.array([[True, True]])
    answer = attend(
        np.ones((1, 1)), np.array([[5.0], [7.0]]), np.array([[1.0], [3.0]]), [Hide(hidden, fill)], guarded=guarded
    )
    np.testing.assert_array_equal(answer.output, [[expected]])
    assert answer.visible.tolist() == [0]


def test_reference_counts_a_sink_in_the_denominator_alone() -> None:
    query, key, value = np.zeros((1, 1)), np.zeros((3, 1)), np.ones((3, 1))
    answer = attend(query, key, value, [], sink=np.zeros((1, 1)))
    np.testing.assert_allclose(answer.probabilities, [[0.25, 0.25, 0.25]], rtol=1e-14)
    np.testing.assert_allclose(answer.output, [[0.75]], rtol=1e-14)
