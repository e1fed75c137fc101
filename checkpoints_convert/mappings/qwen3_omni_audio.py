"""Key names of Qwen3-Omni's audio tower, and of Qwen3-ASR's, which is the same at other sizes.

Of Qwen3-Omni transformers keeps the published names; only what stands before `audio_tower.` depends on the class that
saved them. Of Qwen3-ASR it keeps the projector beside the tower, under other names.
"""

from checkpoints_convert.mapping import Mapping, linear, norm
from checkpoints_convert.mappings.whisper_parts import blocks


def mappings(
    *,
    family: str,
    layers: int,
    embed: int,
    heads: int,
    mlp: int,
    channels: int,
    conv_features: int,
    out: int,
    kernel: int = 3,
) -> dict[str, Mapping]:
    """The layouts, each under any of its prefixes.

    Args:
        family: "qwen3_omni_audio" or "qwen3_asr_audio".
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        channels: Channels of the three convolutions.
        conv_features: Convolution channels x mel bins left after them (480 x 16).
        out: Width of the language model.
        kernel: Side of the convolutions' kernels.

    Returns:
        {"original": ...}, and of Qwen3-ASR "transformers" too.
    """

    def layout(name: str, prefix: str, spellings: tuple[str, ...], up: str, down: str) -> Mapping:
        tower = f"{prefix}audio_tower."
        entries = (
            *linear("stem/conv1", f"{tower}conv2d1", stored=(channels, 1, kernel, kernel)),
            *linear("stem/conv2", f"{tower}conv2d2", stored=(channels, channels, kernel, kernel)),
            *linear("stem/conv3", f"{tower}conv2d3", stored=(channels, channels, kernel, kernel)),
            *linear("stem/out", f"{tower}conv_out", stored=(embed, conv_features), bias=False),
            *blocks(tower, embed=embed, heads=heads, mlp=mlp, key_bias=True),
            *norm("final_norm", f"{tower}ln_post", embed),
            *linear("projector/up", f"{prefix}{up}", stored=(embed, embed)),
            *linear("projector/down", f"{prefix}{down}", stored=(out, embed)),
        )
        owned = dict.fromkeys(f"{prefix}{part.split('.')[0]}." for part in ("audio_tower", up))
        return Mapping(
            family,
            name,
            entries=entries,
            prefixes=tuple(owned),
            layers=layers,
            aliases=((prefix, spellings),),
        )

    original = layout(
        "original", "thinker.", ("", "model.", "model.thinker."), "audio_tower.proj1", "audio_tower.proj2"
    )
    if family == "qwen3_omni_audio":
        return {"original": original}
    projector = "multi_modal_projector.linear_"
    native = layout("transformers", "model.", ("",), f"{projector}1", f"{projector}2")
    return {"original": original, "transformers": native}
