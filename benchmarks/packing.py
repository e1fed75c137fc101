"""How full batches are, how even the devices' work, and how many programs it takes: ours against three other ways.

    python -m benchmarks.packing [--out FOLDER]

Planned, not run: no devices are needed. The encoders lie on H100s in bfloat16, each device with all weights and a part
of the batch.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import jaxenc
from benchmarks import mixes
from benchmarks.machine import versions
from benchmarks.mixes import Sizes
from benchmarks.results import RESULTS, Row, Table, keep
from benchmarks.ways import Cut, by_engines_rule, one_at_a_time, ours, padded
from jaxenc.ladder import Prices, full_work, ladder_of
from jaxenc.models import EncoderConfig
from jaxenc.packing import Budget

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
        "fullest."
    ),
    columns={
        "items": lambda row: row["items"],
        "devices": lambda row: str(row["devices"]),
        "way": lambda row: row["way"],
        "padding": lambda row: f"{row['padding']:.3f}",
        "slowest": lambda row: f"{row['slowest_by_batch']:.3f} / {row['slowest']:.3f}",
        "programs": lambda row: str(row["programs"]),
        "collectives": lambda row: f"{row['collective_bytes_per_token']:,.0f}",
    },
    key=lambda row: (row["devices"], row["items"], row["way"]),
)


class Tally:
    """What comes together over the batches of one way."""

    def __init__(self, devices: int):
        self.computed = self.busiest = self.collective_bytes = 0.0
        self.done = np.zeros(devices)
        self.budgets: set[Budget] = set()

    def add(self, cut: Cut, work: Sequence[float]) -> None:
        """One batch, and what each device has to do."""
        self.computed += cut.budget.tokens
        self.busiest += max(work)
        self.done += work
        self.budgets.add(cut.budget)


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
    window, tokens = config.window, sum(item.tokens for item in items)
    ways: dict[str, Callable[[], Iterator[Cut]]] = {
        "ours": lambda: ours([items], ladder_of(config, plan), window=window),
        "one item at a time": lambda: one_at_a_time(items, window=window),
        "padded to the largest": lambda: padded(calls, devices=devices, window=window),
        "engines' rule": lambda: by_engines_rule(calls, devices=devices, window=window),
    }
    if call:
        ways = {"ours, in calls": lambda: ours(calls, ladder_of(config, plan), window=window), **ways}
    found = []
    for way, cuts in ways.items():
        tally = Tally(prices.parts)
        for cut in cuts():
            tally.add(cut, exact_work(cut, prices))
            if way.startswith("ours"):
                tally.collective_bytes += plan.predict(*full_work(config, plan, cut.budget)).collective_bytes
        found.append(
            {
                "items": name,
                "devices": devices,
                "way": way,
                "padding": tally.computed / tokens,
                "slowest": tally.done.max() / tally.done.mean(),
                "slowest_by_batch": tally.busiest / tally.done.mean(),
                "programs": len(tally.budgets),
                "collective_bytes_per_token": tally.collective_bytes / tokens,
                "versions": versions(),
            }
        )
    return found


def exact_work(cut: Cut, prices: Prices) -> Sequence[float]:
    """What each device has to do: its tokens, and their pairs with all tokens of their piece."""
    work = np.zeros(prices.parts)
    for place in cut.places:
        pairs = cut.items[place.item].pieces[place.piece] * place.size
        work[place.row * prices.parts // max(prices.parts, cut.budget.rows)] += (
            prices.token * place.size + prices.pair * pairs
        )
    return work.tolist()


if __name__ == "__main__":
    main()
