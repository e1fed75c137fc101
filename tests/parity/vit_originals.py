"""transformers' plain vision transformers on the tiny checkpoints of `tests.parity.vit_checkpoints`.

They compute everything in their parameters' dtype, so that in float64 they are the truth as they stand. (DINOv2 resizes
its positions in float32, InternViT and Pixtral have their RMS norms in it, and Pixtral its rotary tables: that is done
in double here.)
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CLIPVisionConfig,
    Dinov2Config,
    InternVLConfig,
    InternVLVisionConfig,
    LlavaConfig,
    Mistral3Config,
    PaliGemmaConfig,
    PixtralVisionConfig,
    Siglip2VisionConfig,
    SiglipVisionConfig,
)
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings, Dinov2Model
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLVisionModel, InternVLVisionRMSNorm
from transformers.models.llava.modeling_llava import LlavaModel
from transformers.models.mistral3.modeling_mistral3 import Mistral3Model, Mistral3RMSNorm
from transformers.models.paligemma.modeling_paligemma import PaliGemmaModel
from transformers.models.pixtral.modeling_pixtral import (
    PixtralRMSNorm,
    PixtralVisionModel,
    PixtralVisionRotaryEmbedding,
)
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings, Siglip2VisionModel

from checkpoints_convert.originals import pixels_of
from tests.parity.checkpoints import Checkpoint, Config, Tensors
from tests.parity.references import Dtype, Encoded, _recorded, resample_bicubic

Alter = Callable[[nn.Module], None]
Item = tuple[np.ndarray, tuple[int, int, int]]


@dataclass(frozen=True)
class Kind:
    """One published model that has such a tower.

    Attributes:
        build: config.json -> module, of random weights.
        name: of a tensor in the checkpoint's layout -> of the module's parameter.
        tower: the part of the module that encodes pictures.
        rows: (module, pixels) -> rows of each picture, or of each tile of one.
        layout: of the checkpoint, whose names are nearest to the module's.
        patches: whether it takes patches [1, rows, columns, features] for pixels.
    """

    build: Callable[[Config], nn.Module]
    name: Callable[[str], str]
    tower: Callable[[nn.Module], nn.Module]
    rows: Callable[[nn.Module, torch.Tensor], Sequence[torch.Tensor]]
    layout: str = "original"
    patches: bool = False


def _features(model: nn.Module, pixels: torch.Tensor) -> Sequence[torch.Tensor]:
    chosen = {key: getattr(model.config, key) for key in ("vision_feature_layer", "vision_feature_select_strategy")}
    return model.get_image_features(pixels, **chosen).pooler_output


def _hidden(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    return model(pixels).last_hidden_state


def _pooled_and_hidden(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    out = model(pixels)
    pooled = [] if out.pooler_output is None else [out.pooler_output[:, None]]
    return torch.cat([*pooled, out.last_hidden_state], dim=1)


class _Dinov2(Dinov2Model):
    """With positions resized in double where the model is."""

    def __init__(self, config: Dinov2Config):
        super().__init__(config)
        self.embeddings = _Dinov2Embeddings(config)


class _Dinov2Embeddings(Dinov2Embeddings):
    def interpolate_pos_encoding(self, embeddings: torch.Tensor, height: int, width: int) -> torch.Tensor:
        table, patch = self.position_embeddings, self.config.patch_size
        if table.dtype != torch.float64:
            return super().interpolate_pos_encoding(embeddings, height, width)
        side = math.isqrt(table.shape[1] - 1)
        patches = resample_bicubic(table[0, 1:].reshape(side, side, -1), height // patch, width // patch)
        return torch.cat([table[:, :1], patches[None]], dim=1)


class _Siglip2(Siglip2VisionModel):
    """With positions resized in double where the model is."""

    def __init__(self, config: Siglip2VisionConfig):
        super().__init__(config)
        self.embeddings.resize_positional_embeddings = self.resized

    def resized(self, table: torch.Tensor, shapes: torch.Tensor, max_length: int) -> torch.Tensor:
        if table.dtype != torch.float64:
            return Siglip2VisionEmbeddings.resize_positional_embeddings(table, shapes, max_length)
        image = table.permute(2, 0, 1)[None]
        image = F.interpolate(image, size=tuple(shapes[0]), mode="bilinear", align_corners=False, antialias=True)
        return image[0].flatten(1).T[None]


class _RMSNorm(PixtralRMSNorm):
    """In double where the model is; InternViT's and Mistral3's are the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float64:
            return super().forward(x)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class _Rotary(PixtralVisionRotaryEmbedding):
    """In double where the model is."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != torch.float64:
            return super().forward(x, position_ids)
        return pixtral_rotary(position_ids, head_dim=2 * len(self.inv_freq))


def pixtral_rotary(
    yx: torch.Tensor, *, head_dim: int, order: Literal["yx", "xy"] = "yx", shared: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [tokens, head_dim] of rows and columns, float64.

    Args:
        yx: row and column of each token.
        head_dim: width of a head.
        order: a mistake is "xy": columns turn the first half of the pairs.
        shared: a mistake too: columns turn with the frequencies of rows.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    first, second = yx.double().T[:, :, None] if order == "yx" else yx.double().flip(-1).T[:, :, None]
    angles = torch.cat([first * frequencies[::2], second * frequencies[0 if shared else 1 :: 2]], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _in_double(model: nn.Module) -> nn.Module:
    for part in model.modules():
        # by class: a copy of the model, in which a mistake is made, keeps it
        if isinstance(part, InternVLVisionRMSNorm | PixtralRMSNorm | Mistral3RMSNorm):
            part.__class__ = _RMSNorm
        elif isinstance(part, PixtralVisionRotaryEmbedding):
            part.__class__ = _Rotary
    return model


def _merged(model: nn.Module, pixels: torch.Tensor) -> Sequence[torch.Tensor]:
    sizes = torch.tensor([pixels.shape[-2:]] * len(pixels))
    return model.get_image_features(pixels, image_sizes=sizes, vision_feature_layer=-1).pooler_output


def encoder_of(tower: nn.Module) -> nn.Module:
    """What holds the blocks of a tower."""
    return tower.transformer if isinstance(tower, PixtralVisionModel) else tower.encoder


def _itself(model: nn.Module) -> nn.Module:
    return model


KINDS = {
    "clip": Kind(
        build=lambda config: CLIPVisionModel(CLIPVisionConfig(**config["vision_config"])),
        name=lambda name: name.removeprefix("vision_model."),
        tower=_itself,
        rows=_hidden,
    ),
    "llava": Kind(
        build=lambda config: LlavaModel(LlavaConfig(**config)),
        name=lambda name: name.removeprefix("model."),
        tower=lambda model: model.vision_tower,
        rows=_features,
        layout="transformers",
    ),
    "siglip": Kind(
        build=lambda config: SiglipVisionModel(SiglipVisionConfig(**config["vision_config"])),
        name=lambda name: name.removeprefix("vision_model."),
        tower=_itself,
        rows=_pooled_and_hidden,
    ),
    "siglip2": Kind(
        build=lambda config: _Siglip2(Siglip2VisionConfig(**config["vision_config"])),
        name=lambda name: name.removeprefix("vision_model."),
        tower=_itself,
        rows=lambda model, patches: (
            model(
                patches.flatten(1, 2),
                torch.ones(len(patches), patches.shape[1] * patches.shape[2]),
                torch.tensor([patches.shape[1:3]] * len(patches)),
            ).last_hidden_state
        ),
        patches=True,
    ),
    "paligemma": Kind(
        build=lambda config: PaliGemmaModel(PaliGemmaConfig(**config)),
        name=lambda name: name.removeprefix("model."),
        tower=lambda model: model.vision_tower,
        rows=lambda model, pixels: model.get_image_features(pixels).pooler_output,
        layout="transformers",
    ),
    "pixtral": Kind(
        build=lambda config: _in_double(PixtralVisionModel(PixtralVisionConfig(**config))),
        name=lambda name: name,
        tower=_itself,
        rows=_hidden,
    ),
    "pixtral in llava": Kind(
        build=lambda config: _in_double(LlavaModel(LlavaConfig(**config))),
        name=lambda name: name.removeprefix("model."),
        tower=lambda model: model.vision_tower,
        rows=_features,
        layout="transformers",
    ),
    "internvl": Kind(
        build=lambda config: _in_double(InternVLModel(InternVLConfig(**config))),
        name=lambda name: name.removeprefix("model."),
        tower=lambda model: model.vision_tower,
        rows=_features,
        layout="transformers",
    ),
    "internvit": Kind(
        build=lambda config: _in_double(InternVLVisionModel(InternVLVisionConfig(**config))),
        name=lambda name: name,
        tower=_itself,
        rows=_hidden,
        layout="transformers",
    ),
    "mistral3": Kind(
        build=lambda config: _in_double(Mistral3Model(Mistral3Config(**config))),
        name=lambda name: name.removeprefix("model."),
        tower=lambda model: model.vision_tower,
        rows=_merged,
        layout="transformers",
    ),
    "dinov2": Kind(
        build=lambda config: _Dinov2(Dinov2Config(**config)),
        name=lambda name: name,
        tower=_itself,
        rows=_hidden,
        layout="transformers",
    ),
}


@dataclass(frozen=True)
class Original:
    """One of them with a checkpoint's weights."""

    kind: Kind
    checkpoint: Checkpoint
    _models: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    @property
    def tensors(self) -> Tensors:
        """The checkpoint's, in the layout that is nearest."""
        return self.checkpoint.tensors[self.kind.layout]

    def run(self, items: Sequence[Item], *, dtype: Dtype = "float64", alter: Alter | None = None) -> Encoded:
        """Encode pictures, those of one size that follow each other together; `alter` makes a mistake, in float64."""
        model = copy.deepcopy(self.model(dtype)) if alter is not None else self.model(dtype)
        if alter is not None:
            alter(model)
        rows, hidden = [], []
        encoder = encoder_of(self.kind.tower(model))
        blocks = encoder.layer if hasattr(encoder, "layer") else encoder.layers
        for _, group in groupby(items, key=lambda item: item[1]):
            pixels = [self.given(*item).to(getattr(torch, dtype)) for item in group]
            with torch.no_grad(), _recorded(blocks) as states:
                encoded = torch.cat(tuple(self.kind.rows(model, torch.cat(pixels))))
            rows += [part.double().cpu().numpy() for part in encoded.chunk(len(pixels))]
            # Pixtral's pictures are one sequence, the others' a batch
            for parts in zip(*(state.flatten(0, 1).chunk(len(pixels)) for state in states), strict=True):
                hidden.append(np.stack([part.double().cpu().numpy() for part in parts]))
        return Encoded(rows, hidden)

    def gradients(self, items: Sequence[Item], weights: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Of the sum of all rows times `weights`, by the tensors' names in the file; float64."""
        model = copy.deepcopy(self.model("float64"))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        loss = torch.zeros((), dtype=torch.float64)
        for (patches, grid), weight in zip(items, weights, strict=True):
            rows = torch.cat(tuple(self.kind.rows(model, self.given(patches, grid).double())))
            loss = loss + (rows * torch.as_tensor(weight)).sum()
        loss.backward()
        slopes = {name: parameter.grad for name, parameter in model.named_parameters()}
        named = {name: slopes[self.kind.name(name)] for name in self.tensors}
        return {name: slope.numpy() for name, slope in named.items() if slope is not None}

    def given(self, patches: np.ndarray, grid: tuple[int, int, int]) -> torch.Tensor:
        """What the module takes of a picture."""
        return torch.as_tensor(patches).reshape(*grid, -1) if self.kind.patches else pixels_of(patches, grid)

    def model(self, dtype: Dtype) -> nn.Module:
        """The module with the checkpoint's weights, strictly loaded but for the language model."""
        if dtype not in self._models:
            model = self.kind.build({**self.checkpoint.configs["original"]})
            state = {self.kind.name(name): torch.as_tensor(value) for name, value in self.tensors.items()}
            problems = model.load_state_dict(state, strict=False)
            known = ("language_model.", "embeddings.mask_token")  # no row depends on them
            missing = [name for name in problems.missing_keys if not name.startswith(known)]
            if missing or problems.unexpected_keys:
                raise ValueError(f"missing {missing}, unexpected {problems.unexpected_keys}")
            self._models[dtype] = model.to(getattr(torch, dtype)).eval()
        return self._models[dtype]
