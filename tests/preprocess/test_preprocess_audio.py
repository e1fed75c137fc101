import io
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxenc.errors import InputError
from jaxenc.preprocess import load_audio, log_mel, mel_filters, pad_or_trim

soundfile = pytest.importorskip("soundfile")
av = pytest.importorskip("av")
pytest.importorskip("soxr")

SPEECH = files("jaxenc") / "assets" / "sense_and_sensibility.flac"


def tone(samples=4000, rate=16000, hertz=440, amplitude=0.3):
    return (amplitude * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)).astype(np.float32)


def saved(waveform, rate=16000, format="WAV", subtype="PCM_16"):
    stream = io.BytesIO()
    soundfile.write(stream, waveform, rate, format=format, subtype=subtype)
    return stream.getvalue()


def m4a(path, waveform, rate=16000):
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=rate)
        stream.layout = "stereo" if waveform.ndim == 2 else "mono"
        frame = av.AudioFrame.from_ndarray(np.atleast_2d(waveform), format="fltp", layout=stream.layout.name)
        frame.sample_rate, frame.pts = rate, 0
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)


# --- sources


def test_path_bytes_and_file_give_the_same_samples(tmp_path):
    path = tmp_path / "tone.wav"
    path.write_bytes(saved(tone()))
    expected = np.round(tone() * 32767) / 32768
    with path.open("rb") as file:
        for source in (path, str(path), path.read_bytes(), file):
            loaded = load_audio(source)
            assert loaded.dtype == np.float32
            np.testing.assert_allclose(loaded, expected, atol=2 / 32768)


@pytest.mark.parametrize(
    ("subtype", "step"), [("PCM_U8", 2**-7), ("PCM_16", 2**-15), ("PCM_24", 2**-23), ("PCM_32", 2**-23), ("FLOAT", 0)]
)
def test_sample_formats_of_files(subtype, step):
    np.testing.assert_allclose(load_audio(saved(tone(), subtype=subtype)), tone(), atol=2 * step)


@pytest.mark.parametrize(
    ("format", "subtype"), [("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]
)
def test_compressed_files(format, subtype):
    loaded = load_audio(saved(tone(16000), format=format, subtype=subtype))
    assert loaded.shape == (16000,)
    np.testing.assert_allclose(loaded[4000:12000], tone(16000)[4000:12000], atol=0.02)


def test_containers_that_libsndfile_does_not_know_are_read_by_ffmpeg(tmp_path):
    m4a(tmp_path / "mono.m4a", tone(16000))
    m4a(tmp_path / "stereo.mp4", np.stack([tone(16000), np.zeros(16000, np.float32)]))
    for name, gain in (("mono.m4a", 1), ("stereo.mp4", 0.5)):
        for source in (tmp_path / name, (tmp_path / name).read_bytes()):
            loaded = load_audio(source)
            assert 16000 <= len(loaded) < 16000 + 1024
            np.testing.assert_allclose(loaded[4000:12000], gain * tone(16000)[4000:12000], atol=0.02)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([-32768, 0, 16384], np.int16), [-1, 0, 0.5]),
        (np.array([-(2**31), 0, 2**30], np.int32), [-1, 0, 0.5]),
        (np.array([0, 128, 192], np.uint8), [-1, 0, 0.5]),
        (np.array([-1, 0, 0.5], np.float64), [-1, 0, 0.5]),
        (np.array([-1, 0, 0.5], np.float16), [-1, 0, 0.5]),
        (np.array([-3, 0, 2.5], np.float32), [-3, 0, 2.5]),  # beyond [-1, 1] is taken as it is
        ([-1.0, 0.0, 0.5], [-1, 0, 0.5]),
    ],
)
def test_sample_formats_of_arrays(array, expected):
    loaded = load_audio(array)
    assert loaded.dtype == np.float32
    assert loaded.tolist() == expected


def test_a_jax_array_is_audio():
    jnp = pytest.importorskip("jax.numpy")
    assert load_audio(jnp.array([0.5, -1], jnp.bfloat16)).tolist() == [0.5, -1]
    assert load_audio((jnp.array([0.5, -1]), 16000)).tolist() == [0.5, -1]


