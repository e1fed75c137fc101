"""Measurements in processes of their own: nothing that one leaves behind is there in the next."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent


def fresh(module: str, *args: str, python: str = sys.executable, devices: int = 1) -> dict[str, Any]:
    """Runs `python -m module args` and reads the JSON object on the last line that it prints.

    Args:
        module: with a `main` that prints it.
        args: of its command line.
        python: interpreter.
        devices: virtual CPU devices that JAX sees.

    Returns:
        The object.
    """
    flags = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", module, *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class Worker:
    """A module that runs beside this process and answers lines with JSON objects in lines."""

    def __init__(self, module: str, *args: str, python: str = sys.executable, environment: Mapping[str, str] = {}):
        """Starts `python -m module args`."""
        self._process = subprocess.Popen(
            [python, "-m", module, *args],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer.

        Raises:
            RuntimeError: it has ended; what it died of is on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(map(str, self._process.args[1:]))} ended with {self._process.wait()}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def __enter__(self) -> Self:
        """Is itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def forget_peak() -> None:
    """Lets `resident_bytes(peak=True)` start anew, where the system allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Returns memory that was freed to the system, where its C library can: else `resident_bytes` counts it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(*, peak: bool = False) -> int:
    """Memory of this process that is in RAM, now or at most so far; file pages that it has mapped count too.

    Read from /proc, whose peak starts anew with every program: `ru_maxrss` would begin with the parent's.
    """
    field = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
