"""What holds for any names, shapes, meshes, rules and work: a plan that JAX takes as it is, or a documented error."""

import contextlib
import json
import logging
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

from sharding_rules import AxisRules, GroupWork, IndivisibleAxisError, Parameter, Plan, RulesError, Workload
from sharding_rules.batching import batchings, deal, longest_first
from tests.sharding_rules.problems import Problem, problems

AUTO = ("tensor", "hybrid", "data")
STRATEGIES = (*AUTO, "replicate")
COUNTS = st.lists(st.integers(0, 200), max_size=12)


def examples(number):
    """So many of them, each as long as it takes on a busy machine."""
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, logger="sharding_rules")


def plan_or_documented_error(problem: Problem) -> Plan | None:
    """The plan; or None, once the error has been found to be one that is documented, and justified."""
    try:
        return problem.plan()
    except IndivisibleAxisError as error:
        assert_indivisible(problem, str(error))
        event("indivisible")
    except RulesError as error:
        assert_doubly_used(problem, str(error))
        event("doubly used")
    except ValueError as error:
        assert_over_the_limit(problem, str(error))
        event("over the limit")
    return None


def in_pool(problem, plan):
    """The candidates that the strategy asked for allows: all of auto's, or those of the one that was taken."""
    pool = AUTO if by_auto(problem, plan) else (plan.strategy,)
    return [candidate for candidate in plan.candidates if candidate.cost and candidate.strategy in pool]


def by_auto(problem, plan):
    mode = problem.settings.get("mm_encoder_tp_mode")
    return problem.settings["strategy"] == "auto" and mode != "data" and not (mode and plan.strategy == "tensor")


def assert_indivisible(problem, text):
    """Only for a strategy that has something to divide, and each way out that is named is one."""
    strategy = problem.settings["strategy"]
    assert strategy not in ("auto", "data", "replicate")
    ways = [eval(quoted) for quoted in re.findall(r"^  (['\"].+?): ", text, re.MULTILINE)]
    assert {"data", "replicate", "auto"} <= set(ways)
    for way in ways:
        assert problem.plan(strategy=way, memory_limit=None).strategy == way or way == "auto"


def assert_over_the_limit(problem, text):
    """The message is about the limit, and without it everything that could be chosen is over it."""
    limit = problem.settings["memory_limit"]
    assert f"fits the memory limit of {limit:,} bytes" in text
    held = [candidate.cost.param_bytes_per_device for candidate in in_pool(problem, problem.plan(memory_limit=None))]
    assert min(held) > limit


def assert_doubly_used(problem, text):
    """The message names a parameter and two of its dimensions, and the rules do allow both the same mesh axis."""
    found = re.search(
        r"^(block/\d): the rules put axes (.*) both on mesh axis '(\w+)' \(dimensions (\d) and (\d)", text
    )
    path, pair, mesh_axis, *dimensions = found.groups()
    names = [problem.parameters[path].axes[int(dimension)] for dimension in dimensions]
    assert pair == " and ".join(map(repr, names))
    assert int(dimensions[0]) < int(dimensions[1])
    for name in names:
        assert any(mesh_axis in axes for axes in problem.rules.alternatives(name))


@examples(100)
@given(problems())
def test_a_problem_has_a_plan_that_keeps_its_promises_or_a_documented_error(problem):
    plan = plan_or_documented_error(problem)
    assume(plan is not None)
    event(f"plan {plan.strategy if plan.strategy in STRATEGIES else 'mixed'}")
    assert_shapes(problem, plan)
    assert_costs(problem, plan)
    assert_batching(problem, plan)
    assert_choice(problem, plan)
    assert_deterministic(problem, plan)


