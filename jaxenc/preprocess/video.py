"""Videos -> sampled frames -> chunks of a few frames, each an item of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int, UInt8
from numpy.typing import ArrayLike

from jaxenc.errors import InputError
from jaxenc.items import VisionItem
from jaxenc.preprocess._sources import MediaFile, as_array, is_array, open_container, open_source, require, source_name
from jaxenc.preprocess.images import load_image, navit_item

Sampling = Literal["even", "endpoints"] | Callable[[int, float], Int[np.ndarray, " n"]]
Frame = tuple[UInt8[np.ndarray, "height width 3"], float]


def load_video(
    source: MediaFile | ArrayLike,
    *,
    fps: float | None = None,
    sample_fps: float | None = 2.0,
    sampling: Sampling = "even",
    name: str | None = None,
) -> tuple[UInt8[np.ndarray, "n height width 3"], Float64[np.ndarray, " n"]]:
    """The sampled frames of a video and their times; `iter_frames` without keeping all of them in memory.

    Args:
        source: a path, bytes or binary file that FFmpeg reads (MP4, GIF, WebM, ...), an array `[n, height, width, 3]`,
            or a list of images.
        fps: the source's frames per second: needed for arrays and lists, overrides a file's own average rate.
        sample_fps: frames per second to keep; None keeps all. A slower video keeps all its frames.
        sampling: see `sample_indices`.
        name: what error messages call it; the path by default.

    Returns:
        Frames, uint8 RGB, and timestamps in seconds: frame index / fps, as the published processors count.

    Raises:
        InputError: unreadable, truncated, without frames, without a frame rate, or frames of several sizes.
    """
    frames, seconds = zip(
        *iter_frames(source, fps=fps, sample_fps=sample_fps, sampling=sampling, name=name), strict=True
    )
    return np.stack(frames), np.asarray(seconds, np.float64)


def iter_frames(
    source: MediaFile | ArrayLike,
    *,
    fps: float | None = None,
    sample_fps: float | None = 2.0,
    sampling: Sampling = "even",
    name: str | None = None,
) -> Iterator[Frame]:
    """`load_video`, one (frame, seconds) at a time."""
    name = source_name(source, name)
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise InputError(f"{name}: fps is {fps}, expected a positive number")
    if is_array(source) or isinstance(source, list | tuple):
        frames = _array_frames(source, fps, sample_fps, sampling, name)
    else:
        frames = _file_frames(source, fps, sample_fps, sampling, name)
    shape = None
    for frame, seconds in frames:
        shape = shape or frame.shape
        if frame.shape != shape:
            raise InputError(f"{name}: the frame at {seconds:g} s has shape {frame.shape}, those before it {shape}")
        yield frame, seconds
    if shape is None:
        raise InputError(f"{name}: the video has no frames")


def sample_indices(
    frames: int, fps: float, *, sample_fps: float | None = 2.0, sampling: Sampling = "even"
) -> Int[np.ndarray, " n"]:
    """Which frames of a video are kept.

    Args:
        frames: the video's.
        fps: its frames per second.
        sample_fps: frames per second to keep; None, or more than `fps`, keeps all.
        sampling: "even" is transformers 5.24's rule: n = floor(frames / fps * sample_fps), index i * frames // n.
            "endpoints" is that of Kimi-K2.5's own file: n = round(...), spread over the first to the last frame. A
            function makes the indices itself, from `frames` and `fps` alone.

    Returns:
        Increasing indices, at least one.
    """
    if callable(sampling):
        return sampling(frames, fps)
    if sample_fps is None or sample_fps >= fps:
        return np.arange(frames)
    if sampling == "even":
        n = max(1, int(frames / fps * sample_fps))
        return np.arange(n) * frames // n
    n = max(1, round(frames * sample_fps / fps))
    return np.linspace(0, frames - 1, n).round().astype(np.int64)


def cut_chunks(frames: Iterable[Frame], size: int) -> Iterator[list[Frame]]:
    """Runs of `size` frames; the last may be shorter."""
    chunk: list[Frame] = []
    for frame in frames:
        chunk.append(frame)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def format_timestamp(seconds: float) -> str:
    """Seconds as "hh:mm:ss.fff", cut, not rounded, to milliseconds, as Kimi's prompts hold it."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"


def navit_video_items(
    frames: Iterable[Frame],
    *,
    frames_per_chunk: int,
    patch: int,
    merge: int,
    patch_limit: int,
    side_limit: int,
    mean: Sequence[float],
    std: Sequence[float],
    name: str = "",
) -> Iterator[VisionItem]:
    """One item for each chunk of frames, made as the frames come, so a long video is never held in full.

    Args:
        frames: (frame, seconds) pairs, as `iter_frames` gives them.
        frames_per_chunk: the most frames of an item (Kimi: 4).
        patch: a patch's side in pixels.
        merge: patches merged on each side.
        patch_limit: patches of one frame before padding (Kimi: 4096).
        side_limit: patches on one side.
        mean: per channel, of values in [0, 1].
        std: per channel.
        name: of every item.

    Returns:
        Items with t = 1..frames_per_chunk and their first frame's timestamp.
    """
    for chunk in cut_chunks(frames, frames_per_chunk):
        yield navit_item(
            np.stack([frame for frame, _ in chunk]),
            patch=patch,
            merge=merge,
            patch_limit=patch_limit,
            side_limit=side_limit,
            mean=mean,
            std=std,
            timestamp=chunk[0][1],
            name=name,
        )


def _array_frames(
    source: Any, fps: float | None, sample_fps: float | None, sampling: Sampling, name: str
) -> Iterator[Frame]:
    if is_array(source):
        source = as_array(source)
        if source.ndim != 4:
            raise InputError(f"{name}: shape {source.shape}, expected frames [n, height, width, 3]")
    if fps is None:
        raise InputError(f"{name}: frames without a frame rate; give fps=")
    if len(source):
        for i in sample_indices(len(source), fps, sample_fps=sample_fps, sampling=sampling):
            yield load_image(source[i], name=f"{name}, frame {i}"), float(i / fps)


def _file_frames(
    source: Any, fps: float | None, sample_fps: float | None, sampling: Sampling, name: str
) -> Iterator[Frame]:
    av: Any = require("av")
    file = open_source(source, name)
    try:
        with open_container(file) as container:
            if not container.streams.video:
                raise InputError(f"{name}: the file has no video stream")
            total = container.streams.video[0].frames
            rate = container.streams.video[0].average_rate
        if not total:  # WebM, Matroska and others do not say; only decoding tells
            total = sum(1 for _ in _decode(file))
        if fps is None and rate and rate.numerator and rate.denominator:
            fps = rate.numerator / rate.denominator
        if fps is None:
            if total > 1:
                raise InputError(f"{name}: the file does not state a frame rate; give fps=")
            fps = 1.0
        indices = sample_indices(total, fps, sample_fps=sample_fps, sampling=sampling).tolist()
        wanted, last = set(indices), max(indices, default=0)
        for i, frame in enumerate(_decode(file)):
            if i in wanted:
                # Phones store portrait video lying down, with the rotation beside it.
                upright = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                yield np.ascontiguousarray(upright), i / fps
            if i >= last:
                return
    except (av.error.FFmpegError, OSError) as error:
        raise InputError(f"{name}: not a readable video ({error})") from error


def _decode(file: Any) -> Iterator[Any]:
    with open_container(file) as container:
        container.streams.video[0].thread_type = "AUTO"
        yield from container.decode(video=0)
