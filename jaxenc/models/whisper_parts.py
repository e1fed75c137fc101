"""What the configs of all encoders that descend from Whisper's have in common."""

from collections.abc import Mapping
from typing import Any

from jaxenc.errors import ConfigError
from jaxenc.layers.transformer import TransformerConfig
from jaxenc.models.published import Keys, read_sizes, require

EPS = 1e-5  # LayerNorm's: PyTorch's default, ten times Flax's

KEYS: Mapping[str, Keys] = {
    "layers": ("encoder_layers",),
    "embed": ("d_model",),
    "heads": ("encoder_attention_heads",),
    "mlp": ("encoder_ffn_dim",),
    "mel": ("num_mel_bins",),
}


def read_audio_sizes(family: str, config: Mapping[str, Any], further: Mapping[str, Keys]) -> dict[str, Any]:
    """The sizes that all of them have, and `further` ones; see `read_sizes`.

    Raises:
        ConfigError: a size is missing, or a setting names a function that such encoders do not compute.
    """
    require(family, config, {"activation_function": "gelu", "scale_embedding": False})
    sizes = read_sizes(family, config, {**KEYS, **further})
    if sizes["embed"] % sizes["heads"]:
        raise ConfigError(f"{family}: d_model {sizes['embed']} is not a multiple of its {sizes['heads']} heads")
    return sizes


def audio_transformer(*, layers: int, embed: int, heads: int, mlp: int, key_bias: bool) -> TransformerConfig:
    """The stack of blocks: GELU is erf's, and queries, keys and values are apart in checkpoints."""
    return TransformerConfig(
        layers,
        embed,
        heads,
        embed // heads,
        mlp,
        EPS,
        activation="gelu_erf",
        fused_qkv=False,
        key_bias=key_bias,
    )
