import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxenc.errors import InputError
from jaxenc.preprocess import (
    cut_chunks,
    format_timestamp,
    iter_frames,
    load_video,
    navit_video_items,
    sample_indices,
)

Image = pytest.importorskip("PIL.Image")
av = pytest.importorskip("av")

KIMI = {"patch": 14, "merge": 2, "patch_limit": 4096, "side_limit": 512, "mean": (0.5,) * 3, "std": (0.5,) * 3}


def frames(n, height=32, width=48):
    """Frame i has the grey level 10 * i, so a decoded frame says which it is."""
    return np.stack([np.full((height, width, 3), 10 * i, np.uint8) for i in range(n)])


def which(decoded):
    return np.round(decoded[:, 4:-4, 4:-4].mean(axis=(1, 2, 3)) / 10).astype(int).tolist()


def encoded(video, rate, format="mp4", codec="mpeg4", title=""):
    stream = io.BytesIO()
    with av.open(stream, "w", format=format) as container:
        container.metadata["title"] = title
        track = container.add_stream(codec, rate=rate)
        track.height, track.width, track.pix_fmt = *video.shape[1:3], "yuv420p"
        for image in video:
            for packet in track.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in track.encode():
            container.mux(packet)
    return stream.getvalue()


def gif(video, milliseconds):
    stream = io.BytesIO()
    images = [Image.fromarray(image) for image in video]
    images[0].save(stream, "GIF", save_all=True, append_images=images[1:], duration=milliseconds)
    return stream.getvalue()


# --- sampling


