"""The noise floor: how far the original's own outputs move when its probabilities change by one rounding step.

Graph outputs can be ill-conditioned.  In a dynamically quantised T5 a change of 2e-7 in the probabilities moves the
logits by their whole range, so a difference of that size says nothing about a rewrite.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from graphsurgery.attention.finder import find_attention
from graphsurgery.attention.site import Site
from graphsurgery.model.emit import Emitter
from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import Place, Rewriter

__all__ = ["noisy_twin"]

_STEPS: dict[int, float] = {
    TensorProto.FLOAT: 2.0**-23,
    TensorProto.FLOAT16: 2.0**-10,
    TensorProto.BFLOAT16: 2.0**-7,
    TensorProto.DOUBLE: 2.0**-52,
}
_SCATTER = 12345.0


def noisy_twin(model: ModelProto) -> ModelProto | None:
    """A copy whose probabilities are multiplied by 1 ± one rounding step, the sign scattered by their own value.

    None where the model has no attention to disturb.
    """
    twin = ModelProto()
    twin.CopyFrom(model)
    index = ModelIndex(twin)
    sites = find_attention(index).sites
    if not sites:
        return None
    rewriter = Rewriter(index)
    for site in sites:
        rewriter.start("noise_floor", site.id)
        _disturb(rewriter, site)
    rewriter.commit()
    return twin


def _disturb(rewriter: Rewriter, site: Site) -> None:
    name = site.softmax.output[0]
    exact = rewriter.rename_output(site.scope, site.softmax, 0, f"{name}_exact")
    emit = Emitter(rewriter, Place(site.scope, site.softmax, after=True), "noise", site.dtype)
    angle = emit.op("Mul", exact, emit.scalar(_SCATTER, "scatter"), what="angle")
    wave = emit.op("Sin", emit.cast(angle, TensorProto.FLOAT, "angle_cast"), what="wave")
    sign = emit.cast(emit.op("Sign", wave, what="sign"), site.dtype, "sign_cast")
    step = emit.op("Mul", sign, emit.scalar(_STEPS[site.dtype], "step"), what="step")
    change = emit.op("Mul", exact, step, what="change")
    emit.op("Add", exact, change, what="disturbed", output=name)
