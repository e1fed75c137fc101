"""Parameters back into the safetensors that PyTorch reads."""

import json
from collections.abc import Mapping as MappingABC
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from checkpoints_convert.convert import read_metadata, restore_host
from checkpoints_convert.folders import begin_folder, clear, finish_folder, keep_apart
from checkpoints_convert.mapping import Mapping
from checkpoints_convert.sources import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, NumpyArray

MAX_SHARD_BYTES = 5_000_000_000


def export_parameters(
    params: MappingABC[str, Any],
    mapping: Mapping,
    out: str | Path,
    *,
    config: MappingABC[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> list[str]:
    """Writes parameters as a folder of safetensors that PyTorch (and `open_source`) reads.

    Args:
        params: Path -> array.
        mapping: Gives names and layout; the original one unless another is wanted.
        out: The folder to make; absent or whole, whatever happens.
        config: Written beside as config.json.
        max_shard_bytes: Above this the tensors go into several files and an index.
        overwrite: Replace a folder that holds an export and nothing else.

    Returns:
        The names of the weight files.

    Raises:
        CheckpointError: The parameters do not fit the mapping, or there is something at `out` already.
    """
    partial, destination = begin_folder(out, overwrite=overwrite, kind="an export", is_kind=_is_export)
    clear(partial)

    written: list[list[str]] = []
    held: dict[str, NumpyArray] = {}
    total_bytes = held_bytes = 0

    def flush() -> None:
        nonlocal held, held_bytes
        save_file(held, partial / f"part-{len(written)}", metadata={"format": "pt"})
        written.append(list(held))
        held, held_bytes = {}, 0

    for name, value in mapping.export(params):
        if held and held_bytes + value.nbytes > max_shard_bytes:
            flush()
        held[name] = value
        held_bytes += value.nbytes
        total_bytes += value.nbytes
    flush()

    count = len(written)
    files = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for number, file in enumerate(files):
        (partial / f"part-{number}").rename(partial / file)
    if count > 1:
        weight_map = {name: file for file, names in zip(files, written, strict=True) for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2))
    if config is not None:
        (partial / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2))
    finish_folder(partial, destination)
    return files


def export_checkpoint(
    checkpoint: str | Path,
    mapping: Mapping,
    out: str | Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> list[str]:
    """Writes a converted checkpoint as safetensors, with the config from its metadata (key "config") beside.

    Args:
        checkpoint: A folder that `save_checkpoint` wrote.
        mapping: Gives names and layout.
        out: The folder to make; not where the checkpoint is.
        max_shard_bytes: Above this the tensors go into several files and an index.
        overwrite: Replace a folder that holds an export and nothing else.

    Returns:
        The names of the weight files.

    Raises:
        CheckpointError: The checkpoint does not fit the mapping, or there is something at `out` already.
    """
    keep_apart(checkpoint, out)
    return export_parameters(
        restore_host(checkpoint),
        mapping,
        out,
        config=read_metadata(checkpoint).get("config"),
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def _is_export(folder: Path) -> bool:
    inside = list(folder.iterdir())
    weights = [path for path in inside if path.suffix == ".safetensors"]
    others = {path.name for path in inside} - {path.name for path in weights}
    return bool(weights) and others <= {INDEX_FILE, CONFIG_FILE} and all(path.is_file() for path in inside)
