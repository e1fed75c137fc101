"""Meshes around the encoder: what `jax.set_mesh` sets, and plans on meshes of other names, shapes and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxenc
from jaxenc import Budget
from jaxenc.layers.parameters import flatten
from tests.conftest import KIMI, QWEN
from tests.devices import eight

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ITEMS = {
    KIMI: [
        jaxenc.VisionItem(np.random.default_rng(n).standard_normal((4 * n, 588)).astype(np.float32), (1, 2, 2 * n))
        for n in (3, 5)
    ],
    QWEN: [jaxenc.AudioItem(np.random.default_rng(n).standard_normal((32, n)).astype(np.float32)) for n in (61, 130)],
}
BUDGETS = {KIMI: Budget(64, 8), QWEN: Budget(104, 8)}


def mesh_of(kind, *, devices=None, **shape):
    """A mesh whose axes are all of one kind, or each of its own."""
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    found = eight() if devices is None else devices
    size = int(np.prod([*shape.values()]))
    return Mesh(np.array(found[:size]).reshape(*shape.values()), tuple(shape), axis_types=kinds)


# what may be around an encoder on data=1, model=8
AROUND = {
    "the same": mesh_of(AUTO, data=1, model=8),
    "the same, Explicit": mesh_of(EXPLICIT, data=1, model=8),
    "another": mesh_of(AUTO, x=4, y=2),
    "another, Explicit": mesh_of(EXPLICIT, x=4, y=2),
    "half Explicit": mesh_of((EXPLICIT, AUTO), x=4, y=2),
}
FEWER = {"Auto": mesh_of(AUTO, x=4, devices=eight()[2:]), "Explicit": mesh_of(EXPLICIT, x=4)}


def made(config, mesh, **settings):
    return jaxenc.from_config(config, mesh=mesh, **{"dtype": "float32", "budgets": [BUDGETS[config]], **settings})


@pytest.fixture(scope="module")
def encoders():
    """One of each strategy, of the same two towers."""
    mesh = jaxenc.make_mesh(data=1, model=8)
    found = {
        "tensor": made(KIMI, mesh, strategy="tensor"),
        "hybrid": made(QWEN, mesh, strategy="hybrid"),
        "data": made(KIMI, mesh, strategy="data"),
        "one device": made(QWEN, jaxenc.make_mesh()),
        "bfloat16": made(QWEN, mesh, strategy="hybrid", dtype="bfloat16"),
    }
    assert dict(found["hybrid"].plan.mesh.shape) == {"data": 1, "model_batch": 2, "model": 4}
    return found


def loss_of(encoder, batch):
    def loss(params):
        rows = encoder.apply(params, batch)
        return jnp.sum(jnp.where((batch.rows.item >= 0)[..., None], rows, 0) ** 2)

    return loss


@pytest.fixture(scope="module")
def expected():
    """Rows, captured tokens and gradients on one device, without any set_mesh."""
    found = {}
    for config in (KIMI, QWEN):
        encoder = made(config, jaxenc.make_mesh())
        batch = encoder.pack(ITEMS[config])
        rows, captured = encoder.apply(encoder.params, batch, capture="all")
        gradient = jax.jit(jax.grad(loss_of(encoder, batch)))(encoder.params)
        found[config] = {
            "rows": encoder.unpack(rows, batch),
            "tokens": encoder.unpack_tokens(captured[1], batch),
            "gradient": {path: np.asarray(value) for path, value in flatten(gradient).items()},
        }
    return found


def assert_close(got, expected):
    got = np.asarray(got)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1e-3)


def assert_all_close(got, expected):
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other)


def assert_gradient(got, expected):
    got = flatten(got)
    assert got.keys() == expected.keys()
    scale = max(np.abs(value).max() for value in expected.values())
    for path, value in expected.items():
        # the gradient of a bias of the keys is rounding only, so each is held against the largest of all
        assert np.abs(np.asarray(got[path]) - value).max() <= 1e-5 * scale, path


def assert_applies(encoder, around, expected):
    """Rows and a captured block, and the caller's next step with them."""
    batch = encoder.pack(ITEMS[encoder.config])
    with jax.set_mesh(around):
        rows, captured = encoder.apply(encoder.params, batch, capture="all")
        sums = jnp.sum(rows, axis=(1, 2))
    assert_all_close(encoder.unpack(rows, batch), expected["rows"])
    assert_all_close(encoder.unpack_tokens(captured[1], batch), expected["tokens"])
    assert_close(sums, np.asarray(rows).sum((1, 2)))
    return rows


