"""The PyTorch originals (transformers 5.24) on the tiny checkpoints of `tests.parity.checkpoints`.

`run(items, dtype=...)` encodes a list of items. In "float32" and "bfloat16" the original runs as it stands (attention
through torch's scaled_dot_product_attention, parameters in that dtype, buffers in float32 as from_pretrained leaves
them): its distance from the truth is the original's own error. In "float64" it is the truth, and float64 throughout:
the places where transformers computes in float32 whatever the model's dtype are replaced.

Kimi_K25VisionModel: rotary tables (`Kimi_K25VisionRotaryEmbedding.forward`) and their application
(`apply_rotary_pos_emb_vision`), the temporal sinusoids (`compute_pos_embed`), the resampling weights
(`_interpolation_axis_taps_weights`; F.interpolate takes their place, in double) and the mean over frames
(`temporal_merge`). Qwen3OmniMoeAudioEncoder,
Qwen3ASREncoder and Qwen2_5OmniAudioEncoder: the sinusoids (`compute_default_singular_positional_embedding`).
WhisperEncoder and Qwen2AudioEncoder: nothing. (Eager attention would add its float32 softmax; it is not used.)

`alter=` takes one mistake that a port could make and returns what it would compute. A test that compares with the truth
shows with it that the mistake would have been seen.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Kimi_K25Config, Qwen2AudioConfig, Qwen2AudioModel, Qwen3ASRConfig, WhisperConfig
from transformers.activations import ACT2FN
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi_modeling
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.qwen3_asr import modeling_qwen3_asr as asr_modeling
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni_modeling
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from tests.parity.checkpoints import Checkpoint, Config, Tensors

Dtype = Literal["float64", "float32", "bfloat16"]
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Encoded:
    """What an original gave.

    Attributes:
        rows: per item, its output [rows, dim].
        hidden: per item, the residual stream [layers + 1, tokens, embed]: what enters the first block, then what leaves
            each block. Kimi's tokens are in raster order (frame, row, column); the audio towers' in time.
    """

    rows: list[np.ndarray]
    hidden: list[np.ndarray]


@dataclass(frozen=True)
class KimiAlter:
    """One mistake each; the defaults are right.

    Attributes:
        resample: what brings the position table [H, W, D] to [h*w, D].
        temporal: (frames, embed) -> what is added to each frame [frames, D].
        rotary: "xy" (a pair of channels turned by the column, then one by the row) or "yx".
        rotary_pairs: "adjacent" channels of the published layout, or "halves" (published rows taken as if reordered).
        segments: who attends to whom: tokens of a "clip", of a "frame", or of the whole "call".
        pool: over the frames: "mean" or "first".
        merge: order of the four patches of a row: "rows" (0,0),(0,1),(1,0),(1,1), or "columns".
        model: changes the tower, projector: norms' eps, activations.
    """

    resample: Callable[[torch.Tensor, int, int], torch.Tensor] | None = None
    temporal: Callable[[int, int], torch.Tensor] | None = None
    rotary: Literal["xy", "yx"] = "xy"
    rotary_pairs: Literal["adjacent", "halves"] = "adjacent"
    segments: Literal["clip", "frame", "call"] = "clip"
    pool: Literal["mean", "first"] = "mean"
    merge: Literal["rows", "columns"] = "rows"
    model: Callable[[nn.Module, nn.Module], None] | None = None


@dataclass(frozen=True)
class Kimi:
    """The Kimi-K2.5 vision tower and projector."""

    checkpoint: Checkpoint
    _models: dict[str, tuple[nn.Module, nn.Module]] = field(default_factory=dict, repr=False)

    def run(
        self,
        items: Sequence[tuple[np.ndarray, Grid]],
        *,
        dtype: Dtype = "float64",
        alter: KimiAlter | None = None,
    ) -> Encoded:
        """Encode all items in one call.

        Args:
            items: (patches [t*h*w, 3*p*p], grid (t, h, w)) each.
            dtype: "float64" is the truth.
            alter: a mistake; in float64 only.
        """
        tower, projector = self._model(dtype)
        torch_dtype = getattr(torch, dtype)
        grids = torch.tensor([grid for _, grid in items])
        patch = tower.config.patch_size
        pixels = torch.as_tensor(np.concatenate([patches for patches, _ in items])).to(torch_dtype)
        pixels = pixels.reshape(-1, 3, patch, patch)
        with torch.no_grad():
            if dtype == "float64":
                rows, hidden = self._truth(tower, projector, pixels, grids, alter or KimiAlter())
            elif alter is not None:
                raise ValueError("a mistake is made in float64 only")
            else:
                with _recorded(tower.layers) as hidden:
                    rows = projector(tower(pixels, grid_thw=grids).pooler_output).squeeze(1)
        tokens = [math.prod(grid) for _, grid in items]
        return Encoded(
            _split(rows, [h * w // 4 for _, (_, h, w) in items]),
            [np.stack(layers) for layers in zip(*(_split(state, tokens) for state in hidden), strict=True)],
        )

    def _model(self, dtype: Dtype) -> tuple[nn.Module, nn.Module]:
        if dtype not in self._models:
            self._models[dtype] = kimi_modules(
                self.checkpoint.configs["transformers"], self.checkpoint.tensors["transformers"], dtype
            )
        return self._models[dtype]

    def _truth(
        self, tower: nn.Module, projector: nn.Module, pixels: torch.Tensor, grids: torch.Tensor, alter: KimiAlter
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Drive the original's own modules, with what it computes in float32 computed here."""
        tower, projector = copy.deepcopy((tower, projector))
        if alter.model is not None:
            alter.model(tower, projector)
        if alter.rotary_pairs == "halves":
            _undo_reordering(tower)
        sizes = grids.tolist()
        table = tower.patch_embed.pos_emb.position_embeddings
        embed = table.shape[-1]
        resample, temporal = alter.resample or resample_bicubic, alter.temporal or temporal_sinusoids
        positions = []
        for t, h, w in sizes:
            positions.append((resample(table, h, w)[None] + temporal(t, embed)[:, None]).reshape(-1, embed))
        x = tower.patch_embed.proj(pixels).reshape(len(pixels), -1) + torch.cat(positions)

        rotary = _kimi_rotary(sizes, embed // tower.config.num_attention_heads, alter.rotary)
        lengths = [length for grid in sizes for length in _segments(grid, alter.segments)]
        lengths = [sum(lengths)] if alter.segments == "call" else lengths
        boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        patched = mock.patch.object(kimi_modeling, "apply_rotary_pos_emb_vision", _rotate_halves)
        with patched, _recorded(tower.layers) as hidden:
            for block in tower.layers:
                x = block(x, cu_seqlens=boundaries, position_embeddings=rotary)
        x = tower.final_layernorm(x)
        order = (0, 2, 1, 3, 4) if alter.merge == "rows" else (0, 2, 3, 1, 4)
        merged = []
        for (t, h, w), clip in zip(sizes, x.split([math.prod(grid) for grid in sizes]), strict=True):
            clip = clip.reshape(t, h * w, embed)
            clip = clip.mean(0) if alter.pool == "mean" else clip[0]
            merged.append(clip.reshape(h // 2, 2, w // 2, 2, embed).permute(order).reshape(-1, 4, embed))
        return projector(torch.cat(merged)).squeeze(1), hidden


@dataclass(frozen=True)
class AudioAlter:
    """One mistake each; the defaults are right.

    Attributes:
        window: tokens that attend to each other; None: the whole clip; "call": all clips together.
        flatten: order of the convolutions' output in conv_out's input.
        positions: start again in each "chunk", or run through the "clip".
        padding: frames up to which short chunks are padded: 100, or "none" for each chunk's own length.
        sinusoids: (positions, embed) -> [positions, embed].
        model: changes the tower: norms' eps, activations.
        conv_gelu: what follows each convolution.
    """

    window: int | Literal["call"] | None = 104
    flatten: Literal["channel-major", "mel-major"] = "channel-major"
    positions: Literal["chunk", "clip"] = "chunk"
    padding: int | Literal["none"] = 100
    sinusoids: Callable[[int, int], torch.Tensor] | None = None
    model: Callable[[nn.Module], None] | None = None
    conv_gelu: Callable[[torch.Tensor], torch.Tensor] = F.gelu


@dataclass(frozen=True)
class Qwen3OmniAudio:
    """The Qwen3-Omni audio tower. Chunks are always padded to 100 frames."""

    checkpoint: Checkpoint
    _models: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    def run(self, items: Sequence[np.ndarray], *, dtype: Dtype = "float64", alter: AudioAlter | None = None) -> Encoded:
        """Encode all clips in one call, with a silent full chunk beside them where none of them has one.

        The original pads to the longest chunk of the call: a full chunk makes that 100 frames whatever the clips are,
        and what it gives itself is dropped.

        Args:
            items: log-mel [bins, frames] each.
            dtype: "float64" is the truth.
            alter: a mistake; in float64 only.
        """
        model = self._model(dtype)
        if alter is not None:
            if dtype != "float64":
                raise ValueError("a mistake is made in float64 only")
            rows, hidden = self._altered(copy.deepcopy(model), items, alter)
        else:
            frames = [item.shape[1] for item in items]
            beside = [np.zeros((items[0].shape[0], 100), np.float32)] if max(frames) < 100 else []
            features = torch.as_tensor(np.concatenate([*items, *beside], axis=1)).to(getattr(torch, dtype))
            lengths = torch.tensor([*frames, *(100 for _ in beside)])
            with torch.no_grad(), _recorded(model.layers) as hidden:
                rows = model(features, feature_lens=lengths).last_hidden_state
        tokens = [audio_tokens(item.shape[1]) for item in items]
        beside_tokens = [len(rows) - sum(tokens)]
        states = [_split(state, tokens + beside_tokens)[: len(items)] for state in hidden]
        return Encoded(
            _split(rows, tokens + beside_tokens)[: len(items)],
            [np.stack(layers) for layers in zip(*states, strict=True)],
        )

    def _model(self, dtype: Dtype) -> nn.Module:
        if dtype not in self._models:
            model = qwen3_omni_audio_module(self.checkpoint.configs["tower"], self.checkpoint.tensors["tower"], dtype)
            self._models[dtype] = model
        return self._models[dtype]

    def _altered(
        self, model: nn.Module, items: Sequence[np.ndarray], alter: AudioAlter
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if alter.model is not None:
            alter.model(model)
        clips, embed = [], model.config.d_model
        sinusoids = alter.sinusoids or whisper_sinusoids
        with torch.no_grad():
            for item in items:
                features, parts, start = torch.as_tensor(item).double(), [], 0
                for chunk in features.split(100, dim=1):
                    pad = 0 if alter.padding == "none" else alter.padding - chunk.shape[1]
                    x = F.pad(chunk, (0, pad))[None, None]
                    for convolution in (model.conv2d1, model.conv2d2, model.conv2d3):
                        x = alter.conv_gelu(convolution(x))
                    order = (0, 3, 1, 2) if alter.flatten == "channel-major" else (0, 3, 2, 1)
                    x = model.conv_out(x.permute(order).flatten(2))[0][: audio_tokens(chunk.shape[1])]
                    first = start if alter.positions == "clip" else 0
                    parts.append(x + sinusoids(first + len(x), embed)[first:])
                    start += len(x)
                clips.append(torch.cat(parts))
            windows: list[int] = []
            for clip in clips:
                window = len(clip) if alter.window is None or alter.window == "call" else alter.window
                windows += [min(window, len(clip) - start) for start in range(0, len(clip), window)]
            windows = [sum(windows)] if alter.window == "call" else windows
            boundaries = torch.tensor([0, *np.cumsum(windows)], dtype=torch.int32)
            x = torch.cat(clips)
            with _recorded(model.layers) as hidden:
                for layer in model.layers:
                    x = layer(x, boundaries)[0]
            return model.proj2(model.act(model.proj1(model.ln_post(x)))), hidden


@dataclass(frozen=True)
class Qwen3AsrAudio:
    """The Qwen3-ASR audio tower and its projector."""

    checkpoint: Checkpoint
    _models: dict[str, tuple[nn.Module, nn.Module]] = field(default_factory=dict, repr=False)

    def run(self, items: Sequence[np.ndarray], *, dtype: Dtype = "float64") -> Encoded:
        """Encode all clips in one call, each with zeros up to whole chunks and a mask, as the processor makes them."""
        if dtype not in self._models:
            self._models[dtype] = qwen3_asr_modules(
                self.checkpoint.configs["transformers"], self.checkpoint.tensors["transformers"], dtype
            )
        tower, projector = self._models[dtype]
        lengths = [item.shape[1] for item in items]
        frames = -(-max(lengths) // 100) * 100
        features = np.stack([np.pad(item, ((0, 0), (0, frames - item.shape[1]))) for item in items])
        mask = torch.arange(frames) < torch.tensor(lengths)[:, None]
        with torch.no_grad(), _recorded(tower.layers) as hidden:
            features = torch.as_tensor(features).to(getattr(torch, dtype))
            rows = projector(tower(features, mask.long()).last_hidden_state)
        tokens = [audio_tokens(length) for length in lengths]
        states = [_split(state, tokens) for state in hidden]
        return Encoded(_split(rows, tokens), [np.stack(layers) for layers in zip(*states, strict=True)])


@dataclass(frozen=True)
class Whisper:
    """The Whisper encoder."""

    checkpoint: Checkpoint
    _models: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    def run(
        self,
        items: Sequence[np.ndarray],
        *,
        dtype: Dtype = "float64",
        alter: Callable[[nn.Module], None] | None = None,
    ) -> Encoded:
        """Encode log-mels [bins, 2 * positions]; `alter` changes the model, in float64 only."""
        if dtype not in self._models:
            self._models[dtype] = whisper_module(
                self.checkpoint.configs["model"], self.checkpoint.tensors["model"], dtype
            )
        model = self._models[dtype]
        if alter is not None:
            model = copy.deepcopy(model)
            alter(model)
        features = torch.as_tensor(np.stack(items)).to(getattr(torch, dtype))
        with torch.no_grad(), _recorded(model.layers) as hidden:
            rows = model(features).last_hidden_state
        return Encoded(
            [_numpy(row) for row in rows],
            [np.stack(layers) for layers in zip(*([_numpy(row) for row in state] for state in hidden), strict=True)],
        )


@dataclass(frozen=True)
class Qwen2Audio:
    """Qwen2-Audio up to its language model: what stands in for the placeholders there."""

    checkpoint: Checkpoint
    _models: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    def run(
        self,
        items: Sequence[tuple[np.ndarray, int]],
        *,
        dtype: Dtype = "float64",
        alter: Callable[[nn.Module], None] | None = None,
    ) -> Encoded:
        """Encode (log-mel [bins, 2 * positions], frames recorded) each; `alter` changes the tower, in float64 only."""
        model = self._model(dtype)
        if alter is not None:
            model = copy.deepcopy(model)
            alter(model.audio_tower)
        tokens, rows = pooled_lengths(model.audio_tower, [frames for _, frames in items])
        ids = torch.full((1, sum(rows)), model.config.audio_token_id)
        features = torch.as_tensor(np.stack([mel for mel, _ in items])).to(getattr(torch, dtype))
        mask = torch.arange(features.shape[2]) < torch.tensor([frames for _, frames in items])[:, None]
        given: list[torch.Tensor] = []
        hook = model.language_model.register_forward_pre_hook(
            lambda _, __, named: given.append(named["inputs_embeds"][0]), with_kwargs=True
        )
        with torch.no_grad(), _recorded(model.audio_tower.layers) as hidden:
            model(input_ids=ids, input_features=features, feature_attention_mask=mask.long())
        hook.remove()
        states = [[_numpy(x[:n]) for x, n in zip(state, tokens, strict=True)] for state in hidden]
        return Encoded(_split(given[0], rows), [np.stack(layers) for layers in zip(*states, strict=True)])

    def rows(self, frames: Sequence[int]) -> list[int]:
        """Rows that come out for so many frames recorded."""
        return pooled_lengths(self._model("float64").audio_tower, frames)[1]

    def _model(self, dtype: Dtype) -> nn.Module:
        if dtype not in self._models:
            config, tensors = self.checkpoint.configs["original"], self.checkpoint.tensors["original"]
            self._models[dtype] = qwen2_audio_module(config, tensors, dtype)
        return self._models[dtype]


@dataclass(frozen=True)
class Qwen25OmniAudio:
    """The Qwen2.5-Omni audio tower."""

    checkpoint: Checkpoint
    _models: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    def run(
        self,
        items: Sequence[np.ndarray],
        *,
        dtype: Dtype = "float64",
        alter: Callable[[nn.Module], None] | None = None,
        windows: Sequence[int] | None = None,
    ) -> Encoded:
        """Encode log-mels [bins, frames] in one call.

        Args:
            items: log-mel [bins, frames] each.
            dtype: "float64" is the truth.
            alter: changes the tower; in float64 only.
            windows: tokens that attend to each other, where they are not those of a chunk.
        """
        model = self._model(dtype)
        if alter is not None:
            model = copy.deepcopy(model)
            alter(model)
        features = torch.as_tensor(np.concatenate(items, axis=1)).to(getattr(torch, dtype))
        lengths = torch.tensor([item.shape[1] for item in items])
        given = {} if windows is None else {"cu_seqlens": torch.tensor([0, *np.cumsum(windows)], dtype=torch.int32)}
        tokens, rows = pooled_lengths(model, lengths.tolist())
        with torch.no_grad(), _recorded(model.layers) as hidden:
            out = model(features, feature_lens=lengths, **given).last_hidden_state
        states = [_split(state, tokens) for state in hidden]
        return Encoded(_split(out, rows), [np.stack(layers) for layers in zip(*states, strict=True)])

    def rows(self, frames: Sequence[int]) -> list[int]:
        """Rows that come out for clips of so many frames."""
        return pooled_lengths(self._model("float64"), frames)[1]

    def _model(self, dtype: Dtype) -> nn.Module:
        if dtype not in self._models:
            config, tensors = self.checkpoint.configs["tower"], self.checkpoint.tensors["tower"]
            self._models[dtype] = qwen2_5_omni_audio_module(config, tensors, dtype)
        return self._models[dtype]


# The originals' modules, loaded strictly


def kimi_modules(config: Config, tensors: Tensors, dtype: Dtype) -> tuple[nn.Module, nn.Module]:
    """(vision tower, projector) of Kimi-K2.5 from a transformers config and tensors in transformers' layout."""
    full = Kimi_K25Config(**config)
    full.vision_config._attn_implementation = "sdpa"
    tower = kimi_modeling.Kimi_K25VisionModel(full.vision_config)
    projector = kimi_modeling.Kimi_K25MultimodalProjection(full)
    return (
        _loaded(tower, tensors, "model.vision_tower.", dtype),
        _loaded(projector, tensors, "model.mm_projector.", dtype),
    )


def qwen3_omni_audio_module(config: Config, tensors: Tensors, dtype: Dtype) -> nn.Module:
    """The audio tower from its own config and tensors without prefix."""
    audio_config = Qwen3OmniMoeAudioEncoderConfig(**config)
    audio_config._attn_implementation = "sdpa"
    return _with_sinusoids(_loaded(omni_modeling.Qwen3OmniMoeAudioEncoder(audio_config), tensors, "", dtype), dtype)


def qwen3_asr_modules(config: Config, tensors: Tensors, dtype: Dtype) -> tuple[nn.Module, nn.Module]:
    """(audio tower, projector) of Qwen3-ASR from a transformers config and tensors in transformers' layout."""
    full = Qwen3ASRConfig(**config)
    full.audio_config._attn_implementation = "sdpa"
    tower = _loaded(asr_modeling.Qwen3ASREncoder(full.audio_config), tensors, "model.audio_tower.", dtype)
    projector = asr_modeling.Qwen3ASRMultiModalProjector(full)
    return _with_sinusoids(tower, dtype), _loaded(projector, tensors, "model.multi_modal_projector.", dtype)


def qwen2_audio_module(config: Config, tensors: Tensors, dtype: Dtype) -> nn.Module:
    """Qwen2-Audio without its head; of the language model, which makes no rows, the parameters are random."""
    full = Qwen2AudioConfig(**config)
    full._attn_implementation = "sdpa"
    model = Qwen2AudioModel(full)
    _loaded(model.audio_tower, tensors, "audio_tower.", dtype)
    _loaded(model.multi_modal_projector, tensors, "multi_modal_projector.", dtype)
    model.language_model.to(getattr(torch, dtype))
    return model.eval()


def qwen2_5_omni_audio_module(config: Config, tensors: Tensors, dtype: Dtype) -> nn.Module:
    """The audio tower from its own config and tensors without prefix."""
    audio_config = Qwen2_5OmniAudioEncoderConfig(**config)
    audio_config._attn_implementation = "sdpa"
    return _with_sinusoids(_loaded(Qwen2_5OmniAudioEncoder(audio_config), tensors, "", dtype), dtype)


def whisper_module(config: Config, tensors: Tensors, dtype: Dtype) -> nn.Module:
    """The encoder from a Whisper config and tensors named encoder.*."""
    whisper_config = WhisperConfig(**config)
    whisper_config._attn_implementation = "sdpa"
    return _loaded(WhisperEncoder(whisper_config), tensors, "encoder.", dtype)


def _loaded(module: nn.Module, tensors: Tensors, prefix: str, dtype: Dtype) -> nn.Module:
    state = {
        name.removeprefix(prefix): torch.as_tensor(value) for name, value in tensors.items() if name.startswith(prefix)
    }
    buffers = {name for name, _ in module.named_buffers()}
    problems = module.load_state_dict(state, strict=False)
    if problems.unexpected_keys or set(problems.missing_keys) - buffers:
        raise ValueError(f"{type(module).__name__}: {problems}")
    for parameter in module.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
        parameter.requires_grad_(False)
    return module.eval()


# What the truth computes in place of the originals' float32


def _with_sinusoids(tower: nn.Module, dtype: Dtype) -> nn.Module:
    if dtype == "float64":
        positions = tower.positional_embedding
        positions.positional_embedding = whisper_sinusoids(positions.length, positions.channels)
    return tower


def resample_bicubic(table: torch.Tensor, height: int, width: int, *, antialias: bool = False) -> torch.Tensor:
    """The position table [H, W, D] at (height, width), [height * width, D], as MoonViT: F.interpolate, bicubic."""
    if table.shape[:2] == (height, width):
        return table.reshape(height * width, -1)
    image = table.double().permute(2, 0, 1)[None]
    image = F.interpolate(image, size=(height, width), mode="bicubic", align_corners=False, antialias=antialias)
    return image[0].permute(1, 2, 0).reshape(height * width, -1)


def resample_taps(
    table: torch.Tensor,
    height: int,
    width: int,
    *,
    a: float = -0.75,
    border: str = "clamp",
    align_corners: bool = False,
) -> torch.Tensor:
    """The same from the cubic kernel (Keys 1981) itself, with another `a`, border ("clamp", "renormalise") or grid."""

    def axis(size: int, side: int) -> torch.Tensor:
        index = np.arange(size)
        source = index * (side - 1) / max(size - 1, 1) if align_corners else (index + 0.5) * side / size - 0.5
        weights = np.zeros((size, side))
        for offset in range(-1, 3):
            tap = np.floor(source).astype(int) + offset
            d = np.abs(source - tap)
            near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            weight = np.where(d <= 1, near, far)
            if border == "renormalise":
                weight = np.where((tap >= 0) & (tap < side), weight, 0)
            np.add.at(weights, (index, tap.clip(0, side - 1)), weight)
        return torch.as_tensor(weights / weights.sum(1, keepdims=True))

    rows, columns = axis(height, table.shape[0]), axis(width, table.shape[1])
    return torch.einsum("hH,wW,HWd->hwd", rows, columns, table.double()).reshape(height * width, -1)


def temporal_sinusoids(frames: int, embed: int, *, divisor: float | None = None, single: bool = False) -> torch.Tensor:
    """What MoonViT3d adds to each frame [frames, embed]: sines, then cosines; nothing to an image unless `single`."""
    if frames == 1 and not single:
        return torch.zeros(1, embed, dtype=torch.float64)
    frequencies = 10000.0 ** (-torch.arange(embed // 2, dtype=torch.float64) / (divisor or embed / 2))
    angles = torch.arange(frames, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def whisper_sinusoids(length: int, embed: int, *, divisor: float | None = None) -> torch.Tensor:
    """Whisper's positions [length, embed]: sines, then cosines, the slowest of 1/10000: (embed / 2 - 1) steps."""
    steps = divisor or embed // 2 - 1
    frequencies = torch.exp(-math.log(10000.0) / steps * torch.arange(embed // 2, dtype=torch.float64))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def audio_tokens(frames: int) -> int:
    """Rows that come out for a clip: what three convolutions of stride 2 leave of each chunk of 100 frames."""
    tokens = 0
    for start in range(0, frames, 100):
        length = min(100, frames - start)
        for _ in range(3):
            length = (length - 1) // 2 + 1
        tokens += length
    return tokens


def pooled_lengths(tower: nn.Module, frames: Sequence[int]) -> tuple[list[int], list[int]]:
    """(tokens, rows) of clips as Qwen2-Audio's and Qwen2.5-Omni's towers count them."""
    tokens, rows = tower._get_feat_extract_output_lengths(torch.tensor(frames))
    return tokens.tolist(), rows.tolist()


def use_epsilon(*modules: nn.Module, eps: float) -> None:
    """Give every norm in `modules` another eps."""
    for module in modules:
        for part in module.modules():
            for name in ("eps", "variance_epsilon"):
                if hasattr(part, name):
                    setattr(part, name, eps)


def use_activation(*modules: nn.Module, name: str) -> None:
    """Give every part of `modules` that has an activation (act, activation_fn) another, by its transformers name."""
    for module in modules:
        for part in list(module.modules()):
            for attribute in ("act", "activation_fn"):
                if hasattr(part, attribute):
                    setattr(part, attribute, ACT2FN[name])


def _kimi_rotary(sizes: Sequence[Sequence[int]], head_dim: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-4 * torch.arange(head_dim // 4, dtype=torch.float64) / head_dim)
    tables = []
    for t, h, w in sizes:
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        axes = (x, y) if order == "xy" else (y, x)
        angles = torch.stack([axis.flatten()[:, None] * frequencies for axis in axes], dim=-1).flatten(1)
        tables.append(torch.cat([angles, angles], dim=1).repeat(t, 1))
    angles = torch.cat(tables)
    return angles.cos(), angles.sin()


def _rotate_halves(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Any, Any]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return tuple(x * cos + kimi_modeling.rotate_half(x) * sin for x in (q, k))


def _undo_reordering(tower: nn.Module) -> None:
    """Give back to q and k the published order of rows, which rotate-half cannot read."""
    heads = tower.config.num_attention_heads
    for block in tower.layers:
        for projection in (block.attn.q_proj, block.attn.k_proj):
            for parameter in (projection.weight, projection.bias):
                halves = parameter.data.reshape(heads, 2, len(parameter) // heads // 2, -1)
                parameter.data = halves.transpose(1, 2).reshape(parameter.shape)


def _segments(grid: Sequence[int], kind: str) -> list[int]:
    t, h, w = grid
    return [h * w] * t if kind == "frame" else [t * h * w]


_rows_alone: ContextVar[bool] = ContextVar("_rows_alone", default=False)


@contextlib.contextmanager
def rows_alone() -> Iterator[None]:
    """Originals that run within keep no hidden states, so that a clock measures what their users wait for."""
    token = _rows_alone.set(True)
    try:
        yield
    finally:
        _rows_alone.reset(token)


@contextlib.contextmanager
def _recorded(blocks: nn.ModuleList) -> Iterator[list[torch.Tensor]]:
    """Give a list that fills with the input of the first of `blocks` and the output of each."""
    states: list[torch.Tensor] = []
    if _rows_alone.get():
        yield states
        return

    def enter(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        states.append(args[0])

    def leave(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [blocks[0].register_forward_pre_hook(enter), *(block.register_forward_hook(leave) for block in blocks)]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(torch.float64).cpu().numpy()


def _split(x: torch.Tensor, sizes: Sequence[int]) -> list[np.ndarray]:
    return [_numpy(part) for part in x.split(list(sizes))]
