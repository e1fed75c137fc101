"""Odd calls: nothing, one small thing on many devices, very long things, and two thousand of any size."""

import math

import jax
import numpy as np
import pytest

import jaxenc
from jaxenc import InputError
from tests.test_encoder import assert_close, counted_compilations

MESHES = [(1, 1), (1, 8), (8, 1), (2, 4)]
every_mesh = pytest.mark.parametrize("shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
RNG = np.random.default_rng(11)


def loaded(folder, shape, **settings):
    return jaxenc.load(folder, mesh=jaxenc.make_mesh(data=shape[0], model=shape[1]), dtype="float32", **settings)


def picture(t, h, w, rng=RNG):
    return jaxenc.VisionItem(rng.standard_normal((t * h * w, 588), np.float32), (t, h, w))


def clip(frames, rng=RNG):
    return jaxenc.AudioItem(rng.standard_normal((32, frames), np.float32))


# --- few


@every_mesh
def test_nothing_gives_nothing_and_compiles_nothing(kimi_folder, shape):
    encoder = loaded(kimi_folder, shape)
    assert encoder.encode(images=[]) == encoder.encode_items([]) == []
    assert list(encoder.encode(images=iter([]))) == list(encoder.encode_items(iter([]))) == []
    assert encoder.compiled == {}


@pytest.mark.parametrize("strategy", ["tensor", "data"])
def test_fewer_items_than_devices(kimi_folder, strategy):
    alone = loaded(kimi_folder, (1, 1))
    eight = loaded(kimi_folder, (1, 8), strategy=strategy)
    # the smallest that this tower takes: four patches, which become one row
    items = [picture(1, 2, 2), picture(4, 10, 6), picture(1, 2, 40)]
    for count in (1, 3):
        for rows, item in zip(eight.encode_items(items[:count]), items, strict=False):
            assert rows.shape == (alone.config.output_rows(item), 24)
            assert_close(rows, alone.encode_items([item])[0])


def test_a_patch_alone_is_less_than_this_tower_takes(kimi_folder):
    with pytest.raises(InputError, match=r"item 0: the grid is \(1, 1, 1\); expected .* multiples of 2"):
        loaded(kimi_folder, (1, 1)).encode_items([picture(1, 1, 1)])


@every_mesh
def test_recordings_at_the_edges_of_chunks_and_windows(qwen_folder, shape):
    encoder, alone = loaded(qwen_folder, shape), loaded(qwen_folder, (1, 1))
    frames = [1, 99, 100, 101, 799, 800, 801, 1600]
    items = [clip(n) for n in frames]
    found = encoder.encode_items(items)
    # 13 tokens a second; 99 frames are halved three times: 50, 25, 13
    assert [len(rows) for rows in found] == [1, 13, 13, 14, 104, 104, 105, 208]
    for rows, item in zip(found, items, strict=True):
        assert_close(rows, alone.encode_items([item])[0])


def test_less_than_ten_milliseconds_of_sound_is_an_error_with_the_number(qwen_folder):
    encoder = loaded(qwen_folder, (1, 1))
    with pytest.raises(InputError, match="159 samples are shorter than one frame"):
        encoder.encode(audio=[np.zeros(159, np.float32)])
    assert encoder.encode(audio=[np.zeros(160, np.float32)])[0].shape == (1, 24)


# --- much


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=["1x1", "2x4"])
def test_half_an_hour_of_speech_is_its_windows_one_by_one(qwen_folder, shape):
    encoder = loaded(qwen_folder, shape)
    item = clip(180_000)
    (rows,) = encoder.encode_items([item])
    assert rows.shape == (30 * 60 * 13, 24)
    for start in (0, 90_400, 179_200):
        (part,) = encoder.encode_items([jaxenc.AudioItem(item.mel[:, start : start + 800])])
        first = start // 100 * 13
        assert_close(rows[first : first + 104], part)


@pytest.mark.parametrize("shape", [(1, 1), (1, 8)], ids=["1x1", "1x8"])
def test_more_patches_in_a_call_than_any_budget_takes(kimi_folder, shape):
    # replicated weights, so that eight rows share the batch
    encoder = loaded(kimi_folder, shape, strategy="data")
    items = [picture(1, 32, 32) for _ in range(70)] + [picture(1, 2, 2)]
    assert sum(len(item.patches) for item in items) > 65_536
    found = encoder.encode_items(items)
    assert [len(rows) for rows in found] == [256] * 70 + [1]
    for i in (0, 37, 69, 70):
        assert_close(found[i], encoder.encode_items([items[i]])[0])


