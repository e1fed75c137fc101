"""Items of any size -> batches of a few fixed shapes, balanced over devices.

Costliest first, each onto the device that has least to do so far: what an item costs is counted with its quadratic
attention. Where that leaves one device with more than its share, or an item is too long for a row, the costliest are
spread over all rows.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxenc.errors import InputError
from jaxenc.ladder import Ladder, Prices
from jaxenc.packing import Budget, Placed, spread_unit
from sharding_rules.batching import LAYOUTS

FAIR = 1.05  # times an equal share of the work: as much as a device may have where that can be had
HASTE = 1.5  # times the time of the fastest way: as long as a fair one may take in a call of several batches
VIEW = 2.0  # times the tokens of the largest budget: how much of what waits is looked at
EMPTY = 1.05  # times its tokens: a batch of a larger budget is empty enough to look for another one
WORTH = 1.02  # how many times as fast all has to be done with a budget that is added


def pack(
    pieces: Sequence[Sequence[int]],
    ladder: Ladder,
    *,
    window: int | None,
    units: Sequence[int],
    names: Sequence[str],
    layout: str = "auto",
    together: bool = False,
) -> Iterator[tuple[Budget, list[Placed]]]:
    """Cuts a call into batches and says where each piece goes.

    Args:
        pieces: item -> sizes of its pieces, in tokens.
        ladder: the budgets, and what they cost.
        window: see `Packer`.
        units: tokens of each item that stay together where it is spread.
        names: of the items, for errors.
        layout: see `Packer`.
        together: one batch is wanted, where a budget holds everything.

    Yields:
        Budgets with the pieces placed in them; every token once.

    Raises:
        InputError: a piece is longer than any budget takes.
        ValueError: the layout is unknown, or no budget has it.
    """
    packer = Packer(ladder, window=window, layout=layout)
    for item, (sizes, unit, name) in enumerate(zip(pieces, units, names, strict=True)):
        packer.add(item, sizes, unit=unit, name=name)
    while packer:
        yield packer.batch(together=together)


class Packer:
    """Pieces that wait for a batch, oldest first: of a call all at once, of a stream as they come."""

    def __init__(self, ladder: Ladder, *, window: int | None, layout: str = "auto"):
        """With nothing that waits.

        Args:
            ladder: the budgets, and what they cost.
            window: where attention is windowed, its tokens; small pieces then share a window.
            layout: "rows" spreads nothing, "length" everything, "auto" what makes the batch fair or fast.

        Raises:
            ValueError: the layout is unknown, or no budget has it.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}; it can be {', '.join(map(repr, LAYOUTS))}")
        if not any(budget.holds(layout) for budget in ladder.budgets):
            raise ValueError(f"layout={layout!r}: none of the budgets is for it: {', '.join(map(str, ladder.budgets))}")
        self.waiting = 0
        self._ladder, self._window, self._layout = ladder, window, layout
        self._queue: deque[_Piece] = deque()
        self._done = [0.0] * ladder.prices.parts  # by each device, in all batches

    def __len__(self) -> int:
        """Pieces that wait."""
        return len(self._queue)

    @property
    def enough(self) -> int:
        """Tokens that should wait before a batch is cut from a stream: with so many to choose from, batches are full.

        `waiting` says how many do.
        """
        return int(VIEW * max(budget.tokens for budget in self._budgets))

    def add(self, item: int, pieces: Sequence[int], *, unit: int, name: str) -> None:
        """Lets the pieces of an item wait.

        Args:
            item: its number.
            pieces: tokens of each.
            unit: tokens that stay together where it is spread.
            name: for the error.

        Raises:
            InputError: a piece is longer than any budget takes, and there can be no longer one.
        """
        if pieces:
            self._make_room(max(pieces), unit, name)
        self._queue.extend(_Piece(size, item, piece, unit) for piece, size in enumerate(pieces))
        self.waiting += sum(pieces)

    def batch(self, *, together: bool = False) -> tuple[Budget, list[Placed]]:
        """Takes the best batch out of what waits; the oldest piece is always in it.

        Best is what lets all that waits be done soonest, a batch that gives a device more than 1.05 times its share
        only where none is fairer.

        Args:
            together: a budget that holds everything is taken where there is one.
        """
        seen = self._seen()
        bins = sorted(_bins(seen, self._window, self._ladder.prices), key=lambda one: -one.cost)
        oldest = next(i for i, one in enumerate(bins) if seen[0] in one.pieces)
        tried = list(self._arranged(bins, oldest, self._budgets))
        best, seconds = _best(tried, bins, self._ladder, together=together)
        long = self.waiting > self._ladder.largest.tokens and not together
        if long and best.budget.tokens > EMPTY * best.tokens:
            sizes = [one.size for one in bins]
            made = self._ladder.fitted(sizes, unit=max(one.unit for one in bins), layout=self._layout)
            better, fewer = _best([*tried, *self._arranged(bins, oldest, made)], bins, self._ladder, together=together)
            if better.budget not in self._ladder.budgets and seconds > WORTH * fewer:
                self._ladder.add(better.budget)
                best = better
        placed = list(best.placed(bins, self._window, devices=self._take_turns(best.loads)))
        self._take(seen, bins, best)
        return best.budget, placed

    # --- private

    @property
    def _budgets(self) -> list[Budget]:
        return [budget for budget in self._ladder.budgets if budget.holds(self._layout)]

    def _make_room(self, size: int, unit: int, name: str) -> None:
        if any(_takes(budget, size, unit, self._window) for budget in self._budgets):
            return
        longer = self._ladder.longer(size, unit=unit, layout=self._layout)
        if longer is None:
            limit = max(budget.limit for budget in self._budgets)
            raise InputError(
                f"{name}: {size} tokens attend together, and the longest row holds {limit}; give a longer one with "
                "budgets="
            )
        self._ladder.add(longer)

    def _take_turns(self, loads: Sequence[float]) -> list[int]:
        """For each device's load the device that gets it: the least goes to the one that has done most so far."""
        devices = range(len(loads))
        turns = [0] * len(loads)
        idlest = sorted(devices, key=self._done.__getitem__)
        for part, device in zip(sorted(devices, key=lambda part: -loads[part]), idlest, strict=True):
            turns[part] = device
            self._done[device] += loads[part]
        return turns

    def _seen(self) -> list["_Piece"]:
        """The oldest of what waits."""
        seen, tokens, enough = [], 0, self.enough
        for piece in self._queue:
            seen.append(piece)
            tokens += piece.size
            if tokens >= enough:
                break
        return seen

    def _take(self, seen: Sequence["_Piece"], bins: Sequence["_Bin"], taken: "_Arrangement") -> None:
        """What was not placed waits on, in the order in which it came."""
        gone = {piece for i in taken.where for piece in bins[i].pieces}
        for _ in seen:
            self._queue.popleft()
        self._queue.extendleft(piece for piece in reversed(seen) if piece not in gone)
        self.waiting -= taken.tokens

    def _arranged(self, bins: Sequence["_Bin"], oldest: int, budgets: Iterable[Budget]) -> Iterator["_Arrangement"]:
        """The ways to fill each budget."""
        for budget in budgets:
            for spread in _numbers_spread(bins, budget, self._ladder, self._window):
                made = _arrange(bins, budget, spread, self._ladder, self._window)
                if oldest not in made.where:
                    made = _arrange(bins, budget, spread, self._ladder, self._window, first=oldest)
                if oldest in made.where:
                    yield made


