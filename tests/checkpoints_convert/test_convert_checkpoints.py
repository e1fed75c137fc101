"""Converted checkpoints: saved whole or not at all, restored onto other devices, verified, exported."""

import json
import os
import random
import subprocess
import sys
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

from checkpoints_convert import (
    CheckpointError,
    Target,
    convert_checkpoint,
    detect,
    export_checkpoint,
    export_parameters,
    inspect,
    is_checkpoint,
    load_parameters,
    mappings,
    open_source,
    read_metadata,
    restore_checkpoint,
    restore_host,
    save_checkpoint,
    stored_targets,
    verify,
)
from tests.checkpoints_convert import tiny

KIMI = mappings.kimi_k25.mappings(**tiny.KIMI)
ORIGINAL = KIMI["original"]


def mesh(devices):
    if len(jax.devices()) < devices:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def targets(dtype="bfloat16", sharding=None):
    return {path: Target(shape, dtype, sharding) for path, shape in ORIGINAL.shapes.items()}


@pytest.fixture
def source(tmp_path):
    return open_source(
        tiny.write_folder(tmp_path / "torch", tiny.language_model(), tiny.kimi_original(), config={"a": [1, None]})
    )


@pytest.fixture
def params(source):
    return load_parameters(source, ORIGINAL, targets())


def test_a_checkpoint_saved_on_8_devices_is_restored_on_others(tmp_path, source):
    # 48 columns of the MLP divide over 8, 6, 3 and 1.
    wanted = targets()
    wanted["layers/mlp/up/kernel"] = Target(
        (3, 48, 32), "bfloat16", NamedSharding(mesh(8), PartitionSpec(None, "model"))
    )
    params = load_parameters(source, ORIGINAL, wanted)
    save_checkpoint(tmp_path / "saved", params)
    for devices in (1, 3, 6):
        sharding = NamedSharding(mesh(devices), PartitionSpec(None, "model"))
        wanted["layers/mlp/up/kernel"] = Target((3, 48, 32), "bfloat16", sharding)
        restored = restore_checkpoint(tmp_path / "saved", wanted)
        assert restored.keys() == params.keys()
        assert restored["layers/mlp/up/kernel"].sharding == sharding
        assert all(tiny.same_bits(restored[path], value) for path, value in params.items())


def test_metadata_comes_back(tmp_path, params):
    metadata = {"config": {"vt_hidden_size": 32}, "source": "org/tiny", "files": {"model.safetensors": 12}}
    save_checkpoint(tmp_path / "saved", params, metadata)
    assert read_metadata(tmp_path / "saved") == metadata
    assert stored_targets(tmp_path / "saved")["final_norm/scale"] == Target((32,), np.dtype(ml_dtypes.bfloat16))
    assert is_checkpoint(tmp_path / "saved")
    assert not is_checkpoint(tmp_path / "torch")


def test_restore_reports_every_difference_together(tmp_path, params):
    save_checkpoint(tmp_path / "saved", params)
    wanted = targets()
    wanted["final_norm/scale"] = Target((31,), "bfloat16")
    wanted["final_norm/bias"] = Target((32,), "float32")
    wanted["extra"] = wanted.pop("position_embed")
    with pytest.raises(CheckpointError) as error:
        restore_checkpoint(tmp_path / "saved", wanted)
    assert error.value.problems == [
        "extra: not in the checkpoint",
        "final_norm/bias: dtype bfloat16, expected float32 (a cast must be asked for)",
        "final_norm/scale: shape [32], expected [31]",
        "position_embed: in the checkpoint, but not asked for",
    ]


def test_twelve_layers_are_not_restored_into_sixteen(tmp_path):
    kinds = {layers: mappings.kimi_k25.mappings(**{**tiny.KIMI, "layers": layers})["original"] for layers in (12, 16)}
    save_checkpoint(tmp_path / "saved", {path: np.zeros(shape) for path, shape in kinds[12].shapes.items()})
    with pytest.raises(CheckpointError) as error:
        restore_checkpoint(
            tmp_path / "saved", {path: Target(shape, "float64") for path, shape in kinds[16].shapes.items()}
        )
    assert str(error.value).startswith(f"{tmp_path / 'saved'}: differs from what is asked for (12 problems):\n")
    assert "layers/mlp/up/kernel: shape [12, 48, 32], expected [16, 48, 32]" in error.value.problems


def test_a_converted_checkpoint_is_restored_on_any_number_of_devices(tmp_path, source, monkeypatch):
    monkeypatch.setattr("checkpoints_convert.stored.PIECE_BYTES", 4_000)  # chunks of one layer
    convert_checkpoint(source, ORIGINAL, tmp_path / "converted")
    expected = load_parameters(source, ORIGINAL, targets())
    for devices in (1, 3, 6, 8):
        wanted, sharding = targets(), NamedSharding(mesh(devices), PartitionSpec(None, "model"))
        wanted["layers/mlp/up/kernel"] = Target((3, 48, 32), "bfloat16", sharding)
        restored = restore_checkpoint(tmp_path / "converted", wanted)
        assert restored["layers/mlp/up/kernel"].sharding == sharding
        assert all(tiny.same_bits(restored[path], value) for path, value in expected.items())
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:  # and by anybody else's program
        whole = checkpointer.restore((tmp_path / "converted" / "arrays").absolute())
    assert all(tiny.same_bits(whole[path], value) for path, value in expected.items())


