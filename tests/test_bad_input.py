"""Bad input gets one clear error that names the culprit and says what to do, and the rest of a call is not lost."""

import json
import logging
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import jaxenc
from jaxenc import AudioItem, CheckpointError, ConfigError, InputError, VisionItem

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def kimi(kimi_folder):
    return jaxenc.load(kimi_folder, dtype="float32")


@pytest.fixture(scope="module")
def qwen(qwen_folder):
    return jaxenc.load(qwen_folder, dtype="float32")


@pytest.fixture(scope="module")
def good_image():
    return np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)


@pytest.fixture(scope="module")
def good_audio():
    return np.random.default_rng(1).standard_normal(16_000).astype(np.float32) * 0.1


def truncated(image, path, suffix):
    whole = path.with_suffix(suffix)
    Image.fromarray(np.tile(image, (8, 8, 1))).save(whole)
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    return whole


def assert_one_error(encoder, kind, good, bad, *, culprit, says, caplog):
    """Alone or among others the bad one is named; skipped, the others are what they are without it."""
    for sources in ([bad], [good, bad, good]):
        with pytest.raises(InputError) as error:
            encoder.encode(**{kind: sources})
        name = culprit.format(position=sources.index(bad) if len(sources) == 1 else 1)
        assert str(error.value).startswith(f"{name}: ") or str(error.value).startswith(f"{name}, ")
        assert says in str(error.value)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        rows = encoder.encode(**{kind: [good, bad, good]}, on_error="skip")
    assert rows[1] is None
    alone = encoder.encode(**{kind: [good]})[0]
    for one in (rows[0], rows[2]):
        np.testing.assert_allclose(one, alone, atol=1e-5 * np.abs(alone).max(), rtol=0)
    assert len(caplog.records) == 1
    assert culprit.format(position=1) in caplog.text
    assert says in caplog.text


# --- files and arrays

