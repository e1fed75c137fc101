"""Configs read whatever names a config.json uses; sizes, mappings and stated work are those of the published models."""

import math
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

import jaxenc
from jaxenc import ConfigError
from jaxenc.encoder import Encoder
from jaxenc.layers.parameters import declared
from jaxenc.layers.transformer import unrolled
from jaxenc.models import (
    FAMILIES,
    abstract_module,
    glm4v,
    kimi_k25,
    named_config,
    published_configs,
    qwen2_5_omni_audio,
    qwen2_audio,
    qwen3_asr_audio,
    qwen3_omni_audio,
    whisper,
)
from jaxenc.packing import Budget

VARIANTS = [
    pytest.param(config, id=f"{family}:{variant}")
    for family, module in FAMILIES.items()
    for variant, config in module.VARIANTS.items()
]

# Kimi-K2.5's config.json
KIMI_VT = {
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1152,
    "vt_num_attention_heads": 16,
    "vt_intermediate_size": 4304,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 1152,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168,
}
# the same with the prefix dropped, as SGLang has it
KIMI_PLAIN = {key.removeprefix("vt_"): value for key, value in KIMI_VT.items()}
# transformers 5's
KIMI_NATIVE = {
    "model_type": "kimi_k25_vision",
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "pos_emb_time": 4,
    "merge_kernel_size": (2, 2),
    "hidden_act": "gelu_pytorch_tanh",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
QWEN_AUDIO = {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "encoder_layers": 32,
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "downsample_hidden_size": 480,
    "output_dim": 2048,
    "n_window": 50,
    "n_window_infer": 800,
    "activation_function": "gelu",
    "scale_embedding": False,
}
QWEN_ASR = QWEN_AUDIO | {
    "model_type": "qwen3_asr_audio_encoder",
    "encoder_layers": 18,
    "d_model": 896,
    "encoder_attention_heads": 14,
    "encoder_ffn_dim": 3584,
    "output_dim": 1024,
}
# as published: without the language model's width, which is the default one
QWEN2_AUDIO = {
    "model_type": "qwen2_audio",
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "encoder_layers": 32,
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        "activation_function": "gelu",
        "scale_embedding": False,
    },
    "text_config": {"model_type": "qwen2", "intermediate_size": 11008},
}
QWEN25_AUDIO = QWEN2_AUDIO["audio_config"] | {
    "model_type": "qwen2_5_omni_audio_encoder",
    "n_window": 100,
    "output_dim": 2048,
}
WHISPER_TINY = {
    "model_type": "whisper",
    "encoder_layers": 4,
    "d_model": 384,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "activation_function": "gelu",
    "scale_embedding": False,
}


def parameter_count(config, *, under=""):
    """Numbers in the parameters below a path; nothing is allocated."""
    found = declared(abstract_module(config, dtype="float32"))
    return sum(math.prod(p.shape) for path, p in found.items() if path.startswith(under))


# --- config.json


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "kimi_k25", "vision_config": KIMI_VT, "text_config": {"hidden_size": 7168}},
        {"model_type": "kimi_k25", "vision_config": KIMI_PLAIN, "text_config": {"hidden_size": 7168}},
        {"model_type": "kimi_k25", "vision_config": KIMI_NATIVE, "text_config": {"hidden_size": 7168}},
        {**KIMI_VT, "model_type": "kimi_k25_vision"},
    ],
    ids=["vt", "plain", "native", "tower alone"],
)
def test_every_spelling_of_kimis_config_gives_the_published_tower(config):
    assert published_configs(config, name="config.json") == [kimi_k25.Config()]


