"""Measurements in processes of their own: nothing that one leaves behind is there in the next."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def resident_bytes(*, peak: bool = False) -> int:
    """Memory of this process that is in RAM, now or at most so far; file pages that it has mapped count too.

    Read from /proc, whose peak starts anew with every program: `ru_maxrss` would begin with the parent's.
    """
    field = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
