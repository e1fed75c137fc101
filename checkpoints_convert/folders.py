"""Folders that are absent or whole: written beside their place under another name, then renamed."""

import shutil
from collections.abc import Callable
from pathlib import Path

from checkpoints_convert.errors import CheckpointError


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
