"""A quantised language model leaves its tower readable; a quantised tower is said to be one."""

import json
import math

import numpy as np
import pytest

from checkpoints_convert import CheckpointError, Target, detect, load_parameters, mappings, open_source
from tests.checkpoints_convert import tiny

KIMI = mappings.kimi_k25.mappings(**tiny.KIMI)
LAYER = "language_model.model.layers.0.mlp.experts.0.down_proj"
BLOCK = "vision_tower.encoder.blocks.0"
BYTES = {
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "F4": 0.5,
    "F6_E3M2": 0.75,
}
# name -> (dtype, shape) of what stands for one linear layer
SCHEMES = {
    "compressed-tensors int4": {
        "weight_packed": ("I32", [64, 8]),
        "weight_scale": ("BF16", [64, 2]),
        "weight_shape": ("I32", [2]),
    },
    "nvfp4": {
        "weight": ("U8", [64, 32]),
        "weight_scale": ("F8_E4M3", [64, 4]),
        "weight_scale_2": ("F32", []),
        "input_scale": ("F32", []),
    },
    "nvfp4 packed": {"weight_packed": ("U8", [64, 32]), "weight_global_scale": ("F32", [1])},
    "fp8": {"weight": ("F8_E4M3", [64, 64]), "weight_scale_inv": ("F32", [1, 1])},
    "mxfp4": {"weight_blocks": ("U8", [64, 2, 16]), "weight_scales": ("U8", [64, 2])},
    "dtypes that are not known": {
        "weight": ("F4", [64, 64]),
        "weight_scale": ("F8_E8M0", [64, 2]),
        "other": ("F6_E3M2", [4]),
        "another": ("F8_E4M3FNUZ", [3]),
    },
}


def write(path, tower, quantised):
    """One file, what is quantised first; its bytes are zero."""
    header, at = {}, 0
    for name, (dtype, shape) in quantised.items():
        size = int(math.prod(shape) * BYTES[dtype])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    data = bytes(at)
    for name, value in tower.items():
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at, data = at + value.nbytes, data + value.tobytes()
    tiny.write_raw(path / "model.safetensors", header, data)
    quantization = {"quant_method": "compressed-tensors", "ignore": ["re:.*vision_tower.*", "re:.*mm_projector.*"]}
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return open_source(path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tower_beside_a_quantised_language_model_is_read_bit_for_bit(tmp_path, scheme):
    tower = tiny.kimi_original()
    source = write(tmp_path, tower, {f"{LAYER}.{part}": entry for part, entry in SCHEMES[scheme].items()})
    mapping = detect(source, KIMI)
    targets = {path: Target(shape, "bfloat16") for path, shape in mapping.shapes.items()}
    params = load_parameters(source, mapping, targets)
    exported = dict(mapping.export({path: np.asarray(value) for path, value in params.items()}))
    assert all(tiny.same_bits(exported[name], value) for name, value in tower.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tower_that_is_quantised_itself_is_refused_with_a_tensor_and_a_way_out(tmp_path, scheme):
    tower = tiny.kimi_original()
    del tower[f"{BLOCK}.wo.weight"]
    source = write(tmp_path, tower, {f"{BLOCK}.wo.{part}": entry for part, entry in SCHEMES[scheme].items()})
    mapping = detect(source, KIMI)
    with pytest.raises(CheckpointError) as error:
        load_parameters(source, mapping, {path: Target(shape, "float32") for path, shape in mapping.shapes.items()})
    assert all(problem.startswith(f"{BLOCK}.wo.") for problem in error.value.problems)
    assert any(
        problem.startswith(f"{BLOCK}.wo.weight") and "a quantised tower cannot be read; take a checkpoint" in problem
        for problem in error.value.problems
    )
