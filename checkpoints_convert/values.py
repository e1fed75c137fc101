"""What can be said of values without knowing what they are for."""

from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.sources import NumpyArray


def bits(values: NumpyArray) -> NumpyArray:
    """The same memory, flat, as unsigned integers."""
    return np.ascontiguousarray(values).reshape(-1).view(np.dtype(f"u{values.dtype.itemsize}"))


def memory(values: NumpyArray) -> memoryview:
    """Their bytes, in C order."""
    return bits(values).view(np.uint8).data


def count_nonfinite(values: NumpyArray) -> int:
    """How many values are NaN or infinite; for bfloat16 an eighth of the time of `isfinite` where there are none."""
    if not values.size:
        return 0
    values = np.ascontiguousarray(values)
    width = 8 * values.dtype.itemsize
    info = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
    exponent = ((1 << info.nexp) - 1) << info.nmant
    # As integers they are the largest of their sign: positive ones of the signed values, negative ones of the unsigned.
    largest, largest_unsigned = (int(values.view(f"{kind}{width // 8}").max()) for kind in "iu")
    if largest < exponent and largest_unsigned < (1 << (width - 1)) + exponent:
        return 0
    return int(np.count_nonzero(~np.isfinite(values)))


def count_zeros(values: NumpyArray) -> int:
    """How many values are zero, of either sign."""
    unsigned = bits(values)
    magnitude = np.array((1 << (8 * values.dtype.itemsize - 1)) - 1, unsigned.dtype)
    return int(values.size - np.count_nonzero(unsigned & magnitude))


def cast_to_nearest(values: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    """Values of another dtype: the nearest, and of two that are equally near the even one."""
    return to_round_once(values, dtype).astype(dtype, copy=False)


def to_round_once(values: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    """What a cast to `dtype` rounds to the value nearest to `values`, and of two that are equally near to the even one.

    That is `values` itself, but for float64 to bfloat16: `ml_dtypes` goes by way of float32, and rounds twice. Where
    the first step is rounded to odd, the second gives what a single one would (Boldo and Melquiond, 2008, "Emulation of
    FMA and correctly rounded sums: proved algorithms using rounding to odd", theorem 3).
    """
    if values.dtype != np.float64 or dtype != ml_dtypes.bfloat16:
        return values
    with np.errstate(over="ignore", under="ignore"):
        single = np.asarray(values.astype(np.float32))
    single = np.where(np.abs(single) > np.abs(values), np.nextafter(single, np.float32(0)), single)
    inexact = (single != values) & ~np.isnan(values)
    return np.asarray((single.view(np.uint32) | inexact).view(np.float32))
