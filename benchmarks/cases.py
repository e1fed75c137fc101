"""What encoders are timed on: one picture, a large one, many sizes together, a video; 30 seconds of speech, many clips.

Pictures are the repository's photograph at other sizes, speech its recording at other lengths.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.subjects import PHOTOGRAPH, SAMPLE_RATE, SPEECH
from jaxenc.items import Item
from jaxenc.models.base import EncoderConfig
from jaxenc.preprocess.audio import load_audio
from jaxenc.preprocess.images import load_image

# height and width in pixels: 32 x 32 patches of 14, four times as many, and ten pictures of 16 to 1,024
ONE, LARGE = (448, 448), (896, 896)
MIXED = (ONE, (224, 336), (140, 420), (420, 280), (112, 112), (224, 224), (168, 392), (84, 112), (56, 56), (280, 196))
FRAMES, FRAME = 8, (224, 224)
CLIPS = (30.0, 7.0, 16.0, 3.0)  # seconds


def sources(config: EncoderConfig) -> dict[str, tuple[str, list[Any]]]:
    """Of every case the kind of what is encoded, and what; an encoder of one size of picture has no large one."""
    if config.modality == "audio":
        recording = load_audio(SPEECH)
        clips = [np.resize(recording, int(seconds * SAMPLE_RATE)) for seconds in CLIPS]
        return {"30 s of speech": ("audio", clips[:1]), "mixed speech": ("audio", clips)}
    result: dict[str, tuple[str, list[Any]]] = {
        "one image": ("images", [_photograph(ONE)]),
        "large image": ("images", [_photograph(LARGE)]),
        "mixed images": ("images", [_photograph(size) for size in MIXED]),
    }
    one, large = (tokens_of(config, read(config, result[case])) for case in ("one image", "large image"))
    if one == large:
        del result["large image"]
    if "videos" in config.kinds:
        frames = np.stack([_photograph(FRAME, shift=8 * i) for i in range(FRAMES)])
        result["video"] = ("videos", [(frames, 2.0)])
    return result


def read(config: EncoderConfig, case: tuple[str, Sequence[Any]]) -> list[Item]:
    """The items of a case."""
    kind, given = case
    return [item for i, source in enumerate(given) for item in config.read(kind, source, name=f"{kind} {i}")]


def tokens_of(config: EncoderConfig, items: Sequence[Item]) -> int:
    """Tokens that enter the first block."""
    return sum(sum(config.pieces(item)) for item in items)


def flops_of(config: EncoderConfig, items: Sequence[Item]) -> float:
    """FLOPs that encoding them takes, with no padding."""
    return sum(config.workload([tokens for item in items for tokens in config.pieces(item)]).item_flops)


def _photograph(size: tuple[int, int], *, shift: int = 0) -> np.ndarray:
    from PIL import Image

    picture = Image.fromarray(np.roll(load_image(PHOTOGRAPH), shift, axis=1))
    return np.asarray(picture.resize(size[::-1], Image.Resampling.BICUBIC))
