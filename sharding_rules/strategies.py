"""The candidate layouts of an encoder on a mesh, and what each one costs.

One idea holds them together. The model axis of m devices is a x b: the weights use a, the batch gets b. `tensor` is
a = m, `data` is a = 1, `hybrid` is everything between; `replicate` is a = 1 with b left idle.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from sharding_rules.mesh import AnyMesh, split_axis
from sharding_rules.rules import BATCH, Axes, AxisRules, Parameter, RulesError, flatten


@dataclass(frozen=True)
class GroupWork:
    """The work of parameters that are divided together: attention, mlp, stem, projector or any other.

    Args:
      name: What it is called in decisions and in `strategy={name: ...}`.
      axis: Logical weight axis whose division divides this work (`"heads"`), or None where there is none.
      length_axis: Logical activation axis of its tokens. Where the weight axis is None or does not divide and the
        rules give this axis the same mesh axes, the tokens are divided instead.
      flops: FLOPs of each of the workload's units in this group, over all layers.
      layers: How many times the block is repeated; above 1 its reductions count as collectives per layer.
    """

    name: str
    axis: str | None
    length_axis: str
    flops: tuple[float, ...]
    layers: int = 1


@dataclass(frozen=True)
class Workload:
    """What is to be computed.

    Args:
      units: Tokens of each indivisible piece: an item, an attention window.
      groups: The work, group by group.

    Raises:
      ValueError: A group's FLOPs are not one number a unit, or two groups share a name.
    """

    units: tuple[int, ...]
    groups: tuple[GroupWork, ...]

    def __post_init__(self) -> None:
        for group in self.groups:
            if len(group.flops) != len(self.units):
                raise ValueError(f"group {group.name!r}: {len(group.flops)} FLOPs for {len(self.units)} units")
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ValueError(f"two groups share a name: {', '.join(group.name for group in self.groups)}")


@dataclass(frozen=True)
class Obstacle:
    """A weight axis that a layout would have to divide and cannot."""

    group: str
    axis: str
    size: int
    parameter: str
    mesh_axes: Axes
    parts: int


@dataclass(frozen=True)
class Layout:
    """Where every logical axis would go.

    Args:
      strategy: tensor, hybrid, data, replicate, or a mixture in words.
      mesh: The mesh that `axes` speaks of: the given one, or with its model axis split.
      axes: Mesh axes of every logical axis in the rules; empty where it stays whole.
      divided: Logical axis that divides each group's work; a group that stays whole is absent.
      obstacles: Why it is not possible, if it is not.
    """

    strategy: str
    mesh: AnyMesh
    axes: Mapping[str, Axes]
    divided: Mapping[str, str]
    obstacles: tuple[Obstacle, ...]

    def parts(self, name: str) -> int:
        """The number of parts that a logical axis is divided into."""
        return parts_of(self.mesh, self.axes[name])

    def group_parts(self, group: str) -> int:
        """The number of parts that a group's work is divided into, the batch apart."""
        return self.parts(self.divided[group]) if group in self.divided else 1

    @property
    def weight_parts(self) -> int:
        """The parts of the weights: a of a x b."""
        return max([1, *(self.parts(axis) for axis in self.divided.values()), *(o.parts for o in self.obstacles)])


@dataclass(frozen=True)
class Cost:
    """What a layout costs: `flops_ratio` is the busiest device's FLOPs over an equal share of all FLOPs."""

    flops_per_device: float
    flops_ideal: float
    flops_ratio: float
    padding_ratio: float
    param_bytes_per_device: int
    collectives_per_layer: int


