"""What an item becomes depends on the item alone: on every mesh, whatever its batch-mates, place and padding.

To the bit in one program at one position, whatever the others hold; within 1e-5 elsewhere; and no gradient is touched.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxenc
from jaxenc.layers import blocks
from jaxenc.layers.parameters import flatten
from jaxenc.models import whisper
from tests import equality

WHISPER = whisper.Config(2, 48, 6, 64, mel=8, positions=24)
FAMILIES = ["kimi", "qwen", "whisper"]
every_family = pytest.mark.parametrize("family", FAMILIES)
POISON = [np.nan, np.inf, -np.inf, 3e38]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Items of some dozens of tokens then share blocks, and reach over several."""
    monkeypatch.setattr(blocks, "BLOCK", 16)


@pytest.fixture(scope="module")
def recordings():
    rng = np.random.default_rng(9)
    return [jaxenc.AudioItem(rng.standard_normal((8, 48)).astype(np.float32), name=f"{i}") for i in range(5)]


class Family:
    """Encoders of one family with the same weights, and items for them."""

    def __init__(self, family, folder, items):
        self.family, self.folder, self.items = family, folder, items
        # room for all of them, and items of so many tokens may lie in rows
        self.tokens, self.whole = {"kimi": (292, 40), "qwen": (5 * 104, 104), "whisper": (5 * 24, 24)}[family]

    def encoder(self, shape, which=-1):
        """On a mesh; with one budget that has whole items and spread ones, where there are several rows."""
        mesh = jaxenc.make_mesh(data=shape[0], model=shape[1])
        if self.family == "whisper":
            made = jaxenc.from_config(WHISPER, mesh=mesh, dtype="float32")
        else:
            made = jaxenc.load(self.folder, mesh=mesh, dtype="float32")
        return [encoder for _, encoder in equality.layouts(made, self.tokens, self.whole)][which]

    def alone(self):
        """The rows of each item by itself on one device."""
        encoder = self.encoder((1, 1))
        return [encoder.encode_items([item])[0] for item in self.items]


@pytest.fixture(scope="module")
def families(kimi_folder, qwen_folder, pictures, clips, recordings):
    made = [("kimi", kimi_folder, pictures), ("qwen", qwen_folder, clips[:5]), ("whisper", None, recordings)]
    return {name: Family(name, folder, items) for name, folder, items in made}


@pytest.fixture(scope="module")
def expected(families):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 16)
        return {name: family.alone() for name, family in families.items()}


def louder(item):
    """The same item, a thousand times as loud."""
    if isinstance(item, jaxenc.VisionItem):
        return replace(item, patches=1000 * item.patches)
    return replace(item, mel=1000 * item.mel)


def poisoned(batch, value):
    """Everything that no item has put into the batch holds this value."""
    inputs = {name: np.array(array) for name, array in batch.inputs.items()}
    if "frames" in inputs:  # mel [parts, chunks, rows, mel, frames]
        real = np.arange(inputs["mel"].shape[-1]) < inputs["frames"][..., None, None]
        inputs["mel"][np.broadcast_to(~real, inputs["mel"].shape)] = value
    else:
        inputs["patches" if "patches" in inputs else "mel"][inputs["segments"] == 0] = value
    return replace(batch, inputs=inputs)


@every_family
@equality.every_mesh
def test_to_the_bit_whatever_batch_mates_and_padding_hold(families, family, mesh_shape):
    family = families[family]
    encoder, items = family.encoder(mesh_shape), family.items
    batch = encoder.pack(items)
    run = jax.jit(encoder.apply)

    def rows(batch):
        return encoder.unpack(run(encoder.params, batch), batch)

    before = rows(batch)
    for kept in (0, len(items) - 1):
        others = [item if i == kept else louder(item) for i, item in enumerate(items)]
        after = rows(encoder.pack(others))
        np.testing.assert_array_equal(after[kept], before[kept])
        assert not np.allclose(after[1], before[1], rtol=1e-3)
    for value in POISON:
        for one, other in zip(rows(poisoned(batch, value)), before, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{value} in the padding")


@every_family
@equality.every_mesh
def test_whatever_the_number_order_and_place_of_batch_mates(families, expected, family, mesh_shape):
    alone, family = expected[family], families[family]
    encoder, items = family.encoder(mesh_shape), family.items
    rng = np.random.default_rng(3)
    for _ in range(4):
        chosen = rng.permutation(len(items))[: rng.integers(1, len(items) + 1)]
        for i, rows in zip(chosen, encoder.encode_items([items[i] for i in chosen]), strict=True):
            equality.assert_same(rows, alone[i], f"{items[i].name} among {chosen}")


@every_family
@pytest.mark.parametrize("mesh_shape", [(1, 1), (1, 3), (2, 4)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_gradients_do_not_see_the_padding(families, family, mesh_shape):
    family = families[family]
    encoder = family.encoder(mesh_shape)
    batch = encoder.pack(family.items)

    # the same program, with less time spent on its machine code
    @jax.jit(compiler_options={"xla_backend_optimization_level": 0})
    def slopes(params, batch):
        valid = (batch.rows.item >= 0)[..., None]
        return jax.grad(lambda params: jnp.sum(jnp.where(valid, encoder.apply(params, batch), 0) ** 2))(params)

    before = flatten(slopes(encoder.params, batch))
    # a bias of the keys moves all scores of a query alike: its gradient is rounding only
    assert all(np.abs(slope).max() > 0 for path, slope in before.items() if not path.endswith("key/bias"))
    for value in POISON:
        for path, slope in flatten(slopes(encoder.params, poisoned(batch, value))).items():
            assert np.isfinite(slope).all(), f"{path}, {value} in the padding"
            np.testing.assert_array_equal(slope, before[path], err_msg=f"{path}, {value} in the padding")
