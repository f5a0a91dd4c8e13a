"""The facts of each op: whether it may run again for the same bits, which arguments it writes to, its family.

An op that nothing here calls pure, by its name, its tags or its schema, is opaque: its outputs are kept (invariant 4).
The ops that ``reviewed_ops`` names were reviewed for CPU and CUDA against "Avoiding nondeterministic algorithms" of
torch's documentation (``torch.use_deterministic_algorithms``), and ``tests/engine/test_ops_review.py`` runs the review.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload

from recompute.engine.cut import reviewed_ops as reviewed
from recompute.engine.cut.reviewed_ops import is_effectful

PINV = torch.ops.aten.linalg_pinv.atol_rtol_tensor


CASTS_INSIDE = frozenset(
    (
        PINV,
        torch.ops.aten._trilinear.default,  # of nn.Bilinear
        torch.ops.aten._native_multi_head_attention.default,  # this and the next: in eval mode without gradients
        torch.ops.aten._transformer_encoder_layer_fwd.default,
    )
)
"""Ops that autocast has no rule for, but whose kernels call ops that it has one for.

torch's own sample inputs find no others. Under inference mode every composite op is one too, because a dispatch mode
sees it whole there.
"""


class Kind(enum.Enum):
    """The kinds of op, by what happens if one runs again."""

    VIEW = "it makes nothing new: its outputs, if any are tensors, share memory with its inputs"
    PURE = "the same inputs give the same bits in new memory, and nothing else happens"
    RANDOM = "pure, given the state of the random generator that it draws from"
    IN_PLACE = "pure, but that it writes its result over an input"
    OPAQUE = "none of these, or not known"


class OpFacts(NamedTuple):
    """The facts of an op. If they depend on its arguments, it ``varies``; then ask ``facts_of_call``."""

    name: str
    """Without the overload: "aten.mm"."""
    kind: Kind
    family: str | None = None
    """"gemm", "convolution", "attention" or "collective" of an op that is costly, or ``is_thin``; None of others."""
    writes: tuple[int | str, ...] = ()
    """The arguments that it changes: their positions, or their names if they are keyword-only."""
    reason: str = ""
    """Why its outputs cannot be regenerated; "" if they can."""
    varies: bool = False
    running_statistics: tuple[int | str, ...] = ()
    """The arguments that only collect statistics. The op writes to no others. With None in their places it is pure, and
    its outputs are the same."""
    casts_inside: bool = False
    """Whether autocast applies to the ops that its kernel calls."""
    is_foreign: bool = False
    """Whether it is another library's, which may draw random numbers without saying so."""
    is_thin: bool = False
    """Whether it is a GEMM that takes no longer than to read and write its output. Only a call's facts say so."""

    @property
    def is_costly(self) -> bool:
        """Whether only a rule that names its family runs it again."""
        return self.family is not None and not self.is_thin

    @property
    def is_update(self) -> bool:
        """Whether nothing that it returns depends on what it writes to, but for that itself."""
        return self.kind is Kind.IN_PLACE or bool(self.running_statistics)


FACTORY = "made by a factory op, so other code may have filled its memory"
DATA_DEPENDENT = "its output's shape depends on the values of tensors"
UNKNOWN = "not known to return the same bits when run again"
DIFFERS = "it adds or writes in an order that may differ from run to run"
REORDERS = "it may order equal values differently when run again"
WRITES = "it writes to an argument, and is not known to write the same when run again"
DRAWS_IN_PLACE = "it draws random numbers into an argument"
RESHAPES = "it changes the shape or the memory of an argument"
COLLECTIVE = "a collective, whose result is ready only after a wait"
HIGHER_ORDER = "a higher-order operator"
STATISTICS = "it updates running statistics"
EFFECT = "it has a side effect, which must happen once"
NO_TENSOR = "it returns no tensor"
EXPOSED = "its memory was exposed, as an array or an address"
IN_FUNCTION = "made inside of a custom autograd.Function"


def facts(op: Any) -> OpFacts:
    """The facts of ``op``, an ``OpOverload`` or a ``HigherOrderOperator``, whatever its arguments.

    Where the arguments matter this is the worst case. ``facts_of_call`` may say something better.
    """
    known = _known.get(op)
    if known is None:
        known = _known[op] = _classify(op)
    return known


