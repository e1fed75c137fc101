"""Weighted gathers: resized position tables, temporal pooling. Taps are made on the host, sums on the device."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def bicubic_taps(size: int, source: int) -> tuple[Int[np.ndarray, "size 4"], Float[np.ndarray, "size 4"]]:
    """Where each of `size` points reads a line of `source` points, and with what weight.

    This is `torch.nn.functional.interpolate(mode="bicubic", align_corners=False, antialias=False)`: Keys' kernel with
    a = -0.75, half-pixel centres, taps clamped at the border. `jax.image.resize` is another function (a = -0.5, weights
    renormalised at the border, antialiased when shrinking).

    Args:
        size: points wanted.
        source: points there are.

    Returns:
        Indices into the source, and weights (float64) that sum to one, four a point.
    """
    if size == source:
        return np.repeat(np.arange(size)[:, None], 4, axis=1), np.tile([1.0, 0.0, 0.0, 0.0], (size, 1))
    centre = (np.arange(size) + 0.5) * (source / size) - 0.5
    left = np.floor(centre)
    fraction = (centre - left)[:, None]
    distance = np.abs(np.concatenate([fraction + 1, fraction, 1 - fraction, 2 - fraction], axis=1))
    a = -0.75
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    index = left.astype(np.int64)[:, None] + np.arange(-1, 3)
    return np.clip(index, 0, source - 1), np.where(distance <= 1, near, far)


def bilinear_taps(size: int, source: int) -> tuple[Int[np.ndarray, "size 2"], Float[np.ndarray, "size 2"]]:
    """The same with two taps a point, first and last on first and last: mode="bilinear", align_corners=True.

    Args:
        size: points wanted.
        source: points there are.

    Returns:
        Indices into the source, and weights (float64) that sum to one, two a point.
    """
    # a product of integers is divided once: the points that meet one of the source get it exactly
    centre = np.arange(size) * (source - 1) / max(size - 1, 1)
    left = np.floor(centre).astype(np.int64)
    fraction = centre - left
    return np.minimum(np.stack([left, left + 1], axis=1), source - 1), np.stack([1 - fraction, fraction], axis=1)


def grid_taps(
    rows: tuple[Int[np.ndarray, "h taps"], Float[np.ndarray, "h taps"]],
    columns: tuple[Int[np.ndarray, "w taps"], Float[np.ndarray, "w taps"]],
    *,
    width: int,
) -> tuple[Int[np.ndarray, "h w taps*taps"], Float[np.ndarray, "h w taps*taps"]]:
    """Taps of a grid's points in a flattened table from those of its rows and columns.

    Args:
        rows: of each row.
        columns: of each column.
        width: columns of the table.
    """
    (index_y, weight_y), (index_x, weight_x) = rows, columns
    index = index_y[:, None, :, None] * width + index_x[None, :, None, :]
    weight = weight_y[:, None, :, None] * weight_x[None, :, None, :]
    return index.reshape(*index.shape[:2], -1), weight.reshape(*weight.shape[:2], -1)


def bilinear_weights(size: int, source: int) -> Float[np.ndarray, "size source"]:
    """How much each of `size` points takes of each of `source` points.

    This is `torch.nn.functional.interpolate(mode="bilinear", align_corners=False, antialias=True)`: a triangle on
    half-pixel centres, as wide as a wanted point where there are fewer of them, cut at the border.

    Args:
        size: points wanted.
        source: points there are.

    Returns:
        Weights (float64); each row sums to one.
    """
    scale = source / size
    centre = (np.arange(size)[:, None] + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(source) - centre) / max(scale, 1))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def weighted_gather(
    table: Float[Array, "s d"], index: Int[Array, "*n taps"], weight: Float[Array, "*n taps"]
) -> Float[Array, "*n d"]:
    """Sum over taps of weight * table[index], in float32.

    One tap at a time, so that the memory in use is a result's and not `taps` times that.
    """

    def add(tap: int, total: jax.Array) -> jax.Array:
        return total + weight[..., tap, None] * table[index[..., tap]].astype(jnp.float32)

    start = jnp.zeros((*index.shape[:-1], table.shape[-1]), jnp.float32)
    return jax.lax.fori_loop(0, index.shape[-1], add, start)
