"""What can be said of values without knowing what they are for."""

import ml_dtypes
import numpy as np

from checkpoints_convert.sources import NumpyArray


def bits(values: NumpyArray) -> NumpyArray:
    """The same memory, flat, as unsigned integers."""
    return np.ascontiguousarray(values).reshape(-1).view(np.dtype(f"u{values.dtype.itemsize}"))


def memory(values: NumpyArray) -> memoryview:
    """Their bytes, in C order."""
    return bits(values).data


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
