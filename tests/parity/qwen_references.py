"""The originals of the Qwen-VL and GLM-V vision towers (transformers 5.24); for the conventions see `references`.

Where transformers computes in float32 whatever the model's dtype, the truth replaces it: rotary tables
(`rotary_pos_emb.forward`) and their application (`apply_rotary_pos_emb_vision`), the weights of resampled positions
(`get_vision_interpolation_indices_and_weights`) or all of them (`Glm4vVisionEmbeddings`), and the statistics of RMS
norms (`Qwen2_5_VLRMSNorm`, `Glm4vRMSNorm`).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import vision_utils
from transformers.models.glm4v import modeling_glm4v
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe
from transformers.models.qwen3_vl import modeling_qwen3_vl

from tests.parity.checkpoints import Checkpoint, Tensors
from tests.parity.references import Dtype, Encoded, Grid, _loaded, _recorded, _split, resample_bicubic

TOWERS: dict[str, tuple[ModuleType, str]] = {
    "qwen2_vl": (modeling_qwen2_vl, "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": (modeling_qwen2_5_vl, "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": (modeling_qwen3_vl, "Qwen3VLVisionModel"),
    "qwen3_omni_vision": (modeling_qwen3_omni_moe, "Qwen3OmniMoeVisionEncoder"),
    "glm4v": (modeling_glm4v, "Glm4vVisionModel"),
}
RMS_NORMS = ("Qwen2_5_VLRMSNorm", "Glm4vRMSNorm")


@dataclass(frozen=True)
class QwenAlter:
    """One mistake each; the defaults are right.

    Attributes:
        rotary: which coordinate turns the first quarter of a head's channels: "hw" (the row) or "wh".
        rotary_pairs: "halves", or "adjacent" channels.
        segments: who attends to whom: tokens of a "frame", of a "clip", or of the whole "call".
        align_corners: of Qwen3-VL's resampled positions.
        resample: GLM-V's table [side, side, D] at (height, width), [height * width, D].
        positions: order of the resampled positions: as the patches are "merged", or by "rows".
        model: changes the tower.
    """

    rotary: Literal["hw", "wh"] = "hw"
    rotary_pairs: Literal["halves", "adjacent"] = "halves"
    segments: Literal["frame", "clip", "call"] = "frame"
    align_corners: bool = True
    resample: Callable[[torch.Tensor, int, int], torch.Tensor] = resample_bicubic
    positions: Literal["merged", "rows"] = "merged"
    model: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Qwen:
    """A vision tower of the family."""

    family: str
    checkpoint: Checkpoint
    _models: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    def run(
        self, items: Sequence[tuple[np.ndarray, Grid]], *, dtype: Dtype = "float64", alter: QwenAlter | None = None
    ) -> Encoded:
        """Encode all items in one call. Rows hold DeepStack's behind the merged ones.

        Args:
            items: (patches [t*h*w, 3*2*p*p] in merge order, grid (t, h, w)) each.
            dtype: "float64" is the truth.
            alter: a mistake; in float64 only.
        """
        tower = self._model(dtype)
        if dtype == "float64":
            tower = copy.deepcopy(tower)
            if alter is not None and alter.model is not None:
                alter.model(tower)
        elif alter is not None:
            raise ValueError("a mistake is made in float64 only")
        with torch.no_grad(), _recorded(tower.blocks) as hidden:
            rows = self._rows(tower, items, dtype, alter or QwenAlter())
        if self.family == "qwen2_5_vl":
            grids = torch.tensor([grid for _, grid in items])
            back = vision_utils.get_vision_window_index(grids, 2, tower.window_size, tower.patch_size)[0].argsort()
            hidden = [x.reshape(-1, 4, x.shape[-1])[back].flatten(0, 1) for x in hidden]
        tokens = [math.prod(grid) for _, grid in items]
        return Encoded(
            _split(rows, [count // 4 for count in tokens]),
            [np.stack(layers) for layers in zip(*(_split(state, tokens) for state in hidden), strict=True)],
        )

    def gradients(self, items: Sequence[tuple[np.ndarray, Grid]], weights: Sequence[np.ndarray]) -> Tensors:
        """Of the sum of all rows times `weights`, by the tensors' names in the file; float64."""
        tower = copy.deepcopy(self._model("float64")).requires_grad_(True)
        rows = self._rows(tower, items, "float64", QwenAlter())
        (rows * torch.as_tensor(np.concatenate(weights))).sum().backward()
        return {self._prefix + name: parameter.grad.numpy() for name, parameter in tower.named_parameters()}

    def _rows(
        self, tower: Any, items: Sequence[tuple[np.ndarray, Grid]], dtype: Dtype, alter: QwenAlter
    ) -> torch.Tensor:
        modeling, _ = TOWERS[self.family]
        clips = [grid for _, grid in items]
        grids = clips
        if self.family == "glm4v":  # as its `get_video_features` does
            grids = [(1, h, w) for t, h, w in clips for _ in range(t)]
        pixels = torch.as_tensor(np.concatenate([patches for patches, _ in items])).to(getattr(torch, dtype))
        replaced: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if dtype == "float64":
            replaced = _in_double(tower, modeling, clips, alter)
        with replaced:
            made = tower(pixels, grid_thw=torch.tensor(grids))
        return torch.cat([made.pooler_output, *(made.get("deepstack_features") or ())], dim=-1)

    @property
    def _prefix(self) -> str:
        return next(iter(self.checkpoint.tensors["original"])).partition("patch_embed")[0]

    def _model(self, dtype: Dtype) -> Any:
        if dtype not in self._models:
            modeling, name = TOWERS[self.family]
            tower = getattr(modeling, name)
            config = tower.config_class(**self.checkpoint.configs["tower"])
            config._attn_implementation = "sdpa"
            tensors = self.checkpoint.tensors["original"]
            self._models[dtype] = _loaded(tower(config), tensors, self._prefix, dtype)
        return self._models[dtype]


