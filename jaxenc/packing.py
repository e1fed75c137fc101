"""Items of any size -> a few fixed shapes, balanced over devices.

An item consists of pieces that cannot be computed apart (a clip that attends as a whole, an attention window). Pieces
go into bins. A bin goes whole into one row of a batch, or is spread over all its rows, a share of its tokens in each;
how many rows there are and how long both parts of them are is the batch's `Budget`, and there are few.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxenc.errors import InputError
from sharding_rules.batching import LAYOUTS


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


def divides(sizes: Mapping[str, int], parts: Mapping[str, int]) -> bool:
    """Whether every axis divides over the devices that share it."""
    return all(size % parts.get(axis, 1) == 0 for axis, size in sizes.items())


def budgets(
    lengths: Sequence[int],
    token_axes: Callable[[Budget], Mapping[str, int]],
    *,
    rows: int,
    parts: Mapping[str, int],
    window: int | None,
    unit: int,
) -> tuple[Budget, ...]:
    """The ladder of budgets of one encoder on one mesh: at most eight.

    Args:
        lengths: tokens that bins together take, ascending.
        token_axes: size of every token axis in a row of a budget.
        rows: devices that share the batch.
        parts: devices that share each token axis.
        window: tokens of an attention window, if there are windows.
        unit: tokens that a row's length is a multiple of.

    Returns:
        On one row, one budget a length. On several, some for whole bins, some for spread ones, and one for both.
        Lengths are raised until every token axis divides.
    """

    def raised(made: Callable[[int], Budget], size: int) -> Budget:
        """The first budget of `size` multiples or more at which every token axis divides."""
        most = math.prod(parts.values())
        step = next(k for k in range(1, most + 1) if divides(token_axes(made(k)), parts))
        return made(-(-size // step) * step)

    def whole(length: int) -> Budget:
        return raised(lambda k: Budget(k * lengths[0], rows), -(-length // lengths[0]))

    def spread(total: int) -> Budget:
        share = spread_unit(window, rows=rows, unit=unit)
        return raised(lambda k: Budget(0, rows, k * share), -(-total // (window or rows * unit)))

    if rows == 1:
        return tuple(sorted({whole(length) for length in lengths}))
    small, middle, large = (lengths[min(i, len(lengths) - 1)] for i in (0, 2, 4))
    ladder = {whole(length) for length in (small, middle, large)}
    ladder |= {spread(total) for total in (small, middle, large, lengths[-1])}
    ladder.add(Budget(whole(middle).length, rows, spread(lengths[-1]).spread))
    return tuple(sorted(ladder))


def pack(
    pieces: Sequence[Sequence[int]],
    ladder: Mapping[Budget, float],
    *,
    window: int | None,
    units: Sequence[int],
    names: Sequence[str],
    layout: str = "auto",
) -> Iterator[tuple[Budget, list[Placed]]]:
    """Cuts a call into batches and says where each piece goes.

    Longest first onto the emptiest row; what is too long for any row, or finds no room, is spread. The budget is the
    fastest that holds all that is left; where none does, the one that does most of it a second.

    Args:
        pieces: item -> sizes of its pieces, in tokens.
        ladder: budgets, and the seconds that each is predicted to take.
        window: where attention is windowed, its tokens; small pieces then share a window.
        units: tokens of each item that stay together where it is spread.
        names: of the items, for errors.
        layout: "rows" spreads nothing, "length" everything.

    Yields:
        Budgets with the pieces placed in them; every token once.

    Raises:
        InputError: a piece is longer than any budget takes.
        ValueError: the layout is unknown, or no budget has it.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it can be {', '.join(map(repr, LAYOUTS))}")
    allowed = {budget: seconds for budget, seconds in ladder.items() if budget.holds(layout)}
    if not allowed:
        raise ValueError(f"layout={layout!r}: none of the budgets is for it: {', '.join(map(str, ladder))}")
    limit = max(max(budget.length, budget.rows * budget.spread) for budget in allowed)
    for name, sizes in zip(names, pieces, strict=True):
        if sizes and max(sizes) > limit:
            raise InputError(
                f"{name}: {max(sizes)} tokens attend together, and the longest row holds {limit}; "
                "give a longer one with budgets="
            )
    flat = [(size, item, piece) for item, sizes in enumerate(pieces) for piece, size in enumerate(sizes)]
    bins = _bins(sorted(flat, key=lambda entry: (-entry[0], entry[1:])), window, units)
    while bins:
        best: tuple[tuple[bool, float], Budget, list[Placed], list[_Bin]] | None = None
        for budget, seconds in allowed.items():
            placed, left = _place(bins, budget, window)
            done = sum(place.size for place in placed)
            score = (False, done / seconds) if left else (True, 1 / seconds)
            if done and (best is None or score > best[0]):
                best = score, budget, placed, left
        assert best is not None  # the longest bin fits somewhere
        yield best[1], best[2]
        bins = best[3]