IMAGES = {
    "missing file": ("{path}", "no such file"),
    "not a picture": ("{path}", "image"),
    "truncated jpg": ("{path}", "image"),
    "truncated png": ("{path}", "image"),
    "bytes": ("images[{position}]", "image"),
    "zero-sized": ("images[{position}]", "empty"),
    "nan": ("images[{position}]", "NaN"),
    "floats out of range": ("images[{position}]", "expected [0, 1]"),
    "shape": ("images[{position}]", "shape"),
    "dtype": ("images[{position}]", "int64"),
    "object": ("images[{position}]", "cannot read a dict"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_a_bad_picture(case, kimi, good_image, tmp_path, caplog):
    path = tmp_path / "bad.jpg"
    if case == "not a picture":
        path.write_bytes(b"GIF or JPEG? Neither.")
    if case.startswith("truncated"):
        path = truncated(good_image, path, f".{case.split()[1]}")
    nan = np.zeros((28, 28, 3), np.float32)
    nan[3, 4, 1] = np.nan
    bad = {
        "bytes": b"nothing",
        "zero-sized": np.zeros((0, 28, 3), np.uint8),
        "nan": nan,
        "floats out of range": np.full((28, 28, 3), 200.0),
        "shape": np.zeros((2, 28, 28, 3), np.uint8),
        "dtype": np.zeros((28, 28, 3), np.int64),
        "object": {"url": "x"},
    }.get(case, str(path))
    culprit, says = IMAGES[case]
    bad = Wrapped(bad) if isinstance(bad, np.ndarray) else bad
    assert_one_error(
        kimi, "images", good_image, bad, culprit=culprit.replace("{path}", str(path)), says=says, caplog=caplog
    )


class Wrapped:
    """An array that can be looked for in a list."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


AUDIO = {
    "missing file": ("{path}", "no such file"),
    "not audio": ("{path}", "audio"),
    "truncated": ("{path}", "audio"),
    "empty": ("audio[{position}]", "empty"),
    "shorter than a frame": ("audio[{position}]", "160"),
    "nan": ("audio[{position}]", "NaN"),
    "infinite": ("audio[{position}]", "infinite"),
    "rate": ("audio[{position}]", "sample rate"),
}


@pytest.mark.parametrize("case", AUDIO)
def test_a_bad_recording(case, qwen, good_audio, tmp_path, caplog):
    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "bad.flac"
    if case == "not audio":
        path.write_bytes(b"RIFF, or so they say")
    if case == "truncated":
        soundfile.write(path, np.tile(good_audio, 4), 16_000)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    broken = good_audio.copy()
    broken[77] = np.inf if case == "infinite" else np.nan
    bad = {
        "empty": Wrapped(np.zeros(0, np.float32)),
        "shorter than a frame": Wrapped(good_audio[:100]),
        "nan": Wrapped(broken),
        "infinite": Wrapped(broken),
        "rate": (Wrapped(good_audio), 0.0),
    }.get(case, str(path))
    culprit, says = AUDIO[case]
    assert_one_error(
        qwen, "audio", good_audio, bad, culprit=culprit.replace("{path}", str(path)), says=says, caplog=caplog
    )


VIDEOS = {
    "missing file": ("{path}", "no such file"),
    "not a video": ("{path}", "video"),
    "no frame rate": ("videos[{position}]", "frame rate"),
    "no frames": ("videos[{position}]", "no frames"),
    "one bad frame": ("videos[{position}]", "empty"),
}


@pytest.mark.parametrize("case", VIDEOS)
def test_a_bad_video(case, kimi, good_image, tmp_path, caplog):
    pytest.importorskip("av")
    path = tmp_path / "bad.mp4"
    if case == "not a video":
        path.write_bytes(b"ftyp?")
    bad = {
        "no frame rate": [good_image],
        "no frames": ([], 2.0),
        "one bad frame": ([good_image, np.zeros((0, 56, 3), np.uint8)], 2.0),
    }.get(case, str(path))
    culprit, says = VIDEOS[case]
    good = (np.stack([good_image] * 2), 2.0)
    alone = kimi.encode(videos=[good])[0]
    with pytest.raises(InputError) as error:
        kimi.encode(videos=[good, bad])
    culprit = culprit.replace("{path}", str(path)).format(position=1)
    assert str(error.value).startswith(culprit)
    assert says in str(error.value)
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        rows = kimi.encode(videos=[good, bad, good], on_error="skip")
    assert rows[1] is None
    assert culprit in caplog.text
    for one in (rows[0], rows[2]):
        np.testing.assert_allclose(one, alone, atol=1e-5 * np.abs(alone).max(), rtol=0)


# --- items


def test_an_item_with_nan_cannot_be_made():
    patches = np.zeros((4, 588), np.float32)
    patches[2, 5] = np.nan
    with pytest.raises(InputError, match=r"^a\.png: patches hold 1 NaN or infinite values"):
        VisionItem(patches, (1, 2, 2), name="a.png")
    with pytest.raises(InputError, match=r"^<audio item>: mel hold 64 NaN or infinite values"):
        AudioItem(np.full((32, 2), np.inf))


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (lambda: VisionItem(np.zeros((6, 588)), (1, 2, 3), name="odd"), r"^odd: the grid is \(1, 2, 3\); .*of 2"),
        (lambda: VisionItem(np.zeros((20, 588)), (5, 2, 2), name="long"), r"^long: .*at most 4 frames"),
        (
            lambda: VisionItem(np.zeros((4, 768)), (1, 2, 2), name="wide"),
            r"^wide: a patch has 768 values, expected 588",
        ),
        (lambda: VisionItem(np.zeros((2056, 588)), (1, 2, 1028), name="far"), r"^far: .*up to 512"),
        (lambda: VisionItem(np.zeros((4, 768)), (1, 2, 2)), r"^item 1: a patch has 768 values"),
        (lambda: AudioItem(np.zeros((32, 100)), name="speech"), r"^speech: .*AudioItem; kimi_k25 encodes VisionItem"),
        (lambda: np.zeros((4, 588)), r"^item 1: .*ndarray; kimi_k25 encodes VisionItem"),
        (lambda: "photo.png", r"^item 1: .*str; kimi_k25 encodes VisionItem"),
    ],
    ids=["odd side", "frames", "patch", "side", "no name", "audio", "array", "path"],
)
def test_an_item_of_another_encoder(kimi, item, says, pictures, caplog):
    bad, good = item(), pictures[1]
    with pytest.raises(InputError, match=says):
        kimi.encode_items([good, bad])
    with pytest.raises(InputError, match=says):
        kimi.pack([good, bad])
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        rows = kimi.encode_items([good, bad], on_error="skip")
    assert rows[1] is None
    assert rows[0].shape == (6, 24)
    assert len(caplog.records) == 1


def test_a_spectrogram_of_other_mel_bins(qwen):
    with pytest.raises(InputError, match=r"^a\.wav: the spectrogram is \(80, 100\); this tower reads \[32, frames"):
        qwen.encode_items([AudioItem(np.zeros((80, 100), np.float32), name="a.wav")])


# --- how it is called


def test_audio_is_not_for_a_vision_tower_nor_pictures_for_an_audio_tower(kimi, qwen):
    with pytest.raises(TypeError, match="kimi_k25 encodes images and videos, not audio"):
        kimi.encode(audio=["a.wav"])
    with pytest.raises(TypeError, match="qwen3_omni_audio encodes audio, not images"):
        qwen.output_rows(images=["a.png"])


@pytest.mark.parametrize(
    "one",
    ["a.png", b"bytes", np.zeros((28, 28, 3), np.uint8), Image.new("RGB", (28, 28)), None],
    ids=["path", "bytes", "array", "PIL", "pathlib"],
)
def test_one_that_is_not_in_a_list_is_an_error(kimi, one, tmp_path):
    one = tmp_path if one is None else one
    with pytest.raises(TypeError, match=rf"images= takes a list, even of one; a {type(one).__name__} was given"):
        kimi.encode(images=one)


def test_exactly_one_kind_is_given(kimi):
    with pytest.raises(TypeError, match=r"exactly one of images=\[\.\.\.\], videos=\[\.\.\.\]"):
        kimi.encode()
    with pytest.raises(TypeError, match="exactly one of"):
        kimi.encode(images=[], videos=[])


def test_on_error_knows_two_values(kimi, good_image):
    with pytest.raises(ValueError, match="on_error is 'ignore'; it can be 'raise' or 'skip'"):
        kimi.encode(images=[good_image], on_error="ignore")
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        kimi.encode_items([], on_error="ignore")


# --- checkpoints


@pytest.fixture
def folder(kimi_folder, tmp_path):
    """A copy to be broken."""
    return shutil.copytree(kimi_folder, tmp_path / "checkpoint")


def edit_config(folder, **vision):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= vision
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, edit):
    """Applies `edit` to the dict of each file's tensors; the index follows."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (folder / INDEX).write_text(json.dumps(index))


def file_of(folder, name):
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def problems(folder):
    with pytest.raises(CheckpointError) as error:
        jaxenc.load(folder)
    assert str(error.value).startswith(str(folder))
    return error.value.problems


FC0 = "vision_tower.encoder.blocks.{}.mlp.fc0"


def test_a_config_key_that_contradicts_a_tensors_shape(folder):
    edit_config(folder, vt_intermediate_size=100)
    found = problems(folder)
    block = "vision_tower.encoder.blocks.{layer}.mlp"
    assert f"{block}.fc0.weight of layers 0-1: shape [96, 64], expected [100, 64]" in found
    assert f"{block}.fc1.weight of layers 0-1: shape [64, 96], expected [64, 100]" in found
    assert f"{block}.fc0.bias of layers 0-1: shape [96], expected [100]" in found
    assert len(found) == 3


def test_sizes_in_a_config_that_are_no_sizes_are_reported_together(folder):
    edit_config(folder, vt_num_hidden_layers="three", patch_size=0, merge_kernel_size=[2, True], vt_hidden_size=64.0)
    with pytest.raises(ConfigError) as error:
        jaxenc.load(folder)
    assert str(error.value) == (
        "kimi_k25: config.json: vt_num_hidden_layers is 'three', vt_hidden_size is 64.0, patch_size is 0, "
        "merge_kernel_size is [2, True]; a whole number of at least 1 is needed"
    )
    edit_config(folder, merge_kernel_size=[])
    with pytest.raises(ConfigError, match=r"merge_kernel_size is \[\]"):
        jaxenc.load(folder)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder, mesh: jaxenc.load(folder, mesh=mesh),
        lambda folder, mesh: jaxenc.from_config("whisper:tiny", mesh=mesh),
        lambda folder, mesh: jaxenc.plan("kimi_k25", mesh=mesh),
    ],
    ids=["load", "from_config", "plan"],
)
def test_a_number_of_devices_is_no_mesh(folder, make):
    with pytest.raises(TypeError, match=r"mesh is 8; give a jax\.sharding\.Mesh, such as jaxenc\.make_mesh\(model=8\)"):
        make(folder, 8)


