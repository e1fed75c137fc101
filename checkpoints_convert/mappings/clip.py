"""Key names of CLIP's vision tower, alone or in a LLaVA with its projector, as published on the hub."""

from dataclasses import replace
from typing import Any

from checkpoints_convert.mapping import Mapping
from checkpoints_convert.mappings.vit import CLIP_NAMES, llava_mappings

NAMES = replace(
    CLIP_NAMES,
    class_embed="embeddings.class_embedding",
    pre_norm="pre_layrnorm",  # sic
)


def mappings(**sizes: Any) -> dict[str, Mapping]:
    """The one layout, under the prefixes of the models that have the tower; for the sizes see `llava_mappings`."""
    # rows are taken before the last norm
    return llava_mappings("clip", NAMES, **sizes, patch_bias=False, unused=("post_layernorm.",))
