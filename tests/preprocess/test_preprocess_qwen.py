"""Against the processors of transformers 5.24. Those that import torchvision are read from their source."""

import ast
import math
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest

import jaxenc
from jaxenc import InputError
from jaxenc.models import glm4v, qwen2_vl, qwen3_omni_vision, qwen3_vl
from jaxenc.preprocess import qwen_patches, qwen_sample_indices, smart_size
from jaxenc.preprocess.qwen import qwen_image_item, qwen_video_items

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

QWEN2, QWEN3, OMNI, GLM = (family.Config().settings for family in (qwen2_vl, qwen3_vl, qwen3_omni_vision, glm4v))


def published(file, name):
    """One function of a transformers module that cannot be imported here, compiled from its source."""
    tree = ast.parse((files("transformers") / "models" / file).read_text())
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list = []
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    scope = {"math": math, "torch": torch, "np": np}
    exec(compile(ast.Module([function], []), file, "exec"), scope)
    return scope[name]


def sizes(seed=0):
    random = np.random.default_rng(seed).integers(1, 6000, (1500, 2)).tolist()
    return [*random, (14, 14), (1, 1), (1, 200), (42, 70), (28, 5600), (224, 224), (1080, 1920), (7168, 500)]


@pytest.mark.parametrize("settings", [QWEN2, QWEN3, OMNI], ids=["qwen2", "qwen3", "omni"])
def test_picture_sizes_are_the_published_ones(settings):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    least, most = settings.image_pixels
    for height, width in sizes():
        if max(height, width) / min(height, width) > 200:
            continue
        expected = smart_resize(height, width, factor=settings.factor, min_pixels=least, max_pixels=most)
        assert smart_size(height, width, factor=settings.factor, pixels=settings.image_pixels) == expected


@pytest.mark.parametrize(
    ("file", "settings"),
    [("qwen3_vl/video_processing_qwen3_vl.py", QWEN3), ("glm4v/video_processing_glm4v.py", GLM)],
    ids=["qwen3", "glm"],
)
def test_video_sizes_are_the_published_ones(file, settings):
    smart_resize = published(file, "smart_resize")
    rng = np.random.default_rng(1)
    for height, width in sizes(1):
        if max(height, width) / min(height, width) > 100:  # the published code scales short sides up before it looks
            continue
        frames = int(rng.integers(2, 769))
        least, most = settings.video_pixels
        expected = smart_resize(frames, height, width, 2, settings.factor, least, most)
        given = {"factor": settings.factor, "pixels": settings.video_pixels, "frames": frames}
        assert smart_size(height, width, **given) == expected


def test_glm_counts_a_picture_as_two_frames():
    smart_resize = published("glm4v/image_processing_glm4v.py", "smart_resize")
    least, most = GLM.image_pixels
    for height, width in [(1080, 1920), (3000, 3000), (14, 14), (20, 200), (60, 40), (2160, 3840)]:
        expected = smart_resize(2, height, width, 2, 28, least, most)
        item = qwen_image_item(np.zeros((height, width, 3), np.uint8), GLM, name="picture")
        assert item.grid == (1, expected[0] // 14, expected[1] // 14)


def test_a_side_of_more_than_200_times_the_other_is_refused():
    assert smart_size(10, 2000, factor=28, pixels=QWEN2.image_pixels)
    with pytest.raises(InputError, match="long: 10 x 2001 pixels: one side may be 200 times the other"):
        smart_size(10, 2001, factor=28, pixels=QWEN2.image_pixels, name="long")


@pytest.mark.parametrize(("settings", "mean"), [(QWEN2, 0.4), (QWEN3, 0.5), (GLM, 0.4)], ids=["qwen2", "qwen3", "glm"])
def test_patches_of_a_picture_are_the_published_ones(settings, mean):
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    assert settings.mean[2] == pytest.approx(mean, abs=0.01)
    image = np.random.default_rng(0).integers(0, 256, (150, 210, 3), dtype=np.uint8)
    least, most = settings.image_pixels
    processor = (Glm4vImageProcessorPil if settings is GLM else Qwen2VLImageProcessorPil)(
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=settings.patch,
        image_mean=settings.mean,
        image_std=settings.std,
    )
    expected = processor(image, return_tensors="np")
    item = qwen_image_item(image, settings, name="noise")
    assert item.grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(item.patches, expected["pixel_values"], atol=2e-6)


@pytest.mark.parametrize("frames", [4, 5])
def test_patches_of_a_video_are_the_published_ones(frames):
    patchify = published("qwen3_vl/video_processing_qwen3_vl.py", "patchify")
    video = np.random.default_rng(0).integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8)
    normalised = (torch.from_numpy(video).permute(0, 3, 1, 2).contiguous()[None].float() - 127.5) / 127.5
    expected = patchify(None, normalised, 16, 2, 2)[0][0].numpy()
    patches = qwen_patches(video, patch=16, merge=2, mean=(0.5,) * 3, std=(0.5,) * 3)
    np.testing.assert_array_equal(patches, expected)


