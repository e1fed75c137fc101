"""The one transformer stack: pre-norm blocks with stacked parameters, scanned."""

from collections.abc import Collection, Iterator, Sequence
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
from jaxenc.layers.norms import Kind, norm_of
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.rotary import Pairs
from jaxenc.layers.schedule import Schedule, Switch
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
        eps: of the norms.
        activation: of the MLP.
        fused_qkv: whether the checkpoint holds q, k and v as one tensor.
        norm: "layer" or "rms".
        gated: whether the MLP is down(activation(gate(x)) * up(x)).
        rotary_pairs: which members of a head rotate together, where there is a rotary embedding.
        head_norm: whether queries and keys are normalised, over all heads together.
        layer_scale: whether what a block adds is multiplied by a learned vector first.
        qkv_bias: whether queries, keys and values have a bias.
        key_bias: whether keys have one, where the others do and they are not fused.
        out_bias: whether the projection after attention has one.
        mlp_bias: whether the MLP's layers have one.
        windowed: blocks in which tokens attend to a window of their segment only.
        window: tokens of such a window, at most.
    """

    layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    eps: float
    activation: Activation
    fused_qkv: bool
    norm: Kind = "layer"
    gated: bool = False
    rotary_pairs: Pairs = "adjacent"
    head_norm: bool = False
    layer_scale: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    windowed: int = 0
    window: int = 0

    @property
    def pair_flops(self) -> float:
        """FLOPs of two tokens of a segment, over the layers where these attend: a score, and a value weighed by it."""
        return (self.layers - self.windowed) * 4.0 * self.heads * self.head_dim

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
            tuple(
                c.layers * 8.0 * n * c.embed * width
                + c.pair_flops * n * n
                + c.windowed * 4.0 * n * min(n, c.window) * width
                for n in tokens
            ),
            unit=unit,
            layers=c.layers,
            paddable=True,
            # the squares of queries and of keys are summed together: XLA makes one exchange of both
            summed=(c.embed, 2) if c.head_norm else (c.embed,),
            shared=2 * width,
            live=tuple(n * (2.0 * c.embed + 4.0 * width) for n in tokens),
            pairs=2 * c.heads,
            block=None if windows else BLOCK,
        )
        mlp = GroupWork(
            "mlp",
            "mlp",
            "length",
            tuple(c.layers * (6.0 if c.gated else 4.0) * n * c.embed * c.mlp for n in tokens),
            unit=unit,
            layers=c.layers,
            paddable=True,
            summed=(c.embed,),
            live=tuple(n * (2.0 * c.embed + (3.0 if c.gated else 2.0) * c.mlp) for n in tokens),
        )
        return attention, mlp


class Block(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x)); with layer scale, each addend times a learned vector."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike):
        """Declares one block of the stack."""
        c = config
        self.attention_norm = norm_of(c.norm, c.embed, eps=c.eps, dtype=dtype)
        self.attention = Attention(
            c.embed,
            c.heads,
            c.head_dim,
            fused=c.fused_qkv,
            bias=c.qkv_bias,
            key_bias=c.key_bias,
            out_bias=c.out_bias,
            head_norm_eps=c.eps if c.head_norm else None,
            pairs=c.rotary_pairs,
            dtype=dtype,
        )
        self.mlp_norm = norm_of(c.norm, c.embed, eps=c.eps, dtype=dtype)
        self.mlp = MLP(
            ("embed", c.embed),
            ("mlp", c.mlp),
            ("embed", c.embed),
            activation=c.activation,
            gated=c.gated,
            bias=c.mlp_bias,
            dtype=dtype,
        )
        self.attention_scale, self.mlp_scale = (
            named_parameter({"embed": c.embed}, "ones", dtype=dtype) if c.layer_scale else None for _ in range(2)
        )

    def __call__(
        self,
        x: Float[Array, "b n embed"],
        *,
        schedule: Schedule | Switch,
        rotary: tuple[Float[Array, "b n pairs"], Float[Array, "b n pairs"]] | None,
        shard: Shard,
    ) -> Float[Array, "b n embed"]:
        """One step of the residual stream; for the arguments see `Attention`."""
        y = self.attention(self.attention_norm(x), schedule=schedule, rotary=rotary, shard=shard)
        x = shard(x + _scaled(y, self.attention_scale), "batch", "length", "embed")
        y = self.mlp(self.mlp_norm(x), length="length", shard=shard)
        return shard(x + _scaled(y, self.mlp_scale), "batch", "length", "embed")


def _scaled(y: Float[Array, "b n embed"], scale: nnx.Param[jax.Array] | None) -> Float[Array, "b n embed"]:
    return y if scale is None else y * scale[...]


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
    others: tuple[Schedule, Collection[int]] | None = None,
) -> tuple[Float[Array, "b n embed"], dict[int, Float[Array, "b n embed"]]]:
    """Runs stacked blocks one after the other.

    Args:
        blocks: what `stacked_blocks` made.
        x: tokens.
        schedule: which tokens attend to which.
        shard: constrains activations by name.
        rotary: cosines and sines of the rotary pairs.
        capture: blocks (from 0) whose outputs are wanted too.
        others: another schedule, and the blocks (from 0) that attend by it.

    Returns:
        The last block's output, and the captured ones by block.
    """
    other, changed = others or (None, ())
    if _unrolled.get():
        # how often a loop over blocks runs is known to the batch only: what is counted attends to whole rows
        schedule = replace(schedule, ranges=None)
        other = other and replace(other, ranges=None)
        shard = replace(shard, attention="dense", layers_apart=True)
    graph, stacked = nnx.split(blocks)
    depth = jax.tree.leaves(stacked)[0].shape[0]
    # one buffer, written as the scan passes: keeping all outputs and choosing later would hold `layers` of them
    slots = np.full(depth, len(capture), np.int32)
    slots[list(capture)] = np.arange(len(capture))
    kept = jnp.zeros((len(capture) + 1, *x.shape), x.dtype) if capture else None
    by_other = jnp.asarray(np.isin(np.arange(depth), list(changed)))

    def step(
        carry: tuple[jax.Array, jax.Array | None], layer: tuple[Any, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array | None], None]:
        x, kept = carry
        state, slot, use_other = layer
        block = nnx.merge(graph, state)
        here = schedule if other is None else Switch(schedule, other, use_other)
        x = block(x, schedule=here, rotary=rotary, shard=shard)
        return (x, kept if kept is None else kept.at[slot].set(x)), None

    layers = (stacked, jnp.asarray(slots), by_other)
    (x, kept), _ = jax.lax.scan(step, (x, kept), layers, unroll=depth if shard.layers_apart else 1)
    return x, {} if kept is None else {layer: kept[slot] for slot, layer in enumerate(capture)}
