"""Pins every requirement of pyproject.toml to its lower bound, as a pip constraints file on stdout.

usage: python tools/lowest.py [--extra NAME]... [PYPROJECT]

Each requirement must have one lower bound (`>=`, `~=` or `==`): one without it has never been tested low, and is
reported with exit status 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

__all__ = ["constraint", "constraints", "main"]

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[(?P<extras>[^\]]*)\])?\s*(?P<bounds>[^;]*)")
_LOWER = re.compile(r"(?:>=|~=|===?)\s*([\w.!+]+)")


def constraint(requirement: str) -> str:
    """`name>=1.2,<3` as `name==1.2`; ValueError where no single lower bound is given."""
    parts = _REQUIREMENT.match(requirement)
    bounds = _LOWER.findall(parts["bounds"]) if parts else []
    if parts is None or len(bounds) != 1:
        raise ValueError(f"{requirement}: give it exactly one lower bound, such as name>=1.2")
    return f"{parts['name']}=={bounds[0]}"


def constraints(pyproject: Path, extras: list[str]) -> list[str]:
    """The constraints of the dependencies and of the named extras, sorted; ValueError names what has no bound."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    unknown = sorted(set(extras) - set(optional))
    if unknown:
        raise ValueError(
            f"extra {unknown[0]}: not in {pyproject.name}, which has {', '.join(sorted(optional)) or 'no extras'}"
        )
    requirements = [*project.get("dependencies", []), *(entry for extra in extras for entry in optional[extra])]
    itself = re.compile(re.escape(project["name"]) + r"\s*\[")
    return sorted({constraint(entry) for entry in requirements if not itself.match(entry)})


def main(arguments: list[str] | None = None) -> int:
    """Print the constraints; 1 with one line on stderr where they can't be told."""
    parser = argparse.ArgumentParser(description="Pin every requirement to its lower bound.")
    parser.add_argument("pyproject", nargs="?", type=Path, default=Path(__file__).parents[1] / "pyproject.toml")
    parser.add_argument("--extra", action="append", default=[], help="also the requirements of this extra")
    options = parser.parse_args(arguments)
    try:
        lines = constraints(options.pyproject, options.extra)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
