"""Attention by blocks: the sums of its definition, whatever shares the blocks, in memory that grows with the tokens."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxenc
from jaxenc.layers import blocks, implementations, softmax
from jaxenc.layers.blocks import BLOCK, block_attention, block_ranges
from jaxenc.layers.implementations import (
    IMPLEMENTATIONS,
    LONGEST,
    Task,
    attend_by_first,
    dense_attention,
)
from jaxenc.layers.schedule import schedule
from jaxenc.packing import Budget

HEADS, WIDTH = 3, 8


def segments_of(sizes, padding=0):
    return np.concatenate([np.full(size, i + 1) for i, size in enumerate(sizes)] + [np.zeros(padding)]).astype(np.int32)


def drawn(n, s, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((tokens, HEADS, WIDTH)).astype(dtype) for tokens in (n, s, s)]


def attend(q, k, v, own, others):
    ranges = jnp.asarray(block_ranges(own[None], others[None]))
    return block_attention(q, k, v, jnp.asarray(own), jnp.asarray(others), ranges[0])


def definition(q, k, v, own, others):
    """Query by query, in float64."""
    out = np.zeros(q.shape)
    for i in np.flatnonzero(own):
        seen = others == own[i]
        if seen.any():
            scores = np.einsum("hd,shd->hs", q[i].astype(float), k[seen].astype(float)) / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[i] = np.einsum("hs,shd->hd", weights / weights.sum(axis=1, keepdims=True), v[seen].astype(float))
    return out


# --- the numbers


@settings(max_examples=16, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    padding=st.integers(0, 40),
    order=st.randoms(use_true_random=False),
    at_once=st.sampled_from([blocks.AT_ONCE, (1,), (1, 2), (1, 3)]),
)
def test_each_query_meets_the_keys_of_its_segment_and_no_others(sizes, padding, order, at_once):
    own = segments_of(sizes, padding)
    # keys lie elsewhere than queries: those of what is spread come after those of the row
    numbers = [*range(1, len(sizes) + 1)]
    order.shuffle(numbers)
    others = np.concatenate([np.full(sizes[i - 1], i, np.int32) for i in numbers])
    q, k, v = drawn(len(own), len(others))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 16)
        patch.setattr(blocks, "AT_ONCE", at_once)
        out = attend(q, k, v, own, others)
    real = own > 0
    np.testing.assert_allclose(out[real], definition(q, k, v, own, others)[real], atol=2e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("sizes", [[1], [BLOCK], [BLOCK + 1], [700, 1, 300], [5] * 200], ids=str)
def test_odd_sizes_at_the_true_block_size(sizes):
    own = segments_of(sizes, padding=3)
    q, k, v = drawn(len(own), len(own))
    real = own > 0
    np.testing.assert_allclose(attend(q, k, v, own, own)[real], definition(q, k, v, own, own)[real], atol=2e-6)


def test_padding_gets_zero():
    own = segments_of([20], padding=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 16)
        out = np.asarray(attend(*drawn(50, 50), own, own))
    assert np.abs(out[:20]).min(axis=(1, 2)).all()
    assert (out[20:] == 0).all()


@pytest.mark.parametrize("at_once", [blocks.AT_ONCE, (1, 2)], ids=["as they are", "two at most"])
def test_gradients_are_those_of_the_definition(at_once):
    own = segments_of([50, 7, 33], padding=6)
    q, k, v = drawn(len(own), len(own))
    weight = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32) * (own > 0)[:, None, None]

    def dense(q, k, v):
        scores = jnp.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
        scores = jnp.where((own[:, None] == own) & (own > 0), scores, -1e9)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)

    def gradients(function):
        return jax.jit(jax.grad(lambda *qkv: jnp.sum(function(*qkv) * weight), argnums=(0, 1, 2)))(q, k, v)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 16)
        patch.setattr(blocks, "AT_ONCE", at_once)
        found = gradients(lambda *qkv: attend(*qkv, own, own))
    for one, expected in zip(found, gradients(dense), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


def test_bfloat16_sums_in_float32():
    own = segments_of([600])
    q, k, v = drawn(600, 600)
    v = np.abs(v)  # so that sums are large beside their terms
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    expected = definition(*(np.asarray(x, np.float32) for x in narrow), own, own)
    out = attend(*narrow, own, own)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-7)


def test_float32_sums_of_many_keys_err_about_as_much_as_pytorchs():
    if jax.devices()[0].platform != "cpu":
        pytest.skip("XLA's sums on CPU")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1500, 2, 64), np.float32)
    v += 1  # so that their means are large
    own = segments_of([1500])
    with jax.default_matmul_precision("highest"):
        out = jax.jit(lambda *qkv: attend(*qkv, own, own))(q, k, v)
    error = np.sqrt(np.mean((out - definition(q, k, v, own, own)) ** 2))
    assert error < 1.5 * 1.06e-7  # what torch 2.13's scaled_dot_product_attention errs here


def test_another_items_values_change_no_bit():
    own = segments_of([40, 60, 28], padding=12)
    q, k, v = drawn(len(own), len(own))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 16)
        run = jax.jit(lambda *qkv: attend(*qkv, own, own))
        before = np.asarray(run(q, k, v))
        for x in (q, k, v):
            x[own != 2] *= 1000
        after = np.asarray(run(q, k, v))
    assert (before[own == 2] == after[own == 2]).all()
    assert not np.allclose(before[own == 1], after[own == 1])


# --- the schedule


def met(ranges):
    return np.diff(ranges)[..., 0]


def test_blocks_of_other_items_are_not_computed():
    whole = segments_of([16 * BLOCK])
    cut = segments_of([BLOCK] * 16)
    # one item of 16 blocks needs 16 times the pairs of 16 items of one
    assert met(block_ranges(whole[None], whole[None])).sum() == 256
    assert met(block_ranges(cut[None], cut[None])).sum() == 16


def test_the_schedule_written_out(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    own = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0]], np.int32)
    # the first block holds item 1; the second items 1 and 2; the third item 2; the last padding, which meets nothing
    assert block_ranges(own, own).tolist() == [[[0, 2], [0, 3], [1, 3], [0, 0]]]


def test_each_part_has_its_own_blocks_and_one_shape():
    giant, small = segments_of([8 * BLOCK]), segments_of([BLOCK] * 8)
    both = np.stack([giant, small])
    assert met(block_ranges(both, both)).sum(axis=1).tolist() == [64, 8]
    empty = np.zeros_like(both)
    assert (block_ranges(empty, empty) == np.zeros((2, 8, 2))).all()


def test_a_spread_item_is_among_the_keys_of_every_part():
    # item 1 is spread over both rows; items 2 and 3 lie in one each
    segments = np.array([[2] * BLOCK + [1] * BLOCK, [3] * BLOCK + [1] * BLOCK], np.int32)
    arrays = schedule(segments, Budget(BLOCK, 2, BLOCK), window=None, parts=2)
    assert arrays["spread"].tolist() == [[1] * (2 * BLOCK)]
    # key blocks: 0 the row's own, 1 and 2 what is spread
    assert arrays["ranges"].tolist() == [[[0, 1], [1, 3]]] * 2


@pytest.mark.parametrize(("tokens", "expected"), [(1, {1}), (3 * BLOCK, {1, 2, 3}), (70 * BLOCK, {1, 2, 4, 16})])
def test_so_many_blocks_are_met_at_once(tokens, expected, monkeypatch):
    monkeypatch.setattr(blocks, "AT_ONCE", (1, 2, 4, 16) if tokens > 3 * BLOCK else blocks.AT_ONCE)
    widths = set()

    def made(dot, query, key, value, bias):
        widths.add(key.shape[1])
        return softmax.weighted(dot, query, key, value, bias)

    monkeypatch.setattr(blocks, "weighted", made)
    array = jax.ShapeDtypeStruct((tokens, HEADS, WIDTH), "float32")
    jax.eval_shape(block_attention, array, array, array, *[jax.ShapeDtypeStruct((tokens,), "int32")] * 2)
    size = blocks.cut(tokens, BLOCK)[1]
    assert widths == {width * size for width in expected}


def test_windows_need_no_blocks():
    segments = np.array([[1] * 8 + [2] * 8], np.int32)
    assert schedule(segments, Budget(16, 1), window=8, parts=1).keys() == {"segments"}


# --- memory


def held_bytes(tokens, *, gradient):
    """What the program holds beside its arguments and results."""
    run = lambda q, k, v, *arrays: block_attention(q, k, v, *arrays)  # noqa: E731
    if gradient:
        run = jax.grad(lambda q, *rest: block_attention(q, *rest).sum(), argnums=(0, 1, 2))
    floats = [jax.ShapeDtypeStruct((tokens, 16, 72), jnp.float32)] * 3
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens,), (tokens,), (-(-tokens // BLOCK), 2))]
    return jax.jit(run).lower(*floats, *ints).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_grows_with_the_tokens_and_not_with_their_pairs(gradient):
    small, large = (held_bytes(tokens, gradient=gradient) for tokens in (8192, 32768))
    assert large < 4.2 * small
    # all scores of 32,768 tokens and 16 heads are 68 GB
    assert large < 1.5e9


def test_products_have_the_precision_that_was_set_where_the_gradient_was_not_traced_yet():
    own = jnp.asarray(segments_of([8]))

    def loss(q, k, v):
        with jax.default_matmul_precision("highest"):
            return block_attention(q, k, v, own, own).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(*drawn(8, 8)))
    products = text.count("dot_general[")
    assert products >= 6
    assert text.count("Precision.HIGHEST, Precision.HIGHEST") == products


# --- implementations


def stretches(dtype=np.float32):
    """Three stretches of two segments and padding each."""
    own = np.stack([segments_of(sizes, padding=150 - sum(sizes)) for sizes in ([100, 30], [1, 149], [60, 5])])
    q, k, v = (np.stack(x) for x in zip(*(drawn(150, 150, seed, dtype) for seed in range(3)), strict=True))
    return q, k, v, own, own


def on_this_machine(name, dtype, windows=True):
    """The implementation, or a skipped test with what it says against this machine."""
    platform = jax.devices()[0].platform
    refusal = IMPLEMENTATIONS[name].refuses(Task(platform, jnp.dtype(dtype), WIDTH, 150, windows, spread=False))
    if refusal:
        pytest.skip(refusal)
    return IMPLEMENTATIONS[name].attend


every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@every_implementation
def test_every_implementation_gives_the_definition(name):
    dtype = jnp.bfloat16 if name == "cudnn" else jnp.float32
    attend = on_this_machine(name, dtype)
    *qkv, own, others = stretches()
    qkv = [jnp.asarray(x, dtype) for x in qkv]
    with jax.default_matmul_precision("highest"):
        out = np.asarray(jax.jit(attend)(*qkv, own, others), np.float32)
    expected = np.stack([definition(*(np.asarray(x[i], np.float32) for x in qkv), own[i], others[i]) for i in range(3)])
    atol = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(out[own > 0], expected[own > 0], atol=atol)
    assert np.isfinite(out).all()


@every_implementation
def test_no_implementation_lets_another_item_or_padding_in(name):
    dtype = jnp.bfloat16 if name == "cudnn" else jnp.float32
    run = jax.jit(on_this_machine(name, dtype))
    *qkv, own, others = stretches()
    before = np.asarray(run(*(jnp.asarray(x, dtype) for x in qkv), own, others), np.float32)
    for x in qkv:
        x[own != 2] *= 1000
    after = np.asarray(run(*(jnp.asarray(x, dtype) for x in qkv), own, others), np.float32)
    assert (before[own == 2] == after[own == 2]).all()
    assert not np.allclose(before[own == 1], after[own == 1])


@every_implementation
def test_gradients_of_every_implementation_are_those_of_dense(name):
    dtype = jnp.bfloat16 if name == "cudnn" else jnp.float32
    attend = on_this_machine(name, dtype)
    *qkv, own, others = stretches()
    weight = np.random.default_rng(1).standard_normal(qkv[0].shape).astype(np.float32) * (own > 0)[..., None, None]

    def gradients(function):
        loss = lambda *qkv: jnp.sum(function(*qkv, own, others).astype(jnp.float32) * weight)  # noqa: E731
        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(jnp.asarray(x, dtype) for x in qkv))

    for one, expected in zip(gradients(attend), gradients(dense_attention), strict=True):
        one, expected = (np.asarray(x, np.float32) for x in (one, expected))
        np.testing.assert_allclose(one, expected, atol=1e-5 if dtype == jnp.float32 else 5e-2)
        assert (one[own == 0] == 0).all()


@pytest.mark.parametrize("name", ["dense", "blocks"])
def test_head_by_head_as_before_jax_0_12(name, monkeypatch):
    monkeypatch.setattr(softmax, "BATCHED", (99,))
    monkeypatch.setattr(softmax, "ALONE", 0)
    jax.clear_caches()  # of what other tests traced
    assert "platform_index" in str(jax.make_jaxpr(IMPLEMENTATIONS[name].attend)(*stretches()))
    test_every_implementation_gives_the_definition(name)
    test_gradients_of_every_implementation_are_those_of_dense(name)


@pytest.mark.skipif(jax.__version_info__ < softmax.BATCHED, reason="XLA before jax 0.12 does not fuse attention")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "blocks"])
def test_scores_stay_in_the_cache(name, dtype):
    if jax.devices()[0].platform != "cpu":
        pytest.skip("what XLA fuses on CPU")
    x, own = jax.ShapeDtypeStruct((1, 1024, 16, 72), dtype), jax.ShapeDtypeStruct((1, 1024), "int32")
    text = jax.jit(IMPLEMENTATIONS[name].attend).lower(x, x, x, own, own).compile().as_text()
    written = [part for part in text.split("\n\n") if not part.startswith("%fused_computation")]
    assert any("ynn_fusion" in part for part in written)
    # no loop or product by itself writes scores of all heads
    scores = re.compile(r"= (f32|bf16)\[(1,)?16,\d+,(256|512|768|1024)\]\S* (fusion|dot|custom-call)")
    assert not [part for part in written if scores.search(part)]


def chosen(task, asked=None):
    return attend_by_first(task, asked, lambda name: name)


CPU = Task("cpu", jnp.dtype("bfloat16"), 72, tokens=1024, windows=False, spread=False)
GPU = replace(CPU, platform="gpu")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (CPU, "blocks"),
        (replace(CPU, windows=True, tokens=257), "blocks"),
        (replace(CPU, windows=True, tokens=LONGEST + 1), "blocks"),
        (replace(CPU, windows=True, tokens=104), "dense"),
        (replace(CPU, platform=None), "blocks"),
        (GPU, "cudnn"),
        (replace(GPU, windows=True, tokens=104, spread=True), "cudnn"),
        (replace(GPU, spread=True), "blocks"),
        (replace(GPU, tokens=LONGEST + 1), "blocks"),
        (replace(GPU, dtype=jnp.dtype("float32")), "blocks"),
        (replace(GPU, dtype=jnp.dtype("float32"), windows=True), "dense"),
        (replace(GPU, head_dim=140), "blocks"),
    ],
    ids=str,
)
def test_what_is_chosen_where_nothing_is_asked_for(task, expected, monkeypatch):
    monkeypatch.setattr(implementations, "find_spec", lambda name: None)  # without tokamax
    assert chosen(task) == expected


@pytest.mark.parametrize(
    ("asked", "task", "why"),
    [
        ("cudnn", CPU, "cuDNN is for NVIDIA GPUs, and this is cpu"),
        ("cudnn", replace(GPU, dtype=jnp.dtype("float32")), "takes bfloat16 and float16, not float32"),
        ("cudnn", replace(GPU, head_dim=140), "up to 128 channels, not of 140"),
        ("cudnn", replace(GPU, spread=True), "items are spread over rows"),
        ("tokamax", replace(GPU, tokens=8192), "a mask of 8192 x 8192 tokens"),
        ("tokamax", replace(GPU, tokens=1024), r'pip install "jaxenc\[tokamax\]"'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_says_why_and_the_next_one_is_taken(asked, task, why, caplog, monkeypatch):
    monkeypatch.setattr(implementations, "find_spec", lambda name: None if "pip" in why else object())
    implementations._warn.cache_clear()
    with caplog.at_level("WARNING"):
        other = chosen(task, asked)
        chosen(task, asked)
    assert other in ("blocks", "tokamax", "cudnn")
    assert other != asked
    (record,) = caplog.records  # once
    assert re.search(why, record.message)
    assert f"attention='{asked}'" in record.message


@pytest.mark.parametrize("name", ["dense", "blocks", "tokamax"])
@pytest.mark.parametrize(("folder", "items"), [("kimi_folder", "pictures"), ("qwen_folder", "clips")])
def test_an_encoder_gives_the_same_rows_with_every_implementation(name, folder, items, request):
    on_this_machine(name, jnp.float32)
    folder, items = (request.getfixturevalue(fixture) for fixture in (folder, items))
    mesh = jaxenc.make_mesh(data=1, model=3)
    settings = {"dtype": "float32", "budgets": [Budget(416, 3)]}
    expected = jaxenc.load(folder, **settings).encode_items(items)
    asked = jaxenc.load(folder, **settings, mesh=mesh, attention=name)
    for rows, one in zip(asked.encode_items(items), expected, strict=True):
        assert np.abs(rows - one).max() <= 1e-5 * np.abs(one).max()


def test_a_kernel_that_refuses_only_when_it_is_called_is_passed_over(caplog, monkeypatch):
    monkeypatch.setattr(implementations, "find_spec", lambda name: None)

    def attend(name):
        if name == "cudnn":
            raise NotImplementedError("these sizes are not supported")
        return name

    implementations._warn.cache_clear()
    with caplog.at_level("WARNING"):
        assert attend_by_first(GPU, "cudnn", attend) == "blocks"
    assert "NotImplementedError: these sizes are not supported" in caplog.text


def test_what_goes_wrong_in_other_implementations_is_no_refusal():
    def attend(name):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        attend_by_first(CPU, None, attend)


def test_an_implementation_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="attention is 'flash'; it can be 'dense', 'blocks', 'cudnn', "):
        jaxenc.from_config("whisper:tiny.en", attention="flash")
