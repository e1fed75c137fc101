"""Tables that are printed, and kept as JSON and Markdown: a new row takes the place of the one it repeats."""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """What one benchmark measures.

    Attributes:
        name: of its files.
        title: above the table.
        text: what was measured, and how.
        columns: heading -> cell of a row, whose `machine` is in it by then.
        key: what a row is the newest measurement of.
    """

    name: str
    title: str
    text: str
    columns: dict[str, Callable[[Row], str]]
    key: Callable[[Row], Hashable]

    def markdown(self, rows: Sequence[Row]) -> str:
        """The rows as a Markdown table."""
        lines = [" | ".join(self.columns), " | ".join("---" for _ in self.columns)]
        lines += [" | ".join(cell(row) for cell in self.columns.values()) for row in rows]
        return "\n".join(f"| {line} |" for line in lines)


def keep(table: Table, rows: Sequence[Row], *, folder: Path | None, note: str = "") -> None:
    """Prints the rows, and writes them beside those that other versions and machines left.

    Args:
        table: what they are rows of.
        rows: each with `versions`.
        folder: where `<name>.json` and `<name>.md` go; nowhere if None.
        note: what a reader should know of these rows.
    """
    here = machine()
    rows = [row | {"machine": here} | ({"note": note} if note else {}) for row in rows]
    print(table.markdown(rows))
    if note:
        print(f"\n{note}")
    if folder is None:
        return
    stored = folder / f"{table.name}.json"
    fresh = {table.key(row): row for row in rows}
    kept = json.loads(stored.read_text())["rows"] if stored.exists() else []
    merged = {table.key(row): row for row in kept} | fresh
    ordered = [merged[key] for key in sorted(merged)]
    folder.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps({"machine": here, "rows": ordered}, indent=1) + "\n")
    notes = list(dict.fromkeys(row["note"] for row in ordered if "note" in row))
    ran_on: dict[tuple[str, str], list[str]] = {}
    for row in ordered:
        ran_on.setdefault((described(row["machine"]), _versions(row)), []).append(row.get("encoder", ""))
    lines = [
        f"* {where}; {versions}" + (f": {', '.join(sorted({*encoders}))}" if len(ran_on) > 1 and encoders[0] else "")
        for (where, versions), encoders in ran_on.items()
    ]
    parts = [f"# {table.title}", table.text, table.markdown(ordered), *notes, "Measured on:\n\n" + "\n".join(lines)]
    (folder / f"{table.name}.md").write_text("\n\n".join(parts) + "\n")


def described(machine: dict[str, str]) -> str:
    """A machine in a line."""
    return ", ".join(f"{name} {value}" if name == "cores" else value for name, value in machine.items())


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())