@pytest.mark.parametrize("shape", [(1, 1), (1, 8)], ids=["1x1", "1x8"])
def test_an_item_longer_than_every_budget_gets_one_and_a_given_ladder_does_not_grow(kimi_folder, shape):
    given = loaded(kimi_folder, shape, strategy="data", budgets=[jaxenc.Budget(64, shape[1])])
    long = picture(4, 8, 8)
    with pytest.raises(InputError, match="256 tokens attend together"):
        given.encode_items([long])
    assert len(given.budgets) == 1


@every_mesh
def test_forty_frames_are_ten_chunks_with_their_times(kimi_folder, shape):
    encoder = loaded(kimi_folder, shape)
    frames = np.random.default_rng(2).integers(0, 256, (40, 28, 56, 3), np.uint8)
    (rows,), (about,) = encoder.encode(videos=[(frames, 2.0)]), encoder.output_rows(videos=[(frames, 2.0)])
    assert about.grids == ((4, 2, 4),) * 10
    assert about.timestamps == tuple(2.0 * i for i in range(10))
    # frames are averaged: two rows a chunk
    assert rows.shape == (20, 24)
    (first,) = encoder.encode(videos=[(frames[:4], 2.0)])
    assert_close(rows[:2], first)


# --- programs


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=["1x1", "2x4"])
def test_two_thousand_pictures_of_any_size_cause_at_most_eight_compilations(kimi_folder, shape):
    rng = np.random.default_rng(4)
    encoder = loaded(
        kimi_folder,
        shape,
    )
    grids = [(int(rng.integers(1, 5)), *(2 * rng.integers(1, 7, 2)).tolist()) for _ in range(2000)]
    grids[17], grids[600], grids[1999] = (1, 96, 96), (4, 40, 40), (1, 2, 400)
    patches = rng.standard_normal((max(map(math.prod, grids)), 588), np.float32)
    stream = (jaxenc.VisionItem(patches[: math.prod(grid)], grid) for grid in grids)
    with counted_compilations() as compilations:
        rows = [len(found) for found in encoder.encode_items(stream)]
        # and calls of a few, of one, and one cut in layouts of all kinds
        for layout in ("rows", "length", "auto"):
            encoder.encode_items([picture(1, 4, 6), picture(3, 2, 2)], layout=layout)
        encoder.encode_items([picture(1, 2, 2)])
    assert rows == [h * w // 4 for _, h, w in grids]
    assert len(compilations) == len(encoder.compiled) <= 8
    assert len(encoder.budgets) <= 8
    assert set(encoder.compiled) <= set(encoder.budgets)


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=["1x1", "2x4"])
def test_two_thousand_recordings_of_any_length_cause_at_most_eight_compilations(qwen_folder, shape):
    rng = np.random.default_rng(5)
    encoder = loaded(qwen_folder, shape)
    frames = np.exp(rng.uniform(np.log(10), np.log(3000), 2000)).astype(int)
    mel = rng.standard_normal((32, 3000), np.float32)
    with counted_compilations() as compilations:
        rows = [len(found) for found in encoder.encode_items(jaxenc.AudioItem(mel[:, :n]) for n in frames)]
    assert rows == [encoder.config.tokens(int(n)) for n in frames]
    assert len(compilations) == len(encoder.compiled) <= 8


def test_the_memory_of_a_budget_is_known_and_linear_before_it_runs(kimi_folder):
    encoder = loaded(
        kimi_folder, (1, 8), budgets=[jaxenc.Budget(length, 1) for length in (2048, 8192, 32_768, 131_072)]
    )
    short, small, middle, large = map(encoder.memory, encoder.budgets)
    assert short > encoder.plan.param_bytes_per_device
    # the slope is that of the arrays of tokens: all scores of 131,072 tokens and 2 heads would be 137 GB
    # (buffers of blocks and of tokens share memory in other ways at other lengths)
    assert large - middle < 6 * (middle - small)
    assert middle < 100e6
    assert large < 400e6
    assert short < 20e6


def test_programs_are_kept_in_jaxs_persistent_cache(kimi_folder, tmp_path):
    hits = []

    def listen(name, **_):
        if name == "/jax/compilation_cache/cache_hits":
            hits.append(name)

    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    jax.monitoring.register_event_listener(listen)
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
        budget = jaxenc.Budget(64, 1)
        first, again = (loaded(kimi_folder, (1, 1), budgets=[budget]) for _ in range(2))
        first.warmup()
        assert hits == []
        again.warmup()
        assert len(hits) == 1
        item = picture(1, 4, 4)
        np.testing.assert_array_equal(first.encode_items([item])[0], again.encode_items([item])[0])
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