def assert_shapes(problem, plan):
    """Dimensions divide, mesh axes come from the rules, and only what may be padded is, with zeros at the end."""
    allowed = {name: {axis for axes in problem.rules.alternatives(name) for axis in axes} for name in problem.rules}
    mixture = "" if plan.strategy in STRATEGIES else plan.strategy
    assert set(plan.mesh.devices.flat) == set(problem.mesh.devices.flat)
    assert set(plan.mesh.axis_types) <= {AxisType.Auto}
    for path, parameter in problem.parameters.items():
        shape, spec = plan.shape(path), plan.parameter_specs[path]
        shard = plan.sharding(path).shard_shape(shape)
        assert len(spec) == len(shape) == len(parameter.shape)
        used = [axis for axes in spec for axis in ((axes,) if isinstance(axes, str) else axes or ())]
        assert len(set(used)) == len(used)
        for name, true, padded, part, axes in zip(parameter.axes, parameter.shape, shape, shard, spec, strict=True):
            if name is None:
                assert axes is None
                assert part == padded == true
                continue
            assert set((axes,) if isinstance(axes, str) else axes or ()) <= allowed[name]
            assert part * plan.parts(name) == padded
            if padded != true:
                users = [group for group in problem.workload.groups if group.axis == name]
                assert users
                assert all(group.paddable for group in users)
                assert true < padded < true + plan.parts(name)
                assert padded - true < 0.02 * true or any(f"{group.name}=pad" in mixture for group in users)
        value = np.ones(parameter.shape, np.int8)
        padded = plan.pad(path, value)
        assert padded.shape == shape
        assert padded[tuple(map(slice, value.shape))].all()
        assert padded.sum() == value.sum()


def assert_costs(problem, plan):
    """No less than an equal share, no more than everything on each device; and it is the work that is there."""
    workload, cost, size = problem.workload, plan.cost, plan.mesh.size
    works = {group.name: math.fsum(group.flops) for group in workload.groups}
    waste = {group.name: 1 + plan.layout.waste(group.axis) for group in workload.groups}
    total = math.fsum(works.values())
    assert cost.flops_ideal == pytest.approx(total / size)
    if not total:
        assert cost.flops_ratio == cost.flops_bound == 1
        return
    assert 1 - 1e-9 <= cost.flops_ratio <= size * max(waste.values()) + 1e-9
    assert cost.flops_ratio == pytest.approx(cost.flops_per_device / cost.flops_ideal)
    assert cost.flops_per_device * size >= (1 - 1e-9) * math.fsum(works[name] * waste[name] for name in works)
    tokens = sum(workload.tokens)
    assert 1 - 1e-9 <= cost.padding_ratio <= plan.rows_parts + 1e-9
    if not plan.batching.spread:
        # whole items: the busiest device by adding up
        rows = [
            math.fsum(
                works_of(group, row) * (waste[group.name] / plan.layout.group_parts(group.name))
                if plan.layout.divided.get(group.name) != group.length_axis
                else works_of(group, row) * share(units(group, workload, row), plan.parts(group.length_axis))
                for group in workload.groups
            )
            for row in plan.batching.rows
        ]
        assert cost.flops_per_device == pytest.approx(max(rows))
        fullest = max(sum(workload.tokens[item] for item in row) for row in plan.batching.rows)
        assert cost.padding_ratio == pytest.approx(fullest * plan.rows_parts / tokens)
    # with equal units of equal cost there is a bound, and it is one: n units on D devices leave one with ceil(n / D)
    if len({group.unit for group in workload.groups}) == 1:
        unit = workload.groups[0].unit
        each = [math.ceil(n / unit) for n in workload.tokens]
        even = Workload(
            workload.tokens, tuple(GroupWork(g.name, g.axis, g.length_axis, tuple(each), unit) for g in workload.groups)
        )
        predicted = plan.predict(even, plan.batching)
        assert predicted.flops_ratio >= predicted.flops_bound * (1 - 1e-9)


def works_of(group, row):
    return math.fsum(group.flops[item] for item in row)


def units(group, workload, row):
    return sum(math.ceil(workload.tokens[item] / group.unit) for item in row)


def share(count, parts):
    return math.ceil(count / parts) / count if count else 0


