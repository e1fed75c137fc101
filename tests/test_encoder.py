"""The public API: files, arrays and items in, rows out; on any mesh, inside the caller's own jit, grad and set_mesh."""

import contextlib
import logging
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from PIL import Image

import jaxenc
from jaxenc import Budget, InputError
from jaxenc.layers.parameters import declared, flatten
from jaxenc.models import abstract_module, whisper
from tests.conftest import KIMI
from tests.devices import eight

SPEECH = "jaxenc/assets/sense_and_sensibility.flac"
# recordings of two seconds
WHISPER = whisper.Config(2, 48, 6, 64, mel=80, positions=100)


# --- shared encoders: every program compiled here is compiled once


@pytest.fixture(scope="module")
def kimi(kimi_folder):
    return jaxenc.load(kimi_folder, dtype="float32")


@pytest.fixture(scope="module")
def kimi_rows(kimi, pictures):
    return kimi.encode_items(pictures)


@pytest.fixture(scope="module")
def kimi_8(kimi_folder):
    """Weights over all eight devices."""
    encoder = jaxenc.load(kimi_folder, mesh=jaxenc.make_mesh(data=1, model=8), dtype="float32")
    assert encoder.plan.strategy == "tensor"
    return encoder


@pytest.fixture(scope="module")
def qwen(qwen_folder):
    return jaxenc.load(qwen_folder, dtype="float32")


@pytest.fixture(scope="module")
def qwen_8(qwen_folder):
    """Weights over four devices, the batch over two."""
    encoder = jaxenc.load(qwen_folder, mesh=jaxenc.make_mesh(data=1, model=8), dtype="float32")
    assert encoder.plan.strategy == "hybrid"
    return encoder


def with_noise(encoder, seed=3):
    """Every parameter random, so that no bias is zero and no scale one."""
    rng = np.random.default_rng(seed)
    noisy = {k: np.asarray(v) + 0.1 * rng.standard_normal(v.shape) for k, v in flatten(encoder.params).items()}
    return encoder.with_params(noisy)


@pytest.fixture(scope="module")
def listener():
    return with_noise(jaxenc.from_config(WHISPER))


@pytest.fixture(scope="module")
def photo():
    return np.random.default_rng(0).integers(0, 256, (60, 88, 3), np.uint8)


@pytest.fixture(scope="module")
def video():
    """Nine frames at two a second: chunks of four, four and one."""
    return np.random.default_rng(1).integers(0, 256, (9, 28, 56, 3), np.uint8), 2.0


@pytest.fixture(scope="module")
def waveform():
    """1.7 seconds: one full chunk and a part of one."""
    return np.random.default_rng(2).standard_normal(27_200).astype(np.float32) * 0.1


def assert_close(got, expected, tolerance=1e-5):
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    assert got.shape == expected.shape
    worst = np.abs(got - expected).max() / np.abs(expected).max()
    assert worst <= tolerance, f"{worst:.1e} of the largest value"


