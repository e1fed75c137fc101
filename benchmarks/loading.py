"""Time and memory of loading Kimi-K2.5's tower: `jaxenc.load` beside transformers' `from_pretrained`.

    python -m benchmarks.loading [--jax-python OTHER_PYTHON]

Each load is in a process of its own, the loaders taking turns; files are in the page cache. jaxenc reads the published
layout, transformers its own (the renaming that the published one needs there is not counted against it).

On CPU transformers only maps the files: the first use of its weights reads them. So the time and the memory that
reading a byte of every page takes are measured too, for both.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import load_average, versions
from benchmarks.process import fresh, resident_bytes
from benchmarks.results import RESULTS, Row, Table, keep

ENCODER, DTYPE = "kimi_k25", "bfloat16"

TABLE = Table(
    name="loading",
    title="Loading Kimi-K2.5's vision tower and projector",
    text=(
        "In bfloat16, from sharded safetensors files in the page cache, each load in a fresh process, loaders taking "
        "turns; medians. Importing (with the start of the devices) is counted apart. Memory is what is in RAM, "
        "mapped files included; `load's memory` is the peak less what was there after importing; beside it stand the "
        "bytes of the parameters, once and as placed on all devices (those that are not divided are on each). On CPU "
        "transformers only maps the files, and the first use of the weights reads them: `then reading all` is the time "
        "that reading a byte of every page takes after loading, and peaks are those after it."
    ),
    columns={
        "loader": lambda row: row["loader"],
        "version": lambda row: row["version"],
        "devices": lambda row: str(row["devices"]),
        "import s": lambda row: f"{row['import_s']:.2f}",
        "import MB": lambda row: f"{row['import_bytes'] / 1e6:.0f}",
        "load s": lambda row: f"{row['load_s']:.2f}",
        "fastest - slowest": lambda row: f"{min(row['loads_s']):.2f} - {max(row['loads_s']):.2f}",
        "then reading all s": lambda row: f"{row['read_s']:.2f}",
        "both s": lambda row: f"{row['load_s'] + row['read_s']:.2f}",
        "peak MB": lambda row: f"{row['peak_bytes'] / 1e6:.0f}",
        "load's memory MB": lambda row: f"{(row['peak_bytes'] - row['import_bytes']) / 1e6:.0f}",
        "parameters MB": lambda row: f"{row['parameter_bytes'] / 1e6:.0f}",
        "on all devices MB": lambda row: f"{row['placed_bytes'] / 1e6:.0f}",
        "load average": lambda row: f"{row['load_average']:.1f}",
    },
    key=lambda row: (row["loader"], row["devices"], row["version"]),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model: a trial run, kept only with --results")
    parser.add_argument("--results", type=Path, help="folder to keep the results in")
    parser.add_argument("--note", default="", help="kept with the rows")
    parser.add_argument("--rounds", type=int, default=5, help="loads of each kind")
    parser.add_argument("--jax-python", action="append", default=[], help="also with the JAX of this interpreter")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write:
        print(json.dumps(write(args.folder, small=args.small)))
    elif args.measure:
        print(json.dumps(MEASURES[args.measure](args.folder, devices=args.devices)))
    else:
        rows = measure(args.rounds, small=args.small, other_pythons=args.jax_python)
        keep(TABLE, rows, folder=args.results or (None if args.small else RESULTS), note=args.note)


def measure(rounds: int, *, small: bool, other_pythons: Sequence[str]) -> list[Row]:
    """A row for each loader."""
    kinds = [("transformers", 1, sys.executable)]
    kinds += [("jaxenc", devices, python) for python in (sys.executable, *other_pythons) for devices in (1, 8)]
    taken: dict[Any, list[Row]] = {kind: [] for kind in kinds}
    busy = []
    with tempfile.TemporaryDirectory() as folder:
        fresh("benchmarks.loading", "--write", "--folder", folder, *(["--small"] if small else []))
        # the first round warms the page cache and every interpreter's bytecode, and is not counted
        for number in range(rounds + 1):
            for loader, devices, python in kinds:
                busy.append(load_average())
                options = ("--measure", loader, "--folder", folder, "--devices", str(devices))
                row = fresh("benchmarks.loading", *options, python=python, devices=devices)
                if number:
                    taken[loader, devices, python].append(row)
    return [
        {
            "loader": loader,
            "devices": devices,
            **{name: runs[0][name] for name in ("version", "versions", "parameter_bytes", "placed_bytes")},
            **{name: statistics.median(run[name] for run in runs) for name in MEASURED},
            "loads_s": [run["load_s"] for run in runs],
            "load_average": statistics.median(busy),
        }
        for (loader, devices, _), runs in taken.items()
    ]


MEASURED = ("import_s", "import_bytes", "load_s", "read_s", "peak_bytes")
PAGE_BYTES = 4096


def write(folder: Path, *, small: bool) -> dict[str, Any]:
    """Writes the checkpoint in both layouts; in a process of its own, to leave the measuring one small."""
    from benchmarks import originals
    from benchmarks.subjects import SUBJECTS

    checkpoint = SUBJECTS[ENCODER].checkpoint(small=small)
    checkpoint.write(folder / "jaxenc", dtype=DTYPE)
    originals.write(checkpoint, folder / "transformers", dtype=DTYPE)
    return {}


def measure_jaxenc(folder: Path, *, devices: int) -> Row:
    """One load on a mesh of `devices`."""
    started = time.perf_counter()
    import jax
    import numpy as np

    import jaxenc

    mesh = jaxenc.make_mesh(model=devices)
    imported, import_bytes = time.perf_counter(), resident_bytes()
    encoder = jaxenc.load(folder / "jaxenc", mesh=mesh, dtype=DTYPE)
    leaves = jax.block_until_ready(jax.tree.leaves(encoder.params))
    loaded = time.perf_counter()
    read_pages(np.asarray(shard.data) for leaf in leaves for shard in leaf.addressable_shards)
    read = time.perf_counter()
    return {
        "version": f"jax {jax.__version__}",
        "versions": versions(),
        "import_s": imported - started,
        "import_bytes": import_bytes,
        "load_s": loaded - imported,
        "read_s": read - loaded,
        "peak_bytes": resident_bytes(peak=True),
        "parameter_bytes": sum(leaf.nbytes for leaf in leaves),
        "placed_bytes": sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards),
    }


def measure_transformers(folder: Path, *, devices: int) -> Row:
    """One load on the CPU."""
    if devices != 1:
        raise ValueError("PyTorch has one CPU device")
    started = time.perf_counter()
    import torch
    import transformers

    from benchmarks import originals

    imported, import_bytes = time.perf_counter(), resident_bytes()
    model = originals.load(folder / "transformers", dtype=DTYPE)
    loaded = time.perf_counter()
    read_pages(parameter.detach().view(torch.uint8).numpy() for parameter in model.parameters())
    read = time.perf_counter()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "version": f"transformers {transformers.__version__}",
        "versions": versions(),
        "import_s": imported - started,
        "import_bytes": import_bytes,
        "load_s": loaded - imported,
        "read_s": read - loaded,
        "peak_bytes": resident_bytes(peak=True),
        "parameter_bytes": parameter_bytes,
        "placed_bytes": parameter_bytes,
    }


def read_pages(arrays: Iterable[Any]) -> int:
    """Reads a byte of every page of contiguous NumPy arrays."""
    return sum(int(array.reshape(-1).view("uint8")[::PAGE_BYTES].sum()) for array in arrays)


MEASURES = {"jaxenc": measure_jaxenc, "transformers": measure_transformers}

if __name__ == "__main__":
    main()