def facts_of_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpFacts:
    """The facts of ``op(*args, **kwargs)``. Attention with a dropout of 0, say, draws no random numbers."""
    known = facts(op)
    if not known.varies:
        return known
    condition, better = _variants[op]
    return better if condition.holds(functools.partial(_argument, op, args, kwargs)) else known


def is_defined(op: Any, slot: int) -> bool:
    """Whether the op writes to its output number ``slot``, so that the outputs of two runs can be compared.

    Attention without dropout does not write to the outputs for the generator's state: they have the memory's old
    content. Nothing reads them. (Seen on an H200, torch 2.11: efficient and cuDNN attention, and the unused outputs of
    flash attention.)
    """
    return facts(op).family != "attention" or slot < 2


class _Condition(NamedTuple):
    """Which calls of an op are pure, if not all are; or which GEMMs are thin.

    reason: why the other calls are opaque; "" if they are random instead.
    """

    holds: Callable[[Callable[[str], Any]], bool]
    """Whether a call is one of these. It is passed a function that returns the call's argument of a name."""
    reason: str


_known: dict[Any, OpFacts] = {}
_variants: dict[Any, tuple[_Condition, OpFacts]] = {}


def _classify(op: Any) -> OpFacts:
    if not isinstance(op, OpOverload):
        name, reason = f"{op.namespace}.{op.name()}", EFFECT if is_effectful(op) else HIGHER_ORDER
        return OpFacts(name, Kind.OPAQUE, _family_by_name(op.name()), reason=reason)
    space, base = op._schema.name.split("::")
    writes = _writes(op, space, base)
    is_foreign = (
        space not in ("aten", "recompute") and space not in reviewed.INTERNAL_SPACES | reviewed.COLLECTIVE_SPACES
    )
    returns = op._schema.returns
    if space in reviewed.COLLECTIVE_SPACES:
        is_view = base in reviewed.COLLECTIVE_VIEWS
        best = OpFacts("", Kind.VIEW) if is_view else OpFacts("", Kind.OPAQUE, "collective", writes, COLLECTIVE)
    elif is_foreign and (is_effectful(op) or not (returns or writes)):
        best = OpFacts("", Kind.OPAQUE, _family_by_name(base), writes, EFFECT)
    elif not writes and not _returns_tensors(op) and (is_foreign or (space == "aten" and not returns)):
        best = OpFacts("", Kind.OPAQUE, reason=NO_TENSOR)
    elif writes and (op._schema.is_mutable or space != "aten" or base not in reviewed.PURE):
        best = _classify_writer(op, space, base, writes)
    elif _is_view(op, space, base) or not _returns_tensors(op):
        best = OpFacts("", Kind.VIEW)
    elif space == "aten":
        best = _classify_aten(op, base)
    elif space in reviewed.INTERNAL_SPACES:
        best = _opaque(op, UNKNOWN)
    else:
        best = _classify_custom(op, base)
    best = best._replace(name=f"{space}.{base}", casts_inside=op in CASTS_INSIDE, is_foreign=is_foreign)
    if best.family == "gemm" and best.kind is not Kind.OPAQUE and (factors := _FACTORS.get(base.removesuffix("_"))):
        _variants[op] = _Condition(functools.partial(_is_thin, factors), ""), best._replace(is_thin=True)
        return best._replace(varies=True)
    condition = _condition(op, space, base)
    if condition is None or best.kind is Kind.OPAQUE:
        return best
    _variants[op] = condition, best
    kind = Kind.OPAQUE if condition.reason else Kind.RANDOM
    worst = best._replace(kind=kind, reason=condition.reason, writes=writes, varies=True)
    return worst._replace(running_statistics=writes) if base in reviewed.STATEFUL_NORMS else worst


def _classify_writer(op: OpOverload, space: str, base: str, writes: tuple[int | str, ...]) -> OpFacts:
    pure = base.removesuffix("_")
    if Tag.inplace_view in op.tags:
        return OpFacts("", Kind.OPAQUE, writes=writes, reason=RESHAPES)
    if Tag.nondeterministic_seeded in op.tags:
        return OpFacts("", Kind.OPAQUE, writes=writes, reason=DRAWS_IN_PLACE)
    if space != "aten":
        return OpFacts("", Kind.OPAQUE, _family_by_name(base), writes, WRITES)
    # The op that writes the same result to new memory; ``op`` itself if none takes the same arguments.
    namesake = getattr(getattr(torch.ops.aten, pure, None), op._overloadname, op)
    if writes == (0,) and base.endswith("_") and _is_pure(namesake, pure):
        return OpFacts("", Kind.IN_PLACE, _family(pure), writes)
    return OpFacts("", Kind.OPAQUE, _family(pure), writes, DIFFERS if pure in reviewed.DIFFER else WRITES)


