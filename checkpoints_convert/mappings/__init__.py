"""The key names of each family, as functions of plain sizes."""

from checkpoints_convert.mappings import (
    glm4v,
    kimi_k25,
    pixtral,
    qwen2_5_omni_audio,
    qwen2_audio,
    qwen3_omni_audio,
    qwen_vision,
    whisper,
)

__all__ = [
    "glm4v",
    "kimi_k25",
    "pixtral",
    "qwen2_5_omni_audio",
    "qwen2_audio",
    "qwen3_omni_audio",
    "qwen_vision",
    "whisper",
]
