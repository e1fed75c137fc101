"""How time and memory grow with tokens, items and devices.

    python -m benchmarks.growth

Each point is a call of a reduced Kimi-K2.5 tower (one layer, a quarter of the width) in float32 on CPU, after one that
compiles; memory is the peak during it. The exponent is the slope of the last four points, in logarithms.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import jaxenc
from benchmarks import mixes
from benchmarks.machine import versions
from benchmarks.process import forget_peak, fresh, give_back, resident_bytes
from benchmarks.results import RESULTS, Row, Table, keep

TOWER = replace(mixes.KIMI, layers=1, embed=288, heads=4, mlp=1076, out=512)
SIDE = 8  # patches of a small picture
TOKENS = tuple(1024 * 2**i for i in range(7))  # to 64k
ITEMS = (1, 3, 10, 30, 100, 300, 1000)
DEVICES = (1, 2, 4, 8)
# what grows -> its values, and what every one of them encodes: how many pictures of how many patches
CURVES: dict[str, tuple[Sequence[int], Any]] = {
    "tokens of one picture": (TOKENS, lambda n: [n]),
    "tokens of pictures of 1,024": (TOKENS, lambda n: [1024] * (n // 1024)),
    "pictures of 64 tokens": (ITEMS, lambda n: [SIDE**2] * n),
    "devices": (DEVICES, lambda n: [1024] * 16),
}

TABLE = Table(
    name="growth",
    title="How time and memory grow",
    text=(
        "One call of a reduced Kimi-K2.5 tower (one layer, a quarter of the width) in float32 on CPU: medians of three "
        "after one that compiles. Memory is what the call added to what was there before it, at its peak. Devices are "
        "virtual, and share one machine: their work is the same in all, so time that did not change would say that "
        "dividing it costs nothing. `exponent` is the slope over the last four points, in logarithms."
    ),
    columns={
        "what grows": lambda row: row["curve"],
        "jax": lambda row: row["versions"]["jax"],
        "from": lambda row: f"{row['sizes'][0]:,}",
        "to": lambda row: f"{row['sizes'][-1]:,}",
        "seconds": lambda row: f"{row['seconds'][0]:.3g} - {row['seconds'][-1]:.3g}",
        "exponent": lambda row: f"{row['time_exponent']:.2f}",
        "MB": lambda row: f"{row['mb'][0]:,.0f} - {row['mb'][-1]:,.0f}",
        "exponent of memory": lambda row: f"{row['memory_exponent']:.2f}",
    },
    key=lambda row: (row["curve"], row["versions"]["jax"]),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--curve", choices=CURVES, action="append", help="some alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to keep the results in")
    parser.add_argument("--measure", choices=CURVES, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(point(args.measure, args.size)))
        return
    rows = [curve(name) for name in args.curve or CURVES]
    keep(TABLE, rows, folder=args.results)


def curve(name: str) -> Row:
    """All points of one curve."""
    sizes, _ = CURVES[name]
    # each in a process of its own: what one leaves of memory, the next would not ask for
    points = [
        fresh(
            "benchmarks.growth",
            *("--measure", name, "--size", str(size)),
            devices=size if name == "devices" else 1,
        )
        for size in sizes
    ]
    seconds, mb = ([measured[what] for measured in points] for what in ("seconds", "mb"))
    return {
        "curve": name,
        "sizes": list(sizes),
        "seconds": seconds,
        "mb": mb,
        "time_exponent": _slope(sizes, seconds),
        "memory_exponent": _slope(sizes, mb),
        "versions": versions(),
    }


def point(name: str, size: int) -> dict[str, float]:
    """Seconds and memory of one call."""
    _, tokens = CURVES[name]
    rng = np.random.default_rng(0)
    items = [_picture(n, rng) for n in tokens(size)]
    mesh = jaxenc.make_mesh(data=size if name == "devices" else 1)
    encoder = jaxenc.from_config(TOWER, mesh=mesh, dtype="float32")
    encoder.encode_items(items)
    give_back()
    before = resident_bytes()
    forget_peak()
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        encoder.encode_items(items)
        taken.append(time.perf_counter() - started)
    return {"seconds": statistics.median(taken), "mb": (resident_bytes(peak=True) - before) / 1e6}


def _picture(tokens: int, rng: np.random.Generator) -> jaxenc.VisionItem:
    h = 2 ** (tokens.bit_length() // 2)
    return jaxenc.VisionItem(rng.standard_normal((tokens, 3 * TOWER.patch**2), np.float32), (1, h, tokens // h))


def _slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    x, y = np.log(sizes[-4:]), np.log(np.maximum(values[-4:], 1e-9))
    return float(np.polyfit(x, y, 1)[0])


if __name__ == "__main__":
    main()