def _classify_aten(op: OpOverload, base: str) -> OpFacts:
    if base in reviewed.RANDOM:
        return OpFacts("", Kind.RANDOM)
    if _is_pure(op, base):
        return OpFacts("", Kind.PURE, _family(base))
    if base in reviewed.DIFFER:
        return _opaque(op, DIFFERS)
    if base in reviewed.REORDER:
        return _opaque(op, REORDERS)
    is_factory = base.startswith("new_") or base.endswith("_like") or not any(_tensor_arguments(op))
    return _opaque(op, FACTORY if is_factory else UNKNOWN)


def _classify_custom(op: OpOverload, base: str) -> OpFacts:
    """An op of another library. Its schema and its tags are believed."""
    if any(value.alias_info is not None for value in op._schema.returns) or Tag.nondeterministic_bitwise in op.tags:
        return _opaque(op, UNKNOWN)
    if Tag.data_dependent_output in op.tags or Tag.dynamic_output_shape in op.tags:
        return _opaque(op, DATA_DEPENDENT)
    family = _family_by_name(base)
    if family == "collective":
        return OpFacts("", Kind.OPAQUE, family, reason=COLLECTIVE)
    takes_generator = any("Generator" in str(argument.type) for argument in op._schema.arguments)
    is_random = takes_generator or Tag.nondeterministic_seeded in op.tags
    return OpFacts("", Kind.RANDOM if is_random else Kind.PURE, family)


def _opaque(op: OpOverload, reason: str) -> OpFacts:
    if Tag.data_dependent_output in op.tags or Tag.dynamic_output_shape in op.tags:
        reason = DATA_DEPENDENT
    return OpFacts("", Kind.OPAQUE, reason=reason)


def _is_pure(op: OpOverload, base: str) -> bool:
    if Tag.nondeterministic_bitwise in op.tags:
        return False
    if base in reviewed.PURE or f"{base}.{op._overloadname}" in reviewed.PURE:
        return True
    return Tag.pointwise in op.tags and Tag.nondeterministic_seeded not in op.tags and _returns_tensors(op)


def _is_view(op: OpOverload, space: str, base: str) -> bool:
    if space == "aten" and base in reviewed.UNANNOTATED_VIEWS:
        return True
    returns = op._schema.returns
    return bool(returns) and all(value.alias_info is not None for value in returns)


def _returns_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(value.type) for value in op._schema.returns)


def _tensor_arguments(op: OpOverload) -> Iterator[tuple[int | str, Any]]:
    """Each argument that takes tensors, with its position, or with its name if it is keyword-only."""
    for position, argument in enumerate(op._schema.arguments):
        if "Tensor" in str(argument.type):
            yield argument.name if argument.kwarg_only else position, argument


def _writes(op: OpOverload, space: str, base: str) -> tuple[int | str, ...]:
    if space in ("c10d", "fsdp"):
        return tuple(where for where, argument in _tensor_arguments(op) if "input" not in argument.name)
    if space in reviewed.COLLECTIVE_SPACES and base in reviewed.COLLECTIVE_WRITERS:
        return tuple(where for where, _ in _tensor_arguments(op))
    if Tag.maybe_aliasing_or_mutating in op.tags and space != "aten":
        return tuple(where for where, _ in _tensor_arguments(op))
    unannotated = reviewed.UNANNOTATED_WRITES.get(base, ()) if space == "aten" else ()
    return tuple(
        where
        for where, argument in _tensor_arguments(op)
        if where in unannotated or (argument.alias_info and argument.alias_info.is_write)
    )


def _family(base: str) -> str | None:
    return next((family for family, names in reviewed.FAMILIES.items() if base in names), None)


def _family_by_name(base: str) -> str | None:
    """The family of another library's op, by words in its name."""
    name = f"_{base.lower()}_"
    return next(
        (family for family, words in reviewed.FAMILY_WORDS.items() if any(word in name for word in words)), None
    )