_Piece = tuple[int, int, int]  # size, item, piece


@dataclass(frozen=True)
class _Bin:
    """Pieces that share a window, or one piece."""

    size: int  # tokens that it takes in a row
    unit: int
    pieces: list[_Piece]

    @property
    def tokens(self) -> int:
        return sum(size for size, _, _ in self.pieces)

    def cut(self, start: int, stop: int, *, row: int, offset: int) -> Iterator[Placed]:
        """Where a range of its tokens goes."""
        before = 0
        for size, item, piece in self.pieces:
            first, last = max(start, before), min(stop, before + size)
            if first < last:
                yield Placed(item, piece, row, offset + first - start, last - first, first - before)
            before += size


def _bins(pieces: Sequence[_Piece], window: int | None, units: Sequence[int]) -> list[_Bin]:
    """Pieces that share a window become one bin of its size (first fit); without windows a piece is a bin."""
    if window is None:
        return [_Bin(piece[0], units[piece[1]], [piece]) for piece in pieces]
    bins: list[_Bin] = []
    room: list[int] = []
    for piece in pieces:
        where = next((i for i, free in enumerate(room) if free >= piece[0]), None) if piece[0] < window else None
        if where is None:
            bins.append(_Bin(window, 1, [piece]))
            room.append(window - piece[0])
        else:
            bins[where].pieces.append(piece)
            room[where] -= piece[0]
    return bins


def _place(bins: Sequence[_Bin], budget: Budget, window: int | None) -> tuple[list[Placed], list[_Bin]]:
    """Bins (longest first) onto the emptiest row they fit in, or else over all rows; and those that fit nowhere."""
    used, spread = [0] * budget.rows, _Spread(budget, window)
    placed: list[Placed] = []
    left: list[_Bin] = []
    room, smallest = budget.tokens, min(one.tokens for one in bins)
    for i, one in enumerate(bins):
        if room < smallest:
            return placed, [*left, *bins[i:]]
        row = min(range(budget.rows), key=used.__getitem__)
        if used[row] + one.size <= budget.length:
            placed += one.cut(0, one.tokens, row=row, offset=used[row])
            used[row] += one.size
        elif spread.fits(one):
            placed += spread.add(one)
        else:
            left.append(one)
            continue
        room -= one.tokens
    return placed, left


class _Spread:
    """The part of every row that holds a share of each bin that is spread."""

    def __init__(self, budget: Budget, window: int | None):
        self.budget, self.windowed = budget, window is not None
        self.folds, self.length = budget.folds(window)
        self.bins = 0
        self.used = np.zeros(budget.rows, int)

    def _shares(self, one: _Bin) -> np.ndarray:
        """Tokens of each row; the units left over go to the rows that have the fewest tokens so far."""
        share, rest = divmod(-(-one.tokens // one.unit), self.budget.rows)
        shares = np.full(self.budget.rows, share)
        shares[np.argsort(self.used, kind="stable")[:rest]] += 1
        return shares * one.unit

    def fits(self, one: _Bin) -> bool:
        if self.windowed:  # a fold takes one bin
            return self.bins < self.folds
        return bool((self.used + self._shares(one)).max() <= self.budget.spread)

    def add(self, one: _Bin) -> Iterator[Placed]:
        shares = self._shares(one)
        stops = np.cumsum(shares)
        starts = self.bins * self.length if self.windowed else self.used
        offsets = self.budget.length + np.broadcast_to(starts, self.budget.rows)
        for row, (share, stop, offset) in enumerate(zip(shares, stops, offsets.copy(), strict=True)):
            yield from one.cut(int(stop - share), int(stop), row=row, offset=int(offset))
        self.used += shares
        self.bins += 1
