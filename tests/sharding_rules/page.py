"""Runs the code on the page about `sharding_rules`. With --write, what it prints is put into the page."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "sharding_rules.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def printed() -> list[str]:
    """What each block prints, run in order in one namespace."""
    names, outputs = {"__name__": "page"}, []
    for code, _ in BLOCK.findall(PAGE.read_text()):
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            exec(compile(code, str(PAGE), "exec"), names)
        outputs.append("".join(f"{line.rstrip()}\n" for line in stdout.getvalue().rstrip().splitlines()))
    return outputs


def shown() -> list[str]:
    """What the page says that each block prints."""
    return [text for _, text in BLOCK.findall(PAGE.read_text())]


def main() -> None:
    """Prints, as JSON, what the blocks print and which modules they brought in; or writes the former into the page."""
    outputs = printed()
    if "--write" in sys.argv:
        left = iter(outputs)

        def with_output(found: re.Match[str]) -> str:
            output = next(left)
            return f"```python\n{found[1]}```\n" + (f"```text\n{output}```\n" if output else "")

        PAGE.write_text(BLOCK.sub(with_output, PAGE.read_text()))
    else:
        print(json.dumps({"printed": outputs, "modules": sorted({name.split(".")[0] for name in sys.modules})}))


if __name__ == "__main__":
    main()
