"""The README's table of encoders, from what the package knows of them and from the results that are kept.

python -m benchmarks.readme            # writes it
"""

import json
from collections.abc import Sequence
from pathlib import Path

import jaxenc
from benchmarks.results import RESULTS, Row
from jaxenc.models import EncoderInfo

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- python -m benchmarks.readme -->\n", "<!-- end -->"
HEADINGS = ("encoder", "heads", "published models", "float32", "bfloat16", "meshes")


def main() -> None:
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + table() + END + after)


def table() -> str:
    """The lines between the two marks."""
    parity, meshes = (_rows(name) for name in ("parity", "meshes"))
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    lines += [_line(encoder, parity, meshes) for encoder in jaxenc.encoders()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _line(encoder: EncoderInfo, parity: Sequence[Row], meshes: Sequence[Row]) -> tuple[str, ...]:
    heads = sorted(set(encoder.heads))
    return (
        f"`{encoder.name}`",
        ", ".join(map(str, heads)),
        ", ".join(name.rpartition("/")[2] for name in encoder.published),
        *(_parity(parity, encoder.name, dtype) for dtype in ("float32", "bfloat16")),
        _meshes(meshes, encoder.name),
    )


def _parity(rows: Sequence[Row], family: str, dtype: str) -> str:
    ratios = [row["ratio_max"] for row in rows if row["dtype"] == dtype and _family(row) == family]
    return f"{max(ratios):.2f}" if ratios else "not run"


def _meshes(rows: Sequence[Row], family: str) -> str:
    of_family = [row for row in rows if _family(row) == family]
    if not of_family:
        return "not run"
    (shapes,) = {tuple(map(tuple, row["meshes"])) for row in of_family}
    worst = max(row["difference"] for row in of_family)
    return f"{', '.join(f'{data} x {model}' for data, model in shapes)}: {worst:.0e}"


def _family(row: Row) -> str:
    return row["encoder"].partition(":")[0].partition(",")[0]


def _rows(name: str) -> list[Row]:
    stored = RESULTS / f"{name}.json"
    return json.loads(stored.read_text())["rows"] if stored.exists() else []


if __name__ == "__main__":
    main()