def test_channels_are_averaged_whichever_axis_they_are_on():
    stereo = np.array([[1, 0], [0, 0], [0.5, -0.5], [0.25, 0.75]], np.float32)
    for source in (stereo, stereo.T, saved(stereo, subtype="FLOAT")):
        assert load_audio(source).tolist() == [0.5, 0, 0, 0.5]


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_other_rates_are_resampled(rate):
    source = tone(rate, rate)
    for loaded in (load_audio((source, rate)), load_audio(saved(source, rate, subtype="FLOAT"))):
        assert loaded.dtype == np.float32
        assert loaded.shape == (16000,)
        np.testing.assert_allclose(loaded[2000:14000], tone(16000)[2000:14000], atol=2e-5)


def test_resampling_keeps_what_fits_and_removes_what_would_fold_back():
    kept, folded = tone(48000, 48000, hertz=7000), tone(48000, 48000, hertz=9000)
    np.testing.assert_allclose(load_audio((kept, 48000))[2000:14000], tone(16000, hertz=7000)[2000:14000], atol=1e-4)
    assert np.abs(load_audio((folded, 48000))[2000:14000]).max() < 1e-5


def test_resampled_length_is_rounded_up():
    assert load_audio((tone(1001, 44100), 44100)).shape == (364,)  # 363.17
    assert load_audio((tone(1000), 16000), sample_rate=8000).shape == (500,)


def test_the_speech_that_the_package_carries():
    loaded = load_audio(SPEECH)
    assert loaded.shape == (113_600,)
    assert float(np.abs(loaded).max()) == 13840 / 32768


# --- refusals: each starts with the name


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_samples_are_refused_by_name(bad):
    waveform = tone()
    waveform[7] = bad
    for source in (waveform, (waveform, 44100), saved(waveform, subtype="FLOAT")):
        with pytest.raises(InputError, match=r"^clip 2: the audio holds NaN or infinite samples"):
            load_audio(source, name="clip 2")


def test_empty_audio_is_refused():
    for source in (np.zeros(0, np.float32), (np.zeros(0), 8000), np.zeros((2, 0)), saved(np.zeros(0))):
        with pytest.raises(InputError, match=r"^silent: the audio is empty"):
            load_audio(source, name="silent")


