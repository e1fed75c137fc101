"""How exact the encoders are at their published sizes, beside how exact the originals are themselves.

    python -m benchmarks.parity                                   # every encoder, float32 and bfloat16
    python -m benchmarks.parity --encoder qwen3_vl:8b             # one
    python -m benchmarks.parity --save-reference reference.npz    # keeps what PyTorch gave ...
    python -m benchmarks.parity --reference reference.npz         # ... for a Python that has another JAX and no PyTorch

The truth is the original (transformers) in float64 on the same weights: for float32, weights that need all 24 bits; for
bfloat16, the same ones rounded to it once. Inputs are the repository's photograph, an image with odd sides, a video
where the encoder takes one; its speech recording, and 30 seconds of it. Our weights come through `jaxenc.load` from a
checkpoint in the published layout, and rows from `Encoder.encode_items`.
"""

import argparse
import gc
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxenc
from benchmarks.machine import versions
from benchmarks.results import RESULTS, Row, Table, keep
from benchmarks.subjects import (
    DTYPES,
    SUBJECTS,
    Subject,
    add_arguments,
    fill_mantissas,
    item_arrays,
    item_of,
    round_to_bfloat16,
)
from jaxenc.items import Item
from jaxenc.models import published_configs
from jaxenc.models.base import EncoderConfig
from jaxenc.packing import Budget
from tests.parity.checkpoints import Checkpoint

Arrays = Mapping[str, np.ndarray]
BAR = 1.5

TABLE = Table(
    name="parity",
    title="Parity with the PyTorch originals at the published sizes",
    text=(
        "Errors are of the absmax of the truth: the original (transformers) in float64 on the same weights and inputs. "
        f"`ratio` is our error over PyTorch's own in the same dtype; at most {BAR} is wanted. Weights are seeded and "
        "random, every bias, norm and table among them. Inputs are real: a photograph, an image with odd sides, and a "
        "video chunk where the encoder takes one; speech of 7.1 and 30 seconds."
    ),
    columns={
        "encoder": lambda row: row["encoder"],
        "dtype": lambda row: row["dtype"],
        "jax": lambda row: row["versions"]["jax"],
        "tokens": lambda row: str(row["tokens"]),
        "our max": lambda row: f"{row['ours_max']:.2e}",
        "torch's max": lambda row: f"{row['torch_max']:.2e}",
        "ratio": lambda row: f"{row['ratio_max']:.2f}",
        "our rms": lambda row: f"{row['ours_rms']:.2e}",
        "torch's rms": lambda row: f"{row['torch_rms']:.2e}",
        "ratio of rms": lambda row: f"{row['ratio_rms']:.2f}",
        "max of ours - torch's": lambda row: f"{row['difference_max']:.2e}",
    },
    key=lambda row: (row["encoder"], row["dtype"], row["versions"]["jax"]),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="one alone")
    parser.add_argument("--save-reference", type=Path, metavar="FILE", help="keep what PyTorch gave (.npz), and stop")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="use what --save-reference kept")
    parser.add_argument("--items", type=int, metavar="N", help="the first N items alone")
    parser.add_argument("--blocks", action="store_true", help="also the errors after every block, of the first item")
    args = parser.parse_args(argv)
    dtypes = (args.dtype,) if args.dtype else DTYPES
    subjects = [SUBJECTS[name] for name in args.encoder or SUBJECTS]
    if args.save_reference:
        made = [
            reference(s, s.checkpoint(small=args.small), dtypes, count=args.items, blocks=args.blocks) for s in subjects
        ]
        np.savez(args.save_reference, **{name: array for arrays in made for name, array in arrays.items()})
        return
    missed = []
    for subject in subjects:
        checkpoint = subject.checkpoint(small=args.small)
        if args.reference:
            with np.load(args.reference) as given:
                rows = compare(subject, checkpoint, dtypes, given, blocks=args.blocks)
        else:
            given = reference(subject, checkpoint, dtypes, count=args.items, blocks=args.blocks)
            rows = compare(subject, checkpoint, dtypes, given, blocks=args.blocks)
        keep(TABLE, rows, folder=args.results or (None if args.small else RESULTS), note=args.note)
        missed += [f"{row['encoder']} in {row['dtype']}" for row in rows if row["ratio_max"] > BAR]
    if missed:
        print(f"\nover {BAR}: {', '.join(missed)}")


def reference(
    subject: Subject, checkpoint: Checkpoint, dtypes: Sequence[str], *, count: int | None, blocks: bool
) -> dict[str, Any]:
    """What the original gives in float64 and in each dtype, and the items it was given.

    Returns:
        `<encoder>/item/<i>/<field>`, `<encoder>/<dtype>/<truth|torch>/<i>` (rows of item i), with `blocks` also
        `<encoder>/<dtype>/blocks/<truth|torch>` (first item, after every block), and `versions/<package>`.
    """
    from tests.parity.originals import ORIGINALS, given

    result: dict[str, Any] = {f"versions/{name}": versions()[name] for name in ("torch", "transformers")}
    items = subject.items(_config(subject, checkpoint))[:count]
    for i, item in enumerate(items):
        result |= {f"{subject.name}/item/{i}/{field}": array for field, array in item_arrays(item).items()}
    for dtype in dtypes:
        _weights(checkpoint, dtype)
        for kind, precision in (("truth", "float64"), ("torch", dtype)):
            # a model of its own each time: two of them in float64 do not fit in memory
            original = ORIGINALS[subject.original](checkpoint)
            encoded = original.run([given(subject.original, item) for item in items], dtype=precision)
            at = f"{subject.name}/{dtype}"
            result |= {f"{at}/{kind}/{i}": rows for i, rows in enumerate(encoded.rows)}
            if blocks:
                result[f"{at}/blocks/{kind}"] = encoded.hidden[0][1:]
            del original, encoded
            gc.collect()
            print(f"{subject.name} {dtype}: {kind} done", flush=True)
    return result


