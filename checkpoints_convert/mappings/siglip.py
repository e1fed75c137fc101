"""Key names of SigLIP's vision tower, alone or in a LLaVA or PaliGemma with its projector, as published on the hub."""

from dataclasses import replace
from typing import Any

from checkpoints_convert.mapping import Mapping
from checkpoints_convert.mappings.vit import CLIP_NAMES, llava_mappings


def mappings(*, final_norm: bool, **sizes: Any) -> dict[str, Mapping]:
    """The one layout, under the prefixes of the models that have the tower.

    Args:
        final_norm: Whether rows are taken after the last norm.
        **sizes: See `llava_mappings`.

    Returns:
        {"original": ...}
    """
    names = replace(CLIP_NAMES, final_norm="post_layernorm" if final_norm else None)
    unused = ("head.",) if final_norm else ("head.", "post_layernorm.")
    return llava_mappings("siglip", names, **sizes, patch_bias=True, unused=unused)
