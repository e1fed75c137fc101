"""What transformers computes with a checkpoint's own weights, for `verify --against torch`.

The model is built from the checkpoint's config.json, and given its tower's tensors under their published names: what
the names mean, and what order rows are in, is then transformers' word and not that of `checkpoints_convert.mappings`.
Where transformers cannot read a published layout, that table is gone through after all, and it is said.

`rows.differences` imports this, after it has seen that torch and transformers are there.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.mapping import Mapping as KeyMapping
from checkpoints_convert.sources import NumpyArray, Source
from checkpoints_convert.values import cast_to_nearest
from jaxenc.items import Item
from jaxenc.models.base import EncoderConfig
from jaxenc.models.internvit import THEIR_DEFAULTS, THEIR_NAMES, THEIRS, as_transformers_says
from jaxenc.models.published import with_defaults

Config = dict[str, Any]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Original:
    """A tower as transformers has it, with the weights of a checkpoint.

    Attributes:
        source: The checkpoint.
        mapping: Names of the tower's tensors there.
        encoder: Which tower it is.
        dtypes: What tensors are rounded to first, by name: those of a converted checkpoint that is compared.
    """

    source: Source
    mapping: KeyMapping
    encoder: EncoderConfig
    dtypes: Mapping[str, npt.DTypeLike] = field(default_factory=dict)

    @property
    def independent(self) -> bool:
        """Whether transformers reads the published names by itself."""
        return self.mapping.layout in READS.get(self.encoder.family, (self.mapping.layout,))

    def rows(self, given: Sequence[Item], *, dtype: str) -> list[Rows]:
        """Rows of each item, with parameters and products in "float32" or "float64".

        Raises:
            CheckpointError: transformers knows no such model, or does not find its tensors in the checkpoint.
        """
        model, missing = self._model(dtype)
        with torch.no_grad():
            made = [CALLS[self.encoder.family](model, item, getattr(torch, dtype)) for item in given]
        rows = [part.reshape(-1, part.shape[-1]).double().numpy() for part in made]
        if not all(np.isfinite(part).all() for part in rows):
            found = _grouped(missing, "transformers finds no tensor for it")
            raise CheckpointError(f"{self.source.name}: torch's rows are NaN or infinite", found)
        return rows

    def _model(self, dtype: str) -> tuple[Any, list[str]]:
        """The model, and those of its parameters that are not among the tensors: they are NaN."""
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        published = as_transformers_reads(self.source.config)
        try:
            config = CONFIG_MAPPING[published["model_type"]].from_dict(published)
            config = getattr(config, "thinker_config", config)  # of an omni model, what understands
            kind: Any = MODEL_MAPPING[type(config)]
        except KeyError as error:
            raise CheckpointError(f"{self.source.name}: transformers has no model of {error}") from error
        _leave_out(config, "audio_config" if self.encoder.modality == "vision" else "vision_config")
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=self._tensors(),
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        problems = _grouped(found["unexpected_keys"], "transformers does not know this tensor")
        problems += _grouped((name for name, *_ in found["mismatched_keys"]), "transformers expects another shape")
        if problems:
            raise CheckpointError(f"{self.source.name}: is not what {kind.__name__} reads", problems)
        # language model, another tower, blocks that no row depends on: were one needed after all, rows would be NaN
        parameters, missing = dict(model.named_parameters()), sorted(found["missing_keys"])
        for name in missing:
            if name in parameters:
                parameters[name].data.fill_(torch.nan)
        return model.eval(), missing

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tower's, under the names that transformers reads."""
        self.source.prefetch(self.mapping.names)
        if self.independent:
            arrays = {name: self._rounded(name, self.source.read(name)) for name in self.mapping.names}
            # what a whole model with its head puts before the names of a model without
            return {name.removeprefix("model."): _tensor(array) for name, array in arrays.items()}
        layouts = self.encoder.mappings()
        native = layouts.get("transformers", layouts["original"])
        params = {
            target: self._rounded(self.mapping.sources(target)[0], self.mapping.read(self.source, target))
            for target in self.mapping.shapes
        }
        # before the names of a tower alone there is nothing
        prefix = native.prefixes[0] if len(native.prefixes) == 1 else "model."
        return {name.removeprefix(prefix): _tensor(array) for name, array in native.export(params)}

    def _rounded(self, name: str, array: NumpyArray) -> NumpyArray:
        return cast_to_nearest(array, np.dtype(self.dtypes.get(name, array.dtype)))


