"""The results of an ablation: rows, what tells them apart, the ``results.json`` that they are kept in, what changed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass
from tabulate import tabulate

from recompute.errors import AblationError
from recompute.files import user_path, write_file

NAME = "results.json"
TIMED = ("step", "forward", "backward", "optimizer", "forward_cpu", "regenerating")
Timings = dict[str, tuple[float, ...]]
"""The seconds of each timed step, by the names in ``TIMED``."""

RowDict = Mapping[str, Any]
"""A row as ``results.json`` holds it. Results from before a key was known lack it."""


@dataclass(frozen=True, config={"extra": "ignore"})  # results of another version may have other keys
class AblationRow:
    """The memory, time and results of training under one policy or peer. If it failed, ``error`` says how.

    What was not measured is None; so are the sizes of a model of the caller's own.

    Bytes are those of tensors. ``activation_bytes_held`` are alive between forward and backward; ``logits_bytes_held``
    of them were not when the decoder returned. ``peak_bytes`` is the most alive at once in forward and backward. None
    of these count what lives all through training: ``parameter_bytes``, ``gradient_bytes`` and ``optimizer_bytes``.

    Times are medians over the timed steps of all repeats; their ``_quartiles`` are the first and the third, and
    ``timings`` has each step of each repeat. On CUDA the parts of a step are by the device's clock, and
    ``forward_cpu_seconds`` is what launching forward takes the CPU. ``regenerating_seconds`` is the part of backward
    that runs again what the policy dropped, known of our policies in eager code. ``backward_added_seconds`` is
    backward's time minus the baseline's.

    The other fields compare with the baseline, and are None where it failed. ``loss_error`` is the largest relative
    error of a step's loss. The error of a gradient g is ‖g - r‖ / ‖r‖, with the baseline's gradient r, over all
    parameters: ``grad_error`` in the first step, where the weights are still equal, ``grad_error_last`` in the last.
    Of an ``exact`` policy, which promises the baseline's bits, ``grads_match`` says whether both steps have them. Any
    other rounds in its own way: then it says whether ``grad_error`` is at most ``grad_tolerance``. That is twice the
    error of the baseline's own gradient against that in a wider dtype, as the two may be off in opposite directions.
    Of a policy that compresses it is ``COMPRESSION_TOLERANCE``, if that is more. Without memory for the wider dtype
    neither is known.
    """

    policy: str
    sequence_length: int | None = None
    model: str | None = None
    batch_size: int | None = None
    dtype: str | None = None
    exact: bool | None = None
    activation_bytes_held: int | None = None
    logits_bytes_held: int | None = None
    peak_bytes: int | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    bytes_per_token_layer_hidden: float | None = None
    step_seconds: float | None = None
    step_seconds_quartiles: tuple[float, float] | None = None
    forward_seconds: float | None = None
    forward_seconds_quartiles: tuple[float, float] | None = None
    backward_seconds: float | None = None
    backward_seconds_quartiles: tuple[float, float] | None = None
    optimizer_seconds: float | None = None
    optimizer_seconds_quartiles: tuple[float, float] | None = None
    forward_cpu_seconds: float | None = None
    forward_cpu_seconds_quartiles: tuple[float, float] | None = None
    backward_added_seconds: float | None = None
    regenerating_seconds: float | None = None
    regenerating_seconds_quartiles: tuple[float, float] | None = None
    losses: tuple[float, ...] | None = None
    losses_match: bool | None = None
    loss_error: float | None = None
    grads_match: bool | None = None
    grad_error: float | None = None
    grad_error_last: float | None = None
    grad_tolerance: float | None = None
    longest_sequence: int | None = None
    """The longest of the tried lengths at which a whole step fits the budget; 0 if none does."""
    timings: tuple[Timings, ...] = ()
    error: str | None = None

    def timed(self, timings: Iterable[Timings]) -> AblationRow:
        """The same row with these timings, and the medians and quartiles over all of them."""
        repeats = tuple(timings)
        found: dict[str, Any] = {"timings": repeats}
        for name in TIMED:
            seconds = [each for repeat in repeats for each in repeat.get(name, ())]
            found[f"{name}_seconds"] = statistics.median(seconds) if seconds else None
            found[f"{name}_seconds_quartiles"] = tuple(np.percentile(seconds, (25, 75)).tolist()) if seconds else None
        return replace(self, **found)


AXES = ("model", "sequence_length", "batch_size", "dtype")
"""The keys of a row that comparisons differ in."""


def place(row: RowDict) -> tuple[Any, ...]:
    """The comparison that a row is of. Rows of results from before a key was known have None there."""
    return tuple(row.get(axis) for axis in AXES)


def varied(rows: Iterable[RowDict]) -> frozenset[str]:
    """The axes on which rows differ."""
    places = [place(row) for row in rows]
    return frozenset(axis for number, axis in enumerate(AXES) if len({each[number] for each in places}) > 1)


def place_of(row: RowDict, axes: Iterable[str]) -> str:
    """The text that follows a policy's name: the sequence length, and the row's values on these axes."""
    words, shown = {"sequence_length": "sequence ", "batch_size": "batch "}, {"sequence_length", *axes}
    found = [f", {words.get(axis, '')}{row[axis]}" for axis in AXES if axis in shown and row.get(axis) is not None]
    return "".join(found)


def grouped(rows: Sequence[RowDict], axes: Sequence[str]) -> list[tuple[str, list[RowDict]]]:
    """The rows that are equal on these axes, with what tells them from others."""
    shown = varied(rows) & {*axes}
    found: dict[str, list[RowDict]] = {}
    for row in rows:
        title = place_of({axis: row.get(axis) for axis in shown}, shown).removeprefix(", ")
        found.setdefault(title, []).append(row)
    return list(found.items())


def package_version() -> str | None:
    """The version of torch-recompute; None for a checkout that is not installed."""
    try:
        return metadata.version("torch-recompute")
    except metadata.PackageNotFoundError:
        return None


def save(results: Mapping[str, Any], folder: Path) -> None:
    """Replace the file as a whole, so that an interrupted run leaves a good one. Raises ``WriteError``."""
    write_file(folder / NAME, json.dumps(results, indent=2) + "\n")


def load(path: Path) -> dict[str, Any]:
    """The results in a file, or in ``results.json`` of a folder. Raises ``AblationError`` where there are none."""
    path = user_path(path)
    file = path / NAME if path.is_dir() else path
    expected = f"{file}: expected the {NAME} of an ablation"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise AblationError(f"{expected}; {error.strerror}") from error
    except ValueError as error:
        raise AblationError(f"{expected}; found invalid JSON ({error})") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "policy" in row for row in rows):
        raise AblationError(f"{expected}, with rows that each have a policy")
    return found


def resumed(expected: Mapping[str, Any], file: Path) -> tuple[dict[str, Any], list[AblationRow]]:
    """The results of an earlier run of the same configuration, on the same machine, with the same versions, to go on.

    Raises ``AblationError`` that names what differs. The date does not count.
    """
    found = load(file)
    changes = [change for part in _PARTS for change in _differences(found, expected, part)]
    if changes:
        listed = "\n".join(f"  {key}: {NAME} has {before!r}, this run {now!r}" for key, before, now in changes)
        raise AblationError(
            f"{file}: expected results of the same configuration, machine and versions; found others:\n"
            f"{listed}\nUse the same configuration and machine as before, or write to another folder with --out"
        )
    dates = [*found.get("resumed", ()), expected["machine"]["date"]]
    return found | {"resumed": dates}, [AblationRow(**row) for row in found["rows"]]


_PARTS = ("config", "machine", "text")
"""The keys of results that say what was run, and on what."""


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], part: str) -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys of a part whose values differ, with both: "absent" where there is none. The date is left out."""
    one, other = (_flat(each.get(part), part) for each in (before, after))
    for key in dict.fromkeys((*one, *other)):
        if one.get(key, "absent") != other.get(key, "absent") and key != "machine.date":
            yield key, one.get(key, "absent"), other.get(key, "absent")


