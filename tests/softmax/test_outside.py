"""The guards that watch the denominators while the model runs: `if` recomputes, `flag` counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, parser

from graphsurgery.api import rewrite
from graphsurgery.errors import UsageError
from graphsurgery.options import RewriteOptions
from graphsurgery.softmax.outside import FLAG_OUTPUT
from graphsurgery.verification.models import verify

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
SITE = "s = MatMul(q, k)  x = Add(s, m)  [soft] p = Softmax<axis = -1>(x)  "
INPUTS = "float[1,2,4,8] q, float[1,2,8,6] k, float[1,2,6,8] v, float[4,6] m"


def model(body: str = SITE + "[pv] y = MatMul(p, v)", functions: str = "") -> ModelProto:
    imports = '"" : 17, "local" : 1' if functions else '"" : 17'
    return parser.parse_model(
        f"<ir_version: 8, opset_import: [{imports}]> g ({INPUTS}) => (float[1,2,4,8] y) {{ {body} }} {functions}"
    )


def feed(scale: float = 1.0, rows: int = 4) -> dict[str, np.ndarray]:
    q = RNG.standard_normal((1, 2, 4, 8)).astype(np.float32)
    q[:, :, :rows] *= np.float32(scale)
    k, v = (RNG.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 8, 6), (1, 2, 6, 8)))
    return {"q": q, "k": k, "v": v, "m": np.zeros((4, 6), np.float32)}


def run(proto: ModelProto, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, sample), strict=True))


def operators(proto: ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize("scale", [1.0, 100.0, 2000.0])
def test_if_gives_the_original_on_any_input(scale: float) -> None:
    result = rewrite(model(), data=[feed()], options=RewriteOptions(guard="if"))
    onnx.checker.check_model(result.proto, full_check=True)
    assert operators(result.proto).count("If") == 1 and operators(result.proto).count("MatMul") == 2
    sample = feed(scale, rows=2)
    np.testing.assert_allclose(run(result.proto, sample)["y"], run(model(), sample)["y"], rtol=1e-4, atol=2e-5)


def test_if_gives_nan_where_the_original_does() -> None:
    result = rewrite(model(), data=[feed()], options=RewriteOptions(guard="if"))
    sample = feed()
    sample["m"][1] = -np.inf
    wanted, found = run(model(), sample)["y"], run(result.proto, sample)["y"]
    assert np.isnan(wanted[:, :, 1]).all() and np.array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


def test_if_takes_the_unified_branch_inside_the_window() -> None:
    """With the original's branch made wrong, inputs inside the window show nothing of it, others do."""
    result = rewrite(model(), data=[feed()], options=RewriteOptions(guard="if"))
    (choice,) = [node for node in result.proto.graph.node if node.op_type == "If"]
    (native,) = [entry.g for entry in choice.attribute if entry.name == "then_branch"]
    native.node[0].op_type = "Exp"
    del native.node[0].attribute[:]
    for scale, same in ((1.0, True), (300.0, False)):
        sample = feed(scale)
        assert np.allclose(run(result.proto, sample)["y"], run(model(), sample)["y"], atol=1e-4) == same


def test_the_branch_is_no_site_of_its_own() -> None:
    once = rewrite(model(), data=[feed()], options=RewriteOptions(guard="if"))
    again = rewrite(once.proto, data=[feed()], options=RewriteOptions(guard="if"))
    assert again.report["sites"] == [] and not again.changed


def test_if_needs_control_flow() -> None:
    with pytest.raises(UsageError, match="--guard if needs control flow, which qnn-htp does not have"):
        RewriteOptions(guard="if", target="qnn-htp")


def test_if_in_a_function() -> None:
    function = f'<domain: "local", opset_import: ["" : 17]> f (q, k, v, m) => (y) {{ {SITE} y = MatMul(p, v) }}'
    proto = model("y = local.f(q, k, v, m)", function)
    result = rewrite(proto, data=[feed()], options=RewriteOptions(guard="if"))
    assert result.rewritten == 1
    sample = feed(500.0)
    np.testing.assert_allclose(run(result.proto, sample)["y"], run(proto, sample)["y"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_flag_counts_the_rows_outside(rows: int) -> None:
    result = rewrite(model(), data=[feed()], options=RewriteOptions(guard="flag"))
    onnx.checker.check_model(result.proto, full_check=True)
    assert [value.name for value in result.proto.graph.output] == ["y", FLAG_OUTPUT]
    sample = feed()
    sample["m"][:rows] = 200.0
    found = run(result.proto, sample)
    assert (found[FLAG_OUTPUT].dtype, found[FLAG_OUTPUT].shape) == (np.dtype(np.int64), ())
    assert found[FLAG_OUTPUT] == 2 * rows
    wanted = run(model(), sample)["y"]
    np.testing.assert_allclose(found["y"][:, :, rows:], wanted[:, :, rows:], rtol=1e-4, atol=2e-5)
    assert np.isfinite(found["y"]).all()


def test_flag_adds_up_all_sites_and_verifies() -> None:
    two = SITE + "h = MatMul(p, v)  s2 = MatMul(h, k)  [two] p2 = Softmax<axis = -1>(s2)  y = MatMul(p2, v)"
    samples = [feed(), feed()]
    result = rewrite(model(two), data=samples, options=RewriteOptions(guard="flag"))
    assert result.rewritten == 2 and run(result.proto, samples[0])[FLAG_OUTPUT] == 0
    assert verify(model(two), result.proto, data=samples).passed


def test_flag_leaves_sites_whose_rows_no_output_can_count() -> None:
    function = f'<domain: "local", opset_import: ["" : 17]> f (q, k, v, m) => (y) {{ {SITE} y = MatMul(p, v) }}'
    proto = model("y = local.f(q, k, v, m)", function)
    result = rewrite(proto, data=[feed()], options=RewriteOptions(guard="flag"))
    (site,) = result.report["sites"]
    assert (site["status"], site["code"]) == ("left", "flag-scope") and not result.changed
    assert result.proto.SerializeToString() == proto.SerializeToString()


def test_the_example_of_a_host_runs() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "flagged_rows.py"], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.count("inside the window") >= 3
