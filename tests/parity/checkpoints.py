"""Small checkpoints with the names, nesting and neighbours of the published ones. NumPy and safetensors only.

Every number comes from an integer hash of (seed, tensor name, index), so a checkpoint is the same on every machine and
with every version of NumPy: the value files of `tests.reference` hold what goes out, not what went in. Values are exact
in bfloat16, as in the published files, so that float32 and bfloat16 copies of a checkpoint hold the same numbers.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """One tiny model as it could have been published.

    Attributes:
        tensors: per key layout, the tower's tensors: float32 values that bfloat16 holds exactly.
        neighbours: per key layout, tensors of the rest of the model, NaN where floating. Nothing may read them.
        configs: per variant, a config.json.
    """

    tensors: dict[str, Tensors]
    neighbours: dict[str, Tensors]
    configs: dict[str, Config]

    def write(
        self,
        folder: Path,
        *,
        layout: str = "original",
        config: str = "original",
        dtype: str = "bfloat16",
        shards: int = 3,
    ) -> Path:
        """Save one layout with one config, the neighbours first as in the published files; returns the folder."""
        tensors = {**self.neighbours[layout], **self.tensors[layout]}
        return write_checkpoint(folder, tensors, self.configs[config], shards=shards, dtype=dtype)


def write_checkpoint(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Config, *, shards: int = 3, dtype: str | None = None
) -> Path:
    """Save tensors as `shards` safetensors files of about equally many, with their index and config.json.

    Args:
        folder: where to; made if it is not there.
        tensors: name -> array, in the order in which they go into the shards.
        config: what config.json holds.
        shards: number of files; one alone is called model.safetensors and has no index.
        dtype: what floating tensors are stored as; None keeps theirs.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: _stored(value, dtype) for name, value in tensors.items()}
    total_bytes = sum(value.nbytes for value in stored.values())
    files: list[Tensors] = [{} for _ in range(shards)]
    for index, (name, value) in enumerate(stored.items()):
        files[index * shards // len(stored)][name] = value
    if shards == 1:
        save_file(files[0], folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for index, content in enumerate(files, start=1):
            file_name = f"model-{index:05d}-of-{shards:05d}.safetensors"
            save_file(content, folder / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(content, file_name))
        index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2, sort_keys=True))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of `shape`, uniform in [-1, 1), a SplitMix64 hash (Steele et al. 2014) of seed, name, index."""
    start = np.uint64(zlib.crc32(name.encode()) << 32) ^ np.uint64(seed)
    z = start + np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)).reshape(shape)


# Kimi-K2.5: vision tower and projector


@dataclass(frozen=True)
class KimiSizes:
    """Sizes of a tiny Kimi-K2.5; `table` is the learned position table (height, width)."""

    layers: int = 2
    heads: int = 4
    head_dim: int = 12
    mlp: int = 88
    patch: int = 14
    table: tuple[int, int] = (64, 64)
    text: int = 40
    projector_eps: float = 1e-5

    @property
    def embed(self) -> int:
        """Width of the tower."""
        return self.heads * self.head_dim


def kimi_k25(
    sizes: KimiSizes = KimiSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Kimi-K2.5.

    Layouts: `original` (published) and `transformers` (as transformers saves it: q, k and v apart, the rows of q and k
    reordered for rotate-half). Configs: `original` (vt_* keys), `plain` (keys without the prefix), `transformers`.
    `scales` multiplies every tensor whose published name contains a key.
    """
    d, f, p = sizes.embed, sizes.mlp, 4 * sizes.embed
    make = _Maker(seed, scales)
    make.norm("mm_projector.pre_norm", d)
    make.linear("mm_projector.proj.0", (p, p), gain=1.2)
    make.linear("mm_projector.proj.2", (sizes.text, p), gain=1.2)
    for n in range(sizes.layers):
        block = f"vision_tower.encoder.blocks.{n}"
        make.linear(f"{block}.mlp.fc0", (f, d), gain=1.3)
        make.linear(f"{block}.mlp.fc1", (d, f), gain=1.2)
        make.norm(f"{block}.norm0", d)
        make.norm(f"{block}.norm1", d)
        make.linear(f"{block}.wo", (d, d), gain=1.2)
        make.linear(f"{block}.wqkv", (3 * d, d), gain=1.3)
    make.norm("vision_tower.encoder.final_layernorm", d)
    make.tensor("vision_tower.patch_embed.pos_emb.weight", (*sizes.table, d), scale=1.2)
    make.linear("vision_tower.patch_embed.proj", (d, 3, sizes.patch, sizes.patch), gain=1.6)
    original = make.tensors
    native = {}
    for name, value in original.items():
        native.update(_kimi_native(name, value, sizes))
    return Checkpoint(
        {"original": original, "transformers": native},
        {
            "original": _kimi_neighbours("language_model.model", "language_model.lm_head", sizes.text),
            "transformers": _kimi_neighbours("model.language_model", "lm_head", sizes.text),
        },
        _kimi_configs(sizes),
    )


