"""From a checkpoint into sharded JAX arrays, and to and from a converted (Orbax) checkpoint on disk."""

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Mapping as MappingABC
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from jax.experimental import multihost_utils

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.folders import (
    begin_folder,
    clear,
    finish_folder,
    keep_apart,
    need_space,
    new_folder,
    removed_on_error,
)
from checkpoints_convert.mapping import Index, Mapping, empty_aligned
from checkpoints_convert.sources import NumpyArray, Source
from checkpoints_convert.stored import Incoming, StoredArray, damage_reported, open_arrays, write_arrays
from checkpoints_convert.values import count_nonfinite, count_zeros, memory

METADATA_FILE = "checkpoint.json"
FORMAT = "checkpoints_convert 1"
_ARRAYS = "arrays"
_KIND = "a converted checkpoint"
ROUNDING = "to the nearest value, and of two that are equally near to the even one"
_INLINE_BYTES = 1 << 20
_Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Target:
    """What one parameter is to become.

    Args:
        shape: Shape of the array on the devices.
        dtype: Its dtype.
        sharding: Its sharding; None is the first local device.
        stored_shape: Shape in the checkpoint, where `shape` is padded with zeros at the end of some dimensions so that
            it divides over the devices; None for `shape`.
    """

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    sharding: jax.sharding.Sharding | None = None
    stored_shape: tuple[int, ...] | None = None


def load_parameters(source: Source, mapping: Mapping, targets: MappingABC[str, Target]) -> dict[str, jax.Array]:
    """Reads a tower straight into its shardings.

    Each process reads the slices that its own devices hold and nothing else. Beside the result there is about one
    parameter in host memory at a time (on CPU none: JAX takes over the buffer that the file was read into).

    Args:
        source: The checkpoint.
        mapping: The tower's mapping, as `detect` gives it.
        targets: Every parameter of the mapping, by path.

    Returns:
        Path -> array of the target's shape, dtype and sharding; what the checkpoint does not store of it is zero.

    Raises:
        CheckpointError: With every problem of the checkpoint in one report; nothing has been read then.
    """
    problems = _padding_problems(targets)
    problems += mapping.check(source, {path: _stored_shape(target) for path, target in targets.items()})
    if problems:
        raise CheckpointError(f"{source.name}: does not hold the {mapping.name} tower asked for", problems)
    source.prefetch(mapping.names)
    loaded: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for path, target in targets.items():
            array = _read(source, mapping, path, target, pool)
            loaded[path] = jax.block_until_ready(array)  # type: ignore[no-untyped-call]
    return loaded


