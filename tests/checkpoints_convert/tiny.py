"""Tiny checkpoints with every key written out, and what their parameters must be; NumPy and safetensors only."""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

KIMI = {
    "layers": 3,
    "embed": 32,
    "heads": 8,
    "mlp": 48,
    "patch": 2,
    "position_h": 4,
    "position_w": 6,
    "projector_in": 128,
    "out": 40,
}
QWEN = {
    "family": "qwen3_omni_audio",
    "layers": 2,
    "embed": 24,
    "heads": 4,
    "mlp": 32,
    "channels": 6,
    "conv_features": 48,
    "out": 20,
}
WHISPER = {"layers": 2, "embed": 24, "heads": 4, "mlp": 32, "mel": 10, "positions": 7}


def kimi_original(dtype: type = ml_dtypes.bfloat16) -> Tensors:
    """Kimi's tower as published (D=32, 8 heads of 4, 3 blocks)."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (32, 3, 2, 2),
        "vision_tower.patch_embed.proj.bias": (32,),
        "vision_tower.patch_embed.pos_emb.weight": (4, 6, 32),
        "vision_tower.encoder.final_layernorm.weight": (32,),
        "vision_tower.encoder.final_layernorm.bias": (32,),
        "mm_projector.pre_norm.weight": (32,),
        "mm_projector.pre_norm.bias": (32,),
        "mm_projector.proj.0.weight": (128, 128),
        "mm_projector.proj.0.bias": (128,),
        "mm_projector.proj.2.weight": (40, 128),
        "mm_projector.proj.2.bias": (40,),
    }
    for n in range(3):
        block = f"vision_tower.encoder.blocks.{n}."
        shapes |= {
            f"{block}norm0.weight": (32,),
            f"{block}norm0.bias": (32,),
            f"{block}wqkv.weight": (96, 32),
            f"{block}wqkv.bias": (96,),
            f"{block}wo.weight": (32, 32),
            f"{block}wo.bias": (32,),
            f"{block}norm1.weight": (32,),
            f"{block}norm1.bias": (32,),
            f"{block}mlp.fc0.weight": (48, 32),
            f"{block}mlp.fc0.bias": (48,),
            f"{block}mlp.fc1.weight": (32, 48),
            f"{block}mlp.fc1.bias": (32,),
        }
    return fill(shapes, dtype)


def kimi_transformers(original: Tensors) -> Tensors:
    """The same weights as transformers holds them: other names, q, k, v apart, q and k permuted within each head."""
    renames = {
        "vision_tower.patch_embed.pos_emb.weight": "model.vision_tower.patch_embed.pos_emb.position_embeddings",
        "vision_tower.patch_embed.proj.": "model.vision_tower.patch_embed.proj.",
        "vision_tower.encoder.final_layernorm.": "model.vision_tower.final_layernorm.",
        "mm_projector.pre_norm.": "model.mm_projector.pre_norm.",
        "mm_projector.proj.0.": "model.mm_projector.in_proj.",
        "mm_projector.proj.2.": "model.mm_projector.out_proj.",
    }
    for n in range(3):
        old, new = f"vision_tower.encoder.blocks.{n}.", f"model.vision_tower.layers.{n}."
        renames |= {
            f"{old}norm0.": f"{new}norm1.",
            f"{old}norm1.": f"{new}norm2.",
            f"{old}wo.": f"{new}attn.proj.",
            f"{old}mlp.fc0.": f"{new}mlp.fc1.",
            f"{old}mlp.fc1.": f"{new}mlp.fc2.",
        }
    native: Tensors = {}
    for name, value in original.items():
        for old, new in renames.items():
            if name.startswith(old):
                native[new + name.removeprefix(old)] = value
    for n in range(3):
        for kind in ("weight", "bias"):
            fused = original[f"vision_tower.encoder.blocks.{n}.wqkv.{kind}"]
            for part, value in zip("qkv", np.split(fused, 3), strict=True):
                if part != "v":
                    rest = value.shape[1:]
                    value = value.reshape(8, 2, 2, *rest).swapaxes(1, 2).reshape(32, *rest)
                native[f"model.vision_tower.layers.{n}.attn.{part}_proj.{kind}"] = np.ascontiguousarray(value)
    return native


def qwen_audio(prefix: str = "thinker.audio_tower.") -> Tensors:
    """Qwen3-Omni's audio tower (D=24, 4 heads, 2 blocks)."""
    shapes: dict[str, tuple[int, ...]] = {
        "conv2d1.weight": (6, 1, 3, 3),
        "conv2d1.bias": (6,),
        "conv2d2.weight": (6, 6, 3, 3),
        "conv2d2.bias": (6,),
        "conv2d3.weight": (6, 6, 3, 3),
        "conv2d3.bias": (6,),
        "conv_out.weight": (24, 48),
        "ln_post.weight": (24,),
        "ln_post.bias": (24,),
        "proj1.weight": (24, 24),
        "proj1.bias": (24,),
        "proj2.weight": (20, 24),
        "proj2.bias": (20,),
        **_whisper_blocks(key_bias=True),
    }
    return fill({prefix + name: shape for name, shape in shapes.items()})


def whisper(prefix: str = "model.encoder.") -> Tensors:
    """Whisper's encoder (D=24, 4 heads, 2 blocks)."""
    shapes: dict[str, tuple[int, ...]] = {
        "conv1.weight": (24, 10, 3),
        "conv1.bias": (24,),
        "conv2.weight": (24, 24, 3),
        "conv2.bias": (24,),
        "embed_positions.weight": (7, 24),
        "layer_norm.weight": (24,),
        "layer_norm.bias": (24,),
        **_whisper_blocks(key_bias=False),
    }
    return fill({prefix + name: shape for name, shape in shapes.items()})


def language_model() -> Tensors:
    """Neighbours that nothing may read."""
    return fill({f"language_model.model.layers.{n}.mlp.down_proj.weight": (64, 64) for n in range(3)})


def fill(shapes: Mapping[str, tuple[int, ...]], dtype: type = ml_dtypes.bfloat16) -> Tensors:
    """Random values, another sequence for each name's place."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_folder(folder: Path, *files: Tensors, config: dict | None = None) -> Path:
    """Saves each dict as one shard, with the index that says so."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"} if config is None else config))
    return folder


def write_raw(path: Path, header: dict | bytes, data: bytes = b"") -> Path:
    """Writes a safetensors file byte by byte, sound or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shape, dtype and bits (NaN included)."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _whisper_blocks(*, key_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(2):
        for layer, shape in (
            ("self_attn.q_proj", (24, 24)),
            ("self_attn.k_proj", (24, 24)),
            ("self_attn.v_proj", (24, 24)),
            ("self_attn.out_proj", (24, 24)),
            ("self_attn_layer_norm", (24,)),
            ("fc1", (32, 24)),
            ("fc2", (24, 32)),
            ("final_layer_norm", (24,)),
        ):
            shapes[f"layers.{n}.{layer}.weight"] = shape
            if key_bias or layer != "self_attn.k_proj":
                shapes[f"layers.{n}.{layer}.bias"] = shape[:1]
    return shapes
