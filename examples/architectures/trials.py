"""One architecture without a policy, twice, and under each preset: whether training computes the same bits."""

from __future__ import annotations

import copy
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
import transformers
from batches import batches
from configurations import Architecture, tiny_configurations
from torch import Tensor, nn
from transformers.initialization import no_init_weights

import recompute
from recompute.errors import NoEffectError, PolicyWarning, RecomputeError

STEPS, LEARNING_RATE, NOISE = 7, 0.05, 0.02  # the last two of the steps run what has been captured by then
MOST_PARAMETERS = 65_000_000
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far kernels may be off: the norm of the differences of a step's gradients, divided by the gradients' norm."""

NOTHING = "nothing governed"

Trace = dict[str, Tensor]
"""What training computed, by name: losses, gradients, and the parameters and buffers at the end."""


class NotBuilt(Exception):
    """No tiny model of an architecture trains without a policy. Says why."""


@dataclass
class Outcome:
    """How a preset did, and what there is to say of it.

    verdict: ``bitwise``; ``close``, where kernels round in their own way; ``idle``, where the preset governs no module;
        ``refused``, by an error of recompute's; or ``wrong``.
    """

    verdict: str
    detail: str = ""
    frames: int = 0
    dropped_nbytes: int = 0
    kept_nbytes: int = 0
    regenerations: int = 0
    regions: int = 0
    """How many regions ran often enough to be captured."""
    captured: int = 0
    """How many of them run as captured code."""
    warnings: list[str] = field(default_factory=list)


@dataclass
class Subject:
    """A model that can be made again and again, and what it is given."""

    class_name: str
    config: Any
    batch: dict[str, Any]
    given: str
    device: torch.device
    dtype: torch.dtype

    def model(self) -> nn.Module:
        """The model in training mode, with the same weights each time.

        No weight stays at a value that hides mistakes, as a gate of 0 does.
        """
        seed(0)
        model: nn.Module = getattr(transformers, self.class_name)(copy.deepcopy(self.config)).train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in filter(torch.is_floating_point, model.parameters()):
                noise = NOISE * torch.randn(parameter.shape, generator=generator)
                sound = parameter.isfinite() & (parameter.abs() < 1e3)  # some are memory that nothing initializes
                parameter.copy_(torch.where(sound, parameter, 0.0) + noise)
        return model.to(self.device, self.dtype)


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def examine(
    architecture: Architecture,
    presets: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> Iterator[dict[str, Any]]:
    """The row of the table as it grows, as plain data."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    row: dict[str, Any] = {"task": architecture.task, "class": architecture.class_name}
    try:
        subject, plain = find(architecture, device, dtype, on_error)
    except NotBuilt as error:
        yield {**row, "not built": str(error)}
        return
    parameters = list(subject.model().parameters())
    gradients = [value for name, value in plain.items() if name.startswith("step 1: gradient")]
    row |= {
        "given": subject.given,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "gradients": f"{sum(bool(gradient.any()) for gradient in gradients)} of {len(parameters)}",
        "finite": all(bool(value.isfinite().all()) for value in plain.values()),
    }
    again, _ = train(subject, None)
    differing = differences(again, plain)
    if differing:
        yield {**row, "differs without a policy": differing[0]}
        return
    row["outcomes"] = {}
    yield row
    with_fixed_weights: Trace | None = None
    for preset in presets:
        if stands_in(preset, device):
            with_fixed_weights = with_fixed_weights or train(subject, None, 0.0)[0]
        expected = with_fixed_weights if stands_in(preset, device) else plain
        row["outcomes"][preset] = vars(outcome_of(subject, preset, expected, on_error))
        yield row


def is_wrong(row: dict[str, Any]) -> bool:
    return any(outcome["verdict"] == "wrong" for outcome in row.get("outcomes", {}).values())


def find(
    architecture: Architecture, device: torch.device, dtype: torch.dtype, on_error: Callable[[Exception], None]
) -> tuple[Subject, Trace]:
    """The first of the tiny configurations and batches with which the class trains, and what it then computes."""
    reasons: list[str] = []
    configs = tiny_configurations(architecture.model_type)
    while True:
        try:
            subject = next(_that_train(architecture, next(configs), device, dtype, reasons), None)
            if subject is not None:
                return subject, train(subject, None)[0]
        except StopIteration:
            raise NotBuilt(reasons[0] if reasons else "it takes neither text nor images nor sounds") from None
        except Exception as error:  # whatever another library's model says of a configuration
            reasons.append(said(error))
            on_error(error)


def _that_train(
    architecture: Architecture, config: Any, device: torch.device, dtype: torch.dtype, reasons: list[str]
) -> Iterator[Subject]:
    """A subject for each batch on which the model trains with this configuration."""
    count = parameters_of(architecture.class_name, config)
    if count > MOST_PARAMETERS:
        reasons.append(f"{count:,} parameters")
        return
    subject = Subject(architecture.class_name, config, {}, "", device, dtype)
    model = subject.model()
    for given, batch in batches(model, architecture.task):
        try:
            placed = {name: _placed(value, device, dtype) for name, value in batch().items()}
            seed(1)
            loss_of(model(**placed)).backward()
        except Exception as error:  # it does not take this one
            reasons.append(f"{given}: {said(error)}")
        else:
            yield replace(subject, batch=placed, given=given)


