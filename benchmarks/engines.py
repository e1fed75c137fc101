"""What encodes, each in a process of its own that answers one question after the other, so that clocks take turns.

    python -m benchmarks.engines ENGINE --encoder NAME --dtype DTYPE --folder FOLDER [--small]

reads lines from stdin and answers each with a JSON object in a line: `CASE` encodes its items, `host CASE` does what
our host does of it alone, `profile CASE` says where its time goes, `limits` multiplies matrices and reads memory, and
`ready` does nothing. On a GPU where there is one.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.cases import flops_of, read, sources, tokens_of
from benchmarks.machine import versions
from benchmarks.process import forget_peak, resident_bytes
from benchmarks.subjects import SUBJECTS, Subject
from jaxenc.items import Item
from jaxenc.layers.attention import ATTENTION
from jaxenc.packing import Budget, Placed, Slots

# products [n, k] x [k, m] that show what the machine's matrix unit gives
PRODUCTS = {
    "cpu": ((2048, 2048, 2048), (4096, 1152, 4304)),
    "gpu": ((8192, 8192, 8192), (16_384, 4096, 4096)),
}
RUNS = 5  # of which the fastest counts
MEMORY_BYTES = 2**28  # that are added up to see how fast memory is read
# what products and attention are called in our programs, and in PyTorch's profile
PRODUCT = re.compile(r" (dot|convolution|custom-call)\(")
TORCHS = {
    "attention": "scaled_dot_product|flash|attention",
    "products": r"::(addmm|mm|bmm|baddbmm|mkldnn_convolution|_?convolution|slow_conv)|linear_pointwise|gemm",
}


class Engine(ABC):
    """One encoder in one dtype."""

    @abstractmethod
    def encode(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Rows of each item, on the host."""

    def host_seconds(self, kind: str, given: Sequence[Any]) -> float:
        """Seconds that the host spends on files and arrays before and after devices compute."""
        raise NotImplementedError

    def operations(self, items: Sequence[Item]) -> Iterator[tuple[str, float]]:
        """What a profiler saw: "products", "attention" or "rest", and seconds, of each operation."""
        raise NotImplementedError

    @property
    @abstractmethod
    def platform(self) -> str:
        """What it runs on: "cpu" or "gpu"."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""

    @abstractmethod
    def product(self, n: int, k: int, m: int) -> Callable[[], Any]:
        """A product of two random matrices; what is returned computes it again, and waits for it."""

    @abstractmethod
    def total(self, count: int) -> Callable[[], Any]:
        """A sum of so many float32 numbers; what is returned computes it again, and waits for it."""

    @abstractmethod
    def forget_peak(self) -> None:
        """Lets `peak_bytes` start anew, where the platform allows it."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most memory that was in use: of the process, or of the GPU."""

    def limits(self) -> dict[str, float]:
        """FLOP/s of the fastest product, and bytes/s that are read from memory."""
        products = (2.0 * math.prod(sizes) / _fastest(self.product(*sizes)) for sizes in PRODUCTS[self.platform])
        return {
            "flops_per_s": max(products),
            "bytes_per_s": MEMORY_BYTES / _fastest(self.total(MEMORY_BYTES // 4)),
        }


def _fastest(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class Ours(Engine):
    """jaxenc, from a checkpoint in the published layout."""

    def __init__(self, subject: Subject, folder: Path, *, dtype: str, small: bool):
        """Loads it."""
        import jaxenc

        self.dtype = dtype
        self.encoder = jaxenc.load(folder, tower=subject.config.modality, dtype=dtype)

    def encode(self, items: Sequence[Item]) -> list[np.ndarray]:
        return self.encoder.encode_items(items)

    def host_seconds(self, kind: str, given: Sequence[Any]) -> float:
        """Seconds that reading, packing, laying out and unpacking take, with no device to wait for."""
        encoder = self.encoder
        dim = encoder.encode(**{kind: given})[0].shape[-1]

        def launch(items: Sequence[Item], placed: Sequence[Placed], budget: Budget) -> tuple[np.ndarray, Slots]:
            batch = encoder.config.layout(items, placed, budget, encoder._programs.parts)
            return np.zeros((*batch.rows.item.shape, dim), np.float32), batch.rows

        with mock.patch.object(encoder, "_launch", launch):
            started = time.perf_counter()
            encoder.encode(**{kind: given})
            return time.perf_counter() - started

    def operations(self, items: Sequence[Item]) -> Iterator[tuple[str, float]]:
        import jax

        encoder, launch = self.encoder, self.encoder._launch
        with tempfile.TemporaryDirectory() as place:
            traces: list[tuple[Budget, Path]] = []

            def traced(items: Sequence[Item], placed: Sequence[Placed], budget: Budget) -> tuple[Any, Slots]:
                # each batch by itself: instructions of two programs have the same names
                traces.append((budget, Path(place, str(len(traces)))))
                with jax.profiler.trace(traces[-1][1]):
                    rows, slots = launch(items, placed, budget)
                    return rows.block_until_ready(), slots

            with mock.patch.object(encoder, "_launch", traced):
                self.encode(items)
            for budget, folder in traces:
                parts = parts_of_program(encoder.compiled[budget].as_text() or "")
                (trace,) = folder.rglob("*.xplane.pb")
                planes = jax.profiler.ProfileData.from_file(str(trace)).planes
                for event in (event for plane in planes for line in plane.lines for event in line.events):
                    name = dict(event.stats).get("hlo_op")
                    if name in parts:
                        yield parts[name], event.duration_ns / 1e9

    def product(self, n: int, k: int, m: int) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp

        x, y = (jax.random.normal(jax.random.key(0), shape, jnp.dtype(self.dtype)) for shape in ((n, k), (k, m)))
        multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest"))
        multiply(x, y).block_until_ready()
        return lambda: multiply(x, y).block_until_ready()

    @property
    def platform(self) -> str:
        return str(self._device.platform)

    @property
    def weight_bytes(self) -> int:
        import jax

        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.encoder.params))

    def total(self, count: int) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp

        x, add = jnp.ones(count), jax.jit(jnp.sum)
        add(x).block_until_ready()
        return lambda: add(x).block_until_ready()

    def forget_peak(self) -> None:
        forget_peak()  # what JAX says of a GPU's cannot start anew

    def peak_bytes(self) -> int:
        held = self._device.memory_stats()
        return resident_bytes(peak=True) if held is None else int(held["peak_bytes_in_use"])

    @property
    def _device(self) -> Any:
        return self.encoder.plan.mesh.devices.flat[0]


def parts_of_program(text: str) -> dict[str, str]:
    """Instruction of a compiled program -> "products", "attention" or "rest"; without those that only hold others."""
    computations = {block.split()[0].lstrip("%"): block for block in text.split("\n\n") if block.startswith("%")}
    parts = {}
    for line in text.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(", line)
        if match is None or match[2] in ("while", "conditional", "call"):
            continue
        called = re.search(r"calls=%?([\w.-]+)", line)
        does = line + computations.get(called[1], "") if called else line
        if f"/{ATTENTION}/" in line or (called and f"/{ATTENTION}/" in does and PRODUCT.search(does)):
            parts[match[1]] = "attention"
        else:
            parts[match[1]] = "products" if PRODUCT.search(does) else "rest"
    return parts


class Torch(Engine):
    """The original, eager, with scaled_dot_product_attention: all items in one call where it takes them so."""

    def __init__(self, subject: Subject, folder: Path, *, dtype: str, small: bool):
        """Makes it, from the same seed as the checkpoint."""
        import torch

        from tests.parity.originals import ORIGINALS, given

        torch.set_num_threads(os.cpu_count() or 1)
        self.dtype = dtype
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_default_device(self.device)
        self.given = lambda item: given(subject.original, item)
        self.original = ORIGINALS[subject.original](subject.checkpoint(small=small))

    def encode(self, items: Sequence[Item]) -> list[np.ndarray]:
        from tests.parity.references import rows_alone

        with rows_alone():
            return self.original.run([self.given(item) for item in items], dtype=self.dtype).rows

    def operations(self, items: Sequence[Item]) -> Iterator[tuple[str, float]]:
        from torch.profiler import profile

        with profile() as traced:
            self.encode(items)
        for event in traced.key_averages():
            seconds = (event.self_device_time_total if self.device == "cuda" else event.self_cpu_time_total) / 1e6
            found = (part for part, names in TORCHS.items() if re.search(names, event.key))
            yield next(found, "rest"), seconds

    def product(self, n: int, k: int, m: int) -> Callable[[], Any]:
        import torch

        x, y = (torch.randn(shape, dtype=getattr(torch, self.dtype)) for shape in ((n, k), (k, m)))
        return self._waiting(lambda: torch.mm(x, y))

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for model in self._models() for p in model.parameters())

    @property
    def platform(self) -> str:
        return "gpu" if self.device == "cuda" else "cpu"

    def total(self, count: int) -> Callable[[], Any]:
        import torch

        x = torch.ones(count)
        return self._waiting(x.sum)

    def forget_peak(self) -> None:
        import torch

        forget_peak()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated() if self.device == "cuda" else resident_bytes(peak=True)

    def _models(self) -> tuple[Any, ...]:
        """The modules, once something was encoded."""
        models = next(iter(self.original._models.values()))
        return models if isinstance(models, tuple) else (models,)

    def _waiting(self, run: Callable[[], Any]) -> Callable[[], Any]:
        import torch

        def run_and_wait() -> None:
            run()
            if self.device == "cuda":
                torch.cuda.synchronize()

        run_and_wait()
        return run_and_wait


class Compiled(Torch):
    """The original with every block compiled: regional compilation, as PyTorch advises where blocks repeat."""

    compiled = False

    def encode(self, items: Sequence[Item]) -> list[np.ndarray]:
        if not self.compiled:
            from torch import nn

            super().encode(items[:1])  # makes the model
            parts = (part for model in self._models() for part in model.modules())
            for block in max((part for part in parts if isinstance(part, nn.ModuleList)), key=len):
                block.compile()
            self.compiled = True
        return super().encode(items)


ENGINES = {"jaxenc": Ours, "torch": Torch, "torch.compile": Compiled}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--encoder", choices=SUBJECTS, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    # what libraries print must not be taken for an answer
    answers, sys.stdout = sys.stdout, sys.stderr
    subject = SUBJECTS[args.encoder]
    engine = ENGINES[args.engine](subject, args.folder, dtype=args.dtype, small=args.small)
    config = subject.sized(args.folder)
    cases = sources(config)
    items = {case: read(config, given) for case, given in cases.items()}
    for line in sys.stdin:
        asked = line.strip()
        if asked == "ready":
            answer: dict[str, Any] = {}
        elif asked == "limits":
            answer = engine.limits()
        elif asked.startswith("profile "):
            answer = {"parts": profiled(engine, items[asked.removeprefix("profile ")])}
        elif asked.startswith("host "):
            answer = {"seconds": engine.host_seconds(*cases[asked.removeprefix("host ")])}
        else:
            sizes = {"tokens": tokens_of(config, items[asked]), "flops": flops_of(config, items[asked])}
            answer = timed(engine, items[asked]) | sizes | {"weight_bytes": engine.weight_bytes}
        print(json.dumps(answer | {"versions": versions()}), file=answers, flush=True)


def timed(engine: Engine, items: Sequence[Item]) -> dict[str, Any]:
    """Seconds from items to rows on the host, how many rows, and the most memory that was in use."""
    engine.forget_peak()
    started = time.perf_counter()
    rows = engine.encode(items)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "rows": sum(map(len, rows)),
        "checksum": float(sum(np.abs(x.astype(np.float64)).sum() for x in rows)),
        "peak_mb": engine.peak_bytes() / 1e6,
    }


def profiled(engine: Engine, items: Sequence[Item]) -> dict[str, float]:
    """Seconds that products, attention and the rest take, and all together."""
    engine.encode(items)
    whole = timed(engine, items)["seconds"]
    parts = dict.fromkeys(("products", "attention"), 0.0)
    for part, seconds in engine.operations(items):
        if part in parts:
            parts[part] += seconds
    return parts | {"rest": whole - sum(parts.values()), "all": whole}


if __name__ == "__main__":
    main()