def test_kimi_sizes_that_are_not_the_defaults_are_read():
    # every size differs from its default, so that one that is not read shows
    vt = {
        "vt_num_hidden_layers": 3,
        "vt_hidden_size": 96,
        "vt_num_attention_heads": 8,
        "vt_intermediate_size": 200,
        "patch_size": 16,
        "init_pos_emb_height": 32,
        "init_pos_emb_width": 48,
        "init_pos_emb_time": 2,
        "merge_kernel_size": [4, 4],
        "text_hidden_size": 640,
        "projector_ln_eps": 1e-6,
        "rope_parameters": {"rope_theta": 500.0},
    }
    native = {
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "num_attention_heads": 8,
        "intermediate_size": 200,
        "patch_size": 16,
        "pos_emb_height": 32,
        "pos_emb_width": 48,
        "pos_emb_time": 2,
        "merge_kernel_size": [4, 4],
        "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
    }
    expected = kimi_k25.Config(
        layers=3,
        embed=96,
        heads=8,
        mlp=200,
        patch=16,
        position_h=32,
        position_w=48,
        frames=2,
        merge=4,
        out=640,
        projector_eps=1e-6,
        theta=500.0,
    )
    assert kimi_k25.Config.from_hf({"vision_config": vt}) == expected
    top = {"vision_config": native, "text_config": {"hidden_size": 640}, "projection_layer_norm_eps": 1e-6}
    assert kimi_k25.Config.from_hf(top) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_omni_moe", "thinker_config": {"audio_config": QWEN_AUDIO}},
        {"model_type": "qwen3_omni_moe_thinker", "audio_config": QWEN_AUDIO},
        QWEN_AUDIO,
    ],
    ids=["whole", "thinker", "tower alone"],
)
def test_the_audio_tower_is_found_at_every_depth_of_the_config(config):
    assert published_configs(config, name="config.json") == [qwen3_omni_audio.Config()]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_asr", "thinker_config": {"audio_config": QWEN_ASR, "model_type": "qwen3_asr"}},
        {"model_type": "qwen3_asr", "audio_config": QWEN_ASR | {"model_type": "qwen3_asr_encoder"}},
        QWEN_ASR,
    ],
    ids=["published", "transformers", "tower alone"],
)
def test_qwen3_asr_is_its_own_family(config):
    assert published_configs(config, name="config.json") == [qwen3_asr_audio.VARIANTS["0.6b"]]


def test_qwen2_audio_is_read_with_its_language_models_width():
    for config in (QWEN2_AUDIO, QWEN2_AUDIO["audio_config"]):
        assert published_configs(config, name="config.json") == [qwen2_audio.Config()]
    made = qwen2_audio.Config.from_hf(QWEN2_AUDIO | {"text_config": {"hidden_size": 640}})
    assert made == qwen2_audio.Config(out=640)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2_5_omni", "thinker_config": {"audio_config": QWEN25_AUDIO}},
        {"model_type": "qwen2_5_omni_thinker", "audio_config": QWEN25_AUDIO},
        QWEN25_AUDIO,
    ],
    ids=["whole", "thinker", "tower alone"],
)
def test_qwen2_5_omni_is_read_at_every_depth_of_the_config(config):
    assert published_configs(config, name="config.json") == [qwen2_5_omni_audio.VARIANTS["3b"]]


def test_audio_sizes_that_are_not_the_defaults_are_read():
    sizes = (3, 96, 8, 200, 64, 16, 48, 25, 200)
    keys = [key for key in QWEN_AUDIO if key not in ("model_type", "activation_function", "scale_embedding")]
    made = qwen3_omni_audio.Config.from_hf(dict(zip(keys, sizes, strict=True)))
    assert made == qwen3_omni_audio.Config(
        layers=3, embed=96, heads=8, mlp=200, mel=64, channels=16, out=48, half_chunk=25, window_frames=200
    )


def test_whisper_is_read_from_its_config():
    assert published_configs(WHISPER_TINY, name="config.json") == [whisper.VARIANTS["tiny"]]


def test_whisper_has_every_published_size():
    heads = {"large-v3": 20, "large-v3-turbo": 20, "large-v2": 20, "medium": 16, "small": 12, "base": 8, "tiny": 6}
    english = {f"{size}.en": heads[size] for size in ("medium", "small", "base", "tiny")}
    assert {size: config.heads for size, config in whisper.VARIANTS.items()} == {**heads, **english}
    # 80 mel bins up to version 2; heads are 64 wide and MLPs four times the width in all of them
    assert {size for size, config in whisper.VARIANTS.items() if config.mel == 128} == {"large-v3", "large-v3-turbo"}
    assert all(c.head_dim == 64 and c.mlp == 4 * c.embed for c in whisper.VARIANTS.values())
    assert set(whisper.Config.published) == {f"openai/whisper-{size}" for size in whisper.VARIANTS}


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"hidden_size": 1024}, r"vt_hidden_size = 1152 and hidden_size = 1024 disagree"),
        ({"num_attention_heads": 12}, r"vt_num_attention_heads = 16 and num_attention_heads = 12 disagree"),
        ({"pos_emb_height": 32}, r"init_pos_emb_height = 64 and pos_emb_height = 32 disagree"),
    ],
    ids=str,
)
def test_keys_that_contradict_each_other_are_an_error_naming_both(extra, says):
    with pytest.raises(ConfigError, match=says):
        kimi_k25.Config.from_hf({"vision_config": KIMI_VT | extra})


