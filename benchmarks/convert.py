"""Seconds, memory and bytes of `checkpoints-convert` on a checkpoint shaped like Kimi-K2.5's.

    python -m benchmarks.convert [--small] [--rounds N]

64 files with the published names and sizes, 0.6 TB of which only the vision tower and projector are there: the language
model's experts are holes in sparse files, and nothing may read them. Needs 4 GB of disk and a file system with holes.
"""

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.machine import load_average, versions
from benchmarks.process import ROOT, fresh, resident_bytes
from benchmarks.results import RESULTS, Row, Table, keep
from jaxenc import demo
from jaxenc.models import kimi_k25

SHARDS, MOE_LAYERS, EXPERTS, HIDDEN, EXPERT_MLP, GROUP = 64, 60, 384, 7168, 2048, 32
BLOCK_BYTES, WARM_BYTES = 8 << 20, 2 << 30
MEASURED = (
    "inspect_s",
    "copy_s",
    "copy_cpu_s",
    "convert_cpu_s",
    "import_bytes",
    "convert_s",
    "open_s",
    "peak_bytes",
    "read_bytes",
)
INSPECT_S, COPIES, MEMORY_BYTES, READ = 5.0, 1.3, 500e6, 1.02  # the bars

TABLE = Table(
    name="convert",
    title="Converting one tower of a large checkpoint",
    text=(
        "A checkpoint of Kimi-K2.5's names and sizes in 64 files, the language model's int4 experts being holes in "
        "them; what is there of the tower, in bfloat16, is in the page cache. Each measurement is in a fresh process, "
        "kinds taking turns; medians. `inspect s` is the whole command, with its imports. `convert s` is the command "
        "without them: it reads, hashes and writes, and waits for the disk; `finding s` of it go into the index and "
        "the headers, before a tensor is read. `copy s` is reading the same byte ranges and writing them into one "
        "file, with fsync. Before either, as much as both write was written and removed. `peak MB` is all that the "
        "process ever had in RAM, `imports MB` "
        f"what it had before converting; the bar is the largest tensor and {MEMORY_BYTES / 1e6:.0f} MB. `read` is what "
        "was read of the files with tensors, headers counted, over the tower's bytes; the index is read too, once, and "
        "stands apart."
    ),
    columns={
        "keys": lambda row: f"{row['keys']:,}",
        "apparent GB": lambda row: f"{row['apparent_bytes'] / 1e9:.1f}",
        "tower MB": lambda row: f"{row['tower_bytes'] / 1e6:.1f}",
        "inspect s": lambda row: f"{row['inspect_s']:.2f}",
        "convert s": lambda row: f"{row['convert_s']:.2f}",
        "finding s": lambda row: f"{row['open_s']:.2f}",
        "fastest - slowest": lambda row: f"{min(row['converts_s']):.2f} - {max(row['converts_s']):.2f}",
        "copy s": lambda row: f"{row['copy_s']:.2f}",
        "CPU s of both": lambda row: f"{row['convert_cpu_s']:.2f}, {row['copy_cpu_s']:.2f}",
        "convert / copy": lambda row: f"{row['convert_s'] / row['copy_s']:.2f}",
        "peak MB": lambda row: f"{row['peak_bytes'] / 1e6:.0f}",
        "imports MB": lambda row: f"{row['import_bytes'] / 1e6:.0f}",
        "bar MB": lambda row: f"{(row['largest_bytes'] + MEMORY_BYTES) / 1e6:.0f}",
        "read": lambda row: f"{row['read_bytes'] / row['tower_bytes']:.4f}",
        "index MB": lambda row: f"{row['index_bytes'] / 1e6:.1f}",
        "within the bars": lambda row: "yes" if not missed(row) else "no: " + ", ".join(missed(row)),
        "load average": lambda row: f"{row['load_average']:.1f}",
    },
    key=lambda row: (row["keys"], str(row["versions"])),
)


