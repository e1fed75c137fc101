"""Key names of InternViT, alone or in an InternVL with its projector.

"original": as OpenGVLab publishes them, with one tensor for query, key and value. "transformers": as transformers 5
names them, in the repositories that end in -hf and in memory.
"""

from typing import Any

from checkpoints_convert.mapping import Mapping, linear, norm
from checkpoints_convert.mappings.vit import Names, vit_entries


def mappings(
    *, layers: int, skipped: int, merge: int, hidden: int | None, out: int | None, head_norm: bool, **sizes: Any
) -> dict[str, Mapping]:
    """The two layouts.

    Args:
        layers: Number of blocks that are wanted.
        skipped: Further ones that the checkpoint holds.
        merge: Patches a side that the projector takes together.
        hidden: Inner width of the projector.
        out: Width of its rows; None where there is none.
        head_norm: Whether queries and keys are normalised.
        **sizes: See `vit_entries`.

    Returns:
        {"original": ..., "transformers": ...}
    """
    published = Names(
        patch_embed="embeddings.patch_embedding",
        class_embed="embeddings.class_embedding",
        position_embed="embeddings.position_embedding",
        block="encoder.layers.{layer}.",
        attention_norm="norm1",
        qkv="attn.qkv",
        head_norms=("attn.q_norm", "attn.k_norm") if head_norm else None,
        out="attn.proj",
        mlp_norm="norm2",
        up="mlp.fc1",
        down="mlp.fc2",
        scales=("ls1", "ls2"),
    )
    native = Names(
        patch_embed="embeddings.patch_embeddings.projection",
        class_embed="embeddings.cls_token",
        position_embed="embeddings.position_embeddings",
        block="encoder.layer.{layer}.",
        attention_norm="layernorm_before",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        head_norms=("attention.q_norm", "attention.k_norm") if head_norm else None,
        out="attention.projection_layer",
        mlp_norm="layernorm_after",
        up="mlp.fc1",
        down="mlp.fc2",
        scales=("lambda_1", "lambda_2"),
    )

    def mapping(layout: str, names: Names, prefix: str, projector: str, parts: tuple[str, str, str]) -> Mapping:
        entries = vit_entries(prefix, names, **sizes, unit_axes=1)
        if out is not None and hidden is not None:
            merged, (first, up, down) = merge**2 * sizes["embed"], (projector + part for part in parts)
            entries += norm("projector_norm", first, merged)
            entries += linear("projector/up", up, stored=(hidden, merged))
            entries += linear("projector/down", down, stored=(out, hidden))
        further = (names.block.replace("{layer}", str(layers + i)) for i in range(skipped))
        return Mapping(
            "internvit",
            layout,
            entries=entries,
            prefixes=(prefix,) if out is None else (prefix, projector),
            layers=layers,
            # the mask token stands for patches that pretraining hides
            unused=tuple(prefix + one for one in ("embeddings.mask_token", *further)),
            aliases=((prefix, ("",)),)
            if out is None
            else ((prefix, (f"model.{prefix}",)), (projector, (f"model.{projector}",))),
        )

    return {
        "original": mapping("original", published, "vision_model.", "mlp1.", ("0", "1", "3")),
        "transformers": mapping(
            "transformers", native, "vision_tower.", "multi_modal_projector.", ("layer_norm", "linear_1", "linear_2")
        ),
    }
