"""Key names of DINOv2.

"original": as published on the hub. "transformers": as transformers 5 names them in memory, where the giant's gate and
up are apart.
"""

from dataclasses import replace
from typing import Any

from checkpoints_convert.mapping import Mapping
from checkpoints_convert.mappings.vit import Names, vit_entries

_PUBLISHED = Names(
    patch_embed="embeddings.patch_embeddings.projection",
    position_embed="embeddings.position_embeddings",
    block="encoder.layer.{layer}.",
    attention_norm="norm1",
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    out="attention.output.dense",
    mlp_norm="norm2",
    up="mlp.fc1",
    down="mlp.fc2",
    class_embed="embeddings.cls_token",
    final_norm="layernorm",
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)


def mappings(*, layers: int, gated: bool, **sizes: Any) -> dict[str, Mapping]:
    """The two layouts.

    Args:
        layers: Number of blocks.
        gated: Whether the MLP is a gated one, as the giant's.
        **sizes: See `vit_entries`.

    Returns:
        {"original": ..., "transformers": ...}
    """
    published = replace(_PUBLISHED, up="mlp.weights_in", down="mlp.weights_out") if gated else _PUBLISHED
    native = replace(
        published,
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.o_proj",
        up=("mlp.gate_proj", "mlp.up_proj") if gated else published.up,
        down="mlp.down_proj" if gated else published.down,
    )

    def mapping(layout: str, names: Names) -> Mapping:
        # a classifier's file has the tower under this name; alone there is nothing before its names
        prefix = "dinov2."
        return Mapping(
            "dinov2",
            layout,
            entries=vit_entries(prefix, names, **sizes, gated=gated, unit_axes=1),
            prefixes=(prefix,),
            layers=layers,
            # it stands for patches that pretraining hides
            unused=(f"{prefix}embeddings.mask_token",),
            aliases=((prefix, ("",)),),
        )

    return {"original": mapping("original", published), "transformers": mapping("transformers", native)}