@pytest.mark.parametrize("content", [b"", b"not audio", b"RIFF\x00\x00\x00\x00WAVE", b"fLaC"])
def test_what_is_no_audio_is_named(tmp_path, content):
    path = tmp_path / "broken.wav"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_audio(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.wav: no such file"):
        load_audio(tmp_path / "gone.wav")


def test_a_truncated_flac_is_refused():
    data = saved(np.random.default_rng(0).normal(0, 0.1, 30_000), format="FLAC")
    with pytest.raises(InputError, match=r"^cut: "):
        load_audio(data[: len(data) // 2], name="cut")


def test_video_without_sound_is_refused(tmp_path):
    with av.open(str(tmp_path / "silent.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    with pytest.raises(InputError, match="no audio stream"):
        load_audio(tmp_path / "silent.mp4")


@pytest.mark.parametrize("source", [np.zeros((2, 3, 4)), np.zeros((128, 300)), np.float32(3), np.zeros(5, np.int64)])
def test_what_is_no_waveform_is_refused(source):
    with pytest.raises(InputError, match=r"^x: (shape|dtype) .*expected"):
        load_audio(source, name="x")


@pytest.mark.parametrize("rate", [0, -16000, np.nan, np.inf])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(InputError, match=r"^x: sample rate"):
        load_audio((tone(), rate), name="x")


def test_rate_before_array_is_refused_with_the_right_order():
    with pytest.raises(InputError, match=r"expected \(array, sample rate in Hz\)"):
        load_audio((16000, tone()))


# --- log-mel


def sweep(samples=4000):
    n = np.arange(samples)
    tones = 0.3 * np.sin(2 * np.pi * 440 * n / 16000) + 0.1 * np.sin(2 * np.pi * (200 + n * 0.5) * n / 16000)
    return tones.astype(np.float32)


@pytest.mark.parametrize(
    ("bins", "rows", "expected", "mean"),  # from transformers 5.24's WhisperFeatureExtractor
    [
        (
            128,
            (0, 17, 60, 127),
            [
                [0.918747, 0.385413, -0.625517, 0.290557],
                [1.062247, 1.206614, 1.226567, 1.224957],
                [0.373943, -0.135681, -0.625517, -0.149583],
                [-0.162511, -0.625517, -0.625517, -0.625517],
            ],
            -0.3424845,
        ),
        (
            80,
            (0, 11, 79),
            [
                [0.994507, None, -0.672676, 0.366316],
                [1.003425, None, 1.327279, 1.32474],
                [-0.162037, None, -0.672676, -0.672676],
            ],
            -0.3521688,
        ),
    ],
)
def test_log_mel_of_a_sweep_is_whispers(bins, rows, expected, mean):
    mel = log_mel(sweep(), bins=bins)
    assert mel.dtype == np.float32
    assert mel.shape == (bins, 25)
    for row, values in zip(rows, expected, strict=True):
        for frame, value in zip((0, 1, 12, 24), values, strict=True):
            if value is not None:
                assert mel[row, frame] == pytest.approx(value, abs=5e-5)
    assert mel.mean() == pytest.approx(mean, abs=5e-5)


def test_log_mel_of_speech_is_whispers():
    mel = log_mel(load_audio(SPEECH), bins=128)
    assert mel.shape == (128, 710)
    assert mel.mean() == pytest.approx(-0.0319111, abs=2e-5)
    assert mel.max() == pytest.approx(1.3216667, abs=2e-5)
    assert mel.min() == pytest.approx(1.3216667 - 2, abs=2e-5)
    values = [mel[0, 0], mel[20, 100], mel[64, 355], mel[127, 709]]
    np.testing.assert_allclose(values, [-0.0204164, -0.1272882, 0.4160109, -0.6783333], atol=2e-5)


def test_mel_filters_are_slaneys():
    filters = mel_filters(128)
    assert filters.shape == (201, 128)
    assert filters.sum() == pytest.approx(3.1909855285406996, abs=1e-12)
    assert filters[1, 0] == pytest.approx(0.012373986332636965, abs=1e-15)
    assert filters[199, 127] == pytest.approx(0.001114280198753211, abs=1e-15)
    assert mel_filters(80).sum() == pytest.approx(1.999024102917858, abs=1e-12)
    assert mel_filters(80)[10, 10] == pytest.approx(0.019908218880980738, abs=1e-15)


@pytest.mark.parametrize(
    ("samples", "frames"), [(160, 1), (161, 1), (200, 1), (201, 1), (319, 1), (320, 2), (32037, 200)]
)
def test_frames_are_whole_hops(samples, frames):
    mel = log_mel(sweep(samples), bins=80)
    assert mel.shape == (80, frames)
    assert np.isfinite(mel).all()


@pytest.mark.parametrize("samples", [0, 1, 159])
def test_less_than_one_hop_is_refused_by_name(samples):
    with pytest.raises(InputError, match=rf"^click: {samples} samples are shorter than one frame \(160 samples"):
        log_mel(sweep(samples), bins=128, name="click")


def test_silence_is_the_floor():
    np.testing.assert_allclose(log_mel(np.zeros(1600, np.float32), bins=80), -1.5, atol=1e-6)


def test_only_the_edges_depend_on_what_lies_outside_the_clip():
    whole, part = sweep(8000), sweep(8000)[1600:6400]
    loud = np.float32(10)  # the same maximum in both, so that the clamp is the same
    whole[4000] = part[2400] = loud
    np.testing.assert_allclose(log_mel(part, bins=80)[:, 2:-2], log_mel(whole, bins=80)[:, 12:38], atol=1e-6)


def test_long_clips_equal_the_frames_computed_alone():
    # 2,100 frames span three blocks of the computation.
    waveform = np.random.default_rng(0).normal(0, 0.1, 2100 * 160).astype(np.float32)
    waveform[1024 * 160] = 50
    mel = log_mel(waveform, bins=80)
    assert mel.shape == (80, 2100)
    around = log_mel(waveform[1000 * 160 : 1050 * 160], bins=80)
    np.testing.assert_allclose(mel[:, 1002:1048], around[:, 2:48], atol=1e-6)


def test_pad_or_trim():
    assert pad_or_trim(np.float32([1, 2, 3]), 5).tolist() == [1, 2, 3, 0, 0]
    assert pad_or_trim(np.float32([1, 2, 3]), 2).tolist() == [1, 2]
    assert pad_or_trim(np.float32([1, 2, 3]), 3).tolist() == [1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([8000, 16000, 22050, 44100]))
def test_every_length_gives_whole_hops_of_the_resampled_clip(samples, rate):
    waveform = load_audio((tone(samples, rate), rate))
    assert len(waveform) == -(-samples * 16000 // rate)
    if len(waveform) >= 160:
        mel = log_mel(waveform, bins=80)
        assert mel.shape == (80, len(waveform) // 160)
        assert np.isfinite(mel).all()
