"""Checks whether a model computes the same under a policy as without it, and says where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from recompute.attach.apply import AppliedPolicy, PolicyLike, apply
from recompute.attach.check_effect import has_effect, listed
from recompute.compiled.under_torch_compile import uncompiled
from recompute.diagnostics.comparing_runs import (
    COMPRESSION_TOLERANCE,
    Widened,
    deterministic,
    max_difference,
    relative_error,
    same_bits,
    wider_dtype,
)
from recompute.engine.bit_comparison import count_different, verifying
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import describe
from recompute.errors import GradientMismatch, NoEffectError, UnsupportedError
from recompute.profiling.model_run import Loss, arguments_of, copy_of, left_as_it_was, named, roots, sources_of
from recompute.substitution.kernel_runner import kernel_of

Tensors = Mapping[str, Tensor | None]
"""Tensors by name, on the host; None for a parameter that got no gradient."""

_STATISTICS = (
    "dropped_tensors", "dropped_nbytes", "kept_nbytes", "eager_nbytes", "compressed_tensors", "worst_code_error",
)  # fmt: skip
_SHOWN = 5  # so many of the tensors of each kind that differ are named


@dataclass(frozen=True)
class Verification:
    """The result of ``verify`` where nothing is wrong."""

    policy: str
    gradients: int
    """How many gradients were compared."""
    bitwise: bool
    """Whether all compared tensors are equal bit for bit."""
    max_difference: float
    """The largest difference of two elements of a gradient."""
    relative_error: float
    """‖difference‖ / ‖gradient‖, over all gradients together."""
    tolerance: float
    """Twice the ``relative_error`` that rounding alone makes without the policy, or ``COMPRESSION_TOLERANCE`` where a
    rule compresses; 0 where all bits are equal."""
    errors: Mapping[str, float]
    """The relative error of each gradient, by the parameter's name; empty where all bits are equal."""
    dropped_tensors: int
    """How many tensors were dropped. Each of them came back as it was."""
    dropped_nbytes: int
    kept_nbytes: int
    """Bytes that the governed modules saved under the policy; the inputs that a checkpoint holds do not count."""
    eager_nbytes: int
    """Bytes that they hold without it."""
    compressed_tensors: int = 0
    """How many tensors were held as codes of 8 bits."""
    worst_code_error: float = 0.0
    """As ``AppliedPolicy.stats`` has it."""

    def __str__(self) -> str:
        lines = [f"policy {self.policy}: outputs and {self.gradients} gradients equal those without it, bit for bit"]
        if not self.bitwise:
            allowed = "for each" if self.compressed_tensors else "twice the rounding error"
            lines = [
                f"policy {self.policy}: {self.gradients} gradients are right, but not bit for bit",
                f"relative error of all gradients: {self.relative_error:.1e} (allowed: {self.tolerance:.1e}, "
                f"{allowed}); largest difference of a number: {self.max_difference:.1e}",
            ]
            if self.compressed_tensors:
                worst = max(self.errors, key=self.errors.__getitem__)
                lines += [
                    f"largest relative error of one gradient: {self.errors[worst]:.1%} ({worst})",
                    f"held in 8 bits: {self.compressed_tensors} tensors, off by at most {self.worst_code_error:.1%} "
                    "of the largest number in a block",
                ]
        dropped = f", {self.dropped_nbytes:,} bytes, all regenerated with the same bits" if self.dropped_tensors else ""
        lines.append(f"dropped: {self.dropped_tensors} tensors{dropped}")
        if self.eager_nbytes:
            lines.append(f"kept: {self.kept_nbytes:,} of the {self.eager_nbytes:,} bytes that are saved without it")
        return "\n".join(lines)


