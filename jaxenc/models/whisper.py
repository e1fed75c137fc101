"""Whisper's encoder.

Source: `WhisperEncoder` of transformers 5.24. It reads exactly 30 seconds: shorter recordings are padded with silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from numpy.lib.stride_tricks import sliding_window_view

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import whisper as keys
from jaxenc import packing
from jaxenc.errors import ConfigError, InputError
from jaxenc.items import AudioItem
from jaxenc.layers.linear import Linear, conv_flops
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.published import Keys, read_sizes, require
from jaxenc.packing import Batch, Budget, Placed, Slots
from jaxenc.preprocess.audio import HOP_SAMPLES, load_audio, log_mel, pad_or_trim
from sharding_rules import GroupWork, Workload

EPS = 1e-5  # LayerNorm's: PyTorch's default, ten times Flax's
TOKEN_FRAMES = 5  # mel frames that token p depends on before attention: 2 p - 2 to 2 p + 2

KEYS: Mapping[str, Keys] = {
    "layers": ("encoder_layers",),
    "embed": ("d_model",),
    "heads": ("encoder_attention_heads",),
    "mlp": ("encoder_ffn_dim",),
    "mel": ("num_mel_bins",),
    "positions": ("max_source_positions",),
}


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        mel: mel bins.
        positions: tokens, always so many.
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    mel: int = 80
    positions: int = 1500

    family: ClassVar[str] = "whisper"
    modality: ClassVar[str] = "audio"
    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    published: ClassVar[tuple[str, ...]] = ("openai/whisper-large-v3", "openai/whisper-tiny.en", "openai/whisper-base")
    model_types: ClassVar[tuple[str, ...]] = ("whisper",)
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "mel": ("batch", "stem_length", None, None),
        "position": ("batch", "stem_length"),
        **SCHEDULE_AXES,
    }

    @property
    def unit(self) -> int:
        """Tokens that a row's length is a multiple of: a recording."""
        return self.positions

    @property
    def typical_tokens(self) -> int:
        """Tokens of a recording."""
        return self.positions

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed // self.heads

    @property
    def frames(self) -> int:
        """Mel frames read: the second convolution halves them."""
        return 2 * self.positions

    @property
    def window(self) -> int:
        """Tokens that attend to each other: a recording's."""
        return self.positions

    @property
    def transformer(self) -> TransformerConfig:
        """The stack. Keys have no bias."""
        return TransformerConfig(
            self.layers,
            self.embed,
            self.heads,
            self.head_dim,
            self.mlp,
            EPS,
            activation="gelu_erf",
            fused_qkv=False,
            key_bias=False,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this encoder does not compute.
        """
        require(cls.family, config, {"activation_function": "gelu", "scale_embedding": False})
        made = cls(**read_sizes(cls.family, config, KEYS))
        if made.embed % made.heads:
            raise ConfigError(f"{cls.family}: d_model {made.embed} is not a multiple of its {made.heads} heads")
        return made

    def build(self, *, dtype: DTypeLike) -> "Whisper":
        """The module."""
        return Whisper(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        """PyTorch's keys for the parameters, by layout."""
        return keys.mappings(
            layers=self.layers,
            embed=self.embed,
            heads=self.heads,
            mlp=self.mlp,
            mel_bins=self.mel,
            positions=self.positions,
        )

    # --- how much there is

    def pieces(self, item: AudioItem) -> tuple[int, ...]:
        """A recording attends as a whole."""
        return (self.positions,)

    def item_unit(self, item: AudioItem) -> int:
        """Tokens that stay together where a recording is spread over devices."""
        return 1

    def output_rows(self, item: AudioItem) -> int:
        """Rows that come out, for 30 seconds whatever was said in them."""
        return self.positions

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group; every recording counts whole."""
        clips = (self.positions,) * sum(-(-tokens // self.positions) for tokens in items)
        d = self.embed
        # no token shares an output of the first convolution with another one
        token = conv_flops(self.mel, d, window=3, positions=3) + conv_flops(d, d, window=3, positions=1)
        stem = GroupWork(
            "stem",
            None,
            "stem_length",
            tuple(token * n for n in clips),
            returned=d,
            live=tuple(n * (9.0 * self.mel + 6.0 * d) for n in clips),
        )
        return Workload(clips, (*self.transformer.work(clips, windows=True), stem))

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from: 1 to 8 recordings."""
        return tuple(self.positions << i for i in range(4))

    def token_axes(self, budget: Budget, parts: Mapping[str, int]) -> Mapping[str, int]:
        """Size of every token axis in a row of a budget."""
        return {"length": budget.row, "stem_length": budget.row}

    # --- items in, arrays out

    def read(self, kind: str, source: Any, *, name: str) -> list[AudioItem]:
        """The item of one recording, of at most 30 seconds."""
        samples = load_audio(source, name=name)
        longest = self.frames * HOP_SAMPLES
        if len(samples) > longest:
            raise InputError(
                f"{name}: {len(samples) / 16_000:.1f} s of audio; Whisper reads {longest / 16_000:.0f} s: cut it first"
            )
        return [AudioItem(log_mel(pad_or_trim(samples, longest), bins=self.mel, name=name), name=name)]

    def check(self, item: AudioItem) -> None:
        """Refuses an item that this encoder cannot encode.

        Raises:
            InputError: names the item and what is wrong with it.
        """
        if item.mel.shape != (self.mel, self.frames):
            raise InputError(
                f"{item.name}: the spectrogram is {item.mel.shape}; Whisper reads {(self.mel, self.frames)}"
            )

    def layout(
        self, items: Sequence[AudioItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """One batch: each token's own mel frames and position, and which tokens are of one recording."""
        b, n = budget.rows, budget.row
        slots = Slots.empty(b, n)
        arrays = {
            "mel": np.zeros((b, n, self.mel, TOKEN_FRAMES), np.float32),
            "position": np.zeros((b, n), np.int32),
            "segments": np.zeros((b, n), np.int32),
        }
        # once an item, however many rows have a share of it
        frames = {item: token_frames(items[item].mel) for item in {place.item for place in placed}}
        for segment, place in packing.segments(placed):
            at = (place.row, slice(place.offset, place.offset + place.size))
            positions = np.arange(place.start, place.start + place.size)
            arrays["mel"][at] = frames[place.item][positions]
            arrays["position"][at] = positions
            arrays["segments"][at] = segment
            slots.fill(place.row, place.offset, place.item, positions)
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        return Batch(arrays, slots, slots)


VARIANTS: Mapping[str, Config] = {
    "large-v3": Config(32, 1280, 20, 5120, mel=128),
    "large-v2": Config(32, 1280, 20, 5120),
    "medium": Config(24, 1024, 16, 4096),
    "small": Config(12, 768, 12, 3072),
    "base": Config(6, 512, 8, 2048),
    "tiny": Config(4, 384, 6, 1536),
    "tiny.en": Config(4, 384, 6, 1536),
}


class Whisper(nnx.Module):
    """Log-mel spectrograms of 30 seconds -> 1,500 rows each."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the encoder."""
        c = self.config = config
        self.stem = Stem(c, dtype=dtype)
        table = {"position": c.positions, "embed": c.embed}
        self.position_embed = named_parameter(table, "normal", dtype=dtype)
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.final_norm = LayerNorm(c.embed, eps=EPS, dtype=dtype)

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b n embed"], dict[int, Float[Array, "b n embed"]]]:
        """Encodes one batch.

        Args:
            inputs: the arrays of `Config.layout`.
            shard: constrains activations by name.
            capture: blocks whose outputs are wanted too.

        Returns:
            Output rows, and the captured blocks' outputs.
        """
        c, segments, position = self.config, inputs["segments"], inputs["position"]
        # selected away, not multiplied by zero: whatever is in the padding, NaN included, ends here
        mel = jnp.where((segments > 0)[..., None, None], inputs["mel"], 0).astype(self.final_norm.scale.dtype)
        x = self.stem(mel, position, shard=shard) + self.position_embed[...][position]
        x = shard(x, "batch", "length", "embed")
        x, captured = run_blocks(
            self.layers,
            x,
            schedule=Schedule.of(inputs, window=c.window),
            shard=shard,
            capture=capture,
        )
        return shard(self.final_norm(x), "batch", "length", "embed"), captured


class Stem(nnx.Module):
    """Two convolutions over time, the second of stride 2, as products over the windows of each token by itself."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the convolutions."""
        filters, window = {"filters": config.embed}, {"kernel_w": 3}
        self.conv1 = Linear(filters, {"channels_in": config.mel, **window}, dtype=dtype)
        self.conv2 = Linear(filters, {"channels_in": config.embed, **window}, dtype=dtype)

    def __call__(
        self, mel: Float[Array, "b n mel 5"], position: Int[Array, "b n"], *, shard: Shard
    ) -> Float[Array, "b n embed"]:
        """Tokens, each from its frames and its position in the recording."""
        mel = shard(mel, "batch", "stem_length", "mel", "frames")
        windows = jnp.stack([mel[..., i : i + 3] for i in range(3)], axis=2)
        x = jax.nn.gelu(self.conv1(windows), approximate=False)
        # the second convolution is padded with zeros, not with what the first makes of its own padding
        inside = 2 * position[..., None] + jnp.arange(-1, 2) >= 0
        x = shard(jnp.where(inside[..., None], x, 0), "batch", "stem_length", "frames", "filters")
        x = jax.nn.gelu(self.conv2(jnp.swapaxes(x, 2, 3)), approximate=False)
        return shard(x, "batch", "stem_length", "filters")


def token_frames(mel: Float[np.ndarray, "mel frames"]) -> Float[np.ndarray, "n mel 5"]:
    """The frames 2 p - 2 to 2 p + 2 of every token p; zero before the first frame and after the last."""
    padded = np.pad(mel, ((0, 0), (2, 1)))
    return sliding_window_view(padded, TOKEN_FRAMES, axis=1)[:, ::2].swapaxes(0, 1)