# layouts whose names transformers reads, of families that have others; of all the rest it reads every one
READS = {"internvit": ("transformers",), "pixtral": ("original",), "qwen3_asr_audio": ("transformers",)}


def as_transformers_reads(config: Mapping[str, Any]) -> Config:
    """A published config.json in the words of transformers, where it has not learnt to read those."""
    config = _without_quantization(config)
    vision, model_type = config.get("vision_config") or {}, config.get("model_type")
    if "vision_encoder" in config:
        return _as_pixtral(config)
    if model_type == "kimi_k25" and vision.get("model_type") != "kimi_k25_vision":
        tower = {key.removeprefix("vt_").removeprefix("init_"): value for key, value in vision.items()}
        width = vision.get("text_hidden_size") or config["text_config"]["hidden_size"]
        return {
            "model_type": model_type,
            "projection_hidden_size": tower["hidden_size"],
            "projection_layer_norm_eps": vision.get("projector_ln_eps", 1e-5),
            "text_config": {"model_type": "deepseek_v3", "hidden_size": width},
            "vision_config": tower | {"model_type": "kimi_k25_vision"},
        }
    if model_type in THEIRS:  # OpenGVLab's InternViT
        theirs = with_defaults(THEIR_DEFAULTS, vision or config)
        tower = {THEIR_NAMES.get(key, key): value for key, value in theirs.items()} | {"model_type": "internvl_vision"}
        if not vision:
            return tower
        whole = as_transformers_says(config, image=theirs["image_size"])
        text = {"model_type": "qwen2", "hidden_size": whole["text_config"]["hidden_size"]}
        return whole | {"model_type": "internvl", "vision_config": tower, "text_config": text}
    if model_type == "qwen3_asr" and "thinker_config" in config:
        thinker = config["thinker_config"]
        width = thinker["audio_config"]["output_dim"]
        return {
            "model_type": model_type,
            "audio_config": thinker["audio_config"] | {"model_type": "qwen3_asr_encoder"},
            "text_config": {"model_type": "qwen3", "hidden_size": width},
        }
    return config


def _without_quantization(config: Mapping[str, Any]) -> Config:
    """The language model is quantised, the tower is not."""
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "quantization_config"
    }


def _as_pixtral(params: Mapping[str, Any]) -> Config:
    """Mistral's params.json."""
    vision = params["vision_encoder"]
    merge = vision.get("spatial_merge_size", 1)
    return {
        "model_type": "mistral3" if merge > 1 else "llava",
        "multimodal_projector_bias": vision.get("adapter_bias", True),
        "projector_hidden_act": "gelu",
        "text_config": {
            "model_type": "mistral",
            "hidden_size": params["dim"],
            "rms_norm_eps": params.get("norm_eps", 1e-5),
        },
        "vision_config": {**vision, "model_type": "pixtral", "hidden_act": "silu"},
        "vision_feature_layer": -1,
    } | ({"spatial_merge_size": merge} if merge > 1 else {"vision_feature_select_strategy": "full"})


def _leave_out(config: Any, other: str) -> None:
    """Leaves a language model of no layers and few words, and no layers of the other tower: no row depends on them."""
    if hasattr(config, "decoder_layers"):  # Whisper's, whose num_hidden_layers are the encoder's
        text, none = config, dict[str, Any](decoder_layers=0)
    else:
        text, none = config.get_text_config(decoder=True), dict[str, Any](num_hidden_layers=0, layer_types=[])
        if text is config:  # a tower alone
            return
    for part, values in (
        (text, {**none, "vocab_size": 8, "pad_token_id": None}),
        (getattr(config, other, None), {"depth": 0, "encoder_layers": 0, "deepstack_visual_indexes": []}),
        (config, {"audio_token_id": 0}),
    ):
        for name, value in values.items():
            if hasattr(part, name):
                setattr(part, name, value)


def _grouped(names: Iterable[str], what: str) -> list[str]:
    """A line for the tensors of one name in all blocks."""
    groups = defaultdict(list)
    for name in sorted(names):
        groups[re.sub(r"(?<=\.)\d+(?=\.)", "N", name)].append(name)
    counted = [(group[0], f" (and {len(group) - 1} more like it)" * (len(group) > 1)) for group in groups.values()]
    return [f"{first}{more}: {what}" for first, more in counted]


