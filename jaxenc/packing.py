"""Items of any size -> a few fixed shapes, balanced over devices.

An item consists of pieces that cannot be divided (a clip that attends as a whole, an attention window). Pieces go into
bins, bins into the rows of a batch; how many rows and how long they are is the batch's `Budget`, and there are few.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxenc.errors import InputError


@dataclass(frozen=True, order=True)
class Budget:
    """The shape of a batch.

    Attributes:
        length: tokens a row.
        rows: rows; a multiple of the devices that share the batch.
    """

    length: int
    rows: int

    @property
    def tokens(self) -> int:
        """Room for so many tokens."""
        return self.rows * self.length


@dataclass(frozen=True)
class Placed:
    """Where a piece goes.

    Attributes:
        item: index of the item in the call.
        piece: index of the piece in the item.
        row: row of the batch.
        offset: first token in the row.
        size: tokens it takes.
    """

    item: int
    piece: int
    row: int
    offset: int
    size: int


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


def divides(sizes: Mapping[str, int], parts: Mapping[str, int]) -> bool:
    """Whether every axis divides over the devices that share it."""
    return all(size % parts.get(axis, 1) == 0 for axis, size in sizes.items())


def budgets(
    lengths: Sequence[int], length_axes: Callable[[int], Mapping[str, int]], *, rows: int, parts: Mapping[str, int]
) -> tuple[Budget, ...]:
    """The ladder of budgets of one encoder on one mesh.

    Args:
        lengths: row lengths wanted, ascending.
        length_axes: size of every token axis in a row of that length.
        rows: devices that share the batch.
        parts: devices that share each token axis.

    Returns:
        One budget a length, each length raised to the next multiple of the shortest at which every token axis divides.
    """
    candidates = (lengths[0] * k for k in range(1, math.prod(parts.values()) + 1))
    unit = next(length for length in candidates if divides(length_axes(length), parts))
    return tuple(sorted({Budget(-(-length // unit) * unit, rows) for length in lengths}))


def pack(
    pieces: Sequence[Sequence[int]],
    ladder: Sequence[Budget],
    *,
    window: int | None,
    names: Sequence[str],
    longest_mixed: int = 4096,
) -> Iterator[tuple[Budget, list[Placed]]]:
    """Cuts a call into batches and says where each piece goes.

    Longest first onto the emptiest row. The budget is the smallest that holds all that is left, but no row is longer
    than `longest_mixed` only to hold more items: attention is quadratic in it.

    Args:
        pieces: item -> sizes of its pieces, in tokens.
        ladder: budgets, ascending.
        window: where attention is windowed, its tokens; small pieces then share a window.
        names: of the items, for errors.
        longest_mixed: tokens.

    Yields:
        Budgets with the pieces placed in them; every piece once.

    Raises:
        InputError: a piece is longer than the longest row.
    """
    limit = ladder[-1].length
    for name, sizes in zip(names, pieces, strict=True):
        if sizes and max(sizes) > limit:
            raise InputError(
                f"{name}: {max(sizes)} tokens attend together, and the longest row holds {limit}; "
                "give a longer one with budgets="
            )
    flat = [(size, item, piece) for item, sizes in enumerate(pieces) for piece, size in enumerate(sizes)]
    bins = _bins(sorted(flat, key=lambda entry: (-entry[0], entry[1:])), window)
    while bins:
        longest = bins[0][0]
        allowed = [b for b in ladder if b.length >= longest]
        mixed = [b for b in allowed if b.length <= max(longest_mixed, allowed[0].length)] if window is None else allowed
        for budget in mixed:
            placed, left = _place(bins, budget)
            if not left:
                break
        yield budget, placed
        bins = left


_Piece = tuple[int, int, int]  # size, item, piece
_Bin = tuple[int, list[tuple[int, _Piece]]]  # size, [(offset, piece)]


def _bins(pieces: Sequence[_Piece], window: int | None) -> list[_Bin]:
    """Pieces that share a window become one bin of its size (first fit); without windows a piece is a bin."""
    if window is None:
        return [(piece[0], [(0, piece)]) for piece in pieces]
    bins: list[_Bin] = []
    room: list[int] = []
    for piece in pieces:
        where = next((i for i, free in enumerate(room) if free >= piece[0]), None) if piece[0] < window else None
        if where is None:
            bins.append((window, [(0, piece)]))
            room.append(window - piece[0])
        else:
            bins[where][1].append((window - room[where], piece))
            room[where] -= piece[0]
    return bins


def _place(bins: Sequence[_Bin], budget: Budget) -> tuple[list[Placed], list[_Bin]]:
    """Bins (longest first) onto the emptiest row they fit in, and those that fit in none."""
    used = [0] * budget.rows
    placed, left = [], []
    for size, contents in bins:
        row = min(range(budget.rows), key=used.__getitem__)
        if used[row] + size > budget.length:
            left.append((size, contents))
            continue
        placed += [Placed(item, i, row, used[row] + offset, n) for offset, (n, item, i) in contents]
        used[row] += size
    return placed, left
