"""Runners by which kernels stand in for what a module computes, and what finds the one that fits."""

from __future__ import annotations

import inspect
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from recompute.deferred import Activated, Linears, Logits, LossObserver, Normed, Operands
from recompute.engine.context import base_of
from recompute.engine.recipe import is_fake, local, open_book
from recompute.engine.region import is_recording
from recompute.engine.saved import Owner, PassingBy, is_under_a_checkpoint
from recompute.engine.sharded import has_layout
from recompute.errors import warn
from recompute.lowering import Lowering, is_lowered
from recompute.recognize import (
    GatedMLP,
    Norm,
    PreNormLayer,
    find_activation,
    find_gated_mlp,
    find_norm,
    find_pre_norm_layer,
)
from recompute.rotary import Rotary, find_rotary
from recompute.runners import Forward, PlainRunner, Runner, is_active

_NOTHING = nullcontext()


@dataclass
class KernelRunner(ABC):
    """A kernel stands in, also without gradients: training and inference then compute the same function."""

    owner: Owner
    fallback: Runner | None
    """Runs instead where the input is not on CUDA; None: the kernel's reference does."""
    note: str = field(init=False)
    lowering: Lowering | None = field(default=None, init=False)
    """The rule in compiled code, where no runner around this has it."""
    stands_in_for_parts = False
    """Whether kernels may stand in for modules inside, too."""

    @property
    def variant(self) -> Hashable:
        """Differs from the last run's where this is going to run other ops."""
        return None

    def __post_init__(self) -> None:
        self.note = f"kernel: {self._what()}"
        if self.fallback is not None:
            self.note += f" on CUDA, else {self.fallback.note}"

    @abstractmethod
    def _what(self) -> str:
        """Which kernels."""

    @abstractmethod
    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """``forward(*args, **kwargs)`` by the kernels, or plainly where they do not fit."""

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if _is_transformed():
            return forward(*args, **kwargs)
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and any(
            isinstance(value, Tensor) and has_layout(value) for value in (*args, *kwargs.values())
        ):
            return self._run_on_parts(module, forward, args, kwargs)
        if self.fallback is None or self.is_where_kernels_are(args, kwargs):
            if self.lowering is not None and is_lowered(module):
                return self.lowering.run(self.run_kernel, (module, forward, args, kwargs), {})
            return self.run_kernel(module, forward, args, kwargs)
        return self.fallback.run(module, forward, args, kwargs)

    def _run_on_parts(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """On DTensors, whose layout over the ranks no kernel knows: as without kernels."""
        if self.fallback is not None:
            return self.fallback.run(module, forward, args, kwargs)
        name = re.sub("[0-9]+", "*", self.owner.name)  # one warning for all layers
        warn(f"{name} is given DTensors, which no kernel takes: it runs as it is written.")
        return forward(*args, **kwargs)

    def is_where_kernels_are(self, args: tuple, kwargs: dict) -> bool:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        return first is not None and (first.is_cuda or local.imagines_cuda)


@dataclass
class KernelNormRunner(KernelRunner):
    norm: Norm

    def _what(self) -> str:
        return f"rms_norm ({self.norm.casting} casting)"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.rms_norm import rms_norm

        x = _only_argument(args, kwargs)
        weight = self.norm.weight_of(module)
        if weight is not None and weight.shape != x.shape[-1:]:
            return forward(*args, **kwargs)  # broadcast, which the kernel does not do
        with _Owned(self.owner):
            return rms_norm(x, weight, self.norm.eps, self.norm.casting)


@dataclass
class KernelMLPRunner(KernelRunner):
    """As long as the parts are what they were and have no hooks."""

    mlp: MLP

    def _what(self) -> str:
        return f"gated_mlp ({self.mlp.activation})"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.gated_mlp import gated_mlp

        if (linears := self.mlp.linears(module)) is None:
            return forward(*args, **kwargs)  # an adapter or a hook has come since the policy was applied
        x = _only_argument(args, kwargs)
        gate, up, down = linears
        with _Owned(self.owner):
            return gated_mlp(
                x,
                gate.weight,
                None if up is None else up.weight,
                down.weight,
                self.mlp.activation,
                gate_bias=gate.bias,
                up_bias=None if up is None else up.bias,
                down_bias=down.bias,
            )


@dataclass(frozen=True)
class MLP:
    """A gated MLP, and what its activation was when it was recognized."""

    parts: GatedMLP
    activation: str
    module: nn.Module
    """The activation's."""

    def linears(self, mlp: nn.Module) -> tuple[nn.Linear, nn.Linear | None, nn.Linear] | None:
        """Gate, up and down; None where they, or the activation, are not what they were, or have hooks."""
        parts = self.parts
        modules = mlp._modules
        gate, up, down = modules[parts.gate], modules[parts.up] if parts.up else None, modules[parts.down]
        if modules[parts.activation] is not self.module or _is_hooked(self.module):
            return None
        is_plain = is_plain_linear(gate) and (up is None or is_plain_linear(up)) and is_plain_linear(down)
        return (gate, up, down) if is_plain else None  # type: ignore[return-value]


@dataclass
class KernelLayerRunner(KernelRunner):
    """A decoder layer's norms, residual sums and MLP; attention is the module's own.

    What attention is given is deferred: the Linears that read it become part of the norm's node.
    """

    layer: PreNormLayer
    norms: tuple[Norm, Norm]
    mlp: MLP | None
    parts: tuple[weakref.ref[nn.Module], ...]
    """The norms and the MLP that were looked at."""
    stands_in_for_parts = True
    _linears: Linears = field(default_factory=Linears, init=False)
    _records: bool = field(default=True, init=False)
    """Whether anything inside can be dropped by the scope around: not known before the first run."""

    @property
    def variant(self) -> Hashable:
        return self._linears.count

    def _what(self) -> str:
        return "norm_linears, " + ("add_rms_norm" if self.mlp is None else "residual_mlp")

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        book = open_book()
        if book is None:
            return self._run(module, forward, args, kwargs)
        before = book.entered
        is_given = isinstance(args[0] if args else None, Tensor) and book.knows(args[0])
        with _NOTHING if self._records or is_given or not args else PassingBy():
            result = self._run(module, forward, args, kwargs)
        self._records = book.entered > before
        return result

    def _run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.add_rms_norm import add_rms_norm
        from recompute.kernels.norm_linears import norm_linears
        from recompute.kernels.residual_mlp import residual_mlp
        from recompute.kernels.rms_norm import rms_norm

        x, attend = self.layer.split(args, kwargs)
        weights = self._weights(module, x)
        if weights is None:
            return forward(*args, **kwargs)
        (norm, mlp_norm), (weight, mlp_weight) = self.norms, weights

        def normalized() -> Tensor:
            with _Owned(self.owner):
                return rms_norm(x, weight, norm.eps, norm.casting)

        def together(x: Tensor, linears: list[Operands]) -> tuple[tuple[Tensor, ...], Tensor]:
            each, biases = zip(*linears, strict=True)
            return norm_linears(x, weight, each, biases, norm.eps, norm.casting)

        # What is run again must save what it saved: there nothing is learned in between.
        linears_known = Linears() if is_under_a_checkpoint() else self._linears
        normed = Normed.of(x, weight, normalized, linears_known, together)
        attended = attend(_child(module, self.layer.attention), normed)
        linears_known.learn(normed)
        mlp = _child(module, self.layer.mlp)
        with _Owned(self.owner):
            if self.mlp is not None and not _is_hooked(mlp) and (linears := self.mlp.linears(mlp)) is not None:
                gate, up, down = linears
                return residual_mlp(
                    attended,
                    normed.stream,
                    mlp_weight,
                    gate.weight,
                    None if up is None else up.weight,
                    down.weight,
                    mlp_norm.eps,
                    mlp_norm.casting,
                    self.mlp.activation,
                    gate_bias=gate.bias,
                    up_bias=None if up is None else up.bias,
                    down_bias=down.bias,
                )
            y, h = add_rms_norm(attended, normed.stream, mlp_weight, mlp_norm.eps, mlp_norm.casting)
        return h + mlp(y)

    def _weights(self, module: nn.Module, x: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
        """The norms' weights; None where the layer has to run as it is."""
        if torch.compiler.is_compiling() or not self.layer.is_as_found(module):
            return None
        parts = self.layer.computed(module)
        if any(part() is not found for part, found in zip(self.parts, parts, strict=True)):
            return None
        weights = []
        for part, norm in zip(parts, self.norms, strict=False):
            weight = norm.weight_of(part)
            if _is_hooked(part) or (weight is not None and (weight.shape, weight.dtype) != (x.shape[-1:], x.dtype)):
                return None
            weights.append(weight)
        return weights[0], weights[1]


@dataclass
class KernelRotaryRunner(KernelRunner):
    """Attention, which runs its own forward, with another function in the place of the one that rotates."""

    rotary: Rotary
    stands_in_for_parts = True

    def _what(self) -> str:
        return f"rope, as {self.rotary.name}"

    def is_where_kernels_are(self, args: tuple, kwargs: dict) -> bool:
        return True  # the function asks where its queries are

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return self.rotary.bind(module, forward)(*args, **kwargs)


@dataclass
class KernelActivationRunner(KernelRunner):
    """Of stacked experts: what is multiplied with the activation becomes a gated linear unit."""

    activation: str

    def _what(self) -> str:
        return f"{self.activation}, fused with the product behind it"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.swiglu import geglu, swiglu

        gate = _only_argument(args, kwargs)
        if not is_active(module) or torch.compiler.is_compiling():  # whose code fuses what it can
            return forward(*args, **kwargs)
        owner, activation = self.owner, self.activation

        def product(gate: Tensor, up: Tensor) -> Tensor:
            with _Owned(owner):
                return swiglu(gate, up) if activation == "silu" else geglu(gate, up, _APPROXIMATE[activation])

        return Activated.of(gate, lambda: forward(*args, **kwargs), product)


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


@dataclass
class KernelHeadRunner(KernelRunner):
    """A Linear whose output goes to a cross-entropy, in training: the loss is computed without it."""

    observe: LossObserver | None = field(default=None, init=False)

    def _what(self) -> str:
        return "linear_cross_entropy (if nothing else reads the logits)"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.linears import autocast

        if is_lowered(module):
            _warn_of_logits(self.owner.name)
            return forward(*args, **kwargs)
        if not is_active(module) or (is_fake() and not local.imagines_cuda) or not is_plain_linear(module):
            return forward(*args, **kwargs)
        self.owner.frames += 1
        assert isinstance(module, nn.Linear)
        x = _only_argument(args, kwargs)
        given: dict[str, Tensor | None] = {"hidden": x, "weight": module.weight, "bias": module.bias}
        # Cast here and now: whoever asks for values later may do so under another autocast, or none.
        hidden, weight, bias = autocast("linear_cross_entropy", {}, given, x.device.type)
        return Logits.of(hidden, weight, bias, self.observe)  # type: ignore[arg-type]  # the first two are tensors


def _warn_of_logits(name: str) -> None:
    warn(
        f"{name} is compiled: logits are made, and held for backward, though its rule has a kernel compute the loss "
        "without them. Compile the layers alone (`layer.compile()` for each), so that head and loss run as they are; "
        "or give the head no rule, or `action: keep`."
    )


# As torch._dynamo.assume_constant_result does, which would load the compiler: it is called when code is compiled.
_warn_of_logits._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_transformed() -> bool:
    """Whether a transform is at work that our functions do not know."""
    if torch.compiler.is_compiling():  # to which there is always an interpreter (torch 2.11 and 2.13)
        return forward_ad._current_level >= 0
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class _Owned:
    """Recipes recorded inside are counted for ``owner``."""

    __slots__ = ("_outer", "_owner")

    def __init__(self, owner: Owner):
        self._owner = owner

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():  # which records nothing
            self._outer, local.owner = local.owner, self._owner
            self._owner.frames += is_recording()

    def __exit__(self, *error: object) -> None:
        if not torch.compiler.is_compiling():
            local.owner = self._outer


def kernel_of(runner: Runner | None) -> KernelRunner | None:
    """The runner of kernels that a runner is, or has inside."""
    while runner is not None and not isinstance(runner, KernelRunner):
        runner = getattr(runner, "inner", None)
    return runner


def find_kernel(owner: Owner, module: nn.Module, fallback: Runner | None, *, is_named: bool) -> KernelRunner | None:
    """The runner of the kernels that compute what ``module`` does, if there are any.

    is_named: whether a rule names this very module, and not one around it.
    """
    if is_named and is_plain_linear(module):
        return KernelHeadRunner(owner, fallback and PlainRunner(owner, "it runs as it is"))
    if (mlp := _find_mlp(module)) is not None:
        return _checked(KernelMLPRunner(owner, fallback, mlp), module, (mlp.parts, mlp.activation))
    if not any(module.children()):
        norm = find_norm(module)
        return None if norm is None else _checked(KernelNormRunner(owner, fallback, norm), module, norm)
    if (layer := find_pre_norm_layer(module)) is not None:
        parts = layer.computed(module)
        norm, mlp_norm = map(find_norm, parts[:2])
        if norm is not None and mlp_norm is not None:
            references = tuple(map(weakref.ref, parts))
            return KernelLayerRunner(owner, fallback, layer, (norm, mlp_norm), _find_mlp(parts[2]), references)
    rotary = find_rotary(module, on_cuda_only=fallback is not None)
    return None if rotary is None else KernelRotaryRunner(owner, fallback, rotary)


_agree: dict[Any, bool] = {}


def _checked(runner: KernelRunner, module: nn.Module, found: Any) -> KernelRunner | None:
    """``runner``, if its kernel gives what ``module`` gives, up to rounding: compared once for all that are alike."""
    parameters = list(module.parameters())
    if not parameters or not all(type(each) is nn.Parameter and each.untyped_storage().nbytes() for each in parameters):
        return runner  # there are no values to compare with: fake, or sharded
    first = parameters[0]
    if first.is_meta or (isinstance(runner, KernelNormRunner) and first.dim() != 1):
        return runner
    key = (base_of(module), found, *((each.shape, each.dtype, each.device.type) for each in parameters))
    if key not in _agree:
        width = first.shape[-1]
        x = torch.linspace(-3, 3, 6 * width, device=first.device, dtype=first.dtype).view(6, width)
        forward = MethodType(base_of(module).forward, module)
        (name,) = inspect.signature(forward).parameters
        with torch.no_grad():
            expected, kernels = forward(**{name: x}), runner.run_kernel(module, forward, (), {name: x})
        tolerance = torch.finfo(first.dtype).eps ** 0.5
        is_other = (kernels - expected).double().norm() > tolerance * expected.double().norm()
        _agree[key] = kernels.shape == expected.shape and not is_other
    return runner if _agree[key] else None


def find_inner_kernel(
    owner: Owner, module: nn.Module, parent: nn.Module, fallback: Runner | None
) -> KernelRunner | None:
    """As ``find_kernel``, for what is inside of a module that a rule names."""
    is_stack_of_experts = any(parameter.dim() == 3 for parameter in parent.parameters(recurse=False))
    if is_stack_of_experts and (activation := find_activation(module)) is not None:
        return KernelActivationRunner(owner, fallback, activation)
    return find_kernel(owner, module, fallback, is_named=False)


def _find_mlp(module: nn.Module) -> MLP | None:
    children = module._modules.values()
    if not 3 <= len(children) <= 6 or any(child is None or any(child.children()) for child in children):
        return None
    parts = find_gated_mlp(module)
    if parts is None:
        return None
    activation = module._modules[parts.activation]
    name = None if activation is None or _is_hooked(activation) else find_activation(activation)
    if activation is None or name is None:
        return None
    mlp = MLP(parts, name, activation)
    return None if mlp.linears(module) is None else mlp


def is_plain_linear(module: nn.Module | None) -> bool:
    return module is not None and base_of(module) is nn.Linear and not _is_hooked(module)


def _child(module: nn.Module, name: str) -> nn.Module:
    return module._modules[name]  # type: ignore[return-value]


def _is_hooked(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than its class's forward does."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def _only_argument(args: tuple, kwargs: dict) -> Tensor:
    (x,) = (*args, *kwargs.values())
    return x
