"""A progress bar for a person at a terminal."""

import sys
import weakref
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
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.1f}/s")

    console = Console(stderr=True)
    if not (console.is_interactive or console.is_jupyter):
        return results
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Speed(),
        progress.TimeRemainingColumn(),
        console=console,
        # what is printed goes above the bar, unless it goes elsewhere
        redirect_stdout=sys.stdout.isatty(),
    )

    def counted() -> Generator[Any, None, None]:
        with closing(results), bar:
            task = bar.add_task(what, total=total)
            for result in results:
                bar.advance(task)
                yield result

    shown = counted()
    # a stream may be left alone until the interpreter ends, and then rich is gone before it
    weakref.finalize(shown, bar.stop)
    return shown
