"""Whisper's encoder.

Source: `WhisperEncoder` of transformers 5.24. It reads exactly 30 seconds: shorter recordings are padded with silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import whisper as keys
from jaxenc.errors import InputError
from jaxenc.items import AudioItem
from jaxenc.layers.mel_stem import AXES as MEL_AXES
from jaxenc.layers.mel_stem import MelStem, mel_arrays, mel_stem_work
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.whisper_parts import EPS, audio_transformer, read_audio_sizes
from jaxenc.packing import Batch, Budget, Placed
from jaxenc.preprocess.audio import load_audio, padded_log_mel
from sharding_rules import Workload

# layers, embed, heads, mlp, mel; of turbo and of the .en models only the decoder and the vocabulary are different
SIZES: Mapping[str, tuple[int, int, int, int, int]] = {
    "large-v3": (32, 1280, 20, 5120, 128),
    "large-v3-turbo": (32, 1280, 20, 5120, 128),
    "large-v2": (32, 1280, 20, 5120, 80),
    "medium": (24, 1024, 16, 4096, 80),
    "medium.en": (24, 1024, 16, 4096, 80),
    "small": (12, 768, 12, 3072, 80),
    "small.en": (12, 768, 12, 3072, 80),
    "base": (6, 512, 8, 2048, 80),
    "base.en": (6, 512, 8, 2048, 80),
    "tiny": (4, 384, 6, 1536, 80),
    "tiny.en": (4, 384, 6, 1536, 80),
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
    published: ClassVar[tuple[str, ...]] = tuple(f"openai/whisper-{size}" for size in SIZES)
    model_types: ClassVar[tuple[str, ...]] = ("whisper",)
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        **MEL_AXES,
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
        return audio_transformer(layers=self.layers, embed=self.embed, heads=self.heads, mlp=self.mlp, key_bias=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this encoder does not compute.
        """
        return cls(**read_audio_sizes(cls.family, config, {"positions": ("max_source_positions",)}))

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
        stem = mel_stem_work(clips, mel=self.mel, embed=self.embed)
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
        mel, recorded = padded_log_mel(load_audio(source, name=name), bins=self.mel, frames=self.frames, name=name)
        return [AudioItem(mel, name=name, frames=recorded)]

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
        arrays, slots = mel_arrays(
            items, placed, budget, mel=self.mel, chunk_frames=self.frames, tokens=self.output_rows
        )
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        return Batch(arrays, slots, slots)


VARIANTS: Mapping[str, Config] = {size: Config(*sizes) for size, sizes in SIZES.items()}


class Whisper(nnx.Module):
    """Log-mel spectrograms of 30 seconds -> 1,500 rows each."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the encoder."""
        c = self.config = config
        self.stem = MelStem(c.mel, c.embed, dtype=dtype)
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
        c = self.config
        x = self.stem(inputs, shard=shard) + self.position_embed[...][inputs["position"]]
        x = shard(x, "batch", "length", "embed")
        x, captured = run_blocks(
            self.layers,
            x,
            schedule=Schedule.of(inputs, window=c.window),
            shard=shard,
            capture=capture,
        )
        return shard(self.final_norm(x), "batch", "length", "embed"), captured
