"""The sentences in which a plan, a warning or an error says what happened."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import AbstractMesh

from sharding_rules.batching import Batching
from sharding_rules.costs import FAIR, Cost
from sharding_rules.mesh import AnyMesh, split_name
from sharding_rules.rules import BATCH, Axes, AxisRules, Parameter, describe_mesh, flatten
from sharding_rules.strategies import (
    AUTO,
    Layout,
    Obstacle,
    axis_sizes,
    describe_mixture,
    enumerate_layouts,
    fits,
    most_padding,
    parts_of,
    splittable_axis,
)
from sharding_rules.workload import GroupWork, Workload

FEW_UNITS = 10  # from so many on, whole units are no reason to be unfair
TOLERANCE = 1.01  # more work than the least by 1 % counts as no more


def shortfall(obstacle: Obstacle) -> str:
    """`20 heads do not divide over 8 devices of 'model' (20 = 8 x 2 + 4)`."""
    return does_not_divide(obstacle.size, obstacle.axis, obstacle.parts, obstacle.mesh_axes)


def summary(layout: Layout, mesh: AnyMesh) -> str:
    """What a layout does: `'model' is split 4 x 2: weights over 4 devices ('model'), the batch over 2 (...)`."""
    a, b = layout.weight_parts, layout.parts(BATCH)
    split = next((axis for axis in mesh.axis_names if layout.mesh.shape[axis] != mesh.shape[axis]), None)
    start = f"{split!r} is split {a} x {mesh.shape[split] // a}: " if split else ""
    over = flatten(layout.axes[axis] for axis in layout.divided.values())
    weights = f"weights over {a} devices ({quoted(over)})" if a > 1 and over else "weights whole on each device"
    batch = f"the batch over {b} ({quoted(layout.axes[BATCH])})" if b > 1 else "the batch undivided"
    return f"{start}{weights}, {batch}"


def plan_reason(layout: Layout, cost: Cost, *, obstacles: Sequence[Obstacle], by_auto: bool, mesh: AnyMesh) -> str:
    """Why this strategy, what it does, and what it leaves idle."""
    sentences = [shortfall(obstacles[0])] if obstacles else []
    sentences.append(summary(layout, mesh))
    if dict(layout.mesh.shape) != dict(mesh.shape):
        sentences.append(f"the plan's mesh is then ({describe_mesh(layout.mesh)})")
    busy = {axis for name in (BATCH, *layout.divided.values()) for axis in layout.axes[name]}
    idle = [axis for axis, size in layout.mesh.shape.items() if size > 1 and axis not in busy]
    if idle:
        sentences.append(f"the devices along {quoted(idle)} repeat the same work")
    if cost.flops_ratio > FAIR:
        why = f"a device's share is {cost.units_per_device:.3g} indivisible units of the group with the fewest"
        bound = f"{cost.flops_bound:.2f} is what whole units of work allow"
        reached = cost.flops_ratio <= TOLERANCE * cost.flops_bound
        few = cost.units_per_device < FEW_UNITS
        sentences.append(
            f"the busiest device does {cost.flops_ratio:.2f} times its share"
            + (f"; whole units of work allow no less{f': {why}' if few else ''}" if reached else f"; {bound}")
        )
    start = "chosen by auto." if by_auto else "as asked."
    return " ".join([start, *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)])


def weight_reason(size: int, axis: str, layout: Layout, mesh: AnyMesh) -> str:
    """Why a weight axis is divided as it is."""
    axes, parts, padded = layout.axes[axis], layout.parts(axis), layout.padded_size(axis, size)
    share = f"{_count(padded // parts, axis)} on each of {parts}"
    full = parts_of(mesh, axes)
    if padded != size:
        zeros = f"{_count(padded - size, axis)} of zeros appended ({(padded - size) / size:.2%} more work)"
        return f"{does_not_divide(size, axis, parts, axes)}; {zeros}: {share}"
    if full == parts:
        return f"{_count(size, axis)} over {parts_in_words(parts, axes)}: {size // parts} on each"
    split = f"{quoted(axes)} is split {parts} x {full // parts}"
    if size % full:
        why = does_not_divide(size, axis, full, axes)
        return f"{why}; {split}: {share}, and the batch over the remaining {full // parts}"
    return f"divides over {full} too, but {split} for all groups together: {share}"


def tokens_reason(group: GroupWork, layout: Layout, sizes: Mapping[str, Mapping[int, str]]) -> str:
    """Why a group's tokens are divided instead of its weights."""
    axes, parts = layout.axes[group.length_axis], layout.parts(group.length_axis)
    uneven = next((size for size in sizes.get(group.axis or "", ()) if size % parts), None)
    why = "no weight axis to divide here"
    if group.axis:  # it may divide by itself, and the others whose tokens it shares do not
        alone = f"the groups of {group.length_axis!r} do not all divide over {parts_in_words(parts, axes)}"
        why = does_not_divide(uneven, group.axis, parts, axes) if uneven else alone
    return f"{why}; its tokens are divided over {parts_in_words(parts, axes)} instead"


