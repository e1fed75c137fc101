"""Linear maps and convolutions in PyTorch's order: what the file holds, reshaped."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxenc.layers.parameters import named_parameter

_parts: ContextVar[int] = ContextVar("_parts", default=1)


@contextmanager
def products_in_parts(parts: int) -> Iterator[None]:
    """Linear maps traced within make their channels in so many products of equal size, where they divide so."""
    token = _parts.set(parts)
    try:
        yield
    finally:
        _parts.reset(token)


class Linear(nnx.Module):
    """y = W x + b between named axes; the kernel is `[*out, *in]`, as PyTorch stores it.

    Several axes on either side keep heads a dimension of their own: `[heads, head_dim, embed]` in and
    `[embed, heads, head_dim]` out.
    Products accumulate, and the bias is added, in float32 (under tensor parallelism that is after the reduction, once).
    """

    def __init__(self, out: Mapping[str, int], inputs: Mapping[str, int], *, bias: bool = True, dtype: DTypeLike):
        """Declares the kernel and the bias.

        Args:
            out: name -> size of the axes that come out.
            inputs: name -> size of the axes that go in (the last ones of `x`).
            bias: whether there is one.
            dtype: of the parameters, and of the result.
        """
        self.contracted = len(inputs)
        self.kernel = named_parameter({**out, **inputs}, "normal", dtype=dtype)
        self.bias = named_parameter(out, "zeros", dtype=dtype) if bias else None

    def __call__(self, x: Float[Array, "b ..."]) -> Float[Array, "b ..."]:
        """Contracts the last axes of `x` with the kernel's; the result's trailing axes are `out`."""
        kernel = self.kernel[...]
        out, lead = kernel.shape[: -self.contracted], x.shape[: -self.contracted]
        parts = math.gcd(_parts.get(), math.prod(out))
        if parts == 1:
            x_axes = tuple(range(x.ndim - self.contracted, x.ndim))
            kernel_axes = tuple(range(kernel.ndim - self.contracted, kernel.ndim))
            y = jax.lax.dot_general(x, kernel, ((x_axes, kernel_axes), ((), ())), preferred_element_type=jnp.float32)
        else:
            kernels = kernel.reshape(parts, math.prod(out) // parts, -1)
            # all tokens for every part: without a batch of them XLA makes one product again
            tokens = jnp.broadcast_to(x.reshape(math.prod(lead), -1), (parts, math.prod(lead), kernels.shape[-1]))
            y = jnp.einsum("pok,pnk->pon", kernels, tokens, preferred_element_type=jnp.float32)
            y = y.reshape(math.prod(out), -1).T.reshape(*lead, *out)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(kernel.dtype)


class Conv(nnx.Module):
    """A convolution over the trailing axes of `[n, channels_in, *space]`, with kernel `[out, channels_in, *window]`."""

    def __init__(
        self,
        channels_in: int,
        out: tuple[str, int],
        *,
        window: Mapping[str, int],
        stride: int,
        dtype: DTypeLike,
    ):
        """Declares kernel and bias.

        Args:
            channels_in: channels that go in.
            out: logical name and number of the channels that come out.
            window: name -> size of the axes it slides over; all encoders here have 3, and padding 1 on both sides.
            stride: along every axis.
            dtype: of the parameters, and of the result.
        """
        self.stride = stride
        self.space = len(window)
        axes = {**dict([out]), "channels_in": channels_in, **window}
        self.kernel = named_parameter(axes, "normal", dtype=dtype)
        self.bias = named_parameter(dict([out]), "zeros", dtype=dtype)

    def __call__(self, x: Float[Array, "n channels_in ..."]) -> Float[Array, "n out ..."]:
        """Convolves with stride `stride`."""
        kernel = self.kernel[...]
        y = jax.lax.conv_general_dilated(
            x, kernel, (self.stride,) * self.space, ((1, 1),) * self.space, preferred_element_type=jnp.float32
        )
        bias = self.bias[...].astype(jnp.float32).reshape((-1,) + (1,) * self.space)
        return (y + bias).astype(kernel.dtype)


def conv_length(length: int, *, stride: int = 2) -> int:
    """Positions that come out of a width-3, pad-1 convolution over `length` positions."""
    return (length - 1) // stride + 1


def conv_flops(channels_in: int, channels: int, *, window: int, positions: int) -> float:
    """FLOPs (two a multiply-add) of a convolution: `window` taps an input channel, `positions` outputs a channel."""
    return 2.0 * math.prod((channels_in, channels, window, positions))
