"""For each accepted kind of attention a near miss: not rewritten, with its reason, and every byte as it was."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import pytest
from onnx import ModelProto, parser

from graphsurgery.api import RewriteResult, rewrite
from graphsurgery.options import RewriteOptions

HEAD = '<ir_version: {ir}, opset_import: ["" : {opset}, "local" : 1, "com.microsoft" : 1]>'
INPUTS = "float[2, 4, 3, 8] q, float[2, 4, 8, 6] k, float[2, 4, 6, 8] v"
ONES = "{" + ", ".join(["1"] * 36) + "}"
WEIGHT = f"float[6, 6] w = {ONES}"
QUANTISER = "float scale = {0.01}, uint8 zero = {0}"
SQUARE = "float[2, 4, 6, 6] q, float[2, 4, 6, 6] k, float[2, 4, 6, 6] v"
UNTYPED = '<domain: "local", opset_import: ["" : 17]> split_up (x) => (q, k, v) { q = Neg(x) k = Abs(x) v = Exp(x) }'
EXACT = RewriteOptions(guard="exact")


@dataclass(frozen=True)
class Twin:
    """One accepted body, and the near miss with its code, or with a part of the reason why it is no attention."""

    site: str
    miss: str
    code: str = ""
    reason: str = ""
    inputs: str = INPUTS
    constants: str = ""
    opset: int = 17
    miss_opset: int | None = None
    functions: str = ""


def _chain(softmax: str = "Softmax <axis = -1> (s)", after: str = "", product: str = "MatMul(p, v)") -> str:
    return f"[qk] s = MatMul(q, k)\n[soft] p = {softmax}\n{after}\n[pv] y = {product}"


SPLIT_SCORES = """[first] a = MatMul(q, k)
{second}
s = Concat <axis = -1> (a, b)
[soft] p = Softmax <axis = -1> (s)
from = Constant <value_ints = [0]> ()
upto = Constant <value_ints = [6]> ()
last = Constant <value_ints = [-1]> ()
c = Slice(p, from, upto, last)
[pv] y = MatMul(c, v)"""
QUANTISED = """i = QuantizeLinear(s, scale, zero)
t = DequantizeLinear(i, scale, zero)"""
CALL = "q, k, v = local.split_up(x)\n"

TWINS = {
    "axis": Twin(_chain("Softmax <axis = 3> (s)"), _chain("Softmax <axis = 2> (s)"), "axis-not-last"),
    "negative axis": Twin(_chain(), _chain("Softmax <axis = -2> (s)"), "axis-not-last"),
    "coerced axis": Twin(
        _chain("Softmax <axis = 3> (s)"), _chain("Softmax <axis = 2> (s)"), "softmax-coerced", opset=12
    ),
    "default axis": Twin(_chain("Softmax(s)"), _chain("Softmax(s)"), "softmax-coerced", opset=13, miss_opset=12),
    "old opset": Twin(_chain(), _chain("Softmax <axis = 3> (s)"), "opset-too-old", opset=9, miss_opset=8),
    "router": Twin(
        _chain(),
        "[qk] s = MatMul(q, w)\n[soft] p = Softmax <axis = -1> (s)\n[pv] y = MatMul(p, v)",
        reason="a product with a weight",
        inputs=SQUARE,
        constants=WEIGHT,
    ),
    "classifier": Twin(
        _chain(), "[qk] s = MatMul(q, k)\n[soft] y = Softmax <axis = -1> (s)", reason="feed no value product"
    ),
    "weight for values": Twin(
        _chain(), _chain(product="MatMul(p, w)"), reason="with a weight, not with values", constants=WEIGHT
    ),
    "turned probabilities": Twin(
        _chain(
            after="t = Transpose <perm = [1, 0, 2, 3]> (p)\nz = Transpose <perm = [1, 0, 2, 3]> (v)",
            product="MatMul(t, z)",
        ),
        _chain(after="t = Transpose <perm = [0, 1, 3, 2]> (p)", product="MatMul(t, v)"),
        reason="does not sum over the keys",
        inputs=SQUARE,
    ),
    "second operand": Twin(
        _chain(), _chain(product="MatMul(v, p)"), reason="does not sum over the keys", inputs=SQUARE
    ),
    "summed labels": Twin(
        _chain(product='Einsum <equation = "bhqk,bhkd->bhqd"> (p, v)'),
        _chain(product='Einsum <equation = "bhqk,bhkd->bhqd"> (v, p)'),
        reason="does not sum over the keys",
        inputs=SQUARE,
    ),
    "Relu behind": Twin(
        _chain(after="t = Identity(p)", product="MatMul(t, v)"),
        _chain(after="t = Relu(p)", product="MatMul(t, v)"),
        reason="not into a value product",
    ),
    "logarithm behind": Twin(
        _chain(after="t = Dropout(p)", product="MatMul(t, v)"),
        _chain(after="t = Log(p)", product="MatMul(t, v)"),
        reason="not into a value product",
    ),
    "exponential in front": Twin(
        "[qk] r = MatMul(q, k)\ns = Tanh(r)\n[soft] p = Softmax <axis = -1> (s)\n[pv] y = MatMul(p, v)",
        "[qk] r = MatMul(q, k)\ns = Exp(r)\n[soft] p = Softmax <axis = -1> (s)\n[pv] y = MatMul(p, v)",
        reason="not from a product",
    ),
    "quantised scores": Twin(
        _chain(),
        _chain("Softmax <axis = -1> (t)").replace("[soft]", f"{QUANTISED}\n[soft]"),
        "quantised",
        constants=QUANTISER,
    ),
    "quantised probabilities": Twin(
        _chain(),
        _chain(after=QUANTISED.replace("(s,", "(p,"), product="MatMul(t, v)"),
        "quantised",
        constants=QUANTISER,
    ),
    "split scores": Twin(
        SPLIT_SCORES.format(second="b = Identity(sink)"),
        SPLIT_SCORES.format(second="[second] b = MatMul(q, k2)"),
        "split-scores",
        inputs=f"{INPUTS}, float[2, 4, 8, 1] k2, float[2, 4, 3, 1] sink",
    ),
    "split probabilities": Twin(
        _chain(),
        _chain(
            after="sizes = Constant <value_ints = [4, 2]> ()\np1, p2 = Split <axis = -1> (p, sizes)",
            product="MatMul(p1, v1)",
        ),
        "split-scores",
        inputs=f"{INPUTS}, float[2, 4, 4, 8] v1",
    ),
    "unknown rank": Twin(
        CALL + _chain(),
        CALL + _chain("Softmax <axis = 3> (s)"),
        "rank-unknown",
        inputs="float[2, 4, 6, 6] x",
        functions=UNTYPED,
    ),
    "fused": Twin(_chain(), "[fused] y = Attention(q, k, v)", "fused-attention", inputs=SQUARE, miss_opset=23),
    "fused elsewhere": Twin(
        _chain(),
        "[fused] y = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v)",
        "fused-contrib",
        inputs=SQUARE,
    ),
}


def _model(twin: Twin, body: str, opset: int) -> ModelProto:
    head = HEAD.format(ir=10 if opset > 18 else 8, opset=opset)
    constants = f"<{twin.constants}>" if twin.constants else ""
    text = f"{head} twin ({twin.inputs}) => (float[B, H, Q, D] y) {constants} {{\n{body}\n}}\n{twin.functions}"
    return parser.parse_model(text)


def _rewrite(model: ModelProto) -> RewriteResult:
    before = model.SerializeToString()
    result = rewrite(model, options=EXACT)
    assert model.SerializeToString() == before
    return result


@pytest.mark.parametrize("name", TWINS)
def test_the_site_is_rewritten(name: str) -> None:
    twin = TWINS[name]
    model = _model(twin, twin.site, twin.opset)
    onnx.checker.check_model(model)
    result = _rewrite(model)
    assert result.rewritten == 1
    assert result.changed
    onnx.checker.check_model(result.model)
    assert not [node for node in result.model.graph.node if node.op_type == "Softmax"]


@pytest.mark.parametrize("name", TWINS)
def test_the_near_miss_is_not_touched(name: str) -> None:
    twin = TWINS[name]
    model = _model(twin, twin.miss, twin.miss_opset or twin.opset)
    result = _rewrite(model)
    assert result.rewritten == 0
    assert not result.changed
    assert result.model.SerializeToString() == model.SerializeToString()
    sites, others = result.report["sites"], result.report["not_attention"]
    if twin.code:
        assert [(site["status"], site["code"]) for site in sites] == [("refused", twin.code)]
        assert sites[0]["reason"]
        assert sites[0]["form"] is None
        assert others == []
    else:
        assert sites == []
        assert len(others) == 1
        assert twin.reason in others[0]["reason"]


@pytest.mark.parametrize("kind", ["unknown", "int64"])
def test_scores_of_another_type_are_refused(kind: str) -> None:
    """Without a known type nothing says which limits keep the exponentials finite."""
    twin = TWINS["unknown rank"]
    body = twin.site.replace("[pv] y = MatMul(p, v)", "[pv] z = MatMul(p, v)\ny = local.last(z)")
    if kind == "int64":
        body = body.replace("[soft] p = Softmax <axis = -1> (s)", "t = Cast <to = 7> (s)\n[soft] p = Softmax(t)")
    function = '<domain: "local", opset_import: ["" : 17]> last (x) => (y) { y = Neg(x) }'
    model = parser.parse_model(
        HEAD.format(ir=8, opset=17)
        + f" twin ({twin.inputs}) => (float[B, H, Q, D] y) {{{body}}}\n{UNTYPED}\n{function}"
    )
    result = _rewrite(model)
    assert [(site["status"], site["code"]) for site in result.report["sites"]] == [("refused", "dtype")]
    assert not result.changed
    assert result.model.SerializeToString() == model.SerializeToString()
