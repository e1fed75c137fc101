"""Key names of SigLIP 2's vision tower of variable resolution, as published on the hub."""

from dataclasses import replace
from typing import Any

from checkpoints_convert.mapping import Mapping
from checkpoints_convert.mappings.vit import CLIP_NAMES, vit_entries


def mappings(*, layers: int, **sizes: Any) -> dict[str, Mapping]:
    """The one layout, for so many blocks; for the sizes see `vit_entries`."""
    prefix, names = "vision_model.", replace(CLIP_NAMES, final_norm="post_layernorm")
    mapping = Mapping(
        "siglip2",
        "original",
        entries=vit_entries(prefix, names, **sizes, flat_patches=True),
        prefixes=(prefix,),
        layers=layers,
        unused=(f"{prefix}head.",),
        aliases=((prefix, ("",)),),
    )
    return {"original": mapping}
