"""A weight file elsewhere, of which only the wanted bytes travel.

The header comes first, in one small request. Tensors that lie side by side then come in one request each run of them,
several at once; each is tried again where it broke off. What has come is kept in a folder of pieces, one file for each
range, named "start-stop" and renamed to that when it is whole. So a second load fetches nothing, a killed one goes on
where it was, and a tensor is read from its piece by the code that reads local files. The folder's name is made from the
file's etag and size: pieces of two versions of a file cannot meet, and every answer must be of the version begun with.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import NumpyArray, map_tensor, read_bytes_into
from checkpoints_convert.headers import read_header

# Most headers fit; those of the largest checkpoints, half a megabyte a file, take a second request.
PROBE_BYTES = 1 << 17
# Above this a run of tensors is cut into several requests, at a tensor's end.
PIECE_BYTES = 1 << 25
CONNECTIONS = 8


@dataclass(frozen=True)
class Answer:
    """What a server sends for a range.

    Attributes:
        etag: Of the whole file.
        size_bytes: Of the whole file.
        start: First byte sent.
        chunks: The bytes.
    """

    etag: str
    size_bytes: int
    start: int
    chunks: Iterator[bytes]


class Remote(Protocol):
    """Where a file's bytes come from; `transient` are the errors after which it is worth asking again."""

    transient: tuple[type[Exception], ...]

    def get(self, start: int, stop: int) -> AbstractContextManager[Answer]:
        """Asks for the bytes from `start` up to `stop`, or to the end of the file if that comes first.

        Raises:
            RangesUnsupportedError: It only sends whole files, or does not say which version of a file it sends.
            CheckpointError: It will not send them.
        """


class RangesUnsupportedError(CheckpointError):
    """A server does not send parts of files, or does not say of which version they are."""


@dataclass(frozen=True)
class Retries:
    """How a broken transfer is tried again.

    Attributes:
        times: Without a byte of progress, after which it is given up.
        wait_s: Before the second time; twice as long before each that follows, up to `longest_wait_s`.
        longest_wait_s: The longest wait.
    """

    times: int = 5
    wait_s: float = 1.0
    longest_wait_s: float = 8.0

    def wait_s_after(self, failures: int) -> float:
        """How long to wait after the given number of failures in a row."""
        return min(self.longest_wait_s, self.wait_s * 2 ** (failures - 1))


