"""Small checkpoints of plain vision transformers, named as the published ones. NumPy and safetensors only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from tests.parity.checkpoints import Checkpoint, Tensors, _Maker, _nan, image_patches

NO_SCALES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class VitSizes:
    """Sizes of a tiny tower.

    Attributes:
        image: side of the pictures that the position table is for, pixels.
        text: width of the language model, where there is one.
    """

    layers: int = 3
    heads: int = 4
    head_dim: int = 8
    mlp: int = 72
    patch: int = 14
    image: int = 56
    text: int = 20

    @property
    def embed(self) -> int:
        """Width of the tower."""
        return self.heads * self.head_dim

    @property
    def config(self) -> dict[str, int]:
        """As transformers calls them."""
        return {
            "hidden_size": self.embed, "intermediate_size": self.mlp, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "image_size": self.image, "patch_size": self.patch,
        }  # fmt: skip


def pictures(sizes: VitSizes) -> list[tuple[np.ndarray, tuple[int, int, int]]]:
    """Patches and grids of three pictures of the tower's own size."""
    side = sizes.image // sizes.patch
    return pictures_of([(side, side)] * 3, patch=sizes.patch)


def tiles(sizes: VitSizes) -> list[tuple[np.ndarray, tuple[int, int, int]]]:
    """Patches and grids of three pictures of several tiles of the tower's own size, and of one."""
    side = sizes.image // sizes.patch
    grids = [(count, side, side) for count in (3, 1, 2)]
    return [(image_patches(grid, seed=seed, patch=sizes.patch), grid) for seed, grid in enumerate(grids)]


def pictures_of(grids: Sequence[tuple[int, int]], *, patch: int) -> list[tuple[np.ndarray, tuple[int, int, int]]]:
    """Patches and grids of pictures of so many rows and columns of patches."""
    return [(image_patches((1, *grid), seed=seed, patch=patch), (1, *grid)) for seed, grid in enumerate(grids)]


def clip(sizes: VitSizes = VitSizes(), *, seed: int = 0, scales: Mapping[str, float] = NO_SCALES) -> Checkpoint:
    """A tiny CLIP. Layouts: `original` (vision_model.*). Configs: `original`, and `tower` for the tower alone."""
    text = {f"text_model.{name}": _nan(8, 8) for name in ("final_layer_norm.weight", "embeddings.position_ids")}
    vision = {**sizes.config, "model_type": "clip_vision_model"}
    return Checkpoint(
        {"original": _prefixed("vision_model.", _clip_tower(sizes, seed, scales))},
        {"original": {**text, "logit_scale": _nan(1), "visual_projection.weight": _nan(8, sizes.embed)}},
        {
            "original": {"model_type": "clip", "projection_dim": 8, "text_config": {}, "vision_config": vision},
            "tower": vision,
        },
    )


