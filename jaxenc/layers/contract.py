"""Products whose float32 sums stay short."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Terms that are added up in one go on a CPU. XLA's products there run all of them through one accumulator, and at 5,120
# terms err three times as much as PyTorch's, which add up blocks of a few hundred.
TERMS = 512


def contract(
    x: Float[Array, "*lead k"], kernel: Float[Array, "*out k"], *, parts: int = 1
) -> Float[Array, "*lead out"]:
    """The product x W^T with float32 accumulation; in float32 on a CPU, in blocks of at most 512 terms.

    Args:
        x: of the compute dtype.
        kernel: of the compute dtype.
        parts: devices that share the contracted axis; each has blocks of its own, so that nothing moves between them.

    Returns:
        float32, the kernel's leading axes last.
    """
    x, kernel = (array.reshape(*array.shape[:-1], parts, -1) for array in (x, kernel))

    def product(x: Array, kernel: Array) -> Array:
        # the parts are a batch of products here, so that each device adds its blocks up before any are exchanged
        contracted, batch = ((x.ndim - 1,), (kernel.ndim - 1,)), ((x.ndim - 2,), (kernel.ndim - 2,))
        return jax.lax.dot_general(x, kernel, (contracted, batch), preferred_element_type=jnp.float32)

    def blocked(x: Array, kernel: Array) -> Array:
        total = product(x[..., :TERMS], kernel[..., :TERMS])
        for start in range(TERMS, x.shape[-1], TERMS):
            total += product(x[..., start : start + TERMS], kernel[..., start : start + TERMS])
        return total

    if x.dtype == jnp.float32 and x.shape[-1] > TERMS:
        return jax.lax.platform_dependent(x, kernel, cpu=blocked, default=product).sum(0)
    return product(x, kernel).sum(0)
