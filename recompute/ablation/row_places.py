"""Tells the rows of an ablation apart: by what was trained, at which sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

_WORDS: Mapping[str, Callable[[Any], str]] = {
    "model": str,
    "sequence_length": lambda length: f"sequence {length}",
    "batch_size": lambda size: f"batch {size}",
    "dtype": str,
}
AXES = tuple(_WORDS)
"""The keys of a row in which comparisons differ."""


def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The comparison that a row is of. Rows of results from before a key was known have None there."""
    return tuple(row.get(axis) for axis in AXES)


def varied(rows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The axes on which rows differ."""
    places = [place(row) for row in rows]
    return frozenset(axis for axis, values in zip(AXES, zip(*places, strict=True), strict=False) if len({*values}) > 1)


def place_of(row: Mapping[str, Any], axes: Iterable[str]) -> str:
    """What follows a policy's name: the sequence length, and the row's values on these axes."""
    shown = {"sequence_length", *axes}
    words = [word(row[axis]) for axis, word in _WORDS.items() if axis in shown and row.get(axis) is not None]
    return "".join(f", {word}" for word in words)
