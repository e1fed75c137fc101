"""What a layout costs: work, memory and traffic of the busiest device, at exact token counts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from sharding_rules.batching import Batching, batchings, deal
from sharding_rules.profiles import DeviceProfile
from sharding_rules.rules import BATCH, Parameter
from sharding_rules.strategies import Layout
from sharding_rules.workload import Workload

FAIR = 1.10  # times an equal share of the work: as much as a device may do where that can be had
_FLOAT32_BYTES = 4  # sums over devices, scores and accumulated products


@dataclass(frozen=True)
class Collective:
    """What devices say to each other for one group.

    Args:
      group: The group.
      kind: "all-reduce" or "all-gather".
      count: How often, over all layers.
      layers: Layers of the group; above 1 this is once a layer.
      size_bytes: Of the array that each device holds after one of them.
      devices: How many take part.
    """

    group: str
    kind: str
    count: int
    layers: int
    size_bytes: float
    devices: int

    @property
    def moved_bytes(self) -> float:
        """What each device sends, all of them together: the optimum of a ring."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.count * rounds * self.size_bytes * (self.devices - 1) / self.devices


@dataclass(frozen=True)
class Cost:
    """What a layout costs.

    Args:
      flops_per_device: FLOPs of the busiest device.
      flops_ideal: All FLOPs, without padding, over the number of devices.
      flops_ratio: The first over the second; 1 is a fair share.
      flops_bound: The least that `flops_ratio` can be with these parts, since units stay whole: ceil(n / D) * D / n
        for each group of n units over D parts, weighed by its work. Exact where the groups have one unit, and a unit
        one cost; otherwise whole items may by chance do a little better.
      units_per_device: Indivisible units in each device's equal share, of the group that has the fewest.
      padding_ratio: Tokens once every part of the batch is as long as the fullest, over the tokens there are.
      param_bytes_per_device: Bytes of parameters on each device.
      activation_bytes_per_device: Bytes of activations that the busiest device holds at once: an estimate, in float32.
      collectives_per_layer: Collectives in each repeated layer.
      collective_bytes_per_layer: Bytes of the arrays that they leave on each device.
      collective_bytes: What each device sends in the whole call.
      seconds: Predicted time on the profile: the larger of computing and reading the weights, and the collectives.
    """

    flops_per_device: float
    flops_ideal: float
    flops_ratio: float
    flops_bound: float
    units_per_device: float
    padding_ratio: float
    param_bytes_per_device: int
    activation_bytes_per_device: float
    collectives_per_layer: int
    collective_bytes_per_layer: float
    collective_bytes: float
    seconds: float


def choose_batching(
    layout: Layout,
    parameters: Mapping[str, Parameter],
    *,
    workload: Workload,
    profile: DeviceProfile,
    batch_layout: str = "auto",
) -> tuple[Batching, Cost]:
    """The batching of the least predicted time among those that give no device more than its fair share of the work.

    Args:
      layout: A possible layout of the weights.
      parameters: Names and shapes, by path.
      workload: The items.
      profile: Of the devices.
      batch_layout: "auto", "rows" or "length".

    Returns:
      The batching and its cost. Where none is fair, the time counts among those with the least work on a device.
    """
    dtype, param_bytes = dtype_of(parameters), _param_bytes(layout, parameters)
    found = [
        (
            batching,
            cost_of(
                layout, workload=workload, batching=batching, profile=profile, dtype=dtype, param_bytes=param_bytes
            ),
        )
        for batching in batchings(workload.item_flops, layout.parts(BATCH), layout=batch_layout)
    ]
    limit = max(FAIR, 1.001 * min(cost.flops_ratio for _, cost in found))
    return min((pair for pair in found if pair[1].flops_ratio <= limit), key=lambda pair: pair[1].seconds)


def dtype_of(parameters: Mapping[str, Parameter]) -> np.dtype[Any]:
    """What an encoder computes in: the dtype of its first parameter."""
    return np.dtype(next((parameter.dtype for parameter in parameters.values()), "float32"))


def _param_bytes(layout: Layout, parameters: Mapping[str, Parameter]) -> int:
    return sum(
        np.dtype(parameter.dtype).itemsize * math.prod(layout.shape(parameter)) // layout.parameter_parts(parameter)
        for parameter in parameters.values()
    )


