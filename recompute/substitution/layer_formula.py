"""Finds pre-norm decoder layers: by their formula, and then by a trial in which stand-ins take submodules' places.

Three kinds are found:

- one after the other: ``h = x + attention(norm(x))``, then ``h + mlp(mlp_norm(h))``, as Llama's layers and GPT-2's;
- with norms or dropouts behind: ``h = x + after(attention(norm(x)))``, then ``h + after(mlp(mlp_norm(h)))``, as Gemma
  2's;
- side by side: ``x + attention(norm(x)) + mlp(mlp_norm(x))``, as GPT-NeoX's, with one norm for both as in Phi's.

A layer may also return another output of attention, as Falcon's do.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from recompute.engine.reachable_objects import base_of
from recompute.substitution.careful_calls import careful
from recompute.substitution.formula_tracer import Tracer
from recompute.substitution.kernel_runner import drop_nothing
from recompute.substitution.module_formula import copy_without_policy, formula_of
from recompute.substitution.settings import ANY_SETTINGS, Settings


@dataclass(frozen=True)
class PreNormLayer:
    """The names of a layer's four submodules, and how its forward calls attention."""

    norm: str
    attention: str
    mlp_norm: str
    mlp: str
    parameters: tuple[str, ...]
    """The names of forward's parameters, in order; the first is x."""
    defaults: tuple[Any, ...]
    """The default values of the last of these parameters."""
    passed: tuple[tuple[int | str, str | None], ...]
    """For each argument of attention, its position or name, and the parameter given for it; None: the norm's output."""
    takes_more: bool
    """Whether forward also passes keywords of other names on to attention."""
    output: int | None
    """The index of the output of attention that is added; None if it has one output."""
    dropouts: tuple[str, ...]
    """The names of dropouts, or of their probabilities, which do nothing as long as these are 0."""
    after_attention: str | None = None
    """The module, a norm or a dropout, that what attention gives goes through before it is added; None: there is none.
    """
    after_mlp: str | None = None
    added_first: frozenset[str] | None = None
    """If the MLP reads x beside attention, which two are added first: of ``stream``, ``attention`` and ``mlp``. None if
    it reads the sum of x and attention."""

    sums_in_place: bool = False
    """Whether what attention gives is added in place to what the MLP gives, which comes first."""
    norms_first: bool = False
    """Whether the MLP reads x beside attention, and its norm runs before attention does."""
    returned_too: int | None = None
    """The index of an output of attention that the layer returns as well, in a pair; None if it returns none."""
    absent: str | None = None
    """A parameter of forward that has to be None, or else the layer computes something else."""
    settings: Settings = field(default=ANY_SETTINGS, compare=False)

    def takes(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the layer computes that with these arguments."""
        if self.absent is None or kwargs.get(self.absent) is not None:
            return self.absent is None
        place = self.parameters.index(self.absent)
        return place >= len(args) or args[place] is None

    @property
    def is_parallel(self) -> bool:
        return self.added_first is not None

    def parts(self, module: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The norms and the MLP, which kernels may compute."""
        norm, mlp_norm, mlp = (module._modules[name] for name in (self.norm, self.mlp_norm, self.mlp))
        return norm, mlp_norm, mlp  # type: ignore[return-value]

    def is_as_found(self, module: nn.Module) -> bool:
        return self.settings.are_those_of(module) and drop_nothing(module, self.dropouts)

    def sum(self, stream: Tensor, attended: Tensor, computed: Tensor) -> Tensor:
        """The output of a parallel layer: x, what attention and what the MLP gives, added in the layer's own order."""
        if self.added_first == {"stream", "attention"}:
            return (stream + attended) + computed
        if self.sums_in_place:
            computed += attended
            return stream + computed
        if self.added_first == {"attention", "mlp"}:
            return stream + (attended + computed)
        return (stream + computed) + attended

    def split(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Callable[[nn.Module, Tensor], tuple[Tensor, Any]]]:
        """Split forward's arguments: x, and a function that calls attention with the norm's output and the others.

        It gives what is added of attention's output, and what the layer returns of it.
        """
        given = dict(zip(self.parameters[len(self.parameters) - len(self.defaults) :], self.defaults, strict=True))
        given |= zip(self.parameters, args, strict=False)
        given |= kwargs

        def call(attention: nn.Module, normed: Tensor) -> tuple[Tensor, Any]:
            values = [(key, normed if name is None else given[name]) for key, name in self.passed]
            positional = [value for key, value in values if isinstance(key, int)]
            named = {key: value for key, value in values if isinstance(key, str)}
            if self.takes_more:
                named |= {key: value for key, value in kwargs.items() if key not in self.parameters}
            result = attention(*positional, **named)
            returned = None if self.returned_too is None else result[self.returned_too]
            return result if self.output is None else result[self.output], returned

        return given[self.parameters[0]], call


def find_pre_norm_layer(module: nn.Module) -> PreNormLayer | None:
    """The pre-norm layer that ``module`` computes, if that is all it does; else None."""
    cls = base_of(module)
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return None
    if cls in _tried and (absent := _tried[cls]) is not None:
        return _find(module, parameters, absent)
    layer = _find(module, parameters)
    if layer is None and cls not in _tried:
        optional = [each.name for each in parameters[1:] if each.default is None]
        found = ((absent, _find(module, parameters, absent)) for absent in optional)
        _tried[cls], layer = next(((absent, layer) for absent, layer in found if layer is not None), (None, None))
    return layer


_tried: weakref.WeakKeyDictionary[type[nn.Module], str | None] = weakref.WeakKeyDictionary()
"""The classes whose forward was traced without one argument after the other: without which it is a layer, if any."""


def _find(module: nn.Module, parameters: list[inspect.Parameter], absent: str | None = None) -> PreNormLayer | None:
    """absent: the argument that is None in the layer's formula, as that of an encoder's output; None: all are given."""
    formula = formula_of(module, functools.partial(LayerTracer, absent))
    if formula is None:
        return None
    tree, more = _sum_and_more(formula.tree)
    found = _one_after_the_other(tree) or _side_by_side(tree)
    if found is None:
        return None
    returned_too = _index_of_output(more, found.attention)
    if (more is None) is not (returned_too is None):
        return None
    names = tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
    given = tuple(name for name in names if name != absent)
    passed = tuple(_passed(place, argument, given) for place, argument in enumerate(found.attention.arguments))
    norms = {source for _, source in passed if isinstance(source, int)}
    if len(norms) != 1 or any(source is _UNKNOWN for _, source in passed):
        return None
    (norm,) = norms

    def name_of(index: int | None) -> str | None:
        return None if index is None else formula.names[index]

    layer = PreNormLayer(
        norm=formula.names[norm],
        attention=formula.names[found.attention.module],
        mlp_norm=formula.names[found.mlp_norm],
        mlp=formula.names[found.mlp],
        parameters=names,
        defaults=tuple(each.default for each in parameters if each.default is not each.empty),
        passed=tuple((key, None if source == norm else source) for key, source in passed if source is not _MORE),
        takes_more=any(source is _MORE for _, source in passed),
        output=found.attention.output,
        dropouts=formula.dropouts,
        after_attention=name_of(found.attention.after),
        after_mlp=name_of(found.after_mlp),
        added_first=found.added_first,
        sums_in_place=found.sums_in_place,
        norms_first=found.added_first is not None and norm != found.mlp_norm < found.attention.module,
        returned_too=returned_too,
        absent=absent,
        settings=Settings.of(module),
    )
    return layer if _computes_that(module, layer) else None


class _Attention(NamedTuple):
    """A term of a layer's sum. Modules are given by their index in the formula."""

    module: int
    arguments: tuple[Any, ...]
    output: int | None
    after: int | None


class _Layer(NamedTuple):
    attention: _Attention
    mlp_norm: int
    mlp: int
    after_mlp: int | None
    added_first: frozenset[str] | None = None
    sums_in_place: bool = False


_X = ("input", 0)


def _attention(term: Any) -> _Attention | None:
    """The attention that a term is, with the module behind it, if there is one."""
    match term:
        case ("module", int(norm), ("getitem", ("module", int(module), *arguments), int(output))):
            return _Attention(module, tuple(arguments), output, norm)
        case ("getitem", ("module", int(module), *arguments), int(output)):
            return _Attention(module, tuple(arguments), output, None)
        case ("module", int(module), *arguments):
            return _Attention(module, tuple(arguments), None, None)
    return None


def _sum_and_more(tree: Any) -> tuple[Any, Any]:
    """What a layer computes, and the other half of the pair that it returns; None if it returns no pair."""
    match tree:
        case ("tuple", computed, more):
            return computed, more
    return tree, None


def _index_of_output(term: Any, attention: _Attention) -> int | None:
    """The index of the output of attention that ``term`` is, beside the one that is added; None if it is none."""
    match term:
        case ("getitem", ("module", attention.module, *_), int(output)) if attention.output is not None:
            return output
    return None


def _one_after_the_other(tree: Any) -> _Layer | None:
    """``h = x + attention``, and then ``h + mlp(mlp_norm(h))``, either with a module behind it. Sums are sorted."""
    after: int | None = None
    match tree:
        case ("add", ("add", *terms) as stream, ("module", int(mlp), ("module", int(mlp_norm), h))) if h == stream:
            pass
        case (
            "add",
            ("add", *terms) as stream,
            ("module", int(after), ("module", int(mlp), ("module", int(mlp_norm), h))),
        ) if h == stream:
            pass
        case _:
            return None
    others = [term for term in terms if term != _X]
    attention = _attention(others[0]) if len(others) == 1 else None
    return None if attention is None else _Layer(attention, mlp_norm, mlp, after)


def _side_by_side(tree: Any) -> _Layer | None:
    """``x + attention + mlp(mlp_norm(x))``, in any order."""
    in_place = False
    match tree:
        case ("add", ("add", *pair), last) | ("add", last, ("add", *pair)):
            terms = [*pair, last]
        case ("add", ("iadd", *pair), last) | ("add", last, ("iadd", *pair)) if _is_mlp(pair[0]):
            terms, in_place = [*pair, last], True
        case _:
            return None
    others = [term for term in terms if term != _X]
    mlps = [term for term in others if _is_mlp(term)]
    if len(others) != 2 or not mlps or (in_place and last != _X):
        return None
    mlp_term = max(mlps, key=lambda term: term[1])  # a term with a higher index runs later
    (attention_term,) = [term for term in others if term is not mlp_term]
    if in_place and pair[0] is not mlp_term:
        return None
    attention, (_, mlp, (_, mlp_norm, _)) = _attention(attention_term), mlp_term
    if attention is None or attention.after is not None or attention.module > mlp:
        return None
    kinds = {id(mlp_term): "mlp", id(attention_term): "attention"}
    added_first = frozenset(kinds.get(id(term), "stream") for term in pair)
    return _Layer(attention, mlp_norm, mlp, None, added_first, in_place)


def _is_mlp(term: Any) -> bool:
    match term:
        case ("module", int(), ("module", int(), x)):
            return x == _X
    return False


_UNKNOWN = object()
_MORE = "**"  # stands for a forward's ``**kwargs``


def _passed(place: int, argument: Any, names: tuple[str, ...]) -> tuple[int | str, Any]:
    """An argument's position or name, and its source: a parameter's name, a norm's index, ``_MORE`` or ``_UNKNOWN``."""
    key: int | str = place
    match argument:
        case ("keyword", str(key), argument):
            pass
    match argument:
        case ("input", int(index)):
            return key, names[index] if index < len(names) else _MORE if key == _MORE else _UNKNOWN
        case ("module", int(norm), ("input", 0)):
            return key, norm
    return key, _UNKNOWN


class LayerTracer(Tracer):
    """Traces forwards with any named arguments, also those inside of decorators, which fx itself refuses.

    absent: the name of one that is None.
    """

    takes_one_argument = False

    def __init__(self, absent: str | None) -> None:
        super().__init__()
        self._absent = absent

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        names = [_MORE if each.kind is each.VAR_KEYWORD else each.name for each in parameters]
        names = [name for name in names if name != self._absent]
        proxies = {name: self.create_proxy("placeholder", name.replace(_MORE, "more"), (), {}) for name in names}
        run = careful(root_fn)
        return lambda root: run(root, *list(proxies.values())[:1], **dict(list(proxies.items())[1:])), [self.root]


class _Outputs(NamedTuple):
    """What attention returns in a trial."""

    length: int
    added: int
    """The index of the one that the layer adds."""
    others_are_none: bool
    """Whether those behind it are None, as attention's weights are where it does not compute them."""


class _TrialPart(nn.Module):
    """Takes a submodule's place in a trial. It computes another function in each place, and notes how it is called."""

    def __init__(self, place: int, outputs: _Outputs | None):
        super().__init__()
        self._place, self._outputs = place, outputs
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, sorted(kwargs.items())))
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        y = torch.sin((self._place + 2) * x + self._place)
        if self._outputs is None:
            return y
        length, added, others_are_none = self._outputs
        behind = (None if others_are_none else y + index - added for index in range(added + 1, length))
        return (*(y + index - added for index in range(added)), y, *behind)


