"""The code that computes attention: implementations say what they refuse, and the next one is tried.

    dense     all scores at once, by XLA: short stretches
    heads     head by head, all scores of one at once, by XLA: long stretches of one item, on CPU
    blocks    block by block with a running softmax, by XLA: everything else, anywhere
    cudnn     NVIDIA's fused attention, through `jax.nn.dot_product_attention`
    tokamax   the kernels of the `tokamax` package (an extra), where it is installed

A stretch is what attends by itself: a window, or a row of several items.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxenc.layers.blocks import BLOCK, all_pairs, block_attention, cut

logger = logging.getLogger(__name__)

T = TypeVar("T")
AttentionName = Literal["dense", "heads", "blocks", "cudnn", "tokamax"]
SHORT = BLOCK // 2  # tokens: to here all scores at once are as fast on CPU, above it blocks are up to twice as fast
LONG = 2 * BLOCK  # tokens: from here head by head is up to twice as fast as blocks on CPU, where none can be left out
SCORES = 2**21  # that are in memory at once, head by head: those of as many queries as there is room for
MASKED = 4096  # tokens of a row of which all pairs are computed: masks and scores grow with the square
KERNELS = ("cudnn", "tokamax")
# how they say that sizes or devices are not theirs
REFUSED = (NotImplementedError, RuntimeError, ExceptionGroup)
FUSED_HEAD = 128  # channels of a head that cuDNN takes on every GPU


@dataclass(frozen=True)
class Task:
    """What is known of an attention when it is traced.

    Attributes:
        platform: "cpu", "gpu" or "tpu"; None where there are no devices.
        dtype: of queries, keys and values.
        head_dim: channels of a head.
        tokens: of a stretch.
        windows: whether stretches are windows, that hold one item each or few; else they are rows of any items.
        spread: whether items lie over several rows.
    """

    platform: str | None
    dtype: np.dtype[Any]
    head_dim: int
    tokens: int
    windows: bool
    spread: bool


def attend_by_first(task: Task, asked: AttentionName | None, attend: Callable[[AttentionName], T]) -> T:
    """What the first implementation gives that does not refuse.

    Args:
        task: what is to be computed.
        asked: one to try before all others.
        attend: computes it by the implementation of a name.

    Returns:
        Its result. Refusals are logged: as a warning, once, where the implementation was asked for.
    """
    for name in dict.fromkeys((*([asked] if asked else []), *_order(task))):
        refusal = IMPLEMENTATIONS[name].refuses(task)
        if refusal is None:
            try:
                return attend(name)
            except REFUSED as error:
                if name not in KERNELS:
                    raise
                refusal = f"{type(error).__name__}: {error}"
        message = f"attention={name!r} is not used for {task.tokens} tokens of {task.dtype.name}: {refusal}"
        if name == asked:
            _warn(message)
        else:
            logger.debug(message)
    raise AssertionError("blocks refuse nothing")


def _order(task: Task) -> tuple[AttentionName, ...]:
    if task.platform == "gpu":
        return ("cudnn", "tokamax", "dense", "blocks") if task.windows else ("cudnn", "tokamax", "blocks")
    if task.windows and task.tokens <= SHORT:
        return ("dense", "blocks")
    return ("heads", "blocks") if task.windows and long(task) else ("blocks",)


def long(task: Task) -> bool:
    """Whether stretches are better computed head by head where no pair of blocks can be left out."""
    return task.platform == "cpu" and LONG <= task.tokens <= MASKED


@cache
def _warn(message: str) -> None:
    logger.warning(message)


# --- what each refuses


def _dense_refuses(task: Task) -> str | None:
    return None if task.windows else _too_long(task, "all scores at once")


def _heads_refuse(task: Task) -> str | None:
    return None if task.windows else _too_long(task, "all scores of a head")


def _blocks_refuse(task: Task) -> str | None:
    return None


def _cudnn_refuses(task: Task) -> str | None:
    if task.platform != "gpu":
        return f"cuDNN is for NVIDIA GPUs, and this is {task.platform}"
    if task.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, not {task.dtype.name}"
    if task.head_dim > FUSED_HEAD or task.head_dim % 8:
        return f"cuDNN's attention takes heads of a multiple of 8 up to {FUSED_HEAD} channels, not of {task.head_dim}"
    return _unfit(task)


def _tokamax_refuses(task: Task) -> str | None:
    if find_spec("tokamax") is None:
        return 'tokamax is not installed: pip install "jaxenc[tokamax]"'
    return _unfit(task)


def _unfit(task: Task) -> str | None:
    if task.spread and not task.windows:
        return "items are spread over rows, and what each part of the batch meets differs"
    return _too_long(task, "a mask")


def _too_long(task: Task, what: str) -> str | None:
    return (
        f"{what} of {task.tokens} x {task.tokens} tokens; {MASKED} a side are the most"
        if task.tokens > MASKED
        else None
    )


# --- what each computes


def dense_attention(
    query: Float[Array, "b n heads head_dim"],
    key: Float[Array, "b s heads head_dim"],
    value: Float[Array, "b s heads head_dim"],
    query_segments: Int[Array, "b n"],
    key_segments: Int[Array, "b s"],
) -> Float[Array, "b n heads head_dim"]:
    """softmax(q k^T / sqrt(head_dim)) v over the keys that share the query's segment (Vaswani et al., 2017).

    Scores and softmax are float32, and all scores are made at once. Padding is a segment of its own, and a query's own
    token is among the keys, so every query has something to attend to.

    Args:
        query: of the compute dtype.
        key: the same.
        value: the same.
        query_segments: a number for each query; it attends where the key's is equal.
        key_segments: a number for each key.

    Returns:
        One vector a query, in the compute dtype.
    """
    # batch-major: one [n, k] x [k, n] product a head is twice as fast on CPU as the transposed einsum
    q, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    scores = jnp.einsum("bhqk,bhsk->bhqs", q, key, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(_same(query_segments, key_segments), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    y = jnp.einsum("bhqs,bhsk->bhqk", weights, value, preferred_element_type=jnp.float32)
    return jnp.swapaxes(y.astype(value.dtype), 1, 2)


def head_attention(
    query: Float[Array, "b n heads head_dim"],
    key: Float[Array, "b s heads head_dim"],
    value: Float[Array, "b s heads head_dim"],
    query_segments: Int[Array, "b n"],
    key_segments: Int[Array, "b s"],
) -> Float[Array, "b n heads head_dim"]:
    """What `dense_attention` computes, head by head; the gradient makes the scores of each anew.

    Products of two large matrices are what CPUs are fastest at. For arguments and result see there.
    """
    b, n, heads, width = query.shape
    chunks, size = cut(n, max(1, SCORES // key.shape[1]))

    def in_chunks(x: Array) -> Array:
        """Queries in chunks of equal size; the last one is repeated at the end, so that all meet a key."""
        filled = jnp.pad(x, [(0, 0), (0, chunks * size - n), *[(0, 0)] * (x.ndim - 2)], mode="edge")
        return filled.reshape(b, chunks, size, *x.shape[2:])

    @jax.checkpoint
    def attend(q: Array, own: Array, k: Array, v: Array, others: Array) -> Array:
        scores = jnp.einsum("qk,sk->qs", q, k, preferred_element_type=jnp.float32) * width**-0.5
        scores = jnp.where(own[:, None] == others, scores, -jnp.inf)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))).astype(v.dtype)
        y = jnp.einsum("qs,sk->qk", weights, v, preferred_element_type=jnp.float32)
        # divided after the product, which is the smaller array, and by the sum of what was multiplied: of the weights
        # as they were rounded, which are half as much to read
        return (y / weights.sum(axis=-1, keepdims=True, dtype=jnp.float32)).astype(v.dtype)

    def attend_head(head: tuple[Array, ...]) -> Array:
        q, own, *keys = head
        return jax.lax.map(lambda chunk: attend(*chunk, *keys), (q, own))

    def by_head(x: Array) -> Array:
        return jnp.moveaxis(x, -2, 1).reshape(b * heads, *x.shape[1:-2], width)

    own, others = (jnp.repeat(x, heads, axis=0) for x in (in_chunks(query_segments), key_segments))
    y = jax.lax.map(attend_head, (by_head(in_chunks(query)), own, by_head(key), by_head(value), others))
    return jnp.moveaxis(y.reshape(b, heads, chunks * size, width)[:, :, :n], 1, 2)


def _by_blocks(query: Array, key: Array, value: Array, own: Array, others: Array) -> Array:
    starts, blocks = map(jnp.asarray, all_pairs(query.shape[1], key.shape[1]))

    def attend(stretch: tuple[Array, Array, Array, Array, Array]) -> Array:
        return block_attention(*stretch, starts, blocks)

    return jax.lax.map(attend, (query, key, value, own, others))


def _cudnn(query: Array, key: Array, value: Array, own: Array, others: Array) -> Array:
    return jax.nn.dot_product_attention(query, key, value, mask=_same(own, others), implementation="cudnn")


def _tokamax(query: Array, key: Array, value: Array, own: Array, others: Array) -> Array:
    import tokamax
    from absl import flags

    # it reads flags of its own, which would be parsed from whatever this process was started with
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    y: Array = tokamax.dot_product_attention(query, key, value, mask=_same(own, others), precision=precision)
    return y


def _same(own: Int[Array, "b n"], others: Int[Array, "b s"]) -> Array:
    return own[:, None, :, None] == others[:, None, None, :]


@dataclass(frozen=True)
class Implementation:
    """One of them.

    Attributes:
        refuses: why it cannot do a task, or None.
        attend: (query, key, value, segments of queries, of keys) -> one vector a query; all of stretches [b, n].
    """

    refuses: Callable[[Task], str | None]
    attend: Callable[[Array, Array, Array, Array, Array], Array]


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "dense": Implementation(_dense_refuses, dense_attention),
    "heads": Implementation(_heads_refuse, head_attention),
    "blocks": Implementation(_blocks_refuse, _by_blocks),
    "cudnn": Implementation(_cudnn_refuses, _cudnn),
    "tokamax": Implementation(_tokamax_refuses, _tokamax),
}
