"""Qwen3-VL's vision tower, with learned positions and DeepStack.

Source: `Qwen3VLVisionModel` of transformers 5.24; `Qwen3_5VisionModel` is the same without DeepStack.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, ClassVar, Self

from jaxenc.errors import ConfigError
from jaxenc.layers.mlp import Activation
from jaxenc.models.published import read_sizes
from jaxenc.models.qwen_vision import HALF, QwenConfig
from jaxenc.preprocess.qwen import FrameRule


@dataclass(frozen=True)
class Config(QwenConfig):
    """Sizes of the tower; the defaults are those of Qwen3-VL-8B."""

    layers: int = 27
    embed: int = 1152
    heads: int = 16
    mlp: int = 4304
    out: int = 4096
    patch: int = 16
    positions: int = 48
    deepstack: tuple[int, ...] = (8, 16, 24)

    family: ClassVar[str] = "qwen3_vl"
    published: ClassVar[tuple[str, ...]] = (
        "Qwen/Qwen3-VL-8B-Instruct",
        "Qwen/Qwen3-VL-2B-Instruct",
        "Qwen/Qwen3-VL-4B-Instruct",
        "Qwen/Qwen3-VL-32B-Instruct",
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
    )
    model_types: ClassVar[tuple[str, ...]] = (
        *("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
        *("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"),
    )
    # GELU is the tanh approximation here, and erf's in the mergers
    activation: ClassVar[Activation] = "gelu_tanh"
    activation_name: ClassVar[str] = "gelu_pytorch_tanh"
    patch_bias: ClassVar[bool] = True
    mean: ClassVar[tuple[float, float, float]] = HALF
    std: ClassVar[tuple[float, float, float]] = HALF
    image_pixels: ClassVar[tuple[int, int]] = (256 * 256, 4096 * 4096)
    video_pixels: ClassVar[tuple[int, int]] = (64 * 64, 24_576 * 32 * 32)
    whole_videos: ClassVar[bool] = True
    frame_rule: ClassVar[FrameRule] = "to last"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self | None:
        """Reads a published config.json, whole or its `vision_config`.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        vision = config.get("vision_config", config)
        table = read_sizes(cls.family, vision, {"positions": ("num_position_embeddings",)})["positions"]
        if isqrt(table) ** 2 != table:
            raise ConfigError(f"{cls.family}: num_position_embeddings is {table}; a square table is needed")
        deepstack = tuple(vision.get("deepstack_visual_indexes") or ())
        return cls.read_hf(vision, positions=isqrt(table), deepstack=deepstack)


SMALL = Config(layers=24, embed=1024, mlp=4096, out=2560, deepstack=(5, 11, 17))
VARIANTS: Mapping[str, Config] = {
    "8b": Config(),
    "2b": replace(SMALL, out=2048),
    "4b": SMALL,
    "32b": Config(out=5120),
    "30b-a3b": Config(out=2048),
}
