"""The candidate layouts of an encoder's weights on a mesh.

One idea holds them together. The model axis of m devices is a x b: the weights use a, the batch gets b. `tensor` is
a = m, `data` is a = 1, `hybrid` is everything between; `replicate` is a = 1 with b left idle. What almost divides is
padded with zeros until it does.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from sharding_rules.mesh import AnyMesh, split_axis, split_name
from sharding_rules.rules import BATCH, Axes, AxisRules, Parameter, RulesError, flatten
from sharding_rules.workload import GroupWork, Workload

AUTO = ("tensor", "hybrid", "data")  # what auto chooses from, the most divided weights first
CHEAP_PADDING = 0.02  # of an axis: less than this is padded without being asked


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
      padded: For each weight axis that gets zeros appended, its sizes and what they become.
      obstacles: Why it is not possible, if it is not.
    """

    strategy: str
    mesh: AnyMesh
    axes: Mapping[str, Axes]
    divided: Mapping[str, str]
    padded: Mapping[str, Mapping[int, int]]
    obstacles: tuple[Obstacle, ...]

    def parts(self, name: str) -> int:
        """The number of parts that a logical axis is divided into."""
        return parts_of(self.mesh, self.axes[name])

    def parameter_parts(self, parameter: Parameter) -> int:
        """The number of parts that a parameter is divided into, over all its dimensions."""
        return math.prod(self.parts(name) for name in parameter.axes if name is not None)

    def group_parts(self, group: str) -> int:
        """The number of parts that a group's work is divided into, the batch apart."""
        return self.parts(self.divided[group]) if group in self.divided else 1

    def padded_size(self, axis: str | None, size: int) -> int:
        """What a weight axis of this size becomes."""
        return self.padded.get(axis or "", {}).get(size, size)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape of a parameter with its padding."""
        sizes = zip(parameter.axes, parameter.shape, strict=True)
        return tuple(self.padded_size(axis, size) for axis, size in sizes)

    def divides_tokens(self, group: GroupWork) -> bool:
        """Whether a group's tokens are divided instead of its weights."""
        return self.divided.get(group.name) == group.length_axis

    def weight_share(self, group: GroupWork) -> float:
        """The part of a group's weights that each device has, its padding included."""
        return 1.0 if self.divides_tokens(group) else (1 + self.waste(group.axis)) / self.group_parts(group.name)

    def waste(self, axis: str | None) -> float:
        """The work that the padding of an axis adds, relative to what there is without."""
        sizes = self.padded.get(axis or "", {})
        return sum(sizes.values()) / sum(sizes) - 1 if sizes else 0.0

    @property
    def weight_parts(self) -> int:
        """The parts of the weights: a of a x b."""
        return max([1, *(self.parts(axis) for axis in self.divided.values()), *(o.parts for o in self.obstacles)])


def parts_of(mesh: AnyMesh, axes: Axes) -> int:
    """The number of devices along some mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def most_padding(group: GroupWork) -> float:
    """How much a group may be padded without being asked, relative to its size."""
    return CHEAP_PADDING if group.paddable else 0.0


def fits(size: int, parts: int, padding: float) -> bool:
    """Whether a size divides, or does once less than this part of it is added."""
    return size % parts == 0 or -size % parts < padding * size


def axis_sizes(parameters: Mapping[str, Parameter]) -> dict[str, dict[int, str]]:
    """The sizes of each logical axis, and the first parameter that has it."""
    sizes: dict[str, dict[int, str]] = {}
    for path, parameter in parameters.items():
        for axis, size in zip(parameter.axes, parameter.shape, strict=True):
            if axis is not None:
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
      mixture: `{group: "tensor" | "pad" | "replicate"}` adds the layouts of that strategy; groups not named are
        tensor. Where there is none and tensor is not possible, one with the groups in its way padded is added.
    """
    alternatives = {name: rules.alternatives(name) for name in rules}
    ranks = max((len(alternatives[group.axis]) for group in workload.groups if group.axis), default=0)

    def lay_out(recipe: _Recipe) -> Layout:
        return _lay_out(recipe, rules, sizes=sizes, workload=workload, own_axes=mesh.axis_names)

    layouts: list[Layout] = []
    for rank in range(ranks):
        later = {name: options[rank:] or options[-1:] for name, options in alternatives.items()}
        tensor = lay_out(_Recipe("tensor", mesh, later))
        paddable = {group.name for group in workload.groups if group.paddable}
        blocked = {obstacle.group for obstacle in tensor.obstacles}
        choices = mixture or (dict.fromkeys(sorted(blocked), "pad") if blocked and blocked <= paddable else None)
        layouts.append(tensor)
        if choices:
            layouts.append(lay_out(_Recipe(describe_mixture(choices), mesh, later, choices=choices, to_batch=False)))
    axis = splittable_axis(rules, workload)
    if axis and split_name(axis) not in mesh.axis_names:
        alone = {name: ((axis,),) if (axis,) in options else () for name, options in alternatives.items()}
        size = mesh.shape[axis]
        parts = [part for part in range(size - 1, 1, -1) if size % part == 0]
        layouts += [lay_out(_Recipe("hybrid", split_axis(mesh, axis, part), alone)) for part in parts]
    layouts += [lay_out(_Recipe("data", mesh, {})), lay_out(_Recipe("replicate", mesh, {}, to_batch=False))]
    return [layout for i, layout in enumerate(layouts) if layout not in layouts[:i]]


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
    """What a strategy offers: mesh axes to each logical axis, and to the batch what the weights leave if `to_batch`."""

    strategy: str
    mesh: AnyMesh
    offered: Mapping[str, tuple[Axes, ...]]
    choices: Mapping[str, str] = field(default_factory=dict)
    to_batch: bool = True


