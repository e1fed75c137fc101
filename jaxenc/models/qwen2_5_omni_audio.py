"""Qwen2.5-Omni's audio tower: Qwen2-Audio's encoder over chunks of two seconds that know nothing of each other.

Source: `Qwen2_5OmniAudioEncoder` of transformers 5.24. Each chunk goes through convolutions and blocks by itself, with
zeros around it and positions from 0. Its `audio_bos_eos_token` is never used there, nor here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.typing import DTypeLike

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import qwen2_5_omni_audio as keys
from jaxenc.errors import ConfigError, InputError
from jaxenc.items import AudioItem
from jaxenc.layers.parameters import named_parameter
from jaxenc.models import qwen2_audio
from jaxenc.models.whisper_parts import read_audio_sizes
from jaxenc.preprocess.audio import load_audio, padded_log_mel


@dataclass(frozen=True)
class Config(qwen2_audio.Config):
    """Sizes of the tower; see `qwen2_audio.Config`. The defaults are Qwen2.5-Omni-7B's."""

    out: int = 3584
    positions: int = 100

    family: ClassVar[str] = "qwen2_5_omni_audio"
    published: ClassVar[tuple[str, ...]] = ("Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen2.5-Omni-3B")
    model_types: ClassVar[tuple[str, ...]] = (
        "qwen2_5_omni",
        "qwen2_5_omni_thinker",
        "qwen2_5_omni_audio_encoder",
    )
    learned_positions: ClassVar[bool] = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json: whole, its `thinker_config`, or the `audio_config` in it.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        config = config.get("thinker_config", config)
        further = {"positions": ("n_window",), "out": ("output_dim",)}
        made = cls(**read_audio_sizes(cls.family, config.get("audio_config", config), further))
        if made.positions % qwen2_audio.POOL:
            raise ConfigError(f"{cls.family}: n_window is {made.positions}; rows would come from two chunks if odd")
        return made

    def build(self, *, dtype: DTypeLike) -> "Qwen25OmniAudio":
        return Qwen25OmniAudio(self, dtype=dtype)

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes("mel", "out"))

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from: 1 to 64 chunks of two seconds."""
        return tuple(self.positions * count for count in (1, 2, 8, 32, 64))

    def read(self, kind: str, source: Any, *, name: str) -> list[AudioItem]:
        """The item of one recording: Whisper's log-mel front end, silence after the end."""
        mel, recorded = padded_log_mel(load_audio(source, name=name), bins=self.mel, name=name)
        return [AudioItem(mel[:, :recorded], name=name)]

    def check(self, item: AudioItem) -> None:
        if item.mel.shape[0] != self.mel or item.mel.shape[1] != item.recorded:
            raise InputError(
                f"{item.name}: the spectrogram is {item.mel.shape}, {item.recorded} frames recorded; this tower reads "
                f"[{self.mel}, frames], all of them recorded"
            )
        self.check_rows(item)


VARIANTS: Mapping[str, Config] = {"7b": Config(), "3b": Config(out=2048)}


class Qwen25OmniAudio(qwen2_audio.Qwen2Audio):
    """Log-mel spectrograms -> output rows, 25 a second."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares the tower, and what its checkpoint holds besides."""
        super().__init__(config, dtype=dtype)
        boundaries = {"position": 2, "projector_out": config.out}
        self.boundary_embed = named_parameter(boundaries, "normal", dtype=dtype)