def parts_of(mesh: AnyMesh, axes: Axes) -> int:
    """The number of devices along some mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def axis_sizes(parameters: Mapping[str, Parameter]) -> dict[str, dict[int, str]]:
    """The sizes of each logical axis, and the first parameter that has it."""
    sizes: dict[str, dict[int, str]] = {}
    for path, parameter in parameters.items():
        for axis, size in zip(parameter.axes, parameter.shape, strict=True):
            sizes.setdefault(axis, {}).setdefault(size, path)
    return sizes


def enumerate_layouts(
    mesh: AnyMesh,
    rules: AxisRules,
    *,
    sizes: Mapping[str, Mapping[int, str]],
    workload: Workload,
    mixture: Mapping[str, str] | None = None,
) -> list[Layout]:
    """All layouts of an encoder on a mesh, possible or not, from the most divided weights to the least.

    Args:
      mesh: The mesh; all axes Auto.
      rules: Mesh axes of each logical axis. Where they have alternatives there is one tensor layout of all first
        choices, one of all second choices, and so on.
      sizes: From `axis_sizes`.
      workload: The groups.
      mixture: `{group: "tensor" | "replicate"}` adds the layouts of that strategy; groups not named are tensor.
    """
    alternatives = {name: rules.alternatives(name) for name in rules}
    ranks = max((len(alternatives[group.axis]) for group in workload.groups if group.axis), default=0)
    recipes: list[_Recipe] = []
    for rank in range(ranks):
        later = {name: options[rank:] or options[-1:] for name, options in alternatives.items()}
        recipes.append(_Recipe("tensor", mesh, later))
        if mixture:
            whole = frozenset(name for name, choice in mixture.items() if choice == "replicate")
            recipes.append(_Recipe(describe_mixture(mixture), mesh, later, whole=whole, spread=False))
    axis = splittable_axis(rules, workload)
    if axis:
        alone = {name: ((axis,),) if (axis,) in options else () for name, options in alternatives.items()}
        size = mesh.shape[axis]
        parts = [part for part in range(size - 1, 1, -1) if size % part == 0]
        recipes += [_Recipe("hybrid", split_axis(mesh, axis, part), alone) for part in parts]
    recipes += [_Recipe("data", mesh, {}), _Recipe("replicate", mesh, {}, spread=False)]
    layouts: list[Layout] = []
    for recipe in recipes:
        layout = _lay_out(recipe, rules, sizes=sizes, workload=workload, own_axes=mesh.axis_names)
        if layout not in layouts:
            layouts.append(layout)
    return layouts


def describe_mixture(mixture: Mapping[str, str]) -> str:
    """The name of a strategy that is given group by group."""
    return ", ".join(f"{name}={choice}" for name, choice in mixture.items())


def weight_axes(rules: AxisRules, workload: Workload) -> Axes:
    """The mesh axes that the groups' weights, or their tokens instead, may use: the model axis and the like."""
    names = [name for group in workload.groups for name in (group.axis, group.length_axis) if name]
    return flatten(axes for name in names for axes in rules.alternatives(name))


def splittable_axis(rules: AxisRules, workload: Workload) -> str | None:
    """The one mesh axis that stands alone as an alternative of the groups' weight axes, if there is just one."""
    axes = {group.axis: rules.alternatives(group.axis) for group in workload.groups if group.axis}
    alone = {option[0] for options in axes.values() for option in options if len(option) == 1}
    return alone.pop() if len(alone) == 1 else None


@dataclass(frozen=True)
class _Recipe:
    """What a strategy offers: mesh axes to each logical axis, and what the weights leave to the batch if `spread`."""

    strategy: str
    mesh: AnyMesh
    offered: Mapping[str, tuple[Axes, ...]]
    whole: frozenset[str] = frozenset()
    spread: bool = True


