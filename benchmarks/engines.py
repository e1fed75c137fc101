"""What encodes, each in a process of its own that answers one question after the other, so that clocks take turns.

    python -m benchmarks.engines ENGINE --encoder NAME --dtype DTYPE --folder FOLDER [--small]

reads lines from stdin and answers each with a JSON object in a line: `CASE` encodes its items, `host CASE` does what
our host does of it alone, `peak` multiplies matrices.
"""

import argparse
import json
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.cases import flops_of, read, sources, tokens_of
from benchmarks.machine import versions
from benchmarks.process import forget_peak, resident_bytes
from benchmarks.subjects import SUBJECTS, Subject
from jaxenc.items import Item
from jaxenc.packing import Budget, Placed, Slots

# products [n, k] x [k, m] that show what the machine's matrix unit gives
PRODUCTS = ((2048, 2048, 2048), (4096, 1152, 4304))
PRODUCT_RUNS = 5


class Engine(ABC):
    """One encoder in one dtype."""

    @abstractmethod
    def encode(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Rows of each item, on the host."""

    def host_seconds(self, kind: str, given: Sequence[Any]) -> float:
        """Seconds that the host spends on files and arrays before and after devices compute."""
        raise NotImplementedError

    @abstractmethod
    def product(self, n: int, k: int, m: int) -> Callable[[], Any]:
        """A product of two random matrices; what is returned computes it again, and waits for it."""

    def peak(self) -> float:
        """FLOP/s of the fastest product."""
        best = 0.0
        for n, k, m in PRODUCTS:
            run = self.product(n, k, m)
            for _ in range(PRODUCT_RUNS):
                started = time.perf_counter()
                run()
                best = max(best, 2.0 * math.prod((n, k, m)) / (time.perf_counter() - started))
        return best


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
            batch = encoder.config.layout(items, placed, budget, encoder._parts)
            return np.zeros((*batch.rows.item.shape, dim), np.float32), batch.rows

        with mock.patch.object(encoder, "_launch", launch):
            started = time.perf_counter()
            encoder.encode(**{kind: given})
            return time.perf_counter() - started

    def product(self, n: int, k: int, m: int) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp

        x, y = (jax.random.normal(jax.random.key(0), shape, jnp.dtype(self.dtype)) for shape in ((n, k), (k, m)))
        multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest"))
        multiply(x, y).block_until_ready()
        return lambda: multiply(x, y).block_until_ready()


class Torch(Engine):
    """The original, eager, with scaled_dot_product_attention: all items in one call where it takes them so."""

    def __init__(self, subject: Subject, folder: Path, *, dtype: str, small: bool):
        """Makes it, from the same seed as the checkpoint."""
        import torch

        from tests.parity.originals import ORIGINALS, given

        torch.set_num_threads(os.cpu_count() or 1)
        self.dtype = dtype
        self.given = lambda item: given(subject.original, item)
        self.original = ORIGINALS[subject.original](subject.checkpoint(small=small))

    def encode(self, items: Sequence[Item]) -> list[np.ndarray]:
        from tests.parity.references import rows_alone

        with rows_alone():
            return self.original.run([self.given(item) for item in items], dtype=self.dtype).rows

    def product(self, n: int, k: int, m: int) -> Callable[[], Any]:
        import torch

        x, y = (torch.randn(shape, dtype=getattr(torch, self.dtype)) for shape in ((n, k), (k, m)))
        torch.mm(x, y)
        return lambda: torch.mm(x, y)


class Compiled(Torch):
    """The original with every block compiled: regional compilation, as PyTorch advises where blocks repeat."""

    compiled = False

    def encode(self, items: Sequence[Item]) -> list[np.ndarray]:
        if not self.compiled:
            from torch import nn

            super().encode(items[:1])  # makes the model
            models = next(iter(self.original._models.values()))
            lists = (
                part
                for model in (models if isinstance(models, tuple) else (models,))
                for part in model.modules()
                if isinstance(part, nn.ModuleList)
            )
            for block in max(lists, key=len):
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
        if asked == "peak":
            answer = {"flops_per_s": engine.peak()}
        elif asked.startswith("host "):
            answer = {"seconds": engine.host_seconds(*cases[asked.removeprefix("host ")])}
        else:
            sizes = {"tokens": tokens_of(config, items[asked]), "flops": flops_of(config, items[asked])}
            answer = timed(engine, items[asked]) | sizes
        print(json.dumps(answer | {"versions": versions()}), file=answers, flush=True)


def timed(engine: Engine, items: Sequence[Item]) -> dict[str, Any]:
    """Seconds from items to rows on the host, how many rows, and the most memory that was in use."""
    forget_peak()
    started = time.perf_counter()
    rows = engine.encode(items)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "rows": sum(map(len, rows)),
        "checksum": float(sum(np.abs(x.astype(np.float64)).sum() for x in rows)),
        "peak_mb": resident_bytes(peak=True) / 1e6,
    }


if __name__ == "__main__":
    main()
