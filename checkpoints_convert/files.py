"""A weight file on this machine: mapped for the length of one read, so that memory never grows by its size."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.headers import Header, TensorInfo, read_header

NumpyArray = np.ndarray[Any, np.dtype[Any]]


class TensorFile(Protocol):
    """One file of a checkpoint, its header read; `etag` is the hub's name of its content, "" of a file of no hub."""

    etag: str

    @property
    def header(self) -> Header:
        """What is in it."""

    def read(self, name: str) -> NumpyArray:
        """One of its tensors, read-only; no bytes move until they are used, where that can be."""

    def read_into(self, name: str, out: NumpyArray, start: int) -> None:
        """Fills `out` with the tensor's elements from the `start`-th on, in C order and in the file's dtype."""


class SafetensorsFile:
    """A safetensors file.

    Args:
        path: Where it is.
        name: What the checkpoint calls it.
        etag: The hub's name of its content, where it is from there.

    Raises:
        CheckpointError: Its header is unusable.
    """

    def __init__(self, path: Path, name: str, *, etag: str = "") -> None:
        self._path = path
        self.etag = etag
        with open(path, "rb") as file:

            def read(start: int, stop: int) -> bytes:
                file.seek(start)
                return file.read(stop - start)

            self.header = read_header(name, path.stat().st_size, read)

    def read(self, name: str) -> NumpyArray:
        """One of its tensors as a view on the file, which stays mapped for as long as the view lives."""
        info = self.header.tensors[name]
        return map_tensor(self._path, info.offset, info)

    def read_into(self, name: str, out: NumpyArray, start: int) -> None:
        """Fills `out` with the tensor's elements from the `start`-th on."""
        info = self.header.tensors[name]
        read_bytes_into(self._path, info.offset + start * info.dtype.itemsize, out, info)


def map_tensor(path: Path, offset: int, info: TensorInfo) -> NumpyArray:
    """A read-only view on a tensor that begins at `offset` of the file at `path`."""
    if not info.size_bytes:
        return np.empty(info.shape, info.dtype)
    try:
        raw = np.memmap(path, np.uint8, "r", offset=offset, shape=(info.size_bytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.file}: cannot be read any more: {error}") from error
    return np.asarray(raw).view(info.dtype).reshape(info.shape)


def read_bytes_into(path: Path, offset: int, out: NumpyArray, info: TensorInfo) -> None:
    """Fills a contiguous array from a file: a third of the time of faulting mapped pages in and copying them."""
    left = out.reshape(-1).view(np.uint8).data
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while left:
                count = file.readinto(left)
                if not count:
                    raise CheckpointError(f"{info.file}: ends early: it has been changed since its header was read")
                left = left[count:]
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read any more: {error}") from error
