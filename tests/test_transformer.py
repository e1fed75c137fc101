"""The kinds of the transformer stack: each is its definition, on one device and divided over several."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict

import jaxenc
from jaxenc.layers.mlp import ACTIVATIONS, activated
from jaxenc.layers.parameters import Shard, declared
from jaxenc.layers.schedule import Schedule
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from sharding_rules import Parameter, Workload, resolve

PLAIN = TransformerConfig(2, 24, 3, 8, 40, 1e-6, activation="gelu_erf", fused_qkv=True)
KINDS = {
    "plain": PLAIN,
    "rms": replace(PLAIN, norm="rms"),
    "gated": replace(PLAIN, gated=True, activation="silu"),
    "apart": replace(PLAIN, fused_qkv=False, key_bias=False),
    "no biases": replace(PLAIN, qkv_bias=False, out_bias=False, mlp_bias=False, activation="quick_gelu"),
    "halves": replace(PLAIN, rotary_pairs="halves", activation="gelu_tanh"),
    "layer scale": replace(PLAIN, layer_scale=True),
    "head norm": replace(PLAIN, head_norm=True),
    "head norm apart": replace(PLAIN, head_norm=True, fused_qkv=False, norm="rms"),
}
TOKENS, ROWS, WINDOW = 24, 2, 6
SEGMENTS = np.array([[1] * 12 + [2] * 10 + [0] * 2, [3] * 24], np.int32)


def parameters(config):
    """Values for every parameter, none of them one or zero."""
    rng = np.random.default_rng(1)
    found = declared(nnx.eval_shape(lambda: stacked_blocks(config, dtype="float32")))
    return {path: (0.5 * rng.standard_normal(p.shape) + (p.initial == "ones"), p) for path, p in found.items()}


def inputs():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((ROWS, TOKENS, PLAIN.embed))
    angles = rng.uniform(0, 6, (ROWS, TOKENS, PLAIN.head_dim // 2))
    return x, np.cos(angles), np.sin(angles)


def ours(config, *, model=1, strategy="auto", windows=()):
    """The stack on a mesh; blocks in `windows` attend to stretches of WINDOW tokens only."""
    values = parameters(config)
    plan = resolve(
        {path: Parameter(p.shape, p.axes, p.dtype) for path, (_, p) in values.items()},
        mesh := jaxenc.make_mesh(model=model),
        rules=jaxenc.default_rules(mesh),
        workload=Workload((TOKENS,) * ROWS, config.work((TOKENS,) * ROWS, windows=True)),
        strategy=strategy,
    )
    placed = {
        path: jax.device_put(plan.pad(path, np.float32(v)), plan.sharding(path)) for path, (v, _) in values.items()
    }
    graph, state = nnx.split(nnx.eval_shape(lambda: stacked_blocks(config, dtype="float32")))
    x, cos, sin = (jnp.asarray(a, jnp.float32) for a in inputs())
    other = Schedule(jnp.asarray(stretches()), window=WINDOW)

    @jax.jit
    def run(params):
        nnx.replace_by_pure_dict(state, unflatten_dict(params, sep="/"))
        with jax.default_matmul_precision("highest"):
            return run_blocks(
                nnx.merge(graph, state),
                x,
                schedule=Schedule(jnp.asarray(SEGMENTS)),
                rotary=(cos, sin) if config.rotary_pairs == "halves" else None,
                shard=Shard(plan),
                others=(other, windows) if windows else None,
            )[0]

    return np.asarray(run(placed)), plan


def stretches():
    return SEGMENTS * 100 + np.arange(TOKENS) // WINDOW


def definition(config, *, windows=()):
    """The same in float64, block by block and head by head."""
    values = {path: v for path, (v, _) in parameters(config).items()}
    x, cos, sin = inputs()
    for layer in range(config.layers):
        p = {path: v[layer] for path, v in values.items()}
        segments = stretches() if layer in windows else SEGMENTS
        normed = norm(config, x, p, "attention_norm")
        if config.fused_qkv:
            kernel, bias = p["attention/qkv/kernel"], p.get("attention/qkv/bias", np.zeros(3))
            q, k, v = (np.einsum("bnd,hkd->bnhk", normed, kernel[i]) + bias[i] for i in range(3))
        else:
            q, k, v = (
                np.einsum("bnd,hkd->bnhk", normed, p[f"attention/{name}/kernel"])
                + p.get(f"attention/{name}/bias", np.zeros(()))
                for name in ("query", "key", "value")
            )
        if config.head_norm:
            q, k = (
                y / np.sqrt((y**2).mean(axis=(2, 3), keepdims=True) + config.eps) * p[f"attention/{name}_norm/scale"]
                for y, name in ((q, "query"), (k, "key"))
            )
        if config.rotary_pairs == "halves":
            q, k = (
                np.concatenate(
                    [a * cos[:, :, None] - b * sin[:, :, None], b * cos[:, :, None] + a * sin[:, :, None]], axis=-1
                )
                for a, b in (np.split(y, 2, axis=-1) for y in (q, k))
            )
        scores = np.einsum("bnhk,bshk->bhns", q, k) / math.sqrt(config.head_dim)
        weights = np.exp(scores) * (segments[:, None, :, None] == segments[:, None, None, :])
        y = np.einsum("bhns,bshk->bnhk", weights / weights.sum(axis=-1, keepdims=True), v)
        y = np.einsum("bnhk,dhk->bnd", y, p["attention/out/kernel"]) + p.get("attention/out/bias", 0)
        x = x + y * p.get("attention_scale", 1)
        hidden = norm(config, x, p, "mlp_norm")
        kernel, bias = p["mlp/up/kernel"], p.get("mlp/up/bias", 0)
        hidden = np.einsum("bnd,...fd->bn...f", hidden, kernel) + bias
        with jax.enable_x64():
            if config.gated:
                hidden = np.asarray(ACTIVATIONS[config.activation](hidden[:, :, 0])) * hidden[:, :, 1]
            else:
                hidden = np.asarray(ACTIVATIONS[config.activation](hidden))
        y = hidden @ p["mlp/down/kernel"].T + p.get("mlp/down/bias", 0)
        x = x + y * p.get("mlp_scale", 1)
    return x


def norm(config, x, p, name):
    if config.norm == "rms":
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.eps) * p[f"{name}/scale"]
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config.eps)
    return centred / spread * p[f"{name}/scale"] + p[f"{name}/bias"]


def assert_same(got, expected):
    real = SEGMENTS > 0
    assert np.abs(got - expected)[real].max() <= 1e-5 * np.abs(expected[real]).max()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_its_definition(kind):
    assert_same(ours(KINDS[kind])[0], definition(KINDS[kind]))


# 3 heads are divided over 3 devices, and padded to 4 on 2
@pytest.mark.parametrize(
    ("model", "strategy"), [(3, {"attention": "tensor", "mlp": "pad"}), (2, {"attention": "pad", "mlp": "tensor"})]
)
@pytest.mark.parametrize("kind", ["gated", "layer scale", "head norm", "head norm apart"])
def test_divided_and_padded_weights_give_the_same(kind, model, strategy):
    got, plan = ours(KINDS[kind], model=model, strategy=strategy)
    assert plan.parts("heads") == model
    assert_same(got, definition(KINDS[kind]))


@pytest.mark.parametrize("windows", [(0,), (1,), (0, 1)])
def test_each_layer_attends_by_its_own_schedule(windows):
    expected = definition(PLAIN, windows=windows)
    assert np.abs(expected - definition(PLAIN)).max() > 1e-2
    assert_same(ours(PLAIN, windows=windows)[0], expected)
    assert_same(ours(PLAIN, windows=windows, model=3, strategy={"attention": "tensor", "mlp": "pad"})[0], expected)


@pytest.mark.parametrize(
    ("name", "at_two"),
    # x Phi(x), its tanh approximation, x sigmoid(1.702 x), x sigmoid(x), at 2
    [("gelu_erf", 1.9544997), ("gelu_tanh", 1.9545977), ("quick_gelu", 1.9356585), ("silu", 1.7615942)],
)
def test_activations_are_the_named_functions(name, at_two):
    assert float(activated(jnp.float32(2.0), name)) == pytest.approx(at_two, rel=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_round_once(name):
    x = jnp.linspace(-4, 4, 1001, dtype=jnp.bfloat16)
    exact = activated(x.astype(jnp.float32), name)
    assert activated(x, name).dtype == jnp.bfloat16
    assert (activated(x, name) == exact.astype(jnp.bfloat16)).all()


def test_work_counts_three_products_of_a_gated_mlp():
    up_down, gated = (config.work((10,), windows=True)[1].flops[0] for config in (PLAIN, KINDS["gated"]))
    assert up_down == 2 * 2 * 2 * 10 * 24 * 40
    assert gated == 2 * 3 * 2 * 10 * 24 * 40


def test_a_norm_over_all_heads_is_summed_over_devices_beside_the_output():
    (attention, _) = KINDS["head norm"].work((10,), windows=True)
    assert attention.summed == (24, 2)
