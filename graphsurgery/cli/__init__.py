"""The command line; it parses, calls the library and prints."""

from __future__ import annotations

from graphsurgery.cli.main import main, run

__all__ = ["main", "run"]
