"""Bytes as people write them: read, and written."""

from __future__ import annotations

import re

from recompute.errors import BudgetError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NBYTES = {
    **{unit.lower(): 1024**exponent for exponent, unit in enumerate(_UNITS)},
    **{unit: 1000**exponent for exponent, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)},
}
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.I)
_EXPECTED = "expected a size such as '40GiB', '512MiB' or '40GB', a share of the device such as '80%', or"


def humanize(nbytes: int) -> str:
    """`nbytes` in the largest binary unit that it fills.

    >>> humanize(3 << 20)
    '3.0 MiB'
    """
    exponent = min((max(abs(nbytes), 1).bit_length() - 1) // 10, 4)
    return f"{nbytes / 1024**exponent:.{(0, 1, 1, 2, 2)[exponent]}f} {_UNITS[exponent]}"


def parse_budget(budget: str | float, capacity_nbytes: int | None = None) -> int:
    """Bytes that a budget names: ``"40GiB"``, ``"512 MiB"``, ``"40GB"`` (10⁹), ``"80%"`` of the capacity, or a number.

    Fractions of a byte are left out. Raises ``BudgetError`` for what is no positive number of bytes, and for a share
    of more than all, or of a device whose capacity is not known.

    >>> parse_budget("40GiB"), parse_budget("80%", capacity_nbytes=1000)
    (42949672960, 800)
    """
    nbytes = parse_size(budget, capacity_nbytes)
    if nbytes == 0:
        raise BudgetError(f"a budget of {budget!r}: expected at least 1 byte; found 0")
    return nbytes


def parse_size(size: str | float, capacity_nbytes: int | None = None) -> int:
    """Bytes that a size names, spelled as ``parse_budget`` has them; 0 is a size too."""
    found = f"a budget of {size!r}"
    if (isinstance(size, int) and not isinstance(size, bool)) or (isinstance(size, float) and size.is_integer()):
        nbytes = int(size)
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None or match[2].lower() not in (*_NBYTES, "%"):
            in_bytes = "bytes with their unit, as '9000B'" if isinstance(size, str) else "a whole number of bytes"
            raise BudgetError(f"{found} cannot be read: {_EXPECTED} {in_bytes}")
        if match[2] == "%":
            nbytes = _share(float(match[1]), capacity_nbytes, found)
        else:
            nbytes = int(float(match[1]) * _NBYTES[match[2].lower()])
    if nbytes < 0:
        raise BudgetError(f"{found}: expected at least 1 byte; found {nbytes:,}")
    return nbytes


def _share(percent: float, capacity_nbytes: int | None, found: str) -> int:
    if percent > 100:
        raise BudgetError(f"{found}: expected at most 100%, all of the device")
    if capacity_nbytes is None:
        raise BudgetError(f"{found}: the capacity of the device is not known; expected a size such as '40GiB'")
    return int(capacity_nbytes * percent / 100)
