import dataclasses

import numpy as np
import pytest

from jaxenc.errors import InputError
from jaxenc.items import AudioItem, VisionItem


def test_items_are_frozen_float32_arrays():
    vision = VisionItem(np.zeros((4, 6), np.float64), [1, 2, 2], timestamp=1.5, name="a")
    assert vision.patches.dtype == np.float32
    assert vision.grid == (1, 2, 2)
    audio = AudioItem(np.zeros((128, 3), np.float64))
    assert audio.mel.dtype == np.float32
    for item in (vision, audio):
        with pytest.raises(dataclasses.FrozenInstanceError):
            item.name = "b"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(bad):
    array = np.zeros((4, 6), np.float32)
    array[2, 3] = bad
    with pytest.raises(InputError, match=r"^cat\.jpg: patches hold 1 NaN or infinite"):
        VisionItem(array, (1, 2, 2), name="cat.jpg")
    with pytest.raises(InputError, match=r"^speech\.wav: mel hold 1 NaN or infinite"):
        AudioItem(array, name="speech.wav")


@pytest.mark.parametrize("grid", [(1, 2, 3), (2, 2), (0, 2, 2), (1, 1, 4, 1)])
def test_a_grid_that_does_not_match_is_refused(grid):
    with pytest.raises(InputError, match=r"^x: "):
        VisionItem(np.zeros((4, 6)), grid, name="x")


@pytest.mark.parametrize("shape", [(128,), (128, 0), (1, 128, 3)])
def test_a_mel_without_frames_is_refused(shape):
    with pytest.raises(InputError, match=r"^x: mel has shape"):
        AudioItem(np.zeros(shape), name="x")


def test_recorded_frames_are_all_unless_it_is_said():
    mel = np.zeros((8, 30), np.float32)
    assert (AudioItem(mel).recorded, AudioItem(mel, frames=7).recorded) == (30, 7)
    for frames in (0, 31):
        with pytest.raises(InputError, match=rf"^x: {frames} of 30 frames are said to be recorded"):
            AudioItem(mel, name="x", frames=frames)
