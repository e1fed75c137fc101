"""The encoders that are measured: their checkpoints, at the published size or small, and what they are given."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxenc import AudioItem, Budget, VisionItem
from jaxenc.items import Item
from jaxenc.models import named_config
from jaxenc.preprocess.audio import load_audio
from jaxenc.preprocess.images import load_image
from tests.parity import checkpoints
from tests.parity.checkpoints import Checkpoint, write_checkpoint

DTYPES = ("float32", "bfloat16")
ASSETS = files("jaxenc") / "assets"
PHOTOGRAPH, SPEECH = str(ASSETS / "cat.jpg"), str(ASSETS / "sense_and_sensibility.flac")
SAMPLE_RATE = 16_000
# turns a value that bfloat16 holds into one that needs all of float32, and that bfloat16 rounds back to what it was
FULL_MANTISSA = np.float32(1.00037)


@dataclass(frozen=True)
class Subject:
    """One encoder.

    Attributes:
        name: its family.
        published: makes its checkpoint at the published size: seeded, every bias, norm and table random.
        small: the same with few layers and channels.
        original_layout: of the PyTorch original's own keys.
        items: what the parity run encodes.
        budgets: of the parity run: row lengths that leave little padding to compute.
        timed: what the timed run encodes.
    """

    name: str
    published: Callable[[], Checkpoint]
    small: Callable[[], Checkpoint]
    original_layout: str
    items: Callable[[], list[Item]]
    budgets: tuple[Budget, ...]
    timed: Callable[[], Item]

    def checkpoint(self, *, small: bool) -> Checkpoint:
        """Its checkpoint; values are exact in bfloat16."""
        return self.small() if small else self.published()

    def write_published(self, checkpoint: Checkpoint, folder: Path, *, dtype: str) -> Path:
        """Writes it as published: sharded safetensors, with tensors of the rest of the model around the tower."""
        return checkpoint.write(folder, layout="original", config="original", dtype=dtype)

    def write_original(self, checkpoint: Checkpoint, folder: Path, *, dtype: str) -> Path:
        """Writes it as transformers saves the tower: no renaming is left to do."""
        layout = self.original_layout
        return write_checkpoint(folder, checkpoint.tensors[layout], checkpoint.configs[layout], dtype=dtype)


def fill_mantissas(checkpoint: Checkpoint) -> None:
    """Makes all values full float32 ones, in place."""
    for values in _arrays(checkpoint):
        values *= FULL_MANTISSA


def round_to_bfloat16(checkpoint: Checkpoint) -> None:
    """Rounds all values to bfloat16, in place."""
    for values in _arrays(checkpoint):
        values[...] = values.astype(ml_dtypes.bfloat16)


def _arrays(checkpoint: Checkpoint) -> Iterator[np.ndarray]:
    """Each buffer once: layouts share those that they do not reorder."""
    seen = set()
    for tensors in checkpoint.tensors.values():
        for values in tensors.values():
            address = values.__array_interface__["data"][0]
            if address not in seen:
                seen.add(address)
                yield values


def _kimi_items() -> list[Item]:
    photograph = load_image(PHOTOGRAPH)
    # a camera that moves over the photograph: 4 frames of 16 x 20 patches
    frames = np.stack([photograph[12 * i : 12 * i + 224, 40 * i : 40 * i + 280] for i in range(4)])
    odd = photograph[40:203, 75:376]
    read = named_config("kimi_k25").read
    items = [
        *read("images", photograph, name="photograph"),
        *read("videos", (frames, 2.0), name="video chunk"),
        *read("images", odd, name="odd image"),
    ]
    assert [item.grid for item in items if isinstance(item, VisionItem)] == [(1, 22, 34), (4, 16, 20), (1, 12, 22)]
    return items


def _kimi_timed() -> Item:
    from PIL import Image

    square = np.asarray(Image.fromarray(load_image(PHOTOGRAPH)).resize((448, 448), Image.Resampling.BICUBIC))
    (item,) = named_config("kimi_k25").read("images", square, name="32 x 32 patches")
    assert isinstance(item, VisionItem)
    assert item.grid == (1, 32, 32)
    return item


def _speech(seconds: float) -> Item:
    samples = load_audio(SPEECH)
    repeated = np.resize(samples, round(seconds * SAMPLE_RATE))
    (item,) = named_config("qwen3_omni_audio").read("audio", repeated, name=f"{seconds:g} s of speech")
    return item


def _audio_items() -> list[Item]:
    return [*named_config("qwen3_omni_audio").read("audio", SPEECH, name="speech"), _speech(30)]


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            "kimi_k25",
            published=lambda: checkpoints.kimi_k25(
                checkpoints.KimiSizes(layers=27, heads=16, head_dim=72, mlp=4304, text=7168)
            ),
            small=checkpoints.kimi_k25,
            original_layout="transformers",
            items=_kimi_items,
            budgets=(Budget(256, 1), Budget(1024, 1), Budget(1280, 1)),
            timed=_kimi_timed,
        ),
        Subject(
            "qwen3_omni_audio",
            published=lambda: checkpoints.qwen3_omni_audio(
                checkpoints.AudioSizes(layers=32, heads=20, head_dim=64, mlp=5120, channels=480, output=2048)
            ),
            small=checkpoints.qwen3_omni_audio,
            original_layout="tower",
            items=_audio_items,
            budgets=(Budget(520, 1),),
            timed=lambda: _speech(30),
        ),
    )
}


def add_arguments(parser: argparse.ArgumentParser, *, encoder: bool = True) -> None:
    """The options that all benchmarks have."""
    if encoder:
        parser.add_argument("--encoder", choices=SUBJECTS, help="one alone")
    parser.add_argument("--small", action="store_true", help="tiny models: a trial run, kept only with --results")
    parser.add_argument("--results", type=Path, help="folder to keep the results in")
    parser.add_argument("--note", default="", help="kept with the rows")


def chosen(args: argparse.Namespace) -> Sequence[Subject]:
    """The encoders asked for."""
    return [SUBJECTS[args.encoder]] if args.encoder else list(SUBJECTS.values())


def item_arrays(item: Item) -> dict[str, np.ndarray]:
    """An item as plain arrays, for a file."""
    if isinstance(item, VisionItem):
        return {"patches": item.patches, "grid": np.array(item.grid)}
    return {"mel": item.mel}


def item_of(arrays: dict[str, np.ndarray]) -> Item:
    """The inverse of `item_arrays`."""
    if "mel" in arrays:
        return AudioItem(arrays["mel"])
    t, h, w = arrays["grid"].tolist()
    return VisionItem(arrays["patches"], (t, h, w))
