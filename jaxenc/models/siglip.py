"""SigLIP's vision tower, by itself or in a LLaVA or PaliGemma with its projector.

Source: `SiglipVisionModel`, `LlavaModel.get_image_features` and `PaliGemmaModel.get_image_features` of transformers
5.24. Rows of the tower alone and in a PaliGemma are normalised, in a LLaVA they are taken before that. The tower alone
mostly has a pooling head: what it makes of a picture (transformers' pooler_output) is row 0, and its patches follow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import siglip as keys
from jaxenc.items import VisionItem
from jaxenc.models.published import with_defaults
from jaxenc.models.vit import PROJECTED, Vit, as_in_llava, tower_sizes
from jaxenc.preprocess.images import fit_square, load_image, picture_item

MEAN = STD = (0.5, 0.5, 0.5)

# of `SiglipVisionConfig`: published files leave out what they do not change
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}
PALIGEMMA_WIDTH = 2048  # of `PaliGemmaConfig`


@dataclass(frozen=True)
class Config(Vit):
    """Sizes of the tower; see `Vit`."""

    family: ClassVar[str] = "siglip"
    published: ClassVar[tuple[str, ...]] = (
        "google/siglip-so400m-patch14-384",
        "google/paligemma-3b-pt-224",
        "google/siglip-base-patch16-224",
    )
    model_types: ClassVar[tuple[str, ...]] = (
        "siglip",
        "siglip_vision_model",
        "paligemma",
        "llava (siglip_vision_model)",
    )
    prefix: ClassVar[int] = 0
    patch_bias: ClassVar[bool] = True
    pre_norm: ClassVar[bool] = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json: LLaVA's, PaliGemma's, SigLIP's, or that of the tower alone.

        Raises:
            ConfigError: a size is wrong, or a setting names a function that this tower does not compute.
        """
        vision = with_defaults(DEFAULTS, config.get("vision_config", config))
        tower = cls(**tower_sizes(cls.family, vision), final_norm=True)
        model_type = config.get("model_type")
        if model_type == "paligemma":
            return replace(tower, out=config.get("projection_dim", vision.get("projection_dim", PALIGEMMA_WIDTH)))
        return as_in_llava(tower, config) if model_type == "llava" else replace(tower, pooled=vision["vision_use_head"])

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes(*PROJECTED, "final_norm", "pooled"))

    def read(self, kind: str, source: Any, *, name: str) -> list[VisionItem]:
        """The item of one picture, resized to the tower's square whatever its shape."""
        pixels = fit_square(load_image(source, name=name), self.image, shorter=None)
        return [picture_item(pixels, patch=self.patch, mean=MEAN, std=STD, name=name)]


SO400M: Mapping[str, Any] = {
    "layers": 27,
    "embed": 1152,
    "heads": 16,
    "mlp": 4304,
    "patch": 14,
    "eps": 1e-6,
    "activation": "gelu_tanh",
    "final_norm": True,
}
VARIANTS: Mapping[str, Config] = {
    "so400m": Config(image=384, **SO400M, pooled=True),
    "so400m-tower": Config(image=384, **SO400M),
    "paligemma-224": Config(image=224, **SO400M, out=2048),
    "base": Config(
        12, 768, 12, 3072, patch=16, image=224, eps=1e-6, activation="gelu_tanh", final_norm=True, pooled=True
    ),
}