def _argument(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    position, default = _parameters(op)[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


@functools.cache
def _parameters(op: OpOverload) -> dict[str, tuple[int, Any]]:
    """The position and the default of each argument, by name. Keyword-only ones have a position past all others."""
    arguments = op._schema.arguments
    return {
        argument.name: (len(arguments) if argument.kwarg_only else position, argument.default_value)
        for position, argument in enumerate(arguments)
    }


def _condition(op: OpOverload, space: str, base: str) -> _Condition | None:
    numbers = (argument.name for argument in op._schema.arguments if "Tensor" not in str(argument.type))
    if dropouts := [name for name in numbers if "dropout" in name]:
        return _Condition(lambda argument: not any(map(argument, dropouts)), "")
    if space == "recompute" and any(argument.name == "group" for argument in op._schema.arguments):
        return _Condition(lambda argument: not argument("group"), COLLECTIVE)  # ranks that share the words of a head
    return _CONDITIONS.get(base.removesuffix("_")) if space == "aten" else None


def _scans_in_order(argument: Callable[[str], Any]) -> bool:
    tensor = argument("self")
    dtype = argument("dtype") or tensor.dtype
    return not tensor.is_cuda or not (dtype.is_floating_point or dtype.is_complex)


def _convolves_in_order(argument: Callable[[str], Any]) -> bool:
    """cuDNN computes a transposed convolution as it computes a convolution's gradient: maybe with atomic additions."""
    if not argument("transposed") or not argument("input").is_cuda:
        return True
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


_MASKS = (torch.bool, torch.uint8)
_CONDITIONS = {
    "index": _Condition(lambda of: all(i is None or i.dtype not in _MASKS for i in of("indices")), DATA_DEPENDENT),
    **dict.fromkeys(reviewed.SCANS, _Condition(_scans_in_order, DIFFERS)),
    "convolution": _Condition(_convolves_in_order, DIFFERS),
    **dict.fromkeys(
        reviewed.STATEFUL_NORMS, _Condition(lambda of: not of("training") or of("running_mean") is None, STATISTICS)
    ),
    **dict.fromkeys(
        ("_to_copy", "copy"),
        _Condition(lambda of: not of("non_blocking"), "a non-blocking copy, which nothing waits for"),
    ),
}

FLOPS = 4e14
"""Floating-point operations a second of a nominal accelerator."""
BANDWIDTH = 2e12
"""Bytes that it moves a second."""
# The most products that sum up to an element of a thin GEMM's output, for each byte of it. Reading and writing the byte
# takes as long: 2 / BANDWIDTH. The rate in float32 lies between a GPU's rate with TF32 and its rate without it.
_THIN, _THIN_IN_FLOAT32 = FLOPS / BANDWIDTH, FLOPS / 8 / BANDWIDTH

# The names of the factors: (..., M, K) and (..., K, N).
_FACTORS = {
    **dict.fromkeys(("mm", "bmm", "_grouped_mm"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    "baddbmm": ("batch1", "batch2"),
}


def _is_thin(factors: tuple[str, str], argument: Callable[[str], Any]) -> bool:
    """Whether a GEMM takes no longer than to read and write its output, as each elementwise op does at least.

    The scores of attention are thin: sums over the size of a head. So is LoRA's second product. A router's is not: its
    output is small, and its inputs are not. No convolution counts as thin: one of few products, as a depthwise one,
    takes several times as long as its arithmetic and its traffic.
    """
    left, right = map(argument, factors)
    if left.dim() > right.dim():  # a grouped GEMM whose groups stand side by side in its output
        return False
    *rows, products = map(size_hint, left.shape)
    made, itemsize = math.prod(rows) * size_hint(right.shape[-1]), left.element_size()
    read = math.prod(rows) * products + math.prod(map(size_hint, right.shape))
    return read <= made and products <= itemsize * (_THIN if itemsize <= 2 else _THIN_IN_FLOAT32)


def size_hint(size: Any) -> int:
    """A size; a symbolic one as the number that it was traced with. To ask for it adds no guard."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in ``values``, which may be lists, tuples and dicts inside of each other."""
    found: list[Tensor] = []
    _add_tensors((values,), found)
    return found


def _add_tensors(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _add_tensors(value, found)
        elif isinstance(value, dict):
            _add_tensors(value.values(), found)
