"""Budgets divide over the plan; packing places every piece once, within the budget and within one window."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxenc import InputError
from jaxenc.packing import Budget, Slots, budgets, pack, unpack

SETTINGS = settings(max_examples=150, deadline=None)


def axes(budget):
    """The token axes of a vision tower that merges four patches."""
    return {"length": budget.row, "stem_length": budget.row, "projector_length": budget.row // 4}


def packed(pieces, ladder, *, window=None, units=None, layout="auto", seconds=lambda budget: budget.tokens):
    names = [f"item {i}" for i in range(len(pieces))]
    ladder = {budget: seconds(budget) for budget in ladder}
    return list(pack(pieces, ladder, window=window, units=units or [1] * len(pieces), names=names, layout=layout))


def shapes(batches):
    return [(budget.rows, budget.length) for budget, _ in batches]


def assert_sound(pieces, ladder, batches, *, window=None, units=None):
    """Every token of every piece once, none over another, whole ones in one row and spread ones in all, evenly."""
    seen = {(item, piece): [] for item, sizes in enumerate(pieces) for piece, _ in enumerate(sizes)}
    for budget, places in batches:
        assert budget in ladder
        assert places, "a batch of padding alone"
        taken = np.zeros((budget.rows, budget.row), int)
        spread = {}
        for p in places:
            seen[p.item, p.piece] += range(p.start, p.start + p.size)
            assert p.offset >= 0
            assert p.offset + p.size <= (budget.length if p.offset < budget.length else budget.row)
            taken[p.row, p.offset : p.offset + p.size] += 1
            if p.offset < budget.length:
                assert p.size == pieces[p.item][p.piece]
                if window is not None:
                    assert p.offset // window == (p.offset + p.size - 1) // window
            else:
                fold = (p.offset - budget.length) // budget.folds(window)[1]
                spread.setdefault((p.item, p.piece), set()).add(fold)
                unit = units[p.item] if units else 1
                assert p.start % unit == p.size % unit == 0
        assert taken.max() == 1, "two pieces overlap"
        assert all(len(folds) == 1 for folds in spread.values()), "keys of one fold do not meet those of another"
        used = taken[:, budget.length :].sum(axis=1)
        assert used.max() - used.min() <= max(units or [1]) * (1 if window is None else len(places))
    for (item, piece), tokens in seen.items():
        assert sorted(tokens) == list(range(pieces[item][piece]))


# --- the ladder


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
    ladder = budgets((256, 512, 1024, 4096), axes, rows=1, parts=parts, window=None, unit=4)
    assert [budget.length for budget in ladder] == expected
    assert {(budget.rows, budget.spread) for budget in ladder} == {(1, 0)}


def test_lengths_stay_multiples_of_the_window():
    def chunks(budget):
        return {"length": budget.row, "stem_length": budget.row // 13}

    ladder = budgets((104, 208, 416), chunks, rows=1, parts={"stem_length": 3}, window=104, unit=104)
    # 8 chunks a window: 24 chunks, three windows, are the fewest that divide over three devices
    assert [budget.length for budget in ladder] == [312, 624]


def test_on_several_rows_items_may_be_whole_or_spread_or_both():
    ladder = budgets((256, 512, 1024, 4096, 8192), axes, rows=4, parts={}, window=None, unit=4)
    assert ladder == (
        Budget(0, 4, 64), Budget(0, 4, 256), Budget(0, 4, 2048), Budget(256, 4), Budget(1024, 4), Budget(1024, 4, 2048),
        Budget(8192, 4),
    )  # fmt: skip
    # 4 units of 4 tokens on 3 rows: two on each row at most, and 36 tokens are the fewest that 9 divides
    odd = budgets((16, 36), axes, rows=3, parts={"length": 9, "projector_length": 9}, window=None, unit=4)
    assert {budget.spread for budget in odd} == {0, 36}


def test_a_window_is_spread_over_all_rows():
    def tokens(budget):
        return {"length": budget.row}

    ladder = budgets((104, 208), tokens, rows=5, parts={}, window=104, unit=104)
    # 104 tokens on 5 rows: 21 on each
    assert {budget.spread for budget in ladder} == {0, 21, 42}
    assert Budget(104, 5, 42).folds(104) == (2, 21)
    assert Budget(104, 5, 42).folds(None) == (1, 42)
    assert Budget(104, 5).folds(None) == (0, 0)


def test_a_budget_knows_its_tokens_and_sorts_by_length():
    assert Budget(256, 3).tokens == 768
    assert Budget(256, 3, 16).tokens == 816
    assert sorted([Budget(512, 1), Budget(256, 4)]) == [Budget(256, 4), Budget(512, 1)]


# --- written-out packings


def test_the_longest_goes_first_and_the_emptiest_row_takes_the_next():
    batches = packed([[2], [5], [3]], [Budget(8, 2)])
    assert shapes(batches) == [(2, 8)]
    assert [(p.item, p.row, p.offset, p.size) for p in batches[0][1]] == [(1, 0, 0, 5), (2, 1, 0, 3), (0, 1, 3, 2)]


def test_the_fastest_budget_that_holds_everything_is_taken():
    ladder = [Budget(4, 2), Budget(8, 2), Budget(16, 2)]
    assert shapes(packed([[4], [4]], ladder)) == [(2, 4)]
    assert shapes(packed([[4], [4], [1]], ladder)) == [(2, 8)]
    assert shapes(packed([[9]], ladder)) == [(2, 16)]


def test_a_call_larger_than_the_largest_budget_becomes_several_batches():
    batches = packed([[8], [8], [8], [3]], [Budget(4, 2), Budget(8, 2)])
    # two of eight; then eight and three, which share no row of eight
    assert shapes(batches) == [(2, 8), (2, 8)]
    assert [[p.item for p in places] for _, places in batches] == [[0, 1], [2, 3]]


def test_the_pieces_of_one_item_may_come_in_several_batches():
    batches = packed([[4, 4, 2]], [Budget(4, 1)], window=4)
    assert [[(p.item, p.piece) for p in places] for _, places in batches] == [[(0, 0)], [(0, 1)], [(0, 2)]]


def test_rows_are_not_made_longer_only_to_hold_more_items():
    ladder = [Budget(4, 1), Budget(8, 1), Budget(16, 1)]

    def quadratic(budget):
        return budget.length**2

    # all four fit in one row of 16, and four of 4 take a quarter of the time: but that is four batches
    assert shapes(packed([[4]] * 4, ladder, seconds=quadratic)) == [(1, 16)]
    # where no budget holds everything, the one that does most a second
    assert shapes(packed([[4]] * 5, ladder, seconds=quadratic)) == [(1, 4), (1, 16)]


def test_what_is_too_long_for_a_row_is_spread_and_the_rest_stays_whole():
    (_, places), = packed([[3], [20], [4]], [Budget(4, 2, 12)])  # fmt: skip
    assert [(p.item, p.row, p.offset, p.size, p.start) for p in places] == [
        (1, 0, 4, 10, 0), (1, 1, 4, 10, 10), (2, 0, 0, 4, 0), (0, 1, 0, 3, 0),
    ]  # fmt: skip


def test_remainders_go_round():
    (_, places), = packed([[6], [6]], [Budget(0, 4, 4)], units=[2, 2])  # fmt: skip
    # three units each on four rows: rows 0, 1, 2, then 3, 0, 1
    assert sorted((p.row, p.item, p.start) for p in places) == [
        (0, 0, 0), (0, 1, 0), (1, 0, 2), (1, 1, 2), (2, 0, 4), (3, 1, 4),
    ]  # fmt: skip


def test_the_layout_can_be_forced():
    ladder = [Budget(8, 2), Budget(0, 2, 8), Budget(8, 2, 8)]
    assert [b for b, _ in packed([[4]], ladder, layout="rows")] == [Budget(8, 2)]
    assert [b for b, _ in packed([[4]], ladder, layout="length")] == [Budget(0, 2, 8)]
    with pytest.raises(ValueError, match="layout is 'row'; it can be 'auto', 'rows', 'length'"):
        packed([[4]], ladder, layout="row")
    with pytest.raises(ValueError, match="layout='length': none of the budgets is for it"):
        packed([[4]], [Budget(8, 2)], layout="length")
    # on one row there is nothing to spread over
    assert [b for b, _ in packed([[4]], [Budget(8, 1)], layout="length")] == [Budget(8, 1)]


def test_small_pieces_share_a_window_and_none_straddles_two():
    # windows of 4: [4] alone, 3 + 1, 2
    batches = packed([[4, 2], [3], [1]], [Budget(12, 1)], window=4)
    places = sorted((p.offset, p.size, p.item, p.piece) for p in batches[0][1])
    assert places == [(0, 4, 0, 0), (4, 3, 1, 0), (7, 1, 2, 0), (8, 2, 0, 1)]


@pytest.mark.parametrize("window", [None, 4])
def test_an_empty_call_makes_no_batch(window):
    assert packed([], [Budget(8, 2)], window=window) == []


def test_a_piece_longer_than_the_longest_row_is_an_error_that_names_the_item_and_the_limit():
    with pytest.raises(InputError, match=r"^item 1: 9 tokens attend together, and the longest row holds 8; .*budgets="):
        packed([[3], [2, 9]], [Budget(4, 2), Budget(8, 2)])


# --- whatever comes


@SETTINGS
@given(
    sizes=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), max_size=12),
    rows=st.integers(1, 4),
    spread=st.sampled_from([0, 5, 20]),
)
def test_every_token_is_placed_once_within_the_budget(sizes, rows, spread):
    ladder = [Budget(length, rows) for length in (6, 12, 20)] + [Budget(6, rows, spread), Budget(0, rows, spread)]
    assert_sound(sizes, ladder, packed(sizes, [budget for budget in ladder if budget.tokens]))


@SETTINGS
@given(units=st.lists(st.tuples(st.sampled_from([4, 8, 16]), st.integers(1, 6)), max_size=12), rows=st.integers(2, 5))
def test_units_stay_together_where_an_item_is_spread(units, rows):
    ladder = [Budget(0, rows, 96)]
    sizes = [[unit * count] for unit, count in units]
    unit = [unit for unit, _ in units]
    assert_sound(sizes, ladder, packed(sizes, ladder, units=unit), units=unit)


@SETTINGS
@given(
    sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), max_size=12),
    rows=st.integers(1, 3),
    windows=st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True),
    folds=st.integers(0, 3),
)
def test_with_windows_every_token_is_placed_once_within_one_window(sizes, rows, windows, folds):
    ladder = [Budget(5 * count, rows, folds * -(-5 // rows)) for count in sorted(windows)]
    assert_sound(sizes, ladder, packed(sizes, ladder, window=5), window=5)


@SETTINGS
@given(st.lists(st.integers(1, 16), min_size=1, max_size=12), st.randoms())
def test_the_order_of_items_does_not_change_the_budgets(sizes, random):
    ladder = [Budget(16, 2), Budget(32, 2), Budget(0, 2, 40)]
    shuffled = random.sample(sizes, len(sizes))
    assert shapes(packed([[n] for n in sizes], ladder)) == shapes(packed([[n] for n in shuffled], ladder))


@SETTINGS
@given(
    parts=st.fixed_dictionaries({name: st.integers(1, 12) for name in ("length", "stem_length", "projector_length")}),
    rows=st.integers(1, 9),
)
def test_every_token_axis_of_every_budget_divides(parts, rows):
    wanted = (256, 512, 1024, 2048, 4096, 8192, 16384, 20480)
    ladder = budgets(wanted, axes, rows=rows, parts=parts, window=None, unit=4)
    for budget in ladder:
        assert budget.length % 4 == budget.spread % 4 == 0
        assert all(size % parts[axis] == 0 for axis, size in axes(budget).items())
    assert max(max(budget.length, rows * budget.spread) for budget in ladder) >= wanted[-1]
    assert len(ladder) <= 8


# --- and out again


def test_unpack_puts_vectors_where_their_item_wants_them():
    slots = Slots.empty(2, 4)
    slots.fill(0, 1, 1, np.array([1, 0]))
    slots.fill(1, 0, 0, np.array([0]))
    out = np.arange(16.0).reshape(2, 4, 2)
    results = {}
    unpack(out, slots, results, [1, 2])
    assert results.keys() == {0, 1}
    np.testing.assert_array_equal(results[0], [[8, 9]])
    np.testing.assert_array_equal(results[1], [[4, 5], [2, 3]])


def test_unpack_joins_an_item_that_came_in_two_batches():
    first, second = Slots.empty(1, 2), Slots.empty(1, 2)
    first.fill(0, 0, 0, np.array([0, 1]))
    second.fill(0, 0, 0, np.array([2]))
    results = {}
    unpack(np.array([[[1.0], [2.0]]]), first, results, [3])
    unpack(np.array([[[3.0], [9.0]]]), second, results, [3])
    np.testing.assert_array_equal(results[0], [[1], [2], [3]])
