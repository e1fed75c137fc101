"""Sources -> items in the order of the sources, read ahead by threads.

Sources are taken from their iterator in the caller's own thread; only reading one runs elsewhere. A long video comes in
runs of a few items, so that it is never held in full.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from jaxenc.errors import InputError

logger = logging.getLogger("jaxenc")

OnError = Literal["raise", "skip"]
T = TypeVar("T")
THREADS = min(16, os.cpu_count() or 1)
AHEAD = 4 * THREADS  # sources that are being read, or have been and wait


@dataclass(frozen=True)
class Run(Generic[T]):
    """What was read of one source in one go: all of it, or the next few items.

    Attributes:
        items: in order.
        size: of them together.
        rest: what is still to be read; None at the source's end.
        error: what is wrong with the source, which ends here.
        stop: what went wrong otherwise; everything ends here.
    """

    items: Sequence[T]
    size: int = 0
    rest: Iterator[T] | None = None
    error: InputError | None = None
    stop: Exception | None = None


def read_ahead(
    sources: Iterable[Any],
    read: Callable[[int, Any], Iterator[T]],
    *,
    size: Callable[[T], int] = lambda item: 0,
    limit: int = sys.maxsize,
) -> Generator[Run[T], None, None]:
    """Reads sources in threads, at most `AHEAD` of them before they are asked for.

    Args:
        sources: whatever `read` takes; its own exception, if it raises one, comes as a run in its place.
        read: position and source -> its items, in a thread, as they are wanted.
        size: of an item.
        limit: what waits stays near this size. No source is begun while there is so much; the first one is read up to
            it, and those behind it, which may all be long videos, up to their share of it.

    Yields:
        The runs of one source after those of the source before.
    """
    stopped = threading.Event()

    def take(items: Iterator[T], enough: int) -> Run[T]:
        taken: list[T] = []
        total = 0
        try:
            for item in () if stopped.is_set() else items:
                taken.append(item)
                total += size(item)
                if total >= enough or stopped.is_set():
                    return Run(taken, total, rest=items)
        except InputError as error:
            return Run(taken, total, error=error)
        except Exception as error:
            return Run(taken, total, stop=error)
        return Run(taken, total)

    pending: deque[Future[Run[T]]] = deque()
    numbered, more = enumerate(sources), True
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="jaxenc-read")
    try:
        while True:
            sizes = [future.result().size for future in pending if future.done()]
            reading = len(pending) - len(sizes)
            if more and reading < THREADS and len(pending) < AHEAD and sum(sizes) < limit:
                try:
                    pending.append(pool.submit(take, read(*next(numbered)), limit // AHEAD))
                except StopIteration:
                    more = False
                except Exception as error:
                    pending.append(Future())
                    pending[-1].set_result(Run((), stop=error))
                    more = False
                continue
            if not pending:
                return
            if not pending[0].done():
                wait([future for future in pending if not future.done()], return_when=FIRST_COMPLETED)
                continue
            run = pending.popleft().result()
            if run.rest is not None:
                pending.appendleft(pool.submit(take, run.rest, limit))
            yield run
    finally:
        # threads end after the item they are at; to wait for it would hold up Ctrl-C. What they have not begun finds
        # itself stopped: cancel_futures=True fails noisily where a stream is left alone until the interpreter ends
        stopped.set()
        pool.shutdown(wait=False)


def read_all(runs: Generator[Run[T], None, None], on_error: OnError) -> Iterator[list[T] | None]:
    """All items of each source; None for a bad one that is skipped."""
    items: list[T] = []
    with closing(runs):
        for run in runs:
            if error := run.stop or (run.error if on_error == "raise" else None):
                raise error
            items += run.items
            if run.error:
                log_skipped(run.error)
            if run.rest is None:
                yield None if run.error else items
                items = []


def log_skipped(error: InputError) -> None:
    """Says that a source was left out, and why."""
    logger.warning("skipped: %s", error)