def verify(
    model: nn.Module, batch: Any, *, policy: PolicyLike = "elementwise", loss: Loss | None = None
) -> Verification:
    """Run forward and backward of ``model`` on ``batch`` under ``policy`` and without it, and compare the two.

    It compares the loss and the outputs, the gradient of each parameter and of each input that requires one, and the
    buffers and the random state afterwards: bit for bit, unless a kernel stands in for a module. Kernels round in their
    own way. With one, a tensor may differ by twice the rounding error that it has without the policy, measured against
    the same model in float32 (in float64 where the model is in float32). Where a rule compresses, each gradient may
    differ by ``COMPRESSION_TOLERANCE``, an eighth of its norm. Otherwise each regenerated tensor is compared, too, with
    the dropped one, which is held for that.

    Both runs train, from the same random state, on CUDA with deterministic algorithms. Afterwards the model with its
    gradients, buffers, attributes and training flags, the batch and the random state are as before, also if this
    raises. Forward's effects on other Python objects happen twice.

    batch: a mapping of keyword arguments, a tuple of arguments, or the only argument. The model gets copies of it.
    policy: as ``recompute.apply`` takes it, with the same default; the model must not be under a policy yet.
    loss: makes a scalar of the output. Without one it is the output's own ``loss``; if there is none either, backward
    starts from every tensor in the output, with a gradient of fixed signs.

    Raises ``GradientMismatch``, which names the tensors that differ; ``RegenerationError`` with the module and the op
    that regenerated other values; ``NoEffectError`` if the policy is meant to drop something but governs nothing of the
    model or drops nothing here; ``MutationError`` where the run itself changes a parameter, as an optimizer in a hook
    does; ``UnsupportedError`` where a kernel's rounding cannot be judged because the model does not run in a wider
    dtype; and the errors of ``recompute.apply`` and of the model.

    >>> layer = torch.nn.TransformerEncoderLayer(64, 2, batch_first=True)
    >>> recompute.verify(layer, torch.randn(4, 32, 64)).bitwise
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recompute.verify takes a torch.nn.Module, got {type(model).__name__}")
    trial = _Trial(model, batch, loss, sources_of(model, batch))
    with apply(model, policy) as handle:
        with verifying():
            found = trial.run()
        name, stats, is_exact = handle.policy.name, handle.stats(), _is_exact(handle, model)
        _refuse_idle(handle, model, is_exact)
    expected = trial.run()
    differing = {kind: _differing(found.tensors[kind], tensors) for kind, tensors in expected.tensors.items()}
    bitwise = not any(differing.values())
    compresses = stats.compressed_tensors > 0
    wrong, tolerance = _beyond_promise(trial, name, differing, found, expected, is_exact, compresses)
    if any(wrong.values()):
        raise GradientMismatch(_complaint(name, wrong, found, expected, tolerance, compresses))
    with expected.rng.replayed():
        if found.rng.drawn() is not None:
            raise GradientMismatch(
                f"under policy {name} outputs and gradients equal those without it, but the random generators end in "
                "another state, so the next step would differ"
            )
    pairs = _pairs(ours := found.tensors["gradients"], theirs := expected.tensors["gradients"])
    errors = {each: _error_of(ours.get(each), theirs[each]) for each in theirs}
    return Verification(
        policy=name,
        gradients=len(pairs[0]),
        bitwise=bitwise,
        max_difference=0.0 if bitwise else max(map(max_difference, *pairs)),
        relative_error=0.0 if bitwise else relative_error(*pairs),
        tolerance=tolerance,
        errors={} if bitwise else errors,
        **{name: getattr(stats, name) for name in _STATISTICS},
    )


def _beyond_promise(
    trial: _Trial,
    policy: str,
    differing: Mapping[str, Sequence[str]],
    found: _Outcome,
    expected: _Outcome,
    is_exact: bool,
    compresses: bool,
) -> tuple[dict[str, list[str]], float]:
    """The names of tensors that differ by more than the policy may change, by kind, and ``Verification.tolerance``."""
    wrong, tolerance = {kind: list(names) for kind, names in differing.items()}, 0.0
    if not any(wrong.values()):
        return wrong, tolerance
    gradients, theirs = found.tensors["gradients"], expected.tensors["gradients"]
    if compresses:
        tolerance = COMPRESSION_TOLERANCE
        wrong["gradients"] = [
            name for name in wrong["gradients"] if not _error_of(gradients.get(name), theirs[name]) <= tolerance
        ]
    # A gradient whose exact value is 0 is all rounding, also where nothing but codes is inexact.
    rounded = list(wrong) if not is_exact else ["gradients"] if compresses else []
    if any(wrong[kind] for kind in rounded):
        wide = _in_wider_dtype(trial, policy)
        for kind in rounded:
            wrong[kind] = _beyond_rounding(wrong[kind], found.tensors[kind], expected.tensors[kind], wide.tensors[kind])
        tolerance = max(tolerance, 2 * relative_error(*_pairs(theirs, wide.tensors["gradients"])))
    return wrong, tolerance


class _Outcome(NamedTuple):
    """The tensors of one run to compare, by kind and name, and the random state at its end."""

    tensors: Mapping[str, Tensors]
    rng: RngState


@dataclass(frozen=True)
class _Trial:
    """Runs forward and backward of a model on a batch, any number of times."""

    model: nn.Module
    batch: Any
    loss: Loss | None
    sources: Sequence[Any]

    def run(self, dtype: torch.dtype | None = None) -> _Outcome:
        """dtype: to calculate in, instead of the model's own floating-point dtypes and autocast's."""
        model = self.model
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        buffers: dict[str, Tensor] = dict(model.named_buffers())
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(left_as_it_was(model, self.sources))
            args, kwargs = arguments_of(self.batch, dtype)
            inputs = named(kwargs or args)
            devices = {tensor.device.type for tensor in (*parameters.values(), *inputs.values())}
            stack.enter_context(deterministic("cuda" in devices))
            if dtype is None:
                output = model(*args, **kwargs)
            else:
                for device in devices:
                    stack.enter_context(torch.autocast(device, enabled=False))
                stack.enter_context(Widened(dtype))
                parameters = {name: copy_of(tensor, dtype) for name, tensor in parameters.items()}
                buffers = {name: copy_of(tensor, dtype) for name, tensor in buffers.items()}
                output = functional_call(model, {**parameters, **buffers}, args, kwargs)
            outputs = self._backward(output)
            leaves = {**parameters, **{f"input {name}": tensor for name, tensor in inputs.items()}}
            gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
            kinds: dict[str, Tensors] = {"outputs": outputs, "gradients": gradients, "buffers": buffers}
            on_host = {
                kind: {name: _on_host(tensor) for name, tensor in tensors.items()} for kind, tensors in kinds.items()
            }
            return _Outcome(on_host, RngState(self.sources))

    def _backward(self, output: Any) -> dict[str, Tensor]:
        """Run backward; returns the tensors in ``output``, and the loss."""
        outputs = named(output)
        starts, gradients = roots(output, self.loss)
        if gradients == [None]:
            outputs["loss"] = starts[0]
        torch.autograd.backward(starts, gradients)
        return outputs


def _on_host(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).to("cpu", copy=True)


def _in_wider_dtype(trial: _Trial, policy: str) -> _Outcome:
    dtype = wider_dtype(trial.model)
    try:
        return trial.run(dtype)
    except RuntimeError as error:  # as from an op that has no kernel for float64
        raise UnsupportedError(
            f"under policy {policy} gradients differ, as kernels round differently. To judge the difference, verify "
            f"runs the model in {dtype}, which fails: {error}"
        ) from error


def _is_exact(handle: AppliedPolicy, model: nn.Module) -> bool:
    """Whether the policy promises the same bits: no kernel stands in where the model is."""
    kernels = [kernel for one in handle._attachments if (kernel := kernel_of(one.runner)) is not None]
    on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    return not any(on_cuda or kernel.fallback is None for kernel in kernels)


def _refuse_idle(handle: AppliedPolicy, model: nn.Module, is_exact: bool) -> None:
    """Raise if the policy did nothing in the run: comparing two runs without a policy would say that all is well."""
    stats, policy = handle.stats(), handle.policy
    # Tensors that a kernel or a compiler does not save do not count as dropped.
    kernels = [] if is_exact else [kernel_of(each.runner) for each in handle._attachments]
    if (
        stats.dropped_tensors
        or stats.offloaded_tensors
        or stats.compressed_tensors
        or any(kernel is not None and kernel.statistics.frames for kernel in kernels)
    ):
        return
    compiled = (uncompiled(each) is not each or each._compiled_call_impl for each in (model, *model.modules()))
    if not has_effect(policy) or any(compiled):
        return
    paths = [each.path or type(model).__name__ for each in handle._attachments if each.rule is not None]
    did_nothing = "nothing was dropped, offloaded or compressed there"
    found = did_nothing if stats.frames else "none of them ran with gradients"
    raise NoEffectError(
        f"policy {policy.name} governs {listed(paths)}, but on this batch {found}: there is nothing to verify. "
        "Call handle.explain() after a forward under recompute.apply() to see why each tensor is kept"
    )


def _differing(found: Tensors, expected: Tensors) -> list[str]:
    """The names of tensors whose bits differ."""
    return [name for name, tensor in expected.items() if not same_bits(found.get(name), tensor)]


def _beyond_rounding(names: Iterable[str], found: Tensors, expected: Tensors, wide: Tensors) -> list[str]:
    """The names whose tensors differ by more than twice the rounding error.

    The rounding error is that of the tensor itself, or its share of the error of all tensors if that is more: in a
    small tensor roundings may cancel out by chance. A gradient that is 0 but for roundings, as that of the bias of
    attention's keys, may differ by 1/64 of the rounding error of all. Numbers that are not floating-point may differ,
    too, where rounding changes them, as it changes ranks.
    """
    share = relative_error(*_pairs(expected, wide))
    least = share * sum(float(each.double().norm()) ** 2 for each in _pairs(expected, wide)[1]) ** 0.5 / 64
    beyond = []
    for name in names:
        one, other, exact = found.get(name), expected[name], wide.get(name)
        if one is None or other is None or exact is None or not one.shape == other.shape == exact.shape:
            beyond.append(name)
        elif not other.is_floating_point():
            if same_bits(other, exact):
                beyond.append(name)
        else:
            one, other, exact = one.double(), other.double(), exact.double()
            if not (one - other).norm() <= max(2 * (other - exact).norm(), 2 * share * exact.norm(), least):
                beyond.append(name)
    return beyond


def _error_of(found: Tensor | None, expected: Tensor | None) -> float:
    """The relative error of one gradient; infinite where there is one in only one of the runs."""
    if found is None or expected is None or found.shape != expected.shape:
        return 0.0 if found is expected else math.inf
    return relative_error([found], [expected])


def _pairs(found: Tensors, expected: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """The floating-point tensors that are in both, in the same order."""
    both = [(one, other) for name, other in expected.items() if (one := found.get(name)) is not None is not other]
    chosen = [(one, other) for one, other in both if other.is_floating_point() and one.shape == other.shape]
    return [one for one, _ in chosen], [other for _, other in chosen]


def _complaint(
    policy: str,
    differing: Mapping[str, Sequence[str]],
    found: _Outcome,
    expected: _Outcome,
    tolerance: float,
    compresses: bool,
) -> str:
    lines = [f"under policy {policy}:"]
    for kind, names in differing.items():
        if names:
            lines.append(f"{len(names)} of {len(expected.tensors[kind])} {kind} differ from those without it")
            lines += [
                f"  {name}: " + _apart(found.tensors[kind].get(name), expected.tensors[kind][name])
                for name in names[:_SHOWN]
            ]
            if len(names) > _SHOWN:
                lines.append(f"  and {len(names) - _SHOWN} more")
    lines.append(
        f"expected the same outputs, and gradients whose relative error is at most {tolerance:.1e}"
        if compresses
        else f"expected at most twice the rounding error; of all gradients together that is {tolerance:.1e}"
        if tolerance
        else "expected the same bits, because no kernel replaces a module"
    )
    return "\n".join(lines)


def _apart(found: Tensor | None, expected: Tensor | None) -> str:
    if found is None or expected is None:
        return "missing " + ("under the policy" if found is None else "without the policy")
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return f"{describe(found)} under the policy, {describe(expected)} without it"
    text = f"shape {tuple(found.shape)}, {count_different(found, expected)} of {found.numel()} elements differ"
    if not expected.is_floating_point():
        return text
    error = relative_error([found], [expected])
    return f"{text}, by at most {max_difference(found, expected):.1e}; relative error {error:.1e}"