def test_a_tower_of_several_dtypes_keeps_them(tmp_path):
    tensors = tiny.kimi_original()
    wide = {name for name in tensors if "norm" in name}
    tensors = {name: value.astype(np.float32) if name in wide else value for name, value in tensors.items()}
    source = open_source(tiny.write_folder(tmp_path / "torch", tensors))
    convert_checkpoint(source, ORIGINAL, tmp_path / "saved")
    assert verify(source, ORIGINAL, tmp_path / "saved").exact == len(tensors)
    export_checkpoint(tmp_path / "saved", ORIGINAL, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert all(tiny.same_bits(file.get_tensor(name), value) for name, value in tensors.items())


def test_restore_casts_where_asked(tmp_path, params):
    save_checkpoint(tmp_path / "saved", params)
    restored = restore_checkpoint(tmp_path / "saved", targets("float32"), cast=True)
    path = "projector/up/kernel"
    assert tiny.same_bits(restored[path], np.asarray(params[path]).astype(np.float32))


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: not a converted checkpoint"):
        restore_checkpoint(tmp_path / "nowhere", {})
    (tmp_path / "checkpoint.json").write_text('{"format": "another"}')
    with pytest.raises(CheckpointError, match="not of the format"):
        read_metadata(tmp_path)
    (tmp_path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        read_metadata(tmp_path)


def test_nothing_is_overwritten_unasked(tmp_path, params):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("x")
    for write in (
        lambda **options: save_checkpoint(tmp_path / "there", params, {"n": 2}, **options),
        lambda **options: export_parameters(params, ORIGINAL, tmp_path / "there", **options),
    ):
        with pytest.raises(CheckpointError, match="there: exists already"):
            write()
        with pytest.raises(CheckpointError, match=r"there: is not (a converted checkpoint|an export), so overwrite"):
            write(overwrite=True)
    assert (tmp_path / "there" / "precious").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "torch"]


def test_what_was_written_before_is_overwritten_when_asked(tmp_path, params):
    # an empty folder is as good as none
    for name in ("saved", "exported"):
        (tmp_path / name).mkdir()
    save_checkpoint(tmp_path / "saved", params, {"n": 1})
    save_checkpoint(tmp_path / "saved", params, {"n": 2}, overwrite=True)
    assert read_metadata(tmp_path / "saved") == {"n": 2}
    export_parameters(params, ORIGINAL, tmp_path / "exported", config={}, max_shard_bytes=30_000)
    export_parameters(params, ORIGINAL, tmp_path / "exported", overwrite=True)
    assert [path.name for path in (tmp_path / "exported").iterdir()] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "saved", "torch"]


