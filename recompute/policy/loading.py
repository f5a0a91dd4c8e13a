"""Loads a policy from a preset's name, a path, a mapping or a policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from recompute.errors import PolicyError
from recompute.files import user_path
from recompute.policy.document import load_document, nearest, show, validate
from recompute.policy.rules import Policy


def load_policy(source: str | os.PathLike[str] | Mapping[str, object] | Policy) -> Policy:
    """The policy that ``source`` names or is. A preset goes before a file of the same name.

    Raises ``PolicyError``: with file, line and key for what is wrong in a file, and with the presets' names
    where ``source`` is neither a preset nor an existing file.

    >>> recompute.load_policy("full").rules[0].action
    'checkpoint'
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _load_named(source)
    if isinstance(source, Mapping):
        return validate(Policy, dict(source), label="policy")
    found = "None" if source is None else show(source)  # no YAML was read here
    raise PolicyError(f"expected a policy: a preset's name, a path, a mapping or a Policy; found {found}")


def _load_named(source: str | os.PathLike[str]) -> Policy:
    presets, name = _presets(), os.fspath(source)
    if name in presets:
        return load_document(Policy, presets[name], kind="policy")
    if user_path(source).exists():
        return load_document(Policy, source, kind="policy")
    raise PolicyError(
        f"no preset and no file is named {show(name)}{nearest(Path(source).stem, presets)}; "
        f"the presets are {', '.join(presets)}"
    )


def preset_names() -> tuple[str, ...]:
    """The names of the policies that come with this package, sorted."""
    return tuple(_presets())


def is_preset(policy: Policy) -> bool:
    """Whether ``policy`` says what the preset of its name does."""
    presets = _presets()
    return policy.name in presets and policy == load_policy(policy.name)


def preset_path(name: str) -> Path:
    """The file of the preset ``name``, to read or to copy. Raises ``PolicyError`` if there is none."""
    presets = _presets()
    if name in presets:
        return presets[name]
    raise PolicyError(f"no preset is named {show(name)}{nearest(name, presets)}; the presets are {', '.join(presets)}")


def _presets() -> dict[str, Path]:
    folder = resources.files("recompute.policies")
    paths = [Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}
