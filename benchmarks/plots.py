"""Pictures of the results that are kept: `speed.png` and `growth.png`, of the machine that ran last.

python -m benchmarks.plots [--results FOLDER]
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.results import RESULTS, Row

COLOURS = {"float32": "#2b6cb0", "bfloat16": "#dd6b20"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    folder = parser.parse_args(argv).results
    for name, draw in (("speed", speed), ("growth", growth)):
        stored = folder / f"{name}.json"
        if stored.exists():
            results = json.loads(stored.read_text())
            figure = draw([row for row in results["rows"] if row["machine"] == results["machine"]])
            figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
            print(folder / f"{name}.png")


def speed(rows: Sequence[Row]) -> plt.Figure:
    """Our time over PyTorch's, a line of bars for each encoder and case."""
    versions = sorted({row["versions"]["jax"] for row in rows})
    cells = list(dict.fromkeys((row["encoder"], row["case"]) for row in rows))
    bars = [(dtype, jax) for dtype in COLOURS for jax in versions]
    figure, axes = plt.subplots(figsize=(8, 1 + 0.16 * len(bars) * len(cells)))
    for place, (dtype, jax) in enumerate(bars):
        found = {
            (row["encoder"], row["case"]): row["ratio_to_torch"]
            for row in rows
            if (row["dtype"], row["versions"]["jax"]) == (dtype, jax)
        }
        y = [cells.index(cell) + (place - (len(bars) - 1) / 2) * 0.8 / len(bars) for cell in found]
        shade = 1.0 if jax == versions[-1] else 0.5
        label = f"{dtype}, jax {jax}"
        axes.barh(y, list(found.values()), 0.75 / len(bars), color=COLOURS[dtype], alpha=shade, label=label)
        for at, ratio in zip(y, found.values(), strict=True):
            axes.text(ratio, at, f" {ratio:.2f}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(cells)), [f"{encoder}\n{case}" for encoder, case in cells], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("our time / PyTorch's better one (left of the line we are ahead)")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def growth(rows: Sequence[Row]) -> plt.Figure:
    """Seconds and memory of every curve, on logarithmic axes."""
    newest = max(row["versions"]["jax"] for row in rows)
    curves = [row for row in rows if row["versions"]["jax"] == newest]
    figure, panes = plt.subplots(2, len(curves), figsize=(3.2 * len(curves), 5.5), squeeze=False)
    for column, row in enumerate(curves):
        for pane, what, exponent, unit in (
            (panes[0, column], "seconds", "time_exponent", "s"),
            (panes[1, column], "mb", "memory_exponent", "MB"),
        ):
            values = np.maximum(row[what], 1e-3)
            pane.loglog(row["sizes"], values, "o-", color=COLOURS["float32"], markersize=4)
            pane.set_title(f"exponent {row[exponent]:.2f}", fontsize=9)
            pane.set_xticks(row["sizes"], [f"{size:,}" for size in row["sizes"]], fontsize=7, rotation=45)
            pane.set_xticks([], minor=True)
            pane.set_xlabel(row["curve"], fontsize=9)
            pane.set_ylabel(unit, fontsize=9)
            pane.grid(alpha=0.3, which="both")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
