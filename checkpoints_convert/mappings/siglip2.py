"""Key names of SigLIP 2's vision tower of variable resolution, as published on the hub."""

from dataclasses import replace

from checkpoints_convert.mapping import Mapping
from checkpoints_convert.mappings.vit import CLIP_NAMES, vit_entries


def mappings(*, layers: int, embed: int, heads: int, mlp: int, patch: int, positions: int) -> dict[str, Mapping]:
    """The one layout.

    Args:
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        positions: Rows of the position table.

    Returns:
        {"original": ...}
    """
    prefix, names = "vision_model.", replace(CLIP_NAMES, final_norm="post_layernorm")
    mapping = Mapping(
        "siglip2",
        "original",
        entries=vit_entries(
            prefix, names, embed=embed, heads=heads, mlp=mlp, patch=patch, positions=positions, flat_patches=True
        ),
        prefixes=(prefix,),
        layers=layers,
        unused=(f"{prefix}head.",),
        aliases=((prefix, ("model.vision_tower.", "model.vision_tower.vision_model.", "vision_tower.vision_model.")),),
    )
    return {"original": mapping}