def test_keys_that_agree_may_both_be_there():
    assert kimi_k25.Config.from_hf({"vision_config": KIMI_VT | KIMI_NATIVE}) == kimi_k25.Config()


def test_all_missing_keys_are_named_together():
    without = {key: value for key, value in QWEN_AUDIO.items() if key not in ("d_model", "n_window_infer")}
    with pytest.raises(ConfigError, match=r"none of d_model is there; none of n_window_infer is there"):
        qwen3_omni_audio.Config.from_hf(without)
    with pytest.raises(ConfigError, match=r"none of vt_hidden_size, hidden_size is there"):
        kimi_k25.Config.from_hf({key: value for key, value in KIMI_VT.items() if key != "vt_hidden_size"})


@pytest.mark.parametrize(
    ("family", "config", "says"),
    [
        (kimi_k25, KIMI_VT | {"merge_type": "mean"}, "merge_type is 'mean', this encoder computes 'sd2_tpool'"),
        (kimi_k25, KIMI_NATIVE | {"hidden_act": "gelu"}, "hidden_act is 'gelu', this encoder computes"),
        (kimi_k25, KIMI_VT | {"merge_kernel_size": [2, 4]}, r"merge_kernel_size is \[2, 4\]; only square"),
        (kimi_k25, KIMI_VT | {"vt_num_attention_heads": 7}, "1152 over 7 heads"),
        (qwen3_omni_audio, QWEN_AUDIO | {"activation_function": "relu"}, "activation_function is 'relu'"),
        (qwen3_omni_audio, QWEN_AUDIO | {"scale_embedding": True}, "scale_embedding is True"),
        (qwen3_omni_audio, QWEN_AUDIO | {"encoder_attention_heads": 24}, "1280 is not a multiple of its 24 heads"),
        (
            qwen3_omni_audio,
            QWEN_AUDIO | {"n_window_infer": 850},
            "850 is no multiple of 2 n_window = 100",
        ),
        (qwen2_5_omni_audio, QWEN25_AUDIO | {"n_window": 25}, "n_window is 25"),
        (qwen2_audio, QWEN2_AUDIO["audio_config"] | {"scale_embedding": True}, "scale_embedding is True"),
        (whisper, WHISPER_TINY | {"encoder_attention_heads": 5}, "384 is not a multiple of its 5 heads"),
    ],
)
def test_a_config_of_another_function_is_refused(family, config, says):
    with pytest.raises(ConfigError, match=says):
        family.Config.from_hf(config)


def test_an_unknown_model_type_is_named_beside_the_known_ones():
    with pytest.raises(ConfigError, match=r"config\.json: model_type is 'bert'; known are clip, .*kimi_k25, .*whisper"):
        published_configs({"model_type": "bert"}, name="config.json")
    with pytest.raises(ConfigError, match=r"model_type is None"):
        published_configs({}, name="config.json")


def test_encoders_are_found_by_family_and_variant():
    assert named_config("kimi_k25") == named_config("kimi_k25:k2.5") == kimi_k25.Config()
    assert named_config("whisper") == named_config("whisper:large-v3")
    assert named_config("whisper:tiny.en").heads == 6
    with pytest.raises(ConfigError, match=r"wisper: no such encoder; there are kimi_k25, .*whisper"):
        named_config("wisper")
    with pytest.raises(ConfigError, match=r"whisper:huge: whisper has the variants large-v3, .*tiny\.en"):
        named_config("whisper:huge")