def _lay_out(
    recipe: _Recipe, rules: AxisRules, *, sizes: Mapping[str, Mapping[int, str]], workload: Workload, own_axes: Axes
) -> Layout:
    mesh = recipe.mesh

    def offered(name: str | None) -> tuple[Axes, ...]:
        return recipe.offered.get(name, ()) if name else ()

    def first_fit(name: str | None, options: Iterable[Axes], *, limit: float = 0.0) -> Axes:
        """The first option that divides every size of the axis, padded if that adds so little; () if there is none."""
        wanted = sizes.get(name, ()) if name else ()
        return next((axes for axes in options if all(fits(size, parts_of(mesh, axes), limit) for size in wanted)), ())

    def fit(group: GroupWork) -> Axes:
        # an axis is padded for all that use it, or not at all
        limits = [most_padding(other) for other in workload.groups if other.axis == group.axis]
        limit = math.inf if recipe.choices.get(group.name) == "pad" else min(limits)
        return first_fit(group.axis, offered(group.axis), limit=limit)

    axes: dict[str, Axes] = dict.fromkeys(rules, ())
    divided: dict[str, str] = {}
    padded: dict[str, Mapping[int, int]] = {}
    obstacles: list[Obstacle] = []
    groups = [group for group in workload.groups if recipe.choices.get(group.name) != "replicate"]
    for length_axis in dict.fromkeys(group.length_axis for group in groups):
        # Groups that share their tokens fall back together: activations between them have one layout.
        members = [group for group in groups if group.length_axis == length_axis]
        found = {group.name: fit(group) for group in members}
        if offered(length_axis) and not all(found.values()):
            axes[length_axis] = offered(length_axis)[0]
            divided |= {group.name: length_axis for group in members}
            continue
        for group in members:
            if group.axis and found[group.name]:
                axes[group.axis], divided[group.name] = found[group.name], group.axis
                parts = parts_of(mesh, found[group.name])
                if any(size % parts for size in sizes[group.axis]):
                    padded[group.axis] = {size: -(-size // parts) * parts for size in sizes[group.axis]}
            elif group.axis and offered(group.axis):
                wanted = offered(group.axis)[0]
                parts = parts_of(mesh, wanted)
                size, path = next((size, path) for size, path in sizes[group.axis].items() if size % parts)
                obstacles.append(Obstacle(group.name, group.axis, size, path, wanted, parts))

    used = flatten([*(axes[axis] for axis in divided.values()), *(obstacle.mesh_axes for obstacle in obstacles)])
    model = (*weight_axes(rules, workload), *(axis for axis in mesh.axis_names if axis not in own_axes))
    left = [axis for axis in mesh.axis_names if axis in model and axis not in used]
    batch = [axis for axis in flatten(rules.alternatives(BATCH)) if axis not in used and axis not in left]
    axes[BATCH] = (*batch, *left) if recipe.to_batch else tuple(batch)
    grouped = {BATCH, *(name for group in workload.groups for name in (group.axis, group.length_axis))}
    for name in rules:
        if name not in grouped:
            axes[name] = first_fit(name, [option for option in rules.alternatives(name) if not set(option) & set(left)])
    return Layout(recipe.strategy, mesh, axes, divided, padded, tuple(obstacles))


def parameter_specs(layout: Layout, parameters: Mapping[str, Parameter]) -> dict[str, PartitionSpec]:
    """Mesh axes of every dimension of every parameter.

    Raises:
      RulesError: Two dimensions of one parameter land on one mesh axis.
    """
    specs = {}
    for path, parameter in parameters.items():
        dimensions = [layout.axes[name] if name is not None else () for name in parameter.axes]
        owner: dict[str, int] = {}
        for dimension, axes in enumerate(dimensions):
            for axis in axes:
                if axis in owner:
                    first, second = owner[axis], dimension
                    raise RulesError(
                        f"{path}: the rules put axes {parameter.axes[first]!r} and {parameter.axes[second]!r} both on "
                        f"mesh axis {axis!r} (dimensions {first} and {second} of {list(parameter.shape)}, strategy "
                        f"{layout.strategy!r}). Neither wins by its place: give one of them None."
                    )
                owner[axis] = dimension
        specs[path] = partition_spec(dimensions)
    return specs


def partition_spec(dimensions: Iterable[Axes]) -> PartitionSpec:
    """A PartitionSpec in its plainest form: None, one name, or a tuple of names for each dimension."""
    entries = [axes if len(axes) > 1 else axes[0] if axes else None for axes in dimensions]
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]
