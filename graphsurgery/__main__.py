"""`python -m graphsurgery` is the command line."""

from __future__ import annotations

from graphsurgery.cli import run

if __name__ == "__main__":
    run()
