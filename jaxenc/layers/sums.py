"""Products in float32 that err no more than they must.

XLA's CPU products run all terms of a float32 sum through one accumulator: at 1,280 terms they err 2.5 times as much as
PyTorch's, at 5,120 three times. Elsewhere, and in bfloat16, both are alike, and plain products are used.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TERMS = 256  # that are added up in one go


def contract(x: Float[Array, "b ..."], kernel: Float[Array, "..."]) -> Float[Array, "b ..."]:
    """The product x W^T with float32 accumulation.

    On a CPU in float32 it is written as a convolution of width one: the same sum, which XLA hands to a library that
    adds up blocks of a few hundred terms. It takes 5 % longer than the plain product; to add up blocks here took 30 %.

    Args:
        x: [b, ..., k], of the compute dtype.
        kernel: [..., k], of the compute dtype.

    Returns:
        float32, [b, ..., ...]: the kernel's leading axes last.
    """

    def product(x: Array, kernel: Array) -> Array:
        contracted = ((x.ndim - 1,), (kernel.ndim - 1,))
        return jax.lax.dot_general(x, kernel, (contracted, ((), ())), preferred_element_type=jnp.float32)

    def convolution(x: Array, kernel: Array) -> Array:
        if kernel.ndim > 3:
            # q, k and v one by one: flattened together, heads would not be the major axis, and their kernel be gathered
            return jnp.stack([convolution(x, one) for one in kernel], axis=x.ndim - 1)
        rows = x.reshape(x.shape[0], -1, x.shape[-1])
        window = kernel.reshape(-1, kernel.shape[-1], 1)
        y = jax.lax.conv_general_dilated(rows, window, (1,), "VALID", dimension_numbers=("NWC", "OIW", "NWC"))
        return y.reshape(*x.shape[:-1], *kernel.shape[:-1])

    if x.dtype == jnp.float32:
        return jax.lax.platform_dependent(x, kernel, cpu=convolution, default=product)
    return product(x, kernel)


def average(
    weights: Float[Array, "b heads q s"], value: Float[Array, "b heads s head_dim"]
) -> Float[Array, "b heads q head_dim"]:
    """Weighted sums of values with float32 accumulation; in float32 on a CPU, over blocks of 256 values.

    Args:
        weights: of the compute dtype.
        value: of the compute dtype.

    Returns:
        float32.
    """

    def product(weights: Array, value: Array) -> Array:
        return jnp.einsum("bhqs,bhsk->bhqk", weights, value, preferred_element_type=jnp.float32)

    def blocked(weights: Array, value: Array) -> Array:
        total = product(weights[..., :TERMS], value[:, :, :TERMS])
        for start in range(TERMS, value.shape[2], TERMS):
            total += product(weights[..., start : start + TERMS], value[:, :, start : start + TERMS])
        return total

    if weights.dtype == jnp.float32 and value.shape[2] > TERMS:
        return jax.lax.platform_dependent(weights, value, cpu=blocked, default=product)
    return product(weights, value)