def whole_reason(
    group: GroupWork, layout: Layout, *, rules: AxisRules, mesh: AnyMesh, sizes: Mapping[str, Mapping[int, str]]
) -> str:
    """Why neither the weights nor the tokens of a group are divided."""
    options = rules.alternatives(group.axis) if group.axis else ()
    if layout.strategy != "data":
        asked = options or rules.alternatives(group.length_axis)
        return (
            "asked for: the same work on each device"
            if asked
            else "the rules divide neither its weights nor its tokens"
        )
    parts = parts_of(mesh, options[0]) if options else 1
    limit = most_padding(group)
    uneven = next((size for size in sizes.get(group.axis or "", ()) if not fits(size, parts, limit)), None)
    why = f"{does_not_divide(uneven, group.axis or '', parts, options[0])}; " if uneven else ""
    return f"{why}weights whole on each device, which takes its own share of the batch"


def other_reason(size: int | None, axis: str, layout: Layout, rules: AxisRules) -> str:
    """Why an axis of no group is divided or not."""
    axes, parts = layout.axes[axis], layout.parts(axis)
    allowed = " or ".join(quoted(option) for option in rules.alternatives(axis))
    if not axes:
        return f"the rules allow {allowed}, which does not divide it or is not for weights in this strategy"
    share = f": {size // parts} on each" if size else ""
    return f"the rules allow {allowed}; over {parts_in_words(parts, axes)}{share}"


def batch_reason(batching: Batching) -> str:
    """How the items of a workload meet the parts of the batch."""
    parts, whole, spread = len(batching.rows), sum(map(len, batching.rows)), len(batching.spread)
    if parts == 1:
        return f"{_items(whole)}, undivided"
    sentences = []
    if whole or not spread:
        empty = sum(not row for row in batching.rows) if not spread else 0
        idle = f"; fewer items than parts, so {empty} of {parts} stay empty" if empty else ""
        sentences.append(f"{_items(whole)} whole, the longest first onto the least loaded part{idle}")
    if spread:
        sentences.append(f"{_items(spread)} with the tokens spread over all {parts} parts")
    return "; ".join(sentences)


def fate(
    layout: Layout, cost: Cost | None, *, enough: float, pool: Sequence[str], memory_limit: int | None, chosen: bool
) -> str:
    """Why a candidate was chosen or not."""
    if chosen:
        return "chosen"
    if cost is None:
        return "; ".join(shortfall(obstacle) for obstacle in layout.obstacles)
    if layout.strategy not in pool:
        return "not asked for" if layout.strategy in AUTO else "only when asked for"
    if memory_limit is not None and cost.param_bytes_per_device > memory_limit:
        return f"over the memory limit of {memory_limit / 1e6:,.1f} MB"
    if cost.flops_ratio > enough:
        return "more work on the busiest device"
    return "fair too, but the weights less divided" if memory_limit is None else "fair too, but slower"


def indivisible_text(
    layouts: Sequence[Layout],
    strategy: str,
    *,
    parameters: Mapping[str, Parameter],
    mesh: AnyMesh,
    rules: AxisRules,
    workload: Workload,
    name: str,
) -> str:
    """The error for a strategy that does not divide: what, why, and the ways out, as `strategy=` takes them."""
    refused = [layout for layout in layouts if layout.strategy == strategy]
    axis = splittable_axis(rules, workload) if strategy == "hybrid" else None
    lines = [f"{name}: strategy {strategy!r} is not possible on mesh ({describe_mesh(mesh)})."]
    if not refused and axis:
        why = f"{mesh.shape[axis]} is prime" if mesh.shape[axis] > 1 else "it is a single device"
        if split_name(axis) in mesh.axis_names:
            why = f"the other part would be {split_name(axis)!r}, which is there already"
        lines.append(f"It splits mesh axis {axis!r} in two, a part for the weights and a part for the batch; {why}.")
    elif not refused:
        alone = " that stands alone as an alternative" if strategy == "hybrid" else ""
        lines.append(f"It needs a mesh axis in the rules of the groups' weights{alone}.")
    for layout in refused if axis else refused[:1]:  # each split of hybrid has obstacles of its own
        for obstacle in layout.obstacles:
            axes, shape = parameters[obstacle.parameter].axes, list(parameters[obstacle.parameter].shape)
            lines.append(
                f"{obstacle.parameter}: axis {obstacle.axis!r} (dimension {axes.index(obstacle.axis)} of {shape}) has "
                f"size {obstacle.size}, and {shortfall(obstacle)}."
            )
    if axis and (nearest := _sizes_to_split(axis, mesh, rules, parameters=parameters, workload=workload)):
        lines.append(f"The nearest sizes of {axis!r} that would work: {' and '.join(map(str, nearest))}.")
    elif refused and not axis:
        works = ", ".join(map(str, _sizes_that_fit(refused[0], rules, parameters=parameters, workload=workload)))
        lines.append(f"Sizes of {quoted(refused[0].obstacles[0].mesh_axes)} that would work: {works}.")
    ways = _ways(layouts, mesh=mesh, workload=workload)
    return "\n".join(
        [*lines, "Strategies that would work on this mesh:", *(f"  {way!r}: {what}" for way, what in ways.items())]
    )


