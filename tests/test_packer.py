"""Packing places every piece once, within the budget and within one window, and gives each device its share."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxenc
from benchmarks import mixes
from benchmarks.baselines import greedy
from jaxenc import InputError
from jaxenc.ladder import Ladder, Prices, ladder_of
from jaxenc.packer import FAIR, Packer, pack
from jaxenc.packing import Budget

SETTINGS = settings(max_examples=150, deadline=None)


def priced(budgets, *, pair=0.0, seconds=lambda budget: budget.tokens):
    """A ladder of these alone, a device a row; every token of a budget takes a second."""
    rows = min(budget.rows for budget in budgets)
    return Ladder(budgets, Prices(seconds, 1.0, pair, rows))


def packed(pieces, budgets, *, window=None, units=None, layout="auto", together=False, **prices):
    names = [f"item {i}" for i in range(len(pieces))]
    rest = {"window": window, "units": units or [1] * len(pieces), "names": names, "layout": layout}
    return list(pack(pieces, priced(budgets, **prices), together=together, **rest))


def shapes(batches):
    return [(budget.rows, budget.length) for budget, _ in batches]


def assert_sound(pieces, ladder, batches, *, window=None, units=None):
    """Every token of every piece once, none over another, whole ones in one row and spread ones in all, evenly."""
    seen = {(item, piece): [] for item, sizes in enumerate(pieces) for piece, _ in enumerate(sizes)}
    for budget, places in batches:
        assert budget in ladder
        assert places, "a batch of padding alone"
        taken = np.zeros((budget.rows, budget.row), int)
        spread, used = {}, np.zeros(budget.rows, int)
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
                assert p.start % unit == 0
                assert p.size % unit == 0 or p.start + p.size == pieces[p.item][p.piece], "only the last may be short"
                used[p.row] += -(-p.size // unit) * unit
        assert taken.max() == 1, "two pieces overlap"
        assert all(len(folds) == 1 for folds in spread.values()), "keys of one fold do not meet those of another"
        assert used.max() - used.min() <= max(units or [1]) * (1 if window is None else len(places))
    for (item, piece), tokens in seen.items():
        assert sorted(tokens) == list(range(pieces[item][piece]))


# --- written-out packings


def test_the_longest_goes_first_and_the_emptiest_row_takes_the_next():
    batches = packed([[2], [5], [3]], [Budget(8, 2)])
    assert shapes(batches) == [(2, 8)]
    assert [(p.item, p.row, p.offset, p.size) for p in batches[0][1]] == [(1, 0, 0, 5), (2, 1, 0, 3), (0, 1, 3, 2)]


def test_the_budget_with_which_all_is_done_soonest_is_taken():
    ladder = [Budget(4, 2), Budget(8, 2), Budget(16, 2)]
    assert shapes(packed([[4], [4]], ladder)) == [(2, 4)]
    assert shapes(packed([[4], [4], [3], [3]], ladder)) == [(2, 8)]
    assert shapes(packed([[9]], ladder)) == [(2, 16)]
    # rather two batches than one that is half empty
    assert shapes(packed([[4], [4], [4]], [Budget(4, 1), Budget(32, 1)])) == [(1, 4)] * 3


def test_a_call_larger_than_the_largest_budget_becomes_several_batches():
    batches = packed([[8], [8], [8], [3]], [Budget(4, 2), Budget(8, 2)])
    # two of eight; then eight and three, which share no row of eight
    assert shapes(batches) == [(2, 8), (2, 8)]
    assert [[p.item for p in places] for _, places in batches] == [[0, 1], [2, 3]]


def test_the_pieces_of_one_item_may_come_in_several_batches():
    batches = packed([[4, 4, 2]], [Budget(4, 1)], window=4)
    assert [[(p.item, p.piece) for p in places] for _, places in batches] == [[(0, 0)], [(0, 1)], [(0, 2)]]


def test_one_batch_can_be_asked_for():
    ladder = [Budget(4, 1), Budget(32, 1)]
    assert shapes(packed([[4]] * 3, ladder, together=True)) == [(1, 32)]
    assert len(packed([[4]] * 9, ladder, together=True)) > 1


def test_what_an_item_costs_counts_its_pairs():
    # by tokens the rows would be 8 + 1 and 5 + 4; of 8 tokens' 64 pairs, all others have 42
    (_, places), = packed([[8], [5], [4], [1]], [Budget(16, 2)], pair=1.0)  # fmt: skip
    assert [[p.item for p in places if p.row == row] for row in (0, 1)] == [[0], [1, 2, 3]]


def test_an_empty_part_of_a_window_is_no_work_beyond_the_budgets_shape():
    # 30 seconds of speech; every batch has a second of its own
    ladder = [Budget(104, 1), Budget(416, 1)]
    batches = packed([[104, 104, 104, 78]], ladder, window=104, seconds=lambda budget: 1 + budget.tokens)
    assert shapes(batches) == [(1, 416)]


def test_a_device_with_several_rows_is_one_device():
    ladder = Ladder([Budget(8, 4)], Prices(lambda budget: 1.0, 1.0, 0.0, 2))
    places = [p for _, places in pack([[8], [4], [4], [4], [4]], ladder, window=None, units=[1] * 5, names="abcde")
              for p in places]  # fmt: skip
    assert [sum(p.size for p in places if p.row in rows) for rows in ((0, 1), (2, 3))] == [12, 12]


def test_the_oldest_waits_for_nobody():
    # the rows fill with the longest; the short one that came first is among them all the same
    first, *_ = packed([[1], [4], [4], [4]], [Budget(4, 1)])
    assert [p.item for p in first[1]] == [0]


def test_a_stream_and_a_call_are_one_path():
    packer = Packer(priced([Budget(8, 1)]), window=None)
    assert not packer
    assert packer.enough == 16
    for item, size in enumerate((5, 3, 6, 2)):
        packer.add(item, [size], unit=1, name="")
    assert (len(packer), packer.waiting) == (4, 16)
    assert packer.waiting >= packer.enough
    _, places = packer.batch()
    assert sorted(p.item for p in places) == [0, 1]
    assert (len(packer), packer.waiting) == (2, 8)
    packer.batch()
    assert not packer


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
@given(
    units=st.lists(
        st.tuples(st.sampled_from([4, 8, 16]), st.integers(1, 6), st.sampled_from([0, 0, 1, 3])), max_size=12
    ),
    rows=st.integers(2, 5),
)
def test_units_stay_together_where_an_item_is_spread(units, rows):
    ladder = [Budget(0, rows, 96)]
    sizes = [[unit * count - short] for unit, count, short in units]
    unit = [unit for unit, _, _ in units]
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
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    rows=st.integers(1, 3),
    window=st.sampled_from([None, 20]),
)
def test_the_oldest_is_always_in_the_batch(sizes, rows, window):
    ladder = [Budget(20, rows), Budget(20, rows, 20), Budget(0, rows, 40)]
    waiting = set(range(len(sizes)))
    for _, places in packed([[n] for n in sizes], ladder, window=window, pair=0.1):
        assert min(waiting) in {p.item for p in places}
        waiting -= {p.item for p in places}


@SETTINGS
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    rows=st.integers(2, 8),
    pair=st.sampled_from([0.0, 1e-4, 1e-3]),
)
def test_balance_is_never_worse_than_by_the_engines_rule(sizes, rows, pair):
    ladder = [Budget(120_000, rows, 120_000), Budget(120_000, rows), Budget(0, rows, 120_000)]
    batches = packed([[n] for n in sizes], ladder, pair=pair)
    ours = unfairness(busiest([[n] for n in sizes], batches, priced(ladder, pair=pair).prices))
    assert ours <= max(FAIR, engines(sizes, priced(ladder, pair=pair).prices)) + 1e-9


# --- what people encode


def busiest(pieces, batches, prices):
    """What each device has to do, exactly: its tokens, each with all tokens of its piece."""
    work = np.zeros(prices.parts)
    for budget, places in batches:
        for p in places:
            part = p.row * prices.parts // budget.rows
            work[part] += p.size * (prices.token + prices.pair * pieces[p.item][p.piece])
    return work


def unfairness(work):
    return work.max() / work.mean()


def engines(sizes, prices):
    order, counts, _ = greedy(sizes, prices.parts)
    devices = np.split(np.array(order), np.cumsum(counts)[:-1])
    return unfairness(np.array([sum(prices.item(sizes[i]) for i in device) for device in devices]))


def on(rows, config):
    """The ladder of an encoder with its batch over so many H100s."""
    plan = jaxenc.plan(config, mesh_shape={"data": rows, "model": 1}, dtype="bfloat16", strategy="data")
    return ladder_of(config, plan)


def streamed(items, ladder, config):
    """The batches of a stream, each cut as soon as enough waits."""
    packer = Packer(ladder, window=config.window)
    for i, item in enumerate(items):
        packer.add(i, item.pieces, unit=item.unit, name="")
        while packer.waiting >= packer.enough:
            yield packer.batch()
    while packer:
        yield packer.batch()


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ([1000, 100, 200, 50], 2, ([0, 2, 1, 3], [1, 3], [1000, 350])),
        ([100, 200], 4, ([1, 0], [1, 1, 0, 0], [200, 100, 0, 0])),
        ([100] * 4, 2, ([0, 2, 1, 3], [2, 2], [200, 200])),
        ([100, 200, 300], 1, ([2, 1, 0], [3], [600])),
    ],
)
def test_the_engines_rule_is_what_it_is(sizes, devices, expected):
    assert greedy(sizes, devices) == expected


BALANCE = {
    **{f"{n} photos": (mixes.mix("photos", n), 1.05 if n >= 64 else 1.15) for n in (8, 16, 64)},
    **{f"{n} documents": (mixes.mix("documents", n), 1.15) for n in (8, 16)},
    **{f"a giant among {n}": (mixes.giant_among(n), 1.05 if n >= 63 else 1.15) for n in (7, 63)},
}


@pytest.mark.parametrize("name", BALANCE)
def test_each_of_eight_devices_has_its_share(name):
    items, most = BALANCE[name]
    ladder, pieces = on(8, mixes.KIMI), [item.pieces for item in items]
    units, names = [item.unit for item in items], [""] * len(items)
    batches = list(pack(pieces, ladder, window=None, units=units, names=names))
    assert_sound(pieces, ladder.budgets, batches, units=units)
    ours = unfairness(busiest(pieces, batches, ladder.prices))
    assert ours <= most
    assert ours <= max(FAIR, engines([item.tokens for item in items], ladder.prices))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", mixes.KINDS)
def test_batches_of_a_stream_are_full(kind, rows):
    config = mixes.SPEECH if kind in ("speech", "long speech") else mixes.KIMI
    items = mixes.mix(kind, 300 if kind == "long speech" else 2000)
    ladder = on(rows, config)
    start = time.process_time()
    batches = list(streamed(items, ladder, config))
    seconds = time.process_time() - start
    tokens = sum(item.tokens for item in items)
    assert sum(p.size for _, places in batches for p in places) == tokens
    assert sum(budget.tokens for budget, _ in batches) <= 1.10 * tokens
    assert len(ladder.budgets) <= 8
    # about one second, or a twentieth of a millisecond a window; several times that on a busy machine
    assert seconds < 10
