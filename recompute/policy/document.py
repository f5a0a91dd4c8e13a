"""Reads one YAML document into a pydantic model; every mistake becomes an error that says where it is."""

from __future__ import annotations

import difflib
import functools
import io
import json
import os
import re
import reprlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import RoundTripRepresenter

from recompute.errors import PolicyError
from recompute.files import user_path

Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]

_IN_FILE = "in_file"
"""The key in a validator's context that says whether the value was read from a file."""

_EXPECTED = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "invalid_key": "a string as key",
}


class _Constructor(SafeConstructor):
    """YAML's safe constructor, except that what looks like a date stays the text that was written."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Representer(RoundTripRepresenter):
    """ruamel.yaml's, except that every control character is escaped: it writes \\x85 bare, a line break."""

    def represent_str(self, data: str) -> ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Representer.add_representer(str, _Representer.represent_str)


def load_document(model_class: type[Model], source: str | os.PathLike[str], *, kind: str = "document") -> Model:
    """Read the YAML file at path ``source`` (UTF-8, one document) as a ``model_class``.

    ``kind`` is what error texts call such a file. Raises ``PolicyError`` with one line for each mistake:
    ``file:line:column: dotted.key[0]: what was expected; what was found``.
    """
    label, text = os.fspath(source), read_text(source, kind)
    if label.endswith(".json") and text.strip():
        parse_json(text, label, kind)  # YAML's parser reads JSON, too, but its messages do not help an author of JSON
    return parse_document(model_class, text, label=label, kind=kind)


