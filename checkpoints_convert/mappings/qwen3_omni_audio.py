"""Key names of Qwen3-Omni's audio tower (and Qwen3-ASR's, which is the same at other sizes).

transformers keeps the published names; only what stands before `audio_tower.` depends on the class that saved them.
"""

from checkpoints_convert.mapping import Mapping, linear, norm


def mappings(
    *,
    layers: int,
    embed: int,
    heads: int,
    mlp: int,
    conv_channels: int,
    conv_features: int,
    projector_out: int,
    kernel: int = 3,
) -> dict[str, Mapping]:
    """The one layout, under any of its prefixes.

    Args:
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        conv_channels: Channels of the three convolutions.
        conv_features: Convolution channels x mel bins left after them (480 x 16).
        projector_out: Width of the language model.
        kernel: Side of the convolutions' kernels.

    Returns:
        {"original": ...}
    """
    prefix = "thinker.audio_tower."
    block = prefix + "layers.{layer}."
    per_head = (heads, embed // heads)
    entries = (
        *linear("stem/conv1", f"{prefix}conv2d1", stored=(conv_channels, 1, kernel, kernel)),
        *linear("stem/conv2", f"{prefix}conv2d2", stored=(conv_channels, conv_channels, kernel, kernel)),
        *linear("stem/conv3", f"{prefix}conv2d3", stored=(conv_channels, conv_channels, kernel, kernel)),
        *linear("stem/out", f"{prefix}conv_out", stored=(embed, conv_features), bias=False),
        *norm("layers/attention_norm", f"{block}self_attn_layer_norm", embed),
        *(
            entry
            for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
            for entry in linear(
                f"layers/attention/{ours}",
                f"{block}self_attn.{theirs}",
                stored=(embed, embed),
                shape=(*per_head, embed),
                bias_shape=per_head,
            )
        ),
        *linear("layers/attention/out", f"{block}self_attn.out_proj", stored=(embed, embed), shape=(embed, *per_head)),
        *norm("layers/mlp_norm", f"{block}final_layer_norm", embed),
        *linear("layers/mlp/up", f"{block}fc1", stored=(mlp, embed)),
        *linear("layers/mlp/down", f"{block}fc2", stored=(embed, mlp)),
        *norm("final_norm", f"{prefix}ln_post", embed),
        *linear("projector/up", f"{prefix}proj1", stored=(embed, embed)),
        *linear("projector/down", f"{prefix}proj2", stored=(projector_out, embed)),
    )
    mapping = Mapping(
        "qwen3_omni_audio",
        "original",
        entries=entries,
        prefixes=(prefix,),
        layers=layers,
        aliases=((prefix, ("audio_tower.", "model.audio_tower.", "model.thinker.audio_tower.")),),
    )
    return {"original": mapping}
