"""Time of encoding on CPU: jaxenc beside the PyTorch originals, with as many threads.

    python -m benchmarks.encode [--jax-python OTHER_PYTHON]

One image of 32 x 32 patches, and 30 seconds of speech, at the published sizes. Each measurement is in a process of its
own, the two taking turns. Ours is `Encoder.encode_items`, from the item to NumPy rows, its compilation counted apart;
the original is run as it comes (scaled_dot_product_attention, not compiled), from tensors to tensors.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import load_average, versions
from benchmarks.process import fresh
from benchmarks.results import RESULTS, Row, Table, keep
from benchmarks.subjects import DTYPES, PHOTOGRAPH, SUBJECTS, Subject, add_arguments, speech
from jaxenc.items import Item
from jaxenc.models.base import EncoderConfig
from jaxenc.preprocess.images import load_image

ENCODERS = ("kimi_k25", "qwen3_omni_audio")

TABLE = Table(
    name="encode",
    title="Encoding on CPU beside the PyTorch originals",
    text=(
        "Seconds for one image of 32 x 32 patches (kimi_k25) and for 30 s of speech (qwen3_omni_audio), at the "
        "published sizes; medians over processes that take turns, with the same number of threads. Below 1, `ratio` is "
        "in our favour. Ours is from the item to NumPy rows; compiling, once a shape, is counted apart. PyTorch is "
        "not compiled, and attends through scaled_dot_product_attention."
    ),
    columns={
        "encoder": lambda row: row["encoder"],
        "dtype": lambda row: row["dtype"],
        "jax": lambda row: row["versions"]["jax"],
        "tokens": lambda row: str(row["tokens"]),
        "threads": lambda row: str(row["threads"]),
        "ours s": lambda row: f"{row['ours_s']:.3f}",
        "fastest - slowest": lambda row: f"{min(row['ours_all_s']):.3f} - {max(row['ours_all_s']):.3f}",
        "torch's s": lambda row: f"{row['torch_s']:.3f}",
        "torch's fastest - slowest": lambda row: f"{min(row['torch_all_s']):.3f} - {max(row['torch_all_s']):.3f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "load average": lambda row: f"{row['load_average']:.1f}",
    },
    key=lambda row: (row["encoder"], row["dtype"], row["versions"]["jax"]),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encode", description=__doc__.splitlines()[0])
    add_arguments(parser, encoders=ENCODERS)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--runs", type=int, default=3, help="timed runs in each process, after one that is not")
    parser.add_argument("--jax-python", action="append", default=[], help="also with the JAX of this interpreter")
    parser.add_argument("--dtype", choices=DTYPES, help="one alone")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write:
        print(json.dumps(write(SUBJECTS[args.encoder[0]], args.folder, small=args.small)))
    elif args.measure:
        measured = MEASURES[args.measure](SUBJECTS[args.encoder[0]], args.folder, dtype=args.dtype, runs=args.runs)
        print(json.dumps(measured))
    else:
        folder = args.results or (None if args.small else RESULTS)
        for subject in [SUBJECTS[name] for name in args.encoder or ENCODERS]:
            rows = measure(subject, args)
            keep(TABLE, rows, folder=folder, note=args.note)


def measure(subject: Subject, args: argparse.Namespace) -> list[Row]:
    """Rows of one encoder."""
    rows = []
    small = ["--small"] if args.small else []
    with tempfile.TemporaryDirectory() as folder:
        place = ("--encoder", subject.name, "--folder", folder)
        fresh("benchmarks.encode", "--write", *place, *small)
        for dtype in (args.dtype,) if args.dtype else DTYPES:
            kinds = [("torch", sys.executable)]
            kinds += [("jaxenc", python) for python in (sys.executable, *args.jax_python)]
            taken: dict[Any, list[Row]] = {kind: [] for kind in kinds}
            busy = []
            for _ in range(args.rounds):
                for kind, python in kinds:
                    busy.append(load_average())
                    options = ("--measure", kind, *place, "--dtype", dtype, "--runs", str(args.runs))
                    taken[kind, python].append(fresh("benchmarks.encode", *options, python=python))
            torch_runs = taken.pop(kinds[0])
            rows += [_row(subject, dtype, runs, torch_runs, busy) for runs in taken.values()]
    return rows


def _row(subject: Subject, dtype: str, ours: Sequence[Row], torch: Sequence[Row], busy: Sequence[float]) -> Row:
    (threads,) = {run["threads"] for run in (*ours, *torch)}
    (rows,) = {run["rows"] for run in (*ours, *torch)}
    ours_s, torch_s = ([second for run in runs for second in run["runs_s"]] for runs in (ours, torch))
    return {
        "encoder": subject.name,
        "dtype": dtype,
        "tokens": ours[0]["tokens"],
        "rows": rows,
        "threads": threads,
        "ours_s": statistics.median(ours_s),
        "torch_s": statistics.median(torch_s),
        "ratio": statistics.median(ours_s) / statistics.median(torch_s),
        "ours_all_s": ours_s,
        "torch_all_s": torch_s,
        "compile_s": statistics.median(run["compile_s"] for run in ours),
        "load_average": statistics.median(busy),
        "versions": torch[0]["versions"] | ours[0]["versions"],
    }


def write(subject: Subject, folder: Path, *, small: bool) -> dict[str, Any]:
    """Writes the checkpoint in both layouts; in a process of its own, to leave the measuring one small."""
    from benchmarks import originals

    checkpoint = subject.checkpoint(small=small)
    checkpoint.write(folder / "jaxenc", dtype="bfloat16")
    originals.write(subject.encoder, checkpoint, folder / "torch", dtype="bfloat16")
    return {}


def timed(config: EncoderConfig) -> Item:
    """What is encoded: a picture of 32 x 32 patches, or 30 s of speech."""
    if config.modality == "audio":
        _, item = speech(config)
        return item
    from PIL import Image

    square = Image.fromarray(load_image(PHOTOGRAPH)).resize((448, 448), Image.Resampling.BICUBIC)
    (item,) = config.read("images", np.asarray(square), name="32 x 32 patches")
    return item


def measure_jaxenc(subject: Subject, folder: Path, *, dtype: str, runs: int) -> Row:
    """One process of ours."""
    import jaxenc

    item = timed(subject.config)
    encoder = jaxenc.load(folder / "jaxenc", tower=subject.config.modality, dtype=dtype)
    tokens = sum(encoder.config.pieces(item))
    budget = next(budget for budget in encoder.budgets if budget.length >= tokens)
    compile_s, _ = _timed(lambda: encoder.warmup([budget]))
    taken, (rows,) = _repeated(lambda: encoder.encode_items([item]), runs)
    # XLA's CPU client takes as many threads as there are cores
    return {
        "runs_s": taken,
        "compile_s": compile_s,
        "rows": len(rows),
        "tokens": tokens,
        "threads": os.cpu_count(),
        "versions": versions(),
    }


def measure_torch(subject: Subject, folder: Path, *, dtype: str, runs: int) -> Row:
    """One process of the original's."""
    import torch

    from benchmarks import originals

    torch.set_num_threads(os.cpu_count() or 1)
    model = originals.load(subject.encoder, folder / "torch", dtype=dtype)
    values, sizes = originals.inputs(model, timed(subject.config))
    taken, rows = _repeated(lambda: originals.encode(model, values, sizes), runs)
    return {"runs_s": taken, "rows": len(rows), "threads": torch.get_num_threads(), "versions": versions()}


MEASURES = {"jaxenc": measure_jaxenc, "torch": measure_torch}


def _repeated(run: Callable[[], Any], runs: int) -> tuple[list[float], Any]:
    """Seconds of each of `runs` runs, after one that is not counted, and what the last returned."""
    result, taken = run(), []
    for _ in range(runs):
        seconds, result = _timed(run)
        taken.append(seconds)
    return taken, result


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