# --- inside jax.set_mesh

CASES = [
    ("hybrid", "the same"),
    ("hybrid", "the same, Explicit"),
    ("hybrid", "another"),
    ("hybrid", "half Explicit"),
    ("tensor", "another, Explicit"),
    ("data", "the same, Explicit"),
]


@pytest.mark.parametrize(("strategy", "around"), CASES)
def test_apply_gives_the_same_whatever_mesh_is_around(encoders, expected, strategy, around):
    encoder, mesh = encoders[strategy], AROUND[around]
    rows = assert_applies(encoder, mesh, expected[encoder.config])
    # rows are on a mesh of the caller's where its axes are Explicit, and elsewhere on the plan's
    assert rows.sharding.mesh == (mesh if EXPLICIT in mesh.axis_types else encoder.plan.mesh)
    # and the batch stays divided over the axes that both have
    parts = 8 if strategy == "data" else 1
    assert rows.sharding.shard_shape(rows.shape)[0] == rows.shape[0] // parts


@pytest.mark.parametrize(("strategy", "around"), [CASES[0], CASES[3], CASES[5]])
def test_gradients_outside_jit_are_the_same_whatever_mesh_is_around(encoders, expected, strategy, around):
    encoder = encoders[strategy]
    with jax.set_mesh(AROUND[around]):
        gradient = jax.grad(loss_of(encoder, encoder.pack(ITEMS[encoder.config])))(encoder.params)
    assert_gradient(gradient, expected[encoder.config]["gradient"])


@pytest.mark.parametrize(("strategy", "around"), [CASES[1], CASES[2]])
def test_gradients_inside_jit_are_the_same_whatever_mesh_is_around(encoders, expected, strategy, around):
    encoder = encoders[strategy]
    batch = encoder.pack(ITEMS[encoder.config])

    @jax.jit
    def rows_and_gradient(params, batch):
        return encoder.apply(params, batch), jax.grad(loss_of(encoder, batch))(params)

    with jax.set_mesh(AROUND[around]):
        rows, gradient = rows_and_gradient(encoder.params, batch)
    assert_all_close(encoder.unpack(rows, batch), expected[encoder.config]["rows"])
    assert_gradient(gradient, expected[encoder.config]["gradient"])


@pytest.mark.parametrize("around", [*AROUND, *FEWER])
def test_encode_warmup_and_with_params_ignore_the_mesh_around(encoders, expected, around):
    encoder = encoders["hybrid"]
    half = encoders["bfloat16"]
    with jax.set_mesh({**AROUND, **FEWER}[around]):
        other = encoder.with_params(encoder.params)
        assert_all_close(other.encode_items(ITEMS[QWEN]), expected[QWEN]["rows"])
        # with a cast, of arrays on the plan's mesh
        cast = half.with_params(encoder.params)
    for path, value in flatten(cast.params).items():
        assert value.sharding == half.plan.sharding(path), path
        np.testing.assert_array_equal(value, np.asarray(flatten(encoder.params)[path]).astype(jnp.bfloat16))


# --- other devices


