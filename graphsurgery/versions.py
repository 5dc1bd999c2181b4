"""Versions of what a stored figure depends on."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

__all__ = ["versions"]

_PACKAGES = ("graphsurgery", "onnx", "onnxruntime", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, this package and the packages that compute its figures."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
