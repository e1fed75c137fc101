"""Plain vision transformers: published configs, plans, pictures."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxenc
from jaxenc import ConfigError, InputError
from jaxenc.models import clip, dinov2, internvit, named_config, pixtral, published_configs, siglip, siglip2
from jaxenc.preprocess.images import naflex_size, tile_grid
from tests import equality

# config.json as published, without what no tower depends on
LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
CLIP_LARGE = {
    "model_type": "clip",
    "vision_config": {
        "hidden_act": "quick_gelu",
        "hidden_size": 1024,
        "image_size": 224,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-05,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}
SIGLIP_SO400M = {
    "model_type": "siglip",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
PALIGEMMA = {
    "model_type": "paligemma",
    "hidden_size": 2048,
    "projection_dim": 2048,
    "text_config": {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18},
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_image_tokens": 256,
        "patch_size": 14,
        "projection_dim": 2048,
        "projector_hidden_act": "gelu_fast",
        "vision_use_head": False,
    },
}
DINOV2_SMALL = {
    "model_type": "dinov2",
    "hidden_act": "gelu",
    "hidden_size": 384,
    "image_size": 518,
    "layer_norm_eps": 1e-06,
    "layerscale_value": 1.0,
    "mlp_ratio": 4,
    "num_attention_heads": 6,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 14,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
}
DINOV2_GIANT = DINOV2_SMALL | {
    "hidden_size": 1536,
    "num_attention_heads": 24,
    "num_hidden_layers": 40,
    "use_swiglu_ffn": True,
}
# OpenGVLab/InternVL3-8B
INTERNVL = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28},
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "pad2square": False,
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internvl2_5",
    "use_thumbnail": True,
    "vision_config": {
        "attention_dropout": 0.0,
        "drop_path_rate": 0.1,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "image_size": 448,
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "model_type": "intern_vit_6b",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
        "use_flash_attn": True,
    },
}
# OpenGVLab/InternVL3-78B
INTERNVL_6B = INTERNVL | {
    "llm_config": {"model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80},
    "vision_config": INTERNVL["vision_config"]
    | {
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "qk_normalization": True,
        "qkv_bias": False,
    },
}
# OpenGVLab/InternVL3-8B-hf
INTERNVL_HF = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "projector_hidden_act": "gelu",
    "text_config": {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28},
    "vision_config": {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "projection_dropout": 0.0,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
# OpenGVLab/InternVL3-78B-hf
INTERNVL_6B_HF = INTERNVL_HF | {
    "text_config": {"model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80},
    "vision_config": INTERNVL_HF["vision_config"]
    | {
        "attention_bias": False,
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "use_qk_norm": True,
    },
}
VARIANTS = [
    f"{module.Config.family}:{variant}"
    for module in (clip, siglip, siglip2, dinov2, internvit, pixtral)
    for variant in module.VARIANTS
]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAVA, "clip"),
        (CLIP_LARGE, "clip:large"),
        (CLIP_LARGE["vision_config"], "clip:large"),
        # CLIP-B/32 and SigLIP-B/16 write nothing of what their classes have by default
        ({"model_type": "clip", "vision_config": {"model_type": "clip_vision_model"}}, "clip:base"),
        (SIGLIP_SO400M, "siglip"),
        (PALIGEMMA, "siglip:paligemma-224"),
        ({"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}}, "siglip:base"),
        ({"model_type": "siglip2", "vision_config": {"model_type": "siglip2_vision_model"}}, "siglip2:base"),
        (DINOV2_SMALL, "dinov2"),
        (DINOV2_GIANT, "dinov2:giant"),
        (DINOV2_GIANT | {"mlp_ratio": None, "layer_norm_eps": None}, "dinov2:giant"),
        (INTERNVL, "internvit"),
        (INTERNVL_HF, "internvit"),
        (INTERNVL_6B, "internvit:6b"),
        (INTERNVL_6B_HF, "internvit:6b"),
        (INTERNVL["vision_config"], "internvit:300m-tower"),
        (INTERNVL_HF["vision_config"], "internvit:300m-tower"),
        (INTERNVL_6B["vision_config"], "internvit:6b-tower"),
        (INTERNVL_6B_HF["vision_config"], "internvit:6b-tower"),
        # the classes' own defaults: transformers' are the small one's, OpenGVLab's the big one's
        ({"model_type": "internvl_vision", "attention_bias": True}, "internvit:300m-tower"),
        ({"model_type": "intern_vit_6b", "num_hidden_layers": 45, "image_size": 448}, "internvit:6b-tower"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_configs_are_the_variants(config, name):
    assert published_configs(config, name="config.json") == [named_config(name)]


def test_the_giants_gated_mlp_is_4096_wide():
    assert named_config("dinov2:giant").mlp == 4096


def test_a_llava_of_siglip_is_siglips():
    vision = SIGLIP_SO400M["vision_config"]
    llava = {**LLAVA, "vision_config": vision, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    (config,) = published_configs(llava, name="config.json")
    assert (config.family, config.layers, config.skipped) == ("siglip", 27, 0)
    assert (config.first_row, config.final_norm, config.out) == (0, False, 4096)


def test_internvits_sizes_are_the_published_ones():
    small, big = named_config("internvit"), named_config("internvit:6b")
    assert (small.layers, small.embed, small.heads, small.mlp, small.norm) == (24, 1024, 16, 4096, "layer")
    assert (big.layers, big.embed, big.heads, big.mlp, big.norm) == (45, 3200, 25, 12_800, "rms")
    assert (small.head_norm, small.qkv_bias) == (False, True)
    assert (big.head_norm, big.qkv_bias) == (True, False)
    assert (small.head_dim, big.head_dim) == (64, 128)
    for config in (small, big):
        assert (config.side, config.positions, config.eps, config.layer_scale) == (32, 1025, 1e-6, True)
        assert (config.merge, config.first_row, config.final_norm) == (2, 1, False)


@pytest.mark.parametrize(
    ("config", "tiles"),
    [
        (INTERNVL, 12),
        (INTERNVL | {"max_dynamic_patch": 6}, 6),
        (INTERNVL | {"dynamic_image_size": False}, 1),
        (INTERNVL_HF, 12),
    ],
    ids=["12", "6", "1", "transformers"],
)
def test_internvls_tiles_are_as_many_as_its_config_says(config, tiles):
    (made,) = published_configs(config, name="config.json")
    assert made == replace(named_config("internvit"), tiles=tiles)
    assert made.typical_tokens == 1025 * {12: 13, 6: 7, 1: 1}[tiles]


@pytest.mark.parametrize(
    "config", [INTERNVL | {"select_layer": -4}, INTERNVL_HF | {"vision_feature_layer": 21}], ids=["", "hf"]
)
def test_blocks_after_internvls_layer_are_skipped(config):
    (made,) = published_configs(config, name="config.json")
    assert (made.layers, made.skipped) == (21, 3)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LLAVA | {"vision_feature_layer": [-2, -5]}, r"vision_feature_layer is \[-2, -5\]; one of the 24 blocks"),
        (LLAVA | {"vision_feature_layer": 0}, "vision_feature_layer is 0"),
        (LLAVA | {"vision_feature_layer": 25}, "vision_feature_layer is 25"),
        (LLAVA | {"vision_feature_select_strategy": "cls_patch"}, "select_strategy is 'cls_patch'"),
        (LLAVA | {"projector_hidden_act": "tanh"}, "projector_hidden_act is 'tanh'; known are 'gelu'"),
        (
            {"model_type": "siglip2", "vision_config": {"num_patches": 250}},
            "num_patches is 250; positions are a square",
        ),
        (DINOV2_SMALL | {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        (DINOV2_SMALL | {"num_attention_heads": 5}, "384 is not a multiple of its 5 heads"),
        (DINOV2_SMALL | {"mlp_ratio": 0}, "mlp_ratio is 0"),
        (DINOV2_SMALL | {"hidden_size": "384"}, "hidden_size is '384'"),
        (DINOV2_SMALL | {"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"model_type": "siglip2", "vision_config": {"patch_size": [16, 16]}}, r"patch_size is \[16, 16\]"),
        (DINOV2_SMALL | {"num_channels": 4}, "num_channels is 4"),
        (LLAVA | {"vision_config": {"model_type": "aimv2"}}, "model_type is 'llava'; known are"),
        (INTERNVL | {"ps_version": "v1"}, "ps_version is 'v1', this encoder computes 'v2'"),
        ({k: v for k, v in INTERNVL.items() if k != "ps_version"}, "ps_version is 'v1'"),
        (INTERNVL | {"downsample_ratio": 0.25}, "downsample_ratio is 0.25"),
        (INTERNVL | {"force_image_size": 224}, "force_image_size is 224, this encoder computes 448"),
        (INTERNVL | {"use_thumbnail": False}, "use_thumbnail is False"),
        (INTERNVL | {"min_dynamic_patch": 2}, "min_dynamic_patch is 2"),
        (INTERNVL | {"max_dynamic_patch": 0}, "max_dynamic_patch is 0"),
        (INTERNVL | {"select_layer": 0}, "vision_feature_layer is 0"),
        (INTERNVL_HF | {"vision_feature_select_strategy": "full"}, "select_strategy is 'full'"),
        (INTERNVL_HF["vision_config"] | {"image_size": [448, 224]}, r"image_size is \[448, 224\]; only squares"),
        (INTERNVL_HF["vision_config"] | {"image_size": 0}, "image_size is 0; a whole number"),
        (INTERNVL_HF["vision_config"] | {"norm_type": "batch"}, "norm_type is 'batch'; known are layer_norm, rms_norm"),
        (INTERNVL_HF["vision_config"] | {"use_mean_pooling": False}, "use_mean_pooling is False"),
        (INTERNVL_HF | {"vision_config": {"image_size": 462}}, "33 patches a side are no multiple of 2"),
    ],
    ids=str,
)
def test_a_config_of_another_function_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        published_configs(config, name="config.json")


@pytest.mark.parametrize("layer", [-2, 23])
def test_llavas_layer_counts_from_either_end(layer):
    (config,) = published_configs(LLAVA | {"vision_feature_layer": layer}, name="config.json")
    assert (config.layers, config.skipped) == (23, 1)


@pytest.mark.parametrize("devices", [3, 6, 8, 32])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_device_does_more_than_its_share(name, devices):
    plan = jaxenc.plan(name, mesh_shape={"data": 1, "model": devices})
    assert plan.flops_ratio <= 1.10


@pytest.mark.parametrize(
    ("name", "tokens", "rows"),
    [
        ("clip", 577, 576),
        ("clip:large", 257, 257),
        ("clip:base", 50, 50),
        ("siglip", 729, 730),
        ("siglip:so400m-tower", 729, 729),
        ("dinov2", 257, 257),
        ("internvit", 13 * 1025, 13 * 256),
        ("internvit:6b-tower", 1025, 1025),
    ],
)
def test_tokens_and_rows_of_a_file(name, tokens, rows):
    config = named_config(name)
    (item,) = config.read("images", np.zeros((300, 400, 3), np.uint8), name="black")
    assert config.typical_tokens == sum(config.pieces(item)) == tokens
    assert config.output_rows(item) == rows
    config.check(item)


def test_items_that_the_tower_cannot_encode_are_refused():
    def item(grid, features=588):
        return jaxenc.VisionItem(np.zeros((int(np.prod(grid)), features), np.float32), grid, name="it")

    named_config("dinov2").check(item((1, 5, 9)))
    with pytest.raises(InputError, match=r"it: the grid is \(2, 5, 9\); this tower reads single pictures"):
        named_config("dinov2").check(item((2, 5, 9)))
    with pytest.raises(InputError, match=r"it: the grid is \(1, 5, 9\); this tower reads \(1, 24, 24\)"):
        named_config("clip").check(item((1, 5, 9)))
    with pytest.raises(InputError, match=r"it: a patch has 768 values, expected 588"):
        named_config("clip").check(item((1, 24, 24), 768))
    named_config("internvit").check(item((13, 32, 32)))
    with pytest.raises(InputError, match=r"it: the grid is \(2, 24, 24\); this tower reads \(n, 32, 32\)"):
        named_config("internvit").check(item((2, 24, 24)))


def test_a_tile_attends_by_itself_and_becomes_256_rows():
    config = named_config("internvit")
    item = jaxenc.VisionItem(np.zeros((3 * 1024, 588), np.float32), (3, 32, 32))
    assert config.pieces(item) == (1025,) * 3
    assert (config.item_unit(item), config.output_rows(item)) == (4, 768)
    assert config.workload([2 * 1025, 7]).tokens == (1025, 1025, 7)


# --- padding and batch-mates

SMALL = {"layers": 2, "embed": 24, "heads": 3, "mlp": 40, "patch": 4, "image": 16, "eps": 1e-6}
NORMED = SMALL | {"final_norm": True}
MERGED = SMALL | {"layer_scale": True, "merge": 2, "first_row": 1, "hidden": 20, "out": 20}
# heads of 8: rotary embeddings need a multiple of four
PIXTRAL = pixtral.Config(layers=2, embed=24, heads=3, mlp=40, patch=4, image=40, out=20)
SUBJECTS = {
    "clip": (clip.Config(**NORMED, activation="quick_gelu", first_row=1, hidden=20, out=20), [(1, 4, 4)] * 3),
    "siglip": (siglip.Config(**NORMED, activation="gelu_tanh", pooled=True), [(1, 4, 4)] * 3),
    "siglip2": (siglip2.Config(**NORMED, activation="gelu_tanh"), [(1, 4, 4), (1, 2, 7), (1, 1, 3)]),
    "dinov2": (
        dinov2.Config(**NORMED, activation="silu", gated=True, layer_scale=True),
        [(1, 4, 4), (1, 2, 7), (1, 5, 6)],
    ),
    "internvit": (
        internvit.Config(**MERGED, activation="gelu_erf", norm="rms", head_norm=True),
        [(1, 4, 4), (3, 4, 4), (2, 4, 4)],
    ),
    "pixtral": (PIXTRAL, [(1, 4, 4), (1, 2, 7), (1, 5, 6)]),
    "mistral3": (replace(PIXTRAL, merge=2), [(1, 4, 4), (1, 2, 8), (1, 4, 6)]),
}


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_nothing_in_the_padding_or_beside_a_picture_touches_it(name, shape):
    config, grids = SUBJECTS[name]
    rng = np.random.default_rng(4)
    items = [
        jaxenc.VisionItem(rng.standard_normal((int(np.prod(grid)), 48)).astype(np.float32), grid, name=f"{i}")
        for i, grid in enumerate(grids)
    ]
    made = jaxenc.from_config(config, mesh=jaxenc.make_mesh(data=shape[0], model=shape[1]), seed=3)
    # the last has whole pictures in it, and pictures that are spread over rows
    tokens = sum(sum(config.pieces(item)) for item in items)
    *_, (_, encoder) = equality.layouts(made, tokens, config.window or 20)
    batch = encoder.pack(items)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def both(params, batch):
        def loss(params):
            rows = encoder.apply(params, batch)
            return jnp.sum(jnp.where((batch.rows.item >= 0)[..., None], rows, 0) ** 2), rows

        slopes, rows = jax.grad(loss, has_aux=True)(params)
        return rows, slopes

    rows, slopes = both(encoder.params, batch)
    before = encoder.unpack(rows, batch)
    assert [len(rows) for rows in before] == [config.output_rows(item) for item in items]
    empty = batch.inputs["segments"] == 0
    assert empty.any()
    for value in (np.nan, np.inf):
        patches = np.where(empty[..., None], value, batch.inputs["patches"]).astype(np.float32)
        rows, other = both(encoder.params, replace(batch, inputs={**batch.inputs, "patches": patches}))
        for one, expected in zip(encoder.unpack(rows, batch), before, strict=True):
            np.testing.assert_array_equal(one, expected)
        jax.tree.map(np.testing.assert_array_equal, other, slopes)
    # turned round as well: a norm of the patches takes out how loud they are
    louder = encoder.pack([items[0], *(replace(item, patches=1000 * item.patches[::-1]) for item in items[1:])])
    after = encoder.unpack(both(encoder.params, louder)[0], louder)
    np.testing.assert_array_equal(after[0], before[0])
    assert not np.allclose(after[1], before[1], rtol=1e-3)


# --- pictures, against transformers' processors


@pytest.mark.parametrize("size", [(480, 640), (640, 427), (224, 224), (37, 501), (513, 512), (90, 31)], ids=str)
@pytest.mark.parametrize("name", ["clip", "clip:base", "siglip", "siglip:base", "dinov2", "internvit:300m-tower"])
def test_pixels_are_those_of_the_published_processor(name, size):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    config = named_config(name)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    (item,) = config.read("images", pixels, name="noise")
    (expected,) = processor(name, config)(pixels, return_tensors="np")["pixel_values"]
    p, (_, h, w) = config.patch, item.grid
    # what is beyond the last whole patch is not read (384 = 27 x 14 + 6)
    cut = expected[:, : h * p, : w * p].reshape(3, h, p, w, p).transpose(1, 3, 0, 2, 4).reshape(h * w, -1)
    np.testing.assert_allclose(item.patches, cut, atol=2e-6)


@pytest.mark.parametrize("size", [(480, 640), (640, 427), (16, 16), (37, 501), (512, 512), (9, 3)], ids=str)
def test_siglip2s_patches_are_those_of_the_published_processor(size):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    (item,) = named_config("siglip2").read("images", pixels, name="noise")
    # otherwise three columns would be taken for channels
    expected = Siglip2ImageProcessorPil()(pixels, return_tensors="np", input_data_format="channels_last")
    assert item.grid == (1, *expected["spatial_shapes"][0])
    np.testing.assert_allclose(item.patches, expected["pixel_values"][0, : len(item.patches)], atol=2e-6)


@pytest.mark.parametrize(
    ("size", "tiles"),
    [
        ((480, 640), 13),
        ((448, 448), 1),
        ((700, 700), 5),  # 2 x 2 tiles have less than twice its pixels
        ((300, 300), 1),
        ((640, 427), 7),  # 3 x 2
        ((37, 501), 13),
        ((1, 1), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [12, 6])
def test_internvls_tiles_are_those_of_the_published_processor(size, tiles, limit):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    # preprocessor_config.json of OpenGVLab/InternVL3-8B-hf
    published = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        crop_to_patches=True,
        max_patches=limit,
    )
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    (item,) = replace(named_config("internvit"), tiles=limit).read("images", pixels, name="noise")
    expected = published(pixels, return_tensors="np", input_data_format="channels_last")["pixel_values"]
    assert item.grid == (len(expected), 32, 32)
    assert limit < 12 or len(expected) == tiles
    patches = expected.reshape(-1, 3, 32, 14, 32, 14).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 588)
    np.testing.assert_allclose(item.patches, patches, atol=2e-6)


@pytest.mark.parametrize("limit", [1, 2, 6, 12, 40])
def test_grids_of_tiles_are_the_published_ones(limit):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as published

    sizes = np.random.default_rng(1).integers(1, 3000, (300, 2)).tolist()
    # as many pixels as half of a grid's, one more and one less; between two shapes
    sizes += [(448, 448), (448, 449), (447, 448), (896, 896), (634, 634), (633, 633), (600, 700), (700, 600), (1, 4000)]
    for height, width in sizes:
        columns, rows = published.get_optimal_tiled_canvas((height, width), (448, 448), 1, limit)
        assert tile_grid(height, width, side=448, limit=limit) == (rows, columns)


@pytest.mark.parametrize("limit", [100, 256, 1024])
def test_siglip2s_sizes_are_the_published_ones(limit):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.models.siglip2 import image_processing_pil_siglip2 as published

    sizes = np.random.default_rng(1).integers(1, 3000, (200, 2)).tolist()
    for height, width in [*sizes, (1, 1), (1, 4000), (4000, 1), (256, 256)]:
        expected = published.get_image_size_for_max_num_patches(height, width, 16, limit)
        assert naflex_size(height, width, patch=16, patch_limit=limit) == expected


def processor(name, config):
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    side = config.image
    if config.family == "clip":
        return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    if config.family == "internvit":  # preprocessor_config.json of OpenGVLab/InternViT-300M-448px
        return CLIPImageProcessorPil(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )
    if config.family == "siglip":
        return SiglipImageProcessorPil(size={"height": side, "width": side})
    # facebook/dinov2-small's preprocessor_config.json
    return BitImageProcessorPil(
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
        resample=3,
    )
