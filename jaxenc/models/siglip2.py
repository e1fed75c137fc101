"""SigLIP 2's vision tower of variable resolution (NaFlex). Its towers of a fixed resolution are SigLIP's.

Source: `Siglip2VisionModel` of transformers 5.24. Rows are its last hidden state, one a patch; a pooling head is not
read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import siglip2 as keys
from jaxenc.errors import ConfigError
from jaxenc.items import VisionItem
from jaxenc.models.published import with_defaults
from jaxenc.models.vit import Vit, tower_sizes
from jaxenc.preprocess.images import load_image, naflex_item

MEAN = STD = (0.5, 0.5, 0.5)
PATCHES = 256  # the published processor's limit

# of `Siglip2VisionConfig`: published files leave out what they do not change
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_patches": 256,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Config(Vit):
    """Sizes of the tower; see `Vit`."""

    family: ClassVar[str] = "siglip2"
    published: ClassVar[tuple[str, ...]] = (
        "google/siglip2-so400m-patch16-naflex",
        "google/siglip2-base-patch16-naflex",
    )
    model_types: ClassVar[tuple[str, ...]] = ("siglip2", "siglip2_vision_model")
    prefix: ClassVar[int] = 0
    patch_bias: ClassVar[bool] = True
    pre_norm: ClassVar[bool] = False
    resized: ClassVar[Literal["no", "bicubic", "bilinear"]] = "bilinear"
    usual_tokens: ClassVar[int] = PATCHES
    row_lengths: ClassVar[tuple[int, ...]] = (256, 1024, 4096, 16_384)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json: SigLIP 2's, or that of the tower alone.

        Raises:
            ConfigError: a size is wrong, or a setting names a function that this tower does not compute.
        """
        vision = with_defaults(DEFAULTS, config.get("vision_config", config))
        patches = vision["num_patches"]
        side = math.isqrt(patches) if isinstance(patches, int) and patches > 0 else 0
        if side**2 != patches:
            raise ConfigError(f"{cls.family}: config.json: num_patches is {patches!r}; positions are a square")
        patch = vision["patch_size"]
        image = side * patch if isinstance(patch, int) else patch  # what is no size is said there
        return cls(**tower_sizes(cls.family, {**vision, "image_size": image}), final_norm=True)

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes())

    def read(self, kind: str, source: Any, *, name: str) -> list[VisionItem]:
        """The item of one picture, resized to at most 256 patches of its own shape."""
        pixels = load_image(source, name=name)
        return [naflex_item(pixels, patch=self.patch, patch_limit=PATCHES, mean=MEAN, std=STD, name=name)]


COMMON: Mapping[str, Any] = {"patch": 16, "image": 256, "eps": 1e-6, "activation": "gelu_tanh", "final_norm": True}
VARIANTS: Mapping[str, Config] = {
    "so400m": Config(27, 1152, 16, 4304, **COMMON),
    "base": Config(12, 768, 12, 3072, **COMMON),
}
