"""The Qwen and GLM vision towers against transformers', on the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax
import numpy as np
import pytest
from torch import nn
from transformers.activations import ACT2FN

import jaxenc
from jaxenc.layers.parameters import flatten
from tests.parity.checkpoints import MAKERS, Checkpoint, image_patches
from tests.parity.compare import (
    assert_avoided,
    assert_bfloat16_as_good,
    assert_float32_equal,
    max_error,
)
from tests.parity.gradients import assert_slopes_equal, slopes
from tests.parity.qwen_references import Grid, Qwen, QwenAlter
from tests.parity.references import Encoded, resample_bicubic, resample_taps

FAMILIES = ["qwen3_vl", "qwen3_omni_vision", "qwen2_vl", "qwen2_5_vl", "glm4v"]
every_family = pytest.mark.parametrize("family", FAMILIES)
# Qwen3-Omni's is Qwen3-VL's under other names
every_other = pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl", "qwen2_5_vl", "glm4v"])

SQUARE, WIDE, CLIP, SMALLEST_CLIP, LARGE, TALL = range(6)
# the sides of windows are 8: one whole, a part of one, parts at two edges, and several with parts at all edges
GRIDS: list[Grid] = [(1, 8, 8), (1, 4, 6), (3, 6, 10), (2, 2, 2), (1, 20, 14), (1, 26, 4)]
SEVERAL_WINDOWS = [CLIP, LARGE, TALL]
Items = list[tuple[np.ndarray, Grid]]


@dataclass(frozen=True)
class Case:
    """One family's original, its truth, and our rows."""

    checkpoint: Checkpoint
    folder: Path
    original: Qwen
    items: Items
    truth: Encoded
    encoder: jaxenc.Encoder
    ours: list[np.ndarray]


def encode(encoder: jaxenc.Encoder, items: Items) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.VisionItem(patches, grid) for patches, grid in items])


def load(folder: Path, dtype: str = "float32") -> jaxenc.Encoder:
    return jaxenc.load(folder, tower="vision", dtype=dtype)


@cache
def case(family: str) -> Case:
    checkpoint = MAKERS[family]()
    original = Qwen(family, checkpoint)
    items = [(image_patches(grid, patch=4, frames=2), grid) for grid in GRIDS]
    folder = checkpoint.write(Path(mkdtemp()))
    encoder = load(folder)
    return Case(checkpoint, folder, original, items, original.run(items), encoder, encode(encoder, items))


def avoids(family: str, mistake: QwenAlter, on: list[int]) -> None:
    """Asserts that the chosen items are right, and that each of them would show the mistake."""
    at = case(family)
    mistaken = at.original.run([at.items[i] for i in on], alter=mistake).rows
    assert_avoided([at.ours[i] for i in on], [at.truth.rows[i] for i in on], mistaken)


EVERY = list(range(len(GRIDS)))


# Numbers


@every_family
def test_truth_is_what_transformers_computes_in_float32(family: str) -> None:
    at = case(family)
    assert max_error(at.original.run(at.items, dtype="float32").rows, at.truth.rows) < 4e-6


@every_family
def test_float32_rows_are_the_originals(family: str) -> None:
    assert_float32_equal(case(family).ours, case(family).truth.rows)


@every_family
def test_every_block_is_the_originals(family: str) -> None:
    at, chosen = case(family), [SQUARE, WIDE, CLIP, LARGE]
    batch = at.encoder.pack([jaxenc.VisionItem(*at.items[i]) for i in chosen])
    _, captured = at.encoder.apply(at.encoder.params, batch, capture="all")
    assert sorted(captured) == [0, 1, 2]
    for block, tokens in captured.items():
        expected = [at.truth.hidden[i][block + 1] for i in chosen]
        assert_float32_equal(at.encoder.unpack_tokens(tokens, batch), expected)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "glm4v"])
def test_bfloat16_is_as_good_as_the_originals(family: str) -> None:
    at = case(family)
    rows = encode(load(at.folder, "bfloat16"), at.items)
    assert_bfloat16_as_good(rows, at.original.run(at.items, dtype="bfloat16").rows, at.truth.rows)