@pytest.mark.parametrize(
    ("total", "fps", "even", "endpoints"),
    [
        (10, 10, [0, 5], [0, 9]),
        (20, 10, [0, 5, 10, 15], [0, 6, 13, 19]),
        (24, 10, [0, 6, 12, 18], [0, 6, 12, 17, 23]),  # 4.8 frames: cut to 4, rounded to 5
        (1, 30, [0], [0]),
        (7, 30, [0], [0]),
        (5, 1, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),  # slower than 2 a second: all of them
        (4, 2, [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_two_frames_a_second_are_kept(total, fps, even, endpoints):
    assert sample_indices(total, fps).tolist() == even
    assert sample_indices(total, fps, sampling="endpoints").tolist() == endpoints


@given(st.integers(1, 5000), st.floats(0.1, 240), st.sampled_from(["even", "endpoints"]))
def test_sampled_indices_increase_within_the_video(total, fps, sampling):
    indices = sample_indices(total, fps, sampling=sampling)
    assert 1 <= len(indices) <= total
    assert indices[0] == 0
    assert indices[-1] < total
    assert (np.diff(indices) > 0).all()


def test_mp4_frames_and_times(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(encoded(frames(20), 10))
    with path.open("rb") as file:
        for source in (path, str(path), path.read_bytes(), file):
            decoded, seconds = load_video(source)
            assert decoded.dtype == np.uint8
            assert decoded.shape == (4, 32, 48, 3)
            assert which(decoded) == [0, 5, 10, 15]
            assert seconds.tolist() == [0, 0.5, 1, 1.5]


def test_gif_frames_and_times():
    decoded, seconds = load_video(gif(frames(20), 100))
    assert which(decoded) == [0, 5, 10, 15]
    np.testing.assert_allclose(seconds, [0, 0.5, 1, 1.5])


def test_a_container_that_does_not_count_its_frames_is_counted():
    data = encoded(frames(20), 10, format="matroska")
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].frames == 0
    decoded, seconds = load_video(data)
    assert which(decoded) == [0, 5, 10, 15]
    np.testing.assert_allclose(seconds, [0, 0.5, 1, 1.5], atol=1e-3)


def test_a_gif_of_one_frame_has_no_rate_and_needs_none():
    decoded, seconds = load_video(gif(frames(1), 100))
    assert decoded.shape == (1, 32, 48, 3)
    assert seconds.tolist() == [0]


def test_all_frames_can_be_kept():
    decoded, seconds = load_video(encoded(frames(5), 10), sample_fps=None)
    assert which(decoded) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(seconds, [0, 0.1, 0.2, 0.3, 0.4])


def test_a_given_rate_overrides_the_files():
    decoded, seconds = load_video(encoded(frames(20), 10), fps=4)
    assert which(decoded) == list(range(0, 20, 2))
    assert seconds.tolist() == [i / 2 for i in range(10)]


def test_arrays_and_lists_of_images_are_sampled_alike():
    video = frames(20)
    for source in (video, video / np.float32(255), list(video), [Image.fromarray(image) for image in video]):
        decoded, seconds = load_video(source, fps=10)
        np.testing.assert_array_equal(decoded, video[::5])
        assert seconds.tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize(
    ("degrees", "matrix"),  # of the track header, 16.16 fixed point but for the last column: clockwise on display
    [(90, (0, 1, -1, 0)), (180, (-1, 0, 0, -1)), (270, (0, -1, 1, 0))],
)
def test_a_rotated_phone_video_stands_upright(degrees, matrix):
    video = np.zeros((2, 32, 48, 3), np.uint8)
    video[:, :16, :24] = 255  # bright top left quarter
    data = bytearray(encoded(video, 2))
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (value * 65536 for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    decoded, _ = load_video(bytes(data))
    expected = np.rot90(video, -degrees // 90, axes=(1, 2))
    assert decoded.shape == expected.shape
    np.testing.assert_allclose(decoded.astype(int), expected, atol=60)


def test_a_title_that_is_not_utf8_is_no_obstacle():
    data = encoded(frames(4), 2, title="cafe 1").replace(b"cafe 1", b"caf\xe9 1")
    assert b"caf\xe9" in data
    assert which(load_video(data)[0]) == [0, 1, 2, 3]


# --- refusals


def test_nan_in_a_frame_is_refused_by_name():
    video = np.zeros((3, 4, 4, 3), np.float32)
    video[2, 0, 0, 0] = np.nan
    with pytest.raises(InputError, match=r"^clip, frame 2: the array holds NaN or infinite"):
        load_video(video, fps=2, name="clip")


@pytest.mark.parametrize("content", [b"", b"not a video", b"\x00\x00\x00\x18ftypmp42"])
def test_what_is_no_video_is_named(tmp_path, content):
    path = tmp_path / "broken.mp4"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a readable video") as caught:
        load_video(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_truncated_video_is_refused():
    data = encoded(np.random.default_rng(0).integers(0, 256, (20, 32, 48, 3), dtype=np.uint8), 10)
    with pytest.raises(InputError, match=r"^cut: not a readable video"):
        load_video(data[: len(data) // 2], name="cut")


def test_sound_without_pictures_is_refused(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "sound.wav", np.zeros(1600), 16000)
    with pytest.raises(InputError, match="no video stream"):
        load_video(tmp_path / "sound.wav")


def test_frames_without_a_rate_are_refused():
    with pytest.raises(InputError, match=r"^<array>: frames without a frame rate; give fps="):
        load_video(frames(3))


@pytest.mark.parametrize("fps", [0, -1, np.nan, np.inf])
def test_impossible_rates_are_refused(fps):
    with pytest.raises(InputError, match=r"^<array>: fps is"):
        load_video(frames(3), fps=fps)


@pytest.mark.parametrize("source", [[], np.zeros((0, 4, 4, 3), np.uint8)])
def test_no_frames_are_refused(source):
    with pytest.raises(InputError, match=r"^clip: the video has no frames"):
        load_video(source, fps=2, name="clip")


def test_a_single_image_is_not_a_video():
    with pytest.raises(InputError, match=r"^<array>: shape \(4, 4, 3\), expected frames"):
        load_video(np.zeros((4, 4, 3), np.uint8), fps=2)


def test_frames_of_several_sizes_are_refused():
    with pytest.raises(InputError, match=r"^clip: the frame at 0\.5 s has shape \(4, 5, 3\)"):
        load_video([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], fps=2, name="clip")


# --- chunks


def test_chunks_hold_at_most_four_frames_and_know_their_time():
    pairs = list(iter_frames(frames(10), fps=2))
    items = list(navit_video_items(pairs, frames_per_chunk=4, name="clip", **KIMI))
    assert [item.grid for item in items] == [(4, 4, 4), (4, 4, 4), (2, 4, 4)]
    assert [item.timestamp for item in items] == [0, 2, 4]
    assert {item.name for item in items} == {"clip"}
    # frame-major rows: the first patch of each frame has that frame's grey level
    first_patches = np.concatenate([item.patches.reshape(item.grid[0], 16, 588)[:, 0, 0] for item in items])
    np.testing.assert_allclose(first_patches, np.arange(10) * 10 / 127.5 - 1, atol=1e-6)


def test_the_frame_limit_holds_for_each_frame_not_for_the_chunk():
    video = np.zeros((4, 1080, 1920, 3), np.uint8)
    (item,) = navit_video_items(((frame, 0.0) for frame in video), frames_per_chunk=4, **KIMI)
    assert item.grid == (4, 48, 86)


def test_items_are_made_as_the_frames_come():
    seen = []

    def source():
        for i, frame in enumerate(frames(9)):
            seen.append(i)
            yield frame, float(i)

    items = navit_video_items(source(), frames_per_chunk=4, **KIMI)
    next(items)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(("n", "sizes"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])])
def test_chunk_sizes(n, sizes):
    assert [len(chunk) for chunk in cut_chunks(((frame, 0.0) for frame in frames(n)), 4)] == sizes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "00:00:00.000"),
        (0.5, "00:00:00.500"),
        (2.0, "00:00:02.000"),
        (61.25, "00:01:01.250"),
        (1 / 3, "00:00:00.333"),
        (0.9999, "00:00:00.999"),  # cut, not rounded
        (3723.75, "01:02:03.750"),
    ],
)
def test_timestamps_as_kimis_prompts_hold_them(seconds, text):
    assert format_timestamp(seconds) == text
