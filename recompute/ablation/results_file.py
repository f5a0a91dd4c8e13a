"""Reads and writes ``results.json``: what an ablation found, on what machine, by which configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from recompute.ablation.trials import AblationRow
from recompute.errors import AblationError
from recompute.files import user_path, write_file

Results = dict[str, Any]

NAME = "results.json"
DATE = "date"
ABSENT = "absent"
"""Stands for the value of a key that is not there."""


def package_version() -> str | None:
    """That of torch-recompute; None for a checkout that is not installed."""
    try:
        return metadata.version("torch-recompute")
    except metadata.PackageNotFoundError:
        return None


def save(results: Mapping[str, Any], folder: Path) -> None:
    """Replace the file as a whole, so that an interrupted run leaves a good one. Raises ``WriteError``."""
    write_file(folder / NAME, json.dumps(results, indent=2) + "\n")


def load(path: Path) -> Results:
    """The results in a file, or in ``results.json`` of a folder. Raises ``AblationError`` where there are none."""
    path = user_path(path)
    file = path / NAME if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise AblationError(f"{file}: expected the {NAME} of an ablation; {error.strerror}") from error
    except ValueError as error:
        raise AblationError(f"{file}: expected the {NAME} of an ablation; found no JSON ({error})") from error
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "policy" in row for row in rows):
        raise AblationError(f"{file}: expected the {NAME} of an ablation, with rows that each have a policy")
    return found


def rows_to_resume(found: Results, expected: Mapping[str, Any], file: Path) -> list[AblationRow]:
    """The rows of an earlier run of the same configuration, on the same machine, with the same versions.

    Raises ``AblationError`` that names what differs. The date does not count.
    """
    parts = ("config", "machine", "text")
    different = [
        f"{key}: {NAME} has {before!r}, this run {now!r}"
        for part in parts
        for key, before, now in differences(found.get(part), expected.get(part), part)
        if key != f"machine.{DATE}"
    ]
    if different:
        listed = "\n".join(f"  {line}" for line in different)
        raise AblationError(
            f"{file}: expected results of the same configuration, machine and versions to resume; found others:\n"
            f"{listed}\nRun with the configuration and on the machine of before, or write to another folder by --out"
        )
    return [row_from(row) for row in found["rows"]]


def differences(one: Any, other: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys whose values differ, with both of them."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys((*one, *other)):
            dotted = f"{key}.{name}" if key else str(name)
            yield from differences(one.get(name, ABSENT), other.get(name, ABSENT), dotted)
    elif one != other:
        yield key, one, other


_FIELDS = {each.name for each in fields(AblationRow)}


def row_from(values: Mapping[str, Any]) -> AblationRow:
    """The row that JSON holds. A field that was not known when it was written has its default."""
    given = {name: _frozen(value) for name, value in values.items() if name in _FIELDS}
    return AblationRow(**given)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
