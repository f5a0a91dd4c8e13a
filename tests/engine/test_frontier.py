"""All cuts that are best at some price: tables that can be read, and random ones against trying everything."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cut import INTER, ROWS, H, K, Table, choices, cost, decoder_layer, tables

from recompute.engine.cut.best_cuts import costs_of, sweep
from recompute.engine.cut.minimum_cut import minimum_cut


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
