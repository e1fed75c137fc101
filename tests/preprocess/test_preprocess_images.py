import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxenc.errors import InputError
from jaxenc.preprocess import (
    load_image,
    navit_item,
    navit_size,
    normalise,
    pad_right_bottom,
    patchify,
    resize_bicubic,
)

Image = pytest.importorskip("PIL.Image")

KIMI = {"patch": 14, "merge": 2, "patch_limit": 16384, "side_limit": 512}
HALF = (0.5, 0.5, 0.5)
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def saved(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def pixels(*rows):
    return np.array(rows, np.uint8)


# --- sources


def test_path_bytes_file_and_pil_image_give_the_same_pixels(tmp_path):
    expected = pixels([RED, GREEN, BLUE], [WHITE, RED, GREEN])
    image = Image.fromarray(expected)
    path = tmp_path / "photo.png"
    image.save(path)
    with path.open("rb") as file:
        for source in (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), file, image, expected):
            loaded = load_image(source)
            assert loaded.dtype == np.uint8
            np.testing.assert_array_equal(loaded, expected)


def test_a_jax_array_is_an_image():
    jnp = pytest.importorskip("jax.numpy")
    np.testing.assert_array_equal(load_image(jnp.full((2, 3, 3), 7, jnp.uint8)), np.full((2, 3, 3), 7))
    np.testing.assert_array_equal(load_image(jnp.full((2, 3, 3), 0.5, jnp.bfloat16)), np.full((2, 3, 3), 128))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "upright"),  # the stored image is a dark top row over two white rows, left column brighter
    [
        (1, [[50, 20], [200, 180], [200, 180]]),
        (2, [[20, 50], [180, 200], [180, 200]]),
        (3, [[180, 200], [180, 200], [20, 50]]),
        (4, [[200, 180], [200, 180], [50, 20]]),
        (5, [[50, 200, 200], [20, 180, 180]]),
        (6, [[200, 200, 50], [180, 180, 20]]),
        (7, [[180, 180, 20], [200, 200, 50]]),
        (8, [[20, 180, 180], [50, 200, 200]]),
    ],
)
def test_exif_orientation_is_applied(format, orientation, upright):
    stored = np.kron(np.array([[50, 20], [200, 180], [200, 180]], np.uint8), np.ones((16, 16), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {"quality": 95} if format == "JPEG" else {}
    loaded = load_image(saved(Image.fromarray(np.stack([stored] * 3, 2)), format, exif=exif, **options))
    assert loaded.shape == (16 * len(upright), 16 * len(upright[0]), 3)
    np.testing.assert_allclose(loaded[8::16, 8::16, 1].astype(int), upright, atol=3)


def test_greyscale_is_repeated():
    grey = pixels([0, 100, 255])
    for source in (Image.fromarray(grey), saved(Image.fromarray(grey), "PNG"), grey, grey[..., None]):
        np.testing.assert_array_equal(load_image(source), [[[0] * 3, [100] * 3, [255] * 3]])


def test_one_bit_pixels_are_black_and_white():
    bits = np.array([[True, False]])
    for source in (Image.fromarray(bits).convert("1"), saved(Image.fromarray(bits).convert("1"), "PNG"), bits):
        np.testing.assert_array_equal(load_image(source), [[[255] * 3, [0] * 3]])


def test_palette_gives_its_colours():
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putpixel((1, 0), 1)
    for format in ("PNG", "GIF"):
        np.testing.assert_array_equal(load_image(saved(image, format)), [[RED, BLUE]])


def test_transparent_palette_entry_is_laid_on_white():
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putpixel((1, 0), 1)
    for format in ("PNG", "GIF"):
        source = saved(image, format, transparency=1)
        np.testing.assert_array_equal(load_image(source), [[RED, WHITE]])
        np.testing.assert_array_equal(load_image(source, background=None), [[RED, BLUE]])


def test_transparent_colour_of_an_rgb_png_is_laid_on_white():
    source = saved(Image.fromarray(pixels([RED, BLUE])), "PNG", transparency=BLUE)
    np.testing.assert_array_equal(load_image(source), [[RED, WHITE]])


def test_alpha_is_laid_on_white_or_a_given_background_or_dropped():
    rgba = pixels([[*BLUE, 255], [*BLUE, 0], [0, 0, 0, 51]])
    for source in (Image.fromarray(rgba), saved(Image.fromarray(rgba), "PNG"), rgba):
        np.testing.assert_array_equal(load_image(source), [[BLUE, WHITE, (204, 204, 204)]])
        np.testing.assert_array_equal(load_image(source, background=RED), [[BLUE, RED, (204, 0, 0)]])
        np.testing.assert_array_equal(load_image(source, background=None), [[BLUE, BLUE, (0, 0, 0)]])


def test_grey_with_alpha_is_laid_on_white():
    la = pixels([[100, 255], [100, 0]])
    for source in (Image.fromarray(la), saved(Image.fromarray(la), "PNG"), la):
        np.testing.assert_array_equal(load_image(source), [[[100] * 3, WHITE]])


def test_premultiplied_alpha_is_divided_out():
    image = Image.fromarray(pixels([[200, 100, 50, 128]])).convert("RGBa")
    np.testing.assert_allclose(load_image(image).astype(int), [[[227, 177, 152]]], atol=2)


def test_cmyk_becomes_rgb():
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    np.testing.assert_array_equal(load_image(saved(image, "TIFF"))[0, 0], RED)
    np.testing.assert_allclose(load_image(saved(image, "JPEG", quality=95))[8, 8].astype(int), RED, atol=3)


def test_sixteen_bit_grey_is_scaled_not_clipped():
    grey = np.array([[0, 128, 129, 257, 32896, 65535]], np.uint16)
    expected = np.repeat(np.array([[0, 0, 1, 1, 128, 255]])[..., None], 3, axis=2)
    for format in ("PNG", "TIFF"):
        source = saved(Image.fromarray(grey), format)
        assert Image.open(io.BytesIO(source)).mode.startswith("I")
        np.testing.assert_array_equal(load_image(source), expected)
    np.testing.assert_array_equal(load_image(grey), expected)
    np.testing.assert_array_equal(load_image(grey.astype(">u2")), expected)
    np.testing.assert_array_equal(load_image(Image.fromarray(grey.astype(np.int32))), expected)


def test_integers_beyond_sixteen_bits_are_refused():
    with pytest.raises(InputError, match=r"^deep: 32-bit integer pixels"):
        load_image(Image.fromarray(np.array([[0, 70000]], np.int32)), name="deep")


def test_float_arrays_and_images_lie_between_0_and_1():
    values = np.array([[0, 0.5, 1]], np.float32)
    expected = [[[0] * 3, [128] * 3, [255] * 3]]
    for source in (values, values.astype(np.float64), values.astype(np.float16), Image.fromarray(values)):
        np.testing.assert_array_equal(load_image(source), expected)
    for wrong in (values * 255, values - 1, values * 1.01):
        with pytest.raises(InputError, match=r"^floats: float pixels lie in \[.*expected \[0, 1\]"):
            load_image(wrong, name="floats")


def test_the_first_frame_of_an_animation_is_taken():
    source = saved(Image.new("RGB", (2, 2), RED), "GIF", save_all=True, append_images=[Image.new("RGB", (2, 2), BLUE)])
    np.testing.assert_array_equal(load_image(source)[0, 0], RED)


def test_the_callers_image_is_left_as_it_was():
    image = Image.fromarray(pixels([[*BLUE, 0]]))
    load_image(image)
    assert image.mode == "RGBA"
    assert image.getpixel((0, 0)) == (*BLUE, 0)


# --- refusals: each starts with the name


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinite_pixels_are_refused_by_name(bad):
    array = np.zeros((4, 4, 3), np.float32)
    array[1, 2, 0] = bad
    with pytest.raises(InputError, match=r"^photo 3: the array holds NaN or infinite"):
        load_image(array, name="photo 3")
    with pytest.raises(InputError, match=r"^<array>: "):
        load_image(array)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.png: no such file") as caught:
        load_image(tmp_path / "gone.png")
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"])
def test_what_is_no_image_is_named(tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    for source, name in ((path, str(path)), (content, "<bytes>")):
        with pytest.raises(InputError, match="not a readable image") as caught:
            load_image(source)
        assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
def test_a_truncated_file_is_refused(format):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise), format)
    for kept in (0.9, 0.5, 0.1):
        with pytest.raises(InputError, match=r"^cut: not a readable image"):
            load_image(data[: int(len(data) * kept)], name="cut")


def test_a_decompression_bomb_is_refused():
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")):
        bomb += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    with pytest.raises(InputError, match=r"^bomb: too large to decode safely"):
        load_image(bomb, name="bomb")


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (0, 0), (5, 5, 0)])
def test_empty_arrays_are_refused(shape):
    with pytest.raises(InputError, match=r"^nothing: the image is empty"):
        load_image(np.zeros(shape, np.uint8), name="nothing")


