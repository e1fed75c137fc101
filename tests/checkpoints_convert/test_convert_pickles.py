"""PyTorch's own files: tensors come out bit for bit, and nothing else is ever unpickled."""

import builtins
import json
import os
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, mappings, open_source
from tests.checkpoints_convert import tiny

MAPPING = mappings.kimi_k25.mappings(**tiny.KIMI)["original"]


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def as_torch(torch, tensors):
    return {name: torch.from_numpy(value.view(np.int16)).view(torch.bfloat16) for name, value in tensors.items()}


@pytest.mark.parametrize("zipped", [True, False])
def test_every_dtype_and_layout_comes_out_as_it_is(tmp_path, torch, zipped):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    nan = torch.tensor([0x7FC1, 0x3F80, -1], dtype=torch.int16)  # a NaN with a payload of its own
    tensors = {
        "f32": base,
        "tied": base,
        "transposed": base.T,
        "strided": base[:, ::2],
        "offset": base[1:],
        "expanded": base[:, :1].expand(4, 3),
        "bf16": nan.view(torch.bfloat16),
        "bf16_transposed": base.to(torch.bfloat16).T,
        "f16": base.half(),
        "f8": torch.tensor([0x38, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(base + 1),
    }
    if not zipped:
        del tensors["f8"]  # PyTorch itself does not read it back from its older format
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    source = open_source(tmp_path / "a.pt")
    assert source.open(tensors) == []
    assert source.read("bf16").view(np.int16).tolist() == nan.tolist()
    if zipped:
        assert source.read("f8").dtype == ml_dtypes.float8_e4m3fn
    assert source.read("bf16_transposed").dtype == ml_dtypes.bfloat16
    for name, tensor in tensors.items():
        expected = tensor.detach().double().numpy()
        assert np.array_equal(source.read(name).astype(np.float64), expected, equal_nan=True), name
        assert source.info(name).shape == tuple(tensor.shape)
        out = np.empty(tensor.numel() // 2, source.info(name).dtype)
        source.read_into(name, out, start=1)
        taken = expected.reshape(-1)[1 : 1 + out.size]
        assert np.array_equal(out.astype(np.float64), taken, equal_nan=True), name
    with pytest.raises(ValueError, match="read-only"):
        source.read("f32")[0] = 1


def test_a_folder_with_an_index_of_pickles_opens_the_towers_files_alone(tmp_path, torch):
    tower = tiny.kimi_original()
    files = {"pytorch_model-00002-of-00003.bin": list(tower)[:20], "pytorch_model-00003-of-00003.bin": list(tower)[20:]}
    for file, names in files.items():
        torch.save(as_torch(torch, {name: tower[name] for name in names}), tmp_path / file)
    (tmp_path / "pytorch_model-00001-of-00003.bin").write_bytes(b"not opened")
    weight_map = {name: file for file, names in files.items() for name in names}
    weight_map["language_model.x"] = "pytorch_model-00001-of-00003.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    source = open_source(tmp_path)
    assert MAPPING.check(source) == []
    assert all(tiny.same_bits(source.read(name), value) for name, value in tower.items())
    assert source.sizes.keys() == files.keys()
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin", "b": "x.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'\.\./x\.bin': is not the path of a \.bin or \.pt or \.pth file"):
        open_source(tmp_path)


@pytest.mark.parametrize("wrapped", [lambda d: d, lambda d: {"epoch": 3, "state_dict": d}])
def test_pytorch_model_bin_of_a_folder_and_tensors_under_state_dict(tmp_path, torch, wrapped):
    torch.save(wrapped({"a": torch.ones(3)}), tmp_path / "pytorch_model.bin")
    torch.save({"a": torch.zeros(3)}, tmp_path / "optimizer.pt")
    source = open_source(tmp_path)
    assert list(source.names) == ["a"]
    assert source.read("a").tolist() == [1, 1, 1]


class Hostile:
    """Its pickle makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_wants_more_than_tensors_is_refused_by_name_and_never_run(tmp_path, torch, zipped):
    content = {"a": torch.ones(3), "args": Hostile(tmp_path / "made"), "path": pathlib.PurePosixPath("x")}
    torch.save(content, tmp_path / "a.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError) as error:
        open_source(tmp_path / "a.bin")
    assert not (tmp_path / "made").exists()
    (problem,) = error.value.problems
    assert problem.startswith("a.bin: is a pickle that wants ")
    assert f"{os.mkdir.__module__}.mkdir" in problem
    assert ("pathlib.PurePosixPath" in problem) == zipped  # the older format is refused at the first
    assert "save it as safetensors: python -c " in problem
    assert str(tmp_path / "a.bin") in problem


def test_the_command_in_the_refusal_works(tmp_path, torch, python):
    torch.save({"a": torch.ones(2, 3).T, "path": pathlib.PurePosixPath("x")}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError) as error:
        open_source(tmp_path / "a.bin")
    command = error.value.problems[0].partition('python -c "')[2]
    code, _, arguments = command.rpartition('" ')
    source, _ = arguments.split(" ")
    process = python("-c", code, source, str(tmp_path / "model.safetensors"))
    assert process.wait(60) == 0, process.stderr.read()
    assert open_source(tmp_path / "model.safetensors").read("a").shape == (3, 2)


def test_damaged_files_and_files_without_tensors_are_named(tmp_path, torch):
    torch.save({"a": torch.ones(1000)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole[:2000])
    for content, message in (
        (b"", "cannot be read as PyTorch's: EOFError"),
        (b"\x80junk", "cannot be read as PyTorch's"),
        (whole[:2000], "cannot be read as PyTorch's"),
    ):
        (tmp_path / "b.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"b\.pt: {message}"):
            open_source(tmp_path / "b.pt")
    torch.save({"lr": 0.1, "step": 3}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"c\.pt: holds a dict of lr, step, not tensors by name"):
        open_source(tmp_path / "c.pt")
    torch.save({"a": torch.ones(3), "s": torch.ones(3, 3).to_sparse()}, tmp_path / "d.pt")
    source = open_source(tmp_path / "d.pt")
    assert source.open(["a"]) == []
    assert source.open(["s"])[0].startswith("s (d.pt): a tensor that cannot be read: ")


def test_without_pytorch_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.pt").write_bytes(b"")
    real = builtins.__import__

    def without_torch(name, *args, **kwargs):
        if name.partition(".")[0] == "torch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(CheckpointError, match=r"a\.pt: is a pickle, .*pip install 'jaxenc\[torch\]'"):
        open_source(tmp_path / "a.pt")
