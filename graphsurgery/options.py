"""Options of the library calls; the command line derives its flags from these fields and their docstrings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from graphsurgery.errors import UsageError

__all__ = ["CalibrateOptions", "RewriteOptions", "VerifyOptions"]

Guard = Literal["clip", "exact", "if", "flag"]
Otherwise = Literal["leave", "exact"]
Form = Literal["auto", "sum", "chunks", "online"]
ChunkSum = Literal["auto", "reshape", "split"]
Target = Literal["generic", "qnn-htp", "ort-cpu", "openvino"]
External = Literal["keep", "copy"]


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """How φ is derived from row statistics."""

    target: Target = "generic"
    """Engine that will execute the model; qnn-htp executes float32 graphs in float16."""

    margin: float | None = None
    """Distance kept from the upper end of the window (default: 3 in float16, 10 in float32 and bfloat16)."""

    max_samples: int | None = None
    """Use at most this many samples."""

    def __post_init__(self) -> None:
        """Refuse values that no option has."""
        _check_choices(self)
        _check_margin(self.margin)


@dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """What `rewrite` does with each attention site."""

    phi: str = "auto"
    """auto (from the evidence), a number for all sites, or a table written by calibrate."""

    guard: Guard = "clip"
    """What protects rows outside the window: clip (branch-free), exact (row maximum kept, needs no evidence), if (an If
    recomputes with the original Softmax) or flag (clip, and an output that counts such rows)."""

    otherwise: Otherwise = "leave"
    """What becomes of a site whose evidence fails."""

    form: Form = "auto"
    """How the denominator is summed; auto: chunks of 512 keys where the key count is known and larger, else one sum;
    online: a maximum per chunk, rescaled and combined (exact, needs no evidence)."""

    chunks: int | None = None
    """Number of chunks of the denominator, implies --form chunks (default: one per 512 keys)."""

    chunk_sum: ChunkSum = "auto"
    """reshape (chunks must divide the keys) or split (a shorter last chunk is fine)."""

    target: Target = "generic"
    """Engine that will execute the model; qnn-htp executes float32 graphs in float16."""

    margin: float | None = None
    """Distance kept from the upper end of the window (default: 3 in float16, 10 in float32 and bfloat16)."""

    include: str | None = None
    """Only sites whose id matches this regular expression."""

    exclude: str | None = None
    """No site whose id matches this regular expression."""

    decompose_attention: bool = False
    """Turn fused Attention operators (opset 23 and 24) into the standard chain first."""

    def __post_init__(self) -> None:
        """Refuse values that no option has."""
        _check_choices(self)
        if self.chunks is not None and self.chunks < 1:
            raise UsageError(f"--chunks {self.chunks} is no number of chunks; give 1 or more")
        if self.guard == "if" and self.target == "qnn-htp":
            raise UsageError("--guard if needs control flow, which qnn-htp does not have; use flag or exact there")
        _check_margin(self.margin)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How two models are compared."""

    rtol: float | None = None
    """Relative tolerance (default: from the table of the output's dtype)."""

    atol: float | None = None
    """Absolute tolerance (default: from the table of the output's dtype)."""

    max_samples: int | None = None
    """Use at most this many samples."""

    def __post_init__(self) -> None:
        """Refuse tolerances that are none."""
        _check_tolerance("rtol", self.rtol)
        _check_tolerance("atol", self.atol)


def _check_choices(options: CalibrateOptions | RewriteOptions) -> None:
    """Options given in Python are held against the same choices as flags."""
    hints = get_type_hints(type(options))
    for field in fields(options):
        value, choices = getattr(options, field.name), get_args(hints[field.name])
        if choices and all(isinstance(choice, str) for choice in choices) and value not in choices:
            raise UsageError(f"{field.name} is {value!r}; choose one of {', '.join(choices)}")


def _check_margin(margin: float | None) -> None:
    if margin is None:
        return
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin <= 1000:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"--margin {margin!r} is out of range; give a distance between 0 and 1000")


def _check_tolerance(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < float("inf"):
        raise UsageError(f"--{name} {value!r} is no tolerance; give a number from 0 on")