def test_an_empty_pil_image_is_refused():
    with pytest.raises(InputError, match=r"^<Image>: the image is empty \(0 x 5\)"):
        load_image(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("shape", [(5,), (3, 5, 6), (1, 5, 5, 3), ()])
def test_wrong_ranks_and_channels_first_are_refused(shape):
    with pytest.raises(InputError, match=r"^<array>: shape \(.*expected \[h, w\]"):
        load_image(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint32, np.complex64])
def test_dtypes_without_a_scale_are_refused(dtype):
    with pytest.raises(InputError, match=r"^<array>: dtype"):
        load_image(np.zeros((2, 2, 3), dtype))


def test_other_objects_are_refused():
    for source, text in ((3, "<int>: cannot read a int"), (io.StringIO("text"), "cannot read a str")):
        with pytest.raises(InputError, match=text):
            load_image(source)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_files_load_or_are_refused_by_name(data):
    noise = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    content = bytearray(
        saved(Image.fromarray(noise), data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "WEBP"])))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        outcome = load_image(bytes(content), name="damaged").dtype.name
    except InputError as error:
        outcome = str(error)
    assert outcome == "uint8" or outcome.startswith("damaged: ")


# --- sizes


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [
        (224, 224, (16, 16)),
        (480, 640, (36, 46)),
        (1080, 1920, (78, 138)),
        (4096, 4096, (130, 130)),
        (1, 1, (2, 2)),
        (7168, 500, (490, 36)),
        (29, 27, (4, 2)),
        (100_000, 1, (512, 2)),
    ],
)
def test_navit_grids_of_kimi(height, width, grid):
    assert navit_size(height, width, **KIMI).grid == grid


