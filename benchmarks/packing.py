"""How full batches are, how even the devices' work, and how many programs it takes: ours against three other ways.

    python -m benchmarks.packing [--out FOLDER]

Planned, not run: no devices are needed. The encoders lie on H100s in bfloat16, each device with all weights and a part
of the batch.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import jaxenc
from benchmarks import mixes
from benchmarks.baselines import greedy
from benchmarks.machine import versions
from benchmarks.mixes import Sizes
from benchmarks.results import RESULTS, Row, Table, keep
from jaxenc.ladder import Prices, full_work, ladder_of
from jaxenc.models import EncoderConfig
from jaxenc.packer import Packer
from jaxenc.packing import Budget, Placed
from sharding_rules import Plan

CALL = 16  # items of a call
STREAM = 2000  # items of a stream
STREAMS = {
    "photos": mixes.KIMI,
    "documents": mixes.KIMI,
    "thumbnails": mixes.KIMI,
    "pictures": mixes.KIMI,
    "video chunks": mixes.KIMI,
    "16,200 patches": mixes.KIMI,
    "5,500 patches": mixes.KIMI,
    "speech": mixes.SPEECH,
}
SINGLE: Mapping[str, Sequence[Sizes]] = {
    **{f"{n} photos": mixes.mix("photos", n) for n in (8, 16, 64)},
    **{f"{n} documents": mixes.mix("documents", n) for n in (8, 16)},
    **{f"16,384 patches among {n} thumbnails": mixes.giant_among(n) for n in (7, 63)},
}

PACKING = Table(
    name="packing",
    title="Packing: padding, balance and programs",
    text=(
        "`padding`: tokens computed over tokens there are. `slowest`: work of the busiest device over the mean, at "
        "exact token counts and with quadratic attention: batch by batch / all together. `programs`: distinct shapes. "
        "`collectives`: bytes that a device sends because items are spread over devices, for each token. A stream is "
        f"{STREAM:,} items; `in calls` means {CALL} items at a time, otherwise all come in one stream or one call. "
        "`one item at a time`: each on one device at its own size. `padded to the largest`: of its call. `engines' "
        "rule`: whole items, the largest first, each to the device with the fewest tokens, and rows as long as the "
        "fullest. `tokens/s`: measured, where it was."
    ),
    columns={
        "items": lambda row: row["items"],
        "devices": lambda row: str(row["devices"]),
        "way": lambda row: row["way"],
        "padding": lambda row: f"{row['padding']:.3f}",
        "slowest": lambda row: f"{row['slowest_by_batch']:.3f} / {row['slowest']:.3f}",
        "programs": lambda row: str(row["programs"]),
        "collectives": lambda row: f"{row['collective_bytes_per_token']:,.0f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "-",
    },
    key=lambda row: (row["devices"], row["items"], row["way"]),
)


@dataclass
class Tally:
    """What comes together over the batches of one way."""

    computed: float = 0.0
    busiest: float = 0.0
    done: np.ndarray = field(default_factory=lambda: np.zeros(1))
    collective_bytes: float = 0.0

    def add(self, computed: float, work: Sequence[float]) -> None:
        """One batch: tokens computed, and what each device has to do."""
        self.computed += computed
        self.busiest += max(work)
        self.done = self.done + np.asarray(work)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    logging.getLogger("sharding_rules").setLevel(logging.ERROR)
    keep(PACKING, rows(), folder=args.out)


def rows() -> list[Row]:
    """Every mix and way."""
    made = []
    for devices in (1, 8):
        for kind, config in STREAMS.items():
            made += compare(kind, mixes.mix(kind, STREAM), config, devices=devices, call=CALL)
    for name, items in SINGLE.items():
        made += compare(name, items, mixes.KIMI, devices=8)
    return made


def compare(
    name: str, items: Sequence[Sizes], config: EncoderConfig, *, devices: int, call: int | None = None
) -> list[Row]:
    """A row for each way.

    Args:
        name: of the items.
        items: in the order in which they come.
        config: of the encoder.
        devices: that share the batch.
        call: items of a call, or all are one.
    """
    plan = jaxenc.plan(config, mesh_shape={"data": devices, "model": 1}, dtype="bfloat16", device="h100")
    prices = ladder_of(config, plan).prices
    calls = [items[i : i + (call or len(items))] for i in range(0, len(items), call or len(items))]
    tokens = sum(item.tokens for item in items)
    ways: dict[str, Callable[[], tuple[Tally, int]]] = {
        "ours": lambda: packed([items], config, plan),
        "one item at a time": lambda: one_at_a_time(items, prices),
        "padded to the largest": lambda: padded(calls, prices),
        "engines' rule": lambda: by_engines_rule(calls, prices),
    }
    if call:
        ways = {"ours, in calls": lambda: packed(calls, config, plan), **ways}
    found = []
    for way, measure in ways.items():
        tally, programs = measure()
        found.append(
            {
                "items": name,
                "devices": devices,
                "way": way,
                "padding": tally.computed / tokens,
                "slowest": tally.done.max() / tally.done.mean(),
                "slowest_by_batch": tally.busiest / tally.done.mean(),
                "programs": programs,
                "collective_bytes_per_token": tally.collective_bytes / tokens,
                "versions": versions(),
            }
        )
    return found


# --- the ways


def packed(calls: Sequence[Sequence[Sizes]], config: EncoderConfig, plan: Plan) -> tuple[Tally, int]:
    """Ours: batches as the encoder would make them, cut from a call as from a stream."""
    ladder, tally = ladder_of(config, plan), Tally()
    used = set()
    for items in calls:
        for budget, places in batches(items, Packer(ladder, window=config.window)):
            used.add(budget)
            tally.add(budget.tokens, exact_work(items, budget, places, ladder.prices))
            tally.collective_bytes += plan.predict(*full_work(config, plan, budget)).collective_bytes
    return tally, len(used)


def batches(items: Sequence[Sizes], packer: Packer) -> Iterator[tuple[Budget, list[Placed]]]:
    """The batches of items that come one after the other."""
    for i, item in enumerate(items):
        packer.add(i, item.pieces, unit=item.unit, name=f"item {i}")
        while packer.waiting >= packer.enough:
            yield packer.batch()
    while packer:
        yield packer.batch()


def exact_work(items: Sequence[Sizes], budget: Budget, places: Sequence[Placed], prices: Prices) -> Sequence[float]:
    """What each device has to do: its tokens, and their pairs with all tokens of their piece."""
    work = np.zeros(prices.parts)
    for place in places:
        pairs = items[place.item].pieces[place.piece] * place.size
        work[place.row * prices.parts // budget.rows] += prices.token * place.size + prices.pair * pairs
    return work.tolist()


def cost(item: Sizes, prices: Prices) -> float:
    """An item on one device."""
    return sum(map(prices.item, item.pieces))


def one_at_a_time(items: Sequence[Sizes], prices: Prices) -> tuple[Tally, int]:
    """Each item at its own size, one device at work."""
    tally = Tally()
    for item in items:
        tally.add(item.tokens, [cost(item, prices), *[0.0] * (prices.parts - 1)])
    return tally, len({item.tokens for item in items})


def padded(calls: Sequence[Sequence[Sizes]], prices: Prices) -> tuple[Tally, int]:
    """Every item of a call as large as its largest, and as many on each device."""
    tally, shapes = Tally(), set()
    for items in calls:
        each, largest = -(-len(items) // prices.parts), max(item.tokens for item in items)
        shares = [items[i * each : (i + 1) * each] for i in range(prices.parts)]
        tally.add(prices.parts * each * largest, [sum(cost(item, prices) for item in share) for share in shares])
        shapes.add((each, largest))
    return tally, len(shapes)


def by_engines_rule(calls: Sequence[Sequence[Sizes]], prices: Prices) -> tuple[Tally, int]:
    """Whole items onto devices by tokens; each device computes as many as the fullest has."""
    tally, shapes = Tally(), set()
    for items in calls:
        order, counts, loads = greedy([item.tokens for item in items], prices.parts)
        stops = np.cumsum(counts)
        shares = [order[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
        tally.add(prices.parts * max(loads), [sum(cost(items[i], prices) for i in share) for share in shares])
        shapes.add(max(loads))
    return tally, len(shapes)


if __name__ == "__main__":
    main()
