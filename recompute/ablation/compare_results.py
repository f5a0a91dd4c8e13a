"""Says what changed between two results of ablations: what was run, which rows there are, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from recompute.ablation import results_file
from recompute.ablation.row_places import AXES, place_of, varied
from recompute.ablation.trials import TIMED

_TIMES = tuple(f"{name}_seconds" for name in TIMED)
_COUNTS = (
    "activation_bytes_held",
    "logits_bytes_held",
    "peak_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "longest_sequence",
)
SAME, BEYOND, WITHIN, UNKNOWN = "the same", "beyond the spread", "within the spread", "spread not known"


def compare(one: Path, other: Path) -> str:
    """The text of a comparison of two ``results.json``, or of the folders that hold them.

    A time has changed beyond the spread where the ranges between its quartiles do not meet. Bytes and lengths have no
    spread: any change is one.

    Raises ``AblationError`` where there are no results.
    """
    before, after = results_file.load(one), results_file.load(other)
    blocks = [f"before: {one}\nafter: {other}"]
    for part in ("config", "machine", "text"):
        found = list(results_file.differences(before.get(part), after.get(part)))
        lines = [f"  {key}: {old!r} before, {new!r} after" for key, old, new in found if key != results_file.DATE]
        blocks.append(f"{part}: {'the same' if not lines else 'different'}\n" + "\n".join(lines))
    rows_before, rows_after = _rows(before), _rows(after)
    axes = varied([*rows_before.values(), *rows_after.values()])
    for name, mine, theirs in (("before", rows_before, rows_after), ("after", rows_after, rows_before)):
        alone = [f"  {_called(mine[key], axes)}" for key in mine if key not in theirs]
        if alone:
            blocks.append(f"rows {name} alone:\n" + "\n".join(alone))
    changes = [
        (_called(row, axes), *line)
        for key, row in rows_before.items()
        if key in rows_after
        for line in _changes(row, rows_after[key])
    ]
    columns = ("row", "number", "before", "after", "ratio", "change")
    align = ("left", "left", "right", "right", "right", "left")
    changed = tabulate(changes, columns, "simple", colalign=align if changes else None, disable_numparse=True)
    blocks.append(changed if changes else "no row is in both")
    return "\n\n".join(block.rstrip("\n") for block in blocks)


def _rows(results: Mapping[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows by what they are of. What rows of older results do not say is read from their configuration."""
    config = results["config"]
    of_llama = isinstance(config.get("model"), dict) and not config.get("models")
    known = {"model": "llama", **{key: config.get(key) for key in ("batch_size", "dtype")}} if of_llama else {}
    rows = [{**known, **{key: value for key, value in row.items() if value is not None}} for row in results["rows"]]
    return {(*(row.get(axis) for axis in AXES), row["policy"]): row for row in rows}


def _called(row: Mapping[str, Any], axes: frozenset[str]) -> str:
    return f"{row['policy']}{place_of(row, axes)}"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """The numbers that both rows have, and their errors where only one failed or they failed otherwise."""
    if before.get("error") != after.get("error"):
        yield "error", _short(before.get("error")), _short(after.get("error")), "", "different"
    for key in (*_TIMES, *_COUNTS):
        if (old := before.get(key)) is not None and (new := after.get(key)) is not None:
            ratio = f"{new / old:.3f}x" if old else "-"
            yield key.removesuffix("_seconds"), _shown(key, old), _shown(key, new), ratio, _judged(key, before, after)
    for key in ("losses_match", "grads_match"):
        if before.get(key) is not after.get(key):
            yield key, str(before.get(key)), str(after.get(key)), "", "different"


def _shown(key: str, value: float) -> str:
    return f"{value * 1e3:.2f} ms" if key in _TIMES else f"{value:,}"


def _judged(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    if before[key] == after[key]:
        return SAME
    if key in _COUNTS:
        return BEYOND
    one, other = (row.get(f"{key}_quartiles") for row in (before, after))
    if one is None or other is None:
        return UNKNOWN
    (low, high), (other_low, other_high) = one, other
    return WITHIN if low <= other_high and other_low <= high else BEYOND


def _short(error: str | None) -> str:
    return "none" if error is None else error.partition("\n")[0][:80]
