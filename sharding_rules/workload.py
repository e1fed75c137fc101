"""What is to be computed: a model states its own work, and nothing is guessed from the shapes of its parameters."""

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class GroupWork:
    """The work of parameters that are divided together: attention, mlp, stem, projector or any other.

    Args:
      name: What it is called in decisions and in `strategy={name: ...}`.
      axis: Logical weight axis whose division divides this work (`"heads"`), or None where there is none.
      length_axis: Logical activation axis of its tokens. Where the weight axis is None or does not divide and the
        rules give this axis the same mesh axes, the tokens are divided instead.
      flops: FLOPs of each of the workload's items in this group, over all layers.
      unit: Tokens that stay together when tokens are divided: a patch, a merge group, a convolution chunk.
      layers: How many times the block is repeated; above 1 its collectives count as collectives per layer.
      paddable: Whether zeros appended along the weight axis change nothing but the work.
      summed: Elements of each of a token's vectors that are summed over devices (in float32) where the weights are
        divided: an output projection's, a norm's over all heads.
      returned: Elements of a token's vector that goes back to all devices where the tokens are divided instead.
      shared: Elements of a token that all devices need where an item is spread over them: keys and values. They are
        divided as the weight axis is.
      live: Elements that each item holds at once in one layer, at most; `pairs` come on top.
      pairs: Elements for every pair of tokens of an item, such as attention's scores.
      block: Where pairs are made and dropped block by block, the tokens of a block; None where all of an item's are
        held at once.
    """

    name: str
    axis: str | None
    length_axis: str
    flops: tuple[float, ...]
    unit: int = 1
    layers: int = 1
    paddable: bool = False
    summed: tuple[float, ...] = ()
    returned: float = 0
    shared: float = 0
    live: tuple[float, ...] = ()
    pairs: float = 0
    block: int | None = None


@dataclass(frozen=True)
class Workload:
    """The items of one call, group by group.

    Args:
      tokens: Of each item that can be computed by itself: a picture, an attention window.
      groups: The work.

    Raises:
      ValueError: A group's FLOPs are not one number an item, a number is not one that can be, or two groups share a
        name.
    """

    tokens: tuple[int, ...]
    groups: tuple[GroupWork, ...]

    def __post_init__(self) -> None:
        if min(self.tokens, default=0) < 0:
            raise ValueError(f"an item has {min(self.tokens)} tokens")
        for group in self.groups:
            if set("=,") & set(group.name):
                raise ValueError(
                    f"group {group.name!r}: a name has neither '=' nor ',', which strategies are written with"
                )
            if min(group.unit, group.layers) < 1:
                raise ValueError(f"group {group.name!r}: unit={group.unit} and layers={group.layers} start from 1")
            for what, numbers in (("FLOPs", group.flops), ("live elements", group.live or group.flops)):
                if len(numbers) != len(self.tokens):
                    raise ValueError(f"group {group.name!r}: {len(numbers)} {what} for {len(self.tokens)} items")
                if not all(math.isfinite(number) and number >= 0 for number in numbers):
                    raise ValueError(f"group {group.name!r}: {what} have to be finite and not negative: {numbers}")
            if any(flops and not tokens for flops, tokens in zip(group.flops, self.tokens, strict=True)):
                raise ValueError(f"group {group.name!r}: FLOPs for an item of no tokens")
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ValueError(f"two groups share a name: {', '.join(group.name for group in self.groups)}")

    @cached_property
    def item_flops(self) -> tuple[float, ...]:
        """FLOPs of each item in all groups together."""
        return tuple(math.fsum(group.flops[item] for group in self.groups) for item in range(len(self.tokens)))
