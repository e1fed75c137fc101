"""Budgets know their sizes, and vectors find their way back to their items."""

import numpy as np

from jaxenc.packing import Budget, Slots, unpack


def test_a_budget_knows_its_tokens_and_sorts_by_length():
    assert Budget(256, 3).tokens == 768
    assert Budget(256, 3, 16).tokens == 816
    assert sorted([Budget(512, 1), Budget(256, 4)]) == [Budget(256, 4), Budget(512, 1)]


def test_a_budget_knows_the_longest_piece_that_it_takes():
    assert Budget(256, 3).limit == 256
    assert Budget(256, 3, 100).limit == 300


def test_a_window_is_spread_over_all_rows():
    # 104 tokens on 5 rows: 21 on each
    assert Budget(104, 5, 42).folds(104) == (2, 21)
    assert Budget(104, 5, 42).folds(None) == (1, 42)
    assert Budget(104, 5).folds(None) == (0, 0)


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
