"""Normalisation with two-pass statistics in float32."""

import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxenc.layers.parameters import named_parameter

Kind = Literal["layer", "rms"]


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis (Ba et al., 2016), as `torch.nn.LayerNorm`."""

    def __init__(self, embed: int, *, eps: float, dtype: DTypeLike):
        """Declares scale and bias of size `embed`; `eps` has no default because the frameworks' defaults differ."""
        self.eps = eps
        self.scale = named_parameter({"embed": embed}, "ones", dtype=dtype)
        self.bias = named_parameter({"embed": embed}, "zeros", dtype=dtype)

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        """Normalises each vector; the result has the parameters' dtype."""
        centred = x.astype(jnp.float32) - jnp.mean(x, axis=-1, keepdims=True, dtype=jnp.float32)
        # the variance of the centred values: E[x^2] - E[x]^2 loses 4e-3 at a mean of 100
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        scale, bias = self.scale[...], self.bias[...]
        return (y * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(scale.dtype)


class RMSNorm(nnx.Module):
    """Division by the root mean square over the last axes (Zhang and Sennrich, 2019), without centring or bias."""

    def __init__(self, axes: Mapping[str, int], *, eps: float, dtype: DTypeLike):
        """Declares a scale over `axes`, name -> size; several, such as heads and head_dim, are normalised together."""
        self.eps = eps
        # the true size: where an axis is padded with zeros, its values add nothing to the sum
        self.width = math.prod(axes.values())
        self.over = tuple(range(-len(axes), 0))
        self.scale = named_parameter(axes, "ones", dtype=dtype)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalises each vector; the result has the parameters' dtype."""
        wide, scale = x.astype(jnp.float32), self.scale[...]
        mean = jnp.sum(jnp.square(wide), axis=self.over, keepdims=True) / self.width
        return (wide * jax.lax.rsqrt(mean + self.eps) * scale.astype(jnp.float32)).astype(scale.dtype)


def norm_of(kind: Kind, embed: int, *, eps: float, dtype: DTypeLike) -> LayerNorm | RMSNorm:
    """The norm of that kind over tokens of width `embed`."""
    if kind == "layer":
        return LayerNorm(embed, eps=eps, dtype=dtype)
    return RMSNorm({"embed": embed}, eps=eps, dtype=dtype)
