"""The families of encoders, and what each of them offers to the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from jaxenc.errors import ConfigError
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
from jaxenc.models.base import EncoderConfig

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
