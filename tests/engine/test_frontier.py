"""All cuts that are best at some price or within a limit of bytes: tables, and random ones against every choice."""

import warnings
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cut import INTER, ROWS, H, K, Table, choices, cost, decoder_layer, tables

from recompute.engine.cut.best_cuts import best_cut, costs_of, cuts_by_nbytes, sweep
from recompute.engine.cut.minimum_cut import minimum_cut
from recompute.errors import PolicyWarning


def costs_of_all(values, ops):
    """Of each point of the frontier (bytes, seconds)."""
    return [costs_of(values, ops, cut)[1:] for _, cut in sweep(values, ops)]


def test_of_two_tensors_the_one_that_takes_long_for_its_bytes_is_kept_first():
    table = Table()
    table.value("x", 100, saved=True)
    table.made("quick", "x", to="large", nbytes=1000, saved=True, flops=4e14)  # a second
    table.made("slow", "x", to="small", nbytes=400, saved=True, flops=8e14)  # two
    points = sweep(table.values, table.ops)
    assert [price for price, _ in points] == [2000.0, 450.0, 0.0]  # borders at 1000 and at 200
    assert costs_of_all(table.values, table.ops) == [(1500, 0), (500, 1), (100, 3)]


@pytest.mark.parametrize(("more", "count"), [(1, 2), (10**4, 3)])
def test_a_point_on_a_hair_of_prices_is_none(more, count):
    table = Table()
    table.value("x", 100, saved=True)
    for name, nbytes in (("one", 10**9), ("other", 10**9 + more)):
        table.made(name, "x", to=name, nbytes=nbytes, saved=True, flops=4e14)  # a second
    assert len(sweep(table.values, table.ops)) == count


def test_the_frontier_of_a_decoder_layer_goes_from_everything_to_its_input():
    table = decoder_layer(())
    assert [nbytes for nbytes, _ in costs_of_all(table.values, table.ops)] == [
        20 * H + 4 * K + 8 * INTER + ROWS,  # everything is kept
        20 * H + 4 * K + 6 * INTER + ROWS,
        *(12 * H + 4 * K + 4 * INTER + ROWS, 8 * H + 4 * K + 4 * INTER + ROWS),  # nothing costly runs again
        8 * H + 2 * K + ROWS,  # gate, up and v do, which take as long for a byte
        *(6 * H + 2 * K + ROWS, 4 * H + 2 * K + ROWS, 4 * H + ROWS),  # and all other GEMMs
        *(2 * H + 8, 2 * H),  # and attention
    ]


def exact(table):
    """The corners of the lower hull of bytes over seconds of all choices."""
    values, ops = table
    found = {
        (
            sum(values[index].nbytes or 0 for index in kept if not values[index].alive),
            sum(ops[index].seconds for index in rerun),
        )
        for rerun, kept in choices(values, ops)
    }
    least = {}
    for nbytes, seconds in found:
        least[seconds] = min(nbytes, least.get(seconds, nbytes))
    corners = []
    for seconds, nbytes in sorted(least.items()):
        if corners and nbytes >= corners[-1][0]:
            continue
        while len(corners) > 1 and slope(corners[-2], corners[-1]) <= slope(corners[-1], (nbytes, seconds)):
            corners.pop()
        corners.append((nbytes, seconds))
    return corners


def slope(left, right):
    return (left[0] - right[0]) / (right[1] - left[1])


@given(tables())
def test_the_corners_are_those_of_all_choices(table):
    values, ops = table
    if not any(choices(values, ops)) or any((value.nbytes or 0) > 2**50 for value in values):
        return  # the largest differ by less than a float can tell
    assert costs_of_all(values, ops) == exact(table)


@given(tables(), st.floats(1e-3, 1e6))
def test_every_price_has_one_of_the_points_for_its_best(table, price):
    values, ops = table
    if not any(choices(values, ops)):
        return
    points = sweep(values, ops)
    best = minimum_cut(values, ops, price)
    least = min(cost(values, ops, price, cut.rerun, cut.kept) for _, cut in points)
    assert least - cost(values, ops, price, best.rerun, best.kept) <= max(1e-4, float(least) * 1e-5)


@given(tables())
def test_a_point_comes_back_at_its_price_and_lower_prices_hold_less(table):
    values, ops = table
    if not any(choices(values, ops)):
        return
    points = sweep(values, ops)
    assert points[-1][0] == 0.0
    for price, cut in points:
        assert minimum_cut(values, ops, price) == cut
    for (price, cut), (lower, other) in pairwise(points):
        assert price > lower
        assert cut.rerun < other.rerun
        assert costs_of(values, ops, cut).nbytes > costs_of(values, ops, other).nbytes


