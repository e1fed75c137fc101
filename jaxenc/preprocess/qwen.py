"""Pictures and videos as the processors of the Qwen-VL and GLM-V models prepare them.

Source: `smart_resize`, `sample_frames` and `patchify` of transformers' Qwen2VLImageProcessor, Qwen2VLVideoProcessor,
Qwen3VLVideoProcessor, Glm4vImageProcessor and Glm4vVideoProcessor (5.24). A patch covers two frames, and a picture is
two frames that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int, UInt8

from jaxenc.errors import InputError
from jaxenc.items import VisionItem
from jaxenc.preprocess.images import load_image, normalise, resize_bicubic
from jaxenc.preprocess.video import cut_chunks, iter_frames

FRAMES = 2  # that a patch covers
LONGEST = 200  # times its short side: a longer picture is refused
SAMPLE_FPS = 2.0
FEWEST_FRAMES, MOST_FRAMES = 4, 768  # of a video, where it has as many
MOST_SECONDS = 300  # of a video that GLM-V's rule samples at the full rate

FrameRule = Literal["even", "to last", "by time"]


@dataclass(frozen=True)
class QwenSettings:
    """What a published processor is set to.

    Attributes:
        patch: a patch's side in pixels.
        merge: patches merged on each side.
        mean: per channel, of values in [0, 1].
        std: per channel.
        image_pixels: the least and the most of a picture.
        video_pixels: the same of a frame of a video, or of all its sampled frames together.
        whole_videos: whether it is all frames together: Qwen3-VL's and GLM-V's rule.
        paired_pictures: whether a picture is counted as the two frames it becomes, and so has half as many: GLM-V's.
        frame_rule: which frames of a video are taken, see `qwen_sample_indices`.
    """

    patch: int
    merge: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_pixels: tuple[int, int]
    video_pixels: tuple[int, int]
    whole_videos: bool = False
    paired_pictures: bool = False
    frame_rule: FrameRule = "even"

    @property
    def factor(self) -> int:
        """Pixels that both sides are a multiple of."""
        return self.patch * self.merge


def qwen_image_item(source: Any, settings: QwenSettings, *, name: str) -> VisionItem:
    """The item of one picture: grid (1, h, w), patches as `qwen_patches` orders them.

    Raises:
        InputError: it cannot be read, or is too long.
    """
    image = load_image(source, name=name)
    size = smart_size(
        *image.shape[:2],
        factor=settings.factor,
        pixels=settings.image_pixels,
        frames=FRAMES if settings.paired_pictures else None,
        name=name,
    )
    return _item(image[None], size, settings, name=name, timestamp=None)


def qwen_video_items(source: Any, settings: QwenSettings, *, fps: float | None, name: str) -> Iterator[VisionItem]:
    """The items of a video, one for every two sampled frames, made as the frames come.

    The towers attend within a frame's patches only, so the rows of all items, one after the other, are what the whole
    video gives.

    Args:
        source: see `load_video`.
        settings: of the processor.
        fps: the source's frames a second, where it does not say.
        name: of every item.

    Returns:
        Items of grid (1, h, w), with their first frame's timestamp. An odd last frame is taken twice.
    """
    count = 1

    def sampled(frames: int, rate: float) -> Int[np.ndarray, " n"]:
        nonlocal count
        indices = qwen_sample_indices(frames, rate, rule=settings.frame_rule)
        count = len(indices)
        return indices

    size = None
    for chunk in cut_chunks(iter_frames(source, fps=fps, sampling=sampled, name=name), FRAMES):
        frames = np.stack([frame for frame, _ in chunk])
        # which frames there will be is known when the first one comes, and so the size of all
        size = size or smart_size(
            *frames.shape[1:3],
            factor=settings.factor,
            pixels=settings.video_pixels,
            frames=max(count, FRAMES) if settings.whole_videos else None,
            name=name,
        )
        yield _item(frames, size, settings, name=name, timestamp=chunk[0][1])


def smart_size(
    height: int, width: int, *, factor: int, pixels: tuple[int, int], frames: int | None = None, name: str = ""
) -> tuple[int, int]:
    """The size to which a picture, or the frames of a video, are resized: about its shape, within a budget of pixels.

    Args:
        height: pixels.
        width: pixels.
        factor: both sides become multiples of it.
        pixels: the least and the most there may be.
        frames: where the budget is for all of them together (at least 2), how many; otherwise it is for one.
        name: for the error.

    Returns:
        Height and width in pixels.

    Raises:
        InputError: one side is more than 200 times the other.
    """
    least, most = pixels
    if frames is not None and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > LONGEST * min(height, width):
        raise InputError(f"{name}: {height} x {width} pixels: one side may be {LONGEST} times the other, not more")
    # Python's round goes to the even neighbour at a half, as the published code does; floor(x + 0.5) would not
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    count, rounded = (1, 1) if frames is None else (frames, round(frames / FRAMES) * FRAMES)
    if rounded * new_height * new_width > most:
        beta = math.sqrt(count * height * width / most)
        return tuple(max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if rounded * new_height * new_width < least:
        beta = math.sqrt(least / (count * height * width))
        return tuple(math.ceil(side * beta / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return new_height, new_width


def qwen_sample_indices(frames: int, fps: float, *, rule: FrameRule) -> Int[np.ndarray, " n"]:
    """Which frames of a video are kept: about two a second.

    Args:
        frames: the video's.
        fps: its frames per second.
        rule: "even" is Qwen2-VL's: an even number of frames at equal distances from the first on, 4 to 768 of them
            where there are as many. "to last" is Qwen3-VL's: as many, spread over the first to the last. "by time" is
            GLM-V's: the first frame not before each half second, or before each of 600 points of a video that is longer
            than five minutes.

    Returns:
        Increasing indices, at least one; "by time", the last is there twice where they would be odd.
    """
    if rule == "by time":
        return _indices_by_time(frames, fps)
    wanted = max(frames / fps * SAMPLE_FPS, FEWEST_FRAMES)
    if rule == "to last":
        count = max(1, min(int(wanted), MOST_FRAMES, frames))
        return np.linspace(0, frames - 1, count).round().astype(np.int64)
    even = min(wanted, min(MOST_FRAMES, frames) // FRAMES * FRAMES) // FRAMES * FRAMES
    count = max(1, int(even))
    return np.arange(count) * frames // count


def _indices_by_time(frames: int, fps: float) -> Int[np.ndarray, " n"]:
    duration, most = frames / fps, int(MOST_SECONDS * SAMPLE_FPS)
    if duration <= MOST_SECONDS:
        wanted = np.arange(max(int(duration * SAMPLE_FPS), 1)) * fps / SAMPLE_FPS
    elif most >= frames:
        wanted = np.arange(float(frames))
    else:
        wanted = np.linspace(0, duration, most) * fps
    indices = np.unique(np.minimum(np.ceil(wanted).astype(np.int64), frames - 1))
    return np.append(indices, indices[-1:]) if len(indices) % FRAMES else indices


def qwen_patches(
    frames: UInt8[np.ndarray, "t height width 3"],
    *,
    patch: int,
    merge: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Float32[np.ndarray, "patches features"]:
    """Rows of (c, frame, ph, pw) features, one a patch; those that are merged stand side by side.

    Args:
        frames: of sides that are multiples of `patch * merge`; of an odd number, the last is taken twice.
        patch: a patch's side in pixels.
        merge: patches merged on each side.
        mean: per channel, of values in [0, 1].
        std: per channel.

    Returns:
        Patches in the order (frame pair, merged row, merged column, row, column).
    """
    frames = np.concatenate([frames, frames[-1:]]) if len(frames) % FRAMES else frames
    t, height, width, c = frames.shape
    side = patch * merge
    cut = normalise(frames, mean=mean, std=std).reshape(
        t // FRAMES, FRAMES, height // side, merge, patch, width // side, merge, patch, c
    )
    return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, c * FRAMES * patch * patch)


def _item(
    frames: UInt8[np.ndarray, "t height width 3"],
    size: tuple[int, int],
    settings: QwenSettings,
    *,
    name: str,
    timestamp: float | None,
) -> VisionItem:
    resized = np.stack([resize_bicubic(frame, *size) for frame in frames])
    patches = qwen_patches(resized, patch=settings.patch, merge=settings.merge, mean=settings.mean, std=settings.std)
    grid = (-(-len(frames) // FRAMES), size[0] // settings.patch, size[1] // settings.patch)
    return VisionItem(patches, grid, timestamp=timestamp, name=name)
