"""Where tensors come from: a safetensors file, a folder of them, or a model on the Hugging Face hub.

    source = open_source("moonshotai/Kimi-K2.5")      # config and index only
    problems = source.open(names)                     # downloads and checks the files that hold these names, no others
    source.read(name)                                 # a NumPy view on the file: no bytes move until they are used

A file is mapped for the length of one read and unmapped when the view is dropped, so resident memory never grows by the
size of the checkpoint.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.errors import CheckpointError

NumpyArray = np.ndarray[Any, np.dtype[Any]]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
# Mistral's own, read where there are none of the others
PARAMS_FILE = "params.json"
CONSOLIDATED_INDEX_FILE = "consolidated.safetensors.index.json"
CONSOLIDATED_FILE = "consolidated.safetensors"
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


def open_source(src: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> "Source":
    """Opens a checkpoint without reading any tensor.

    Args:
        src: A `.safetensors` file, a folder that holds some (with or without `model.safetensors.index.json`), or a hub
            id `org/name`.
        revision: Hub only: branch, tag or commit.
        token: Hub only: access token; None takes the one that `huggingface_hub` finds.

    Returns:
        The source. Of a hub id only the config and the index have been downloaded.

    Raises:
        CheckpointError: Nothing is there, or the index is unusable.
    """
    path = Path(src).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path}: not a .safetensors file")
        return _from_headers(Source(str(src), {}, locate=_local(str(src), path.parent)), [path.name])
    if path.is_dir():
        return _open_folder(str(src), path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(src)):
        return _open_hub(str(src), revision=revision, token=token)
    raise CheckpointError(f"{src}: no such file or folder, and not a hub id (org/name)")


@dataclass(frozen=True)
class _Cut:
    """Tensors whose bytes end after their file does; there are none where the file has its `expected_bytes`."""

    names: frozenset[str]
    file_bytes: int
    expected_bytes: int


class Source:
    """A checkpoint: the names of its tensors, and their bytes on demand.

    Args:
        name: What the user called it; starts every error message.
        files: Tensor name -> file name.
        locate: File name -> path on this machine (downloads it where need be). Raises CheckpointError when it cannot.
        revision: The hub's commit, None for local files.
    """

    def __init__(
        self, name: str, files: Mapping[str, str], *, locate: Callable[[str], Path], revision: str | None = None
    ) -> None:
        self.name = name
        self.files = dict(files)
        self.revision = revision
        self._locate = locate
        self._paths: dict[str, Path] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._faults: dict[str, list[tuple[str, str]]] = {}
        self._cut: dict[str, _Cut] = {}
        self._held: dict[str, list[str]] = {}

    @property
    def names(self) -> Iterable[str]:
        """All tensor names, of files not opened yet too."""
        return self.files.keys()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors of the files opened so far; `open` adds to them."""
        return self._tensors

    @property
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json, or where it has none its params.json (Mistral's).

        Raises:
            CheckpointError: Both are missing, or what is there is not a JSON object.
        """
        try:
            path = self._locate(CONFIG_FILE)
        except CheckpointError as error:
            try:
                path = self._locate(PARAMS_FILE)
            except CheckpointError:
                raise error from None
        return _read_json(self.name, path)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file opened so far."""
        return {file: path.stat().st_size for file, path in sorted(self._paths.items())}

    def open(self, names: Iterable[str]) -> list[str]:
        """Fetches and checks the headers of the files that hold `names`, and of no others.

        Args:
            names: The wanted tensors. Names the checkpoint does not have are passed over.

        Returns:
            What is wrong with the wanted tensors or their files; empty if nothing is.
        """
        wanted = {name for name in names if name in self.files}
        problems: list[str] = []
        by_file: dict[str, list[str]] = {}
        for name in sorted(wanted):
            by_file.setdefault(self.files[name], []).append(name)
        for file, inside in sorted(by_file.items()):
            if file not in self._faults:
                self._read_header(file)
            lost = f" ({len(inside)} of the wanted tensors are in it, the first is {inside[0]})"
            problems += [
                fault if name else fault + lost for name, fault in self._faults[file] if not name or name in wanted
            ]
            lacking = [name for name in inside if file in self._cut and name in self._cut[file].names]
            if lacking:
                count = "1 wanted tensor is" if len(lacking) == 1 else f"{len(lacking)} wanted tensors are"
                size = f"{self._cut[file].file_bytes} of {self._cut[file].expected_bytes} bytes"
                problems.append(f"{file}: truncated ({size}): {count} cut off, the first is {lacking[0]}")
        for name in sorted(wanted):
            file, holders = self.files[name], self._held.get(name, [])
            if len(holders) > 1:
                problems.append(f"{name}: is in {len(holders)} files: {', '.join(sorted(holders))}")
            if file not in holders and file in self._paths:
                problems.append(f"{name}: the index says it is in {file}, which does not have it")
        return problems

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and place of one tensor.

        Raises:
            CheckpointError: There is no such tensor, or its file is broken.
        """
        if name not in self._tensors:
            problems = self.open([name]) if name in self.files else [f"{name}: no such tensor"]
            if problems:
                raise CheckpointError(f"{self.name}: cannot read {name}", problems)
        return self._tensors[name]

    def read(self, name: str) -> NumpyArray:
        """One tensor as a read-only view on its file, which stays mapped for as long as the view lives."""
        info = self.info(name)
        if not info.size_bytes:
            return np.empty(info.shape, info.dtype)
        raw = np.memmap(self._paths[info.file], np.uint8, "r", offset=info.offset, shape=(info.size_bytes,))
        return np.asarray(raw).view(info.dtype).reshape(info.shape)

    def read_into(self, name: str, out: NumpyArray, *, start: int = 0) -> None:
        """Fills `out` with the tensor's contiguous elements from the `start`-th on, in the file's dtype.

        Straight from the file: a third of the time of faulting mapped pages in and copying them.
        """
        info = self.info(name)
        left = out.reshape(-1).view(np.uint8).data
        with open(self._paths[info.file], "rb", buffering=0) as file:
            file.seek(info.offset + start * info.dtype.itemsize)
            while left:
                count = file.readinto(left)
                if not count:
                    raise CheckpointError(f"{self.name}: {name}: {info.file} ends early")
                left = left[count:]

    def _read_header(self, file: str) -> None:
        self._faults[file] = []
        try:
            path = self._locate(file)
            tensors, self._faults[file], self._cut[file] = _parse_header(path, file)
        except CheckpointError as error:
            self._faults[file] = [("", str(error).removeprefix(f"{self.name}: "))]
            return
        self._paths[file] = path
        broken = {name for name, _ in self._faults[file]} | self._cut[file].names
        for name in tensors.keys() | broken:
            self._held.setdefault(name, []).append(file)
            if self.files.setdefault(name, file) == file and name not in broken:
                self._tensors[name] = tensors[name]
            if len(self._held[name]) > 1:
                self._tensors.pop(name, None)


def _open_folder(name: str, folder: Path) -> Source:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    # one file is read before the index of another copy
    for index, instead in ((INDEX_FILE, None), (CONSOLIDATED_INDEX_FILE, SINGLE_FILE)):
        if (folder / index).is_file() and instead not in files:
            return Source(name, _read_index(name, folder / index), locate=_local(name, folder))
    if not files:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle: save it as safetensors first" if pickles else ""
        raise CheckpointError(f"{name}: the folder has no .safetensors file{hint}")
    # Some repositories keep a second copy of all weights (model.fp32-..., consolidated...) beside this one.
    source = Source(name, {}, locate=_local(name, folder))
    return _from_headers(source, [SINGLE_FILE] if SINGLE_FILE in files else files)


def _from_headers(source: Source, files: list[str]) -> Source:
    """Fills in the names of a checkpoint that has no index."""
    for file in files:
        source._read_header(file)
    problems = [fault for faults in source._faults.values() for culprit, fault in faults if not culprit]
    if problems:
        raise CheckpointError(f"{source.name}: cannot be read", problems)
    return source


def _open_hub(name: str, *, revision: str | None, token: str | bool | None) -> Source:
    # Imported here because local files need not wait for it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is its HTTP library's own
        EntryNotFoundError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
    )

    commit = revision

    def locate(file: str) -> Path:
        try:
            return Path(hf_hub_download(name, file, revision=commit, token=token))
        except LocalEntryNotFoundError as error:
            raise CheckpointError(
                f"{name}: {file}: not in the cache, and the hub cannot be reached: {error}"
            ) from error
        except EntryNotFoundError as error:
            raise CheckpointError(f"{name}: {file}: the hub has no such file at {commit or 'main'}") from error
        except (OSError, HTTPError, HFValidationError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{name}: {file}: {why} (there is no folder {name} here either)") from error

    def optional(file: str, unless: type[Exception] | tuple[()] = ()) -> Path | None:
        try:
            return locate(file)
        except CheckpointError as error:
            if isinstance(error.__cause__, EntryNotFoundError) and not isinstance(error.__cause__, unless):
                return None
            raise

    config = optional(CONFIG_FILE, unless=LocalEntryNotFoundError) or optional(PARAMS_FILE)
    if config is not None and config.parent.parent.name == "snapshots":
        # Everything after comes from this commit, even if the branch moves meanwhile.
        commit = config.parent.name
    for index_file, single in ((INDEX_FILE, SINGLE_FILE), (CONSOLIDATED_INDEX_FILE, CONSOLIDATED_FILE)):
        index = optional(index_file)
        if index is not None:
            return Source(name, _read_index(name, index), locate=locate, revision=commit)
        if optional(single) is not None:
            return _from_headers(Source(name, {}, locate=locate, revision=commit), [single])
    raise CheckpointError(f"{name}: neither {INDEX_FILE} nor {SINGLE_FILE} at {commit or 'main'} of the hub's copy")


def _local(name: str, folder: Path) -> Callable[[str], Path]:
    def locate(file: str) -> Path:
        if not (folder / file).is_file():
            raise CheckpointError(f"{name}: {file}: no such file in {folder}")
        return folder / file

    return locate


def _read_json(name: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{name}: {path.name} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: {path.name} holds a {type(value).__name__}, not a JSON object")
    return value


def _read_index(name: str, path: Path) -> dict[str, str]:
    files = _read_json(name, path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{name}: {path.name} has no 'weight_map' of tensor names to file names")
    outside = sorted(file for file in set(files.values()) if not _inside(file))
    if outside:
        raise CheckpointError(
            f"{name}: {path.name} is refused",
            [f"{file!r}: is not the path of a .safetensors file inside the checkpoint's folder" for file in outside],
        )
    return files


def _inside(file: str) -> bool:
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    escapes = posix.is_absolute() or bool(windows.anchor) or ".." in posix.parts or ".." in windows.parts
    return not escapes and "\0" not in file and posix.suffix == ".safetensors"


def _parse_header(path: Path, file: str) -> tuple[dict[str, TensorInfo], list[tuple[str, str]], _Cut]:
    """Reads a safetensors header.

    Returns:
        The tensors described, (tensor name, fault) of those that are not sound, and those that are cut off.

    Raises:
        CheckpointError: The header itself is unusable.
    """
    file_bytes = path.stat().st_size
    with open(path, "rb") as handle:
        prefix = handle.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: truncated: {file_bytes} bytes, no room for a header")
        if header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: not safetensors: a header of {header_bytes} bytes, but the limit is {MAX_HEADER_BYTES}"
            )
        if 8 + header_bytes > file_bytes:
            raise CheckpointError(f"{file}: truncated: the header alone is {header_bytes} bytes, the file {file_bytes}")
        raw = handle.read(header_bytes)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: malformed header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: malformed header: a {type(header).__name__}, not a JSON object")
    header.pop("__metadata__", None)

    start = 8 + header_bytes
    tensors: dict[str, TensorInfo] = {}
    faults: list[tuple[str, str]] = []
    for name, entry in header.items():
        fault = _entry_fault(entry)
        if not fault:
            begin, end = entry["data_offsets"]
            info = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]], file, start + begin, end - begin)
            tensors[name] = info
            expected = math.prod(info.shape) * info.dtype.itemsize
            if info.size_bytes != expected:
                fault = f"{info.size_bytes} bytes stored, but {entry['dtype']}{list(info.shape)} takes {expected}"
        if fault:
            faults.append((name, f"{name} ({file}): {fault}"))
    end, previous = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if info.size_bytes and info.offset < end:
            for one, other in ((name, previous), (previous, name)):
                faults.append((one, f"{one} ({file}): its bytes overlap those of {other}"))
        if info.offset + info.size_bytes > end:
            end, previous = info.offset + info.size_bytes, name
    cut = {name for name, info in tensors.items() if info.offset + info.size_bytes > file_bytes}
    return tensors, faults, _Cut(frozenset(cut - {name for name, _ in faults}), file_bytes, max(end, start))


def _entry_fault(entry: object) -> str:
    if not isinstance(entry, dict):
        return f"malformed header entry {entry!r}"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return f"malformed shape {shape!r} in the header"
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        return f"malformed data_offsets {offsets!r} in the header"
    if not 0 <= offsets[0] <= offsets[1]:
        return f"impossible data_offsets {offsets!r} in the header"
    if dtype not in DTYPES:
        return f"dtype {dtype!r} is not one that can be read ({', '.join(DTYPES)})"
    return ""
