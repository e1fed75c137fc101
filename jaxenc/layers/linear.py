"""Linear maps and convolutions in PyTorch's order: what the file holds, reshaped."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxenc.layers.parameters import named_parameter

PAD = (1, 1)  # of every convolution here


@dataclass(frozen=True)
class Matrices:
    """How linear maps and convolutions are written as products of matrices, where a platform computes these faster.

    Axes that are merged into one cannot be divided over devices each by itself, so this is for one device.

    Attributes:
        parts: a linear map makes its channels in so many products of equal size, where they divide so.
        taps: a convolution is a sum of products, one for every element of its window.
        tokens: a linear map or an MLP takes so many at a time, where there are more than twice as many.
    """

    parts: int = 1
    taps: bool = False
    tokens: int | None = None


_matrices: ContextVar[Matrices | None] = ContextVar("_matrices", default=None)


@contextmanager
def products_of_matrices(matrices: Matrices | None) -> Iterator[None]:
    """What is traced within is written so; None for products of arrays with all their axes."""
    token = _matrices.set(matrices)
    try:
        yield
    finally:
        _matrices.reset(token)


def by_tokens(compute: Callable[[Array], Array], x: Array, *, trailing: int = 1) -> Array:
    """What `compute` makes of [..., channels], on so many tokens at a time as `Matrices` says.

    Args:
        compute: token by token.
        x: any axes of tokens, then its channels.
        trailing: axes of channels.
    """
    matrices, lead = _matrices.get(), x.shape[: x.ndim - trailing]
    tokens = math.prod(lead)
    if matrices is None or matrices.tokens is None or tokens <= 2 * matrices.tokens:
        return compute(x)
    number = -(-tokens // matrices.tokens)
    size = -(-tokens // number)
    filled = jnp.pad(x.reshape(tokens, *x.shape[len(lead) :]), [(0, number * size - tokens)] + [(0, 0)] * trailing)
    # an axis of one before the tokens, as a batch has
    y = jax.lax.map(compute, filled.reshape(number, 1, size, *filled.shape[1:]))
    return y.reshape(number * size, *y.shape[3:])[:tokens].reshape(*lead, *y.shape[3:])


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
        return by_tokens(self._contracted, x, trailing=self.contracted)

    def _contracted(self, x: Float[Array, "b ..."]) -> Float[Array, "b ..."]:
        kernel, matrices = self.kernel[...], _matrices.get()
        if matrices is None:
            x_axes = tuple(range(x.ndim - self.contracted, x.ndim))
            kernel_axes = tuple(range(kernel.ndim - self.contracted, kernel.ndim))
            y = jax.lax.dot_general(x, kernel, ((x_axes, kernel_axes), ((), ())), preferred_element_type=jnp.float32)
        else:
            out, lead = kernel.shape[: -self.contracted], x.shape[: -self.contracted]
            tokens = x.reshape(math.prod(lead), -1)
            parts = math.gcd(matrices.parts, math.prod(out))
            y = _product(tokens, kernel.reshape(math.prod(out), -1), parts=parts).reshape(*lead, *out)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(kernel.dtype)


def _product(x: Float[Array, "n k"], kernel: Float[Array, "o k"], *, parts: int = 1) -> Float[Array, "n o"]:
    if parts == 1:
        return jax.lax.dot_general(x, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # all tokens for every part: without a batch of them XLA makes one product again
    tokens = jnp.broadcast_to(x, (parts, *x.shape))
    kernels = kernel.reshape(parts, -1, kernel.shape[-1])
    y = jnp.einsum("pok,pnk->pon", kernels, tokens, preferred_element_type=jnp.float32)
    return y.reshape(len(kernel), -1).T


class Conv(nnx.Module):
    """A convolution over the middle axes of `[n, *space, channels_in]`; the kernel is `[out, channels_in, *window]`."""

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
        axes = {**dict([out]), "channels_in": channels_in, **window}
        self.kernel = named_parameter(axes, "normal", dtype=dtype)
        self.bias = named_parameter(dict([out]), "zeros", dtype=dtype)

    def __call__(self, x: Float[Array, "n ... channels_in"]) -> Float[Array, "n ... out"]:
        """Convolves with stride `stride`."""
        kernel, matrices = self.kernel[...], _matrices.get()
        # of one channel a product would be a sum of one term
        taps = matrices is not None and matrices.taps and kernel.shape[1] > 1
        y = (_sum_of_taps if taps else _convolution)(x, kernel, stride=self.stride)
        return (y + self.bias[...].astype(jnp.float32)).astype(kernel.dtype)


def _convolution(x: Array, kernel: Array, *, stride: int) -> Array:
    space = x.ndim - 2
    last = (0, x.ndim - 1, *range(1, x.ndim - 1))
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * space,
        (PAD,) * space,
        dimension_numbers=jax.lax.ConvDimensionNumbers(last, tuple(range(x.ndim)), last),
        preferred_element_type=jnp.float32,
    )


def _sum_of_taps(x: Array, kernel: Array, *, stride: int) -> Array:
    window, lengths = kernel.shape[2:], [conv_length(size, stride=stride) for size in x.shape[1:-1]]
    kernels = jnp.moveaxis(kernel, (0, 1), (-2, -1))

    def convolve(x: Array) -> Array:
        x = jnp.pad(x, [*(PAD,) * len(window), (0, 0)])
        y = jnp.zeros((math.prod(lengths), len(kernel)), jnp.float32)
        for tap in np.ndindex(*window):
            cut = tuple(slice(i, i + stride * (n - 1) + 1, stride) for i, n in zip(tap, lengths, strict=True))
            y = y + _product(x[cut].reshape(len(y), -1), kernels[tap])
        return y.reshape(*lengths, -1)

    # one after the other: what is read nine times stays in the cache
    return jax.lax.map(convolve, x)


def conv_length(length: int, *, stride: int = 2) -> int:
    """Positions that come out of a width-3, pad-1 convolution over `length` positions."""
    return (length - 1) // stride + 1


def conv_flops(channels_in: int, channels: int, *, window: int, positions: int) -> float:
    """FLOPs (two a multiply-add) of a convolution: `window` taps an input channel, `positions` outputs a channel."""
    return 2.0 * math.prod((channels_in, channels, window, positions))
