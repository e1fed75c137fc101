"""What the vision towers of the Qwen family and of GLM-V have in common; each family's file says what is its own.

Source: `Qwen2VisionTransformerPretrainedModel`, `Qwen2_5_VisionTransformerPretrainedModel`, `Qwen3VLVisionModel`,
`Qwen3OmniMoeVisionEncoder` and `Glm4vVisionModel` of transformers 5.24.

A patch covers two frames. Tokens come in the order of the rows they are merged to. Those of a pair of frames attend to
each other, and pairs are encoded apart: each is a piece of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import qwen_vision as keys
from jaxenc import packing
from jaxenc.errors import ConfigError, InputError
from jaxenc.items import VisionItem
from jaxenc.layers.linear import Linear
from jaxenc.layers.mlp import Activation
from jaxenc.layers.norms import Kind, norm_of
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.patches import PatchMerger, embed_patches, merge_order, merger_work, patch_work
from jaxenc.layers.resample import bicubic_taps, bilinear_taps, grid_taps, weighted_gather
from jaxenc.layers.rotary import axial_rotary
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.base import EncoderConfig, EncoderModule
from jaxenc.models.published import Keys, read_sizes, require, require_rotary
from jaxenc.packing import Batch, Budget, Placed, Slots
from jaxenc.preprocess.qwen import FRAMES, FrameRule, QwenSettings, qwen_image_item, qwen_video_items
from sharding_rules import GroupWork, Workload

# sides of a grid are below it: no tower has a limit of its own, and the longest picture the processors make has 3620
ROTARY_POSITIONS = 4096

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
# how a table of positions is resized: taps an axis
TAPS = {"bilinear": bilinear_taps, "bicubic": bicubic_taps}
KEYS: Mapping[str, Keys] = {
    "layers": ("depth", "num_hidden_layers"),
    "embed": ("hidden_size",),
    "heads": ("num_heads", "num_attention_heads"),
    "mlp": ("intermediate_size",),
    "patch": ("patch_size",),
    "merge": ("spatial_merge_size",),
    "out": ("out_hidden_size",),
}


@dataclass(frozen=True)
class QwenConfig(EncoderConfig):
    """Sizes of a tower. A family says which of the parts it has, and gives the defaults.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        out: width of the language model.
        patch: side of a patch, pixels.
        merge: patches a side that become one output row.
        theta: base of the rotary frequencies.
        positions: side of the square table of learned positions; 0 where there is none.
        deepstack: blocks (from 0) whose outputs are merged as well: each row holds the merged output of the last block,
            then theirs, one after the other, `out` values each. So the serving engines pass them on.
        window_pixels: side of an attention window; 0 where there are none.
        whole: blocks (from 0) that attend to whole frames where the others do to windows.
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    out: int
    patch: int = 14
    merge: int = 2
    theta: float = 10_000.0
    positions: int = 0
    deepstack: tuple[int, ...] = ()
    window_pixels: int = 0
    whole: tuple[int, ...] = ()

    family: ClassVar[str]
    modality: ClassVar[str] = "vision"
    kinds: ClassVar[tuple[str, ...]] = ("images", "videos")
    published: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]]

    activation: ClassVar[Activation]
    activation_name: ClassVar[str]
    eps: ClassVar[float] = 1e-6  # of every norm: Flax's default, a tenth of PyTorch's
    norm: ClassVar[Kind] = "layer"
    gated: ClassVar[bool] = False
    bias: ClassVar[bool] = True  # of the layers of the blocks
    patch_bias: ClassVar[bool] = False
    patch_norm: ClassVar[bool] = False  # of embedded patches, before positions are added
    resized: ClassVar[Literal["bilinear", "bicubic"]] = "bilinear"
    mean: ClassVar[tuple[float, float, float]] = CLIP_MEAN
    std: ClassVar[tuple[float, float, float]] = CLIP_STD
    image_pixels: ClassVar[tuple[int, int]] = (56 * 56, 3584 * 3584)
    video_pixels: ClassVar[tuple[int, int]] = (128 * 28 * 28, 768 * 28 * 28)
    whole_videos: ClassVar[bool] = False
    paired_pictures: ClassVar[bool] = False
    frame_rule: ClassVar[FrameRule] = "even"

    def __post_init__(self) -> None:
        """Tuples, where a stored config has lists; sizes that fit together.

        Raises:
            ConfigError: heads are of no width that rotary pairs need, or a block that is named is not there.
        """
        for name in ("deepstack", "whole"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require_rotary(self.family, embed=self.embed, heads=self.heads)
        if wrong := [block for block in (*self.deepstack, *self.whole) if not 0 <= block < self.layers]:
            raise ConfigError(f"{self.family}: there is no block {wrong[0]}: the tower has {self.layers}")

    # --- what it is

    @property
    def input_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Logical axes of each array that `layout` makes."""
        axes: dict[str, tuple[str | None, ...]] = {
            "patches": ("batch", "stem_length", "patch"),
            **SCHEDULE_AXES,
            "yx": ("batch", "length", None),
        }
        if self.positions:
            axes |= {"tap_index": ("batch", "stem_length", None), "tap_weight": ("batch", "stem_length", None)}
        if self.window_pixels:
            axes |= {f"window_{name}": names for name, names in SCHEDULE_AXES.items()}
        return axes

    @property
    def typical_tokens(self) -> int:
        """Tokens of a picture of 448 x 448 pixels."""
        return (448 // self.patch) ** 2

    @property
    def features(self) -> int:
        """Values of a patch."""
        return 3 * FRAMES * self.patch**2

    @property
    def transformer(self) -> TransformerConfig:
        """The stack."""
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
            rotary_pairs="halves",
            qkv_bias=self.bias,
            out_bias=self.bias,
            mlp_bias=self.bias,
            windowed=self.layers - len(self.whole) if self.window_pixels else 0,
            window=(self.window_pixels // self.patch) ** 2,
        )

    @property
    def settings(self) -> QwenSettings:
        """The published processor's."""
        return QwenSettings(
            self.patch,
            self.merge,
            self.mean,
            self.std,
            self.image_pixels,
            self.video_pixels,
            whole_videos=self.whole_videos,
            paired_pictures=self.paired_pictures,
            frame_rule=self.frame_rule,
        )

    @classmethod
    def read_hf(cls, vision: Mapping[str, Any], names: Mapping[str, Keys] = KEYS, **rest: Any) -> Self:
        """Reads the tower's part of a published config.json.

        Args:
            vision: that part.
            names: field -> names it is published under.
            rest: fields that are read otherwise.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        sizes = read_sizes(cls.family, vision, names)
        known = {"in_channels": 3, "in_chans": 3, "temporal_patch_size": FRAMES, "hidden_act": cls.activation_name}
        require(cls.family, vision, known)
        theta = (vision.get("rope_parameters") or {}).get("rope_theta", cls.theta)
        return cls(**sizes, theta=theta, **rest)

    def build(self, *, dtype: DTypeLike) -> "QwenVision":
        return QwenVision(self, dtype=dtype)

    def merger(self, *, norm_of_group: bool = False, dtype: DTypeLike) -> "Merger":
        """What makes output rows of a block's tokens, in groups of merge x merge."""
        return PatchMerger(
            self.embed,
            self.out,
            group=self.group,
            eps=self.eps,
            norm=self.norm,
            norm_of_group=norm_of_group,
            dtype=dtype,
        )

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(
            self.family,
            **self.sizes("patch", "group", "out", "patch_bias"),
            positions=self.positions**2,
            deepstack=len(self.deepstack),
            norm_bias=self.norm == "layer",
        )

    # --- how much there is

    def pieces(self, item: VisionItem) -> tuple[int, ...]:
        """Tokens of each part that cannot be divided: a pair of frames attends by itself."""
        t, h, w = item.grid
        return (h * w,) * t

    def output_rows(self, item: VisionItem) -> int:
        """Rows that come out: one for every merge x merge patches of every pair of frames."""
        return int(np.prod(item.grid)) // self.group

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group (an item taken as one pair of frames)."""
        unit = self.group
        stem = patch_work(items, features=self.features, embed=self.embed, unit=unit)
        blocks = self.transformer.work(items, windows=False, unit=unit)
        return Workload(tuple(items), (*blocks, stem, self.projector_work(items)))

    def projector_work(self, items: Sequence[int]) -> GroupWork:
        """The part of `workload` that mergers have."""
        mergers = 1 + len(self.deepstack)
        return merger_work(items, embed=self.embed, out=self.out, group=self.group, count=mergers)

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from. The largest pictures of the published processors have 65,536 patches."""
        return (256, 1024, 4096, 16_384, 65_536, 131_072)

    # --- items in, arrays out

    def read(self, kind: str, source: Any, *, name: str) -> Iterable[VisionItem]:
        """The item of one picture, or one for each pair of a video's frames, as the published processor makes them."""
        if kind == "images":
            return [qwen_image_item(source, self.settings, name=name)]
        video, fps = source if isinstance(source, tuple) else (source, None)
        return qwen_video_items(video, self.settings, fps=fps, name=name)

    def check(self, item: VisionItem) -> None:
        """Refuses an item that this tower cannot encode. Its patches are in the order of `qwen_patches`.

        Raises:
            InputError: names the item and what is wrong with it.
        """
        _, h, w = item.grid
        item.check_features(self.features)
        if h % self.merge or w % self.merge or max(h, w) >= ROTARY_POSITIONS:
            raise InputError(
                f"{item.name}: the grid is {item.grid}; expected sides that are multiples of {self.merge}, below "
                f"{ROTARY_POSITIONS}"
            )

    def layout(
        self, items: Sequence[VisionItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """Index arrays of one batch: where each patch is, and to which it attends.

        Where there are windows, the tokens of each lie side by side, and windows are not padded to a common length:
        they are smaller at edges, and padding costs as much as any token in all of a block (39 MFLOPs in Qwen2.5-VL's).
        There would be an eighth more tokens for a picture of 1000 x 700 pixels, 2.6 times as many for 140 x 140. In a
        schedule of blocks of 256 tokens, each meeting itself and at most its neighbours, a token's scores cost 1 to 4.
        """
        b, n, group = budget.rows, budget.row, self.merge**2
        tokens, rows = Slots.empty(b, n), Slots.empty(b, n // group)
        arrays = {
            "patches": np.zeros((b, n, self.features), np.float32),
            "yx": np.zeros((b, n, 2), np.int32),
        }
        if self.positions:
            taps = {"bilinear": 4, "bicubic": 16}[self.resized]
            arrays |= {"tap_index": np.zeros((b, n, taps), np.int32), "tap_weight": np.zeros((b, n, taps), np.float32)}
        segments, windows = np.zeros((2, b, n), np.int32)
        first_window: dict[int, int] = {}
        next_window = 1
        for segment, place in packing.segments(placed):
            item = items[place.item]
            _, h, w = item.grid
            order, window = windows_of((h, w), merge=self.merge, side=self.window_pixels // self.patch)
            if segment not in first_window:
                first_window[segment], next_window = next_window, next_window + window[-1] + 1
            part = slice(place.start, place.start + place.size)
            frame_tokens = order[part]
            at = (place.row, slice(place.offset, place.offset + place.size))
            token = place.piece * h * w + frame_tokens
            y, x = np.divmod(merge_order((1, h, w), self.merge)[frame_tokens], w)
            arrays["patches"][at] = item.patches[token]
            arrays["yx"][at] = np.stack([y, x], axis=-1)
            segments[at], windows[at] = segment, first_window[segment] + window[part]
            if self.positions:
                rows_taps, columns_taps = (TAPS[self.resized](size, self.positions) for size in (h, w))
                index, weight = grid_taps(rows_taps, columns_taps, width=self.positions)
                arrays["tap_index"][at], arrays["tap_weight"][at] = index[y, x], weight[y, x]
            tokens.fill(place.row, place.offset, place.item, token)
            rows.fill(place.row, place.offset // group, place.item, token[::group] // group)
        shared = parts.get("batch", 1)
        arrays |= schedule(segments, budget, window=self.window, parts=shared)
        if self.window_pixels:
            made = schedule(windows, budget, window=self.window, parts=shared)
            arrays |= {f"window_{name}": array for name, array in made.items()}
        return Batch(arrays, tokens, rows)


class Merger(Protocol):
    """A module that makes output rows of tokens."""

    def __call__(self, x: Float[Array, "b n embed"], *, shard: Shard) -> Float[Array, "b rows out"]:
        """Merges consecutive tokens."""


class QwenVision(EncoderModule):
    """Patches -> output rows."""

    def __init__(self, config: QwenConfig, *, dtype: DTypeLike):
        """Declares the tower and its mergers."""
        c = self.config = config
        self.patch_embed = Linear({"embed": c.embed}, {"patch": c.features}, bias=c.patch_bias, dtype=dtype)
        self.patch_norm = norm_of(c.norm, c.embed, eps=c.eps, dtype=dtype) if c.patch_norm else None
        table = {"position": c.positions**2, "embed": c.embed}
        self.position_embed = named_parameter(table, "normal", dtype=dtype) if c.positions else None
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.projector = c.merger(dtype=dtype)

        @nnx.vmap(axis_size=len(c.deepstack), transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack() -> Merger:
            return c.merger(norm_of_group=True, dtype=dtype)

        self.deepstack = stack() if c.deepstack else None

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b rows out"], dict[int, Float[Array, "b n embed"]]]:
        c = self.config
        x = embed_patches(self.patch_embed, inputs, shard=shard)
        if self.patch_norm is not None:
            x = self.patch_norm(x)
        if self.position_embed is not None:
            position = weighted_gather(self.position_embed[...], inputs["tap_index"], inputs["tap_weight"])
            x = (x + position).astype(x.dtype)
        frames = Schedule.of(inputs, window=c.window)
        windows = {name: inputs[f"window_{name}"] for name in SCHEDULE_AXES if f"window_{name}" in inputs}
        x, captured = run_blocks(
            self.layers,
            shard(x, "batch", "length", "embed"),
            schedule=Schedule.of(windows, window=c.window) if windows else frames,
            others=(frames, c.whole) if windows else None,
            rotary=axial_rotary(
                inputs["yx"],
                head_dim=c.head_dim,
                theta=c.theta,
                positions=ROTARY_POSITIONS,
                order="rows first",
            ),
            shard=shard,
            capture=tuple(sorted({*capture, *c.deepstack})),
        )
        rows = [self.projector(x, shard=shard)]
        if self.deepstack is not None:
            graph, stacked = nnx.split(self.deepstack)
            for place, block in enumerate(c.deepstack):
                merger = nnx.merge(graph, jax.tree.map(lambda leaf, place=place: leaf[place], stacked))
                rows.append(merger(captured[block], shard=shard))
        return jnp.concatenate(rows, axis=-1), {block: captured[block] for block in capture}


@lru_cache(maxsize=64)  # every row that has a share of a frame asks for it
def windows_of(grid: tuple[int, int], *, merge: int, side: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The tokens of a frame window by window, and the window of each.

    Args:
        grid: rows and columns of patches.
        merge: patches a side that are merged, which stay together.
        side: patches of a window; 0 for one window.

    Returns:
        Tokens, numbered in the order of the rows they are merged to: of the first window, of the next one to its right.
        And numbers of windows, ascending from 0.
    """
    h, w = (size // merge for size in grid)
    side = side // merge or max(h, w)
    y, x = np.divmod(np.arange(h * w), w)
    window = y // side * -(-w // side) + x // side
    order = np.argsort(window, kind="stable")
    tokens = order[:, None] * merge**2 + np.arange(merge**2)
    return tokens.ravel(), np.repeat(window[order], merge**2)
