"""Pixtral without PyTorch: its configs, what there is of it, its files, its pictures."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxenc
from checkpoints_convert import Entry, Mapping, Reorder, open_source
from checkpoints_convert.mapping import half_split_to_pairs, pairs_to_half_split
from jaxenc import ConfigError, InputError
from jaxenc.layers.parameters import declared, flatten
from jaxenc.layers.rotary import axial_rotary
from jaxenc.models import abstract_module, named_config, pixtral, published_configs
from jaxenc.preprocess.images import fit_patches
from tests.parity import vit_checkpoints

# config.json as published, without what no tower depends on
PIXTRAL_12B = {
    "model_type": "llava",
    "image_token_index": 10,
    "projector_hidden_act": "gelu",
    "text_config": {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "rms_norm_eps": 1e-05},
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "model_type": "pixtral",
        "patch_size": 16,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
MISTRAL_SMALL = {
    "model_type": "mistral3",
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "rms_norm_eps": 1e-05},
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}
# as transformers 5 writes it
ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}}
NATIVE = MISTRAL_SMALL | {
    "vision_config": {k: v for k, v in MISTRAL_SMALL["vision_config"].items() if k != "rope_theta"} | ROPE
}
# Mistral's params.json
OWN_12B = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "norm_eps": 1e-05,
    "vision_encoder": {
        "hidden_size": 1024,
        "num_channels": 3,
        "image_size": 1024,
        "patch_size": 16,
        "rope_theta": 10000.0,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_token_id": 10,
    },
}
OWN_SMALL = OWN_12B | {
    "vision_encoder": OWN_12B["vision_encoder"]
    | {
        "image_size": 1540,
        "max_image_size": 1540,
        "patch_size": 14,
        "adapter_bias": False,
        "add_pre_mm_projector_layer_norm": True,
        "mm_projector_id": "patch_merge",
        "spatial_merge_size": 2,
    }
}


def changed(config, part, **changes):
    return config | {part: config[part] | changes}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PIXTRAL_12B, "pixtral"),
        (OWN_12B, "pixtral:12b"),
        (MISTRAL_SMALL, "pixtral:mistral-small-3.1"),
        (NATIVE, "pixtral:mistral-small-3.1"),
        (OWN_SMALL, "pixtral:mistral-small-3.1"),
    ],
    ids=["12b", "12b of Mistral", "mistral3", "mistral3 of transformers 5", "mistral3 of Mistral"],
)
def test_published_configs_are_the_variants(config, name):
    assert published_configs(config, name="config.json") == [named_config(name)]


def test_sizes_of_the_variants_are_the_published_ones():
    whole, merged = pixtral.VARIANTS.values()
    for config in (whole, merged):
        assert (config.layers, config.embed, config.heads, config.head_dim, config.mlp) == (24, 1024, 16, 64, 4096)
        assert (config.out, config.theta, config.activation) == (5120, 10_000.0, "silu")
    assert (whole.patch, whole.side, whole.merge, whole.projector_bias) == (16, 64, 1, True)
    assert (merged.patch, merged.side, merged.merge, merged.projector_bias) == (14, 110, 2, False)


def test_parameter_counts_are_the_published_ones():
    def count(config):
        return sum(math.prod(p.shape) for p in declared(abstract_module(config, dtype="float32")).values())

    blocks = 24 * (2 * 1024 + 4 * 1024**2 + 3 * 1024 * 4096)
    layers = 1024 * 5120 + 5120 * 5120
    assert count(named_config("pixtral:12b")) == 3 * 16**2 * 1024 + 1024 + blocks + layers + 2 * 5120
    merger = 1024 + 4 * 1024 * 1024
    assert count(named_config("pixtral:mistral-small-3.1")) == 3 * 14**2 * 1024 + 1024 + blocks + merger + layers


def test_what_a_config_does_not_say_is_what_its_class_has():
    (tower,) = published_configs({"model_type": "pixtral"}, name="config.json")
    assert tower == pixtral.Config(activation="gelu_erf", out=None)
    (small,) = published_configs(changed(MISTRAL_SMALL, "text_config", rms_norm_eps=None), name="config.json")
    assert small.merger_eps == 1e-6


def test_the_mergers_epsilon_is_the_language_models():
    for config, text, key in ((MISTRAL_SMALL, "text_config", "rms_norm_eps"), (OWN_SMALL, None, "norm_eps")):
        other = changed(config, text, **{key: 1e-3}) if text else config | {key: 1e-3}
        assert pixtral.Config.from_hf(other).merger_eps == 1e-3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (PIXTRAL_12B | {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        (PIXTRAL_12B | {"vision_feature_layer": None}, "vision_feature_layer is -2"),  # LLaVA's default
        (PIXTRAL_12B | {"vision_feature_select_strategy": "default"}, "select_strategy is 'default'"),
        (MISTRAL_SMALL | {"vision_feature_layer": [-1, -2]}, r"vision_feature_layer is \[-1, -2\]"),
        (MISTRAL_SMALL | {"spatial_merge_size": "2"}, "spatial_merge_size is '2'"),
        (changed(MISTRAL_SMALL, "vision_config", head_dim=32), "head_dim is 32, this encoder computes 64"),
        (changed(MISTRAL_SMALL, "vision_config", hidden_size=1000, head_dim=None), "1000 over 16 heads"),
        (changed(MISTRAL_SMALL, "vision_config", hidden_act="relu"), "hidden_act is 'relu'"),
        (changed(MISTRAL_SMALL, "vision_config", rope_parameters={"rope_type": "default"}), "rope_type is 'default'"),
        (changed(MISTRAL_SMALL, "vision_config", model_type="siglip_vision_model"), "model_type is 'mistral3'"),
        (changed(OWN_SMALL, "vision_encoder", mm_projector_id=""), "mm_projector_id is '', .* 'patch_merge'"),
        (changed(OWN_12B, "vision_encoder", add_pre_mm_projector_layer_norm=True), "projector_layer_norm is True"),
        (changed(OWN_SMALL, "vision_encoder", max_image_size=1024), "max_image_size is 1024"),
        (OWN_12B | {"dim": None}, "none of dim is there"),
    ],
    ids=str,
)
def test_a_config_of_another_function_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        published_configs(config, name="config.json")


# --- how much there is


@pytest.mark.parametrize(
    ("name", "size", "grid", "rows"),
    [
        ("pixtral:12b", (300, 400), (1, 19, 25), 19 * 25),
        ("pixtral:12b", (1024, 1024), (1, 64, 64), 4096),
        ("pixtral:12b", (2000, 1500), (1, 64, 48), 3072),
        ("pixtral:mistral-small-3.1", (300, 400), (1, 22, 30), 11 * 15),
        ("pixtral:mistral-small-3.1", (1540, 4000), (1, 44, 110), 22 * 55),
    ],
)
def test_tokens_and_rows_of_a_file(name, size, grid, rows):
    config = named_config(name)
    (item,) = config.read("images", np.zeros((*size, 3), np.uint8), name="black")
    assert item.grid == grid
    assert config.pieces(item) == (math.prod(grid),)
    assert config.output_rows(item) == rows
    config.check(item)
    *_, largest, several = config.lengths()
    assert config.side**2 <= largest < several


@pytest.mark.parametrize(
    ("name", "grid", "says"),
    [
        ("pixtral:12b", (1, 65, 2), r"big: the grid is \(1, 65, 2\); expected one picture .* up to 64"),
        ("pixtral:12b", (2, 4, 4), r"big: the grid is \(2, 4, 4\); expected one picture"),
        ("pixtral:mistral-small-3.1", (1, 2, 112), "multiples of 2, up to 110"),
        ("pixtral:mistral-small-3.1", (1, 2, 3), "multiples of 2"),
    ],
)
def test_items_beyond_the_rotary_table_or_of_no_whole_rows_are_refused(name, grid, says):
    config = named_config(name)
    item = jaxenc.VisionItem(np.zeros((math.prod(grid), 3 * config.patch**2), np.float32), grid, name="big")
    with pytest.raises(InputError, match=says):
        config.check(item)
    with pytest.raises(InputError, match="a patch has 3 values"):
        config.check(jaxenc.VisionItem(np.zeros((math.prod(grid), 3), np.float32), grid))


def test_sides_that_patches_do_not_divide_are_cut_as_the_models_are():
    # 1540 / 16 is no whole number: the table has 96 rows
    assert pixtral.Config(image=1540).side == 96


# --- rotary embedding


def test_rows_and_columns_turn_with_every_other_frequency():
    cos, sin = axial_rotary(
        np.array([[[3, 5]]]), head_dim=8, theta=10_000.0, positions=6, order="rows first", shared=False
    )
    # theta^(-2i / 8) is 1, 0.1, 0.01, 0.001
    angles = [3 * 1.0, 3 * 0.01, 5 * 0.1, 5 * 0.001]
    np.testing.assert_allclose(np.asarray(cos)[0, 0], np.cos(angles), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(sin)[0, 0], np.sin(angles), rtol=1e-6)


def test_rotary_channels_go_from_pairs_to_halves_and_back():
    assert pairs_to_half_split(8) == (0, 2, 4, 6, 1, 3, 5, 7)
    channels = np.arange(8)
    np.testing.assert_array_equal(channels[list(pairs_to_half_split(8))][list(half_split_to_pairs(8))], channels)
    # two heads of four channels: each is reordered by itself
    entry = Entry("query", "wq", stored=(8, 1), shape=(2, 4, 1), reorder=Reorder(1, pairs_to_half_split(4)))
    mapping = Mapping("one", "mistral", entries=(entry,), prefixes=("wq",))
    exported = dict(mapping.export({"query": np.array([[0, 2, 1, 3], [4, 6, 5, 7]])[..., None]}))
    np.testing.assert_array_equal(exported["wq"].ravel(), np.arange(8))


# --- files


@pytest.mark.parametrize("projector", ["llava", "mistral3"])
def test_every_layout_is_read_into_the_same_parameters_and_written_back_to_the_bit(tmp_path, projector):
    checkpoint = vit_checkpoints.pixtral(projector=projector, seed=3)
    expected = None
    for layout, tensors in checkpoint.tensors.items():
        encoder = jaxenc.load(checkpoint.write(tmp_path / layout, layout=layout), dtype="float32")
        params = flatten(encoder.params)
        expected = expected or params
        for path, value in params.items():
            np.testing.assert_array_equal(value, expected[path], err_msg=path)
        name = "mistral" if layout == "mistral" else "original"
        exported = dict(encoder.config.mappings()[name].located(tensors).export(params))
        assert exported.keys() == tensors.keys()
        for name, value in exported.items():
            np.testing.assert_array_equal(value, tensors[name], err_msg=name)
    encoder.save(tmp_path / "converted")
    assert jaxenc.load(tmp_path / "converted").config == encoder.config


def test_parameters_are_the_files_tensors_reordered(tmp_path):
    checkpoint = vit_checkpoints.pixtral(projector="mistral3")
    params = flatten(jaxenc.load(checkpoint.write(tmp_path), dtype="float32").params)
    tensors, block = checkpoint.tensors["original"], "vision_tower.transformer.layers.1."
    qkv = [tensors[f"{block}attention.{letter}_proj.weight"].reshape(4, 8, 32) for letter in "qkv"]
    np.testing.assert_array_equal(params["layers/attention/qkv/kernel"][1], qkv)
    gate_up = [tensors[f"{block}feed_forward.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(params["layers/mlp/up/kernel"][1], gate_up)
    # channel 5 of the third patch of a group
    merging = tensors["multi_modal_projector.patch_merger.merging_layer.weight"]
    np.testing.assert_array_equal(params["merger/layer/kernel"][:, 2, 5], merging[:, 4 * 5 + 2])


def test_without_a_config_json_mistrals_params_json_is_read(tmp_path):
    save_file({"vision_encoder.ln_pre.weight": np.ones(3, np.float32)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(OWN_12B))
    source = open_source(tmp_path)
    assert set(source.names) == {"vision_encoder.ln_pre.weight"}
    assert source.config == OWN_12B
    (tmp_path / "config.json").write_text(json.dumps(PIXTRAL_12B))
    assert source.config == PIXTRAL_12B


def test_an_index_of_consolidated_files_is_read_where_there_is_no_other_copy(tmp_path):
    shards = {"a": "consolidated-00001-of-00002.safetensors", "b": "consolidated-00002-of-00002.safetensors"}
    for name, file in shards.items():
        save_file({name: np.ones(3, np.float32)}, tmp_path / file)
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert open_source(tmp_path).files == shards
    save_file({"c": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert set(open_source(tmp_path).names) == {"c"}


# --- pictures, against transformers' processor

SIZES = [(480, 640), (1024, 1024), (2000, 1501), (37, 501), (16, 16), (9, 3), (1541, 90), (1023, 1025)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["pixtral:12b", "pixtral:mistral-small-3.1"])
def test_pixels_are_those_of_the_published_processor(name, size):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    config, pixels = named_config(name), np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    (item,) = config.read("images", pixels, name="noise")
    # what `PixtralProcessor` asks of it
    asked = {"size": {"longest_edge": config.image}, "patch_size": config.patch * config.merge}
    # otherwise three columns would be taken for channels
    made = PixtralImageProcessorPil(**asked)(pixels, return_tensors="np", input_data_format="channels_last")
    (expected,) = made["pixel_values"]
    p, (_, h, w) = config.patch, item.grid
    assert expected.shape == (3, h * p, w * p)
    cut = expected.reshape(3, h, p, w, p).transpose(1, 3, 0, 2, 4).reshape(h * w, -1)
    np.testing.assert_allclose(item.patches, cut, atol=2e-6)


@pytest.mark.parametrize(("longest", "multiple"), [(1024, 16), (1540, 28)])
def test_sizes_are_the_published_ones(longest, multiple):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    sizes = np.random.default_rng(1).integers(1, 4000, (60, 2)).tolist()
    for height, width in [*sizes, (1, 1), (longest, longest + 1), (3000, 3)]:
        image = np.zeros((height, width, 3), np.uint8)
        expected = get_resize_output_image_size(
            image, size=longest, patch_size=multiple, input_data_format="channels_last"
        )
        assert fit_patches(image, longest=longest, multiple=multiple).shape[:2] == expected
    # there is no picture of no pixels, which the published code would make of this one
    assert fit_patches(np.zeros((1, 4000, 3), np.uint8), longest=1024, multiple=16).shape == (16, 1024, 3)
