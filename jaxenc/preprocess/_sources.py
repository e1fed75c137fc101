"""Where media come from: paths, bytes, file objects, arrays; and the libraries that read them."""

from __future__ import annotations

import io
import os
from importlib import import_module
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from jaxenc.errors import InputError

MediaFile = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


def require(module: str) -> ModuleType:
    """Import a media library, or say how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f'reading this input needs {module.split(".")[0]}: pip install "jaxenc[media]"') from error


def source_name(source: object, name: str | None) -> str:
    """What error messages call a source."""
    if name is not None:
        return name
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return "<bytes>"
    if is_array(source):
        return "<array>"
    label = getattr(source, "name", None) or getattr(source, "filename", None)
    return label if isinstance(label, str) else f"<{type(source).__name__}>"


def is_array(source: object) -> bool:
    """True for NumPy, JAX and (CPU) torch arrays."""
    return isinstance(source, np.ndarray) or hasattr(source, "__array__")


def as_array(source: object) -> np.ndarray:
    """A NumPy array; ml_dtypes floats (bfloat16, float8), which NumPy does not count as floating, as float32."""
    array = np.asarray(source)
    if array.dtype.kind == "V" and "float" in array.dtype.name:
        return array.astype(np.float32)
    return array


def open_source(source: object, name: str) -> str | io.BytesIO:
    """A path that exists, or the bytes, as the decoding libraries take them."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if not os.path.isfile(path):
            raise InputError(f"{name}: no such file")
        return path
    if hasattr(source, "read"):
        source = source.read()
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source)
    raise InputError(f"{name}: cannot read a {type(source).__name__}; give a path, bytes, a binary file or an array")


def open_container(file: str | io.BytesIO) -> Any:
    """A file as FFmpeg's container, from its start."""
    av: Any = require("av")
    if isinstance(file, io.BytesIO):
        file.seek(0)
    # Before 19, PyAV refuses a file for a title that is not UTF-8 unless told otherwise.
    return av.open(file, metadata_errors="replace") if int(av.__version__.split(".")[0]) < 19 else av.open(file)
