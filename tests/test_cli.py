"""Both command lines: results on stdout, progress and errors on stderr, exit codes 0, 1 and 2."""

import contextlib
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import checkpoints_convert
import jaxenc
from checkpoints_convert.cli import app as convert_app
from checkpoints_convert.cli import parse_size
from jaxenc import console
from jaxenc.cli import app as jaxenc_app

SPEECH = Path(jaxenc.__file__).parent / "assets" / "sense_and_sensibility.flac"
PLAN_KEYS = {
    "encoder",
    "mesh",
    "strategy",
    "decisions",
    "flops_per_device",
    "flops_ideal",
    "flops_ratio",
    "padding_ratio",
    "param_bytes_per_device",
    "collectives_per_layer",
    "batch_layout",
    "candidates",
}


@pytest.fixture
def command(capsys):
    """Runs a command line in this process: (exit code, stdout, stderr)."""

    def run(app, *arguments):
        capsys.readouterr()
        code = console.run(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def as_json(command):
    """The JSON object of a command that has to succeed."""

    def run(app, *arguments):
        code, out, err = command(app, *arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


def assert_error(result, *says):
    """Exit code 1, nothing on stdout, on stderr one line and indented ones."""
    code, out, err = result
    assert (code, out) == (1, "")
    line, *details = err.splitlines()
    assert line.startswith("error: ")
    assert all(detail.startswith("  ") and detail[2:3].strip() for detail in details)
    for text in says:
        assert text in err


def assert_usage(result, *says):
    code, out, err = result
    assert (code, out) == (2, "")
    for text in says:
        assert text in " ".join(err.split())


@pytest.fixture(scope="module")
def converted(kimi_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "kimi"
    assert console.run(convert_app, ["convert", str(kimi_folder), str(path), "--quiet"]) == 0
    return path


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)).save(path)
    return path


# --- jaxenc list, plan


def test_list_shows_every_encoder(command, as_json):
    found = {e["name"]: e for e in as_json(jaxenc_app, "list")["encoders"]}
    assert found.keys() == {e.name for e in jaxenc.encoders()}
    assert found["kimi_k25"]["modality"] == "vision"
    assert found["whisper"]["variants"]["tiny.en"] == {"heads": 6}
    assert "moonshotai/Kimi-K2.5" in found["kimi_k25"]["published"]
    code, out, err = command(jaxenc_app, "list")
    assert (code, err) == (0, "")
    assert all(name in out for name in found)


def test_plan_says_what_becomes_of_twenty_heads_on_eight_devices(as_json):
    made = as_json(jaxenc_app, "plan", "qwen3_omni_audio", "--mesh", "data=1,model=8", "--batch", 8, "--tokens", 390)
    assert made.keys() >= PLAN_KEYS
    assert made["encoder"] == "qwen3_omni_audio"
    assert made["mesh"] == {"data": 1, "model": 8}
    assert made["strategy"] == "hybrid"
    attention = next(d for d in made["decisions"] if d["group"] == "attention")
    assert attention.keys() >= {"group", "axis", "size", "mesh_axes", "parts", "action", "reason"}
    assert (attention["axis"], attention["size"], attention["parts"]) == ("heads", 20, 4)
    assert [c["chosen"] for c in made["candidates"]].count(True) == 1
    # bfloat16: 647.9 M parameters, most of them over four devices
    assert 647.9e6 * 2 / 4 < made["param_bytes_per_device"] < 647.9e6 * 2 / 3
    data = as_json(jaxenc_app, "plan", "qwen3_omni_audio", "--mesh", "data=1,model=8", "--strategy", "data")
    assert data["strategy"] == "data"
    assert data["param_bytes_per_device"] == pytest.approx(647.9e6 * 2, rel=1e-3)


def test_plan_reads_a_checkpoint_too_and_prints_a_table(command, as_json, kimi_folder, converted):
    for src in (kimi_folder, converted):
        made = as_json(jaxenc_app, "plan", src, "--mesh", "model=4", "--dtype", "float32")
        assert made["encoder"] == "kimi_k25"
        assert made["strategy"] == "tensor"
    code, out, err = command(jaxenc_app, "plan", "kimi_k25", "--mesh", "data=1,model=8")
    assert (code, err) == (0, "")
    assert "kimi_k25 on 8 devices" in out
    assert "16 heads" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kimi_k26", "--mesh", "model=8"], ["kimi_k26: no such encoder; there are kimi_k25"]),
        (["whisper:huge", "--mesh", "model=8"], ["whisper has the variants large-v3"]),
        (["qwen3_omni_audio", "--mesh", "model=8", "--strategy", "tensor"], ["20", "8"]),
        (
            ["kimi_k25", "--mesh", "model=8", "--strategy", "best"],
            ["strategy 'best' should be one of 'auto', 'tensor'"],
        ),
        (["kimi_k25", "--mesh", "model=8", "--memory-limit", "999"], ["the memory limit of 999 bytes"]),
        (["kimi_k25", "--mesh", "model=8", "--strategy", "atention=pad"], ["did you mean 'attention'"]),
        (["kimi_k25", "--mesh", "model=7", "--strategy", "hybrid"], ["7 is prime", "would work: 6 and 8", "'data': "]),
        (["kimi_k25", "--mesh", "model=8", "--layout", "row"], ["layout 'row' should be one of 'auto', 'rows'"]),
        (["kimi_k25", "--mesh", "model=8", "--device", "h1000"], ["no device profile 'h1000'; known are h100"]),
        (["whisper:base", "--mesh", "model=8", "--tokens", "77"], ["whisper:base: every item has 1500 tokens", "77"]),
        (["whisper", "--mesh", "model=8", "--tokens", "3000"], ["every item has 1500 tokens"]),
        (["kimi_k25", "--mesh", "model=8", "--dtype", "float12"], ["float12"]),
        (["kimi_k25", "--mesh", "modle=8"], ["mesh axis 'modle'", "did you mean 'model'? Rename it"]),
        (["./nowhere", "--mesh", "model=8"], ["nowhere: no such file or folder"]),
        (["whisper", "--mesh", "model=8", "--tower", "vision"], ["there is no vision tower that is known here"]),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_plan_fails_with_an_error(command, arguments, says):
    assert_error(command(jaxenc_app, "plan", *arguments), *says)


def test_the_plan_in_the_readme_is_what_is_printed(command):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    call, shown = re.search(r"^    \$ jaxenc (plan .*)\n\n((?:    .*\n|\n)+)", readme, re.MULTILINE).groups()
    code, out, _ = command(jaxenc_app, *call.split())
    assert code == 0
    assert textwrap.dedent(shown).strip() == out.strip()


def test_plan_is_called_what_was_asked_for(as_json, kimi_folder):
    for name in ("whisper", "whisper:base", "kimi_k25"):
        assert as_json(jaxenc_app, "plan", name, "--mesh", "model=2")["encoder"] == name
    assert as_json(jaxenc_app, "plan", "whisper", "--mesh", "model=2", "--tokens", 1500)["encoder"] == "whisper"
    assert as_json(jaxenc_app, "plan", kimi_folder, "--mesh", "model=2")["encoder"] == "kimi_k25"


def test_plan_takes_a_strategy_by_groups_a_layout_and_a_device(command, as_json):
    common = ("plan", "qwen3_omni_audio", "--mesh", "data=1,model=8", "--batch", 1, "--tokens", 64)
    padded = as_json(jaxenc_app, *common, "--strategy", "attention=pad,mlp=tensor")
    assert padded["strategy"] == "attention=pad, mlp=tensor"
    assert padded["decisions"][0]["padded_size"] == 24
    spread, whole = (as_json(jaxenc_app, *common, "--strategy", "data", "--layout", a) for a in ("length", "rows"))
    assert (spread["batch_layout"], whole["batch_layout"]) == ("length", "rows")
    assert whole["flops_ratio"] == pytest.approx(8)
    slow = as_json(jaxenc_app, *common, "--strategy", "data", "--layout", "rows", "--device", "tpu_v5e")
    assert (whole["device"], slow["device"]) == ("h100", "tpu_v5e")
    assert slow["seconds"] > 2 * whole["seconds"]


@pytest.mark.parametrize(("arguments", "coloured"), [((), True), (("--quiet",), False), (("--json",), False)])
def test_plan_is_in_colours_on_a_terminal_alone(capsys, monkeypatch, arguments, coloured):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = ["plan", "kimi_k25", "--mesh", "data=1,model=8", *arguments]
    assert console.run(jaxenc_app, command) == 0
    piped = capsys.readouterr().out
    assert "\x1b" not in piped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert console.run(jaxenc_app, command) == 0
    shown = capsys.readouterr().out
    assert ("\x1b[1;32m" in shown) == coloured
    if not coloured:
        assert shown == piped


def test_plan_is_plain_where_there_is_no_rich(capsys, monkeypatch):
    command = ["plan", "kimi_k25", "--mesh", "data=1,model=8"]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert console.run(jaxenc_app, command) == 0
    assert capsys.readouterr().out.startswith("kimi_k25 on 8 devices, mesh (data=1, model=8)\nStrategy: tensor")


@pytest.mark.parametrize("mesh", ["8", "model=eight", "model=0", "=8", "", "model=2,model=4"])
def test_a_mesh_that_cannot_be_read_is_wrong_usage(command, mesh):
    assert_usage(command(jaxenc_app, "plan", "kimi_k25", "--mesh", mesh), "data=1,model=8")


def test_wrong_usage_exits_with_two(command):
    assert_usage(command(jaxenc_app, "plan", "kimi_k25"), "--mesh")
    assert_usage(command(jaxenc_app, "plan", "kimi_k25", "--mesh", "model=8", "--batch", "0"), "--batch")
    assert_usage(command(jaxenc_app, "transcribe"), "transcribe")
    assert_usage(command(convert_app, "convert", "only-a-source"), "DST")


@pytest.mark.parametrize("app", [jaxenc_app, convert_app], ids=["jaxenc", "checkpoints-convert"])
def test_help_names_every_command(command, app):
    code, out, _ = command(app, "--help")
    assert code == 0
    commands = ["list", "plan", "encode", "demo"] if app is jaxenc_app else ["inspect", "convert", "verify", "export"]
    assert all(name in out for name in commands)


def test_help_keeps_what_is_in_brackets(command):
    code, out, _ = command(jaxenc_app, "encode", "--help")
    assert code == 0
    assert "one array [rows, dim] for each" in " ".join(out.split())


@pytest.mark.parametrize("app", [jaxenc_app, convert_app], ids=["jaxenc", "checkpoints-convert"])
def test_version_is_printed(command, app):
    assert command(app, "--version") == (0, f"jaxenc {jaxenc.__version__}\n", "")


def test_debug_gives_the_traceback(command):
    with pytest.raises(jaxenc.ConfigError):
        command(jaxenc_app, "plan", "kimi_k26", "--mesh", "model=8", "--debug")


# --- jaxenc encode


@pytest.fixture(scope="module")
def expected(kimi_folder, photo):
    """The photo's rows: 4 x 6 patches."""
    (rows,) = jaxenc.load(kimi_folder).encode(images=[photo])
    assert rows.shape == (6, 24)
    return rows


def test_encode_writes_one_array_a_file(as_json, kimi_folder, photo, expected, tmp_path):
    other = shutil.copy(photo, tmp_path / "other.png")
    out = tmp_path / "rows.safetensors"
    data = as_json(jaxenc_app, "encode", kimi_folder, photo, other, "--out", out)
    assert data == {"out": str(out), "rows": {str(photo): [6, 24], str(other): [6, 24]}, "skipped": []}
    stored = load_file(out)
    assert stored.keys() == {str(photo), str(other)}
    assert stored[str(photo)].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(stored[str(photo)], expected)


def test_encode_runs_on_a_mesh_and_in_the_dtype_asked_for(command, qwen_folder, tmp_path):
    out = tmp_path / "rows.safetensors"
    arguments = ("--mesh", "model=2", "--dtype", "float32", "--strategy", "tensor", "--quiet")
    code, _, err = command(jaxenc_app, "encode", qwen_folder, SPEECH, "-o", out, *arguments)
    assert (code, err) == (0, "")
    (rows,) = load_file(out).values()
    encoder = jaxenc.load(qwen_folder, dtype="float32")
    assert rows.dtype == np.float32
    assert rows.shape == (encoder.output_rows(audio=[SPEECH])[0].rows, 24)
    assert np.isfinite(rows).all()


def test_encode_takes_the_layout_asked_for(as_json, command, kimi_folder, photo, expected, tmp_path, monkeypatch):
    out, layouts = tmp_path / "rows.safetensors", []
    encode = jaxenc.Encoder.encode
    monkeypatch.setattr(
        jaxenc.Encoder, "encode", lambda self, **how: layouts.append(how["layout"]) or encode(self, **how)
    )
    for layout in (("--layout", "length"), ("--layout", "rows"), ()):
        as_json(jaxenc_app, "encode", kimi_folder, photo, "-o", out, "--mesh", "model=2", "--strategy", "data", *layout)
        (rows,) = load_file(out).values()
        np.testing.assert_allclose(rows.astype(np.float32), expected.astype(np.float32), atol=0.05)
    assert layouts == ["length", "rows", "auto"]
    assert_error(command(jaxenc_app, "encode", kimi_folder, photo, "-o", out, "--layout", "row", "--quiet"), "'row'")


def test_encode_stops_at_a_bad_file_unless_told_to_skip_it(command, kimi_folder, photo, expected, tmp_path):
    bad, out = tmp_path / "bad.png", tmp_path / "rows.npz"
    bad.write_bytes(b"no picture")
    assert_error(command(jaxenc_app, "encode", kimi_folder, bad, "-o", out, "--quiet"), str(bad))
    assert not out.exists()
    code, text, err = command(jaxenc_app, "encode", kimi_folder, bad, photo, "-o", out, "--skip-bad")
    assert code == 0
    assert text.splitlines() == [f"{photo}: 6 rows of 24", f"{bad}: skipped", f"written to {out}"]
    assert "encoding 2 files" in err
    with np.load(out) as arrays:
        assert arrays.files == [str(photo)]
        # NumPy's own files have no bfloat16
        assert arrays[str(photo)].dtype == np.float32
        np.testing.assert_array_equal(arrays[str(photo)], expected.astype(np.float32))


def test_encode_writes_nothing_where_every_file_is_bad(command, kimi_folder, tmp_path):
    bad = [tmp_path / "one.png", tmp_path / "two.png"]
    for path in bad:
        path.write_bytes(b"no picture")
    out = tmp_path / "rows.npz"
    result = command(jaxenc_app, "encode", kimi_folder, *bad, "-o", out, "--skip-bad", "--quiet", "--json")
    assert_error(result, "none of the 2 files could be read")
    assert not out.exists()


def test_encode_leaves_what_is_there_where_writing_fails(command, kimi_folder, photo, tmp_path, monkeypatch):
    out = tmp_path / "rows.npz"
    out.write_bytes(b"of an earlier run")

    def full_disk(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", full_disk)
    assert_error(command(jaxenc_app, "encode", kimi_folder, photo, "-o", out, "--quiet"), "no space left")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npz"]
    assert out.read_bytes() == b"of an earlier run"


def test_encode_that_is_interrupted_exits_with_130_and_writes_nothing(kimi_folder, photo, tmp_path, python):
    files = [str(photo)] * 10_000
    process = python("-m", "jaxenc", "encode", str(kimi_folder), *files, "-o", str(tmp_path / "rows.npz"))
    assert "encoding 10000 files" in process.stderr.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "shown"), [((), True), (("--quiet",), False), (("--json",), False)])
