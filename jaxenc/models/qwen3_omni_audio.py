"""Qwen3-Omni's audio tower.

Source: `Qwen3OmniMoeAudioEncoder` of transformers 5.24. One difference, on purpose: chunks are always padded to their
full 100 frames. transformers pads to the longest chunk of the call, so there a clip of under one second comes out
differently alone than beside a longer one; here it is always the latter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import qwen3_omni_audio as keys
from jaxenc import packing
from jaxenc.errors import ConfigError, InputError
from jaxenc.items import AudioItem
from jaxenc.layers.linear import Conv, Linear, conv_flops, conv_length
from jaxenc.layers.mlp import MLP, activated
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.sinusoids import sinusoids
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.base import EncoderConfig, EncoderModule
from jaxenc.models.published import Keys
from jaxenc.models.whisper_parts import EPS, audio_transformer, read_audio_sizes
from jaxenc.packing import Batch, Budget, Placed, Slots
from jaxenc.preprocess.audio import load_audio, log_mel
from sharding_rules import GroupWork, Workload

KEYS: Mapping[str, Keys] = {
    "channels": ("downsample_hidden_size",),
    "out": ("output_dim",),
    "half_chunk": ("n_window",),
    "window_frames": ("n_window_infer",),
}


@dataclass(frozen=True)
class Config(EncoderConfig):
    """Sizes of the tower; the defaults are Qwen3-Omni-30B-A3B's.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        mel: mel bins.
        channels: of the convolutions.
        out: width of an output row, the language model's.
        half_chunk: half the frames of a convolution chunk.
        window_frames: frames of an attention window.
    """

    layers: int = 32
    embed: int = 1280
    heads: int = 20
    mlp: int = 5120
    mel: int = 128
    channels: int = 480
    out: int = 2048
    half_chunk: int = 50
    window_frames: int = 800

    family: ClassVar[str] = "qwen3_omni_audio"
    modality: ClassVar[str] = "audio"
    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    published: ClassVar[tuple[str, ...]] = ("Qwen/Qwen3-Omni-30B-A3B-Instruct",)
    model_types: ClassVar[tuple[str, ...]] = (
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_audio_encoder",
    )
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "mel": ("batch", "stem_length", None, None, None),
        "frames": ("batch", "stem_length", None),
        **SCHEDULE_AXES,
        "spread_source": ("batch", None),
    }

    @property
    def typical_tokens(self) -> int:
        """Tokens of 30 seconds."""
        return self.tokens(3000)

    @property
    def transformer(self) -> TransformerConfig:
        """The stack."""
        return audio_transformer(self, key_bias=True)

    @property
    def chunk_frames(self) -> int:
        """Mel frames that go through the convolutions together."""
        return 2 * self.half_chunk

    @property
    def chunk_tokens(self) -> int:
        """Tokens a full chunk becomes."""
        return _after_convolutions(self.chunk_frames)

    @property
    def window_chunks(self) -> int:
        """Chunks that attend to each other."""
        return self.window_frames // self.chunk_frames

    @property
    def window(self) -> int:
        """Tokens that attend to each other."""
        return self.window_chunks * self.chunk_tokens

    @property
    def conv_mel(self) -> int:
        """Mel bins left after the convolutions."""
        return _after_convolutions(self.mel)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json: whole, its `thinker_config`, or the `audio_config` in it.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        config = config.get("thinker_config", config)
        audio = config.get("audio_config", config)
        made = cls(**read_audio_sizes(cls.family, audio, KEYS))
        if made.window_frames % made.chunk_frames:
            raise ConfigError(
                f"{cls.family}: n_window_infer {made.window_frames} is no multiple of 2 n_window = {made.chunk_frames}"
            )
        return made

    def build(self, *, dtype: DTypeLike) -> "Qwen3OmniAudio":
        return Qwen3OmniAudio(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        features = self.channels * self.conv_mel
        return keys.mappings(family=self.family, **self.sizes("channels", "out"), conv_features=features)

    # --- how much there is

    def tokens(self, frames: int) -> int:
        """Tokens of a clip of so many mel frames: each chunk goes through three convolutions of stride 2."""
        full, rest = divmod(frames, self.chunk_frames)
        return full * _after_convolutions(self.chunk_frames) + _after_convolutions(rest)

    def pieces(self, item: AudioItem) -> tuple[int, ...]:
        """Tokens that each attention window takes, a short last chunk counted whole as the convolutions see it."""
        chunks = -(-item.mel.shape[1] // self.chunk_frames)
        return packing.stretches(chunks * self.chunk_tokens, self.window)

    def output_rows(self, item: AudioItem) -> int:
        """Rows that come out: one a token, 13 a second."""
        return self.tokens(item.mel.shape[1])

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group. Windows are independent of each other."""
        windows = tuple(piece for tokens in items for piece in packing.stretches(tokens, self.window))
        c = self.channels
        rows, columns = (_halvings(size) for size in (self.mel, self.chunk_frames))
        chunk = (
            conv_flops(1, c, window=9, positions=rows[0] * columns[0])
            + conv_flops(c, c, window=9, positions=rows[1] * columns[1])
            + conv_flops(c, c, window=9, positions=rows[2] * columns[2])
            + 2.0 * columns[2] * rows[2] * c * self.embed
        )
        chunks = tuple(-(-n // self.chunk_tokens) for n in windows)
        stem = GroupWork(
            "stem",
            None,
            "stem_length",
            tuple(n * chunk for n in chunks),
            unit=self.chunk_tokens,
            returned=self.embed,
            shared=self.embed,
            live=tuple(2.0 * n * c * rows[0] * columns[0] for n in chunks),
        )
        projector = GroupWork(
            "projector",
            "projector_mlp",
            "projector_length",
            tuple(2.0 * n * self.embed * (self.embed + self.out) for n in windows),
            summed=(self.out,),
            live=tuple(n * (3.0 * self.embed + self.out) for n in windows),
        )
        return Workload(windows, (*self.transformer.work(windows, windows=True), stem, projector))

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from: 1 to 64 windows of 8 seconds; 4 are the half minute that speech is cut into."""
        return tuple(self.window * count for count in (1, 4, 8, 32, 64))

    def token_axes(self, budget: Budget, parts: Mapping[str, int]) -> Mapping[str, int]:
        """Size of every token axis in a row of a budget; the stem's tokens are chunks."""
        stem = sum(self._chunks(budget, parts))
        return {"length": budget.row, "stem_length": stem, "projector_length": budget.row}

    def _chunks(self, budget: Budget, parts: Mapping[str, int]) -> tuple[int, int]:
        """Chunks of a row: those of its whole windows, and its share of those of all windows that are spread.

        A device makes whole chunks, while a window's tokens are spread one by one.
        """
        share = -(-budget.folds(self.window)[0] * self.window_chunks // budget.rows)
        devices = parts.get("stem_length", 1)
        return budget.length // self.chunk_tokens, -(-share // devices) * devices

    # --- items in, arrays out

    def read(self, kind: str, source: Any, *, name: str) -> list[AudioItem]:
        """The item of one recording: Whisper's log-mel front end."""
        return [AudioItem(log_mel(load_audio(source, name=name), bins=self.mel, name=name), name=name)]

    def check(self, item: AudioItem) -> None:
        if item.mel.ndim != 2 or item.mel.shape[0] != self.mel or item.mel.shape[1] == 0:
            raise InputError(
                f"{item.name}: the spectrogram is {item.mel.shape}; this tower reads [{self.mel}, frames >= 1]"
            )

    def layout(
        self, items: Sequence[AudioItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """One batch: chunks of the spectrogram, how much of each is real, and which tokens share a window.

        Chunks come as [parts of the batch, chunks of a row, rows of a part]. The convolutions take all of them as one
        axis; in this order every device's chunks are next to each other there, and stay on it.
        """
        b, size, (whole, shared) = budget.rows, self.chunk_tokens, self._chunks(budget, parts)
        slots = Slots.empty(b, budget.row)
        arrays = {
            "mel": np.zeros((b, whole + shared, self.mel, self.chunk_frames), np.float32),
            "frames": np.zeros((b, whole + shared), np.int32),
            "segments": np.zeros((b, budget.row), np.int32),
        }
        source = np.zeros((b, budget.spread), np.int32)
        dealt: dict[tuple[int, int], int] = {}  # chunk of an item -> its turn among the chunks that are spread
        for segment, place in packing.segments(placed):
            mel = items[place.item].mel
            first = place.piece * self.window + place.start
            tokens = np.arange(first, first + place.size)  # of the item, every chunk counted whole
            chunks, within = np.divmod(tokens, size)
            spread = place.offset >= budget.length
            for chunk in range(chunks[0], chunks[-1] + 1):
                frames = mel[:, chunk * self.chunk_frames : (chunk + 1) * self.chunk_frames]
                row, slot = place.row, (place.offset + chunk * size - first) // size
                if spread:
                    turn = dealt.setdefault((place.item, chunk), len(dealt))
                    row, slot = turn % b, whole + turn // b
                    inside = np.flatnonzero(chunks == chunk)
                    at = place.offset - budget.length + inside
                    source[place.row, at] = (row * shared + slot - whole) * size + within[inside]
                arrays["mel"][row, slot, :, : frames.shape[1]] = frames
                arrays["frames"][row, slot] = frames.shape[1]
            real = np.flatnonzero(tokens < self.tokens(mel.shape[1]))
            arrays["segments"][place.row, place.offset + real] = segment
            slots.item[place.row, place.offset + real] = place.item
            slots.index[place.row, place.offset + real] = tokens[real]
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        if budget.spread:
            arrays["spread_source"] = source
        for name in ("mel", "frames"):
            by_part = arrays[name].reshape(parts.get("batch", 1), -1, *arrays[name].shape[1:])
            arrays[name] = by_part.swapaxes(1, 2)
        return Batch(arrays, slots, slots)


VARIANTS: Mapping[str, Config] = {"30b-a3b": Config()}


class Qwen3OmniAudio(EncoderModule):
    """Chunks of a log-mel spectrogram -> output rows."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the tower."""
        c = self.config = config
        self.stem = Stem(c, dtype=dtype)
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.final_norm = LayerNorm(c.embed, eps=EPS, dtype=dtype)
        self.projector = MLP(
            ("projector_in", c.embed),
            ("projector_mlp", c.embed),
            ("projector_out", c.out),
            activation="gelu_erf",
            dtype=dtype,
        )

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b n out"], dict[int, Float[Array, "b n embed"]]]:
        c, segments = self.config, inputs["segments"]
        x = shard(self.stem(inputs["mel"], inputs["frames"], shard=shard), "batch", "length", "embed")
        if "spread" in inputs:
            # a row's share of spread tokens comes from the chunks of all rows
            source = inputs["spread_source"]
            whole = segments.shape[1] - source.shape[1]
            made = shard(x[:, whole:], None, None, "embed").reshape(-1, c.embed)
            x = shard(jnp.concatenate([x[:, :whole], made[source]], axis=1), "batch", "length", "embed")
        x, captured = run_blocks(
            self.layers,
            x,
            schedule=Schedule.of(inputs, window=c.window),
            shard=shard,
            capture=capture,
        )
        x = shard(self.final_norm(x), "batch", "projector_length", "projector_in")
        rows = self.projector(x, length="projector_length", shard=shard)
        return shard(rows, "batch", "projector_length", "projector_out"), captured


class Stem(nnx.Module):
    """Three stride-2 convolutions over each chunk, a projection, and positions that restart in every chunk."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the convolutions."""
        c = self.config = config
        # not "channels": the chunks are divided over devices, which moves tokens once instead of feature maps twice
        filters, window = ("filters", c.channels), {"kernel_h": 3, "kernel_w": 3}
        self.conv1 = Conv(1, filters, window=window, stride=2, dtype=dtype)
        self.conv2 = Conv(c.channels, filters, window=window, stride=2, dtype=dtype)
        self.conv3 = Conv(c.channels, filters, window=window, stride=2, dtype=dtype)
        features = {"conv_features": c.channels * c.conv_mel}
        self.out = Linear({"embed": c.embed}, features, bias=False, dtype=dtype)

    def __call__(
        self,
        mel: Float[Array, "parts chunks rows mel frames"],
        frames: Int[Array, "parts chunks rows"],
        *,
        shard: Shard,
    ) -> Float[Array, "b n embed"]:
        """Tokens of every chunk, row by row; those of padding are finite."""
        *grid, bins, length = mel.shape
        real = jnp.arange(length) < frames[..., None, None]
        # selected away, not multiplied by zero: whatever is in the padding, NaN included, ends here
        x = jnp.where(real, mel, 0).astype(self.out.kernel.dtype)
        x = shard(x, "batch", "stem_length", None, "mel", "frames").reshape(-1, bins, length, 1)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = activated(conv(x), "gelu_erf")
        # channel-major: the projection reads [channels, mel] flattened at each position
        x = self.out(jnp.moveaxis(x, 1, -1).reshape(*grid, x.shape[2], -1))
        parts, chunks, rows, tokens, embed = x.shape
        x = x + jnp.asarray(sinusoids(tokens, embed, steps=embed // 2 - 1), x.dtype)
        return x.swapaxes(1, 2).reshape(parts * rows, chunks * tokens, embed)


def _halvings(size: int) -> tuple[int, int, int]:
    first = conv_length(size)
    second = conv_length(first)
    return first, second, conv_length(second)


def _after_convolutions(frames: int) -> int:
    return _halvings(frames)[-1]
