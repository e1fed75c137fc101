"""CLIP's vision tower, by itself or in a LLaVA with its projector.

Source: `CLIPVisionModel` and `LlavaModel.get_image_features` of transformers 5.24. Rows are those of LLaVA where the
checkpoint is one's; of the tower alone they are its last hidden state, which is not normalised.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import clip as keys
from jaxenc.items import VisionItem
from jaxenc.models.published import with_defaults
from jaxenc.models.vit import PROJECTED, Vit, as_in_llava, tower_sizes
from jaxenc.preprocess.images import fit_square, load_image, picture_item

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

# of `CLIPVisionConfig`: published files leave out what they do not change
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Config(Vit):
    """Sizes of the tower; see `Vit`."""

    family: ClassVar[str] = "clip"
    published: ClassVar[tuple[str, ...]] = (
        "llava-hf/llava-1.5-7b-hf",
        "openai/clip-vit-large-patch14",
        "openai/clip-vit-base-patch32",
    )
    model_types: ClassVar[tuple[str, ...]] = ("clip", "clip_vision_model", "llava (clip_vision_model)")
    prefix: ClassVar[int] = 1
    patch_bias: ClassVar[bool] = False
    pre_norm: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json: LLaVA's, CLIP's, or that of the tower alone.

        Raises:
            ConfigError: a size is wrong, or a setting names a function that this tower does not compute.
        """
        tower = cls(**tower_sizes(cls.family, with_defaults(DEFAULTS, config.get("vision_config", config))))
        return as_in_llava(tower, config) if config.get("model_type") == "llava" else tower

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes(*PROJECTED))

    def read(self, kind: str, source: Any, *, name: str) -> list[VisionItem]:
        """The item of one picture: its shorter side brought to the tower's size, and the middle of the longer taken."""
        pixels = fit_square(load_image(source, name=name), self.image, shorter=self.image)
        return [picture_item(pixels, patch=self.patch, mean=MEAN, std=STD, name=name)]


LARGE: Mapping[str, Any] = {
    "embed": 1024,
    "heads": 16,
    "mlp": 4096,
    "patch": 14,
    "eps": 1e-5,
    "activation": "quick_gelu",
}
VARIANTS: Mapping[str, Config] = {
    "large-336": Config(layers=23, image=336, **LARGE, skipped=1, first_row=1, hidden=4096, out=4096),
    "large": Config(layers=24, image=224, **LARGE),
    "base": Config(12, 768, 12, 3072, patch=32, image=224, eps=1e-5, activation="quick_gelu"),
}
