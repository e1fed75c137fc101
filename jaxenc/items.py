"""What an encoder eats: preprocessed items, as NumPy arrays on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from jaxenc.errors import InputError


@dataclass(frozen=True, eq=False)
class VisionItem:
    """An image, or a chunk of a video's frames, cut into patches.

    Attributes:
        patches: float32 `[t*h*w, features]`, normalised, one row a patch, in the order the encoder expects.
        grid: `(t, h, w)` in patches.
        timestamp: of the first frame, in seconds; None for an image.
        name: what error messages call the item.

    Raises:
        InputError: rows and grid disagree, or a value is NaN or infinite.
    """

    patches: Float32[np.ndarray, "patches features"]
    grid: tuple[int, int, int]
    timestamp: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        """Check the item, so that whatever is packed later is known to be finite."""
        name = self.name or "<vision item>"
        patches = np.asarray(self.patches, np.float32)
        grid = tuple(int(size) for size in self.grid)
        if len(grid) != 3 or min(grid) < 1:
            raise InputError(f"{name}: grid is {self.grid}, expected (t, h, w) of at least 1 each")
        if patches.ndim != 2 or len(patches) != grid[0] * grid[1] * grid[2]:
            rows = grid[0] * grid[1] * grid[2]
            raise InputError(f"{name}: patches have shape {patches.shape}, grid {grid} needs [{rows}, features]")
        _refuse_non_finite(patches, name, "patches")
        object.__setattr__(self, "patches", patches)
        object.__setattr__(self, "grid", grid)

    def check_features(self, expected: int) -> None:
        """Raises InputError where a patch does not have the values that an encoder reads."""
        if self.patches.shape[1] != expected:
            raise InputError(f"{self.name}: a patch has {self.patches.shape[1]} values, expected {expected}")


@dataclass(frozen=True, eq=False)
class AudioItem:
    """A clip as a log-mel spectrogram.

    Attributes:
        mel: float32 `[bins, frames]`.
        name: what error messages call the item.
        frames: how many of them were recorded, where silence was appended that some encoders leave out; None: all.

    Raises:
        InputError: not two-dimensional, no frames, more of them recorded than there are, or a value is NaN or infinite.
    """

    mel: Float32[np.ndarray, "bins frames"]
    name: str = ""
    frames: int | None = None

    @property
    def recorded(self) -> int:
        """Frames without the silence that was appended."""
        return self.mel.shape[1] if self.frames is None else self.frames

    def __post_init__(self) -> None:
        """Check the item, so that whatever is packed later is known to be finite."""
        name = self.name or "<audio item>"
        mel = np.asarray(self.mel, np.float32)
        if mel.ndim != 2 or mel.size == 0:
            raise InputError(f"{name}: mel has shape {mel.shape}, expected [bins, frames] with at least one frame")
        if self.frames is not None and not 1 <= self.frames <= mel.shape[1]:
            raise InputError(f"{name}: {self.frames} of {mel.shape[1]} frames are said to be recorded")
        _refuse_non_finite(mel, name, "mel")
        object.__setattr__(self, "mel", mel)


Item = VisionItem | AudioItem


def _refuse_non_finite(array: np.ndarray, name: str, what: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        raise InputError(f"{name}: {what} hold {array.size - int(finite.sum())} NaN or infinite values")
