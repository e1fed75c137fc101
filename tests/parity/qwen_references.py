"""The PyTorch originals of the Qwen-VL vision towers (transformers 5.24); for the conventions see `references`.

Where transformers computes in float32 whatever the model's dtype, the truth replaces it: rotary tables
(`rotary_pos_emb.forward`) and their application (`apply_rotary_pos_emb_vision`), the weights of resampled positions
(`get_vision_interpolation_indices_and_weights`), and the statistics of Qwen2.5-VL's norms (`Qwen2_5_VLRMSNorm`).
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
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe
from transformers.models.qwen3_vl import modeling_qwen3_vl

from tests.parity.checkpoints import Checkpoint
from tests.parity.references import Dtype, Encoded, Grid, _loaded, _recorded, _split

TOWERS: dict[str, tuple[ModuleType, str]] = {
    "qwen2_vl": (modeling_qwen2_vl, "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": (modeling_qwen2_5_vl, "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": (modeling_qwen3_vl, "Qwen3VLVisionModel"),
    "qwen3_omni_vision": (modeling_qwen3_omni_moe, "Qwen3OmniMoeVisionEncoder"),
}


@dataclass(frozen=True)
class QwenAlter:
    """One mistake each; the defaults are right.

    Attributes:
        rotary: which coordinate turns the first quarter of a head's channels: "hw" (the row) or "wh".
        rotary_pairs: "halves", or "adjacent" channels.
        segments: who attends to whom: tokens of a "frame", of a "clip", or of the whole "call".
        align_corners: of the resampled positions.
        positions: order of the resampled positions: as the patches are "merged", or by "rows".
        model: changes the tower.
    """

    rotary: Literal["hw", "wh"] = "hw"
    rotary_pairs: Literal["halves", "adjacent"] = "halves"
    segments: Literal["frame", "clip", "call"] = "frame"
    align_corners: bool = True
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
        modeling, _ = TOWERS[self.family]
        tower = self._model(dtype)
        grids = torch.tensor([grid for _, grid in items])
        pixels = torch.from_numpy(np.concatenate([patches for patches, _ in items])).to(getattr(torch, dtype))
        replaced: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if dtype == "float64":
            tower = copy.deepcopy(tower)
            if alter is not None and alter.model is not None:
                alter.model(tower)
            replaced = _in_double(tower, modeling, alter or QwenAlter())
        elif alter is not None:
            raise ValueError("a mistake is made in float64 only")
        with torch.no_grad(), replaced, _recorded(tower.blocks) as hidden:
            made = tower(pixels, grid_thw=grids)
        rows = torch.cat([made.pooler_output, *(made.get("deepstack_features") or ())], dim=-1)
        if self.family == "qwen2_5_vl":
            back = vision_utils.get_vision_window_index(grids, 2, tower.window_size, tower.patch_size)[0].argsort()
            hidden = [x.reshape(-1, 4, x.shape[-1])[back].flatten(0, 1) for x in hidden]
        tokens = [math.prod(grid) for _, grid in items]
        return Encoded(
            _split(rows, [count // 4 for count in tokens]),
            [np.stack(layers) for layers in zip(*(_split(state, tokens) for state in hidden), strict=True)],
        )

    def _model(self, dtype: Dtype) -> Any:
        if dtype not in self._models:
            modeling, name = TOWERS[self.family]
            tower = getattr(modeling, name)
            config = tower.config_class(**self.checkpoint.configs["tower"])
            config._attn_implementation = "sdpa"
            tensors = self.checkpoint.tensors["original"]
            prefix = next(iter(tensors)).partition("patch_embed")[0]
            self._models[dtype] = _loaded(tower(config), tensors, prefix, dtype)
        return self._models[dtype]


@contextlib.contextmanager
def _in_double(tower: Any, modeling: ModuleType, alter: QwenAlter) -> Iterator[None]:
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

    def lengths(grid_thw: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        sizes = [
            size for t, h, w in grid_thw.tolist() for size in {"frame": [h * w] * t}.get(alter.segments, [t * h * w])
        ]
        sizes = [sum(sizes)] if alter.segments == "call" else sizes
        return torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32), None

    def taps(grid_thw: torch.Tensor, *, num_grid_per_side: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        indices, weights = [], []
        for t, h, w in grid_thw.tolist():
            index, weight = _grid_taps(h, w, num_grid_per_side, alter.align_corners)
            if alter.positions == "merged":
                merged = torch.arange(h * w).reshape(h // 2, 2, w // 2, 2).transpose(1, 2).flatten()
                index, weight = index[merged], weight[merged]
            indices += [index] * t
            weights += [weight] * t
        return torch.cat(indices), torch.cat(weights)

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
        if hasattr(modeling, "Qwen2_5_VLRMSNorm"):
            stack.enter_context(mock.patch.object(modeling.Qwen2_5_VLRMSNorm, "forward", rms))
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
    return torch.from_numpy(index.reshape(h * w, 4)), torch.from_numpy(weight.reshape(h * w, 4))
