"""What the encoders that descend from Whisper's have in common: blocks; and, but for Qwen3's, stem and front end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxenc.errors import ConfigError, InputError
from jaxenc.items import AudioItem
from jaxenc.layers.linear import conv_length
from jaxenc.layers.mel_stem import AXES as MEL_AXES
from jaxenc.layers.mel_stem import MelStem, mel_arrays
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.sinusoids import sinusoids
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.base import EncoderConfig, EncoderModule
from jaxenc.models.published import Keys, read_sizes, require
from jaxenc.packing import Batch, Budget, Placed
from jaxenc.preprocess.audio import load_audio, padded_log_mel

EPS = 1e-5  # LayerNorm's: PyTorch's default, ten times Flax's

KEYS: Mapping[str, Keys] = {
    "layers": ("encoder_layers",),
    "embed": ("d_model",),
    "heads": ("encoder_attention_heads",),
    "mlp": ("encoder_ffn_dim",),
    "mel": ("num_mel_bins",),
}


@dataclass(frozen=True)
class MelConfig(EncoderConfig):
    """Sizes of an encoder that has Whisper's stem.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        mel: mel bins.
        positions: tokens that attend to each other at most, of twice as many mel frames.
    """

    layers: int
    embed: int
    heads: int
    mlp: int
    mel: int = 80
    positions: int = 1500

    modality: ClassVar[str] = "audio"
    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {**MEL_AXES, **SCHEDULE_AXES}
    learned_positions: ClassVar[bool] = True

    @property
    def typical_tokens(self) -> int:
        """Tokens of 30 seconds."""
        return 1500

    @property
    def chunk_frames(self) -> int:
        """Mel frames whose tokens attend to each other: the second convolution halves them."""
        return 2 * self.positions

    @property
    def transformer(self) -> TransformerConfig:
        """The stack. Keys have no bias."""
        return audio_transformer(self, key_bias=False)

    def tokens(self, item: AudioItem) -> int:
        """Tokens of a recording, without those of the silence after it."""
        return conv_length(item.recorded)

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from: 1 to 8 recordings of full length."""
        return tuple(self.positions << i for i in range(4))

    def read(self, kind: str, source: Any, *, name: str) -> list[AudioItem]:
        """The item of one recording, of at most 30 seconds, padded with silence to that."""
        samples = load_audio(source, name=name)
        mel, recorded = padded_log_mel(samples, bins=self.mel, frames=self.chunk_frames, name=name)
        return [AudioItem(mel, name=name, frames=recorded)]

    def check(self, item: AudioItem) -> None:
        if item.mel.shape != (self.mel, self.chunk_frames):
            raise InputError(
                f"{item.name}: the spectrogram is {item.mel.shape}; {self.family} reads "
                f"{(self.mel, self.chunk_frames)}, with silence after what was recorded"
            )

    def layout(
        self, items: Sequence[AudioItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """One batch: each token's own mel frames and position, and which tokens attend to each other."""
        arrays, slots = mel_arrays(
            items, placed, budget, mel=self.mel, chunk_frames=self.chunk_frames, tokens=self.tokens
        )
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        return Batch(arrays, slots, slots)


class MelEncoder(EncoderModule):
    """Log-mel spectrograms -> tokens, and what a family makes of them."""

    def __init__(self, config: MelConfig, *, dtype: DTypeLike):
        """Declares all but a projector."""
        c = self.config = config
        self.stem = MelStem(c.mel, c.embed, dtype=dtype)
        table = {"position": c.positions, "embed": c.embed}
        self.position_embed = named_parameter(table, "normal", dtype=dtype) if c.learned_positions else None
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.final_norm = LayerNorm(c.embed, eps=EPS, dtype=dtype)

    def tokens(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...]
    ) -> tuple[Float[Array, "b n embed"], dict[int, Float[Array, "b n embed"]]]:
        """The last block's output, and the captured ones'."""
        c, x = self.config, self.stem(inputs, shard=shard)
        if self.position_embed is not None:
            table = self.position_embed[...]
        else:
            table = jnp.asarray(sinusoids(c.positions, c.embed, steps=c.embed // 2 - 1), x.dtype)
        return run_blocks(
            self.layers,
            shard(x + table[inputs["position"]], "batch", "length", "embed"),
            schedule=Schedule.of(inputs, window=c.window),
            shard=shard,
            capture=capture,
        )


def read_audio_sizes(family: str, config: Mapping[str, Any], further: Mapping[str, Keys]) -> dict[str, Any]:
    """The sizes that all of them have, and `further` ones; see `read_sizes`.

    Raises:
        ConfigError: a size is missing, or a setting names a function that such encoders do not compute.
    """
    require(family, config, {"activation_function": "gelu", "scale_embedding": False})
    sizes = read_sizes(family, config, {**KEYS, **further})
    if sizes["embed"] % sizes["heads"]:
        raise ConfigError(f"{family}: d_model {sizes['embed']} is not a multiple of its {sizes['heads']} heads")
    return sizes


def audio_transformer(config: EncoderConfig, *, key_bias: bool) -> TransformerConfig:
    """The stack of blocks: GELU is erf's, and queries, keys and values are apart in checkpoints."""
    c = config
    return TransformerConfig(
        c.layers,
        c.embed,
        c.heads,
        c.head_dim,
        c.mlp,
        EPS,
        activation="gelu_erf",
        fused_qkv=False,
        key_bias=key_bias,
    )
