"""Pre-norm decoder layers: ``h = x + attention(norm(x))``, then ``h + mlp(mlp_norm(h))``.

A layer is recognized by its formula, and then by a trial in which stand-ins take the places of its four submodules.

Attention runs its own code. It is given a ``LazyNorm``, so that ``kernels.norm_linears`` computes the norm and the
Linears that read it together. After attention ``kernels.residual_mlp`` computes the sum, the second norm and the MLP.
If the MLP is not a gated one, ``kernels.add_rms_norm`` computes the sum and the norm.

That is for RMSNorms. In the place of LayerNorms ``kernels.add_layer_norm`` computes the norm with the sum in front, and
in backward adds the gradient of the residual stream in the same pass. Such a layer is taken as a whole only if its MLP
has a kernel of its own: of another MLP all would be held that autograd saves, where a tape of the layer drops the
activation. Then the LayerNorms alone have kernels, on that tape.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from recompute.compiled.captured_region import CaptureCache, CapturedRegion, StandIn
from recompute.compiled.runner import Forward, Runner
from recompute.engine.checkpoint.module_state import base_of
from recompute.engine.cut.op_policy import kernel_op_policy
from recompute.engine.recipe_book import open_book
from recompute.engine.saved_tensors import RegionStatistics, is_inside_checkpoint
from recompute.engine.scopes import BypassScope
from recompute.engine.tape.recorder import TapeRegion
from recompute.substitution.feed_forward import KernelMLP, find_kernel_mlp, how_it_holds
from recompute.substitution.kernel_runner import KernelRunner, is_hooked
from recompute.substitution.layer_fusion import FUSION
from recompute.substitution.module_formula import Tracer, copy_without_policy, drops_nothing, formula_of
from recompute.substitution.norm import (
    KernelLayerNorm,
    KernelNorm,
    KernelRMSNorm,
    LazyNorm,
    LearnedLinears,
    LinearOperands,
    Operands,
    find_norm,
)

_NOTHING = nullcontext()


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

    def parts(self, module: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The norms and the MLP, which kernels may compute."""
        norm, mlp_norm, mlp = (module._modules[name] for name in (self.norm, self.mlp_norm, self.mlp))
        return norm, mlp_norm, mlp  # type: ignore[return-value]

    def is_as_found(self, module: nn.Module) -> bool:
        return all([drops_nothing(getattr(module, name)) for name in self.dropouts])

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Callable[[nn.Module, Tensor], Tensor]]:
        """Split forward's arguments: x, and a function that calls attention with the norm's output and the others."""
        given = dict(zip(self.parameters[len(self.parameters) - len(self.defaults) :], self.defaults, strict=True))
        given |= zip(self.parameters, args, strict=False)
        given |= kwargs

        def call(attention: nn.Module, normed: Tensor) -> Tensor:
            values = [(key, normed if name is None else given[name]) for key, name in self.passed]
            positional = [value for key, value in values if isinstance(key, int)]
            named = {key: value for key, value in values if isinstance(key, str)}
            if self.takes_more:
                named |= {key: value for key, value in kwargs.items() if key not in self.parameters}
            result = attention(*positional, **named)
            return result if self.output is None else result[self.output]

        return given[self.parameters[0]], call


def find_pre_norm_layer(module: nn.Module) -> PreNormLayer | None:
    """The pre-norm layer that ``module`` computes, if that is all it does; else None."""
    parameters = list(inspect.signature(base_of(module).forward).parameters.values())[1:]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return None
    formula = formula_of(module, _LayerTracer)
    match None if formula is None else formula.tree:  # in which the operands of a sum are sorted
        case ("add", stream, ("module", int(mlp), ("module", int(mlp_norm), again))) if stream == again:
            pass
        case _:
            return None
    output: int | None = None
    match stream:
        case ("add", ("input", 0), ("module", int(attention), *arguments)):
            pass
        case ("add", ("getitem", ("module", int(attention), *arguments), int(output)), ("input", 0)):
            pass
        case _:
            return None
    names = tuple(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
    passed = tuple(_passed(place, argument, names) for place, argument in enumerate(arguments))
    norms = {source for _, source in passed if isinstance(source, int)}
    if formula is None or len(norms) != 1 or any(source is _UNKNOWN for _, source in passed):
        return None
    (norm,) = norms
    layer = PreNormLayer(
        norm=formula.names[norm],
        attention=formula.names[attention],
        mlp_norm=formula.names[mlp_norm],
        mlp=formula.names[mlp],
        parameters=names,
        defaults=tuple(each.default for each in parameters if each.default is not each.empty),
        passed=tuple((key, None if source == norm else source) for key, source in passed if source is not _MORE),
        takes_more=any(source is _MORE for _, source in passed),
        output=output,
        dropouts=formula.dropouts,
    )
    return layer if _computes_that(module, layer) else None


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


class _LayerTracer(Tracer):
    """Traces forwards with any named arguments, also those inside of decorators, which fx itself refuses."""

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        names = [_MORE if each.kind is each.VAR_KEYWORD else each.name for each in parameters]
        proxies = {name: self.create_proxy("placeholder", name.replace(_MORE, "more"), (), {}) for name in names}
        return lambda root: root_fn(root, *list(proxies.values())[:1], **dict(list(proxies.items())[1:])), [self.root]


class _TrialPart(nn.Module):
    """Takes a submodule's place in a trial. It computes another function in each place, and notes how it is called."""

    def __init__(self, place: int, output: int | None):
        super().__init__()
        self._place, self._output = place, output
        self.calls: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, sorted(kwargs.items())))
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        y = torch.sin((self._place + 2) * x + self._place)
        return y if self._output is None else (*(y + 1 for _ in range(self._output)), y, None)


