"""Kimi-K2.5's vision tower (MoonViT3d) with its patch-merger projector.

Source: the published model code and `Kimi_K25VisionModel` of transformers 5.24.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import kimi_k25 as keys
from jaxenc import packing
from jaxenc.errors import ConfigError, InputError
from jaxenc.items import VisionItem
from jaxenc.layers.linear import Linear
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.patches import PatchMerger, embed_patches, merge_order, merger_work, patch_work
from jaxenc.layers.resample import bicubic_taps, grid_taps, weighted_gather
from jaxenc.layers.rotary import axial_rotary
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.sinusoids import sinusoids
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.base import EncoderConfig, EncoderModule
from jaxenc.models.published import Keys, read_sizes, require, require_rotary
from jaxenc.packing import Batch, Budget, Placed, Slots
from jaxenc.preprocess.images import load_image, navit_item
from jaxenc.preprocess.video import iter_frames, navit_video_items
from sharding_rules import Workload

EPS = 1e-5  # LayerNorm's, everywhere: PyTorch's default, ten times Flax's
ROTARY_POSITIONS = 512  # the rotary table of the published code, and so the longest side of a grid

# the published processor's settings
IMAGE_PATCHES = 16_384
FRAME_PATCHES = 4_096
SAMPLE_FPS = 2.0
MEAN = STD = (0.5, 0.5, 0.5)

KEYS: Mapping[str, Keys] = {
    "layers": ("vt_num_hidden_layers", "num_hidden_layers"),
    "embed": ("vt_hidden_size", "hidden_size"),
    "heads": ("vt_num_attention_heads", "num_attention_heads"),
    "mlp": ("vt_intermediate_size", "intermediate_size"),
    "patch": ("patch_size",),
    "position_h": ("init_pos_emb_height", "pos_emb_height"),
    "position_w": ("init_pos_emb_width", "pos_emb_width"),
    "frames": ("init_pos_emb_time", "pos_emb_time"),
    "merge": ("merge_kernel_size",),
}


@dataclass(frozen=True)
class Config(EncoderConfig):
    """Sizes of the tower; the defaults are Kimi-K2.5's, K2.6's and K2.7's.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        patch: side of a patch, pixels.
        position_h: rows of the learned position table.
        position_w: its columns.
        frames: most frames in one clip.
        merge: patches a side that become one output row.
        out: width of an output row, the language model's.
        projector_eps: of the projector's norm.
        theta: base of the rotary frequencies.
    """

    layers: int = 27
    embed: int = 1152
    heads: int = 16
    mlp: int = 4304
    patch: int = 14
    position_h: int = 64
    position_w: int = 64
    frames: int = 4
    merge: int = 2
    out: int = 7168
    projector_eps: float = 1e-5
    theta: float = 10_000.0

    family: ClassVar[str] = "kimi_k25"
    modality: ClassVar[str] = "vision"
    kinds: ClassVar[tuple[str, ...]] = ("images", "videos")
    published: ClassVar[tuple[str, ...]] = ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2.7")
    model_types: ClassVar[tuple[str, ...]] = ("kimi_k25", "kimi_k25_vision")
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "patches": ("batch", "stem_length", "patch"),
        **SCHEDULE_AXES,
        "frame": ("batch", "length"),
        "yx": ("batch", "length", None),
        "tap_index": ("batch", "stem_length", None),
        "tap_weight": ("batch", "stem_length", None),
        "pool_index": ("batch", "projector_length", None),
        "pool_weight": ("batch", "projector_length", None),
    }

    @property
    def typical_tokens(self) -> int:
        """Tokens of a picture of 448 x 448 pixels."""
        return (448 // self.patch) ** 2

    @property
    def transformer(self) -> TransformerConfig:
        """The stack. GELU is the tanh approximation here, and erf's in the projector."""
        return TransformerConfig(
            self.layers, self.embed, self.heads, self.head_dim, self.mlp, EPS, activation="gelu_tanh", fused_qkv=True
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json: whole or its `vision_config`, with `vt_*`, plain or transformers' keys.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        vision = config.get("vision_config", config)
        sizes = read_sizes(cls.family, vision, KEYS)
        merge = sizes["merge"]
        if not isinstance(merge, int):
            if len(set(merge)) != 1:
                raise ConfigError(
                    f"{cls.family}: merge_kernel_size is {merge}; only square groups of patches are known"
                )
            sizes["merge"] = merge[0]
        known = {"merge_type": "sd2_tpool", "pos_emb_type": "divided_fixed", "video_attn_type": "spatial_temporal"}
        require(cls.family, vision, {**known, "mm_projector_type": "patchmerger", "hidden_act": "gelu_pytorch_tanh"})
        text = config.get("text_config") or {}
        out = vision.get("text_hidden_size") or text.get("hidden_size") or cls.out
        eps = vision.get("projector_ln_eps", config.get("projection_layer_norm_eps", cls.projector_eps))
        theta = (vision.get("rope_parameters") or {}).get("rope_theta", cls.theta)
        require_rotary(cls.family, embed=sizes["embed"], heads=sizes["heads"])
        return cls(**sizes, out=out, projector_eps=eps, theta=theta)

    def build(self, *, dtype: DTypeLike) -> "KimiK25":
        return KimiK25(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(
            **self.sizes("patch", "position_h", "position_w", "out"), projector_in=self.group * self.embed
        )

    # --- how much there is

    def pieces(self, item: VisionItem) -> tuple[int, ...]:
        """Tokens of each part that cannot be divided: a clip attends as a whole."""
        return (int(np.prod(item.grid)),)

    def item_unit(self, item: VisionItem) -> int:
        """Tokens that stay together where an item is spread over devices: those that become one output row."""
        return item.grid[0] * self.group

    def output_rows(self, item: VisionItem) -> int:
        """Rows that come out: h w / merge^2 whatever the number of frames, which are averaged."""
        return item.grid[1] * item.grid[2] // self.group

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group (an item taken as one frame)."""
        group = self.group
        stem = patch_work(items, features=3 * self.patch**2, embed=self.embed, unit=group)
        projector = merger_work(items, embed=self.embed, out=self.out, group=group)
        return Workload(tuple(items), (*self.transformer.work(items, windows=False, unit=group), stem, projector))

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from. 7168 x 500 pixels pad to 17,640 patches, beyond the processor's own limit."""
        return (256, 1024, 4096, 8192, 17_920, 65_536)

    # --- items in, arrays out

    def read(self, kind: str, source: Any, *, name: str) -> Iterable[VisionItem]:
        """The item of one picture, or those of a video's chunks, as the published processor makes them."""
        if kind == "images":
            frames = load_image(source, name=name)[None]
            return [
                navit_item(
                    frames,
                    patch=self.patch,
                    merge=self.merge,
                    patch_limit=IMAGE_PATCHES,
                    side_limit=ROTARY_POSITIONS,
                    mean=MEAN,
                    std=STD,
                    name=name,
                )
            ]
        video, fps = source if isinstance(source, tuple) else (source, None)
        return navit_video_items(
            iter_frames(video, fps=fps, sample_fps=SAMPLE_FPS, name=name),
            frames_per_chunk=self.frames,
            patch=self.patch,
            merge=self.merge,
            patch_limit=FRAME_PATCHES,
            side_limit=ROTARY_POSITIONS,
            mean=MEAN,
            std=STD,
            name=name,
        )

    def check(self, item: VisionItem) -> None:
        t, h, w = item.grid
        item.check_features(3 * self.patch**2)
        if t > self.frames or h % self.merge or w % self.merge or max(h, w) > ROTARY_POSITIONS:
            raise InputError(
                f"{item.name}: the grid is {item.grid}; expected at most {self.frames} frames and sides that are "
                f"multiples of {self.merge}, up to {ROTARY_POSITIONS}"
            )

    def layout(
        self, items: Sequence[VisionItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """Index arrays of one batch: where each patch is, which patches an output row averages.

        An item's tokens are in the order of the output rows they become, so that any run of whole rows can be apart.
        """
        b, n, group = budget.rows, budget.row, self.group
        tokens, rows = Slots.empty(b, n), Slots.empty(b, n // group)
        arrays = {
            "patches": np.zeros((b, n, 3 * self.patch**2), np.float32),
            "segments": np.zeros((b, n), np.int32),
            "frame": np.zeros((b, n), np.int32),
            "yx": np.zeros((b, n, 2), np.int32),
            "tap_index": np.zeros((b, n, 16), np.int32),
            "tap_weight": np.zeros((b, n, 16), np.float32),
            "pool_index": np.zeros((b, n, self.frames), np.int32),
            "pool_weight": np.zeros((b, n, self.frames), np.float32),
        }
        for segment, place in packing.segments(placed):
            item = items[place.item]
            t, h, w = item.grid
            order = merge_order(item.grid, self.merge)[place.start : place.start + place.size]
            at = (place.row, slice(place.offset, place.offset + place.size))
            frame, y, x = np.unravel_index(order, item.grid)
            arrays["patches"][at] = item.patches[order]
            arrays["segments"][at] = segment
            # row 0 of the temporal table is zero: a single frame gets no temporal term, frame 0 of a clip gets row 1
            arrays["frame"][at] = frame + 1 if t > 1 else 0
            arrays["yx"][at] = np.stack([y, x], axis=-1)
            axes = bicubic_taps(h, self.position_h), bicubic_taps(w, self.position_w)
            index, weight = grid_taps(*axes, width=self.position_w)
            arrays["tap_index"][at] = index[y, x]
            arrays["tap_weight"][at] = weight[y, x]
            tokens.fill(place.row, place.offset, place.item, order)

            made = place.size // (t * group)  # output rows, each the mean over t frames of group patches
            pooled = (place.row, slice(place.offset, place.offset + made * group))
            patch = np.arange(made)[:, None] * t * group + np.arange(group)
            arrays["pool_index"][pooled] = place.offset + patch.reshape(-1, 1) + np.arange(self.frames) % t * group
            arrays["pool_weight"][pooled] = np.where(np.arange(self.frames) < t, 1 / t, 0)
            first = place.start // (t * group)
            rows.fill(place.row, place.offset // group, place.item, np.arange(first, first + made))
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        return Batch(arrays, tokens, rows)


VARIANTS: Mapping[str, Config] = {"k2.5": Config()}


class KimiK25(EncoderModule):
    """Patches -> output rows."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the tower and its projector."""
        c = self.config = config
        self.patch_embed = Linear({"embed": c.embed}, {"patch": 3 * c.patch**2}, dtype=dtype)
        self.position_embed = named_parameter(
            {"position_h": c.position_h, "position_w": c.position_w, "embed": c.embed}, "normal", dtype=dtype
        )
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.final_norm = LayerNorm(c.embed, eps=EPS, dtype=dtype)
        self.projector = PatchMerger(c.embed, c.out, group=c.group, eps=c.projector_eps, dtype=dtype)

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b rows out"], dict[int, Float[Array, "b n embed"]]]:
        c, dtype = self.config, self.final_norm.scale.dtype
        x = embed_patches(self.patch_embed, inputs, shard=shard)
        table = self.position_embed[...].reshape(-1, c.embed)
        position = weighted_gather(table, inputs["tap_index"], inputs["tap_weight"])
        position = position + jnp.asarray(temporal_table(c.frames, c.embed))[inputs["frame"]]
        x = shard((x + position).astype(dtype), "batch", "length", "embed")

        rotary = axial_rotary(inputs["yx"], head_dim=c.head_dim, theta=c.theta, positions=ROTARY_POSITIONS)
        x, captured = run_blocks(
            self.layers,
            x,
            schedule=Schedule.of(inputs, window=c.window),
            rotary=rotary,
            shard=shard,
            capture=capture,
        )

        x = self.final_norm(x)
        # the mean over frames is taken in float32, and tokens come out grouped as the projector merges them
        x = jax.vmap(weighted_gather)(x, inputs["pool_index"], inputs["pool_weight"]).astype(dtype)
        return self.projector(x, shard=shard), captured


def temporal_table(frames: int, embed: int) -> Float[np.ndarray, "frames+1 embed"]:
    """Sinusoids of a frame's index in its clip, [sin | cos] of index * 10000^(-j / (embed / 2)); row 0 is zero."""
    return np.concatenate([np.zeros((1, embed), np.float32), sinusoids(frames, embed, steps=embed // 2)])
