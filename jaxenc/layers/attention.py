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
    key: Float[Array, "b s heads head_dim"],
    value: Float[Array, "b s heads head_dim"],
    query_segments: Int[Array, "b n"],
    key_segments: Int[Array, "b s"],
) -> Float[Array, "b n heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the keys that share the query's segment (Vaswani et al., 2017).

    Scores and softmax are float32. Padding is a segment of its own, and a query's own token is among the keys, so every
    query has something to attend to. Scores are made for 1,024 queries at a time: 16,384 tokens need 1 GB for 16
    heads, not 17.

    Args:
        query: of the compute dtype.
        key: the same.
        value: the same.
        query_segments: a number for each query; it attends where the key's is equal.
        key_segments: a number for each key.

    Returns:
        One vector a query, in the compute dtype.
    """
    b, n, h, k = query.shape
    # batch-major: one [n, k] x [k, n] product a head is twice as fast on CPU as the transposed einsum
    q, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))

    def attend(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, own = block
        scores = jnp.einsum("bhqk,bhsk->bhqs", queries, key, preferred_element_type=jnp.float32) * k**-0.5
        same = own[:, None, :, None] == key_segments[:, None, None, :]
        weights = jax.nn.softmax(jnp.where(same, scores, -jnp.inf), axis=-1)
        return jnp.einsum(
            "bhqs,bhsk->bhqk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
        ).astype(value.dtype)

    if n <= QUERY_BLOCK or n % QUERY_BLOCK:
        y = attend((q, query_segments))
    else:
        blocks = n // QUERY_BLOCK
        q_blocks = jnp.moveaxis(q.reshape(b, h, blocks, QUERY_BLOCK, k), 2, 0)
        own_blocks = jnp.moveaxis(query_segments.reshape(b, blocks, QUERY_BLOCK), 1, 0)
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
        spread: Int[Array, "folds s"] | None,
        rotary: tuple[Float[Array, "b n pairs"], Float[Array, "b n pairs"]] | None,
        window: int | None,
        shard: Shard,
    ) -> Float[Array, "b n embed"]:
        """Attends within segments.

        Args:
            x: tokens.
            segments: which tokens belong together.
            spread: where the last tokens of every row belong to items that are spread over all rows, their segments:
                fold by fold, the share of each row after that of the one before.
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
        whole = x.shape[1] - (0 if spread is None else spread.size // x.shape[0])
        y = []
        if whole:
            y.append(_attend_in_rows(*(part[:, :whole] for part in (query, key, value, segments)), window=window))
        if spread is not None:
            own = (part[:, whole:] for part in (query, key, value, segments))
            y.append(_attend_over_rows(*own, spread=spread, shard=shard))
        return self.out(shard(jnp.concatenate(y, axis=1), "batch", "length", "heads", "head_dim"))


def _attend_in_rows(
    query: Float[Array, "b n heads head_dim"],
    key: Float[Array, "b n heads head_dim"],
    value: Float[Array, "b n heads head_dim"],
    segments: Int[Array, "b n"],
    *,
    window: int | None,
) -> Float[Array, "b n heads head_dim"]:
    """Every row by itself, and every window of it."""
    b, n = segments.shape
    fold = (b * (n // window), window) if window else (b, n)
    q, k, v, own = (array.reshape(*fold, *array.shape[2:]) for array in (query, key, value, segments))
    return segment_attention(q, k, v, own, own).reshape(query.shape)


def _attend_over_rows(
    query: Float[Array, "b n heads head_dim"],
    key: Float[Array, "b n heads head_dim"],
    value: Float[Array, "b n heads head_dim"],
    segments: Int[Array, "b n"],
    *,
    spread: Int[Array, "folds s"],
    shard: Shard,
) -> Float[Array, "b n heads head_dim"]:
    """Each row's queries meet the keys of all rows: keys and values are gathered, together, and nothing else moves."""
    rows, folds = query.shape[0], spread.shape[0]
    both = jnp.stack([key, value], axis=2)
    folded = both.reshape(rows, folds, -1, *both.shape[2:])
    folded = shard(folded, None, None, None, None, "heads", "head_dim")
    keys, values = jnp.moveaxis(jnp.moveaxis(folded, 0, 1).reshape(folds, -1, *both.shape[2:]), 2, 0)
    own = (array.reshape(rows, folds, -1, *array.shape[2:]) for array in (query, segments))
    attend = jax.vmap(lambda q, s: segment_attention(q, keys, values, s, spread))
    return attend(*own).reshape(query.shape)
