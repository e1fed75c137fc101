"""Pixtral's vision tower with the projector of a LLaVA (Pixtral-12B) or of a Mistral3, which merges patches first.

Source: `PixtralVisionModel`, `LlavaModel.get_image_features` and `Mistral3Model.get_image_features` of transformers
5.24; Mistral's own code computes the same. Rows are what the language model takes in the places of its image tokens;
those that break lines between them are its own. Of the tower alone they are its last hidden state, not normalised.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import pixtral as keys
from jaxenc import packing
from jaxenc.errors import InputError
from jaxenc.items import VisionItem
from jaxenc.layers.linear import Linear
from jaxenc.layers.mlp import MLP, Activation
from jaxenc.layers.norms import RMSNorm
from jaxenc.layers.parameters import Shard
from jaxenc.layers.patches import embed_patches, merge_order, patch_work, projector_work
from jaxenc.layers.rotary import axial_rotary
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.base import EncoderConfig, EncoderModule
from jaxenc.models.clip import MEAN, STD
from jaxenc.models.published import activation_of, read_sizes, require, require_rotary, with_defaults
from jaxenc.models.vit import KEYS
from jaxenc.packing import Batch, Budget, Placed, Slots
from jaxenc.preprocess.images import fit_patches, load_image, picture_item
from sharding_rules import GroupWork, Workload

EPS = 1e-5  # of every norm of the tower, whatever a config.json says

# of `PixtralVisionConfig`, `LlavaConfig`, `Mistral3Config` and `MistralConfig`: published files leave out what they do
# not change. The trap: Mistral's own activation is silu, but what a config.json that names none means is this one
VISION: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
LLAVA: Mapping[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
MISTRAL3: Mapping[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
    "spatial_merge_size": 2,
}
TEXT: Mapping[str, Any] = {"hidden_size": 4096, "rms_norm_eps": 1e-6}
# of the `vision_encoder` in Mistral's params.json
OWN: Mapping[str, Any] = {"adapter_bias": True, "spatial_merge_size": 1, "mm_projector_id": ""}


@dataclass(frozen=True)
class Config(EncoderConfig):
    """Sizes of the tower; the defaults are Pixtral-12B's.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        patch: side of a patch, pixels.
        image: longest side of a picture, pixels.
        activation: of the blocks.
        theta: base of the rotary frequencies.
        out: width of the projector's layers and of its rows, the language model's; None where there is no projector.
        merge: patches a side that become one row.
        merger_eps: of the norm before they are merged: the language model's, not the tower's.
        projector_activation: between the projector's layers.
        projector_bias: whether they have a bias.
    """

    layers: int = 24
    embed: int = 1024
    heads: int = 16
    mlp: int = 4096
    patch: int = 16
    image: int = 1024
    activation: Activation = "silu"
    theta: float = 10_000.0
    out: int | None = 5120
    merge: int = 1
    merger_eps: float = 1e-5
    projector_activation: Activation = "gelu_erf"
    projector_bias: bool = True

    family: ClassVar[str] = "pixtral"
    modality: ClassVar[str] = "vision"
    kinds: ClassVar[tuple[str, ...]] = ("images",)
    published: ClassVar[tuple[str, ...]] = (
        "mistral-community/pixtral-12b",
        "mistralai/Pixtral-12B-2409",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    )
    model_types: ClassVar[tuple[str, ...]] = ("pixtral", "llava (pixtral)", "mistral3 (pixtral)", "params.json")
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "patches": ("batch", "stem_length", "patch"),
        **SCHEDULE_AXES,
        "yx": ("batch", "length", None),
    }

    def __post_init__(self) -> None:
        """Sizes that fit together.

        Raises:
            ConfigError: heads are of no width that rotary pairs need.
        """
        require_rotary(self.family, embed=self.embed, heads=self.heads)

    @property
    def side(self) -> int:
        """Patches a side of the largest picture: the rotary table of Mistral's code."""
        return self.image // self.patch

    @property
    def typical_tokens(self) -> int:
        """Tokens of a picture of 448 x 448 pixels."""
        return (448 // self.patch // self.merge) ** 2 * self.group

    @property
    def transformer(self) -> TransformerConfig:
        """The stack. Checkpoints hold q, k and v apart; they are read into one kernel, for one product."""
        return TransformerConfig(
            self.layers,
            self.embed,
            self.heads,
            self.head_dim,
            self.mlp,
            EPS,
            activation=self.activation,
            fused_qkv=True,
            norm="rms",
            gated=True,
            rotary_pairs="halves",
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json, a LLaVA's, a Mistral3's or that of the tower alone, or Mistral's params.json.

        Raises:
            ConfigError: a size is wrong, or a setting names a function that this tower does not compute.
        """
        if "vision_encoder" in config:
            return cls._from_params(config)
        if "vision_config" not in config:
            return cls(**tower_sizes(with_defaults(VISION, config)), out=None)
        merging = config["model_type"] == "mistral3"
        config = with_defaults(MISTRAL3 if merging else LLAVA, config)
        require(cls.family, config, {"vision_feature_layer": -1})
        if not merging:
            require(cls.family, config, {"vision_feature_select_strategy": "full"})
        text = with_defaults(TEXT, config.get("text_config") or {})
        sizes = read_sizes(cls.family, text, {"out": ("hidden_size",)})
        if merging:
            sizes |= read_sizes(cls.family, config, {"merge": ("spatial_merge_size",)})
            sizes["merger_eps"] = text["rms_norm_eps"]
        return cls(
            **tower_sizes(with_defaults(VISION, config["vision_config"])),
            **sizes,
            projector_activation=activation_of(cls.family, config, "projector_hidden_act"),
            projector_bias=config["multimodal_projector_bias"],
        )

    @classmethod
    def _from_params(cls, params: Mapping[str, Any]) -> "Config":
        vision = with_defaults(OWN, params["vision_encoder"])
        sizes = read_sizes(cls.family, {**vision, "dim": params.get("dim")}, {"out": ("dim",)})
        sizes |= read_sizes(cls.family, vision, {"merge": ("spatial_merge_size",)})
        merging = sizes["merge"] > 1
        known = {"mm_projector_id": "patch_merge" if merging else "", "add_pre_mm_projector_layer_norm": merging}
        # pictures are read as large as the rotary table allows
        require(cls.family, vision, {**known, "max_image_size": vision.get("image_size")})
        if merging:
            # what transformers' converter makes of it
            sizes["merger_eps"] = params.get("norm_eps", EPS)
        return cls(**tower_sizes({**vision, "hidden_act": "silu"}), **sizes, projector_bias=vision["adapter_bias"])

    def build(self, *, dtype: DTypeLike) -> "Pixtral":
        return Pixtral(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes("patch", "merge", "out", "projector_bias"))

    # --- how much there is

    def pieces(self, item: VisionItem) -> tuple[int, ...]:
        """A picture attends as a whole."""
        return (len(item.patches),)

    def output_rows(self, item: VisionItem) -> int:
        """Rows that come out: one for every merge x merge patches."""
        return len(item.patches) // self.group

    def workload(self, items: Sequence[int]) -> Workload:
        group = self.group
        stem = patch_work(items, features=3 * self.patch**2, embed=self.embed, unit=group)
        groups = [*self.transformer.work(items, windows=False, unit=group), stem]
        if self.merge > 1:
            merger = GroupWork(
                "merger",
                None,
                "projector_length",
                tuple(2.0 * self.embed**2 * n for n in items),
                unit=group,
                live=tuple(self.embed * (n + n / group) for n in items),
            )
            groups.append(merger)
        if self.out is not None:
            sizes = {"inputs": self.embed, "hidden": self.out, "out": self.out}
            groups.append(projector_work(items, **sizes, group=group))
        return Workload(tuple(items), tuple(groups))

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from: the last but one holds the largest picture, the last four of them."""
        largest = -(-(self.side**2) // 1024) * 1024
        whole = (*(length for length in (256, 1024, 4096) if length < largest), largest, 4 * largest)
        return tuple(-(-length // self.group) * self.group for length in whole)

    # --- items in, arrays out

    def read(self, kind: str, source: Any, *, name: str) -> Iterable[VisionItem]:
        """The item of one picture, as the published processor makes it: scaled down to the longest side, never up."""
        pixels = fit_patches(load_image(source, name=name), longest=self.image, multiple=self.patch * self.merge)
        return [picture_item(pixels, patch=self.patch, mean=MEAN, std=STD, name=name)]

    def check(self, item: VisionItem) -> None:
        t, h, w = item.grid
        item.check_features(3 * self.patch**2)
        if t > 1 or h % self.merge or w % self.merge or max(h, w) > self.side:
            raise InputError(
                f"{item.name}: the grid is {item.grid}; expected one picture with sides that are multiples of "
                f"{self.merge}, up to {self.side}"
            )

    def layout(
        self, items: Sequence[VisionItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """One batch: each token's patch, its place in the picture, and which tokens are of one picture.

        A picture's tokens are in the order of the rows they become: of one patch each, in raster order.
        """
        b, n, group = budget.rows, budget.row, self.group
        tokens, rows = Slots.empty(b, n), Slots.empty(b, n // group)
        arrays = {
            "patches": np.zeros((b, n, 3 * self.patch**2), np.float32),
            "segments": np.zeros((b, n), np.int32),
            "yx": np.zeros((b, n, 2), np.int32),
        }
        for segment, place in packing.segments(placed):
            item = items[place.item]
            order = merge_order(item.grid, self.merge)[place.start : place.start + place.size]
            at = (place.row, slice(place.offset, place.offset + place.size))
            arrays["patches"][at] = item.patches[order]
            arrays["segments"][at] = segment
            arrays["yx"][at] = np.stack(np.divmod(order, item.grid[2]), axis=-1)
            tokens.fill(place.row, place.offset, place.item, order)
            made = np.arange(place.start // group, (place.start + place.size) // group)
            rows.fill(place.row, place.offset // group, place.item, made)
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        return Batch(arrays, tokens, rows)


VARIANTS: Mapping[str, Config] = {
    "12b": Config(),
    "mistral-small-3.1": Config(patch=14, image=1540, merge=2, projector_bias=False),
}


class Pixtral(EncoderModule):
    """Patches -> output rows."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the tower, and its projector where it has one."""
        c = self.config = config
        self.patch_embed = Linear({"embed": c.embed}, {"patch": 3 * c.patch**2}, bias=False, dtype=dtype)
        self.pre_norm = RMSNorm({"embed": c.embed}, eps=EPS, dtype=dtype)
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.merger = Merger(c.embed, group=c.group, eps=c.merger_eps, dtype=dtype) if c.merge > 1 else None
        self.projector = projector(c, c.out, dtype=dtype) if c.out is not None else None

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b rows out"], dict[int, Float[Array, "b n embed"]]]:
        c = self.config
        x = self.pre_norm(embed_patches(self.patch_embed, inputs, shard=shard))
        x, captured = run_blocks(
            self.layers,
            shard(x, "batch", "length", "embed"),
            schedule=Schedule.of(inputs, window=c.window),
            rotary=axial_rotary(
                inputs["yx"],
                head_dim=c.head_dim,
                theta=c.theta,
                positions=c.side,
                order="rows first",
                shared=False,
            ),
            shard=shard,
            capture=capture,
        )
        if self.merger is not None:
            x = self.merger(x, shard=shard)
        if self.projector is None:
            return shard(x, "batch", "length", "embed"), captured
        x = shard(x, "batch", "projector_length", "projector_in")
        x = self.projector(x, length="projector_length", shard=shard)
        return shard(x, "batch", "projector_length", "projector_out"), captured


class Merger(nnx.Module):
    """Each group of consecutive tokens, normalised one by one, becomes a token of the same width: one layer."""

    def __init__(self, embed: int, *, group: int, eps: float, dtype: DTypeLike):
        """Declares norm and layer."""
        self.norm = RMSNorm({"embed": embed}, eps=eps, dtype=dtype)
        self.layer = Linear({"projector_in": embed}, {"merge": group, "embed": embed}, bias=False, dtype=dtype)

    def __call__(self, x: Float[Array, "b n embed"], *, shard: Shard) -> Float[Array, "b rows embed"]:
        """Merges consecutive tokens."""
        groups = x.reshape(x.shape[0], -1, *self.layer.kernel.shape[1:])
        groups = self.norm(shard(groups, "batch", "projector_length", "merge", "embed"))
        return shard(self.layer(groups), "batch", "projector_length", "projector_in")


def projector(config: Config, out: int, *, dtype: DTypeLike) -> MLP:
    """What makes rows of the language model's width `out`: two layers."""
    return MLP(
        ("projector_in", config.embed),
        ("projector_mlp", out),
        ("projector_out", out),
        activation=config.projector_activation,
        bias=config.projector_bias,
        dtype=dtype,
    )


def tower_sizes(vision: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a tower's own part of a published config gives.

    Args:
        vision: that part, with the defaults of its class filled in.

    Raises:
        ConfigError: a size is missing or wrong, or the function is not known here.
    """
    sizes = read_sizes(Config.family, vision, KEYS)
    require(Config.family, vision, {"num_channels": 3, "head_dim": sizes["embed"] // sizes["heads"]})
    rope = vision.get("rope_parameters") or {}
    require(Config.family, rope, {"rope_type": "axial"})
    theta = rope.get("rope_theta", vision.get("rope_theta", Config.theta))
    return {**sizes, "theta": float(theta), "activation": activation_of(Config.family, vision, "hidden_act")}