@dataclass(frozen=True)
class _Piece:
    size: int
    item: int
    piece: int
    unit: int


@dataclass(frozen=True)
class _Bin:
    """Pieces that share a window, or one piece.

    Attributes:
        size: tokens that it takes in a row.
        tokens: of its pieces.
        unit: tokens that stay together where it is spread.
        cost: seconds on one device.
        pairs: of them, those of pairs of tokens, which a budget's shape does not fix.
    """

    size: int
    tokens: int
    unit: int
    cost: float
    pairs: float
    pieces: list[_Piece]

    @property
    def spread(self) -> int:
        """Tokens that are spread: where they are no whole number of units, the last unit counts as one."""
        return -(-self.tokens // self.unit) * self.unit

    def cut(self, start: int, stop: int, *, row: int, offset: int) -> Iterator[Placed]:
        """Where a range of its tokens goes."""
        before = 0
        for piece in self.pieces:
            first, last = max(start, before), min(stop, before + piece.size)
            if first < last:
                yield Placed(piece.item, piece.piece, row, offset + first - start, last - first, first - before)
            before += piece.size


def _bins(pieces: Sequence[_Piece], window: int | None, prices: Prices) -> list[_Bin]:
    """Pieces that share a window become one bin of its size (longest first, first fit); otherwise a piece is a bin."""
    if window is None:
        return [_bin(one.size, one.unit, [one], prices) for one in pieces]
    shared: list[list[_Piece]] = []
    room: list[int] = []
    for one in sorted((one for one in pieces if one.size < window), key=lambda one: -one.size):
        where = next((i for i, free in enumerate(room) if free >= one.size), None)
        if where is None:
            shared.append([one])
            room.append(window - one.size)
        else:
            shared[where].append(one)
            room[where] -= one.size
    filled = [[one] for one in pieces if one.size == window] + shared
    return [_bin(window, 1, held, prices) for held in filled]


def _bin(size: int, unit: int, pieces: list[_Piece], prices: Prices) -> _Bin:
    tokens = sum(one.size for one in pieces)
    return _Bin(size, tokens, unit, prices.item(size), prices.pairs(size), pieces)


@dataclass(frozen=True)
class _Arrangement:
    """Bins in a budget.

    Attributes:
        budget: which.
        where: bin -> its row, or -1 if it is spread; in the order in which they lie in a row.
        tokens: of all of them.
        cost: of all of them.
        seconds: that the batch is predicted to take.
        ratio: work of the busiest device over the mean.
        loads: of each device, of what is not spread.
    """

    budget: Budget
    where: dict[int, int]
    tokens: int
    cost: float
    seconds: float
    ratio: float
    loads: Sequence[float]

    def placed(self, bins: Sequence[_Bin], window: int | None, *, devices: Sequence[int]) -> Iterator[Placed]:
        """Where each piece goes, or its parts, with the rows of one device on another."""
        used, spread = [0] * self.budget.rows, _Spread(self.budget, window)
        per_device = self.budget.rows // len(devices)
        for i, row in self.where.items():
            if row < 0:
                yield from spread.add(bins[i])
            else:
                row = devices[row // per_device] * per_device + row % per_device
                yield from bins[i].cut(0, bins[i].tokens, row=row, offset=used[row])
                used[row] += bins[i].size


class _Room:
    """How much has been spread, and whether more can be."""

    def __init__(self, budget: Budget, window: int | None):
        self.budget, self.window = budget, window
        self.folds, _ = budget.folds(window)
        self.bins = self.tokens = self.largest = self.divisor = 0
        self.cost = self.pairs = 0.0

    def fullest(self, one: _Bin | None = None) -> int:
        """Tokens of the fullest row, at most, once one more is there.

        Rows differ by no more than the largest unit, since what is left over goes to those that have least.
        """
        size, unit = (one.spread, one.unit) if one else (0, 0)
        rows, largest, divisor = self.budget.rows, max(self.largest, unit), math.gcd(self.divisor, unit)
        return (self.tokens + size + largest * (rows - 1)) // rows // divisor * divisor if divisor else 0

    def fits(self, one: _Bin) -> bool:
        """Whether one more fits."""
        return self.bins < self.folds if self.window is not None else self.fullest(one) <= self.budget.spread

    def add(self, one: _Bin) -> None:
        """One more."""
        self.bins += 1
        self.tokens += one.spread
        self.cost += one.cost
        self.pairs += one.pairs
        self.largest, self.divisor = max(self.largest, one.unit), math.gcd(self.divisor, one.unit)

    @property
    def share(self) -> float:
        """The part of what is spread that the fullest row has, at most."""
        if not self.tokens:
            return 0.0
        if self.window is not None:
            return self.bins * spread_unit(self.window, rows=self.budget.rows, unit=1) / self.tokens
        return self.fullest() / self.tokens


def _takes(budget: Budget, size: int, unit: int, window: int | None) -> bool:
    """Whether a budget can hold a piece."""
    return (window or size) <= budget.length or _Room(budget, window).fits(_Bin(size, size, unit, 0.0, 0.0, []))


def _numbers_spread(bins: Sequence[_Bin], budget: Budget, ladder: Ladder, window: int | None) -> list[int]:
    """How many of the costliest bins are spread in advance: none, all that can be, and some numbers between."""
    if not budget.spread or not budget.length:
        return [0]
    room, most = _Room(budget, window), 0
    for one in bins:
        if not room.fits(one):
            break
        room.add(one)
        most += 1
    numbers = {0, min(most, len(bins) % ladder.prices.parts), most}
    if window is None:  # windows all cost the same
        numbers |= {min(most, 2**step) for step in range(most.bit_length())}
    return sorted(numbers)


def _arrange(
    bins: Sequence[_Bin],
    budget: Budget,
    spread: int,
    ladder: Ladder,
    window: int | None,
    *,
    first: int | None = None,
) -> _Arrangement:
    """Some bins spread, the others each on the device with least to do that has room.

    Args:
        bins: costliest first.
        budget: to fill.
        spread: how many are spread in advance; afterwards what finds no room in a row is.
        ladder: what things cost.
        window: see `Packer`.
        first: the bin that goes before all others.
    """
    prices, smallest = ladder.prices, bins[-1].tokens
    rows, room = _Rows(budget, prices.parts, smallest=smallest), _Room(budget, window)
    where: dict[int, int] = {}
    left = budget.tokens
    order = range(len(bins)) if first is None else [first, *(i for i in range(len(bins)) if i != first)]
    in_advance = spread if first is None else spread + 1
    for turn, i in enumerate(order):
        one = bins[i]
        if left < smallest:
            break
        row = rows.put(one) if i == first or turn >= in_advance else None
        if row is None:
            if not room.fits(one):
                continue
            room.add(one)
            row = -1
        where[i] = row
        left -= one.tokens
    share = room.share * budget.rows / prices.parts
    total = math.fsum(rows.loads) + room.cost
    return _Arrangement(
        budget,
        where,
        tokens=sum(bins[i].tokens for i in where),
        cost=total,
        seconds=ladder.seconds(budget) + max(rows.pairs) + share * room.pairs,
        ratio=(max(rows.loads) + share * room.cost) * prices.parts / total if total else math.inf,
        loads=rows.loads,
    )


class _Rows:
    """The whole parts of a budget's rows, those of each device together."""

    def __init__(self, budget: Budget, parts: int, *, smallest: int):
        self.free = [[budget.length] * (budget.rows // parts) for _ in range(parts)]
        self.loads, self.pairs = [0.0] * parts, [0.0] * parts
        self._idlest = [(0.0, part) for part in range(parts)]  # a heap, without those that have no room for anything
        self._smallest, self._refused = smallest, budget.length + 1

    def put(self, one: _Bin) -> int | None:
        """Puts a bin on the device with least to do that has room, and returns its row there, the emptiest."""
        if one.size >= self._refused:
            return None
        passed: list[tuple[float, int]] = []
        row = None
        while self._idlest and row is None:
            load, part = self._idlest[0]
            free = self.free[part]
            slot = free.index(max(free))
            if free[slot] >= one.size:
                free[slot] -= one.size
                self.loads[part] += one.cost
                self.pairs[part] += one.pairs
                row = part * len(free) + slot
                heapq.heapreplace(self._idlest, (load + one.cost, part))
            elif free[slot] >= self._smallest:
                passed.append(heapq.heappop(self._idlest))
            else:
                heapq.heappop(self._idlest)
        for entry in passed:
            heapq.heappush(self._idlest, entry)
        if row is None:
            self._refused = one.size
        return row


def _best(
    tried: Sequence[_Arrangement], bins: Sequence[_Bin], ladder: Ladder, *, together: bool
) -> tuple[_Arrangement, float]:
    """The best arrangement, and the seconds in which everything is done: with the rest as fast, or in one batch."""
    prices, budgets = ladder.prices, {one.budget for one in tried}
    work = math.fsum(one.cost for one in bins)
    least = min(map(ladder.seconds, budgets))
    room = {budget: budget.length if budget.rows == 1 else budget.rows * budget.spread for budget in budgets}

    def seconds(one: _Arrangement) -> float:
        if len(one.where) == len(bins):
            return one.seconds
        rest = [other for i, other in enumerate(bins) if i not in one.where]
        left, pairs = sum(other.size for other in rest), math.fsum(other.pairs for other in rest) / prices.parts
        at_once = [ladder.seconds(budget) + pairs for budget in budgets if room[budget] >= left]
        return one.seconds + min([max(least, one.seconds * (work / one.cost - 1)), *at_once])

    complete = [one for one in tried if len(one.where) == len(bins)]
    if not complete:
        # what is uneven in one of many batches is little of them all
        soonest = min(map(seconds, tried))
        tried = [one for one in tried if seconds(one) <= HASTE * soonest]
    elif together:
        tried = complete
    limit = max(FAIR, 1.001 * min(one.ratio for one in tried))
    best = min((one for one in tried if one.ratio <= limit), key=lambda one: (seconds(one), -one.cost))
    return best, seconds(best)


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

    def add(self, one: _Bin) -> Iterator[Placed]:
        """Where the tokens of one more go."""
        shares = self._shares(one)
        stops = np.cumsum(shares)
        starts = self.bins * self.length if self.windowed else self.used
        offsets = self.budget.length + np.broadcast_to(starts, self.budget.rows)
        for row, (share, stop, offset) in enumerate(zip(shares, stops, offsets.copy(), strict=True)):
            yield from one.cut(int(stop - share), int(stop), row=row, offset=int(offset))
        self.used += shares
        self.bins += 1
