"""One vector of a whole picture: a learned probe attends to its tokens."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxenc.layers.linear import Linear
from jaxenc.layers.mlp import MLP, Activation
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.schedule import Schedule
from jaxenc.packing import Budget

MASKED = -1e30  # finite: what is padding throughout has a mean of it, not NaN


class AttentionPooling(nnx.Module):
    """SigLIP's head (Zhai et al., 2023): y = attention(probe, tokens, tokens); y + mlp(norm(y))."""

    def __init__(
        self, embed: int, heads: int, head_dim: int, mlp: int, *, eps: float, activation: Activation, dtype: DTypeLike
    ):
        """Declares the head; the checkpoint holds q, k and v as one tensor."""
        per_head, tokens = {"heads": heads, "head_dim": head_dim}, {"embed": embed}
        self.probe = named_parameter(tokens, "normal", dtype=dtype)
        self.qkv = Linear({"qkv": 3, **per_head}, tokens, dtype=dtype)
        self.out = Linear(tokens, per_head, dtype=dtype)
        self.norm = LayerNorm(embed, eps=eps, dtype=dtype)
        self.mlp = MLP(("embed", embed), ("mlp", mlp), ("embed", embed), activation=activation, dtype=dtype)

    def __call__(self, x: Float[Array, "b n embed"], *, schedule: Schedule, shard: Shard) -> Float[Array, "b m embed"]:
        """Pools every window.

        Args:
            x: tokens; a picture's fill a window.
            schedule: where the windows are.
            shard: constrains activations by name.

        Returns:
            A vector for each place of `pooled_places`.
        """
        kernel, bias = self.qkv.kernel[...], self.qkv.bias
        assert bias is not None
        assert schedule.window is not None
        wide = {"preferred_element_type": jnp.float32}
        query = jnp.einsum("d,hkd->hk", self.probe[...], kernel[0], **wide) + bias[...][0]
        both = jnp.einsum("bnd,phkd->bnphk", x, kernel[1:], **wide) + bias[...][1:]
        both = shard(both.astype(x.dtype), "batch", "length", "qkv", "heads", "head_dim")
        spread = 0 if schedule.spread is None else schedule.spread.size // len(x)
        whole, real, pooled = x.shape[1] - spread, schedule.segments > 0, []
        if whole:
            fold = (len(x), -1, schedule.window)
            keys = both[:, :whole].reshape(*fold, *both.shape[2:])
            pooled.append(_attend(query.astype(x.dtype), keys, real[:, :whole].reshape(fold), over=(2,)))
        if schedule.spread is not None:
            # a picture's tokens are the shares of all rows
            fold = (len(x), len(schedule.spread), -1)
            keys = both[:, whole:].reshape(*fold, *both.shape[2:])
            y = _attend(query.astype(x.dtype), keys, real[:, whole:].reshape(fold), over=(0, 2))
            padding = -len(y) % len(x)
            pooled.append(jnp.pad(y, ((0, padding), (0, 0), (0, 0))).reshape(len(x), -1, *y.shape[1:]))
        y = shard(jnp.concatenate(pooled, axis=1), "batch", None, "heads", "head_dim")
        y = shard(self.out(y), "batch", None, "embed")
        return shard(y + self.mlp(self.norm(y), length="length", shard=shard), "batch", None, "embed")


def pooled_places(budget: Budget, window: int) -> tuple[int, int]:
    """Vectors of each row: those of its own windows, and of its share of those that are spread, in order."""
    return budget.length // window, -(-budget.folds(window)[0] // budget.rows)


def _attend(
    query: Float[Array, "h k"], both: Float[Array, "b m s 2 h k"], real: Bool[Array, "b m s"], *, over: tuple[int, ...]
) -> Float[Array, "*left h k"]:
    """Means of values over the axes `over` of the tokens, weighed by the softmax of the query's scores there."""
    scores = jnp.einsum("hk,bmshk->bmsh", query, both[:, :, :, 0], preferred_element_type=jnp.float32)
    scores = jnp.where(real[..., None], scores * query.shape[-1] ** -0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=over)
    # sums, not products: there is one query
    y = jnp.sum(weights[..., None] * both[:, :, :, 1].astype(jnp.float32), axis=over)
    return y.astype(both.dtype)
