"""Where tensors come from: a file or folder of safetensors or PyTorch pickles, or a model on the Hugging Face hub.

source = open_source("moonshotai/Kimi-K2.5")      # config and index only
problems = source.open(names)                     # checks the headers of the files that hold these names, no others
source.prefetch(names)                            # brings these tensors here, and nothing else; nothing to do if local
source.read(name)                                 # a NumPy view on a file: no bytes move until they are used
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import NumpyArray, SafetensorsFile, TensorFile
from checkpoints_convert.headers import DTYPES, TensorInfo
from checkpoints_convert.pickles import SUFFIXES, PickleFile
from checkpoints_convert.ranges import CONNECTIONS, RangedFile

__all__ = ["CONFIG_FILE", "DTYPES", "INDEX_FILE", "SINGLE_FILE", "NumpyArray", "Source", "TensorInfo", "open_source"]

SUFFIX = ".safetensors"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
PICKLE_FILE = "pytorch_model.bin"
CONFIG_FILE = "config.json"
# Mistral's own, read where there are none of the others
PARAMS_FILE = "params.json"
CONSOLIDATED_INDEX_FILE = "consolidated.safetensors.index.json"
CONSOLIDATED_FILE = "consolidated.safetensors"
# Several copies of the weights may lie side by side: the first that is there is read.
COPIES = ((INDEX_FILE, SINGLE_FILE), (CONSOLIDATED_INDEX_FILE, CONSOLIDATED_FILE), (PICKLE_INDEX_FILE, PICKLE_FILE))
# What an interrupted or converted checkpoint of this package has; it is opened elsewhere.
_CONVERTED_FILE = "checkpoint.json"

Progress = Callable[[int, int], None]


def open_source(
    src: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    progress: Progress | None = None,
) -> "Source":
    """Opens a checkpoint without reading any tensor.

    Args:
        src: A `.safetensors` file or PyTorch's `.bin`, `.pt` or `.pth`; a folder that holds safetensors (with or
            without their index) or `pytorch_model.bin` (or its index); or a hub id, `org/name` or
            `hf://org/name[@revision]`.
        revision: Hub only: branch, tag or commit.
        token: Hub only: access token; None takes the one that `huggingface_hub` finds.
        progress: Hub only: called with (bytes fetched, bytes to fetch) while tensors come, from any thread.

    Returns:
        The source. Of a hub id only the config and the index have been downloaded.

    Raises:
        CheckpointError: Nothing is there, or the index is unusable.
    """
    name, path = str(src), Path(src).expanduser()
    on_hub = re.fullmatch(r"hf://([^@]+)(?:@(.+))?", name)
    if on_hub:
        if revision is not None and on_hub[2] not in (None, revision):
            raise CheckpointError(f"{name}: names the revision {on_hub[2]}, but {revision} is asked for")
        return _open_hub(on_hub[1], revision=revision or on_hub[2], token=token, progress=progress)
    if path.is_file():
        if path.suffix not in (SUFFIX, *SUFFIXES):
            raise CheckpointError(f"{path}: not a {SUFFIX} file, nor PyTorch's ({', '.join(SUFFIXES)})")
        return _from_headers(_local(name, path.parent), [path.name])
    if path.is_dir():
        return _open_folder(name, path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return _open_hub(name, revision=revision, token=token, progress=progress)
    raise CheckpointError(f"{src}: no such file or folder, and not a hub id (org/name)")


class Traffic:
    """Counts the bytes of a source that have moved, from any thread.

    Args:
        progress: Called with (bytes fetched, bytes to fetch) between `begin` and `end`.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.read_bytes = 0
        self.fetched_bytes = 0
        self._progress = progress
        self._goal = (0, 0)
        self._lock = threading.Lock()

    def read(self, count: int) -> None:
        """Counts bytes of tensors that are read."""
        with self._lock:
            self.read_bytes += count

    def fetched(self, count: int) -> None:
        """Counts bytes that came over the network."""
        with self._lock:
            self.fetched_bytes += count
            begun, total = self._goal
            if total and self._progress is not None:
                self._progress(min(self.fetched_bytes - begun, total), total)

    def begin(self, total: int) -> None:
        """From now on so many bytes are to come; 0 ends it."""
        with self._lock:
            self._goal = (self.fetched_bytes, total)


