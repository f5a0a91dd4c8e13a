"""Explains an out-of-memory error: which modules hold how much, and which rule would free how much."""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from recompute.attach.apply import policy_on
from recompute.compiled.under_torch_compile import unwrapped
from recompute.errors import PolicyWarning, RecomputeError
from recompute.estimation.attention_choice import Platform
from recompute.estimation.estimate_result import Advice, ModuleActivations, table
from recompute.estimation.model_and_batch import ModelAndBatch, on_fake_tensors
from recompute.estimation.model_estimator import ModelEstimator, by_module
from recompute.estimation.module_tracker import layer_of
from recompute.estimation.simulation import SimulatedStep
from recompute.policy.matching import pattern_of
from recompute.policy.rules import Policy, Rule
from recompute.profiling.dry_run import nbytes_of
from recompute.units import humanize

logger = logging.getLogger(__name__)

_PARTS = 3
"""Rules are tried for so many parts of a layer: for those that hold most."""
_PLAIN = bool, int, float, str, torch.dtype, torch.device


@dataclass(frozen=True)
class OutOfMemory:
    """The report of an out-of-memory error. Its figures of the step come from a step on fake tensors."""

    where: str
    """ "forward of model.layers.3.mlp (LlamaMLP)" …"""
    device: str
    """The device's memory, and the share that is taken; "" where nobody counts."""
    static: Mapping[str, int]
    """Bytes of "parameters", "gradients" … that were there before the step."""
    peak_nbytes: int = 0
    """The peak of a step above these."""
    peak_moment: str = ""
    activations: tuple[ModuleActivations, ...] = ()
    """The modules' bytes held for backward, the largest first."""
    rules: tuple[Advice, ...] = ()
    """Rules that would lower the peak before the policy's others, the most helpful first."""
    problem: str = ""
    """Why the step could not be estimated; "" if it could."""

    def __str__(self) -> str:
        blocks = [f"out of memory in the {self.where}{self.device and f'; {self.device}'}"]
        static = ", ".join(f"{name} {humanize(nbytes)}" for name, nbytes in self.static.items() if nbytes)
        blocks.append(f"Held before the step: {static or 'nothing'}.")
        if self.problem:
            return "\n".join([*blocks, f"The step cannot be estimated: {self.problem}"])
        blocks.append(
            f"A step on this batch takes up to {humanize(self.peak_nbytes)} more, in the {self.peak_moment}. This is "
            "an estimate, made on fake tensors."
        )
        held = [
            (each.path or "outside of all modules", each.modules, humanize(each.nbytes)) for each in self.activations
        ]
        blocks.append(table("held for backward, by", held, "modules", "total"))
        if self.rules:
            rows = [(each.what, humanize(each.saves_nbytes)) for each in self.rules]
            blocks.append(table("one of these rules, as the policy's first", rows, "lowers the peak by"))
        else:
            blocks.append("No rule lowers the peak. Use a smaller batch, shorter sequences or more devices.")
        return "\n\n".join(blocks)


@contextmanager
def explain_out_of_memory(model: nn.Module) -> Iterator[None]:
    """If the device runs out of memory inside, say which modules hold it, and which rules would free how much.

        with explain_out_of_memory(model):
            trainer.train()

    The error is raised again, with an ``OutOfMemory`` as a note (from Python 3.11 on). The logger
    ``recompute.diagnostics.out_of_memory`` logs the same text as an error.

    Finding out takes seconds, and no memory of the device. A step on the last batch's shapes runs on fake tensors, as
    in ``recompute.estimate``, under the policy that is on ``model``.

    model: the module that is called in training, or a part of it, under any policy or none.
    """
    latest = _Latest()
    hook = model.register_forward_pre_hook(latest, with_kwargs=True)
    try:
        yield
    except torch.OutOfMemoryError as error:
        hook.remove()  # or the copy that the report is made of would call it
        inner = unwrapped(model)
        report = _report(inner, latest, _where(inner, error))
        logger.error("%s", report)
        if hasattr(error, "add_note"):
            error.add_note(f"\n{report}")
        raise
    finally:
        hook.remove()


