"""The same items through one device and through many: rows, and gradients of all parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxenc
from jaxenc import packing
from jaxenc.layers.parameters import flatten
from jaxenc.packing import Budget
from sharding_rules import IndivisibleAxisError

MESHES = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (2, 4), (8, 1)]
# one that nothing divides, and one with two axes; where the suite runs on two Pythons, one of them leaves it at these
COVERING = ((1, 3), (2, 4))
every_mesh = pytest.mark.parametrize(
    "mesh_shape",
    [pytest.param(shape, marks=() if shape in COVERING else pytest.mark.cross) for shape in MESHES],
    ids=lambda shape: f"{shape[0]}x{shape[1]}",
)
STRATEGIES = [
    "tensor",
    "hybrid",
    "data",
    "replicate",
    {"attention": "replicate", "mlp": "tensor"},
    {"attention": "tensor", "mlp": "replicate", "projector": "replicate"},
    {"attention": "pad", "mlp": "pad"},
]
TOLERANCE = 1e-5


def encoders(folder, mesh_shape):
    """An encoder for everything different that the plan can do on this mesh."""
    mesh = jaxenc.make_mesh(data=mesh_shape[0], model=mesh_shape[1])
    seen = []
    for strategy in STRATEGIES:
        try:
            encoder = jaxenc.load(folder, mesh=mesh, dtype="float32", strategy=strategy)
        except IndivisibleAxisError:
            continue
        parts = {axis: encoder.plan.parts(axis) for axis in encoder.plan.axes}
        if parts not in seen:
            seen.append(parts)
            yield encoder


def layouts(encoder, tokens, whole):
    """The layouts of a batch with room for so many tokens, and an encoder for each: where both are in one batch, rows
    hold pieces of up to `whole` tokens."""
    plan, config = encoder.plan, encoder.config
    rows = plan.rows_parts
    share = packing.spread_unit(config.window, rows=rows, unit=config.unit)

    def first(made):
        """The first budget that divides."""
        return next(b for b in map(made, range(1, 500)) if packing.divides(sizes(b), plan.length_parts))

    def sizes(budget):
        return config.token_axes(budget, plan.length_parts)

    def only(*budgets):
        return jaxenc.Encoder(config, plan, encoder.params, dtype="float32", budgets=budgets)

    long = first(lambda k: Budget((-(-tokens // rows // config.unit) + whole // config.unit + k) * config.unit, rows))
    short = first(lambda k: Budget(whole + (k - 1) * config.unit, rows))
    spread = first(lambda k: Budget(0, rows, (-(-tokens // rows // share) + k) * share))
    yield "rows", only(long)
    if rows > 1:
        yield "length", only(spread)
        yield "rows and length", only(Budget(short.length, rows, spread.spread))


def rows_and_gradients(encoder, items):
    """The rows of each item, and the gradient of a weighted sum of them all by parameter: one batch, one program."""
    batch = encoder.pack(items)
    item, index = batch.rows.item, batch.rows.index

    def loss(params):
        rows = encoder.apply(params, batch)
        weights = jnp.cos((7.0 * item + 0.3 * index)[..., None] + jnp.arange(rows.shape[-1]))
        return jnp.sum(jnp.where(item[..., None] >= 0, rows * weights, 0)), rows

    # the same program, with less time spent on its machine code
    options = {"xla_backend_optimization_level": 0}
    slopes, rows = jax.jit(jax.grad(loss, has_aux=True), compiler_options=options)(encoder.params)
    return encoder.unpack(rows, batch), flatten(slopes)


def assert_same(got, expected, what, scale=None):
    """Within the tolerance of the largest value, or of the largest one of `scale`."""
    assert got.shape == expected.shape, what
    worst = np.abs(got - expected).max() / np.abs(expected if scale is None else scale).max()
    assert worst <= TOLERANCE, f"{what}: {worst:.1e}"


def check(folder, items, reference, mesh_shape, *, tokens, whole):
    """Every strategy and layout on a mesh against one device. Returns the strategies, and the layouts of "data"."""
    rows, slopes = reference
    strategies, tried = set(), []
    for encoder in encoders(folder, mesh_shape):
        strategy = encoder.plan.strategy
        strategies.add(strategy)
        *separate, both = layouts(encoder, tokens, whole)
        # the last has whole items and spread ones in it; where weights lie alike, it is enough
        for kind, single in separate if strategy in ("tensor", "hybrid", "data") else ():
            what = f"{strategy} on {mesh_shape}, {kind}"
            for item, expected, got in zip(items, rows, single.encode_items(items), strict=True):
                assert_same(got, expected, f"{what}: {item.name}")
        kind, single = both
        what = f"{strategy} on {mesh_shape}, {kind}"
        tried += [kind for kind, _ in (*separate, both)] if strategy == "data" else []
        together, gradients = rows_and_gradients(single, items)
        for item, expected, got in zip(items, rows, together, strict=True):
            assert_same(got, expected, f"{what}: {item.name}")
        for path, got in gradients.items():
            array, expected = np.asarray(got), slopes[path]
            true = tuple(slice(size) for size in expected.shape)
            # softmax does not see what all keys have in common: without rotary, that gradient is rounding alone
            scale = slopes[path.replace("key/bias", "query/bias")]
            assert_same(array[true], expected, f"{what}: gradient of {path}", scale)
            outside = array.copy()
            outside[true] = 0
            assert not outside.any(), f"{what}: {path}: the padding has a gradient, and would not stay zero"
    return strategies, tried
