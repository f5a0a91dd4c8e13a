"""Cuts within a limit of bytes, also those that no price gives: tables that can be read, and random ones."""

import warnings
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cut import INTER, ROWS, H, K, Table, choices, decoder_layer, tables

from recompute.engine.cut.best_cuts import best_cut, costs_of, cuts_by_nbytes, sweep
from recompute.engine.cut.minimum_cut import minimum_cut
from recompute.errors import PolicyWarning


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
