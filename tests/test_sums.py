"""Products against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxenc.layers.sums import average, contract


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.parametrize("terms", [1280, 5120])
def test_float32_products_err_no_more_than_pytorchs(terms):
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((64, terms)).astype("f4"), rng.standard_normal((96, terms)).astype("f4")
    truth = x.astype("f8") @ kernel.astype("f8").T
    y = jax.jit(contract)(x, kernel)
    # PyTorch's error is 2.6e-7 at any length; one accumulator for all terms gives 6e-7 at 1,280 and 8e-7 at 5,120
    assert rms(y - truth) / rms(truth) < 3.5e-7


def test_averages_over_many_values_err_no_more_than_pytorchs():
    rng = np.random.default_rng(0)
    weights, value = rng.random((1, 2, 64, 1500)).astype("f4"), rng.standard_normal((1, 2, 1500, 16)).astype("f4")
    truth = np.einsum("bhqs,bhsk->bhqk", weights.astype("f8"), value.astype("f8"))
    y = jax.jit(average)(weights, value)
    # one accumulator for all terms gives 6e-7
    assert rms(y - truth) / rms(truth) < 3.5e-7


def test_several_axes_come_out_and_bfloat16_accumulates_in_float32():
    x, kernel = jnp.ones((2, 5, 1024), jnp.bfloat16), jnp.ones((3, 4, 1024), jnp.bfloat16)
    y = contract(x, kernel)
    assert y.shape == (2, 5, 3, 4)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, 1024.0)
