"""The perceptron of transformer blocks and projectors."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxenc.layers.linear import Linear, by_tokens
from jaxenc.layers.parameters import Shard

Activation = Literal["gelu_tanh", "gelu_erf", "quick_gelu", "silu"]
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    # CLIP's approximation, 1e-2 off the others
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
}


class MLP(nnx.Module):
    """down(activation(up(x))); gated, down(activation(gate(x)) * up(x)) (SwiGLU, Shazeer, 2020).

    Gate and up are one kernel `[2, hidden, inputs]`: one product, and dividing the hidden axis cuts both alike.
    """

    def __init__(
        self,
        inputs: tuple[str, int],
        hidden: tuple[str, int],
        out: tuple[str, int],
        *,
        activation: Activation,
        gated: bool = False,
        bias: bool = True,
        dtype: DTypeLike,
    ):
        """Declares the layers; each axis is (logical name, size)."""
        self.activation = activation
        self.gated = gated
        self.hidden_axis = hidden[0]
        up = {**({"gate_up": 2} if gated else {}), **dict([hidden])}
        self.up = Linear(up, dict([inputs]), bias=bias, dtype=dtype)
        self.down = Linear(dict([out]), dict([hidden]), bias=bias, dtype=dtype)

    def __call__(self, x: Float[Array, "b n inputs"], *, length: str, shard: Shard) -> Float[Array, "b n out"]:
        """Applies it to every token; `length` is the logical name of the token axis."""

        def apply(x: Array) -> Array:
            hidden, activate = self.up(x), partial(activated, activation=self.activation)
            hidden = activate(hidden[:, :, 0]) * hidden[:, :, 1] if self.gated else activate(hidden)
            return self.down(shard(hidden, "batch", length, self.hidden_axis))

        return by_tokens(apply, x)


def activated(x: Float[Array, "*b hidden"], activation: Activation) -> Float[Array, "*b hidden"]:
    """The activation of x: in float32, which is faster on CPU than in 16 bits, and rounded once."""
    return ACTIVATIONS[activation](x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)
