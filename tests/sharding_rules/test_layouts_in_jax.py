"""A plan never asks JAX for what JAX refuses, and what it predicts is what JAX holds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from sharding_rules import IndivisibleAxisError
from tests.devices import eight

SHAPES = [(1,), (3,), (7,), (8,), (1, 8), (2, 4), (4, 2), (8, 1), (1, 6), (2, 3), (2, 2, 2), (1, 2, 4), (2, 1, 3)]
NAMES = {1: ("model",), 2: ("data", "model"), 3: ("data", "model", "expert")}
CHOICES = ["auto", "tensor", "hybrid", "data", "replicate", {"attention": "replicate"}, {"mlp": "replicate"}]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from(SHAPES),
    heads=st.integers(1, 25),
    mlp=st.integers(1, 40),
    projector=st.integers(1, 12),
    units=st.lists(st.integers(1, 50), max_size=12),
    strategy=st.sampled_from(CHOICES),
    kind=st.sampled_from([AxisType.Auto, AxisType.Explicit]),
)
def test_jax_accepts_every_plan_and_heads_are_never_cut(tower, shape, heads, mlp, projector, units, strategy, kind):
    devices = np.array(eight()[: math.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, NAMES[len(shape)], axis_types=(kind,) * len(shape))
    small = tower(heads=heads, mlp=mlp, projector=projector, units=tuple(units), rules=tower().rules.for_mesh(mesh))
    try:
        plan = small.plan(mesh, strategy=strategy)
    except IndivisibleAxisError:
        assert strategy not in ("auto", "data", "replicate")
        return

    assert plan.flops_ratio >= 1 - 1e-9
    assert plan.rows_parts * max(plan.parts("heads"), plan.parts("mlp")) <= mesh.size
    held = 0
    values = {}
    for path, parameter in small.parameters.items():
        sharding = plan.sharding(path)
        value = np.arange(math.prod(parameter.shape), dtype="float32").reshape(parameter.shape).astype(jnp.bfloat16)
        placed = jax.device_put(value, sharding)
        called = jax.make_array_from_callback(value.shape, sharding, lambda index, value=value: value[index])
        assert placed.sharding == called.sharding == sharding
        shard = placed.addressable_shards[0].data
        held += shard.nbytes
        for name, whole, part in zip(parameter.axes, parameter.shape, shard.shape, strict=True):
            assert part * plan.parts(name) == whole
            assert name not in ("head_dim", "embed", "layers") or part == whole
        values[path] = placed
    assert held == plan.param_bytes_per_device

    shardings = {path: plan.sharding(path) for path in values}
    if units[:1] < [5]:  # compiling is the slow part
        out = jax.jit(
            lambda tree: jax.tree.map(lambda x: x + 1, tree), in_shardings=(shardings,), out_shardings=shardings
        )
        for path, value in out(values).items():
            assert (np.asarray(value) == np.asarray(values[path]) + 1).all()


@pytest.mark.parametrize(
    ("shape", "heads", "strategy"), [((1, 8), 20, "hybrid"), ((2, 4), 12, "tensor"), ((1, 6), 25, "data")]
)
def test_a_transformer_block_computes_the_same_under_every_plan(tower, shape, heads, strategy):
    small = tower(heads=heads, mlp=heads * 6)
    mesh = Mesh(np.array(eight()[: math.prod(shape)]).reshape(shape), ("data", "model"))
    plan = small.plan(mesh)
    assert plan.strategy == strategy
    random = np.random.default_rng(0)
    weights = {
        path: random.normal(size=parameter.shape[1:]).astype("float32")
        for path, parameter in small.parameters.items()
        if path.startswith("layers/")
    }
    x = random.normal(size=(plan.rows_parts, 5, 8)).astype("float32")

    def block(xp, weights, x, constrain):
        up, down = weights["layers/mlp/up/kernel"], weights["layers/mlp/down/kernel"]
        query, out = weights["layers/attention/query/kernel"], weights["layers/attention/out/kernel"]
        h = xp.einsum("bnd,hkd->bnhk", x, query) + weights["layers/attention/query/bias"]
        h = constrain(xp.tanh(h), "batch", "length", "heads", "head_dim")
        x = constrain(x + xp.einsum("bnhk,dhk->bnd", h, out), "batch", "length", "embed")
        f = constrain(xp.tanh(xp.einsum("bnd,fd->bnf", x, up)), "batch", "length", "mlp")
        return constrain(x + xp.einsum("bnf,df->bnd", f, down), "batch", "length", "embed")

    expected = block(np, weights, x, lambda x, *names: x)
    specs = {path: jax.P(*plan.parameter_specs[path][1:]) for path in weights}
    placed = {path: jax.device_put(value, jax.NamedSharding(plan.mesh, specs[path])) for path, value in weights.items()}
    out = jax.jit(lambda weights, x: block(jnp, weights, x, plan.constrain))(placed, x)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())
    assert out.sharding.shard_shape(out.shape) == (1, 5, 8)
