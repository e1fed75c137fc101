"""Items onto the parts of a batch: whole, or with their tokens spread over all parts."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LAYOUTS = ("auto", "rows", "length")
SMALL = 0.05


@dataclass(frozen=True)
class Batching:
    """Where the items of one call go.

    Args:
      rows: For each part of the batch, the items that it has whole.
      spread: Items whose tokens are spread over all parts.
    """

    rows: tuple[tuple[int, ...], ...]
    spread: tuple[int, ...] = ()

    @cached_property
    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """The items that are whole, and the part of the batch that each is on."""
        items = np.array([item for row in self.rows for item in row], int)
        return items, np.repeat(np.arange(len(self.rows)), [len(row) for row in self.rows])

    @property
    def layout(self) -> str:
        """`rows`, `length`, or `rows and length` where a call has both."""
        if not self.spread:
            return "rows"
        return "rows and length" if any(self.rows) else "length"


def longest_first(sizes: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of `sizes` in `parts` lists: the largest first, each to the part with the least so far."""
    assigned: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, part = loads[0]
        assigned[part].append(index)
        heapq.heapreplace(loads, (load + sizes[index], part))
    return assigned


def deal(units: Sequence[int], parts: int) -> np.ndarray:
    """How many units of each item each part gets when they are spread.

    Every part gets its equal share of an item, rounded down; the remainders go round, an item's beginning where the
    one before it ended, so that all items together are as even as one.

    Args:
      units: Indivisible units of each item.
      parts: Over how many parts.

    Returns:
      Counts [items, parts]; a row sums to that item's units.
    """
    counts = np.asarray(units, int).reshape(-1, 1)
    share, rest = np.divmod(counts, parts)
    first = (np.cumsum(rest) - rest[:, 0]).reshape(-1, 1)
    turn = (np.arange(parts) - first) % parts
    dealt: np.ndarray = share + (turn < rest)
    return dealt


def batchings(sizes: Sequence[float], parts: int, *, layout: str = "auto") -> Iterator[Batching]:
    """The ways to put items on the parts of a batch: some of the largest spread, the others whole, longest first.

    Args:
      sizes: What each item costs.
      parts: Parts of the batch.
      layout: "rows" spreads none, "length" all; "auto" also tries to spread some.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for spread in _numbers_spread(sizes, parts, layout):
        whole = order[spread:]
        rows = longest_first([sizes[index] for index in whole], parts)
        yield Batching(tuple(tuple(whole[i] for i in row) for row in rows), tuple(sorted(order[:spread])))


def _numbers_spread(sizes: Sequence[float], parts: int, layout: str) -> list[int]:
    items = len(sizes)
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} should be one of {', '.join(map(repr, LAYOUTS))}")
    if parts == 1 or layout == "rows":
        return [0]
    if layout == "length":
        return [items]
    # whole items are within the largest one of an equal share: where that is little, spreading gains nothing
    if parts * max(sizes, default=0) <= SMALL * sum(sizes):
        return [0]
    # what is left when the parts have taken turns, and about eight steps between none and all
    return sorted({0, items % parts, items, *range(0, items, max(1, items // 8))})