@every_other
def test_gradients_are_the_originals_and_go_back_to_its_names(family: str) -> None:
    at, rng = case(family), np.random.default_rng(5)
    weights = [rng.standard_normal(rows.shape) for rows in at.truth.rows]
    tensors = at.checkpoint.tensors["original"]
    mapping = at.encoder.config.mappings()["original"].located(tensors)
    ours = slopes(at.encoder, [jaxenc.VisionItem(*item) for item in at.items], weights)
    named = dict(mapping.export(flatten(jax.tree.map(np.asarray, ours))))
    assert named.keys() == tensors.keys()
    assert_slopes_equal(named, at.original.gradients(at.items, weights))


@every_family
def test_every_prefix_and_config_gives_the_same_parameters(family: str, tmp_path: Path) -> None:
    at = case(family)
    folder = at.checkpoint.write(tmp_path, layout="model", config="tower", dtype="float32", shards=1)
    params = load(folder).params
    assert same_tree(params, at.encoder.params)


def same_tree(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tree(a[key], b[key]) for key in a)
    return np.array_equal(a, b)


# Traps


@every_other
def test_rows_turn_the_first_half_of_the_rotary_pairs(family: str) -> None:
    avoids(family, QwenAlter(rotary="wh"), on=EVERY)


@every_other
def test_rotary_pairs_are_halves(family: str) -> None:
    avoids(family, QwenAlter(rotary_pairs="adjacent"), on=EVERY)


@every_other
def test_pairs_of_frames_do_not_attend_to_each_other(family: str) -> None:
    avoids(family, QwenAlter(segments="clip"), on=[CLIP, SMALLEST_CLIP])


@every_other
def test_items_do_not_attend_to_each_other(family: str) -> None:
    avoids(family, QwenAlter(segments="call"), on=EVERY)


@every_other
def test_every_pair_of_frames_has_rows_of_its_own(family: str) -> None:
    width = 120 if family == "qwen3_vl" else 40
    assert [rows.shape for rows in case(family).ours] == [(n, width) for n in (16, 6, 45, 2, 70, 26)]


def test_positions_are_resampled_from_corner_to_corner() -> None:
    avoids("qwen3_vl", QwenAlter(align_corners=False), on=EVERY)


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_positions_are_in_the_order_of_the_patches(family: str) -> None:
    avoids(family, QwenAlter(positions="rows"), on=[SQUARE, WIDE, CLIP, LARGE, TALL])


@pytest.mark.parametrize(
    ("resample", "on"),
    [
        (partial(resample_taps, align_corners=True), EVERY),
        (partial(resample_taps, a=-0.5), EVERY),
        # no tap of the smallest grid's is beyond the table
        (partial(resample_taps, border="renormalise"), [SQUARE, WIDE, CLIP, LARGE, TALL]),
        (partial(resample_bicubic, antialias=True), [SQUARE, WIDE, CLIP, SMALLEST_CLIP, TALL]),
    ],
    ids=["corners", "a", "border", "antialias"],
)
def test_glms_positions_are_resampled_by_cubics(resample: Callable[..., Any], on: list[int]) -> None:
    avoids("glm4v", QwenAlter(resample=resample), on=on)


def test_glms_patches_are_normalised_before_positions_are_added() -> None:
    def mistake(tower: Any) -> None:
        norm, embeddings = tower.post_conv_layernorm, tower.embeddings
        tower.post_conv_layernorm = nn.Identity()
        embeddings.forward = lambda *given: norm(type(embeddings).forward(embeddings, *given))

    avoids("glm4v", QwenAlter(model=mistake), on=EVERY)


def test_glm_merges_patches_row_by_row() -> None:
    def mistake(tower: Any) -> None:
        tower.downsample.weight.data = tower.downsample.weight.data.transpose(2, 3)

    avoids("glm4v", QwenAlter(model=mistake), on=EVERY)


def test_glms_merger_has_silu_in_its_mlp() -> None:
    def mistake(tower: Any) -> None:
        tower.merger.act_fn = nn.GELU()

    avoids("glm4v", QwenAlter(model=mistake), on=EVERY)


def test_deepstack_merges_what_leaves_the_named_blocks() -> None:
    def mistake(tower: Any) -> None:
        tower.deepstack_visual_indexes = [1, 2]

    avoids("qwen3_vl", QwenAlter(model=mistake), on=EVERY)


