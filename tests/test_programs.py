"""How programs are compiled on CPU: which products they take, and layers in a loop or one after the other."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxenc
from jaxenc import programs
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


def products_by_ynn(encoder, budget):
    encoder.warmup([budget])
    return "__ynn_fusion" in encoder.compiled[budget].as_text()


def test_float32_products_come_from_eigen_but_those_of_few_tokens_where_vectors_are_wide(config, monkeypatch):
    monkeypatch.setattr(programs, "_wide_vectors", lambda: True)
    encoder = encoder_of(config, budgets=[SMALL, LARGE])
    assert products_by_ynn(encoder, SMALL), "XLA no longer uses it: drop the compiler option"
    assert not products_by_ynn(encoder, LARGE)
    monkeypatch.setattr(programs, "_wide_vectors", lambda: False)
    assert not products_by_ynn(encoder_of(config, budgets=[SMALL]), SMALL)


def test_several_devices_and_bfloat16_take_what_xla_takes(config):
    mesh = jaxenc.make_mesh(data=1, model=2)
    assert encoder_of(config, mesh=mesh, budgets=[LARGE])._programs.options(LARGE) == {}
    assert encoder_of(config, "bfloat16", budgets=[LARGE])._programs.options(LARGE) == {}


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux says what its CPU has")
def test_which_vectors_this_cpu_has_is_found_out():
    assert programs._wide_vectors() == ("avx512f" in Path("/proc/cpuinfo").read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_one_after_the_other_give_what_the_loop_gives(config, pictures, dtype, monkeypatch):
    in_loop = encoder_of(config, dtype, budgets=[SMALL])
    assert not in_loop._programs.apart(SMALL)  # its layers are too small to be worth it
    expected = in_loop.encode_items(pictures)
    monkeypatch.setattr(programs, "APART_BYTES", 1)
    apart = encoder_of(config, dtype, budgets=[SMALL])
    assert apart._programs.apart(SMALL)
    for rows, one in zip(apart.encode_items(pictures), expected, strict=True):
        np.testing.assert_allclose(rows, one, atol=1e-5 if dtype == "float32" else 2e-2)
    # nothing is as large as all layers together: they are not put into one array first
    stacked = f"[{config.layers},{config.mlp},{config.embed}]"
    assert stacked in in_loop.compiled[SMALL].as_text()
    assert stacked not in apart.compiled[SMALL].as_text()


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
