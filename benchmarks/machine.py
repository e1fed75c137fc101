"""What the numbers were measured on: the machine and the versions, and nothing that identifies either's owner."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers")


def machine() -> dict[str, str]:
    """CPU model, cores, memory and operating system."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = f"{platform.system()} {platform.release()}"
    return {
        "cpu": _cpu(),
        **_gpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "os": system,
    }


def versions() -> dict[str, str]:
    """Python's version, and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def load_average() -> float:
    """Processes that ran or waited to run in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _gpu() -> dict[str, str]:
    """Its name, where there is one."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.split("\n")
    return {"gpu": names[0]} if names[0] else {}


def _cpu() -> str:
    model, features = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        model = fields.get("model name", model)
        flags = fields.get("flags", "").split()
        wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
        features = f" ({', '.join(wide)})" if wide else ""
    return model + features