def assert_batching(problem, plan):
    """Every item once, whole or spread; all of them one way where that is asked for."""
    items, asked = len(problem.workload.tokens), problem.settings["layout"]
    assert len(plan.batching.rows) == plan.rows_parts
    assert_each_item_once(plan.batching, items)
    whole = sum(map(len, plan.batching.rows))
    assert asked != "rows" or whole == items
    assert asked != "length" or plan.rows_parts == 1 or whole == 0


def assert_each_item_once(batching, items):
    assert Counter([*batching.spread, *(item for row in batching.rows for item in row)]) == Counter(range(items))


def assert_choice(problem, plan):
    """What was asked for, within the limit; and of what auto may choose from, a fair one or one with the least work."""
    strategy, limit = problem.settings["strategy"], problem.settings["memory_limit"]
    assert limit is None or plan.param_bytes_per_device <= limit
    assert [candidate.cost for candidate in plan.candidates if candidate.chosen] == [plan.cost]
    if isinstance(strategy, str) and strategy != "auto":
        assert plan.strategy == strategy
    fitting = [c for c in in_pool(problem, plan) if limit is None or c.cost.param_bytes_per_device <= limit]
    best = min(candidate.cost.flops_ratio for candidate in fitting)
    assert plan.flops_ratio <= max(1.10, 1.01 * best) + 1e-9
    if limit is not None:
        fair = [candidate.cost for candidate in fitting if candidate.cost.flops_ratio <= max(1.10, 1.01 * best)]
        assert plan.cost.seconds == min(cost.seconds for cost in fair)


def assert_deterministic(problem, plan):
    """Again the same; and the same in another order of parameters and rules, and without devices."""
    assert problem.plan() == plan
    assert str(problem.plan()) == str(plan)
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
    assert plan.diff(problem.plan()) == "no difference"
    rules = AxisRules(**dict(reversed(list(problem.rules.items()))))
    parameters = problem.parameters
    if len({parameter.dtype for parameter in parameters.values()}) == 1:  # the first one's decides the speed
        parameters = dict(reversed(list(parameters.items())))
    flipped = problem.plan(rules=rules, parameters=parameters)
    assert flipped.parameter_specs == plan.parameter_specs
    assert flipped.layout.padded == plan.layout.padded
    assert flipped.cost == plan.cost
    abstract = problem.plan(mesh=problem.abstract_mesh)
    assert abstract.to_json() == plan.to_json()
    assert abstract.parameter_specs == plan.parameter_specs


@examples(25)
@given(problems(), st.integers(1, 3), st.booleans())
def test_jax_takes_every_plan_as_it_is(problem, multiple, in_context):
    plan = plan_or_documented_error(problem)
    assume(plan is not None)
    shardings = {path: plan.sharding(path) for path in problem.parameters}
    values = {
        path: np.arange(math.prod(parameter.shape)).reshape(parameter.shape).astype(parameter.dtype)
        for path, parameter in problem.parameters.items()
    }
    padded = {path: plan.pad(path, value) for path, value in values.items()}

    placed = {path: jax.device_put(value, shardings[path]) for path, value in padded.items()}
    for path, value in padded.items():
        called = jax.make_array_from_callback(value.shape, shardings[path], value.__getitem__)
        assert placed[path].sharding == called.sharding == shardings[path]
        assert called.shape == plan.shape(path)
    held = Counter(dict.fromkeys(problem.mesh.devices.flat, 0))
    for value in placed.values():
        held.update({shard.device: shard.data.nbytes for shard in value.addressable_shards})
    assert set(held.values()) == {plan.param_bytes_per_device}
    assert len(held) == problem.mesh.size

    # activations of whatever names the plan has a spec for; a fixed dimension of 1 beside them
    activations = []
    for group in problem.workload.groups:
        for names in [("batch", group.length_axis, None), ("batch", group.axis), (group.length_axis,)]:
            try:
                spec = plan.spec(*names)
            except RulesError as error:
                assert "both use mesh axis" in str(error)  # noqa: PT017
                continue
            shape = tuple(1 if name is None else multiple * plan.parts(name) for name in names)
            activations.append((names, shape, NamedSharding(plan.mesh, spec)))

    def work(params):
        return params, [plan.constrain(jax.numpy.zeros(shape) + 1, *names) for names, shape, _ in activations]

    jitted = jax.jit(work, in_shardings=(shardings,), out_shardings=(shardings, None))
    with jax.set_mesh(problem.mesh) if in_context else contextlib.nullcontext():
        if in_context and activations and plan.mesh.size > 1 and AxisType.Explicit in problem.mesh.axis_types:
            with pytest.raises(ValueError, match="has Explicit axes, the plan's"):
                jitted(placed)
            return
        out, constrained = jitted(placed)
    for path, value in out.items():
        assert value.sharding == shardings[path]
        np.testing.assert_array_equal(np.asarray(value), padded[path])
    for got, (_, shape, sharding) in zip(constrained, activations, strict=True):
        assert plan.mesh.size == 1 or got.sharding.is_equivalent_to(sharding, len(shape))
        assert got.sharding.shard_shape(shape) == sharding.shard_shape(shape)
        assert (np.asarray(got) == 1).all()


