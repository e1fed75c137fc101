"""What a checkpoint holds, and whether a converted one still says the same."""

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from checkpoints_convert.convert import checksums, stored_arrays
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.mapping import Mapping, top_level
from checkpoints_convert.sources import Source
from checkpoints_convert.values import bits, cast_to_nearest, count_nonfinite, memory


@dataclass(frozen=True)
class Report:
    """The outcome of `verify`.

    Attributes:
        exact: Tensors equal bit for bit.
        widened: Tensors equal, stored in a dtype that holds every value of the original's.
        rounded: Tensors equal after rounding to the stored dtype.
        differing: A line for each tensor that differs.
        nonfinite: NaN and infinite values of the source.
    """

    exact: int
    widened: int
    rounded: int
    differing: tuple[str, ...]
    nonfinite: int

    @property
    def ok(self) -> bool:
        """Whether every tensor agrees."""
        return not self.differing


def verify(
    source: Source,
    mapping: Mapping,
    checkpoint: str | Path | MappingABC[str, Any],
    *,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Report:
    """Compares each tensor of the source with what the inverse mapping makes of the stored parameters, one at a time.

    Args:
        source: The original checkpoint.
        mapping: The tower's mapping, as `detect` gives it.
        checkpoint: A folder that `convert_checkpoint` or `save_checkpoint` wrote, or parameters by path.
        progress: Called with the stored bytes of each tensor that has been compared.

    Returns:
        How many tensors are equal, and a line for each that differs.

    Raises:
        CheckpointError: The source or the parameters do not fit the mapping.
    """
    params = stored_arrays(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
    problems = mapping.check(source)
    if problems:
        raise CheckpointError(f"{source.name}: does not hold the {mapping.name} tower", problems)
    source.prefetch(mapping.names)
    exact = widened = rounded = nonfinite = 0
    differing: list[str] = []
    for name, stored in mapping.export(params):
        original = source.read(name)
        nonfinite += count_nonfinite(original)
        expected = cast_to_nearest(original, stored.dtype)
        unequal = int(np.count_nonzero(bits(expected) != bits(stored)))
        if unequal:
            how = "" if original.dtype == stored.dtype else f" rounded from {original.dtype} to {stored.dtype}"
            differing.append(f"{name}: {unequal} of {stored.size} values differ{how}")
        elif original.dtype == stored.dtype:
            exact += 1
        elif np.can_cast(original.dtype, stored.dtype, casting="safe"):
            widened += 1
        else:
            rounded += 1
        progress(stored.nbytes)
    return Report(exact, widened, rounded, tuple(differing), nonfinite)


def verify_checksums(
    path: str | Path, progress: Callable[[int], None] = lambda size_bytes: None
) -> tuple[list[str], list[str], list[str]]:
    """Compares each stored parameter with the checksum that was kept when it was written.

    Args:
        path: A converted checkpoint.
        progress: Called with the bytes of each piece that has been read.

    Returns:
        The parameters that are as they were; a line for each that is not; those that have no checksum (a checkpoint
        that several processes wrote has none).

    Raises:
        CheckpointError: `path` is not a converted checkpoint.
    """
    kept, same, differing = checksums(path), [], []
    arrays = stored_arrays(path)
    for name, array in arrays.items():
        if name not in kept:
            continue
        digest = blake3()
        try:
            for piece in array.pieces():
                digest.update(memory(piece))
                progress(piece.nbytes)
        except CheckpointError as error:
            differing.append(f"{name}: {str(error).removeprefix(f'{path}: ')}")
            continue
        if digest.hexdigest() == kept[name]:
            same.append(name)
        else:
            differing.append(f"{name}: its bytes are not those that were written")
    return same, differing, [name for name in arrays if name not in kept]


def inspect(source: Source, towers: MappingABC[str, Mapping]) -> dict[str, Any]:
    """What is there, what would be read and what would be ignored, as plain JSON values.

    Args:
        source: The checkpoint. Only files that hold the towers' tensors are opened.
        towers: The mappings to look for, by tower name, each as `detect` gives it.

    Returns:
        A dict: source, revision, tensors (count), files (count), ignored {top-level prefix: count}, and, of those that
        are there, towers {name: {mapping, layout, prefixes, tensors {name: {shape, dtype, file, size_bytes}},
        parameters (count), size_bytes, size_bytes_by_file, size_bytes_by_dtype, problems}}.
    """
    names = set(source.names)
    found: dict[str, Any] = {}
    read: set[str] = set()
    for tower, mapping in towers.items():
        if not mapping.hits(names):
            continue
        problems = mapping.check(source)
        infos = {name: source.tensors[name] for name in mapping.names if name in source.tensors}
        read |= mapping.names.keys() & names
        by_file: Counter[str] = Counter()
        by_dtype: Counter[str] = Counter()
        for info in infos.values():
            by_file[info.file] += info.size_bytes
            by_dtype[info.dtype.name] += info.size_bytes
        found[tower] = {
            "mapping": mapping.name,
            "layout": mapping.layout,
            "prefixes": list(mapping.prefixes),
            "tensors": {
                name: {
                    "shape": list(info.shape),
                    "dtype": info.dtype.name,
                    "file": info.file,
                    "size_bytes": info.size_bytes,
                }
                for name, info in infos.items()
            },
            "parameters": sum(math.prod(info.shape) for info in infos.values()),
            "size_bytes": by_file.total(),
            "size_bytes_by_file": dict(sorted(by_file.items())),
            "size_bytes_by_dtype": dict(by_dtype),
            "problems": problems,
        }
    return {
        "source": source.name,
        "revision": source.revision,
        "tensors": len(names),
        "files": len(set(source.files.values())),
        "towers": found,
        "ignored": top_level(names - read),
    }