def missed(row: Row) -> list[str]:
    """The bars that a row misses."""
    held = {
        "inspect": row["inspect_s"] < INSPECT_S,
        "convert": row["convert_s"] < COPIES * row["copy_s"],
        "memory": row["peak_bytes"] < row["largest_bytes"] + MEMORY_BYTES,
        "read": row["read_bytes"] < READ * row["tower_bytes"],
    }
    return [name for name, good in held.items() if not good]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few experts, a small tower: kept only with --results")
    parser.add_argument("--results", type=Path, help="folder to keep the results in")
    parser.add_argument("--note", default="", help="kept with the rows")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--scratch", type=Path, help="where to put the checkpoint; a temporary folder if not given")
    parser.add_argument("--measure", choices=("convert", "copy"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        measured = convert(args.folder) if args.measure == "convert" else copy(args.folder)
        print(json.dumps(measured))
        return
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        rows = [measure(Path(folder), rounds=args.rounds, small=args.small)]
    keep(TABLE, rows, folder=args.results or (None if args.small else RESULTS), note=args.note)


def measure(folder: Path, *, rounds: int, small: bool) -> Row:
    """All of it."""
    made = write(folder / "published", small=small)
    taken: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("inspect", "copy", "convert")}
    busy = []
    # the first round warms the page cache and every interpreter's bytecode, and is not counted
    for number in range(rounds + 1):
        for kind, results in taken.items():
            busy.append(load_average())
            if kind == "inspect":
                result = inspect(folder)
            else:
                result = fresh("benchmarks.convert", "--measure", kind, "--folder", str(folder))
            if number:
                results.append(result)
    return {
        **made,
        **{
            name: statistics.median(run[name] for runs in taken.values() for run in runs if name in run)
            for name in MEASURED
        },
        "converts_s": [run["convert_s"] for run in taken["convert"]],
        "copies_s": [run["copy_s"] for run in taken["copy"]],
        "versions": versions(),
        "load_average": statistics.median(busy),
    }


def write(folder: Path, *, small: bool) -> dict[str, int]:
    """Makes the checkpoint; returns what it holds."""
    config = kimi_k25.Config()
    layers, experts = MOE_LAYERS, EXPERTS
    if small:
        config = replace(config, layers=2, embed=64, mlp=96, position_h=16, position_w=12, out=24)
        layers, experts = 4, 8
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(demo.published_kimi(config)))

    tower = dict(config.mappings()["original"].names)
    holes = {
        f"language_model.model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight_{part}": described_part
        for layer in range(1, layers + 1)
        for expert in range(experts)
        for matrix, (rows, columns) in (
            ("down", (HIDDEN, EXPERT_MLP)),
            ("gate", (EXPERT_MLP, HIDDEN)),
            ("up", (EXPERT_MLP, HIDDEN)),
        )
        for part, described_part in (
            ("packed", ("I32", (rows, columns // 8))),
            ("scale", ("BF16", (rows, columns // GROUP))),
            ("shape", ("I32", (2,))),
        )
    }
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(SHARDS)]
    for number, (name, part) in enumerate(holes.items()):
        files[number * SHARDS // len(holes)][name] = part
    for number, (name, shape) in enumerate(tower.items()):
        files[-2 + number * 2 // len(tower)][name] = ("BF16", shape)

    random, weight_map, apparent_bytes = np.random.default_rng(0), {}, 0
    sizes = {"I32": 4, "BF16": 2}
    for number, tensors in enumerate(files, start=1):
        file_name = f"model-{number:05d}-of-{SHARDS:06d}.safetensors"
        header, end = {}, 0
        for name, (dtype, shape) in tensors.items():
            start, end = end, end + sizes[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file_name
        text = json.dumps(header).encode()
        with open(folder / file_name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
            for name in tensors.keys() & tower.keys():
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                values = random.standard_normal(tower[name], np.float32).astype(ml_dtypes.bfloat16)
                file.write(values.view(np.uint8).data)
        apparent_bytes += 8 + len(text) + end
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": apparent_bytes}, "weight_map": weight_map}, indent=2))
    return {
        "keys": len(weight_map),
        "apparent_bytes": apparent_bytes,
        "tower_bytes": sum(2 * math.prod(shape) for shape in tower.values()),
        "largest_bytes": max(2 * math.prod(shape) for shape in tower.values()),
        "index_bytes": index.stat().st_size,
    }


def inspect(folder: Path) -> dict[str, float]:
    """The command as its users start it."""
    started = time.perf_counter()
    program = "from checkpoints_convert.cli import main; main()"
    command = [sys.executable, "-c", program, "inspect", str(folder / "published"), "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - started
    assert not json.loads(done.stdout)["towers"]["kimi_k25"]["problems"]
    return {"inspect_s": seconds}


def convert(folder: Path) -> dict[str, float]:
    """The command, its imports counted apart."""
    import jax
    import orbax.checkpoint  # noqa: F401

    from checkpoints_convert.cli import app
    from jaxenc import console
    from jaxenc.loading import open_checkpoint

    jax.config.update("jax_platforms", "cpu")
    source, destination = folder / "published", folder / "converted"
    warm(folder)
    started, import_bytes, read_before = time.perf_counter(), resident_bytes(), bytes_read()
    cpu_before = time.process_time()
    arguments = ["convert", str(source), str(destination), "--quiet"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert console.run(app, arguments) == 0
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
    apart = sum((source / file).stat().st_size for file in ("model.safetensors.index.json", "config.json"))
    measured = {
        "import_bytes": import_bytes,
        "convert_s": seconds,
        "convert_cpu_s": cpu_s,
        "peak_bytes": resident_bytes(peak=True),
        "read_bytes": bytes_read() - read_before - apart,
    }
    started = time.perf_counter()
    open_checkpoint(source)
    measured["open_s"] = time.perf_counter() - started
    shutil.rmtree(destination)
    return measured


def copy(folder: Path) -> dict[str, float]:
    """Reads the tower's byte ranges and writes them into one file."""
    import checkpoints_convert

    source = checkpoints_convert.open_source(folder / "published")
    names = [name for name in source.names if not name.startswith("language_model.")]
    assert not source.open(names)
    ranges = [(info.file, info.offset, info.size_bytes) for info in map(source.info, names)]
    destination = folder / "copied"
    warm(folder)
    started, cpu_before = time.perf_counter(), time.process_time()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with open(destination, "wb", buffering=0) as out:
        for name, offset, size_bytes in sorted(ranges):
            with open(folder / "published" / name, "rb", buffering=0) as file:
                file.seek(offset)
                while size_bytes:
                    count = file.readinto(buffer[: min(size_bytes, BLOCK_BYTES)])
                    assert out.write(buffer[:count]) == count
                    size_bytes -= count
        os.fsync(out.fileno())
    seconds = time.perf_counter() - started
    cpu_s = time.process_time() - cpu_before
    destination.unlink()
    return {"copy_s": seconds, "copy_cpu_s": cpu_s}


def warm(folder: Path) -> None:
    """Leaves the system with free memory that was in use a moment ago, as much as is about to be written.

    Pages that are free for a second go back to a virtual machine's host, and to have them again takes longer than all
    else here: without this, what is measured is how long ago the last file was removed.
    """
    with open(folder / "warm", "wb", buffering=0) as file:
        for _ in range(WARM_BYTES // BLOCK_BYTES):
            file.write(bytes(BLOCK_BYTES))
    (folder / "warm").unlink()


def bytes_read() -> int:
    """That this process has asked the system for; pages of mapped files are not among them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


if __name__ == "__main__":
    main()
