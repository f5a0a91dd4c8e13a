"""What is kept and what is run again: tables that can be read, and random ones against trying everything."""

import re
import warnings
from fractions import Fraction
from itertools import compress, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute.engine.cut.best_cuts import best_cut, costs_of, cuts_by_nbytes, sweep
from recompute.engine.cut.minimum_cut import Op, Value, minimum_cut
from recompute.errors import PolicyWarning

MEMORY, MATH = 2e12, 4e14  # bytes and FLOPs a second
PRICE = 1e9  # bytes a second: regenerating 4 bytes a token may take 4 ns


class Table:
    """A frame's values and ops, by name. An op takes as long as moving its bytes, or as its `flops` where given."""

    def __init__(self, forbidden=()):
        self.forbidden = forbidden
        self.names = []
        self.values = []
        self.ops = []
        self.op_names = []

    def value(self, name, nbytes, *, saved=False, alive=False):
        self.names.append(name)
        self.values.append(Value(nbytes, demanded=saved, alive=alive))
        return name

    def op(self, op, inputs, *outputs, flops=0.0):
        sources, targets = tuple(map(self.names.index, inputs)), tuple(map(self.names.index, outputs))
        moved = sum(self.values[index].nbytes or 0 for index in (*sources, *targets))
        self.op_names.append(op)
        self.ops.append(Op(sources, targets, flops / MATH or moved / MEMORY, op not in self.forbidden))

    def made(self, op, *inputs, to, nbytes, saved=False, flops=0.0):
        """Add an op and its only output."""
        self.value(to, nbytes, saved=saved)
        self.op(op, inputs, to, flops=flops)
        return to

    def cut(self, price=0.0):
        """The names of the values kept and of the ops run again."""
        kept, rerun = minimum_cut(self.values, self.ops, price)
        return {self.names[index] for index in kept}, {self.op_names[index] for index in rerun}

    def held_nbytes(self, price=0.0):
        kept = [self.values[index] for index in minimum_cut(self.values, self.ops, price).kept]
        return sum(value.nbytes or 0 for value in kept if not value.alive)


def rms_norm(table, x, name, hidden):
    """Llama's, of one token in bfloat16; autograd saves 8 bytes an element and the 4 of rstd."""

    def made(op, *inputs, to, nbytes, saved=False):
        return table.made(f"{name}.{op}", *inputs, to=f"{name}.{to}", nbytes=nbytes, saved=saved)

    weight = table.value(f"{name}.weight", 2 * hidden, saved=True, alive=True)
    wide = made("to float", x, to="wide", nbytes=4 * hidden, saved=True)
    square = made("pow", wide, to="square", nbytes=4 * hidden)
    variance = made("add", made("mean", square, to="mean", nbytes=4), to="variance", nbytes=4)
    rstd = made("rsqrt", variance, to="rstd", nbytes=4, saved=True)
    scaled = made("mul", wide, rstd, to="scaled", nbytes=4 * hidden)
    normed = made("to bfloat16", scaled, to="normed", nbytes=2 * hidden, saved=True)
    return made("weigh", weight, normed, to="out", nbytes=2 * hidden, saved=True)


def swiglu(table, gate, up, intermediate):
    silu = table.made("silu", gate, to="silu", nbytes=2 * intermediate, saved=True)
    return table.made("mul", silu, up, to="product", nbytes=2 * intermediate, saved=True)


H, K, INTER, HEADS, LENGTH = 4096, 1024, 14336, 32, 8192  # Llama 8B: hidden, keys, intermediate, heads, sequence


