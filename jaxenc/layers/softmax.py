"""The sum of values by the softmax of scores, in the one form that XLA computes fastest on CPU.

From jax 0.12 on, XLA makes one loop of the products and all that is between them, and the scores stay in the cache:
half the time. It does so where nothing but the last product is asked for, and where what masks is added.
"""

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Dot = Callable[..., Array]  # (subscripts of einsum, two arrays) -> float32
MASKED = -1e30  # added to a score it is what comes of any: -inf less -inf would be NaN where all are masked
# XLA on CPU multiplies a batch of matrices as fast as single ones since
BATCHED = (0, 12)
# Scores of a head. Before that, from here on, it multiplies one head's matrices after the other's faster
ALONE = 2**19
# Terms. Before that, it adds those of batched matrices one to the other: sums of more err more than PyTorch's
TERMS = 512


def mask(own: Int[Array, "*b n"], others: Int[Array, "*b s"]) -> Float[Array, "*b n s"]:
    """What is added to scores: nothing where a key has the query's segment, else what masks it.

    An array of its own: else every head would compare the segments again, in every pass over its scores.
    """
    same = own[..., :, None] == others[..., None, :]
    return jax.lax.optimization_barrier(jnp.where(same, 0.0, MASKED).astype(jnp.float32))


def with_ones(value: Float[Array, "*b d"]) -> Float[Array, "*b columns"]:
    """Values with columns of ones behind, whose product with the weights is their sum, as they were rounded.

    Processors multiply eight columns at a time, and more, so that these few cost nothing where a pass over the weights
    would.
    """
    return jnp.pad(value, [*[(0, 0)] * (value.ndim - 1), (0, 8 - value.shape[-1] % 8)], constant_values=1)


def scores(
    dot: Dot, query: Float[Array, "h n d"], key: Float[Array, "h s d"], bias: Float[Array, "n s"]
) -> Float[Array, "h n s"]:
    """What the softmax is taken of: q k^T / sqrt(d) + bias."""
    return dot("hqd,hkd->hqk", query, key) * query.shape[-1] ** -0.5 + bias


def weighted(
    dot: Dot,
    query: Float[Array, "h n d"],
    key: Float[Array, "h s d"],
    value: Float[Array, "h s columns"],
    bias: Float[Array, "n s"],
) -> Float[Array, "h n columns"]:
    """exp(scores - the largest of them) v: of `with_ones(v)` the last column is what to divide the others by.

    Args:
        dot: makes the products.
        query: of the compute dtype.
        key: the same.
        value: the same.
        bias: what `mask` gives.
    """

    def summed(*given: Array, parts: int = 1) -> Array:
        query, key, value, bias = given
        made = scores(dot, query, key, bias)
        made -= jax.lax.stop_gradient(made.max(axis=-1, keepdims=True))
        cut = zip(jnp.array_split(made, parts, axis=-1), jnp.array_split(value, parts, axis=-2), strict=True)
        return reduce(jnp.add, (dot("hqk,hkd->hqd", jnp.exp(x).astype(v.dtype), v) for x, v in cut))

    def before_batched(*given: Array) -> Array:
        in_parts = partial(summed, parts=-(-value.shape[-2] // TERMS))
        if bias.size < ALONE:
            return in_parts(*given)
        return jax.lax.map(lambda head: in_parts(*(x[None] for x in head), given[-1])[0], given[:-1])

    if jax.__version_info__ >= BATCHED:
        return summed(query, key, value, bias)
    return jax.lax.platform_dependent(query, key, value, bias, cpu=before_batched, default=summed)
