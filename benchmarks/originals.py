"""The PyTorch originals as their users have them: `from_pretrained`, scaled_dot_product_attention, no compilation."""

from pathlib import Path

import torch
from torch import nn
from transformers import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25PreTrainedModel,
    Kimi_K25VisionModel,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from jaxenc.items import Item, VisionItem
from tests.parity.checkpoints import Checkpoint, write_checkpoint


class KimiTower(Kimi_K25PreTrainedModel):
    """The vision tower and the projector of `Kimi_K25Model`, under their names there, without the language model."""

    def __init__(self, config: Kimi_K25Config):
        """Makes both from the whole model's config."""
        super().__init__(config)
        self.vision_tower = Kimi_K25VisionModel._from_config(config.vision_config)
        self.mm_projector = Kimi_K25MultimodalProjection(config)
        self.post_init()


# and the layout of a checkpoint that holds the model as transformers saves it: no renaming is left to do
ORIGINALS = {"kimi_k25": (KimiTower, "transformers"), "qwen3_omni_audio": (Qwen3OmniMoeAudioEncoder, "tower")}


def write(name: str, checkpoint: Checkpoint, folder: Path, *, dtype: str) -> None:
    """Saves the tower alone."""
    _, layout = ORIGINALS[name]
    write_checkpoint(folder, checkpoint.tensors[layout], checkpoint.configs[layout], dtype=dtype)


def load(name: str, folder: Path, *, dtype: str) -> nn.Module:
    """The tower, from a checkpoint as transformers saves it."""
    model, _ = ORIGINALS[name]
    return model.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


def inputs(model: nn.Module, item: Item) -> tuple[torch.Tensor, torch.Tensor]:
    """What the tower takes for one item, in its dtype: values, and sizes."""
    dtype = next(model.parameters()).dtype
    if isinstance(item, VisionItem):
        patch = model.config.vision_config.patch_size
        return torch.from_numpy(item.patches).reshape(-1, 3, patch, patch).to(dtype), torch.tensor([item.grid])
    return torch.from_numpy(item.mel).to(dtype), torch.tensor([item.mel.shape[1]])


@torch.inference_mode()
def encode(model: nn.Module, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Output rows [rows, dim]."""
    if isinstance(model, KimiTower):
        return model.mm_projector(model.vision_tower(values, grid_thw=sizes).pooler_output).squeeze(1)
    return model(values, feature_lens=sizes).last_hidden_state
