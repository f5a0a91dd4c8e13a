"""What a policy is: an ordered tuple of rules, each a pattern over modules and an action."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WrapSerializer,
    field_validator,
    model_validator,
)

from recompute.errors import BudgetError
from recompute.policy.document import dump_document, raises_policy_error, with_unit
from recompute.policy.layer_spans import LAYERS, LayerSpan
from recompute.units import parse_size

Action = Literal["keep", "recompute", "checkpoint", "offload", "compress"]
Via = Literal["hook", "kernel", "auto"]
Repeatable = Literal["gemm", "convolution", "attention"]

REPEATABLE: frozenset[str] = frozenset(get_args(Repeatable))
"""The kinds of op that cost so much that ``recompute`` runs none of them again, unless a rule's ``rerun`` says so.

Thin GEMMs may always: they take no longer than to read and write their output (``engine.cut.ops``)."""

FAMILIES = (*get_args(Repeatable), "collective")
"""The families in ``REPEATABLE``, and "collective": no tape ever runs a collective again."""

PRICE = 1e10
"""By default, the bytes that may be held to save a second of running ops again.

The output of a reduction over a hundred elements is kept, as norms' statistics are: to bring back its few bytes, many
would be read. An elementwise op or a thin GEMM brings back at least fifty times as many bytes a second as this."""

MIN_BYTES = 1 << 20
"""By default, smaller storages stay on the device: a copy of their own to the host and back does not pay."""

NO_RULES: Final = "none"
"""Stands in the place of a policy's rules if the policy is to do nothing."""

BLOCK: Final = "block"
"""The word in a rule's ``type`` for the repeated layers of a model, whatever their class is called."""

HEAD: Final = "head"
"""The word in a rule's ``type`` for the module that returns a language model's logits, whatever it is called."""

_BELONGS_TO = {
    "via": ("recompute",),
    "rerun": ("recompute",),
    "keep": ("recompute", "checkpoint"),
    "price": ("recompute",),
    "hold": ("recompute",),
    "capture": ("recompute", "checkpoint"),
    "compiled": ("recompute", "checkpoint"),
    "offload": ("recompute", "checkpoint", "compress"),
    "compress": ("recompute",),
    "tile": ("recompute",),
}
_OFFLOAD_KEYS = ("fraction", "min_bytes", "max_host_bytes")
_VERSION = 1


