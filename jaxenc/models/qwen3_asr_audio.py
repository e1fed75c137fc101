"""Qwen3-ASR's audio tower: Qwen3-Omni's at other sizes, under other names.

Source: `Qwen3ASREncoder` and `Qwen3ASRMultiModalProjector` of transformers 5.24, which pad every chunk to its full 100
frames, as is done here for Qwen3-Omni too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxenc.items import AudioItem
from jaxenc.models import qwen3_omni_audio
from jaxenc.preprocess.audio import load_audio, log_mel, pad_or_trim

SHORTEST_SAMPLES = 8000  # half a second: shorter recordings are padded with silence


class Config(qwen3_omni_audio.Config):
    """Sizes of the tower; for the attributes see `qwen3_omni_audio.Config`."""

    family: ClassVar[str] = "qwen3_asr_audio"
    published: ClassVar[tuple[str, ...]] = ("Qwen/Qwen3-ASR-1.7B", "Qwen/Qwen3-ASR-0.6B")
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_asr", "qwen3_asr_audio_encoder", "qwen3_asr_encoder")

    def read(self, kind: str, source: Any, *, name: str) -> list[AudioItem]:
        """The item of one recording: Whisper's log-mel front end, of half a second or more."""
        samples = load_audio(source, name=name)
        samples = pad_or_trim(samples, max(len(samples), SHORTEST_SAMPLES))
        return [AudioItem(log_mel(samples, bins=self.mel, name=name), name=name)]


VARIANTS: Mapping[str, Config] = {
    "1.7b": Config(24, 1024, 16, 4096, out=2048),
    "0.6b": Config(18, 896, 14, 3584, out=1024),
}
