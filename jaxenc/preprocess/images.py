"""Images of any kind -> uint8 RGB -> normalised patches."""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Shaped, UInt8
from numpy.typing import ArrayLike

from jaxenc.errors import InputError
from jaxenc.items import VisionItem
from jaxenc.preprocess._sources import MediaFile, as_array, is_array, open_source, require, source_name

if TYPE_CHECKING:
    from PIL.Image import Image

WHITE = (255, 255, 255)
# one PIL image may be given several times, and is decoded only when loaded, which two threads must not do at once
_LOADING = tuple(threading.Lock() for _ in range(64))
# What Pillow's readers raise on damaged files, beside OSError and its own decompression-bomb classes.
_DAMAGED = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, RuntimeError),
    *(struct.error, zlib.error),
)


def load_image(
    source: MediaFile | Image | ArrayLike, *, name: str | None = None, background: tuple[int, int, int] | None = WHITE
) -> UInt8[np.ndarray, "height width 3"]:
    """Any image as uint8 RGB, upright.

    EXIF orientation is applied; of several frames the first is taken; 16-bit values are scaled (v / 257, rounded), not
    clipped as Pillow's own conversion does. Transparency is laid on white, as the image processors of transformers
    5.24 do with a PIL image; Kimi-K2.5's own file drops alpha (`convert("RGB")`): `background=None` does that.

    Args:
        source: a path, bytes, binary file, PIL image, or an array (NumPy, JAX): `[h, w]` or `[h, w, c]` with c 1
            (grey), 2 (grey, alpha), 3 or 4 (RGBA); uint8, uint16, bool, or float in [0, 1].
        name: what error messages call it; the path by default.
        background: RGB behind transparent pixels, or None to drop alpha.

    Returns:
        uint8 `[height, width, 3]`.

    Raises:
        InputError: unreadable, truncated, empty, a decompression bomb, NaN or infinite, or not an image's shape.
    """
    name = source_name(source, name)
    pil: Any = require("PIL.Image")
    if not isinstance(source, pil.Image) and is_array(source):
        pixels = _check_shape(eight_bits(as_array(source), name), name)
        if pixels.shape[2] == 3:
            return np.ascontiguousarray(pixels)
        source = pil.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    bombs = (pil.DecompressionBombError, pil.DecompressionBombWarning)
    try:
        image = source if isinstance(source, pil.Image) else pil.open(open_source(source, name))
        if 0 in image.size:
            raise InputError(f"{name}: the image is empty ({image.width} x {image.height})")
        with _LOADING[id(image) // 16 % len(_LOADING)]:
            image.load()
        image = require("PIL.ImageOps").exif_transpose(image)
        return _to_rgb(image, name, background)
    except InputError:
        raise
    except bombs as error:
        raise InputError(f"{name}: too large to decode safely; raise PIL.Image.MAX_IMAGE_PIXELS if meant") from error
    except _DAMAGED as error:
        raise InputError(f"{name}: not a readable image ({error or type(error).__name__})") from error


def eight_bits(array: np.ndarray, name: str) -> UInt8[np.ndarray, "..."]:
    """Pixel values of any accepted dtype as uint8: uint16 / 257, bool * 255, floats in [0, 1] * 255, rounded."""
    kind, size_bytes = array.dtype.kind, array.dtype.itemsize
    if kind == "u" and size_bytes == 1:
        return array
    if kind == "u" and size_bytes == 2:
        return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if kind == "b":
        return array.astype(np.uint8) * np.uint8(255)
    if kind != "f":
        raise InputError(f"{name}: dtype {array.dtype}, expected uint8, uint16, bool, or float in [0, 1]")
    if not np.isfinite(array).all():
        raise InputError(f"{name}: the array holds NaN or infinite values")
    if array.size and (array.min() < -1e-6 or array.max() > 1 + 1e-6):
        raise InputError(
            f"{name}: float pixels lie in [{array.min():g}, {array.max():g}], expected [0, 1]; "
            "clip or rescale them, or give uint8"
        )
    return np.rint(np.clip(array.astype(np.float64), 0, 1) * 255).astype(np.uint8)


def _check_shape(pixels: np.ndarray, name: str) -> np.ndarray:
    shaped = pixels[..., None] if pixels.ndim == 2 else pixels
    if shaped.ndim != 3 or (shaped.size and shaped.shape[2] not in (1, 2, 3, 4)):
        raise InputError(f"{name}: shape {pixels.shape}, expected [h, w] or [h, w, 1 to 4 channels]")
    if shaped.size == 0:
        raise InputError(f"{name}: the image is empty (shape {pixels.shape})")
    return shaped


def _to_rgb(image: Image, name: str, background: tuple[int, int, int] | None) -> np.ndarray:
    pil: Any = require("PIL.Image")
    if image.mode.startswith(("I", "F")):
        grey = np.asarray(image)
        if image.mode == "I":  # 32-bit integers: where older Pillow puts 16-bit PNGs
            if grey.min() < 0 or grey.max() > 65535:
                raise InputError(f"{name}: 32-bit integer pixels outside 0..65535 have no agreed scale")
            grey = grey.astype(np.uint16)
        return np.repeat(eight_bits(grey, name)[..., None], 3, axis=2)
    if not image.has_transparency_data:
        return np.array(image.convert("RGB"))
    rgba = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
    if background is None:
        return np.array(rgba)[..., :3].copy()
    return np.array(pil.alpha_composite(pil.new("RGBA", rgba.size, (*background, 255)), rgba).convert("RGB"))


class NavitSize(NamedTuple):
    """Sizes as (height, width): the resized image and the padded one in pixels, the grid in patches."""

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid: tuple[int, int]


def navit_size(height: int, width: int, *, patch: int, merge: int, patch_limit: int, side_limit: int) -> NavitSize:
    """How an image is scaled down to a patch budget and padded, keeping its shape (Kimi's `navit_resize`).

    The image is never scaled up. Padding comes after the budget, so the grid may hold more patches than `patch_limit`:
    7168 x 500 gives (490, 36) = 17,640 under a limit of 16,384.

    Args:
        height: pixels.
        width: pixels.
        patch: a patch's side in pixels.
        merge: patches merged on each side; both sides of the grid are multiples of it.
        patch_limit: patches an image may have before padding.
        side_limit: patches on one side.

    Returns:
        The resized and padded sizes in pixels and the grid in patches.
    """
    patches = max(1, height // patch) * max(1, width // patch)
    side_pixels = side_limit * patch
    scale = min(1.0, math.sqrt(patch_limit / patches), side_pixels / height, side_pixels / width)
    resized = tuple(min(max(1, int(size * scale)), side_pixels) for size in (height, width))
    factor = merge * patch
    padded = tuple(-(-size // factor) * factor for size in resized)
    return NavitSize((resized[0], resized[1]), (padded[0], padded[1]), (padded[0] // patch, padded[1] // patch))


def resize_bicubic(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Pillow's bicubic resize (a = -0.5, antialiased, rounded to uint8 after each axis), the published processors'."""
    if image.shape[:2] == (height, width):
        return image
    pil: Any = require("PIL.Image")
    return np.asarray(pil.fromarray(image).resize((width, height), pil.Resampling.BICUBIC))


def fit_square(
    image: UInt8[np.ndarray, "height width 3"], side: int, *, shorter: int | None
) -> UInt8[np.ndarray, "side side 3"]:
    """A square of an image, as the image processors of CLIP, DINOv2 (`shorter`) and SigLIP (None) make it.

    Args:
        image: uint8 RGB.
        side: of the square, in pixels.
        shorter: what the shorter side is resized to, in pixels, before the middle is cut out: at least `side`. None
            resizes both sides to `side`, whatever shape the image has.
    """
    if shorter is None:
        return resize_bicubic(image, side, side)
    height, width = image.shape[:2]
    # the longer side is cut down to whole pixels, as the published processors do
    fitted = (shorter, int(shorter * width / height)) if height <= width else (int(shorter * height / width), shorter)
    image = resize_bicubic(image, *fitted)
    top, left = ((size - side) // 2 for size in fitted)
    return image[top : top + side, left : left + side]


def tile_grid(height: int, width: int, *, side: int, limit: int) -> tuple[int, int]:
    """Rows and columns of square tiles whose shape, all together, is nearest to an image's (InternVL's tiling).

    Args:
        height: of the image, pixels.
        width: the same.
        side: of a tile, pixels.
        limit: tiles there may be.

    Returns:
        Of several grids of that shape the one of most tiles that has less than twice the image's pixels, or else the
        smallest.
    """
    grids = [(rows, columns) for columns in range(1, limit + 1) for rows in range(1, limit // columns + 1)]
    distances = {grid: abs(width / height - grid[1] / grid[0]) for grid in sorted(grids, key=math.prod)}
    least = min(distances.values())
    smallest, *larger = (grid for grid, distance in distances.items() if distance == least)
    filled = [grid for grid in larger if math.prod(grid) * side**2 < 2 * height * width]
    return filled[-1] if filled else smallest


def fit_tiles(
    image: UInt8[np.ndarray, "height width 3"], side: int, *, limit: int
) -> UInt8[np.ndarray, "tiles side side 3"]:
    """An image cut into square tiles, in raster order, and the whole of it as one more where there are several.

    Args:
        image: uint8 RGB.
        side: of a tile, in pixels.
        limit: tiles there may be beside the whole.
    """
    rows, columns = tile_grid(*image.shape[:2], side=side, limit=limit)
    fitted = resize_bicubic(image, rows * side, columns * side)
    tiles = fitted.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    return tiles if len(tiles) == 1 else np.concatenate([tiles, resize_bicubic(image, side, side)[None]])


def fit_patches(
    image: UInt8[np.ndarray, "height width 3"], *, longest: int, multiple: int
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """An image scaled down to a longest side, and both sides resized up to a multiple (Pixtral's).

    Args:
        image: uint8 RGB.
        longest: what neither side is above, in pixels; itself a multiple.
        multiple: pixels that both sides become multiples of.
    """
    height, width = image.shape[:2]
    ratio = max(height / longest, width / longest, 1)
    # cut down to whole pixels, then up to whole patches: neither keeps the shape exactly
    fitted = (-(-max(math.floor(side / ratio), 1) // multiple) * multiple for side in (height, width))
    return resize_bicubic(image, *fitted)


def naflex_size(height: int, width: int, *, patch: int, patch_limit: int) -> tuple[int, int]:
    """The size in whole patches nearest to an image's shape, of at most so many of them (SigLIP 2's NaFlex).

    Args:
        height: pixels.
        width: pixels.
        patch: a patch's side in pixels.
        patch_limit: patches the resized image may have.

    Returns:
        (height, width) in pixels; images are scaled up as well as down.
    """

    def scaled(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(size * scale / patch)) for size in (height, width))
        return rows * patch, columns * patch

    # the published search, step by step: where it stops decides between neighbouring sizes
    tolerance = 1e-5
    low, high = tolerance / 10, 100.0
    while high - low >= tolerance:
        middle = (low + high) / 2
        rows, columns = scaled(middle)
        if (rows // patch) * (columns // patch) <= patch_limit:
            low = middle
        else:
            high = middle
    return scaled(low)


def pad_right_bottom(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Black pixels at the right and the bottom, up to the given size."""
    return np.pad(image, ((0, height - image.shape[0]), (0, width - image.shape[1]), (0, 0)))


def normalise(
    pixels: UInt8[np.ndarray, "*shape 3"], *, mean: Sequence[float], std: Sequence[float]
) -> Float32[np.ndarray, "*shape 3"]:
    """(v / 255 - mean) / std per channel, correctly rounded to float32."""
    values = np.arange(256)[:, None] / 255
    table: np.ndarray = ((values - np.asarray(mean)) / np.asarray(std)).astype(np.float32)
    return np.asarray(table[pixels, np.arange(3)])


def patchify(frames: Shaped[np.ndarray, "t height width c"], *, patch: int) -> Shaped[np.ndarray, "patches features"]:
    """Rows of (c, ph, pw) features, one a patch, in raster order (t, row, column)."""
    t, height, width, c = frames.shape
    cut = frames.reshape(t, height // patch, patch, width // patch, patch, c)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(-1, c * patch * patch)


def navit_item(
    frames: UInt8[np.ndarray, "t height width 3"],
    *,
    patch: int,
    merge: int,
    patch_limit: int,
    side_limit: int,
    mean: Sequence[float],
    std: Sequence[float],
    timestamp: float | None = None,
    name: str = "",
) -> VisionItem:
    """One item from the frames of one image (t = 1) or video chunk: resize, pad with black, normalise, cut.

    The padding is black *before* normalisation, so padded pixels hold -mean/std (-1 for Kimi), not 0.

    Args:
        frames: uint8 RGB `[t, height, width, 3]`.
        patch: a patch's side in pixels.
        merge: patches merged on each side.
        patch_limit: patches a frame may have before padding.
        side_limit: patches on one side.
        mean: per channel, of values in [0, 1].
        std: per channel.
        timestamp: of the first frame, in seconds.
        name: the item's.

    Returns:
        The item: patches float32 `[t*h*w, 3*patch*patch]` in raster order and the grid (t, h, w).
    """
    size = navit_size(
        frames.shape[1], frames.shape[2], patch=patch, merge=merge, patch_limit=patch_limit, side_limit=side_limit
    )
    fitted = np.stack([pad_right_bottom(resize_bicubic(frame, *size.resized), *size.padded) for frame in frames])
    patches = patchify(normalise(fitted, mean=mean, std=std), patch=patch)
    return VisionItem(patches, (len(frames), *size.grid), timestamp=timestamp, name=name)


def picture_item(
    pixels: UInt8[np.ndarray, "*pictures height width 3"],
    *,
    patch: int,
    mean: Sequence[float],
    std: Sequence[float],
    name: str = "",
) -> VisionItem:
    """The item of one picture as it is: normalised and cut into patches, what is beyond the last whole patch left away.

    Args:
        pixels: uint8 RGB, at least a patch each way; of several pictures, such as tiles, one after the other.
        patch: a patch's side in pixels.
        mean: per channel, of values in [0, 1].
        std: per channel.
        name: the item's.
    """
    h, w = pixels.shape[-3] // patch, pixels.shape[-2] // patch
    pictures = pixels.reshape(-1, *pixels.shape[-3:])
    whole = normalise(pictures[:, : h * patch, : w * patch], mean=mean, std=std)
    return VisionItem(patchify(whole, patch=patch), (len(pictures), h, w), name=name)


def naflex_item(
    pixels: UInt8[np.ndarray, "height width 3"],
    *,
    patch: int,
    patch_limit: int,
    mean: Sequence[float],
    std: Sequence[float],
    name: str = "",
) -> VisionItem:
    """The item of one picture as SigLIP 2 reads it: resized by `naflex_size`, with patches of (ph, pw, c) features.

    Args:
        pixels: uint8 RGB.
        patch: a patch's side in pixels.
        patch_limit: patches the item may have.
        mean: per channel, of values in [0, 1].
        std: per channel.
        name: the item's.
    """
    height, width = naflex_size(*pixels.shape[:2], patch=patch, patch_limit=patch_limit)
    pil: Any = require("PIL.Image")
    resized = np.asarray(pil.fromarray(pixels).resize((width, height), pil.Resampling.BILINEAR))
    item = picture_item(resized, patch=patch, mean=mean, std=std, name=name)
    last = item.patches.reshape(-1, 3, patch * patch).swapaxes(1, 2).reshape(len(item.patches), -1)
    return VisionItem(last, item.grid, name=name)
