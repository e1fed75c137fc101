"""Tables of sines and cosines that are added to tokens."""

import numpy as np
from jaxtyping import Float


def sinusoids(positions: int, embed: int, *, steps: int) -> Float[np.ndarray, "positions embed"]:
    """[sin | cos] of position * 10000^(-j / steps) for each j below embed / 2.

    Args:
        positions: rows of the table.
        embed: width of a token.
        steps: embed / 2, or one less, as in Whisper, where the slowest is 1 / 10000 exactly.
    """
    angles = np.arange(positions)[:, None] * 10_000.0 ** (-np.arange(embed // 2) / steps)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
