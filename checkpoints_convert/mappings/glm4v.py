"""Key names of GLM-V's vision tower, which transformers keeps: the Qwen family's in the blocks, its own around them."""

from checkpoints_convert.mapping import Entry, Mapping, linear, norm
from checkpoints_convert.mappings.qwen_vision import PREFIX, Names, stacked, tower

NAMES = Names(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", positions="embeddings.position_embedding")


def mappings(
    *,
    layers: int,
    embed: int,
    heads: int,
    mlp: int,
    patch: int,
    merge: int,
    out: int,
    merger_mlp: int,
    positions: int,
) -> dict[str, Mapping]:
    """The one layout; it is published as model.visual.*.

    Args:
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        merge: Patches a side that are merged.
        out: Width of the language model.
        merger_mlp: Inner width of the merger's MLP.
        positions: Rows of the position table.

    Returns:
        {"original": ...}
    """
    into, merger = "projector/mlp", f"{PREFIX}merger"
    mapping = Mapping(
        "glm4v",
        "original",
        entries=(
            *tower(
                NAMES,
                embed=embed,
                heads=heads,
                mlp=mlp,
                patch=patch,
                positions=positions,
                patch_bias=True,
                norm_bias=False,
                bias=False,
            ),
            *norm("patch_norm", f"{PREFIX}post_conv_layernorm", embed, bias=False),
            *norm("projector/norm", f"{PREFIX}post_layernorm", embed, bias=False),
            # a convolution that does not overlap: its channels go last, as tokens have them
            Entry(
                "projector/merge/kernel",
                f"{PREFIX}downsample.weight",
                stored=(out, embed, merge, merge),
                transpose=(0, 2, 3, 1),
            ),
            Entry("projector/merge/bias", f"{PREFIX}downsample.bias", stored=(out,)),
            *linear("projector/project", f"{merger}.proj", stored=(out, out), bias=False),
            *norm("projector/projected_norm", f"{merger}.post_projection_norm", out),
            *stacked(
                f"{into}/up",
                [f"{merger}.gate_proj", f"{merger}.up_proj"],
                stored=(merger_mlp, out),
                bias=False,
            ),
            *linear(f"{into}/down", f"{merger}.down_proj", stored=(out, merger_mlp), bias=False),
        ),
        prefixes=(PREFIX,),
        layers=layers,
        aliases=((PREFIX, ("model.visual.",)),),
    )
    return {"original": mapping}
