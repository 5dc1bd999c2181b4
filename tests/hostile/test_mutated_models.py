"""Mutated exports: whatever a file holds, the answer is a result or one line, and soon."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
from onnx import GraphProto, ModelProto

from graphsurgery.api import rewrite
from graphsurgery.errors import GraphSurgeryError
from graphsurgery.options import RewriteOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = sorted(json.loads((FIXTURES / "fixtures.json").read_text())["models"])
OPERATORS = (
    "Softmax MatMul Add Where Reshape Slice Split Cast Concat Transpose Mul IsNaN If Loop Einsum Identity".split()
)
SECONDS = 10


def mutate_graph(graph: GraphProto, rng: random.Random) -> None:
    node, other = rng.choice(graph.node), rng.choice(graph.node)
    match rng.randrange(9):
        case 0 if node.input:
            del node.input[rng.randrange(len(node.input))]
        case 1 if node.input and other.output:
            node.input[rng.randrange(len(node.input))] = other.output[0]
        case 2:
            node.op_type = rng.choice(OPERATORS)
        case 3:
            del node.attribute[:]
        case 4 if node.output:
            node.output[0] = ""
        case 5:
            graph.node.remove(node)
        case 6:
            node.input.append("nowhere")
        case 7:
            del node.input[:]
        case _ if node.output and other.output:
            node.output[0] = other.output[0]
        case _:
            pass


def mutated(raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        changed = bytearray(raw)
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    model = ModelProto.FromString(raw)
    for _ in range(rng.randint(1, 4)):
        mutate_graph(model.graph, rng)
    return model.SerializeToString()


def too_long(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer within {SECONDS} s")


def outcomes(count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)  # noqa: S311 - a reproducible choice, no secret
    models = [(FIXTURES / name).read_bytes() for name in NAMES]
    seen: Counter[str] = Counter()
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for number in range(count):
            data = mutated(rng.choice(models), rng)
            guard = rng.choice(("exact", "clip", "if", "flag"))
            options = RewriteOptions(guard=guard, phi="1", decompose_attention=rng.random() < 0.3)
            signal.alarm(SECONDS)
            try:
                seen["rewritten" if rewrite(data, options=options).rewritten else "nothing"] += 1
            except GraphSurgeryError as error:
                assert "\n" not in str(error), str(error)
                seen["refused"] += 1
            except BaseException as error:
                error.add_note(f"mutation {number} of seed {seed}")
                raise
            signal.alarm(0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return seen


def test_some_mutated_exports() -> None:
    seen = outcomes(300, 1)
    assert seen["rewritten"] and seen["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_ten_thousand_mutated_exports(seed: int) -> None:
    assert sum(outcomes(2000, seed).values()) == 2000
