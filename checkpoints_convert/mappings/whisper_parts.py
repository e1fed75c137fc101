"""What the key names of all encoders that descend from Whisper's have in common."""

from checkpoints_convert.mapping import Entry, linear, norm


def convolutions(prefix: str, *, embed: int, mel: int, kernel: int = 3) -> tuple[Entry, ...]:
    """The two convolutions over time.

    Args:
        prefix: What their names start with.
        embed: Width of the encoder.
        mel: Mel bins of the input.
        kernel: Width of their kernels.
    """
    return (
        *linear("stem/conv1", f"{prefix}conv1", stored=(embed, mel, kernel)),
        *linear("stem/conv2", f"{prefix}conv2", stored=(embed, embed, kernel)),
    )


def blocks(prefix: str, *, embed: int, heads: int, mlp: int, key_bias: bool) -> tuple[Entry, ...]:
    """The transformer blocks.

    Args:
        prefix: What their names start with, before `layers.`.
        embed: Width of the encoder.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of their MLP.
        key_bias: Whether the key projection has one; Whisper's has none.
    """
    block = prefix + "layers.{layer}."
    per_head = (heads, embed // heads)
    return (
        *norm("layers/attention_norm", f"{block}self_attn_layer_norm", embed),
        *(
            entry
            for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
            for entry in linear(
                f"layers/attention/{ours}",
                f"{block}self_attn.{theirs}",
                stored=(embed, embed),
                shape=(*per_head, embed),
                bias=key_bias or ours != "key",
                bias_shape=per_head,
            )
        ),
        *linear("layers/attention/out", f"{block}self_attn.out_proj", stored=(embed, embed), shape=(embed, *per_head)),
        *norm("layers/mlp_norm", f"{block}final_layer_norm", embed),
        *linear("layers/mlp/up", f"{block}fc1", stored=(mlp, embed)),
        *linear("layers/mlp/down", f"{block}fc2", stored=(embed, mlp)),
    )
