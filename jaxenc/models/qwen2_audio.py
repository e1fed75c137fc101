"""Qwen2-Audio's encoder and projector: Whisper's encoder, whose tokens become rows two by two.

Source: `Qwen2AudioEncoder` and `Qwen2AudioMultiModalProjector` of transformers 5.24, as
`Qwen2AudioForConditionalGeneration` calls them: no token attends to the silence after a recording, and silence makes no
rows. So none of it is computed here, and short recordings share a row of a batch. The convolutions do see it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import qwen2_audio as keys
from jaxenc import packing
from jaxenc.errors import InputError
from jaxenc.items import AudioItem
from jaxenc.layers.linear import Linear, conv_length
from jaxenc.layers.mel_stem import AXES as MEL_AXES
from jaxenc.layers.mel_stem import MelStem, mel_arrays, mel_stem_work
from jaxenc.layers.norms import LayerNorm
from jaxenc.layers.parameters import Shard, named_parameter
from jaxenc.layers.schedule import AXES as SCHEDULE_AXES
from jaxenc.layers.schedule import Schedule, schedule
from jaxenc.layers.sinusoids import sinusoids
from jaxenc.layers.transformer import TransformerConfig, run_blocks, stacked_blocks
from jaxenc.models.whisper_parts import EPS, audio_transformer, read_audio_sizes
from jaxenc.packing import Batch, Budget, Placed, Slots
from jaxenc.preprocess.audio import load_audio, padded_log_mel
from sharding_rules import GroupWork, Workload

POOL = 2  # tokens of a row


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder; the defaults are Qwen2-Audio-7B's.

    Attributes:
        layers: transformer blocks.
        embed: width of a token.
        heads: attention heads.
        mlp: width of the blocks' MLP.
        mel: mel bins.
        out: width of an output row, the language model's.
        positions: tokens that attend to each other at most, of twice as many mel frames: those of 30 seconds.
    """

    layers: int = 32
    embed: int = 1280
    heads: int = 20
    mlp: int = 5120
    mel: int = 128
    out: int = 4096
    positions: int = 1500

    family: ClassVar[str] = "qwen2_audio"
    modality: ClassVar[str] = "audio"
    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    published: ClassVar[tuple[str, ...]] = ("Qwen/Qwen2-Audio-7B", "Qwen/Qwen2-Audio-7B-Instruct")
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_audio", "qwen2_audio_encoder")
    # a row of a batch is cut between pairs of tokens, which the stretches of a windowed row are not
    window: ClassVar[int | None] = None
    unit: ClassVar[int] = POOL
    learned_positions: ClassVar[bool] = True
    input_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {**MEL_AXES, **SCHEDULE_AXES}

    @property
    def typical_tokens(self) -> int:
        """Tokens of 30 seconds."""
        return 1500

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed // self.heads

    @property
    def chunk_frames(self) -> int:
        """Mel frames whose tokens attend to each other: the second convolution halves them."""
        return 2 * self.positions

    @property
    def transformer(self) -> TransformerConfig:
        """The stack. Keys have no bias."""
        return audio_transformer(layers=self.layers, embed=self.embed, heads=self.heads, mlp=self.mlp, key_bias=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json. The language model's width is 4096 where it is not said, as published.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this encoder does not compute.
        """
        further = {"positions": ("max_source_positions",)}
        made = cls(**read_audio_sizes(cls.family, config.get("audio_config", config), further))
        return replace(made, out=(config.get("text_config") or {}).get("hidden_size", cls.out))

    def build(self, *, dtype: DTypeLike) -> "Qwen2Audio":
        """The module."""
        return Qwen2Audio(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        """PyTorch's keys for the parameters, by layout."""
        return keys.mappings(
            layers=self.layers,
            embed=self.embed,
            heads=self.heads,
            mlp=self.mlp,
            mel_bins=self.mel,
            positions=self.positions,
            projector_out=self.out,
        )

    # --- how much there is

    def tokens(self, item: AudioItem) -> int:
        """Tokens of a recording, without those of the silence after it."""
        return conv_length(item.recorded)

    def pieces(self, item: AudioItem) -> tuple[int, ...]:
        """Tokens of each part that attends by itself, in whole pairs."""
        return packing.stretches(-(-self.tokens(item) // POOL) * POOL, self.positions)

    def item_unit(self, item: AudioItem) -> int:
        """Tokens that stay together where a recording is spread over devices: those of a row."""
        return POOL

    def output_rows(self, item: AudioItem) -> int:
        """Rows that come out, 25 a second: one for two tokens, none for a last one alone."""
        return self.tokens(item) // POOL

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group."""
        chunks = tuple(piece for tokens in items for piece in packing.stretches(tokens, self.positions))
        projector = GroupWork(
            "projector",
            None,
            "projector_length",
            tuple(2.0 * self.embed * self.out * n / POOL for n in chunks),
            unit=POOL,
            live=tuple(n * (2.0 * self.embed + self.out / POOL) for n in chunks),
        )
        stem = mel_stem_work(chunks, mel=self.mel, embed=self.embed)
        return Workload(chunks, (*self.transformer.work(chunks, windows=False, unit=POOL), stem, projector))

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from: 1 to 8 recordings of full length."""
        return tuple(self.positions << i for i in range(4))

    def token_axes(self, budget: Budget, parts: Mapping[str, int]) -> Mapping[str, int]:
        """Size of every token axis in a row of a budget."""
        return {"length": budget.row, "stem_length": budget.row, "projector_length": budget.row // POOL}

    # --- items in, arrays out

    def read(self, kind: str, source: Any, *, name: str) -> list[AudioItem]:
        """The item of one recording, of at most 30 seconds, padded with silence to that."""
        mel, recorded = padded_log_mel(
            load_audio(source, name=name), bins=self.mel, frames=self.chunk_frames, name=name
        )
        return [AudioItem(mel, name=name, frames=recorded)]

    def check(self, item: AudioItem) -> None:
        """Refuses an item that this encoder cannot encode.

        Raises:
            InputError: names the item and what is wrong with it.
        """
        if item.mel.shape != (self.mel, self.chunk_frames):
            raise InputError(
                f"{item.name}: the spectrogram is {item.mel.shape}; Qwen2-Audio reads {(self.mel, self.chunk_frames)}, "
                "of which `frames` are the recording's"
            )
        self.check_rows(item)

    def check_rows(self, item: AudioItem) -> None:
        """Refuses an item of which nothing comes out."""
        if not self.output_rows(item):
            raise InputError(f"{item.name}: {item.recorded} frames make no row; the shortest recording has 3")

    def layout(
        self, items: Sequence[AudioItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """One batch: each token's own mel frames and position, and which tokens attend to each other."""
        arrays, tokens = mel_arrays(
            items, placed, budget, mel=self.mel, chunk_frames=self.chunk_frames, tokens=self.tokens
        )
        arrays |= schedule(arrays["segments"], budget, window=self.window, parts=parts.get("batch", 1))
        rows = Slots.empty(budget.rows, budget.row // POOL)
        whole = (tokens.item[:, ::POOL] >= 0) & (tokens.item[:, 1::POOL] >= 0)
        rows.item[whole] = tokens.item[:, ::POOL][whole]
        rows.index[whole] = tokens.index[:, ::POOL][whole] // POOL
        return Batch(arrays, tokens, rows)


VARIANTS: Mapping[str, Config] = {"7b": Config()}


class Qwen2Audio(nnx.Module):
    """Log-mel spectrograms -> output rows, 25 a second."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the encoder and its projector."""
        c = self.config = config
        self.stem = MelStem(c.mel, c.embed, dtype=dtype)
        table = {"position": c.positions, "embed": c.embed}
        self.position_embed = named_parameter(table, "normal", dtype=dtype) if c.learned_positions else None
        self.layers = stacked_blocks(c.transformer, dtype=dtype)
        self.final_norm = LayerNorm(c.embed, eps=EPS, dtype=dtype)
        self.projector = Linear({"projector_out": c.out}, {"projector_in": c.embed}, dtype=dtype)

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b rows out"], dict[int, Float[Array, "b n embed"]]]:
        """Encodes one batch.

        Args:
            inputs: the arrays of `Config.layout`.
            shard: constrains activations by name.
            capture: blocks whose outputs are wanted too.

        Returns:
            Output rows, and the captured blocks' outputs.
        """
        c, x = self.config, self.stem(inputs, shard=shard)
        if self.position_embed is not None:
            table = self.position_embed[...]
        else:
            table = jnp.asarray(sinusoids(c.positions, c.embed, steps=c.embed // 2 - 1), x.dtype)
        x = shard(x + table[inputs["position"]], "batch", "length", "embed")
        x, captured = run_blocks(
            self.layers,
            x,
            schedule=Schedule.of(inputs, window=c.window),
            shard=shard,
            capture=capture,
        )
        # before the norm, which is not linear
        pooled = jnp.mean(x.reshape(x.shape[0], -1, POOL, c.embed), axis=2, dtype=jnp.float32).astype(x.dtype)
        pooled = self.final_norm(shard(pooled, "batch", "projector_length", "projector_in"))
        return shard(self.projector(pooled), "batch", "projector_length", "projector_out"), captured