def test_encoders_lists_every_family_with_its_heads():
    heads = {e.name: dict(zip(e.variants, e.heads, strict=True)) for e in jaxenc.encoders()}
    assert heads["kimi_k25"] == {"k2.5": 16}
    assert heads["qwen3_omni_audio"] == {"30b-a3b": 20}
    assert heads["whisper"]["tiny.en"] == 6
    assert heads["clip"] == {"large-336": 16, "large": 16, "base": 12}
    assert heads["dinov2"] == {"small": 6, "base": 12, "large": 16, "giant": 24}
    assert heads["pixtral"] == {"12b": 16, "mistral-small-3.1": 16}
    vision = {e.name for e in jaxenc.encoders() if e.modality == "vision"}
    assert vision >= {"kimi_k25", "clip", "siglip", "dinov2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_vision"}
    assert heads["glm4v"] == {"9b": 12, "106b": 12}
    assert heads["qwen2_audio"] == {"7b": 20}
    assert heads["qwen2_5_omni_audio"] == {"7b": 20, "3b": 20}
    assert heads["qwen3_asr_audio"] == {"1.7b": 16, "0.6b": 14}
    assert heads["qwen3_vl"]["2b"] == heads["qwen2_5_vl"]["72b"] == 16
    modality = {e.name: e.modality for e in jaxenc.encoders()}
    assert modality["kimi_k25"] == "vision"
    assert modality["qwen2_audio"] == modality["qwen2_5_omni_audio"] == modality["qwen3_asr_audio"] == "audio"
    assert modality["qwen3_omni_audio"] == modality["whisper"] == "audio"
    assert all(e.published for e in jaxenc.encoders())


# --- parameters


def test_parameter_counts_are_the_published_ones():
    kimi, projector = kimi_k25.Config(), parameter_count(kimi_k25.Config(), under="projector/")
    # norm 2 x 1152, 4608 x 4608 + 4608, 7168 x 4608 + 7168
    assert projector == 2304 + 21_238_272 + 33_037_312 == 54_277_888
    assert (parameter_count(kimi) - projector) / 1e6 == pytest.approx(416.9, abs=0.05)
    assert parameter_count(qwen3_omni_audio.Config()) / 1e6 == pytest.approx(647.9, abs=0.05)
    # stem 92,544 + 442,752, positions 576,000, four blocks of 1,774,080, norm 768
    assert parameter_count(whisper.VARIANTS["tiny"]) == 8_208_384


@pytest.mark.parametrize("config", VARIANTS)
def test_every_mapping_fills_every_parameter_exactly_once(config):
    shapes = {path: p.shape for path, p in declared(abstract_module(config, dtype="bfloat16")).items()}
    for layout, mapping in config.mappings().items():
        assert mapping.layout == layout
        assert [path for path, count in Counter(entry.target for entry in mapping.entries).items() if count > 1] == []
        assert mapping.shapes == shapes
        # as many numbers in the file as in the parameters, each tensor once
        assert sum(map(math.prod, mapping.names.values())) == sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize("config", VARIANTS)
def test_parameters_carry_a_name_for_each_axis_that_the_default_rules_know(config):
    rules = jaxenc.default_rules(jax.sharding.AbstractMesh((1, 8), ("data", "model")))
    for path, parameter in declared(abstract_module(config, dtype="float32")).items():
        assert len(parameter.axes) == len(parameter.shape), path
        assert set(parameter.axes) <= set(rules), path


@pytest.mark.parametrize("config", VARIANTS)
def test_heads_are_an_axis_of_every_attention_kernel(config):
    found = declared(abstract_module(config, dtype="float32"))
    kernels = {path: p for path, p in found.items() if "/attention/" in path and path.endswith("kernel")}
    assert kernels
    for path, parameter in kernels.items():
        assert dict(zip(parameter.axes, parameter.shape, strict=True))["heads"] == config.heads, path


# --- how much there is

KIMI = replace(kimi_k25.Config(), layers=1, embed=512, heads=8, mlp=2048, position_h=8, position_w=8, out=1024)
# wide, or the GELUs after the convolutions, which are not counted as work, would show
QWEN = replace(qwen3_omni_audio.Config(), layers=1, mel=64, channels=256)
WHISPER = whisper.Config(1, 512, 8, 2048, mel=80, positions=500)
GLM = replace(glm4v.Config(), layers=1, embed=512, heads=4, mlp=1024, out=1024, positions=8, merger_mlp=2048)
QWEN2 = qwen2_audio.Config(1, 512, 8, 2048, mel=80, out=256, positions=500)


def vision_item(grid, features=588):
    return jaxenc.VisionItem(np.zeros((math.prod(grid), features), np.float32), grid)