def compare(
    subject: Subject, checkpoint: Checkpoint, dtypes: Sequence[str], given: Arrays, *, blocks: bool
) -> list[Row]:
    """Our rows on the same weights and items, measured."""
    items = _items(given, subject.name)
    rows = []
    for dtype in dtypes:
        _weights(checkpoint, dtype)
        with tempfile.TemporaryDirectory() as folder:
            path = checkpoint.write(Path(folder) / "published", dtype=dtype)
            config = _config(subject, checkpoint)
            encoder = jaxenc.load(path, tower=config.modality, dtype=dtype, budgets=_budgets(config, items))
        ours = _flat(encoder.encode_items(items))
        truth, torch = (
            _flat([given[f"{subject.name}/{dtype}/{kind}/{i}"] for i in range(len(items))])
            for kind in ("truth", "torch")
        )
        absmax = np.abs(truth).max()
        errors = {
            f"{whose}_{name}": float(measure(rows_ - truth) / absmax)
            for whose, rows_ in (("ours", ours), ("torch", torch))
            for name, measure in (("max", _max), ("rms", _rms))
        }
        row = {
            "encoder": subject.name,
            "dtype": dtype,
            "tokens": sum(sum(encoder.config.pieces(item)) for item in items),
            **errors,
            "ratio_max": errors["ours_max"] / errors["torch_max"],
            "ratio_rms": errors["ours_rms"] / errors["torch_rms"],
            "difference_max": float(_max(ours - torch) / absmax),
            "truth_rms": float(_rms(truth) / absmax),
            "versions": versions() | {name: str(given[f"versions/{name}"]) for name in ("torch", "transformers")},
        }
        if blocks:
            row["blocks"] = _block_errors(encoder, items[0], given, at=f"{subject.name}/{dtype}/blocks")
            _print_blocks(row)
        rows.append(row)
        print(f"{subject.name} {dtype}: compared", flush=True)
        del encoder
        gc.collect()
    return rows


def _weights(checkpoint: Checkpoint, dtype: str) -> None:
    """The weights of a dtype, whatever was made of them before: rounding gives back what `fill_mantissas` changed."""
    round_to_bfloat16(checkpoint)
    if dtype == "float32":
        fill_mantissas(checkpoint)


def _config(subject: Subject, checkpoint: Checkpoint) -> EncoderConfig:
    towers = published_configs(checkpoint.configs["original"], name=subject.name)
    return next(tower for tower in towers if tower.family == subject.config.family)


def _budgets(config: EncoderConfig, items: Sequence[Item]) -> tuple[Budget, ...]:
    """A row for each item, with little padding to compute."""
    tokens = {sum(config.pieces(item)) for item in items}
    return tuple(sorted({Budget(-(-n // config.unit) * config.unit, 1) for n in tokens}))


def _items(given: Arrays, name: str) -> list[Item]:
    fields: dict[int, dict[str, np.ndarray]] = {}
    for key in given:
        if key.startswith(f"{name}/item/"):
            *_, i, field = key.split("/")
            fields.setdefault(int(i), {})[field] = given[key]
    return [item_of(fields[i]) for i in sorted(fields)]


def _block_errors(encoder: jaxenc.Encoder, item: Item, given: Arrays, *, at: str) -> list[dict[str, float]]:
    batch = encoder.pack([item])
    _, captured = jax.jit(partial(encoder.apply, capture="all"))(encoder.params, batch)
    truth, torch = given[f"{at}/truth"], given[f"{at}/torch"]
    errors = []
    for block, out in captured.items():
        (ours,) = encoder.unpack_tokens(out, batch)
        absmax = np.abs(truth[block]).max()
        errors.append(
            {
                f"{whose}_{name}": float(measure(np.asarray(x, np.float64) - truth[block]) / absmax)
                for whose, x in (("ours", ours), ("torch", torch[block]))
                for name, measure in (("max", _max), ("rms", _rms))
            }
        )
    return errors


def _print_blocks(row: Row) -> None:
    for block, e in enumerate(row["blocks"]):
        print(
            f"  block {block}: max {e['ours_max']:.2e} / {e['torch_max']:.2e} = {e['ours_max'] / e['torch_max']:.2f}, "
            f"rms {e['ours_rms']:.2e} / {e['torch_rms']:.2e} = {e['ours_rms'] / e['torch_rms']:.2f}"
        )


def _flat(rows: Sequence[np.ndarray]) -> np.ndarray:
    flat = np.concatenate([np.asarray(x, np.float64) for x in rows])
    assert np.isfinite(flat).all(), "NaN or infinite rows"
    return flat


def _max(x: np.ndarray) -> np.floating[Any]:
    return np.abs(x).max()


def _rms(x: np.ndarray) -> np.floating[Any]:
    return np.sqrt(np.mean(np.square(x)))


if __name__ == "__main__":
    main()