def test_one_kind_of_folder_does_not_replace_another(tmp_path, params):
    save_checkpoint(tmp_path / "saved", params)
    export_parameters(params, ORIGINAL, tmp_path / "exported")
    with pytest.raises(CheckpointError, match="saved: is not an export, so overwrite does not replace it"):
        export_parameters(params, ORIGINAL, tmp_path / "saved", overwrite=True)
    with pytest.raises(CheckpointError, match="exported: is not a converted checkpoint, so overwrite"):
        save_checkpoint(tmp_path / "exported", params, overwrite=True)
    (tmp_path / "exported" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="exported: is not an export"):
        export_parameters(params, ORIGINAL, tmp_path / "exported", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: is not a converted checkpoint"):
        save_checkpoint(tmp_path / "file", params, overwrite=True)


def test_nothing_is_exported_over_its_own_checkpoint(tmp_path, params):
    saved = tmp_path / "some" / "saved"
    save_checkpoint(saved, params)
    (tmp_path / "link").symlink_to(saved)
    for out in (saved, saved / "out", tmp_path / "some", tmp_path / "link"):
        with pytest.raises(CheckpointError, match=r"is the source .*, or inside or around it"):
            export_checkpoint(saved, ORIGINAL, out, overwrite=True)
    assert restore_host(saved).keys() == params.keys()


KILLED = """
import sys
import jax, numpy as np
from checkpoints_convert import save_checkpoint
for n in range(1000):
    params = {f"p{i}": jax.numpy.full((256, 1024), n, "float32") for i in range(6)}
    if n == 1:
        print("saving", flush=True)
    save_checkpoint(sys.argv[1], params, {"n": n}, overwrite=True)
"""


def test_a_killed_save_leaves_the_destination_absent_or_whole(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "XLA_FLAGS": ""}
    delays = random.Random(0)
    saved = tmp_path / "saved"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(saved)], env=env, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"saving\n"
        time.sleep(delays.uniform(0.0, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()
        if saved.exists():
            values = restore_host(saved)
            assert len(values) == 6
            assert all((value == read_metadata(saved)["n"]).all() for value in values.values())
    save_checkpoint(saved, {"a": jax.numpy.zeros(2)}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, params):
    save_checkpoint(tmp_path / "saved", params, {"n": 1})
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "saved", params, {"n": object()}, overwrite=True)
    assert read_metadata(tmp_path / "saved") == {"n": 1}


def test_verify_counts_exact_tensors_and_names_changed_ones(tmp_path, source, params):
    save_checkpoint(tmp_path / "saved", params)
    report = verify(source, ORIGINAL, tmp_path / "saved")
    assert (report.exact, report.rounded, report.differing, report.ok) == (47, 0, (), True)

    changed = dict(params)
    changed["layers/mlp/down/bias"] = params["layers/mlp/down/bias"].at[1, 3].add(1)
    report = verify(source, ORIGINAL, changed)
    assert report.differing == ("vision_tower.encoder.blocks.1.mlp.fc1.bias: 1 of 32 values differ",)
    assert not report.ok


def test_verify_knows_a_stated_rounding_from_a_change(tmp_path):
    tensors = tiny.kimi_original(np.float32)
    tensors["mm_projector.pre_norm.bias"][4] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    params = load_parameters(source, ORIGINAL, targets("bfloat16"))
    report = verify(source, ORIGINAL, params)
    assert (report.exact, report.widened, report.rounded, report.ok, report.nonfinite) == (0, 0, 47, True, 1)
    # One unit in the last place is already a difference.
    bits = np.asarray(params["final_norm/scale"]).view(np.uint16).copy()
    bits[0] += 1
    report = verify(source, ORIGINAL, {**params, "final_norm/scale": bits.view(ml_dtypes.bfloat16)})
    assert report.differing == (
        "vision_tower.encoder.final_layernorm.weight: 1 of 32 values differ rounded from float32 to bfloat16",
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_counted(dtype, value):
    from checkpoints_convert.verify import count_nonfinite

    values = np.array([[0.0, -1.0, value, 60000.0], [-0.0, 1e-30, -60000.0, value]]).astype(dtype)
    assert count_nonfinite(values) == 2
    assert count_nonfinite(values[:, :2]) == 0


def test_export_writes_what_pytorch_reads(tmp_path, source, params):
    save_checkpoint(tmp_path / "saved", params, {"config": source.config})
    assert export_checkpoint(tmp_path / "saved", ORIGINAL, tmp_path / "out") == ["model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    back, original = open_source(tmp_path / "out"), tiny.kimi_original()
    assert set(back.names) == original.keys()
    assert all(tiny.same_bits(back.read(name), value) for name, value in original.items())
    assert back.config == {"a": [1, None]}


def test_export_splits_large_checkpoints_and_writes_their_index(tmp_path, params):
    files = export_parameters(params, KIMI["transformers"], tmp_path / "out", max_shard_bytes=30_000)
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    back, native = open_source(tmp_path / "out"), tiny.kimi_transformers(tiny.kimi_original())
    assert set(back.names) == native.keys()
    assert all(tiny.same_bits(back.read(name), value) for name, value in native.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in native.values())
    largest = max(value.nbytes for value in native.values())
    assert all((tmp_path / "out" / file).stat().st_size < max(30_000, largest) + 10_000 for file in files)


def test_export_reports_parameters_that_do_not_fit(tmp_path, params):
    wrong = {path: value for path, value in params.items() if path != "final_norm/bias"}
    wrong["final_norm/scale"] = np.zeros(3)
    with pytest.raises(CheckpointError) as error:
        export_parameters(wrong, ORIGINAL, tmp_path / "out")
    assert [problem.split(":")[0] for problem in error.value.problems] == ["final_norm/bias", "final_norm/scale"]
    assert not (tmp_path / "out").exists()


def test_inspect_says_what_would_be_read_and_what_ignored(source):
    audio = mappings.qwen3_omni_audio.mappings(**tiny.QWEN)["original"]
    report = inspect(source, {"vision": detect(source, KIMI), "audio": audio})
    assert json.loads(json.dumps(report)) == report
    assert (report["tensors"], report["files"], report["ignored"]) == (50, 2, {"language_model": 3})
    assert report["towers"].keys() == {"vision"}
    vision = report["towers"]["vision"]
    assert (vision["mapping"], vision["layout"], vision["problems"]) == ("kimi_k25", "original", [])
    assert len(vision["tensors"]) == 47
    assert vision["tensors"]["mm_projector.proj.2.weight"] == {
        "shape": [40, 128],
        "dtype": "bfloat16",
        "file": "model-00002-of-00002.safetensors",
        "size_bytes": 10240,
    }
    assert vision["size_bytes"] == 2 * vision["parameters"] == sum(v.nbytes for v in tiny.kimi_original().values())
    assert vision["size_bytes_by_file"] == {"model-00002-of-00002.safetensors": vision["size_bytes"]}
    assert vision["size_bytes_by_dtype"] == {"bfloat16": vision["size_bytes"]}
    # The language model's file was not looked into.
    assert source.sizes.keys() == {"model-00002-of-00002.safetensors"}
