"""Tokens a second of small towers on CPU, cut into batches by us and by three other ways.

    python -m benchmarks.packing_speed [--devices N ...] [--rounds N] [--out FOLDER]

The clock measures what all devices do together: virtual ones share one machine. So padding shows in it, and what is
uneven only through the padding to the fullest device.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

import jaxenc
from benchmarks import mixes
from benchmarks.machine import load_average, versions
from benchmarks.mixes import Sizes
from benchmarks.process import fresh
from benchmarks.results import RESULTS, Row, Table, keep
from benchmarks.ways import Cut, by_engines_rule, one_at_a_time, ours, padded
from jaxenc.items import Item
from jaxenc.models import EncoderConfig

COUNT = 16  # items of a mix
CALLS = {1: 4, 8: 16}  # devices -> items of a call of the other ways
KIMI = replace(mixes.KIMI, layers=1, embed=576, heads=8, mlp=2152, out=1024)
SPEECH = replace(mixes.SPEECH, layers=1, embed=640, heads=10, mlp=2560, channels=60, out=512)
MIXES: dict[str, tuple[EncoderConfig, Callable[[np.random.Generator], Sizes]]] = {
    "photos": (KIMI, partial(mixes.photo, scale=0.2)),
    "documents": (KIMI, partial(mixes.page, scale=0.2)),
    "video chunks": (KIMI, partial(mixes.chunk, patch_limit=256)),
    "speech": (SPEECH, partial(mixes.speech, longest=120.0)),
}

SPEED = Table(
    name="packing_speed",
    title="Packing on a wall clock",
    text=(
        f"{COUNT} items of each mix through reduced towers in float32 (one layer, half of Kimi-K2.5's and of "
        "Qwen3-Omni's width; pictures and pages of a fifth of the usual pixels a side, frames of up to 256 patches, "
        "speech of up to two minutes), on one CPU device and on eight virtual ones of the same machine, data=8. Ours "
        f"is one stream; the others have {CALLS[1]} items a call on one device and {CALLS[8]} on eight, but for `one "
        "item at a time`, which is on one device always. Medians, the ways taking turns, all from items to rows on the "
        "host. `programs` and `compile s` are those of the first round; `with compiling` is what that round gave."
    ),
    columns={
        "items": lambda row: row["items"],
        "devices": lambda row: str(row["devices"]),
        "way": lambda row: row["way"],
        "padding": lambda row: f"{row['padding']:.2f}",
        "programs": lambda row: str(row["programs"]),
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "fastest - slowest": lambda row: " - ".join(f"{row['tokens'] / s:,.0f}" for s in _ends(row["all_s"])),
        "of ours": lambda row: f"{row['of_ours']:.2f}",
        "with compiling": lambda row: f"{row['tokens'] / row['first_s']:,.0f}",
        "load average": lambda row: f"{row['load_average']:.1f}",
    },
    key=lambda row: (row["devices"], row["items"], row["way"]),
)


def _ends(seconds: Sequence[float]) -> tuple[float, float]:
    return max(seconds), min(seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds, after one that compiles")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--measure", nargs=2, metavar=("MIX", "DEVICES"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    logging.getLogger("sharding_rules").setLevel(logging.ERROR)
    if args.measure:
        name, devices = args.measure
        print(json.dumps({"rows": measure(name, int(devices), rounds=args.rounds)}))
        return
    found = [
        row
        for devices in args.devices
        for name in MIXES
        for row in fresh(
            "benchmarks.packing_speed", "--measure", name, f"{devices}", "--rounds", f"{args.rounds}", devices=devices
        )["rows"]
    ]
    keep(SPEED, found, folder=args.out)


@dataclass
class Way:
    """One way to encode all items."""

    encoder: jaxenc.Encoder
    cuts: Sequence[Cut]
    seconds: list[float] = field(default_factory=list)
    compile_s: float = 0.0

    def run(self, items: Sequence[Item]) -> None:
        """All batches, one being laid out while another is computed, to rows on the host."""
        start = time.perf_counter()
        running: list[jax.Array] = []
        for cut in self.cuts:
            if cut.budget not in self.encoder.compiled:
                compiling = time.perf_counter()
                self.encoder.warmup([cut.budget])
                self.compile_s += time.perf_counter() - compiling
            here = cut.items[0].start  # type: ignore[attr-defined]
            out, _ = self.encoder._launch(items[here : here + len(cut.items)], cut.places, cut.budget)
            running.append(out)
            if len(running) > 1:
                np.asarray(running.pop(0))
        for out in running:
            np.asarray(out)
        self.seconds.append(time.perf_counter() - start)


@dataclass(frozen=True)
class Numbered(Sizes):
    """An item's sizes, and which of all it is."""

    start: int = 0


def measure(name: str, devices: int, *, rounds: int) -> list[Row]:
    """A row for each way of one mix."""
    config, draw = MIXES[name]
    rng = np.random.default_rng(0)
    drawn = [draw(rng) for _ in range(COUNT)]
    sizes = [Numbered(size.pieces, size.unit, size.shape, start) for start, size in enumerate(drawn)]
    items = [_item(config, size, rng) for size in drawn]
    tokens = sum(size.tokens for size in sizes)
    calls = [sizes[i : i + CALLS[devices]] for i in range(0, COUNT, CALLS[devices])]
    alone = jaxenc.from_config(config, mesh=jaxenc.make_mesh(data=1), dtype="float32")
    many = jaxenc.from_config(config, mesh=jaxenc.make_mesh(data=devices), dtype="float32")
    window = config.window

    def way(encoder: jaxenc.Encoder, cuts: Iterator[Cut]) -> Way:
        return Way(encoder.with_params(encoder.params), list(cuts))

    own = many.with_params(many.params)
    ways = {
        "ours": Way(own, list(ours([sizes], own._ladder, window=window))),
        "one item at a time": way(alone, one_at_a_time(sizes, window=window)),
        "padded to the largest": way(many, padded(calls, devices=devices, window=window)),
        "engines' rule": way(many, by_engines_rule(calls, devices=devices, window=window)),
    }
    for one in ways.values():
        one.encoder.compiled.clear()
    for _ in range(rounds + 1):
        for one in ways.values():
            one.run(items)
    medians = {how: statistics.median(one.seconds[1:]) for how, one in ways.items()}
    return [
        {
            "items": name,
            "devices": devices,
            "way": how,
            "tokens": tokens,
            "padding": sum(cut.budget.tokens for cut in one.cuts) / tokens,
            "programs": len(one.encoder.compiled),
            "compile_s": one.compile_s,
            "tokens_per_s": tokens / medians[how],
            "all_s": one.seconds[1:],
            "first_s": one.seconds[0],
            "of_ours": medians["ours"] / medians[how],
            "load_average": load_average(),
            "versions": versions(),
        }
        for how, one in ways.items()
    ]


def _item(config: EncoderConfig, size: Sizes, rng: np.random.Generator) -> Item:
    if config is KIMI:
        t, h, w = size.shape
        return jaxenc.VisionItem(rng.standard_normal((t * h * w, 3 * KIMI.patch**2), np.float32), (t, h, w))
    return jaxenc.AudioItem(rng.standard_normal((SPEECH.mel, *size.shape), np.float32))


if __name__ == "__main__":
    main()
