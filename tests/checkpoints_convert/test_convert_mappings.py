"""Names, layouts, slices: what a mapping reads is what the file holds, and its inverse gives the file back."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from checkpoints_convert import Entry, Mapping, Reorder, Target, detect, load_parameters, mappings, open_source
from tests.checkpoints_convert import tiny
from tests.devices import eight

KIMI = mappings.kimi_k25.mappings(**tiny.KIMI)
QWEN = mappings.qwen3_omni_audio.mappings(**tiny.QWEN)
ASR = mappings.qwen3_omni_audio.mappings(**{**tiny.QWEN, "family": "qwen3_asr_audio"})
POOLED = {"layers": 2, "embed": 24, "heads": 4, "mlp": 32, "mel": 10, "out": 20}
QWEN2 = mappings.qwen2_audio.mappings(**POOLED, positions=7)
QWEN25 = mappings.qwen2_5_omni_audio.mappings(**POOLED)
WHISPER = mappings.whisper.mappings(**tiny.WHISPER)
NATIVE = tiny.kimi_transformers(tiny.kimi_original())
VLLM = {
    name.replace("mm_projector.proj.0", "mm_projector.linear_1").replace(
        "mm_projector.proj.2", "mm_projector.linear_2"
    ): v
    for name, v in tiny.kimi_original().items()
}
ASR_NATIVE = {
    name.replace("audio_tower.proj", "multi_modal_projector.linear_"): v
    for name, v in tiny.qwen_audio("model.audio_tower.").items()
}
CHECKPOINTS = [
    pytest.param(KIMI, tiny.kimi_original(), "original", id="kimi-original"),
    pytest.param(KIMI, VLLM, "original", id="kimi-original-vllm-projector"),
    pytest.param(KIMI, NATIVE, "transformers", id="kimi-transformers"),
    pytest.param(KIMI, {k.removeprefix("model."): v for k, v in NATIVE.items()}, "transformers", id="kimi-no-model"),
    pytest.param(QWEN, tiny.qwen_audio(), "original", id="qwen"),
    pytest.param(QWEN, tiny.qwen_audio("audio_tower."), "original", id="qwen-thinker-alone"),
    pytest.param(ASR, tiny.qwen_audio(), "original", id="qwen-asr"),
    pytest.param(ASR, ASR_NATIVE, "transformers", id="qwen-asr-transformers"),
    pytest.param(
        ASR, {k.removeprefix("model."): v for k, v in ASR_NATIVE.items()}, "transformers", id="qwen-asr-no-model"
    ),
    pytest.param(QWEN2, tiny.fill(QWEN2["original"].names), "original", id="qwen2-audio"),
    pytest.param(
        QWEN2,
        tiny.fill({f"model.{name}": shape for name, shape in QWEN2["original"].names.items()}),
        "original",
        id="qwen2-audio-transformers",
    ),
    pytest.param(QWEN25, tiny.fill(QWEN25["original"].names), "original", id="qwen2.5-omni"),
    pytest.param(WHISPER, tiny.whisper(), "original", id="whisper"),
    pytest.param(WHISPER, tiny.whisper("encoder."), "original", id="whisper-no-model"),
]


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    if len(eight()) < 8:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,), devices=eight()[:8])


def load(path, candidates, dtype="bfloat16", specs=None, mesh=None):
    source = open_source(path)
    mapping = detect(source, candidates)
    targets = {}
    for name, shape in mapping.shapes.items():
        sharding = NamedSharding(mesh, (specs or {}).get(name, PartitionSpec())) if mesh else None
        targets[name] = Target(shape, dtype, sharding)
    return mapping, load_parameters(source, mapping, targets)


@pytest.mark.parametrize(("candidates", "tensors", "layout"), CHECKPOINTS)
def test_a_checkpoint_comes_back_bit_for_bit_from_its_parameters(tmp_path, candidates, tensors, layout):
    save_file(tensors, tmp_path / "model.safetensors")
    mapping, params = load(tmp_path, candidates)
    assert mapping.layout == layout
    exported = dict(mapping.export(params))
    assert exported.keys() == tensors.keys()
    assert all(tiny.same_bits(exported[name], value) for name, value in tensors.items())


def test_both_layouts_of_kimi_give_identical_parameters(tmp_path):
    original = tiny.kimi_original()
    save_file(original, tmp_path / "original.safetensors")
    save_file(tiny.kimi_transformers(original), tmp_path / "native.safetensors")
    _, ours = load(tmp_path / "original.safetensors", KIMI)
    _, theirs = load(tmp_path / "native.safetensors", KIMI)
    assert ours.keys() == theirs.keys()
    assert all(tiny.same_bits(ours[name], theirs[name]) for name in ours)


def test_kimi_parameters_are_the_published_tensors_reshaped(tmp_path):
    original = tiny.kimi_original()
    save_file(original, tmp_path / "model.safetensors")
    _, params = load(tmp_path, KIMI)
    block = "vision_tower.encoder.blocks."
    expected = {
        "patch_embed/kernel": original["vision_tower.patch_embed.proj.weight"].reshape(32, 12),
        "position_embed": original["vision_tower.patch_embed.pos_emb.weight"],
        "layers/attention_norm/scale": np.stack([original[f"{block}{n}.norm0.weight"] for n in range(3)]),
        "layers/mlp_norm/bias": np.stack([original[f"{block}{n}.norm1.bias"] for n in range(3)]),
        "layers/attention/qkv/kernel": np.stack(
            [original[f"{block}{n}.wqkv.weight"].reshape(3, 8, 4, 32) for n in range(3)]
        ),
        "layers/attention/qkv/bias": np.stack([original[f"{block}{n}.wqkv.bias"].reshape(3, 8, 4) for n in range(3)]),
        "layers/attention/out/kernel": np.stack(
            [original[f"{block}{n}.wo.weight"].reshape(32, 8, 4) for n in range(3)]
        ),
        "layers/mlp/up/kernel": np.stack([original[f"{block}{n}.mlp.fc0.weight"] for n in range(3)]),
        "layers/mlp/down/kernel": np.stack([original[f"{block}{n}.mlp.fc1.weight"] for n in range(3)]),
        "final_norm/bias": original["vision_tower.encoder.final_layernorm.bias"],
        "projector/norm/scale": original["mm_projector.pre_norm.weight"],
        "projector/up/kernel": original["mm_projector.proj.0.weight"],
        "projector/down/bias": original["mm_projector.proj.2.bias"],
    }
    for name, value in expected.items():
        assert tiny.same_bits(params[name], value), name


def test_audio_parameters_keep_query_key_and_value_apart(tmp_path):
    tensors = tiny.qwen_audio()
    save_file(tensors, tmp_path / "model.safetensors")
    _, params = load(tmp_path, QWEN)
    stacked = [tensors[f"thinker.audio_tower.layers.{n}.self_attn.k_proj.weight"].reshape(4, 6, 24) for n in range(2)]
    assert tiny.same_bits(params["layers/attention/key/kernel"], np.stack(stacked))
    assert tiny.same_bits(params["stem/conv1/kernel"], tensors["thinker.audio_tower.conv2d1.weight"])
    assert tiny.same_bits(params["stem/out/kernel"], tensors["thinker.audio_tower.conv_out.weight"])
    assert "layers/attention/key/bias" in params
    assert "stem/out/bias" not in params


def test_whisper_has_no_key_bias():
    assert "layers/attention/query/bias" in WHISPER["original"].shapes
    assert "layers/attention/key/bias" not in WHISPER["original"].shapes


def test_sharded_parameters_equal_unsharded_ones(tmp_path, mesh):
    for layout, tensors in (("original", tiny.kimi_original()), ("native", NATIVE)):
        save_file(tensors, tmp_path / f"{layout}.safetensors")
        specs = {
            "layers/attention/qkv/kernel": PartitionSpec(None, None, "model"),
            "layers/attention/qkv/bias": PartitionSpec(None, None, "model"),
            "layers/attention/out/kernel": PartitionSpec(None, None, "model"),
            "layers/mlp/up/kernel": PartitionSpec(None, "model"),
            "layers/mlp/down/kernel": PartitionSpec(None, None, "model"),
            "projector/down/kernel": PartitionSpec("model"),
        }
        _, whole = load(tmp_path / f"{layout}.safetensors", KIMI)
        _, parts = load(tmp_path / f"{layout}.safetensors", KIMI, specs=specs, mesh=mesh)
        for name, value in parts.items():
            assert value.sharding == NamedSharding(mesh, specs.get(name, PartitionSpec())), name
            assert tiny.same_bits(value, whole[name]), name
        assert parts["layers/attention/qkv/kernel"].addressable_shards[0].data.shape == (3, 3, 1, 4, 32)


def test_every_slice_equals_the_slice_of_the_whole(tmp_path):
    # Transposed, reordered and stacked twice, so that each step meets each kind of slice.
    tensors = tiny.fill({f"b.{n}.{part}": (6, 4) for n in range(3) for part in "qk"}, np.float32)
    save_file(tensors, tmp_path / "m.safetensors")
    order = (2, 0, 1)
    entry = Entry(
        "w",
        ("b.{layer}.q", "b.{layer}.k"),
        stored=(6, 4),
        shape=(3, 2, 4),
        transpose=(2, 0, 1),
        reorder=(Reorder(1, order), None),
    )
    mapping = Mapping("toy", "original", entries=(entry,), prefixes=("b.",), layers=3)
    whole = np.stack(
        [np.stack([tensors[f"b.{n}.{part}"].reshape(3, 2, 4).transpose(2, 0, 1) for part in "qk"]) for n in range(3)]
    )
    whole[:, 0] = whole[:, 0][:, :, list(order)]
    source = open_source(tmp_path / "m.safetensors")
    assert mapping.check(source, {"w": (3, 2, 4, 3, 2)}) == []
    spans = [[slice(None), slice(1, 2)] for _ in range(5)]
    for index in itertools.product(*spans):
        assert tiny.same_bits(mapping.read(source, "w", index), whole[index]), index
    assert tiny.same_bits(mapping.read(source, "w", dtype=np.float64), whole.astype(np.float64))
    assert {name: value.tobytes() for name, value in mapping.export({"w": whole})} == {
        name: value.tobytes() for name, value in tensors.items()
    }


def test_a_shard_reads_only_its_own_bytes(tmp_path, mesh, monkeypatch):
    save_file(tiny.kimi_original(), tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    mapping = KIMI["original"]
    read = []
    inner = source.read_into
    monkeypatch.setattr(source, "read", lambda name: pytest.fail(f"{name} was mapped whole"))
    monkeypatch.setattr(
        source, "read_into", lambda name, out, *, start=0: (read.append(out.nbytes), inner(name, out, start=start))
    )
    head = mapping.read(source, "layers/mlp/up/kernel", (slice(1, 2), slice(6, 12), slice(None)))
    assert head.shape == (1, 6, 32)
    assert read == [6 * 32 * 2]


def test_weights_are_cast_to_the_dtype_asked_for(tmp_path):
    tensors = tiny.kimi_original(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    _, params = load(tmp_path, KIMI, dtype="bfloat16")
    name = "mm_projector.proj.0.weight"
    assert tiny.same_bits(params["projector/up/kernel"], tensors[name].astype(ml_dtypes.bfloat16))


def test_kimi_names_and_permutation_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.core_model_loading import PermuteForRope
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

    config = Kimi_K25VisionConfig(
        hidden_size=32,
        num_attention_heads=8,
        num_hidden_layers=3,
        intermediate_size=48,
        patch_size=2,
        pos_emb_height=4,
        pos_emb_width=6,
    )
    tower = {
        f"model.vision_tower.{name}": tuple(value.shape)
        for name, value in Kimi_K25VisionModel(config).state_dict().items()
    }
    ours = {k: v for k, v in KIMI["transformers"].names.items() if k.startswith("model.vision_tower.")}
    assert ours == tower

    value = torch.arange(32 * 32, dtype=torch.float32).reshape(32, 32)
    permuted = PermuteForRope()._permute_for_rope(value, config).numpy()
    block = "vision_tower.encoder.blocks.0.wqkv.weight"
    native = tiny.kimi_transformers({block: np.tile(value.numpy(), (3, 1)), **_rest(block)})
    assert np.array_equal(native["model.vision_tower.layers.0.attn.q_proj.weight"], permuted)


def test_audio_names_are_those_of_transformers():
    pytest.importorskip("transformers")
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
    from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioEncoderConfig
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder
    from transformers.models.whisper.configuration_whisper import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32}
    qwen = Qwen3OmniMoeAudioEncoder(
        Qwen3OmniMoeAudioEncoderConfig(
            **sizes, num_mel_bins=64, downsample_hidden_size=6, output_dim=20, max_source_positions=50
        )
    )
    encoder = WhisperEncoder(WhisperConfig(**sizes, num_mel_bins=10, max_source_positions=7))
    qwen2 = Qwen2AudioEncoder(Qwen2AudioEncoderConfig(**sizes, num_mel_bins=10, max_source_positions=7))
    qwen25 = Qwen2_5OmniAudioEncoder(Qwen2_5OmniAudioEncoderConfig(**sizes, num_mel_bins=10, output_dim=20))
    for mapping, prefix, model in (
        (QWEN25["original"], "thinker.audio_tower.", qwen25),
        (QWEN["original"], "thinker.audio_tower.", qwen),
        (WHISPER["original"], "model.encoder.", encoder),
    ):
        assert mapping.names == {prefix + name: tuple(v.shape) for name, v in model.state_dict().items()}
    projector = {f"multi_modal_projector.linear.{name}": v for name, v in (("weight", (20, 24)), ("bias", (20,)))}
    tower = {f"audio_tower.{name}": tuple(v.shape) for name, v in qwen2.state_dict().items()}
    assert QWEN2["original"].names == tower | projector


def _rest(block: str) -> tiny.Tensors:
    return {name: value for name, value in tiny.kimi_original().items() if name != block}
