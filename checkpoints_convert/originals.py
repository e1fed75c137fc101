"""What transformers computes with a checkpoint's own weights, for `verify --against torch`.

The model is built from the checkpoint's config.json, and given its tower's tensors under their published names: what
the names mean, and what order rows are in, is then transformers' word and not that of `checkpoints_convert.mappings`.
Where transformers cannot read a published layout, that table is gone through after all, and it is said.

Importing this needs neither torch nor transformers: `require` says what to install.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import jaxenc
from checkpoints_convert.convert import stored_arrays
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.mapping import Mapping as KeyMapping
from checkpoints_convert.sources import NumpyArray, Source
from jaxenc.items import Item
from jaxenc.models.base import EncoderConfig
from jaxenc.models.internvit import THEIR_DEFAULTS, THEIR_NAMES, THEIRS, as_transformers_says
from jaxenc.models.published import with_defaults
from jaxenc.packing import Budget
from jaxenc.preprocess.audio import load_audio
from jaxenc.preprocess.images import load_image

ASSETS = files("jaxenc") / "assets"
# older ones compute another audio tower: 4.57's ignores its attention windows
OLDEST = (5, 24)
# Two right ways to add up in float32 differ: at every published size ours is at most 1.3 times as far from float64 as
# torch's (benchmarks/results). Below the floor nothing is said, since float64 as transformers runs it keeps tables of
# float32 (rotary angles, sinusoids, resampling): torch in float32 shares their rounding with it, and ours does not.
TIMES, FLOOR = 3.0, 1e-5

Config = dict[str, Any]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How far rows of one item are apart; errors are of the absmax of torch's rows.

    Attributes:
        item: its name.
        rows: that come out.
        difference_max: largest |ours - torch's|, both in float32.
        difference_rms: its root mean square.
        ours_max: largest error of ours against torch in float64.
        torch_max: that of torch in float32.
    """

    item: str
    rows: int
    difference_max: float
    difference_rms: float
    ours_max: float
    torch_max: float

    @property
    def ratio(self) -> float:
        """Our error over torch's own."""
        return self.ours_max / max(self.torch_max, 1e-30)

    @property
    def allowed(self) -> float:
        """The error that float32 explains."""
        return max(TIMES * self.torch_max, FLOOR)

    @property
    def line(self) -> str:
        """It in words."""
        return (
            f"{self.item}: {self.rows} rows, ours - torch's in float32: max {self.difference_max:.1e}, rms "
            f"{self.difference_rms:.1e} of absmax; from torch in float64: ours {self.ours_max:.1e}, torch's "
            f"{self.torch_max:.1e}, ratio {self.ratio:.2f}"
        )


@dataclass(frozen=True)
class Differences:
    """Those of all items.

    Attributes:
        reference: what it was: names and versions.
        independent: whether transformers read the published names itself.
        items: one each.
    """

    reference: str
    independent: bool
    items: tuple[Difference, ...]

    @property
    def problems(self) -> list[str]:
        """A line for each item that float32 does not explain."""
        return [
            f"{item.item}: rows are {item.ours_max:.1e} of absmax from torch's in float64; float32 explains "
            f"{item.allowed:.1e}"
            for item in self.items
            if not item.ours_max <= item.allowed  # so that NaN is one
        ]

    @property
    def lines(self) -> list[str]:
        """Them in words."""
        names = "published names" if self.independent else "through jaxenc's own table of names: not independent"
        return [f"against {self.reference}, {names}:", *(f"  {item.line}" for item in self.items)]

    @property
    def data(self) -> dict[str, Any]:
        """Them as plain JSON values."""
        return {
            "reference": self.reference,
            "independent": self.independent,
            "items": [asdict(item) | {"ratio": item.ratio, "allowed": item.allowed} for item in self.items],
        }


