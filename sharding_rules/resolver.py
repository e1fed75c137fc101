"""resolve(): names, shapes, a mesh, rules and work in; a Plan out."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from sharding_rules import reasons
from sharding_rules.batching import Batching
from sharding_rules.costs import FAIR, Cost, choose_batching
from sharding_rules.mesh import AnyMesh, auto_mesh
from sharding_rules.plan import Candidate, Decision, Plan
from sharding_rules.profiles import DeviceProfile, profile_of
from sharding_rules.rules import BATCH, AxisRules, IndivisibleAxisError, Parameter, RulesError, describe_mesh, nearest
from sharding_rules.strategies import (
    AUTO,
    Layout,
    Obstacle,
    axis_sizes,
    describe_mixture,
    enumerate_layouts,
    parameter_specs,
    parts_of,
)
from sharding_rules.workload import Workload

STRATEGIES = ("auto", "tensor", "hybrid", "data", "replicate")
CHOICES = ("tensor", "pad", "replicate")  # for a single group

_logger = logging.getLogger("sharding_rules")
_warned: set[tuple[str, tuple[tuple[str, int], ...]]] = set()  # so that a stream of plans warns once


def resolve(
    parameters: Mapping[str, Parameter],
    mesh: AnyMesh,
    *,
    rules: AxisRules,
    workload: Workload,
    strategy: str | Mapping[str, str] = "auto",
    mm_encoder_tp_mode: str | None = None,
    memory_limit: int | None = None,
    layout: str = "auto",
    device: str | DeviceProfile | None = None,
    name: str = "encoder",
) -> Plan:
    """Decide where every parameter and activation of an encoder goes on a mesh.

    A pure function of its arguments, but for one logged warning per encoder and mesh where `auto` cannot take tensor.

    Args:
      parameters: Names and shapes, by path.
      mesh: Concrete or abstract; Auto or Explicit axes.
      rules: The mesh axes of every logical axis.
      workload: What is to be computed; decides between the layouts that are possible.
      strategy: "auto", "tensor" (weights over the whole model axis), "hybrid" (weights over a part of it, the batch
        over the rest), "data" (weights whole, batch over everything), "replicate" (weights whole, the model axis
        idle), or `{group: "tensor" | "pad" | "replicate"}`, also in the form "attention=pad, mlp=tensor". Auto looks
        at the layouts in which no device does more than 1.10 times its share of the work (or else at those with the
        least work on the busiest): it takes the one that divides the weights most, or, with a memory limit, the
        fastest that fits it.
      mm_encoder_tp_mode: The engines' setting: "weights" is tensor where it divides and auto's choice otherwise,
        "data" is data.
      memory_limit: Most bytes of parameters on one device. What fits is then free: time alone decides.
      layout: Of the batch: "rows" keeps every item whole, "length" spreads the tokens of every item over all parts,
        "auto" does either, or both at once, by predicted time, and fair to all devices.
      device: Whose speed predictions are made with: a name in `PROFILES` or a profile; by the mesh where not given.
      name: What the encoder is called in messages.

    Returns:
      The plan.

    Raises:
      RulesError: Rules, parameters, workload and mesh do not fit together.
      IndivisibleAxisError: The strategy asked for does not divide.
      ValueError: Unknown strategy or setting, or nothing fits the memory limit.
    """
    strategy = _parsed(strategy)
    asked = _asked(strategy, mm_encoder_tp_mode, workload)
    _check(parameters, mesh, rules, workload)
    sizes = axis_sizes(parameters)
    mixture = strategy if isinstance(strategy, Mapping) else None
    profile = profile_of(device, mesh=mesh)
    layouts = enumerate_layouts(auto_mesh(mesh), rules, sizes=sizes, workload=workload, mixture=mixture)
    specs = [{} if option.obstacles else parameter_specs(option, parameters) for option in layouts]
    costs = [
        None
        if option.obstacles
        else choose_batching(option, parameters, workload=workload, profile=profile, batch_layout=layout)
        for option in layouts
    ]

    tensor = [option for option in layouts if option.strategy == "tensor"]
    tensor_fits = any(not option.obstacles for option in tensor)
    by_auto = asked == "auto" and not (mm_encoder_tp_mode == "weights" and tensor_fits)
    pool = AUTO if by_auto else ("tensor",) if asked == "auto" else (asked,)
    possible = {i: found[1] for i, found in enumerate(costs) if found and layouts[i].strategy in pool}
    if not possible:
        raise IndivisibleAxisError(
            reasons.indivisible_text(
                layouts, pool[0], parameters=parameters, mesh=mesh, rules=rules, workload=workload, name=name
            )
        )
    fitting = {i: cost for i, cost in possible.items() if _fits(cost, memory_limit)}
    if memory_limit is not None and not fitting:
        tried = [(layouts[i], cost) for i, cost in possible.items()]
        raise ValueError(reasons.memory_text(tried, memory_limit=memory_limit, mesh=mesh, name=name))
    enough = max(FAIR, reasons.TOLERANCE * min(cost.flops_ratio for cost in fitting.values()))
    fair = [i for i, cost in fitting.items() if cost.flops_ratio <= enough]
    chosen = fair[0] if memory_limit is None else min(fair, key=lambda i: fitting[i].seconds)

    found = costs[chosen]
    assert found is not None  # it is among the possible ones
    weights, (batching, cost) = layouts[chosen], found
    obstacles = tensor[0].obstacles if by_auto and tensor and not tensor_fits else ()
    if obstacles:
        _warn_once(weights, obstacles, mesh=mesh, name=name)
    return Plan(
        encoder=name,
        given_mesh=dict(mesh.shape),
        layout=weights,
        reason=reasons.plan_reason(weights, cost, obstacles=obstacles, by_auto=by_auto, mesh=mesh),
        parameters=parameters,
        parameter_specs=specs[chosen],
        length_parts={group.length_axis: weights.parts(group.length_axis) for group in workload.groups},
        batching=batching,
        cost=cost,
        profile=profile,
        decisions=tuple(_decisions(weights, batching, rules, mesh=mesh, workload=workload, sizes=sizes)),
        candidates=tuple(
            Candidate(
                strategy=other.strategy,
                weight_parts=other.weight_parts,
                batch_parts=other.parts(BATCH),
                batch_layout=found[0].layout if found else None,
                cost=found[1] if found else None,
                chosen=i == chosen,
                reason=reasons.fate(
                    other, found and found[1], enough=enough, pool=pool, memory_limit=memory_limit, chosen=i == chosen
                ),
            )
            for i, (other, found) in enumerate(zip(layouts, costs, strict=True))
        ),
    )


def _fits(cost: Cost, memory_limit: int | None) -> bool:
    return memory_limit is None or cost.param_bytes_per_device <= memory_limit


def _parsed(strategy: str | Mapping[str, str]) -> str | Mapping[str, str]:
    """A strategy by groups that is written as `Plan.strategy` and command lines write it, as a dict."""
    if not isinstance(strategy, str) or "=" not in strategy:
        return strategy
    pairs = [tuple(map(str.strip, pair.split("="))) for pair in strategy.split(",")]
    choices = {pair[0]: pair[-1] for pair in pairs}
    if any(len(pair) != 2 for pair in pairs) or len(choices) < len(pairs):
        raise ValueError(f"strategy {strategy!r} should give each group one choice, as in 'attention=pad, mlp=tensor'")
    return choices


def _asked(strategy: str | Mapping[str, str], mode: str | None, workload: Workload) -> str:
    """The strategy's name, from the two settings that may give one."""
    if mode not in (None, "weights", "data"):
        raise ValueError(f"mm_encoder_tp_mode={mode!r} should be None, 'weights' or 'data'")
    if mode and strategy != "auto":
        raise ValueError(
            f"strategy {strategy!r} and mm_encoder_tp_mode={mode!r} both name a strategy; give one of them"
        )
    if not isinstance(strategy, Mapping) or not strategy:
        if strategy not in STRATEGIES:
            known, choices = ", ".join(map(repr, STRATEGIES)), ", ".join(CHOICES)
            raise ValueError(
                f"strategy {strategy!r} should be one of {known}, or give groups one of {choices}, as in "
                "'attention=pad, mlp=tensor'"
            )
        return "data" if mode == "data" else strategy
    groups = [group.name for group in workload.groups]
    for group, choice in strategy.items():
        if group not in groups:
            raise RulesError(f"strategy names group {group!r}{nearest(group, groups)} (there are {', '.join(groups)})")
        if choice not in CHOICES:
            raise ValueError(
                f"strategy for group {group!r} should be {' or '.join(map(repr, CHOICES))}, not {choice!r}"
            )
        if choice == "pad" and not next(g for g in workload.groups if g.name == group).paddable:
            raise ValueError(f"group {group!r} cannot be padded: zeros would change what it computes")
    for one, other in combinations(workload.groups, 2):
        pair = [strategy.get(group.name, "tensor") for group in (one, other)]
        if one.axis is not None and one.axis == other.axis and pair[0] != pair[1]:
            raise RulesError(
                f"groups {one.name!r} and {other.name!r} share weight axis {one.axis!r}, and the strategy gives them "
                f"{pair[0]!r} and {pair[1]!r}: give both the same"
            )
    return describe_mixture(strategy)


