"""Budgets divide over the plan, there are never more than eight, and what is added fits what waits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxenc
from jaxenc import InputError
from jaxenc.ladder import MOST, Ladder, Prices, Shapes, default_budgets, ladder_of, prices_of
from jaxenc.models import kimi_k25
from jaxenc.packer import Packer, pack
from jaxenc.packing import Budget

LENGTHS = (256, 1024, 4096, 8192, 16_384, 65_536)


def axes(budget):
    """The token axes of a vision tower that merges four patches."""
    return {"length": budget.row, "stem_length": budget.row, "projector_length": budget.row // 4}


def shapes(rows=1, parts=(), unit=4, window=None, token_axes=axes):
    return Shapes(rows, unit, window, token_axes, dict(parts))


def ladder(budgets=None, *, rows=1, **kwargs):
    prices = Prices(lambda budget: budget.tokens / rows, 1.0, 0.0, rows)
    return Ladder(budgets or [Budget(256, rows)], prices, shapes(rows, **kwargs))


def encode(sizes, ladder, *, together=False):
    names = [f"item {i}" for i in range(len(sizes))]
    calls = pack([[n] for n in sizes], ladder, window=None, units=[4] * len(sizes), names=names, together=together)
    return [budget for budget, _ in calls]


# --- what there is


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, [256, 512, 1024, 4096]),
        ({"length": 8, "stem_length": 8, "projector_length": 8}, [256, 512, 1024, 4096]),
        # 256 has no factor 3: 768 is its first multiple that has
        ({"length": 3, "stem_length": 3, "projector_length": 3}, [768, 1536, 4608]),
        ({"projector_length": 5}, [1280, 5120]),
        # 3 on one axis and 5 on another
        ({"stem_length": 3, "projector_length": 5}, [3840, 7680]),
        # 256 / 4 divides over 64 devices, not over 128
        ({"projector_length": 64}, [256, 512, 1024, 4096]),
        ({"projector_length": 128}, [512, 1024, 4096]),
    ],
    ids=str,
)
def test_lengths_are_raised_until_every_token_axis_divides(parts, expected):
    budgets = default_budgets((256, 512, 1024, 4096), shapes(parts=parts))
    assert [budget.length for budget in budgets] == expected
    assert {(budget.rows, budget.spread) for budget in budgets} == {(1, 0)}


def test_lengths_stay_multiples_of_the_window():
    def chunks(budget):
        return {"length": budget.row, "stem_length": budget.row // 13}

    windowed = shapes(parts={"stem_length": 3}, unit=104, window=104, token_axes=chunks)
    # 8 chunks a window: 24 chunks, three windows, are the fewest that divide over three devices
    assert [budget.length for budget in default_budgets((104, 208, 416), windowed)] == [312, 624]


def test_on_several_rows_items_may_be_whole_or_spread_or_both():
    assert default_budgets(LENGTHS, shapes(4)) == (
        Budget(0, 4, 256), Budget(0, 4, 1024), Budget(0, 4, 4096), Budget(1024, 4), Budget(8192, 4, 8192),
        Budget(16_384, 4),
    )  # fmt: skip


def test_a_windows_share_is_what_a_spread_part_is_a_multiple_of():
    windowed = shapes(5, unit=104, window=104, token_axes=lambda budget: {"length": budget.row})
    budgets = default_budgets((104, 416, 1664, 6656), windowed)
    # 104 tokens on 5 rows: 21 on each
    assert {budget.spread % 21 for budget in budgets} == {0}
    assert Budget(0, 5, 21) in budgets


@settings(max_examples=150, deadline=None)
@given(
    parts=st.fixed_dictionaries({name: st.integers(1, 12) for name in ("length", "stem_length", "projector_length")}),
    rows=st.integers(1, 9),
    tokens=st.integers(1, 100_000),
)
def test_every_token_axis_of_every_budget_divides(parts, rows, tokens):
    made = shapes(rows, parts)
    budgets = default_budgets(LENGTHS, made)
    for budget in (*budgets, made.whole(tokens), made.spread(tokens)):
        made.check(budget)
        assert all(size % parts[axis] == 0 for axis, size in axes(budget).items())
    assert max(budget.limit for budget in budgets) >= LENGTHS[-2]
    assert len(budgets) <= 6
    assert made.whole(tokens).length >= tokens
    assert rows * made.spread(tokens).spread >= tokens


def test_what_does_not_divide_is_an_error_that_says_what_would():
    with pytest.raises(ValueError, match=r"rows must be a multiple of 2, the length of 4"):
        shapes(2).check(Budget(256, 3))
    with pytest.raises(ValueError, match=r"and of what divides stem_length 256 over 3"):
        shapes(parts={"stem_length": 3}).check(Budget(256, 1))


@pytest.mark.parametrize("name", [info.name for info in jaxenc.encoders()])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_encoder_has_at_most_six_budgets_to_begin_with(name, rows):
    plan = jaxenc.plan(name, mesh_shape={"data": rows, "model": 1})
    assert 1 < len(ladder_of(jaxenc.models.named_config(name), plan).budgets) <= 6


# --- what is added


def test_a_long_call_gets_a_budget_that_it_fills():
    one = ladder([Budget(256, 1), Budget(1024, 1)])
    assert set(encode([600] * 20, one)) == {Budget(640, 1)}
    assert one.budgets == (Budget(256, 1), Budget(640, 1), Budget(1024, 1))


def test_a_long_call_that_fills_what_there_is_adds_nothing():
    one = ladder([Budget(256, 1), Budget(1024, 1)])
    encode([512, 256, 240, 1000] * 20, one)
    assert one.budgets == (Budget(256, 1), Budget(1024, 1))


def test_a_small_call_adds_nothing():
    one = ladder([Budget(256, 1), Budget(1024, 1)])
    assert encode([600], one) == [Budget(1024, 1)]
    assert one.budgets == (Budget(256, 1), Budget(1024, 1))


def test_an_item_longer_than_all_gets_a_budget_of_its_own():
    one = ladder()
    assert encode([1100], one) == [Budget(2048, 1)]
    many = ladder([Budget(256, 4), Budget(0, 4, 64)], rows=4)
    assert encode([1100], many) == [Budget(0, 4, 512)]
    rows = Packer(ladder([Budget(256, 4)], rows=4), window=None, layout="rows")
    rows.add(0, [1100], unit=4, name="item")
    assert rows.batch()[0] == Budget(2048, 4)


def test_an_item_that_fits_nowhere_is_an_error_once_there_are_eight():
    one = ladder([Budget(128 * 2**i, 1) for i in range(MOST)])
    with pytest.raises(InputError, match=r"item 0: 16400 tokens attend together, and the longest row holds 16384; "):
        encode([16_400], one)
    assert len(one.budgets) == MOST


def test_the_last_place_is_kept_for_an_item_longer_than_all():
    one = ladder([Budget(128 * 2**i, 1) for i in range(MOST - 1)])
    assert set(encode([4200] * 20, one)) == {Budget(8192, 1)}
    assert encode([16_000], one) == [Budget(16_384, 1)]
    assert len(one.budgets) == MOST


def test_budgets_that_were_given_are_never_added_to():
    one = Ladder([Budget(1024, 1)], Prices(lambda budget: budget.tokens, 1.0, 0.0, 1))
    assert set(encode([600] * 20, one)) == {Budget(1024, 1)}
    with pytest.raises(InputError, match="the longest row holds 1024"):
        encode([1100], one)
    with pytest.raises(ValueError, match="cannot be added"):
        one.add(Budget(2048, 1))


@settings(max_examples=50, deadline=None)
@given(
    calls=st.lists(st.lists(st.integers(1, 40_000), min_size=1, max_size=30), max_size=5), rows=st.sampled_from([1, 3])
)
def test_there_are_never_more_than_eight(calls, rows):
    one = ladder([shapes(rows).whole(256), shapes(rows).whole(1024)], rows=rows)
    for sizes in calls:
        try:
            used = encode(sizes, one)
        except InputError:
            assert len(one.budgets) == MOST
        else:
            assert set(used) <= set(one.budgets)
    assert len(one.budgets) <= MOST


# --- what it costs


def test_prices_are_the_plans():
    config = jaxenc.models.named_config("kimi_k25")
    one, eight = (
        prices_of(config, jaxenc.plan("kimi_k25", mesh_shape={"data": 1, "model": n}, strategy="tensor"))
        for n in (1, 8)
    )
    # four FLOPs for each pair of tokens, of 16 heads of 72 in 27 layers; weights divided by eight divide pairs too
    assert one.pair / one.token == pytest.approx(27 * 4 * 1152 / (27 * (8 * 1152**2 + 4 * 1152 * 4304) + 28.5e6), 0.01)
    assert one.pair / eight.pair == pytest.approx(8)
    assert one.token / eight.token == pytest.approx(8, rel=0.01)
    assert one.item(16_384) == pytest.approx(16_384 * one.token + 16_384**2 * one.pair)
    # a shape costs its tokens; pairs come on top, by what is in it
    assert one.shape(Budget(16_384, 1)) == pytest.approx(16_384 * one.token + 1e-3, rel=0.05)


def test_where_windows_are_computed_whole_a_pair_costs_nothing_more():
    plan = jaxenc.plan("qwen3_omni_audio", mesh_shape={"data": 8, "model": 1})
    prices = prices_of(jaxenc.models.named_config("qwen3_omni_audio"), plan)
    assert prices.pair == 0
    assert prices.parts == plan.rows_parts == 8


def test_eight_windows_over_eight_devices_leave_nothing_empty():
    plan = jaxenc.plan("qwen3_omni_audio", mesh_shape={"data": 8, "model": 1})
    config = jaxenc.models.named_config("qwen3_omni_audio")
    for layout in ("rows", "length", "auto"):
        packer = Packer(ladder_of(config, plan), window=config.window, layout=layout)
        for item in range(8):
            packer.add(item, [config.window], unit=1, name="")
        assert packer.batch()[0].tokens == 8 * config.window


# --- in an encoder


def test_an_encoder_says_which_budgets_it_has_by_now():
    config = kimi_k25.Config(layers=1, embed=32, heads=2, mlp=64, patch=2, out=16)
    encoder = jaxenc.from_config(config, seed=0)
    before = encoder.budgets
    trained = encoder.with_params(encoder.params)
    grid = (4, 128, 130)
    encoder.pack([jaxenc.VisionItem(np.zeros((math.prod(grid), 12), np.float32), grid)])
    assert set(encoder.budgets) == {*before, Budget(131_072, 1)}
    assert encoder.costs.keys() == set(encoder.budgets)
    # programs are shared, and so are the budgets they are for
    assert trained.budgets == encoder.budgets