def test_navit_size_scales_down_to_the_limit_and_pads_to_whole_merge_groups():
    assert navit_size(4096, 4096, **KIMI) == ((1795, 1795), (1820, 1820), (130, 130))
    assert navit_size(480, 640, **KIMI) == ((480, 640), (504, 644), (36, 46))
    frame = navit_size(1080, 1920, **{**KIMI, "patch_limit": 4096})
    assert frame == ((672, 1196), (672, 1204), (48, 86))


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from([4096, 16384]))
def test_navit_sizes_never_grow_and_stay_within_the_sides(height, width, patch_limit):
    size = navit_size(height, width, patch=14, merge=2, patch_limit=patch_limit, side_limit=512)
    for before, resized, padded, patches in zip((height, width), *size, strict=True):
        assert 1 <= resized <= min(before, 7168)
        assert resized <= padded < resized + 28
        assert padded == 14 * patches
        assert patches % 2 == 0
        assert patches <= 512


# --- pixels


def test_resize_is_pillows_antialiased_bicubic():
    # Values of Pillow 13: a = -0.5, support widened by the scale, rounded after each axis.
    ramp = np.repeat(np.arange(0, 256, 17, dtype=np.uint8)[None, :, None], 3, axis=2)
    resized = resize_bicubic(np.repeat(ramp, 2, axis=0), 1, 5)
    assert resized[0, :, 0].tolist() == [20, 72, 127, 183, 235]
    checkers = np.repeat((np.indices((8, 8)).sum(0) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)
    np.testing.assert_allclose(resize_bicubic(checkers, 2, 2).astype(int), 128, atol=2)


def test_padding_is_black_at_the_right_and_the_bottom():
    padded = pad_right_bottom(np.full((1, 2, 3), 9, np.uint8), 2, 3)
    assert padded[..., 0].tolist() == [[9, 9, 0], [0, 0, 0]]


def test_normalise_is_rounded_once():
    values = np.repeat(np.array([0, 1, 127, 128, 255], np.uint8)[:, None], 3, axis=1)
    expected = np.float32([-1, -253 / 255, -1 / 255, 1 / 255, 1])
    np.testing.assert_array_equal(normalise(values, mean=HALF, std=HALF), np.repeat(expected[:, None], 3, axis=1))
    per_channel = normalise(np.full((1, 3), 255, np.uint8), mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0))
    np.testing.assert_array_equal(per_channel, [[1, 3, 0.5]])


def test_patches_are_in_raster_order_with_channel_major_features():
    t, h, w, p = 2, 2, 3, 2
    index = np.arange(t * h * p * w * p * 3).reshape(t, h * p, w * p, 3)
    rows = patchify(index, patch=p)
    assert rows.shape == (t * h * w, 3 * p * p)
    for frame in range(t):
        for row in range(h):
            for column in range(w):
                patch = index[frame, row * p : (row + 1) * p, column * p : (column + 1) * p]
                expected = [patch[y, x, c] for c in range(3) for y in range(p) for x in range(p)]
                assert rows[(frame * h + row) * w + column].tolist() == expected


def test_an_item_is_padded_before_it_is_normalised():
    item = navit_item(np.full((1, 14, 20, 3), 255, np.uint8), **KIMI, mean=HALF, std=HALF, name="white")
    assert (item.grid, item.name, item.timestamp) == ((1, 2, 2), "white", None)
    assert item.patches.dtype == np.float32
    image = item.patches.reshape(2, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 28, 3)
    np.testing.assert_array_equal(image[:14, :20], 1)
    np.testing.assert_array_equal(image[14:], -1)
    np.testing.assert_array_equal(image[:, 20:], -1)


def test_the_photograph_that_the_package_carries_becomes_748_patches():
    from importlib.resources import files

    image = load_image(files("jaxenc") / "assets" / "cat.jpg")
    assert image.shape == (300, 451, 3)
    np.testing.assert_allclose(image.mean(axis=(0, 1)), [147.70, 111.44, 86.81], atol=0.5)
    item = navit_item(image[None], **KIMI, mean=HALF, std=HALF)
    assert item.grid == (1, 22, 34)
    assert item.patches.shape == (748, 588)
