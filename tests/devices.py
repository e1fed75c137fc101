"""The devices that tests share: eight, or the test is skipped."""

import jax
import pytest

DEVICES = 8


def eight() -> list[jax.Device]:
    """JAX's eight devices; where there are fewer, as on a GPU, the test or the whole file is skipped."""
    found = jax.devices()
    if len(found) < DEVICES:
        pytest.skip(f"{DEVICES} devices are needed, and there are {len(found)}", allow_module_level=True)
    return found
