"""Qwen2.5-VL's vision tower: RMS norms, gated MLPs, and windows in all blocks but four.

Source: `Qwen2_5_VisionTransformerPretrainedModel` of transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxenc.errors import ConfigError
from jaxenc.layers.mlp import Activation
from jaxenc.layers.norms import Kind
from jaxenc.models.published import read_sizes
from jaxenc.models.qwen_vision import QwenConfig


@dataclass(frozen=True)
class Config(QwenConfig):
    """Sizes of the tower; the defaults are those of Qwen2.5-VL-7B."""

    layers: int = 32
    embed: int = 1280
    heads: int = 16
    mlp: int = 3420
    out: int = 3584
    window_pixels: int = 112
    whole: tuple[int, ...] = (7, 15, 23, 31)

    family: ClassVar[str] = "qwen2_5_vl"
    published: ClassVar[tuple[str, ...]] = (
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "Qwen/Qwen2.5-VL-32B-Instruct",
        "Qwen/Qwen2.5-VL-72B-Instruct",
    )
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl", "qwen2_5_vl_vision")
    activation: ClassVar[Activation] = "silu"
    activation_name: ClassVar[str] = "silu"
    norm: ClassVar[Kind] = "rms"
    gated: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json, whole or its `vision_config`.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        vision = config.get("vision_config", config)
        window = read_sizes(cls.family, vision, {"window_pixels": ("window_size",)})["window_pixels"]
        made = cls.read_hf(vision, window_pixels=window, whole=tuple(vision.get("fullatt_block_indexes", cls.whole)))
        if window < made.patch * made.merge:
            raise ConfigError(f"{cls.family}: window_size is {window}, less than a merged patch")
        return made


VARIANTS: Mapping[str, Config] = {
    "7b": Config(),
    "3b": Config(out=2048),
    "32b": Config(mlp=3456, out=5120),
    "72b": Config(mlp=3456, out=8192),
}
