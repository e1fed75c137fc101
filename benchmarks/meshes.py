"""What comes out on many meshes beside what comes out on one device, for every encoder, with its published heads.

    python -m benchmarks.meshes [--encoder NAME]

The models have the published heads and otherwise few channels and layers, written as published and loaded on each mesh
of virtual CPU devices: laid out as "auto" decides, and on the last one with weights replicated too.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import jaxenc
from benchmarks.machine import versions
from benchmarks.results import RESULTS, Row, Table, keep
from benchmarks.subjects import SUBJECTS, Subject, add_arguments

# data x model, of which two are numbers that few heads divide by
MESHES = ((1, 3), (1, 6), (1, 8), (2, 4))
STRATEGIES = ("auto", "data")

TABLE = Table(
    name="meshes",
    title="The same rows on every mesh",
    text=(
        "Largest difference between rows on a mesh (data x model, virtual CPU devices) and on one device, of the "
        "largest value, in float32. Models have the published heads and few channels and layers; `strategies` are what "
        "auto chose, and data."
    ),
    columns={
        "encoder": lambda row: row["encoder"],
        "heads": lambda row: str(row["heads"]),
        "jax": lambda row: row["versions"]["jax"],
        "meshes": lambda row: ", ".join(f"{data} x {model}" for data, model in row["meshes"]),
        "strategies": lambda row: ", ".join(row["strategies"]),
        "largest difference": lambda row: f"{row['difference']:.1e}",
    },
    key=lambda row: (row["encoder"], row["versions"]["jax"]),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meshes", description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", max(data * model for data, model in MESHES))
    folder = args.results or RESULTS
    for name in args.encoder or SUBJECTS:
        keep(TABLE, [measure(SUBJECTS[name])], folder=folder, note=args.note)


def measure(subject: Subject) -> Row:
    """One encoder on all meshes."""
    heads = subject.config.transformer.heads
    # twice as wide an MLP as the tower, which is what some families' configs can say
    sizes = replace(subject.small, heads=heads, mlp=2 * heads * subject.small.head_dim)
    checkpoint = subject.make(sizes)
    differences, strategies = [], set()
    with tempfile.TemporaryDirectory() as place:
        folder = checkpoint.write(Path(place) / "published", dtype="float32")
        modality = subject.config.modality
        alone = jaxenc.load(folder, tower=modality, dtype="float32")
        items = subject.items(alone.config)
        expected = alone.encode_items(items)
        for data, model in MESHES:
            mesh, seen = jaxenc.make_mesh(data=data, model=model), []
            for strategy in STRATEGIES if (data, model) == MESHES[-1] else STRATEGIES[:1]:
                encoder = jaxenc.load(folder, tower=modality, dtype="float32", mesh=mesh, strategy=strategy)
                parts = {axis: encoder.plan.parts(axis) for axis in encoder.plan.axes}
                if parts in seen:
                    continue
                seen.append(parts)
                strategies.add(encoder.plan.strategy)
                for rows, one in zip(encoder.encode_items(items), expected, strict=True):
                    differences.append(float(np.abs(rows - one).max() / np.abs(one).max()))
    return {
        "encoder": subject.name,
        "heads": heads,
        "meshes": MESHES,
        "strategies": sorted(strategies),
        "difference": max(differences),
        "versions": versions(),
    }


if __name__ == "__main__":
    main()
