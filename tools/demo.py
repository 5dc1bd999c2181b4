"""The main job on an exported decoder of fixtures/: inspect, rewrite with calibration data, verify, and a summary.

usage: python tools/demo.py [--fixtures DIR] [--out DIR]

Each step is the command line as a user types it.  A step that fails ends the demo with that step's exit status.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["commands", "decoder", "main", "summary"]


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


def summary(report: dict[str, Any], rewritten: Path) -> str:
    """What the report says, in a few lines."""
    status = Counter(site["status"] for site in report["sites"])
    nodes = {when: sum(counts.values()) for when, counts in report["nodes"].items()}
    lines = [f"attention sites  {len(report['sites'])}: " + ", ".join(f"{n} {s}" for s, n in sorted(status.items()))]
    for site in report["sites"]:
        phi: dict[str, Any] = site.get("phi") or {}
        value: Any = phi.get("per_head", phi.get("value"))
        reason = "" if site["status"] == "rewritten" else f" ({site['code']}: {site['reason']})"
        form = f", form {site['form']}, guard {site['guard']}, phi {value}" if site.get("form") else ""
        lines.append(f"  {site['id']}  {site['status']}{form}{reason}")
    lines.append(f"nodes            {nodes['before']} before, {nodes['after']} after")
    outputs: dict[str, dict[str, Any]] = report["verify"]["onnxruntime"]
    worst = max(outputs, key=lambda output: outputs[output]["max_abs"])
    largest, floor = outputs[worst]["max_abs"], outputs[worst]["floor_abs"]
    lines.append(f"outputs          {len(outputs)} compared on onnxruntime")
    lines.append(f"                 largest difference {largest:.2g} in {worst}; one rounding step gives {floor:.2g}")
    lines.append(f"written          {rewritten}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the steps; the exit status of the first that fails, else 0."""
    parser = argparse.ArgumentParser(description="Run the main job on an exported decoder.")
    parser.add_argument("--fixtures", type=Path, default=Path("fixtures"))
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    options = parser.parse_args(arguments)
    name = decoder(options.fixtures)
    options.out.mkdir(parents=True, exist_ok=True)
    program = Path(sys.executable).with_name("graphsurgery")
    for command in commands(options.fixtures, name, options.out):
        print("\n$ " + shlex.join(["graphsurgery", *command]), flush=True)
        status = subprocess.run([program, *command], check=False).returncode
        if status:
            print(f"demo: {command[0]} ended with status {status}", file=sys.stderr)
            return status
    report = json.loads((options.out / "report.json").read_text(encoding="utf-8"))
    print("\n== summary\n" + summary(report, options.out / name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
