"""Entries that the towers of plain vision transformers share; a family gives its names."""

from dataclasses import dataclass

from checkpoints_convert.mapping import Entry, Mapping, linear, norm


@dataclass(frozen=True)
class Names:
    """Names of a tower's tensors, from its prefix on; of a block's, from "...{layer}." on.

    Attributes:
        patch_embed: layer that embeds patches.
        position_embed: position table.
        block: what stands before a block's names.
        attention_norm: norm before attention.
        qkv: layers that queries, keys and values come from: one each, or one that holds all three.
        out: the layer after attention.
        mlp_norm: norm before the MLP.
        up: layers that go into the MLP: one, or gate and up, or one that holds both.
        down: the layer that comes out.
        class_embed: class token, where there is one.
        pre_norm: norm before the blocks, where there is one.
        final_norm: norm after them, where it is wanted.
        scales: of what attention and MLP add, where they are scaled.
        head_norms: norms of queries and of keys over all heads, where there are any.
    """

    patch_embed: str
    position_embed: str
    block: str
    attention_norm: str
    qkv: str | tuple[str, str, str]
    out: str
    mlp_norm: str
    up: str | tuple[str, str]
    down: str
    class_embed: str | None = None
    pre_norm: str | None = None
    final_norm: str | None = None
    scales: tuple[str, str] | None = None
    head_norms: tuple[str, str] | None = None


# CLIP's and SigLIP's
CLIP_NAMES = Names(
    patch_embed="embeddings.patch_embedding",
    position_embed="embeddings.position_embedding.weight",
    block="encoder.layers.{layer}.",
    attention_norm="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up="mlp.fc1",
    down="mlp.fc2",
)


def vit_entries(
    prefix: str,
    names: Names,
    *,
    embed: int,
    heads: int,
    mlp: int,
    patch: int,
    positions: int,
    patch_bias: bool = True,
    qkv_bias: bool = True,
    gated: bool = False,
    norm_bias: bool = True,
    unit_axes: int = 0,
    flat_patches: bool = False,
) -> tuple[Entry, ...]:
    """A tower's entries.

    Args:
        prefix: What stands before its names.
        names: Its names.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        positions: Rows of the position table.
        patch_bias: Whether the layer that embeds patches has a bias.
        qkv_bias: Whether queries, keys and values have one.
        gated: Whether the MLP is gated.
        norm_bias: Whether the blocks' norms have one: RMS norms have none.
        unit_axes: Axes of size 1 before those of the position table, and of the class token one more.
        flat_patches: Whether the layer that embeds patches is stored as a linear one, not as a convolution.
    """
    head_dim, block = embed // heads, prefix + names.block
    per_head, lead = (heads, head_dim), (1,) * unit_axes
    entries = [
        *linear(
            "patch_embed",
            prefix + names.patch_embed,
            stored=(embed, 3 * patch * patch) if flat_patches else (embed, 3, patch, patch),
            shape=(embed, 3 * patch * patch),
            bias=patch_bias,
        ),
        Entry(
            "position_embed",
            prefix + names.position_embed,
            stored=(*lead, positions, embed),
            shape=(positions, embed) if lead else None,
        ),
        *norm("layers/attention_norm", block + names.attention_norm, embed, bias=norm_bias),
        *_qkv(block, names.qkv, embed=embed, per_head=per_head, bias=qkv_bias),
        *linear("layers/attention/out", block + names.out, stored=(embed, embed), shape=(embed, *per_head)),
        *norm("layers/mlp_norm", block + names.mlp_norm, embed, bias=norm_bias),
        *_up(block, names.up, embed=embed, mlp=mlp, gated=gated),
        *linear("layers/mlp/down", block + names.down, stored=(embed, mlp)),
    ]
    if names.class_embed is not None:
        stored = (*lead, *lead, embed)
        entries.append(
            Entry("class_embed", prefix + names.class_embed, stored=stored, shape=(embed,) if lead else None)
        )
    for target, name in (("pre_norm", names.pre_norm), ("final_norm", names.final_norm)):
        entries += norm(target, prefix + name, embed) if name is not None else ()
    if names.scales is not None:
        for target, name in zip(("attention_scale", "mlp_scale"), names.scales, strict=True):
            entries.append(Entry(f"layers/{target}", block + name, stored=(embed,)))
    if names.head_norms is not None:
        for target, name in zip(("query_norm", "key_norm"), names.head_norms, strict=True):
            entry = Entry(f"layers/attention/{target}/scale", f"{block}{name}.weight", stored=(embed,), shape=per_head)
            entries.append(entry)
    return tuple(entries)