@pytest.mark.parametrize("kind", FEWER)
@pytest.mark.parametrize("strategy", ["hybrid", "one device"])
def test_a_mesh_of_other_devices_is_no_matter_outside_jit_and_an_error_in_it(encoders, expected, strategy, kind):
    encoder = encoders[strategy]
    batch = encoder.pack(ITEMS[QWEN])
    own = r"model_batch=2, model=4" if strategy == "hybrid" else r"data=1, model=1"
    with jax.set_mesh(FEWER[kind]):
        assert_all_close(encoder.unpack(encoder.apply(encoder.params, batch), batch), expected[QWEN]["rows"])
        for call in (jax.jit(encoder.apply), jax.jit(jax.grad(lambda p, b: loss_of(encoder, b)(p)))):
            with pytest.raises(jaxenc.RulesError, match=rf"{own}\), the surrounding one \(x=4\): other devices"):
                call(encoder.params, batch)
        with pytest.raises(jaxenc.RulesError, match=r"outside that set_mesh.*or plan for the mesh that is set"):
            jax.grad(loss_of(encoder, batch))(encoder.params)


def test_as_many_other_devices_or_another_order_are_no_matter_outside_jit(expected):
    for devices, around in ((eight()[2:6], eight()[:4]), (eight(), eight()[::-1])):
        encoder = made(QWEN, jaxenc.make_mesh(model=len(devices), devices=devices))
        batch = encoder.pack(ITEMS[QWEN])
        with jax.set_mesh(mesh_of(EXPLICIT, model=len(devices), devices=around)):
            rows = encoder.apply(encoder.params, batch)
        assert_all_close(encoder.unpack(rows, batch), expected[QWEN]["rows"])


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_an_encoder_for_one_device_runs_where_its_parameters_have_been_put(encoders, expected, kind):
    encoder, mesh = encoders["one device"], mesh_of(kind, x=8)
    batch = encoder.pack(ITEMS[QWEN])
    params = jax.device_put(encoder.params, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        rows = jax.jit(encoder.apply)(params, batch)
    assert rows.sharding.mesh == mesh
    assert_all_close(encoder.unpack(rows, batch), expected[QWEN]["rows"])


def test_shard_map_takes_an_encoder_for_one_device_and_says_so_of_others(encoders, expected):
    batch, everywhere = encoders["hybrid"].pack(ITEMS[QWEN]), PartitionSpec()
    params = jax.tree.map(np.asarray, encoders["one device"].params)

    def mapped(encoder):
        whole = mesh_of(AUTO, x=8)
        return jax.jit(jax.shard_map(encoder.apply, mesh=whole, in_specs=everywhere, out_specs=everywhere))(
            params, batch
        )

    assert_all_close(encoders["hybrid"].unpack(mapped(encoders["one device"]), batch), expected[QWEN]["rows"])
    with pytest.raises(jaxenc.RulesError, match=r"model_batch=2, model=4\), the surrounding one \(x=8\).*shard_map"):
        mapped(encoders["hybrid"])


# --- plans on meshes of other names, shapes and devices


def rules_on(mesh, *, weights, batch):
    return jaxenc.default_rules(mesh).replace(
        **dict.fromkeys(("heads", "mlp", "projector_mlp", "stem_length", "projector_length"), weights), batch=batch
    )


MESHES = {
    "one axis": ({"model": 4}, None, 4),
    "fsdp and tensor": ({"fsdp": 2, "tensor": 4}, None, 4),
    "three axes": (
        {"replica": 2, "expert": 2, "tensor": 2},
        {"weights": (("expert", "tensor"),), "batch": "replica"},
        4,
    ),
    "some devices": ({"data": 1, "model": 4}, None, 4),
}


@pytest.mark.parametrize("name", MESHES)
def test_other_meshes_give_the_same_inside_an_explicit_mesh_too(expected, name):
    shape, rules, heads = MESHES[name]
    devices = eight()[2:6] if name == "some devices" else None
    mesh = mesh_of(AUTO, devices=devices, **shape)
    encoder = made(KIMI, mesh, strategy="tensor", rules=rules and rules_on(mesh, **rules))
    assert encoder.plan.parts("heads") == heads
    assert {d for leaf in jax.tree.leaves(encoder.params) for d in leaf.devices()} == {*mesh.devices.flat}
    if name in ("three axes", "some devices"):
        assert_all_close(encoder.encode_items(ITEMS[KIMI]), expected[KIMI]["rows"])
    assert_applies(encoder, mesh_of(EXPLICIT, devices=devices, **shape), expected[KIMI])