def test_encode_shows_how_far_it_is_on_a_terminal(command, kimi_folder, photo, tmp_path, monkeypatch, arguments, shown):
    asked = []
    encode = jaxenc.Encoder.encode
    monkeypatch.setattr(
        jaxenc.Encoder, "encode", lambda self, **how: asked.append(how["progress"]) or encode(self, **how)
    )
    code, _, err = command(jaxenc_app, "encode", kimi_folder, photo, "-o", tmp_path / "rows.npz", *arguments)
    assert (code, asked) == (0, [shown])
    # captured stderr is no terminal
    assert "1/1" not in err


def test_warnings_move_above_a_progress_bar(kimi_folder, photo, tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    encode = jaxenc.Encoder.encode
    moved = io.StringIO()

    def with_a_bar(self, **how):
        with contextlib.redirect_stderr(moved):
            return encode(self, **how)

    monkeypatch.setattr(jaxenc.Encoder, "encode", with_a_bar)
    handlers = logging.root.handlers[:]
    logging.root.handlers.clear()
    try:
        arguments = [kimi_folder, bad, photo, "-o", tmp_path / "rows.npz", "--skip-bad"]
        assert console.run(jaxenc_app, ["encode", *map(str, arguments)]) == 0
    finally:
        logging.root.handlers[:] = handlers
    assert moved.getvalue().startswith(f"skipped: {bad}")


def test_encode_checks_where_it_writes_first(command, kimi_folder, photo, tmp_path):
    assert_usage(command(jaxenc_app, "encode", kimi_folder, photo, "-o", tmp_path / "rows.txt"), ".safetensors or .npz")
    assert_usage(command(jaxenc_app, "encode", kimi_folder, photo, "-o", tmp_path / "no" / "rows.npz"), "no folder")
    assert_usage(command(jaxenc_app, "encode", kimi_folder, photo), "--out")


def test_encode_needs_as_many_devices_as_the_mesh_has(command, kimi_folder, photo, tmp_path):
    result = command(jaxenc_app, "encode", kimi_folder, photo, "-o", tmp_path / "a.npz", "--mesh", "data=3,model=8")
    assert_error(result, "24", str(jax.device_count()))


# --- checkpoints-convert


def test_inspect_says_what_would_be_read(command, as_json, kimi_folder):
    found = as_json(convert_app, "inspect", kimi_folder)
    tower = found["towers"]["kimi_k25"]
    # 31 tensors of a fixed tower: 5 around the blocks, 12 in each of two, 6 of the projector
    assert len(tower["tensors"]) == 5 + 2 * 12 + 6
    assert tower["layout"] == "original"
    assert tower["prefixes"] == ["vision_tower.", "mm_projector."]
    assert tower["size_bytes"] == sum(t["size_bytes"] for t in tower["tensors"].values()) == 2 * tower["parameters"]
    assert tower["problems"] == []
    assert found["ignored"] == {"language_model": 4}
    assert (found["tensors"], found["files"]) == (39, 3)
    code, out, err = command(convert_app, "inspect", kimi_folder)
    assert (code, err) == (0, "")
    assert "35 tensors" in out
    assert "language_model.* (4)" in out


def test_inspect_says_what_a_converted_checkpoint_holds_and_where_it_came_from(
    command, as_json, converted, kimi_folder, tmp_path
):
    found = as_json(convert_app, "inspect", converted)
    before = as_json(convert_app, "inspect", kimi_folder)["towers"]["kimi_k25"]
    assert (found["converted"], found["encoder"]) == (True, "kimi_k25")
    assert (found["parameters"], found["size_bytes"]) == (before["parameters"], before["size_bytes"])
    assert found["provenance"]["source"] == str(kimi_folder)
    assert found["exact"] is True
    assert found["tensors"]["layers/mlp/up/kernel"] == {
        "shape": [2, 96, 64],
        "dtype": "bfloat16",
        "size_bytes": 2 * 2 * 96 * 64,
    }
    code, out, err = command(convert_app, "inspect", converted)
    assert (code, err) == (0, "")
    assert f"from {kimi_folder}, original layout" in out
    assert "every tensor is the source's, bit for bit" in out
    # what a program saved came from nowhere that is known
    jaxenc.from_config("whisper:tiny.en").save(tmp_path / "saved")
    code, out, err = command(convert_app, "inspect", tmp_path / "saved")
    assert code == 0
    assert "a converted checkpoint of whisper" in out
    assert "written by a program" in out


def test_convert_writes_a_checkpoint_and_refuses_to_overwrite(command, as_json, converted, kimi_folder, tmp_path):
    dst = tmp_path / "kimi"
    data = as_json(convert_app, "convert", kimi_folder, dst, "--dtype", "float32")
    parameters = as_json(convert_app, "inspect", kimi_folder)["towers"]["kimi_k25"]["parameters"]
    assert data == {
        "source": str(kimi_folder),
        "destination": str(dst),
        "encoder": "kimi_k25",
        "dtype": "float32",
        "parameters": parameters,
        "size_bytes": 4 * parameters,
        "nonfinite": 0,
        "overflowed": 0,
        "underflowed": 0,
    }
    assert_error(command(convert_app, "convert", kimi_folder, dst), str(dst), "exists already", "--overwrite")
    assert jaxenc.load(dst).dtype == np.float32
    code, out, err = command(convert_app, "convert", kimi_folder, dst, "--overwrite")
    assert code == 0
    assert "bfloat16" in out
    assert err == ""  # a bar on a terminal alone
    assert jaxenc.load(dst).dtype == ml_dtypes.bfloat16


def test_a_dry_run_says_what_would_be_read_and_written_and_touches_nothing(
    command, as_json, converted, kimi_folder, tmp_path
):
    dst = tmp_path / "kimi"
    tower = as_json(convert_app, "inspect", kimi_folder)["towers"]["kimi_k25"]
    data = as_json(convert_app, "convert", kimi_folder, dst, "--dtype", "float32", "--dry-run")
    assert data == {
        "source": str(kimi_folder),
        "destination": str(dst),
        "encoder": "kimi_k25",
        "dry_run": True,
        "dtype": "float32",
        "tensors": 35,
        "size_bytes": 4 * tower["parameters"],
        "read_bytes_by_file": tower["size_bytes_by_file"],
    }
    code, out, err = command(convert_app, "convert", kimi_folder, dst, "--dry-run")
    assert (code, err) == (0, "")
    assert out.startswith("would read ")
    assert f"of bfloat16 in {dst}" in out
    data = as_json(convert_app, "export", converted, tmp_path / "out", "--dry-run", "--max-shard-size", "100kB")
    assert data["tensors"] == 35
    assert sum(data["written_bytes_by_file"].values()) == tower["size_bytes"]
    assert list(data["written_bytes_by_file"]) == data["files"]
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_says_where_it_came_from_and_is_restored_without_that(as_json, kimi_folder, tmp_path):
    published = shutil.copytree(kimi_folder, tmp_path / "published")
    as_json(convert_app, "convert", published, tmp_path / "kimi", "--dtype", "float16")
    expected = jaxenc.load(published, dtype="float32")
    files = {file.name: file.stat().st_size for file in published.glob("*.safetensors")}
    shutil.rmtree(published)
    metadata = checkpoints_convert.read_metadata(tmp_path / "kimi")
    provenance = metadata["provenance"]
    assert (provenance["source"], provenance["mapping"], provenance["layout"]) == (
        str(published),
        "kimi_k25",
        "original",
    )
    assert provenance["files"].items() <= files.items()
    assert provenance["versions"].keys() == {"jaxenc", "jax", "orbax-checkpoint"}
    assert metadata["config"]["model_type"] == "kimi_k25"
    assert metadata["conversion"]["source_dtypes"].keys() == {"bfloat16"}
    assert "nearest" in metadata["conversion"]["rounding"]
    # encoders compute in float32 or bfloat16: float16 is widened, which rounds nothing
    encoder = jaxenc.load(tmp_path / "kimi")
    assert encoder.dtype == np.float32
    for one, other in zip(jax.tree.leaves(encoder.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other).astype(np.float16).astype(np.float32))


def test_a_converted_checkpoint_is_converted_again(as_json, converted, kimi_folder, tmp_path):
    as_json(convert_app, "convert", converted, tmp_path / "wide", "--dtype", "float32")
    assert as_json(convert_app, "verify", kimi_folder, tmp_path / "wide")["widened"] == 35
    assert as_json(convert_app, "verify", tmp_path / "wide")["ok"]


def test_convert_warns_of_values_that_are_not_finite(as_json, kimi_folder, tmp_path, caplog):
    published = shutil.copytree(kimi_folder, tmp_path / "published")
    for file in published.glob("*.safetensors"):
        tensors = load_file(file)
        if "mm_projector.proj.2.bias" in tensors:
            tensors["mm_projector.proj.2.bias"][:2] = np.nan
            tensors["mm_projector.proj.2.bias"][2] = 1e30
            save_file(tensors, file, metadata={"format": "pt"})
    data = as_json(convert_app, "convert", published, tmp_path / "kimi", "--dtype", "float16")
    assert (data["nonfinite"], data["overflowed"]) == (2, 1)
    assert "warning: 2 values are NaN or infinite in the source; they are stored as they are" in caplog.messages
    assert "warning: 1 value is too large for float16: infinite now" in caplog.messages


def test_convert_takes_no_other_dtype(command, kimi_folder, tmp_path):
    assert_usage(command(convert_app, "convert", kimi_folder, tmp_path / "kimi", "--dtype", "int8"), "float16")


def test_convert_shows_bytes_and_rate_on_a_terminal(kimi_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console.Console.is_interactive", True, raising=False)
    assert console.run(convert_app, ["convert", str(kimi_folder), str(tmp_path / "one")]) == 0
    err = capsys.readouterr().err
    assert "converting" in err
    assert "B" in err
    assert console.run(convert_app, ["convert", str(kimi_folder), str(tmp_path / "two"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_convert_never_replaces_what_it_did_not_write(command, kimi_folder, tmp_path):
    folder = tmp_path / "published" / "kimi"
    shutil.copytree(kimi_folder, folder)
    files = sorted(folder.iterdir())
    for dst in (folder, folder / "converted", folder.parent):
        assert_error(command(convert_app, "convert", folder, dst, "--overwrite"), f"{dst}: is the source")
    assert sorted(folder.iterdir()) == files
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("x")
    says = "is not a converted checkpoint, so overwrite does not replace it; choose another place"
    assert_error(command(convert_app, "convert", folder, other, "--overwrite"), f"{other}: {says}")
    assert (other / "precious").read_text() == "x"


def test_convert_and_inspect_report_every_problem(command, kimi_folder, tmp_path):
    folder = shutil.copytree(kimi_folder, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["vt_intermediate_size"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    result = command(convert_app, "convert", folder, tmp_path / "dst", "--quiet")
    assert_error(result, "3 problems", "fc0.weight of layers 0-1: shape [96, 64], expected [100, 64]\n  ", "fc1.weight")
    assert len(result[2].splitlines()) == 4
    assert not (tmp_path / "dst").exists()
    code, out, err = command(convert_app, "inspect", folder)
    assert (code, err) == (1, "")
    assert out.count("  problem: ") == 3
    assert out.splitlines()[-1] == "convert would refuse this: 3 problems"
    code, out, _ = command(convert_app, "inspect", folder, "--json")
    assert code == 1
    assert len(json.loads(out)["towers"]["kimi_k25"]["problems"]) == 3
    assert_error(command(convert_app, "convert", folder, tmp_path / "dst", "--tower", "audio", "--quiet"), "no audio")


def test_verify_finds_a_sound_checkpoint_equal_bit_for_bit(command, as_json, kimi_folder, converted):
    data = as_json(convert_app, "verify", kimi_folder, converted)
    assert data == {
        "source": str(kimi_folder),
        "destination": str(converted),
        "exact": 35,
        "widened": 0,
        "rounded": 0,
        "differing": [],
        "nonfinite": 0,
        "ok": True,
    }
    code, out, err = command(convert_app, "verify", kimi_folder, converted)
    assert (code, out, err) == (0, "35 tensors equal bit for bit\n", "")


def test_verify_knows_that_a_wider_type_rounds_nothing(command, as_json, kimi_folder, tmp_path):
    as_json(convert_app, "convert", kimi_folder, tmp_path / "wide", "--dtype", "float32")
    data = as_json(convert_app, "verify", kimi_folder, tmp_path / "wide")
    assert (data["exact"], data["widened"], data["rounded"], data["ok"]) == (0, 35, 0, True)
    result = command(convert_app, "verify", kimi_folder, tmp_path / "wide")
    assert result == (0, "35 tensors equal (stored as float32)\n", "")


def test_verify_reports_a_tampered_checkpoint(command, kimi_folder, converted, tmp_path):
    params = checkpoints_convert.restore_host(converted)
    bias = params["layers/mlp/up/bias"].copy()
    bias[1, 7] += 1
    metadata = checkpoints_convert.read_metadata(converted)
    checkpoints_convert.save_checkpoint(tmp_path / "tampered", {**params, "layers/mlp/up/bias": bias}, metadata)
    code, out, err = command(convert_app, "verify", kimi_folder, tmp_path / "tampered", "--json")
    data = json.loads(out)
    assert code == 1
    assert data["differing"] == ["vision_tower.encoder.blocks.1.mlp.fc0.bias: 1 of 96 values differ"]
    assert (data["exact"], data["ok"]) == (34, False)
    line, detail = err.splitlines()
    assert line.startswith("error: ")
    assert detail == "  vision_tower.encoder.blocks.1.mlp.fc0.bias: 1 of 96 values differ"


def test_verify_alone_compares_with_the_checksums_that_were_kept(command, as_json, converted, tmp_path):
    data = as_json(convert_app, "verify", converted)
    assert (data["ok"], data["differing"], data["without_checksum"]) == (True, [], [])
    damaged = shutil.copytree(converted, tmp_path / "damaged")
    file = max((path for path in damaged.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, _, err = command(convert_app, "verify", damaged)
    assert code == 1
    assert f"{damaged}: is not known to be as it was written (1 problem):\n  " in err
    assert "its bytes are not those that were written" in err


def test_verify_wants_a_converted_checkpoint(command, kimi_folder):
    assert_error(command(convert_app, "verify", kimi_folder, kimi_folder), "not a converted checkpoint")


def tensors_of(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_export_gives_back_what_came_in_bit_for_bit(as_json, kimi_folder, converted, tmp_path):
    out = tmp_path / "out"
    data = as_json(convert_app, "export", converted, out)
    assert data == {
        "source": str(converted),
        "destination": str(out),
        "layout": "original",
        "files": ["model.safetensors"],
        "exact": True,
        "claim": "every tensor is the source's, bit for bit",
    }
    original, exported = tensors_of(kimi_folder), tensors_of(out)
    assert exported.keys() == {name for name in original if not name.startswith("language_model.")}
    for name, value in exported.items():
        assert value.dtype == original[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value.view(np.uint16), original[name].view(np.uint16), err_msg=name)
    assert json.loads((out / "config.json").read_text()) == json.loads((kimi_folder / "config.json").read_text())


def test_what_was_exported_in_transformers_layout_is_the_same_encoder(command, as_json, converted, tmp_path):
    out = tmp_path / "out"
    data = as_json(convert_app, "export", converted, out, "--layout", "transformers", "--max-shard-size", 100_000)
    assert len(data["files"]) > 1
    assert all((out / file).is_file() for file in [*data["files"], "model.safetensors.index.json"])
    assert "model.vision_tower.layers.0.attn.q_proj.weight" in tensors_of(out)
    again, first = jaxenc.load(out), jaxenc.load(converted)
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(first.params), strict=True):
        np.testing.assert_array_equal(one, other)
    assert_error(command(convert_app, "export", converted, out), "exists already")
    assert_usage(command(convert_app, "export", converted, out, "--layout", "flax"), "original, transformers")


def test_export_says_what_it_cannot_claim(command, as_json, kimi_folder, tmp_path):
    for dtype, says in (("float32", "but not its bits"), ("float16", "values are rounded to the nearest value")):
        as_json(convert_app, "convert", kimi_folder, tmp_path / dtype, "--dtype", dtype)
        data = as_json(convert_app, "export", tmp_path / dtype, tmp_path / f"{dtype} out")
        assert data["exact"] is False
        assert data["claim"].startswith(f"stored as {dtype}, came as bfloat16: ")
        assert says in data["claim"]
        index = json.loads((tmp_path / f"{dtype} out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["note"] == data["claim"]
        assert {value.dtype.name for value in tensors_of(tmp_path / f"{dtype} out").values()} == {dtype}
    encoder = jaxenc.load(kimi_folder)
    encoder.save(tmp_path / "saved")
    data = as_json(convert_app, "export", tmp_path / "saved", tmp_path / "saved out")
    assert data["exact"] is None
    assert as_json(convert_app, "verify", tmp_path / "saved")["ok"]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 1536 * 1024), ("7", 7), ("3kb", 3000)])
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5 apples", "1e9"])
def test_what_is_no_size_is_wrong_usage(command, converted, tmp_path, text):
    assert_usage(command(convert_app, "export", converted, tmp_path / "out", f"--max-shard-size={text}"), "5GB, 500MiB")


def test_export_wants_a_converted_checkpoint(command, kimi_folder, tmp_path):
    assert_error(command(convert_app, "export", kimi_folder, tmp_path / "out"), "not a converted checkpoint")


# --- as programs


def program(module, *arguments):
    """Runs a command line in a process of its own."""
    return python(f"from {module} import main; main()", *arguments)


def python(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )


def test_a_program_prints_one_json_object_and_is_silent_when_asked():
    arguments = ("plan", "qwen3_omni_audio", "--mesh", "model=8", "--json")
    loud = program("jaxenc.cli", *arguments)
    assert loud.returncode == 0
    assert json.loads(loud.stdout)["strategy"] == "hybrid"
    assert loud.stderr == (
        "qwen3_omni_audio on mesh (model=8): 20 heads do not divide over 8 devices of 'model', so 'hybrid' is used "
        "instead of 'tensor'. Ask for strategy 'hybrid' to silence this.\n"
    )
    quiet = program("jaxenc.cli", *arguments, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, loud.stdout, "")


def test_a_program_says_of_a_damaged_checkpoint_what_to_do_and_no_more(converted, tmp_path):
    damaged = shutil.copytree(converted, tmp_path / "damaged")
    largest = max(damaged.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    failed = program("checkpoints_convert.cli", "export", damaged, tmp_path / "out")
    assert (failed.returncode, failed.stdout) == (1, "")
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"error: {damaged}: cannot be restored; if a file is damaged, convert it again")


def test_a_line_of_the_hub_is_printed_once():
    shown = python(
        "from huggingface_hub.utils import logging\n"
        "from jaxenc.console import run\n"
        "from jaxenc.cli import app\n"
        "run(app, ['list'])\n"
        "logging.get_logger('huggingface_hub.utils').warning('Retrying')"
    )
    assert shown.stderr == "Retrying\n"


def test_jaxenc_is_a_module_too():
    shown = python("import runpy; runpy.run_module('jaxenc', run_name='__main__')", "--version")
    assert (shown.returncode, shown.stdout) == (0, f"jaxenc {jaxenc.__version__}\n")


def test_a_program_exits_with_the_code_of_its_error(tmp_path):
    failed = program("checkpoints_convert.cli", "inspect", tmp_path / "nowhere", "--debug")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "Traceback" in failed.stderr
    assert "CheckpointError" in failed.stderr


def test_demo_shows_the_plan_and_the_difference_to_one_device(qwen_folder):
    shown = program("jaxenc.cli", "demo", qwen_folder, "--json")
    assert shown.returncode == 0, shown.stderr
    (tower,) = json.loads(shown.stdout)["towers"]
    assert tower["encoder"] == "qwen3_omni_audio"
    assert tower["plan"]["mesh"] == {"data": 1, "model": 8}
    assert tower["rows"][1] == 24
    # rounding of bfloat16 or float32, whichever the demonstration computes in, and nothing more
    assert tower["difference"] < 0.02
    assert "hybrid" in shown.stderr