def differences(
    source: Source,
    mapping: KeyMapping,
    encoder: EncoderConfig,
    checkpoint: str | Path | None = None,
    *,
    revision: str | None = None,
) -> Differences:
    """Encodes the same items with transformers and with ours.

    Args:
        source: What transformers is given.
        mapping: Names of the tower's tensors there.
        encoder: Which tower it is.
        checkpoint: What ours is loaded from; the source where not given.
        revision: Of the source, on the hub.

    Raises:
        CheckpointError: transformers is not there or does not know the source, or gives other rows than ours.
    """
    reference = require()
    given = _items(encoder)
    dtypes = {}
    if checkpoint is not None:  # what it has rounded is rounded for both: rows would differ by much more than a mistake
        stored = mapping.outputs(stored_arrays(checkpoint))
        dtypes = {name: dtype for name, (_, dtype) in stored.items()}
    original = Original(source, mapping, encoder, dtypes)
    # one model after the other: in float64 there is no room for a second one
    torch, truth = original.rows(given, dtype="float32"), original.rows(given, dtype="float64")
    tokens = {sum(encoder.pieces(item)) for item in given}
    ours = jaxenc.load(
        checkpoint or source.name,
        tower=encoder.modality,
        dtype="float32",
        budgets=[Budget(n, 1) for n in sorted({-(-n // encoder.unit) * encoder.unit for n in tokens})],
        revision=None if checkpoint else revision,
    ).encode_items(given)
    items = tuple(map(compare, given, ours, torch, truth))
    return Differences(reference, original.independent, items)


def require() -> str:
    """What the reference is: names and versions.

    Raises:
        CheckpointError: It is not installed, or too old.
    """
    wanted = f'transformers {OLDEST[0]}.{OLDEST[1]} with torch: pip install "jaxenc[verify]"'
    lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if lacking:
        raise CheckpointError(f"--against torch: there is no {' and no '.join(lacking)} here; it needs {wanted}")
    found = importlib.metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        raise CheckpointError(f"--against torch: transformers {found} is too old; it needs {wanted}")
    return f"transformers {found}, torch {importlib.metadata.version('torch')}"


def compare(item: Item, ours: npt.ArrayLike, torch: Rows, truth: Rows) -> Difference:
    """Measures our rows of one item against torch's, in float32 and in float64.

    Raises:
        CheckpointError: There are more or fewer of them, or of another width.
    """
    ours, at = np.asarray(ours, np.float64), getattr(item, "timestamp", None)
    name = item.name if at is None else f"{item.name} at {at:g} s"
    if ours.shape != truth.shape:
        raise CheckpointError(f"{name}: our rows have the shape {list(ours.shape)}, torch's {list(truth.shape)}")
    absmax = np.abs(truth).max()
    return Difference(
        name,
        len(ours),
        float(np.abs(ours - torch).max() / np.abs(torch).max()),
        float(np.sqrt(np.square(ours - torch).mean()) / np.abs(torch).max()),
        float(np.abs(ours - truth).max() / absmax),
        float(np.abs(torch - truth).max() / absmax),
    )


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
        import torch

        model, missing = self._model(dtype)
        with torch.no_grad():
            made = [CALLS[self.encoder.family](model, item, getattr(torch, dtype)) for item in given]
        rows = [part.reshape(-1, part.shape[-1]).double().numpy() for part in made]
        if not all(np.isfinite(part).all() for part in rows):
            found = [f"{name}: transformers finds no tensor for it" for name in missing]
            raise CheckpointError(f"{self.source.name}: torch's rows are NaN or infinite", found)
        return rows

    def _model(self, dtype: str) -> tuple[Any, list[str]]:
        """The model, and those of its parameters that are not among the tensors: they are NaN."""
        import torch
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

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
            state_dict={name: _tensor(value) for name, value in self._tensors().items()},
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        problems = [f"{name}: transformers does not know this tensor" for name in sorted(found["unexpected_keys"])]
        problems += [f"{entry[0]}: transformers expects another shape" for entry in sorted(found["mismatched_keys"])]
        if problems:
            raise CheckpointError(f"{self.source.name}: is not what {kind.__name__} reads", problems)
        # language model, another tower, blocks that no row depends on: were one needed after all, rows would be NaN
        parameters, missing = dict(model.named_parameters()), sorted(found["missing_keys"])
        for name in missing:
            if name in parameters:
                parameters[name].data.fill_(torch.nan)
        return model.eval(), missing

    def _tensors(self) -> dict[str, NumpyArray]:
        """The tower's, under the names that transformers reads."""
        self.source.prefetch(self.mapping.names)
        if self.independent:
            tensors = {name: self.source.read(name) for name in self.mapping.names}
            return {
                name: value.astype(self.dtypes.get(name, value.dtype), copy=False) for name, value in tensors.items()
            }
        layouts = self.encoder.mappings()
        native = layouts.get("transformers", layouts["original"])
        params = {target: self.mapping.read(self.source, target) for target in self.mapping.shapes}
        for target, value in params.items():
            params[target] = value.astype(self.dtypes.get(self.mapping.sources(target)[0], value.dtype))
        # transformers has nothing before the names of a tower alone
        alone = native.prefixes[0] if len(native.prefixes) == 1 else ""
        return {name.removeprefix(alone): value for name, value in native.export(params)}


# layouts whose names transformers reads, of families that have others; of all the rest it reads every one
READS = {"internvit": ("transformers",), "pixtral": ("original",), "qwen3_asr_audio": ("transformers",)}


def as_transformers_reads(config: Mapping[str, Any]) -> Config:
    """A published config.json in the words of transformers: those of it that transformers has not learnt to read."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}  # of the language model
    vision, model_type = config.get("vision_config") or {}, config.get("model_type")
    if "vision_encoder" in config:
        return _as_pixtral(config)
    if model_type == "kimi_k25" and "text_hidden_size" in vision:
        renamed = {key.removeprefix("vt_").removeprefix("init_"): value for key, value in vision.items()}
        return {
            "model_type": model_type,
            "projection_hidden_size": vision.get("mm_hidden_size", renamed["hidden_size"]),
            "projection_layer_norm_eps": vision["projector_ln_eps"],
            "text_config": {"model_type": "deepseek_v3", "hidden_size": vision["text_hidden_size"]},
            "vision_config": renamed | {"model_type": "kimi_k25_vision"},
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
        return {
            "model_type": model_type,
            "audio_config": thinker["audio_config"] | {"model_type": "qwen3_asr_encoder"},
            "text_config": thinker.get("text_config", {}) | {"model_type": "qwen3"},
        }
    for part in ("text_config", "thinker_config"):
        if isinstance(config.get(part), dict):
            config[part] = {key: value for key, value in config[part].items() if key != "quantization_config"}
    return config


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
    whole = hasattr(config, "decoder_layers") or config.get_text_config(decoder=True) is not config
    if not whole:  # a tower alone
        return
    text = config if hasattr(config, "decoder_layers") else config.get_text_config(decoder=True)
    words = {"layer_types": [], "vocab_size": 8, "pad_token_id": None}
    layers = {"decoder_layers": 0} if text is config else {"num_hidden_layers": 0}
    for part, values in (
        (text, words | layers),
        (getattr(config, other, None), {"depth": 0, "encoder_layers": 0, "deepstack_visual_indexes": []}),
        (config, {"audio_token_id": 0}),
    ):
        for name, value in values.items():
            if hasattr(part, name):
                setattr(part, name, value)


def _tensor(value: NumpyArray) -> Any:
    import torch

    value = np.array(value)  # that of a file cannot be written to, of which torch warns
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _items(config: EncoderConfig) -> list[Item]:
    """What is encoded: a photograph of odd sides, a video where the encoder takes one; or speech."""
    if config.modality == "audio":
        return list(config.read("audio", load_audio(str(ASSETS / "sense_and_sensibility.flac")), name="speech"))
    photograph = load_image(str(ASSETS / "cat.jpg"))
    # a camera that moves over the photograph
    frames = np.stack([photograph[12 * i : 12 * i + 112, 40 * i : 40 * i + 140] for i in range(4)])
    sources = {"images": ("photograph", photograph[40:203, 75:376]), "videos": ("video", (frames, 2.0))}
    return [
        item
        for kind, (name, source) in sources.items()
        if kind in config.kinds
        for item in config.read(kind, source, name=name)
    ]


# (model, item, dtype) -> rows


def _vit(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    (t, h, w), p = item.grid, int(np.sqrt(item.patches.shape[1] // 3))
    pixels = item.patches.reshape(t, h, w, 3, p, p).transpose(0, 3, 1, 4, 2, 5).reshape(t, 3, h * p, w * p)
    pixels = torch.tensor(pixels).to(dtype)
    if hasattr(model, "multi_modal_projector"):
        sizes = {"image_sizes": torch.tensor([[h * p, w * p]] * t)} if model.config.model_type == "mistral3" else {}
        return torch.cat(tuple(model.get_image_features(pixels, **sizes).pooler_output))
    return getattr(model, "vision_model", model)(pixels).last_hidden_state


def _siglip(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    heads: list[Any] = []
    tower = getattr(model, "vision_model", model)
    if hasattr(tower, "head"):  # its row comes first
        tower.head.register_forward_hook(lambda _, __, out: heads.append(out[:, None]))
    rows = _vit(model, item, dtype)
    return torch.cat([*heads, rows], dim=1) if heads else rows


def _siglip2(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    _, h, w = item.grid
    patches = torch.tensor(item.patches)[None].to(dtype)
    tower = getattr(model, "vision_model", model)
    return tower(patches, torch.ones(1, h * w), torch.tensor([[h, w]])).last_hidden_state


def _kimi(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    patch = model.config.vision_config.patch_size
    pixels = torch.tensor(item.patches).to(dtype).reshape(-1, 3, patch, patch)
    return torch.cat(model.get_image_features(pixels, torch.tensor([item.grid])).pooler_output)


def _qwen(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    pixels, grid = torch.tensor(item.patches).to(dtype), torch.tensor([item.grid])
    if not hasattr(model, "visual"):  # a tower alone
        made = model(pixels, grid_thw=grid)
    elif item.grid[0] > 1:
        made = model.get_video_features(pixels, grid)
    else:
        made = model.get_image_features(pixels, grid)
    # DeepStack's rows stand behind the merged ones
    parts = [made.pooler_output, *(made.get("deepstack_features") or ())]
    return torch.cat([part if isinstance(part, torch.Tensor) else torch.cat(tuple(part)) for part in parts], dim=-1)


def _whisper(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    return model.encoder(torch.tensor(item.mel)[None].to(dtype)).last_hidden_state


def _qwen2_audio(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    given: list[Any] = []
    model.language_model.register_forward_pre_hook(
        lambda _, __, named: given.append(named["inputs_embeds"]), with_kwargs=True
    )
    mask = (torch.arange(item.mel.shape[1]) < item.recorded)[None].long()
    _, rows = model.audio_tower._get_feat_extract_output_lengths(mask.sum(1))
    ids = torch.full((1, int(rows)), model.config.audio_token_id)
    model(input_ids=ids, input_features=torch.tensor(item.mel)[None].to(dtype), feature_attention_mask=mask)
    return given[0]


def _omni_audio(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    mask = torch.ones(1, item.mel.shape[1], dtype=torch.long)
    return model.get_audio_features(torch.tensor(item.mel)[None].to(dtype), mask).last_hidden_state


def _asr_audio(model: Any, item: Any, dtype: Any) -> Any:
    import torch

    frames = item.mel.shape[1]
    mel = np.pad(item.mel, ((0, 0), (0, -frames % 100)))  # up to whole chunks, as the processor makes them
    mask = (torch.arange(mel.shape[1]) < frames)[None].long()
    return model.get_audio_features(torch.tensor(mel)[None].to(dtype), mask).pooler_output


CALLS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
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
