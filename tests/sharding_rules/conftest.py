"""A small transformer tower, by names and shapes only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from jax.sharding import AbstractMesh

from sharding_rules import AxisRules, GroupWork, Parameter, Plan, Workload, resolve

RULES = AxisRules(
    layers=None,
    embed=None,
    patch=None,
    heads="model",
    head_dim=None,
    mlp="model",
    projector_mlp="model",
    projector_in=None,
    batch="data",
    length=None,
    stem_length="model",
    projector_length="model",
)


@dataclass(frozen=True)
class Tower:
    """`heads` heads of 4, `mlp` columns, 2 layers; attention, mlp, stem, projector work 4 : 8 : 1 : 1 per token."""

    heads: int = 20
    mlp: int = 5120
    projector: int = 64
    units: tuple[int, ...] = (1,) * 3360
    rules: AxisRules = RULES
    name: str = "tower"
    groups: tuple[str, ...] = field(default=("attention", "mlp", "stem", "projector"))

    @property
    def parameters(self) -> dict[str, Parameter]:
        """bfloat16 parameters by path."""

        def parameter(*dimensions: tuple[str, int]) -> Parameter:
            return Parameter(tuple(size for _, size in dimensions), tuple(name for name, _ in dimensions), "bfloat16")

        layers, embed, heads, head_dim = ("layers", 2), ("embed", 8), ("heads", self.heads), ("head_dim", 4)
        return {
            "stem/kernel": parameter(embed, ("patch", 12)),
            "layers/attention/query/kernel": parameter(layers, heads, head_dim, embed),
            "layers/attention/query/bias": parameter(layers, heads, head_dim),
            "layers/attention/out/kernel": parameter(layers, embed, heads, head_dim),
            "layers/mlp/up/kernel": parameter(layers, ("mlp", self.mlp), embed),
            "layers/mlp/down/kernel": parameter(layers, embed, ("mlp", self.mlp)),
            "projector/up/kernel": parameter(("projector_mlp", self.projector), ("projector_in", 8)),
        }

    @property
    def workload(self) -> Workload:
        """Work of the groups in `groups`."""
        groups = {
            "attention": GroupWork(
                "attention", "heads", "length", tuple(4.0 * n for n in self.units), layers=2, paddable=True, summed=(8,)
            ),
            "mlp": GroupWork(
                "mlp", "mlp", "length", tuple(8.0 * n for n in self.units), layers=2, paddable=True, summed=(8,)
            ),
            "stem": GroupWork("stem", None, "stem_length", tuple(1.0 * n for n in self.units)),
            "projector": GroupWork(
                "projector", "projector_mlp", "projector_length", tuple(1.0 * n for n in self.units)
            ),
        }
        return Workload(self.units, tuple(groups[name] for name in self.groups))

    def plan(self, mesh: Any, **settings: Any) -> Plan:
        """Resolve on a mesh, or on an abstract mesh of these sizes."""
        if isinstance(mesh, Mapping):
            mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
        settings = {"rules": self.rules, "workload": self.workload, "name": self.name} | settings
        return resolve(self.parameters, mesh, **settings)


@pytest.fixture
def tower(request: pytest.FixtureRequest) -> Callable[..., Tower]:
    """Makes towers, each named after the test, so that each test has its own warning."""
    return lambda **changes: replace(Tower(name=request.node.name), **changes)