def _qkv(
    block: str, qkv: str | tuple[str, str, str], *, embed: int, per_head: tuple[int, int], bias: bool
) -> tuple[Entry, ...]:
    if isinstance(qkv, str):
        return linear(
            "layers/attention/qkv",
            block + qkv,
            stored=(3 * embed, embed),
            shape=(3, *per_head, embed),
            bias=bias,
            bias_shape=(3, *per_head),
        )
    return tuple(
        Entry(
            f"layers/attention/qkv/{ours}",
            tuple(f"{block}{name}.{theirs}" for name in qkv),
            stored=(embed, *rest),
            shape=(*per_head, *rest),
        )
        for ours, theirs, rest in (("kernel", "weight", (embed,)), ("bias", "bias", ()))[: 1 + bias]
    )


def _up(block: str, up: str | tuple[str, str], *, embed: int, mlp: int, gated: bool) -> tuple[Entry, ...]:
    if isinstance(up, str):
        # gate and up in one tensor, gate first
        return linear(
            "layers/mlp/up",
            block + up,
            stored=((1 + gated) * mlp, embed),
            shape=(2, mlp, embed) if gated else None,
            bias_shape=(2, mlp) if gated else None,
        )
    return tuple(
        Entry(f"layers/mlp/up/{ours}", tuple(f"{block}{name}.{theirs}" for name in up), stored=(mlp, *rest))
        for ours, theirs, rest in (("kernel", "weight", (embed,)), ("bias", "bias", ()))
    )


def llava_mappings(
    name: str,
    names: Names,
    *,
    layers: int,
    skipped: int,
    embed: int,
    heads: int,
    mlp: int,
    patch: int,
    positions: int,
    patch_bias: bool,
    hidden: int | None,
    out: int | None,
    projector_bias: bool,
    unused: tuple[str, ...],
) -> dict[str, Mapping]:
    """A tower by itself or in a language model with its projector: LLaVA's two layers, or PaliGemma's one.

    Args:
        name: The tower's family.
        names: Its names.
        layers: Number of blocks that are wanted.
        skipped: Further ones that the checkpoint holds.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        positions: Rows of the position table.
        patch_bias: Whether the layer that embeds patches has a bias.
        hidden: Inner width of the projector; None where it has one layer.
        out: Width of its rows; None where there is none.
        projector_bias: Whether its layers have a bias.
        unused: Further tensors of the tower that are not wanted.

    Returns:
        {"original": ...}
    """
    prefix, theirs = ("vision_model." if out is None else "vision_tower.vision_model."), "multi_modal_projector."
    entries = vit_entries(
        prefix,
        names,
        embed=embed,
        heads=heads,
        mlp=mlp,
        patch=patch,
        positions=positions,
        patch_bias=patch_bias,
    )
    if out is not None and hidden is None:
        entries += linear("projector", f"{theirs}linear", stored=(out, embed), bias=projector_bias)
    elif out is not None and hidden is not None:
        entries += linear("projector/up", f"{theirs}linear_1", stored=(hidden, embed), bias=projector_bias)
        entries += linear("projector/down", f"{theirs}linear_2", stored=(out, hidden), bias=projector_bias)
    # older files hold the numbers of the positions too
    unused += ("embeddings.position_ids", *(names.block.replace("{layer}", str(layers + i)) for i in range(skipped)))
    mapping = Mapping(
        name,
        "original",
        entries=entries,
        prefixes=(prefix,) if out is None else (prefix, theirs),
        layers=layers,
        unused=tuple(prefix + one for one in unused),
        # transformers 5 saves a tower alone with nothing before its names
        aliases=((prefix, ("",)),)
        if out is None
        else (
            (prefix, ("model.vision_tower.", "model.vision_tower.vision_model.", "vision_tower.")),
            (theirs, (f"model.{theirs}",)),
        ),
    )
    return {"original": mapping}
