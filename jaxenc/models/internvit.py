"""InternViT, by itself or in an InternVL with its projector.

Source: `InternVLVisionModel` and `InternVLModel.get_image_features` of transformers 5.24, and OpenGVLab's
`InternVisionModel` and `InternVLChatModel`, whose config.json and tensors have other names. A picture is tiles of 448 x
448 pixels, and the whole of it as one more; each attends by itself. Rows are those of an InternVL where the checkpoint
is one's: 2 x 2 patches each, without the class token. Of the tower alone they are its last hidden state, which is not
normalised, of one square picture.

Where the two originals differ, OpenGVLab's counts, which the weights were trained with: queries and keys are normalised
with the eps of all norms, while transformers always has 1e-6 there. All published ones have 1e-6.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import internvit as keys
from jaxenc.errors import ConfigError
from jaxenc.items import VisionItem
from jaxenc.layers.norms import Kind
from jaxenc.models.published import read_sizes, require, with_defaults
from jaxenc.models.vit import Vit, as_in_llava, tower_sizes
from jaxenc.preprocess.images import fit_square, fit_tiles, load_image, picture_item

# the published processor's settings
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
TILES = 12

MERGE = 2  # of the published downsample_ratio, 0.5
NORMS: Mapping[str, Kind] = {"layer_norm": "layer", "rms_norm": "rms"}

# of `InternVLVisionConfig`: published files leave out what they do not change
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "attention_bias": False,
    "use_qk_norm": False,
}
# of OpenGVLab's `InternVisionConfig`, and what it calls differently
THEIRS = ("internvl_chat", "intern_vit_6b")
THEIR_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 3200,
    "intermediate_size": 12_800,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "rms_norm",
    "qkv_bias": False,
    "qk_normalization": True,
}
THEIR_NAMES: Mapping[str, str] = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}


@dataclass(frozen=True)
class Config(Vit):
    """Sizes of the tower; see `Vit`.

    Attributes:
        tiles: that a picture is cut into at most, beside the whole of it.
    """

    tiles: int = TILES

    family: ClassVar[str] = "internvit"
    published: ClassVar[tuple[str, ...]] = (
        "OpenGVLab/InternVL3-8B",
        "OpenGVLab/InternVL3-78B-hf",
        "OpenGVLab/InternVL2_5-26B",
        "OpenGVLab/InternViT-300M-448px-V2_5",
        "OpenGVLab/InternViT-6B-448px-V2_5",
    )
    model_types: ClassVar[tuple[str, ...]] = (*THEIRS, "internvl", "internvl_vision")
    prefix: ClassVar[int] = 1
    patch_bias: ClassVar[bool] = True
    pre_norm: ClassVar[bool] = False
    tiled: ClassVar[bool] = True

    @property
    def typical_tokens(self) -> int:
        """Tokens of a photograph of 4 x 3 in an InternVL, which has all 12 tiles; alone, of one picture."""
        return self.positions if self.out is None else self.positions * (self.tiles + (self.tiles > 1))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json: OpenGVLab's or transformers', InternVL's or that of the tower alone.

        Raises:
            ConfigError: a size is wrong, or a setting names a function that this tower does not compute.
        """
        vision, theirs = config.get("vision_config", config), config.get("model_type") in THEIRS
        if theirs:
            vision = {THEIR_NAMES.get(key, key): value for key, value in with_defaults(THEIR_DEFAULTS, vision).items()}
        vision = with_defaults(DEFAULTS, vision)
        vision |= {key: square(vision[key], key) for key in ("image_size", "patch_size")}
        known = {"use_absolute_position_embeddings": True, "use_mean_pooling": True}
        require(cls.family, vision, known)
        if vision["norm_type"] not in NORMS:
            raise ConfigError(
                f"{cls.family}: config.json: norm_type is {vision['norm_type']!r}; known are {', '.join(NORMS)}"
            )
        most = read_sizes(cls.family, {"max_dynamic_patch": TILES, **config}, {"tiles": ("max_dynamic_patch",)})
        tower = cls(
            **tower_sizes(cls.family, vision),
            norm=NORMS[vision["norm_type"]],
            head_norm=vision["use_qk_norm"],
            qkv_bias=vision["attention_bias"],
            layer_scale=True,
            tiles=most["tiles"] if config.get("dynamic_image_size", True) else 1,
        )
        if "vision_config" not in config:
            return tower
        return as_in_internvl(tower, as_transformers_says(config, image=tower.image) if theirs else config)

    def mappings(self) -> Mapping[str, KeyMapping]:
        further = ("skipped", "merge", "hidden", "out", "head_norm", "qkv_bias")
        return keys.mappings(**self.sizes(*further), norm_bias=self.norm == "layer")

    def read(self, kind: str, source: Any, *, name: str) -> list[VisionItem]:
        """The item of one picture: its tiles, and the whole of it; of the tower alone, the middle of it."""
        pixels = load_image(source, name=name)
        if self.out is None:
            pictures = fit_square(pixels, self.image, shorter=self.image)
        else:
            pictures = fit_tiles(pixels, self.image, limit=self.tiles)
        return [picture_item(pictures, patch=self.patch, mean=MEAN, std=STD, name=name)]


