"""Key names of Whisper's encoder, as published on the hub; transformers uses the same."""

from checkpoints_convert.mapping import Entry, Mapping, norm
from checkpoints_convert.mappings.whisper_parts import blocks, convolutions


def mappings(*, layers: int, embed: int, heads: int, mlp: int, mel: int, positions: int) -> dict[str, Mapping]:
    """The one layout, with or without the leading `model.`.

    Args:
        layers: Number of blocks.
        embed: Width of the encoder.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        mel: Mel bins of the input.
        positions: Rows of the position table (1500).

    Returns:
        {"original": ...}
    """
    prefix = "model.encoder."
    entries = (
        *convolutions(prefix, embed=embed, mel=mel),
        Entry("position_embed", f"{prefix}embed_positions.weight", stored=(positions, embed)),
        *blocks(prefix, embed=embed, heads=heads, mlp=mlp, key_bias=False),
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
