"""Files and arrays -> items, in NumPy. Imports neither JAX nor any media library until one is needed."""

from jaxenc.preprocess.audio import load_audio, log_mel, mel_filters, pad_or_trim, padded_log_mel
from jaxenc.preprocess.images import (
    NavitSize,
    load_image,
    navit_item,
    navit_size,
    normalise,
    pad_right_bottom,
    patchify,
    resize_bicubic,
)
from jaxenc.preprocess.qwen import (
    QwenSettings,
    qwen_image_item,
    qwen_patches,
    qwen_sample_indices,
    qwen_video_items,
    smart_size,
)
from jaxenc.preprocess.video import (
    cut_chunks,
    format_timestamp,
    iter_frames,
    load_video,
    navit_video_items,
    sample_indices,
)

__all__ = [
    "NavitSize",
    "QwenSettings",
    "cut_chunks",
    "format_timestamp",
    "iter_frames",
    "load_audio",
    "load_image",
    "load_video",
    "log_mel",
    "mel_filters",
    "navit_item",
    "navit_size",
    "navit_video_items",
    "normalise",
    "pad_or_trim",
    "pad_right_bottom",
    "padded_log_mel",
    "patchify",
    "qwen_image_item",
    "qwen_patches",
    "qwen_sample_indices",
    "qwen_video_items",
    "resize_bicubic",
    "sample_indices",
    "smart_size",
]
