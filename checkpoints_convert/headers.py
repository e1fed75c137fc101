"""The header of a safetensors file: what it says of each tensor, and everything that is wrong with it."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.errors import CheckpointError

# The limit of the format itself: a longer header is a corrupt or hostile file.
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it; `offset` is in bytes from the start of the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: str
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """What a weight file says that it holds.

    Attributes:
        tensors: By name; those that are not sound are here too where they can be described.
        faults: (tensor name, what is wrong with it) of those that are not sound.
        cut: Tensors whose bytes end after the file does; there are none where the file has its `expected_bytes`.
        file_bytes: Size of the file.
        expected_bytes: Where its last tensor ends.
        header_bytes: Size of the header, its own length included.
    """

    tensors: Mapping[str, TensorInfo]
    faults: list[tuple[str, str]] = field(default_factory=list)
    cut: frozenset[str] = frozenset()
    file_bytes: int = 0
    expected_bytes: int = 0
    header_bytes: int = 0


def read_header(file: str, file_bytes: int, read: Callable[[int, int], bytes]) -> Header:
    """Reads and checks a safetensors header.

    Args:
        file: Name of the file; starts every message.
        file_bytes: Its size.
        read: Gives the bytes from the first number up to the second, fewer where the file ends.

    Returns:
        The tensors described, and what is wrong with any of them.

    Raises:
        CheckpointError: The header itself is unusable.
    """
    prefix = read(0, 8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        raise CheckpointError(f"{file}: truncated: {file_bytes} bytes, no room for a header")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: not safetensors: a header of {length} bytes, but the limit is {MAX_HEADER_BYTES}"
        )
    start = 8 + length
    if start > file_bytes:
        raise CheckpointError(f"{file}: truncated: the header alone is {length} bytes, the file {file_bytes}")
    entries = _entries(file, read(8, start))

    tensors: dict[str, TensorInfo] = {}
    faults: list[tuple[str, str]] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        fault = _place_fault(entry)
        if not fault:
            begin, end = (start + offset for offset in entry["data_offsets"])
            spans.append((begin, end, name))
            if entry["dtype"] in DTYPES:
                tensors[name] = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]], file, begin, end - begin)
            fault = _size_fault(entry)
        if fault:
            faults.append((name, f"{name} ({file}): {fault}"))
    spans.sort()
    faults += [(name, f"{name} ({file}): {fault}") for name, fault in _overlaps(spans)]
    # Where one entry has no place that can be read, what lies between the others may be that one's.
    if len(spans) == len(entries):
        faults += [(name, f"{name} ({file}): {fault}") for name, fault in _gaps(spans, start, file_bytes)]
    expected = max([start, *(end for _, end, _ in spans)])
    cut = {name for name, info in tensors.items() if info.offset + info.size_bytes > file_bytes}
    return Header(tensors, faults, frozenset(cut - {name for name, _ in faults}), file_bytes, expected, start)


def _entries(file: str, raw: bytes) -> dict[str, Any]:
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            seen: set[str] = set()
            twice.extend(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        return entries

    try:
        header = json.loads(raw, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: malformed header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: malformed header: a {type(header).__name__}, not a JSON object")
    if twice:
        raise CheckpointError(f"{file}: malformed header: {twice[0]!r} is in it twice")
    header.pop("__metadata__", None)
    return header


def _place_fault(entry: object) -> str:
    if not isinstance(entry, dict):
        return f"malformed header entry {entry!r}"
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return f"malformed shape {shape!r} in the header"
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        return f"malformed data_offsets {offsets!r} in the header"
    if not 0 <= offsets[0] <= offsets[1]:
        return f"impossible data_offsets {offsets!r} in the header"
    if not isinstance(entry.get("dtype"), str):
        return f"malformed dtype {entry.get('dtype')!r} in the header"
    return ""


def _size_fault(entry: Mapping[str, Any]) -> str:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        return f"dtype {dtype!r} is not one that can be read ({', '.join(DTYPES)})"
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    return "" if end - begin == expected else f"{end - begin} bytes stored, but {dtype}{shape} takes {expected}"


def _overlaps(spans: list[tuple[int, int, str]]) -> Iterator[tuple[str, str]]:
    reached, previous = 0, ""
    for begin, end, name in spans:
        if begin < min(reached, end):
            for one, other in ((name, previous), (previous, name)):
                yield one, f"its bytes overlap those of {other}"
        if end > reached:
            reached, previous = end, name


def _gaps(spans: list[tuple[int, int, str]], start: int, file_bytes: int) -> Iterator[tuple[str, str]]:
    """Bytes that belong to no tensor, said of those on both sides: the header is not the one of these bytes."""
    reached, previous = start, ""
    for begin, end, name in [*spans, (file_bytes, file_bytes, "")]:
        if begin > reached:
            for one in filter(None, (previous, name)):
                yield one, f"{begin - reached} bytes beside it, from {reached} on, belong to no tensor"
        if end >= reached:
            reached, previous = end, name
