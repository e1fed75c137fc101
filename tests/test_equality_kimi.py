"""Kimi's tower gives the same rows and gradients whatever the mesh, the strategy and the layout of the batch."""

import pytest

import jaxenc
from tests import equality

PADDED = (3, 5, 6, 7)  # heads or MLP do not divide over so many devices


@pytest.fixture(scope="module")
def reference(kimi_folder, pictures):
    encoder = jaxenc.load(kimi_folder, dtype="float32")
    return encoder.encode_items(pictures), equality.rows_and_gradients(encoder, pictures)[1]


@equality.every_mesh
def test_kimi(kimi_folder, pictures, reference, mesh_shape):
    strategies, kinds = equality.check(kimi_folder, pictures, reference, mesh_shape, tokens=292, whole=40)
    # 16 heads divide over 1, 2, 4 and 8; a part of 6, 8 and 4 does
    assert ("tensor" in strategies) == (mesh_shape[1] in (1, 2, 4, 8))
    assert ("hybrid" in strategies) == (mesh_shape[1] in (4, 6, 8))
    # on one device all strategies are the same
    assert ("data" in strategies) == (mesh_shape[1] > 1)
    assert ("attention=pad, mlp=pad" in strategies) == (mesh_shape[1] in PADDED)
    assert not kinds or kinds == ["rows", "length", "rows and length"]


def test_an_item_alone_is_what_it_is_among_others(kimi_folder, pictures, reference):
    encoder = jaxenc.load(kimi_folder, dtype="float32")
    for index in (0, 3, len(pictures) - 1):
        alone = encoder.encode_items([pictures[index]])[0]
        equality.assert_same(reference[0][index], alone, pictures[index].name)
