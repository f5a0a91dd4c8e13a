"""Runners by which kernels stand in for what a module computes."""

from __future__ import annotations

import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from recompute.compiled.runner import Forward, Runner, is_active
from recompute.compiled.under_torch_compile import CompiledRegion, is_compiling_training
from recompute.engine.checkpoint.module_state import base_of
from recompute.engine.dtensors import has_layout
from recompute.engine.recipes import is_fake, local, open_book
from recompute.engine.saved_tensors import RegionStatistics, is_inside_checkpoint
from recompute.engine.scopes import BypassScope
from recompute.errors import warn
from recompute.substitution.accounts import Accounts, Held
from recompute.substitution.lazy_tensors import Activated, Linears, Logits, LossObserver, Normed, Operands
from recompute.substitution.recognize import GatedMLP, Norm, PreNormLayer
from recompute.substitution.rotary import Rotary

_NOTHING = nullcontext()


@dataclass
class KernelRunner(Runner, ABC):
    """A kernel stands in, also without gradients: training and inference then compute the same function."""

    statistics: RegionStatistics
    fallback: Runner | None
    """Runs instead where the input is not on CUDA; None: the kernel's reference does."""
    note: str = field(init=False)
    accounts: Accounts = field(init=False)
    """Counts what the kernels hold for backward."""
    compiled_region: CompiledRegion | None = field(default=None, init=False)
    """The rule in compiled code, where no runner around this has it."""
    stands_in_for_parts = False
    """Whether kernels may stand in for modules inside, too."""

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.statistics)
        self.note = f"kernel: {self._what()}"
        if self.fallback is not None:
            self.note += f" on CUDA, else {self.fallback.note}"

    @abstractmethod
    def _what(self) -> str:
        """Which kernels."""

    @abstractmethod
    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """``forward(*args, **kwargs)`` by the kernels, or plainly where they do not fit."""

    def run(self, module: Any, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if _is_transformed():
            return forward(*args, **kwargs)
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and any(
            isinstance(value, Tensor) and has_layout(value) for value in (*args, *kwargs.values())
        ):
            return self._run_on_parts(module, forward, args, kwargs)
        if self.fallback is None or self.is_where_kernels_are(args, kwargs):
            if self.compiled_region is not None and is_compiling_training(module):
                return self.compiled_region.run(self.run_kernel, (module, forward, args, kwargs), {})
            if not is_compiling:
                self.statistics.dropped_outputs = []
            return self.run_kernel(module, forward, args, kwargs)
        return self.fallback.run(module, forward, args, kwargs)

    run_training = run_compiled = run_plain = run

    def _run_on_parts(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """On DTensors, whose layout over the ranks no kernel knows: as without kernels."""
        if self.fallback is not None:
            return self.fallback.run(module, forward, args, kwargs)
        name = re.sub("[0-9]+", "*", self.statistics.name)  # one warning for all layers
        warn(f"{name} is given DTensors, which no kernel takes: it runs as it is written.")
        return forward(*args, **kwargs)

    def is_where_kernels_are(self, args: tuple, kwargs: dict) -> bool:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        return first is not None and (first.is_cuda or local.simulates_cuda)


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
        eps, casting = self.norm.eps, self.norm.casting
        self.accounts.add((base_of(module),), x, [weight], lambda x: rms_norm(x, weight, eps, casting), forward)
        with _CreditedTo(self.statistics):
            return rms_norm(x, weight, eps, casting)


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
        activation = self.mlp.activation
        weights, biases = operands_of(linears)

        def run(x: Tensor) -> Tensor:
            return gated_mlp(x, *weights, activation, **biases)

        self.accounts.add((base_of(module), activation), x, [*weights, *biases.values()], run, forward)
        with _CreditedTo(self.statistics):
            return run(x)


MLPLinears = tuple[nn.Linear, nn.Linear | None, nn.Linear]
"""Gate, up and down; one that is packed has no up."""


@dataclass(frozen=True)
class MLP:
    """A gated MLP, and what its activation was when it was recognized."""

    parts: GatedMLP
    activation: str
    module: nn.Module
    """The activation's."""

    def linears(self, mlp: nn.Module) -> MLPLinears | None:
        """Gate, up and down; None where they, or the activation, are not what they were, or have hooks."""
        parts = self.parts
        modules = mlp._modules
        gate, up, down = modules[parts.gate], modules[parts.up] if parts.up else None, modules[parts.down]
        if modules[parts.activation] is not self.module or is_hooked(self.module):
            return None
        is_plain = is_plain_linear(gate) and (up is None or is_plain_linear(up)) and is_plain_linear(down)
        return (gate, up, down) if is_plain else None  # type: ignore[return-value]


def operands_of(linears: MLPLinears) -> tuple[tuple[Tensor, Tensor | None, Tensor], dict[str, Any]]:
    """The weights and, by what the kernels call them, the biases."""
    gate, up, down = linears
    weights = gate.weight, None if up is None else up.weight, down.weight
    return weights, {"gate_bias": gate.bias, "up_bias": None if up is None else up.bias, "down_bias": down.bias}


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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kinds = tuple([base_of(part) for reference in self.parts if (part := reference()) is not None])

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
        with _NOTHING if self._records or is_given or not args else BypassScope():
            result = self._run(module, forward, args, kwargs)
        self._records = book.entered > before
        return result

    def _run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        x, attend = self.layer.split(args, kwargs)
        weights = self._weights(module, x)
        if weights is None:
            return forward(*args, **kwargs)
        weight, mlp_weight = weights
        # What is run again must save what it saved: there nothing is learned in between.
        linears = Linears() if is_inside_checkpoint() else self._linears
        normed = self._normed(x, weight, linears)
        attended = attend(_child(module, self.layer.attention), normed)
        linears.learn(normed)
        return self._after_attention(_child(module, self.layer.mlp), attended, normed.stream, mlp_weight)

    def _normed(self, x: Tensor, weight: Tensor | None, linears: Linears) -> Normed:
        """What attention is given."""
        from recompute.kernels.norm_linears import norm_linears
        from recompute.kernels.rms_norm import rms_norm

        norm = self.norms[0]

        def normalize(x: Tensor) -> Tensor:
            return rms_norm(x, weight, norm.eps, norm.casting)

        def normalized() -> Tensor:
            self.accounts.add(self._kinds[:1], x, [weight], normalize, self._as_written(0), is_frame=False)
            with _CreditedTo(self.statistics):
                return normalize(x)

        def together(x: Tensor, linears: list[Operands]) -> tuple[tuple[Tensor, ...], Tensor]:
            each, biases = zip(*linears, strict=True)

            def run(x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
                return norm_linears(x, weight, each, biases, norm.eps, norm.casting)

            def as_written(x: Tensor) -> list[Tensor]:
                y = self._as_written(0)(x)
                return [F.linear(y, *operands) for operands in linears]

            kind = *self._kinds[:1], len(each)
            self.accounts.add(kind, x, [weight, *each, *biases], run, as_written, is_frame=False)
            return run(x)

        return Normed.of(x, weight, normalized, linears, together)

    def _after_attention(self, mlp: nn.Module, attended: Tensor, stream: Tensor, weight: Tensor | None) -> Tensor:
        """The residual sum, the second norm and the MLP."""
        from recompute.kernels.add_rms_norm import add_rms_norm
        from recompute.kernels.residual_mlp import residual_mlp

        norm = self.norms[1]
        if self.mlp is None or is_hooked(mlp) or (linears := self.mlp.linears(mlp)) is None:

            def sum_and_norm(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
                return add_rms_norm(x, stream, weight, norm.eps, norm.casting)

            self.accounts.add(
                ("sum", self._kinds[1]),
                attended,
                [weight],
                lambda x: sum_and_norm(x, x),
                lambda x: (h := x + x, self._as_written(1)(h)),
            )
            with _CreditedTo(self.statistics):
                y, h = sum_and_norm(attended, stream)
            return h + mlp(y)
        activation = self.mlp.activation
        weights, biases = operands_of(linears)

        def run(x: Tensor, stream: Tensor) -> Tensor:
            return residual_mlp(x, stream, weight, *weights, norm.eps, norm.casting, activation, **biases)

        self.accounts.add(
            ("sum", *self._kinds[1:], activation),
            attended,
            [weight, *weights, *biases.values()],
            lambda x: run(x, x),
            lambda x: (h := x + x) + self._as_written(2)(self._as_written(1)(h)),
        )
        with _CreditedTo(self.statistics):
            return run(attended, stream)

    def _as_written(self, part: int) -> Callable[[Tensor], Tensor]:
        """The forward of the first norm, the second one or the MLP, as its class has it."""
        module = self.parts[part]()
        assert module is not None, "it has just been looked at"
        return MethodType(base_of(module).forward, module)

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
            if is_hooked(part) or (weight is not None and (weight.shape, weight.dtype) != (x.shape[-1:], x.dtype)):
                return None
            weights.append(weight)
        return weights[0], weights[1]


@dataclass
class KernelRotaryRunner(KernelRunner):
    """Attention, which runs its own forward, with another function in the place of the one that rotates."""

    rotary: Rotary
    stands_in_for_parts = True

    @property
    def substitutes(self) -> dict[Forward, Forward]:
        """What forward calls, and what is called in its place: for a graph of the region around it."""
        return {self.rotary.original: self.rotary.stand_in}

    def _what(self) -> str:
        return f"rope, as {self.rotary.name}"

    def is_where_kernels_are(self, args: tuple, kwargs: dict) -> bool:
        return True  # the function asks where its queries are

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with _CreditedTo(self.statistics):
            output = self.rotary.bind(module, forward)(*args, **kwargs)
        self.accounts.add_run()
        return output


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
        statistics, activation = self.statistics, self.activation

        def run(gate: Tensor, up: Tensor) -> Tensor:
            return swiglu(gate, up) if activation == "silu" else geglu(gate, up, _APPROXIMATE[activation])

        def product(gate: Tensor, up: Tensor) -> Tensor:
            self.accounts.add(
                (base_of(module),), gate, [], lambda x: run(x, x.clone()), lambda x: forward(x) * x.clone()
            )
            with _CreditedTo(statistics):
                return run(gate, up)

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

        if is_compiling_training(module):
            _warn_of_logits(self.statistics.name)
            return forward(*args, **kwargs)
        if not is_active(module) or (is_fake() and not local.simulates_cuda) or not is_plain_linear(module):
            return forward(*args, **kwargs)
        assert isinstance(module, nn.Linear)
        x = _only_argument(args, kwargs)
        given: dict[str, Tensor | None] = {"hidden": x, "weight": module.weight, "bias": module.bias}
        # Cast here and now: whoever asks for values later may do so under another autocast, or none.
        hidden, weight, bias = autocast("linear_cross_entropy", {}, given, x.device.type)
        return Logits.of(hidden, weight, bias, self.observe, self._count)  # type: ignore[arg-type]  # two are tensors

    def _count(self, hidden: Tensor, weight: Tensor, logits_nbytes: int) -> None:
        """After a loss without logits. logits_nbytes: what it would hold of them."""
        from recompute.kernels.linear_cross_entropy import held_nbytes

        kernels = Held(held_nbytes(hidden, weight), 0, holds_input=True)
        self.accounts.add_known(hidden, kernels, Held(logits_nbytes, 0, holds_input=weight.requires_grad))


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


class _CreditedTo:
    """Recipes recorded inside are of ``statistics``."""

    __slots__ = ("_outer", "_statistics")

    def __init__(self, statistics: RegionStatistics):
        self._statistics = statistics

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():  # which records nothing
            self._outer, local.statistics = local.statistics, self._statistics

    def __exit__(self, *error: object) -> None:
        if not torch.compiler.is_compiling():
            local.statistics = self._outer


def kernel_of(runner: Runner | None) -> KernelRunner | None:
    """The runner of kernels that a runner is, or has inside."""
    while runner is not None and not isinstance(runner, KernelRunner):
        runner = getattr(runner, "inner", None)
    return runner


def is_plain_linear(module: nn.Module | None) -> bool:
    return module is not None and base_of(module) is nn.Linear and not is_hooked(module)


def _child(module: nn.Module, name: str) -> nn.Module:
    return module._modules[name]  # type: ignore[return-value]


def is_hooked(module: nn.Module) -> bool:
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
