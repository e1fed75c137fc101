"""One table, as plain text, notebook HTML or a rich table."""

import html
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

WIDTH = 116
NARROWEST = 44  # a last column with less room than this goes below its row


@dataclass(frozen=True)
class Table:
    """Rows of cells; the last column is prose.

    Args:
      title: Above it.
      columns: Names of the columns; one that starts with ">" is aligned to the right.
      rows: As many cells as there are columns.
      marked: The row to point at.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None

    @property
    def _heads(self) -> list[str]:
        return [name.removeprefix(">") for name in self.columns]

    def text(self) -> str:
        """Plain text, the prose wrapped: beside the other cells, or below them where that is too narrow."""
        *heads, prose = self._heads
        widths = [max(map(len, cells)) for cells in zip(heads, *(row[:-1] for row in self.rows), strict=True)]
        right = 2 + sum(widths) + 2 * len(widths)
        beside = right + NARROWEST <= WIDTH
        indent = " " * (right if beside else 4 + widths[0])

        def line(cells: Sequence[str]) -> str:
            columns = zip(self.columns, cells, widths, strict=False)
            return "  ".join(f"{cell:>{w}}" if name[0] == ">" else f"{cell:<{w}}" for name, cell, w in columns)

        def lines() -> Iterator[str]:
            yield f"  {line(heads)}  {prose if beside else ''}"
            yield f"  {line(['-' * width for width in widths])}  {'-' * (WIDTH - right if beside else 0)}"
            for index, row in enumerate(self.rows):
                start = f"{'>' if index == self.marked else ' '} {line(row)}  "
                wrapped = textwrap.wrap(row[-1], WIDTH, initial_indent=indent, subsequent_indent=indent)
                if beside and wrapped:
                    wrapped[0] = start + wrapped[0].lstrip()
                yield from wrapped if beside and wrapped else [start, *wrapped]

        return "\n".join([self.title, *(each.rstrip() for each in lines())])

    def html(self) -> str:
        """A small HTML table, escaped."""

        def row(cells: Sequence[str], tag: str, style: str = "") -> str:
            sides = ["right" if name[0] == ">" else "left" for name in self.columns]
            body = (
                f'<{tag} style="text-align: {s}">{html.escape(c)}</{tag}>' for c, s in zip(cells, sides, strict=True)
            )
            return f"<tr{style}>{''.join(body)}</tr>"

        bold = ' style="font-weight: bold"'
        rows = (row(cells, "td", bold if index == self.marked else "") for index, cells in enumerate(self.rows))
        return f"<h4>{html.escape(self.title)}</h4><table>{row(self._heads, 'th')}{''.join(rows)}</table>"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["RenderableType"]:
        """For a rich console; where that is narrow the prose follows the table."""
        from rich.box import SIMPLE_HEAD
        from rich.padding import Padding
        from rich.table import Table as RichTable
        from rich.text import Text

        cells = [self._heads[:-1], *(row[:-1] for row in self.rows)]
        taken = sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True))
        beside = taken + NARROWEST <= options.max_width
        table = RichTable(box=SIMPLE_HEAD, header_style="cyan")
        styles = ["bold green" if index == self.marked else "" for index in range(len(self.rows))]
        for name in self.columns if beside else self.columns[:-1]:
            table.add_column(name.removeprefix(">"), justify="right" if name[0] == ">" else "left", overflow="fold")
        for row, style in zip(self.rows, styles, strict=True):
            table.add_row(*map(Text, row if beside else row[:-1]), style=style)
        yield Text(f"\n{self.title}", style="bold")
        yield table
        if not beside:
            for row, style in zip(self.rows, styles, strict=True):
                prose = Text.assemble((f"{row[0]} ({row[1]}): ", style or "cyan"), (row[-1], style))
                yield Padding(prose, (0, 0, 0, 2))
