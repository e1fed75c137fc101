"""DINOv2.

Source: `Dinov2Model` of transformers 5.24. Rows are its last hidden state: the class token's, then one a patch.
Pictures may have any size: learned positions are resized to it. Files are cropped to 224 x 224 pixels, as the published
processor does; items of other grids go in through `encode_items`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import dinov2 as keys
from jaxenc.errors import ConfigError
from jaxenc.items import VisionItem
from jaxenc.models.published import with_defaults
from jaxenc.models.vit import Vit, tower_sizes
from jaxenc.preprocess.images import fit_square, load_image, picture_item

# the published processor's settings
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SHORTER_SIDE = 256
SIDE = 224

# of `Dinov2Config`: published files leave out what they do not change
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "mlp_ratio": 4,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "use_swiglu_ffn": False,
    "qkv_bias": True,
}


@dataclass(frozen=True)
class Config(Vit):
    """Sizes of the tower; see `Vit`."""

    family: ClassVar[str] = "dinov2"
    published: ClassVar[tuple[str, ...]] = (
        "facebook/dinov2-small",
        "facebook/dinov2-base",
        "facebook/dinov2-large",
        "facebook/dinov2-giant",
    )
    model_types: ClassVar[tuple[str, ...]] = ("dinov2",)
    prefix: ClassVar[int] = 1
    patch_bias: ClassVar[bool] = True
    pre_norm: ClassVar[bool] = False
    resized: ClassVar[Literal["no", "bicubic", "bilinear"]] = "bicubic"
    usual_tokens: ClassVar[int] = 257
    # a picture of 224 x 224 pixels, of 518, of 1,036, of 2,072, and several
    row_lengths: ClassVar[tuple[int, ...]] = (280, 1400, 5600, 22_400, 67_200)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        config = with_defaults(DEFAULTS, config)
        ratio, gated = config["mlp_ratio"], config["use_swiglu_ffn"]
        if not isinstance(ratio, int | float) or ratio <= 0:
            raise ConfigError(f"{cls.family}: config.json: mlp_ratio is {ratio!r}; a number above 0 is needed")
        embed = config["hidden_size"]
        mlp = int(embed * ratio) if isinstance(embed, int) else embed  # what is no size is said there
        sizes = tower_sizes(cls.family, {**config, "intermediate_size": mlp})
        if gated:
            sizes |= {"mlp": gated_mlp(sizes["mlp"]), "activation": "silu"}
        return cls(**sizes, gated=gated, qkv_bias=config["qkv_bias"], layer_scale=True, final_norm=True)

    def mappings(self) -> Mapping[str, KeyMapping]:
        return keys.mappings(**self.sizes("gated", "qkv_bias"))

    def read(self, kind: str, source: Any, *, name: str) -> list[VisionItem]:
        """The item of one picture: its shorter side brought to 256 pixels, and 224 x 224 taken from the middle."""
        pixels = fit_square(load_image(source, name=name), SIDE, shorter=SHORTER_SIDE)
        return [picture_item(pixels, patch=self.patch, mean=MEAN, std=STD, name=name)]


def gated_mlp(mlp: int) -> int:
    """Width of a gated MLP that has about as many parameters as one of this width: two thirds, in eights."""
    return (int(mlp * 2 / 3) + 7) // 8 * 8


COMMON: Mapping[str, Any] = {"patch": 14, "image": 518, "eps": 1e-6, "layer_scale": True, "final_norm": True}
VARIANTS: Mapping[str, Config] = {
    "small": Config(12, 384, 6, 1536, activation="gelu_erf", **COMMON),
    "base": Config(12, 768, 12, 3072, activation="gelu_erf", **COMMON),
    "large": Config(24, 1024, 16, 4096, activation="gelu_erf", **COMMON),
    "giant": Config(40, 1536, 24, gated_mlp(6144), activation="silu", gated=True, **COMMON),
}
