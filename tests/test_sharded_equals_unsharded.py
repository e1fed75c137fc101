"""The same items give the same rows whatever the mesh and the strategy."""

import numpy as np
import pytest

import jaxenc
from sharding_rules import IndivisibleAxisError

MESHES = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8), (2, 4), (8, 1)]
STRATEGIES = [
    "tensor",
    "hybrid",
    "data",
    "replicate",
    {"attention": "replicate", "mlp": "tensor"},
    {"attention": "tensor", "mlp": "replicate", "projector": "replicate"},
]


def valid_strategies(folder, mesh):
    """What the plan can do on this mesh; encoders whose weights are in place."""
    for strategy in STRATEGIES:
        try:
            yield jaxenc.load(folder, mesh=mesh, dtype="float32", strategy=strategy)
        except IndivisibleAxisError:
            continue


@pytest.fixture(scope="module")
def kimi_rows(kimi_folder, pictures):
    return jaxenc.load(kimi_folder, dtype="float32").encode_items(pictures)


@pytest.fixture(scope="module")
def qwen_rows(qwen_folder, clips):
    return jaxenc.load(qwen_folder, dtype="float32").encode_items(clips)


def assert_same_rows(folder, items, one, mesh_shape):
    """Returns the strategies tried."""
    mesh = jaxenc.make_mesh(data=mesh_shape[0], model=mesh_shape[1])
    tried = []
    for encoder in valid_strategies(folder, mesh):
        tried.append(encoder.plan.strategy)
        rows = encoder.encode_items(items)
        for item, expected, got in zip(items, one, rows, strict=True):
            assert got.shape == expected.shape
            worst = np.abs(got - expected).max() / np.abs(expected).max()
            assert worst <= 1e-5, f"{item.name} with {encoder.plan.strategy} on {mesh_shape}: {worst:.1e}"
    assert {"data", "replicate"} <= set(tried)
    return tried


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_kimi(kimi_folder, pictures, kimi_rows, mesh_shape):
    tried = assert_same_rows(kimi_folder, pictures, kimi_rows, mesh_shape)
    # 16 heads divide over 1, 2, 4 and 8; a part of 6, 8 and 4 does
    assert ("tensor" in tried) == (mesh_shape[1] in (1, 2, 4, 8))
    assert ("hybrid" in tried) == (mesh_shape[1] in (4, 6, 8))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_qwen_audio(qwen_folder, clips, qwen_rows, mesh_shape):
    tried = assert_same_rows(qwen_folder, clips, qwen_rows, mesh_shape)
    # 20 heads divide over 1, 2 and 4, not over 8
    assert ("tensor" in tried) == (mesh_shape[1] in (1, 2, 4))
    assert ("hybrid" in tried) == (mesh_shape[1] in (4, 6, 8))


def test_an_item_alone_is_what_it_is_among_others(kimi_folder, pictures, kimi_rows, qwen_folder, clips, qwen_rows):
    for folder, items, rows in ((kimi_folder, pictures, kimi_rows), (qwen_folder, clips, qwen_rows)):
        encoder = jaxenc.load(folder, dtype="float32")
        for index in (0, 3, len(items) - 1):
            alone = encoder.encode_items([items[index]])[0]
            np.testing.assert_allclose(rows[index], alone, atol=1e-5 * np.abs(alone).max(), rtol=0)
