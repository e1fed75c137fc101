"""Qwen3-ASR's audio tower against transformers', on the same weights."""

from pathlib import Path

import numpy as np
import pytest

import jaxenc
from tests.parity.checkpoints import AudioSizes, Checkpoint, log_mel, qwen3_asr_audio, qwen3_omni_audio
from tests.parity.compare import assert_avoided, assert_bfloat16_as_good, assert_float32_equal, max_error
from tests.parity.references import AudioAlter, Encoded, Qwen3AsrAudio, Qwen3OmniAudio

SIZES = AudioSizes(heads=7)  # of 14, seven a device of two
FRAMES = [230, 61, 1050, 9]


def encode(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.AudioItem(mel) for mel in items])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return qwen3_asr_audio(SIZES)


@pytest.fixture(scope="module")
def original(checkpoint: Checkpoint) -> Qwen3AsrAudio:
    return Qwen3AsrAudio(checkpoint)


@pytest.fixture(scope="module")
def items() -> list[np.ndarray]:
    return [log_mel(frames) for frames in FRAMES]


@pytest.fixture(scope="module")
def truth(original: Qwen3AsrAudio, items: list[np.ndarray]) -> Encoded:
    return original.run(items)


def test_truth_is_what_transformers_computes_in_float32(
    original: Qwen3AsrAudio, items: list[np.ndarray], truth: Encoded
) -> None:
    assert max_error(original.run(items, dtype="float32").rows, truth.rows) < 3e-6


@pytest.mark.parametrize(("layout", "dtype"), [("original", "bfloat16"), ("transformers", "float32")])
def test_float32_rows_are_the_originals(
    checkpoint: Checkpoint, items: list[np.ndarray], truth: Encoded, tmp_path: Path, layout: str, dtype: str
) -> None:
    folder = checkpoint.write(tmp_path, layout=layout, config=layout, dtype=dtype)
    encoder = jaxenc.load(folder, dtype="float32")
    assert encoder.config.family == "qwen3_asr_audio"
    assert_float32_equal(encode(encoder, items), truth.rows)


def test_bfloat16_is_as_good(
    checkpoint: Checkpoint, original: Qwen3AsrAudio, items: list[np.ndarray], truth: Encoded, tmp_path: Path
) -> None:
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="bfloat16"), items)
    assert_bfloat16_as_good(rows, original.run(items, dtype="bfloat16").rows, truth.rows)


def test_a_short_clip_alone_is_padded_to_100_frames(
    checkpoint: Checkpoint, original: Qwen3AsrAudio, items: list[np.ndarray], tmp_path: Path
) -> None:
    # unlike in Qwen3-Omni, where transformers pads to the longest chunk of the call
    alone = items[1:2]
    unpadded = Qwen3OmniAudio(qwen3_omni_audio(SIZES)).run(alone, alter=AudioAlter(padding="none"))
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), alone)
    assert_avoided(rows, original.run(alone).rows, unpadded.rows)


def test_a_recording_is_half_a_second_at_least() -> None:
    samples = np.sin(np.arange(4000, dtype=np.float32) / 9)
    short, half, padded = (
        jaxenc.models.named_config("qwen3_asr_audio").read("audio", x, name="clip")[0].mel
        for x in (samples, np.tile(samples, 2), np.pad(samples, (0, 4000)))
    )
    assert short.shape == half.shape == (128, 50)
    np.testing.assert_array_equal(short, padded)
