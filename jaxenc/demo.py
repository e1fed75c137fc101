"""The demonstration: PyTorch checkpoints of two towers -> converted -> encoded on eight devices, and on one."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

import checkpoints_convert
import jaxenc
from jaxenc.layers.parameters import flatten
from jaxenc.loading import open_checkpoint, towers
from jaxenc.models import kimi_k25, qwen3_omni_audio
from jaxenc.models.base import EncoderConfig
from sharding_rules import Plan

ASSETS = files("jaxenc") / "assets"
PICTURE, SPEECH = str(ASSETS / "cat.jpg"), str(ASSETS / "sense_and_sensibility.flac")
DEVICES = 8

# small, but with the published numbers of heads: 16 divide over 8 devices and 20 do not
KIMI = replace(kimi_k25.Config(), layers=3, embed=256, mlp=1072, out=512)
QWEN = replace(qwen3_omni_audio.Config(), layers=3, embed=320, mlp=1280, channels=48, out=512)


def run_demo(model: str | None, *, say: Callable[[str], Any]) -> list[dict[str, Any]]:
    """Runs it and tells what happens.

    Args:
        model: a hub id or folder, for real weights; small seeded checkpoints of both towers where not given.
        say: takes a line of text.

    Returns:
        A dict for each tower: encoder, plan, rows, and the largest difference against one device, relative to the
        largest value.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        if model is not None:
            sources = [(model, config.modality) for config in towers(model)]
        else:
            sources = [
                (str(write_kimi(Path(folder) / "kimi-k2.5-small")), "vision"),
                (str(write_qwen(Path(folder) / "qwen3-omni-small")), "audio"),
            ]
        return [_show(src, tower, converted=Path(folder) / f"{tower}-converted", say=say) for src, tower in sources]


def published_kimi(config: kimi_k25.Config) -> dict[str, Any]:
    """What Kimi-K2.5's config.json says of a tower."""
    return {
        "model_type": "kimi_k25",
        "vision_config": {
            "vt_num_hidden_layers": config.layers,
            "vt_hidden_size": config.embed,
            "vt_num_attention_heads": config.heads,
            "vt_intermediate_size": config.mlp,
            "patch_size": config.patch,
            "init_pos_emb_height": config.position_h,
            "init_pos_emb_width": config.position_w,
            "init_pos_emb_time": config.frames,
            "merge_kernel_size": [config.merge, config.merge],
            "merge_type": "sd2_tpool",
            "pos_emb_type": "divided_fixed",
            "mm_projector_type": "patchmerger",
            "text_hidden_size": config.out,
            "projector_ln_eps": config.projector_eps,
        },
        "text_config": {"hidden_size": config.out},
    }


def write_kimi(folder: Path, *, config: kimi_k25.Config = KIMI, seed: int = 0) -> Path:
    """A seeded checkpoint of Kimi-K2.5's shape and key layout, with tensors of a language model around the tower."""
    language = {f"language_model.model.layers.{i}.mlp.up_proj.weight": (1024, 512) for i in range(4)}
    return write_checkpoint(folder, config, published_kimi(config), language=language, seed=seed)


def write_qwen(folder: Path, *, config: qwen3_omni_audio.Config = QWEN, seed: int = 1) -> Path:
    """A seeded checkpoint of Qwen3-Omni's shape and key layout, with tensors of a language model around the tower."""
    audio = {
        "encoder_layers": config.layers,
        "d_model": config.embed,
        "encoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.mlp,
        "num_mel_bins": config.mel,
        "downsample_hidden_size": config.channels,
        "output_dim": config.out,
        "n_window": config.half_chunk,
        "n_window_infer": config.window_frames,
        "activation_function": "gelu",
        "scale_embedding": False,
    }
    published = {"model_type": "qwen3_omni_moe", "thinker_config": {"audio_config": audio}}
    language = {f"thinker.model.layers.{i}.mlp.gate.weight": (1024, 512) for i in range(4)}
    others = {"talker.model.layers.0.weight": (512, 512), "code2wav.decoder.0.weight": (512, 512)}
    return write_checkpoint(folder, config, published, language=language | others, seed=seed)


def write_checkpoint(
    folder: Path,
    config: EncoderConfig,
    published: Mapping[str, Any],
    *,
    language: Mapping[str, tuple[int, ...]],
    seed: int,
    shards: int = 3,
) -> Path:
    """Random bfloat16 weights in the original published key layout: safetensors files, an index and a config.json.

    Args:
        folder: made if need be.
        config: sizes of the tower.
        published: config.json.
        language: name -> shape of other tensors, which a converter must not read.
        seed: of the weights.
        shards: files.

    Returns:
        The folder.
    """
    rng = np.random.default_rng(seed)
    params = flatten(jaxenc.from_config(config, seed=seed).params)
    # every bias and scale is random too: zero biases would hide one that is added once a device
    noisy = {path: np.asarray(value) + 0.05 * rng.standard_normal(value.shape) for path, value in params.items()}
    tensors = dict(config.mappings()["original"].export(noisy))
    tensors |= {name: rng.standard_normal(shape) for name, shape in language.items()}
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        held = {name: tensors[name].astype(ml_dtypes.bfloat16) for name, of in weight_map.items() if of == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(published, indent=2))
    return folder


def _show(src: str, tower: str, *, converted: Path, say: Callable[[str], Any]) -> dict[str, Any]:
    file = PICTURE if tower == "vision" else SPEECH

    def encode(mesh: Mesh) -> tuple[Plan, np.ndarray]:
        encoder = jaxenc.load(src, mesh=mesh)
        rows = encoder.encode(images=[file]) if tower == "vision" else encoder.encode(audio=[file])
        return encoder.plan, rows[0]

    say(f"\n=== {Path(src).name}: its {tower} tower, and {Path(file).name}")
    stored = open_checkpoint(src, tower=tower)
    if stored.source is not None and stored.mapping is not None:
        found = checkpoints_convert.inspect(stored.source, {tower: stored.mapping})
        read = found["towers"][tower]
        ignored = ", ".join(f"{prefix}.* ({count})" for prefix, count in found["ignored"].items())
        say(
            f"converted to float32: {len(read['tensors'])} of {found['tensors']} tensors in {found['files']} files, "
            f"{read['size_bytes'] / 1e6:.1f} MB under {' and '.join(read['prefixes'])}; ignored {ignored or 'none'}"
        )
        jaxenc.load(src, tower=tower, dtype="float32").save(converted)
        src = str(converted)
    plan, rows = encode(jaxenc.make_mesh(data=1, model=DEVICES))
    say(f"\n{plan}\n")
    _, one = encode(jaxenc.make_mesh())
    difference = float(np.abs(rows - one).max() / np.abs(one).max())
    say(f"{Path(file).name}: {rows.shape[0]} rows of {rows.shape[1]}")
    say(f"largest difference between {DEVICES} devices and one: {difference:.1e} of the largest value")
    return {
        "encoder": plan.encoder,
        "plan": plan.to_json(),
        "rows": list(rows.shape),
        "difference": difference,
    }