def parameters_of(class_name: str, config: Any) -> int:
    with torch.device("meta"), no_init_weights():
        model = getattr(transformers, class_name)(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def _placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def said(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def train(subject: Subject, preset: str | None, learning_rate: float = LEARNING_RATE) -> tuple[Trace, Any]:
    """Steps of SGD from the same seed, and the policy's handle."""
    model = subject.model()
    handle = None if preset is None else recompute.apply(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    trace: Trace = {}
    for step in range(1, STEPS + 1):
        seed(step)
        loss = loss_of(model(**subject.batch))
        loss.backward()
        trace[f"step {step}: loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                trace[f"step {step}: gradient of {name}"] = parameter.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    trace |= {f"after: {name}": value.detach().clone() for name, value in model.named_parameters()}
    trace |= {f"after: {name}": value.detach().clone() for name, value in model.named_buffers()}
    return trace, handle


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or where it has none, the mean of its outputs in random proportions, always the same."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.reshape(())
    found = {id(tensor): tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point()}
    generator = torch.Generator().manual_seed(0)
    terms = [
        (tensor.float() * torch.randn(tensor.shape, generator=generator).to(tensor.device)).mean()
        for tensor in found.values()
        if tensor.numel() > 0
    ]
    return torch.stack(terms).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple, dict)):
        for each in output.values() if isinstance(output, dict) else output:
            yield from _tensors(each)


def outcome_of(subject: Subject, preset: str, plain: Trace, on_error: Callable[[Exception], None]) -> Outcome:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            # Random weights drift apart from any rounding, as fast as they learn.
            rate = 0.0 if stands_in(preset, subject.device) else LEARNING_RATE
            trace, handle = train(subject, preset, rate)
        except NoEffectError:
            return Outcome("idle", NOTHING)
        except RecomputeError as error:
            on_error(error)
            return Outcome("refused", said(error))
        except Exception as error:  # without the policy it trained
            on_error(error)
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Outcome("wrong", f"raises {said(error)} in {where.name}")
    stats = handle.stats()
    messages = sorted({str(each.message) for each in warned if issubclass(each.category, PolicyWarning)})
    outcome = Outcome(
        "bitwise",
        frames=stats.frames,
        dropped_nbytes=stats.dropped_nbytes,
        kept_nbytes=stats.kept_nbytes,
        regenerations=stats.regenerations,
        warnings=messages,
    )
    shares = re.findall(r"([\d,]+) of ([\d,]+) run as captured code", handle.explain(wide=True))
    for captured, regions in shares:
        outcome.captured += int(captured.replace(",", ""))
        outcome.regions += int(regions.replace(",", ""))
    differing = differences(trace, plain)
    if differing:
        error = error_of(trace, plain)
        close = stands_in(preset, subject.device) and error <= CLOSE[subject.dtype]
        outcome.verdict = "close" if close else "wrong"
        outcome.detail = f"error {error:.1e}; {len(differing)} of {len(plain)} differ, first {differing[0]}"
    elif outcome.frames == 0:
        outcome.verdict, outcome.detail = "idle", NOTHING
    return outcome


def stands_in(preset: str, device: torch.device) -> bool:
    """Whether kernels compute a part of what a preset governs: on CPUs those alone that a rule insists on."""
    ways = {rule.via for rule in recompute.load_policy(preset).rules if rule.action == "recompute"}
    return "kernel" in ways or ("auto" in ways and device.type == "cuda")


def differences(found: Trace, expected: Trace) -> list[str]:
    """The names of what is not the same to the bit, with a measure of how far off it is."""
    odd = [f"{name}: only in one" for name in found.keys() ^ expected.keys()]
    return odd + [
        f"{name}: {relative([found[name]], [expected[name]]):.1e}"
        for name in expected
        if name in found and not same_bits(found[name], expected[name])
    ]


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def error_of(found: Trace, expected: Trace) -> float:
    """The largest relative error of any step, of all gradients as one vector."""
    errors = []
    for step in range(1, STEPS + 1):
        names = [name for name in expected if name.startswith(f"step {step}: gradient") and name in found]
        errors.append(relative([found[name] for name in names], [expected[name] for name in names]))
    return max(errors)


def relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference to that of what is expected; infinite where shapes differ."""
    if any(one.shape != other.shape for one, other in zip(found, expected, strict=True)):
        return float("inf")
    apart = sum(_square(_difference(one, other)) for one, other in zip(found, expected, strict=True))
    size = sum(_square(other.double()) for other in expected if other.isfinite().all())
    return (apart / size) ** 0.5 if size else float("inf") if apart else 0.0


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """0 where both are NaN, or infinite alike."""
    return torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, one.double() - other.double())


def _square(value: Tensor) -> float:
    return float(value.square().sum())
