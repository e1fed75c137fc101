"""The two-layer perceptron of transformer blocks and projectors."""

from functools import partial
from typing import Literal

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxenc.layers.linear import Linear
from jaxenc.layers.parameters import Shard

Activation = Literal["gelu_tanh", "gelu_erf"]
ACTIVATIONS = {
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
}


class MLP(nnx.Module):
    """down(activation(up(x))), both with bias."""

    def __init__(
        self,
        inputs: tuple[str, int],
        hidden: tuple[str, int],
        out: tuple[str, int],
        *,
        activation: Activation,
        dtype: DTypeLike,
    ):
        """Declares both layers; each axis is (logical name, size)."""
        self.activation = activation
        self.hidden_axis = hidden[0]
        self.up = Linear(dict([hidden]), dict([inputs]), dtype=dtype)
        self.down = Linear(dict([out]), dict([hidden]), dtype=dtype)

    def __call__(self, x: Float[Array, "b n inputs"], *, length: str, shard: Shard) -> Float[Array, "b n out"]:
        """Applies it to every token; `length` is the logical name of the token axis."""
        hidden = ACTIVATIONS[self.activation](self.up(x))
        return self.down(shard(hidden, "batch", length, self.hidden_axis))
