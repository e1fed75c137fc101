"""Whisper's encoder against transformers', on the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import jaxenc
from tests.parity.checkpoints import Checkpoint, WhisperSizes, log_mel, whisper
from tests.parity.compare import assert_avoided, assert_bfloat16_as_good, assert_float32_equal, max_error
from tests.parity.references import Encoded, Whisper, use_activation, use_epsilon


def encode(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.AudioItem(mel) for mel in items])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return whisper()


@pytest.fixture(scope="module")
def original(checkpoint: Checkpoint) -> Whisper:
    return Whisper(checkpoint)


@pytest.fixture(scope="module")
def items() -> list[np.ndarray]:
    sizes = WhisperSizes()
    return [log_mel(2 * sizes.positions, bins=sizes.mel, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def truth(original: Whisper, items: list[np.ndarray]) -> Encoded:
    return original.run(items)


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> jaxenc.Encoder:
    return jaxenc.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def ours(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> list[np.ndarray]:
    return encode(encoder, items)


@pytest.fixture(scope="module")
def avoids(original: Whisper, items: list[np.ndarray], truth: Encoded, ours: list[np.ndarray]) -> Callable[..., None]:
    """Asserts that the rows are right, and that every item would show the mistake."""
    return lambda mistake: assert_avoided(ours, truth.rows, original.run(items, alter=mistake).rows)


def test_truth_is_what_transformers_computes_in_float32(
    original: Whisper, items: list[np.ndarray], truth: Encoded
) -> None:
    assert max_error(original.run(items, dtype="float32").rows, truth.rows) < 3e-6


def test_float32_rows_are_the_originals(ours: list[np.ndarray], truth: Encoded) -> None:
    assert_float32_equal(ours, truth.rows)


def test_every_block_is_the_originals(encoder: jaxenc.Encoder, items: list[np.ndarray], truth: Encoded) -> None:
    batch = encoder.pack([jaxenc.AudioItem(mel) for mel in items])
    _, captured = encoder.apply(encoder.params, batch, capture="all")
    assert sorted(captured) == [0, 1]
    for block, tokens in captured.items():
        assert_float32_equal(encoder.unpack_tokens(tokens, batch), [hidden[block + 1] for hidden in truth.hidden])


def test_bfloat16_is_as_good_as_the_originals(
    folder: Path, original: Whisper, items: list[np.ndarray], truth: Encoded
) -> None:
    rows = encode(jaxenc.load(folder, dtype="bfloat16"), items)
    assert_bfloat16_as_good(rows, original.run(items, dtype="bfloat16").rows, truth.rows)


@pytest.mark.parametrize(
    ("layout", "config", "dtype", "shards"), [("original", "original", "float16", 1), ("model", "model", "float32", 2)]
)
def test_every_layout_gives_the_same_rows(
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
    assert_float32_equal(encode(jaxenc.load(folder, dtype="float32"), items[:1]), truth.rows[:1])


def test_convolutions_and_blocks_have_the_erf_gelu(
    avoids: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    avoids(lambda encoder: use_activation(encoder.layers, name="gelu_pytorch_tanh"))
    monkeypatch.setattr(nn.functional, "gelu", partial(nn.functional.gelu, approximate="tanh"))
    avoids(lambda encoder: None)


def test_positions_are_added(avoids: Callable[..., None]) -> None:
    avoids(lambda encoder: encoder.embed_positions.weight.data.zero_())


def test_recordings_do_not_attend_to_each_other(
    encoder: jaxenc.Encoder, items: list[np.ndarray], truth: Encoded
) -> None:
    for item, rows in zip(items, truth.rows, strict=True):
        assert_float32_equal(encode(encoder, [item]), [rows])


def test_every_norms_epsilon_is_1e_5(tmp_path: Path, items: list[np.ndarray]) -> None:
    checkpoint = whisper(scales={"conv2": 3e-3, "embed_positions": 3e-3, "out_proj": 3e-3, "fc2": 3e-3})
    original = Whisper(checkpoint)
    truth = original.run(items[:1]).rows
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), items[:1])
    for part in (
        lambda encoder: [layer.self_attn_layer_norm for layer in encoder.layers],
        lambda encoder: [layer.final_layer_norm for layer in encoder.layers],
        lambda encoder: [encoder.layer_norm],
    ):
        mistaken = original.run(items[:1], alter=lambda encoder, part=part: use_epsilon(*part(encoder), eps=1e-6)).rows
        assert_avoided(rows, truth, mistaken)
