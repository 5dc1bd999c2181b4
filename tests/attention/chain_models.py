"""Attention chains as small text models."""

from __future__ import annotations

from onnx import ModelProto, parser

from graphsurgery.attention import Findings, find_attention
from graphsurgery.model.index import ModelIndex

IMPORTS = '<ir_version: 10, opset_import: ["" : {opset}, "local" : 1, "com.microsoft" : 1]>\n'
INPUTS = (
    "float[B, 4, S, 16] q, float[B, 4, 16, K] k, float[B, 4, K, 16] v, float[B, 1, S, K] m, float[1, 4, S, K] n, "
    "bool[B, 1, S, K] t, float[B, 4, S, 1] sink"
)
HALF = INPUTS.replace("float[", "float16[")
CONSTANTS = "float d = {0.25}, float cap = {50}, float inf = {-inf}, float low = {-3e38}, float nil = {0}"
HALF_CONSTANTS = "float16 nil = {0}, float16 d = {13312}"
"""Half precision is written as its bits: 0.25."""


def model(
    body: str,
    *,
    inputs: str = INPUTS,
    constants: str = CONSTANTS,
    opset: int = 17,
    outputs: str = "float[B, 4, S, 16] y",
    more: str = "",
) -> ModelProto:
    """A model whose nodes are the body; `q` is [B, H, S, D], `k` is already transposed."""
    return parser.parse_model(
        f"{IMPORTS.format(opset=opset)} agraph ({inputs}) => ({outputs}) <{constants}> {{ {body} }} {more}"
    )


def find(proto: ModelProto) -> Findings:
    """All of a model, found without changing it."""
    before = proto.SerializeToString()
    findings = find_attention(ModelIndex(proto))
    assert proto.SerializeToString() == before
    return findings