@examples(40)
@given(problems(), st.data())
def test_what_does_not_divide_is_refused_where_jax_would_replicate_it(problem, data):
    try:
        plan = problem.plan(strategy="auto", memory_limit=None)
    except RulesError:
        assume(False)
    divided = [name for name in plan.axes if plan.parts(name) > 1]
    assume(divided)
    name = data.draw(st.sampled_from(divided))
    size = data.draw(st.integers(1, 30).filter(lambda size: size % plan.parts(name)))
    with pytest.raises(IndivisibleAxisError) as error:
        jax.eval_shape(lambda: plan.constrain(jax.numpy.zeros((2, size)), None, name))
    assert f"axis {name!r} (dimension 1 of {[2, size]})" in str(error.value)
    assert f"Make it a multiple of {plan.parts(name)}." in str(error.value)


# one thing wrong: what the error has to name


def rename(parameter, old, new):
    return Parameter(parameter.shape, tuple(new if name == old else name for name in parameter.axes), parameter.dtype)


def unknown_axis(problem, data):
    _, name = data.draw(st.sampled_from(named_axes(problem)))
    rules = AxisRules(**{other: rule for other, rule in problem.rules.items() if other != name})
    first = next(path for path, parameter in problem.parameters.items() if name in parameter.axes)
    return problem.replace(rules=rules), [f"{first}: there is no rule for axis {name!r}"]


def unknown_length_axis(problem, data):
    group = data.draw(st.sampled_from(problem.workload.groups))
    rules = AxisRules(**{other: rule for other, rule in problem.rules.items() if other != group.length_axis})
    first = next(g for g in problem.workload.groups if g.length_axis == group.length_axis)
    return problem.replace(rules=rules), [f"group {first.name!r}: there is no rule for axis {group.length_axis!r}"]


def unknown_mesh_axis(problem, data):
    name = data.draw(st.sampled_from(list(problem.rules)))
    rule = data.draw(st.sampled_from(["modle", ("modle",), (("modle", problem.mesh.axis_names[0]), None)[:1]]))
    mesh = ", ".join(f"{axis}={size}" for axis, size in problem.mesh.shape.items())
    parts = [f"rule {name}={rule!r} names mesh axis 'modle'", f"the mesh ({mesh}) does not have"]
    return problem.replace(rules=problem.rules.replace(**{name: rule})), parts


