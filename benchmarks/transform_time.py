"""Load + rewrite + save against plain onnx.load + onnx.save, in one run, alternating.

    python benchmarks/transform_time.py [--sites 1000] [--nodes 40000] [--runs 9]

Prints, for each style of export, the seconds of both (least and median) and their ratio.  Wall-clock times of a
machine say little, the ratio of one run is the figure.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import onnx
from workloads import decoder

from graphsurgery.api import rewrite
from graphsurgery.model.files import save_model
from graphsurgery.options import RewriteOptions


def plain(source: Path, target: Path) -> int:
    model = onnx.load(source)
    onnx.save(model, target)
    return 0


def ours(source: Path, target: Path) -> int:
    result = rewrite(source, options=RewriteOptions(phi="3"))
    save_model(result.proto, target, source=result.source)
    return result.rewritten


def timed(job: Callable[[Path, Path], int], source: Path, target: Path) -> tuple[float, int]:
    begin = time.perf_counter()
    done = job(source, target)
    return time.perf_counter() - begin, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    print(f"{args.nodes} nodes, {args.sites} sites, {args.runs} runs each, alternating; seconds least / median")
    for style in ("torchscript", "dynamo"):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "in.onnx"
            onnx.save(decoder(args.sites, args.nodes, style), source)
            a: list[float] = []
            b: list[float] = []
            for _ in range(args.runs):
                a.append(timed(plain, source, Path(folder) / "plain.onnx")[0])
                seconds, done = timed(ours, source, Path(folder) / "ours.onnx")
                b.append(seconds)
                if done != args.sites:
                    raise SystemExit(f"only {done} of {args.sites} sites were rewritten")
            size = source.stat().st_size / 1e6
        print(
            f"{style:12} {size:6.1f} MB  load+save {min(a):.3f} / {median(a):.3f}  load+rewrite+save {min(b):.3f} / "
            f"{median(b):.3f}  ratio {min(b) / min(a):.2f} / {median(b) / median(a):.2f}"
        )


if __name__ == "__main__":
    main()
