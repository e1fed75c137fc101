"""Which tokens attend to which, as arrays that the host makes for every batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxenc.layers.blocks import block_ranges
from jaxenc.packing import Budget

AXES: Mapping[str, tuple[str | None, ...]] = {
    "segments": ("batch", "length"),
    "spread": (None, None),
    "ranges": ("batch", None, None),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Tokens attend to those of their own segment; the rest says where these are.

    Attributes:
        segments: of every token; 0 is padding.
        spread: where the last tokens of every row belong to items that are spread over all rows, their segments: fold
            by fold, the share of each row after that of the one before.
        ranges: without windows, for each part of the batch and block of queries, the blocks of keys that it meets.
        window: no segment crosses a multiple of this many tokens, so each such stretch attends by itself.
    """

    segments: Int[Array, "b n"]
    spread: Int[Array, "folds s"] | None = None
    ranges: Int[Array, "parts blocks 2"] | None = None
    window: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, inputs: Mapping[str, Array], *, window: int | None) -> "Schedule":
        """What `schedule` put into a batch."""
        return cls(**{name: inputs[name] for name in AXES if name in inputs}, window=window)


@dataclass(frozen=True)
class Switch:
    """Two schedules of the same tokens, for stacks whose layers attend in two ways: windows in most, whole in some.

    Attributes:
        first: of layers where `use_second` is false.
        second: of the others.
        use_second: which one holds, in the layer that is being computed.
    """

    first: Schedule
    second: Schedule
    use_second: Bool[Array, ""]


def schedule(
    segments: Int[np.ndarray, "b n"], budget: Budget, *, window: int | None, parts: int
) -> dict[str, np.ndarray]:
    """The arrays of a batch from which its tokens learn where to attend.

    Args:
        segments: of every token; 0 is padding.
        budget: of the batch.
        window: tokens of an attention window, if there are windows.
        parts: of the batch.
    """
    arrays = {"segments": segments}
    if budget.spread:
        folds, length = budget.folds(window)
        spread = segments[:, budget.length :].reshape(budget.rows, folds, length).swapaxes(0, 1)
        arrays["spread"] = np.ascontiguousarray(spread.reshape(folds, -1))
    if window is None:
        keys = segments[:, : budget.length].reshape(parts, -1)
        if budget.spread:
            keys = np.concatenate([keys, np.broadcast_to(arrays["spread"], (parts, arrays["spread"].size))], axis=1)
        arrays["ranges"] = block_ranges(segments.reshape(parts, -1), keys)
    return arrays
