"""Problems for the resolver: any names, shapes, rules, work and meshes, most of them with an answer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding_rules import AxisRules, GroupWork, Parameter, Plan, Workload, resolve
from tests.devices import eight

MESH_AXES = ("data", "model", "fsdp", "tensor", "expert", "replica")
MESH_SIZES = [sizes for n in (1, 2, 3) for sizes in np.ndindex(*(9,) * n) if 0 < math.prod(sizes) <= 8]
STRATEGIES = ("auto", "auto", "auto", "tensor", "hybrid", "data", "replicate")
NAMES = st.text("abcdeéπ_ '<", min_size=1, max_size=5)
GROUPS = ("attention", "mlp", "stem", "x", "'a", "a b")


@dataclass(frozen=True)
class Problem:
    """The arguments of `resolve`."""

    parameters: Mapping[str, Parameter]
    mesh: Mesh
    rules: AxisRules
    workload: Workload
    settings: Mapping[str, Any]

    def plan(self, **changes: Any) -> Plan:
        """Resolve it; the speed is always that of the CPU, so that an abstract mesh has the same plan."""
        arguments = {"mesh": self.mesh, "rules": self.rules, "workload": self.workload, "device": "cpu"}
        arguments |= self.settings | changes
        return resolve(arguments.pop("parameters", self.parameters), arguments.pop("mesh"), **arguments)

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without its devices."""
        return AbstractMesh(
            tuple(self.mesh.shape.values()), tuple(self.mesh.shape), axis_types=tuple(self.mesh.axis_types)
        )

    def replace(self, **changes: Any) -> "Problem":
        """The same problem but for some of it."""
        return replace(self, **changes)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One to three axes over some of the eight devices in any order, Auto or Explicit or both."""
    sizes = draw(st.sampled_from(MESH_SIZES))
    names = tuple(draw(st.permutations(MESH_AXES)))[: len(sizes)]
    devices = draw(st.permutations(eight()))[: math.prod(sizes)]
    kinds = tuple(draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])) for _ in sizes)
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=kinds)


def rule(axes: tuple[str, ...], *, whole: bool = True) -> st.SearchStrategy[Any]:
    """None if `whole`, an axis, alternatives, axes together."""
    if not axes:
        return st.none()
    alone = st.sampled_from(axes)
    together = st.lists(alone, min_size=1, max_size=2, unique=True).map(tuple)
    alternatives = st.lists(alone | together, min_size=1, max_size=3).map(tuple)
    return st.one_of(*([st.none()] if whole else []), alone, alternatives)


@st.composite
def workloads(draw: st.DrawFn, *, weights: list[str], lengths: list[str]) -> Workload:
    """Up to four groups on some of these weight axes, or on none, and up to six items."""
    tokens = tuple(draw(st.lists(st.integers(0, 60), max_size=6)))
    length_of = {axis: draw(st.sampled_from(lengths)) for axis in weights}  # the groups of an axis share their tokens
    groups = []
    for name in draw(st.permutations(GROUPS))[: draw(st.integers(0, 4))]:
        axis = draw(st.sampled_from([*weights, None]))
        linear, quadratic = draw(st.floats(0.1, 10)), draw(st.sampled_from([0.0, 0.0, 0.1]))
        flops = tuple(linear * n + quadratic * n * n for n in tokens)
        groups.append(
            GroupWork(
                name,
                axis,
                length_of[axis] if axis else draw(st.sampled_from(lengths)),
                flops,
                unit=draw(st.sampled_from([1, 1, 4, 13])),
                layers=draw(st.sampled_from([1, 3])),
                paddable=draw(st.booleans()),
                summed=draw(st.sampled_from([(), (8,), (8, 1)])),
                returned=draw(st.sampled_from([0, 8])),
                shared=draw(st.sampled_from([0, 16])),
                live=draw(st.sampled_from([(), flops])),
            )
        )
    return Workload(tokens, tuple(groups))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A problem; now and then the rules put two dimensions of a parameter on one mesh axis."""
    mesh = draw(meshes())
    # one mesh axis or more for the weights, what is left for everything else
    cut = draw(st.integers(0, len(mesh.axis_names)))
    model, free = mesh.axis_names[:cut], mesh.axis_names[cut:]
    salt = draw(NAMES)
    names = [f"{salt}{index}" for index in draw(st.permutations(range(8)))]
    weights, lengths, others = names[:2], names[2:4], names[4:]
    workload = draw(workloads(weights=weights, lengths=lengths))

    size = st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 24, 25, 40, 63, 119])
    sizes = {name: draw(st.lists(size, min_size=1, max_size=2)) for name in [*weights, *others]}
    needed = [group.axis for group in workload.groups if group.axis]
    parameters = {}
    for index in range(len(needed) + draw(st.integers(0, 3))):
        # of the weights' axes one: two are on the same mesh axis, mostly
        first = needed[index : index + 1] or draw(st.lists(st.sampled_from(weights), max_size=1))
        axes = draw(st.permutations(first + draw(st.lists(st.sampled_from([*others, None]), max_size=2, unique=True))))
        shape = tuple(draw(st.sampled_from(sizes[axis] if axis else [1, 5])) for axis in axes)
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
        parameters[f"block/{index}"] = Parameter(shape, tuple(axes), dtype)

    rules = {name: draw(rule(model, whole=False)) for name in weights}
    rules |= {name: draw(rule(model)) for name in lengths}
    rules |= {name: draw(rule(free) if draw(st.integers(0, 9)) else rule(mesh.axis_names)) for name in others}
    rules["batch"] = draw(rule(free) if draw(st.integers(0, 9)) else rule(mesh.axis_names))

    choice = st.sampled_from(["tensor", "pad", "replicate"])
    one = draw(st.fixed_dictionaries({}, optional={group.axis or "": choice for group in workload.groups}))
    mixture = {g.name: one[g.axis or ""] for g in workload.groups if (g.axis or "") in one}
    mixture = {n: "tensor" if c == "pad" and not _paddable(workload, n) else c for n, c in mixture.items()}
    settings = {
        "strategy": mixture if mixture and draw(st.booleans()) else draw(st.sampled_from(STRATEGIES)),
        "layout": draw(st.sampled_from(["auto", "auto", "rows", "length"])),
        "memory_limit": draw(st.sampled_from([None, None, None, 100, 1000, 10_000])),
        "name": draw(NAMES),
    }
    if settings["strategy"] == "auto":
        settings["mm_encoder_tp_mode"] = draw(st.sampled_from([None, None, "weights", "data"]))
    return Problem(parameters, mesh, AxisRules(**rules), workload, settings)


def _paddable(workload: Workload, name: str) -> bool:
    axis = next(group.axis for group in workload.groups if group.name == name)
    return axis is not None and all(group.paddable for group in workload.groups if group.axis == axis)