class Source:
    """A checkpoint: the names of its tensors, and their bytes on demand.

    Args:
        name: What the user called it; starts every error message.
        files: Tensor name -> file name.
        open_file: Opens a weight file by name. Raises CheckpointError when it cannot, without the source's name.
        locate: The path on this machine of a small file, by name. Raises CheckpointError likewise.
        revision: The hub's commit, None for local files.
        traffic: Counts what moves.
    """

    def __init__(
        self,
        name: str,
        files: Mapping[str, str],
        *,
        open_file: Callable[[str], TensorFile],
        locate: Callable[[str], Path],
        revision: str | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.name = name
        self.files = dict(files)
        self.revision = revision
        self._open_file = open_file
        self._locate = locate
        self._traffic = traffic or Traffic()
        self._opened: dict[str, TensorFile] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._faults: dict[str, list[tuple[str, str]]] = {}
        self._held: dict[str, list[str]] = {}

    @property
    def names(self) -> KeysView[str]:
        """All tensor names, of files not opened yet too; those that the index is silent about come last."""
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
        file = CONFIG_FILE
        try:
            self._locate(CONFIG_FILE)
        except CheckpointError:
            with suppress(CheckpointError):
                self._locate(PARAMS_FILE)
                file = PARAMS_FILE
        return _read_json(self.name, file, self._locate)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file opened so far."""
        return {name: file.header.file_bytes for name, file in sorted(self._opened.items())}

    @property
    def etags(self) -> dict[str, str]:
        """What the hub calls the content of each of its files opened so far: of large ones, their SHA-256."""
        return {name: file.etag for name, file in sorted(self._opened.items()) if file.etag}

    @property
    def bytes_read(self) -> int:
        """Bytes of the headers and of the tensors read so far, each as often as it was read."""
        return self._traffic.read_bytes + sum(file.header.header_bytes for file in self._opened.values())

    @property
    def bytes_fetched(self) -> int:
        """Bytes of weight files that came over the network so far, headers and what was sent twice included."""
        return self._traffic.fetched_bytes

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
        self._read_headers(by_file)
        for file, inside in sorted(by_file.items()):
            lost = f" ({len(inside)} of the wanted tensors are in it, the first is {inside[0]})"
            problems += [
                fault if name else fault + lost for name, fault in self._faults[file] if not name or name in wanted
            ]
            header = self._opened[file].header if file in self._opened else None
            lacking = [name for name in inside if header and name in header.cut]
            if header and lacking:
                count = "1 wanted tensor is" if len(lacking) == 1 else f"{len(lacking)} wanted tensors are"
                size = f"{header.file_bytes} of {header.expected_bytes} bytes"
                problems.append(f"{file}: truncated ({size}): {count} cut off, the first is {lacking[0]}")
        for name in sorted(wanted):
            file, holders = self.files[name], self._held.get(name, [])
            if len(holders) > 1:
                problems.append(f"{name}: is in {len(holders)} files: {', '.join(sorted(holders))}")
            if file not in holders and file in self._opened:
                problems.append(f"{name}: the index says it is in {file}, which does not have it")
        return problems

    def prefetch(self, names: Iterable[str]) -> None:
        """Brings tensors to this machine that are not here yet: those that lie side by side in one request, several at
        once. Each is fetched once, however often and in whatever slices it is read then.

        Args:
            names: Tensors of the checkpoint that `open` has no problem with.

        Raises:
            CheckpointError: With every transfer that failed. What has come is kept, and is not fetched again.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.info(name).file, []).append(name)
        ranges = {}
        for name, inside in by_file.items():
            file = self._opened[name]
            if isinstance(file, RangedFile) and (missing := file.missing(inside)):
                ranges[file] = missing
        if not ranges:
            return
        self._traffic.begin(sum(stop - start for spans in ranges.values() for start, stop in spans))
        halt, problems = threading.Event(), []
        # A thread for each file, which waits for its requests; the requests are made in the other pool.
        with ThreadPoolExecutor(CONNECTIONS) as connections, ThreadPoolExecutor(len(ranges)) as files:
            transfers = [files.submit(file.fetch, spans, connections, halt) for file, spans in ranges.items()]
            try:
                for transfer in as_completed(transfers):
                    try:
                        transfer.result()
                    except CancelledError:
                        pass
                    except CheckpointError as error:
                        problems.append(str(error))
                        halt.set()
            except BaseException:
                halt.set()
                raise
        self._traffic.begin(0)
        if problems:
            raise CheckpointError(f"{self.name}: cannot be fetched", sorted(problems))

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
        self._traffic.read(info.size_bytes)
        if not info.size_bytes:
            return np.empty(info.shape, info.dtype)
        with self._named(name):
            return self._opened[info.file].read(name)

    def read_into(self, name: str, out: NumpyArray, *, start: int = 0) -> None:
        """Fills `out` with the tensor's elements from the `start`-th on, in C order and in the file's dtype.

        Straight from the file: a third of the time of faulting mapped pages in and copying them.
        """
        info = self.info(name)
        self._traffic.read(out.nbytes)
        if out.size:
            with self._named(name):
                self._opened[info.file].read_into(name, out, start)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: cannot read {name}", [str(error)]) from error

    def _read_headers(self, files: Iterable[str]) -> None:
        """Opens the files that have not been, several at once."""

        def opened(file: str) -> TensorFile | CheckpointError:
            try:
                return self._open_file(file)
            except CheckpointError as error:
                return error

        unread = sorted(file for file in files if file not in self._faults)
        if not unread:
            return
        with ThreadPoolExecutor(min(CONNECTIONS, len(unread))) as pool:
            for name, file in zip(unread, pool.map(opened, unread), strict=True):
                if isinstance(file, CheckpointError):
                    self._faults[name] = [("", str(file))]
                else:
                    self._take(name, file)

    def _take(self, name: str, file: TensorFile) -> None:
        header = file.header
        self._opened[name], self._faults[name] = file, header.faults
        broken = {tensor for tensor, _ in header.faults} | header.cut
        for tensor in header.tensors.keys() | broken:
            self._held.setdefault(tensor, []).append(name)
            if self.files.setdefault(tensor, name) == name and tensor not in broken:
                self._tensors[tensor] = header.tensors[tensor]
            if len(self._held[tensor]) > 1:
                self._tensors.pop(tensor, None)