@contextlib.contextmanager
def _in_double(tower: Any, modeling: ModuleType, clips: Sequence[Grid], alter: QwenAlter) -> Iterator[None]:
    blocks = tower.blocks[0].attn
    head_dim = blocks.qkv.in_features // blocks.num_heads

    def tables(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = 10000.0 ** (-4 * torch.arange(head_dim // 4, dtype=torch.float64) / head_dim)
        yx = position_ids.double() if alter.rotary == "hw" else position_ids.double().flip(-1)
        angles = (yx[..., None] * frequencies).flatten(-2)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        if alter.rotary_pairs == "halves":
            return tuple(x * cos + modeling.rotate_half(x) * sin for x in (q, k))
        order = torch.arange(head_dim).reshape(-1, 2).T.flatten()  # of pairs side by side, as halves
        return tuple(x[..., order] * cos + modeling.rotate_half(x[..., order]) * sin for x in (q, k))

    def lengths(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        sizes = [size for t, h, w in clips for size in {"frame": [h * w] * t}.get(alter.segments, [t * h * w])]
        sizes = [sum(sizes)] if alter.segments == "call" else sizes
        return torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32), None

    def placed(h: int, w: int) -> torch.Tensor:
        order = torch.arange(h * w)
        merged = order.reshape(h // 2, 2, w // 2, 2).transpose(1, 2).flatten()
        return merged if alter.positions == "merged" else order

    def taps(grid_thw: torch.Tensor, *, num_grid_per_side: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        indices, weights = [], []
        for t, h, w in grid_thw.tolist():
            index, weight = _grid_taps(h, w, num_grid_per_side, alter.align_corners)
            order = placed(h, w)
            indices += [index[order]] * t
            weights += [weight[order]] * t
        return torch.cat(indices), torch.cat(weights)

    def embeddings(self: Any, x: torch.Tensor, _: Any, grid_thw: torch.Tensor, *__: Any) -> torch.Tensor:
        table = self.position_embedding.weight
        table = table.reshape(math.isqrt(len(table)), -1, table.shape[1])
        return x + torch.cat([alter.resample(table, h, w)[placed(h, w)] for _, h, w in grid_thw.tolist()])

    def rms(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    with contextlib.ExitStack() as stack:
        for name, function in (
            ("apply_rotary_pos_emb_vision", rotate),
            ("get_vision_attention_seqlens", lengths),
            ("get_vision_interpolation_indices_and_weights", taps),
        ):
            if hasattr(modeling, name):
                stack.enter_context(mock.patch.object(modeling, name, function))
        for name, function in (*((name, rms) for name in RMS_NORMS), ("Glm4vVisionEmbeddings", embeddings)):
            if hasattr(modeling, name):
                stack.enter_context(mock.patch.object(getattr(modeling, name), "forward", function))
        tower.rotary_pos_emb.forward = tables
        yield


def _grid_taps(h: int, w: int, side: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Four taps of each point of a grid, by rows, in a square table."""

    def axis(size: int) -> tuple[np.ndarray, np.ndarray]:
        index = np.arange(size)
        source = index * (side - 1) / max(size - 1, 1) if align_corners else (index + 0.5) * side / size - 0.5
        first = np.floor(source).astype(int)
        taps = np.stack([first, first + 1], axis=1).clip(0, side - 1)
        return taps, np.stack([1 - (source - first), source - first], axis=1)

    (y, weight_y), (x, weight_x) = axis(h), axis(w)
    index = y[:, None, :, None] * side + x[None, :, None, :]
    weight = weight_y[:, None, :, None] * weight_x[None, :, None, :]
    return torch.as_tensor(index.reshape(h * w, 4)), torch.from_numpy(weight.reshape(h * w, 4))
