"""Key names of Qwen2.5-Omni's audio tower."""

from checkpoints_convert.mapping import Entry, Mapping, linear, norm
from checkpoints_convert.mappings.whisper_parts import blocks, convolutions


def mappings(*, layers: int, embed: int, heads: int, mlp: int, mel: int, out: int) -> dict[str, Mapping]:
    """The one layout, under any of its prefixes.

    Args:
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        mel: Mel bins of the input.
        out: Width of the language model.

    Returns:
        {"original": ...}
    """
    prefix = "thinker.audio_tower."
    entries = (
        *convolutions(prefix, embed=embed, mel=mel),
        *blocks(prefix, embed=embed, heads=heads, mlp=mlp, key_bias=False),
        *norm("final_norm", f"{prefix}ln_post", embed),
        *linear("projector", f"{prefix}proj", stored=(out, embed)),
        Entry("boundary_embed", f"{prefix}audio_bos_eos_token.weight", stored=(2, out)),
    )
    mapping = Mapping(
        "qwen2_5_omni_audio",
        "original",
        entries=entries,
        prefixes=(prefix,),
        layers=layers,
        aliases=((prefix, ("audio_tower.", "model.audio_tower.")),),
    )
    return {"original": mapping}
