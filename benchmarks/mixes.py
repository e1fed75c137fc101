"""What people encode, by size: pixels and seconds from a fixed seed, tokens by the published processors' rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxenc.models import kimi_k25, qwen3_omni_audio
from jaxenc.packing import stretches
from jaxenc.preprocess.audio import HOP_SAMPLES, SAMPLE_RATE
from jaxenc.preprocess.images import navit_size

KIMI, SPEECH = kimi_k25.Config(), qwen3_omni_audio.Config()
# height, width: what cameras, telephones and web pages have, upright and across
PHOTOS = ((480, 640), (720, 1280), (768, 1024), (1080, 1920), (1200, 1600), (2000, 3000), (3024, 4032), (4000, 6000))
INCHES = ((11.69, 8.27), (11.0, 8.5), (8.27, 11.69), (11.69, 16.54))
DPI = (72, 96, 100, 120, 150, 200, 300)


@dataclass(frozen=True)
class Sizes:
    """The size of one item.

    Attributes:
        pieces: tokens of each part that attends by itself.
        unit: tokens that stay together where it is spread.
        shape: frames, rows and columns of patches, or frames of a spectrogram.
    """

    pieces: tuple[int, ...]
    unit: int = 1
    shape: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(self.pieces)


def picture(height: int, width: int, *, frames: int = 1, patch_limit: int = kimi_k25.IMAGE_PATCHES) -> Sizes:
    """A picture of so many pixels, or a video chunk, in Kimi's vision tower."""
    size = navit_size(
        height,
        width,
        patch=KIMI.patch,
        merge=KIMI.merge,
        patch_limit=patch_limit,
        side_limit=kimi_k25.ROTARY_POSITIONS,
    )
    return Sizes((frames * size.grid[0] * size.grid[1],), frames * KIMI.merge**2, (frames, *size.grid))


def recording(seconds: float) -> Sizes:
    """A recording in Qwen3-Omni's audio tower."""
    frames = max(1, round(seconds * SAMPLE_RATE / HOP_SAMPLES))
    tokens = -(-frames // SPEECH.chunk_frames) * SPEECH.chunk_tokens
    return Sizes(stretches(tokens, SPEECH.window), shape=(frames,))


def photo(rng: np.random.Generator, *, scale: float = 1.0) -> Sizes:
    """As taken, or cropped."""
    height, width = rng.permutation(PHOTOS[rng.integers(len(PHOTOS))]) * rng.uniform(0.6, 1.0, 2) * scale
    return picture(int(height), int(width))


def page(rng: np.random.Generator, *, scale: float = 1.0) -> Sizes:
    """A scanned or printed page, perhaps a part of it."""
    height, width = np.array(INCHES[rng.integers(len(INCHES))]) * DPI[rng.integers(len(DPI))] * scale
    return picture(int(height * rng.uniform(0.5, 1.0)), int(width))


def thumbnail(rng: np.random.Generator) -> Sizes:
    """Of 56 to 256 pixels a side."""
    height, width = rng.integers(56, 257, 2)
    return picture(int(height), int(width))


def any_picture(rng: np.random.Generator) -> Sizes:
    """From a thumbnail to 7168 x 500 pixels."""
    width = int(np.exp(rng.uniform(np.log(56), np.log(7168))))
    return picture(int(np.exp(rng.uniform(np.log(56), np.log(500)))), width)


def chunk(rng: np.random.Generator, *, patch_limit: int = kimi_k25.FRAME_PATCHES) -> Sizes:
    """A video's chunk of one to four frames."""
    height, width = ((360, 640), (480, 854), (720, 1280), (1080, 1920))[rng.integers(4)]
    return picture(height, width, frames=int(rng.integers(1, 5)), patch_limit=patch_limit)


def long_speech(rng: np.random.Generator) -> Sizes:
    """From 0.1 s to 30 minutes, any length as likely."""
    return recording(float(rng.uniform(0.1, 1800.0)))


def speech(rng: np.random.Generator, *, longest: float = 1800.0) -> Sizes:
    """From 0.1 s to 30 minutes, most of them short."""
    return recording(float(np.exp(rng.uniform(np.log(0.1), np.log(longest)))))


KINDS: Mapping[str, Callable[[np.random.Generator], Sizes]] = {
    "photos": photo,
    "documents": page,
    "thumbnails": thumbnail,
    "pictures": any_picture,
    "video chunks": chunk,
    "speech": speech,
    "long speech": long_speech,
    "16,200 patches": lambda rng: Sizes((16_200,), 4),
    "5,500 patches": lambda rng: Sizes((5_500,), 4),
}


def mix(kind: str, count: int, *, seed: int = 0) -> Sequence[Sizes]:
    """So many items of a kind."""
    rng = np.random.default_rng(seed)
    return [KINDS[kind](rng) for _ in range(count)]


def giant_among(thumbnails: int) -> Sequence[Sizes]:
    """One picture of 16,384 patches among thumbnails."""
    return [*mix("thumbnails", thumbnails // 2), picture(1792, 1792), *mix("thumbnails", -(-thumbnails // 2), seed=1)]
