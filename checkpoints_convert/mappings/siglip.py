"""Key names of SigLIP's vision tower, alone or in a LLaVA or PaliGemma with its projector, as published on the hub."""

from dataclasses import replace
from typing import Any

from checkpoints_convert.mapping import Entry, Mapping, linear, norm
from checkpoints_convert.mappings.vit import CLIP_NAMES, llava_mappings


def mappings(*, final_norm: bool, pooled: bool, **sizes: Any) -> dict[str, Mapping]:
    """The one layout, under the prefixes of the models that have the tower.

    Args:
        final_norm: Whether rows are taken after the last norm.
        pooled: Whether the head that pools them is wanted; only of the tower alone.
        **sizes: See `llava_mappings`.

    Returns:
        {"original": ...}
    """
    names = replace(CLIP_NAMES, final_norm="post_layernorm" if final_norm else None)
    unused = () if pooled else ("head.",) if final_norm else ("head.", "post_layernorm.")
    made = llava_mappings("siglip", names, **sizes, patch_bias=True, unused=unused)
    head = _head("vision_model.head.", sizes["embed"], sizes["heads"], sizes["mlp"]) if pooled else ()
    return {layout: replace(mapping, entries=(*mapping.entries, *head)) for layout, mapping in made.items()}


def _head(prefix: str, embed: int, heads: int, mlp: int) -> tuple[Entry, ...]:
    per_head = (heads, embed // heads)
    return (
        Entry("head/probe", f"{prefix}probe", stored=(1, 1, embed), shape=(embed,)),
        # torch's MultiheadAttention: no dot before weight and bias
        Entry(
            "head/qkv/kernel",
            f"{prefix}attention.in_proj_weight",
            stored=(3 * embed, embed),
            shape=(3, *per_head, embed),
        ),
        Entry("head/qkv/bias", f"{prefix}attention.in_proj_bias", stored=(3 * embed,), shape=(3, *per_head)),
        *linear("head/out", f"{prefix}attention.out_proj", stored=(embed, embed), shape=(embed, *per_head)),
        *norm("head/norm", f"{prefix}layernorm", embed),
        *linear("head/mlp/up", f"{prefix}mlp.fc1", stored=(mlp, embed)),
        *linear("head/mlp/down", f"{prefix}mlp.fc2", stored=(embed, mlp)),
    )
