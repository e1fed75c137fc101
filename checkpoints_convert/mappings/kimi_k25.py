"""Key names of Kimi-K2.5's vision tower and projector.

"original": as published, or with the projector spelt as vLLM does. "transformers": as transformers 5 names them in
memory, where norms and MLP layers are counted from 1 instead of 0, query, key and value are apart, and the rows of
query and key are permuted within each head for `rotate_half` (`PermuteForRope`). Parameters are in the original order:
rotary pairs side by side.
"""

from checkpoints_convert.mapping import Entry, Mapping, Reorder, half_split_to_pairs, linear, norm


def mappings(
    *,
    layers: int,
    embed: int,
    heads: int,
    mlp: int,
    patch: int,
    position_h: int,
    position_w: int,
    projector_in: int,
    out: int,
    channels: int = 3,
) -> dict[str, Mapping]:
    """The two layouts.

    Args:
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        position_h: Rows of the position table.
        position_w: Columns of the position table.
        projector_in: Width of a merged patch (4 x embed), which is the projector's inner width too.
        out: Width of the language model.
        channels: Colour channels.

    Returns:
        {"original": ..., "transformers": ...}
    """
    head_dim = embed // heads

    def entries(tower: str, block: str, projector: str, names: dict[str, str]) -> tuple[Entry, ...]:
        """All but query, key and value."""
        return (
            *linear(
                "patch_embed",
                f"{tower}patch_embed.proj",
                stored=(embed, channels, patch, patch),
                shape=(embed, channels * patch * patch),
            ),
            Entry("position_embed", f"{tower}{names['table']}", stored=(position_h, position_w, embed)),
            *norm("layers/attention_norm", f"{block}{names['attention_norm']}", embed),
            *linear(
                "layers/attention/out",
                f"{block}{names['out']}",
                stored=(embed, embed),
                shape=(embed, heads, head_dim),
            ),
            *norm("layers/mlp_norm", f"{block}{names['mlp_norm']}", embed),
            *linear("layers/mlp/up", f"{block}{names['up']}", stored=(mlp, embed)),
            *linear("layers/mlp/down", f"{block}{names['down']}", stored=(embed, mlp)),
            *norm("final_norm", f"{tower}{names['final_norm']}", embed),
            *norm("projector/norm", f"{projector}pre_norm", embed),
            *linear("projector/up", f"{projector}{names['projector_up']}", stored=(projector_in, projector_in)),
            *linear("projector/down", f"{projector}{names['projector_down']}", stored=(out, projector_in)),
        )

    block = "vision_tower.encoder.blocks.{layer}."
    fused = linear(
        "layers/attention/qkv",
        f"{block}wqkv",
        stored=(3 * embed, embed),
        shape=(3, heads, head_dim, embed),
        bias_shape=(3, heads, head_dim),
    )
    original = Mapping(
        "kimi_k25",
        "original",
        entries=(*entries("vision_tower.", block, "mm_projector.", _ORIGINAL), *fused),
        prefixes=("vision_tower.", "mm_projector."),
        layers=layers,
        aliases=(
            ("mm_projector.proj.0.", ("mm_projector.linear_1.",)),
            ("mm_projector.proj.2.", ("mm_projector.linear_2.",)),
        ),
    )

    block = "model.vision_tower.layers.{layer}."
    pairs = Reorder(axis=1, order=half_split_to_pairs(head_dim))
    apart = tuple(
        Entry(
            f"layers/attention/qkv/{ours}",
            tuple(f"{block}attn.{part}_proj.{theirs}" for part in "qkv"),
            stored=(embed, *rest),
            shape=(heads, head_dim, *rest),
            reorder=(pairs, pairs, None),
        )
        for ours, theirs, rest in (("kernel", "weight", (embed,)), ("bias", "bias", ()))
    )
    native = Mapping(
        "kimi_k25",
        "transformers",
        entries=(*entries("model.vision_tower.", block, "model.mm_projector.", _TRANSFORMERS), *apart),
        prefixes=("model.vision_tower.", "model.mm_projector."),
        layers=layers,
        aliases=(("model.vision_tower.", ("vision_tower.",)), ("model.mm_projector.", ("mm_projector.",))),
    )
    return {"original": original, "transformers": native}


# The trap: the original's norm1 and fc1 are transformers' norm2 and fc2, not its norm1 and fc1.
_ORIGINAL = {
    "table": "patch_embed.pos_emb.weight",
    "attention_norm": "norm0",
    "out": "wo",
    "mlp_norm": "norm1",
    "up": "mlp.fc0",
    "down": "mlp.fc1",
    "final_norm": "encoder.final_layernorm",
    "projector_up": "proj.0",
    "projector_down": "proj.2",
}
_TRANSFORMERS = {
    "table": "patch_embed.pos_emb.position_embeddings",
    "attention_norm": "norm1",
    "out": "attn.proj",
    "mlp_norm": "norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "final_norm": "final_layernorm",
    "projector_up": "in_proj",
    "projector_down": "out_proj",
}
