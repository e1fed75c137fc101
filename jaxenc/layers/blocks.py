"""Attention as a schedule: which blocks of keys each block of queries meets is an array that the host makes.

Several items in a row, one item over all rows, or a giant among many small ones are the same program with other arrays.
Blocks that belong to other items only are not computed.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxenc.layers.softmax import MASKED, mask, scores, weighted, with_ones

BLOCK = 256  # tokens: below it loops cost more than they skip, above it more than needed is computed
NOWHERE = -1
# Blocks of keys that are met at once: a program for each number. More are met sixteen by sixteen, 2**24 scores of 16
# heads, and numbers between these with the next larger one.
AT_ONCE = (1, 2, 3, 4, 6, 8, 12, 16)


def block_ranges(
    queries: Int[np.ndarray, "parts n"], keys: Int[np.ndarray, "parts s"]
) -> Int[np.ndarray, "parts blocks 2"]:
    """The blocks of keys that each block of queries meets: from the first to the last that has one of its segments.

    Args:
        queries: segments of the queries of each part of a batch; 0 is padding, which meets nothing.
        keys: segments of the keys there.

    Returns:
        For each part and block of queries, the first block of keys and the one after the last. An item's tokens lie one
        after the other, so there are others between only where a block holds the end of a row's own tokens and the
        beginning of what is spread.
    """
    segments = 1 + max(queries.max(initial=0), keys.max(initial=0))
    ranges = np.zeros((len(queries), cut(queries.shape[1], BLOCK)[0], 2), np.int32)
    for part, (own, others) in enumerate(zip(queries, keys, strict=True)):
        meets = _held(own, segments) @ _held(others, segments).T > 0
        ranges[part, :, 0] = meets.argmax(axis=1)
        ranges[part, :, 1] = np.where(meets.any(axis=1), meets.shape[1] - meets[:, ::-1].argmax(axis=1), 0)
    return ranges


def block_attention(
    query: Float[Array, "n heads head_dim"],
    key: Float[Array, "s heads head_dim"],
    value: Float[Array, "s heads head_dim"],
    query_segments: Int[Array, " n"],
    key_segments: Int[Array, " s"],
    ranges: Int[Array, "blocks 2"] | None = None,
) -> Float[Array, "n heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the keys of the query's segment, block by block of a schedule.

    Where there are many keys the softmax is a running one (Milakov and Gimelshein, 2018; Dao et al., 2022). Scores are
    float32. The gradient computes them anew, so that memory grows with the tokens and not with their pairs.

    Args:
        query: of the compute dtype.
        key: the same.
        value: the same.
        query_segments: a number for each query; it attends where the key's is equal. 0 is padding.
        key_segments: a number for each key; those of the queries are among them.
        ranges: of one part, as `block_ranges` makes it; None where every block meets every other.

    Returns:
        One vector a query, in the compute dtype; zero for padding.
    """
    n, s = len(query), len(key)
    if ranges is None:
        ranges = jnp.broadcast_to(jnp.asarray([0, cut(s, BLOCK)[0]]), (cut(n, BLOCK)[0], 2))
    # the gradient is traced where this precision is not set any more
    attend = partial(_attend, jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
    keys, values = (_in_blocks(x).swapaxes(1, 2) for x in (key, value))
    # padding is another segment among queries than among keys, and so meets nothing
    own, others = _in_blocks(query_segments), _in_blocks(key_segments)
    own = jnp.where(own == 0, NOWHERE, own)
    out = attend(_in_blocks(query).swapaxes(1, 2), keys, values, own, others, ranges)
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
def _attend(precision: str | None, q: Array, k: Array, v: Array, own: Array, others: Array, ranges: Array) -> Array:
    return _forward(precision, q, k, v, own, others, ranges)[0]


def _forward(
    precision: str | None, q: Array, k: Array, v: Array, own: Array, others: Array, ranges: Array
) -> tuple[Array, tuple[Array, ...]]:
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    number, heads, size, _ = k.shape
    most = min(number, AT_ONCE[-1])
    widths = (*(width for width in AT_ONCE if width < most), most)
    # each head's keys are one array, so that any blocks that follow each other are a piece of it
    keys, values = (x.swapaxes(0, 1).reshape(heads, number * size, -1) for x in (k, with_ones(v)))
    others = others.reshape(-1)

    def meet_all(query: tuple[Array, ...]) -> tuple[Array, Array]:
        q_i, own_i, (first, last) = query
        nothing = jnp.full(q_i.shape[:2], MASKED), jnp.zeros((*q_i.shape[:2], values.shape[-1]))

        def meet(width: int, first: Array) -> tuple[Array, Array]:
            start = jnp.minimum(first, number - width) * size
            k_j, v_j = (jax.lax.dynamic_slice_in_dim(x, start, width * size, axis=1) for x in (keys, values))
            others_j = jax.lax.dynamic_slice_in_dim(others, start, width * size)
            # what a piece that would end beyond the keys has of the one before
            others_j = jnp.where(start + jnp.arange(width * size) < first * size, 0, others_j)
            bias = mask(own_i, others_j)
            # apart: XLA on CPU keeps the scores in the cache where the product with the values is all that is made of
            # them; without a gradient, and with no more keys, nobody asks for the maximum
            largest = scores(dot, jax.lax.optimization_barrier(q_i), k_j, bias).max(axis=-1)
            return largest, weighted(dot, q_i, k_j, v_j, bias)

        def add(state: tuple[Array, Array], more: tuple[Array, Array]) -> tuple[Array, Array]:
            largest = jnp.maximum(state[0], more[0])
            one, other = (y * jnp.exp(m - largest)[..., None] for m, y in (state, more))
            return largest, one + other

        def meet_rest(first: Array) -> tuple[Array, Array]:
            smallest = jnp.searchsorted(jnp.asarray([0, *widths]), last - first)
            return jax.lax.switch(smallest, [lambda _: nothing, *(partial(meet, width) for width in widths)], first)

        if most < number:
            whole = (last - first) // most
            many = jax.lax.fori_loop(0, whole, lambda i, state: add(state, meet(most, first + i * most)), nothing)
            largest, y = add(many, meet_rest(first + whole * most))
        else:
            largest, y = meet_rest(first)
        real = own_i != NOWHERE
        y, total = y[..., : q_i.shape[-1]], jnp.where(real, y[..., -1], 1)
        out = jnp.where(real[:, None], y / total[..., None], 0).astype(q.dtype)
        return out, jnp.where(real, largest + jnp.log(total), 0)

    out, logsum = jax.lax.map(meet_all, (q, own, ranges))
    return out, (q, k, v, own, others, ranges, out, logsum)


def _backward(precision: str | None, kept: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, own, others, ranges, out, logsum = kept
    others = others.reshape(len(k), -1)
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scale = q.shape[-1] ** -0.5
    # the softmax's gradient is w (dw - sum(w dw)), and sum(w dw) is d_out . out
    inner = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def meet_all(d_kv: tuple[Array, ...], query: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        q_i, own_i, (first, last), d_out_i, logsum_i, inner_i = query

        def meet(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = state
            weights = jnp.exp(scores(dot, q_i, k[j], mask(own_i, others[j])) - logsum_i[..., None])
            d_weights = dot("hqd,hkd->hqk", d_out_i, v[j])
            d_scores = (weights * (d_weights - inner_i[..., None]) * scale).astype(q.dtype)
            d_q = d_q + dot("hqk,hkd->hqd", d_scores, k[j])
            d_k = d_k.at[j].add(dot("hqk,hqd->hkd", d_scores, q_i))
            d_v = d_v.at[j].add(dot("hqk,hqd->hkd", weights.astype(d_out.dtype), d_out_i))
            return d_q, d_k, d_v

        d_q, *d_kv = jax.lax.fori_loop(first, last, meet, (jnp.zeros(q_i.shape, jnp.float32), *d_kv))
        return tuple(d_kv), d_q

    d_kv: tuple[Array, ...] = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (d_k, d_v), d_q = jax.lax.scan(meet_all, d_kv, (q, own, ranges, d_out, logsum, inner))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None


_attend.defvjp(_forward, _backward)