def decoder_layer(forbidden):
    """What one token costs in a Llama layer in bfloat16."""
    table = Table(forbidden)

    def made(op, *inputs, to, size, saved=False):
        return table.made(op, *inputs, to=to, nbytes=2 * size, saved=saved)

    def linear(x, to, rows, columns, *, saved=False):
        weight = table.value(f"{to}.weight", 2 * rows * columns, saved=True, alive=True)
        return table.made(f"mm {to}", x, weight, to=to, nbytes=2 * columns, saved=saved, flops=2 * rows * columns)

    def rotary(x, size):
        negative = made(f"neg {x}", x, to=f"{x}.negative", size=size // 2)
        half = made(f"cat {x}", x, negative, to=f"{x}.half", size=size)
        parts = [
            made(f"mul {x}", x, "cos", to=f"{x}.cos", size=size),
            made(f"mul {x}", half, "sin", to=f"{x}.sin", size=size),
        ]
        return made(f"add {x}", *parts, to=f"{x}.rotated", size=size, saved=True)

    x = table.value("x", 2 * H)
    for name in ("cos", "sin"):
        table.value(name, 2 * H // HEADS, saved=True, alive=True)
    y = rms_norm(table, x, "input_norm", H)
    q, k, v = linear(y, "q", H, H), linear(y, "k", H, K), linear(y, "v", H, K, saved=True)
    q, k = rotary(q, H), rotary(k, K)
    table.value("attention", 2 * H, saved=True)
    table.value("logsumexp", 4 * HEADS, saved=True)
    table.op("attention", (q, k, v), "attention", "logsumexp", flops=2 * LENGTH * H)
    h = made("add h", x, linear("attention", "o", H, H), to="h", size=H)
    y = rms_norm(table, h, "post_norm", H)
    gate, up = linear(y, "gate", H, INTER, saved=True), linear(y, "up", H, INTER, saved=True)
    made("add out", h, linear(swiglu(table, gate, up, INTER), "down", INTER, H), to="out", size=H)
    return table


GEMMS = {f"mm {name}" for name in ("q", "k", "v", "o", "gate", "up", "down")}
ATTENTION = {"attention"}
EVERYTHING = set(decoder_layer(()).op_names)
ROWS = 4 * HEADS + 2 * 4  # bytes of what is one number a row: the logsumexp, and an rstd of each norm


@pytest.mark.parametrize(
    ("forbidden", "price", "nbytes"),
    [
        pytest.param(EVERYTHING, 0, 20 * H + 4 * K + 8 * INTER + ROWS, id="keep"),  # 200,840
        pytest.param(GEMMS | ATTENTION, PRICE, 8 * H + 4 * K + 4 * INTER + ROWS, id="recompute"),  # 94,344
        pytest.param(GEMMS | ATTENTION, 0, 8 * H + 4 * K + 4 * INTER + 4 * HEADS, id="recompute, to the last byte"),
        pytest.param(
            GEMMS - {"mm gate", "mm up"} | ATTENTION, PRICE, 8 * H + 4 * K + ROWS, id="rerun two GEMMs of the MLP"
        ),  # 37,000
        pytest.param({"mm o", "mm down"} | ATTENTION, PRICE, 6 * H + ROWS, id="rerun q, k and v too"),  # 24,712
        pytest.param(ATTENTION, PRICE, 4 * H + ROWS, id="rerun all GEMMs"),
        pytest.param(ATTENTION, 0, 4 * H + 4 * HEADS, id="checkpoint but for attention"),
        pytest.param((), 0, 2 * H, id="checkpoint"),  # 8,192
    ],
)
def test_bytes_a_decoder_layer_holds(forbidden, price, nbytes):
    assert decoder_layer(forbidden).held_nbytes(price) == nbytes


def test_at_a_high_price_all_that_is_saved_is_kept():
    table = decoder_layer(())
    saved = {name for name, value in zip(table.names, table.values, strict=True) if value.demanded}
    assert table.cut(1e30) == table.cut(1.7e308) == (saved, set())


def test_one_byte_of_many_decides():
    for nbytes, kept in ((2**60 - 1, "x"), (2**60 + 1, "y")):
        table = Table()
        table.value("x", nbytes)
        table.made("neg", "x", to="y", nbytes=2**60, saved=True)
        assert table.cut()[0] == {kept}


NBYTES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, None, 2**60, 2**60 + 1])  # the last two are one float
EXACT_PRICES = st.sampled_from([0.0, 2.0**-18, 0.25, 0.5, 1.0, 2.0, 3.0, 1000.0, 2.0**62, 2.0**80])


@st.composite
def tables(draw):
    """Up to five ops of up to two outputs, with the values that they are given and those that they make."""
    often = st.sampled_from([True, True, True, False])
    values = st.builds(Value, NBYTES, st.booleans(), often.map(lambda often: not often))
    table = draw(st.lists(values, min_size=1, max_size=3))
    ops = []
    for _ in range(draw(st.integers(1, 5))):
        inputs = draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=3))
        made = draw(st.lists(values, min_size=1, max_size=2))
        outputs = range(len(table), len(table) + len(made))
        seconds = draw(st.integers(0, 8)) / 4
        ops.append(Op(tuple(inputs), tuple(outputs), seconds, draw(often)))
        table += made
    return table, ops


def choices(values, ops):
    """Every set of ops that could run again, with the values that would have to be kept."""
    for bits in product((False, True), repeat=len(ops)):
        rerun = list(compress(ops, bits))
        needed = {index for index, value in enumerate(values) if value.demanded}.union(*(op.inputs for op in rerun))
        kept = needed.difference(*(op.outputs for op in rerun))
        if all(op.may_rerun for op in rerun) and all(values[index].nbytes is not None for index in kept):
            yield frozenset(compress(range(len(ops)), bits)), kept


def cost(values, ops, price, rerun, kept):
    nbytes = sum(values[index].nbytes or 0 for index in kept if not values[index].alive)
    return nbytes + Fraction(price) * sum(Fraction(ops[index].seconds) for index in rerun)


@given(tables(), EXACT_PRICES)
def test_no_choice_is_cheaper_nor_as_cheap_with_other_ops(table, price):
    values, ops = table
    costs = {rerun: (cost(values, ops, price, rerun, kept), kept) for rerun, kept in choices(values, ops)}
    if not costs:
        with pytest.raises(ValueError, match="neither kept nor regenerated"):
            minimum_cut(values, ops, price)
        return
    cut = minimum_cut(values, ops, price)
    found, must_keep = costs[cut.rerun]
    least = min(least for least, _ in costs.values())
    assert found == least
    assert all(cut.rerun <= rerun for rerun, (as_cheap, _) in costs.items() if as_cheap == least)
    needed = {index for index, value in enumerate(values) if value.demanded}
    needed |= {index for op in cut.rerun for index in ops[op].inputs}
    assert cut.kept == must_keep | {at for at in needed if values[at].alive and values[at].nbytes is not None}


@given(tables(), st.floats(0, 1e12))
def test_any_price_is_right_to_a_millionth_of_a_byte_an_op(table, price):
    values, ops = table
    costs = {rerun: cost(values, ops, price, rerun, kept) for rerun, kept in choices(values, ops)}
    if costs:
        assert costs[minimum_cut(values, ops, price).rerun] - min(costs.values()) <= Fraction(len(ops), 10**6)


@given(tables())
def test_the_error_names_just_the_values_that_cannot_be_had(table):
    values, ops = table
    alone = [[value._replace(demanded=at == one) for at, value in enumerate(values)] for one in range(len(values))]
    lost = [one for one, table in enumerate(alone) if values[one].demanded and not any(choices(table, ops))]
    if lost:
        with pytest.raises(ValueError, match=rf"^values {re.escape(str(lost))} are demanded"):
            minimum_cut(values, ops, 1.0)
    else:
        minimum_cut(values, ops, 1.0)


# All cuts that are best at some price or within a limit of bytes: tables, and random ones against every choice


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