def strip_padding(params: MappingABC[str, jax.Array], shapes: MappingABC[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Cuts parameters to the shapes that checkpoints store, the inverse of what a target's `stored_shape` does.

    Args:
        params: Path -> array, of any sharding. Those that have their stored shape already are returned as they are.
        shapes: The stored shape of every parameter, by path.

    Returns:
        Path -> array of the stored shape. Where a dimension that is cut was sharded, another is, one that divides; if
        there is none, that dimension is replicated.

    Raises:
        CheckpointError: With every parameter that has no stored shape, or one that is not within its own.
    """
    problems = [f"{path}: its stored shape is not given" for path in params.keys() - shapes.keys()]
    problems += _padding_problems(
        {path: Target(params[path].shape, params[path].dtype, None, shapes[path]) for path in params.keys() & shapes}
    )
    if problems:
        raise CheckpointError("these parameters cannot be cut to their stored shapes", sorted(problems))
    return {path: _cut(value, tuple(shapes[path])) for path, value in params.items()}


def save_checkpoint(
    path: str | Path,
    params: MappingABC[str, jax.Array],
    metadata: MappingABC[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a converted checkpoint. Whatever stops it, `path` is absent or whole, never in between.

    Args:
        path: The folder to make. Only one save at a time may go there.
        params: Path -> array, of any sharding and without padding (see `strip_padding`).
        metadata: Anything JSON holds: config, provenance, ...; comes back from `read_metadata`.
        overwrite: Replace the converted checkpoint that is there; nothing else is replaced.

    Raises:
        CheckpointError: There is something at `path` already.
    """
    partial, destination = _begin(path, overwrite=overwrite)
    text = _description({name: _described(value) for name, value in params.items()}, metadata)
    first = jax.process_index() == 0
    with removed_on_error(path, partial):
        if first:
            clear(partial)
            (partial / METADATA_FILE).write_text(text)
        _barrier("checkpoints_convert.begin")
        import orbax.checkpoint as ocp

        with _checkpointer() as checkpointer:
            checkpointer.save(partial / _ARRAYS, args=ocp.args.PyTreeSave(dict(params)))
        _barrier("checkpoints_convert.written")
        if first:
            finish_folder(partial, destination)
        _barrier("checkpoints_convert.done")


@dataclass(frozen=True)
class Conversion:
    """What `convert_checkpoint` wrote.

    Attributes:
        parameters: Values.
        size_bytes: Bytes of them, as stored.
        dtypes: Bytes by dtype, as stored.
        source_dtypes: Bytes by dtype, as they came.
        nonfinite: Values of the source that are NaN or infinite; they are stored as they are.
        narrowed: Whether some are stored in a dtype that does not hold every value of the one they came in.
        overflowed: Finite values of the source that the stored dtype is too narrow for: they are infinite now.
        underflowed: Values of the source that the stored dtype is too coarse for: they are zero now.
    """

    parameters: int
    size_bytes: int
    dtypes: dict[str, int]
    source_dtypes: dict[str, int]
    nonfinite: int
    narrowed: bool
    overflowed: int
    underflowed: int


def convert_checkpoint(
    source: "Source | str | Path",
    mapping: Mapping | None,
    path: str | Path,
    *,
    dtype: npt.DTypeLike | None = None,
    metadata: MappingABC[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Conversion:
    """Writes a tower as a converted checkpoint, a piece at a time: it is never in memory as a whole, nor on a device.

    Whatever stops it, `path` is absent or whole (or what it was before), never in between. Casts round to the nearest
    value, and of two that are equally near to the even one.

    Args:
        source: The checkpoint; or a converted one, which is rewritten.
        mapping: The tower's mapping, as `detect` gives it; None for a converted checkpoint.
        path: The folder to make.
        dtype: What values are stored as; None keeps what they come in (float32 or wider for a parameter that is stacked
            from tensors of several).
        metadata: Anything JSON holds; comes back from `read_metadata`, with "conversion": a `Conversion`'s fields.
        overwrite: Replace the converted checkpoint that is there; nothing else is replaced.
        progress: Called with the bytes of each piece that has been read.

    Returns:
        What was written.

    Raises:
        CheckpointError: With every problem of the source in one report; or there is something at `path`, or no room.
    """
    keep_apart(source.name if isinstance(source, Source) else source, path)
    _begin(path, overwrite=overwrite)
    arrays = incoming(source, mapping, dtype)
    need_space(path, sum(array.nbytes for array in arrays.values()))
    if isinstance(source, Source) and mapping is not None:
        source.prefetch(mapping.names)
    sums: dict[str, dict[str, Any]] = {name: {} for name in arrays}
    found: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    source_dtypes: Counter[str] = Counter()

    counting = threading.Lock()

    def seen(name: str, raw: NumpyArray, piece: NumpyArray) -> None:
        sums[name].setdefault("blake3", blake3()).update(memory(piece))
        bad = count_nonfinite(raw)
        counts = {"nonfinite": bad}
        if raw.dtype != piece.dtype:
            sums[name].setdefault("source_blake3", blake3()).update(memory(raw))
            counts["narrowed"] = not np.can_cast(raw.dtype, piece.dtype, casting="safe")
            counts["overflowed"] = count_nonfinite(piece) - bad
            counts["underflowed"] = count_zeros(piece) - count_zeros(raw)
        with counting:
            found.update(counts)
            dtypes[piece.dtype.name] += piece.nbytes
            source_dtypes[raw.dtype.name] += raw.nbytes
            progress(raw.nbytes)

    with new_folder(path, overwrite=overwrite, kind=_KIND, is_kind=_is_ours) as partial:
        write_arrays(partial / _ARRAYS, arrays, seen)
        conversion = Conversion(
            parameters=sum(math.prod(array.shape) for array in arrays.values()),
            size_bytes=dtypes.total(),
            dtypes=dict(dtypes),
            source_dtypes=dict(source_dtypes),
            nonfinite=found["nonfinite"],
            narrowed=found["narrowed"] > 0,
            overflowed=found["overflowed"],
            underflowed=found["underflowed"],
        )
        described = {
            name: _shape_and_dtype(array) | {key: value.hexdigest() for key, value in sums[name].items()}
            for name, array in arrays.items()
        }
        extra = {"conversion": {**asdict(conversion), "rounding": ROUNDING}}
        (partial / METADATA_FILE).write_text(_description(described, {**(metadata or {}), **extra}))
    return conversion


def incoming(
    source: "Source | str | Path", mapping: Mapping | None, dtype: npt.DTypeLike | None = None
) -> dict[str, Incoming]:
    """What `convert_checkpoint` would write, by path; nothing is read yet.

    Args:
        source: See `convert_checkpoint`.
        mapping: See `convert_checkpoint`.
        dtype: See `convert_checkpoint`.

    Raises:
        CheckpointError: With every problem of the source in one report.
    """
    if not isinstance(source, Source):
        arrays = stored_arrays(source)
        return {
            path: Incoming(array.shape, np.dtype(array.dtype if dtype is None else dtype), array.read)
            for path, array in arrays.items()
        }
    assert mapping is not None
    problems = mapping.check(source)
    if problems:
        raise CheckpointError(f"{source.name}: does not hold the {mapping.name} tower", problems)

    def one(path: str, shape: tuple[int, ...]) -> Incoming:
        own = _common_dtype(source.info(name).dtype for name in mapping.sources(path))

        def read(rows: slice) -> NumpyArray:
            return mapping.read(source, path, (rows,) if shape else None, own)

        return Incoming(shape, own if dtype is None else np.dtype(dtype), read)

    return {path: one(path, shape) for path, shape in mapping.shapes.items()}


def check_destination(path: str | Path, *, source: str | Path, overwrite: bool = False) -> None:
    """Raises what `save_checkpoint` would, and refuses to write where the source is; to be called before a long read.

    Raises:
        CheckpointError: There is something at `path` that is not to be replaced.
    """
    keep_apart(source, path)
    _begin(path, overwrite=overwrite)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata given to `save_checkpoint`.

    Raises:
        CheckpointError: `path` is not a converted checkpoint.
    """
    metadata = _describe(path)["metadata"]
    assert isinstance(metadata, dict)
    return metadata


def stored_targets(path: str | Path) -> dict[str, Target]:
    """Shape and dtype of each parameter in a converted checkpoint, in the form that `restore_checkpoint` takes.

    Raises:
        CheckpointError: `path` is not a converted checkpoint.
    """
    parameters = _describe(path)["parameters"]
    return {name: Target(tuple(entry["shape"]), _dtype(entry["dtype"])) for name, entry in parameters.items()}


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a folder that `save_checkpoint` wrote, even if part of it has been lost since."""
    return (Path(path).expanduser() / METADATA_FILE).is_file() or _has_arrays(path)


def restore_checkpoint(
    path: str | Path, targets: MappingABC[str, Target], *, cast: bool = False
) -> dict[str, jax.Array]:
    """Reads a converted checkpoint into the given shardings, whatever devices it was saved from.

    Args:
        path: The folder.
        targets: Every parameter of the checkpoint, by path.
        cast: Allow the targets' dtypes to differ from the stored ones.

    Returns:
        Path -> array of the target's shape, dtype and sharding; what the checkpoint does not store of it is zero.

    Raises:
        CheckpointError: With every difference in names, shapes and dtypes in one report.
    """
    stored = stored_targets(path)
    problems = _padding_problems(targets)
    problems += [f"{name}: not in the checkpoint" for name in targets.keys() - stored.keys()]
    problems += [f"{name}: in the checkpoint, but not asked for" for name in stored.keys() - targets.keys()]
    for name in targets.keys() & stored.keys():
        have, want = stored[name], targets[name]
        if have.shape != _stored_shape(want):
            problems.append(f"{name}: shape {list(have.shape)}, expected {list(_stored_shape(want))}")
        if have.dtype != np.dtype(want.dtype) and not cast:
            problems.append(f"{name}: dtype {have.dtype}, expected {np.dtype(want.dtype)} (a cast must be asked for)")
    if problems:
        raise CheckpointError(f"{path}: differs from what is asked for", sorted(problems))
    return _restore(
        path,
        {name: _abstract(target, _sharding(target)) for name, target in targets.items()},
        padded=[name for name, target in targets.items() if _stored_shape(target) != tuple(target.shape)],
    )


def stored_arrays(path: str | Path) -> dict[str, StoredArray]:
    """The parameters of a converted checkpoint by path, to be read piece by piece.

    Raises:
        CheckpointError: `path` is not a converted checkpoint.
    """
    names = list(_describe(path)["parameters"])
    return open_arrays(str(path), _arrays_folder(path), names)


def checksums(path: str | Path) -> dict[str, str]:
    """BLAKE3 of each parameter's bytes in C order, by path, as they were when it was written; of those that have one.

    Raises:
        CheckpointError: `path` is not a converted checkpoint.
    """
    return {name: entry["blake3"] for name, entry in _describe(path)["parameters"].items() if "blake3" in entry}


def restore_host(path: str | Path) -> dict[str, NumpyArray]:
    """Reads a converted checkpoint into NumPy arrays, as stored.

    Raises:
        CheckpointError: `path` is not a converted checkpoint.
    """
    restored = _restore(path, {name: _abstract(target, None) for name, target in stored_targets(path).items()})
    return {name: np.asarray(value) for name, value in restored.items()}


def _read(source: Source, mapping: Mapping, path: str, target: Target, pool: ThreadPoolExecutor) -> jax.Array:
    """One parameter: each tensor is visited once for all the slices of it that this process needs."""
    shape, stored_shape, sharding = tuple(target.shape), _stored_shape(target), _sharding(target)
    shards: dict[_Spans, NumpyArray] = {}
    slices: list[tuple[Index, NumpyArray]] = []
    for index in sharding.addressable_devices_indices_map(shape).values():
        spans = _spans(index, shape)
        if spans in shards:
            continue
        shard = shards[spans] = empty_aligned(tuple(stop - start for start, stop in spans), target.dtype)
        part = tuple(slice(min(a, size), min(b, size)) for (a, b), size in zip(spans, stored_shape, strict=True))
        out = shard[tuple(slice(span.stop - span.start) for span in part)]
        if out.shape != shard.shape:
            shard.fill(0)
        if out.size:
            slices.append((part, out))
    fills = mapping.fills(source, path, slices)
    # Handing a small read to a thread takes longer than the read.
    small = sum(out.nbytes for _, out in slices) < _INLINE_BYTES
    for _ in (map if small else pool.map)(lambda fill: fill(), fills):
        pass
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[_spans(index, shape)])


def _spans(index: Index | None, shape: tuple[int, ...]) -> _Spans:
    return tuple(span.indices(size)[:2] for span, size in zip(index or (), shape, strict=True))


def _stored_shape(target: Target) -> tuple[int, ...]:
    return tuple(target.shape if target.stored_shape is None else target.stored_shape)


def _padding_problems(targets: MappingABC[str, Target]) -> list[str]:
    problems = []
    for path, target in targets.items():
        shape, stored = tuple(target.shape), _stored_shape(target)
        if len(shape) != len(stored) or any(size < least for size, least in zip(shape, stored, strict=True)):
            problems.append(f"{path}: shape {list(shape)} cannot be the stored {list(stored)} with padding")
    return problems


def _cut(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if value.shape == shape:
        return value
    sharding = _cut_sharding(value, shape)
    # Resharded first: on a mesh of explicit axes JAX does not cut a sharded dimension to what does not divide.
    value = jax.device_put(value, sharding)
    return jax.jit(lambda whole: jax.lax.slice(whole, (0,) * whole.ndim, shape), out_shardings=sharding)(value)


def _cut_sharding(value: jax.Array, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """The array's sharding with the mesh axes of each dimension that is cut moved to another that they divide."""
    sharding = value.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = [*sharding.spec, *[None] * (value.ndim - len(sharding.spec))]
    cut = [before != after for before, after in zip(value.shape, shape, strict=True)]
    for dim in range(value.ndim):
        if not cut[dim] or spec[dim] is None:
            continue
        axes, spec[dim] = spec[dim], None
        parts = math.prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
        free = (i for i in range(value.ndim) if spec[i] is None and not cut[i] and shape[i] % parts == 0)
        if (other := next(free, None)) is not None:
            spec[other] = axes
    return sharding.update(spec=jax.sharding.PartitionSpec(*spec))


def _sharding(target: Target) -> jax.sharding.Sharding:
    return target.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _begin(path: str | Path, *, overwrite: bool) -> tuple[Path, Path]:
    return begin_folder(path, overwrite=overwrite, kind=_KIND, is_kind=_is_ours)


def _description(parameters: MappingABC[str, Any], metadata: MappingABC[str, Any] | None) -> str:
    return json.dumps({"format": FORMAT, "parameters": dict(parameters), "metadata": dict(metadata or {})}, indent=1)


def _shape_and_dtype(value: Any) -> dict[str, Any]:
    return {"shape": list(value.shape), "dtype": np.dtype(value.dtype).name}


def _described(value: jax.Array) -> dict[str, Any]:
    described = _shape_and_dtype(value)
    if jax.process_count() == 1:  # of several processes no one has all of it
        described["blake3"] = blake3(memory(np.asarray(value))).hexdigest()
    return described


def _common_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    found = set(dtypes)
    return found.pop() if len(found) == 1 else max(np.dtype(np.float32), *found, key=lambda dtype: dtype.itemsize)


def _arrays_folder(path: str | Path) -> Path:
    folder = Path(path).expanduser().absolute() / _ARRAYS
    if not folder.is_dir():
        raise CheckpointError(f"{path}: is incomplete (its folder {_ARRAYS} is not there); convert it again")
    return folder


def _is_ours(folder: Path) -> bool:
    try:
        _describe(folder)
    except CheckpointError:
        return False
    return True


def _describe(path: str | Path) -> dict[str, Any]:
    file = Path(path).expanduser() / METADATA_FILE
    if not file.is_file():
        if _has_arrays(path):
            raise CheckpointError(
                f"{path}: an incomplete converted checkpoint (it has no {METADATA_FILE}); convert it again"
            )
        raise CheckpointError(f"{path}: not a converted checkpoint (it has no {METADATA_FILE})")
    try:
        description = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: {METADATA_FILE} is not readable JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CheckpointError(f"{path}: {METADATA_FILE} is not of the format {FORMAT!r}")
    return description


def _has_arrays(path: str | Path) -> bool:
    # a file that Orbax writes: a published folder may have something of its own called arrays
    return (Path(path).expanduser() / _ARRAYS / "_METADATA").is_file()


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    # Compression takes four times the time of writing and saves a fifth of bfloat16 weights.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _restore(
    path: str | Path, targets: MappingABC[str, jax.ShapeDtypeStruct], padded: Iterable[str] = ()
) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    item = dict(targets)
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    for name in padded:
        # Not strict: each shard is read as far as it is stored, and is zero beyond.
        restore_args[name].strict = False
    args = ocp.args.PyTreeRestore(item, restore_args=restore_args)
    arrays = _arrays_folder(path)
    with damage_reported(str(path)), _checkpointer() as checkpointer:
        restored = checkpointer.restore(arrays, args=args)
    assert isinstance(restored, dict)
    return restored


def _abstract(target: Target, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(target.shape), np.dtype(target.dtype), sharding=sharding)  # type: ignore[no-untyped-call]