def _path_glob(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a glob such as '**.mlp', or a list of globs")
    for part in value.split("."):
        if not part:
            raise ValueError("expected a name, '*' or '**' between the dots of a glob, not an empty part")
        if "**" in part and part != "**":
            raise ValueError("expected '**' alone between dots, as in 'a.**.b': it stands for whole parts of a path")
    if found := re.search(r"[\[\]{}]", value):
        raise ValueError(f"expected a glob of '*', '**', '?' and plain text; {found[0]!r} has no meaning here")
    return value


def _class_glob(value: object) -> str:
    if isinstance(value, str) and "." in value:
        raise ValueError(f"expected the name of a class without its module, such as {value.split('.')[-1]!r}")
    return _path_glob(value)


def is_tensor_name(word: str) -> bool:
    """Whether a tensor may have this name: an identifier, and no family's name, so that ``keep`` is unambiguous."""
    return word.isidentifier() and word not in FAMILIES


def is_op_name(word: str) -> bool:
    """Whether this is spelled as an op's name without its overload: ``"aten.mm"``."""
    parts = word.split(".")
    return len(parts) == 2 and all(map(str.isidentifier, parts))


def _keepable(value: object) -> str:
    if isinstance(value, str):
        if value in FAMILIES or is_op_name(value) or is_tensor_name(value):
            return value
        if "." in value or ":" in value:
            raise ValueError("expected an op as 'namespace.name', without an overload, such as 'aten.mm'")
    raise ValueError(
        f"expected a family ({', '.join(FAMILIES)}), an op such as 'aten.mm', the name of a tensor (letters, digits "
        "and '_'), or a list of these"
    )


def _price(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value) + 0.0  # of -0.0 too, to be one price
    raise ValueError("expected a number from 0 up: the bytes that may be held to save a second, such as 3.2e10")


def _fraction(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise ValueError("expected a share above 0 and up to 1, such as 0.5")


def _size(value: object, info: ValidationInfo) -> int:
    value = with_unit(value, info)
    try:
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return parse_size(value)
    except BudgetError:
        pass
    raise ValueError("expected a size such as '40GiB', '512MiB' or '40GB', or bytes as '9000B'")


def _size_or_none(value: object, info: ValidationInfo) -> int | None:
    return None if value is None else _size(value, info)


def size_as_written(nbytes: int | None) -> str | None:
    """Bytes as a policy file spells them: "400MiB" where that is exact."""
    if nbytes is None:
        return None
    for unit, name in ((1 << 30, "GiB"), (10**9, "GB"), (1 << 20, "MiB"), (10**6, "MB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return f"{nbytes}B"


def _tokens_or_none(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("expected a number of tokens from 1 up, such as 16384")


def _rules_as_tuple(value: object) -> object:
    if value == NO_RULES:
        return ()
    if value in ([], ()):
        raise ValueError("expected at least one rule, or the word none: a policy that is to do nothing says so")
    return tuple(value) if isinstance(value, list) else value


_RULES_AS_WRITTEN = WrapSerializer(lambda rules, write: write(rules) if rules else NO_RULES)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _as_written(values: Sequence[object] | None) -> Any:
    """A tuple as a policy file spells it: one value bare, several as a list."""
    if values is None:
        return None
    written = [value.spelling if isinstance(value, LayerSpan) else value for value in values]
    return written[0] if len(written) == 1 else written


def _not_empty(layers: tuple[LayerSpan, ...] | None) -> tuple[LayerSpan, ...] | None:
    if layers == ():
        raise ValueError(f"expected {LAYERS}")
    return layers


def _known_version(version: int) -> int:
    if version != _VERSION:
        raise ValueError(f"expected {_VERSION}, the only version of this format that this release reads")
    return version


Item = TypeVar("Item")
OneOrMore = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple), PlainSerializer(_as_written)]
PathGlob = Annotated[str, PlainValidator(_path_glob)]
ClassGlob = Annotated[str, PlainValidator(_class_glob)]
Keepable = Annotated[str, PlainValidator(_keepable)]
Layers = Annotated[
    tuple[Annotated[LayerSpan, PlainValidator(LayerSpan.parse)], ...] | None,
    BeforeValidator(lambda value: None if value is None else _as_tuple(value)),
    AfterValidator(_not_empty),
    PlainSerializer(_as_written),
]
SizeOrNone = Annotated[int | None, PlainValidator(_size_or_none), PlainSerializer(size_as_written)]
LayerSpelling = int | str | LayerSpan

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid")


@raises_policy_error
class Rule(BaseModel):
    """Gives ``action`` to the modules that ``match`` and ``type`` and ``layers`` all select.

    match: globs over dotted module paths ("*" one part, "**" any number, "?" one character); () is any path.
    type: globs over class names, or the words "block" (each of a model's repeated layers) and "head" (the module that
        makes a language model's logits), whatever their classes are called; () is any class.
    layers: indices in the nearest ModuleList around a module, or in the Sequential or ModuleDict that its block is a
        child of; None is any index, and also modules in no list.
    via: how ``recompute`` regenerates: "hook", "kernel", or "auto" (a kernel where one can stand in).
    rerun: the costly families (see ``REPEATABLE``) that ``recompute`` may run again.
    keep: what ``recompute`` and ``checkpoint`` never drop: outputs of a costly family ("attention") or of an op
        ("aten.mm", any overload), and tensors that bear a name ("logits", from ``recompute.keep(tensor, "logits")``).
        The three spellings never overlap, so ``word in rule.keep`` asks for any of them.
    price: the bytes that ``recompute`` may hold to save a second of running ops again, on a nominal accelerator
        (``engine.cut.ops``). The higher it is, the fewer ops run again; 0 holds the fewest bytes.
    hold: in place of a price, the most that ``recompute`` may save in one forward of a module: a size such as
        "400MiB", or bytes. If nothing meets it, the fewest bytes are saved. Of a head, it is the memory for logits.
    capture: whether a module that has run the same way for some steps goes on as straight code, which takes less CPU
        time and changes no bit (see ``compiled.captured_region``).
    compiled: whether captured code on CUDA runs groups of elementwise ops in generated kernels, which changes no bit
        (see ``compiled.generated``).
    compress: whether ``recompute`` saves tensors as codes of 8 bits, as action "compress" does, if only GEMMs,
        convolutions, products, SiLU and GELU read them. Gradients are then not exact.
    tile: how many tokens an MLP computes at a time, if kernels compute it, or would if it had no adapters. Then only
        its input is saved, and backward runs it again, tile by tile: for long sequences. None: all tokens at once.
    offload: whether what is held travels off the device, as under action "offload".
    fraction: the share of the bytes that may be offloaded and are, the largest storages first; from above 0 to 1.
    min_bytes: storages of fewer bytes stay on the device: a size such as "1MiB", or bytes.
    max_host_bytes: the most that this process may offload, a size; None is half of what is free, divided by the
        processes of this machine. Beyond it forward raises ``HostMemoryError``. These three need the action "offload",
        or ``offload: true``.

    At least one of match, type and layers is needed, and no family may be in both rerun and keep. One string or
    number stands for a list of one. The guide to policies has the details. Raises ``PolicyError``.

    >>> recompute.Rule(type="block", action="checkpoint", keep="attention").keep
    ('attention',)
    """

    model_config = _STRICT

    match: OneOrMore[PathGlob] = ()
    type: OneOrMore[ClassGlob] = ()
    layers: Layers = None
    action: Action
    via: Via = "auto"
    rerun: OneOrMore[Repeatable] = ()
    keep: OneOrMore[Keepable] = ()
    price: Annotated[float, PlainValidator(_price)] = PRICE
    hold: SizeOrNone = None
    capture: bool = True
    compiled: bool = True
    compress: bool = False
    tile: Annotated[int | None, PlainValidator(_tokens_or_none)] = None
    offload: bool = False
    fraction: Annotated[float, PlainValidator(_fraction)] = 1.0
    min_bytes: Annotated[int, PlainValidator(_size), PlainSerializer(size_as_written)] = MIN_BYTES
    max_host_bytes: SizeOrNone = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            match: str | Sequence[str] = (),
            type: str | Sequence[str] = (),
            layers: LayerSpelling | Sequence[LayerSpelling] | None = None,
            action: Action,
            via: Via = "auto",
            rerun: Repeatable | Sequence[Repeatable] = (),
            keep: str | Sequence[str] = (),
            price: float = PRICE,
            hold: int | str | None = None,
            capture: bool = True,
            compiled: bool = True,
            compress: bool = False,
            tile: int | None = None,
            offload: bool = False,
            fraction: float = 1.0,
            min_bytes: int | str = MIN_BYTES,
            max_host_bytes: int | str | None = None,
        ) -> None: ...

    @field_validator("via", "rerun", "keep", "price", "hold", "capture", "compiled", "compress", "tile", "offload")
    @classmethod
    def _beside_its_action(cls, value: Any, info: ValidationInfo) -> Any:
        action, key = info.data.get("action", "recompute"), str(info.field_name)
        if value != cls.model_fields[key].default and action not in _BELONGS_TO[key]:
            actions = " or ".join(map(repr, _BELONGS_TO[key]))
            raise ValueError(f"expected no {key!r} beside action {action!r}: it belongs to action {actions}")
        return value

    @field_validator(*_OFFLOAD_KEYS)
    @classmethod
    def _beside_offloading(cls, value: Any, info: ValidationInfo) -> Any:
        key, offloads = str(info.field_name), info.data.get("action") == "offload" or info.data.get("offload")
        if value != cls.model_fields[key].default and not offloads:
            raise ValueError(f"expected no {key!r} here: it belongs to action 'offload', or beside 'offload: true'")
        return value

    @field_validator("hold", "tile")
    @classmethod
    def _beside_others(cls, value: Any, info: ValidationInfo) -> Any:
        key, others = str(info.field_name), info.data
        if value is not None and key == "hold" and others.get("price", PRICE) != PRICE:
            raise ValueError("expected 'price' or 'hold', not both: each of them says how much runs again")
        if value is not None and key == "tile" and others.get("via") == "hook":
            raise ValueError("expected no 'tile' beside 'via: hook', which runs a module as it is written")
        return value

    @field_validator("keep")
    @classmethod
    def _not_rerun(cls, keep: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for family in info.data.get("rerun", ()):
            if family in keep:
                raise ValueError(f"expected {family!r} in 'rerun' or in 'keep', not in both")
        return keep

    @model_validator(mode="after")
    def _selects_something(self) -> Rule:
        if not self.match and not self.type and self.layers is None:
            raise ValueError("expected at least one of match, type and layers")
        return self


@raises_policy_error
class Policy(BaseModel):
    """Rules in order: each module gets the first that matches it, and is left alone if none does.

    rules: at least one, or the word "none" for no rules, since an empty list is a mistake more often than a wish.

    Equality is by value, and a policy is hashable. Raises ``PolicyError``.

    >>> recompute.Policy(rules=[recompute.Rule(match="**.mlp", action="offload")]).rules[0].action
    'offload'
    """

    model_config = _STRICT

    version: Annotated[int, AfterValidator(_known_version)] = _VERSION
    name: str = "unnamed"
    description: str = ""
    rules: Annotated[
        tuple[Rule, ...],
        BeforeValidator(_rules_as_tuple),
        _RULES_AS_WRITTEN,
    ]

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            version: int = 1,
            name: str = "unnamed",
            description: str = "",
            rules: Sequence[Rule] | Literal["none"],
        ) -> None: ...

    def to_yaml(self) -> str:
        """This policy as the text of a policy file. Loading the text gives an equal policy."""
        return dump_document({"version": self.version, "name": self.name, **self.model_dump(exclude_defaults=True)})
