"""Key names of Pixtral's vision tower and projector.

"original": as transformers keeps them on the hub and in memory, under the prefixes of the models that have the tower.
"mistral": as Mistral publishes them, beside a params.json, where the rows of query and key are in the order of rotary
pairs side by side. Parameters are in transformers' order: first halves of the pairs, then second ones.
"""

from dataclasses import dataclass

from checkpoints_convert.mapping import Entry, Mapping, Reorder, linear, norm, pairs_to_half_split

Aliases = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Names:
    """What a layout calls its parts.

    Attributes:
        tower: what stands before the tower's names.
        attention: queries, keys, values and the projection after attention.
        mlp: gate, up and down.
        merger_norm: of the tokens that are merged.
        merger: the layer that merges them.
        projector: its two layers.
        prefixes: what tower and projector own.
    """

    tower: str
    attention: tuple[str, str, str, str]
    mlp: tuple[str, str, str]
    merger_norm: str
    merger: str
    projector: tuple[str, str]
    prefixes: tuple[str, ...]


_TRANSFORMERS = Names(
    tower="vision_tower.",
    attention=("q_proj", "k_proj", "v_proj", "o_proj"),
    mlp=("gate_proj", "up_proj", "down_proj"),
    merger_norm="multi_modal_projector.norm",
    merger="multi_modal_projector.patch_merger.merging_layer",
    projector=("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
    prefixes=("vision_tower.", "multi_modal_projector."),
)
_MISTRAL = Names(
    tower="vision_encoder.",
    attention=("wq", "wk", "wv", "wo"),
    mlp=("w1", "w3", "w2"),
    merger_norm="pre_mm_projector_norm",
    merger="patch_merger.merging_layer",
    projector=("vision_language_adapter.w_in", "vision_language_adapter.w_out"),
    prefixes=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
)


def mappings(
    *, layers: int, embed: int, heads: int, mlp: int, patch: int, merge: int, out: int | None, projector_bias: bool
) -> dict[str, Mapping]:
    """The two layouts.

    Args:
        layers: Number of blocks.
        embed: Width of the tower.
        heads: Attention heads; the head dimension is embed / heads.
        mlp: Inner width of the blocks' MLP.
        patch: Side of a patch [pixels].
        merge: Patches a side that are merged; 1 where none are.
        out: Width of the language model, and of the projector's inner layer; None where there is no projector.
        projector_bias: Whether the projector's layers have a bias.

    Returns:
        {"original": ..., "mistral": ...}
    """
    head_dim, group = embed // heads, merge * merge

    def entries(names: Names, pairs: Reorder | None) -> tuple[Entry, ...]:
        block = names.tower + "transformer.layers.{layer}."
        *qkv, after = (f"{block}attention.{name}" for name in names.attention)
        gate, up, down = (f"{block}feed_forward.{name}" for name in names.mlp)
        tower = (
            *linear(
                "patch_embed",
                f"{names.tower}patch_conv",
                stored=(embed, 3, patch, patch),
                shape=(embed, 3 * patch * patch),
                bias=False,
            ),
            _scale("pre_norm", f"{names.tower}ln_pre", embed),
            _scale("layers/attention_norm", f"{block}attention_norm", embed),
            Entry(
                "layers/attention/qkv/kernel",
                tuple(f"{name}.weight" for name in qkv),
                stored=(embed, embed),
                shape=(heads, head_dim, embed),
                reorder=(pairs, pairs, None),
            ),
            *linear("layers/attention/out", after, stored=(embed, embed), shape=(embed, heads, head_dim), bias=False),
            _scale("layers/mlp_norm", f"{block}ffn_norm", embed),
            Entry("layers/mlp/up/kernel", (f"{gate}.weight", f"{up}.weight"), stored=(mlp, embed)),
            *linear("layers/mlp/down", down, stored=(embed, mlp), bias=False),
        )
        if out is None:
            return tower
        merger = (
            _scale("merger/norm", names.merger_norm, embed),
            # the trap: in the file the patches of a group are the faster axis of the columns, and channels the slower
            Entry(
                "merger/layer/kernel",
                f"{names.merger}.weight",
                stored=(embed, embed * group),
                shape=(embed, embed, group),
                transpose=(0, 2, 1),
            ),
        )
        first, second = names.projector
        projector = (
            *linear("projector/up", first, stored=(out, embed), bias=projector_bias),
            *linear("projector/down", second, stored=(out, out), bias=projector_bias),
        )
        return (*tower, *(merger if merge > 1 else ()), *projector)

    def mapping(layout: str, names: Names, pairs: Reorder | None, aliases: Aliases = ()) -> Mapping:
        prefixes = names.prefixes[:1] if out is None else names.prefixes
        return Mapping(
            "pixtral", layout, entries=entries(names, pairs), prefixes=prefixes, layers=layers, aliases=aliases
        )

    # transformers saves a tower alone with nothing before its names
    spellings: Aliases = (("vision_tower.", ("model.vision_tower.", "")),)
    if out is not None:
        spellings = tuple((prefix, (f"model.{prefix}",)) for prefix in _TRANSFORMERS.prefixes)
    halves = Reorder(axis=1, order=pairs_to_half_split(head_dim))
    return {
        "original": mapping("original", _TRANSFORMERS, None, spellings),
        "mistral": mapping("mistral", _MISTRAL, halves),
    }


def _scale(target: str, source: str, size: int) -> Entry:
    """That of an RMS norm, which has no bias."""
    return norm(target, source, size)[0]
