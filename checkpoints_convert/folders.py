"""Folders that are absent or whole: written beside their place under another name, then renamed."""

import shutil
from pathlib import Path

from checkpoints_convert.errors import CheckpointError


def begin_folder(path: str | Path, *, overwrite: bool) -> tuple[Path, Path]:
    """Where to write, and where that goes in the end; makes nothing.

    The name of the first is the same in every process, and what a killed run left there is cleared away by `clear`.

    Raises:
        CheckpointError: There is something at `path` and it is not to be overwritten.
    """
    destination = Path(path).expanduser().absolute()
    if destination.exists() and not overwrite:
        raise CheckpointError(f"{path}: exists already; overwrite it explicitly, or choose another place")
    return destination.with_name(f".{destination.name}.partial"), destination


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
