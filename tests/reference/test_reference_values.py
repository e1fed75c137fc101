"""The encoders against the originals' values in files, without PyTorch; the files against the originals, with it."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxenc
from tests.parity.compare import assert_float32_equal
from tests.reference.values import CASES, FOLDER, WITH_HIDDEN, load

NAMES = tuple(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_float32_rows_are_the_files(name: str, tmp_path: Path) -> None:
    values = load(name)
    items = list(map(item_of, values.items))
    tower = "vision" if isinstance(items[0], jaxenc.VisionItem) else "audio"
    encoder = jaxenc.load(values.checkpoint.write(tmp_path), tower=tower, dtype="float32")
    assert_float32_equal(encoder.encode_items(items), values.rows)


def item_of(given: Any) -> jaxenc.VisionItem | jaxenc.AudioItem:
    array, size = given if isinstance(given, tuple) else (given, None)
    return jaxenc.VisionItem(array, size) if isinstance(size, tuple) else jaxenc.AudioItem(array, frames=size)


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) < 1.5e6


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="the originals need PyTorch")
@pytest.mark.parametrize("name", NAMES)
def test_files_hold_what_the_originals_compute(name: str) -> None:
    from tests.reference.generate import generate

    values, encoded = load(name), generate(name)
    for stored, made in ((values.rows, encoded.rows), (values.hidden, encoded.hidden[:WITH_HIDDEN])):
        for ours, theirs in zip(stored, made, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)