def _computes_that(module: nn.Module, layer: PreNormLayer) -> bool:
    """Whether the module's forward, with trial parts for its submodules, gives what ``layer`` says, bit for bit.

    The trial sees what a trace cannot: what forward does with an argument that is None, which a proxy never is.
    """
    outputs = {layer.norm: None, layer.attention: layer.output, layer.mlp_norm: None, layer.mlp: None}
    with _disable_current_modes(), torch.no_grad():
        x = torch.linspace(-1, 1, 6, dtype=torch.float64, device="cpu").view(1, 2, 3)
        # With the arguments that must be given, and with all that may be.
        for count in (len(layer.parameters) - len(layer.defaults), len(layer.parameters)):
            kwargs: dict[str, Any] = {name: object() for name in layer.parameters[1:count]}
            if layer.takes_more:
                kwargs["something_else"] = object()
            ours, theirs = (
                {name: _TrialPart(place, output) for place, (name, output) in enumerate(outputs.items())} for _ in "ab"
            )
            x, attend = layer.split((x,), kwargs)
            h = x + attend(ours[layer.attention], ours[layer.norm](x))
            expected = h + ours[layer.mlp](ours[layer.mlp_norm](h))
            copy = copy_without_policy(module, module.training)
            copy.__dict__["_modules"] = vars(copy)["_modules"] | theirs
            try:
                found = base_of(module).forward(copy, x, **kwargs)
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