def _kimi_native(name: str, value: np.ndarray, sizes: KimiSizes) -> Tensors:
    """The tensors that transformers' Kimi_K25Model keeps for one published tensor (its conversion_mapping.py)."""
    # Longest first, and in one pass: renaming norm0 to norm1 and then norm1 to norm2 would merge the two norms.
    renames = {
        "vision_tower.encoder.blocks.": "model.vision_tower.layers.", "vision_tower.encoder.": "model.vision_tower.",
        "vision_tower.patch_embed.pos_emb.weight": "model.vision_tower.patch_embed.pos_emb.position_embeddings",
        "vision_tower.": "model.vision_tower.", "mm_projector.proj.0": "model.mm_projector.in_proj",
        "mm_projector.proj.2": "model.mm_projector.out_proj", "mm_projector.": "model.mm_projector.",
    }  # fmt: skip
    prefix = next(old for old in renames if name.startswith(old))
    head, rest = renames[prefix], name.removeprefix(prefix)
    parts = {"norm0": "norm1", "norm1": "norm2", "mlp.fc0": "mlp.fc1", "mlp.fc1": "mlp.fc2", "wo": "attn.proj"}
    layer, _, inner = rest.partition(".")
    if not (layer.isdigit() and prefix.endswith("blocks.")):
        return {head + rest: value}
    stem, kind = inner.rsplit(".", 1)
    if stem != "wqkv":
        return {f"{head}{layer}.{parts[stem]}.{kind}": value}
    query, key, third = np.split(value, 3)
    pairs = (sizes.heads, sizes.head_dim // 2, 2, -1)
    halves = [np.ascontiguousarray(x.reshape(pairs).swapaxes(1, 2)).reshape(x.shape) for x in (query, key)]
    names = [f"{head}{layer}.attn.{letter}_proj.{kind}" for letter in "qkv"]
    return dict(zip(names, [*halves, np.ascontiguousarray(third)], strict=True))


def _kimi_neighbours(model: str, lm_head: str, text: int) -> Tensors:
    """Parts of the language model, its experts packed to int4 as published."""
    expert = f"{model}.layers.1.mlp.experts.0.down_proj"
    return {
        f"{lm_head}.weight": _nan(96, text),
        f"{model}.embed_tokens.weight": _nan(96, text),
        f"{model}.norm.weight": _nan(text),
        f"{model}.layers.0.input_layernorm.weight": _nan(text),
        f"{model}.layers.0.self_attn.o_proj.weight": _nan(text, 64),
        f"{model}.layers.1.mlp.gate.e_score_correction_bias": _nan(8),
        f"{expert}.weight_packed": np.full((text, 8), -1, np.int32),
        f"{expert}.weight_scale": _nan(text, 2),
        f"{expert}.weight_shape": np.array([text, 64], np.int32),
    }


def _kimi_configs(sizes: KimiSizes) -> dict[str, Config]:
    d, (height, width) = sizes.embed, sizes.table
    tower = {"hidden_size": d, "intermediate_size": sizes.mlp, "num_attention_heads": sizes.heads,
             "num_hidden_layers": sizes.layers}  # fmt: skip
    common = {
        "init_pos_emb_height": height, "init_pos_emb_time": 4, "init_pos_emb_width": width, "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool", "mm_hidden_size": d, "mm_projector_type": "patchmerger", "patch_size": sizes.patch,
        "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": sizes.projector_eps,
        "text_hidden_size": sizes.text, "video_attn_type": "spatial_temporal",
    }  # fmt: skip
    quantization = {"format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
                    "quant_method": "compressed-tensors", "quantization_status": "compressed"}  # fmt: skip
    # Sizes that no tower has: a reader that takes the text model's by mistake shows.
    text = {"hidden_size": sizes.text, "intermediate_size": 56, "num_attention_heads": 2, "num_hidden_layers": 2,
            "model_type": "deepseek_v3", "vocab_size": 96}  # fmt: skip
    published = {
        "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 163584, "dtype": "bfloat16",
        "eos_token_id": 163585, "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25",
        "pad_token_id": 163839, "tie_word_embeddings": False, "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": {**text, "quantization_config": quantization},
    }  # fmt: skip
    native = {
        "architectures": ["Kimi_K25ForConditionalGeneration"], "dtype": "bfloat16", "model_type": "kimi_k25",
        "image_token_id": 163605, "video_token_id": 163840, "projection_hidden_size": d,
        "projection_layer_norm_eps": sizes.projector_eps, "text_config": text, "tie_word_embeddings": True,
        "transformers_version": "5.24.0",
        "vision_config": {
            **tower, "hidden_act": "gelu_pytorch_tanh", "merge_kernel_size": [2, 2], "model_type": "kimi_k25_vision",
            "patch_size": sizes.patch, "pos_emb_height": height, "pos_emb_time": 4, "pos_emb_width": width,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
        },
    }  # fmt: skip
    prefixed = {f"vt_{key}": value for key, value in tower.items()}
    return {
        "original": {**published, "vision_config": {**common, **prefixed, "model_type": ""}},
        "plain": {**published, "vision_config": {**common, **tower, "model_type": "kimi_k25"}},
        "transformers": native,
    }


# Qwen3-Omni: audio tower


@dataclass(frozen=True)
class AudioSizes:
    """Sizes of a tiny Qwen3-Omni audio tower; `channels` are those of the three convolutions."""

    layers: int = 2
    heads: int = 5
    head_dim: int = 8
    mlp: int = 72
    channels: int = 6
    output: int = 28
    mel: int = 128

    @property
    def embed(self) -> int:
        """Width of the tower."""
        return self.heads * self.head_dim


def qwen3_omni_audio(
    sizes: AudioSizes = AudioSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Qwen3-Omni with its audio tower.

    Layouts: `original` (published: thinker.audio_tower.*), `thinker` (the thinker saved by itself: audio_tower.*),
    `tower` (the encoder saved by itself). Configs have the same names and nest alike.
    `scales` multiplies every tensor whose name contains a key.
    """
    d, c = sizes.embed, sizes.channels
    make = _Maker(seed, scales)
    for number, inputs in ((1, 1), (2, c), (3, c)):
        make.linear(f"conv2d{number}", (c, inputs, 3, 3), gain=1.5)
    make.linear("conv_out", (d, c * -(-sizes.mel // 8)), gain=1.4, bias=False)
    make.whisper_blocks(sizes.layers, d, sizes.mlp, key_bias=True)
    make.norm("ln_post", d)
    make.linear("proj1", (d, d), gain=1.2)
    make.linear("proj2", (sizes.output, d), gain=1.2)
    tower = make.tensors
    prefixes = {"original": "thinker.audio_tower.", "thinker": "audio_tower.", "tower": ""}
    return Checkpoint(
        {layout: {prefix + name: value for name, value in tower.items()} for layout, prefix in prefixes.items()},
        {"original": _omni_neighbours("thinker.", d), "thinker": _omni_neighbours("", d), "tower": {}},
        _omni_configs(sizes),
    )


def _omni_neighbours(prefix: str, width: int) -> Tensors:
    """Parts of the language model, the vision tower, and (of the whole model) the talker and the vocoder."""
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.experts.0.down_proj.weight", "lm_head.weight",
             "visual.patch_embed.proj.bias", "visual.blocks.0.attn.qkv.weight"]  # fmt: skip
    whole = ["talker.model.norm.weight", "talker.text_projection.linear_fc1.weight", "code2wav.decoder.0.conv.weight"]
    return {name: _nan(48, width) for name in [*(prefix + name for name in names), *(whole if prefix else ())]}


def _omni_configs(sizes: AudioSizes) -> dict[str, Config]:
    audio = {
        "activation_dropout": 0, "activation_function": "gelu", "attention_dropout": 0, "conv_chunksize": 500,
        "d_model": sizes.embed, "downsample_hidden_size": sizes.channels, "dropout": 0, "dtype": None,
        "encoder_attention_heads": sizes.heads, "encoder_ffn_dim": sizes.mlp, "encoder_layers": sizes.layers,
        "initializer_range": 0.02, "max_source_positions": 1500, "model_type": "qwen3_omni_moe_audio_encoder",
        "n_window": 50, "n_window_infer": 800, "num_mel_bins": sizes.mel, "output_dim": sizes.output,
        "scale_embedding": False, "tie_word_embeddings": True,
    }  # fmt: skip
    thinker = {
        "audio_config": audio, "audio_end_token_id": 151670, "audio_start_token_id": 151669, "audio_token_id": 151675,
        "dtype": "bfloat16", "image_token_id": 151655, "model_type": "qwen3_omni_moe_thinker",
        "position_id_per_seconds": 13, "seconds_per_chunk": 2, "user_token_id": 872, "video_token_id": 151656,
        "text_config": {"head_dim": 16, "hidden_size": sizes.output, "intermediate_size": 24, "num_attention_heads": 2,
                        "num_hidden_layers": 1, "model_type": "qwen3_omni_moe_text", "vocab_size": 96},
        "vision_config": {"deepstack_visual_indexes": [0], "depth": 1, "hidden_act": "gelu_pytorch_tanh",
                          "hidden_size": 32, "in_channels": 3, "intermediate_size": 48, "num_heads": 2,
                          "model_type": "qwen3_omni_moe_vision_encoder", "num_position_embeddings": 16,
                          "out_hidden_size": sizes.output, "patch_size": 16, "spatial_merge_size": 2,
                          "temporal_patch_size": 2},
    }  # fmt: skip
    whole = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "assistant_token_id": 77091,
        "code2wav_config": {"hidden_size": 24, "model_type": "", "num_attention_heads": 2, "num_hidden_layers": 1},
        "dtype": "bfloat16", "enable_audio_output": True, "model_type": "qwen3_omni_moe",
        "talker_config": {"accept_hidden_layer": 24, "model_type": "", "text_config": {"hidden_size": 24}},
        "thinker_config": thinker,
    }  # fmt: skip
    return {
        "original": whole,
        "thinker": {"architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"], **thinker},
        "tower": {"architectures": ["Qwen3OmniMoeAudioEncoder"], **audio, "dtype": "bfloat16"},
    }


# Qwen3-ASR: the same tower


def qwen3_asr_audio(sizes: AudioSizes = AudioSizes(heads=7), *, seed: int = 0) -> Checkpoint:
    """A tiny Qwen3-ASR: the tensors of `qwen3_omni_audio` at those sizes.

    Layouts: `original` (published: thinker.audio_tower.*) and `transformers` (the projector beside the tower). Configs
    have the same names.
    """
    omni = qwen3_omni_audio(sizes, seed=seed)
    native = {
        f"model.audio_tower.{name}".replace("audio_tower.proj", "multi_modal_projector.linear_"): value
        for name, value in omni.tensors["tower"].items()
    }
    audio = {**omni.configs["original"]["thinker_config"]["audio_config"], "model_type": "qwen3_asr_audio_encoder"}
    text = {"hidden_size": sizes.output, "model_type": "qwen3", "num_hidden_layers": 1, "vocab_size": 96}
    keys = ("d_model", "downsample_hidden_size", "encoder_attention_heads", "encoder_ffn_dim", "encoder_layers",
            "n_window", "n_window_infer", "num_mel_bins", "output_dim", "activation_function",
            "scale_embedding")  # fmt: skip
    common = {"architectures": ["Qwen3ASRForConditionalGeneration"], "model_type": "qwen3_asr"}
    thinker = {"audio_config": audio, "model_type": "qwen3_asr", "text_config": text}
    native_audio = {key: audio[key] for key in keys} | {"model_type": "qwen3_asr_encoder"}
    return Checkpoint(
        {"original": omni.tensors["original"], "transformers": native},
        {
            "original": _omni_neighbours("thinker.", sizes.embed),
            "transformers": {"model.language_model.norm.weight": _nan(sizes.output), "lm_head.weight": _nan(96, 8)},
        },
        {
            "original": {**common, "support_languages": ["English"], "thinker_config": thinker},
            "transformers": {**common, "audio_config": native_audio, "text_config": text},
        },
    )


# Qwen-VL and GLM-V: vision towers


@dataclass(frozen=True)
class QwenSizes:
    """Sizes of a tiny Qwen-VL or GLM-V tower; the families leave out what they have not."""

    layers: int = 3
    heads: int = 4
    head_dim: int = 12
    mlp: int = 84
    patch: int = 4
    table: int = 12
    deepstack: tuple[int, ...] = (0, 2)
    window: int = 32
    whole: tuple[int, ...] = (1,)
    text: int = 40

    @property
    def embed(self) -> int:
        """Width of the tower."""
        return self.heads * self.head_dim


def qwen2_vl(
    sizes: QwenSizes = QwenSizes(mlp=96), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Qwen2-VL. Layouts: `original` (visual.*), `model` (model.visual.*); configs: whole and of the `tower`."""
    make = _Maker(seed, scales)
    _qwen_tower(make, sizes, up=("fc1",), down="fc2", patch_bias=False)
    _qwen_merger(make, "merger", sizes, parts=("ln_q", "mlp.0", "mlp.2"))
    vision = {
        "depth": sizes.layers, "embed_dim": sizes.embed, "hidden_act": "quick_gelu", "hidden_size": sizes.text,
        "in_channels": 3, "in_chans": 3, "mlp_ratio": sizes.mlp // sizes.embed, "model_type": "qwen2_vl",
        "num_heads": sizes.heads, "patch_size": sizes.patch, "spatial_merge_size": 2, "spatial_patch_size": sizes.patch,
        "temporal_patch_size": 2,
    }  # fmt: skip
    return _qwen(
        make.tensors, vision, "visual.", {"model_type": "qwen2_vl", "hidden_size": 72, "vision_config": vision}
    )


def qwen2_5_vl(
    sizes: QwenSizes = QwenSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Qwen2.5-VL, as `qwen2_vl`."""
    make = _Maker(seed, scales, norm_bias=False)
    _qwen_tower(make, sizes, up=("gate_proj", "up_proj"), down="down_proj", patch_bias=False)
    _qwen_merger(make, "merger", sizes, parts=("ln_q", "mlp.0", "mlp.2"))
    vision = {
        "depth": sizes.layers, "fullatt_block_indexes": list(sizes.whole), "hidden_act": "silu",
        "hidden_size": sizes.embed, "in_chans": 3, "intermediate_size": sizes.mlp, "model_type": "qwen2_5_vl",
        "num_heads": sizes.heads, "out_hidden_size": sizes.text, "patch_size": sizes.patch, "spatial_merge_size": 2,
        "spatial_patch_size": sizes.patch, "temporal_patch_size": 2, "tokens_per_second": 2,
        "window_size": sizes.window,
    }  # fmt: skip
    return _qwen(
        make.tensors, vision, "visual.", {"model_type": "qwen2_5_vl", "hidden_size": 72, "vision_config": vision}
    )


def qwen3_vl(
    sizes: QwenSizes = QwenSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Qwen3-VL, as `qwen2_vl`; published as model.visual.*, and `model` is visual.* here."""
    make = _Maker(seed, scales)
    _qwen_tower(make, sizes, up=("linear_fc1",), down="linear_fc2", patch_bias=True, table="pos_embed")
    parts = ("norm", "linear_fc1", "linear_fc2")
    _qwen_merger(make, "merger", sizes, parts=parts)
    for place in range(len(sizes.deepstack)):
        _qwen_merger(make, f"deepstack_merger_list.{place}", sizes, parts=parts, norm_of_group=True)
    vision = _qwen3_vision(sizes, "qwen3_vl")
    text = {"hidden_size": 72, "model_type": "qwen3_vl_text", "num_hidden_layers": 1}
    return _qwen(
        make.tensors, vision, "model.visual.", {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    )


def qwen3_omni_vision(
    sizes: QwenSizes = QwenSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Qwen3-Omni with its vision tower, as `qwen2_vl`; published as thinker.visual.*."""
    make = _Maker(seed, scales)
    _qwen_tower(make, sizes, up=("linear_fc1",), down="linear_fc2", patch_bias=True, table="pos_embed")
    parts = ("ln_q", "mlp.0", "mlp.2")
    _qwen_merger(make, "merger", sizes, parts=parts)
    for place in range(len(sizes.deepstack)):
        _qwen_merger(make, f"merger_list.{place}", sizes, parts=parts, norm_of_group=True)
    vision = _qwen3_vision(sizes, "qwen3_omni_moe_vision_encoder")
    config = _omni_configs(AudioSizes())["original"]
    config["thinker_config"]["vision_config"] = vision
    return _qwen(make.tensors, vision, "thinker.visual.", config)


def glm4v(
    sizes: QwenSizes = QwenSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny GLM-4.1V, as `qwen3_vl`. As in its config, `mlp` is the merger's, and the blocks' is as wide as `text`."""
    make, d, out = _Maker(seed, scales, norm_bias=False), sizes.embed, sizes.text
    gated, table = ("gate_proj", "up_proj"), "embeddings.position_embedding"
    blocks = replace(sizes, mlp=out)
    _qwen_tower(make, blocks, up=gated, down="down_proj", patch_bias=True, table=table, bias=False)
    make.norm("post_conv_layernorm", d)
    make.norm("post_layernorm", d)
    make.linear("downsample", (out, d, 2, 2), gain=1.3)
    make.linear("merger.proj", (out, out), gain=1.2, bias=False)
    make.norm("merger.post_projection_norm", out, bias=True)
    for name in gated:
        make.linear(f"merger.{name}", (sizes.mlp, out), gain=1.3, bias=False)
    make.linear("merger.down_proj", (out, sizes.mlp), gain=1.2, bias=False)
    vision = {
        "attention_bias": False, "depth": sizes.layers, "hidden_act": "silu", "hidden_size": d,
        "image_size": sizes.table * sizes.patch, "in_channels": 3, "initializer_range": 0.02,
        "intermediate_size": sizes.mlp, "model_type": "glm4v", "num_heads": sizes.heads, "out_hidden_size": out,
        "patch_size": sizes.patch, "rms_norm_eps": 1e-5, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = {"model_type": "glm4v", "hidden_size": out, "intermediate_size": 72, "vision_config": vision}
    return _qwen(make.tensors, vision, "model.visual.", config)


def _qwen_tower(
    make: "_Maker",
    sizes: QwenSizes,
    *,
    up: tuple[str, ...],
    down: str,
    patch_bias: bool,
    table: str = "",
    bias: bool = True,
) -> None:
    d, f = sizes.embed, sizes.mlp
    make.linear("patch_embed.proj", (d, 3, 2, sizes.patch, sizes.patch), gain=1.6, bias=patch_bias)
    if table:
        make.tensor(f"{table}.weight", (sizes.table**2, d), scale=1.2)
    for n in range(sizes.layers):
        block = f"blocks.{n}"
        make.norm(f"{block}.norm1", d)
        make.norm(f"{block}.norm2", d)
        make.linear(f"{block}.attn.qkv", (3 * d, d), gain=1.3, bias=bias)
        make.linear(f"{block}.attn.proj", (d, d), gain=1.2, bias=bias)
        for name in up:
            make.linear(f"{block}.mlp.{name}", (f, d), gain=1.3, bias=bias)
        make.linear(f"{block}.mlp.{down}", (d, f), gain=1.2, bias=bias)


def _qwen_merger(
    make: "_Maker", name: str, sizes: QwenSizes, *, parts: tuple[str, str, str], norm_of_group: bool = False
) -> None:
    width = 4 * sizes.embed
    make.norm(f"{name}.{parts[0]}", width if norm_of_group else sizes.embed)
    make.linear(f"{name}.{parts[1]}", (width, width), gain=1.2)
    make.linear(f"{name}.{parts[2]}", (sizes.text, width), gain=1.2)


def _qwen3_vision(sizes: QwenSizes, model_type: str) -> Config:
    return {
        "deepstack_visual_indexes": list(sizes.deepstack), "depth": sizes.layers, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": sizes.embed, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": sizes.mlp,
        "model_type": model_type, "num_heads": sizes.heads, "num_position_embeddings": sizes.table**2,
        "out_hidden_size": sizes.text, "patch_size": sizes.patch, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip


def _qwen(tower: Tensors, vision: Config, prefix: str, config: Config) -> Checkpoint:
    prefixes = {"original": prefix, "model": "visual." if prefix == "model.visual." else "model.visual."}
    names = ("language_model.layers.0.mlp.up_proj.weight", "lm_head.weight", "audio_tower.proj1.weight")
    neighbours = {name: _nan(48, 40) for name in names}
    return Checkpoint(
        {layout: {start + name: value for name, value in tower.items()} for layout, start in prefixes.items()},
        dict.fromkeys(prefixes, neighbours),
        {"original": config, "tower": vision},
    )


# Whisper: encoder


@dataclass(frozen=True)
class WhisperSizes:
    """Sizes of a tiny Whisper; `positions` rows come out of every item, which holds 2 * positions frames."""

    layers: int = 2
    heads: int = 6
    head_dim: int = 8
    mlp: int = 80
    mel: int = 80
    positions: int = 60

    @property
    def embed(self) -> int:
        """Width of the encoder."""
        return self.heads * self.head_dim


def whisper(
    sizes: WhisperSizes = WhisperSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Whisper. Layouts: `original` (model.encoder.*), `model` (WhisperModel saved by itself: encoder.*)."""
    d, f = sizes.embed, sizes.mlp
    make = _Maker(seed, scales)
    make.linear("conv1", (d, sizes.mel, 3), gain=1.6)
    make.linear("conv2", (d, d, 3), gain=1.6)
    make.tensor("embed_positions.weight", (sizes.positions, d), scale=0.8)
    make.whisper_blocks(sizes.layers, d, f, key_bias=False)
    make.norm("layer_norm", d)
    tensors, neighbours = {}, {}
    for layout, prefix in (("original", "model."), ("model", "")):
        tensors[layout] = {f"{prefix}encoder.{name}": value for name, value in make.tensors.items()}
        neighbours[layout] = {
            f"{prefix}decoder.{name}": _nan(48, d)
            for name in ("embed_tokens.weight", "embed_positions.weight", "layers.0.fc1.weight", "layer_norm.weight")
        }
    neighbours["original"]["proj_out.weight"] = _nan(48, d)
    config = {
        "activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "d_model": d,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 56, "decoder_layers": 1, "decoder_start_token_id": 50257,
        "dropout": 0.0, "encoder_attention_heads": sizes.heads, "encoder_ffn_dim": f, "encoder_layers": sizes.layers,
        "is_encoder_decoder": True, "max_source_positions": sizes.positions, "max_target_positions": 48,
        "model_type": "whisper", "num_hidden_layers": sizes.layers, "num_mel_bins": sizes.mel,
        "scale_embedding": False, "torch_dtype": "float32", "vocab_size": 51864,
    }  # fmt: skip
    configs = {"original": {"architectures": ["WhisperForConditionalGeneration"], **config},
               "model": {"architectures": ["WhisperModel"], **config}}  # fmt: skip
    return Checkpoint(tensors, neighbours, configs)


# Qwen2-Audio, and Qwen2.5-Omni's audio tower


@dataclass(frozen=True)
class PooledSizes(WhisperSizes):
    """Sizes of a tiny Qwen2-Audio, or of a tiny Qwen2.5-Omni, where `positions` are the tokens of a chunk."""

    mel: int = 16
    output: int = 28


def qwen2_audio(
    sizes: PooledSizes = PooledSizes(), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Qwen2-Audio.

    Layouts: `original` (published: audio_tower.*, multi_modal_projector.*) and `transformers` (as it names them in
    memory: model.*). The config is the same.
    """
    d = sizes.embed
    make = _Maker(seed, scales)
    make.linear("audio_tower.conv1", (d, sizes.mel, 3), gain=1.6)
    make.linear("audio_tower.conv2", (d, d, 3), gain=1.6)
    make.tensor("audio_tower.embed_positions.weight", (sizes.positions, d), scale=0.8)
    blocks = _Maker(seed, scales)
    blocks.whisper_blocks(sizes.layers, d, sizes.mlp, key_bias=False)
    make.tensors |= {f"audio_tower.{name}": value for name, value in blocks.tensors.items()}
    make.norm("audio_tower.layer_norm", d)
    make.linear("multi_modal_projector.linear", (sizes.output, d), gain=1.2)
    published = {f"language_model.{name}": _nan(48, d) for name in ("lm_head.weight", "model.norm.weight")}
    native = {"lm_head.weight": _nan(48, d), "model.language_model.norm.weight": _nan(d)}
    audio = {
        "activation_function": "gelu", "d_model": d, "encoder_attention_heads": sizes.heads,
        "encoder_ffn_dim": sizes.mlp, "encoder_layerdrop": 0.0, "encoder_layers": sizes.layers,
        "max_source_positions": sizes.positions, "model_type": "qwen2_audio_encoder", "num_mel_bins": sizes.mel,
        "scale_embedding": False,
    }  # fmt: skip
    text = {"hidden_size": sizes.output, "intermediate_size": 24, "model_type": "qwen2", "num_attention_heads": 2,
            "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 48}  # fmt: skip
    config = {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": audio, "audio_token_index": 7,
              "model_type": "qwen2_audio", "text_config": text}  # fmt: skip
    return Checkpoint(
        {"original": make.tensors, "transformers": {f"model.{name}": x for name, x in make.tensors.items()}},
        {"original": published, "transformers": native},
        {"original": config, "transformers": config},
    )


def qwen2_5_omni_audio(
    sizes: PooledSizes = PooledSizes(positions=20), *, seed: int = 0, scales: Mapping[str, float] = MappingProxyType({})
) -> Checkpoint:
    """A tiny Qwen2.5-Omni with its audio tower; for the layouts see `qwen3_omni_audio`."""
    d = sizes.embed
    make = _Maker(seed, scales)
    make.linear("conv1", (d, sizes.mel, 3), gain=1.6)
    make.linear("conv2", (d, d, 3), gain=1.6)
    make.whisper_blocks(sizes.layers, d, sizes.mlp, key_bias=False)
    make.norm("ln_post", d)
    make.linear("proj", (sizes.output, d), gain=1.2)
    make.tensor("audio_bos_eos_token.weight", (2, sizes.output), scale=1.0)
    audio = {
        "activation_function": "gelu", "d_model": d, "encoder_attention_heads": sizes.heads,
        "encoder_ffn_dim": sizes.mlp, "encoder_layers": sizes.layers, "max_source_positions": 1500,
        "model_type": "qwen2_5_omni_audio_encoder", "n_window": sizes.positions, "num_mel_bins": sizes.mel,
        "output_dim": sizes.output, "scale_embedding": False,
    }  # fmt: skip
    thinker = {"architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"], "audio_config": audio,
               "model_type": "qwen2_5_omni_thinker", "text_config": {"hidden_size": sizes.output}}  # fmt: skip
    prefixes = {"original": "thinker.audio_tower.", "thinker": "audio_tower.", "tower": ""}
    return Checkpoint(
        {layout: {prefix + name: x for name, x in make.tensors.items()} for layout, prefix in prefixes.items()},
        {"original": _omni_neighbours("thinker.", d), "thinker": _omni_neighbours("", d), "tower": {}},
        {
            "original": {"model_type": "qwen2_5_omni", "talker_config": {"hidden_size": 24}, "thinker_config": thinker},
            "thinker": thinker,
            "tower": audio,
        },
    )


# Inputs


def image_patches(grid: tuple[int, int, int], *, seed: int = 0, patch: int = 14, frames: int = 1) -> np.ndarray:
    """Patches [t*h*w, 3*frames*patch*patch] float32 of one item, the normalised values of random 8-bit pixels."""
    shape = (math.prod(grid), 3 * frames * patch * patch)
    pixels = np.floor(uniform(seed, f"patches {grid}", shape) * np.float32(128)) + 128
    return ((pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5)).astype(np.float32)


def log_mel(frames: int, *, bins: int = 128, seed: int = 0) -> np.ndarray:
    """A log-mel spectrogram [bins, frames] float32, random, in the range of real ones."""
    return uniform(seed, f"mel {frames}", (bins, frames)) * np.float32(1.5)


@dataclass
class _Maker:
    """Collects named tensors in which no term of the model is negligible."""

    seed: int
    scales: Mapping[str, float]
    norm_bias: bool = True

    def __post_init__(self) -> None:
        self.tensors: Tensors = {}

    def tensor(self, name: str, shape: tuple[int, ...], *, scale: float, offset: float = 0.0) -> None:
        values = np.float32(offset) + np.float32(scale) * uniform(self.seed, name, shape)
        for part, factor in self.scales.items():
            values = values * np.float32(factor) if part in name else values
        self.tensors[name] = _bfloat16_exact(values)

    def linear(self, name: str, shape: tuple[int, ...], *, gain: float, bias: bool = True) -> None:
        """A kernel [out, in, ...] that gives unit-variance inputs a standard deviation of `gain`, and a bias."""
        self.tensor(f"{name}.weight", shape, scale=gain * math.sqrt(3 / math.prod(shape[1:])))
        if bias:
            self.tensor(f"{name}.bias", shape[:1], scale=0.4)

    def norm(self, name: str, width: int, *, bias: bool = False) -> None:
        """A norm's factors, and a bias where this one or every one has it."""
        self.tensor(f"{name}.weight", (width,), scale=0.4, offset=1.0)
        if self.norm_bias or bias:
            self.tensor(f"{name}.bias", (width,), scale=0.4)

    def whisper_blocks(self, layers: int, width: int, mlp: int, *, key_bias: bool) -> None:
        """The blocks of Whisper and its descendants."""
        for layer in (f"layers.{n}" for n in range(layers)):
            for letter in ("k", "v", "q"):
                bias = key_bias or letter != "k"
                self.linear(f"{layer}.self_attn.{letter}_proj", (width, width), gain=1.3, bias=bias)
            self.linear(f"{layer}.self_attn.out_proj", (width, width), gain=1.2)
            self.norm(f"{layer}.self_attn_layer_norm", width)
            self.linear(f"{layer}.fc1", (mlp, width), gain=1.3)
            self.linear(f"{layer}.fc2", (width, mlp), gain=1.2)
            self.norm(f"{layer}.final_layer_norm", width)


def _bfloat16_exact(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def _nan(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def _stored(value: np.ndarray, dtype: str | None) -> np.ndarray:
    floating = np.issubdtype(value.dtype, np.floating) or value.dtype == ml_dtypes.bfloat16
    return np.ascontiguousarray(value.astype(np.dtype(dtype)) if dtype and floating else value)


MAKERS: dict[str, Callable[..., Checkpoint]] = {
    "kimi_k25": kimi_k25,
    "qwen2_5_omni_audio": qwen2_5_omni_audio,
    "qwen2_audio": qwen2_audio,
    "qwen3_asr_audio": qwen3_asr_audio,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_omni_vision": qwen3_omni_vision,
    "glm4v": glm4v,
    "qwen3_omni_audio": qwen3_omni_audio,
    "whisper": whisper,
}
