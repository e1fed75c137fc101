"""Key names of the vision towers of the Qwen family, which transformers keeps.

They differ in how they call the layers of the MLPs and the mergers. What stands before `visual.` depends on the model
and on the class that saved it.
"""

from dataclasses import dataclass, replace

from checkpoints_convert.mapping import Entry, Mapping, linear, norm


@dataclass(frozen=True)
class Names:
    """What a family calls its parts.

    Attributes:
        up: of the blocks' MLP; two where it is gated: gate and up.
        down: the same.
        merger_norm: of a merger.
        merger_up: the same.
        merger_down: the same.
        deepstack: the mergers of blocks in between.
    """

    up: tuple[str, ...]
    down: str
    merger_norm: str = "ln_q"
    merger_up: str = "mlp.0"
    merger_down: str = "mlp.2"
    deepstack: str = ""


NAMES = {
    "qwen2_vl": Names(("mlp.fc1",), "mlp.fc2"),
    "qwen2_5_vl": Names(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    "qwen3_vl": Names(
        ("mlp.linear_fc1",), "mlp.linear_fc2", "norm", "linear_fc1", "linear_fc2", deepstack="deepstack_merger_list"
    ),
    "qwen3_omni_vision": Names(("mlp.linear_fc1",), "mlp.linear_fc2", deepstack="merger_list"),
}


def mappings(
    family: str,
    *,
    layers: int,
    embed: int,
    heads: int,
    mlp: int,
    patch: int,
    group: int,
    out: int,
    positions: int = 0,
    deepstack: int = 0,
    patch_bias: bool = False,
    norm_bias: bool = True,
    channels: int = 3,
    frames: int = 2,
) -> dict[str, Mapping]:
    """The one layout, under any of its prefixes.

    Args:
        family: One of `NAMES`.
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        group: Tokens that are merged.
        out: Width of the language model.
        positions: Rows of the position table; 0 where there is none.
        deepstack: Mergers of blocks in between.
        patch_bias: Whether the patch embedding has a bias.
        norm_bias: Whether norms have one: RMS norms have none.
        channels: Colour channels.
        frames: Frames that a patch covers.

    Returns:
        {"original": ...}
    """
    prefix, names = "visual.", NAMES[family]
    block, head_dim = prefix + "blocks.{layer}.", embed // heads

    def scale(target: str, source: str, size: int) -> tuple[Entry, ...]:
        return norm(target, source, size, bias=norm_bias)

    def merger(target: str, source: str, normed: int, layers: int | None = None) -> tuple[Entry, ...]:
        width = group * embed
        entries = (
            *scale(f"{target}/norm", f"{source}.{names.merger_norm}", normed),
            *linear(f"{target}/up", f"{source}.{names.merger_up}", stored=(width, width)),
            *linear(f"{target}/down", f"{source}.{names.merger_down}", stored=(out, width)),
        )
        return tuple(replace(entry, layers=layers) for entry in entries)

    up = tuple(
        Entry(f"layers/mlp/up/{ours}", tuple(f"{block}{name}.{theirs}" for name in names.up), stored=stored)
        for ours, theirs, stored in (("kernel", "weight", (mlp, embed)), ("bias", "bias", (mlp,)))
    )
    if len(names.up) == 1:
        up = linear("layers/mlp/up", f"{block}{names.up[0]}", stored=(mlp, embed))
    table = (Entry("position_embed", f"{prefix}pos_embed.weight", stored=(positions, embed)),)
    mapping = Mapping(
        family,
        "original",
        entries=(
            *linear(
                "patch_embed",
                f"{prefix}patch_embed.proj",
                stored=(embed, channels, frames, patch, patch),
                shape=(embed, channels * frames * patch * patch),
                bias=patch_bias,
            ),
            *(table if positions else ()),
            *scale("layers/attention_norm", f"{block}norm1", embed),
            *linear(
                "layers/attention/qkv",
                f"{block}attn.qkv",
                stored=(3 * embed, embed),
                shape=(3, heads, head_dim, embed),
                bias_shape=(3, heads, head_dim),
            ),
            *linear(
                "layers/attention/out",
                f"{block}attn.proj",
                stored=(embed, embed),
                shape=(embed, heads, head_dim),
            ),
            *scale("layers/mlp_norm", f"{block}norm2", embed),
            *up,
            *linear("layers/mlp/down", f"{block}{names.down}", stored=(embed, mlp)),
            *merger("projector", f"{prefix}merger", embed),
            # these normalise the merged vector, the last one the tokens
            *(
                merger("deepstack", prefix + names.deepstack + ".{layer}", group * embed, deepstack)
                if deepstack
                else ()
            ),
        ),
        prefixes=(prefix,),
        layers=layers,
        aliases=((prefix, ("model.visual.", "thinker.visual.", "model.thinker.visual.")),),
    )
    return {"original": mapping}