def cost_of(
    layout: Layout,
    *,
    workload: Workload,
    batching: Batching,
    profile: DeviceProfile,
    dtype: np.dtype[Any],
    param_bytes: int,
) -> Cost:
    """What a layout costs with the items on its parts in a given way.

    Args:
      layout: A possible layout of the weights.
      workload: The items and the groups.
      batching: Where the items go.
      profile: Of the devices.
      dtype: Of products and activations.
      param_bytes: Of the parameters on each device.
    """
    batch_parts = len(batching.rows)
    flops, live = np.zeros(batch_parts), np.zeros(batch_parts)
    spread = sum(workload.tokens[item] for item in batching.spread)
    bound, units_per_device = 0.0, math.inf
    loads = {unit: _Load(workload.tokens, batching, unit=unit) for unit in {1, *(g.unit for g in workload.groups)}}
    for group in workload.groups:
        load = loads[group.unit]
        token_parts = layout.group_parts(group.name) if layout.divides_tokens(group) else 1
        weights = layout.weight_share(group)
        # tokens are divided by whole units, weights evenly
        share = weights * np.ceil(load.units / token_parts) / np.maximum(load.units, 1)
        flops += share * load.of(group.flops)
        # where an item is spread, a device still has all of its keys, and their scores with its own queries
        across = group.pairs * load.pairs(group.block, token_parts) + group.shared * spread
        held = share * load.of(group.live or (0.0,) * len(workload.tokens)) + weights * across
        live = np.maximum(live, held)
        units, pieces = int(load.units.sum()), batch_parts * token_parts
        if work := math.fsum(group.flops):
            bound += work * weights * math.ceil(units / pieces) / units
            units_per_device = min(units_per_device, units / pieces)
    ideal = math.fsum(workload.item_flops) / layout.mesh.size
    busiest = float(flops.max(initial=0.0))
    exchanged = collectives(layout, workload=workload, batching=batching, dtype=dtype)
    repeated = [one for one in exchanged if one.layers > 1]
    moved = math.fsum(one.moved_bytes for one in exchanged)
    return Cost(
        flops_per_device=busiest,
        flops_ideal=ideal,
        flops_ratio=busiest / ideal if ideal else 1.0,
        flops_bound=bound / ideal if ideal else 1.0,
        units_per_device=units_per_device if ideal else 0.0,
        padding_ratio=loads[1].fullest * batch_parts / sum(workload.tokens) if sum(workload.tokens) else 1.0,
        param_bytes_per_device=param_bytes,
        activation_bytes_per_device=_FLOAT32_BYTES * float(live.max(initial=0.0)),
        collectives_per_layer=len(repeated),
        collective_bytes_per_layer=math.fsum(one.size_bytes for one in repeated),
        collective_bytes=moved,
        seconds=max(profile.compute_seconds(busiest, dtype), profile.read_seconds(param_bytes))
        + profile.collective_seconds(moved, sum(one.count for one in exchanged)),
    )


def collectives(layout: Layout, *, workload: Workload, batching: Batching, dtype: DTypeLike) -> tuple[Collective, ...]:
    """What devices say to each other in one call.

    Args:
      layout: A possible layout of the weights.
      workload: The items and the groups.
      batching: Where the items go.
      dtype: Of activations.
    """
    itemsize, batch_parts = np.dtype(dtype).itemsize, len(batching.rows)
    load = _Load(workload.tokens, batching, unit=1)
    spread = sum(workload.tokens[item] for item in batching.spread)
    found = []
    for group in workload.groups:
        parts = layout.group_parts(group.name)
        by_tokens = layout.divides_tokens(group)
        if by_tokens and parts > 1 and group.returned:
            size = load.fullest * group.returned * itemsize
            found.append(Collective(group.name, "all-gather", group.layers, group.layers, size, parts))
        for elements in group.summed if not by_tokens and parts > 1 else ():
            size = load.fullest * elements * _FLOAT32_BYTES
            found.append(Collective(group.name, "all-reduce", group.layers, group.layers, size, parts))
        if spread and batch_parts > 1 and group.shared:
            size = spread * group.shared * layout.weight_share(group) * itemsize
            found.append(Collective(group.name, "all-gather", group.layers, group.layers, size, batch_parts))
    return tuple(found)


class _Load:
    """Indivisible units on each part of the batch."""

    def __init__(self, tokens: Sequence[int], batching: Batching, *, unit: int):
        self.batching = batching
        self.tokens = np.asarray(tokens, float)
        self.each = np.ceil(self.tokens / unit)
        self.dealt = deal([int(self.each[item]) for item in batching.spread], len(batching.rows))
        whole = self._whole(self.each)
        self.units = whole + self.dealt.sum(axis=0)
        self.fullest = float(whole.max(initial=0.0)) + float(self.dealt.sum(axis=0).max(initial=0))

    def of(self, amounts: Sequence[float]) -> np.ndarray:
        """What each part gets of some amount that every item has."""
        given, spread = np.asarray(amounts, float), list(self.batching.spread)
        got: np.ndarray = self._whole(given) + given[spread] / np.maximum(self.each[spread], 1) @ self.dealt
        return got

    def pairs(self, block: int | None, parts: int) -> np.ndarray:
        """Pairs of tokens that each part has at once where each item's tokens are divided further into `parts`."""
        if block is not None:
            return np.full(len(self.units), min(self.fullest, block) ** 2)
        pairs = self.tokens**2 / parts
        got: np.ndarray = self._whole(pairs) + pairs[list(self.batching.spread)].sum() / len(self.units)
        return got

    def _whole(self, amounts: np.ndarray) -> np.ndarray:
        items, parts = self.batching.whole
        return np.bincount(parts, amounts[items], minlength=len(self.batching.rows))
