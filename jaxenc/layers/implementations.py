"""The code that computes attention: implementations say what they refuse, and the next one is tried.

    dense     all scores at once, by XLA: short stretches
    blocks    block by block, and only blocks that meet, by XLA: everything else, anywhere
    cudnn     NVIDIA's fused attention, through `jax.nn.dot_product_attention`
    tokamax   the kernels of the `tokamax` package (an extra), where it is installed

A stretch is what attends by itself: a window, or a row of several items.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxenc.layers.blocks import block_attention
from jaxenc.layers.softmax import mask, weighted, with_ones

logger = logging.getLogger(__name__)

T = TypeVar("T")
AttentionName = Literal["dense", "blocks", "cudnn", "tokamax"]
SHORT = 128  # tokens: to here stretches are faster on CPU all at once, above it block by block
LONGEST = 4096  # tokens of a row of which all pairs are computed: masks and scores grow with the square
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
    return ("dense", "blocks") if task.windows and task.tokens <= SHORT else ("blocks",)


@cache
def _warn(message: str) -> None:
    logger.warning(message)


# --- what each refuses


def _dense_refuses(task: Task) -> str | None:
    return None if task.windows else _too_long(task, "all scores at once")


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
        f"{what} of {task.tokens} x {task.tokens} tokens; {LONGEST} a side are the most"
        if task.tokens > LONGEST
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
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def attend(*stretch: Array) -> Array:
        query, key, value, own, others = stretch
        y = weighted(dot, query, key, with_ones(value), mask(own, others))
        return (y[..., : query.shape[-1]] / y[..., -1:]).astype(value.dtype)

    # heads first: one [n, k] x [k, n] product a head is twice as fast on CPU as the transposed einsum
    by_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(jax.vmap(attend)(*by_head, query_segments, key_segments), 1, 2)


def _by_blocks(query: Array, key: Array, value: Array, own: Array, others: Array) -> Array:
    return jax.lax.map(lambda stretch: block_attention(*stretch), (query, key, value, own, others))


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
    "blocks": Implementation(_blocks_refuse, _by_blocks),
    "cudnn": Implementation(_cudnn_refuses, _cudnn),
    "tokamax": Implementation(_tokamax_refuses, _tokamax),
}