def _tensor(value: NumpyArray) -> torch.Tensor:
    value = np.array(value)  # that of a file cannot be written to, of which torch warns
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(value)


# (model, item, dtype) -> rows


def pixels_of(patches: NumpyArray, grid: tuple[int, int, int]) -> torch.Tensor:
    """[tiles, 3, height, width] of patches in raster order."""
    (t, h, w), p = grid, int(np.sqrt(patches.shape[1] // 3))
    pixels = patches.reshape(t, h, w, 3, p, p).transpose(0, 3, 1, 4, 2, 5).reshape(t, 3, h * p, w * p)
    return torch.as_tensor(np.ascontiguousarray(pixels))


def _pixels(item: Any, dtype: torch.dtype) -> torch.Tensor:
    return pixels_of(item.patches, item.grid).to(dtype)


def _vit(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    pixels = _pixels(item, dtype)
    if not hasattr(model, "multi_modal_projector"):
        return getattr(model, "vision_model", model)(pixels).last_hidden_state
    sizes = [pixels.shape[-2:]] * len(pixels)
    given = {"image_sizes": torch.tensor(sizes)} if model.config.model_type == "mistral3" else {}
    return torch.cat(tuple(model.get_image_features(pixels, **given).pooler_output))


def _siglip(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    tower = getattr(model, "vision_model", model)
    if not hasattr(tower, "head"):
        return _vit(model, item, dtype)
    made = tower(_pixels(item, dtype))
    return torch.cat([made.pooler_output[:, None], made.last_hidden_state], dim=1)


def _siglip2(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    _, h, w = item.grid
    patches = torch.tensor(item.patches)[None].to(dtype)
    tower = getattr(model, "vision_model", model)
    return tower(patches, torch.ones(1, h * w), torch.tensor([[h, w]])).last_hidden_state


def _kimi(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    patch = model.config.vision_config.patch_size
    pixels = torch.tensor(item.patches).to(dtype).reshape(-1, 3, patch, patch)
    return torch.cat(model.get_image_features(pixels, torch.tensor([item.grid])).pooler_output)


def _qwen(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    pixels, grid = torch.tensor(item.patches).to(dtype), torch.tensor([item.grid])
    made = (model.get_video_features if item.grid[0] > 1 else model.get_image_features)(pixels, grid)
    # DeepStack's rows stand behind the merged ones
    parts = [made.pooler_output, *(made.get("deepstack_features") or ())]
    return torch.cat([part if isinstance(part, torch.Tensor) else torch.cat(tuple(part)) for part in parts], dim=-1)


def _whisper(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    return model.encoder(torch.tensor(item.mel)[None].to(dtype)).last_hidden_state


def _qwen2_audio(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    given: list[Any] = []
    model.language_model.register_forward_pre_hook(
        lambda _, __, named: given.append(named["inputs_embeds"]), with_kwargs=True
    )
    mask = (torch.arange(item.mel.shape[1]) < item.recorded)[None].long()
    _, rows = model.audio_tower._get_feat_extract_output_lengths(mask.sum(1))
    ids = torch.full((1, int(rows)), model.config.audio_token_id)
    model(input_ids=ids, input_features=torch.tensor(item.mel)[None].to(dtype), feature_attention_mask=mask)
    return given[0]


def _omni_audio(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.ones(1, item.mel.shape[1], dtype=torch.long)
    return model.get_audio_features(torch.tensor(item.mel)[None].to(dtype), mask).last_hidden_state


def _asr_audio(model: Any, item: Any, dtype: torch.dtype) -> torch.Tensor:
    frames = item.mel.shape[1]
    mel = np.pad(item.mel, ((0, 0), (0, -frames % 100)))  # up to whole chunks, as the processor makes them
    mask = (torch.arange(mel.shape[1]) < frames)[None].long()
    return model.get_audio_features(torch.tensor(mel)[None].to(dtype), mask).pooler_output


CALLS: Mapping[str, Callable[[Any, Any, torch.dtype], torch.Tensor]] = {
    "kimi_k25": _kimi,
    **dict.fromkeys(("clip", "dinov2", "internvit", "pixtral"), _vit),
    "siglip": _siglip,
    "siglip2": _siglip2,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_vision", "glm4v"), _qwen),
    "whisper": _whisper,
    "qwen2_audio": _qwen2_audio,
    **dict.fromkeys(("qwen2_5_omni_audio", "qwen3_omni_audio"), _omni_audio),
    "qwen3_asr_audio": _asr_audio,
}