def square(size: Any, key: str) -> Any:
    """One side of what transformers writes as two; what is no size is said elsewhere.

    Raises:
        ConfigError: the sides differ.
    """
    if not isinstance(size, list | tuple):
        return size
    if len(set(size)) != 1:
        raise ConfigError(f"internvit: config.json: {key} is {size!r}; only squares are known")
    return size[0]


def as_transformers_says(config: Mapping[str, Any], *, image: int) -> dict[str, Any]:
    """What the rest of transformers' config.json would say in place of this one of OpenGVLab's.

    Args:
        config: OpenGVLab's.
        image: side of the pictures that the tower reads, pixels.

    Raises:
        ConfigError: pictures or their patches are arranged otherwise.
    """
    known = {"ps_version": "v2", "use_thumbnail": True, "min_dynamic_patch": 1, "force_image_size": image}
    # a model that says nothing of its version has the first one, which transposes the picture
    config = with_defaults({"ps_version": "v1"}, config)
    require("internvit", config, known)
    return {
        "downsample_ratio": config.get("downsample_ratio", 0.5),
        "text_config": config.get("llm_config"),
        "vision_feature_layer": config.get("select_layer", -1),
    }


def as_in_internvl(tower: Config, config: Mapping[str, Any]) -> Config:
    """The tower as an InternVL uses it: groups of 2 x 2 patches become one row, and are projected by two layers.

    Args:
        tower: whole.
        config: transformers' config.json.

    Raises:
        ConfigError: rows come from no block or from the class token too, or patches cannot be merged.
    """
    require(tower.family, config, {"downsample_ratio": 1 / MERGE, "vision_feature_select_strategy": "default"})
    if tower.side % MERGE:
        raise ConfigError(f"{tower.family}: config.json: {tower.side} patches a side are no multiple of {MERGE}")
    return replace(as_in_llava(tower, {"vision_feature_layer": -1, **config}), merge=MERGE)


_300M: Mapping[str, Any] = {"layers": 24, "embed": 1024, "heads": 16, "mlp": 4096}
_6B: Mapping[str, Any] = {"layers": 45, "embed": 3200, "heads": 25, "mlp": 12_800, "norm": "rms", "head_norm": True}
COMMON: Mapping[str, Any] = {"patch": 14, "image": 448, "eps": 1e-6, "activation": "gelu_erf", "layer_scale": True}
MERGED: Mapping[str, Any] = {"merge": MERGE, "first_row": 1}
VARIANTS: Mapping[str, Config] = {
    # in InternVL3-8B
    "300m": Config(**_300M, **COMMON, **MERGED, hidden=3584, out=3584),
    # in InternVL3-78B
    "6b": Config(**_6B, **COMMON, **MERGED, qkv_bias=False, hidden=8192, out=8192),
    "300m-tower": Config(**_300M, **COMMON),
    "6b-tower": Config(**_6B, **COMMON, qkv_bias=False),
}
