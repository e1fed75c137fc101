"""The arrays of a converted checkpoint, written and read piece by piece: memory does not grow with their size.

A piece is some of an array's leading rows (of a stacked parameter: some layers), and one chunk of the checkpoint. What
is written is what Orbax itself writes of NumPy arrays in chunks, and anything that reads Orbax checkpoints reads it.
"""

import asyncio
import math
import os
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.sources import NumpyArray
from checkpoints_convert.values import cast_to_nearest

PIECE_BYTES = 32 << 20
# Arrays that are read, looked at and written at once, each a piece at a time.
WRITERS = min(4, os.cpu_count() or 1)
# Of a file of the checkpoint: what is in one that is complete is on its way to the disk while the next is filled.
FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class Incoming:
    """An array that is to be written, and can be read a piece at a time.

    Args:
        shape: Its shape.
        dtype: What it is stored as.
        read: Leading rows -> those rows, in the dtype they come in; of an array without axes, the whole of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[slice], NumpyArray]

    @property
    def nbytes(self) -> int:
        """Bytes that are written of it."""
        return math.prod(self.shape) * self.dtype.itemsize


Seen = Callable[[str, NumpyArray, NumpyArray], None]


def write_arrays(folder: Path, arrays: MappingABC[str, Incoming], seen: Seen) -> None:
    """Writes arrays as an Orbax (OCDBT) checkpoint.

    Args:
        folder: The checkpoint; must not be there.
        arrays: By name.
        seen: Is given each piece (name, as read, as stored), an array's first rows first, several arrays at once, each
            in a thread of its own.
    """
    # Here because importing it takes seconds, and nothing else in this file needs it.
    import orbax.checkpoint as ocp

    class PieceHandler(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
        """Writes several arrays at once, so that one is read or looked at while another goes to the disk."""

        async def serialize(self, values: Sequence[Incoming], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            # All at once: each commit to the checkpoint waits for the disk, and those of one moment share one.
            stores = await asyncio.gather(
                *(self._create(value, info) for value, info in zip(values, infos, strict=True))
            )
            synchronised: set[Path] = set()

            def write(info: Any, value: Incoming, store: Any) -> None:
                for index in _pieces(value.shape, value.dtype.itemsize):
                    raw = value.read(index)
                    with np.errstate(over="ignore"):  # whoever sees the piece counts what is infinite now
                        piece = cast_to_nearest(raw, value.dtype)
                    part = store[index] if value.shape else store
                    written = part.write(piece, can_reference_source_data_indefinitely=True).commit
                    # without this, writing starts when somebody waits for it
                    written.force()
                    try:
                        seen(info.name, raw, piece)
                    finally:  # nobody is to remove the folder while it is written into
                        written.result()
                    disk.submit(_synchronise, Path(info.parent_dir), synchronised)

            # The largest first: at the end no thread is left with a long one.
            jobs = sorted(zip(infos, values, stores, strict=True), key=lambda job: -job[1].nbytes)
            with ThreadPoolExecutor(1) as disk, ThreadPoolExecutor(WRITERS) as pool:
                try:
                    await asyncio.gather(*(asyncio.wrap_future(pool.submit(write, *job)) for job in jobs))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            return []

        async def _create(self, value: Incoming, info: Any) -> Any:
            first = next(_pieces(value.shape, value.dtype.itemsize), slice(0, 1))
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=value.shape,
                local_shape=(first.stop, *value.shape[1:]) if value.shape else (),
                dtype=value.dtype,
                process_index=0,
            )
            # Files are synchronised beside: to wait for the disk before the next piece is written takes longer.
            spec["context"] = {"file_io_sync": False}
            return await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)

    registry = ocp.type_handlers.create_type_handler_registry((Incoming, PieceHandler()))
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(arrays), ocdbt_target_data_file_size=FILE_BYTES))
    _synchronise(folder, set())


class StoredArray:
    """An array of a checkpoint, read where it is indexed; holds the piece that it read last.

    Args:
        checkpoint: What errors start with.
        name: Of the array.
        store: The array on disk.
    """

    def __init__(self, checkpoint: str, name: str, store: Any) -> None:
        self._checkpoint, self._name, self._store = checkpoint, name, store
        self._start, self._piece = 0, np.empty(0)
        self.shape: tuple[int, ...] = tuple(store.shape)
        self.dtype: np.dtype[Any] = store.dtype.numpy_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, position: tuple[int, ...]) -> NumpyArray:
        """What is at a place among the leading axes; all of it at ()."""
        if not position:
            return self.read(slice(None))
        first, *rest = position
        if not self._start <= first < self._start + len(self._piece):
            self._start = first // self._rows * self._rows
            self._piece = np.empty(0)  # before the next is read
            self._piece = self.read(slice(self._start, min(self._start + self._rows, self.shape[0])))
        return np.asarray(self._piece[(first - self._start, *rest)])

    def pieces(self) -> Iterator[NumpyArray]:
        """All of it, in order."""
        if not self.shape:
            yield self.read(slice(None))
            return
        for start in range(0, self.shape[0], self._rows):
            yield self.read(slice(start, min(start + self._rows, self.shape[0])))

    def read(self, rows: slice) -> NumpyArray:
        """Some of its leading rows; of an array without axes, the whole of it."""
        part = self._store[rows] if self.shape else self._store
        with damage_reported(self._checkpoint, self._name):
            return np.asarray(part.read().result())

    @property
    def _rows(self) -> int:
        """Leading rows in a chunk."""
        return int(self._store.chunk_layout.read_chunk.shape[0])


def open_arrays(checkpoint: str, folder: Path, names: Sequence[str]) -> dict[str, StoredArray]:
    """The arrays of an Orbax checkpoint, none of them read yet.

    Args:
        checkpoint: What errors start with.
        folder: What `write_arrays` made.
        names: Of the arrays.

    Raises:
        CheckpointError: One of them is not there, or the checkpoint is damaged.
    """
    import orbax.checkpoint as ocp

    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    infos = [ocp.type_handlers.ParamInfo(name=name, parent_dir=folder, ts_context=context) for name in names]
    specs = [ts.Spec(ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True)) for info in infos]
    opened = [ts.open(spec, open=True, read=True, context=context) for spec in specs]
    arrays = {}
    for name, store in zip(names, opened, strict=True):
        with damage_reported(checkpoint, name):
            arrays[name] = StoredArray(checkpoint, name, store.result())
    return arrays


@contextmanager
def damage_reported(checkpoint: str, name: str = "") -> Iterator[None]:
    """What the storage raises, as a CheckpointError of one line."""
    try:
        yield
    except Exception as error:
        # some of it is Exception itself
        if not isinstance(error, ValueError | OSError) and type(error) is not Exception:
            raise
        why = (f"{name}: " if name else "") + str(error.__cause__ or error).partition("\n")[0]
        raise CheckpointError(
            f"{checkpoint}: cannot be restored; if a file is damaged, convert it again: {why}"
        ) from error


def _pieces(shape: tuple[int, ...], item_bytes: int) -> Iterator[slice]:
    """Rows of each piece: a divisor of all rows, so that no chunk holds padding."""
    if not shape:
        yield slice(0, 1)
        return
    most = max(1, PIECE_BYTES // max(1, math.prod(shape[1:]) * item_bytes))
    rows = max((size for size in range(1, min(most, shape[0]) + 1) if shape[0] % size == 0), default=1)
    yield from (slice(start, start + rows) for start in range(0, shape[0], rows))


def _synchronise(folder: Path, done: set[Path]) -> None:
    """Waits until the disk has all files that are not `done`, and adds them."""
    for file in folder.rglob("*"):
        # one may be renamed meanwhile; the last call meets it under its own name
        with suppress(FileNotFoundError):
            if file not in done and file.is_file():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
                done.add(file)
