"""Qwen2-VL's vision tower: rotary positions only, whole frames.

Source: `Qwen2VisionTransformerPretrainedModel` of transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxenc.layers.mlp import Activation
from jaxenc.models.published import read_sizes
from jaxenc.models.qwen_vision import KEYS, QwenConfig


@dataclass(frozen=True)
class Config(QwenConfig):
    """Sizes of the tower; the defaults are those of Qwen2-VL-7B."""

    layers: int = 32
    embed: int = 1280
    heads: int = 16
    mlp: int = 5120
    out: int = 3584

    family: ClassVar[str] = "qwen2_vl"
    published: ClassVar[tuple[str, ...]] = (
        "Qwen/Qwen2-VL-7B-Instruct",
        "Qwen/Qwen2-VL-2B-Instruct",
        "Qwen/Qwen2-VL-72B-Instruct",
    )
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl", "qwen2_vl_vision")
    # CLIP's approximation here, and erf's in the merger
    activation: ClassVar[Activation] = "quick_gelu"
    activation_name: ClassVar[str] = "quick_gelu"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json, whole or its `vision_config`.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        vision = config.get("vision_config", config)
        # the trap: `hidden_size` is the language model's here, and the tower's in all later ones
        names = {**KEYS, "embed": ("embed_dim",), "out": ("hidden_size",), "mlp": ("mlp_ratio",)}
        sizes = read_sizes(cls.family, vision, names)
        del names["mlp"]
        return cls.read_hf(vision, names, mlp=sizes["mlp"] * sizes["embed"])


VARIANTS: Mapping[str, Config] = {"7b": Config(), "2b": Config(out=1536), "72b": Config(out=8192)}