class _Latest:
    """The arguments of the latest forward in training, with tensors reduced to their shapes, and how it was called."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.autocast = False
        self.allocated_nbytes = 0

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        device = _device(module)
        if device.type == "cuda":
            self.allocated_nbytes = torch.cuda.memory_allocated(device)
        self.autocast = torch.is_autocast_enabled(device.type)
        args, kwargs = tree_map(_outline, (args, kwargs))
        self.batch = _arguments(unwrapped(module), args, kwargs)


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value if isinstance(value, _PLAIN) else None  # any other object, such as a cache, might hold tensors


def _arguments(module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """The arguments as ``recompute.estimate`` takes a batch: either all by position or all by name."""
    if not args or not kwargs:
        return args or kwargs
    signature = inspect.signature(module.forward)
    named = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _where(model: nn.Module, error: BaseException) -> str:
    """The code that ran when the error came up, by its traceback: "backward of model.layers.3.mlp (LlamaMLP)"."""
    paths = {module: path for path, module in model.named_modules()}
    phase, innermost = "forward", None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        runs = frame.f_locals.get("self")
        if isinstance(runs, Optimizer):
            return f"step of {type(runs).__name__}"
        if frame.f_code.co_name == "_engine_run_backward":
            phase, innermost = "backward", None
        if isinstance(runs, nn.Module) and runs in paths:
            innermost = runs
    if innermost is None:
        return phase if phase == "backward" else "code outside of the model"
    return f"{phase} of {paths[innermost] or 'the model'} ({type(innermost).__name__})"


def _report(model: nn.Module, latest: _Latest, where: str) -> OutOfMemory:
    device = _device(model)
    text = ""
    static = {
        "parameters": nbytes_of(list(model.parameters())),
        "gradients": nbytes_of([each.grad for each in model.parameters()]),
        "buffers": nbytes_of(list(model.buffers())),
    }
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        text = (
            f"of the device's {humanize(total)}, tensors take {humanize(allocated)} and torch's allocator reserves "
            f"{humanize(reserved)}"
        )
        static["others (optimizer states, the batch …)"] = max(0, latest.allocated_nbytes - sum(static.values()))
    if latest.batch is None:
        return OutOfMemory(where, text, static, problem="the model has not run in training mode yet.")
    try:
        return _with_advice(model, latest, device, OutOfMemory(where, text, static))
    except Exception as error:  # the report of an error may not hide it
        if not isinstance(error, RecomputeError):
            logger.debug("the out-of-memory report failed", exc_info=True)
        return OutOfMemory(where, text, static, problem=f"{type(error).__name__}: {error}")


def _with_advice(model: nn.Module, latest: _Latest, device: torch.device, found: OutOfMemory) -> OutOfMemory:
    """``found``, with the peak of a step and rules that would lower it."""
    policy = policy_on(model)
    with on_fake_tensors(model, latest.batch) as (fake, batch), warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        estimator = ModelEstimator(
            ModelAndBatch(fake, batch, type(model).__name__),
            Platform.of(None) if device.type == "cuda" else None,
            strict=False,
        )
        rules = () if policy is None else policy.rules
        now = estimator.step(_taped(rules), latest.autocast)
        peak_nbytes, moment = _peak(now)
        freed = []
        most: dict[tuple[str, ...], int] = {}  # the bytes that the best rule saves, by the rules' modules
        recomputed: dict[tuple[str, ...], int] = {}  # ``action: recompute`` alone: as fast as ``compress``, and exact
        for rule in _rules(model, estimator, now):
            saved = peak_nbytes - _peak(estimator.step(_taped((rule, *rules)), latest.autocast))[0]
            better = most if rule.offload else recomputed if rule.compress else {}
            if saved > max(0, better.get(rule.match, 0)):
                freed.append(Advice(_text(rule), saved))
            if rule.action == "recompute" and not (rule.offload or rule.compress):
                recomputed[rule.match] = saved
            most[rule.match] = max(saved, most.get(rule.match, 0))
    held = sorted((each for each in by_module(now.held) if each.nbytes), key=lambda each: -each.nbytes)
    freed.sort(key=lambda each: -each.saves_nbytes)
    told: dict[str, Any] = {"activations": tuple(held), "rules": tuple(freed)}
    return replace(found, peak_nbytes=peak_nbytes, peak_moment=moment, **told)


def _taped(rules: Sequence[Rule]) -> Policy | None:
    """A policy of these rules, whose regions stay on the tape. A step on the tape tells what each module holds."""
    taped = [
        rule.model_copy(update={"capture": False}) if rule.action in ("recompute", "checkpoint") else rule
        for rule in rules
    ]
    return Policy(name="out of memory", rules=taped) if taped else None


def _peak(step: SimulatedStep) -> tuple[int, str]:
    """The step's peak in bytes, with gradients, and when it is."""
    return max((moment.peak_nbytes(lambda nbytes: nbytes), moment.name) for moment in step.moments)


def _rules(model: nn.Module, estimator: ModelEstimator, step: SimulatedStep) -> Iterator[Rule]:
    """Rules to try: for the layers, for those of their parts that hold most, and for the head."""
    layers: dict[str, dict[str, int]] = {}
    for path, nbytes in step.held.items():
        if layer := layer_of(path):
            parts = layers.setdefault(pattern_of(layer), {})
            part = path.removeprefix(layer).removeprefix(".").split(".")[0]
            parts[part] = parts.get(part, 0) + nbytes
    for pattern, parts in layers.items():
        largest = sorted(filter(None, parts), key=lambda part: -parts[part])[:_PARTS]
        for glob in (pattern, *(f"{pattern}.{part}" for part in largest)):
            yield Rule(match=glob, action="recompute")
            yield Rule(match=glob, action="checkpoint")
        yield Rule(match=pattern, action="recompute", offload=True)
        yield Rule(match=pattern, action="checkpoint", offload=True)
        yield Rule(match=pattern, action="recompute", compress=True)
    if (head := estimator.head()) is not None:
        yield Rule(match=head, action="recompute", via="kernel")


def _text(rule: Rule) -> str:
    """The rule as a line of a policy file."""
    via = f", via: {rule.via}" if rule.via == "kernel" else ""
    offload = ", offload: true" if rule.offload else ""
    compress = ", compress: true" if rule.compress else ""
    lossy = "  # not exact" if rule.compress else ""
    return f'- {{match: "{rule.match[0]}", action: {rule.action}{via}{offload}{compress}}}{lossy}'