def _computes_that(module: nn.Module, layer: PreNormLayer) -> bool:
    """Whether the module's forward, with trial parts for its submodules, gives what ``layer`` says, bit for bit.

    The trial sees what a trace cannot: what forward does with what is None, which a proxy never is.
    """
    if layer.output is None:
        return _computes_that_of(module, layer, 1)
    # A forward that assigns attention's outputs to names takes as many as these, and the last ones may go unread.
    needed = 1 + max(layer.output, layer.returned_too or 0)
    return any(_computes_that_of(module, layer, count) for count in range(needed, needed + 3))


def _computes_that_of(module: nn.Module, layer: PreNormLayer, output_count: int) -> bool:
    """The same for an attention with so many outputs."""
    names = (layer.norm, layer.attention, layer.mlp_norm, layer.mlp, layer.after_attention, layer.after_mlp)
    with _disable_current_modes(), torch.no_grad():
        x = torch.linspace(-1, 1, 6, dtype=torch.float64, device="cpu").view(1, 2, 3)
        # With the arguments that must be given, and with all that may be; without what may be None, and with it.
        required = len(layer.parameters) - len(layer.defaults)
        for count, others_are_none in ((required, True), (len(layer.parameters), False)):
            kwargs: dict[str, Any] = {name: object() for name in layer.parameters[1:count] if name != layer.absent}
            if layer.takes_more:
                kwargs["something_else"] = object()
            added = None if layer.output is None else _Outputs(output_count, layer.output, others_are_none)
            outputs = {name: added if name == layer.attention else None for name in names if name is not None}
            ours, theirs = (
                {name: _TrialPart(place, output) for place, (name, output) in enumerate(outputs.items())} for _ in "ab"
            )
            x, attend = layer.split((x,), kwargs)
            attended, returned = attend(ours[layer.attention], ours[layer.norm](x))
            if layer.after_attention is not None:
                attended = ours[layer.after_attention](attended)
            h = x if layer.is_parallel else x + attended
            computed = ours[layer.mlp](ours[layer.mlp_norm](h))
            if layer.after_mlp is not None:
                computed = ours[layer.after_mlp](computed)
            expected = layer.sum(x, attended, computed) if layer.is_parallel else h + computed
            expected = expected if layer.returned_too is None else (expected, returned)
            copy = copy_without_policy(module, module.training)
            copy.__dict__["_modules"] = vars(copy)["_modules"] | theirs
            try:
                found = careful(base_of(module).forward)(copy, x, **kwargs)
            except Exception:
                # Any module's forward comes here, and may raise anything with trial parts. Then it is not recognized.
                return False
            if not _are_same((found, theirs[layer.attention].calls), (expected, ours[layer.attention].calls)):
                return False
    return True


def _are_same(values: Any, others: Any) -> bool:
    """Whether these are the same objects, or equal tensors, in the same containers."""
    (leaves, spec), (other_leaves, other_spec) = tree_flatten(values), tree_flatten(others)
    return spec == other_spec and all(
        torch.equal(each, other) if isinstance(each, Tensor) and isinstance(other, Tensor) else each is other
        for each, other in zip(leaves, other_leaves, strict=True)
    )