def _lay_out(
    recipe: _Recipe, rules: AxisRules, *, sizes: Mapping[str, Mapping[int, str]], workload: Workload, own_axes: Axes
) -> Layout:
    mesh = recipe.mesh

    def offered(name: str | None) -> tuple[Axes, ...]:
        return recipe.offered.get(name, ()) if name else ()

    def first_fit(name: str | None, options: Iterable[Axes]) -> Axes:
        """The first option that divides every size of the axis; () where there is none."""
        wanted = sizes.get(name, ()) if name else ()
        return next((axes for axes in options if all(size % parts_of(mesh, axes) == 0 for size in wanted)), ())

    axes: dict[str, Axes] = dict.fromkeys(rules, ())
    divided: dict[str, str] = {}
    obstacles: list[Obstacle] = []
    groups = [group for group in workload.groups if group.name not in recipe.whole]
    for length_axis in dict.fromkeys(group.length_axis for group in groups):
        # Groups that share their tokens fall back together: activations between them have one layout.
        members = [group for group in groups if group.length_axis == length_axis]
        found = {group.name: first_fit(group.axis, offered(group.axis)) for group in members}
        if offered(length_axis) and not all(found.values()):
            axes[length_axis] = offered(length_axis)[0]
            divided |= {group.name: length_axis for group in members}
            continue
        for group in members:
            if group.axis and found[group.name]:
                axes[group.axis], divided[group.name] = found[group.name], group.axis
            elif group.axis and offered(group.axis):
                wanted = offered(group.axis)[0]
                parts = parts_of(mesh, wanted)
                size, path = next((size, path) for size, path in sizes[group.axis].items() if size % parts)
                obstacles.append(Obstacle(group.name, group.axis, size, path, wanted, parts))

    used = flatten([*(axes[axis] for axis in divided.values()), *(obstacle.mesh_axes for obstacle in obstacles)])
    model = (*weight_axes(rules, workload), *(axis for axis in mesh.axis_names if axis not in own_axes))
    left = [axis for axis in mesh.axis_names if axis in model and axis not in used]
    batch = [axis for axis in flatten(rules.alternatives(BATCH)) if axis not in used and axis not in left]
    axes[BATCH] = (*batch, *left) if recipe.spread else tuple(batch)
    grouped = {BATCH, *(name for group in workload.groups for name in (group.axis, group.length_axis))}
    for name in rules:
        if name not in grouped:
            axes[name] = first_fit(name, [option for option in rules.alternatives(name) if not set(option) & set(left)])
    return Layout(recipe.strategy, mesh, axes, divided, tuple(obstacles))


def parameter_specs(layout: Layout, parameters: Mapping[str, Parameter]) -> dict[str, PartitionSpec]:
    """Mesh axes of every dimension of every parameter.

    Raises:
      RulesError: Two dimensions of one parameter land on one mesh axis.
    """
    specs = {}
    for path, parameter in parameters.items():
        owner: dict[str, str] = {}
        for name in parameter.axes:
            for axis in layout.axes[name]:
                if axis in owner:
                    raise RulesError(
                        f"{path}: the rules put axes {owner[axis]!r} and {name!r} both on mesh axis {axis!r} "
                        f"(strategy {layout.strategy!r}). Neither wins by its place: give one of them None."
                    )
                owner[axis] = name
        specs[path] = partition_spec(layout.axes[name] for name in parameter.axes)
    return specs


def partition_spec(dimensions: Iterable[Axes]) -> PartitionSpec:
    """A PartitionSpec in its plainest form: None, one name, or a tuple of names for each dimension."""
    entries = [axes if len(axes) > 1 else axes[0] if axes else None for axes in dimensions]
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def cost_of(layout: Layout, parameters: Mapping[str, Parameter], *, workload: Workload) -> Cost:
    """What a layout costs, at exact token counts.

    Units go to the batch parts longest first, each to the part with the least FLOPs so far. A group whose weights or
    tokens are divided divides its FLOPs by the parts; one that stays whole does not.

    Args:
      layout: A possible layout.
      parameters: Names and shapes, by path.
      workload: The units and the groups.
    """
    batch_parts = layout.parts(BATCH)
    totals = [math.fsum(group.flops[unit] for group in workload.groups) for unit in range(len(workload.units))]
    assigned = longest_first(totals, batch_parts)
    parts = {group.name: layout.group_parts(group.name) for group in workload.groups}
    busiest = max(
        math.fsum(group.flops[unit] / parts[group.name] for group in workload.groups for unit in units)
        for units in assigned
    )
    ideal = math.fsum(totals) / layout.mesh.size
    tokens = sum(workload.units)
    fullest = max(sum(workload.units[unit] for unit in units) for units in assigned)
    return Cost(
        flops_per_device=busiest,
        flops_ideal=ideal,
        flops_ratio=busiest / ideal if ideal else 1.0,
        padding_ratio=fullest * batch_parts / tokens if tokens else 1.0,
        param_bytes_per_device=sum(
            np.dtype(parameter.dtype).itemsize
            * math.prod(parameter.shape)
            // math.prod(layout.parts(name) for name in parameter.axes)
            for parameter in parameters.values()
        ),
        collectives_per_layer=sum(
            group.layers > 1 and parts[group.name] > 1 and layout.divided[group.name] == group.axis
            for group in workload.groups
        ),
    )


def longest_first(sizes: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of `sizes` in `parts` lists: the largest first, each to the part with the least so far."""
    assigned: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, part = loads[0]
        assigned[part].append(index)
        heapq.heapreplace(loads, (load + sizes[index], part))
    return assigned
