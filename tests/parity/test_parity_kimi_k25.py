"""Kimi-K2.5's vision tower and projector against transformers', on the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Kimi_K25Config, Kimi_K25Model

import jaxenc
from tests.parity.checkpoints import Checkpoint, KimiSizes, image_patches, kimi_k25, write_checkpoint
from tests.parity.compare import (
    assert_avoided,
    assert_bfloat16_as_good,
    assert_float32_equal,
    max_error,
)
from tests.parity.references import (
    Encoded,
    Grid,
    Kimi,
    KimiAlter,
    resample_bicubic,
    resample_taps,
    temporal_sinusoids,
    use_activation,
    use_epsilon,
)

SMALL, WIDE, CLIP, SHORT_CLIP, DOWN, SMALLEST_CLIP, UP = range(7)
GRIDS: list[Grid] = [(1, 8, 8), (1, 4, 6), (4, 6, 10), (3, 12, 4), (1, 20, 14), (2, 2, 2), (1, 68, 6)]
IMAGES, CLIPS = [SMALL, WIDE, DOWN, UP], [CLIP, SHORT_CLIP, SMALLEST_CLIP]
Items = list[tuple[np.ndarray, Grid]]


def encode(encoder: jaxenc.Encoder, items: Items) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.VisionItem(patches, grid) for patches, grid in items])


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return kimi_k25()


@pytest.fixture(scope="module")
def original(checkpoint: Checkpoint) -> Kimi:
    return Kimi(checkpoint)


@pytest.fixture(scope="module")
def items() -> Items:
    return [(image_patches(grid), grid) for grid in GRIDS]


@pytest.fixture(scope="module")
def truth(original: Kimi, items: Items) -> Encoded:
    return original.run(items)


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("kimi_k25"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> jaxenc.Encoder:
    return jaxenc.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def ours(encoder: jaxenc.Encoder, items: Items) -> list[np.ndarray]:
    return encode(encoder, items)


@pytest.fixture(scope="module")
def avoids(original: Kimi, items: Items, truth: Encoded, ours: list[np.ndarray]) -> Callable[..., None]:
    """Asserts that the chosen items are right, and that each of them would show the mistake."""

    def check(mistake: KimiAlter, on: list[int]) -> None:
        mistaken = original.run([items[i] for i in on], alter=mistake).rows
        assert_avoided([ours[i] for i in on], [truth.rows[i] for i in on], mistaken)

    return check


# The truth itself


def test_truth_is_what_transformers_computes_in_float32(original: Kimi, items: Items, truth: Encoded) -> None:
    assert max_error(original.run(items, dtype="float32").rows, truth.rows) < 3e-6


def test_transformers_converts_the_published_layout_as_the_checkpoint_does(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, checkpoint.tensors["original"], checkpoint.configs["transformers"], dtype="float32")
    model = Kimi_K25Model.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = {f"model.{name}": value.numpy() for name, value in model.state_dict().items()}
    for name, value in checkpoint.tensors["transformers"].items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)


def test_transformers_config_is_one_that_transformers_reads(checkpoint: Checkpoint) -> None:
    config = checkpoint.configs["transformers"]
    read = Kimi_K25Config(**config).to_dict()
    assert {key: read["vision_config"][key] for key in config["vision_config"]} == config["vision_config"]
    assert read["projection_layer_norm_eps"] == config["projection_layer_norm_eps"]


# Numbers


def test_float32_rows_are_the_originals(ours: list[np.ndarray], truth: Encoded) -> None:
    assert_float32_equal(ours, truth.rows)


def test_every_block_is_the_originals(encoder: jaxenc.Encoder, items: Items, truth: Encoded) -> None:
    chosen = [SMALL, WIDE, SHORT_CLIP, SMALLEST_CLIP]
    batch = encoder.pack([jaxenc.VisionItem(*items[i]) for i in chosen])
    _, captured = encoder.apply(encoder.params, batch, capture="all")
    assert sorted(captured) == [0, 1]
    for block, tokens in captured.items():
        assert_float32_equal(encoder.unpack_tokens(tokens, batch), [truth.hidden[i][block + 1] for i in chosen])


def test_bfloat16_is_as_good_as_the_originals(folder: Path, original: Kimi, items: Items, truth: Encoded) -> None:
    rows = encode(jaxenc.load(folder, dtype="bfloat16"), items)
    assert_bfloat16_as_good(rows, original.run(items, dtype="bfloat16").rows, truth.rows)


# Every published spelling


@pytest.mark.parametrize(
    ("layout", "config", "dtype", "shards"),
    [
        ("original", "plain", "bfloat16", 3),
        ("original", "transformers", "float32", 1),
        ("transformers", "transformers", "bfloat16", 3),
        ("transformers", "original", "float32", 2),
    ],
)
def test_every_layout_and_config_gives_the_same_rows(
    checkpoint: Checkpoint,
    items: Items,
    truth: Encoded,
    tmp_path: Path,
    layout: str,
    config: str,
    dtype: str,
    shards: int,
) -> None:
    folder = checkpoint.write(tmp_path, layout=layout, config=config, dtype=dtype, shards=shards)
    chosen = [SMALL, SHORT_CLIP]
    rows = encode(jaxenc.load(folder, dtype="float32"), [items[i] for i in chosen])
    assert_float32_equal(rows, [truth.rows[i] for i in chosen])


def test_shards_of_the_language_model_need_not_be_there(
    checkpoint: Checkpoint, items: Items, truth: Encoded, tmp_path: Path
) -> None:
    checkpoint.write(tmp_path, shards=8)
    (tmp_path / "model-00001-of-00008.safetensors").unlink()
    rows = encode(jaxenc.load(tmp_path, dtype="float32"), [items[SMALL]])
    assert_float32_equal(rows, [truth.rows[SMALL]])


def test_position_table_need_not_be_square(tmp_path: Path) -> None:
    checkpoint = kimi_k25(KimiSizes(layers=1, table=(10, 14)), seed=1)
    item = (image_patches((1, 8, 6)), (1, 8, 6))
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), [item])
    assert_float32_equal(rows, Kimi(checkpoint).run([item]).rows)


def test_position_table_of_the_grids_own_size_is_added_as_it_is(tmp_path: Path) -> None:
    checkpoint = kimi_k25(KimiSizes(layers=1, table=(8, 8)), seed=2)
    item = (image_patches((1, 8, 8)), (1, 8, 8))
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), [item])
    assert_float32_equal(rows, Kimi(checkpoint).run([item]).rows)


# Traps


def test_positions_are_resampled_with_torchs_cubic_kernel(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(resample=partial(resample_taps, a=-0.5)), on=IMAGES + CLIPS)


def test_positions_are_resampled_without_antialiasing(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(resample=partial(resample_bicubic, antialias=True)), on=IMAGES + CLIPS)


def test_positions_are_resampled_on_half_pixel_centres(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(resample=partial(resample_taps, align_corners=True)), on=IMAGES + CLIPS)


def test_positions_are_resampled_with_taps_clamped_at_the_border(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(resample=partial(resample_taps, border="renormalise")), on=[UP])


def test_columns_turn_before_rows_in_the_rotary_pairs(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(rotary="yx"), on=IMAGES + CLIPS)


def test_rotary_pairs_are_adjacent_channels(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(rotary_pairs="halves"), on=IMAGES + CLIPS)


def test_images_get_no_temporal_embedding(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(temporal=partial(temporal_sinusoids, single=True)), on=IMAGES)


def test_frames_of_clips_get_a_temporal_embedding(avoids: Callable[..., None]) -> None:
    nothing = KimiAlter(temporal=lambda frames, embed: torch.zeros(frames, embed, dtype=torch.float64))
    avoids(nothing, on=CLIPS)


def test_temporal_frequencies_are_over_half_the_width(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(temporal=partial(temporal_sinusoids, divisor=KimiSizes().embed // 2 - 1)), on=CLIPS)


def test_a_clip_is_one_segment(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(segments="frame"), on=CLIPS)


def test_items_do_not_attend_to_each_other(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(segments="call"), on=IMAGES + CLIPS)


def test_rows_are_a_quarter_of_a_frames_patches_whatever_the_frames(ours: list[np.ndarray]) -> None:
    assert [len(rows) for rows in ours] == [16, 6, 15, 12, 70, 1, 102]


def test_frames_are_averaged(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(pool="first"), on=CLIPS)


def test_patches_of_a_row_merge_in_raster_order(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(merge="columns"), on=IMAGES + CLIPS)


def test_tower_has_the_tanh_gelu(avoids: Callable[..., None]) -> None:
    avoids(KimiAlter(model=lambda tower, _: use_activation(tower, name="gelu")), on=IMAGES + CLIPS)


def test_projector_has_the_erf_gelu(avoids: Callable[..., None]) -> None:
    def mistake(_: nn.Module, projector: nn.Module) -> None:
        projector.act = nn.GELU("tanh")

    avoids(KimiAlter(model=mistake), on=IMAGES + CLIPS)


def test_every_norms_epsilon_is_1e_5(tmp_path: Path) -> None:
    # Activations of a standard deviation of about sqrt(1e-5) reach every norm.
    faint = {"patch_embed": 3e-3, "wo.": 3e-3, "mlp.fc1": 3e-3, "final_layernorm": 3e-3}
    checkpoint = kimi_k25(scales=faint)
    original, item = Kimi(checkpoint), (image_patches((1, 6, 8)), (1, 6, 8))
    rows, truth = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), [item]), original.run([item]).rows
    for part in (
        lambda tower, _: [block.norm1 for block in tower.layers],
        lambda tower, _: [block.norm2 for block in tower.layers],
        lambda tower, _: [tower.final_layernorm],
        lambda _, projector: [projector.pre_norm],
    ):
        mistake = KimiAlter(model=lambda *modules, part=part: use_epsilon(*part(*modules), eps=1e-6))
        assert_avoided(rows, truth, original.run([item], alter=mistake).rows)


def test_projectors_epsilon_is_the_configs(tmp_path: Path) -> None:
    checkpoint = kimi_k25(KimiSizes(layers=1, projector_eps=1e-2))
    original, item = Kimi(checkpoint), (image_patches((1, 4, 4)), (1, 4, 4))
    truth = original.run([item]).rows
    mistake = KimiAlter(model=lambda _, projector: use_epsilon(projector, eps=1e-5))
    mistaken = original.run([item], alter=mistake).rows
    for config in ("original", "transformers"):
        folder = checkpoint.write(tmp_path / config, config=config)
        assert_avoided(encode(jaxenc.load(folder, dtype="float32"), [item]), truth, mistaken)