def read_text(source: str | os.PathLike[str], kind: str) -> str:
    """The text of a file in UTF-8. Raises ``PolicyError``, which calls it a ``kind`` file."""
    label = os.fspath(source)
    try:
        content = user_path(source).read_bytes()
    except OSError as error:
        raise PolicyError(f"{label}: cannot be read as a {kind} file: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{content[error.start]:02x}"
        raise PolicyError(f"{label}:{line}: expected UTF-8 text; found {found}") from error


def parse_json(text: str, label: str, kind: str) -> Any:
    """The value of JSON ``text``. Raises ``PolicyError`` with its ``label``, and the line and column of a mistake."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        is_cut_off = not text[error.pos :].strip()
        found = f"the file ends in the middle of the {kind}" if is_cut_off else error.msg[:1].lower() + error.msg[1:]
        raise PolicyError(f"{label}:{error.lineno}:{error.colno}: not valid JSON: {found}") from error


def parse_document(model_class: type[Model], text: str, *, label: str = "<text>", kind: str = "document") -> Model:
    """Read YAML ``text`` as a ``model_class``; error texts name it by ``label``. Raises ``PolicyError``."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        root = _only_document(list(yaml.compose_all(text)), label, kind)
        data = yaml.constructor.construct_document(root)
    except MarkedYAMLError as error:
        raise PolicyError(_syntax_error(error, label)) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        found = f"the control character {chr(error.character)!r}"
        raise PolicyError(f"{label}:{line}: not valid YAML: {found} has to be escaped") from error
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{label}: a value cannot be read: {error}") from error
    _refuse_another_kind(model_class, data, label, kind)
    return validate(model_class, data, label=label, root=root)


def validate(model_class: type[Model], data: Any, *, label: str, root: Node | None = None) -> Model:
    """Check plain ``data`` against ``model_class``; ``root`` is the YAML node it was read from, if any.

    Raises ``PolicyError`` with one line for each mistake, each starting with ``label``.
    """
    try:
        return model_class.model_validate(data, context={_IN_FILE: root is not None})
    except ValidationError as error:
        raise PolicyError(_report(error, model_class, data, label, root)) from None


def with_unit(size: object, info: ValidationInfo) -> object:
    """``size``. A bare number in a file is refused: its author may mean any unit. In code, numbers are bytes."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0 and (info.context or {}).get(_IN_FILE):
        raise ValueError(f"expected a size with its unit, such as '{size}MiB', or '{size}B' for so many bytes")
    return size


def raises_policy_error(model_class: type[Model]) -> type[Model]:
    """Class decorator: a wrong value given to the constructor raises ``PolicyError``, as it does in a file.

    pydantic fills nested models without calling their ``__init__``, so it is the outermost call that reports,
    with the whole dotted key.
    """
    construct = model_class.__init__

    @functools.wraps(construct)
    def __init__(self: BaseModel, *unnamed: Any, **values: Any) -> None:
        name = model_class.__name__
        if unnamed:
            keys = ", ".join(f"{key}=" for key in [*model_class.model_fields][:4])
            found = f"found {show(unnamed[0])} without one. Write its keyword before it"
            raise PolicyError(f"{name}: expected values with keywords, such as {keys}; {found}")
        try:
            construct(self, **values)
        except ValidationError as error:
            raise PolicyError(_report(error, model_class, values, name, None)) from None

    model_class.__init__ = __init__  # type: ignore[method-assign, assignment]
    return model_class


def dump_document(data: Mapping[str, Any]) -> str:
    """Write plain ``data`` as YAML in its own order. Reading the text gives ``data`` back."""
    yaml = YAML(typ="rt", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = 110
    text = io.StringIO()
    yaml.dump(dict(data), text)
    return text.getvalue()


def show(value: Any) -> str:
    """``value`` as error texts show it: short, and spelled as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _shortened.repr(value)


def nearest(word: Any, candidates: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the candidate that most resembles ``word``, or ``""`` if none does."""
    close = difflib.get_close_matches(str(word), list(candidates), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80


def _only_document(documents: Sequence[Node], label: str, kind: str) -> Node:
    if not documents:
        raise PolicyError(f"{label}: expected a {kind}; found an empty file")
    if len(documents) > 1:
        where = _position(label, documents[1])
        raise PolicyError(f"{where}: expected one {kind} a file; found a second document, which starts here")
    root = documents[0]
    if not isinstance(root, MappingNode):
        found = "a list" if isinstance(root, SequenceNode) else show(root.value)
        raise PolicyError(f"{_position(label, root)}: expected a {kind}, which is a mapping; found {found}")
    return root


def _refuse_another_kind(model_class: type[BaseModel], data: Mapping[Any, Any], label: str, kind: str) -> None:
    """Raise one sentence, and not one for each key, if no key of a file is known or resembles a known one."""
    known = [name for name in model_class.model_fields if name != "version"]
    words = [str(key) for key in data if key != "version"]
    if words and not any(word in known or nearest(word, known) for word in words):
        keys, found = ", ".join(known[:5]), ", ".join(words[:5])
        raise PolicyError(f"{label}: expected a {kind}, whose keys are {keys} …; found another file, with {found}")


def _syntax_error(error: MarkedYAMLError, label: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark else label
    text = ": ".join(part for part in (error.context, error.problem) if part)
    hint = "; a value that starts with '*' has to be in quotes" if "alias" in text else ""
    hint = "; indent by spaces, not by tabs" if "'\\t'" in text else hint
    return f"{where}: not valid YAML: {text}{hint}"


def _report(error: ValidationError, model_class: type[BaseModel], data: Any, label: str, root: Node | None) -> str:
    """One line for each wrong key, in the order of the file; the alternatives of a union share a line."""
    texts: dict[KeyPath, list[str]] = {}
    details = {}
    for detail in error.errors(include_url=False):
        path = _path_in(data, detail["loc"], may_be_absent=detail["type"] == "missing")
        details[path] = detail
        alternatives = texts.setdefault(path, [])
        text = _expectation(detail)
        text = text.removeprefix("expected ") if alternatives else text
        if text not in alternatives:
            alternatives.append(text)

    lines = []
    for path, detail in details.items():
        of_key = detail["type"] in ("extra_forbidden", "invalid_key")
        node = _node_at(root, path, of_key) if root else None
        where = _position(label, node) if node else label
        key = f"{_dotted(path)}: " if path else ""
        sentence = _sentence(detail, " or ".join(texts[path]), model_class, path)
        order = (node.start_mark.line, node.start_mark.column) if node else (0, 0)
        lines.append((order, f"{where}: {key}{sentence}"))
    return "\n".join(line for _, line in sorted(lines, key=lambda entry: entry[0]))


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] in _EXPECTED:
        return f"expected {_EXPECTED[detail['type']]}"
    if detail["type"] in ("value_error", "assertion_error"):
        return str(detail["ctx"]["error"])
    return re.sub(r"^.* should (be|have) ", "expected ", detail["msg"])


def _sentence(detail: ErrorDetails, expectation: str, model_class: type[BaseModel], path: KeyPath) -> str:
    if detail["type"] == "missing":
        return "this key is required, and missing"
    if detail["type"] == "extra_forbidden":
        models = [kind for kind in _types_at(model_class, path[:-1]) if _is_subclass(kind, BaseModel)]
        keys = [name for model in models for name in model.model_fields]
        return f"unknown key{nearest(path[-1], keys)}; expected one of {', '.join(keys)}"
    is_word = detail["type"] == "literal_error"
    suggestion = nearest(detail["input"], re.findall(r"'([^']*)'", detail["ctx"]["expected"])) if is_word else ""
    return f"{expectation}; found {show(detail['input'])}{suggestion}"


def _path_in(data: Any, location: tuple[int | str, ...], *, may_be_absent: bool) -> KeyPath:
    """pydantic's ``location`` without what ``data`` lacks: names of a union's members, items of a scalar."""
    path: list[str | int] = []
    for key in location:
        is_item = isinstance(data, (list, tuple)) and isinstance(key, int) and key < len(data)
        if is_item or (isinstance(data, Mapping) and key in data):
            data = data[key]
            path.append(key if is_item else str(key))
    return (*path, location[-1]) if may_be_absent else tuple(path)


def _node_at(root: Node, path: KeyPath, of_key: bool) -> Node:
    """The node at ``path`` (or of its last key), or the closest one above it that is written in the file."""
    node = found = root
    for key in path:
        if isinstance(node, SequenceNode) and isinstance(key, int):
            found = node = node.value[key]
            continue
        pair = next((pair for pair in _pairs(node) if pair[0].value == key), None)
        if pair is None:
            break
        node = pair[1]
        is_left_out = node.start_mark.index == node.end_mark.index
        found = pair[0] if of_key or is_left_out else node
    return found


def _pairs(node: Node) -> list[tuple[Node, Node]]:
    pairs = node.value if isinstance(node, MappingNode) else ()
    return [(key, value) for key, value in pairs if isinstance(key, ScalarNode)]


def _types_at(kind: Any, path: KeyPath) -> Iterator[Any]:
    """The types that a value at ``path`` below a ``kind`` may have, with unions taken apart."""
    if get_origin(kind) is Annotated:
        yield from _types_at(get_args(kind)[0], path)
    elif get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _types_at(member, path)
    elif not path:
        yield kind
    elif _is_subclass(kind, BaseModel):
        if field := kind.model_fields.get(path[0]):
            yield from _types_at(field.annotation, path[1:])
    else:
        for content in get_args(kind):
            yield from _types_at(content, path[1:])


def _is_subclass(kind: Any, base: type) -> bool:
    # On Python 3.10 list[int] is an instance of type too, and issubclass refuses it.
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, base)


def _position(label: str, node: Node) -> str:
    return f"{label}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
