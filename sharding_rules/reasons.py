"""The sentences in which a plan, a warning or an error says what happened."""

from collections.abc import Iterable, Mapping, Sequence

from sharding_rules.batching import Batching
from sharding_rules.costs import FAIR, Cost
from sharding_rules.mesh import AnyMesh
from sharding_rules.rules import BATCH, Axes, AxisRules, Parameter, describe_mesh, flatten
from sharding_rules.strategies import Layout, Obstacle, axis_sizes, fits, most_padding, parts_of
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
    busy = {axis for name in (BATCH, *layout.divided.values()) for axis in layout.axes[name]}
    idle = [axis for axis, size in layout.mesh.shape.items() if size > 1 and axis not in busy]
    if idle:
        sentences.append(f"the devices along {quoted(idle)} repeat the same work")
    if cost.flops_ratio > FAIR:
        why = f"a device's share is {cost.units_per_device:.3g} indivisible units of the group with the fewest"
        bound = f"{cost.flops_bound:.2f} is the least that can be had by this strategy"
        reached = cost.flops_ratio <= TOLERANCE * cost.flops_bound
        few = cost.units_per_device < FEW_UNITS
        sentences.append(
            f"the busiest device does {cost.flops_ratio:.2f} times its share"
            + (f", the least that can be had by this strategy{f': {why}' if few else ''}" if reached else f"; {bound}")
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
    misfit = next((size for size in sizes.get(group.axis or "", ()) if size % parts), None)
    why = does_not_divide(misfit, group.axis or "", parts, axes) if misfit else "no weight axis to divide here"
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
    misfit = next((size for size in sizes.get(group.axis or "", ()) if not fits(size, parts, limit)), None)
    why = f"{does_not_divide(misfit, group.axis or '', parts, options[0])}; " if misfit else ""
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
        return "not asked for" if layout.strategy in ("tensor", "hybrid", "data") else "only when asked for"
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
    """The error for a strategy that does not divide: what, why, and the ways out."""
    refused = next((layout for layout in layouts if layout.strategy == strategy), None)
    lines = [f"{name}: strategy {strategy!r} is not possible on mesh ({describe_mesh(mesh)})."]
    if refused is None:
        needs = ""
        if strategy == "hybrid":
            needs = (
                " that stands alone as an alternative, whose size is not prime, and AXIS_batch free for its other part"
            )
        lines.append(f"It needs a mesh axis in the rules of the groups' weights{needs}.")
    else:
        for obstacle in refused.obstacles:
            axes, shape = parameters[obstacle.parameter].axes, list(parameters[obstacle.parameter].shape)
            lines.append(
                f"{obstacle.parameter}: axis {obstacle.axis!r} (dimension {axes.index(obstacle.axis)} of {shape}) has "
                f"size {obstacle.size}, and {shortfall(obstacle)}."
            )
        blocked = {obstacle.group for obstacle in refused.obstacles}
        weights = [g for g in workload.groups if g.name in blocked or refused.divided.get(g.name) == g.axis]
        firm = [(g, g.axis) for g in weights if g.axis is not None and not rules.alternatives(g.length_axis)]
        sizes = axis_sizes(parameters)
        limits = [(size, most_padding(g)) for g, axis in firm for size in sizes[axis]]
        counts = range(1, min(size for size, _ in limits) + 1)
        works = ", ".join(f"{parts}" for parts in counts if all(fits(size, parts, most) for size, most in limits))
        lines.append(f"Sizes of {quoted(refused.obstacles[0].mesh_axes)} that would work: {works}.")
    lines.append("Strategies that would work on this mesh:")
    ways: dict[str, str] = {}
    for layout in layouts:
        if not layout.obstacles:
            ways.setdefault(repr(layout.strategy), summary(layout, mesh))
    tensor = next((layout for layout in layouts if layout.strategy == "tensor"), None)
    if tensor and tensor.obstacles and tensor.divided:
        whole = {obstacle.group: "replicate" for obstacle in tensor.obstacles}
        ways[f"{whole}"] = "that whole on each device, the other groups as in 'tensor'"
        blocked_groups = [group for group in workload.groups if group.name in whole]
        if all(group.paddable for group in blocked_groups):
            ways[f"{dict.fromkeys(whole, 'pad')}"] = "that padded with zeros until it divides"
    ways["'auto'"] = "whichever of tensor, hybrid and data leaves the least work on the busiest device"
    return "\n".join([*lines, *(f"  {way}: {what}" for way, what in ways.items())])


def memory_text(possible: Iterable[tuple[Layout, Cost]], *, memory_limit: int, mesh: AnyMesh, name: str) -> str:
    """The error where no layout fits the memory limit."""
    lines = [f"{name}: no layout on mesh ({describe_mesh(mesh)}) fits memory_limit={memory_limit:,} bytes a device:"]
    lines += [f"  {o.strategy!r} ({summary(o, mesh)}): {c.param_bytes_per_device:,} bytes" for o, c in possible]
    return "\n".join(lines)


def does_not_divide(size: int, axis: str, parts: int, axes: Axes) -> str:
    """`20 heads do not divide over 8 devices of 'model' (20 = 8 x 2 + 4)`."""
    why = f"{size} = {parts} x {size // parts} + {size % parts}" if size > parts else f"{size} is less than {parts}"
    return f"{_count(size, axis)} do not divide over {parts_in_words(parts, axes)} ({why})"


def parts_in_words(parts: int, axes: Axes) -> str:
    """`8 devices of 'model'`."""
    return f"{parts} device{'s' * (parts != 1)} of {quoted(axes)}"


def quoted(axes: Iterable[str]) -> str:
    """`'fsdp' and 'tensor'`."""
    return " and ".join(map(repr, axes))


def _items(number: int) -> str:
    return f"{number} item{'s' * (number != 1)} or window{'s' * (number != 1)}"


def _count(size: int, axis: str) -> str:
    return f"{size} {axis}" if axis.endswith("s") else f"{size} {axis} columns"