def llava(
    sizes: VitSizes = VitSizes(), *, seed: int = 0, scales: Mapping[str, float] = NO_SCALES, tower: str = "clip"
) -> Checkpoint:
    """A tiny LLaVA with a CLIP tower or a SigLIP one.

    Layouts: `original`, and `transformers`, as transformers 5 names them in memory.
    """
    names = _clip_tower(sizes, seed, scales) if tower == "clip" else _siglip_tower(sizes, seed, scales)
    make = _Maker(seed, scales)
    make.linear("multi_modal_projector.linear_1", (sizes.text, sizes.embed), gain=1.3)
    make.linear("multi_modal_projector.linear_2", (sizes.text, sizes.text), gain=1.2)
    original = _prefixed("vision_tower.vision_model.", names) | make.tensors
    native = _prefixed("model.vision_tower.", names) | _prefixed("model.", make.tensors)
    # 5 is the layer of the language model: a reader that counts it among the tower's shows
    beside = "language_model.model.layers.5.input_layernorm.weight"
    config = {
        "model_type": "llava", "image_token_index": 95, "projector_hidden_act": "gelu",
        "text_config": {"model_type": "llama", "hidden_size": sizes.text, "intermediate_size": 24,
                        "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 96},
        "vision_config": {**sizes.config, "model_type": f"{tower}_vision_model", "vision_use_head": False},
        "vision_feature_layer": -2 if tower == "clip" else -1,
        "vision_feature_select_strategy": "default" if tower == "clip" else "full",
    }  # fmt: skip
    return Checkpoint(
        {"original": original, "transformers": native},
        {"original": {beside: _nan(sizes.text)}, "transformers": {f"model.{beside}": _nan(sizes.text)}},
        {"original": config},
    )


def siglip(
    sizes: VitSizes = VitSizes(), *, seed: int = 0, scales: Mapping[str, float] = NO_SCALES, head: bool = True
) -> Checkpoint:
    """A tiny SigLIP, with its pooling head or not. Layouts: `original`. Configs: `original`, and `tower` alone."""
    vision = {**sizes.config, "model_type": "siglip_vision_model"} | ({} if head else {"vision_use_head": False})
    tower = _siglip_tower(sizes, seed, scales) | (_siglip_head(sizes, seed, scales) if head else {})
    return Checkpoint(
        {"original": _prefixed("vision_model.", tower)},
        {"original": {"text_model.head.weight": _nan(8, 8), "logit_scale": _nan(1), "logit_bias": _nan(1)}},
        {"original": {"model_type": "siglip", "text_config": {}, "vision_config": vision}, "tower": vision},
    )


def siglip2(
    sizes: VitSizes = VitSizes(image=70), *, seed: int = 0, scales: Mapping[str, float] = NO_SCALES
) -> Checkpoint:
    """A tiny SigLIP 2 of variable resolution. Layouts: `original`. Configs: `original`, and `tower` alone."""
    tower = _siglip_tower(sizes, seed, scales)
    tower["embeddings.patch_embedding.weight"] = tower["embeddings.patch_embedding.weight"].reshape(sizes.embed, -1)
    vision: dict[str, object] = {**sizes.config, "model_type": "siglip2_vision_model", "vision_use_head": False}
    del vision["image_size"]  # there is none in SigLIP 2's
    vision["num_patches"] = (sizes.image // sizes.patch) ** 2
    head = {"vision_model.head.probe": _nan(1, 1, sizes.embed)}
    return Checkpoint(
        {"original": _prefixed("vision_model.", tower)},
        {"original": {"text_model.head.weight": _nan(8, 8), "logit_scale": _nan(1), **head}},
        {"original": {"model_type": "siglip2", "text_config": {}, "vision_config": vision}, "tower": vision},
    )


def paligemma(sizes: VitSizes = VitSizes(), *, seed: int = 0, scales: Mapping[str, float] = NO_SCALES) -> Checkpoint:
    """A tiny PaliGemma. Layouts: `original`, and `transformers`, as transformers 5 names them in memory."""
    make, names = _Maker(seed, scales), _siglip_tower(sizes, seed, scales)
    make.linear("multi_modal_projector.linear", (sizes.text, sizes.embed), gain=1.3)
    text = {"model_type": "gemma", "hidden_size": sizes.text, "intermediate_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 8}  # fmt: skip
    vision = {
        **sizes.config,
        "model_type": "siglip_vision_model",
        "projection_dim": sizes.text,
        "vision_use_head": False,
    }
    return Checkpoint(
        {
            "original": _prefixed("vision_tower.vision_model.", names) | make.tensors,
            "transformers": _prefixed("model.vision_tower.", names) | _prefixed("model.", make.tensors),
        },
        {
            "original": {"language_model.model.norm.weight": _nan(sizes.text)},
            "transformers": {"model.language_model.norm.weight": _nan(sizes.text)},
        },
        {
            "original": {
                "model_type": "paligemma",
                "hidden_size": sizes.text,
                "projection_dim": sizes.text,
                "image_token_index": 95,
                "text_config": text,
                "vision_config": vision,
            }
        },
    )


def dinov2(
    sizes: VitSizes = VitSizes(image=70),
    *,
    seed: int = 0,
    scales: Mapping[str, float] = NO_SCALES,
    gated: bool = False,
    ratio: int = 3,
) -> Checkpoint:
    """A tiny DINOv2; `gated` as the giant is.

    Layouts: `original`, `classifier` (dinov2.* beside a classifier), and `transformers`, as transformers 5 names them
    in memory. The MLP is `ratio` times as wide as the tower, not as `sizes` says.
    """
    make, d = _Maker(seed, scales), sizes.embed
    hidden = (int(ratio * d * 2 / 3) + 7) // 8 * 8 if gated else ratio * d
    make.tensor("embeddings.cls_token", (1, 1, d), scale=1.0)
    make.tensor("embeddings.position_embeddings", (1, (sizes.image // sizes.patch) ** 2 + 1, d), scale=0.8)
    make.linear("embeddings.patch_embeddings.projection", (d, 3, sizes.patch, sizes.patch), gain=2.0)
    for n in range(sizes.layers):
        layer = f"encoder.layer.{n}"
        make.norm(f"{layer}.norm1", d)
        for name in ("query", "key", "value"):
            make.linear(f"{layer}.attention.attention.{name}", (d, d), gain=1.3)
        make.linear(f"{layer}.attention.output.dense", (d, d), gain=1.2)
        make.norm(f"{layer}.norm2", d)
        make.linear(f"{layer}.mlp.{'weights_in' if gated else 'fc1'}", ((1 + gated) * hidden, d), gain=1.3)
        make.linear(f"{layer}.mlp.{'weights_out' if gated else 'fc2'}", (d, hidden), gain=1.2)
        for number in (1, 2):
            make.tensor(f"{layer}.layer_scale{number}.lambda1", (d,), scale=0.5, offset=0.7)
    make.norm("layernorm", d)
    mask = {"embeddings.mask_token": _nan(1, d)}
    native: Tensors = {}
    for name, value in make.tensors.items():
        if "weights_in" in name:
            for part, half in zip(("gate_proj", "up_proj"), np.split(value, 2), strict=True):
                native[name.replace("weights_in", part)] = half
        else:
            native[dinov2_in_memory(name)] = value
    config = {
        **sizes.config, "model_type": "dinov2", "mlp_ratio": ratio, "use_swiglu_ffn": gated, "hidden_act": "gelu",
        "layer_norm_eps": 1e-6, "layerscale_value": 1.0, "num_channels": 3, "qkv_bias": True,
    }  # fmt: skip
    del config["intermediate_size"]  # there is none in DINOv2's
    return Checkpoint(
        {"original": make.tensors, "classifier": _prefixed("dinov2.", make.tensors), "transformers": native},
        {
            "original": mask,
            "classifier": _prefixed("dinov2.", mask) | {"classifier.weight": _nan(8, 2 * d)},
            "transformers": mask,
        },
        {"original": config},
    )


def pixtral(
    sizes: VitSizes = VitSizes(image=140),
    *,
    seed: int = 0,
    scales: Mapping[str, float] = NO_SCALES,
    projector: Literal["llava", "mistral3"] | None = "llava",
) -> Checkpoint:
    """A tiny Pixtral with a projector: a LLaVA's, or a Mistral3's, which merges 2 x 2 patches; or the tower alone.

    Layouts: `original`, `transformers`, as transformers 5 names them in memory, and `mistral`, which has another order
    of rotary channels. Configs: `original`, and `params`, as Mistral's params.json is. Of the tower alone: `original`.
    """
    make, d, text = _Maker(seed, scales, norm_bias=False), sizes.embed, sizes.text
    merge = 2 if projector == "mistral3" else 1
    make.linear("patch_conv", (d, 3, sizes.patch, sizes.patch), gain=2.0, bias=False)
    make.norm("ln_pre", d)
    for n in range(sizes.layers):
        layer = f"transformer.layers.{n}"
        make.norm(f"{layer}.attention_norm", d)
        for letter in "qkvo":
            make.linear(f"{layer}.attention.{letter}_proj", (d, d), gain=1.2 if letter == "o" else 1.3, bias=False)
        make.norm(f"{layer}.ffn_norm", d)
        for name, shape in (("gate", (sizes.mlp, d)), ("up", (sizes.mlp, d)), ("down", (d, sizes.mlp))):
            make.linear(f"{layer}.feed_forward.{name}_proj", shape, gain=1.3, bias=False)
    vision = {**sizes.config, "model_type": "pixtral", "hidden_act": "silu", "head_dim": sizes.head_dim}
    if projector is None:
        return Checkpoint({"original": make.tensors}, {"original": {}}, {"original": vision})

    tower, make, biased = make.tensors, _Maker(seed, scales, norm_bias=False), projector == "llava"
    if merge > 1:
        make.norm("multi_modal_projector.norm", d)
        make.linear("multi_modal_projector.patch_merger.merging_layer", (d, 4 * d), gain=1.2, bias=False)
    make.linear("multi_modal_projector.linear_1", (text, d), gain=1.3, bias=biased)
    make.linear("multi_modal_projector.linear_2", (text, text), gain=1.2, bias=biased)
    original = _prefixed("vision_tower.", tower) | make.tensors
    # the epsilon of its norms is not the tower's
    language = {"model_type": "mistral", "hidden_size": text, "intermediate_size": 24, "num_attention_heads": 2,
                "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 8,
                "rms_norm_eps": 1e-6}  # fmt: skip
    config: dict[str, Any] = {
        "model_type": projector, "image_token_index": 95, "projector_hidden_act": "gelu", "text_config": language,
        "vision_config": vision, "vision_feature_layer": -1,
    }  # fmt: skip
    own: dict[str, Any] = {**sizes.config, "num_channels": 3, "rope_theta": 10000.0, "image_token_id": 95}
    if merge > 1:
        config |= {"spatial_merge_size": merge, "multimodal_projector_bias": False}
        own |= {"spatial_merge_size": merge, "mm_projector_id": "patch_merge", "adapter_bias": False,
                "add_pre_mm_projector_layer_norm": True, "max_image_size": sizes.image}  # fmt: skip
    else:
        config |= {"vision_feature_select_strategy": "full"}
    # 5 is the layer of the language model: a reader that counts it among the tower's shows
    beside = "language_model.model.layers.5.input_layernorm.weight"
    return Checkpoint(
        {
            "original": original,
            "transformers": _prefixed("model.", original),
            "mistral": dict(_pixtral_as_mistral(name, value, sizes) for name, value in original.items()),
        },
        {
            "original": {beside: _nan(text)},
            "transformers": {f"model.{beside}": _nan(text)},
            "mistral": {"layers.5.attention_norm.weight": _nan(text), "tok_embeddings.weight": _nan(96, text)},
        },
        {"original": config, "params": {"dim": text, "n_layers": 1, "norm_eps": 1e-6, "vision_encoder": own}},
    )


def _pixtral_as_mistral(name: str, value: np.ndarray, sizes: VitSizes) -> tuple[str, np.ndarray]:
    for old, new in (
        ("vision_tower.", "vision_encoder."),
        ("multi_modal_projector.norm", "pre_mm_projector_norm"),
        ("multi_modal_projector.patch_merger", "patch_merger"),
        ("multi_modal_projector.linear_1", "vision_language_adapter.w_in"),
        ("multi_modal_projector.linear_2", "vision_language_adapter.w_out"),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
        *((f".{letter}_proj", f".w{letter}") for letter in "qkvo"),
    ):
        name = name.replace(old, new)
    if name.endswith((".wq.weight", ".wk.weight")):
        # what transformers' converter did, undone: pairs of channels lie side by side
        halves = value.reshape(sizes.heads, 2, sizes.head_dim // 2, -1)
        value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
    return name, value


def dinov2_in_memory(name: str) -> str:
    """The name that transformers 5 gives a published one; not of a gated MLP, which it divides."""
    for old, new in (
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("mlp.weights_out", "mlp.down_proj"),
    ):
        name = name.replace(old, new)
    return name


def internvit(
    sizes: VitSizes = VitSizes(),
    *,
    seed: int = 0,
    scales: Mapping[str, float] = NO_SCALES,
    big: bool = False,
    alone: bool = False,
) -> Checkpoint:
    """A tiny InternViT; `big` as the one of 6B is, with RMS norms, also of queries and keys, and no bias there.

    It is in an InternVL with its projector, or `alone`.
    Layouts: `original` (OpenGVLab's), `transformers`, as transformers 5 names them in memory, and `hub`, as it writes
    them. Configs: `original` (transformers'), and `chat` (OpenGVLab's).
    """
    make, d, text = _Maker(seed, scales, norm_bias=not big), sizes.embed, sizes.text
    make.tensor("embeddings.cls_token", (1, 1, d), scale=1.0)
    make.tensor("embeddings.position_embeddings", (1, (sizes.image // sizes.patch) ** 2 + 1, d), scale=0.8)
    make.linear("embeddings.patch_embeddings.projection", (d, 3, sizes.patch, sizes.patch), gain=2.0)
    for n in range(sizes.layers):
        layer = f"encoder.layer.{n}"
        make.norm(f"{layer}.layernorm_before", d)
        for letter in ("q", "k", "v"):
            make.linear(f"{layer}.attention.{letter}_proj", (d, d), gain=1.3, bias=not big)
        for letter in ("q", "k") if big else ():
            make.norm(f"{layer}.attention.{letter}_norm", d)
        make.linear(f"{layer}.attention.projection_layer", (d, d), gain=1.2)
        make.norm(f"{layer}.layernorm_after", d)
        make.linear(f"{layer}.mlp.fc1", (sizes.mlp, d), gain=1.3)
        make.linear(f"{layer}.mlp.fc2", (d, sizes.mlp), gain=1.2)
        for number in (1, 2):
            make.tensor(f"{layer}.lambda_{number}", (d,), scale=0.5, offset=0.7)
    projector = _Maker(seed, scales)
    if not alone:
        projector.norm("multi_modal_projector.layer_norm", 4 * d)
        projector.linear("multi_modal_projector.linear_1", (text, 4 * d), gain=1.3)
        projector.linear("multi_modal_projector.linear_2", (text, text), gain=1.2)
    hub = _prefixed("" if alone else "vision_tower.", make.tensors) | projector.tensors
    original: Tensors = {}
    for name, value in hub.items():
        if ".q_proj." in name:
            values = [hub[name.replace(".q_proj.", f".{letter}_proj.")] for letter in ("q", "k", "v")]
            original[internvit_published(name.replace(".q_proj.", ".qkv."))] = np.concatenate(values)
        elif ".k_proj." not in name and ".v_proj." not in name:
            original[internvit_published(name)] = value
    vision: dict[str, object] = {
        **sizes.config, "model_type": "internvl_vision", "norm_type": "rms_norm" if big else "layer_norm",
        "use_qk_norm": big, "attention_bias": not big, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
        "image_size": [sizes.image] * 2, "patch_size": [sizes.patch] * 2, "use_mean_pooling": True,
    }  # fmt: skip
    chat: dict[str, object] = {
        **sizes.config, "model_type": "intern_vit_6b", "norm_type": vision["norm_type"], "qk_normalization": big,
        "qkv_bias": not big, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
    }  # fmt: skip
    if alone:
        return Checkpoint(
            {"original": original, "transformers": hub, "hub": hub},
            {"original": {}, "transformers": {}, "hub": {}},
            {"original": vision, "chat": chat},
        )
    beside = {"language_model.model.layers.5.input_layernorm.weight": _nan(text)}
    language = {"hidden_size": text, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2,
                "num_hidden_layers": 1, "vocab_size": 96}  # fmt: skip
    return Checkpoint(
        {"original": original, "transformers": _prefixed("model.", hub), "hub": hub},
        {"original": beside, "transformers": _prefixed("model.", beside), "hub": beside},
        {
            "original": {
                "model_type": "internvl", "downsample_ratio": 0.5, "image_token_id": 95, "vision_feature_layer": -1,
                "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
                "text_config": {**language, "model_type": "qwen2"}, "vision_config": vision,
            },
            "chat": {
                "model_type": "internvl_chat", "downsample_ratio": 0.5, "ps_version": "v2", "select_layer": -1,
                "force_image_size": sizes.image, "dynamic_image_size": True, "max_dynamic_patch": 12,
                "min_dynamic_patch": 1, "use_thumbnail": True, "llm_config": {**language, "architectures": []},
                "vision_config": chat,
            },
        },
    )  # fmt: skip


def internvit_published(name: str) -> str:
    """OpenGVLab's name for one that transformers gives, but of queries, keys and values, which are one tensor there."""
    for new, old in (
        ("vision_tower.", "vision_model."),
        ("embeddings.cls_token", "embeddings.class_embedding"),
        ("embeddings.position_embeddings", "embeddings.position_embedding"),
        ("embeddings.patch_embeddings.projection", "embeddings.patch_embedding"),
        ("encoder.layer.", "encoder.layers."),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        ("lambda_", "ls"),
        ("attention.projection_layer", "attn.proj"),
        ("attention.", "attn."),
        ("multi_modal_projector.layer_norm", "mlp1.0"),
        ("multi_modal_projector.linear_1", "mlp1.1"),
        ("multi_modal_projector.linear_2", "mlp1.3"),
    ):
        name = name.replace(new, old)
    return name


def _clip_tower(sizes: VitSizes, seed: int, scales: Mapping[str, float]) -> Tensors:
    make, d = _Maker(seed, scales), sizes.embed
    make.tensor("embeddings.class_embedding", (d,), scale=1.0)
    make.linear("embeddings.patch_embedding", (d, 3, sizes.patch, sizes.patch), gain=2.0, bias=False)
    make.tensor("embeddings.position_embedding.weight", ((sizes.image // sizes.patch) ** 2 + 1, d), scale=0.8)
    make.norm("pre_layrnorm", d)
    _clip_blocks(make, sizes)
    make.norm("post_layernorm", d)
    return make.tensors


def _clip_blocks(make: _Maker, sizes: VitSizes) -> None:
    d = sizes.embed
    for n in range(sizes.layers):
        layer = f"encoder.layers.{n}"
        make.norm(f"{layer}.layer_norm1", d)
        for letter in ("k", "v", "q"):
            make.linear(f"{layer}.self_attn.{letter}_proj", (d, d), gain=1.3)
        make.linear(f"{layer}.self_attn.out_proj", (d, d), gain=1.2)
        make.norm(f"{layer}.layer_norm2", d)
        make.linear(f"{layer}.mlp.fc1", (sizes.mlp, d), gain=1.3)
        make.linear(f"{layer}.mlp.fc2", (d, sizes.mlp), gain=1.2)


def _siglip_tower(sizes: VitSizes, seed: int, scales: Mapping[str, float]) -> Tensors:
    make, d = _Maker(seed, scales), sizes.embed
    make.linear("embeddings.patch_embedding", (d, 3, sizes.patch, sizes.patch), gain=2.0)
    make.tensor("embeddings.position_embedding.weight", ((sizes.image // sizes.patch) ** 2, d), scale=0.8)
    _clip_blocks(make, sizes)
    make.norm("post_layernorm", d)
    return make.tensors


def _siglip_head(sizes: VitSizes, seed: int, scales: Mapping[str, float]) -> Tensors:
    make, d = _Maker(seed, scales), sizes.embed
    make.tensor("head.probe", (1, 1, d), scale=1.7)
    make.tensor("head.attention.in_proj_weight", (3 * d, d), scale=1.3 * (3 / d) ** 0.5)
    make.tensor("head.attention.in_proj_bias", (3 * d,), scale=0.4)
    make.linear("head.attention.out_proj", (d, d), gain=1.2)
    make.norm("head.layernorm", d)
    make.linear("head.mlp.fc1", (sizes.mlp, d), gain=1.3)
    make.linear("head.mlp.fc2", (d, sizes.mlp), gain=1.2)
    return make.tensors


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: value for name, value in tensors.items()}
