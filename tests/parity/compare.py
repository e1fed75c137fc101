"""How far two lists of arrays are apart."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

FLOAT32_TOLERANCE = 1e-5  # of the output's absmax


def max_error(ours: Sequence[ArrayLike], truth: Sequence[np.ndarray]) -> float:
    """Largest |difference| over all arrays, of the truth's absmax."""
    differences = _differences(ours, truth)
    return float(max(np.abs(x).max() for x in differences) / max(np.abs(x).max() for x in truth))


def rms_error(ours: Sequence[ArrayLike], truth: Sequence[np.ndarray]) -> float:
    """Root mean square of the difference over all arrays, of the truth's."""
    differences = _differences(ours, truth)
    return float(np.sqrt(sum((x**2).sum() for x in differences) / sum((x**2).sum() for x in truth)))


def assert_float32_equal(
    ours: Sequence[ArrayLike], truth: Sequence[np.ndarray], *, tolerance: float = FLOAT32_TOLERANCE
) -> None:
    """Every array within `tolerance` of its own absmax."""
    assert len(ours) == len(truth)
    errors = [max_error([x], [y]) for x, y in zip(ours, truth, strict=True)]
    assert max(errors) <= tolerance, [f"{error:.1e}" for error in errors]


def assert_avoided(
    ours: Sequence[ArrayLike],
    truth: Sequence[np.ndarray],
    mistaken: Sequence[np.ndarray],
    *,
    tolerance: float = FLOAT32_TOLERANCE,
) -> None:
    """Every array is the truth, and every one shows the mistake: with it, it could not be within the tolerance."""
    shown = [max_error([x], [y]) for x, y in zip(mistaken, truth, strict=True)]
    assert min(shown) > 3 * tolerance, f"the mistake does not show: {[f'{error:.1e}' for error in shown]}"
    assert_float32_equal(ours, truth, tolerance=tolerance)


def assert_bfloat16_as_good(
    ours: Sequence[ArrayLike], original: Sequence[np.ndarray], truth: Sequence[np.ndarray]
) -> None:
    """Our distance from the truth is at most 1.5 times the original's own at the same precision."""
    for measure in (rms_error, max_error):
        got, allowed = measure(ours, truth), 1.5 * measure(original, truth)
        assert got <= allowed, f"{measure.__name__}: {got:.2e}, allowed {allowed:.2e}"


def _differences(ours: Sequence[ArrayLike], truth: Sequence[np.ndarray]) -> list[np.ndarray]:
    pairs = [(np.asarray(x, np.float64), y) for x, y in zip(ours, truth, strict=True)]
    for x, y in pairs:
        assert x.shape == y.shape, f"{x.shape} is not {y.shape}"
        assert np.isfinite(x).all(), "NaN or infinite"
    return [x - y for x, y in pairs]
