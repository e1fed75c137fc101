"""Attention among the tokens of one segment."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxenc.layers.linear import Linear
from jaxenc.layers.parameters import Shard
from jaxenc.layers.rotary import rotate_pairs

QUERY_BLOCK = 1024


def segment_attention(
    query: Float[Array, "b n heads head_dim"],
    key: Float[Array, "b n heads head_dim"],
    value: Float[Array, "b n heads head_dim"],
    segments: Int[Array, "b n"],
) -> Float[Array, "b n heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the tokens that share the query's segment (Vaswani et al., 2017).

    Scores and softmax are float32. Padding is a segment of its own, so every row has something to attend to. Scores
    are made for 1,024 queries at a time: 16,384 tokens need 1 GB for 16 heads, not 17.

    Args:
        query: of the compute dtype.
        key: the same.
        value: the same.
        segments: a number for each token; tokens attend where it is equal.

    Returns:
        One vector a query, in the compute dtype.
    """
    b, n, h, k = query.shape
    # batch-major: one [n, k] x [k, n] product a head is twice as fast on CPU as the transposed einsum
    q, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))

    def attend(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, own = block
        scores = jnp.einsum("bhqk,bhsk->bhqs", queries, key, preferred_element_type=jnp.float32) * k**-0.5
        same = own[:, None, :, None] == segments[:, None, None, :]
        weights = jax.nn.softmax(jnp.where(same, scores, -jnp.inf), axis=-1)
        return jnp.einsum(
            "bhqs,bhsk->bhqk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
        ).astype(value.dtype)

    if n <= QUERY_BLOCK or n % QUERY_BLOCK:
        y = attend((q, segments))
    else:
        blocks = n // QUERY_BLOCK
        q_blocks = jnp.moveaxis(q.reshape(b, h, blocks, QUERY_BLOCK, k), 2, 0)
        own_blocks = jnp.moveaxis(segments.reshape(b, blocks, QUERY_BLOCK), 1, 0)
        y = jnp.moveaxis(jax.lax.map(attend, (q_blocks, own_blocks)), 0, 2).reshape(b, h, n, k)
    return jnp.swapaxes(y, 1, 2)


class Attention(nnx.Module):
    """Multi-head self-attention; heads are a dimension of every kernel."""

    def __init__(
        self,
        embed: int,
        heads: int,
        head_dim: int,
        *,
        fused: bool,
        key_bias: bool = True,
        dtype: DTypeLike,
    ):
        """Declares the projections.

        Args:
            embed: width of the tokens.
            heads: number of heads.
            head_dim: width of one.
            fused: one `qkv` kernel `[3, heads, head_dim, embed]`, or `query`, `key` and `value`: as the file has it.
            key_bias: whether keys have a bias (Whisper's have none).
            dtype: of parameters and products.
        """
        per_head, tokens = {"heads": heads, "head_dim": head_dim}, {"embed": embed}
        if fused:
            self.qkv = Linear({"qkv": 3, **per_head}, tokens, dtype=dtype)
        else:
            self.query = Linear(per_head, tokens, dtype=dtype)
            self.key = Linear(per_head, tokens, bias=key_bias, dtype=dtype)
            self.value = Linear(per_head, tokens, dtype=dtype)
        self.fused = fused
        self.out = Linear(tokens, per_head, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "b n embed"],
        *,
        segments: Int[Array, "b n"],
        rotary: tuple[Float[Array, "b n pairs"], Float[Array, "b n pairs"]] | None,
        window: int | None,
        shard: Shard,
    ) -> Float[Array, "b n embed"]:
        """Attends within segments.

        Args:
            x: tokens.
            segments: which tokens belong together.
            rotary: cosines and sines of the pairs' angles, or none.
            window: where no segment crosses a multiple of this many tokens, the row is folded into that many
                independent rows, and no score between two of them is computed.
            shard: constrains activations by name.

        Returns:
            What is added to the residual stream.
        """
        if self.fused:
            qkv = shard(self.qkv(x), "batch", "length", "qkv", "heads", "head_dim")
            query, key, value = (qkv[:, :, i] for i in range(3))
        else:
            query, key, value = (
                shard(project(x), "batch", "length", "heads", "head_dim")
                for project in (self.query, self.key, self.value)
            )
        if rotary is not None:
            query, key = rotate_pairs(query, *rotary), rotate_pairs(key, *rotary)
        b, n = segments.shape
        fold = (b * (n // window), window) if window else (b, n)
        rows = (array.reshape(*fold, *array.shape[2:]) for array in (query, key, value, segments))
        y = segment_attention(*rows).reshape(query.shape)
        return self.out(shard(y, "batch", "length", "heads", "head_dim"))
