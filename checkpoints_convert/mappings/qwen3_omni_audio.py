"""Key names of Qwen3-Omni's audio tower (and Qwen3-ASR's, which is the same at other sizes).

transformers keeps the published names; only what stands before `audio_tower.` depends on the class that saved them.
"""

from checkpoints_convert.mapping import Mapping, linear, norm
from checkpoints_convert.mappings.whisper_parts import blocks


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
    entries = (
        *linear("stem/conv1", f"{prefix}conv2d1", stored=(conv_channels, 1, kernel, kernel)),
        *linear("stem/conv2", f"{prefix}conv2d2", stored=(conv_channels, conv_channels, kernel, kernel)),
        *linear("stem/conv3", f"{prefix}conv2d3", stored=(conv_channels, conv_channels, kernel, kernel)),
        *linear("stem/out", f"{prefix}conv_out", stored=(embed, conv_features), bias=False),
        *blocks(prefix, embed=embed, heads=heads, mlp=mlp, key_bias=True),
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
