"""Qwen3-Omni's vision tower: Qwen3-VL's under other names, and with the limits of Qwen2-VL's processor.

Source: `Qwen3OmniMoeVisionEncoder` of transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jaxenc.models import qwen3_vl
from jaxenc.models.qwen_vision import QwenConfig
from jaxenc.preprocess.qwen import FrameRule


@dataclass(frozen=True)
class Config(qwen3_vl.Config):
    """Sizes of the tower; the defaults are those of Qwen3-Omni-30B-A3B."""

    out: int = 2048

    family: ClassVar[str] = "qwen3_omni_vision"
    published: ClassVar[tuple[str, ...]] = ("Qwen/Qwen3-Omni-30B-A3B-Instruct",)
    model_types: ClassVar[tuple[str, ...]] = (
        "qwen3_omni_moe",
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_vision_encoder",
    )
    image_pixels: ClassVar[tuple[int, int]] = QwenConfig.image_pixels
    video_pixels: ClassVar[tuple[int, int]] = QwenConfig.video_pixels
    whole_videos: ClassVar[bool] = False
    frame_rule: ClassVar[FrameRule] = "even"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self | None:
        """Reads a published config.json: whole, its `thinker_config`, or the `vision_config` in it.

        Returns:
            The tower; None where a model is described by its audio tower alone.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        thinker = config.get("thinker_config", config)
        if "audio_config" in thinker and "vision_config" not in thinker:
            return None
        return super().from_hf(thinker)


VARIANTS: Mapping[str, Config] = {"30b-a3b": Config()}
