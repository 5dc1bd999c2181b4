"""A host that reruns the untouched model where rows left the window.

    python examples/flagged_rows.py [MODEL] [DATA]

`rewrite --guard flag` adds one int64 output that counts the rows outside the windows of their sites.  Where it is 0
the outputs are right; else the host runs the original, which it keeps beside the rewritten model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

import graphsurgery

FIXTURES = Path(__file__).parents[1] / "fixtures"
FLAG = "graphsurgery_rows_outside"


class Guarded:
    """Runs the rewritten model, and the original for the inputs that it is not right for."""

    def __init__(self, rewritten: bytes, original: str) -> None:
        self.fast = ort.InferenceSession(rewritten, providers=["CPUExecutionProvider"])
        self.original = ort.InferenceSession(original, providers=["CPUExecutionProvider"])
        self.reruns = 0

    def run(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [value.name for value in self.fast.get_outputs()]
        outputs = dict(zip(names, self.fast.run(None, feed), strict=True))
        if outputs.pop(FLAG) == 0:
            return outputs
        self.reruns += 1
        return dict(zip(outputs, self.original.run(list(outputs), feed), strict=True))


def main(model: str, data: str) -> None:
    samples = [dict(np.load(path)) for path in sorted(Path(data).glob("*.npz"))]
    result = graphsurgery.rewrite(model, data=samples[:1], options=graphsurgery.RewriteOptions(guard="flag"))
    guarded = Guarded(result.model.SerializeToString(), model)
    for number, sample in enumerate(samples):
        before = guarded.reruns
        guarded.run(sample)
        print(f"sample {number}: {'original rerun' if guarded.reruns > before else 'inside the window'}")


if __name__ == "__main__":
    decoder = FIXTURES / "llama_decode_sdpa_dynamo.onnx"
    given = sys.argv[1:] or [str(decoder), str(FIXTURES / "data" / decoder.stem)]
    main(*given)
