"""A progress bar for a person at a terminal."""

from collections.abc import Generator
from contextlib import closing
from typing import Any


def with_progress(results: Generator[Any, None, None], *, what: str, total: int | None) -> Generator[Any, None, None]:
    """The same results, counted on stderr as they are given out, where that is a terminal or a notebook.

    Args:
        results: one a source.
        what: they are of, such as "images".
        total: how many there will be, where that is known.

    Yields:
        What comes.
    """
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g}/s")

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Speed(),
        progress.TimeRemainingColumn(),
    )
    shown = console.is_terminal or console.is_jupyter
    with closing(results), progress.Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task(what, total=total)
        for result in results:
            bar.advance(task)
            yield result
