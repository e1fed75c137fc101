"""A progress bar for a person at a terminal."""

import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
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


class BytesBar:
    """Bytes that are worked on, and those that are fetched for it, counted on stderr where that is a terminal.

    Args:
        shown: nothing is shown if not.
    """

    def __init__(self, *, shown: bool = True):
        """Shows nothing yet."""
        self._shown = shown
        self._fetched: Callable[[int, int], None] = lambda fetched, total: None

    def fetched(self, fetched: int, total: int) -> None:
        """So many bytes of so many have come; shown within `counting`, from any thread."""
        self._fetched(fetched, total)

    @contextmanager
    def counting(self, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Gives what is to be called with the bytes of each step.

        Args:
            what: is done, such as "converting".
            total_bytes: of all steps.
        """
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        if not (self._shown and (console.is_interactive or console.is_jupyter)):
            yield lambda size_bytes: None
            return
        with progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            redirect_stdout=sys.stdout.isatty(),
        ) as bar:
            # seen from the first byte on that comes over the network
            fetching = bar.add_task("fetching", total=None, visible=False)
            task = bar.add_task(what, total=total_bytes)
            self._fetched = lambda fetched, total: bar.update(fetching, completed=fetched, total=total, visible=True)
            yield lambda size_bytes: bar.advance(task, size_bytes)
