"""How programs are compiled on CPU: which products they take, and layers in a loop or one after the other."""

import re

import jax
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import jaxenc
from jaxenc import programs
from jaxenc.layers import linear
from jaxenc.layers.linear import Conv, Linear, Matrices, products_of_matrices
from jaxenc.layers.mlp import MLP
from jaxenc.layers.parameters import Shard
from jaxenc.models import qwen3_omni_audio
from jaxenc.packing import Budget

SMALL, LARGE = Budget(256, 1), Budget(1024, 1)


def encoder_of(config, dtype="float32", **settings):
    return jaxenc.from_config(config, dtype=dtype, **settings)


@pytest.fixture(scope="module")
def config(kimi_folder):
    return jaxenc.load(kimi_folder, dtype="float32").config


@pytest.fixture
def pictures(config):
    rng = np.random.default_rng(1)
    grids = [(1, 4, 6), (1, 2, 2), (2, 8, 4)]
    return [
        jaxenc.VisionItem(rng.standard_normal((t * h * w, 3 * config.patch**2), np.float32), (t, h, w))
        for t, h, w in grids
    ]


def products_in(text, kind):
    """The lines of a program that compute products so."""
    return [line for line in text.splitlines() if kind in line and re.search("dot_general|conv_general", line)]


@pytest.fixture
def narrow_registers(monkeypatch):
    """Where XLA's own sums are not good enough."""
    monkeypatch.setattr(programs, "sum_error", lambda: 1.2e-6)


def test_xlas_own_products_are_taken_where_their_sums_are_good(config, monkeypatch):
    assert 1e-8 < programs.sum_error() < 5e-6
    monkeypatch.setattr(programs, "sum_error", lambda: 4.1e-7)
    for wide, taken in ((programs.WIDE, False), (config.embed, True)):  # and channels are many
        monkeypatch.setattr(programs, "WIDE", wide)
        encoder = encoder_of(config, budgets=[LARGE])
        encoder.warmup()
        assert bool(products_in(encoder.compiled[LARGE].as_text(), "__ynn_fusion")) == taken


@pytest.mark.usefixtures("narrow_registers")
def test_float32_products_come_from_eigen_in_two_parts_where_tokens_are_few(config):
    encoder = encoder_of(config, budgets=[SMALL, LARGE])
    encoder.warmup()
    for budget, parts in ((SMALL, 2), (LARGE, 1)):
        assert not products_in(encoder.compiled[budget].as_text(), "__ynn_fusion")
        half = f"f32[{parts},{config.mlp // parts},{budget.tokens}]" if parts > 1 else f"{budget.tokens},{config.mlp}]"
        assert half in encoder.compiled[budget].as_text()
    plain = jax.jit(lambda x: x @ x.T).lower(jax.ShapeDtypeStruct((256, 1280), "float32")).compile().as_text()
    assert products_in(plain, "__ynn_fusion"), "XLA no longer uses it: drop the compiler option"


@pytest.mark.usefixtures("narrow_registers")
def test_several_devices_and_bfloat16_take_what_xla_takes(config):
    assert encoder_of(config, mesh=jaxenc.make_mesh(data=1, model=2))._programs.options() == {}
    assert encoder_of(config, "bfloat16")._programs.options() == {}


def test_products_of_matrices_are_the_same_products():
    layer = Linear({"heads": 3, "head_dim": 4}, {"mlp": 5, "embed": 2}, dtype="float32")
    rng = np.random.default_rng(0)
    layer.kernel[...] = rng.standard_normal((3, 4, 5, 2), np.float32)
    layer.bias[...] = rng.standard_normal((3, 4), np.float32)
    x = rng.standard_normal((2, 7, 5, 2), np.float32)
    expected = np.einsum("bnme,hdme->bnhd", x, layer.kernel[...]) + layer.bias[...]
    # 8 do not divide 12: 4 are made
    for matrices in (None, *map(Matrices, (1, 2, 4, 8)), Matrices(tokens=4)):
        with products_of_matrices(matrices):
            np.testing.assert_allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_tokens_a_few_at_a_time_are_the_same(gated, config):
    mlp = MLP(("embed", 6), ("mlp", 10), ("out", 4), activation="silu", gated=gated, dtype="float32")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 7, 6), np.float32)
    shard, product = Shard(jaxenc.plan(config, mesh=jaxenc.make_mesh(data=1))), linear._product
    expected = mlp(x, length="length", shard=shard)
    for tokens, at_once in ((3, 3), (5, 5), (6, 5), (7, 14), (100, 14)):  # 14 are not more than twice 7
        shapes = set()

        def seen(x, kernel, shapes=shapes, **settings):
            shapes.add(x.shape)
            return product(x, kernel, **settings)

        with products_of_matrices(Matrices(tokens=tokens)), pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "_product", seen)
            np.testing.assert_allclose(mlp(x, length="length", shard=shard), expected, atol=1e-6)
        assert shapes == {(at_once, 6), (at_once, 10)}


