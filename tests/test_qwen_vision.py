"""The Qwen and GLM vision towers without PyTorch: configs, how much there is, and that meshes change nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest

import jaxenc
from jaxenc import ConfigError, InputError
from jaxenc.layers.parameters import declared, flatten
from jaxenc.models import (
    FAMILIES,
    abstract_module,
    glm4v,
    published_configs,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_omni_vision,
    qwen3_vl,
)
from jaxenc.models.qwen_vision import windows_of
from jaxenc.packing import Budget, Placed
from tests import equality
from tests.parity.checkpoints import MAKERS, QwenSizes, image_patches

NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_vision", "glm4v"]
every_family = pytest.mark.parametrize("family", NAMES)

# --- config.json

QWEN2 = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
}
QWEN2_5 = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "temporal_patch_size": 2,
}
QWEN3 = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# GLM-4.1V-9B-Thinking's; GLM-4.6V's has another width of the merger
GLM = {
    "hidden_size": 1536,
    "depth": 24,
    "num_heads": 12,
    "attention_bias": False,
    "intermediate_size": 13696,
    "hidden_act": "silu",
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.02,
    "image_size": 336,
    "patch_size": 14,
    "out_hidden_size": 4096,
    "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
GLM_MOE = GLM | {"in_channels": 3, "intermediate_size": 10944, "model_type": "glm4v_moe"}
# transformers 5's
GLM_NATIVE = GLM | {"model_type": "glm4v_vision", "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
OMNI = QWEN3 | {"out_hidden_size": 2048}
PUBLISHED = {
    "qwen2_vl": ({"model_type": "qwen2_vl", "hidden_size": 3584, "vision_config": QWEN2}, qwen2_vl.Config()),
    "qwen2_vl tower": ({"model_type": "qwen2_vl", **QWEN2}, qwen2_vl.Config()),
    "qwen2_5_vl": ({"model_type": "qwen2_5_vl", "hidden_size": 3584, "vision_config": QWEN2_5}, qwen2_5_vl.Config()),
    "qwen3_vl": ({"model_type": "qwen3_vl", "text_config": {}, "vision_config": QWEN3}, qwen3_vl.Config()),
    "qwen3_vl_moe": ({"model_type": "qwen3_vl_moe", "vision_config": OMNI}, qwen3_vl.VARIANTS["30b-a3b"]),
    "qwen3_5": (
        {"model_type": "qwen3_5", "vision_config": QWEN3 | {"deepstack_visual_indexes": []}},
        qwen3_vl.Config(deepstack=()),
    ),
    "omni": (
        {"model_type": "qwen3_omni_moe", "thinker_config": {"vision_config": OMNI}, "talker_config": {}},
        qwen3_omni_vision.Config(),
    ),
    "omni thinker": ({"model_type": "qwen3_omni_moe_thinker", "vision_config": OMNI}, qwen3_omni_vision.Config()),
    "omni tower": ({"model_type": "qwen3_omni_moe_vision_encoder", **OMNI}, qwen3_omni_vision.Config()),
    "glm4v": ({"model_type": "glm4v", "hidden_size": 4096, "vision_config": GLM}, glm4v.Config()),
    "glm4v_moe": ({"model_type": "glm4v_moe", "text_config": {}, "vision_config": GLM_MOE}, glm4v.VARIANTS["106b"]),
    "glm46v": ({"model_type": "glm46v", "text_config": {}, "vision_config": GLM_NATIVE}, glm4v.Config()),
    "glm4v tower": (GLM_NATIVE, glm4v.Config()),
    "glm4v_moe tower": (GLM_MOE | {"model_type": "glm4v_moe_vision"}, glm4v.VARIANTS["106b"]),
}


@pytest.mark.parametrize(("config", "expected"), PUBLISHED.values(), ids=list(PUBLISHED))
def test_published_configs_give_the_published_towers(config, expected):
    family = FAMILIES[expected.family]
    assert family.Config.from_hf(config) == expected
    assert config["model_type"] in family.Config.model_types


def test_an_omni_config_without_vision_has_none():
    assert qwen3_omni_vision.Config.from_hf({"thinker_config": {"audio_config": {}}}) is None


def test_both_towers_of_an_omni_config_are_found():
    whole = MAKERS["qwen3_omni_vision"]().configs["original"]
    found = published_configs(whole, name="config.json")
    assert [config.family for config in found] == ["qwen3_omni_vision", "qwen3_omni_audio"]


@pytest.mark.parametrize(
    ("family", "config", "says"),
    [
        ("qwen2_vl", QWEN2 | {"hidden_act": "gelu"}, "hidden_act is 'gelu', this encoder computes 'quick_gelu'"),
        ("qwen2_5_vl", QWEN2_5 | {"temporal_patch_size": 1}, "temporal_patch_size is 1"),
        ("qwen2_5_vl", QWEN2_5 | {"num_heads": 7}, "1280 over 7 heads"),
        ("qwen2_5_vl", QWEN2_5 | {"fullatt_block_indexes": [7, 32]}, "no block 32"),
        ("qwen2_5_vl", QWEN2_5 | {"window_size": 14}, "window_size is 14"),
        ("qwen3_vl", QWEN3 | {"num_position_embeddings": 2305}, "2305; a square table"),
        ("qwen3_vl", {key: value for key, value in QWEN3.items() if key != "depth"}, "none of depth"),
        ("glm4v", GLM | {"attention_bias": True}, "attention_bias is True, this encoder computes False"),
        ("glm4v", GLM | {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, this encoder computes 1e-05"),
        ("glm4v", {key: value for key, value in GLM.items() if key != "image_size"}, "none of image_size"),
    ],
)
def test_a_config_of_another_function_is_refused(family, config, says):
    with pytest.raises(ConfigError, match=says):
        FAMILIES[family].Config.from_hf(config)


def test_glms_sizes_that_are_not_the_defaults_are_read():
    # every size differs from its default, so that one that is not read shows
    sizes = {"depth": 3, "hidden_size": 96, "num_heads": 8, "intermediate_size": 200, "image_size": 128}
    more = {"patch_size": 16, "out_hidden_size": 40, "spatial_merge_size": 4, "rope_parameters": {"rope_theta": 500.0}}
    made = glm4v.Config.from_hf(sizes | more)
    # the blocks' MLP is as wide as the language model, and what is called intermediate is in the merger
    assert made == glm4v.Config(3, 96, 8, mlp=40, out=40, patch=16, merge=4, theta=500.0, positions=8, merger_mlp=200)


def test_glm_has_the_published_number_of_parameters():
    found = declared(abstract_module(glm4v.Config(), dtype="bfloat16"))
    stem = 1536 * 1176 + 1536 + 1536 + 24 * 24 * 1536
    blocks = 24 * (1536 + 3 * 1536 * 1536 + 1536 * 1536 + 1536 + 3 * 4096 * 1536)
    merger = 1536 + 4096 * 6144 + 4096 + 4096 * 4096 + 2 * 4096 + 3 * 13696 * 4096
    assert sum(math.prod(parameter.shape) for parameter in found.values()) == stem + blocks + merger


# --- how much there is


@every_family
@pytest.mark.parametrize("devices", [3, 6, 8, 32])
def test_every_device_has_a_fair_share_of_the_work(family, devices):
    for variant in FAMILIES[family].VARIANTS:
        plan = jaxenc.plan(f"{family}:{variant}", mesh_shape={"data": 1, "model": devices}, batch=devices)
        assert plan.flops_ratio <= 1.10, variant


def test_windows_of_a_frame_are_ragged_at_its_edges():
    order, window = windows_of((20, 14), merge=2, side=8)
    # 10 x 7 merged patches in windows of 4 x 4
    assert np.bincount(window).tolist() == [64, 48, 64, 48, 32, 24]
    assert order[:64:4].tolist() == [4 * (7 * y + x) for y in range(4) for x in range(4)]
    assert sorted(order.tolist()) == list(range(280))
    order, window = windows_of((6, 10), merge=2, side=0)
    assert order.tolist() == list(range(60))
    assert not window.any()


def test_windows_meet_their_own_block_and_its_neighbours_at_most():
    config, grids = replace(qwen2_5_vl.Config(), patch=4, window_pixels=32), [(1, 46, 34), (2, 20, 14), (1, 10, 10)]
    items = [jaxenc.VisionItem(np.zeros((math.prod(grid), 96), np.float32), grid) for grid in grids]
    placed, offset = [], 0
    for index, item in enumerate(items):
        for piece, size in enumerate(config.pieces(item)):
            placed.append(Placed(index, piece, 0, offset, size))
            offset += size
    inputs = config.layout(items, placed, Budget(4096, 1), {}).inputs
    met = np.diff(inputs["window_ranges"][0])
    assert met.max() <= 3
    # those of whole frames: 7 blocks, of which the last is shared, and so on
    assert met.sum() < np.diff(inputs["ranges"][0]).sum() / 2


def test_windows_make_attention_cheaper_than_whole_frames():
    windowed = qwen2_5_vl.Config().workload([4096]).groups[0].flops[0]
    whole = qwen2_5_vl.Config(window_pixels=0).workload([4096]).groups[0].flops[0]
    # 28 of 32 layers make 64 scores a token where 4096 were
    assert whole - windowed == pytest.approx(28 * 4 * 4096 * (4096 - 64) * 1280)


@pytest.mark.parametrize(
    ("grid", "features", "says"),
    [((1, 4, 6), 95, "95 values, expected 96"), ((1, 3, 6), 96, "multiples of 2"), ((1, 2, 4096), 96, "below 4096")],
)
def test_items_of_another_shape_are_refused(grid, features, says):
    config = replace(qwen3_vl.Config(), patch=4)
    with pytest.raises(InputError, match=says):
        config.check(jaxenc.VisionItem(np.zeros((math.prod(grid), features), np.float32), grid, name="picture"))


# --- checkpoints


@every_family
def test_exported_tensors_are_the_checkpoints(family, tmp_path):
    checkpoint = MAKERS[family]()
    encoder = jaxenc.load(checkpoint.write(tmp_path / "published"), tower="vision", dtype="float32")
    mapping = encoder.config.mappings()["original"].located(checkpoint.tensors["original"])
    exported = dict(mapping.export(flatten(encoder.params)))
    assert exported.keys() == checkpoint.tensors["original"].keys()
    for name, value in checkpoint.tensors["original"].items():
        np.testing.assert_array_equal(exported[name], value, err_msg=name)
    encoder.save(tmp_path / "converted")
    assert jaxenc.load(tmp_path / "converted").config == encoder.config


# --- meshes

GRIDS = [(1, 8, 8), (3, 4, 6), (1, 10, 14), (2, 2, 2), (1, 2, 20)]
SIZES = {"qwen2_vl": QwenSizes(2, heads=16, head_dim=4, mlp=128), "qwen2_5_vl": QwenSizes(3, heads=16, head_dim=4)}
SIZES["qwen3_vl"] = QwenSizes(2, heads=16, head_dim=4, deepstack=(0, 1))
# 12 heads on 8 devices: today's engines replicate, or refuse
SIZES["glm4v"] = QwenSizes(2, heads=12, head_dim=4, mlp=96, text=48)
CASES = [("qwen3_vl", (2, 4)), ("qwen2_5_vl", (1, 8)), ("qwen2_5_vl", (2, 4)), ("qwen2_vl", (1, 3))]
CASES += [("glm4v", (1, 8)), ("glm4v", (2, 4)), ("glm4v", (1, 5))]


@pytest.fixture(scope="module")
def pictures():
    return [jaxenc.VisionItem(image_patches(grid, patch=4, frames=2), grid, name=str(grid)) for grid in GRIDS]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, pictures):
    """Of each family a folder, and rows and gradients on one device."""

    def of(family):
        folder = MAKERS[family](SIZES[family]).write(tmp_path_factory.mktemp(family))
        return folder, equality.rows_and_gradients(jaxenc.load(folder, dtype="float32"), pictures)

    return {family: of(family) for family in SIZES}


@pytest.mark.parametrize(("family", "shape"), CASES, ids=str)
def test_rows_and_gradients_are_those_of_one_device(alone, pictures, family, shape):
    folder, (rows, slopes) = alone[family]
    mesh = jaxenc.make_mesh(data=shape[0], model=shape[1])
    encoder = jaxenc.load(folder, mesh=mesh, dtype="float32")
    # whole pictures and spread ones in one batch, where there are several rows
    *_, (_, single) = equality.layouts(encoder, 320, 64)
    together, gradients = equality.rows_and_gradients(single, pictures)
    for item, expected, got in zip(pictures, rows, together, strict=True):
        equality.assert_same(got, expected, item.name)
    assert gradients.keys() == slopes.keys()
    for path, expected in slopes.items():
        got = np.asarray(gradients[path])[tuple(slice(size) for size in expected.shape)]
        assert np.isfinite(got).all()
        equality.assert_same(got, np.asarray(expected), path)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "glm4v"])
def test_spread_over_all_rows_nothing_changes(alone, pictures, family):
    folder, (rows, _) = alone[family]
    encoder = jaxenc.load(folder, mesh=jaxenc.make_mesh(data=2, model=4), dtype="float32", strategy="data")
    for expected, got in zip(rows, encoder.encode_items(pictures, layout="length"), strict=True):
        equality.assert_same(got, expected, family)


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_a_video_is_what_its_pairs_of_frames_are(alone, pictures, family):
    encoder = jaxenc.load(alone[family][0], dtype="float32")
    clip = pictures[1]
    pairs = [jaxenc.VisionItem(patches, (1, *clip.grid[1:])) for patches in np.split(clip.patches, clip.grid[0])]
    equality.assert_same(np.concatenate(encoder.encode_items(pairs)), encoder.encode_items([clip])[0], clip.name)


def test_a_large_batch_is_the_same_on_eight_devices():
    # on several devices Eigen's products spoil a block of the merger's rows here
    config = replace(qwen2_vl.Config(), layers=1, embed=192, heads=16, mlp=384, patch=4, out=40)
    item = jaxenc.VisionItem(image_patches((2, 56, 70), patch=4, frames=2), (2, 56, 70))
    meshes = (jaxenc.make_mesh(data=1, model=devices) for devices in (1, 8))
    one, eight = (
        jaxenc.from_config(config, mesh=mesh, dtype="float32", budgets=[Budget(16384, 1)]).encode_items([item])[0]
        for mesh in meshes
    )
    assert np.abs(eight - one).max() < 1e-5 * np.abs(one).max()