@pytest.mark.parametrize(
    ("config", "item", "tokens"),
    [
        pytest.param(KIMI, vision_item((1, 16, 32)), 512, id="kimi_k25"),
        pytest.param(GLM, vision_item((1, 16, 32), features=1176), 512, id="glm4v"),
        # four windows of 104, all chunks whole
        pytest.param(QWEN, jaxenc.AudioItem(np.zeros((64, 3200), np.float32)), 416, id="qwen3_omni_audio"),
        pytest.param(WHISPER, jaxenc.AudioItem(np.zeros((80, 1000), np.float32)), 500, id="whisper"),
        pytest.param(QWEN2, jaxenc.AudioItem(np.zeros((80, 1000), np.float32)), 500, id="qwen2_audio"),
    ],
)
def test_the_stated_work_is_what_xla_counts(config, item, tokens):
    plan = jaxenc.plan(config, mesh=jaxenc.make_mesh(), batch=1, tokens=tokens)
    params = {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype)
        for path, p in declared(abstract_module(config, dtype="bfloat16")).items()
    }
    # bfloat16: float32 products are cut in blocks on CPU, and XLA counts the GELU before them once a block
    full = [Budget(tokens, 1)]
    encoder = Encoder(config, plan, unflatten_dict(params, sep="/"), dtype=jnp.bfloat16, budgets=full)
    batch = encoder.pack([item])
    # the row is full: nothing is computed for padding
    assert int((batch.tokens.item >= 0).sum()) == batch.tokens.item.size == tokens
    with unrolled():
        lowered = jax.jit(encoder.apply).lower(encoder.params, batch)
    counted = lowered.compile().cost_analysis()["flops"]
    workload = config.workload([tokens])
    stated = sum(flops for group in workload.groups for flops in group.flops)
    assert plan.flops_ideal == pytest.approx(stated)
    assert stated == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("frames", "rows"), [(1, 1), (8, 1), (9, 2), (16, 2), (100, 13), (101, 14), (800, 104), (1050, 137), (3000, 390)]
)
def test_audio_rows_follow_the_three_convolutions(frames, rows):
    # 13 a full chunk of 100 frames; of the rest, halved three times, rounding up
    item = jaxenc.AudioItem(np.zeros((128, frames), np.float32))
    assert qwen3_omni_audio.Config().output_rows(item) == rows


@pytest.mark.parametrize(("frames", "pieces"), [(100, (13,)), (30, (13,)), (800, (104,)), (1050, (104, 39))])
def test_audio_pieces_are_windows_of_whole_chunks(frames, pieces):
    item = jaxenc.AudioItem(np.zeros((128, frames), np.float32))
    assert qwen3_omni_audio.Config().pieces(item) == pieces


@pytest.mark.parametrize(
    ("frames", "pieces", "rows"), [(3000, (1500,), 750), (2999, (1500,), 750), (401, (202,), 100), (3, (2,), 1)]
)
def test_qwen2_audio_takes_what_was_recorded_in_whole_pairs(frames, pieces, rows):
    item = jaxenc.AudioItem(np.zeros((128, 3000), np.float32), frames=frames)
    assert qwen2_audio.Config().pieces(item) == pieces
    assert qwen2_audio.Config().output_rows(item) == rows


def test_every_hop_that_a_recording_begins_is_a_frame_before_silence():
    samples = np.random.default_rng(0).normal(0, 0.1, 32_037).astype(np.float32)
    (whole,) = qwen2_audio.Config().read("audio", samples, name="speech")
    (cut,) = qwen2_5_omni_audio.Config().read("audio", samples, name="speech")
    assert (whole.mel.shape, whole.recorded) == ((128, 3000), 201)
    assert (cut.mel.shape, cut.recorded) == ((128, 201), 201)
    np.testing.assert_array_equal(whole.mel[:, :201], cut.mel)
    with pytest.raises(jaxenc.InputError, match=r"speech: 30\.1 s of audio; this encoder reads 30 s: cut it first"):
        qwen2_audio.Config().read("audio", np.tile(samples, 16)[:481_000], name="speech")


@pytest.mark.parametrize(
    ("frames", "pieces", "rows"), [(200, (100,), 50), (401, (100, 100, 2), 100), (497, (100, 100, 50), 124)]
)
def test_qwen2_5_omni_attends_within_two_seconds(frames, pieces, rows):
    item = jaxenc.AudioItem(np.zeros((128, frames), np.float32))
    assert qwen2_5_omni_audio.Config().pieces(item) == pieces
    assert qwen2_5_omni_audio.Config().output_rows(item) == rows


@pytest.mark.parametrize(("grid", "rows"), [((1, 4, 6), 6), ((4, 4, 6), 6), ((2, 2, 2), 1)])
def test_kimi_rows_do_not_depend_on_the_number_of_frames(grid, rows):
    assert kimi_k25.Config().output_rows(vision_item(grid)) == rows
    assert kimi_k25.Config().pieces(vision_item(grid)) == (math.prod(grid),)
