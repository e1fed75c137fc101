"""What the planner decides for every encoder, mesh and batch, and whether a wall clock agrees.

    python -m benchmarks.plans [ENCODER ...] [--all] [--no-wall-clock]

The sweep needs no devices: data 1 to 8 x model 1 to 64, batches of 1, 3, 8 and 64 typical items. Beside our default
plan it says what two common ways would cost: the tower replicated along the model axis, and whole items dealt to all
devices one by one. The wall clock is of a reduced audio tower, 20 heads on eight virtual devices of one machine, where
it measures the sum of what all devices do.
"""

import argparse
import json
import logging
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import jaxenc
from benchmarks.machine import load_average, versions
from benchmarks.process import fresh
from benchmarks.results import RESULTS, Row, Table, keep
from jaxenc.encoder import BatchLayout
from jaxenc.models.qwen3_omni_audio import Config
from sharding_rules.costs import FAIR
from sharding_rules.reasons import FEW_UNITS

DATA = range(1, 9)
MODEL = range(1, 65)
BATCHES = (1, 3, 8, 64)
SHOWN = [(1, 3), (1, 5), (1, 6), (1, 7), (1, 8), (1, 12), (1, 20), (1, 24), (1, 25), (1, 32), (1, 48), (1, 64), (8, 8)]

PLANS = Table(
    name="plans",
    title="What the planner decides, and what other ways would cost",
    text=(
        "`flops ratio`: FLOPs of the busiest device over an equal share of all FLOPs, at exact token counts; `bound`: "
        "the least it can be with that strategy, since a merge group or a convolution chunk stays whole; `units`: "
        "indivisible units in a device's equal share, of the group that has the fewest. `replicated`: the whole tower "
        "on every device of the model axis. `whole items`: weights replicated, each item on one of all devices. Items "
        "are typical ones: a picture of 448 x 448 pixels, 30 s of speech."
    ),
    columns={
        "encoder": lambda row: row["encoder"],
        "data x model": lambda row: f"{row['data']} x {row['model']}",
        "batch": lambda row: str(row["batch"]),
        "strategy": lambda row: row["strategy"],
        "weights x batch": lambda row: f"{row['weight_parts']} x {row['batch_parts']}",
        "batch layout": lambda row: row["batch_layout"],
        "flops ratio": lambda row: f"{row['flops_ratio']:.3f}",
        "bound": lambda row: f"{row['flops_bound']:.3f}",
        "units": lambda row: f"{row['units_per_device']:.3g}",
        "replicated": lambda row: f"{row['replicated']:.2f}",
        "whole items": lambda row: f"{row['whole_items']:.2f}",
    },
    key=lambda row: (row["encoder"], row["data"], row["model"], row["batch"]),
)

CLOCK = Table(
    name="plans_wall_clock",
    title="The planner's ranking on a wall clock",
    text=(
        "Seconds of one call of a reduced audio tower (4 layers of Qwen3-Omni's width, 20 heads, its convolutions "
        "whole) on eight virtual CPU devices of one machine, data=1, model=8: medians, the ways taking turns. There "
        "the clock measures what all devices do together. `total work`: the FLOPs of all devices that are predicted "
        "for the shapes that run, over the FLOPs that are needed; `clock`: seconds over those of the fastest way."
    ),
    columns={
        "batch": lambda row: f"{row['batch']} x {row['tokens']} tokens",
        "strategy": lambda row: row["strategy"],
        "layout": lambda row: row["layout"],
        "flops ratio": lambda row: f"{row['flops_ratio']:.2f}",
        "total work": lambda row: f"{row['work']:.2f}",
        "s": lambda row: f"{row['seconds']:.2f}",
        "fastest - slowest": lambda row: f"{min(row['all_s']):.2f} - {max(row['all_s']):.2f}",
        "clock": lambda row: f"{row['clock']:.2f}",
        "load average": lambda row: f"{row['load_average']:.1f}",
    },
    key=lambda row: (row["batch"], row["tokens"], row["strategy"], row["layout"]),
)

