"""Every encoder, converted, exported and loaded into its original in transformers: the tensors are identical."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.subjects import SUBJECTS
from checkpoints_convert import open_source
from checkpoints_convert.cli import app
from jaxenc import console
from jaxenc.loading import open_checkpoint
from tests.parity.originals import ORIGINALS


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_exported_is_the_same_model_in_transformers(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    checkpoint = subject.checkpoint(small=True)
    published = checkpoint.write(tmp_path / "published")
    tower = ["--tower", subject.config.modality, "--quiet"]
    assert console.run(app, ["convert", str(published), str(tmp_path / "converted"), *tower]) == 0
    mappings = open_checkpoint(tmp_path / "converted").config.mappings()
    expected, loaded = states(ORIGINALS[subject.original](checkpoint)), 0
    for layout in mappings:
        out = tmp_path / layout
        arguments = ["export", str(tmp_path / "converted"), str(out), "--layout", layout, "--max-shard-size", "30kB"]
        assert console.run(app, arguments) == 0
        source = open_source(out)
        exported = {tensor: np.array(source.read(tensor)) for tensor in source.names}
        assert not source.open(exported)
        for theirs, tensors in checkpoint.tensors.items():
            if not exported.keys() <= tensors.keys():
                continue
            for tensor, value in exported.items():
                assert str(value.dtype) == "bfloat16"
                np.testing.assert_array_equal(value.astype(np.float32), tensors[tensor], err_msg=tensor)
            # only blocks that no row depends on are not there
            left = {tensor: value for tensor, value in tensors.items() if tensor not in exported}
            assert all(tensor.startswith(mappings[layout].located(tensors).unused) for tensor in left)
            back = {tensor: exported.get(tensor, value).astype(np.float32) for tensor, value in tensors.items()}
            again = replace(checkpoint, tensors={**checkpoint.tensors, theirs: back})
            same(states(ORIGINALS[subject.original](again)), expected)
            loaded += 1
    assert loaded


def states(original: Any) -> list[dict[str, torch.Tensor]]:
    """The tensors of its modules, which it has loaded strictly."""
    make = getattr(original, "_model", None) or getattr(original, "model", None)
    if make is None:  # made with the first call, which needs something to encode
        with suppress(ValueError):
            original.run([], dtype="float32")
    modules = make("float32") if make else original._models["float32"]
    return [module.state_dict() for module in ([modules] if isinstance(modules, nn.Module) else modules)]


def same(ours: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            # of a whole model's language model, which makes no rows, the parameters are random
            if not name.startswith("language_model."):
                assert torch.equal(value, other[name]), name
