"""What both command lines share: where output goes, and how a run ends."""

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, NoReturn

import typer

from checkpoints_convert import CheckpointError
from jaxenc import __version__
from jaxenc.errors import ConfigError, InputError
from sharding_rules import IndivisibleAxisError, RulesError

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="A traceback instead of an error message.")]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"jaxenc {__version__}")
        raise typer.Exit()


Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="The version, and nothing else.")
]

# newer versions of typer bring their own copy of click: what is raised is not what click exports
USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
EXPECTED = (
    CheckpointError,
    ConfigError,
    InputError,
    IndivisibleAxisError,
    RulesError,
    ValueError,
    OSError,
    ImportError,
)


@dataclass(frozen=True)
class Output:
    """Where a command's results and progress go.

    Attributes:
        as_json: results as one JSON object.
        quiet: no progress.
    """

    as_json: bool
    quiet: bool

    def progress(self, text: str) -> None:
        """A line for a person who waits, on stderr."""
        if not self.quiet:
            typer.echo(text, err=True)

    def result(self, data: dict[str, Any], text: str, *, coloured: Any = None) -> None:
        """The command's result, on stdout.

        Args:
            data: printed with --json.
            text: printed without.
            coloured: printed instead of `text` on a terminal, by rich where it is installed, unless --quiet.
        """
        if coloured is not None and sys.stdout.isatty() and not (self.as_json or self.quiet):
            with contextlib.suppress(ImportError):
                from rich.console import Console

                Console().print(coloured)
                return
        typer.echo(json.dumps(data) if self.as_json else text)


def main(app: typer.Typer) -> NoReturn:
    """Runs a command line as the whole program."""
    if "--debug" not in sys.argv:
        _silence_leftovers()
    sys.exit(run(app))


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Runs a command line.

    Args:
        app: the commands.
        arguments: without the program's name; the process's own where not given.

    Returns:
        The exit code: 0 done, 1 an error (on stderr; details are indented), 2 wrong usage, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # one handler, on stderr: stdout belongs to the result
    handler = _Stderr()
    handler.addFilter(lambda record: not record.name.startswith(_silenced(arguments)))
    level = logging.ERROR if "--quiet" in arguments else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    command: Callable[..., Any] = typer.main.get_command(app)
    try:
        code: int = command(args=arguments, standalone_mode=False) or 0
    except typer.Exit as stop:
        code = stop.exit_code
    except USAGE as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except EXPECTED as error:
        if "--debug" in arguments:
            raise
        first, *rest = (line.strip() for line in str(error).splitlines() or [type(error).__name__])
        typer.echo("\n  ".join([f"error: {first}", *rest]), err=True)
        return 1
    if code == 130:  # newer versions of typer return it, older ones raise
        typer.echo("interrupted", err=True)
    return code


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what stderr is at the time: a progress bar takes its place, and moves lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def parse_mesh(text: str) -> dict[str, int]:
    """A mesh such as "data=1,model=8", as axis -> size.

    Raises:
        typer.BadParameter: it is not of that form.
    """
    try:
        parts = [part.split("=") for part in text.split(",")]
        shape = {name.strip(): int(size) for name, size in parts}
    except ValueError:
        parts, shape = [], {}
    if not shape or len(shape) < len(parts) or min(shape.values()) < 1 or not all(shape):
        raise typer.BadParameter(f"{text!r}: write a mesh as axis=size,axis=size such as data=1,model=8")
    return shape


def _silence_leftovers() -> None:
    """A failed read of Orbax's leaves others behind, which print tracebacks after the error that has been reported."""
    hook = sys.excepthook

    def of_this_thread(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Python's own threads have another hook: what comes here from elsewhere are the storage's
        if threading.current_thread() is threading.main_thread():
            hook(kind, error, trace)

    sys.excepthook = of_this_thread
    sys.unraisablehook = lambda unraisable: None


def _silenced(arguments: list[str]) -> tuple[str, ...]:
    """Loggers whose lines are not printed: the hub's prints them itself, the others repeat an error as a traceback."""
    return ("huggingface_hub",) if "--debug" in arguments else ("huggingface_hub", "asyncio", "orbax", "absl")
