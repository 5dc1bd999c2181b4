"""Form `online`: exact for any input and any chunk count."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, parser

from graphsurgery.api import rewrite
from graphsurgery.options import RewriteOptions

RNG = np.random.default_rng(1)
KEYS = 10


def model(body: str, keys: str = str(KEYS)) -> ModelProto:
    inputs = f"float[1,2,3,4] q, float[1,2,4,{keys}] k, float[1,2,{keys},4] v, float[3,{keys}] m, float[1,2,3,1] sink"
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[1,2,3,4] y) {{ {body} }}'
    )


PLAIN = "s = MatMul(q, k)  x = Add(s, m)  p = Softmax<axis = -1>(x)  y = MatMul(p, v)"
SINK = """s = MatMul(q, k)  x = Add(s, m)  c = Concat<axis = -1>(x, sink)  p = Softmax<axis = -1>(c)
  a = Constant<value_ints = [-1]>()  b = Constant<value_ints = [0]>()  e = Constant<value_ints = [10]>()
  w = Slice(p, b, e, a)  y = MatMul(w, v)"""


def feed(scale: float = 1.0) -> dict[str, np.ndarray]:
    shapes = {"q": (1, 2, 3, 4), "k": (1, 2, 4, KEYS), "v": (1, 2, KEYS, 4), "sink": (1, 2, 3, 1)}
    found = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found["q"] *= np.float32(scale)
    return {**found, "m": np.zeros((3, KEYS), np.float32)}


def run(proto: ModelProto, sample: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    used = {value.name for value in proto.graph.input}
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: array for name, array in sample.items() if name in used})[0]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7, 10, 25])
@pytest.mark.parametrize("body", [PLAIN, SINK], ids=["plain", "sink"])
@pytest.mark.parametrize("scale", [1.0, 700.0])
def test_every_chunk_count_is_exact(body: str, chunks: int, scale: float) -> None:
    """Also for chunks larger than the keys, a shorter last one, and a chunk that sees no key."""
    proto = model(body)
    result = rewrite(proto, options=RewriteOptions(form="online", chunks=chunks))
    (site,) = result.report["sites"]
    assert (site["status"], site["guard"]) == ("rewritten", "exact")
    assert site["form"] == ("sum" if chunks == 1 else "online")
    sample = feed(scale)
    sample["m"][0, :6] = -np.inf
    sample["m"][1, 4:] = np.finfo(np.float32).min
    np.testing.assert_allclose(run(result.proto, sample), run(proto, sample), rtol=1e-4, atol=1e-5)


def test_rows_without_a_key_are_what_they_were() -> None:
    proto = model(PLAIN)
    result = rewrite(proto, options=RewriteOptions(form="online", chunks=3))
    sample = feed()
    sample["m"][1] = np.finfo(np.float32).min
    np.testing.assert_allclose(run(result.proto, sample), run(proto, sample), rtol=1e-4, atol=1e-5)
    sample["m"][1] = -np.inf
    assert np.isfinite(run(result.proto, sample)).all()


def test_a_symbolic_key_count_takes_one_row_maximum() -> None:
    proto = model(PLAIN, "K")
    result = rewrite(proto, options=RewriteOptions(form="online", chunks=3))
    (site,) = result.report["sites"]
    assert (site["form"], site["notes"]) == ("sum", ["the number of keys is symbolic: one sum instead of chunks"])
    sample = feed(300.0)
    np.testing.assert_allclose(run(result.proto, sample), run(proto, sample), rtol=1e-4, atol=1e-5)


def test_the_sink_reaches_the_sum_once() -> None:
    sample = feed()
    sample["sink"][:] = 50.0
    proto = model(SINK)
    for chunks in (2, 3, 11):
        result = rewrite(proto, options=RewriteOptions(form="online", chunks=chunks))
        found = run(result.proto, sample)
        np.testing.assert_allclose(found, run(proto, sample), rtol=1e-4, atol=1e-12)
        assert np.abs(found).max() < 1e-15
