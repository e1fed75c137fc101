"""Against the processors of transformers 5.24. Those that import torchvision are read from their source."""

import ast
import math
from importlib.resources import files

import numpy as np
import pytest

from jaxenc.preprocess import (
    format_timestamp,
    load_audio,
    load_image,
    log_mel,
    mel_filters,
    navit_item,
    navit_size,
    padded_log_mel,
    sample_indices,
)

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

SIDE_LIMIT = 512
KIMI = {"patch": 14, "merge": 2, "patch_limit": 16384, "side_limit": SIDE_LIMIT}


def published(file, name):
    """One function of a transformers module that cannot be imported here, compiled from its source."""
    tree = ast.parse((files("transformers") / "models" / "kimi_k25" / file).read_text())
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list = []
    scope = {"math": math, "torch": torch}
    exec(compile(ast.Module([function], []), file, "exec"), scope)
    return scope[name]


@pytest.mark.parametrize("file", ["image_processing_kimi_k25.py", "video_processing_kimi_k25.py"])
def test_navit_sizes_are_kimis(file):
    navit_resize = published(file, "navit_resize")
    sizes = np.random.default_rng(0).integers(1, 12_000, (3000, 2)).tolist()
    sizes += [(224, 224), (480, 640), (1080, 1920), (4096, 4096), (1, 1), (7168, 500), (7169, 1), (1, 50_000)]
    for limit in (4096, 16384):
        for height, width in sizes:
            resized, padded = navit_resize(height, width, 14, 2, limit, SIDE_LIMIT)
            size = navit_size(height, width, patch=14, merge=2, patch_limit=limit, side_limit=SIDE_LIMIT)
            assert (size.resized, size.padded) == (resized, padded), (height, width, limit)


def test_patches_are_kimis():
    image = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    item = navit_item(image[None], **KIMI, mean=(0.5,) * 3, std=(0.5,) * 3)
    padded = torch.zeros(1, 3, 56, 84)
    padded[0, :, :50, :70] = torch.from_numpy(image).permute(2, 0, 1)
    # The published rescaling and normalisation are fused: mean and std are multiplied by 255.
    patchify = published("image_processing_kimi_k25.py", "patchify")
    patches, grid_h, grid_w = patchify(None, (padded - 127.5) / 127.5, 14)
    assert item.grid == (1, grid_h, grid_w)
    np.testing.assert_array_equal(item.patches, patches[0].reshape(-1, 588).numpy())


def test_video_patches_are_kimis():
    frames = np.random.default_rng(0).integers(0, 256, (3, 56, 84, 3), dtype=np.uint8)
    item = navit_item(frames, **KIMI, mean=(0.5,) * 3, std=(0.5,) * 3)
    normalised = (torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()[None].float() - 127.5) / 127.5
    patchify = published("video_processing_kimi_k25.py", "patchify")
    patches, *grid = patchify(None, normalised, 14)
    assert item.grid == tuple(grid)
    np.testing.assert_array_equal(item.patches, patches[0].reshape(-1, 588).numpy())


def test_sampled_frames_are_transformers():
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    for total in (1, 2, 7, 30, 99, 300, 1001):
        for fps in (2, 8, 10, 23.976, 24, 25, 29.97, 30, 59.94, 120):
            expected = default_sample_indices_fn(VideoMetadata(total_num_frames=total, fps=fps), fps=2)
            assert sample_indices(total, fps).tolist() == expected.tolist()


def test_timestamps_are_kimis():
    import time

    for seconds in np.random.default_rng(0).uniform(0, 80_000, 500):
        expected = time.strftime("%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
        assert format_timestamp(seconds) == expected


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_colours_are_transformers(mode):
    from transformers.image_transforms import convert_to_rgb

    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    image = Image.fromarray(noise if "A" in mode else noise[..., :3].copy()).convert(mode)
    np.testing.assert_array_equal(load_image(image), convert_to_rgb(image, return_numpy=True))


@pytest.mark.parametrize("bins", [80, 128])
def test_mel_filters_are_transformers(bins):
    from transformers.audio_utils import mel_filter_bank

    expected = mel_filter_bank(201, bins, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(bins), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("samples", [201, 399, 16000, 32037, 113600])
def test_log_mel_is_whispers(bins, samples):
    waveform = load_audio(files("jaxenc") / "assets" / "sense_and_sensibility.flac")[:samples]
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    mel = log_mel(waveform, bins=bins)
    expected = extractor(waveform, sampling_rate=16000, padding=True, truncation=False, return_tensors="np")
    np.testing.assert_allclose(mel, expected["input_features"][0], atol=5e-5)
    # The published NumPy path works in float64, as ours does.
    in_float64 = extractor._np_extract_fbank_features(waveform[None], "cpu")[0]
    np.testing.assert_allclose(mel, in_float64, atol=5e-7)


@pytest.mark.parametrize("samples", [100, 161, 32037, 47900])
def test_a_recording_padded_with_silence_is_whispers(samples):
    # three seconds instead of thirty: what Qwen2-Audio, and Qwen2.5-Omni of five minutes, pad to
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=3)
    waveform = load_audio(files("jaxenc") / "assets" / "sense_and_sensibility.flac")[:samples]
    expected = extractor(
        waveform, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    whole, recorded = padded_log_mel(waveform, bins=128, frames=300)
    short, also_recorded = padded_log_mel(waveform, bins=128)
    assert recorded == also_recorded == expected["attention_mask"].sum()
    np.testing.assert_allclose(whole, expected["input_features"][0], atol=5e-5)
    np.testing.assert_allclose(short[:, :recorded], expected["input_features"][0][:, :recorded], atol=5e-5)


@pytest.mark.parametrize("samples", [160, 177, 200])
def test_clips_shorter_than_the_reflection_are_reflected_repeatedly(samples):
    waveform = np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)
    expected = transformers.WhisperFeatureExtractor()._np_extract_fbank_features(waveform[None], "cpu")[0]
    np.testing.assert_allclose(log_mel(waveform, bins=80), expected, atol=5e-7)


@pytest.mark.parametrize("rate", [8000, 22050, 44100])
def test_loaded_audio_is_transformers(tmp_path, rate):
    soundfile = pytest.importorskip("soundfile")
    from transformers.audio_utils import load_audio as published_load

    stereo = np.random.default_rng(0).normal(0, 0.1, (rate, 2))
    soundfile.write(tmp_path / "noise.wav", stereo, rate)
    expected = published_load(str(tmp_path / "noise.wav"), sampling_rate=16000, backend="soundfile")
    np.testing.assert_array_equal(load_audio(tmp_path / "noise.wav"), expected)
