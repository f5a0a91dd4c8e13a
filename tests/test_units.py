"""Budgets are read as people write them, what is no budget is told, and bytes are shown."""

import pytest

from recompute.errors import BudgetError, RecomputeError
from recompute.units import humanize, parse_budget


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("40GiB", 40 << 30), ("512MiB", 512 << 20), ("1.5 gib", 3 << 29), (" 7 KiB ", 7 << 10), ("2TiB", 2 << 40),
        ("40GB", 40 * 10**9), ("40MB", 40 * 10**6), ("9B", 9), ("80%", 800), ("100 %", 1000), ("0.5%", 5),
        (12345, 12345), (1e9, 10**9),
    ],
)  # fmt: skip
def test_a_budget_is_read(budget, nbytes):
    assert parse_budget(budget, 1000) == nbytes


@pytest.mark.parametrize(
    ("budget", "capacity", "message"),
    [
        ("fourty", 1000, "a budget of 'fourty' cannot be read: expected a size such as '40GiB', '512MiB' or '40GB', a"),
        ("40", 1000, "a share of the device such as '80%', or bytes with their unit, as '9000B'"),
        ("40G", 1000, "cannot be read"),
        ("", 1000, "cannot be read"),
        ("1e3MiB", 1000, "cannot be read"),
        ("nan%", 1000, "cannot be read"),
        (True, 1000, "cannot be read"),
        (4.5, 1000, "a share of the device such as '80%', or a whole number of bytes"),
        (None, 1000, "cannot be read"),
        ("-1GiB", 1000, "a budget of '-1GiB': expected at least 1 byte; found -1,073,741,824"),
        (-5, 1000, "expected at least 1 byte; found -5"),
        (0, 1000, "expected at least 1 byte; found 0"),
        ("0%", 1000, "expected at least 1 byte; found 0"),
        ("101%", 1000, "a budget of '101%': expected at most 100%, all of the device"),
        ("80%", None, "the capacity of the device is not known; expected a size such as '40GiB'"),
    ],
)
def test_what_is_no_budget_is_told(budget, capacity, message):
    with pytest.raises(BudgetError) as caught:
        parse_budget(budget, capacity)
    assert message in str(caught.value)
    assert isinstance(caught.value, RecomputeError)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), ((1 << 30) - 1, "1024.0 MiB"),
        (3 << 29, "1.50 GiB"), (2**52, "4096.00 TiB"), (-58_653_184, "-55.9 MiB"), (-1, "-1 B"),
    ],
)  # fmt: skip
def test_bytes_are_shown_in_the_largest_unit_that_they_fill(nbytes, text):
    assert humanize(nbytes) == text
