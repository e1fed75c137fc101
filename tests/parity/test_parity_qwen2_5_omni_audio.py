"""Qwen2.5-Omni's audio tower against transformers', on the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import jaxenc
from tests.parity.checkpoints import Checkpoint, PooledSizes, log_mel, qwen2_5_omni_audio
from tests.parity.compare import assert_avoided, assert_bfloat16_as_good, assert_float32_equal, max_error
from tests.parity.references import Encoded, Qwen25OmniAudio, use_activation, use_epsilon, whisper_sinusoids

SIZES = PooledSizes(positions=20)  # a chunk of 40 frames
FRAMES = [95, 40, 37, 81, 3, 120]
LONG = [0, 3, 5]  # of several chunks
ODD_TAILS = [2, 3]  # of 37 and of 1 frame: 19 tokens, and one


def encode(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.AudioItem(mel) for mel in items])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return qwen2_5_omni_audio(SIZES)


@pytest.fixture(scope="module")
def original(checkpoint: Checkpoint) -> Qwen25OmniAudio:
    return Qwen25OmniAudio(checkpoint)


@pytest.fixture(scope="module")
def items() -> list[np.ndarray]:
    return [log_mel(frames, bins=SIZES.mel) for frames in FRAMES]


@pytest.fixture(scope="module")
def truth(original: Qwen25OmniAudio, items: list[np.ndarray]) -> Encoded:
    return original.run(items)


@pytest.fixture(scope="module")
def encoder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> jaxenc.Encoder:
    return jaxenc.load(checkpoint.write(tmp_path_factory.mktemp("qwen2_5_omni")), dtype="float32")


@pytest.fixture(scope="module")
def ours(encoder: jaxenc.Encoder, items: list[np.ndarray]) -> list[np.ndarray]:
    return encode(encoder, items)


@pytest.fixture(scope="module")
def avoids(
    original: Qwen25OmniAudio, items: list[np.ndarray], truth: Encoded, ours: list[np.ndarray]
) -> Callable[..., None]:
    """Asserts that the chosen clips are right, and that each of them would show the mistake."""

    def check(mistake: Callable[[nn.Module], None] | None = None, *, on: list[int] = LONG, **given: list[int]) -> None:
        mistaken = original.run([items[i] for i in on], alter=mistake, **given).rows
        assert_avoided([ours[i] for i in on], [truth.rows[i] for i in on], mistaken)

    return check


def test_truth_is_what_transformers_computes_in_float32(
    original: Qwen25OmniAudio, items: list[np.ndarray], truth: Encoded
) -> None:
    assert max_error(original.run(items, dtype="float32").rows, truth.rows) < 3e-6


def test_float32_rows_are_the_originals(ours: list[np.ndarray], truth: Encoded) -> None:
    assert_float32_equal(ours, truth.rows)


def test_every_block_is_the_originals(encoder: jaxenc.Encoder, items: list[np.ndarray], truth: Encoded) -> None:
    batch = encoder.pack([jaxenc.AudioItem(mel) for mel in items])
    _, captured = encoder.apply(encoder.params, batch, capture="all")
    for block, tokens in captured.items():
        assert_float32_equal(encoder.unpack_tokens(tokens, batch), [hidden[block + 1] for hidden in truth.hidden])


def test_bfloat16_is_as_good_and_the_thinker_alone_is_read(
    checkpoint: Checkpoint, original: Qwen25OmniAudio, items: list[np.ndarray], truth: Encoded, tmp_path: Path
) -> None:
    folder = checkpoint.write(tmp_path, layout="thinker", config="thinker")
    rows = encode(jaxenc.load(folder, tower="audio", dtype="bfloat16"), items)
    assert_bfloat16_as_good(rows, original.run(items, dtype="bfloat16").rows, truth.rows)


# Traps


def test_attention_stays_in_chunks(avoids: Callable[..., None]) -> None:
    avoids(windows=[(FRAMES[i] + 1) // 2 for i in LONG])


def test_convolutions_stay_in_chunks(avoids: Callable[..., None]) -> None:
    # of 81 frames the last chunk is one token, which makes no row, and attends to itself alone
    def mistake(tower: nn.Module) -> None:
        table = tower.positional_embedding
        table.positional_embedding = table.positional_embedding[: SIZES.positions].repeat(4, 1)
        tower.n_window = 10**4

    avoids(mistake, windows=[20, 20, 8, 20, 20, 1, 20, 20, 20])


def test_positions_start_again_in_every_chunk(original: Qwen25OmniAudio, ours: list[np.ndarray]) -> None:
    # the same forty frames twice: two chunks that nothing tells apart
    twice = np.tile(log_mel(40, bins=SIZES.mel), 2)
    first, second = np.split(original.run([twice]).rows[0], 2)
    assert max_error([second], [first]) < 1e-13
    assert_float32_equal([ours[1]], [first])


def test_position_frequencies_end_at_the_slowest(avoids: Callable[..., None]) -> None:
    def mistake(tower: nn.Module) -> None:
        table = tower.positional_embedding
        table.positional_embedding = whisper_sinusoids(table.length, SIZES.embed, divisor=SIZES.embed // 2)

    avoids(mistake)


def test_the_second_convolution_sees_zeros_after_an_odd_tail(
    original: Qwen25OmniAudio, items: list[np.ndarray], truth: Encoded, ours: list[np.ndarray]
) -> None:
    mistaken = original.run([np.pad(items[ODD_TAILS[0]], ((0, 0), (0, 1)))]).rows
    assert_avoided(ours[2:3], truth.rows[2:3], mistaken)


def test_an_odd_last_token_is_attended_to_but_makes_no_row(
    original: Qwen25OmniAudio, items: list[np.ndarray], truth: Encoded, ours: list[np.ndarray]
) -> None:
    assert [len(rows) for rows in ours] == [24, 10, 9, 20, 1, 30]
    assert_avoided(ours[2:3], truth.rows[2:3], original.run([items[2][:, :36]]).rows)


def test_tokens_are_averaged_before_the_norm(avoids: Callable[..., None]) -> None:
    def mistake(tower: nn.Module) -> None:
        norm, tower.ln_post = tower.ln_post, nn.Identity()
        tower.layers[-1].register_forward_hook(lambda _, __, out: (norm(out[0]),))

    avoids(mistake)


def test_convolutions_and_blocks_have_the_erf_gelu(
    avoids: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    avoids(lambda tower: use_activation(tower.layers, name="gelu_pytorch_tanh"))
    monkeypatch.setattr(nn.functional, "gelu", partial(nn.functional.gelu, approximate="tanh"))
    avoids(lambda tower: None)


def test_the_last_norms_epsilon_is_1e_5(tmp_path: Path) -> None:
    # positions enter with a standard deviation of 0.7 whatever the weights: of a clip of 3 frames, which is two tokens,
    # the first attention's bias takes away the mean of them, and what is left of that is what the last norm sees
    checkpoint = qwen2_5_omni_audio(SIZES, scales={"conv2": 2e-3, "out_proj": 2e-3, "fc2": 2e-3})
    mean = np.asarray(whisper_sinusoids(2, SIZES.embed).mean(0), np.float32)
    for tensors in checkpoint.tensors.values():
        bias = next(name for name in tensors if name.endswith("layers.0.self_attn.out_proj.bias"))
        tensors[bias][:] = -mean
    original, item = Qwen25OmniAudio(checkpoint), log_mel(3, bins=SIZES.mel)
    truth = original.run([item]).rows
    rows = encode(jaxenc.load(checkpoint.write(tmp_path, dtype="float32"), dtype="float32"), [item])
    mistaken = original.run([item], alter=lambda tower: use_epsilon(tower.ln_post, eps=1e-6)).rows
    # tokens are a hundredth of what they are made of: float32 has two digits less for them
    assert_avoided(rows, truth, mistaken, tolerance=1e-4)


# Lengths


def test_rows_are_those_that_the_original_keeps(encoder: jaxenc.Encoder, original: Qwen25OmniAudio) -> None:
    frames = range(3, 201)
    items = [jaxenc.AudioItem(np.zeros((SIZES.mel, n), np.float32)) for n in frames]
    assert list(map(encoder.config.output_rows, items)) == original.rows(frames)
    with pytest.raises(jaxenc.InputError, match="2 frames make no row"):
        encode(encoder, [np.zeros((SIZES.mel, 2), np.float32)])