def two_alike():
    """Two GEMMs of one input, which take equally long."""
    table = Table()
    table.value("x", 100, saved=True)
    for name in ("gate", "up"):
        table.made(name, "x", to=name, nbytes=600, saved=True, flops=4e14)  # a second
    return table


def test_of_two_that_cost_the_same_a_limit_keeps_one():
    table = two_alike()
    values, ops = table.values, table.ops
    assert [costs_of(values, ops, cut)[1:] for _, cut in sweep(values, ops)] == [(1300, 0.0), (100, 2.0)]
    assert [(each.nbytes, each.seconds) for each in cuts_by_nbytes(values, ops)] == [(1300, 0), (700, 1), (100, 2)]
    assert {most: costs_of(values, ops, best_cut(values, ops, 0.0, most)).nbytes for most in LIMITS} == LIMITS


def test_a_limit_that_cannot_be_met_is_told():
    table = two_alike()
    with pytest.warns(PolicyWarning, match="hold: expected at most 99 B .* rerun and keep allow is 100 B"):
        best_cut(table.values, table.ops, 0.0, 99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best_cut(table.values, table.ops, 0.0, 100)


LIMITS = {10**9: 1300, 1300: 1300, 1299: 700, 700: 700, 699: 100, 100: 100, 99: 100, 0: 100}
"""What is held within each: the most that fits; where nothing does, the least there is."""


def test_what_ran_for_the_sake_of_an_op_alone_does_not_run_without_it():
    table = Table()
    table.value("x", 10, saved=True)
    table.made("norm", "x", to="normed", nbytes=1000, flops=4e13)
    table.made("gemm", "normed", to="y", nbytes=600, saved=True, flops=4e14)
    table.made("other", "x", to="z", nbytes=500, saved=True, flops=4e14)
    found = cuts_by_nbytes(table.values, table.ops)
    ran = [{table.op_names[index] for index in each.cut.rerun} for each in found]
    assert ran == [set(), {"other"}, {"norm", "gemm"}, {"norm", "gemm", "other"}]


def test_without_a_limit_the_price_decides_and_with_one_it_does_not():
    table = two_alike()
    for price in (0.0, 1e6):
        assert best_cut(table.values, table.ops, price) == minimum_cut(table.values, table.ops, price)
        assert len(best_cut(table.values, table.ops, price, 700).rerun) == 1


def test_a_decoder_layer_may_hold_gate_or_up_alone():
    """By prices all three of gate, up and v run again or none does."""
    table = decoder_layer(())
    nothing_costly, without_three = 8 * H + 4 * K + 4 * INTER + ROWS, 8 * H + 2 * K + ROWS

    def between(held):
        return [nbytes for nbytes in held if without_three <= nbytes <= nothing_costly]

    prices = [costs_of(table.values, table.ops, cut).nbytes for _, cut in sweep(table.values, table.ops)]
    limits = [each.nbytes for each in cuts_by_nbytes(table.values, table.ops)]
    assert between(prices) == [nothing_costly, without_three]
    assert set(prices) <= set(limits)
    assert {nothing_costly - 2 * K, without_three + 2 * INTER} <= set(between(limits))
    assert max(more - less for more, less in pairwise(between(limits))) <= 2 * INTER


@given(tables())
def test_each_is_a_cut_and_what_holds_less_takes_longer(table):
    values, ops = table
    possible = {rerun: kept for rerun, kept in choices(values, ops)}
    if not possible:
        with pytest.raises(ValueError, match="neither kept nor regenerated"):
            cuts_by_nbytes(values, ops)
        return
    found = cuts_by_nbytes(values, ops)
    for each in found:
        alive = {index for index, value in enumerate(values) if value.alive and value.nbytes is not None}
        assert each.cut.kept - alive == possible[each.cut.rerun] - alive
        assert each == costs_of(values, ops, each.cut)
    for more, less in pairwise(found):
        assert more.nbytes > less.nbytes
        assert more.seconds < less.seconds


@given(tables(), st.integers(0, 30))
def test_a_limit_is_kept_where_it_can_be_and_no_price_does_better_within_it(table, most):
    values, ops = table
    possible = list(choices(values, ops))
    if not possible:
        return
    _, held, seconds = costs_of(values, ops, best_cut(values, ops, 0.0, most))
    least = min(sum(values[i].nbytes or 0 for i in kept if not values[i].alive) for _, kept in possible)
    assert held <= max(most, least)
    for _, cut in sweep(values, ops):
        _, other_held, other_seconds = costs_of(values, ops, cut)
        assert other_held > max(most, held) or seconds <= other_seconds
