"""Seconds that encoding takes beside the PyTorch originals, on the same machine, threads and inputs.

    python -m benchmarks.speed                                    # every encoder, case and dtype
    python -m benchmarks.speed --encoder kimi_k25 --dtype bfloat16
    python -m benchmarks.speed --jax-python python3.12            # ours with that interpreter's JAX; may be repeated
    python -m benchmarks.speed --peer flax=peers/bin/python       # another JAX implementation too: benchmarks.peers

Every engine is a process that stays, and they take turns: ours, the original as it is, the original compiled. Each case
runs once unmeasured (compiling), then `--rounds` times.
"""

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cases import sources
from benchmarks.machine import load_average
from benchmarks.peers import PEERS
from benchmarks.process import Worker
from benchmarks.results import RESULTS, Row, Table, keep
from benchmarks.subjects import DTYPES, SUBJECTS, Subject, add_arguments

# its language model computes what it returns, so its tower cannot be timed alone
SUBJECTS_TIMED = tuple(name for name in SUBJECTS if name != "qwen2_audio")
ORIGINALS = ("torch", "torch.compile")

TABLE = Table(
    name="speed",
    title="Encoding beside the PyTorch originals",
    text=(
        "Seconds from items to rows on the host, at the published sizes, with seeded random weights: medians over "
        "turns. Every engine is a process with as many threads as there are cores. `ratio` is our time over that of "
        "PyTorch's better one, its original as it is (scaled_dot_product_attention) or with every block compiled: "
        "below 1 is in our favour. `flax s` is what the encoder takes that transformers 4.57 has in Flax, `easydel s` "
        "that of easydel, where they have one. `peak share` is the FLOPs that the items take, padding not among them, "
        "over our time, of the fastest matrix product that JAX or PyTorch made on the machine in that dtype; "
        "`roofline` the same of the longer of two times, that of the FLOPs and that of reading all weights once. "
        "`compile s` is what our first call took longer than the others, `cached s` the same where XLA's persistent "
        "cache has the programs. `host` is what reading, packing, laying out and unpacking take by themselves, of our "
        "time."
    ),
    columns={
        "machine": lambda row: short_machine(row["machine"]),
        "encoder": lambda row: row["encoder"],
        "case": lambda row: row["case"],
        "dtype": lambda row: row["dtype"],
        "jax": lambda row: row["versions"]["jax"],
        "tokens": lambda row: f"{row['tokens']:,}",
        "ours s": lambda row: f"{row['ours_s']:.3g}",
        "torch s": lambda row: _seconds(row, "torch"),
        "compiled s": lambda row: _seconds(row, "torch.compile"),
        **{f"{peer} s": lambda row, peer=peer: _number(row.get(f"{peer}_s")) for peer in PEERS},
        "ratio": lambda row: f"{row['ratio_to_torch']:.2f}",
        "peak share": lambda row: f"{row['peak_share']:.0%}",
        "roofline": lambda row: f"{row['roofline_share']:.0%}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "cached s": lambda row: f"{row['cached_s']:.1f}",
        "host": lambda row: f"{row['host_share']:.1%}",
        "peak MB": lambda row: f"{row['peak_mb']:,.0f}",
        "torch's MB": lambda row: f"{row['torch_peak_mb']:,.0f}",
        "load average": lambda row: f"{row['load_average']:.1f}",
    },
    key=lambda row: (row["encoder"], row["dtype"], row["versions"]["jax"], row["case"], str(row["machine"])),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.splitlines()[0])
    add_arguments(parser, encoders=SUBJECTS_TIMED)
    parser.add_argument("--dtype", choices=DTYPES, help="one alone")
    parser.add_argument("--case", action="append", help="some alone")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each engine")
    parser.add_argument("--jax-python", action="append", help="interpreters to run ours with; this one if not given")
    parser.add_argument("--peer", action="append", default=[], help="another JAX implementation: its name=interpreter")
    parser.add_argument("--originals", nargs="+", choices=ORIGINALS, default=ORIGINALS, help="PyTorch's, some alone")
    args = parser.parse_args(argv)
    folder = args.results or (None if args.small else RESULTS)
    for name in args.encoder or SUBJECTS_TIMED:
        for dtype in (args.dtype,) if args.dtype else DTYPES:
            keep(TABLE, measure(SUBJECTS[name], dtype, args), folder=folder, note=args.note)


