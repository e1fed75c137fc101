"""load, from_config and plan: config -> names and shapes -> plan -> weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.typing import DTypeLike

import checkpoints_convert
from checkpoints_convert import CheckpointError, Source, Target
from checkpoints_convert import Mapping as KeyMapping
from jaxenc.encoder import Encoder
from jaxenc.errors import ConfigError
from jaxenc.layers.implementations import AttentionName
from jaxenc.layers.parameters import declared
from jaxenc.models import (
    abstract_module,
    named_config,
    published_configs,
    stored_config,
)
from jaxenc.models.base import EncoderConfig
from jaxenc.packing import Budget
from jaxenc.rules import default_rules
from sharding_rules import AxisRules, DeviceProfile, Parameter, Plan, make_mesh, resolve


def load(
    src: str | Path,
    *,
    mesh: Mesh | None = None,
    tower: str | None = None,
    dtype: DTypeLike | None = None,
    strategy: str | Mapping[str, str] = "auto",
    rules: AxisRules | None = None,
    mm_encoder_tp_mode: str | None = None,
    memory_limit: int | None = None,
    device: str | DeviceProfile | None = None,
    precision: str = "ieee",
    attention: AttentionName | None = None,
    budgets: Sequence[Budget] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Encoder:
    """The encoder of a published or converted checkpoint, its weights read straight into their places on the mesh.

    Args:
        src: hub id, folder or file of PyTorch safetensors (or pickles) with its config.json (or Mistral's params.json),
            or a converted checkpoint.
        mesh: devices; the first device alone where not given. See `jaxenc.make_mesh`.
        tower: "vision" or "audio", where the checkpoint has both.
        dtype: of parameters and products, float32 or bfloat16; as stored where not given (float32 for other types).
        strategy: "auto", "tensor", "hybrid", "data", "replicate", or a dict of group -> "tensor" | "pad" |
            "replicate", which can also be written as in "attention=pad, mlp=tensor".
        rules: which mesh axes the logical axes may use; `jaxenc.default_rules(mesh)` where not given.
        mm_encoder_tp_mode: the engines' setting, "weights" or "data".
        memory_limit: bytes of parameters a device may hold; what fits is then free, and the fastest layout is taken.
        device: whose speed is predicted: "h100", "tpu_v5e", ... or a `DeviceProfile`; as the mesh's where not given.
        precision: of float32 products: "ieee", or "tf32" where the hardware has it.
        attention: the implementation to try first: "dense", "blocks", "cudnn" (NVIDIA, bfloat16) or "tokamax"
            (where it is installed); as platform, dtype and sizes suggest where not given. What it refuses is logged,
            with the reason, and another is taken.
        budgets: shapes that batches can have.
        revision: of a hub repository.
        token: for the hub.

    Returns:
        The encoder.

    Raises:
        CheckpointError: everything that is wrong with the checkpoint, together.
        ConfigError: its config describes no encoder known here, or several and no `tower`.
        IndivisibleAxisError: `strategy` does not divide over the mesh.
    """
    mesh = make_mesh() if mesh is None else _checked(mesh, Mesh)
    stored = open_checkpoint(src, tower=tower, revision=revision, token=token)
    dtype = _compute_dtype(dtype, stored.dtype)
    plan = _plan(
        stored.config,
        mesh,
        dtype=dtype,
        strategy=strategy,
        rules=rules,
        mm_encoder_tp_mode=mm_encoder_tp_mode,
        memory_limit=memory_limit,
        device=device,
    )
    targets = {
        path: Target(plan.shape(path), dtype, plan.sharding(path), stored_shape=parameter.shape)
        for path, parameter in plan.parameters.items()
    }
    return Encoder(
        stored.config,
        plan,
        unflatten_dict(stored.load(targets), sep="/"),
        dtype=dtype,
        precision=precision,
        attention=attention,
        budgets=budgets,
        provenance=stored.provenance,
    )


def from_config(
    config: str | Mapping[str, Any] | EncoderConfig,
    *,
    mesh: Mesh | None = None,
    tower: str | None = None,
    seed: int = 0,
    dtype: DTypeLike = "float32",
    strategy: str | Mapping[str, str] = "auto",
    rules: AxisRules | None = None,
    mm_encoder_tp_mode: str | None = None,
    memory_limit: int | None = None,
    device: str | DeviceProfile | None = None,
    precision: str = "ieee",
    attention: AttentionName | None = None,
    budgets: Sequence[Budget] | None = None,
) -> Encoder:
    """An encoder with random weights, the same on every mesh.

    Args:
        config: "family" or "family:variant" (see `jaxenc.encoders`), a published config.json or params.json, or a
            config object.
        mesh: devices; the first device alone where not given.
        tower: "vision" or "audio", where a config.json describes both.
        seed: of the weights.
        dtype: of parameters and products.
        strategy: see `load`.
        rules: see `load`.
        mm_encoder_tp_mode: see `load`.
        memory_limit: see `load`.
        device: see `load`.
        precision: see `load`.
        attention: see `load`.
        budgets: see `load`.

    Returns:
        The encoder.

    Raises:
        ConfigError: no such encoder.
        IndivisibleAxisError: `strategy` does not divide over the mesh.
    """
    mesh = make_mesh() if mesh is None else _checked(mesh, Mesh)
    sizes, _ = _config(config, tower=tower)
    dtype = _compute_dtype(dtype, None)
    plan = _plan(
        sizes,
        mesh,
        dtype=dtype,
        strategy=strategy,
        rules=rules,
        mm_encoder_tp_mode=mm_encoder_tp_mode,
        memory_limit=memory_limit,
        device=device,
        name=_asked_name(config, sizes),
    )

    params = {}
    for path, parameter in declared(abstract_module(sizes, dtype=dtype)).items():
        values = plan.pad(path, parameter.draw(path, seed=seed))
        params[path] = jax.make_array_from_callback(values.shape, plan.sharding(path), values.__getitem__)
    return Encoder(
        sizes,
        plan,
        unflatten_dict(params, sep="/"),
        dtype=dtype,
        precision=precision,
        attention=attention,
        budgets=budgets,
    )


def plan(
    encoder: str | Mapping[str, Any] | EncoderConfig,
    *,
    mesh_shape: Mapping[str, int] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    tower: str | None = None,
    batch: int = 8,
    tokens: int | None = None,
    dtype: DTypeLike | None = None,
    strategy: str | Mapping[str, str] = "auto",
    rules: AxisRules | None = None,
    mm_encoder_tp_mode: str | None = None,
    memory_limit: int | None = None,
    layout: str = "auto",
    device: str | DeviceProfile | None = None,
) -> Plan:
    """What `load` would decide, without weights and without devices.

    Args:
        encoder: "family" or "family:variant", a checkpoint, a published config.json, or a config object.
        mesh_shape: axis -> size, such as {"data": 1, "model": 8}.
        mesh: a mesh, instead of a shape.
        tower: "vision" or "audio", where there are both.
        batch: items encoded together.
        tokens: that enter the first block, an item; a typical item's where not given. An encoder of a fixed length
            takes no other.
        dtype: of parameters; where not given as stored in a checkpoint, and bfloat16 without one.
        strategy: see `load`.
        rules: see `load`.
        mm_encoder_tp_mode: see `load`.
        memory_limit: see `load`.
        layout: of the batch: "auto", "rows" or "length"; see `Encoder.encode`.
        device: see `load`; an H100 where there are no devices.

    Returns:
        The plan: print it.

    Raises:
        ConfigError: no such encoder.
        IndivisibleAxisError: `strategy` does not divide over the mesh.
        ValueError: a setting that is not known, or another number of `tokens` than the encoder always has.
    """
    if (mesh is None) == (mesh_shape is None):
        raise TypeError("give either mesh_shape={axis: size} or mesh=")
    if mesh is None:
        assert mesh_shape is not None
        names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
        mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    config, stored = _config(encoder, tower=tower)
    name = _asked_name(encoder, config)
    always = sum(config.workload((1,)).tokens)  # above 1 where an item counts as one of a fixed length
    if tokens not in (None, always) and always > 1:
        raise ValueError(f"{name}: every item has {always} tokens, whatever is in it; it cannot have {tokens}")
    return _plan(
        config,
        _checked(mesh, Mesh | AbstractMesh),
        dtype=_compute_dtype(dtype, stored or "bfloat16"),
        strategy=strategy,
        rules=rules,
        mm_encoder_tp_mode=mm_encoder_tp_mode,
        memory_limit=memory_limit,
        device=device,
        layout=layout,
        batch=batch,
        tokens=tokens,
        name=name,
    )


@dataclass(frozen=True)
class StoredEncoder:
    """An encoder in a checkpoint, published or converted: what it is, and how to read it.

    Attributes:
        config: its sizes.
        dtype: of its tensors.
        provenance: where it comes from.
        source: the published checkpoint, or None where it is a converted one.
        mapping: the key names of a published checkpoint.
        path: a converted checkpoint.
    """

    config: EncoderConfig
    dtype: np.dtype[Any]
    provenance: Mapping[str, Any]
    source: Source | None = None
    mapping: KeyMapping | None = None
    path: Path | None = None

    def load(self, targets: Mapping[str, Target]) -> dict[str, jax.Array]:
        """Its parameters by path; see `checkpoints_convert.load_parameters`."""
        if self.path is not None:
            return checkpoints_convert.restore_checkpoint(self.path, targets, cast=True)
        assert self.source is not None
        assert self.mapping is not None
        return checkpoints_convert.load_parameters(self.source, self.mapping, targets)


def towers(src: str | Path) -> list[EncoderConfig]:
    """The encoders in a checkpoint that are known here."""
    if checkpoints_convert.is_checkpoint(src):
        return [open_checkpoint(src).config]
    source = checkpoints_convert.open_source(src)
    return published_configs(source.config, name=source.name)


def open_checkpoint(
    src: str | Path,
    *,
    tower: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StoredEncoder:
    """Finds the encoder in a checkpoint; reads its config and headers, no tensor.

    Args:
        src: as `load` takes it.
        tower: "vision" or "audio", where the checkpoint has both.
        revision: of a hub repository.
        token: for the hub.
        progress: called with (bytes fetched, bytes to fetch) while tensors come from the hub, from any thread.

    Returns:
        What it is, and how to read it.

    Raises:
        CheckpointError: it is not there, or broken.
        ConfigError: no encoder known here, or several and no `tower`.
    """
    if checkpoints_convert.is_checkpoint(src):
        metadata = checkpoints_convert.read_metadata(src)
        stored = checkpoints_convert.stored_targets(src)
        converted = stored_config(metadata["family"], metadata["sizes"])
        return StoredEncoder(
            _one_tower([converted], tower=tower, name=str(src)),
            jnp.dtype(next(iter(stored.values())).dtype),
            {**metadata["provenance"], "config": metadata["config"]},
            path=Path(src),
        )
    source = checkpoints_convert.open_source(src, revision=revision, token=token, progress=progress)
    config = _one_tower(published_configs(source.config, name=source.name), tower=tower, name=source.name)
    mapping = checkpoints_convert.detect(source, config.mappings())
    problems = mapping.check(source)
    if problems:
        raise CheckpointError(f"{source.name}: does not hold the {mapping.name} tower asked for", problems)
    provenance = {
        "source": source.name,
        "revision": source.revision,
        "files": source.sizes,
        "etags": source.etags,
        "mapping": mapping.name,
        "layout": mapping.layout,
        "tensors": list(mapping.names),  # as they are spelt there: `export` spells them so again
        "versions": {name: version(name) for name in ("jaxenc", "jax", "orbax-checkpoint")},
        "config": source.config,
    }
    return StoredEncoder(
        config, jnp.dtype(source.info(next(iter(mapping.names))).dtype), provenance, source=source, mapping=mapping
    )


def _plan(
    config: EncoderConfig,
    mesh: Mesh | AbstractMesh,
    *,
    dtype: DTypeLike,
    strategy: str | Mapping[str, str],
    rules: AxisRules | None,
    mm_encoder_tp_mode: str | None,
    memory_limit: int | None,
    device: str | DeviceProfile | None,
    layout: str = "auto",
    batch: int | None = None,
    tokens: int | None = None,
    name: str | None = None,
) -> Plan:
    # weights are placed once, for a stream of calls: an item for each device is what keeps all of them busy
    items = (tokens or config.typical_tokens,) * (mesh.size if batch is None else batch)
    return resolve(
        _parameters(config, jnp.dtype(dtype)),
        mesh,
        rules=default_rules(mesh) if rules is None else rules,
        workload=config.workload(items),
        strategy=strategy,
        mm_encoder_tp_mode=mm_encoder_tp_mode,
        memory_limit=memory_limit,
        layout=layout,
        device=device,
        name=name or config.family,
    )


@lru_cache(maxsize=32)
def _parameters(config: EncoderConfig, dtype: np.dtype[Any]) -> Mapping[str, Parameter]:
    module = abstract_module(config, dtype=dtype)
    return MappingProxyType({path: Parameter(p.shape, p.axes, p.dtype) for path, p in declared(module).items()})


def _checked(mesh: Any, kind: Any) -> Any:
    if not isinstance(mesh, kind):
        raise TypeError(f"mesh is {mesh!r}; give a jax.sharding.Mesh, such as jaxenc.make_mesh(model=8)")
    return mesh


def _config(
    encoder: str | Mapping[str, Any] | EncoderConfig, *, tower: str | None
) -> tuple[EncoderConfig, np.dtype[Any] | None]:
    """The sizes, and of a checkpoint the dtype that is stored."""
    if isinstance(encoder, Mapping):
        return _one_tower(published_configs(encoder, name="config.json"), tower=tower, name="config.json"), None
    if not isinstance(encoder, str | Path):
        return _one_tower([encoder], tower=tower, name=encoder.family), None
    if "/" in str(encoder) or Path(encoder).exists():
        stored = open_checkpoint(encoder, tower=tower)
        return stored.config, stored.dtype
    return _one_tower([named_config(encoder)], tower=tower, name=encoder), None


def _asked_name(encoder: str | Mapping[str, Any] | EncoderConfig, config: EncoderConfig) -> str:
    """What a plan is called: `family:variant` where that was asked for, else the family."""
    return encoder if isinstance(encoder, str) and encoder.partition(":")[0] == config.family else config.family


def _one_tower(configs: Sequence[EncoderConfig], *, tower: str | None, name: str) -> EncoderConfig:
    there = ", ".join(f"{config.modality} ({config.family})" for config in configs)
    chosen = [config for config in configs if tower in (None, config.modality)]
    if not chosen:
        raise ConfigError(f"{name}: there is no {tower} tower that is known here; there is {there}")
    if len(chosen) > 1:
        raise ConfigError(f"{name}: there are several towers; choose one: {there}")
    return chosen[0]


def _compute_dtype(asked: DTypeLike | None, stored: DTypeLike | None) -> Any:
    known = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
    if asked is None:
        return jnp.dtype(stored) if jnp.dtype(stored) in known else known[0]
    if asked not in known and asked not in [dtype.name for dtype in known]:
        raise ValueError(f"dtype is {asked!r}; encoders compute in float32 or bfloat16")
    return jnp.dtype(asked)
