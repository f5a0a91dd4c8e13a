"""Checks the name of a model before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from recompute.errors import ModelError, PolicyError
from recompute.files import user_path
from recompute.policy.document import parse_json, read_text

EXPECTED = (
    "expected an ablation's .yaml file, the config.json of a Hugging Face model or the folder with it, the name of "
    "such a model, or package.module:factory"
)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def names_factory(source: str) -> bool:
    """Whether ``source`` reads as ``package.module:factory``."""
    return _FACTORY.fullmatch(source) is not None


def check_source(source: str) -> None:
    """Raise ``ModelError`` where ``source`` is a path at which there is no configuration of a model.

    Anything else may be a name that Hugging Face knows, which only transformers can tell.
    """
    if not source.strip():
        raise ModelError(f"{EXPECTED}; found an empty name")
    path = user_path(source)
    if _DOTTED.fullmatch(source) and not path.exists() and (meant := _factory_meant(source)):
        raise ModelError(f"{source}: {EXPECTED}; did you mean {meant!r}?")
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"{source}: {EXPECTED}; found a folder without a config.json")
    if not path.exists():
        looks_like_a_path = source.endswith((".json", ".yaml", ".yml", "/")) or source.startswith((".", "~", "/"))
        if looks_like_a_path or source.count("/") > 1 or (os.sep not in "/" and os.sep in source):
            raise ModelError(f"{source}: there is no such file or folder; {EXPECTED}")
        return
    if path.suffix not in (".yaml", ".yml"):
        _check_json(path)


def _factory_meant(source: str) -> str:
    """``package.module:factory`` where ``source`` has a dot in the place of the colon, and there is such a module."""
    *parts, name = source.split(".")
    where = Path(*parts)
    own = where.with_suffix(".py").is_file() or (where / "__init__.py").is_file()
    return f"{'.'.join(parts)}:{name}" if own or importlib.util.find_spec(parts[0]) is not None else ""


def _check_json(path: Path) -> None:
    try:
        found = parse_json(read_text(path, "configuration"), str(path), "configuration")
    except PolicyError as error:
        raise ModelError(f"{error}; {EXPECTED}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object with a model_type; found a {type(found).__name__}")
    if not isinstance(found.get("model_type"), str):
        raise ModelError(
            f"{path}: expected a model_type, which names the architecture ('llama', 'qwen3', …); "
            + (f"found keys {', '.join(list(found)[:5])}{', …' if len(found) > 5 else ''}" if found else "found {}")
        )
