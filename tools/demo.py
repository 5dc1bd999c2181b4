"""The main job on an exported decoder of fixtures/: inspect, rewrite with calibration data, verify, and a summary.

usage: python tools/demo.py [--fixtures DIR] [--out DIR]

Each step is the command line as a user types it; the summary is what rewrite said.  A step that fails ends the demo
with that step's exit status.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["commands", "decoder", "main"]


def decoder(fixtures: Path) -> str:
    """The file name of the first Llama decode step that the dynamo exporter wrote."""
    models = json.loads((fixtures / "fixtures.json").read_text(encoding="utf-8"))["models"]
    names = sorted(name for name, entry in models.items() if _is_decoder(entry))
    if not names:
        raise SystemExit(f"{fixtures / 'fixtures.json'}: lists no Llama decode step of the dynamo exporter")
    return names[0]


def _is_decoder(entry: dict[str, Any]) -> bool:
    wanted = {"architecture": "llama_decode", "exporter": "dynamo", "dtype": "float32"}
    return all(entry.get(key) == value for key, value in wanted.items())


def commands(fixtures: Path, name: str, out: Path) -> list[list[str]]:
    """The three commands, without the program's own path."""
    original, rewritten = str(fixtures / name), str(out / name)
    data = ["--data", str(fixtures / "data" / Path(name).stem)]
    return [
        ["inspect", original],
        ["rewrite", original, "-o", rewritten, *data, "--report", str(out / "report.json")],
        ["verify", original, rewritten, *data],
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the steps; the exit status of the first that fails, else 0."""
    parser = argparse.ArgumentParser(description="Run the main job on an exported decoder.")
    parser.add_argument("--fixtures", type=Path, default=Path("fixtures"))
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args(arguments)
    name = decoder(options.fixtures)
    options.out.mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("graphsurgery")
    said: list[str] = []
    for command in commands(options.fixtures, name, options.out):
        print("\n$ " + shlex.join(["graphsurgery", *command]), flush=True)
        done = subprocess.run([program, *command], stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        sys.stderr.flush()
        if done.returncode:
            print(f"demo: {command[0]} ended with status {done.returncode}", file=sys.stderr)
            return done.returncode
        if command[0] == "rewrite":
            said = done.stderr.splitlines()
    print("\n== summary\n" + "\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
