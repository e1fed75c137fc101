"""What a batch is: a few fixed shapes, what lies where in them, and the way back to items.

An item consists of pieces that cannot be computed apart (a clip that attends as a whole, an attention window). A piece
goes whole into one row of a batch, or is spread over all its rows, a share of its tokens in each; how many rows there
are and how long both parts of them are is the batch's `Budget`, and there are few.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped


@dataclass(frozen=True, order=True)
class Budget:
    """The shape of a batch.

    Attributes:
        length: tokens a row, of bins that are whole.
        rows: rows; a multiple of the devices that share the batch.
        spread: further tokens a row, of bins that are spread over all rows.
    """

    length: int
    rows: int
    spread: int = 0

    @property
    def tokens(self) -> int:
        """Room for so many tokens."""
        return self.rows * (self.length + self.spread)

    @property
    def row(self) -> int:
        """Tokens of a row, both parts."""
        return self.length + self.spread

    def folds(self, window: int | None) -> tuple[int, int]:
        """Number and length of the stretches of a row's spread part that attend by themselves.

        Without windows it is one. With them a window's tokens take one stretch of every row, of equal length.
        """
        if not self.spread:
            return 0, 0
        length = self.spread if window is None else spread_unit(window, rows=self.rows, unit=1)
        return self.spread // length, length

    @property
    def limit(self) -> int:
        """Tokens of the longest piece that it takes."""
        return max(self.length, self.rows * self.spread)

    def holds(self, layout: str) -> bool:
        """Whether a call with `layout` can use it: "rows" spreads nothing, "length" all."""
        return layout == "auto" or self.rows == 1 or (self.spread if layout == "rows" else self.length) == 0


@dataclass(frozen=True)
class Placed:
    """Where a piece goes, or a part of it.

    Attributes:
        item: index of the item in the call.
        piece: index of the piece in the item.
        row: row of the batch.
        offset: first token in the row.
        size: tokens it takes.
        start: which of the piece's tokens is the first of them.
    """

    item: int
    piece: int
    row: int
    offset: int
    size: int
    start: int = 0


def segments(placed: Sequence[Placed]) -> Iterator[tuple[int, Placed]]:
    """Every place with the number of its piece, from 1: its parts have the same."""
    numbers: dict[tuple[int, int], int] = {}
    for place in placed:
        yield numbers.setdefault((place.item, place.piece), len(numbers) + 1), place


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Whose vector each place of a row holds.

    Attributes:
        item: index of the item in the call, -1 for padding.
        index: which of the item's vectors it is.
    """

    item: Int[np.ndarray, "b n"]
    index: Int[np.ndarray, "b n"]

    @classmethod
    def empty(cls, rows: int, length: int) -> "Slots":
        """All padding, to be written into."""
        return cls(np.full((rows, length), -1, np.int32), np.zeros((rows, length), np.int32))

    def fill(self, row: int, start: int, item: int, indices: Int[np.ndarray, " n"]) -> None:
        """Says that the places from `start` on hold these vectors of `item`."""
        self.item[row, start : start + len(indices)] = item
        self.index[row, start : start + len(indices)] = indices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What `Encoder.apply` takes: arrays of one budget's shapes.

    Attributes:
        inputs: what the module reads, by name.
        tokens: whose token each place of a captured layer holds, in the item's own order.
        rows: whose output row each place of the result holds.
    """

    inputs: Mapping[str, Shaped[Array | np.ndarray, "..."]]
    tokens: Slots
    rows: Slots


def unpack(
    out: Shaped[np.ndarray, "b m d"], slots: Slots, results: dict[int, np.ndarray], sizes: Sequence[int]
) -> None:
    """Copies the vectors of a batch into the arrays of their items.

    Args:
        out: what came out, on the host.
        slots: whose each vector is.
        results: item -> array [sizes[item], d]; made where it is not there yet, since the pieces of a long item may
            come in several batches.
        sizes: vectors of each item.
    """
    for item in np.unique(slots.item[slots.item >= 0]):
        held = slots.item == item
        target = results.setdefault(int(item), np.empty((sizes[item], out.shape[-1]), out.dtype))
        target[slots.index[held]] = out[held]


def spread_unit(window: int | None, *, rows: int, unit: int) -> int:
    """Tokens that the spread part of a row is a multiple of: a row's share of a window, or `unit` without windows."""
    return unit if window is None else -(-window // rows)


def stretches(tokens: int, size: int) -> tuple[int, ...]:
    """The pieces of an item that attends in stretches of `size` tokens; the last may be shorter."""
    full, rest = divmod(tokens, size)
    return (size,) * full + ((rest,) if rest else ())


def divides(sizes: Mapping[str, int], parts: Mapping[str, int]) -> bool:
    """Whether every axis divides over the devices that share it."""
    return all(size % parts.get(axis, 1) == 0 for axis, size in sizes.items())