def _open_folder(name: str, folder: Path) -> Source:
    source = _local(name, folder)
    for index, single in COPIES:
        if (folder / index).is_file():
            return _local(name, folder, _read_index(name, index, folder.joinpath))
        if (folder / single).is_file():
            return _from_headers(source, [single])
        # Weights of no index that are called something else come before the copies further down.
        if index == INDEX_FILE and (files := _further(folder)):
            return _from_headers(source, files)
    hint = ""
    if (folder / _CONVERTED_FILE).is_file():
        hint = "; it is a converted checkpoint: jaxenc.load reads it, and export makes safetensors of it"
    elif pickles := sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES):
        # training_args.bin and optimizer.pt are not weights: which of them is meant is not guessed.
        hint = f"; if {pickles[0]} is what you mean, give the path of that file"
    raise CheckpointError(f"{name}: the folder has no {SUFFIX} file and no {PICKLE_FILE}{hint}")


def _further(folder: Path) -> list[str]:
    """Safetensors files that are not Mistral's copy."""
    return sorted(path.name for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("consolidated"))


def _from_headers(source: Source, files: list[str]) -> Source:
    """Fills in the names of a checkpoint that has no index."""
    source._read_headers(files)
    problems = [fault for faults in source._faults.values() for culprit, fault in faults if not culprit]
    if problems:
        raise CheckpointError(f"{source.name}: cannot be read", problems)
    return source


def _open_hub(name: str, *, revision: str | None, token: str | bool | None, progress: Progress | None) -> Source:
    # Imported here because local files need not wait for it.
    from checkpoints_convert.hub import Hub, cached_etag

    traffic = Traffic(progress)
    hub = Hub(name, revision=revision, token=token, count=traffic.fetched)

    def open_file(file: str) -> TensorFile:
        if Path(file).suffix not in SUFFIXES:
            return hub.open(file)
        path = hub.locate(file)
        return PickleFile(path, file, etag=cached_etag(path))

    def source(files: Mapping[str, str]) -> Source:
        return Source(name, files, open_file=open_file, locate=hub.locate, revision=hub.revision, traffic=traffic)

    try:
        # Everything after comes from the commit of the first that is there, even if the branch moves meanwhile.
        hub.optional(hub.locate, CONFIG_FILE) or hub.optional(hub.locate, PARAMS_FILE)
        for index, single in COPIES:
            if hub.optional(hub.locate, index):
                return source(_read_index(name, index, hub.locate))
            if (opened := hub.optional(open_file, single)) is not None:
                whole = source({})
                whole._take(single, opened)
                return whole
    except CheckpointError as error:
        raise error if str(error).startswith(name) else CheckpointError(f"{name}: {error}") from error
    looked = ", ".join(file for copy in COPIES for file in copy)
    raise CheckpointError(f"{name}: has none of {looked} at {hub.revision or 'main'}")


def _local(name: str, folder: Path, files: Mapping[str, str] | None = None) -> Source:
    def locate(file: str) -> Path:
        if not (folder / file).is_file():
            raise CheckpointError(f"{file}: no such file in {folder}")
        return folder / file

    def open_file(file: str) -> TensorFile:
        path = locate(file)
        return PickleFile(path, file) if path.suffix in SUFFIXES else SafetensorsFile(path, file)

    return Source(name, files or {}, open_file=open_file, locate=locate)


def _read_json(name: str, file: str, locate: Callable[[str], Path]) -> dict[str, Any]:
    try:
        value = json.loads(locate(file).read_bytes())
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{name}: {file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: {file} holds a {type(value).__name__}, not a JSON object")
    return value


def _read_index(name: str, index: str, locate: Callable[[str], Path]) -> dict[str, str]:
    files = _read_json(name, index, locate).get("weight_map")
    if not isinstance(files, dict) or not set(map(type, files.values())) <= {str}:
        raise CheckpointError(f"{name}: {index} has no 'weight_map' of tensor names to file names")
    suffixes = SUFFIXES if index == PICKLE_INDEX_FILE else (SUFFIX,)
    outside = sorted(file for file in set(files.values()) if not _inside(file, suffixes))
    if outside:
        kind = f"is not the path of a {' or '.join(suffixes)} file inside the checkpoint's folder"
        raise CheckpointError(f"{name}: {index} is refused", [f"{file!r}: {kind}" for file in outside])
    return files


def _inside(file: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a path of an index stays in its folder.

    A link there may lead out of it: huggingface_hub's cache is made of links, and unlike an index they do not come with
    a download.
    """
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    escapes = posix.is_absolute() or bool(windows.anchor) or ".." in posix.parts or ".." in windows.parts
    return not escapes and "\0" not in file and posix.suffix in suffixes
