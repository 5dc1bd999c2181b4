"""Rewrites the softmax of exported ONNX attention to the unified max form.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphsurgery.api import RewriteResult, calibrate, rewrite
    from graphsurgery.api import find as find_attention
    from graphsurgery.options import CalibrateOptions, RewriteOptions, VerifyOptions
    from graphsurgery.verification.models import VerifyResult, verify

    __version__: str

__all__ = [
    "CalibrateOptions",
    "RewriteOptions",
    "RewriteResult",
    "VerifyOptions",
    "VerifyResult",
    "__version__",
    "calibrate",
    "find_attention",
    "rewrite",
    "verify",
]

_EXPORTS = {
    "CalibrateOptions": ("graphsurgery.options", "CalibrateOptions"),
    "RewriteOptions": ("graphsurgery.options", "RewriteOptions"),
    "RewriteResult": ("graphsurgery.api", "RewriteResult"),
    "VerifyOptions": ("graphsurgery.options", "VerifyOptions"),
    "VerifyResult": ("graphsurgery.verification.models", "VerifyResult"),
    "calibrate": ("graphsurgery.api", "calibrate"),
    "find_attention": ("graphsurgery.api", "find"),
    "rewrite": ("graphsurgery.api", "rewrite"),
    "verify": ("graphsurgery.verification.models", "verify"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("graphsurgery")
    elif name in _EXPORTS:
        module, attribute = _EXPORTS[name]
        value = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module 'graphsurgery' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
