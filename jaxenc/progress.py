"""A progress bar for a person at a terminal."""

import atexit
from collections.abc import Generator
from contextlib import closing
from typing import Any


def with_progress(results: Generator[Any, None, None], *, what: str, total: int | None) -> Generator[Any, None, None]:
    """The same results, counted on stderr as they are given out, where that is a terminal or a notebook.

    Args:
        results: one a source.
        what: they are of, such as "images".
        total: how many there will be, where that is known.
    """
    from rich.console import Console

    console = Console(stderr=True)
    return _counted(results, console, what, total) if console.is_interactive or console.is_jupyter else results


def _counted(
    results: Generator[Any, None, None], console: Any, what: str, total: int | None
) -> Generator[Any, None, None]:
    from rich import progress
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.1f}/s")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Speed(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=console)
    task = bar.add_task(what, total=total)
    bar.start()
    # where the stream is left alone until the interpreter ends, rich is gone before it
    atexit.register(bar.stop)
    try:
        with closing(results):
            for result in results:
                bar.advance(task)
                yield result
    finally:
        atexit.unregister(bar.stop)
        bar.stop()
