"""Key names of the vision towers of the Qwen family, which transformers keeps.

They differ in how they call the layers of the MLPs and the mergers. What stands before `visual.` depends on the model
and on the class that saved it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkpoints_convert.mapping import Entry, Mapping, linear, norm


@dataclass(frozen=True)
class Names:
    """What a family calls its parts.

    Attributes:
        up: of the blocks' MLP; two where it is gated: gate and up.
        down: the same.
        positions: the table of them, where there is one.
        merger_norm: of a merger.
        merger_up: the same.
        merger_down: the same.
        deepstack: the mergers of blocks in between.
    """

    up: tuple[str, ...]
    down: str
    positions: str = "pos_embed"
    merger_norm: str = "ln_q"
    merger_up: str = "mlp.0"
    merger_down: str = "mlp.2"
    deepstack: str = ""


NAMES = {
    "qwen2_vl": Names(("mlp.fc1",), "mlp.fc2"),
    "qwen2_5_vl": Names(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    "qwen3_vl": Names(
        ("mlp.linear_fc1",),
        "mlp.linear_fc2",
        merger_norm="norm",
        merger_up="linear_fc1",
        merger_down="linear_fc2",
        deepstack="deepstack_merger_list",
    ),
    "qwen3_omni_vision": Names(("mlp.linear_fc1",), "mlp.linear_fc2", deepstack="merger_list"),
}
PREFIX = "visual."


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

    Returns:
        {"original": ...}
    """
    names = NAMES[family]

    def merger(target: str, source: str, normed: int, layers: int | None = None) -> tuple[Entry, ...]:
        width = group * embed
        entries = (
            *norm(f"{target}/norm", f"{source}.{names.merger_norm}", normed, bias=norm_bias),
            *linear(f"{target}/up", f"{source}.{names.merger_up}", stored=(width, width)),
            *linear(f"{target}/down", f"{source}.{names.merger_down}", stored=(out, width)),
        )
        return tuple(replace(entry, layers=layers) for entry in entries)

    mapping = Mapping(
        family,
        "original",
        entries=(
            *tower(
                names,
                embed=embed,
                heads=heads,
                mlp=mlp,
                patch=patch,
                positions=positions,
                patch_bias=patch_bias,
                norm_bias=norm_bias,
            ),
            *merger("projector", f"{PREFIX}merger", embed),
            # these normalise the merged vector, the last one the tokens
            *(
                merger("deepstack", PREFIX + names.deepstack + ".{layer}", group * embed, deepstack)
                if deepstack
                else ()
            ),
        ),
        prefixes=(PREFIX,),
        layers=layers,
        aliases=((PREFIX, ("model.visual.", "thinker.visual.", "model.thinker.visual.")),),
    )
    return {"original": mapping}


def tower(
    names: Names,
    *,
    embed: int,
    heads: int,
    mlp: int,
    patch: int,
    positions: int,
    patch_bias: bool,
    norm_bias: bool,
    bias: bool = True,
    channels: int = 3,
    frames: int = 2,
) -> tuple[Entry, ...]:
    """The entries of all but the mergers.

    Args:
        names: Of the parts.
        embed: Width of the tower.
        heads: Attention heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        positions: Rows of the position table; 0 where there is none.
        patch_bias: Whether the patch embedding has a bias.
        norm_bias: Whether norms have one.
        bias: Whether the layers of the blocks have one.
        channels: Colour channels.
        frames: Frames that a patch covers.
    """
    block, head_dim = PREFIX + "blocks.{layer}.", embed // heads

    def scale(target: str, source: str) -> tuple[Entry, ...]:
        return norm(f"layers/{target}", block + source, embed, bias=norm_bias)

    table = Entry("position_embed", f"{PREFIX}{names.positions}.weight", stored=(positions, embed))
    return (
        *linear(
            "patch_embed",
            f"{PREFIX}patch_embed.proj",
            stored=(embed, channels, frames, patch, patch),
            shape=(embed, channels * frames * patch * patch),
            bias=patch_bias,
        ),
        *((table,) if positions else ()),
        *scale("attention_norm", "norm1"),
        *linear(
            "layers/attention/qkv",
            f"{block}attn.qkv",
            stored=(3 * embed, embed),
            shape=(3, heads, head_dim, embed),
            bias=bias,
            bias_shape=(3, heads, head_dim),
        ),
        *linear(
            "layers/attention/out",
            f"{block}attn.proj",
            stored=(embed, embed),
            shape=(embed, heads, head_dim),
            bias=bias,
        ),
        *scale("mlp_norm", "norm2"),
        *stacked("layers/mlp/up", [block + name for name in names.up], stored=(mlp, embed), bias=bias),
        *linear("layers/mlp/down", f"{block}{names.down}", stored=(embed, mlp), bias=bias),
    )


def stacked(target: str, sources: Sequence[str], *, stored: tuple[int, int], bias: bool) -> tuple[Entry, ...]:
    """Kernel and bias of the layer that goes into an MLP: one of the file, or gate and up together."""
    if len(sources) == 1:
        return linear(target, sources[0], stored=stored, bias=bias)
    kernel, offset = (
        Entry(f"{target}/{ours}", tuple(f"{source}.{theirs}" for source in sources), stored=shape)
        for ours, theirs, shape in (("kernel", "weight", stored), ("bias", "bias", stored[:1]))
    )
    return (kernel, offset)[: 1 + bias]
