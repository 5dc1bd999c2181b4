"""Every exported model of fixtures/: all sites are found, rewritten and verified on samples held out of calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import ModelProto, NodeProto

from graphsurgery.api import open_data, open_model, rewrite
from graphsurgery.options import RewriteOptions
from graphsurgery.verification.models import verify

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODELS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "fixtures.json").read_text())["models"]
PRODUCTS = ("MatMul", "Gemm", "Einsum")


def products(model: ModelProto) -> list[NodeProto]:
    return sorted((n for n in model.graph.node if n.op_type in PRODUCTS), key=lambda n: n.name)


def shape_of(node: NodeProto) -> tuple[str, str, list[bytes], int]:
    return node.name, node.op_type, [a.SerializeToString() for a in node.attribute], len(node.input)


@pytest.mark.parametrize("guard", ["clip", "exact", "if", "flag"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_site_is_rewritten_and_right_on_unseen_samples(name: str, guard: str) -> None:
    path = FIXTURES / name
    original = open_model(path)
    samples = open_data(FIXTURES / "data" / path.stem, original)
    assert samples is not None
    seen, held_out = samples.split()
    result = rewrite(path, data=seen, options=RewriteOptions(guard=guard, otherwise="exact"))

    sites = result.report["sites"]
    assert [site["status"] for site in sites] == ["rewritten"] * MODELS[name]["attention_sites"]
    assert len(result.report["not_attention"]) == MODELS[name]["not_attention"]
    onnx.checker.check_model(result.proto, full_check=True)
    checked = verify(original, result.outcome(), data=held_out)
    assert checked.passed, checked.summary()
    assert len(checked.sites) == len(sites)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_products_and_interface_stay_as_they_were(name: str) -> None:
    path = FIXTURES / name
    before = onnx.load(path)
    after = rewrite(path, options=RewriteOptions(guard="exact")).proto
    assert [shape_of(n) for n in products(before)] == [shape_of(n) for n in products(after)]
    for field in ("input", "output"):
        assert list(getattr(before.graph, field)) == list(getattr(after.graph, field))
    assert list(before.opset_import) == list(after.opset_import)
    assert list(before.metadata_props) == list(after.metadata_props)
    kept = {node.name: node for node in after.graph.node}
    untouched = [node for node in before.graph.node if node.name in kept and node.op_type not in PRODUCTS]
    changed = [node.name for node in untouched if kept[node.name] != node]
    passed_through = 4 * MODELS[name]["attention_sites"]
    assert len(changed) <= passed_through, changed
    assert not {node.domain for node in after.graph.node} - {node.domain for node in before.graph.node}
