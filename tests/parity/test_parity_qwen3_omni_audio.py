"""Qwen3-Omni's audio tower against transformers', on the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

import jaxenc
from tests.parity.checkpoints import AudioSizes, Checkpoint, log_mel, qwen3_omni_audio
from tests.parity.compare import assert_avoided, assert_bfloat16_as_good, assert_float32_equal, max_error
from tests.parity.references import (
    AudioAlter,
    Encoded,
    Qwen3OmniAudio,
    audio_tokens,
    use_activation,
    use_epsilon,
    whisper_sinusoids,
)

FRAMES = [230, 100, 61, 1750, 333, 37, 99, 1]
TWO_CHUNKS, CHUNK, SHORT, LONG, FOUR_CHUNKS, SHORTER, ALMOST, ONE_FRAME = range(8)
SEVERAL = [TWO_CHUNKS, SHORT, ONE_FRAME]


def encode(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.AudioItem(mel) for mel in items])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return qwen3_omni_audio()


@pytest.fixture(scope="module")
def original(checkpoint: Checkpoint) -> Qwen3OmniAudio:
    return Qwen3OmniAudio(checkpoint)


@pytest.fixture(scope="module")
def items() -> list[np.ndarray]:
    return [log_mel(frames) for frames in FRAMES]


@pytest.fixture(scope="module")
def truth(original: Qwen3OmniAudio, items: list[np.ndarray]) -> Encoded:
    return original.run(items)


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("qwen3_omni"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> jaxenc.Encoder:
    return jaxenc.load(folder, tower="audio", dtype="float32")


@pytest.fixture(scope="module")
def ours(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> list[np.ndarray]:
    return encode(encoder, items)


@pytest.fixture(scope="module")
def avoids(
    original: Qwen3OmniAudio, items: list[np.ndarray], truth: Encoded, ours: list[np.ndarray]
) -> Callable[..., None]:
    """Asserts that the chosen clips are right, and that each of them would show the mistake."""

    def check(mistake: AudioAlter, on: list[int]) -> None:
        mistaken = original.run([items[i] for i in on], alter=mistake).rows
        assert_avoided([ours[i] for i in on], [truth.rows[i] for i in on], mistaken)

    return check


# The truth itself


def test_truth_is_what_transformers_computes_in_float32(
    original: Qwen3OmniAudio, items: list[np.ndarray], truth: Encoded
) -> None:
    assert max_error(original.run(items, dtype="float32").rows, truth.rows) < 3e-6


def test_mistakes_are_made_in_a_forward_that_is_otherwise_the_original(
    original: Qwen3OmniAudio, items: list[np.ndarray], truth: Encoded
) -> None:
    assert max_error(original.run(items, alter=AudioAlter()).rows, truth.rows) < 1e-13


# Numbers


def test_float32_rows_are_the_originals(ours: list[np.ndarray], truth: Encoded) -> None:
    assert_float32_equal(ours, truth.rows)


def test_every_block_is_the_originals(encoder: jaxenc.Encoder, items: list[np.ndarray], truth: Encoded) -> None:
    chosen = [TWO_CHUNKS, SHORT, LONG]
    batch = encoder.pack([jaxenc.AudioItem(items[i]) for i in chosen])
    _, captured = encoder.apply(encoder.params, batch, capture="all")
    assert sorted(captured) == [0, 1]
    for block, tokens in captured.items():
        assert_float32_equal(encoder.unpack_tokens(tokens, batch), [truth.hidden[i][block + 1] for i in chosen])


def test_bfloat16_is_as_good_as_the_originals(
    folder: Path, original: Qwen3OmniAudio, items: list[np.ndarray], truth: Encoded
) -> None:
    rows = encode(jaxenc.load(folder, tower="audio", dtype="bfloat16"), items)
    assert_bfloat16_as_good(rows, original.run(items, dtype="bfloat16").rows, truth.rows)


# Every published spelling


@pytest.mark.parametrize(
    ("layout", "config", "dtype", "shards"),
    [
        ("original", "original", "float32", 1),
        ("thinker", "thinker", "bfloat16", 2),
        ("thinker", "tower", "bfloat16", 3),
    ],
)
def test_every_layout_and_config_gives_the_same_rows(
    checkpoint: Checkpoint,
    items: list[np.ndarray],
    truth: Encoded,
    tmp_path: Path,
    layout: str,
    config: str,
    dtype: str,
    shards: int,
) -> None:
    folder = checkpoint.write(tmp_path, layout=layout, config=config, dtype=dtype, shards=shards)
    chosen = [TWO_CHUNKS, SHORT]
    rows = encode(jaxenc.load(folder, tower="audio", dtype="float32"), [items[i] for i in chosen])
    assert_float32_equal(rows, [truth.rows[i] for i in chosen])


# Traps


def test_convolutions_are_flattened_channel_major(avoids: Callable[..., None]) -> None:
    avoids(AudioAlter(flatten="mel-major"), on=SEVERAL)


def test_positions_start_again_in_every_chunk(avoids: Callable[..., None]) -> None:
    avoids(AudioAlter(positions="clip"), on=[TWO_CHUNKS, FOUR_CHUNKS])


def test_attention_stays_in_windows_of_104_tokens(avoids: Callable[..., None]) -> None:
    avoids(AudioAlter(window=None), on=[LONG])
    avoids(AudioAlter(window=100), on=[LONG])


def test_clips_do_not_attend_to_each_other(avoids: Callable[..., None]) -> None:
    avoids(AudioAlter(window="call"), on=SEVERAL)


def test_short_chunks_are_padded_to_100_frames(avoids: Callable[..., None]) -> None:
    # 61 and 37 frames: what a short clip gives by itself; 230 and 333: a last chunk that is not padded.
    avoids(AudioAlter(padding="none"), on=[SHORT, SHORTER, TWO_CHUNKS, FOUR_CHUNKS])


def test_a_short_clip_is_the_same_alone_as_among_others(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> None:
    alone, among = encode(encoder, [items[SHORT]])[0], encode(encoder, [items[LONG], items[SHORT], items[CHUNK]])[1]
    assert_float32_equal([alone], [np.asarray(among, np.float64)])


def test_position_frequencies_end_at_the_slowest(avoids: Callable[..., None]) -> None:
    half = AudioSizes().embed // 2
    avoids(AudioAlter(sinusoids=partial(whisper_sinusoids, divisor=half)), on=[TWO_CHUNKS, SHORT, ALMOST])


def test_convolutions_have_the_erf_gelu(avoids: Callable[..., None]) -> None:
    avoids(AudioAlter(conv_gelu=nn.GELU("tanh")), on=SEVERAL)


def test_blocks_have_the_erf_gelu(avoids: Callable[..., None]) -> None:
    avoids(AudioAlter(model=lambda tower: use_activation(tower.layers, name="gelu_pytorch_tanh")), on=SEVERAL)


def test_projector_has_the_erf_gelu(avoids: Callable[..., None]) -> None:
    def mistake(tower: nn.Module) -> None:
        tower.act = nn.GELU("tanh")

    avoids(AudioAlter(model=mistake), on=SEVERAL)


def test_every_norms_epsilon_is_1e_5(tmp_path: Path) -> None:
    # Positions enter with a standard deviation of 0.5 whatever the weights. A clip of 8 frames is one token, and that
    # is at position 0, [0, ..., 1, ...]: the first attention's bias takes it away, and every norm after that (for the
    # first, its second layer stands) meets activations of about sqrt(1e-5).
    checkpoint = qwen3_omni_audio(scales={"conv_out": 2e-3, "out_proj": 2e-3, "fc2": 2e-3})
    checkpoint.tensors["tower"]["layers.0.self_attn.out_proj.bias"][:] = -whisper_sinusoids(1, AudioSizes().embed)[0]
    original, item = Qwen3OmniAudio(checkpoint), log_mel(8)
    truth = original.run([item]).rows
    folder = checkpoint.write(tmp_path, dtype="float32")
    rows = encode(jaxenc.load(folder, tower="audio", dtype="float32"), [item])
    for part in (
        lambda tower: [layer.self_attn_layer_norm for layer in tower.layers],
        lambda tower: [layer.final_layer_norm for layer in tower.layers],
        lambda tower: [tower.ln_post],
    ):
        mistake = AudioAlter(model=lambda tower, part=part: use_epsilon(*part(tower), eps=1e-6))
        # tokens are a hundredth of what they are made of: float32 has two digits less for them
        assert_avoided(rows, truth, original.run([item], alter=mistake).rows, tolerance=1e-4)


# Lengths


def test_rows_of_every_length_are_what_its_chunks_leave(encoder: jaxenc.Encoder) -> None:
    for frames in range(1, 3001):
        expected = int(_get_feat_extract_output_lengths(torch.tensor(frames)))
        assert encoder.config.tokens(frames) == expected == audio_tokens(frames), frames


@pytest.mark.parametrize("frames", [1, 8, 9, 99, 100, 101, 796, 800, 801, 1600])
def test_as_many_rows_come_out_as_are_said(encoder: jaxenc.Encoder, frames: int) -> None:
    item = jaxenc.AudioItem(log_mel(frames))
    assert len(encoder.encode_items([item])[0]) == encoder.config.output_rows(item) == audio_tokens(frames)
