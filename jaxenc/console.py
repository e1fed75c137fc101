"""What both command lines share: where output goes, and how a run ends."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from checkpoints_convert import CheckpointError
from jaxenc.errors import ConfigError, InputError
from sharding_rules import IndivisibleAxisError, RulesError

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="A traceback instead of a one-line error.")]

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

    def result(self, data: dict[str, Any], text: str) -> None:
        """The command's result, on stdout."""
        typer.echo(json.dumps(data) if self.as_json else text)


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Runs a command line.

    Args:
        app: the commands.
        arguments: without the program's name; the process's own where not given.

    Returns:
        The exit code: 0 done, 1 an error (one line on stderr), 2 wrong usage, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # one handler, on stderr: stdout belongs to the result
    logging.basicConfig(level=logging.ERROR if "--quiet" in arguments else logging.WARNING, format="%(message)s")
    command: Callable[..., Any] = typer.main.get_command(app)
    try:
        return command(args=arguments, standalone_mode=False) or 0
    except typer.Exit as stop:
        return stop.exit_code
    except USAGE as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return 130
    except EXPECTED as error:
        if "--debug" in arguments:
            raise
        # a report of several problems becomes one line too: what reads a log reads lines
        first, *rest = (line.strip() for line in str(error).splitlines() or [type(error).__name__])
        typer.echo(f"error: {first} {'; '.join(rest)}".rstrip(), err=True)
        return 1


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
