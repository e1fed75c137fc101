"""Ways to cut items into batches: ours, and those that it is measured against."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.baselines import greedy
from jaxenc.ladder import Ladder
from jaxenc.packer import Packer
from jaxenc.packing import Budget, Placed


class Sized(Protocol):
    """What is known of an item: tokens of its pieces, and how many stay together where it is spread."""

    pieces: tuple[int, ...]
    unit: int


@dataclass(frozen=True)
class Cut:
    """One batch.

    Attributes:
        items: that the places are of.
        budget: its shape.
        places: where their pieces lie.
    """

    items: Sequence[Sized]
    budget: Budget
    places: Sequence[Placed]


def ours(
    calls: Sequence[Sequence[Sized]], ladder: Ladder, *, window: int | None, layout: str = "auto"
) -> Iterator[Cut]:
    """As the encoder cuts a stream: as soon as enough waits, and what is left at the end of a call."""
    for items in calls:
        packer = Packer(ladder, window=window, layout=layout)
        for i, item in enumerate(items):
            packer.add(i, item.pieces, unit=item.unit, name=f"item {i}")
            while packer.waiting >= packer.enough:
                yield Cut(items, *packer.batch())
        while packer:
            yield Cut(items, *packer.batch())


def one_at_a_time(items: Sequence[Sized], *, window: int | None) -> Iterator[Cut]:
    """Each item at its own size, on one device."""
    for i, item in enumerate(items):
        yield Cut(items, Budget(_row(item, window), 1), list(_in_a_row([i], items, 0, window)))


def padded(calls: Sequence[Sequence[Sized]], *, devices: int, window: int | None) -> Iterator[Cut]:
    """A row for every item of a call, as long as its largest, and as many on each device."""
    for items in calls:
        rows = -(-len(items) // devices) * devices
        longest = max(_row(item, window) for item in items)
        places = [place for i in range(len(items)) for place in _in_a_row([i], items, i, window)]
        yield Cut(items, Budget(longest, rows), places)


def by_engines_rule(calls: Sequence[Sequence[Sized]], *, devices: int, window: int | None) -> Iterator[Cut]:
    """Whole items, the largest first, each to the device with the fewest tokens; rows as long as the fullest."""
    for items in calls:
        order, counts, loads = greedy([_row(item, window) for item in items], devices)
        places: list[Placed] = []
        for row, count in enumerate(counts):
            taken, order = order[:count], order[count:]
            places += _in_a_row(taken, items, row, window)
        yield Cut(items, Budget(max(loads), devices), places)


def _row(item: Sized, window: int | None) -> int:
    """Tokens that an item takes in a row: whole windows."""
    return sum(window or size for size in item.pieces)


def _in_a_row(chosen: Sequence[int], items: Sequence[Sized], row: int, window: int | None) -> Iterator[Placed]:
    offset = 0
    for i in chosen:
        for piece, size in enumerate(items[i].pieces):
            yield Placed(i, piece, row, offset, size)
            offset += window or size
