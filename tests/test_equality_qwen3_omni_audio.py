"""The audio tower gives the same rows and gradients whatever the mesh, the strategy and the layout of the batch."""

import pytest

import jaxenc
from tests import equality

PADDED = (3, 6, 7, 8)  # heads or MLP do not divide over so many devices


@pytest.fixture(scope="module")
def clips(clips):
    """Ten windows: on eight rows of one, two have to be spread."""
    return [*clips, *clips]


@pytest.fixture(scope="module")
def reference(qwen_folder, clips):
    encoder = jaxenc.load(qwen_folder, dtype="float32")
    return encoder.encode_items(clips), equality.rows_and_gradients(encoder, clips)[1]


@equality.every_mesh
def test_qwen_audio(qwen_folder, clips, reference, mesh_shape):
    strategies, kinds = equality.check(qwen_folder, clips, reference, mesh_shape, tokens=1040, whole=104)
    # 20 heads divide over 1, 2, 4 and 5, not over 8
    assert ("tensor" in strategies) == (mesh_shape[1] in (1, 2, 4, 5))
    assert ("hybrid" in strategies) == (mesh_shape[1] in (4, 6, 8))
    # on one device all strategies are the same
    assert ("data" in strategies) == (mesh_shape[1] > 1)
    assert ("attention=pad, mlp=pad" in strategies) == (mesh_shape[1] in PADDED)
    assert not kinds or kinds == ["rows", "length", "rows and length"]


def test_an_item_alone_is_what_it_is_among_others(qwen_folder, clips, reference):
    encoder = jaxenc.load(qwen_folder, dtype="float32")
    for index in (0, 3, len(clips) - 1):
        alone = encoder.encode_items([clips[index]])[0]
        equality.assert_same(reference[0][index], alone, clips[index].name)
