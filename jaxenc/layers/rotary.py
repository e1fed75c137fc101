"""Rotary position embedding (Su et al., 2021) over the rows and columns of a grid."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Pairs = Literal["adjacent", "halves"]
Order = Literal["alternating", "rows first"]


def axial_rotary(
    yx: Int[Array, "b n 2"],
    *,
    head_dim: int,
    theta: float,
    positions: int,
    order: Order = "alternating",
    shared: bool = True,
) -> tuple[Float[Array, "b n pairs"], Float[Array, "b n pairs"]]:
    """Cosine and sine of the angle by which each pair of a token's head turns.

    Frequencies are theta^(-4i / head_dim), each for a pair that turns with the row and one that turns with the column.
    "alternating": pair 2i turns with the column and pair 2i+1 with the row: width first, which is what MoonViT's code
    does although its docstring says the opposite. "rows first": pair i turns with the row, and pair i + head_dim / 4
    with the column, as in the Qwen-VL and GLM towers. Where rows and columns do not share their frequencies, those of
    columns lie between those of rows, theta^(-(4i + 2) / head_dim), as in Pixtral.

    Args:
        yx: row and column of each token in its grid.
        head_dim: a multiple of 4; there are head_dim / 2 pairs.
        theta: base of the frequencies.
        positions: rows and columns are below this.
        order: of the pairs.
        shared: whether rows and columns turn with the same frequencies.

    Returns:
        Cosines and sines, float32. They are read from a table made in float64: an angle of 512 is good to 3e-5 only in
        float32.
    """
    steps = np.arange(0, head_dim, 4)
    by_row, by_column = (
        np.arange(positions)[:, None] * theta ** (-(steps + offset) / head_dim) for offset in (0, 0 if shared else 2)
    )

    def read(function: np.ufunc) -> Array:
        row = jnp.asarray(function(by_row), jnp.float32)[yx[..., 0]]
        column = jnp.asarray(function(by_column), jnp.float32)[yx[..., 1]]
        if order == "rows first":
            return jnp.concatenate([row, column], axis=-1)
        return jnp.stack([column, row], axis=-1).reshape(*yx.shape[:-1], head_dim // 2)

    return read(np.cos), read(np.sin)


def rotate(
    x: Float[Array, "b n heads head_dim"],
    cos: Float[Array, "b n pairs"],
    sin: Float[Array, "b n pairs"],
    *,
    pairs: Pairs,
) -> Float[Array, "b n heads head_dim"]:
    """Rotates pair j by angle j, in float32.

    "adjacent" pairs are (x[2j], x[2j+1]), as in MoonViT; "halves" are (x[j], x[j + head_dim / 2]), what transformers
    calls rotate_half. The result is laid out as all first members, then all second ones. Queries and keys are rotated
    alike, so their products do not notice, and nothing has to be interleaved again.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if pairs == "adjacent" else jnp.split(x, 2, axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)