def _sizes_that_fit(
    refused: Layout, rules: AxisRules, *, parameters: Mapping[str, Parameter], workload: Workload
) -> list[int]:
    """The sizes of the mesh axis over which all weights would divide that have to."""
    blocked = {obstacle.group for obstacle in refused.obstacles}
    weights = [g for g in workload.groups if g.name in blocked or refused.divided.get(g.name) == g.axis]
    firm = [(g, g.axis) for g in weights if g.axis is not None and not rules.alternatives(g.length_axis)]
    sizes = axis_sizes(parameters)
    limits = [(size, most_padding(g)) for g, axis in firm for size in sizes[axis]]
    counts = range(1, min(size for size, _ in limits) + 1)
    return [parts for parts in counts if all(fits(size, parts, most) for size, most in limits)]


def _sizes_to_split(
    axis: str, mesh: AnyMesh, rules: AxisRules, *, parameters: Mapping[str, Parameter], workload: Workload
) -> list[int]:
    """The nearest sizes of the mesh axis, below and above, of which hybrid would work."""

    def works(size: int) -> bool:
        shape = {**mesh.shape, axis: size}
        other = AbstractMesh(tuple(shape.values()), tuple(shape))
        layouts = enumerate_layouts(other, rules, sizes=axis_sizes(parameters), workload=workload)
        return any(layout.strategy == "hybrid" and not layout.obstacles for layout in layouts)

    now = mesh.shape[axis]
    below, above = range(now - 1, 3, -1), range(now + 1, 4 * now + 4)
    return [size for sizes in (below, above) for size in itertools.islice(filter(works, sizes), 1)]


def _ways(layouts: Sequence[Layout], *, mesh: AnyMesh, workload: Workload) -> dict[str, str]:
    """The strategies that are possible, and what each of them does."""
    ways: dict[str, str] = {}
    for layout in layouts:
        if not layout.obstacles:
            ways.setdefault(layout.strategy, summary(layout, mesh))
    tensor = next((layout for layout in layouts if layout.strategy == "tensor"), None)
    if tensor and tensor.obstacles and tensor.divided:
        blocked = list(dict.fromkeys(obstacle.group for obstacle in tensor.obstacles))
        rest = f"the rest as in {tensor.strategy!r}"
        whole, padded = (describe_mixture(dict.fromkeys(blocked, choice)) for choice in ("replicate", "pad"))
        ways[whole] = f"{' and '.join(blocked)} whole on each device, {rest}"
        if all(group.paddable for group in workload.groups if group.name in blocked):
            ways[padded] = f"{' and '.join(blocked)} padded with zeros until it divides, {rest}"
    ways["auto"] = "whichever of tensor, hybrid and data leaves the least work on the busiest device"
    return ways


def memory_text(possible: Iterable[tuple[Layout, Cost]], *, memory_limit: int, mesh: AnyMesh, name: str) -> str:
    """The error where no layout fits the memory limit."""
    limit = f"the memory limit of {memory_limit:,} bytes a device"
    lines = [f"{name}: no layout on mesh ({describe_mesh(mesh)}) fits {limit}:"]
    lines += [f"  {o.strategy!r} ({summary(o, mesh)}): {c.param_bytes_per_device:,} bytes" for o, c in possible]
    return "\n".join(lines)


def does_not_divide(size: int, axis: str, parts: int, axes: Axes) -> str:
    """`20 heads do not divide over 8 devices of 'model' (20 = 8 x 2 + 4)`."""
    why = f"{size} = {parts} x {size // parts} + {size % parts}" if size > parts else f"{size} is less than {parts}"
    return f"{misfit(size, axis, parts, axes)} ({why})"


def misfit(size: int, axis: str, parts: int, axes: Axes) -> str:
    """`20 heads do not divide over 8 devices of 'model'`."""
    return f"{_count(size, axis)} {'does' if size == 1 else 'do'} not divide over {parts_in_words(parts, axes)}"


def parts_in_words(parts: int, axes: Axes) -> str:
    """`8 devices of 'model'`."""
    return f"{parts} device{'s' * (parts != 1)} of {quoted(axes)}"


def quoted(axes: Iterable[str]) -> str:
    """`'fsdp' and 'tensor'`."""
    return " and ".join(map(repr, axes))


def _items(number: int) -> str:
    return f"{number} item{'s' * (number != 1)} or window{'s' * (number != 1)}"


def _count(size: int, axis: str) -> str:
    name = axis.removesuffix("s") if axis.endswith("s") else f"{axis} column"
    return f"{size} {name}{'s' * (size != 1)}"