RATES = [(total, fps) for total in (2, 3, 5, 7, 30, 99, 300, 1001, 20_000) for fps in (1.0, 10, 23.976, 25, 30, 120)]


def test_frames_of_a_video_are_qwen3_vls():
    sample = published("qwen3_vl/video_processing_qwen3_vl.py", "sample_frames")
    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    for total, fps in RATES:
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        expected = sample(processor, metadata, fps=2)
        assert qwen_sample_indices(total, fps, rule="to last").tolist() == expected.tolist(), (total, fps)


def test_frames_of_a_video_are_qwen2_vls():
    sample = published("qwen2_vl/video_processing_qwen2_vl.py", "sample_frames")
    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=768, temporal_patch_size=2, num_frames=None)
    for total, fps in RATES:
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        # its steps are float32: 98 of 99 frames end in a 99th, which is not there
        expected = [i for i in sample(processor, metadata, fps=2).tolist() if i < total]
        assert qwen_sample_indices(total, fps, rule="even").tolist() == expected, (total, fps)


def test_frames_of_a_video_are_glms():
    sample = published("glm4v/video_processing_glm4v.py", "sample_frames")
    processor = SimpleNamespace(fps=2, max_duration=300)
    for total, fps in [*RATES, (1, 30.0), (9000, 30.0), (9001, 30.0), (12_000, 29.97), (599, 1.5), (601, 1.5)]:
        # as all decoders state it; of frames without a duration the published code guesses one, up to a second longer
        metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
        expected = sample(processor, metadata)
        assert qwen_sample_indices(total, fps, rule="by time").tolist() == expected.tolist(), (total, fps)


def test_an_odd_last_frame_of_glms_is_taken_twice_and_counted_so():
    assert qwen_sample_indices(30, 10.0, rule="by time").tolist() == [0, 5, 10, 15, 20, 25]
    assert qwen_sample_indices(25, 10.0, rule="by time").tolist() == [0, 5, 10, 15, 20, 20]


@pytest.mark.parametrize(
    ("settings", "grid", "times"),
    [
        # of 9 sampled frames together at most 24,576 x 1024 pixels; of each at most 768 x 784
        (QWEN3, (1, 20, 30), [0.0, 1.1, 2.2, 3.3, 4.4]),
        (QWEN2, (1, 22, 34), [0.0, 1.1, 2.2, 3.3]),
        (OMNI, (1, 20, 30), [0.0, 1.1, 2.2, 3.3]),
        (GLM, (1, 22, 34), [0.0, 1.0, 2.0, 3.0, 4.0]),
    ],
    ids=["qwen3", "qwen2", "omni", "glm"],
)
def test_a_video_is_an_item_for_every_two_frames(settings, grid, times):
    video = np.random.default_rng(0).integers(0, 256, (45, 312, 480, 3), dtype=np.uint8)
    items = list(qwen_video_items(video, settings, fps=10.0, name="noise"))
    assert [item.grid for item in items] == [grid] * len(times)
    # 9 frames from the first to the last, 8 at equal distances, or 9 at half seconds; pairs start every other one
    assert [item.timestamp for item in items] == pytest.approx(times)


def test_a_single_frame_is_an_item_too():
    video = np.zeros((1, 64, 64, 3), np.uint8)
    for settings in (QWEN2, QWEN3, GLM):
        (item,) = qwen_video_items(video, settings, fps=1.0, name="still")
        assert item.grid[0] == 1


TINY = {"layers": 1, "embed": 32, "heads": 2, "mlp": 32, "out": 8, "positions": 4}


@pytest.mark.parametrize(
    ("config", "pictures", "videos"),
    [
        (qwen3_vl.Config(**TINY, deepstack=(0,)), (64, 16), (8, 16)),
        (glm4v.Config(**TINY, merger_mlp=16), (81, 8), (8, 8)),
    ],
    ids=["qwen3", "glm"],
)
def test_encoders_read_pictures_and_videos(config, pictures, videos):
    encoder = jaxenc.from_config(config)
    picture, video = np.zeros((256, 256, 3), np.uint8), np.zeros((4, 64, 64, 3), np.uint8)
    assert [rows.shape for rows in encoder.encode(images=[picture])] == [pictures]
    assert [rows.shape for rows in encoder.encode(videos=[(video, 2.0)])] == [videos]
