"""STAND-IN for `packing.Packer`, until that is there: the same interface on top of `packing.pack`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxenc.packing import Budget, Placed, pack


class Packer:
    """Items come one by one, batches are taken out."""

    def __init__(self, ladder: Mapping[Budget, float], *, window: int | None, layout: str = "auto"):
        """As `packing.pack`."""
        self._how: dict[str, Any] = {"ladder": ladder, "window": window, "layout": layout}
        self._pieces: dict[tuple[int, int], tuple[int, int, str]] = {}
        self.waiting = 0  # tokens
        list(self._pack([]))  # refuses an unknown layout
        self.enough = max(budget.tokens for budget in ladder if budget.holds(layout))

    def _pack(self, pieces: Sequence[tuple[int, int, str]]) -> Iterator[tuple[Budget, list[Placed]]]:
        sizes, units, names = zip(*pieces, strict=True) if pieces else ((), (), ())
        return pack([[size] for size in sizes], units=units, names=names, **self._how)

    def add(self, item: int, pieces: Sequence[int], *, unit: int, name: str) -> None:
        """Raises InputError where a piece is too long for any budget."""
        next(self._pack([(max(pieces), unit, name)]))
        self._pieces.update({(item, i): (size, unit, name) for i, size in enumerate(pieces)})
        self.waiting += sum(pieces)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def batch(self) -> tuple[Budget, list[Placed]]:
        """A batch with the oldest piece in it."""
        keys = list(self._pieces)
        for budget, placed in self._pack(list(self._pieces.values())):
            if any(place.item == 0 for place in placed):
                self.waiting -= sum(place.size for place in placed)
                taken = {keys[place.item] for place in placed}
                self._pieces = {key: piece for key, piece in self._pieces.items() if key not in taken}
                return budget, [replace(p, item=keys[p.item][0], piece=keys[p.item][1]) for p in placed]
        raise AssertionError
