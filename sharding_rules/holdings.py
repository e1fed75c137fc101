"""What each device holds: of every axis that a plan decides on, the part that its place in the mesh gives it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from sharding_rules.mesh import AnyMesh
from sharding_rules.rules import BATCH, Axes

if TYPE_CHECKING:
    from sharding_rules.plan import Plan


@dataclass(frozen=True)
class Share:
    """What one device holds of one axis: one of `parts` equal ones.

    Args:
      group: As in the decision.
      axis: Logical name.
      part: Which part, from 0.
      parts: Into how many the axis is divided; 1 where each device has all of it.
      size: Size of the axis without the zeros appended; None for tokens, whose number the plan does not fix.
      start: First index that the device holds; None for tokens.
      stop: One past the last, zeros included; None for tokens.
    """

    group: str
    axis: str
    part: int
    parts: int
    size: int | None = None
    start: int | None = None
    stop: int | None = None

    @property
    def label(self) -> str:
        """What it is part of, in a word or two: `heads`, `mlp`, `projector`, `stem tokens`."""
        if self.size is None:
            return f"{self.group} tokens"
        return self.group if self.axis.startswith(f"{self.group}_") else self.axis

    @property
    def zeros(self) -> int:
        """How many of the indices held are zeros appended."""
        if self.size is None or self.start is None or self.stop is None:
            return 0
        return self.stop - max(self.start, min(self.stop, self.size))

    @property
    def held(self) -> str:
        """What is held of it: `15-19`, `18-19 + 1 zero`, `part 2 of 4`, `all`."""
        if self.parts == 1:
            return "all"
        if self.start is None or self.stop is None:
            return f"part {self.part + 1} of {self.parts}"
        last = self.stop - self.zeros - 1
        numbers = [f"{self.start}-{last}" if last > self.start else f"{last}"] if last >= self.start else []
        zeros = [f"{self.zeros} zero{'s' * (self.zeros > 1)}"] if self.zeros else []
        return " + ".join([*numbers, *zeros])

    def __str__(self) -> str:
        """`heads: 15-19 of 20`."""
        return f"{self.label}: {self.held}{f' of {self.size}' if self.size is not None and self.parts > 1 else ''}"


@dataclass(frozen=True)
class BatchShare:
    """What one device holds of the workload's items (or windows).

    Args:
      part: Which part of the batch, from 0.
      parts: Into how many the batch is divided.
      whole: The items that it has whole.
      spread: The items whose tokens are spread over all parts: it has its share of each.
      items: How many items there are.
    """

    part: int
    parts: int
    whole: tuple[int, ...]
    spread: tuple[int, ...]
    items: int

    @property
    def rows(self) -> str:
        """The items that are whole: `16 of 32 items`."""
        count = "all" if len(self.whole) == self.items else f"{len(self.whole)} of" if self.whole else "none of"
        return f"{count} {self.items} item{'s' * (self.items != 1)}"

    @property
    def tokens(self) -> str:
        """The share of spread items: `1/8 of 1 item`."""
        return f"1/{self.parts} of {len(self.spread)} item{'s' * (len(self.spread) != 1)}"

    def __str__(self) -> str:
        """`rows: 16 of 32 items`, `tokens: 1/8 of 1 item`, or both."""
        rows = [f"rows: {self.rows}"] if self.whole or not self.spread else []
        return "; ".join([*rows, *([f"tokens: {self.tokens}"] if self.spread else [])])


@dataclass(frozen=True)
class Holding:
    """What one device holds. `str` of it is a line.

    Args:
      index: Its place in the plan's mesh, counted row by row.
      device: JAX's number of the device; on an abstract mesh the index.
      coordinates: The same place, axis by axis.
      shares: What it holds of each axis of the weights and of each group's tokens, in the decisions' order.
      batch: What it holds of the items.
    """

    index: int
    device: int
    coordinates: Mapping[str, int]
    shares: tuple[Share, ...]
    batch: BatchShare

    @property
    def name(self) -> str:
        """`device 3 (data=0, model_batch=0, model=3)`."""
        return f"device {self.device} ({', '.join(f'{axis}={at}' for axis, at in self.coordinates.items())})"

    def __str__(self) -> str:
        """`device 3 (data=0, model_batch=0, model=3): heads: 15-19 of 20; ...`."""
        return f"{self.name}: {'; '.join(map(str, (*self.shares, self.batch)))}"


def holdings_of(plan: "Plan") -> tuple[Holding, ...]:
    """What each device of a plan's mesh holds, in the mesh's order."""
    mesh = plan.mesh
    devices = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else range(mesh.size)
    return tuple(
        Holding(index, device, coordinates, tuple(_shares(plan, coordinates)), _batch_share(plan, coordinates))
        for index, (device, coordinates) in enumerate(zip(devices, _places(mesh), strict=True))
    )


def holdings_json(plan: "Plan") -> list[dict[str, Any]]:
    """The same by axis, so that a large mesh stays small: the parts there are, and which of them each device has."""
    held = holdings_of(plan)
    columns = []
    for shares in zip(*(holding.shares for holding in held), strict=True):
        first, parts = shares[0], sorted({share.part: share for share in shares}.items())
        ranges = None if first.size is None else [[share.start, share.stop] for _, share in parts]
        name = {"group": first.group, "axis": first.axis, "size": first.size, "parts": first.parts}
        columns.append({**name, "ranges": ranges, "part_of_device": [share.part for share in shares]})
    batching, batch = plan.batching, [holding.batch for holding in held]
    items = {"rows": [list(row) for row in batching.rows], "spread": list(batching.spread)}
    name = {"group": BATCH, "axis": BATCH, "size": batch[0].items, "parts": batch[0].parts}
    return [*columns, {**name, **items, "part_of_device": [share.part for share in batch]}]


def _places(mesh: AnyMesh) -> Iterator[dict[str, int]]:
    for place in np.ndindex(*mesh.shape.values()):
        yield dict(zip(mesh.axis_names, place, strict=True))


def _part(mesh: AnyMesh, axes: Axes, coordinates: Mapping[str, int]) -> int:
    """Which part of a dimension lies at a place: of several mesh axes the first counts most, as in a PartitionSpec."""
    part = 0
    for axis in axes:
        part = part * mesh.shape[axis] + coordinates[axis]
    return part


def _shares(plan: "Plan", coordinates: Mapping[str, int]) -> Iterator[Share]:
    for decision in plan.decisions:
        if decision.group == BATCH:
            continue
        part = _part(plan.mesh, decision.mesh_axes, coordinates)
        if decision.padded_size is None:
            yield Share(decision.group, decision.axis, part, decision.parts)
        else:
            length = decision.padded_size // decision.parts
            held = part * length, (part + 1) * length
            yield Share(decision.group, decision.axis, part, decision.parts, decision.size, *held)


def _batch_share(plan: "Plan", coordinates: Mapping[str, int]) -> BatchShare:
    batching, part = plan.batching, _part(plan.mesh, plan.axes[BATCH], coordinates)
    items = sum(map(len, batching.rows)) + len(batching.spread)
    return BatchShare(part, plan.rows_parts, batching.rows[part], batching.spread, items)
