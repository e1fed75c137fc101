"""Parameters back into the safetensors that PyTorch reads."""

import json
import math
from collections.abc import Callable
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.convert import ROUNDING, read_metadata, stored_arrays
from checkpoints_convert.folders import begin_folder, keep_apart, need_space, new_folder
from checkpoints_convert.mapping import Mapping
from checkpoints_convert.sources import CONFIG_FILE, DTYPES, INDEX_FILE, SINGLE_FILE
from checkpoints_convert.values import memory

MAX_SHARD_BYTES = 5_000_000_000
_KIND = "an export"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Claim:
    """What can be said of an export beside what was converted.

    Attributes:
        exact: Whether every tensor is the source's, bit for bit; None where that is not known.
        text: The same in words, with the reason.
    """

    exact: bool | None
    text: str


@dataclass(frozen=True)
class Shard:
    """One file of an export.

    Attributes:
        file: Its name.
        tensors: Shape and dtype of each tensor in it, by name, in order.
        size_bytes: Of the tensors together.
    """

    file: str
    tensors: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    size_bytes: int


def export_parameters(
    params: MappingABC[str, Any],
    mapping: Mapping,
    out: str | Path,
    *,
    config: MappingABC[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    note: str = "",
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> list[str]:
    """Writes parameters as a folder of safetensors that PyTorch (and `open_source`) reads, one tensor at a time.

    Args:
        params: Path -> array.
        mapping: Gives names and layout; the original one unless another is wanted.
        out: The folder to make; absent or whole, whatever happens.
        config: Written beside as config.json.
        max_shard_bytes: Above this the tensors go into several files and an index.
        overwrite: Replace a folder that holds an export and nothing else.
        note: Kept in the index's metadata; there is an index then even of one file.
        progress: Called with the bytes of each tensor that has been written.

    Returns:
        The names of the weight files.

    Raises:
        CheckpointError: The parameters do not fit the mapping, or there is something at `out` already, or no room.
    """
    begin_folder(out, overwrite=overwrite, kind=_KIND, is_kind=_is_export)
    shards = export_shards(params, mapping, max_shard_bytes=max_shard_bytes)
    total_bytes = sum(shard.size_bytes for shard in shards)
    need_space(out, total_bytes)
    with new_folder(out, overwrite=overwrite, kind=_KIND, is_kind=_is_export) as partial:
        tensors = mapping.export(params)
        for shard in shards:
            with open(partial / shard.file, "xb") as file:
                file.write(_header(shard))
                for name, (shape, dtype) in shard.tensors.items():
                    exported, value = next(tensors)
                    assert (exported, value.shape, value.dtype) == (name, shape, dtype)
                    file.write(memory(value))
                    progress(value.nbytes)
        if len(shards) > 1 or note:
            weight_map = {name: shard.file for shard in shards for name in shard.tensors}
            metadata = {"total_size": total_bytes} | ({"note": note} if note else {})
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2))
        if config is not None:
            (partial / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2))
    return [shard.file for shard in shards]


def export_shards(
    params: MappingABC[str, Any], mapping: Mapping, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[Shard]:
    """The files that `export_parameters` would write.

    Args:
        params: Path -> array; only shapes and dtypes are looked at.
        mapping: See `export_parameters`.
        max_shard_bytes: See `export_parameters`.

    Raises:
        CheckpointError: The parameters do not fit the mapping.
    """
    files: list[dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = [{}]
    sizes = [0]
    for name, (shape, dtype) in mapping.outputs(params).items():
        size_bytes = math.prod(shape) * dtype.itemsize
        if files[-1] and sizes[-1] + size_bytes > max_shard_bytes:
            files.append({})
            sizes.append(0)
        files[-1][name] = (shape, dtype)
        sizes[-1] += size_bytes
    count = len(files)
    names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [Shard(*parts) for parts in zip(names, files, sizes, strict=True)]


def export_checkpoint(
    checkpoint: str | Path,
    mapping: Mapping,
    out: str | Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> list[str]:
    """Writes a converted checkpoint as safetensors, with the config from its metadata (key "config") beside.

    Where they are not the source's tensors bit for bit, the index says so; see `export_claim`.

    Args:
        checkpoint: A folder that `convert_checkpoint` or `save_checkpoint` wrote.
        mapping: Gives names and layout.
        out: The folder to make; not where the checkpoint is.
        max_shard_bytes: Above this the tensors go into several files and an index.
        overwrite: Replace a folder that holds an export and nothing else.
        progress: Called with the bytes of each tensor that has been written.

    Returns:
        The names of the weight files.

    Raises:
        CheckpointError: The checkpoint does not fit the mapping, or there is something at `out` already, or no room.
    """
    keep_apart(checkpoint, out)
    claim = export_claim(checkpoint)
    return export_parameters(
        stored_arrays(checkpoint),
        mapping,
        out,
        config=read_metadata(checkpoint).get("config"),
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        note=claim.text if claim.exact is False else "",
        progress=progress,
    )


def export_claim(checkpoint: str | Path) -> Claim:
    """What can be said of the tensors that a converted checkpoint gives back.

    Raises:
        CheckpointError: `checkpoint` is not a converted checkpoint.
    """
    conversion = read_metadata(checkpoint).get("conversion")
    if conversion is None:
        return Claim(None, "written by a program, not by a conversion: nothing is known of what its tensors equal")
    came, stored = (" and ".join(sorted(conversion[key])) for key in ("source_dtypes", "dtypes"))
    if conversion["source_dtypes"] == conversion["dtypes"]:
        return Claim(True, "every tensor is the source's, bit for bit")
    if not conversion["narrowed"]:
        return Claim(False, f"stored as {stored}, came as {came}: every value is the source's, but not its bits")
    lost = f"{conversion['overflowed']} became infinite and {conversion['underflowed']} zero"
    return Claim(
        False, f"stored as {stored}, came as {came}: values are rounded {ROUNDING}; {lost}; the source's are lost"
    )


def _header(shard: Shard) -> bytes:
    """The start of a safetensors file: the length of the rest, and where each tensor is; padded to 8 bytes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shard.tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _is_export(folder: Path) -> bool:
    inside = list(folder.iterdir())
    weights = [path for path in inside if path.suffix == ".safetensors"]
    others = {path.name for path in inside} - {path.name for path in weights}
    return bool(weights) and others <= {INDEX_FILE, CONFIG_FILE} and all(path.is_file() for path in inside)
