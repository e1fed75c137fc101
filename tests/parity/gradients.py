"""Gradients of the parameters, as the file's tensors."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxenc

TOLERANCE = 2e-5  # of a tensor's largest gradient


def slopes(encoder: jaxenc.Encoder, items: Sequence[jaxenc.VisionItem], weights: Sequence[np.ndarray]) -> Any:
    """Of the sum of all rows times `weights`, by parameter."""
    batch = encoder.pack(items)
    slots = batch.rows
    placed = np.zeros((*slots.item.shape, weights[0].shape[1]), np.float32)
    for i, weight in enumerate(weights):
        placed[slots.item == i] = weight[slots.index[slots.item == i]]

    # the same program, with less time spent on its machine code
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def of(params: Any) -> Any:
        return jax.grad(lambda params: jnp.sum(encoder.apply(params, batch) * placed))(params)

    return of(encoder.params)


def assert_slopes_equal(ours: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Every tensor's, within the tolerance."""
    for name, slope in ours.items():
        # what all keys have in common moves no score: that gradient is rounding, beside the queries'
        scale = np.abs(expected[name.replace("k_proj.bias", "q_proj.bias")]).max()
        assert np.abs(slope - expected[name]).max() <= TOLERANCE * scale, name
