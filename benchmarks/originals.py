"""Kimi-K2.5's tower in PyTorch as its users have it: saved and loaded by transformers' own means."""

from pathlib import Path

import torch
from torch import nn
from transformers import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25PreTrainedModel,
    Kimi_K25VisionModel,
)

from tests.parity.checkpoints import Checkpoint, write_checkpoint


class KimiTower(Kimi_K25PreTrainedModel):
    """The vision tower and the projector of `Kimi_K25Model`, under their names there, without the language model."""

    def __init__(self, config: Kimi_K25Config):
        """Makes both from the whole model's config."""
        super().__init__(config)
        self.vision_tower = Kimi_K25VisionModel._from_config(config.vision_config)
        self.mm_projector = Kimi_K25MultimodalProjection(config)
        self.post_init()


def write(checkpoint: Checkpoint, folder: Path, *, dtype: str) -> None:
    """Saves the tower alone, as transformers would: no renaming is left to do."""
    write_checkpoint(folder, checkpoint.tensors["transformers"], checkpoint.configs["transformers"], dtype=dtype)


def load(folder: Path, *, dtype: str) -> nn.Module:
    """The tower, from what `write` saved."""
    return KimiTower.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
