"""Plain vision transformers: published configs, plans, pictures."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxenc
from jaxenc import ConfigError, InputError
from jaxenc.models import clip, dinov2, named_config, pixtral, published_configs, siglip, siglip2
from jaxenc.preprocess.images import naflex_size
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
VARIANTS = [
    f"{family}:{variant}"
    for family, module in (
        ("clip", clip),
        ("siglip", siglip),
        ("siglip2", siglip2),
        ("dinov2", dinov2),
        ("pixtral", pixtral),
    )
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


# --- padding and batch-mates

SMALL = {"layers": 2, "embed": 24, "heads": 3, "mlp": 40, "patch": 4, "image": 16, "eps": 1e-6, "final_norm": True}
# heads of 8: rotary embeddings need a multiple of four
PIXTRAL = pixtral.Config(layers=2, embed=24, heads=3, mlp=40, patch=4, image=40, out=20)
SUBJECTS = {
    "clip": (clip.Config(**SMALL, activation="quick_gelu", first_row=1, hidden=20, out=20), [(4, 4)] * 3),
    "siglip": (siglip.Config(**SMALL, activation="gelu_tanh", pooled=True), [(4, 4)] * 3),
    "siglip2": (siglip2.Config(**SMALL, activation="gelu_tanh"), [(4, 4), (2, 7), (1, 3)]),
    "dinov2": (dinov2.Config(**SMALL, activation="silu", gated=True, layer_scale=True), [(4, 4), (2, 7), (5, 6)]),
    "pixtral": (PIXTRAL, [(4, 4), (2, 7), (5, 6)]),
    "mistral3": (replace(PIXTRAL, merge=2), [(4, 4), (2, 8), (4, 6)]),
}


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_nothing_in_the_padding_or_beside_a_picture_touches_it(name, shape):
    config, grids = SUBJECTS[name]
    rng = np.random.default_rng(4)
    items = [
        jaxenc.VisionItem(rng.standard_normal((h * w, 48)).astype(np.float32), (1, h, w), name=f"{i}")
        for i, (h, w) in enumerate(grids)
    ]
    made = jaxenc.from_config(config, mesh=jaxenc.make_mesh(data=shape[0], model=shape[1]), seed=3)
    # the last has whole pictures in it, and pictures that are spread over rows
    *_, (_, encoder) = equality.layouts(made, sum(config.pieces(item)[0] for item in items), config.window or 20)
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
@pytest.mark.parametrize("name", ["clip", "clip:base", "siglip", "siglip:base", "dinov2"])
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
