"""Qwen2-Audio's encoder and projector: Whisper's encoder, whose tokens become rows two by two.

Source: `Qwen2AudioEncoder` and `Qwen2AudioMultiModalProjector` of transformers 5.24, as
`Qwen2AudioForConditionalGeneration` calls them: no token attends to the silence after a recording, and silence makes no
rows. So none of it is computed here, and short recordings share a row of a batch. The convolutions do see it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import qwen2_audio as keys
from jaxenc import packing
from jaxenc.errors import InputError
from jaxenc.items import AudioItem
from jaxenc.layers.linear import Linear
from jaxenc.layers.mel_stem import mel_stem_work
from jaxenc.layers.parameters import Shard
from jaxenc.models.whisper_parts import MelConfig, MelEncoder, read_audio_sizes
from jaxenc.packing import Batch, Budget, Placed, Slots
from sharding_rules import GroupWork, Workload

POOL = 2  # tokens of a row


@dataclass(frozen=True)
class Config(MelConfig):
    """Sizes of the encoder; see `MelConfig`. The defaults are Qwen2-Audio-7B's.

    No windows: a row of a batch is cut between pairs of tokens, which the stretches of a windowed row are not.

    Attributes:
        out: width of an output row, the language model's.
    """

    layers: int = 32
    embed: int = 1280
    heads: int = 20
    mlp: int = 5120
    mel: int = 128
    out: int = 4096

    family: ClassVar[str] = "qwen2_audio"
    published: ClassVar[tuple[str, ...]] = ("Qwen/Qwen2-Audio-7B", "Qwen/Qwen2-Audio-7B-Instruct")
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_audio", "qwen2_audio_encoder")
    group: ClassVar[int] = POOL

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
        return Qwen2Audio(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes("mel", "positions", "out"))

    def pieces(self, item: AudioItem) -> tuple[int, ...]:
        """Tokens of each part that attends by itself, in whole pairs."""
        return packing.stretches(-(-self.tokens(item) // POOL) * POOL, self.positions)

    def output_rows(self, item: AudioItem) -> int:
        """Rows that come out, 25 a second: one for two tokens, none for a last one alone."""
        return self.tokens(item) // POOL

    def workload(self, items: Sequence[int]) -> Workload:
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

    def check(self, item: AudioItem) -> None:
        super().check(item)
        self.check_rows(item)

    def check_rows(self, item: AudioItem) -> None:
        """Refuses an item of which nothing comes out."""
        if not self.output_rows(item):
            raise InputError(f"{item.name}: {item.recorded} frames make no row; the shortest recording has 3")

    def layout(
        self, items: Sequence[AudioItem], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]
    ) -> Batch:
        """One batch: each token's own mel frames and position, and which tokens attend to each other."""
        batch = super().layout(items, placed, budget, parts)
        tokens, rows = batch.tokens, Slots.empty(budget.rows, budget.row // POOL)
        whole = (tokens.item[:, ::POOL] >= 0) & (tokens.item[:, 1::POOL] >= 0)
        rows.item[whole] = tokens.item[:, ::POOL][whole]
        rows.index[whole] = tokens.index[:, ::POOL][whole] // POOL
        return replace(batch, rows=rows)


VARIANTS: Mapping[str, Config] = {"7b": Config()}


class Qwen2Audio(MelEncoder):
    """Log-mel spectrograms -> output rows, 25 a second."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the encoder and its projector."""
        super().__init__(config, dtype=dtype)
        self.projector = Linear({"projector_out": config.out}, {"projector_in": config.embed}, dtype=dtype)

    def __call__(
        self, inputs: Mapping[str, Array], *, shard: Shard, capture: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "b rows out"], dict[int, Float[Array, "b n embed"]]]:
        x, captured = self.tokens(inputs, shard=shard, capture=capture)
        # before the norm, which is not linear
        pooled = jnp.mean(x.reshape(x.shape[0], -1, POOL, x.shape[-1]), axis=2, dtype=jnp.float32).astype(x.dtype)
        pooled = self.final_norm(shard(pooled, "batch", "projector_length", "projector_in"))
        return shard(self.projector(pooled), "batch", "projector_length", "projector_out"), captured