def measure(subject: Subject, dtype: str, args: argparse.Namespace) -> list[Row]:
    """A row for each case and each JAX."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = subject.checkpoint(small=args.small).write(Path(place) / "published", dtype="bfloat16")
        options = ("--encoder", subject.name, "--dtype", dtype, "--folder", str(folder))
        options += ("--small",) if args.small else ()

        def start(engine: str, python: str) -> Worker:
            environment = {
                "JAX_COMPILATION_CACHE_DIR": f"{place}/cache",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            return Worker("benchmarks.engines", engine, *options, python=python, environment=environment)

        peers = {
            name: stack.enter_context(Worker("benchmarks.peers", name, *options, python=python))
            for name, _, python in (peer.partition("=") for peer in args.peer)
            if subject.config.family in PEERS[name]
        }
        pythons = args.jax_python or [sys.executable]
        engines = [(engine, sys.executable) for engine in args.originals]
        engines += [("jaxenc", python) for python in pythons]
        workers = {engine: stack.enter_context(start(*engine)) for engine in engines}
        answers = [worker.ask("limits") for worker in workers.values()]
        limits = {what: max(answer[what] for answer in answers) for what in ("flops_per_s", "bytes_per_s")}
        found: dict[str, dict[tuple[str, str], list[Row]]] = {}
        peers_s: dict[str, dict[str, list[float]]] = {}
        for case, (_, given) in sources(subject.sized(folder)).items():
            if args.case and case not in args.case:
                continue
            taken: dict[tuple[str, str], list[Row]] = {engine: [] for engine in engines}
            peers_s[case] = {f"{name}_s": [] for name in peers}
            for _ in range(args.rounds + 1):
                for engine, worker in workers.items():
                    taken[engine].append(worker.ask(case) | {"load_average": load_average()})
                for name in [*peers]:
                    try:
                        peers_s[case][f"{name}_s"].append(peers[name].ask(str(len(given)))["seconds"])
                    except RuntimeError as error:  # such as for want of memory; the others go on
                        print(error, file=sys.stderr, flush=True)
                        del peers[name]
            found[case] = taken
            print(f"{subject.name} {dtype}: {case} done", file=sys.stderr, flush=True)
        host = {(python, case): workers["jaxenc", python].ask(f"host {case}") for python in pythons for case in found}
        stack.close()  # memory for what comes
        cached = {}
        for python in pythons:
            with start("jaxenc", python) as again:
                cached[python] = {case: again.ask(case) for case in found}
        return [
            _row(
                subject,
                case,
                dtype,
                taken,
                python,
                limits=limits,
                cached=cached[python][case],
                host=host[python, case],
            )
            | {name: statistics.median(timed[1:]) for name, timed in peers_s[case].items() if len(timed) > args.rounds}
            for case, taken in found.items()
            for python in pythons
        ]


def _row(
    subject: Subject,
    case: str,
    dtype: str,
    taken: Mapping[tuple[str, str], Sequence[Row]],
    python: str,
    *,
    limits: Mapping[str, float],
    cached: Row,
    host: Row,
) -> Row:
    first, *ours = taken["jaxenc", python]
    torch = {engine: runs[1:] for (engine, _), runs in taken.items() if engine != "jaxenc"}
    medians = {engine: statistics.median(run["seconds"] for run in runs) for engine, runs in torch.items()}
    best = min(medians, key=lambda engine: medians[engine])
    ours_s = statistics.median(run["seconds"] for run in ours)
    # no time is less than that of the products, nor than that of reading every weight once
    roofline_s = max(first["flops"] / limits["flops_per_s"], first["weight_bytes"] / limits["bytes_per_s"])
    # different work would be no comparison: both make as many rows, of nearly the same sum
    assert {run["rows"] for run in ours} == {run["rows"] for run in torch[best]}, (case, ours[0], torch[best][0])
    assert abs(ours[0]["checksum"] / torch[best][0]["checksum"] - 1) < 0.02, (case, ours[0], torch[best][0])
    return {
        "encoder": subject.name,
        "case": case,
        "dtype": dtype,
        "tokens": first["tokens"],
        "rows": first["rows"],
        "ours_s": ours_s,
        "torch_s": medians[best],
        "ratio_to_torch": ours_s / medians[best],
        "originals_s": medians,
        "all_s": {
            "jaxenc": [run["seconds"] for run in ours],
            **{engine: [run["seconds"] for run in runs] for engine, runs in torch.items()},
        },
        "limits": dict(limits),
        "peak_share": first["flops"] / limits["flops_per_s"] / ours_s,
        "roofline_share": roofline_s / ours_s,
        "compile_s": max(0.0, first["seconds"] - ours_s),
        "cached_s": max(0.0, cached["seconds"] - ours_s),
        "host_share": host["seconds"] / ours_s,
        "peak_mb": max(run["peak_mb"] for run in ours),
        "torch_peak_mb": max(run["peak_mb"] for run in torch[best]),
        "load_average": statistics.median(run["load_average"] for runs in taken.values() for run in runs[1:]),
        "versions": torch[best][0]["versions"] | first["versions"],
    }


def _seconds(row: Row, engine: str) -> str:
    return _number(row["originals_s"].get(engine))


def short_machine(machine: Mapping[str, str]) -> str:
    """Its GPU, or its CPU's maker and widest instructions."""
    maker, *rest = re.findall(r"[\w-]+", machine["cpu"])
    return machine.get("gpu") or " ".join([maker, *rest[-1:]])


def _number(seconds: Any) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"


if __name__ == "__main__":
    main()
