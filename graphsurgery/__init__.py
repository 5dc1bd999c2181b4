"""Rewrites the softmax of exported ONNX attention to the unified max form.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphsurgery.api import RewriteResult, calibrate, rewrite
    from graphsurgery.api import find as find_attention
    from graphsurgery.options import CalibrateOptions, RewriteOptions, VerifyOptions
    from graphsurgery.verify.models import VerifyResult, verify

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
    "VerifyResult": ("graphsurgery.verify.models", "VerifyResult"),
    "calibrate": ("graphsurgery.api", "calibrate"),
    "find_attention": ("graphsurgery.api", "find"),
    "rewrite": ("graphsurgery.api", "rewrite"),
    "verify": ("graphsurgery.verify.models", "verify"),
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


class _Package(ModuleType):
    """Keeps `graphsurgery.verify` the function: importing the folder of that name would bind the module instead."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
