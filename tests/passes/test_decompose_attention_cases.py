"""The operator's own test cases are the oracle: every fused node must keep its outputs when it becomes a chain."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import numpy as np
import onnx
import onnx.checker
import pytest
from attention_nodes import Values, assert_same, decompose, needs_the_operator, operators, run
from onnx import ModelProto

pytestmark = needs_the_operator

CASES_IN_ONNX = 93
CHECKER: Any = onnx.checker


@functools.cache
def node_cases() -> dict[str, tuple[ModelProto, Values, Values]]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # the generators of other operators divide by zero on purpose
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found: list[Any] = collect_testcases(None)
    cases: dict[str, tuple[ModelProto, Values, Values]] = {}
    for case in found:
        if case.name.startswith("test_attention") and "_expanded" not in case.name:
            model, (inputs, outputs) = case.model, case.data_sets[0]
            feed = dict(zip([v.name for v in model.graph.input], inputs, strict=True))
            want = dict(zip([v.name for v in model.graph.output], outputs, strict=True))
            cases[case.name.removeprefix("test_attention_")] = (model, feed, want)
    return cases


def without_sizes(model: ModelProto, keep_rank: bool) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    for value in [*copy.graph.input, *copy.graph.output]:
        if not keep_rank:
            value.type.tensor_type.ClearField("shape")
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return copy


def test_every_case_of_onnx_keeps_its_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    right: list[str] = []
    refused: dict[str, str] = {}
    for name, (model, feed, want) in node_cases().items():
        new, result = decompose(model)
        if not result.changed:
            refused[name] = result.skipped[0][1]
            continue
        assert "Attention" not in operators(new)
        CHECKER.check_model(new, full_check=True)
        assert_same(run(new, feed), want)
        right.append(name)
    with capsys.disabled():
        sys.stdout.write(
            f"\ndecomposed and equal: {len(right)} of {len(node_cases())} cases of onnx {onnx.__version__}\n"
        )
    assert refused == {}
    assert len(right) >= CASES_IN_ONNX


def test_every_case_without_sizes_keeps_its_outputs() -> None:
    for model, feed, want in node_cases().values():
        new, result = decompose(without_sizes(model, keep_rank=True))
        assert result.changed == 1
        CHECKER.check_model(new, full_check=True)
        assert_same(run(new, feed), want)


def test_without_any_shape_only_nodes_with_head_counts_are_skipped() -> None:
    for name, (model, feed, want) in node_cases().items():
        new, result = decompose(without_sizes(model, keep_rank=False))
        if name.startswith("3d"):
            assert [reason for _, reason in result.skipped] == ["input Q: rank unknown"], name
        else:
            assert result.changed == 1, name
            assert_same(run(new, feed), want)


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("4d", "Transpose Mul MatMul Softmax MatMul"),
        ("4d_softcap", "Transpose Mul MatMul Div Tanh Mul Softmax MatMul"),
        ("4d_causal", "Transpose Mul MatMul Add Softmax MatMul"),
        ("4d_attn_mask_bool", "Transpose Where Mul MatMul Add Softmax IsNaN Where MatMul"),
        ("3d_local_window", "Reshape Transpose Reshape Transpose Expand Transpose Reshape Transpose Mul MatMul Add "
         "Softmax Expand MatMul Transpose Reshape"),
    ],
)  # fmt: skip
def test_the_chain_is_the_standard_one(name: str, chain: str) -> None:
    assert operators(decompose(node_cases()[name][0])[0]) == chain.split()


def test_no_value_has_more_than_four_dimensions() -> None:
    for name, (model, _, _) in node_cases().items():
        inferred = onnx.shape_inference.infer_shapes(decompose(model)[0], strict_mode=True)
        ranks = {len(info.type.tensor_type.shape.dim) for info in inferred.graph.value_info}
        assert max(ranks) == 4, name
