"""What a checkpoint holds, and whether a converted one still says the same."""

import math
from collections import Counter
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.convert import restore_host
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.mapping import Mapping, top_level
from checkpoints_convert.sources import NumpyArray, Source


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


def verify(source: Source, mapping: Mapping, checkpoint: str | Path | MappingABC[str, Any]) -> Report:
    """Compares each tensor of the source with what the inverse mapping makes of the stored parameters.

    Args:
        source: The original checkpoint.
        mapping: The tower's mapping, as `detect` gives it.
        checkpoint: A folder that `save_checkpoint` wrote, or parameters by path.

    Returns:
        How many tensors are equal, and a line for each that differs.

    Raises:
        CheckpointError: The source or the parameters do not fit the mapping.
    """
    params = restore_host(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
    problems = mapping.check(source)
    if problems:
        raise CheckpointError(f"{source.name}: does not hold the {mapping.name} tower", problems)
    source.prefetch(mapping.names)
    exact = widened = rounded = nonfinite = 0
    differing: list[str] = []
    for name, stored in mapping.export(params):
        original = source.read(name)
        nonfinite += count_nonfinite(original)
        expected = original.astype(stored.dtype)
        unequal = int(np.count_nonzero(_bits(expected) != _bits(stored)))
        if unequal:
            how = "" if original.dtype == stored.dtype else f" rounded from {original.dtype} to {stored.dtype}"
            differing.append(f"{name}: {unequal} of {stored.size} values differ{how}")
        elif original.dtype == stored.dtype:
            exact += 1
        elif np.can_cast(original.dtype, stored.dtype, casting="safe"):
            widened += 1
        else:
            rounded += 1
    return Report(exact, widened, rounded, tuple(differing), nonfinite)


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


def _bits(values: NumpyArray) -> NumpyArray:
    return np.ascontiguousarray(values).reshape(-1).view(np.dtype(f"u{values.dtype.itemsize}"))


def count_nonfinite(values: NumpyArray) -> int:
    """How many values are NaN or infinite; for bfloat16 an eighth of the time of `isfinite` where there are none."""
    if not values.size:
        return 0
    values = np.ascontiguousarray(values)
    bits = 8 * values.dtype.itemsize
    info = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
    exponent = ((1 << info.nexp) - 1) << info.nmant
    # As integers they are the largest of their sign: positive ones of the signed values, negative ones of the unsigned.
    largest, largest_unsigned = (int(values.view(f"{kind}{bits // 8}").max()) for kind in "iu")
    if largest < exponent and largest_unsigned < (1 << (bits - 1)) + exponent:
        return 0
    return int(np.count_nonzero(~np.isfinite(values)))
