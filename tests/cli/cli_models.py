"""Small models, and what a run of the command line gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import parser

FIXTURES = Path(__file__).parents[2] / "fixtures"

SENTINEL = b"what was here before"

ATTENTION = """
<ir_version: 10, opset_import: ["": 18]>
attention (float[1,2,4,8] q, float[1,2,8,4] k, float[1,2,4,8] v) => (float[1,2,4,8] y) {
  s = MatMul(q, k)
  p = Softmax<axis = AXIS>(s)
  y = MatMul(p, v)
}
"""

FUSED = """
<ir_version: 11, opset_import: ["": 23]>
fused (float[1,2,4,8] q, float[1,2,4,8] k, float[1,2,4,8] v) => (float[1,2,4,8] y) {
  y = Attention(q, k, v)
}
"""

NO_ATTENTION = '<ir_version: 10, opset_import: ["": 18]> plain (float[2] x) => (float[2] y) { y = Relu(x) }'

CLASSIFIER = """
<ir_version: 10, opset_import: ["": 18]>
classifier (float[2,3] x) => (float[2,3] y) { y = Softmax(x) }
"""


def write_model(path: Path, text: str) -> Path:
    model = parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"the_{node.op_type}_{node.output[0]}"
    onnx.save(model, path)
    return path


@dataclass(frozen=True)
class Ran:
    """What one run of the command line gave."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


Cli = Callable[..., Ran]
