"""The one transformer stack: pre-norm blocks with stacked parameters, scanned."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxenc.layers.attention import Attention
from jaxenc.layers.blocks import BLOCK
from jaxenc.layers.mlp import MLP, Activation
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard
from jaxenc.layers.schedule import Schedule
from sharding_rules import GroupWork

# XLA's cost analysis counts the body of a scan once: programs that are only counted are traced without scans
_unrolled: ContextVar[bool] = ContextVar("_unrolled", default=False)


@contextmanager
def unrolled() -> Iterator[None]:
    """Programs traced within have a copy of the block for every layer."""
    token = _unrolled.set(True)
    try:
        yield
    finally:
        _unrolled.reset(token)


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and kinds of one stack.

    Attributes:
        layers: number of blocks.
        embed: width of the residual stream.
        heads: attention heads.
        head_dim: width of a head.
        mlp: width of the MLP.
        eps: of the layer norms.
        activation: of the MLP.
        fused_qkv: whether the checkpoint holds q, k and v as one tensor.
        key_bias: whether keys have a bias.
    """

    layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    eps: float
    activation: Activation
    fused_qkv: bool
    key_bias: bool = True

    @property
    def pair_flops(self) -> float:
        """FLOPs of two tokens that attend to each other, over all layers: a score, and a value weighed by it."""
        return self.layers * 4.0 * self.heads * self.head_dim

    def work(self, tokens: Sequence[int], *, windows: bool, unit: int = 1) -> tuple[GroupWork, GroupWork]:
        """The work of attention and MLPs over segments of so many tokens (two FLOPs a multiply-add).

        Args:
            tokens: of each segment.
            windows: whether the segments are windows, whose scores are made all at once.
            unit: tokens that stay together where a segment is spread over devices.
        """
        c, width = self, self.heads * self.head_dim
        attention = GroupWork(
            "attention",
            "heads",
            "length",
            tuple(c.layers * (8.0 * n * c.embed * width + 4.0 * n * n * width) for n in tokens),
            unit=unit,
            layers=c.layers,
            paddable=True,
            summed=c.embed,
            shared=2 * width,
            live=tuple(n * (2.0 * c.embed + 4.0 * width) for n in tokens),
            pairs=2 * c.heads,
            block=None if windows else BLOCK,
        )
        mlp = GroupWork(
            "mlp",
            "mlp",
            "length",
            tuple(c.layers * 4.0 * n * c.embed * c.mlp for n in tokens),
            unit=unit,
            layers=c.layers,
            paddable=True,
            summed=c.embed,
            live=tuple(2.0 * n * (c.embed + c.mlp) for n in tokens),
        )
        return attention, mlp


class Block(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike):
        """Declares one block of the stack."""
        c = config
        self.attention_norm = LayerNorm(c.embed, eps=c.eps, dtype=dtype)
        self.attention = Attention(c.embed, c.heads, c.head_dim, fused=c.fused_qkv, key_bias=c.key_bias, dtype=dtype)
        self.mlp_norm = LayerNorm(c.embed, eps=c.eps, dtype=dtype)
        self.mlp = MLP(("embed", c.embed), ("mlp", c.mlp), ("embed", c.embed), activation=c.activation, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "b n embed"],
        *,
        schedule: Schedule,
        rotary: tuple[Float[Array, "b n pairs"], Float[Array, "b n pairs"]] | None,
        shard: Shard,
    ) -> Float[Array, "b n embed"]:
        """One step of the residual stream; for the arguments see `Attention`."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, schedule=schedule, rotary=rotary, shard=shard)
        x = shard(x, "batch", "length", "embed")
        x = x + self.mlp(self.mlp_norm(x), length="length", shard=shard)
        return shard(x, "batch", "length", "embed")


def stacked_blocks(config: TransformerConfig, *, dtype: DTypeLike) -> Block:
    """All blocks as one: every parameter has a leading `layers` axis, so any depth compiles as fast as one."""

    @nnx.vmap(axis_size=config.layers, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack() -> Block:
        return Block(config, dtype=dtype)

    return stack()


def run_blocks(
    blocks: Block,
    x: Float[Array, "b n embed"],
    *,
    schedule: Schedule,
    shard: Shard,
    rotary: tuple[Float[Array, "b n pairs"], Float[Array, "b n pairs"]] | None = None,
    capture: tuple[int, ...] = (),
) -> tuple[Float[Array, "b n embed"], dict[int, Float[Array, "b n embed"]]]:
    """Runs stacked blocks one after the other.

    Args:
        blocks: what `stacked_blocks` made.
        x: tokens.
        schedule: which tokens attend to which.
        shard: constrains activations by name.
        rotary: cosines and sines of the rotary pairs.
        capture: blocks (from 0) whose outputs are wanted too.

    Returns:
        The last block's output, and the captured ones by block.
    """
    if _unrolled.get():
        # how often a loop over blocks runs is known to the batch only: what is counted attends to whole rows
        schedule = replace(schedule, starts=None, blocks=None)
    graph, stacked = nnx.split(blocks)
    depth = jax.tree.leaves(stacked)[0].shape[0]
    # one buffer, written as the scan passes: keeping all outputs and choosing later would hold `layers` of them
    slots = np.full(depth, len(capture), np.int32)
    slots[list(capture)] = np.arange(len(capture))
    kept = jnp.zeros((len(capture) + 1, *x.shape), x.dtype) if capture else None

    def step(
        carry: tuple[jax.Array, jax.Array | None], layer: tuple[Any, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array | None], None]:
        x, kept = carry
        state, slot = layer
        block = nnx.merge(graph, state)
        x = block(x, schedule=schedule, rotary=rotary, shard=shard)
        return (x, kept if kept is None else kept.at[slot].set(x)), None

    (x, kept), _ = jax.lax.scan(step, (x, kept), (stacked, jnp.asarray(slots)), unroll=depth if _unrolled.get() else 1)
    return x, {} if kept is None else {layer: kept[slot] for slot, layer in enumerate(capture)}
