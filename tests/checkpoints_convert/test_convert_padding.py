"""Padding with zeros: loaded and restored so that it divides, and never saved."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

import checkpoints_convert.convert
from checkpoints_convert import (
    CheckpointError,
    Entry,
    Mapping,
    Reorder,
    Target,
    load_parameters,
    open_source,
    restore_checkpoint,
    restore_host,
    save_checkpoint,
    stored_targets,
    strip_padding,
)
from tests.checkpoints_convert import tiny
from tests.devices import eight

P = PartitionSpec
# 2 layers, 20 heads of 4, 8 channels
ENTRIES = (
    Entry("qkv", "b.{layer}.qkv", stored=(240, 8), shape=(3, 20, 4, 8)),
    Entry(
        "qk",
        ("b.{layer}.q", "b.{layer}.k"),
        stored=(80, 8),
        shape=(20, 4, 8),
        reorder=(Reorder(1, (0, 2, 1, 3)), None),
    ),
    Entry("out", "b.{layer}.out", stored=(8, 80), shape=(8, 20, 4)),
    Entry("up", "b.{layer}.up", stored=(20, 8)),
    Entry("turned", "turned", stored=(20, 8), transpose=(1, 0)),
    Entry("bias", "bias", stored=(20,)),
)
MAPPING = Mapping("toy", "original", entries=ENTRIES, prefixes=("b.",), layers=2)
STORED = {
    "qkv": (2, 3, 20, 4, 8),
    "qk": (2, 2, 20, 4, 8),
    "out": (2, 8, 20, 4),
    "up": (2, 20, 8),
    "turned": (8, 20),
    "bias": (20,),
}
PADDED = {
    "qkv": (2, 3, 24, 4, 8),
    "qk": (2, 2, 24, 4, 8),
    "out": (2, 8, 24, 4),
    "up": (2, 24, 8),
    "turned": (8, 24),
    "bias": (24,),
}
# 24 heads over 8 devices: six shards are whole, one holds two heads and one none
HEADS = {
    "qkv": P(None, None, "model"),
    "qk": P(None, None, "model"),
    "out": P(None, None, "model"),
    "up": P(None, "model"),
    "turned": P(None, "model"),
    "bias": P("model"),
}
CASES = [
    *[(path, PADDED[path], HEADS[path]) for path in PADDED],
    *[(path, PADDED[path], P()) for path in PADDED],
    # the padded dimension is whole on each device, and another is sharded
    ("qkv", PADDED["qkv"], P(None, None, None, None, "model")),
    ("up", PADDED["up"], P(None, None, "model")),
    ("turned", PADDED["turned"], P("model")),
    # several dimensions are padded, of which one is sharded
    ("qkv", (2, 8, 24, 4, 8), P(None, None, "model")),
    ("qkv", (2, 8, 24, 4, 8), P(None, "model")),
    ("out", (2, 16, 24, 5), P(None, "model")),
    # whole layers are padding
    ("up", (8, 24, 8), P("model")),
    # most shards are
    ("bias", (160,), P("model")),
    # nothing is
    ("up", STORED["up"], P()),
]


def mesh(devices, axis_type=AxisType.Auto):
    if len(eight()) < devices:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return jax.make_mesh((devices,), ("model",), axis_types=(axis_type,), devices=eight()[:devices])


def tensors():
    shapes = {f"b.{n}.{name}": (80, 8) for n in range(2) for name in "qk"}
    shapes |= {f"b.{n}.qkv": (240, 8) for n in range(2)}
    shapes |= {f"b.{n}.out": (8, 80) for n in range(2)}
    shapes |= {f"b.{n}.up": (20, 8) for n in range(2)}
    return tiny.fill({**shapes, "turned": (20, 8), "bias": (20,)}, np.float32)


def values():
    """The parameters without padding."""
    t = tensors()
    qk = [[t[f"b.{n}.q"].reshape(20, 4, 8)[:, [0, 2, 1, 3]], t[f"b.{n}.k"].reshape(20, 4, 8)] for n in range(2)]
    return {
        "qkv": np.stack([t[f"b.{n}.qkv"].reshape(3, 20, 4, 8) for n in range(2)]),
        "qk": np.array(qk),
        "out": np.stack([t[f"b.{n}.out"].reshape(8, 20, 4) for n in range(2)]),
        "up": np.stack([t[f"b.{n}.up"] for n in range(2)]),
        "turned": t["turned"].T,
        "bias": t["bias"],
    }


def padded(value, shape):
    out = np.zeros(shape, value.dtype)
    out[tuple(slice(size) for size in value.shape)] = value
    return out


def targets(shapes=STORED, specs=None, on=None, dtype="float32"):
    return {
        path: Target(
            shapes[path], dtype, on and NamedSharding(on, (specs or {}).get(path, P())), stored_shape=STORED[path]
        )
        for path in STORED
    }


@pytest.fixture
def source(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    return open_source(tmp_path / "model.safetensors")


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path / "saved", {path: jax.numpy.asarray(value) for path, value in values().items()})
    return tmp_path / "saved"


@pytest.fixture
def _dirty(monkeypatch):
    """Fresh memory is most often zero already: here it is NaN."""
    clean = checkpoints_convert.convert.empty_aligned

    def dirty(shape, dtype):
        out = clean(shape, dtype)
        out.fill(np.nan)
        return out

    monkeypatch.setattr(checkpoints_convert.convert, "empty_aligned", dirty)


@pytest.mark.usefixtures("_dirty")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("path", "shape", "spec"), CASES)
def test_loaded_parameters_are_the_stored_ones_and_zero_beyond(source, path, shape, spec, dtype):
    sharding = NamedSharding(mesh(8), spec)
    wanted = targets() | {path: Target(shape, dtype, sharding, stored_shape=STORED[path])}
    loaded = load_parameters(source, MAPPING, wanted)[path]
    assert loaded.sharding == sharding
    assert tiny.same_bits(loaded, padded(values()[path].astype(dtype), shape))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("path", "shape", "spec"), CASES)
def test_restored_parameters_are_the_stored_ones_and_zero_beyond(saved, path, shape, spec, dtype):
    sharding = NamedSharding(mesh(8), spec)
    wanted = targets() | {path: Target(shape, dtype, sharding, stored_shape=STORED[path])}
    restored = restore_checkpoint(saved, wanted, cast=True)[path]
    assert restored.sharding == sharding
    assert tiny.same_bits(restored, padded(values()[path].astype(dtype), shape))


def test_only_the_bytes_that_are_stored_are_read(source, monkeypatch):
    read = []
    inner = source.read_into
    monkeypatch.setattr(
        source, "read_into", lambda name, out, *, start=0: (read.append((name, start)), inner(name, out, start=start))
    )
    load_parameters(source, MAPPING, targets(PADDED, HEADS, mesh(8)))
    # 24 over 8 devices is 3 for each, so the seventh has two rows and the eighth none
    assert sorted(start for name, start in read if name == "b.0.up") == [0, 24, 48, 72, 96, 120, 144]
    assert sorted(start for name, start in read if name == "bias") == [0, 3, 6, 9, 12, 15, 18]


def test_padded_parameters_are_saved_without_padding_and_restored_on_other_meshes(tmp_path, source):
    params = load_parameters(source, MAPPING, targets(PADDED, HEADS, mesh(8)))
    save_checkpoint(tmp_path / "saved", strip_padding(params, STORED))
    assert {path: target.shape for path, target in stored_targets(tmp_path / "saved").items()} == STORED
    for path, value in restore_host(tmp_path / "saved").items():
        assert tiny.same_bits(value, values()[path]), path
    # 20 divides over 4 and over 1, and becomes 21 over 3
    by_three = {path: tuple(21 if size == 24 else size for size in shape) for path, shape in PADDED.items()}
    for devices, shapes in ((1, STORED), (3, by_three), (4, STORED), (8, PADDED)):
        restored = restore_checkpoint(tmp_path / "saved", targets(shapes, HEADS, mesh(devices)))
        for path, value in restored.items():
            assert value.sharding == NamedSharding(mesh(devices), HEADS[path])
            assert tiny.same_bits(value, padded(values()[path], shapes[path])), path


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "spec", "stored", "expected"),
    [
        # the first dimension that divides takes the axis over
        ((3, 24, 8, 16), P(None, "model"), (3, 20, 8, 16), P(None, None, "model", None)),
        ((24, 5), P("model"), (20, 5), P(None, None)),
        ((3, 24, 8), P(None, None, "model"), (3, 20, 8), P(None, None, "model")),
        ((24, 8), P(None, "model"), (20, 7), P(None, None)),
        ((24, 8), P("model"), (20, 7), P(None, None)),
        ((24, 8), P("model"), (24, 8), P("model")),
    ],
)
def test_what_is_cut_is_sharded_where_it_divides(shape, spec, stored, expected, axis_type):
    value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    on = mesh(8, axis_type)
    params = {"w": jax.device_put(value, NamedSharding(on, spec))}
    stripped = strip_padding(params, {"w": stored})["w"]
    assert stripped.sharding == NamedSharding(on, expected)
    assert tiny.same_bits(stripped, value[tuple(slice(size) for size in stored)])


def test_two_mesh_axes_move_apart_or_together():
    if len(eight()) < 8:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    axis_types = (AxisType.Auto, AxisType.Auto)
    on = jax.make_mesh((2, 4), ("data", "model"), axis_types=axis_types, devices=eight()[:8])
    value = np.random.default_rng(0).standard_normal((24, 8, 4, 16)).astype(np.float32)
    for spec, stored, expected in (
        (P(("data", "model")), (20, 8, 4, 16), P(None, ("data", "model"), None, None)),
        (P("model", "data"), (21, 7, 4, 16), P(None, None, "model", "data")),
        (P("model", "data"), (20, 8, 4, 16), P(None, "data", "model", None)),
    ):
        params = {"w": jax.device_put(value, NamedSharding(on, spec))}
        stripped = strip_padding(params, {"w": stored})["w"]
        assert stripped.sharding == NamedSharding(on, expected)
        assert tiny.same_bits(stripped, value[tuple(slice(size) for size in stored)])


def test_parameters_without_padding_are_not_touched():
    params = {"w": jax.numpy.ones((4, 3)), "v": jax.numpy.ones(6)}
    stripped = strip_padding(params, {"w": (4, 3), "v": (5,), "elsewhere": (1,)})
    assert stripped.keys() == params.keys()
    assert stripped["w"] is params["w"]
    assert stripped["v"].shape == (5,)
    assert isinstance(stripped["v"].sharding, SingleDeviceSharding)


def test_loading_names_each_parameter_whose_shapes_do_not_fit(source):
    wanted = targets()
    wanted["up"] = Target((2, 16, 8), "float32", stored_shape=(2, 20, 8))
    wanted["out"] = Target((2, 8, 96), "float32", stored_shape=(2, 8, 20, 4))
    wanted["bias"] = Target((24,), "float32")
    wanted["turned"] = Target((8, 24), "float32", stored_shape=(8, 21))
    with pytest.raises(CheckpointError) as error:
        load_parameters(source, MAPPING, wanted)
    assert sorted(error.value.problems) == [
        "bias: parameter of shape [24], the checkpoint's gives [20]",
        "out: shape [2, 8, 96] cannot be the stored [2, 8, 20, 4] with padding",
        "turned: parameter of shape [8, 21], the checkpoint's gives [8, 20]",
        "up: shape [2, 16, 8] cannot be the stored [2, 20, 8] with padding",
    ]


def test_restoring_names_each_parameter_whose_shapes_do_not_fit(saved):
    wanted = targets()
    wanted["up"] = Target((2, 16, 8), "float32", stored_shape=(2, 20, 8))
    wanted["bias"] = Target((24,), "float32")
    wanted["turned"] = Target((8, 24), "float32", stored_shape=(8, 21))
    with pytest.raises(CheckpointError) as error:
        restore_checkpoint(saved, wanted)
    assert error.value.problems == [
        "bias: shape [20], expected [24]",
        "turned: shape [8, 20], expected [8, 21]",
        "up: shape [2, 16, 8] cannot be the stored [2, 20, 8] with padding",
    ]


def test_stripping_names_each_parameter_whose_shapes_do_not_fit():
    params = {path: jax.numpy.ones((2, 20)) for path in ("a", "b", "c", "d")}
    with pytest.raises(CheckpointError) as error:
        strip_padding(params, {"a": (2, 21), "b": (40,), "c": (2, 20)})
    assert error.value.problems == [
        "a: shape [2, 20] cannot be the stored [2, 21] with padding",
        "b: shape [2, 20] cannot be the stored [40] with padding",
        "d: its stored shape is not given",
    ]
