"""The budgets of one encoder: which there are, what a batch of each costs, and when another one is made."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jaxenc.models.base import EncoderConfig
from jaxenc.packing import Budget, divides, spread_unit
from sharding_rules import Batching, Plan, Workload
from sharding_rules.costs import dtype_of

MOST = 8  # budgets an encoder ever has: each is a program to compile
STEP = 128  # tokens that a length chosen from a stream is a multiple of, about: what attention takes at a time
FITS = 12  # lengths that are tried for a stream
BATCH_SECONDS = 1e-3  # to lay a batch out, send it and start it, whatever its size: an estimate


@dataclass(frozen=True)
class Prices:
    """What batches and the items in them cost, in seconds.

    Attributes:
        shape: of a budget, all that its shape fixes: its tokens, full or not, and what devices say to each other.
        token: of a token on one device, without its pairs.
        pair: of two tokens that attend to each other, on one device; 0 where windows of one length are computed whole.
        parts: devices that share the batch: a budget's rows are divided over them, in order.
    """

    shape: Callable[[Budget], float]
    token: float
    pair: float
    parts: int

    def item(self, tokens: int) -> float:
        """A piece of so many tokens on one device."""
        return self.token * tokens + self.pairs(tokens)

    def pairs(self, tokens: int) -> float:
        """The part of it that pairs of its tokens have."""
        return self.pair * tokens**2


@dataclass(frozen=True)
class Shapes:
    """Which budgets one encoder can have on one plan.

    Attributes:
        rows: rows, one for each device that shares the batch.
        unit: tokens that a row's length is a multiple of.
        window: tokens of an attention window, if there are windows.
        token_axes: size of every token axis in a row of a budget.
        parts: devices that share each token axis.
    """

    rows: int
    unit: int
    window: int | None
    token_axes: Callable[[Budget], Mapping[str, int]]
    parts: Mapping[str, int]

    def whole(self, length: int, *, step: int | None = None) -> Budget:
        """Rows of at least `length` tokens, a multiple of `step` or else of about 128 and of what divides."""
        step = step or self.unit * max(1, STEP // self.unit)
        return self._raised(lambda k: Budget(k * step, self.rows), -(-length // step))

    def spread(self, tokens: int, *, length: int = 0) -> Budget:
        """Room for a piece of `tokens` that is spread over all rows, beside whole ones in `length` tokens of a row."""
        share = spread_unit(self.window, rows=self.rows, unit=self.unit)
        count = -(-tokens // (self.window or self.rows * self.unit))
        return self._raised(lambda k: Budget(length, self.rows, k * share), count)

    def check(self, budget: Budget) -> None:
        """Raises ValueError, with what would divide, for a budget that does not."""
        axes = self.token_axes(budget)
        share = spread_unit(self.window, rows=budget.rows, unit=self.unit)
        if (
            budget.rows % self.rows
            or budget.length % self.unit
            or budget.spread % share
            or not divides(axes, self.parts)
        ):
            shared = ", ".join(f"{axis} {axes[axis]} over {n}" for axis, n in self.parts.items() if n > 1)
            raise ValueError(
                f"{budget} does not divide on this plan: rows must be a multiple of {self.rows}, the length of "
                f"{self.unit}, spread of {share}{shared and ', and of what divides ' + shared}"
            )

    def _raised(self, made: Callable[[int], Budget], count: int) -> Budget:
        """The first budget of `count` multiples or more at which every token axis divides."""
        most = math.prod(self.parts.values())
        # where there is a whole part beside the spread one, only some counts divide, and not their multiples alone
        return next(budget for budget in map(made, range(count, count + most + 1)) if self._divides(budget))

    def _divides(self, budget: Budget) -> bool:
        return divides(self.token_axes(budget), self.parts)


def default_budgets(lengths: Sequence[int], shapes: Shapes) -> tuple[Budget, ...]:
    """At most six budgets.

    Args:
        lengths: tokens of a row to choose from, ascending; the last but one holds the largest item, the last several.
        shapes: what divides.

    Returns:
        On one row, one budget a length. On several, a small and a large one of whole items, three or four in which
        items are spread, and one for both.
    """

    def whole(length: int) -> Budget:
        return shapes.whole(length, step=lengths[0])

    if shapes.rows == 1:
        return tuple(sorted({whole(length) for length in lengths}))
    first, second, third, middle, large = (lengths[i] for i in (0, 1, 2, -3, -2))
    ladder = {whole(-(-third // shapes.rows)), whole(large)}
    ladder |= {shapes.spread(total) for total in (second, third, large)}
    ladder.add(shapes.spread(2 * large, length=whole(middle).length))
    if len(ladder) < 6:
        ladder.add(shapes.spread(first))
    return tuple(sorted(ladder))


class Ladder:
    """The budgets of one encoder.

    A call is cut into batches of those there are; where more waits than the largest of them holds and they leave a
    twentieth empty, one that what waits fills is added, if it saves a fiftieth of the time. An item longer than all
    of them gets one of the next power of two, over whose rows it is spread. There are never more than eight, the
    last only for such an item, and those that a user gave are never added to.
    """

    def __init__(self, budgets: Sequence[Budget], prices: Prices, shapes: Shapes | None = None):
        """Starts with some budgets.

        Args:
            budgets: at first.
            prices: what batches cost.
            shapes: of those that may be added; none may be, where not given.
        """
        self.budgets = tuple(sorted(budgets))
        self.prices = prices
        self._shapes = shapes
        self._seconds: dict[Budget, float] = {}

    @property
    def largest(self) -> Budget:
        """The one with most tokens."""
        return max(self.budgets, key=lambda budget: budget.tokens)

    def seconds(self, budget: Budget) -> float:
        """What the shape of a budget costs."""
        if budget not in self._seconds:
            self._seconds[budget] = self.prices.shape(budget)
        return self._seconds[budget]

    def add(self, budget: Budget) -> None:
        """The one place where a budget is added."""
        if self._shapes is None or len(self.budgets) >= MOST:
            raise ValueError(f"{budget} cannot be added to {', '.join(map(str, self.budgets))}")
        self.budgets = tuple(sorted({*self.budgets, budget}))

    def fitted(self, sizes: Sequence[int], *, unit: int, layout: str) -> Iterator[Budget]:
        """Budgets that could be added: those that the longest of these pieces fill, a few at a time.

        Args:
            sizes: tokens of what waits, descending.
            unit: tokens that stay together where a piece is spread, at most.
            layout: "rows", "length" or "auto".
        """
        if self._shapes is None or len(self.budgets) >= MOST - 1:  # the last is for an item longer than all
            return
        together = [total for total in accumulate(sizes[:FITS]) if total <= self.largest.tokens]
        made = [self._shapes.whole(total) for total in together]
        if self._shapes.rows > 1:
            made += [self._shapes.spread(total + self._shapes.rows * unit) for total in together]
        for budget in dict.fromkeys(made):
            if budget.holds(layout) and budget.tokens <= self.largest.tokens and budget not in self.budgets:
                yield budget

    def longer(self, tokens: int, *, unit: int, layout: str) -> Budget | None:
        """The budget to add for a piece that is longer than all of them take, if one can be.

        Args:
            tokens: of the piece.
            unit: tokens of it that stay together where it is spread.
            layout: "rows", "length" or "auto".
        """
        if self._shapes is None or len(self.budgets) >= MOST:
            return None
        if self._shapes.rows == 1 or layout == "rows":
            return self._shapes.whole(_power_of_two(tokens))
        units = -(-tokens // (self._shapes.rows * unit))  # of the fullest row
        return self._shapes.spread(_power_of_two(self._shapes.rows * units * unit))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def ladder_of(config: EncoderConfig, plan: Plan, given: Sequence[Budget] | None = None) -> Ladder:
    """The budgets of an encoder on a plan: its own, or those that a user gave.

    Raises:
        ValueError: one that was given does not divide.
    """
    parts = plan.length_parts
    shapes = Shapes(plan.rows_parts, config.unit, config.window, lambda budget: config.token_axes(budget, parts), parts)
    if given is None:
        return Ladder(default_budgets(config.lengths(), shapes), prices_of(config, plan), shapes)
    for budget in given:
        shapes.check(budget)
    return Ladder(given, prices_of(config, plan))


def prices_of(config: EncoderConfig, plan: Plan) -> Prices:
    """What batches and items cost on a plan."""
    pair = 0.0 if config.window else config.transformer.pair_flops

    def without_pairs(workload: Workload) -> Workload:
        def linear(flops: Sequence[float]) -> tuple[float, ...]:
            return tuple(each - pair * n * n for each, n in zip(flops, workload.tokens, strict=True))

        groups = (replace(g, flops=linear(g.flops)) if g.name == "attention" else g for g in workload.groups)
        return replace(workload, groups=tuple(groups))

    def shape(budget: Budget) -> float:
        workload, batching = full_work(config, plan, budget)
        return BATCH_SECONDS + plan.predict(without_pairs(workload), batching).seconds

    one = without_pairs(config.workload((config.typical_tokens,)))
    layout = plan.layout
    shares = {
        group.name: 1 / layout.group_parts(group.name) if layout.divides_tokens(group) else layout.weight_share(group)
        for group in one.groups
    }
    token = sum(shares[group.name] * sum(group.flops) for group in one.groups) / sum(one.tokens)
    second = plan.profile.compute_seconds(1.0, dtype_of(plan.parameters))
    return Prices(shape, second * token, second * shares["attention"] * pair, plan.rows_parts)


def full_work(config: EncoderConfig, plan: Plan, budget: Budget) -> tuple[Workload, Batching]:
    """The work of a budget's program where a row is one item, and how it lies."""
    rows, parts = budget.rows, plan.rows_parts
    whole = config.workload((budget.length,)).tokens if budget.length else ()
    items = (budget.length,) * (rows if whole else 0) + ((rows * budget.spread,) if budget.spread else ())
    workload = config.workload(items)
    share = len(whole) * rows // parts  # of the pieces that lie in rows
    batching = Batching(
        tuple(tuple(range(part * share, (part + 1) * share)) for part in range(parts)),
        tuple(range(parts * share, len(workload.tokens))),
    )
    return workload, batching
