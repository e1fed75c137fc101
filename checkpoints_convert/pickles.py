"""PyTorch's own files (.bin, .pt, .pth): pickles, of which nothing but tensors is ever unpickled."""

import pickle
import re
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import NumpyArray
from checkpoints_convert.headers import Header, TensorInfo

if TYPE_CHECKING:
    import torch

SUFFIXES = (".bin", ".pt", ".pth")
# What torch has and NumPy has not, by torch's names, with an integer of the same size that both have.
_SAME_BITS = {
    "bfloat16": (ml_dtypes.bfloat16, "int16"),
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, "uint8"),
    "float8_e5m2": (ml_dtypes.float8_e5m2, "uint8"),
    "float8_e8m0fnu": (ml_dtypes.float8_e8m0fnu, "uint8"),
}
# Where a file holds more than tensors, they are under one of these.
_STATE_DICTS = ("state_dict", "model_state_dict", "model", "module")
_RESAVE = (
    "python -c \"import sys, torch, safetensors.torch as st; d = torch.load(sys.argv[1], map_location='cpu', "
    "weights_only=False); d = d.get('state_dict', d); st.save_file({k: v.clone().contiguous() for k, v in d.items() "
    'if isinstance(v, torch.Tensor)}, sys.argv[2])" '
)


class PickleFile:
    """A file that torch.save wrote.

    It is mapped, so that only tensors that are read come into memory (one in the format from before PyTorch 1.6 is read
    whole). Tensors that share memory or whose elements do not lie side by side are read as what they say.

    Args:
        path: Where it is.
        name: What the checkpoint calls it.
        etag: The hub's name of its content, where it is from there.

    Raises:
        CheckpointError: PyTorch is not there; the file is damaged; it holds no tensors by name; or its pickle wants
            more than tensors, which would be code that the file chooses.
    """

    def __init__(self, path: Path, name: str, *, etag: str = "") -> None:
        self.etag = etag
        self._arrays: dict[str, NumpyArray] = {}
        tensors: dict[str, TensorInfo] = {}
        faults: list[tuple[str, str]] = []
        for tensor, value in _state_dict(_load(path, name), name).items():
            try:
                array = _as_numpy(value)
            except (TypeError, RuntimeError) as error:
                reason = str(error).partition("\\n")[0]
                faults.append((tensor, f"{tensor} ({name}): a tensor that cannot be read: {reason}"))
                continue
            self._arrays[tensor] = array
            tensors[tensor] = TensorInfo(array.shape, array.dtype, name, 0, array.nbytes)
        size = path.stat().st_size
        self.header = Header(tensors, faults, file_bytes=size, expected_bytes=size)

    def read(self, name: str) -> NumpyArray:
        """One of its tensors, as a view on the mapped file."""
        return self._arrays[name]

    def read_into(self, name: str, out: NumpyArray, start: int) -> None:
        """Fills `out` with the tensor's elements from the `start`-th on."""
        np.copyto(out, self._arrays[name].reshape(-1)[start : start + out.size].reshape(out.shape))


def _load(path: Path, name: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{name}: is a pickle, which takes PyTorch to read: pip install 'jaxenc[torch]', or save it as safetensors"
        ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError, EOFError, OSError, AttributeError) as error:
        wanted = _more_wanted(path, str(error))
        if not wanted:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{name}: cannot be read as PyTorch's: {type(error).__name__}: {reason}") from error
        raise CheckpointError(
            f"{name}: is a pickle that wants {', '.join(wanted)}, which is more than tensors: unpickling it would run "
            f"code of its choice, so it is not read. If you trust where it is from, save it as safetensors: "
            f"{_RESAVE}{shlex.quote(str(path))} model.safetensors"
        ) from error


def _more_wanted(path: Path, message: str) -> list[str]:
    """The names of what a pickle imports beside tensors."""
    import torch

    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError):
        # The format from before PyTorch 1.6; then the first of them is in the refusal.
        return sorted(set(re.findall(r"(?:GLOBAL|global) ([\w.]+\.[\w.]+)", message)))


def _state_dict(content: object, name: str) -> Mapping[str, "torch.Tensor"]:
    import torch

    if isinstance(content, Mapping):
        for held in (content, *(content.get(key) for key in _STATE_DICTS)):
            if isinstance(held, Mapping):
                tensors = {str(key): value for key, value in held.items() if isinstance(value, torch.Tensor)}
                if tensors:
                    return tensors
    keys = f" of {', '.join(map(str, list(content)[:8]))}" if isinstance(content, Mapping) else ""
    raise CheckpointError(f"{name}: holds a {type(content).__name__}{keys}, not tensors by name")


def _as_numpy(tensor: "torch.Tensor") -> NumpyArray:
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype, stand_in = _SAME_BITS.get(str(tensor.dtype).removeprefix("torch."), (None, None))
    array = tensor.numpy() if stand_in is None else tensor.view(getattr(torch, stand_in)).numpy().view(dtype)
    array.flags.writeable = False
    return array
