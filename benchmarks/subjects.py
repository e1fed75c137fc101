"""The encoders that are measured: their checkpoints, at the published size or small, and what they are given."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxenc import AudioItem, VisionItem
from jaxenc.items import Item
from jaxenc.models import named_config, published_configs
from jaxenc.models.base import EncoderConfig
from jaxenc.preprocess.audio import load_audio
from jaxenc.preprocess.images import load_image
from tests.parity import checkpoints
from tests.parity.checkpoints import AudioSizes, Checkpoint, KimiSizes, PooledSizes, QwenSizes, WhisperSizes
from tests.parity.vit_checkpoints import VitSizes, clip, dinov2, internvit, llava, paligemma, pixtral, siglip, siglip2

DTYPES = ("float32", "bfloat16")
ASSETS = files("jaxenc") / "assets"
PHOTOGRAPH, SPEECH = str(ASSETS / "cat.jpg"), str(ASSETS / "sense_and_sensibility.flac")
SAMPLE_RATE = 16_000
# turns a value that bfloat16 holds into one that needs all of float32, and that bfloat16 rounds back to what it was
FULL_MANTISSA = np.float32(1.00037)


@dataclass(frozen=True)
class Subject:
    """One encoder at one of its published sizes.

    Attributes:
        encoder: "family:variant", as `jaxenc.from_config` takes it.
        original: of `tests.parity.originals`.
        make: sizes -> checkpoint: seeded, every bias, norm and table random.
        sizes: of a config -> as `make` takes them.
        small: those of a small model.
        layers: how many of the published layers there are, where all of them do not fit into this machine's memory.
    """

    encoder: str
    original: str
    make: Callable[..., Checkpoint]
    sizes: Callable[[Any], Any]
    small: Any
    layers: int | None = None

    @property
    def name(self) -> str:
        """What its rows are called."""
        return self.encoder + (f", {self.layers} layers" if self.layers else "")

    @property
    def config(self) -> EncoderConfig:
        """Of the published size, or as much of it as there is."""
        config = named_config(self.encoder)
        return replace(config, layers=self.layers) if self.layers else config  # type: ignore[type-var]

    def checkpoint(self, *, small: bool) -> Checkpoint:
        """Its checkpoint, or one of few layers and channels; values are exact in bfloat16."""
        return self.make(self.small if small else self.sizes(self.config))

    def sized(self, folder: Path) -> EncoderConfig:
        """Of a checkpoint of it that was written there: the published size, or a small one."""
        with open(folder / "config.json") as file:
            towers = published_configs(json.load(file), name=self.name)
        return next(tower for tower in towers if tower.family == self.config.family)

    def items(self, config: EncoderConfig) -> list[Item]:
        """What the parity run encodes, for an encoder of some size: real pictures and sounds, of odd sizes too."""
        if config.modality == "audio":
            return speech(config)
        if config.family == "internvit":
            config = replace(config, tiles=2)  # type: ignore[type-var]  # as many as say all that there is to say
        step = max(1, 14 // config.patch)  # type: ignore[attr-defined]  # small models have small patches
        photograph = load_image(PHOTOGRAPH)
        # a camera that moves over the photograph
        frames = np.stack([photograph[12 * i : 12 * i + 224, 40 * i : 40 * i + 280] for i in range(4)])
        read = {
            "photograph": ("images", photograph[::step, ::step]),
            "odd image": ("images", photograph[40:203:step, 75:376:step]),
            "video chunk": ("videos", (frames[:, ::step, ::step], 2.0)),
        }
        return [
            item
            for name, (kind, source) in read.items()
            if kind in config.kinds
            for item in config.read(kind, source, name=name)
        ]


def speech(config: EncoderConfig) -> list[Item]:
    """The recording, and 30 seconds of it repeated."""
    longer = np.resize(load_audio(SPEECH), 30 * SAMPLE_RATE)
    return [*config.read("audio", SPEECH, name="speech"), *config.read("audio", longer, name="30 s of speech")]


def fill_mantissas(checkpoint: Checkpoint) -> None:
    """Makes all values full float32 ones, in place."""
    for values in _arrays(checkpoint):
        values *= FULL_MANTISSA


def round_to_bfloat16(checkpoint: Checkpoint) -> None:
    """Rounds all values to bfloat16, in place."""
    for values in _arrays(checkpoint):
        values[...] = values.astype(ml_dtypes.bfloat16)


def _arrays(checkpoint: Checkpoint) -> Iterator[np.ndarray]:
    """Each buffer once: layouts share those that they do not reorder, whole or in parts."""
    buffers: dict[int, np.ndarray] = {}
    for tensors in checkpoint.tensors.values():
        for values in tensors.values():
            buffer = values
            while isinstance(buffer.base, np.ndarray):
                buffer = buffer.base
            buffers[id(buffer)] = buffer
    yield from buffers.values()


def _vit(c: Any) -> VitSizes:
    return VitSizes(c.layers + c.skipped, c.heads, c.head_dim, c.mlp, c.patch, c.image, text=c.out or 0)


def _pixtral(c: Any) -> VitSizes:
    return VitSizes(c.layers, c.heads, c.head_dim, c.mlp, c.patch, c.image, text=c.out)


def _qwen(c: Any) -> QwenSizes:
    extent = {"table": c.positions, "deepstack": c.deepstack, "window": c.window_pixels, "whole": c.whole}
    return QwenSizes(c.layers, c.heads, c.head_dim, c.mlp, c.patch, text=c.out, **extent)


def _glm(c: Any) -> QwenSizes:
    return replace(_qwen(c), mlp=c.merger_mlp)


def _pooled(c: Any) -> PooledSizes:
    return PooledSizes(c.layers, c.heads, c.head_dim, c.mlp, c.mel, c.positions, output=c.out)


def _chunked(c: Any) -> AudioSizes:
    return AudioSizes(c.layers, c.heads, c.head_dim, c.mlp, c.channels, c.out)


def _whisper(c: Any) -> WhisperSizes:
    return WhisperSizes(c.layers, c.heads, c.head_dim, c.mlp, c.mel, c.positions)


def _kimi(c: Any) -> KimiSizes:
    return KimiSizes(c.layers, c.heads, c.head_dim, c.mlp, c.patch, (c.position_h, c.position_w), text=c.out)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("kimi_k25", "kimi_k25", checkpoints.kimi_k25, _kimi, KimiSizes()),
        Subject("clip:large-336", "llava", llava, _vit, VitSizes(image=70)),
        Subject("clip:large", "clip", clip, _vit, VitSizes(image=70)),
        Subject("siglip:so400m", "siglip", siglip, _vit, VitSizes(image=70)),
        Subject("siglip:paligemma-224", "paligemma", paligemma, _vit, VitSizes(image=70)),
        Subject("siglip2:so400m", "siglip2", siglip2, _vit, VitSizes(image=70)),
        Subject("dinov2:large", "dinov2", partial(dinov2, ratio=4), _vit, VitSizes(image=70)),
        Subject("dinov2:giant", "dinov2", partial(dinov2, ratio=4, gated=True), _vit, VitSizes(image=70)),
        Subject("internvit:300m", "internvl", internvit, _vit, VitSizes()),
        Subject("internvit:6b", "internvl", partial(internvit, big=True), _vit, VitSizes(), layers=8),
        Subject("pixtral:12b", "pixtral in llava", pixtral, _pixtral, VitSizes(image=560)),
        Subject(
            "pixtral:mistral-small-3.1",
            "mistral3",
            partial(pixtral, projector="mistral3"),
            _pixtral,
            VitSizes(image=560),
        ),
        Subject("qwen2_vl:7b", "qwen2_vl", checkpoints.qwen2_vl, _qwen, QwenSizes(mlp=96)),
        Subject("qwen2_5_vl:7b", "qwen2_5_vl", checkpoints.qwen2_5_vl, _qwen, QwenSizes(mlp=96)),
        Subject("qwen3_vl:8b", "qwen3_vl", checkpoints.qwen3_vl, _qwen, QwenSizes(mlp=96)),
        Subject("qwen3_omni_vision", "qwen3_omni_vision", checkpoints.qwen3_omni_vision, _qwen, QwenSizes(mlp=96)),
        Subject("glm4v:9b", "glm4v", checkpoints.glm4v, _glm, QwenSizes(mlp=96)),
        Subject("whisper:large-v3", "whisper", checkpoints.whisper, _whisper, WhisperSizes(positions=1500)),
        Subject("qwen2_audio", "qwen2_audio", checkpoints.qwen2_audio, _pooled, PooledSizes(positions=1500)),
        Subject(
            "qwen2_5_omni_audio:7b",
            "qwen2_5_omni_audio",
            checkpoints.qwen2_5_omni_audio,
            _pooled,
            PooledSizes(positions=20),
        ),
        Subject("qwen3_omni_audio", "qwen3_omni_audio", checkpoints.qwen3_omni_audio, _chunked, AudioSizes()),
        Subject("qwen3_asr_audio:1.7b", "qwen3_asr_audio", checkpoints.qwen3_asr_audio, _chunked, AudioSizes()),
    )
}


def add_arguments(parser: argparse.ArgumentParser, *, encoders: Sequence[str] = tuple(SUBJECTS)) -> None:
    """The options that all benchmarks have."""
    if encoders:
        parser.add_argument("--encoder", choices=encoders, action="append", help="some alone")
    parser.add_argument("--small", action="store_true", help="tiny models: a trial run, kept only with --results")
    parser.add_argument("--results", type=Path, help="folder to keep the results in")
    parser.add_argument("--note", default="", help="kept with the rows")


def item_arrays(item: Item) -> dict[str, np.ndarray]:
    """An item as plain arrays, for a file."""
    if isinstance(item, VisionItem):
        return {"patches": item.patches, "grid": np.array(item.grid)}
    return {"mel": item.mel, "frames": np.array(item.recorded)}


def item_of(arrays: dict[str, np.ndarray]) -> Item:
    """The inverse of `item_arrays`."""
    if "mel" in arrays:
        return AudioItem(arrays["mel"], frames=int(arrays["frames"]))
    t, h, w = arrays["grid"].tolist()
    return VisionItem(arrays["patches"], (t, h, w))
