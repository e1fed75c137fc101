"""Eight virtual CPU devices for every test, and small checkpoints of the seed towers.

On a GPU, or with `XLA_FLAGS=`, there is one device, and what needs more is skipped.
"""

import os
import subprocess
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxenc
from jaxenc import demo
from jaxenc.models import kimi_k25, qwen3_omni_audio
from tests.devices import DEVICES

# the published numbers of heads, which decide what divides, and little else
KIMI = replace(kimi_k25.Config(), layers=2, embed=64, mlp=96, position_h=16, position_w=12, out=24)
QWEN = replace(qwen3_omni_audio.Config(), layers=2, embed=80, mlp=120, mel=32, channels=8, out=24)


@contextmanager
def _skips_without_devices() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if jax.device_count() < DEVICES and f"devices and there are {jax.device_count()}" in str(error):
            pytest.skip(str(error).partition(". ")[0])
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    with _skips_without_devices():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with _skips_without_devices():
        return (yield)


# a shell that starts the tests in the background has them ignore interrupts, and so would what they start
_HEEDS_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, sys.argv[1:])
"""


@pytest.fixture
def python():
    """Starts Python with these arguments, to be interrupted as at a terminal; killed with the test."""
    started = []

    def start(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", _HEEDS_INTERRUPTS, sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def kimi_folder(tmp_path_factory):
    """A published-layout checkpoint of a small Kimi tower: 16 heads, no bias zero."""
    return demo.write_kimi(tmp_path_factory.mktemp("kimi"), config=KIMI)


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory):
    """A published-layout checkpoint of a small audio tower: 20 heads, no bias zero."""
    return demo.write_qwen(tmp_path_factory.mktemp("qwen"), config=QWEN)


@pytest.fixture(scope="session")
def pictures():
    """Distinguishable items of several shapes, clips among them."""
    rng = np.random.default_rng(7)
    grids = [(1, 8, 8), (1, 4, 6), (4, 2, 10), (3, 4, 4), (1, 2, 14), (2, 2, 2), (1, 10, 4)]
    return [
        jaxenc.VisionItem(rng.standard_normal((int(np.prod(grid)), 588)).astype(np.float32), grid, name=f"{grid}")
        for grid in grids
    ]


@pytest.fixture(scope="session")
def clips():
    """Distinguishable clips: less than a chunk, exact chunks, more than a window."""
    rng = np.random.default_rng(8)
    return [
        jaxenc.AudioItem(rng.standard_normal((32, frames)).astype(np.float32), name=f"{frames} frames")
        for frames in (230, 100, 61, 1050, 333, 37, 800, 9)
    ]
