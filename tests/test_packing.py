"""Budgets divide over the plan; packing places every piece once, within the budget and within one window."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxenc import InputError
from jaxenc.packing import Budget, Slots, budgets, pack, unpack

SETTINGS = settings(max_examples=150, deadline=None)


def axes(length):
    """The token axes of a vision tower that merges four patches."""
    return {"length": length, "stem_length": length, "projector_length": length // 4}


def packed(pieces, ladder, *, window=None, longest_mixed=4096):
    names = [f"item {i}" for i in range(len(pieces))]
    return list(pack(pieces, ladder, window=window, names=names, longest_mixed=longest_mixed))


def shapes(batches):
    return [(budget.rows, budget.length) for budget, _ in batches]


def assert_sound(pieces, ladder, batches, *, window=None):
    placed = [place for _, places in batches for place in places]
    assert sorted((p.item, p.piece, p.size) for p in placed) == [
        (item, piece, size) for item, sizes in enumerate(pieces) for piece, size in enumerate(sizes)
    ]
    for budget, places in batches:
        assert budget in ladder
        assert places, "a batch of padding alone"
        taken = np.zeros((budget.rows, budget.length), int)
        for p in places:
            assert p.offset >= 0
            assert p.offset + p.size <= budget.length
            taken[p.row, p.offset : p.offset + p.size] += 1
            if window is not None:
                assert p.offset // window == (p.offset + p.size - 1) // window
        assert taken.max() == 1, "two pieces overlap"


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
    ladder = budgets((256, 512, 1024, 4096), axes, rows=2, parts=parts)
    assert [budget.length for budget in ladder] == expected
    assert {budget.rows for budget in ladder} == {2}


def test_lengths_stay_multiples_of_the_window():
    ladder = budgets((104, 208, 416), lambda n: {"length": n, "stem_length": n // 13}, rows=1, parts={"stem_length": 3})
    # 8 chunks a window: 24 chunks, three windows, are the fewest that divide over three devices
    assert [budget.length for budget in ladder] == [312, 624]


def test_a_budget_knows_its_tokens_and_sorts_by_length():
    assert Budget(256, 3).tokens == 768
    assert sorted([Budget(512, 1), Budget(256, 4)]) == [Budget(256, 4), Budget(512, 1)]


# --- written-out packings


def test_the_longest_goes_first_and_the_emptiest_row_takes_the_next():
    batches = packed([[2], [5], [3]], [Budget(8, 2)])
    assert shapes(batches) == [(2, 8)]
    assert [(p.item, p.row, p.offset, p.size) for p in batches[0][1]] == [(1, 0, 0, 5), (2, 1, 0, 3), (0, 1, 3, 2)]


def test_the_smallest_budget_that_holds_everything_is_taken():
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
    assert shapes(packed([[4]] * 4, ladder, longest_mixed=8)) == [(1, 8), (1, 8)]
    assert shapes(packed([[4]] * 4, ladder, longest_mixed=16)) == [(1, 16)]
    # one long item needs the row anyway, and others may fill it up
    assert shapes(packed([[9], [4]], ladder, longest_mixed=8)) == [(1, 16)]


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
    longest_mixed=st.sampled_from([1, 10, 4096]),
)
def test_every_piece_is_placed_once_within_the_budget(sizes, rows, longest_mixed):
    ladder = [Budget(length, rows) for length in (6, 12, 20)]
    assert_sound(sizes, ladder, packed(sizes, ladder, longest_mixed=longest_mixed))


@SETTINGS
@given(
    sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), max_size=12),
    rows=st.integers(1, 3),
    windows=st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True),
)
def test_with_windows_every_piece_is_placed_once_within_one_window(sizes, rows, windows):
    ladder = [Budget(5 * count, rows) for count in sorted(windows)]
    assert_sound(sizes, ladder, packed(sizes, ladder, window=5), window=5)


@SETTINGS
@given(st.lists(st.integers(1, 16), min_size=1, max_size=12), st.randoms())
def test_the_order_of_items_does_not_change_the_budgets(sizes, random):
    ladder = [Budget(16, 2), Budget(32, 2)]
    shuffled = random.sample(sizes, len(sizes))
    assert shapes(packed([[n] for n in sizes], ladder)) == shapes(packed([[n] for n in shuffled], ladder))


@SETTINGS
@given(
    parts=st.fixed_dictionaries({name: st.integers(1, 12) for name in ("length", "stem_length", "projector_length")})
)
def test_every_token_axis_of_every_budget_divides(parts):
    wanted = (256, 1024, 20480)
    ladder = budgets(wanted, axes, rows=3, parts=parts)
    for budget in ladder:
        assert budget.length % 256 == 0
        assert all(size % parts[axis] == 0 for axis, size in axes(budget.length).items())
    assert ladder[-1].length >= wanted[-1]
    assert len(ladder) <= len(wanted)


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