def one_dimension_twice(problem, data):
    axis = data.draw(st.sampled_from(problem.mesh.axis_names))
    parameters = {"twice": Parameter((8, 840, 840), ("a", "b", "c"), "float32"), **problem.parameters}
    rules = problem.rules.replace(a=None, b=axis, c=axis, batch=None)
    # of no group's axes: neither gives way
    groups = tuple(GroupWork(g.name, None, "tokens", g.flops) for g in problem.workload.groups)
    parts = [
        "twice: the rules put axes 'b' and 'c' both on",
        f"mesh axis {axis!r} (dimensions 1 and 2 of [8, 840, 840]",
    ]
    workload = Workload(problem.workload.tokens, groups)
    settings = problem.settings | {"strategy": "auto"}
    wrong = problem.replace(parameters=parameters, rules=rules.replace(tokens=None), workload=workload)
    return wrong.replace(settings=settings), parts


def batch_in_a_parameter(problem, data):
    path, name = data.draw(st.sampled_from(named_axes(problem)))
    parameters = {**problem.parameters, path: rename(problem.parameters[path], name, "batch")}
    return problem.replace(parameters=parameters), [f"{path}: axis 'batch' is for activations"]


def tokens_in_a_parameter(problem, data):
    group = data.draw(st.sampled_from(problem.workload.groups))
    parameters = {**problem.parameters, "position": Parameter((840,), (group.length_axis,), "float32")}
    axis = problem.mesh.axis_names[0]
    first = next(g for g in problem.workload.groups if g.length_axis == group.length_axis)
    parts = [f"position: axis {group.length_axis!r} is the tokens' of group {first.name!r}", f"({axis!r})"]
    return problem.replace(parameters=parameters, rules=problem.rules.replace(**{group.length_axis: axis})), parts


def lost_group(problem, data):
    group = data.draw(st.sampled_from([group for group in problem.workload.groups if group.axis]))
    parameters = {path: rename(parameter, group.axis, None) for path, parameter in problem.parameters.items()}
    first = next(g for g in problem.workload.groups if g.axis == group.axis)
    return problem.replace(parameters=parameters), [f"group {first.name!r}: no parameter has its axis {group.axis!r}"]


def two_kinds_of_tokens(problem, data):
    group = data.draw(st.sampled_from([group for group in problem.workload.groups if group.axis]))
    other = GroupWork("other", group.axis, "tokens", group.flops)
    workload = Workload(problem.workload.tokens, (*problem.workload.groups, other))
    rules = problem.rules.replace(tokens=problem.mesh.axis_names[0])
    first = next(g for g in workload.groups if g.axis == group.axis)
    return problem.replace(workload=workload, rules=rules), [f"groups {first.name!r} and 'other' share weight axis"]


def two_choices_for_one_axis(problem, data):
    group = data.draw(st.sampled_from([group for group in problem.workload.groups if group.axis]))
    other = GroupWork("other", group.axis, group.length_axis, group.flops)
    workload = Workload(problem.workload.tokens, (*problem.workload.groups, other))
    settings = problem.settings | {"strategy": {"other": "replicate"}, "mm_encoder_tp_mode": None}
    return problem.replace(workload=workload, settings=settings), [
        " and 'other' share weight axis",
        "give both the same",
    ]


def named_axes(problem):
    return [(path, name) for path, p in problem.parameters.items() for name in p.axes if name]


@examples(80)
@given(problems(), st.data())
def test_what_does_not_fit_together_is_an_error_that_names_both_places(problem, data):
    spoilers = [unknown_mesh_axis, one_dimension_twice]
    spoilers += [unknown_axis, batch_in_a_parameter] if named_axes(problem) else []
    spoilers += [unknown_length_axis, tokens_in_a_parameter] if problem.workload.groups else []
    weighted = any(group.axis for group in problem.workload.groups)
    spoilers += [lost_group, two_kinds_of_tokens, two_choices_for_one_axis] if weighted else []
    spoil = data.draw(st.sampled_from(spoilers))
    event(spoil.__name__)
    wrong, parts = spoil(problem, data)
    with pytest.raises(RulesError) as error:
        wrong.plan()
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (3, -1)}, "an item has -1 tokens"),
        ({"tokens": (3, 0)}, "group 'g': FLOPs for an item of no tokens"),
        ({"flops": (1.0, math.inf)}, "group 'g': FLOPs have to be finite"),
        ({"flops": (1.0, math.nan)}, "group 'g': FLOPs have to be finite"),
        ({"flops": (1.0, -2.0)}, "group 'g': FLOPs have to be finite and not negative"),
        ({"live": (1.0, -2.0)}, "group 'g': live elements have to be"),
        ({"flops": (1.0,)}, "group 'g': 1 FLOPs for 2 items"),
        ({"unit": 0}, "group 'g': unit=0"),
        ({"layers": 0}, "layers=0"),
        ({"name": "a=b"}, "group 'a=b': a name has neither"),
        ({"name": "a,b"}, "group 'a,b': a name has neither"),
    ],
)
def test_work_that_cannot_be_is_refused(changes, message):
    work = {"flops": (1.0, 2.0)} | changes
    tokens, name = work.pop("tokens", (3, 4)), work.pop("name", "g")
    with pytest.raises(ValueError, match=message):
        Workload(tokens, (GroupWork(name, None, "length", **work),))