def test_deepstack_follows_the_merged_rows_in_the_order_of_its_blocks() -> None:
    at = case("qwen3_vl")
    turned = [np.roll(rows, 40, axis=1) for rows in at.truth.rows]
    assert_avoided(at.ours, at.truth.rows, turned)


@every_other
def test_blocks_have_their_own_activation(family: str) -> None:
    def mistake(tower: Any) -> None:
        for block in tower.blocks:
            attribute = "act_fn" if hasattr(block.mlp, "act_fn") else "act"
            setattr(block.mlp, attribute, ACT2FN["gelu"])

    avoids(family, QwenAlter(model=mistake), on=EVERY)


@every_other
def test_mergers_have_the_erf_gelu(family: str) -> None:
    def mistake(tower: Any) -> None:
        if hasattr(tower.merger, "mlp"):
            tower.merger.mlp[1] = nn.GELU("tanh")
        else:
            setattr(tower.merger, "act1" if family == "glm4v" else "act_fn", nn.GELU("tanh"))

    avoids(family, QwenAlter(model=mistake), on=EVERY)


@pytest.mark.parametrize(("family", "where"), [("qwen2_5_vl", "blocks"), ("glm4v", "blocks"), ("glm4v", "merger")])
def test_the_gate_is_what_the_activation_is_applied_to(family: str, where: str) -> None:
    def mistake(tower: Any) -> None:
        for mlp in [block.mlp for block in tower.blocks] if where == "blocks" else [tower.merger]:
            mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj

    avoids(family, QwenAlter(model=mistake), on=EVERY)


@pytest.mark.parametrize("whole", [[], [0], [0, 1, 2]], ids=["none", "another", "all"])
def test_blocks_attend_in_windows_but_for_the_named_ones(whole: list[int]) -> None:
    def mistake(tower: Any) -> None:
        tower.fullatt_block_indexes = whole

    avoids("qwen2_5_vl", QwenAlter(model=mistake), on=SEVERAL_WINDOWS)


@pytest.mark.parametrize("pixels", [16, 64])
def test_windows_are_as_wide_as_the_config_says(pixels: int) -> None:
    def mistake(tower: Any) -> None:
        tower.window_size = pixels

    avoids("qwen2_5_vl", QwenAlter(model=mistake), on=[LARGE, TALL])


def test_rows_come_out_in_merge_order_and_not_window_by_window() -> None:
    at = case("qwen2_5_vl")
    rows = at.truth.rows[LARGE]
    columns = np.arange(70).reshape(10, 7)
    by_window = np.concatenate([columns[y : y + 4, x : x + 4].ravel() for y in (0, 4, 8) for x in (0, 4)])
    assert_avoided([at.ours[LARGE]], [rows], [rows[by_window]])


FAINT = (
    *("patch_embed", "pos_embed", "position_embedding", "post_conv_layernorm", "downsample"),
    *(".attn.proj", ".mlp.fc2", ".mlp.linear_fc2", ".mlp.down_proj"),
)


@every_other
def test_every_norm_has_its_epsilon(family: str, tmp_path: Path) -> None:
    # activations of a standard deviation of about sqrt(1e-6) reach every norm
    checkpoint = MAKERS[family](scales=dict.fromkeys(FAINT, 1e-3))
    original, item = Qwen(family, checkpoint), (image_patches((1, 6, 8), patch=4, frames=2), (1, 6, 8))
    rows, truth = encode(load(checkpoint.write(tmp_path)), [item]), original.run([item]).rows
    parts: list[Callable[[Any], Any]] = [
        lambda tower: [block.norm1 for block in tower.blocks],
        lambda tower: [block.norm2 for block in tower.blocks],
        lambda tower: [tower.merger],
    ]
    if family == "qwen3_vl":
        parts.append(lambda tower: [tower.deepstack_merger_list])
    if family == "glm4v":
        parts += [lambda tower: [tower.post_conv_layernorm], lambda tower: [tower.post_layernorm]]
    for part in parts:
        mistake = QwenAlter(model=partial(_use_epsilon, part, 1e-6 if family == "glm4v" else 1e-5))
        assert_avoided(rows, truth, original.run([item], alter=mistake).rows)


def _use_epsilon(part: Callable[[Any], Any], eps: float, tower: Any) -> None:
    for module in part(tower):
        for norm in module.modules():
            for name in ("eps", "variance_epsilon"):
                if hasattr(norm, name):
                    setattr(norm, name, eps)
