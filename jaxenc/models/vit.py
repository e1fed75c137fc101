"""The plain vision transformer that CLIP, SigLIP, DINOv2 and InternViT are: what their families share.

Patches in raster order, a class token before them or none, learned positions, pre-norm blocks. A family says which of
these it has, reads its published configs and pictures, and names its keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxenc import packing
from jaxenc.errors import ConfigError, InputError
from jaxenc.items import VisionItem
from jaxenc.layers.linear import Linear
from jaxenc.layers.mlp import MLP, Activation
from jaxenc.layers.norms import Kind, LayerNorm
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.patches import embed_patches, merge_order
from jaxenc.layers.pooling import AttentionPooling, pooled_places
from jaxenc.layers.resample import bicubic_taps, bilinear_weights, grid_taps, weighted_gather
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.base import EncoderConfig, EncoderModule
from jaxenc.models.published import Keys, activation_of, read_sizes, require
from jaxenc.packing import Batch, Budget, Placed, Slots
from sharding_rules import GroupWork, Workload

KEYS: Mapping[str, Keys] = {
    "layers": ("num_hidden_layers",),
    "embed": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "mlp": ("intermediate_size",),
    "patch": ("patch_size",),
    "image": ("image_size",),
}
TOWER = ("layers", "embed", "heads", "mlp", "patch", "positions")
PROJECTED = ("skipped", "hidden", "out", "projector_bias")
EVEN = 24  # tokens that 2, 3, 4, 6, 8 and 12 devices divide: a row that is no window may be a little longer
PROJECTOR_EPS = 1e-5  # PyTorch's default, where a projector has a norm
LLAMA_WIDTH = 4096  # what a text_config means that leaves its hidden_size out, as LLaVA-1.5-7B's does


@dataclass(frozen=True)
class Vit(EncoderConfig):
    """Sizes and kinds of one tower, and its host side.

    Attributes:
        layers: transformer blocks that are computed.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        patch: side of a patch, pixels.
        image: side of the pictures that the position table is for, pixels.
        eps: of the norms.
        activation: of the blocks.
        norm: of the blocks, "layer" or "rms".
        gated: whether the blocks' MLP is a gated one.
        head_norm: whether queries and keys are normalised, over all heads together.
        layer_scale: whether what a block adds is scaled.
        qkv_bias: whether queries, keys and values have a bias.
        final_norm: whether rows are normalised.
        pooled: whether there is a head that makes one row of a picture; it comes before the others.
        first_row: tokens before the first that comes out: LLaVA leaves the class token away.
        merge: patches a side that become one row, side by side and normalised, before they are projected.
        skipped: further blocks that the checkpoint holds, which no row depends on.
        hidden: inner width of the projector; None where it has one layer.
        out: width of its rows, the language model's; None where there is no projector.
        projector_activation: between its layers.
        projector_bias: whether its layers have a bias.
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    patch: int
    image: int
    eps: float
    activation: Activation
    norm: Kind = "layer"
    gated: bool = False
    head_norm: bool = False
    layer_scale: bool = False
    qkv_bias: bool = True
    final_norm: bool = False
    pooled: bool = False
    first_row: int = 0
    merge: int = 1
    skipped: int = 0
    hidden: int | None = None
    out: int | None = None
    projector_activation: Activation = "gelu_erf"
    projector_bias: bool = True

    family: ClassVar[str]
    prefix: ClassVar[int]  # class tokens before the patches: 1 or none
    patch_bias: ClassVar[bool]
    pre_norm: ClassVar[bool]  # before the blocks
    # how the position table is resized to pictures of any size; "no" where all have the table's
    resized: ClassVar[Literal["no", "bicubic", "bilinear"]] = "no"
    tiled: ClassVar[bool] = False  # whether an item may be several pictures, each of which attends by itself
    # where they have any size: tokens of one as the published processor makes it, and the lengths of rows
    usual_tokens: ClassVar[int]
    row_lengths: ClassVar[tuple[int, ...]]

    modality: ClassVar[str] = "vision"
    kinds: ClassVar[tuple[str, ...]] = ("images",)
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "patches": ("batch", "stem_length", "patch"),
        "position": ("batch", "stem_length"),
        "tap_index": ("batch", "stem_length", None),
        "tap_weight": ("batch", "stem_length", None),
        "row_weight": ("batch", "stem_length", None),
        "column_weight": ("batch", "stem_length", None),
        "merge_index": ("batch", "projector_length", None),
        **SCHEDULE_AXES,
    }

    @property
    def side(self) -> int:
        """Patches a side of the position table."""
        return self.image // self.patch

    @property
    def positions(self) -> int:
        """Rows of the position table: tokens of a picture of its own size."""
        return self.prefix + self.side**2

    @property
    def window(self) -> int | None:
        """Tokens that attend to each other, where that is always the same number: a picture's.

        Not where they are merged: a row of a batch is cut between groups of patches, and the stretches of a windowed
        row are not.
        """
        return self.positions if self.resized == "no" and self.merge == 1 else None

    @property
    def typical_tokens(self) -> int:
        """Tokens of a picture as the published processor makes it."""
        return self.window or self.usual_tokens

    @property
    def transformer(self) -> TransformerConfig:
        """The stack. Checkpoints hold q, k and v apart; they are read into one kernel, for one product."""
        return TransformerConfig(
            self.layers,
            self.embed,
            self.heads,
            self.head_dim,
            self.mlp,
            self.eps,
            activation=self.activation,
            fused_qkv=True,
            norm=self.norm,
            gated=self.gated,
            head_norm=self.head_norm,
            layer_scale=self.layer_scale,
            qkv_bias=self.qkv_bias,
        )

    def build(self, *, dtype: DTypeLike) -> "VisionTransformer":
        return VisionTransformer(self, dtype=dtype)

    def sizes(self, *more: str) -> dict[str, Any]:
        """What the tensors of a tower depend on, and `more` of what those of a family do."""
        return {name: getattr(self, name) for name in (*TOWER, *more)}

    # --- how much there is

    def pieces(self, item: VisionItem) -> tuple[int, ...]:
        """A picture attends as a whole."""
        pictures, h, w = item.grid
        return (self.prefix + h * w,) * pictures

    def output_rows(self, item: VisionItem) -> int:
        """Rows that come out of each picture: one a token or group of patches, and the head's before them."""
        pictures, h, w = item.grid
        return pictures * (self.pooled + self.prefix - self.first_row + h * w // self.merge**2)

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group; pictures of a fixed size count whole."""
        if self.window is not None:
            items = (self.window,) * sum(-(-tokens // self.window) for tokens in items)
        elif self.resized == "no":
            items = tuple(picture for tokens in items for picture in packing.stretches(tokens, self.positions))
        features, d, unit = 3 * self.patch**2, self.embed, self.merge**2
        stem = GroupWork(
            "stem",
            None,
            "stem_length",
            tuple(2.0 * (features + (self.side**2 if self.resized == "bilinear" else 0)) * d * n for n in items),
            unit=unit,
            returned=d,
            live=tuple(n * float(features + d) for n in items),
        )
        groups = [*self.transformer.work(items, windows=self.window is not None, unit=unit), stem]
        if self.pooled:
            # keys and values of the head, and the rest for one token a picture
            extra = (tuple(4.0 * d * d * n + 8.0 * d * n for n in items), (4.0 * d * self.mlp,) * len(items))
            groups[:2] = (
                replace(group, flops=tuple(map(sum, zip(group.flops, more, strict=True))))
                for group, more in zip(groups, extra, strict=False)
            )
        if self.out is not None:
            merged = unit * d
            kernels = merged * self.out if self.hidden is None else self.hidden * (merged + self.out)
            projector = GroupWork(
                "projector",
                None if self.hidden is None else "projector_mlp",
                "projector_length",
                tuple(2.0 * kernels * n / unit for n in items),
                unit=unit,
                summed=() if self.hidden is None else (self.out / unit,),
                live=tuple(n * (merged + 2.0 * (self.hidden or 0) + self.out) / unit for n in items),
            )
            groups.append(projector)
        return Workload(tuple(items), tuple(groups))

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from: 1 to 16 pictures of a fixed size, or the family's own."""
        if self.resized != "no":
            return self.row_lengths
        picture = self.window or -(-self.positions // EVEN) * EVEN
        return tuple(picture << i for i in range(5))

    # --- items in, arrays out

    def check(self, item: VisionItem) -> None:
        item.check_features(3 * self.patch**2)
        if item.grid[0] != 1 and not self.tiled:
            raise InputError(f"{item.name}: the grid is {item.grid}; this tower reads single pictures")
        if self.resized == "no" and item.grid[1:] != (self.side, self.side):
            pictures = "n" if self.tiled else 1
            raise InputError(
                f"{item.name}: the grid is {item.grid}; this tower reads ({pictures}, {self.side}, {self.side})"
            )

    def layout(
        self, items: Sequence[VisionItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """One batch: each token's patch, its position in the picture, and which tokens are of one picture.

        Where patches are merged, those of a group lie side by side, and the class token behind them all.
        """
        b, n, group = budget.rows, budget.row, self.merge**2
        whole, shared = pooled_places(budget, self.unit) if self.pooled else (0, 0)
        tokens, rows = Slots.empty(b, n), Slots.empty(b, whole + shared + n // group)
        arrays: dict[str, np.ndarray] = {
            "patches": np.zeros((b, n, 3 * self.patch**2), np.float32),
            "segments": np.zeros((b, n), np.int32),
            "position": np.zeros((b, n), np.int32),
        }
        if group > 1:
            arrays["merge_index"] = np.zeros((b, n // group, group), np.int32)
        for name, like in self.resampling((1, 1, 1)).items():
            arrays[name] = np.zeros((b, n, like.shape[1]), like.dtype)
        for segment, place in packing.segments(placed):
            item = items[place.item]
            patches = item.grid[1] * item.grid[2]
            at = (place.row, slice(place.offset, place.offset + place.size))
            position = self.order(item.grid)[place.start : place.start + place.size]
            pictured = position >= self.prefix
            arrays["patches"][at][pictured] = item.patches[place.piece * patches + position[pictured] - self.prefix]
            arrays["segments"][at] = segment
            arrays["position"][at] = position
            for name, values in self.resampling(item.grid).items():
                arrays[name][at] = values[position]
            tokens.fill(place.row, place.offset, place.item, place.piece * (self.prefix + patches) + position)
            before = place.piece * self.output_rows(item) // item.grid[0]  # rows of the pictures before it
            if group > 1:
                first, made = place.offset // group, np.arange(np.count_nonzero(pictured) // group)
                side_by_side = place.offset + np.arange(len(made) * group).reshape(-1, group)
                arrays["merge_index"][place.row, first + made] = side_by_side
                rows.fill(place.row, first, place.item, before + place.start // group + made)
                continue
            kept = position[position >= self.first_row]
            first = whole + shared + place.offset + place.size - len(kept)
            rows.fill(place.row, first, place.item, before + kept - self.first_row + self.pooled)
            head = np.full(1, before, np.int32)
            if self.pooled and place.offset < budget.length:
                rows.fill(place.row, place.offset // self.unit, place.item, head)
            elif self.pooled:
                row, turn = divmod((place.offset - budget.length) // budget.folds(self.window)[1], shared)
                rows.fill(row, whole + turn, place.item, head)
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        return Batch(arrays, tokens, rows)

    def order(self, grid: tuple[int, int, int]) -> Int[np.ndarray, " n"]:
        """The tokens of one picture, numbered as their positions are, in the order in which they lie in a batch."""
        if self.merge == 1:
            return np.arange(self.prefix + grid[1] * grid[2])
        return np.append(self.prefix + merge_order((1, *grid[1:]), self.merge), np.arange(self.prefix))

    def resampling(self, grid: tuple[int, int, int]) -> Mapping[str, Shaped[np.ndarray, "n taps"]]:
        """What each token of a picture takes of the position table, where that is resized."""
        if self.resized == "bicubic":
            return bicubic_positions(grid[1], grid[2], side=self.side, prefix=self.prefix)
        if self.resized == "bilinear":
            return bilinear_positions(grid[1], grid[2], side=self.side)
        return {}


class VisionTransformer(EncoderModule):
    """Patches -> rows."""

    def __init__(self, config: Vit, *, dtype: DTypeLike):
        """Declares the tower, and its projector where it has one."""
        c = self.config = config
        self.patch_embed = Linear({"embed": c.embed}, {"patch": 3 * c.patch**2}, bias=c.patch_bias, dtype=dtype)
        self.class_embed = named_parameter({"embed": c.embed}, "normal", dtype=dtype) if c.prefix else None
        self.position_embed = named_parameter({"position": c.positions, "embed": c.embed}, "normal", dtype=dtype)
        self.pre_norm = LayerNorm(c.embed, eps=c.eps, dtype=dtype) if c.pre_norm else None
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.final_norm = LayerNorm(c.embed, eps=c.eps, dtype=dtype) if c.final_norm else None
        merged = c.merge**2 * c.embed
        self.projector_norm = LayerNorm(merged, eps=PROJECTOR_EPS, dtype=dtype) if c.merge > 1 else None
        self.projector = projector(c, dtype=dtype)
        head = (c.embed, c.heads, c.head_dim, c.mlp)
        self.head = AttentionPooling(*head, eps=c.eps, activation=c.activation, dtype=dtype) if c.pooled else None

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b n out"], dict[int, Float[Array, "b n embed"]]]:
        c, position = self.config, inputs["position"]
        dtype = self.patch_embed.kernel.dtype
        x = embed_patches(self.patch_embed, inputs, shard=shard)
        if self.class_embed is not None:
            x = jnp.where((position < c.prefix)[..., None], self.class_embed[...], x)
        table = self.position_embed[...]
        if "tap_index" in inputs:
            x = x + weighted_gather(table, inputs["tap_index"], inputs["tap_weight"])
        elif "row_weight" in inputs:
            weight = inputs["row_weight"][..., :, None] * inputs["column_weight"][..., None, :]
            weight = weight.reshape(*position.shape, -1)
            x = x + jnp.matmul(weight, table.astype(jnp.float32), precision="highest")
        else:
            x = x + table[position]
        x = shard(x.astype(dtype), "batch", "length", "embed")
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        schedule = Schedule.of(inputs, window=c.window)
        x, captured = run_blocks(self.layers, x, schedule=schedule, shard=shard, capture=capture)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.projector is None:
            x = shard(x, "batch", "length", "embed")
            if self.head is not None:
                x = jnp.concatenate([self.head(x, schedule=schedule, shard=shard), x], axis=1)
            return x, captured
        if c.merge > 1:
            # pixel shuffle: the patches of a group, in raster order, become one vector
            groups = jax.vmap(lambda tokens, index: tokens[index])(x, inputs["merge_index"])
            x = groups.reshape(*groups.shape[:2], -1)
        x = shard(x, "batch", "projector_length", "projector_in")
        if self.projector_norm is not None:
            x = self.projector_norm(x)
        if isinstance(self.projector, MLP):
            x = self.projector(x, length="projector_length", shard=shard)
        else:
            x = self.projector(x)
        return shard(x, "batch", "projector_length", "projector_out"), captured


def projector(config: Vit, *, dtype: DTypeLike) -> MLP | Linear | None:
    """What makes rows of the language model's width of tokens: two layers, one, or nothing."""
    c, merged = config, config.merge**2 * config.embed
    if c.out is None:
        return None
    if c.hidden is None:
        return Linear({"projector_out": c.out}, {"projector_in": merged}, bias=c.projector_bias, dtype=dtype)
    return MLP(
        ("projector_in", merged),
        ("projector_mlp", c.hidden),
        ("projector_out", c.out),
        activation=c.projector_activation,
        bias=c.projector_bias,
        dtype=dtype,
    )


@lru_cache(maxsize=64)  # every row that has a share of an item asks for it
def bicubic_positions(height: int, width: int, *, side: int, prefix: int) -> Mapping[str, Shaped[np.ndarray, "n 16"]]:
    """Which 16 rows of the position table each token of a picture reads, and with what weight.

    Args:
        height: patches of the picture.
        width: the same.
        side: patches a side of the table.
        prefix: class tokens before the patches, in the picture as in the table; they have their own rows.
    """
    taps = grid_taps(bicubic_taps(height, side), bicubic_taps(width, side), width=side)
    index, weight = (of_grid.reshape(-1, 16) for of_grid in taps)
    own = np.repeat(np.arange(prefix)[:, None], 16, axis=1), np.tile(np.eye(1, 16), (prefix, 1))
    return {
        "tap_index": np.concatenate([own[0], prefix + index]).astype(np.int32),
        "tap_weight": np.concatenate([own[1], weight]).astype(np.float32),
    }


@lru_cache(maxsize=64)
def bilinear_positions(height: int, width: int, *, side: int) -> Mapping[str, Float[np.ndarray, "n side"]]:
    """How much each token of a picture takes of each row of the square of positions, and of each column."""
    y, x = np.divmod(np.arange(height * width), width)
    return {
        "row_weight": bilinear_weights(height, side)[y].astype(np.float32),
        "column_weight": bilinear_weights(width, side)[x].astype(np.float32),
    }


# --- published configs


def tower_sizes(family: str, vision: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a tower's own part of a config.json gives.

    Args:
        family: for errors.
        vision: that part, with the defaults of its class filled in.

    Raises:
        ConfigError: a size is missing or wrong, or the function is not known here.
    """
    require(family, vision, {"num_channels": 3})
    sizes = read_sizes(family, vision, KEYS)
    if sizes["embed"] % sizes["heads"]:
        raise ConfigError(f"{family}: hidden_size {sizes['embed']} is not a multiple of its {sizes['heads']} heads")
    eps = vision["layer_norm_eps"]
    if not isinstance(eps, int | float) or eps <= 0:
        raise ConfigError(f"{family}: config.json: layer_norm_eps is {eps!r}; a number above 0 is needed")
    return {
        **sizes,
        "eps": float(eps),
        "activation": activation_of(family, vision, "hidden_act"),
    }


AnyVit = TypeVar("AnyVit", bound=Vit)


def as_in_llava(tower: AnyVit, config: Mapping[str, Any]) -> AnyVit:
    """The tower as a LLaVA uses it: up to one of its blocks, without the norm after, and projected by two layers.

    Args:
        tower: whole.
        config: LLaVA's config.json.

    Raises:
        ConfigError: rows come from several blocks, or from none that there is.
    """
    layer, total = config.get("vision_feature_layer", -2), tower.layers
    if not isinstance(layer, int) or not -total <= layer <= total or not layer % (total + 1):
        raise ConfigError(
            f"{tower.family}: config.json: vision_feature_layer is {layer!r}; one of the {total} blocks is needed"
        )
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ConfigError(f"{tower.family}: config.json: vision_feature_select_strategy is {strategy!r}")
    # transformers counts what enters the first block as 0
    layers = layer % (total + 1)
    out = (config.get("text_config") or {}).get("hidden_size") or LLAMA_WIDTH
    act = activation_of(tower.family, {"projector_hidden_act": "gelu", **config}, "projector_hidden_act")
    return replace(
        tower,
        layers=layers,
        skipped=total - layers,
        final_norm=False,
        first_row=1 if strategy == "default" else 0,
        hidden=out,
        out=out,
        projector_activation=act,
        projector_bias=config.get("multimodal_projector_bias", True),
    )
