"""What the originals give on the tiny checkpoints, from files: for suites that run without PyTorch.

    values = load("kimi_k25")
    folder = values.checkpoint.write(tmp_path)
    rows = jaxenc.load(folder, dtype="float32").encode_items([jaxenc.VisionItem(*item) for item in values.items])
    # rows[i] is within 1e-5 of values.rows[i]

The files hold float64 outputs alone. Weights and inputs are made anew by `tests.parity`, the same
everywhere; the files hold their digests, and `load` refuses when they differ. The files are made (with PyTorch and
transformers) by

    python -m tests.reference.generate
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tests.parity.checkpoints import (
    MAKERS,
    AudioSizes,
    Checkpoint,
    KimiSizes,
    PooledSizes,
    QwenSizes,
    WhisperSizes,
    image_patches,
    kimi_k25,
    log_mel,
    qwen2_5_omni_audio,
    qwen2_audio,
    qwen3_asr_audio,
    qwen3_omni_audio,
    whisper,
)
from tests.parity.vit_checkpoints import (
    VitSizes,
    dinov2,
    internvit,
    llava,
    pictures,
    pictures_of,
    pixtral,
    siglip,
    siglip2,
    tiles,
)

FOLDER = Path(__file__).parent
GRIDS = ((1, 8, 8), (2, 2, 2), (1, 4, 6), (4, 6, 10), (3, 12, 4), (1, 20, 14), (1, 16, 16))
# the sides of Qwen2.5-VL's windows are 8, and of the tables of positions 12
QWEN_GRIDS = ((1, 4, 6), (2, 2, 2), (1, 8, 8), (3, 4, 6), (1, 14, 10))
FRAMES = (230, 61, 100, 1750, 333, 37, 99)
PICTURES = ((5, 5), (7, 3), (2, 4))
WITH_HIDDEN = 2  # items whose blocks' outputs are kept, the first ones


@dataclass(frozen=True)
class Case:
    """How one file comes about: a checkpoint and its items, whatever the original takes."""

    checkpoint: Callable[[], Checkpoint]
    items: Callable[[], list[Any]]


QWEN_SIZES = QwenSizes(head_dim=8, mlp=64, text=24)

CASES = {
    # a table of 16 x 16 keeps the checkpoint small; the grids need more rows than that, fewer, and just as many
    "kimi_k25": Case(
        lambda: kimi_k25(KimiSizes(table=(16, 16)), seed=7),
        lambda: [(image_patches(grid, seed=7), grid) for grid in GRIDS],
    ),
    "qwen3_omni_audio": Case(
        lambda: qwen3_omni_audio(AudioSizes(heads=10, head_dim=4), seed=7),
        lambda: [log_mel(frames, seed=7) for frames in FRAMES],
    ),
    **{
        name: Case(
            partial(MAKERS[name], QWEN_SIZES, seed=7),
            lambda: [(image_patches(grid, seed=7, patch=QWEN_SIZES.patch, frames=2), grid) for grid in QWEN_GRIDS],
        )
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_vision", "glm4v")
    },
    "whisper": Case(
        lambda: whisper(WhisperSizes(), seed=7),
        lambda: [log_mel(2 * WhisperSizes().positions, bins=WhisperSizes().mel, seed=seed) for seed in (7, 8)],
    ),
    "qwen2_audio": Case(
        lambda: qwen2_audio(PooledSizes(), seed=7),
        lambda: [(log_mel(2 * PooledSizes().positions, bins=16, seed=frames), frames) for frames in (120, 37)],
    ),
    "qwen2_5_omni_audio": Case(
        lambda: qwen2_5_omni_audio(PooledSizes(positions=20), seed=7),
        lambda: [log_mel(frames, bins=16, seed=7) for frames in (95, 40, 37)],
    ),
    "qwen3_asr_audio": Case(
        lambda: qwen3_asr_audio(AudioSizes(heads=7), seed=7), lambda: [log_mel(frames, seed=7) for frames in (230, 61)]
    ),
    "llava": Case(lambda: llava(seed=7), lambda: pictures(VitSizes())),
    "siglip": Case(lambda: siglip(seed=7), lambda: pictures(VitSizes())),
    "siglip2": Case(lambda: siglip2(seed=7), lambda: pictures_of(PICTURES, patch=14)),
    # as the one of 6B is
    "internvl": Case(lambda: internvit(VitSizes(heads=5), seed=7, big=True), lambda: tiles(VitSizes())),
    # as Mistral Small's is
    "mistral3": Case(
        lambda: pixtral(seed=7, projector="mistral3"),
        lambda: pictures_of([(4, 6), (8, 10), (2, 4)], patch=14),
    ),
    # as the giant is
    "dinov2": Case(lambda: dinov2(seed=7, gated=True), lambda: pictures_of(PICTURES, patch=14)),
}


@dataclass(frozen=True)
class Values:
    """One original's weights, inputs and outputs.

    Attributes:
        checkpoint: weights and configs; `write` saves them as published.
        items: (patches [t*h*w, features], (t, h, w)) each, or log-mels [bins, frames].
        rows: what comes out of each [rows, dim], float64.
        hidden: of the first items, the residual stream [layers + 1, tokens, embed], float64: what enters the first
            block, then what leaves each.
    """

    checkpoint: Checkpoint
    items: list[Any]
    rows: list[np.ndarray]
    hidden: list[np.ndarray]


def load(name: str) -> Values:
    """The values of one of `CASES`.

    Raises:
        ValueError: weights or inputs are not those that the file was made from.
    """
    case = CASES[name]
    checkpoint, items = case.checkpoint(), case.items()
    with safe_open(FOLDER / f"{name}.safetensors", framework="numpy") as file:
        if file.metadata()["digests"] != digests(checkpoint, items):
            raise ValueError(f"{name}: other weights or inputs; run python -m tests.reference.generate")
        rows = [file.get_tensor(f"rows.{i}") for i in range(len(items))]
        hidden = [file.get_tensor(f"hidden.{i}") for i in range(WITH_HIDDEN)]
    return Values(checkpoint, items, rows, hidden)


def digests(checkpoint: Checkpoint, items: Sequence[Any]) -> str:
    """JSON: SHA-256 of the published layout's tensors and config, and of the items."""
    weights, inputs = hashlib.sha256(), hashlib.sha256()
    for tensor_name, value in sorted(checkpoint.tensors["original"].items()):
        weights.update(tensor_name.encode() + str(value.shape).encode() + value.astype("<f4").tobytes())
    weights.update(json.dumps(checkpoint.configs["original"], sort_keys=True).encode())
    for item in items:
        array, *grid = item if isinstance(item, tuple) else (item,)
        inputs.update(str((array.shape, grid)).encode() + array.astype("<f4").tobytes())
    return json.dumps({"weights": weights.hexdigest(), "inputs": inputs.hexdigest()})