def _check(parameters: Mapping[str, Parameter], mesh: AnyMesh, rules: AxisRules, workload: Workload) -> None:
    """Raise where names do not meet: between parameters, groups, rules and mesh."""
    rules.check_mesh(mesh)
    rules.check_name(BATCH, where="the batch")
    for path, parameter in parameters.items():
        if len(parameter.axes) != len(parameter.shape):
            raise RulesError(f"{path}: {len(parameter.axes)} axis names {parameter.axes} for shape {parameter.shape}")
        for axis in parameter.axes:
            if axis is not None:
                rules.check_name(axis, where=path)
    used = {axis: path for path, parameter in parameters.items() for axis in parameter.axes if axis is not None}
    if BATCH in used:
        raise RulesError(f"{used[BATCH]}: axis {BATCH!r} is for activations; give this dimension a name of its own")
    for group in workload.groups:
        if BATCH in (group.axis, group.length_axis):
            raise RulesError(
                f"group {group.name!r}: axis {BATCH!r} is the items', neither a group's weights nor tokens"
            )
        for name in (group.axis, group.length_axis):
            if name is not None:
                rules.check_name(name, where=f"group {group.name!r}")
        if group.axis is not None and group.axis not in used:
            raise RulesError(
                f"group {group.name!r}: no parameter has its axis {group.axis!r}{nearest(group.axis, used)}"
            )
        if group.length_axis in used and rules.alternatives(group.length_axis):
            raise RulesError(
                f"{used[group.length_axis]}: axis {group.length_axis!r} is the tokens' of group {group.name!r}, which "
                f"the rules let be divided ({rules[group.length_axis]!r}): give this dimension a name of its own"
            )
    for one, other in combinations(workload.groups, 2):
        lengths = {one.length_axis, other.length_axis}
        if (
            one.axis is not None
            and one.axis == other.axis
            and len(lengths) > 1
            and any(map(rules.alternatives, lengths))
        ):
            raise RulesError(
                f"groups {one.name!r} and {other.name!r} share weight axis {one.axis!r} but not the axis of their "
                f"tokens ({one.length_axis!r}, {other.length_axis!r}), which the rules let be divided: where the "
                "tokens of one are, the weights cannot be. Give one of them a weight axis of its own."
            )


