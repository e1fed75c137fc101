"""Patches -> tokens, and groups of neighbouring tokens -> output rows."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxenc.layers.linear import Linear
from jaxenc.layers.mlp import activated
from jaxenc.layers.norms import Kind, norm_of
from jaxenc.layers.parameters import Shard
from sharding_rules import GroupWork


def embed_patches(layer: Linear, inputs: Mapping[str, Array], *, shard: Shard) -> Float[Array, "b n embed"]:
    """The tokens of a batch's patches, whose pixels are features side by side: a convolution that does not overlap.

    Args:
        layer: the convolution as a linear map.
        inputs: of the batch: `patches` [b, n, features] and `segments` [b, n].
        shard: constrains activations by name.
    """
    # selected away, not multiplied by zero: whatever is in the padding, NaN included, ends here
    patches = jnp.where((inputs["segments"] > 0)[..., None], inputs["patches"], 0)
    tokens = layer(shard(patches.astype(layer.kernel.dtype), "batch", "stem_length", "patch"))
    # or XLA exchanges the patches, which are wider, and all devices embed all of them
    return shard(tokens, "batch", "stem_length", "embed")


def patch_work(items: Sequence[int], *, features: int, embed: int, unit: int) -> GroupWork:
    """The work of `embed_patches` for items of so many patches; `unit` of them stay together."""
    return GroupWork(
        "stem",
        None,
        "stem_length",
        tuple(2.0 * features * embed * n for n in items),
        unit=unit,
        returned=embed,
        live=tuple(n * (features + embed) for n in items),
    )


def merger_work(items: Sequence[int], *, embed: int, out: int, group: int, count: int = 1) -> GroupWork:
    """The work of `count` mergers for items of so many tokens, each of a projection's size."""
    merged = group * embed
    return projector_work(items, inputs=merged, hidden=merged, out=out, group=group, count=count)


def projector_work(
    items: Sequence[int], *, inputs: int, hidden: int, out: int, group: int, count: int = 1
) -> GroupWork:
    """The work of `count` projectors of two layers for items of so many tokens, of which `group` make a row."""
    return GroupWork(
        "projector",
        "projector_mlp",
        "projector_length",
        tuple(count * 2.0 * hidden * (inputs + out) * n / group for n in items),
        unit=group,
        # their rows are put side by side, and so are the sums exchanged
        summed=(count * out / group,),
        live=tuple(count * (float(inputs) + hidden + out) * n / group for n in items),
    )


@lru_cache(maxsize=64)  # every row that has a share of an item asks for it
def merge_order(grid: tuple[int, int, int], merge: int) -> Int[np.ndarray, " n"]:
    """The tokens of a clip (frames, rows, columns), in raster order, in the order of the output rows they become.

    Args:
        grid: of the clip; rows and columns are multiples of `merge`.
        merge: patches a side that become one row, those of all frames together.
    """
    t, h, w = grid
    tokens = np.arange(t * h * w).reshape(t, h // merge, merge, w // merge, merge)
    return tokens.transpose(1, 3, 0, 2, 4).ravel()


class PatchMerger(nnx.Module):
    """Each group of consecutive tokens, normalised, becomes a row: two layers with erf's GELU between."""

    def __init__(
        self,
        embed: int,
        out: int,
        *,
        group: int,
        eps: float,
        norm: Kind = "layer",
        norm_of_group: bool = False,
        dtype: DTypeLike,
    ):
        """Declares norm and layers.

        Args:
            embed: width of a token.
            out: width of a row.
            group: tokens that become one.
            eps: of the norm.
            norm: "layer" or "rms".
            norm_of_group: whether the tokens of a group are normalised together, and not one by one.
            dtype: of parameters and products.
        """
        inputs, hidden = {"projector_in": group * embed}, {"projector_mlp": group * embed}
        self.norm_of_group = norm_of_group
        self.norm = norm_of(norm, group * embed if norm_of_group else embed, eps=eps, dtype=dtype)
        self.up = Linear(hidden, inputs, dtype=dtype)
        self.down = Linear({"projector_out": out}, hidden, dtype=dtype)

    def __call__(self, x: Float[Array, "b n embed"], *, shard: Shard) -> Float[Array, "b rows out"]:
        """Merges consecutive tokens."""

        def grouped(x: Array) -> Array:
            return x.reshape(x.shape[0], -1, self.up.kernel.shape[-1])

        merged = self.norm(grouped(x)) if self.norm_of_group else grouped(self.norm(x))
        hidden = self.up(shard(merged, "batch", "projector_length", "projector_in"))
        hidden = shard(activated(hidden, "gelu_erf"), "batch", "projector_length", "projector_mlp")
        return shard(self.down(hidden), "batch", "projector_length", "projector_out")
