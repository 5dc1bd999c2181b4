"""Statistics of sites in every kind of scope, against float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, parser

from graphsurgery.data import Samples, open_samples, signature
from graphsurgery.phi.collect import Evidence, collect
from graphsurgery.phi.observe import observation_model
from graphsurgery.phi.statistics import RowStatistics, SiteStatistics

HEADER = '<ir_version: 10, opset_import: ["" : 17, "local" : 1]>\n'
INPUTS = "float[B, 2, Q, 4] q, float[B, 2, 4, K] k, float[B, 2, K, 4] v, float[B, 1, Q, K] mask"
SITE = "s = MatMul(q, k)  a = Add(s, mask)  [soft] p = Softmax(a)  [pv] y = MatMul(p, v)"
Feed = dict[str, NDArray[np.float32]]


def model(body: str = SITE, inputs: str = INPUTS, more: str = "") -> ModelProto:
    return parser.parse_model(f"{HEADER} agraph ({inputs}) => (float[B, 2, Q, 4] y) {{ {body} }} {more}")


def feed(seed: int = 0, queries: int = 3, keys: int = 5, scale: float = 1.0) -> Feed:
    rng = np.random.default_rng(seed)
    return {
        "q": rng.normal(0, scale, (1, 2, queries, 4)).astype(np.float32),
        "k": rng.normal(0, 1, (1, 2, 4, keys)).astype(np.float32),
        "v": rng.normal(0, 2, (1, 2, keys, 4)).astype(np.float32),
        "mask": np.zeros((1, 1, queries, keys), np.float32),
    }


def gathered(proto: ModelProto, feeds: Iterable[Mapping[str, np.ndarray]]) -> Evidence:
    before = proto.SerializeToString()
    samples: Samples = open_samples(feeds, signature(proto))
    evidence = collect(proto, None, samples)
    assert proto.SerializeToString() == before, "the model is not modified"
    return evidence


def reference(sample: Feed) -> SiteStatistics:
    """The statistics in float64, head by head."""
    wide = {name: value.astype(np.float64) for name, value in sample.items()}
    scores = wide["q"] @ wide["k"] + wide["mask"]
    heads = [_head(scores[:, head].reshape(-1, scores.shape[-1]), wide["v"][:, head]) for head in range(2)]
    return SiteStatistics(tuple(heads))


def _head(scores: np.ndarray, values: np.ndarray) -> RowStatistics:
    seen = scores[scores.max(axis=-1) > -9000]
    top = seen.max(axis=-1)
    lse = top + np.log(np.exp(seen - top[:, None]).sum(axis=-1))
    single = (seen - top[:, None] > -30).sum(axis=-1) == 1
    inf = float("inf")
    return RowStatistics(
        len(seen),
        len(scores) - len(seen),
        int(single.sum()),
        top.min(initial=inf),
        top.max(initial=-inf),
        top[~single].min(initial=inf),
        top[single].min(initial=inf),
        lse.max(initial=-inf),
        seen[seen > -9000].min(initial=inf),
        float(np.abs(values).max()),
        float(scores[scores.max(axis=-1) <= -9000].max(initial=-inf)),
    )


def assert_close(found: SiteStatistics, expected: SiteStatistics) -> None:
    assert (len(found.heads), found.samples) == (len(expected.heads), expected.samples)
    for mine, theirs in zip(found.heads, expected.heads, strict=True):
        assert (mine.rows, mine.hidden, mine.single) == (theirs.rows, theirs.hidden, theirs.single)
        numbers = [
            [getattr(head, name) for name in RowStatistics.__slots__ if name not in ("rows", "hidden", "single")]
            for head in (mine, theirs)
        ]
        np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-5)


def test_against_float64() -> None:
    sample = feed()
    evidence = gathered(model(), [sample])
    assert list(evidence.sites) == ["main/soft"] and evidence.unseen == {}
    assert (evidence.samples, evidence.synthetic) == (1, False) and len(evidence.data_sha256) == 64
    assert_close(evidence.sites["main/soft"], reference(sample))


def test_the_comparison_can_fail() -> None:
    sample = feed()
    wrong = dict(sample, v=sample["v"] * np.float32(1.001))
    with pytest.raises(AssertionError):
        assert_close(gathered(model(), [sample]).sites["main/soft"], reference(wrong))


def test_over_samples_of_different_lengths() -> None:
    samples = [feed(seed, queries=3 + seed, keys=5 + seed, scale=1.0 + seed) for seed in range(3)]
    expected = reference(samples[0])
    for sample in samples[1:]:
        expected = expected.merge(reference(sample))
    assert_close(gathered(model(), samples).sites["main/soft"], expected)


@pytest.mark.parametrize("fill", [-np.inf, -3.0e38, -10000.0])
def test_padding_and_causal_rows(fill: float) -> None:
    sample = feed(queries=5)
    mask = np.where(np.tri(5, dtype=bool), 0.0, fill)
    mask[3] = fill
    sample["mask"] = mask.astype(np.float32)[None, None]
    found = gathered(model(), [sample]).sites["main/soft"]
    assert [(head.rows, head.hidden) for head in found.heads] == [(4, 1), (4, 1)]
    assert all(head.single >= 1 for head in found.heads), "the first row of a causal mask sees one key"
    assert_close(found, reference(sample))


def test_scores_far_above_the_range_of_exp() -> None:
    sample = feed(scale=100.0)
    found = gathered(model(), [sample]).sites["main/soft"]
    assert found.layer.row_max_high > 100 and np.isfinite(found.layer.lse_high)
    assert_close(found, reference(sample))


def test_only_the_part_that_feeds_the_sites_runs() -> None:
    proto = model(SITE + "  [after] z = Exp(y)  [other] w = Exp(q)")
    observed = observation_model(proto)
    names = {node.name for node in observed.model.graph.node}
    assert {"after", "other", "soft", "pv"}.isdisjoint(names)
    assert [value.name for value in observed.model.graph.output] == observed.names
    assert [value.name for value in observed.model.graph.input] == [value.name for value in proto.graph.input]


def test_only_wanted_sites() -> None:
    two = SITE.replace("y = MatMul(p, v)", "h = MatMul(p, v)  b = MatMul(h, k)  [two] r = Softmax(b)  y = MatMul(r, v)")
    proto = model(two)
    assert list(observation_model(proto).outputs) == ["main/soft", "main/two"]
    assert list(observation_model(proto, ["main/two"]).outputs) == ["main/two"]
    nothing = observation_model(proto, [])
    assert (nothing.outputs, nothing.names, len(nothing.model.graph.node)) == ({}, [], 0)


def test_no_site_runs_nothing() -> None:
    evidence = gathered(model("y = Identity(q)"), [feed()])
    assert (evidence.sites, evidence.unseen, evidence.samples) == ({}, {}, 1)


FUNCTION = """<domain: "local", opset_import: ["" : 17]>
f (q, k, v, mask) => (y) { s = MatMul(q, k)  a = Add(s, mask)  [soft] p = Softmax(a)  y = MatMul(p, v) }"""


def test_a_function_that_is_called_twice() -> None:
    sample = feed()
    evidence = gathered(model("h = local.f(q, k, v, mask)  y = local.f(h, k, v, mask)", more=FUNCTION), [sample])
    scores = sample["q"].astype(np.float64) @ sample["k"]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    second = (weights / weights.sum(-1, keepdims=True)) @ sample["v"]
    expected = reference(sample).merge(reference(dict(sample, q=second.astype(np.float32))))
    assert list(evidence.sites) == ["f/soft"]
    found = evidence.sites["f/soft"]
    assert_close(SiteStatistics(found.heads, 2), expected)


def test_calls_of_a_function_are_no_samples() -> None:
    evidence = gathered(model("h = local.f(q, k, v, mask)  y = local.f(h, k, v, mask)", more=FUNCTION), [feed()])
    assert evidence.sites["f/soft"].samples == 1


BRANCH = f"""y = If(c) <then_branch = yes () => (float t) {{ {SITE.replace("y =", "t =")} }},
  else_branch = no () => (float e) {{ e = Identity(q) }}>"""


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch(taken: bool) -> None:
    sample = feed()
    evidence = gathered(model(BRANCH, INPUTS + ", bool c"), [{**sample, "c": np.array(taken)}])
    label = "main/If_0.then_branch/soft"
    if taken:
        assert_close(evidence.sites[label], reference(sample))
        assert evidence.unseen == {}
    else:
        assert evidence.sites == {} and evidence.unseen == {label: "no sample ran this part of the graph"}


def test_a_branch_that_some_samples_take() -> None:
    samples = [feed(0), feed(1), feed(2)]
    feeds = [{**sample, "c": np.array(i != 1)} for i, sample in enumerate(samples)]
    found = gathered(model(BRANCH, INPUTS + ", bool c"), feeds).sites["main/If_0.then_branch/soft"]
    assert_close(found, reference(samples[0]).merge(reference(samples[2])))


LOOP = f"""go = Constant<value = bool {{1}}>()
  y = Loop(n, go, q) <body = b (int64 i, bool on, float[B, 2, Q, 4] state) => (bool keep, float[B, 2, Q, 4] next) {{
    keep = Identity(on)  {SITE.replace("MatMul(q, k)", "MatMul(state, k)").replace("y =", "next =")}
  }}>"""


@pytest.mark.parametrize("count", [1, 3])
def test_a_loop(count: int) -> None:
    sample = feed()
    found = gathered(model(LOOP, INPUTS + ", int64 n"), [{**sample, "n": np.array(count)}])
    (seen,) = found.sites.values()
    assert [head.rows for head in seen.heads] == [3 * count] * 2
    if count == 1:
        assert_close(seen, reference(sample))


def test_a_loop_that_does_not_run() -> None:
    evidence = gathered(model(LOOP, INPUTS + ", int64 n"), [{**feed(), "n": np.array(0)}])
    assert list(evidence.unseen.values()) == ["no sample ran this part of the graph"]


def test_a_scope_that_shows_nothing_is_said() -> None:
    body = f"""w, y = Scan(q, steps) <num_scan_inputs = 1, scan_output_axes = [1], body = b (float s, float t) =>
      (float u, float y) {{ u = Identity(s)  {SITE.replace("MatMul(q, k)", "MatMul(s, k)")} }}>"""
    observed = observation_model(model(body, INPUTS + ", float[3] steps"))
    assert observed.outputs == {}
    assert list(observed.unseen.values()) == ["Scan (Scan) does not let values of its body out"]


def test_a_function_that_nobody_calls() -> None:
    """Nothing tells the element type of its inputs, so the site in it is refused and not asked for."""
    evidence = gathered(model("y = Identity(q)", more=FUNCTION), [feed()])
    assert (evidence.sites, evidence.unseen) == ({}, {})


MIXED = """go = Constant<value = bool {{1}}>()
  y = Loop(n, go, q) <body = b (int64 i, bool on, float[B, 2, Q, 4] state) => (bool keep, float[B, 2, Q, 4] next) {{
    one = Constant<value = int64 {{1}}>()  keep = Identity(on)  first = Less(i, one)  {body}
  }}>"""
CHOICE = f"""{{out}} = If({{test}})
  <then_branch = yes () => (float[B, 2, Q, 4] t) {{{{ {SITE.replace("y =", "t =")} }}}},
  else_branch = no () => (float[B, 2, Q, 4] e) {{{{ e = Identity(q) }}}}>"""


def test_a_branch_in_a_loop_is_said_to_be_unseen() -> None:
    """A loop collects values of one shape, so iterations that leave the branch out have nothing to give."""
    body = MIXED.format(body=CHOICE.format(out="next", test="first"))
    evidence = gathered(model(body, INPUTS + ", int64 n"), [{**feed(), "n": np.array(2)}])
    assert evidence.sites == {}
    assert list(evidence.unseen) == ["main/Loop_1.body/If_3.then_branch/soft"]
    assert list(evidence.unseen.values()) == [
        "If (If) stands in a Loop or Scan, which collects values of one shape only"
    ]


def test_a_branch_in_a_function_that_a_loop_calls() -> None:
    function = f"""<domain: "local", opset_import: ["" : 17]>
    g (first, q, k, v, mask) => (y) {{ {CHOICE.format(out="y", test="first")} }}"""
    body = MIXED.format(body="next = local.g(first, state, k, v, mask)")
    evidence = gathered(model(body, INPUTS + ", int64 n", function), [{**feed(), "n": np.array(2)}])
    assert list({**evidence.sites, **evidence.unseen}) == ["g/If_0.then_branch/soft"]


def test_overloads_of_a_function() -> None:
    proto = model("h = local.f(q, k, v, mask)  y = local.f(h, k, v, mask)", more=FUNCTION)
    proto.functions.add().CopyFrom(proto.functions[0])
    for function, node, overload in zip(proto.functions, proto.graph.node, ("one", "two"), strict=True):
        function.overload = node.overload = overload
    sample = feed()
    evidence = gathered(proto, [sample])
    assert list(evidence.sites) == ["f/soft", "local.f/soft"]
    assert_close(evidence.sites["f/soft"], reference(sample))
