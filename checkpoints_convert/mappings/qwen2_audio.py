"""Key names of Qwen2-Audio's encoder and projector."""

from checkpoints_convert.mapping import Entry, Mapping, linear, norm
from checkpoints_convert.mappings.whisper_parts import blocks, convolutions


def mappings(
    *, layers: int, embed: int, heads: int, mlp: int, mel: int, positions: int, out: int
) -> dict[str, Mapping]:
    """The one layout, with or without a leading `model.`.

    Args:
        layers: Number of blocks.
        embed: Width of the encoder.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        mel: Mel bins of the input.
        positions: Rows of the position table (1500).
        out: Width of the language model.

    Returns:
        {"original": ...}
    """
    tower, projector = "audio_tower.", "multi_modal_projector."
    entries = (
        *convolutions(tower, embed=embed, mel=mel),
        Entry("position_embed", f"{tower}embed_positions.weight", stored=(positions, embed)),
        *blocks(tower, embed=embed, heads=heads, mlp=mlp, key_bias=False),
        *norm("final_norm", f"{tower}layer_norm", embed),
        *linear("projector", f"{projector}linear", stored=(out, embed)),
    )
    mapping = Mapping(
        "qwen2_audio",
        "original",
        entries=entries,
        prefixes=(tower, projector),
        layers=layers,
        aliases=(("", ("model.",)),),
    )
    return {"original": mapping}
