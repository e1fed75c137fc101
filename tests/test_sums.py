"""Products against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxenc.layers.sums import contract


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.parametrize("terms", [1280, 5120])
def test_float32_products_err_as_little_as_short_sums_do(terms):
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((64, terms)).astype("f4"), rng.standard_normal((96, terms)).astype("f4")
    truth = x.astype("f8") @ kernel.astype("f8").T
    y = jax.jit(contract)(x, kernel)
    # PyTorch's error is 2.6e-7 at any length; one accumulator for all terms gives 6e-7 at 1,280 and 8e-7 at 5,120
    assert rms(y - truth) / rms(truth) < 3.5e-7


def test_a_length_that_is_no_multiple_of_the_block_loses_nothing():
    x, kernel = np.ones((2, 1100), "f4"), np.ones((3, 1100), "f4")
    np.testing.assert_array_equal(jax.jit(contract)(x, kernel), np.full((2, 3), 1100))


def test_several_axes_come_out_and_bfloat16_accumulates_in_float32():
    x, kernel = jnp.ones((2, 5, 1024), jnp.bfloat16), jnp.ones((3, 4, 1024), jnp.bfloat16)
    y = contract(x, kernel)
    assert y.shape == (2, 5, 3, 4)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, 1024.0)
