"""Where the time of an encoder goes, and that of its PyTorch original: products, attention and the rest.

    python -m benchmarks.profile --encoder kimi_k25 --dtype bfloat16
    python -m benchmarks.profile --jax-python python3.12           # ours with that interpreter's JAX

Each encodes a case twice unmeasured and once under its own profiler.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cases import sources
from benchmarks.process import Worker
from benchmarks.results import RESULTS, Row, Table, keep
from benchmarks.speed import SUBJECTS_TIMED, short_machine
from benchmarks.subjects import DTYPES, SUBJECTS, Subject, add_arguments

PARTS = ("products", "attention", "rest")


def _beside(part: str) -> Callable[[Row], str]:
    return lambda row: f"{row['ours_s'][part]:.3g} / {row['torch_s'][part]:.3g}"


TABLE = Table(
    name="profile",
    title="Where the time goes",
    text=(
        "Seconds of one run, ours / PyTorch's original as it is (scaled_dot_product_attention), by their profilers. "
        "`products` are those of matrices and convolutions outside attention; `attention` is the products with keys "
        "and values and all between; `rest` is what is left of the time from items to rows: norms, activations, "
        "positions, copies, the host."
    ),
    columns={
        "machine": lambda row: short_machine(row["machine"]),
        "encoder": lambda row: row["encoder"],
        "case": lambda row: row["case"],
        "dtype": lambda row: row["dtype"],
        "jax": lambda row: row["versions"]["jax"],
        "all": _beside("all"),
        **{part: _beside(part) for part in PARTS},
    },
    key=lambda row: (row["encoder"], row["dtype"], row["versions"]["jax"], row["case"], str(row["machine"])),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.splitlines()[0])
    add_arguments(parser, encoders=SUBJECTS_TIMED)
    parser.add_argument("--dtype", choices=DTYPES, help="one alone")
    parser.add_argument("--jax-python", default=sys.executable, help="interpreter to run ours with")
    args = parser.parse_args(argv)
    folder = args.results or (None if args.small else RESULTS)
    for name in args.encoder or SUBJECTS_TIMED:
        for dtype in (args.dtype,) if args.dtype else DTYPES:
            rows = measure(SUBJECTS[name], dtype, args.jax_python, small=args.small)
            keep(TABLE, rows, folder=folder, note=args.note)


def measure(subject: Subject, dtype: str, python: str, *, small: bool) -> list[Row]:
    """A row for each case."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = subject.checkpoint(small=small).write(Path(place) / "published", dtype="bfloat16")
        options = ("--encoder", subject.name, "--dtype", dtype, "--folder", str(folder))
        options += ("--small",) if small else ()
        workers = {
            engine: stack.enter_context(Worker("benchmarks.engines", engine, *options, python=with_python))
            for engine, with_python in (("jaxenc", python), ("torch", sys.executable))
        }
        for worker in workers.values():
            worker.ask("ready")  # an answer comes once it has loaded, which would take the others' time
        rows = []
        for case in sources(subject.sized(folder)):
            ours, torch = (worker.ask(f"profile {case}") for worker in workers.values())
            rows.append(
                {
                    "encoder": subject.name,
                    "case": case,
                    "dtype": dtype,
                    "ours_s": ours["parts"],
                    "torch_s": torch["parts"],
                    "versions": torch["versions"] | ours["versions"],
                }
            )
        return rows


if __name__ == "__main__":
    main()
