"""The families of encoders, and what each of them offers to the rest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import jax
from flax import nnx
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from checkpoints_convert import Mapping as KeyMapping
from jaxenc.errors import ConfigError
from jaxenc.items import Item
from jaxenc.layers.transformer import TransformerConfig
from jaxenc.models import (
    clip,
    dinov2,
    glm4v,
    internvit,
    kimi_k25,
    pixtral,
    qwen2_5_omni_audio,
    qwen2_5_vl,
    qwen2_audio,
    qwen2_vl,
    qwen3_asr_audio,
    qwen3_omni_audio,
    qwen3_omni_vision,
    qwen3_vl,
    siglip,
    siglip2,
    whisper,
)
from jaxenc.packing import Batch, Budget, Placed
from sharding_rules import Workload


class EncoderConfig(Protocol):
    """An encoder: its sizes, its module, and what the host has to know of it. One class a family.

    Attributes:
        family: its name.
        modality: "vision" or "audio".
        kinds: arguments of `Encoder.encode` that it takes.
        published: models that use it.
        model_types: of the config.json files that describe it; "model (tower)" where the type of its `vision_config`
            decides; "params.json" for Mistral's files of that name, which hold none.
    """

    family: ClassVar[str]
    modality: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    published: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]]

    @property
    def input_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Logical axes of each array that `layout` makes and the module reads."""

    @property
    def transformer(self) -> TransformerConfig:
        """The stack of blocks."""

    @property
    def window(self) -> int | None:
        """Tokens of an attention window; None where an item attends as a whole."""

    @property
    def unit(self) -> int:
        """Tokens that a row's length is a multiple of."""

    @property
    def typical_tokens(self) -> int:
        """Tokens of the item that a plan is made for where nothing else is said."""

    def __hash__(self) -> int:
        """Configs are values."""

    def build(self, *, dtype: DTypeLike) -> nnx.Module:
        """The module; its parameters hold zeros until they are given."""

    def mappings(self) -> Mapping[str, KeyMapping]:
        """PyTorch's keys for the parameters, by layout."""

    def pieces(self, item: Any) -> tuple[int, ...]:
        """Tokens of each part of an item that attends by itself."""

    def item_unit(self, item: Any) -> int:
        """Tokens of an item that stay together where it is spread over devices."""

    def output_rows(self, item: Any) -> int:
        """Rows that come out."""

    def workload(self, items: Sequence[int]) -> Workload:
        """What encoding items of so many tokens costs, group by group."""

    def lengths(self) -> tuple[int, ...]:
        """Row lengths to choose from, ascending; the last but one holds the largest item, the last several."""

    def token_axes(self, budget: Budget, parts: Mapping[str, int]) -> Mapping[str, int]:
        """Size of every token axis in a row of a budget, where each axis is divided over so many devices."""

    def read(self, kind: str, source: Any, *, name: str) -> Iterable[Item]:
        """The items of one file or array; those of a long one as they are wanted."""

    def check(self, item: Any) -> None:
        """Raises InputError for an item that this encoder cannot encode."""

    def layout(self, items: Sequence[Any], placed: Sequence[Placed], budget: Budget, parts: Mapping[str, int]) -> Batch:
        """The arrays of one batch; of an empty one, their shapes. `parts` are those of the batch and of token axes."""


FAMILIES = {
    module.Config.family: module
    for module in (
        kimi_k25,
        clip,
        siglip,
        siglip2,
        dinov2,
        internvit,
        pixtral,
        qwen2_vl,
        qwen2_5_vl,
        qwen3_vl,
        qwen3_omni_vision,
        glm4v,
        whisper,
        qwen2_audio,
        qwen2_5_omni_audio,
        qwen3_omni_audio,
        qwen3_asr_audio,
    )
}


@dataclass(frozen=True)
class EncoderInfo:
    """One line of `jaxenc.encoders()`.

    Attributes:
        name: of the family.
        variants: published sizes; the family alone is the first.
        modality: "vision" or "audio".
        heads: attention heads, a variant.
        published: models that use it.
    """

    name: str
    variants: tuple[str, ...]
    modality: str
    heads: tuple[int, ...]
    published: tuple[str, ...]


def encoders() -> tuple[EncoderInfo, ...]:
    """Every encoder there is."""
    return tuple(
        EncoderInfo(
            name,
            tuple(module.VARIANTS),
            module.Config.modality,
            tuple(config.heads for config in module.VARIANTS.values()),
            module.Config.published,
        )
        for name, module in FAMILIES.items()
    )


def named_config(name: str) -> EncoderConfig:
    """The config of "family" or "family:variant".

    Raises:
        ConfigError: there is none; lists what there is.
    """
    family, _, variant = name.partition(":")
    if family not in FAMILIES:
        raise ConfigError(f"{name}: no such encoder; there are {', '.join(FAMILIES)}")
    variants = FAMILIES[family].VARIANTS
    if variant and variant not in variants:
        raise ConfigError(f"{name}: {family} has the variants {', '.join(variants)}")
    return variants[variant or next(iter(variants))]


def published_configs(config: Mapping[str, Any], *, name: str) -> list[EncoderConfig]:
    """The encoders that a published config.json describes, one a tower; or Mistral's params.json.

    Raises:
        ConfigError: none is known; names the model type.
    """
    model_type = config.get("model_type", "params.json" if "vision_encoder" in config else None)
    tower_type = f"{model_type} ({(config.get('vision_config') or {}).get('model_type')})"
    types = {model_type, tower_type}
    read = [m.Config.from_hf(config) for m in FAMILIES.values() if types & set(m.Config.model_types)]
    found = [tower for tower in read if tower is not None]  # of several towers, one may not be described
    if not found:
        known = ", ".join(sorted({t for m in FAMILIES.values() for t in m.Config.model_types}))
        raise ConfigError(f"{name}: model_type is {model_type!r}; known are {known}")
    return found


def stored_config(family: str, sizes: Mapping[str, Any]) -> EncoderConfig:
    """The config that a converted checkpoint holds.

    Raises:
        ConfigError: an unknown family or field.
    """
    if family not in FAMILIES:
        raise ConfigError(f"{family}: no such encoder; there are {', '.join(FAMILIES)}")
    config = FAMILIES[family].Config
    if unknown := set(sizes) - {f.name for f in fields(config)}:
        raise ConfigError(f"{family}: unknown sizes {', '.join(sorted(unknown))}; was it written by a newer version?")
    return config(**sizes)


def abstract_module(config: EncoderConfig, *, dtype: DTypeLike) -> nnx.Module:
    """The module with shapes for parameters: nothing is allocated."""
    # within jax.set_mesh nnx would take the logical names for that mesh's axes
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return nnx.eval_shape(lambda: config.build(dtype=dtype))
