"""Attention among the tokens of one segment."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jaxenc.layers.blocks import block_attention
from jaxenc.layers.implementations import (
    IMPLEMENTATIONS,
    AttentionName,
    Task,
    attend_by_first,
    dense_attention,
)
from jaxenc.layers.linear import Linear
from jaxenc.layers.norms import RMSNorm
from jaxenc.layers.parameters import Shard
from jaxenc.layers.rotary import Pairs, rotate
from jaxenc.layers.schedule import AXES, Schedule, Switch

ATTENTION = "attend"  # what profiles call scores, softmax and the sum of values, of all implementations


class Attention(nnx.Module):
    """Multi-head self-attention; heads are a dimension of every kernel."""

    def __init__(
        self,
        embed: int,
        heads: int,
        head_dim: int,
        *,
        fused: bool,
        bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        head_norm_eps: float | None = None,
        pairs: Pairs = "adjacent",
        dtype: DTypeLike,
    ):
        """Declares the projections.

        Args:
            embed: width of the tokens.
            heads: number of heads.
            head_dim: width of one.
            fused: one `qkv` kernel `[3, heads, head_dim, embed]`, or `query`, `key` and `value`: as the file has it.
            bias: whether queries, keys and values have one.
            key_bias: whether keys do, where the others do and they are not fused (Whisper's have none).
            out_bias: whether the projection out has one.
            head_norm_eps: of a norm of queries and one of keys over all heads together (InternViT-6B); None for none.
            pairs: which members of a head rotate together.
            dtype: of parameters and products.
        """
        per_head, tokens = {"heads": heads, "head_dim": head_dim}, {"embed": embed}
        if fused:
            self.qkv = Linear({"qkv": 3, **per_head}, tokens, bias=bias, dtype=dtype)
        else:
            self.query = Linear(per_head, tokens, bias=bias, dtype=dtype)
            self.key = Linear(per_head, tokens, bias=bias and key_bias, dtype=dtype)
            self.value = Linear(per_head, tokens, bias=bias, dtype=dtype)
        self.normed = head_norm_eps is not None
        if head_norm_eps is not None:
            self.query_norm, self.key_norm = (RMSNorm(per_head, eps=head_norm_eps, dtype=dtype) for _ in range(2))
        self.fused = fused
        self.pairs: Pairs = pairs
        self.out = Linear(tokens, per_head, bias=out_bias, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "b n embed"],
        *,
        schedule: Schedule | Switch,
        rotary: tuple[Float[Array, "b n pairs"], Float[Array, "b n pairs"]] | None,
        shard: Shard,
    ) -> Float[Array, "b n embed"]:
        """Attends within segments.

        Args:
            x: tokens.
            schedule: which tokens attend to which, or two of them and which one holds here.
            rotary: cosines and sines of the pairs' angles, or none.
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
        if self.normed:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = (rotate(part, *rotary, pairs=self.pairs) for part in (query, key))
        if isinstance(schedule, Switch):
            branches = [partial(_attend, schedule=one, shard=shard) for one in (schedule.second, schedule.first)]
            y = jax.lax.cond(schedule.use_second, *branches, query, key, value)
        else:
            y = _attend(query, key, value, schedule=schedule, shard=shard)
        return self.out(shard(y, "batch", "length", "heads", "head_dim"))


Heads = Float[Array, "b n heads head_dim"]


def _attend(query: Heads, key: Heads, value: Heads, *, schedule: Schedule, shard: Shard) -> Heads:
    task = Task(
        shard.plan.platform,
        query.dtype,
        query.shape[-1],
        schedule.window or _whole(schedule),
        windows=schedule.window is not None,
        spread=schedule.spread is not None,
    )

    def attend(name: AttentionName) -> Heads:
        if name == "blocks" and schedule.ranges is not None:
            return _attend_in_blocks(query, key, value, schedule, shard)
        return _attend_in_stretches(query, key, value, schedule, shard, IMPLEMENTATIONS[name].attend)

    with jax.named_scope(ATTENTION):
        return attend_by_first(task, shard.attention, attend)


def _attend_in_blocks(query: Heads, key: Heads, value: Heads, schedule: Schedule, shard: Shard) -> Heads:
    """Each device goes through its own blocks: keys of its rows, and those of what is spread over all rows."""
    whole, segments = _whole(schedule), schedule.segments
    heads = ("batch", "length", "heads", "head_dim")
    given = [(query, heads), *((getattr(schedule, name), AXES[name]) for name in ("segments", "ranges"))]
    # what there is to attend to: keys, values and segments of the device's own rows, then of what is spread
    given += [(key[:, :whole], heads), (value[:, :whole], heads), (segments[:, :whole], AXES["segments"])]
    if schedule.spread is not None:
        keys, values = _gathered(key[:, whole:], value[:, whole:], 1, shard)
        shared = (None, None, "heads", "head_dim")
        given += [(keys, shared), (values, shared), (schedule.spread, AXES["spread"])]

    def attend(query: Array, segments: Array, ranges: Array, *there: Array) -> Array:
        keys, values, others = (jnp.concatenate([*map(_flat, there[kind::3])]) for kind in range(3))
        return block_attention(_flat(query), keys, values, _flat(segments), others, ranges[0]).reshape(query.shape)

    arrays, axes = zip(*given, strict=True)
    return shard.per_device(attend, *arrays, axes=axes, out=heads)


def _attend_in_stretches(
    query: Heads, key: Heads, value: Heads, schedule: Schedule, shard: Shard, kernel: Callable[..., Array]
) -> Heads:
    """Every stretch by itself, in a row or, where it is spread, with a share of its queries in each row."""
    whole, spread, segments = _whole(schedule), schedule.spread, schedule.segments
    heads = ("batch", "length", "heads", "head_dim")

    def attend(*parts: Array) -> Array:
        q, k, v, own = (part.reshape(-1, schedule.window or whole, *part.shape[2:]) for part in parts)
        return kernel(q, k, v, own, own).reshape(parts[0].shape)

    y = []
    if whole:
        parts = [part[:, :whole] for part in (query, key, value, segments)]
        y.append(shard.per_device(attend, *parts, axes=(heads, heads, heads, AXES["segments"]), out=heads))
    if spread is not None:
        rows, folds = len(query), len(spread)
        keys, values = _gathered(key[:, whole:], value[:, whole:], folds, shard)
        q, own = (part[:, whole:].reshape(rows, folds, -1, *part.shape[2:]) for part in (query, segments))
        over_rows = jax.vmap(lambda q, own: dense_attention(q, keys, values, own, spread))
        y.append(over_rows(q, own).reshape(query[:, whole:].shape))
    return jnp.concatenate(y, axis=1)


def _whole(schedule: Schedule) -> int:
    """Tokens of a row that belong to items which lie in it."""
    rows, length = schedule.segments.shape
    return length - (0 if schedule.spread is None else schedule.spread.size // rows)


def _gathered(key: Heads, value: Heads, folds: int, shard: Shard) -> Float[Array, "2 folds s heads head_dim"]:
    """Keys and values of all rows' shares, fold by fold, on every row: in one exchange, and nothing else moves."""
    both = jnp.stack([key, value], axis=2)
    folded = both.reshape(len(key), folds, -1, *both.shape[2:])
    folded = shard(folded, None, None, None, None, "heads", "head_dim")
    return jnp.moveaxis(jnp.moveaxis(folded, 0, 1).reshape(folds, -1, *both.shape[2:]), 2, 0)


def _flat(x: Shaped[Array, "b n *rest"]) -> Shaped[Array, "b*n *rest"]:
    return x.reshape(-1, *x.shape[2:])
