"""What may stop a conversion, and what is left then: the destination is absent or whole."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import (
    CheckpointError,
    checksums,
    convert_checkpoint,
    export_checkpoint,
    mappings,
    open_source,
    restore_host,
    stored,
    verify,
    verify_checksums,
)
from tests.checkpoints_convert import tiny

ORIGINAL = mappings.kimi_k25.mappings(**tiny.KIMI)["original"]
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "XLA_FLAGS": ""}
PREPARED = """
import json, os, resource, sys
import orbax.checkpoint
from checkpoints_convert import CheckpointError, convert_checkpoint, mappings, open_source, stored
sizes, src, dst = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
mapping = mappings.kimi_k25.mappings(**sizes)["original"]
stored.PIECE_BYTES = 2_000  # many pieces, and moments between them
"""
# A process for each conversion, which costs no import: the parent has no threads and no devices yet.
FORKING = """
for line in sys.stdin:
    child = os.fork()
    if not child:
        convert_checkpoint(open_source(src), mapping, dst, overwrite=True)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()  # until then its id is nobody else's
    os.waitpid(child, 0)
    print("over", flush=True)
"""
LIMITED = """
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    convert_checkpoint(open_source(src), mapping, dst)
except CheckpointError as error:
    print(error)
"""


@pytest.fixture
def source(tmp_path):
    return open_source(tiny.write_folder(tmp_path / "torch", tiny.language_model(), tiny.kimi_original()))


def start(program, *arguments):
    command = [sys.executable, "-c", PREPARED + program, json.dumps(tiny.KIMI), *map(str, arguments)]
    return subprocess.Popen(command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_conversion_killed_at_any_of_fifty_moments_leaves_its_destination_absent_or_whole(tmp_path, source):
    saved, moments = tmp_path / "saved", random.Random(0)
    with start(FORKING, tmp_path / "torch", saved) as process:

        def convert(kill_after=None):
            """How long it took."""
            began = time.perf_counter()
            process.stdin.write("\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            if kill_after is not None:
                time.sleep(kill_after)
                os.kill(child, signal.SIGKILL)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "over\n"
            return time.perf_counter() - began

        convert()
        seconds = convert()
        shutil.rmtree(saved)
        absent = partial = 0
        for number in range(50):
            convert(kill_after=moments.uniform(0, seconds))
            partial += (tmp_path / ".saved.partial").exists()
            if saved.exists():
                same, differing, without = verify_checksums(saved)
                assert (len(same), differing, without) == (len(ORIGINAL.shapes), [], [])
            else:
                absent += 1
            if number % 10 == 9:  # one that ends, for the next ones to overwrite
                convert()
                assert verify(source, ORIGINAL, saved).ok
            if number % 20 == 19:
                shutil.rmtree(saved)
        assert partial
        assert absent
        process.stdin.close()
    convert_checkpoint(source, ORIGINAL, saved, overwrite=True)
    assert verify(source, ORIGINAL, saved).ok
    # what the killed ones left is gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "torch"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit on the size of files")
def test_a_file_that_cannot_grow_stops_a_conversion_with_one_line_and_nothing_is_left(tmp_path, source):
    process = start(LIMITED, tmp_path / "torch", tmp_path / "saved")
    out, _ = process.communicate(timeout=120)
    (line,) = out.splitlines()
    assert line.startswith(f"{tmp_path / 'saved'}: cannot be written, and nothing is left of it: ")
    assert line.endswith("File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


def test_a_disk_that_fills_up_is_an_error_of_one_line(tmp_path, source, monkeypatch):
    def full(folder, arrays, seen):
        folder.mkdir()
        (folder / "some").write_bytes(b"x")
        raise ValueError("OUT_OF_RANGE: Failed to write 8 bytes: No space left on device [os_error_code='28']")

    monkeypatch.setattr("checkpoints_convert.convert.write_arrays", full)
    (tmp_path / "old").mkdir()
    for name in ("saved", "old"):
        with pytest.raises(CheckpointError, match=rf"{name}: cannot be written, .*: the disk is full$"):
            convert_checkpoint(source, ORIGINAL, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "torch"]


def test_an_export_that_fills_the_disk_leaves_nothing(tmp_path, source, monkeypatch):
    convert_checkpoint(source, ORIGINAL, tmp_path / "saved")

    def full(size_bytes):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"out: cannot be written, .*: the disk is full$"):
        export_checkpoint(tmp_path / "saved", ORIGINAL, tmp_path / "out", progress=full)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "torch"]


def test_what_has_no_room_is_not_begun(tmp_path, source, monkeypatch):
    convert_checkpoint(source, ORIGINAL, tmp_path / "saved")
    usage = namedtuple("usage", "total used free")(1_000_000, 990_000, 10_000)
    monkeypatch.setattr("checkpoints_convert.folders.shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"more: takes 0\.1 MB, but the disk has 0\.0 MB free"):
        convert_checkpoint(source, ORIGINAL, tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"out: takes 0\.1 MB, but the disk has 0\.0 MB free"):
        export_checkpoint(tmp_path / "saved", ORIGINAL, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "torch"]


def test_a_source_that_fails_midway_leaves_the_old_checkpoint(tmp_path, source, monkeypatch):
    convert_checkpoint(source, ORIGINAL, tmp_path / "saved")
    before = checksums(tmp_path / "saved")
    read, calls = source.read_into, []

    def cut(name, out, *, start=0):
        calls.append(name)
        if len(calls) > 9:
            raise CheckpointError(f"{name}: the network went away")
        read(name, out, start=start)

    monkeypatch.setattr(source, "read_into", cut)
    with pytest.raises(CheckpointError, match="the network went away"):
        convert_checkpoint(source, ORIGINAL, tmp_path / "saved", overwrite=True)
    with pytest.raises(CheckpointError, match="saved: exists already"):
        convert_checkpoint(source, ORIGINAL, tmp_path / "saved")
    assert checksums(tmp_path / "saved") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "torch"]


@pytest.mark.parametrize("piece_bytes", [stored.PIECE_BYTES, 5_000])
def test_a_flipped_bit_is_found_and_its_parameter_named(tmp_path, source, monkeypatch, piece_bytes):
    monkeypatch.setattr(stored, "PIECE_BYTES", piece_bytes)
    convert_checkpoint(source, ORIGINAL, tmp_path / "saved")
    values = restore_host(tmp_path / "saved")["projector/up/kernel"][:3].tobytes()
    for file in (tmp_path / "saved" / "arrays").rglob("*"):
        content = bytearray(file.read_bytes()) if file.is_file() else bytearray()
        if (at := content.find(values)) >= 0:
            content[at + 5] ^= 1
            file.write_bytes(content)
    same, differing, without = verify_checksums(tmp_path / "saved")
    assert len(same) == len(ORIGINAL.shapes) - 1
    assert differing == ["projector/up/kernel: its bytes are not those that were written"]
    assert not without
    report = verify(source, ORIGINAL, tmp_path / "saved")
    assert report.differing == ("mm_projector.proj.0.weight: 1 of 16384 values differ",)


def test_values_that_are_not_finite_are_counted_and_kept(tmp_path):
    tensors = tiny.kimi_original(np.float32)
    tensors["mm_projector.pre_norm.bias"][:3] = [np.nan, np.inf, -np.inf]
    tensors["mm_projector.pre_norm.weight"][:4] = [70_000, -65_520, 65_519, 1e-9]
    tensors["mm_projector.proj.2.bias"][:3] = [2**-25, -(2**-24), 0]
    source = open_source(tiny.write_folder(tmp_path / "torch", tensors))
    done = convert_checkpoint(source, ORIGINAL, tmp_path / "half", dtype="float16")
    assert (done.nonfinite, done.overflowed, done.underflowed, done.narrowed) == (3, 2, 2, True)
    kept = restore_host(tmp_path / "half")
    np.testing.assert_array_equal(kept["projector/norm/bias"][:3], [np.nan, np.inf, -np.inf])
    np.testing.assert_array_equal(kept["projector/norm/scale"][:4], [np.inf, -np.inf, 65_504, 0])
    done = convert_checkpoint(source, ORIGINAL, tmp_path / "same")
    assert (done.nonfinite, done.overflowed, done.underflowed, done.narrowed) == (3, 0, 0, False)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_casts_round_to_the_nearest_and_halfway_to_even(tmp_path, dtype):
    tensors = tiny.kimi_original(np.float32)
    bits = 7 if dtype is ml_dtypes.bfloat16 else 10
    unit = 2.0**-bits
    # halfway to an even last bit below, to an even one above, and just beside both
    tensors["mm_projector.pre_norm.bias"][:4] = [1 + unit / 2, 1 + 1.5 * unit, 1 + 0.51 * unit, 1 + 1.49 * unit]
    source = open_source(tiny.write_folder(tmp_path / "torch", tensors))
    convert_checkpoint(source, ORIGINAL, tmp_path / "cast", dtype=dtype)
    kept = restore_host(tmp_path / "cast")["projector/norm/bias"][:4].astype(np.float64)
    np.testing.assert_array_equal(kept, [1, 1 + 2 * unit, 1 + unit, 1 + unit])
    assert verify(source, ORIGINAL, tmp_path / "cast").rounded == len(tensors)


def test_float64_is_rounded_to_bfloat16_once(tmp_path):
    """By way of float32 the first would fall on the middle and go to the even 1, the second likewise upwards."""
    tensors = tiny.kimi_original(np.float64)
    unit = 2.0**-7
    given = [1 + unit / 2 + 2**-30, 1 + 1.5 * unit - 2**-30, -(1 + unit / 2 + 2**-30), 1e300, -1e-300, np.nan, np.inf]
    expected = [1 + unit, 1 + unit, -(1 + unit), np.inf, -0.0, np.nan, np.inf]
    tensors["mm_projector.pre_norm.bias"][: len(given)] = given
    source = open_source(tiny.write_folder(tmp_path / "torch", tensors))
    convert_checkpoint(source, ORIGINAL, tmp_path / "cast", dtype=ml_dtypes.bfloat16)
    kept = restore_host(tmp_path / "cast")["projector/norm/bias"][: len(given)].astype(np.float64)
    np.testing.assert_array_equal(kept, expected)
    loaded = ORIGINAL.read(source, "projector/norm/bias", dtype=ml_dtypes.bfloat16)[: len(given)].astype(np.float64)
    np.testing.assert_array_equal(loaded, expected)
    assert verify(source, ORIGINAL, tmp_path / "cast").ok
