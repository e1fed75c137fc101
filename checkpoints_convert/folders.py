"""Folders that are absent or whole: written beside their place under another name, then renamed."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints_convert.errors import CheckpointError

# tensorstore raises what the disk says as ValueError, the operating system's number for it in the text
_DISK = re.compile(r"os_error_code='(\d+)'")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def begin_folder(path: str | Path, *, overwrite: bool, kind: str, is_kind: Callable[[Path], bool]) -> tuple[Path, Path]:
    """Where to write, and where that goes in the end; makes nothing.

    The name of the first is the same in every process, and what a killed run left there is cleared away by `clear`.

    Args:
        path: The folder to make. An empty one may be there.
        overwrite: Replace a folder of the same kind.
        kind: What is written, for the error.
        is_kind: Whether a folder is of that kind; nothing else is ever replaced.

    Raises:
        CheckpointError: There is something at `path` that is not to be replaced.
    """
    destination = Path(path).expanduser().absolute()
    is_folder = destination.is_dir()
    if destination.exists() and not (is_folder and not any(destination.iterdir())):
        if not overwrite:
            raise CheckpointError(
                f"{path}: exists already; give overwrite=True (--overwrite) to replace it, or choose another place"
            )
        if not (is_folder and is_kind(destination)):
            raise CheckpointError(f"{path}: is not {kind}, so overwrite does not replace it; choose another place")
    return destination.with_name(f".{destination.name}.partial"), destination


def keep_apart(source: str | Path, path: str | Path) -> None:
    """Refuses to write where the source is.

    Raises:
        CheckpointError: `path` is the source, inside it or around it.
    """
    one, other = (Path(place).expanduser().resolve() for place in (source, path))
    # a source that is not here is one of the hub
    if one.exists() and (one.is_relative_to(other) or other.is_relative_to(one)):
        raise CheckpointError(f"{path}: is the source {source}, or inside or around it; choose another place")


@contextmanager
def new_folder(path: str | Path, *, overwrite: bool, kind: str, is_kind: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to write into, which is at `path` once all is written; nothing is left of it if something is raised.

    Args:
        path: See `begin_folder`.
        overwrite: See `begin_folder`.
        kind: See `begin_folder`.
        is_kind: See `begin_folder`.

    Raises:
        CheckpointError: There is something at `path` that is not to be replaced, or it cannot be written.
    """
    partial, destination = begin_folder(path, overwrite=overwrite, kind=kind, is_kind=is_kind)
    with removed_on_error(path, partial):
        clear(partial)
        yield partial
        finish_folder(partial, destination)


@contextmanager
def removed_on_error(path: str | Path, partial: Path) -> Iterator[None]:
    """Removes `partial` if something is raised; what the disk or its driver says is a CheckpointError of one line."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        found = _DISK.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if isinstance(error, CheckpointError) or number is None:
            raise
        why = "the disk is full" if number in _FULL else os.strerror(number)
        raise CheckpointError(f"{path}: cannot be written, and nothing is left of it: {why}") from error


def need_space(path: str | Path, size_bytes: int) -> None:
    """Refuses to begin what the disk has no room for.

    Raises:
        CheckpointError: There is less than that free.
    """
    place = Path(path).expanduser().absolute()
    free = shutil.disk_usage(next(parent for parent in place.parents if parent.is_dir())).free
    if free < size_bytes:
        raise CheckpointError(f"{path}: takes {size_bytes / 1e6:,.1f} MB, but the disk has {free / 1e6:,.1f} MB free")


def clear(partial: Path) -> None:
    """Makes `partial` an empty folder."""
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def finish_folder(partial: Path, destination: Path) -> None:
    """Renames `partial` to `destination`, which is replaced."""
    old = destination.with_name(f".{destination.name}.old")
    _remove(old)
    if destination.exists():
        destination.rename(old)
    partial.rename(destination)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
