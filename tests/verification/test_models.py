from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from attention_pairs import LAYERS, feeds, model, planted, rewritten
from onnx import ModelProto, TensorProto

import graphsurgery
from graphsurgery import VerifyOptions
from graphsurgery.engines import EngineError
from graphsurgery.errors import UsageError, VerificationError
from graphsurgery.verification.models import VerifyResult

# the sine of a large multiple: a rounding step in the probabilities moves it visibly
SINE = "o = MatMul(p2, v)  f = Constant<value_float = {f}>()  e = Mul(o, f)  y = Sin(e)"
ILL = LAYERS.replace("y = MatMul(p2, v)", SINE)


def verified(a: ModelProto, b: ModelProto, options: VerifyOptions | None = None, count: int = 1) -> VerifyResult:
    return graphsurgery.verify(a, b, data=feeds(count), options=options)


def with_body(proto: ModelProto, old: str, new: str) -> ModelProto:
    """The same model with another operator under a name."""
    changed = ModelProto()
    changed.CopyFrom(proto)
    (node,) = [node for node in changed.graph.node if node.op_type == old]
    node.op_type = new
    return changed


def test_equal_models() -> None:
    result = verified(model(), model(), count=3)
    (check,) = result.outputs
    assert (check.metrics.name, check.metrics.max_abs, check.passed, check.note) == ("y", 0.0, True, None)
    assert check.floor_abs is not None and 0 < check.floor_abs < 1e-5
    assert (result.samples, result.engine, result.synthetic, result.reused) == (3, "onnxruntime", False, False)
    assert result.passed and result.summary().startswith("verified on 3 samples on onnxruntime: worst output y")


def test_a_wrong_model() -> None:
    result = verified(model(), planted(rewritten(model()), 2))
    (check,) = result.outputs
    assert not check.passed and check.note is None and not result.passed
    assert check.floor_abs is not None and check.metrics.max_abs > 100 * check.floor_abs
    assert result.summary().startswith("verification failed on 1 sample on onnxruntime: y: ")
    assert result.summary().endswith("(and 1 more)"), "the site of the layer fails too"


# -- the noise floor


def test_the_floor_rescues_an_ill_conditioned_output_and_says_so() -> None:
    first = model(ILL.format(f=1e5))
    second = rewritten(first)
    result = verified(first, second)
    (check,) = result.outputs
    assert check.floor_abs is not None and 0 < check.metrics.max_abs <= 4 * check.floor_abs
    assert not check.metrics.within and check.passed and result.passed
    assert check.note is not None and check.note.startswith("ill-conditioned: one rounding step in the original's")
    assert f"moves it by {check.floor_abs:.3g}" in check.note
    entry = result.to_json()["onnxruntime"]["y"]
    assert entry["passed"] and not entry["within"] and entry["note"] == check.note
    assert all(site.passed for site in result.sites), "sites are not ill-conditioned"


def test_the_floor_does_not_rescue_a_larger_error() -> None:
    first = model(ILL.format(f=1e4))
    wrong = with_body(rewritten(first), "Sin", "Cos")
    result = verified(first, wrong)
    (check,) = result.outputs
    assert check.floor_abs is not None and check.metrics.max_abs > 4 * check.floor_abs
    assert not check.passed and check.note is None


@pytest.mark.parametrize("tail", ["e = Log(e0)", "e = Sqrt(e0)"])
def test_the_floor_never_rescues_what_is_not_finite(tail: str) -> None:
    """The factor makes the ill-conditioned output NaN somewhere."""
    first = model(ILL.format(f=1e5))
    wrong = rewritten(first)
    for node in wrong.graph.node:
        if node.op_type == "Mul" and node.output[0] == "e":
            node.output[0] = "e0"
    extra = model(f"e0 = Identity(q)  {tail}  y = Identity(e)").graph.node[1]
    position = next(i for i, node in enumerate(wrong.graph.node) if node.op_type == "Sin")
    nodes = list(wrong.graph.node)
    del wrong.graph.node[:]
    wrong.graph.node.extend([*nodes[:position], extra, *nodes[position:]])
    (check,) = verified(first, wrong).outputs
    assert not check.passed and not check.metrics.finite and check.metrics.nan_mismatches > 0
    assert check.metrics.reason is not None and "not finite as the reference is" in check.metrics.reason