def _flat(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    return {dotted: each for name in value for dotted, each in _flat(value[name], f"{key}.{name}").items()}


_TIMES = tuple(f"{name}_seconds" for name in TIMED)
_BYTES = ("activation_bytes_held", "logits_bytes_held", "peak_bytes", "parameter_bytes", "gradient_bytes")
_COUNTS = (*_BYTES, "optimizer_bytes", "longest_sequence")


def compare(one: Path, other: Path) -> str:
    """The text of a comparison of two ``results.json``, or of the folders that hold them.

    A time has changed beyond the spread where the ranges between its quartiles do not meet. Bytes and lengths have no
    spread: any change is one. Raises ``AblationError`` where there are no results.
    """
    before, after = load(one), load(other)
    blocks = [f"before: {one}\nafter: {other}"]
    for part in _PARTS:
        found = [(key.removeprefix(f"{part}."), *both) for key, *both in _differences(before, after, part)]
        lines = [f"  {key}: {old!r} before, {new!r} after" for key, old, new in found]
        blocks.append("\n".join([f"{part}: {'different' if lines else 'the same'}", *lines]))
    mine, theirs = _rows(before), _rows(after)
    axes = varied([*mine.values(), *theirs.values()])
    names = {key: f"{row['policy']}{place_of(row, axes)}" for key, row in (mine | theirs).items()}
    for when, rows, others in (("before", mine, theirs), ("after", theirs, mine)):
        if alone := [f"  {names[key]}" for key in rows if key not in others]:
            blocks.append("\n".join([f"rows {when} alone:", *alone]))
    found = [(names[key], *change) for key in mine if key in theirs for change in _changes(mine[key], theirs[key])]
    if changes := [each for each in found if each[-1] != _SAME]:
        columns = ("row", "number", "before", "after", "ratio", "change")
        align = ("left", "left", "right", "right", "right", "left")
        blocks.append(tabulate(changes, columns, colalign=align, disable_numparse=True))
    same = f"{len(found) - len(changes)} of {len(found)} numbers are the same" if found else "no row is in both"
    return "\n\n".join([*blocks, same])


def _rows(results: Mapping[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows by comparison and policy. If older rows lack a key, it is read from their configuration."""
    config = results["config"]
    of_llama = isinstance(config.get("model"), dict) and not config.get("models")
    known = {"model": "llama", **{key: config.get(key) for key in ("batch_size", "dtype")}} if of_llama else {}
    rows = [{**known, **{key: value for key, value in row.items() if value is not None}} for row in results["rows"]]
    return {(*place(row), row["policy"]): row for row in rows}


_SAME = "the same"


def _changes(before: RowDict, after: RowDict) -> Iterator[tuple[str, str, str, str, str]]:
    """The numbers that both rows have, and whatever else only one of them says, or they say otherwise."""
    for key in (*_TIMES, *_COUNTS):
        if key in before and key in after:
            one, other = before[key], after[key]
            old, new = (f"{each * 1e3:.2f} ms" if key in _TIMES else f"{each:,}" for each in (one, other))
            spreads = [row[f"{key}_quartiles"] for row in (before, after) if row.get(f"{key}_quartiles")]
            if one == other:
                judged = _SAME
            elif key in _TIMES and len(spreads) < 2:
                judged = "spread not known"
            else:
                is_within = spreads and max(low for low, _ in spreads) <= min(high for _, high in spreads)
                judged = "within the spread" if is_within else "beyond the spread"
            yield key.removesuffix("_seconds"), old, new, f"{other / one:.3f}x" if one else "-", judged
    for key, absent in {"error": "none", "losses_match": None, "grads_match": None}.items():
        if before.get(key) != after.get(key):
            old, new = (str(row.get(key, absent)).partition("\n")[0][:80] for row in (before, after))
            yield key, old, new, "", "different"
