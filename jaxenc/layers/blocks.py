"""Attention as a schedule: which blocks of keys each block of queries meets is an array that the host makes.

Several items in a row, one item over all rows, or a giant among many small ones are the same program with other arrays.
Blocks that belong to other items only are not computed.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

BLOCK = 256  # tokens: below it loops cost more than they skip, above it more than needed is computed


def block_pairs(
    queries: Int[np.ndarray, "parts n"], keys: Int[np.ndarray, "parts s"]
) -> tuple[Int[np.ndarray, "parts blocks+1"], Int[np.ndarray, "parts pairs"]]:
    """Which blocks of keys each block of queries meets: those in which one of its segments has a token.

    Args:
        queries: segments of the queries of each part of a batch; 0 is padding, which meets nothing.
        keys: segments of the keys there.

    Returns:
        For each part, where the key blocks of each block of queries start, and the key blocks, one query block's after
        the other's. There is room for all of them, so that the shape depends on the numbers of tokens alone.
    """
    segments = 1 + max(queries.max(initial=0), keys.max(initial=0))
    starts = np.zeros((len(queries), 1 + cut(queries.shape[1], BLOCK)[0]), np.int32)
    blocks = np.zeros((len(queries), cut(queries.shape[1], BLOCK)[0] * cut(keys.shape[1], BLOCK)[0]), np.int32)
    for part, (own, others) in enumerate(zip(queries, keys, strict=True)):
        meets = _held(own, segments) @ _held(others, segments).T > 0
        np.cumsum(meets.sum(axis=1), out=starts[part, 1:])
        blocks[part, : starts[part, -1]] = np.nonzero(meets)[1]
    return starts, blocks


def all_pairs(queries: int, keys: int) -> tuple[Int[np.ndarray, " blocks+1"], Int[np.ndarray, " pairs"]]:
    """The schedule of so many queries and keys in which every block of queries meets every block of keys."""
    own, others = cut(queries, BLOCK)[0], cut(keys, BLOCK)[0]
    return others * np.arange(own + 1, dtype=np.int32), np.tile(np.arange(others, dtype=np.int32), own)


def block_attention(
    query: Float[Array, "n heads head_dim"],
    key: Float[Array, "s heads head_dim"],
    value: Float[Array, "s heads head_dim"],
    query_segments: Int[Array, " n"],
    key_segments: Int[Array, " s"],
    starts: Int[Array, " blocks+1"],
    blocks: Int[Array, " pairs"],
) -> Float[Array, "n heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the keys of the query's segment, block by block of a schedule.

    The softmax is a running one (Milakov and Gimelshein, 2018; Dao et al., 2022), in float32. The gradient computes the
    scores anew, so that memory grows with the tokens and not with their pairs.

    Args:
        query: of the compute dtype.
        key: the same.
        value: the same.
        query_segments: a number for each query; it attends where the key's is equal.
        key_segments: a number for each key.
        starts: of one part, as `block_pairs` makes it.
        blocks: the same.

    Returns:
        One vector a query, in the compute dtype; zero where a query meets no key, as padding does.
    """
    n = len(query)
    # the gradient is traced where this precision is not set any more
    attend = partial(_attend, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
    out = attend(
        _in_blocks(query).swapaxes(1, 2),
        _in_blocks(key).swapaxes(1, 2),
        _in_blocks(value).swapaxes(1, 2),
        _in_blocks(query_segments),
        _in_blocks(key_segments),
        starts,
        blocks,
    )
    return out.swapaxes(1, 2).reshape(-1, *query.shape[1:])[:n]


def cut(tokens: int, most: int) -> tuple[int, int]:
    """Number and size of the parts of at most `most` that so many tokens are cut into; the last may end in padding."""
    number = max(1, -(-tokens // most))
    return number, -(-tokens // number)


def _in_blocks(x: Array) -> Array:
    number, size = cut(len(x), BLOCK)
    return jnp.pad(x, [(0, number * size - len(x)), *[(0, 0)] * (x.ndim - 1)]).reshape(number, size, *x.shape[1:])


def _held(tokens: Int[np.ndarray, " n"], segments: int) -> Float[np.ndarray, "blocks segments"]:
    """1 where a block has a token of a segment. Floating point, because such products are fast."""
    number, size = cut(len(tokens), BLOCK)
    held = np.zeros((number, segments), np.float32)
    held[np.arange(len(tokens)) // size, tokens] = 1
    held[:, 0] = 0
    return held


# In what follows: i a block of queries, j of keys; q, k and v are [blocks, h, tokens, d], own and others the segments.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    precision: str | None, q: Array, k: Array, v: Array, own: Array, others: Array, starts: Array, blocks: Array
) -> Array:
    return _forward(precision, q, k, v, own, others, starts, blocks)[0]


def _forward(
    precision: str | None, q: Array, k: Array, v: Array, own: Array, others: Array, starts: Array, blocks: Array
) -> tuple[Array, tuple[Array, ...]]:
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)

    def meet_all(query: tuple[Array, ...]) -> tuple[Array, Array]:
        q_i, own_i, first, last = query

        def meet(pair: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, y = state
            j = blocks[pair]
            scores = _scores(dot, q_i, k[j], own_i, others[j])
            new = jnp.maximum(largest, scores.max(axis=-1))
            # where there is no key yet, -inf - -inf would be NaN
            shift = jnp.where(jnp.isneginf(new), 0, new)
            weights, kept = jnp.exp(scores - shift[..., None]), jnp.exp(largest - shift)
            y = y * kept[..., None] + dot("hqk,hkd->hqd", weights.astype(v.dtype), v[j])
            return new, total * kept + weights.sum(axis=-1), y

        empty = jnp.zeros(q_i.shape[:2], jnp.float32)
        state = empty - jnp.inf, empty, jnp.zeros(q_i.shape, jnp.float32)
        largest, total, y = jax.lax.fori_loop(first, last, meet, state)
        alone = total == 0
        logsum = jnp.where(alone, 0, largest + jnp.log(jnp.where(alone, 1, total)))
        return (y / jnp.where(alone, 1, total)[..., None]).astype(q.dtype), logsum

    out, logsum = jax.lax.map(meet_all, (q, own, starts[:-1], starts[1:]))
    return out, (q, k, v, own, others, starts, blocks, out, logsum)


def _backward(precision: str | None, kept: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, own, others, starts, blocks, out, logsum = kept
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scale = q.shape[-1] ** -0.5
    # the softmax's gradient is w (dw - sum(w dw)), and sum(w dw) is d_out . out
    inner = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def meet_all(d_kv: tuple[Array, ...], query: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        q_i, own_i, first, last, d_out_i, logsum_i, inner_i = query

        def meet(pair: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = state
            j = blocks[pair]
            weights = jnp.exp(_scores(dot, q_i, k[j], own_i, others[j]) - logsum_i[..., None])
            d_weights = dot("hqd,hkd->hqk", d_out_i, v[j])
            d_scores = (weights * (d_weights - inner_i[..., None]) * scale).astype(q.dtype)
            d_q = d_q + dot("hqk,hkd->hqd", d_scores, k[j])
            d_k = d_k.at[j].add(dot("hqk,hqd->hkd", d_scores, q_i))
            d_v = d_v.at[j].add(dot("hqk,hqd->hkd", weights.astype(d_out.dtype), d_out_i))
            return d_q, d_k, d_v

        d_q, *d_kv = jax.lax.fori_loop(first, last, meet, (jnp.zeros(q_i.shape, jnp.float32), *d_kv))
        return tuple(d_kv), d_q

    d_kv: tuple[Array, ...] = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (d_k, d_v), d_q = jax.lax.scan(meet_all, d_kv, (q, own, starts[:-1], starts[1:], d_out, logsum, inner))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None, None


def _scores(dot: partial[Array], q: Array, k: Array, own: Array, others: Array) -> Array:
    scores = dot("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
    return jnp.where(own[:, None] == others, scores, -jnp.inf)


_attend.defvjp(_forward, _backward)
