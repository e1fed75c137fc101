"""The vision tower of GLM-4.1V, GLM-4.5V and GLM-4.6V: learned positions resized by cubics, and a merger with an MLP.

Source: `Glm4vVisionModel` of transformers 5.24; its `Glm4vMoeVisionModel` is the same. Frames of videos are those that
`Glm4vVideoProcessor` takes; its `Glm46VVideoProcessor`, which is for GLM-4.6V, takes others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints_convert import Mapping as KeyMapping
from checkpoints_convert.mappings import glm4v as keys
from jaxenc.layers.linear import Linear
from jaxenc.layers.mlp import MLP, Activation, activated
from jaxenc.layers.norms import Kind, LayerNorm, RMSNorm
from jaxenc.layers.parameters import Shard
from jaxenc.models.published import read_sizes, require
from jaxenc.models.qwen_vision import KEYS, QwenConfig
from jaxenc.preprocess.qwen import FrameRule
from sharding_rules import GroupWork


@dataclass(frozen=True)
class Config(QwenConfig):
    """Sizes of the tower; the defaults are those of GLM-4.1V-9B.

    Attributes:
        merger_mlp: inner width of the merger's MLP.
    """

    layers: int = 24
    embed: int = 1536
    heads: int = 12
    mlp: int = 4096
    out: int = 4096
    positions: int = 24
    merger_mlp: int = 13_696

    family: ClassVar[str] = "glm4v"
    published: ClassVar[tuple[str, ...]] = (
        "zai-org/GLM-4.1V-9B-Thinking",
        "zai-org/GLM-4.1V-9B-Base",
        "zai-org/GLM-4.5V",
        "zai-org/GLM-4.6V",
        "zai-org/GLM-4.6V-Flash",
    )
    model_types: ClassVar[tuple[str, ...]] = ("glm4v", "glm4v_vision", "glm4v_moe", "glm4v_moe_vision", "glm46v")
    eps: ClassVar[float] = 1e-5
    activation: ClassVar[Activation] = "silu"
    activation_name: ClassVar[str] = "silu"
    norm: ClassVar[Kind] = "rms"
    gated: ClassVar[bool] = True
    bias: ClassVar[bool] = False
    patch_bias: ClassVar[bool] = True
    patch_norm: ClassVar[bool] = True
    resized: ClassVar[Literal["bilinear", "bicubic"]] = "bicubic"
    # the published files' limit; the processor's own default is a fifth higher
    image_pixels: ClassVar[tuple[int, int]] = (112 * 112, 2 * 6144 * 28 * 28)
    video_pixels: ClassVar[tuple[int, int]] = (112 * 112, 2 * 30_000 * 28 * 28)
    whole_videos: ClassVar[bool] = True
    paired_pictures: ClassVar[bool] = True
    frame_rule: ClassVar[FrameRule] = "by time"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Reads a published config.json, whole or its `vision_config`.

        Raises:
            ConfigError: a size is missing, or a setting names a function that this tower does not compute.
        """
        vision = config.get("vision_config", config)
        # the trap: `intermediate_size` is the merger's, and the blocks' MLP is as wide as what comes out
        names = {**KEYS, "mlp": KEYS["out"], "merger_mlp": KEYS["mlp"]}
        sizes = read_sizes(cls.family, vision, {**names, "image": ("image_size",)})
        require(cls.family, vision, {"attention_bias": False, "rms_norm_eps": cls.eps})
        return cls.read_hf(vision, names, positions=sizes["image"] // sizes["patch"])

    def mappings(self) -> Mapping[str, KeyMapping]:
        further = self.sizes("patch", "merge", "out", "merger_mlp")
        return keys.mappings(**further, positions=self.positions**2)

    def merger(self, *, norm_of_group: bool = False, dtype: DTypeLike) -> "GlmMerger":
        """What makes output rows of a block's tokens; tokens are always normalised one by one."""
        return GlmMerger(self, dtype=dtype)

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from. Pictures have at most 24,576 patches; frames of a short video may have more."""
        return (256, 1024, 4096, 8192, 24_576, 65_536)

    def projector_work(self, items: Sequence[int]) -> GroupWork:
        """The part of `workload` that the merger has."""
        group, out = self.merge**2, self.out
        widths = group * self.embed + out + 3 * self.merger_mlp
        return GroupWork(
            "projector",
            "projector_mlp",
            "projector_length",
            tuple(2.0 * widths * out * n / group for n in items),
            unit=group,
            # after the projection, which is normalised whole, and after the MLP
            summed=(out / group, out / group),
            live=tuple((group * self.embed + 2.0 * out + 3.0 * self.merger_mlp) * n / group for n in items),
        )


VARIANTS: Mapping[str, Config] = {"9b": Config(), "106b": Config(merger_mlp=10_944)}


class GlmMerger(nnx.Module):
    """Each group of consecutive tokens, normalised one by one, becomes a row: two layers, GELU, and a gated MLP."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        """Declares norms and layers."""
        c = self.config = config
        inputs, out = {"kernel_h": c.merge, "kernel_w": c.merge, "projector_in": c.embed}, {"projector_out": c.out}
        self.norm = RMSNorm({"embed": c.embed}, eps=c.eps, dtype=dtype)
        self.merge = Linear({"projector_mlp": c.out}, inputs, dtype=dtype)
        self.project = Linear(out, {"projector_mlp": c.out}, bias=False, dtype=dtype)
        # PyTorch's default, which here is that of the other norms too
        self.projected_norm = LayerNorm(c.out, eps=1e-5, dtype=dtype)
        self.mlp = MLP(
            ("projector_in", c.out),
            ("projector_mlp", c.merger_mlp),
            ("projector_out", c.out),
            activation=c.activation,
            gated=True,
            bias=False,
            dtype=dtype,
        )

    def __call__(self, x: Float[Array, "b n embed"], *, shard: Shard) -> Float[Array, "b rows out"]:
        """Merges consecutive tokens."""
        c, length = self.config, "projector_length"
        grouped = self.norm(x).reshape(x.shape[0], -1, c.merge, c.merge, c.embed)
        merged = self.merge(shard(grouped, "batch", length, None, None, "projector_in"))
        projected = self.project(shard(merged, "batch", length, "projector_mlp"))
        projected = self.projected_norm(shard(projected, "batch", length, "projector_out"))
        rows = self.mlp(activated(projected, "gelu_erf"), length=length, shard=shard)
        return shard(rows, "batch", length, "projector_out")