def assert_same(got, expected):
    """Lists of arrays, equal to the bit."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@contextlib.contextmanager
def counted_compilations():
    """A list that grows by one for every program that XLA compiles."""
    names, counting = [], True

    def listen(name, duration, **_):
        if counting and name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        counting = False


# --- encode


def test_a_picture_is_the_same_as_path_bytes_pil_and_array(kimi, photo, tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(photo).save(path)
    rows = kimi.encode(images=[path, str(path), path.read_bytes(), Image.fromarray(photo), photo, photo / 255.0])
    # 60 x 88 pixels pad to 84 x 112, 6 x 8 patches, 3 x 4 groups
    assert [r.shape for r in rows] == [(12, 24)] * 6
    for other in rows[1:]:
        assert_close(other, rows[0])


def test_results_are_numpy_of_the_encoders_dtype_in_input_order(kimi, photo):
    sizes = [(28, 28), (140, 140), (28, 84), (56, 56)]
    images = [photo[:h, :w] if h <= 60 and w <= 88 else np.tile(photo, (3, 2, 1))[:h, :w] for h, w in sizes]
    together = kimi.encode(images=images)
    assert [r.shape[0] for r in together] == [1, 25, 3, 4]
    assert all(type(r) is np.ndarray and r.dtype == np.float32 and r.shape[1] == 24 for r in together)
    for image, expected in zip(images, together, strict=True):
        assert_close(kimi.encode(images=[image])[0], expected)


def test_an_empty_call_gives_an_empty_list(kimi):
    assert kimi.encode(images=[]) == []
    assert kimi.encode_items([]) == []
    assert kimi.output_rows(images=[]) == []


def test_a_generator_is_as_good_as_a_list(kimi, photo):
    assert_same(list(kimi.encode(images=(image for image in [photo]))), kimi.encode(images=[photo]))


def test_a_videos_rows_are_those_of_its_chunks_one_after_the_other(kimi, video):
    (rows,) = kimi.encode(videos=[video])
    frames, _ = video
    # 2 x 4 patches a frame, so 2 rows a chunk however many frames it has
    assert rows.shape == (3 * 2, 24)
    chunks = kimi.encode(videos=[(frames[:4], 2.0), (frames[4:8], 2.0), (frames[8:], 2.0)])
    assert_close(rows, np.concatenate(chunks))


def test_audio_is_the_same_as_array_and_as_array_with_its_rate(qwen, waveform):
    rows = qwen.encode(audio=[waveform, (waveform, 16_000), (np.stack([waveform, waveform]), 16_000.0)])
    # 170 frames: 13 tokens of the first 100, 9 of the other 70
    assert [r.shape for r in rows] == [(22, 24)] * 3
    assert_close(rows[1], rows[0])
    assert_close(rows[2], rows[0])


def test_audio_is_read_from_a_file_at_its_own_rate(qwen, tmp_path, waveform):
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "a.wav"
    soundfile.write(path, waveform, 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "fast.wav", np.repeat(waveform, 3), 48_000, subtype="FLOAT")
    rows = qwen.encode(audio=[path, waveform, tmp_path / "fast.wav"])
    assert_close(rows[0], rows[1])
    assert rows[2].shape == rows[0].shape


def test_whisper_gives_all_its_positions_however_short_the_recording(listener, waveform):
    short, long = listener.encode(audio=[waveform[:8000], np.tile(waveform, 2)[:32_000]])
    assert short.shape == long.shape == (100, 48)
    assert np.abs(short - long).max() > 0.1


def test_whispers_tokens_may_lie_in_any_order(listener):
    items = [jaxenc.AudioItem(np.random.default_rng(3).standard_normal((80, 200)).astype(np.float32))]
    batch = listener.pack(items)
    order = np.random.default_rng(4).permutation(100)
    moved = replace(batch, inputs={name: array[:, order] for name, array in batch.inputs.items()})
    assert_close(listener.apply(listener.params, moved), listener.apply(listener.params, batch)[:, order])


def test_bfloat16_gives_bfloat16_rows_near_the_float32_ones(kimi_folder, kimi, photo):
    encoder = jaxenc.load(kimi_folder, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(encoder.params)} == {np.dtype(ml_dtypes.bfloat16)}
    (rows,) = encoder.encode(images=[photo])
    assert type(rows) is np.ndarray
    assert rows.dtype == ml_dtypes.bfloat16
    assert_close(rows, kimi.encode(images=[photo])[0], tolerance=0.05)


def test_dtype_is_the_stored_one_where_it_is_not_given_and_others_are_refused(kimi_folder):
    assert jaxenc.load(kimi_folder).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype is 'float16'; encoders compute in float32 or bfloat16"):
        jaxenc.load(kimi_folder, dtype="float16")


def test_skip_puts_none_in_place_of_a_bad_one_and_loses_nothing_else(kimi, photo, tmp_path, caplog):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not a picture")
    images = [photo, bad, photo[:28, :28], np.zeros((0, 4, 3), np.uint8)]
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        rows = kimi.encode(images=images, on_error="skip")
    assert rows[1] is None
    assert rows[3] is None
    assert_same([rows[0], rows[2]], kimi.encode(images=[photo, photo[:28, :28]]))
    assert [str(bad) in message for message in caplog.messages] == [True, False]
    assert "images[3]" in caplog.messages[1]
    with pytest.raises(InputError, match=rf"^{bad}"):
        kimi.encode(images=images)


def test_skip_gives_only_none_where_all_are_bad(kimi):
    assert kimi.encode(images=[b"bad", b"worse"], on_error="skip") == [None, None]


# --- before encoding


def test_output_rows_are_known_before_encoding(kimi, qwen, listener, photo, video, waveform):
    assert kimi.output_rows(images=[photo, photo[:28, :28]]) == [
        jaxenc.ItemRows(rows=12, grids=((1, 6, 8),)),
        jaxenc.ItemRows(rows=1, grids=((1, 2, 2),)),
    ]
    # a chunk every four frames, two frames a second
    assert kimi.output_rows(videos=[video]) == [
        jaxenc.ItemRows(rows=6, grids=((4, 2, 4), (4, 2, 4), (1, 2, 4)), timestamps=(0.0, 2.0, 4.0))
    ]
    assert qwen.output_rows(audio=[waveform, waveform[:1600]]) == [jaxenc.ItemRows(22), jaxenc.ItemRows(2)]
    assert listener.output_rows(audio=[waveform]) == [jaxenc.ItemRows(100)]


def test_output_rows_are_what_encode_returns(kimi, qwen, photo, video, waveform):
    for encoder, kind, sources in (
        (kimi, "images", [photo, photo[:28, :28], photo[:57, :29]]),
        (kimi, "videos", [video, (video[0][:5], 2.0)]),
        (qwen, "audio", [waveform, waveform[:1600], np.tile(waveform, 6)]),
    ):
        expected = [found.rows for found in encoder.output_rows(**{kind: sources})]
        assert [len(rows) for rows in encoder.encode(**{kind: sources})] == expected


def test_preprocess_makes_the_items_that_encode_encodes(kimi, qwen, photo, video, waveform):
    items = kimi.preprocess(images=[photo])
    assert [(item.grid, item.patches.shape, item.patches.dtype, item.name) for item in items] == [
        ((1, 6, 8), (48, 588), np.float32, "images[0]")
    ]
    assert_same(kimi.encode_items(items), kimi.encode(images=[photo]))
    chunks = kimi.preprocess(videos=[video])
    assert [item.timestamp for item in chunks] == [0.0, 2.0, 4.0]
    assert_same([np.concatenate(kimi.encode_items(chunks))], kimi.encode(videos=[video]))
    clips = qwen.preprocess(audio=[waveform])
    assert [item.mel.shape for item in clips] == [(32, 170)]
    assert_same(qwen.encode_items(clips), qwen.encode(audio=[waveform]))


def test_preprocess_skips_bad_ones(kimi, photo):
    assert len(kimi.preprocess(images=[b"bad", photo], on_error="skip")) == 1


# --- pack, apply, unpack


def test_what_does_not_fit_one_batch_is_an_error_that_names_the_limit(kimi_folder, pictures):
    encoder = jaxenc.load(kimi_folder, budgets=[Budget(256, 1)])
    with pytest.raises(InputError, match=r"8 items of 512 tokens .* largest budget is 1 rows of 256 tokens"):
        encoder.pack([pictures[0]] * 8)
    big = jaxenc.VisionItem(np.zeros((512, 588), np.float32), (1, 16, 32), name="big.png")
    with pytest.raises(InputError, match=r"^big\.png: 512 tokens attend together, and the longest row holds 256"):
        encoder.pack([big])
    with pytest.raises(InputError, match="no items"):
        encoder.pack([])


def test_budgets_are_checked_against_the_plan(kimi_folder):
    mesh = jaxenc.make_mesh(data=2, model=1)
    encoder = jaxenc.load(kimi_folder, mesh=mesh, budgets=[Budget(512, 4), Budget(256, 2)])
    assert encoder.budgets == (Budget(256, 2), Budget(512, 4))
    with pytest.raises(ValueError, match=r"length=256, rows=3.*rows must be a multiple of 2"):
        jaxenc.load(kimi_folder, mesh=mesh, budgets=[Budget(256, 3)])
    assert jaxenc.load(kimi_folder, budgets=[Budget(256, 1), Budget(300, 1)]).budgets[1].length == 300
    with pytest.raises(ValueError, match=r"length=250.*the length of 4"):
        jaxenc.load(kimi_folder, budgets=[Budget(250, 1)])


@pytest.mark.parametrize("budget", [Budget(416, 8), Budget(104, 8, 104)], ids=["rows", "rows and length"])
def test_a_part_of_the_batch_may_have_several_rows(qwen, qwen_folder, clips, budget):
    # two parts of four rows, whose chunks lie on the devices in another order than in the rows
    encoder = jaxenc.load(
        qwen_folder, mesh=jaxenc.make_mesh(data=2, model=4), dtype="float32", strategy="tensor", budgets=[budget]
    )
    assert encoder.plan.rows_parts == 2
    for rows, one in zip(encoder.encode_items(clips), qwen.encode_items(clips), strict=True):
        assert_close(rows, one)


@pytest.mark.parametrize("which", ["kimi_8", "qwen_8"])
def test_pack_apply_unpack_inside_the_callers_own_jit_is_encode_items(which, request, pictures, clips):
    encoder = request.getfixturevalue(which)
    items = pictures if which.startswith("kimi") else clips
    batch = encoder.pack(items)

    @jax.jit
    def doubled(params, batch):
        return 2 * encoder.apply(params, batch)

    got = encoder.unpack(doubled(encoder.params, batch), batch)
    for rows, one in zip(got, encoder.encode_items(items), strict=True):
        assert_close(rows, 2 * one)


# --- capture


def test_captured_blocks_are_returned_by_number(kimi, pictures, kimi_rows):
    batch = kimi.pack(pictures)
    rows, captured = kimi.apply(kimi.params, batch, capture="all")
    assert sorted(captured) == [0, 1]
    for one, expected in zip(kimi.unpack(rows, batch), kimi_rows, strict=True):
        assert_close(one, expected)
    assert np.abs(np.asarray(captured[0]) - np.asarray(captured[1])).max() > 0.1
    # negative ones count from the end; shapes suffice here
    _, some = jax.eval_shape(lambda params: kimi.apply(params, batch, capture=(-2,)), kimi.params)
    assert {block: tokens.shape for block, tokens in some.items()} == {0: captured[0].shape}


def test_a_captured_block_is_the_output_of_a_shorter_tower(kimi, kimi_folder, pictures):
    # the same weights with the second block left out: its final norm reads what block 0 wrote
    params = flatten(kimi.params)
    cut = {path: value[:1] if path.startswith("layers/") else value for path, value in params.items()}
    short = jaxenc.from_config(replace(KIMI, layers=1)).with_params(cut)
    batch = kimi.pack(pictures)
    _, captured = kimi.apply(kimi.params, batch, capture="all")
    _, expected = short.apply(short.params, batch, capture="all")
    assert_same(kimi.unpack_tokens(captured[0], batch), short.unpack_tokens(expected[0], batch))


def test_captured_tokens_come_in_the_items_own_order_wherever_it_was_packed(kimi, pictures):
    batch = kimi.pack(pictures)
    _, captured = kimi.apply(kimi.params, batch, capture="all")
    expected = kimi.unpack_tokens(captured[0], batch)
    assert [tokens.shape for tokens in expected] == [(len(item.patches), 64) for item in pictures]
    # the longest goes first: every other item moves
    more = jaxenc.VisionItem(np.ones((120, 588), np.float32), (1, 10, 12))
    moved = kimi.pack([*pictures[4:], more, *pictures[:4]])
    assert moved.inputs["segments"].shape == batch.inputs["segments"].shape
    _, captured = kimi.apply(kimi.params, moved, capture="all")
    tokens = kimi.unpack_tokens(captured[0], moved)
    for one, other in zip([*tokens[:3], *tokens[4:]], [*expected[4:], *expected[:4]], strict=True):
        assert_close(one, other)


def test_captured_tokens_of_a_recording_longer_than_a_window_are_in_order(qwen, clips):
    long = clips[3]
    assert long.mel.shape[1] == 1050
    batch = qwen.pack([long])
    _, captured = qwen.apply(qwen.params, batch, capture=(1,))
    (tokens,) = qwen.unpack_tokens(captured[1], batch)
    # 10 chunks of 13 and 7 of the last 50 frames
    assert tokens.shape == (137, 80)
    first = qwen.pack([jaxenc.AudioItem(long.mel[:, :800])])
    _, captured = qwen.apply(qwen.params, first, capture=(1,))
    assert_close(qwen.unpack_tokens(captured[1], first)[0], tokens[:104])


@pytest.mark.parametrize("wrong", [(2,), (0, 5), (-3,)], ids=str)
def test_a_block_that_is_not_there_is_an_error_that_says_what_is(kimi, pictures, wrong):
    with pytest.raises(ValueError, match=r"capture=\[.*\]: kimi_k25 has blocks 0 to 1"):
        kimi.apply(kimi.params, kimi.pack(pictures[:1]), capture=wrong)


# --- parameters


def test_trained_parameters_go_back_in_where_the_plan_wants_them(kimi, kimi_8, pictures):
    trained = {path: np.asarray(value) * 1.25 for path, value in flatten(kimi.params).items()}
    other = kimi_8.with_params(unflatten_dict(trained, sep="/"))
    for path, value in flatten(other.params).items():
        assert value.sharding == kimi_8.plan.sharding(path), path
        np.testing.assert_array_equal(value, trained[path])
    expected = kimi.with_params(trained).encode_items(pictures)
    for rows, one in zip(other.encode_items(pictures), expected, strict=True):
        assert_close(rows, one)
    assert np.abs(expected[0] - kimi.encode_items(pictures)[0]).max() > 0.01


def test_other_parameters_need_no_other_program(kimi, pictures):
    kimi.encode_items(pictures)
    with counted_compilations() as compilations:
        kimi.with_params(kimi.params).encode_items(pictures)
    assert compilations == []


def test_parameters_that_do_not_fit_are_named_together(kimi):
    wrong = dict(flatten(kimi.params))
    del wrong["final_norm/scale"]
    wrong["final_norm/gain"] = np.ones(64)
    wrong["patch_embed/bias"] = np.ones(65)
    with pytest.raises(ValueError, match="parameters do not fit kimi_k25") as error:
        kimi.with_params(wrong)
    for problem in (
        "final_norm/scale is missing",
        "final_norm/gain is unknown",
        "patch_embed/bias is (65,), expected (64,)",
    ):
        assert problem in str(error.value)


@pytest.fixture(scope="module")
def saved(kimi_8, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "kimi"
    kimi_8.save(path)
    return path


@pytest.mark.parametrize("model", [1, 3, 6])
def test_what_eight_devices_saved_is_loaded_on_any_number(saved, kimi_8, model):
    encoder = jaxenc.load(saved, mesh=jaxenc.make_mesh(data=1, model=model))
    assert encoder.config == kimi_8.config
    assert encoder.dtype == jnp.float32
    expected = flatten(kimi_8.params)
    assert flatten(encoder.params).keys() == expected.keys()
    for path, value in flatten(encoder.params).items():
        assert value.sharding == encoder.plan.sharding(path), path
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


def test_save_does_not_overwrite_unless_told(saved, kimi):
    with pytest.raises(jaxenc.CheckpointError, match="exists already"):
        kimi.save(saved)


def test_a_converted_checkpoint_keeps_where_it_came_from(saved, kimi_folder):
    encoder = jaxenc.load(saved)
    assert encoder.provenance["source"] == str(kimi_folder)
    assert encoder.provenance["layout"] == "original"
    assert encoder.provenance["config"]["model_type"] == "kimi_k25"


def test_random_weights_are_the_same_on_every_mesh_and_differ_between_seeds():
    one = flatten(jaxenc.from_config(WHISPER, seed=4).params)
    for mesh in (jaxenc.make_mesh(data=1, model=6), jaxenc.make_mesh(data=2, model=2)):
        encoder = jaxenc.from_config(WHISPER, mesh=mesh, seed=4)
        for path, value in flatten(encoder.params).items():
            assert value.sharding == encoder.plan.sharding(path), path
            np.testing.assert_array_equal(value, one[path], err_msg=path)
    other = flatten(jaxenc.from_config(WHISPER, seed=5).params)
    same = [path for path in one if np.array_equal(one[path], other[path])]
    # only zeros and ones are
    assert all(path.endswith(("bias", "scale")) for path in same)
    assert declared(abstract_module(WHISPER, dtype="float32")).keys() == one.keys()


# --- where results live


def test_rows_go_where_out_sharding_says(kimi_8, pictures, photo):
    expected = kimi_8.encode_items(pictures)
    # on another mesh, of other devices, in another order: where a language model would be
    language = Mesh(np.array(eight()[::-1][:4]), ("tensor",))
    target = NamedSharding(language, PartitionSpec(None, "tensor"))
    got = kimi_8.encode_items(pictures, out_sharding=target)
    assert all(isinstance(rows, jax.Array) and rows.sharding == target for rows in got)
    assert_same(got, expected)
    # on one device of the encoder's own
    device = jax.sharding.SingleDeviceSharding(eight()[5])
    (rows,) = kimi_8.encode(images=[photo], out_sharding=device)
    assert rows.devices() == {eight()[5]}


def test_out_sharding_leaves_skipped_ones_none(kimi, photo):
    replicated = NamedSharding(Mesh(np.array(eight()[:2]), ("x",)), PartitionSpec())
    rows = kimi.encode(images=[b"bad", photo], on_error="skip", out_sharding=replicated)
    assert rows[0] is None
    assert rows[1].sharding == replicated


# --- precision


def products(jaxpr):
    """(primitive, precision) of every dot and convolution in a jaxpr, those in loops, branches and calls too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            found.append((equation.primitive.name, equation.params["precision"]))
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            found += products(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": "float32"}, "HIGHEST"),
        ({"dtype": "float32", "precision": "ieee"}, "HIGHEST"),
        ({"dtype": "float32", "precision": "tf32"}, "HIGH"),
        ({"dtype": "bfloat16"}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["kimi", "qwen"])
def test_every_product_has_the_precision_asked_for(family, settings, expected, request):
    encoder = jaxenc.load(request.getfixturevalue(f"{family}_folder"), **settings)
    item = (
        jaxenc.VisionItem(np.zeros((4, 588), np.float32), (1, 2, 2))
        if family == "kimi"
        else jaxenc.AudioItem(np.zeros((32, 50), np.float32))
    )
    batch = encoder.pack([item])
    found = products(jax.make_jaxpr(encoder.apply)(encoder.params, batch).jaxpr)
    # of the stem, of a block (two projections, scores, values, two of the MLP), of the projector
    assert len(found) >= 9
    assert ("conv_general_dilated" in dict(found)) == (family == "qwen")
    wanted = None if expected is None else (jax.lax.Precision[expected],) * 2
    assert [precision for _, precision in found] == [wanted] * len(found)


def test_the_callers_own_precision_setting_changes_nothing(kimi):
    batch = kimi.pack([jaxenc.VisionItem(np.zeros((4, 588), np.float32), (1, 2, 2))])
    with jax.default_matmul_precision("bfloat16"):
        found = products(jax.make_jaxpr(kimi.apply)(kimi.params, batch).jaxpr)
    assert {precision for _, precision in found} == {(jax.lax.Precision.HIGHEST,) * 2}


def test_an_unknown_precision_is_an_error_that_says_what_there_is(kimi_folder):
    with pytest.raises(ValueError, match="precision is 'fp8'; it can be 'ieee' or 'tf32'"):
        jaxenc.load(kimi_folder, precision="fp8")


# --- meshes


def assert_rows(encoder, pictures, kimi_rows):
    for item, rows, expected in zip(pictures, encoder.encode_items(pictures), kimi_rows, strict=True):
        assert_close(rows, expected), item.name


def test_rules_may_name_other_mesh_axes(kimi_folder, pictures, kimi_rows):
    mesh = Mesh(np.array(eight()).reshape(2, 4), ("fsdp", "tp"))
    rules = jaxenc.default_rules(mesh).replace(
        **dict.fromkeys(("heads", "mlp", "projector_mlp", "stem_length", "projector_length"), "tp"),
        batch="fsdp",
        embed="fsdp",
        projector_in="fsdp",
    )
    encoder = jaxenc.load(kimi_folder, mesh=mesh, dtype="float32", rules=rules)
    params = flatten(encoder.params)
    # 3 x 16 heads x 4 x 64, heads over four and embed over two
    assert params["layers/attention/qkv/kernel"].sharding.spec == PartitionSpec(None, None, "tp", None, "fsdp")
    assert params["layers/attention/qkv/kernel"].addressable_shards[0].data.shape == (2, 3, 4, 4, 32)
    assert_rows(encoder, pictures, kimi_rows)


def test_a_tensor_axis_is_taken_for_the_weights_and_others_for_the_batch(kimi_folder):
    mesh = Mesh(np.array(eight()).reshape(2, 4), ("fsdp", "tensor"))
    encoder = jaxenc.load(kimi_folder, mesh=mesh, strategy="tensor")
    assert encoder.plan.spec("batch", "length", "heads") == PartitionSpec("fsdp", None, "tensor")
    assert encoder.plan.rows_parts == 2


def test_a_rule_for_an_axis_the_mesh_lacks_is_an_error(kimi_folder):
    mesh = jaxenc.make_mesh(data=1, model=2)
    with pytest.raises(jaxenc.RulesError, match=r"'tensor'.*data=1, model=2"):
        jaxenc.load(kimi_folder, mesh=mesh, rules=jaxenc.default_rules(mesh).replace(heads="tensor"))


def test_a_mesh_of_some_devices_uses_no_others(kimi_folder, pictures, kimi_rows):
    chosen = eight()[3:7]
    encoder = jaxenc.load(kimi_folder, mesh=jaxenc.make_mesh(model=4, devices=chosen), dtype="float32")
    assert {d for leaf in jax.tree.leaves(encoder.params) for d in leaf.devices()} == set(chosen)
    assert_rows(encoder, pictures, kimi_rows)


def test_a_single_device_need_not_be_the_first(kimi_folder, kimi, photo):
    encoder = jaxenc.load(kimi_folder, mesh=jaxenc.make_mesh(devices=eight()[6:]), dtype="float32")
    assert {d for leaf in jax.tree.leaves(encoder.params) for d in leaf.devices()} == {eight()[6]}
    assert_close(encoder.encode(images=[photo])[0], kimi.encode(images=[photo])[0])


def explicit_mesh():
    return jax.make_mesh((1, 8), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=eight())


def test_an_explicit_mesh_is_as_good_as_an_auto_one(kimi_folder, pictures, kimi_rows):
    encoder = jaxenc.load(kimi_folder, mesh=explicit_mesh(), dtype="float32")
    assert encoder.plan.strategy == "tensor"
    assert_rows(encoder, pictures, kimi_rows)


def test_loading_and_encoding_work_inside_set_mesh(kimi_folder, pictures, kimi_rows):
    mesh = jaxenc.make_mesh(data=1, model=8)
    with jax.set_mesh(mesh):
        assert_rows(jaxenc.load(kimi_folder, mesh=mesh, dtype="float32"), pictures, kimi_rows)


def test_loading_and_encoding_work_inside_an_explicit_set_mesh(kimi_folder, pictures, kimi_8, kimi_rows):
    with jax.set_mesh(explicit_mesh()):
        encoder = jaxenc.load(kimi_folder, mesh=explicit_mesh(), dtype="float32")
        assert_rows(encoder, pictures, kimi_rows)
    assert encoder.plan.parameter_specs == kimi_8.plan.parameter_specs


# --- how many programs, and which


def pictures_of_many_sizes(rng):
    grids = [(int(rng.integers(1, 5)), *(2 * rng.integers(1, 6, 2)).tolist()) for _ in range(rng.integers(1, 5))]
    return [jaxenc.VisionItem(rng.standard_normal((math.prod(grid), 588)).astype(np.float32), grid) for grid in grids]


def clips_of_many_lengths(rng):
    frames = rng.integers(1, 1200, rng.integers(1, 5)).tolist()
    return [jaxenc.AudioItem(rng.standard_normal((32, n)).astype(np.float32)) for n in frames]


def test_a_stream_of_sizes_causes_at_most_eight_compilations(kimi_folder):
    rng = np.random.default_rng(9)
    encoder = jaxenc.load(kimi_folder, dtype="float32")
    assert len(encoder.budgets) <= 8
    with counted_compilations() as compilations:
        for _ in range(25):
            call = pictures_of_many_sizes(rng)
            rows = encoder.encode_items(call)
            assert [len(r) for r in rows] == [encoder.config.output_rows(item) for item in call]
    assert len(compilations) == len(encoder.compiled) <= 8
    assert set(encoder.compiled) <= set(encoder.budgets)
    assert len(encoder.compiled) > 1


def test_nothing_is_compiled_after_warmup(qwen_folder):
    mesh = jaxenc.make_mesh(data=1, model=2)
    encoder = jaxenc.load(qwen_folder, mesh=mesh, dtype="float32", budgets=[Budget(104, 1), Budget(416, 1)])
    assert encoder.compiled == {}
    with counted_compilations() as compilations:
        encoder.warmup(encoder.budgets[:1])
        assert set(encoder.compiled) == {Budget(104, 1)}
        encoder.warmup()
    assert set(encoder.compiled) == {Budget(104, 1), Budget(416, 1)}
    assert len(compilations) == 2
    rng = np.random.default_rng(10)
    with counted_compilations() as compilations:
        for _ in range(15):
            encoder.encode_items(clips_of_many_lengths(rng))
        encoder.warmup()
    assert compilations == []


def test_an_encoder_says_what_it_is(kimi_8):
    assert repr(kimi_8) == "Encoder(kimi_k25, float32, tensor on {'data': 1, 'model': 8})"


# --- jaxenc.plan


def test_a_plan_needs_neither_weights_nor_devices(kimi_8, kimi_folder):
    plan = jaxenc.plan("qwen3_omni_audio", mesh_shape={"data": 4, "model": 64}, batch=512, tokens=390)
    assert plan.mesh.size == 256
    assert plan.strategy == "hybrid"
    # eight items of 390 tokens are windows of 104, 104, 104 and 78
    batch = next(d for d in plan.decisions if d.group == "batch")
    assert batch.size == 512 * 4
    shape = {"data": 1, "model": 8}
    loaded = jaxenc.plan(kimi_folder, mesh_shape=shape, dtype="float32")
    assert loaded.parameter_specs == kimi_8.plan.parameter_specs
    with pytest.raises(TypeError, match="either mesh_shape"):
        jaxenc.plan("kimi_k25")
    with pytest.raises(jaxenc.IndivisibleAxisError, match="20"):
        jaxenc.plan("qwen3_omni_audio", mesh_shape=shape, strategy="tensor")
