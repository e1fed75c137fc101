"""The one error of this package: everything that is wrong with a checkpoint, in one report."""

from collections.abc import Iterable


class CheckpointError(ValueError):
    """A checkpoint cannot be used; `problems` lists every reason found, one string each.

    Args:
        summary: One line that names the checkpoint.
        problems: What is wrong, each starting with the name of the culprit.
    """

    def __init__(self, summary: str, problems: Iterable[str] = ()) -> None:
        self.problems = list(problems)
        lines = [f"{summary} ({len(self.problems)} problem{'s' * (len(self.problems) != 1)}):"] if self.problems else []
        super().__init__("\n".join([*(lines or [summary]), *(f"  {problem}" for problem in self.problems)]))
