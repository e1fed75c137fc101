"""Whisper's encoder.

Source: `WhisperEncoder` of transformers 5.24. It reads exactly 30 seconds: shorter recordings are padded with silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import whisper as keys
from jaxenc.items import AudioItem
from jaxenc.layers.mel_stem import mel_stem_work
from jaxenc.layers.parameters import Shard
from jaxenc.models.whisper_parts import MelConfig, MelEncoder, read_audio_sizes
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
class Config(MelConfig):
    """Sizes of the encoder; see `MelConfig`. There are always as many tokens as positions."""

    family: ClassVar[str] = "whisper"
    published: ClassVar[tuple[str, ...]] = tuple(f"openai/whisper-{size}" for size in SIZES)
    model_types: ClassVar[tuple[str, ...]] = ("whisper",)

    @property
    def window(self) -> int:
        """Tokens that attend to each other: a recording's."""
        return self.positions

    @property
    def typical_tokens(self) -> int:
        """Tokens of a recording."""
        return self.positions

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        return cls(**read_audio_sizes(cls.family, config, {"positions": ("max_source_positions",)}))

    def build(self, *, dtype: DTypeLike) -> "Whisper":
        return Whisper(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes("mel", "positions"))

    def tokens(self, item: AudioItem) -> int:
        """Tokens of a recording, with those of the silence after it."""
        return self.positions

    def pieces(self, item: AudioItem) -> tuple[int, ...]:
        """A recording attends as a whole."""
        return (self.positions,)

    def output_rows(self, item: AudioItem) -> int:
        """Rows that come out, for 30 seconds whatever was said in them."""
        return self.positions

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group; every recording counts whole."""
        clips = (self.positions,) * sum(-(-tokens // self.positions) for tokens in items)
        stem = mel_stem_work(clips, mel=self.mel, embed=self.embed)
        return Workload(clips, (*self.transformer.work(clips, windows=True), stem))


VARIANTS: Mapping[str, Config] = {size: Config(*sizes) for size, sizes in SIZES.items()}


class Whisper(MelEncoder):
    """Log-mel spectrograms of 30 seconds -> 1,500 rows each."""

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b n embed"], dict[int, Float[Array, "b n embed"]]]:
        x, captured = self.tokens(inputs, shard=shard, capture=capture)
        return shard(self.final_norm(x), "batch", "length", "embed"), captured
