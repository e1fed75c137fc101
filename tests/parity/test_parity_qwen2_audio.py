"""Qwen2-Audio's encoder and projector against transformers', on the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import jaxenc
from tests.parity.checkpoints import Checkpoint, PooledSizes, log_mel, qwen2_audio
from tests.parity.compare import assert_avoided, assert_bfloat16_as_good, assert_float32_equal, max_error
from tests.parity.references import Encoded, Qwen2Audio, use_activation, use_epsilon

SIZES = PooledSizes()
RECORDED = [120, 61, 37, 118, 3]  # of 120 frames
Item = tuple[np.ndarray, int]


def encode(encoder: jaxenc.Encoder, items: list[Item]) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.AudioItem(mel, frames=frames) for mel, frames in items])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return qwen2_audio(SIZES)


@pytest.fixture(scope="module")
def original(checkpoint: Checkpoint) -> Qwen2Audio:
    return Qwen2Audio(checkpoint)


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return [(log_mel(120, bins=SIZES.mel, seed=frames), frames) for frames in RECORDED]


@pytest.fixture(scope="module")
def truth(original: Qwen2Audio, items: list[Item]) -> Encoded:
    return original.run(items)


@pytest.fixture(scope="module")
def encoder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> jaxenc.Encoder:
    return jaxenc.load(checkpoint.write(tmp_path_factory.mktemp("qwen2_audio")), dtype="float32")


@pytest.fixture(scope="module")
def ours(encoder: jaxenc.Encoder, items: list[Item]) -> list[np.ndarray]:
    return encode(encoder, items)


@pytest.fixture(scope="module")
def avoids(original: Qwen2Audio, items: list[Item], truth: Encoded, ours: list[np.ndarray]) -> Callable[..., None]:
    """Asserts that the rows are right, and that every item would show the mistake."""
    return lambda mistake: assert_avoided(ours, truth.rows, original.run(items, alter=mistake).rows)


def test_truth_is_what_transformers_computes_in_float32(
    original: Qwen2Audio, items: list[Item], truth: Encoded
) -> None:
    assert max_error(original.run(items, dtype="float32").rows, truth.rows) < 3e-6


def test_float32_rows_are_the_originals(ours: list[np.ndarray], truth: Encoded) -> None:
    assert_float32_equal(ours, truth.rows)


def test_every_block_is_the_originals(encoder: jaxenc.Encoder, items: list[Item], truth: Encoded) -> None:
    batch = encoder.pack([jaxenc.AudioItem(mel, frames=frames) for mel, frames in items])
    _, captured = encoder.apply(encoder.params, batch, capture="all")
    for block, tokens in captured.items():
        assert_float32_equal(encoder.unpack_tokens(tokens, batch), [hidden[block + 1] for hidden in truth.hidden])


def test_bfloat16_is_as_good_and_the_layout_of_transformers_is_read(
    checkpoint: Checkpoint, original: Qwen2Audio, items: list[Item], truth: Encoded, tmp_path: Path
) -> None:
    folder = checkpoint.write(tmp_path, layout="transformers", config="transformers")
    rows = encode(jaxenc.load(folder, dtype="bfloat16"), items)
    assert_bfloat16_as_good(rows, original.run(items, dtype="bfloat16").rows, truth.rows)


# Traps


def test_no_token_attends_to_the_silence_after_a_recording(
    original: Qwen2Audio, items: list[Item], truth: Encoded, ours: list[np.ndarray]
) -> None:
    some = range(1, len(items))  # the first has no silence
    heard = original.run([(items[i][0], 120) for i in some]).rows
    mistaken = [rows[: len(ours[i])] for i, rows in zip(some, heard, strict=True)]
    assert_avoided([ours[i] for i in some], [truth.rows[i] for i in some], mistaken)


def test_the_convolutions_see_the_silence_after_a_recording(
    original: Qwen2Audio, items: list[Item], truth: Encoded, ours: list[np.ndarray]
) -> None:
    some = range(1, len(items))
    zeroed = [(np.where(np.arange(120) < frames, mel, 0).astype(np.float32), frames) for mel, frames in items]
    mistaken = original.run([zeroed[i] for i in some]).rows
    assert_avoided([ours[i] for i in some], [truth.rows[i] for i in some], mistaken)


def test_tokens_are_averaged_before_the_norm(avoids: Callable[..., None]) -> None:
    class NormThenMean(nn.Module):
        def __init__(self, norm: nn.Module):
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).unflatten(1, (-1, 2)).mean(2)

    def mistake(tower: nn.Module) -> None:
        tower.avg_pooler, tower.layer_norm = nn.Identity(), NormThenMean(tower.layer_norm)

    avoids(mistake)


def test_positions_are_added(avoids: Callable[..., None]) -> None:
    avoids(lambda tower: tower.embed_positions.weight.data.zero_())


def test_convolutions_and_blocks_have_the_erf_gelu(
    avoids: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    avoids(lambda tower: use_activation(tower.layers, name="gelu_pytorch_tanh"))
    monkeypatch.setattr(nn.functional, "gelu", partial(nn.functional.gelu, approximate="tanh"))
    avoids(lambda tower: None)


def test_every_norms_epsilon_is_1e_5(tmp_path: Path, items: list[Item]) -> None:
    checkpoint = qwen2_audio(SIZES, scales={"conv2": 3e-3, "embed_positions": 3e-3, "out_proj": 3e-3, "fc2": 3e-3})
    original = Qwen2Audio(checkpoint)
    truth = original.run(items[:1]).rows
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), items[:1])
    for part in (
        lambda tower: [layer.self_attn_layer_norm for layer in tower.layers],
        lambda tower: [layer.final_layer_norm for layer in tower.layers],
        lambda tower: [tower.layer_norm],
    ):
        mistaken = original.run(items[:1], alter=lambda tower, part=part: use_epsilon(*part(tower), eps=1e-6)).rows
        assert_avoided(rows, truth, mistaken)


# Lengths


def test_rows_are_those_that_the_original_keeps(
    encoder: jaxenc.Encoder, original: Qwen2Audio, items: list[Item]
) -> None:
    mel = items[0][0]
    lengths = original._models["float64"].audio_tower._get_feat_extract_output_lengths
    for frames in range(3, 121):
        item = jaxenc.AudioItem(mel, frames=frames)
        assert encoder.config.output_rows(item) == int(lengths(torch.tensor(frames))[1])
    with pytest.raises(jaxenc.InputError, match="2 frames make no row"):
        encode(encoder, [(mel, 2)])