@pytest.mark.parametrize(("stride", "channels"), [(1, 3), (2, 3), (2, 1)])
def test_convolutions_as_sums_of_taps_are_the_same(stride, channels):
    layer = Conv(channels, ("filters", 4), window={"kernel_h": 3, "kernel_w": 3}, stride=stride, dtype="float32")
    rng = np.random.default_rng(0)
    kernel = layer.kernel[...] = rng.standard_normal((4, channels, 3, 3), np.float32)
    bias = layer.bias[...] = rng.standard_normal(4, np.float32)
    x = rng.standard_normal((2, 7, 6, channels), np.float32)
    windows = sliding_window_view(np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]), (3, 3), axis=(1, 2))
    expected = np.einsum("nhwcij,ocij->nhwo", windows[:, ::stride, ::stride], kernel) + bias
    for matrices in (None, Matrices(taps=True)):
        with products_of_matrices(matrices):
            np.testing.assert_allclose(layer(x), expected, atol=1e-5)


@pytest.mark.usefixtures("narrow_registers")
def test_on_one_cpu_kernels_are_matrices_and_what_eigen_does_not_compute_takes_convolutions_apart(config):
    def lowered(config, dtype, **settings):
        encoder = encoder_of(config, dtype, **settings)
        return encoder._programs.lower(encoder.budgets[0], encoder.params).as_text()

    heads_out = "contracting_dims = [2, 3] x [1, 2]"
    assert heads_out not in lowered(config, "bfloat16")
    assert heads_out in lowered(config, "bfloat16", mesh=jaxenc.make_mesh(data=2))
    audio = qwen3_omni_audio.Config(layers=1, embed=64, heads=4, mlp=96, channels=16, out=32)
    for dtype, convolutions in (("bfloat16", 1), ("float32", 3)):  # the first is of one channel
        assert lowered(audio, dtype).count("stablehlo.convolution") == convolutions


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_one_after_the_other_give_what_the_loop_gives(config, pictures, dtype, monkeypatch):
    in_loop = encoder_of(config, dtype, budgets=[LARGE])
    assert not in_loop._programs.apart(LARGE)  # its layers are too small to be worth it
    expected = in_loop.encode_items(pictures)
    monkeypatch.setattr(programs, "APART_BYTES", 1)
    apart = encoder_of(config, dtype, budgets=[LARGE])
    assert apart._programs.apart(LARGE)
    for rows, one in zip(apart.encode_items(pictures), expected, strict=True):
        np.testing.assert_allclose(rows, one, atol=1e-5 if dtype == "float32" else 2e-2)
    # nothing is as large as all layers together: they are not put into one array first
    stacked = f"[{config.layers},{config.mlp},{config.embed}]"
    assert stacked in in_loop.compiled[LARGE].as_text()
    assert stacked not in apart.compiled[LARGE].as_text()


def test_large_batches_and_several_devices_keep_the_loop(config, monkeypatch):
    monkeypatch.setattr(programs, "APART_BYTES", 1)
    assert not encoder_of(config)._programs.apart(Budget(programs.APART_TOKENS + 256, 1))
    assert not encoder_of(config, mesh=jaxenc.make_mesh(data=2))._programs.apart(SMALL)


def test_layers_apart_share_the_memory_of_the_stacked_ones(config):
    encoder = encoder_of(config)
    stacked = encoder.params["layers"]["mlp"]["up"]["kernel"]
    layers = encoder._programs.layers_apart(encoder.params)["layers"]["mlp"]["up"]["kernel"]
    assert len(layers) == config.layers
    begin = stacked.unsafe_buffer_pointer()
    size = stacked.nbytes // config.layers
    assert size % 64 == 0  # what is not aligned is copied
    assert [layer.unsafe_buffer_pointer() for layer in layers] == [begin + i * size for i in range(config.layers)]


def test_trained_parameters_are_what_layers_apart_hold(config, pictures, monkeypatch):
    monkeypatch.setattr(programs, "APART_BYTES", 1)
    encoder = encoder_of(config, budgets=[SMALL])
    before = encoder.encode_items(pictures)
    doubled = encoder.with_params(jax.tree.map(lambda leaf: 2 * leaf, encoder.params))
    assert not np.allclose(doubled.encode_items(pictures)[0], before[0])
    np.testing.assert_array_equal(encoder.encode_items(pictures)[0], before[0])