def _warn_once(layout: Layout, obstacles: Sequence[Obstacle], *, mesh: AnyMesh, name: str) -> None:
    key = name, tuple(mesh.shape.items())
    if key in _warned:
        return
    _warned.add(key)
    misfits = [reasons.misfit(o.size, o.axis, o.parts, o.mesh_axes) for o in obstacles]
    _logger.warning(
        "%s on mesh (%s): %s, so %r is used instead of 'tensor'. Ask for strategy %r to silence this.",
        name,
        describe_mesh(mesh),
        " and ".join(misfits),
        layout.strategy,
        layout.strategy,
    )


def _decisions(
    layout: Layout,
    batching: Batching,
    rules: AxisRules,
    *,
    mesh: AnyMesh,
    workload: Workload,
    sizes: Mapping[str, Mapping[int, str]],
) -> Iterator[Decision]:
    """One decision for each group, each other axis of a parameter that the rules let be divided, and the batch."""

    def decide(group: str, axis: str, size: int | None, action: str, reason: str) -> Decision:
        went = () if action == "replicated" else layout.axes[axis]
        padded = size if size is None else layout.padded_size(axis, size)
        return Decision(group, axis, size, padded, went, parts_of(layout.mesh, went), action, reason)

    for group in workload.groups:
        axis = layout.divided.get(group.name)
        if axis == group.axis and axis is not None:
            for size in sizes[axis]:
                reason = reasons.weight_reason(size, axis, layout, mesh)
                action = "sharded" if layout.padded_size(axis, size) == size else "padded and sharded"
                yield decide(group.name, axis, size, action, reason)
        elif axis is not None:
            yield decide(group.name, axis, None, "tokens sharded", reasons.tokens_reason(group, layout, sizes))
        else:
            first = next(iter(sizes[group.axis])) if group.axis else None
            reason = reasons.whole_reason(group, layout, rules=rules, mesh=mesh, sizes=sizes)
            yield decide(group.name, group.axis or group.length_axis, first, "replicated", reason)
    grouped = {BATCH, *(name for group in workload.groups for name in (group.axis, group.length_axis))}
    for axis in rules:
        if axis not in grouped and rules.alternatives(axis):
            action = "sharded" if layout.axes[axis] else "replicated"
            for size in sizes.get(axis, ()):
                yield decide("parameters", axis, size, action, reasons.other_reason(size, axis, layout, rules))
    action = "sharded" if layout.axes[BATCH] else "replicated"
    yield decide(BATCH, BATCH, len(workload.tokens), action, reasons.batch_reason(batching))
