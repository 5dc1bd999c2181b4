from __future__ import annotations

import numpy as np
import pytest
from attention_pairs import EARLY, INPUTS, LAYERS, feeds, model, planted, rewritten
from onnx import ModelProto

import graphsurgery
from graphsurgery.verification.models import VerifyResult
from graphsurgery.verification.sites import paired_sites


def verified(a: ModelProto, b: ModelProto) -> VerifyResult:
    before = a.SerializeToString(), b.SerializeToString()
    result = graphsurgery.verify(a, b, data=feeds(2))
    assert (a.SerializeToString(), b.SerializeToString()) == before, "models are not modified"
    return result


def sites(result: VerifyResult) -> dict[str, bool]:
    return {check.id: check.passed for check in result.sites}


BOTH = {"main/soft1": True, "main/soft2": True}


@pytest.mark.parametrize("body", [LAYERS, EARLY], ids=["late", "early"])
def test_right_sites_pass(body: str) -> None:
    first = model(body)
    second = rewritten(first)
    assert not any(node.op_type == "Softmax" for node in second.graph.node)
    result = verified(first, second)
    assert sites(result) == BOTH and result.passed and result.sites_not_compared == ()
    assert all(check.metrics.name == check.id and check.metrics.max_abs < 1e-5 for check in result.sites)


@pytest.mark.parametrize("body", [LAYERS, EARLY], ids=["late", "early"])
@pytest.mark.parametrize("layer", [1, 2])
def test_an_error_fails_its_own_site_only(body: str, layer: int) -> None:
    first = model(body)
    result = verified(first, planted(rewritten(first), layer))
    assert sites(result) == {**BOTH, f"main/soft{layer}": False}
    assert [check.passed for check in result.outputs] == [False], "the output sees both"
    assert not result.passed and "verification failed" in result.summary()


@pytest.mark.parametrize("body", [LAYERS, EARLY], ids=["late", "early"])
def test_both_versions_read_the_same_scores(body: str) -> None:
    first = model(body)
    joined = paired_sites(first, rewritten(first))
    assert [pair[:2] for pair in joined.pairs] == [("main/soft1", "h"), ("main/soft2", "y")]
    producers = {name: node for node in joined.model.graph.node for name in node.output}
    for site, own, other in joined.pairs:
        assert producers[own].name == f"pv{(own == 'y' and 2) or 1}" and other.startswith(f"candidate::{site}::")
        grafted = [node for node in joined.model.graph.node if node.name.startswith(f"candidate::{site}::")]
        assert grafted and "MatMul" in {node.op_type for node in grafted}
        inputs = {name for node in grafted for name in node.input if name and not name.startswith("candidate::")}
        assert inputs == {"a1" if site == "main/soft1" else "a2", "v"}, "scores and values are those of the original"
    outputs = [value.name for value in joined.model.graph.output]
    assert sorted(outputs) == sorted(name for pair in joined.pairs for name in pair[1:])


def test_equal_models_have_no_pairs() -> None:
    first = model()
    joined = paired_sites(first, first)
    assert (joined.pairs, joined.skipped, len(joined.model.graph.node)) == ((), (), 0)
    result = verified(first, first)
    assert result.sites == () and result.passed


def test_a_site_that_was_left_is_not_paired() -> None:
    first = model()
    half = graphsurgery.rewrite(first, options=graphsurgery.RewriteOptions(guard="exact", include="soft2")).model
    assert [pair[0] for pair in paired_sites(first, half).pairs] == ["main/soft2"]
    assert sites(verified(first, half)) == {"main/soft2": True}


FUNCTION = """<domain: "local", opset_import: ["" : 17]>
f (q, k, v) => (y) { a = MatMul(q, k)  [soft] p = Softmax(a)  y = MatMul(p, v) }"""


def test_sites_of_functions_and_branches_are_named_as_not_compared() -> None:
    body = """h = local.f(q, k, v)
      y = If(c) <then_branch = yes () => (float u) { a = MatMul(h, k)  [soft] p = Softmax(a)  u = MatMul(p, v) },
                 else_branch = no () => (float e) { e = Identity(h) }>"""
    first = model(body, inputs=INPUTS + ", bool c", more=FUNCTION)
    joined = paired_sites(first, rewritten(first))
    assert joined.pairs == () and joined.skipped == ("main/If_1.then_branch/soft", "f/soft")


@pytest.mark.parametrize(("scale", "passed"), [(1000.0, True), (1.0, False)])
def test_the_absolute_tolerance_grows_with_the_largest_output(scale: float, passed: bool) -> None:
    """Elements near 0 beside large ones carry the rounding of the large ones."""
    first = model()
    samples = [{**sample, "v": sample["v"] * np.float32(scale)} for sample in feeds()]
    (one, _) = graphsurgery.verify(first, planted(rewritten(first), 1, 0.01, "Add"), data=samples).sites
    assert one.metrics.max_abs == pytest.approx(0.01, rel=0.1) and one.passed is passed
    (one, _) = graphsurgery.verify(first, planted(rewritten(first), 1, 1.01), data=samples).sites
    assert not one.passed
