"""Key names of Whisper's encoder, as published on the hub; transformers uses the same."""

from checkpoints_convert.mapping import Entry, Mapping, linear, norm


def mappings(
    *, layers: int, embed: int, heads: int, mlp: int, mel_bins: int, positions: int, kernel: int = 3
) -> dict[str, Mapping]:
    """The one layout, with or without the leading `model.`.

    Args:
        layers: Number of blocks.
        embed: Width of the encoder.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        mel_bins: Mel bins of the input.
        positions: Rows of the position table (1500).
        kernel: Width of the convolutions' kernels.

    Returns:
        {"original": ...}
    """
    prefix = "model.encoder."
    block = prefix + "layers.{layer}."
    per_head = (heads, embed // heads)
    entries = (
        *linear("stem/conv1", f"{prefix}conv1", stored=(embed, mel_bins, kernel)),
        *linear("stem/conv2", f"{prefix}conv2", stored=(embed, embed, kernel)),
        Entry("position_embed", f"{prefix}embed_positions.weight", stored=(positions, embed)),
        *norm("layers/attention_norm", f"{block}self_attn_layer_norm", embed),
        *(
            entry
            for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
            for entry in linear(
                f"layers/attention/{ours}",
                f"{block}self_attn.{theirs}",
                stored=(embed, embed),
                shape=(*per_head, embed),
                bias=ours != "key",  # Whisper's key projection has none.
                bias_shape=per_head,
            )
        ),
        *linear("layers/attention/out", f"{block}self_attn.out_proj", stored=(embed, embed), shape=(embed, *per_head)),
        *norm("layers/mlp_norm", f"{block}final_layer_norm", embed),
        *linear("layers/mlp/up", f"{block}fc1", stored=(mlp, embed)),
        *linear("layers/mlp/down", f"{block}fc2", stored=(embed, mlp)),
        *norm("final_norm", f"{prefix}layer_norm", embed),
    )
    mapping = Mapping(
        "whisper",
        "original",
        entries=entries,
        prefixes=(prefix,),
        layers=layers,
        aliases=((prefix, ("encoder.", "model.model.encoder.")),),
    )
    return {"original": mapping}
