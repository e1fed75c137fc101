"""Runs of items -> batches -> rows, in the order of the sources; no more is held than the next batches need.

When a batch is cut depends on the items alone, never on how fast they were read or computed: every process of a mesh
cuts the same ones.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from jaxenc import packing
from jaxenc.errors import InputError
from jaxenc.items import Item
from jaxenc.models.base import EncoderConfig
from jaxenc.packer import Packer
from jaxenc.packing import Budget, Placed, Slots
from jaxenc.reading import OnError, Run, log_skipped

Launch = Callable[[Sequence[Item], Sequence[Placed], Budget], tuple[jax.Array, Slots]]
IN_FLIGHT = 1  # batches that devices compute while the next is laid out


@dataclass
class _Part:
    """An item on its way.

    Attributes:
        size: output rows.
        unplaced: tokens that are in no batch yet.
        unfinished: tokens whose rows are not there yet.
        item: given up as soon as all of it is in batches.
        rows: of the item, filled batch by batch.
    """

    size: int
    unplaced: int
    unfinished: int
    item: Item | None
    rows: Shaped[np.ndarray, "rows d"] | None = None


@dataclass
class _Source:
    """A file or array whose result is not given out yet."""

    parts: list[_Part] = field(default_factory=list)
    read: bool = False  # to its end
    skipped: bool = False

    @property
    def finished(self) -> bool:
        return self.read and not any(part.unfinished for part in self.parts)


@dataclass(frozen=True)
class _Running:
    """A batch on the devices."""

    out: jax.Array
    slots: Slots
    parts: Sequence[_Part]
    tokens: Counter[int]  # of each part


class Stream:
    """One call of `Encoder.encode`."""

    def __init__(
        self,
        config: EncoderConfig,
        packer: Packer,
        *,
        launch: Launch,
        fetch: Callable[[jax.Array], np.ndarray],
        place: Callable[[np.ndarray], Any],
        on_error: OnError,
    ):
        """Nothing is read or computed yet.

        Args:
            config: of the encoder.
            packer: empty.
            launch: items and their places in a batch -> what will come out, and whose row each is.
            fetch: waits for what comes out.
            place: puts a finished result where it shall live.
            on_error: "raise" ends the stream at a bad source, after the results before it.
        """
        self._config, self._packer, self._on_error = config, packer, on_error
        self._launch, self._fetch, self._place = launch, fetch, place
        self._sources: deque[_Source] = deque()
        self._waiting: dict[int, _Part] = {}  # by the packer's number
        self._running: deque[_Running] = deque()
        self._count = 0

    def results(self, runs: Generator[Run[Item], None, None]) -> Generator[Any, None, None]:
        """The result of each source; None for a bad one that is skipped."""
        stop: Exception | None = None
        with closing(runs):
            for run in runs:
                stop = run.stop or self._take(run)
                if stop:
                    break
                yield from self._finished()
        while self._packer:
            self._cut()
            yield from self._finished()
        while self._running:
            self._collect()
        yield from self._finished()
        if stop:
            raise stop

    def _take(self, run: Run[Item]) -> InputError | None:
        """Takes the items of a run, and cuts batches; returns what the stream ends with, if it does."""
        if not self._sources or self._sources[-1].read:
            self._sources.append(_Source())
        source = self._sources[-1]
        source.read = run.rest is None
        if source.skipped:
            return None
        error = run.error
        try:
            for item in run.items:
                source.parts.append(self._add(item))
                while self._packer.waiting >= self._packer.enough:
                    self._cut()
        except InputError as too_long:
            error = too_long
        if error is None:
            return None
        if self._on_error == "raise":
            self._sources.pop()
            return error
        log_skipped(error)
        source.skipped = True
        source.parts.clear()
        return None

    def _add(self, item: Item) -> _Part:
        pieces = self._config.pieces(item)
        self._packer.add(self._count, pieces, unit=self._config.item_unit(item), name=item.name)
        part = _Part(self._config.output_rows(item), sum(pieces), sum(pieces), item)
        self._waiting[self._count] = part
        self._count += 1
        return part

    def _cut(self) -> None:
        """Starts the next batch, and waits for one of those before."""
        budget, placed = self._packer.batch()
        numbers = list(dict.fromkeys(place.item for place in placed))
        index = {number: i for i, number in enumerate(numbers)}
        placed = [replace(place, item=index[place.item]) for place in placed]
        parts = [self._waiting[number] for number in numbers]
        out, slots = self._launch([part.item for part in parts if part.item is not None], placed, budget)
        tokens: Counter[int] = Counter()
        for place in placed:
            tokens[place.item] += place.size
        for i, (number, part) in enumerate(zip(numbers, parts, strict=True)):
            part.unplaced -= tokens[i]
            if not part.unplaced:
                part.item = None
                del self._waiting[number]
        self._running.append(_Running(out, slots, parts, tokens))
        if len(self._running) > IN_FLIGHT:
            self._collect()

    def _collect(self) -> None:
        """Waits for the oldest batch, and hands its rows to their items."""
        done = self._running.popleft()
        rows = {i: part.rows for i, part in enumerate(done.parts) if part.rows is not None}
        packing.unpack(self._fetch(done.out), done.slots, rows, [part.size for part in done.parts])
        for i, part in enumerate(done.parts):
            part.rows = rows.get(i)
            part.unfinished -= done.tokens[i]

    def _finished(self) -> Iterator[Any]:
        """Gives out what is finished, up to the first source that is not."""
        while self._sources and self._sources[0].finished:
            source = self._sources.popleft()
            yield None if source.skipped else self._place(_joined([part.rows for part in source.parts]))


def _joined(parts: Sequence[Any]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