def test_a_plan_has_the_towers_and_the_dtype_that_loading_has(folder, kimi, tmp_path):
    kimi.save(tmp_path / "converted")
    size = {"model": 1}
    wide, narrow = (jaxenc.plan(folder, mesh_shape=size, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert wide.param_bytes_per_device == 2 * narrow.param_bytes_per_device
    stored = jaxenc.load(folder)
    published = jaxenc.plan(folder, mesh_shape=size)
    assert published.param_bytes_per_device == stored.plan.param_bytes_per_device
    assert jaxenc.plan(tmp_path / "converted", mesh_shape=size).param_bytes_per_device == wide.param_bytes_per_device
    for encoder in ("kimi_k25", kimi.config, tmp_path / "converted"):
        with pytest.raises(ConfigError, match=r"no audio tower that is known here; there is vision \(kimi_k25\)"):
            jaxenc.plan(encoder, mesh_shape=size, tower="audio")


def test_a_config_of_more_or_fewer_layers_than_there_are(folder):
    edit_config(folder, vt_num_hidden_layers=3)
    assert problems(folder) == [
        "vision_tower.encoder.blocks.: layers 2 are missing: the config says 3 layers, the checkpoint has 2 of them"
    ]
    edit_config(folder, vt_num_hidden_layers=1)
    assert problems(folder) == ["vision_tower.encoder.blocks.: layers 1 are there, but the config says 1 layers"]


def test_missing_extra_and_misshapen_tensors_are_reported_together(folder):
    def edit(tensors):
        tensors.pop("mm_projector.pre_norm.bias", None)
        if FC0.format(1) + ".bias" in tensors:
            tensors[FC0.format(1) + ".bias"] = np.zeros(95, np.float32)
            tensors["vision_tower.encoder.blocks.0.gate"] = np.zeros(3, np.float32)

    edit_tensors(folder, edit)
    found = problems(folder)
    assert len(found) == 3
    assert "mm_projector.pre_norm.bias: missing" in found
    assert FC0.format(1) + ".bias: shape [95], expected [96]" in found
    assert any(problem.startswith("vision_tower.encoder.blocks.0.gate: unknown tensor") for problem in found)


def test_a_missing_shard_names_the_file_and_a_tensor_in_it(folder):
    name = "mm_projector.pre_norm.bias"
    file = file_of(folder, name)
    (folder / file).unlink()
    found = problems(folder)
    assert len(found) == 1
    assert file in found[0]
    assert "no such file" in found[0]
    assert "of the wanted tensors are in it" in found[0]


def test_a_truncated_shard_names_the_file(folder):
    file = folder / file_of(folder, "vision_tower.patch_embed.proj.weight")
    file.write_bytes(file.read_bytes()[:-1])
    size = file.stat().st_size
    (problem,) = problems(folder)
    # the others in the file are whole
    assert problem.startswith(f"{file.name}: truncated ({size} of {size + 1} bytes): 1 wanted tensor is cut off")


def test_an_unknown_model_type_is_named_beside_the_known(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llava_next"}))
    with pytest.raises(ConfigError, match=r"checkpoint: model_type is 'llava_next'; known are .*kimi_k25, "):
        jaxenc.load(folder)


def test_a_tower_that_is_not_there(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"no audio tower that is known here; there is vision \(kimi_k25\)"):
        jaxenc.load(folder, tower="audio")
    jaxenc.load(folder).save(tmp_path / "converted")
    with pytest.raises(ConfigError, match=r"no audio tower that is known here; there is vision \(kimi_k25\)"):
        jaxenc.load(tmp_path / "converted", tower="audio")
    assert jaxenc.load(tmp_path / "converted", tower="vision").config.family == "kimi_k25"

    def language_model_only(tensors):
        for name in [name for name in tensors if not name.startswith("language_model.")]:
            del tensors[name]

    edit_tensors(folder, language_model_only)
    with pytest.raises(CheckpointError, match=r"no kimi_k25 tower: nothing under .*there is language_model \(4\)"):
        jaxenc.load(folder)


def test_a_checkpoint_without_config_or_without_anything(folder, tmp_path):
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        jaxenc.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        jaxenc.load(folder)
    with pytest.raises(CheckpointError, match=r"nowhere: no such file or folder, and not a hub id"):
        jaxenc.load(tmp_path / "nowhere")


def test_a_converted_checkpoint_without_its_arrays(kimi, tmp_path):
    kimi.save(tmp_path / "converted")
    shutil.rmtree(tmp_path / "converted" / "arrays")
    with pytest.raises(CheckpointError, match=r"converted: is incomplete \(its folder arrays .*; convert it again"):
        jaxenc.load(tmp_path / "converted")


def test_a_converted_checkpoint_without_its_description(kimi, tmp_path):
    kimi.save(tmp_path / "converted")
    (tmp_path / "converted" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"converted: an incomplete converted checkpoint .*; convert it again"):
        jaxenc.load(tmp_path / "converted")


def test_a_converted_checkpoint_with_a_damaged_file(kimi, tmp_path):
    kimi.save(tmp_path / "converted")
    largest = max((tmp_path / "converted").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"converted: cannot be restored; if a file is damaged, convert it again"):
        jaxenc.load(tmp_path / "converted")