# strategy, layout; the first is the default's
WAYS: Sequence[tuple[Any, BatchLayout]] = (
    ("auto", "auto"),
    ({"attention": "pad"}, "rows"),
    ("data", "length"),
    ("data", "rows"),
    ("replicate", "rows"),
)
CALLS = ((1, 390), (8, 104))  # items, tokens of each: 30 s and 8 s of speech


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__.splitlines()[0])
    names = [f"{info.name}:{variant}" for info in jaxenc.encoders() for variant in info.variants]
    parser.add_argument("encoders", nargs="*", default=names, metavar="ENCODER", help="family:variant; all by default")
    parser.add_argument("--all", action="store_true", help="print every cell")
    parser.add_argument("--no-wall-clock", action="store_true", help="the sweep alone")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each way, after one that is not")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--measure", nargs=2, type=int, metavar=("BATCH", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    logging.getLogger("sharding_rules").setLevel(logging.ERROR)
    if args.measure:
        print(json.dumps(measure(*args.measure, rounds=args.rounds)))
        return

    cells = [(name, data, model) for name in args.encoders for data in DATA for model in MODEL]
    with ProcessPoolExecutor() as pool:
        rows = [row for found in pool.map(sweep, cells, chunksize=16) for row in found]
    shown = rows if args.all else [row for row in rows if (row["data"], row["model"]) in SHOWN]
    keep(PLANS, shown, folder=args.out, note=summary(rows))
    if not args.no_wall_clock:
        found = [fresh("benchmarks.plans", "--measure", *map(str, call), "--rounds", str(args.rounds), devices=8)
                 for call in CALLS]  # fmt: skip
        keep(CLOCK, [row for rows in found for row in rows["rows"]], folder=args.out)


def sweep(cell: tuple[str, int, int]) -> list[Row]:
    """Our default and the two other ways on one mesh, for every batch."""
    name, data, model = cell
    logging.getLogger("sharding_rules").setLevel(logging.ERROR)

    def ratio(batch: int, strategy: str) -> float:
        mesh = {"data": data, "model": model}
        return jaxenc.plan(name, mesh_shape=mesh, batch=batch, strategy=strategy, layout="rows").flops_ratio

    rows = []
    for batch in BATCHES:
        plan = jaxenc.plan(name, mesh_shape={"data": data, "model": model}, batch=batch)
        rows.append(
            {
                "encoder": name,
                "data": data,
                "model": model,
                "batch": batch,
                "strategy": plan.strategy,
                "weight_parts": plan.layout.weight_parts,
                "batch_parts": plan.rows_parts,
                "batch_layout": plan.batch_layout,
                "flops_ratio": plan.flops_ratio,
                "flops_bound": plan.cost.flops_bound,
                "units_per_device": plan.cost.units_per_device,
                "replicated": ratio(batch, "replicate"),
                "whole_items": ratio(batch, "data"),
                "versions": versions(),
            }
        )
    return rows


def summary(rows: Sequence[Row]) -> str:
    """How many cells keep the promise, in words."""
    unfair = [row for row in rows if row["flops_ratio"] > FAIR]
    broken = [row for row in unfair if row["units_per_device"] >= FEW_UNITS]
    above = [row for row in unfair if row["flops_ratio"] > row["flops_bound"] * 1.01]
    excess = max((row["flops_ratio"] / row["flops_bound"] for row in unfair), default=1.0)
    return (
        f"Of {len(rows):,} cells (every encoder, data {DATA[0]} to {DATA[-1]}, model {MODEL[0]} to {MODEL[-1]}, "
        f"batches of {', '.join(map(str, BATCHES))}), {len(rows) - len(unfair):,} have a flops ratio of at most "
        f"{FAIR:.2f}. Of the other {len(unfair):,}, {len(broken)} have ten indivisible units or more in a device's "
        f"share, and {len(above)} are more than 1 % above the integer bound (the worst is at {excess:.4f} of it). "
        f"Mean and largest ratio: ours {_spread(rows, 'flops_ratio')}; replicated {_spread(rows, 'replicated')}; whole "
        f"items on all devices {_spread(rows, 'whole_items')}."
    )


def _spread(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{statistics.fmean(values):.3f} and {max(values):.2f}"


def measure(batch: int, tokens: int, *, rounds: int) -> dict[str, list[Row]]:
    """Seconds of each way, taking turns, on eight devices of this process."""
    config = replace(Config(), layers=4)
    chunks, rest = divmod(tokens, config.chunk_tokens)
    frames = chunks * config.chunk_frames + (0 if rest == 0 else config.chunk_frames)
    rng = np.random.default_rng(0)
    items = [jaxenc.AudioItem(rng.standard_normal((config.mel, frames)).astype(np.float32)) for _ in range(batch)]
    mesh = jaxenc.make_mesh(data=1, model=8)
    need = math.fsum(config.workload((tokens,) * batch).item_flops)
    encoders = [jaxenc.from_config(config, mesh=mesh, strategy=strategy) for strategy, _ in WAYS]
    seconds: list[list[float]] = [[] for _ in WAYS]
    for turn in range(rounds + 1):
        for encoder, (_, layout), times in zip(encoders, WAYS, seconds, strict=True):
            start = time.perf_counter()
            encoder.encode_items(items, layout=layout)
            if turn:  # the first compiles
                times.append(time.perf_counter() - start)
    fastest = min(map(statistics.median, seconds))
    rows = []
    for encoder, (strategy, layout), times in zip(encoders, WAYS, seconds, strict=True):
        plan = jaxenc.plan(config, mesh=mesh, batch=batch, tokens=tokens, strategy=strategy, layout=layout)
        budgets = [budget for budget, _ in encoder._batches(items, layout)]
        rows.append(
            {
                "batch": batch,
                "tokens": tokens,
                "strategy": plan.strategy,
                "layout": plan.batch_layout,
                "flops_ratio": plan.flops_ratio,
                "work": mesh.size * math.fsum(encoder.costs[budget].flops_per_device for budget in budgets) / need,
                "seconds": statistics.median(times),
                "all_s": times,
                "clock": statistics.median(times) / fastest,
                "load_average": load_average(),
                "versions": versions(),
            }
        )
    return {"rows": sorted(rows, key=lambda row: row["seconds"])}


if __name__ == "__main__":
    main()