class RangedFile:
    """A safetensors file elsewhere.

    Args:
        remote: Sends its bytes; None where it cannot be asked, and what was kept must do.
        name: What the checkpoint calls it.
        folder: Where pieces are kept, of all versions.
        note: Where to write down which version this is, if that can never change (as at one commit of the hub).
        retries: After a broken transfer.
        count: Called with the number of bytes that have come, from any thread.

    Raises:
        CheckpointError: It cannot be had, or its header is unusable.
    """

    def __init__(
        self,
        remote: Remote | None,
        name: str,
        folder: Path,
        *,
        note: Path | None = None,
        retries: Retries | None = None,
        count: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._remote = remote
        self._name = name
        self._retries = retries or Retries()
        self._count = count
        self._version = _noted(note)
        first = bytearray()
        if self._version is None:
            self._transfer(0, PROBE_BYTES, first.extend, threading.Event())
            assert self._version is not None
        self.etag = self._version[0]
        self._folder = folder / sha256(repr(self._version).encode()).hexdigest()
        with self._keeping():
            self._folder.mkdir(parents=True, exist_ok=True)
            if first:
                _write(self._folder / f"0-{len(first)}", first)
            if first and note is not None:
                note.parent.mkdir(parents=True, exist_ok=True)
                _write(note, json.dumps(self._version).encode())
        self.header = read_header(name, self._version[1], self._bytes)

    def read(self, name: str) -> NumpyArray:
        """One of its tensors as a view on the piece that holds it, which is fetched now if it was not before."""
        info = self.header.tensors[name]
        path, start = self._piece(info.offset, info.offset + info.size_bytes)
        return map_tensor(path, info.offset - start, info)

    def read_into(self, name: str, out: NumpyArray, start: int) -> None:
        """Fills `out` with the tensor's elements from the `start`-th on; fetches all of it if it is not there."""
        info = self.header.tensors[name]
        path, begin = self._piece(info.offset, info.offset + info.size_bytes)
        read_bytes_into(path, info.offset - begin + start * info.dtype.itemsize, out, info)

    def missing(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """The ranges to be asked for so that these tensors are here."""
        infos = [self.header.tensors[name] for name in names]
        return self._missing((info.offset, info.offset + info.size_bytes) for info in infos)

    def _missing(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        pieces = _pieces(self._folder)
        ranges: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if start == stop or _holding(pieces, start, stop):
                continue
            begin, end = ranges[-1] if ranges else (0, 0)
            if ranges and start == end and stop - begin <= PIECE_BYTES:
                ranges[-1] = (begin, stop)
            else:
                ranges.append((start, stop))
        return ranges

    def fetch(self, spans: Sequence[tuple[int, int]], pool: Executor, halt: threading.Event) -> None:
        """Fetches ranges that are missing, each in a thread of the pool, until `halt` is set; one that fails sets it.

        Only one process at a time fetches pieces of a file; those that waited find them.

        Raises:
            CheckpointError: Some of it cannot be had; what has come is kept.
            CancelledError: `halt` was set.
        """
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # exported lazily

        with self._keeping(), WeakFileLock(self._folder / "lock"):
            transfers = [pool.submit(self._fetch, start, stop, halt) for start, stop in self._missing(spans)]
            errors = [transfer.exception() for transfer in transfers]
        # One that was only called off says nothing of why.
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, CancelledError)):
            raise error

    def _fetch(self, start: int, stop: int, halt: threading.Event) -> None:
        path = self._folder / f"{start}-{stop}"
        partial = path.with_name(f"{path.name}.part")
        try:
            with self._keeping():
                with open(partial, "ab") as out:
                    if out.tell() > stop - start:
                        out.truncate(0)
                    self._transfer(start + out.tell(), stop, out.write, halt)
                    out.flush()
                    os.fsync(out.fileno())
                partial.replace(path)
        except BaseException:
            halt.set()
            raise

    def _piece(self, start: int, stop: int) -> tuple[Path, int]:
        found = _holding(_pieces(self._folder), start, stop)
        if found is None:
            with ThreadPoolExecutor(1) as pool:
                self.fetch([(start, stop)], pool, threading.Event())
            found = _holding(_pieces(self._folder), start, stop)
            assert found is not None
        return self._folder / f"{found[0]}-{found[1]}", found[0]

    def _bytes(self, start: int, stop: int) -> bytes:
        assert self._version is not None
        stop = min(stop, self._version[1])
        path, begin = self._piece(start, stop)
        with open(path, "rb") as file:
            file.seek(start - begin)
            return file.read(stop - start)

    def _transfer(self, start: int, stop: int, write: Callable[[bytes], Any], halt: threading.Event) -> None:
        """Hands on the bytes from `start` up to `stop` (or the end of the file), whatever breaks in between."""
        if self._remote is None:
            raise CheckpointError(f"{self._name}: bytes {start}-{stop} of it have not been fetched before")
        at, failures = start, 0
        while at < stop and not halt.is_set():
            begun, broke = at, "the answer ended early"
            try:
                with self._remote.get(at, stop) as answer:
                    stop = min(stop, self._checked(answer, at))
                    for chunk in answer.chunks:
                        if halt.is_set():
                            break
                        if at + len(chunk) > stop:
                            raise CheckpointError(f"{self._name}: the server sends more than the bytes {start}-{stop}")
                        write(chunk)
                        at += len(chunk)
                        self._count(len(chunk))
            except self._remote.transient as error:
                broke = f"{type(error).__name__}: {error}"
            if at < stop:
                failures = 1 if at > begun else failures + 1
                if failures > self._retries.times:
                    raise CheckpointError(
                        f"{self._name}: bytes {start}-{stop} of it: broke off at {at}, and {self._retries.times} more "
                        f"tries gave nothing: {broke}"
                    )
                halt.wait(self._retries.wait_s_after(failures))
        if at < stop:
            raise CancelledError

    def _checked(self, answer: Answer, start: int) -> int:
        version = (answer.etag, answer.size_bytes)
        if self._version is None:
            self._version = version
        if version != self._version:
            raise CheckpointError(
                f"{self._name}: has changed while it was read: {_spelt(self._version)} became {_spelt(version)}"
            )
        if answer.start != start:
            raise CheckpointError(f"{self._name}: the server sends bytes from {answer.start} on, not from {start} on")
        return answer.size_bytes

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self._name}: what comes of it cannot be kept: {error}") from error


def _noted(note: Path | None) -> tuple[str, int] | None:
    if note is None or not note.is_file():
        return None
    etag, size_bytes = json.loads(note.read_bytes())
    return etag, size_bytes


def _pieces(folder: Path) -> list[tuple[int, int]]:
    found = (re.fullmatch(r"(\d+)-(\d+)", entry.name) for entry in os.scandir(folder))
    return [(int(match[1]), int(match[2])) for match in found if match]


def _holding(pieces: Iterable[tuple[int, int]], start: int, stop: int) -> tuple[int, int] | None:
    return next((piece for piece in pieces if piece[0] <= start and stop <= piece[1]), None)


def _write(path: Path, content: bytes | bytearray) -> None:
    """Makes a file that is whole or absent."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    partial.write_bytes(content)
    partial.replace(path)


def _spelt(version: tuple[str, int]) -> str:
    return f"{version[1]} bytes with the etag {version[0]}"