# batching


@examples(100)
@given(COUNTS, st.integers(1, 16))
def test_dealt_units_are_as_even_as_one_item_and_none_is_lost(units, parts):
    dealt = deal(units, parts)
    assert dealt.shape == (len(units), parts)
    assert dealt.sum(axis=1).tolist() == units
    assert (
        (dealt == np.array(units, int)[:, None] // parts) | (dealt == -(-np.array(units, int)[:, None] // parts))
    ).all()
    together = dealt.sum(axis=0)
    assert together.max() - together.min() <= 1


@examples(100)
@given(COUNTS, st.integers(1, 16), st.sampled_from(["auto", "rows", "length"]))
def test_every_batching_has_each_item_once(sizes, parts, layout):
    found = list(batchings(sizes, parts, layout=layout))
    assert found
    assert len(set(found)) == len(found)
    for batching in found:
        assert len(batching.rows) == parts
        assert_each_item_once(batching, len(sizes))
        assert min((sizes[item] for item in batching.spread), default=math.inf) >= max(
            (sizes[item] for row in batching.rows for item in row), default=-math.inf
        )
        items, places = batching.whole
        assert [(item, place) for place, row in enumerate(batching.rows) for item in row] == list(
            zip(items.tolist(), places.tolist(), strict=True)
        )
    assert layout == "length" or any(not batching.spread for batching in found)
    assert layout == "rows" or parts == 1 or len(found) > 1 or layout == "length" or sizes_are_small(sizes, parts)


def sizes_are_small(sizes, parts):
    return parts * max(sizes, default=0) <= 0.05 * sum(sizes)


@examples(100)
@given(COUNTS, st.integers(1, 16))
def test_the_longest_first_are_within_the_largest_of_an_equal_share(sizes, parts):
    loads = [sum(sizes[item] for item in row) for row in longest_first(sizes, parts)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / parts + max(sizes, default=0) * (1 - 1 / parts) + 1e-9


@examples(100)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32]),
    st.integers(1, 32),
    st.integers(1, 4000),
    st.floats(0, 0.01),
)
def test_the_work_is_fair_wherever_a_share_is_ten_units(tower, tokens, devices, heads, mlp, quadratic):
    groups = (
        GroupWork("attention", "heads", "length", tuple(n + quadratic * n * n for n in tokens), 4, 2, True, (8,)),
        GroupWork("mlp", "mlp", "length", tuple(8.0 * n for n in tokens), 1, 2, True, (8,)),
        GroupWork("stem", None, "stem_length", tuple(1.0 * n for n in tokens), 4),
        GroupWork("projector", "projector_mlp", "projector_length", tuple(2.0 * n for n in tokens), 4),
    )
    small = tower(heads=heads, mlp=mlp)
    plan = small.plan({"data": 1, "model": devices}, workload=Workload(tuple(tokens), groups))
    if sum(math.ceil(n / 4) for n in tokens) >= 10 * devices:
        assert plan.flops_ratio <= 1.10