def test_the_floor_never_rescues_another_shape_or_type() -> None:
    first = model(ILL.format(f=1e5), output="float y")
    for operator, reason in (("Cast", "element type is float16"), ("ReduceMax", "shape is [1, 1, 1, 1]")):
        wrong = rewritten(first)
        (node,) = [node for node in wrong.graph.node if node.op_type == "Sin"]
        node.op_type = operator
        if operator == "Cast":
            node.attribute.add(name="to", type=2, i=TensorProto.FLOAT16)
        wrong.graph.output[0].type.tensor_type.ClearField("shape")
        wrong.graph.output[0].type.tensor_type.elem_type = (
            TensorProto.FLOAT16 if operator == "Cast" else TensorProto.FLOAT
        )
        before = model(ILL.format(f=1e5))
        (check,) = verified(before, wrong).outputs
        assert not check.passed and check.note is None and check.metrics.max_abs == math.inf
        assert check.metrics.reason is not None and reason in check.metrics.reason


def test_without_attention_there_is_no_floor() -> None:
    first = model("y = Sin(q)")
    (check,) = verified(first, with_body(first, "Sin", "Tanh")).outputs
    assert check.floor_abs is None and not check.passed and check.note is None
    assert "noise floor" not in verified(first, first).summary()


# -- options and signatures


def test_tolerances_of_the_call() -> None:
    first, wrong = model("y = Identity(q)"), model("c = Constant<value_float = 1.001>()  y = Mul(q, c)")
    assert not verified(first, wrong).passed
    assert verified(first, wrong, VerifyOptions(rtol=1e-2)).passed
    assert verified(first, wrong, VerifyOptions(atol=1e-1)).passed
    assert verified(first, wrong, VerifyOptions(max_samples=1), count=3).samples == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (model("z = Identity(q)", output="float[B, 2, Q, 4] z"), r"the outputs of <memory> are \['z'\], those of"),
        (model("y = Neg(q)  z = Neg(q)", output="float y, float z"), r"the outputs of <memory> are \['y', 'z'\]"),
        (model("y = Identity(q)", inputs="float[B, 2, Q, 4] q"), r"the inputs of <memory> are \['q'\]"),
        (
            model("y = Neg(q)", inputs="float[B, 2, Q, 4] q, float[B, 2, Q, 4] v, float[B, 2, 4, Q] k"),
            r"the inputs of <memory> are \['q', 'v', 'k'\]",
        ),
    ],
    ids=["other_output", "one_output_more", "inputs_missing", "order"],
)
def test_models_with_other_names_are_refused(other: ModelProto, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        verified(model("y = Identity(q)"), other)
    assert "compare models with the same signature" in str(caught.value)


def test_data_and_engines_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="verify needs data; give --data DIR"):
        graphsurgery.verify(model(), model(), data=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no engine 'none'"):
        graphsurgery.verify(model(), model(), data=feeds(), engine="none")
    with pytest.raises(UsageError, match="input 'v'"):
        graphsurgery.verify(model(), model(), data=[{name: feeds()[0][name] for name in "qk"}])


def test_a_model_that_does_not_run() -> None:
    broken = model("[bad] y = NoSuchOperator(q)")
    with pytest.raises(VerificationError, match=r"does not load where .* does: onnxruntime cannot load the model"):
        verified(model(), broken)
    with pytest.raises(EngineError, match="cannot load the model"):
        verified(broken, broken)


def test_models_from_files(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.onnx", "b.onnx")]
    for path, proto in zip(paths, (model(), rewritten(model())), strict=True):
        path.write_bytes(proto.SerializeToString())
    result = graphsurgery.verify(*paths, data=feeds())
    assert result.passed and len(result.sites) == 2


def test_made_up_samples_are_said() -> None:
    fixed = "float[1, 2, 6, 4] q, float[1, 2, 4, 6] k, float[1, 2, 6, 4] v"
    result = graphsurgery.verify(model(inputs=fixed), model(inputs=fixed), data="synthetic:2")
    assert result.synthetic and result.samples == 2 and result.to_json()["synthetic"]


def test_the_report_is_json() -> None:
    entry = verified(model(), rewritten(model())).to_json()
    text = json.loads(json.dumps(entry, allow_nan=False))
    assert sorted(text) == [
        "held_out",
        "onnxruntime",
        "passed",
        "samples",
        "sites",
        "sites_not_compared",
        "synthetic",
    ]
    assert sorted(text["sites"]) == ["main/soft1", "main/soft2"] and text["held_out"] and text["passed"]
    assert np.isfinite(text["onnxruntime"]["y"]["floor_abs"])
