"""Products whose float32 sums stay short."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Terms that are added up in one go on a CPU. XLA's products there run all of them through one accumulator, and at 5,120
# terms err three times as much as PyTorch's, which add up blocks of a few hundred.
TERMS = 256


def short_sums(
    product: Callable[[Array, Array], Array], x: Array, y: Array, *, x_axis: int, y_axis: int, window: int = 1
) -> Array:
    """product(x, y); in float32 on a CPU, as a sum of products over blocks of the contracted axis.

    Args:
        product: any function that is a sum over `x_axis` of x, `y_axis` of y.
        x: of the compute dtype.
        y: of the compute dtype.
        x_axis: the contracted axis.
        y_axis: the contracted axis.
        window: terms that each index of the axis stands for.

    Returns:
        What `product` gives.
    """
    size, block = x.shape[x_axis], max(1, TERMS // window)

    def blocked(x: Array, y: Array) -> Array:
        def part(start: int) -> Array:
            stop = min(start + block, size)
            return product(
                jax.lax.slice_in_dim(x, start, stop, axis=x_axis), jax.lax.slice_in_dim(y, start, stop, axis=y_axis)
            )

        total = part(0)
        for start in range(block, size, block):
            total += part(start)
        return total

    if x.dtype == jnp.float32 and size > block:
        return jax.lax.platform_dependent(x, y, cpu=blocked, default=product)
    return product(x, y)


def contract(
    x: Float[Array, "*lead k"], kernel: Float[Array, "*out k"], *, parts: int = 1
) -> Float[Array, "*lead out"]:
    """The product x W^T with float32 accumulation, in short sums.

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

    return short_sums(product, x, kernel, x_axis=-1, y_axis=-1).sum(0)