@dataclass
class KernelLayerRunner(KernelRunner):
    layer: PreNormLayer
    norms: tuple[KernelNorm, KernelNorm]
    mlp: KernelMLP | None
    parts: tuple[weakref.ref[nn.Module], ...]
    """The norms and the MLP that were recognized."""
    stands_in_for_parts = True
    fusion = FUSION
    _linears: LearnedLinears = field(default_factory=LearnedLinears, init=False)
    _may_drop: bool = field(default=True, init=False)
    """Whether the last run recorded anything that the scope around could drop. The first run assumes that it does."""

    @classmethod
    def for_module(
        cls, statistics: RegionStatistics, fallback: Runner | None, module: nn.Module
    ) -> KernelLayerRunner | None:
        """The runner of ``module``, if it is a pre-norm layer whose norms the kernels compute."""
        layer = find_pre_norm_layer(module)
        if layer is None:
            return None
        parts = layer.parts(module)
        norm, mlp_norm = map(find_norm, parts[:2])
        if norm is None or mlp_norm is None:
            return None
        mlp = find_kernel_mlp(parts[2])
        if mlp is None and isinstance(mlp_norm, KernelLayerNorm):
            return None
        return cls(statistics, fallback, layer, (norm, mlp_norm), mlp, tuple(map(weakref.ref, parts)))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kinds = tuple([base_of(part) for reference in self.parts if (part := reference()) is not None])

    def capture(self, cache: CaptureCache) -> None:
        tape = TapeRegion(self.statistics, kernel_op_policy(), cache.plan_cache)
        stand_in = StandIn(self._run_forward, FUSION, is_taped=False)
        self.region = CapturedRegion(tape, cache, stand_in=stand_in)

    def _run_forward(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return self.run_kernel(forward.__self__, forward, args, kwargs)  # type: ignore[attr-defined]

    @property
    def wants_tape(self) -> bool:  # type: ignore[override]
        """Attention runs its own code here, as with one Linear for q, k and v, of which a tape drops what rope gives.

        Layers with LayerNorms and gated MLPs, such as OLMo's, have none of that.
        """
        return isinstance(self.norms[1], KernelLayerNorm) and self.mlp is not None and not self.mlp.is_gated

    @property
    def variant(self) -> Hashable:
        return self._linears.count

    def _what(self) -> str:
        first = "norm_linears" if isinstance(self.norms[0], KernelRMSNorm) else "add_layer_norm"
        if self.mlp is None:
            return f"{first}, add_rms_norm"
        if isinstance(self.norms[1], KernelLayerNorm):
            second = "add_layer_norm"
        else:
            second = f"residual_mlp{how_it_holds(self, self.mlp)}" if self.mlp.is_gated else "add_rms_norm"
        return ", ".join(dict.fromkeys((first, second)))

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        book = open_book()
        if book is None:
            return self._run(module, forward, args, kwargs)
        before = book.entered
        is_given = isinstance(args[0] if args else None, Tensor) and book.knows(args[0])
        with _NOTHING if self._may_drop or is_given or not args else BypassScope():
            result = self._run(module, forward, args, kwargs)
        self._may_drop = book.entered > before
        return result

    def _run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        x, attend = self.layer.split(args, kwargs)
        operands = self._operands(module, x)
        if operands is None:
            return forward(*args, **kwargs)
        norm, attention = self.norms[0], _child(module, self.layer.attention)
        if isinstance(norm, KernelLayerNorm):
            y, stream = self._normed_and_stream(norm, x, operands[0])
            attended = attend(attention, y)
        else:
            # A checkpoint runs this twice, and both runs must save the same tensors: so neither uses what was learned.
            linears = LearnedLinears() if is_inside_checkpoint() else self._linears
            normed = self._normed(norm, x, operands[0], linears)
            attended = attend(attention, normed)
            linears.learn(normed)
            stream = normed.stream
        return self._after_attention(_child(module, self.layer.mlp), attended, stream, operands[1])

    def _normed_and_stream(self, norm: KernelLayerNorm, x: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
        """The first norm's output, and x for the residual sum, whose gradient the norm's backward adds to its own."""

        def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
            return norm.add(x, None, *operands)

        def as_written(x: Tensor) -> tuple[Tensor, Tensor]:
            return self._as_written(0)(x), x

        return self.compute(("stream", self._kinds[0]), (x,), operands, kernel, as_written, is_frame=False)

    def _normed(self, norm: KernelRMSNorm, x: Tensor, operands: Operands, linears: LearnedLinears) -> LazyNorm:
        """The first norm's output, as a lazy tensor for attention."""
        from recompute.kernels.norm_linears import norm_linears

        (weight,), kind = operands, self._kinds[:1]

        def normalized() -> Tensor:
            def kernel(x: Tensor) -> Tensor:
                return norm.compute(x, weight)

            return self.compute(kind, (x,), [weight], kernel, self._as_written(0), is_frame=False)

        def together(x: Tensor, linears: list[LinearOperands]) -> tuple[tuple[Tensor, ...], Tensor]:
            weights, biases = zip(*linears, strict=True)

            def kernel(x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
                return norm_linears(x, weight, weights, biases, norm.eps, norm.casting)

            def as_written(x: Tensor) -> list[Tensor]:
                y = self._as_written(0)(x)
                return [F.linear(y, *operands) for operands in linears]

            read = [weight, *weights, *biases]
            return self.compute((*kind, len(weights)), (x,), read, kernel, as_written, is_frame=False)

        return LazyNorm.of(x, weight, normalized, linears, together)

    def _after_attention(self, mlp: nn.Module, attended: Tensor, stream: Tensor, operands: Operands) -> Tensor:
        """The residual sum, the second norm and the MLP."""
        from recompute.kernels.residual_mlp import residual_mlp

        norm, inputs = self.norms[1], (attended, stream)

        def sum_and_norm(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
            h = x + stream
            return self._as_written(1)(h), h

        if (
            isinstance(norm, KernelLayerNorm)
            or self.mlp is None
            or not self.mlp.is_gated
            or is_hooked(mlp)
            or (mlp_operands := self.mlp.operands(mlp)) is None
        ):

            def sum_kernel(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
                return norm.add(x, stream, *operands)

            y, h = self.compute(("sum", self._kinds[1]), inputs, operands, sum_kernel, sum_and_norm)
            return h + mlp(y)
        (weight,), (weights, biases), activation = operands, mlp_operands, self.mlp.activation
        gate, up, down = weights

        def kernel(x: Tensor, stream: Tensor) -> Tensor:
            settings: dict[str, Any] = {**biases, "compress": self.compresses, "tile": self.tile}
            return residual_mlp(x, stream, weight, gate, up, down, norm.eps, norm.casting, activation, **settings)

        def as_written(x: Tensor, stream: Tensor) -> Tensor:
            y, h = sum_and_norm(x, stream)
            return h + self._as_written(2)(y)

        kind = "sum", *self._kinds[1:], activation, self.compresses, self.tile
        read = [weight, *weights, *biases.values()]
        return self.compute(kind, inputs, read, kernel, as_written)

    def _as_written(self, part: int) -> Callable[[Tensor], Tensor]:
        """The forward that the class of the first norm (0), the second norm (1) or the MLP (2) has."""
        module = self.parts[part]()
        assert module is not None, "it has just been looked at"
        return MethodType(base_of(module).forward, module)

    def _operands(self, module: nn.Module, x: Tensor) -> tuple[Operands, Operands] | None:
        """What the norms' kernels read beside x; None where the layer has to run its own code."""
        if torch.compiler.is_compiling() or not self.layer.is_as_found(module):
            return None
        parts = self.layer.parts(module)
        if any(part() is not found for part, found in zip(self.parts, parts, strict=True)):
            return None
        found = []
        for part, norm in zip(parts, self.norms, strict=False):
            operands = norm.operands(part, x)
            if operands is None or is_hooked(part) or (isinstance(norm, KernelLayerNorm) and norm.casts(x)):
                return None
            if any(each is not None and each.dtype is not x.dtype for each in operands):
                return None
            found.append(operands)
        return found[0], found[1]


def _child(module: nn.Module, name: str) -> nn.Module:
    return module._modules[name]  # type: ignore[return-value]
