"""One architecture without a policy, twice, and under each preset: whether training computes the same bits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from batches import batches
from comparison import Recording, differences, outcome_of, said, seed, unhide
from configurations import Architecture, tiny_configurations
from torch import Tensor, nn
from transformers.initialization import no_init_weights

import recompute

STEPS, LEARNING_RATE = 7, 0.05  # the last two of the steps run what has been captured by then
MOST_PARAMETERS = 65_000_000
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far kernels may be off: the norm of the differences of a step's gradients, divided by the gradients' norm."""


class NotBuilt(Exception):
    """No tiny model of an architecture trains without a policy. Says why."""


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
        """The model in training mode, with the same weights each time."""
        seed(0)
        model: nn.Module = getattr(transformers, self.class_name)(copy.deepcopy(self.config)).train()
        unhide(model.parameters())
        return model.to(self.device, self.dtype)


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
    gradients = [value for name, value in plain.trace.items() if name.startswith("step 1: gradient")]
    row |= {
        "given": subject.given,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "gradients": f"{sum(bool(gradient.any()) for gradient in gradients)} of {len(parameters)}",
        "finite": all(bool(value.isfinite().all()) for value in plain.trace.values()),
    }
    again, _ = train(subject, None)
    differing = differences(again.trace, plain.trace)
    if differing:
        yield {**row, "differs without a policy": differing[0]}
        return
    row["outcomes"] = {}
    yield row
    with_fixed_weights: Recording | None = None
    for preset in presets:
        if stands_in(preset, device):  # random weights drift apart from any rounding, as fast as they learn
            with_fixed_weights = with_fixed_weights or train(subject, None, 0.0)[0]
            under_preset = functools.partial(train, subject, preset, 0.0)
            outcome = outcome_of(under_preset, with_fixed_weights, on_error, CLOSE[dtype])
        else:
            outcome = outcome_of(functools.partial(train, subject, preset), plain, on_error)
        row["outcomes"][preset] = vars(outcome)
        yield row


def find(
    architecture: Architecture, device: torch.device, dtype: torch.dtype, on_error: Callable[[Exception], None]
) -> tuple[Subject, Recording]:
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


def train(subject: Subject, preset: str | None, learning_rate: float = LEARNING_RATE) -> tuple[Recording, Any]:
    """Steps of SGD from the same seed, and the policy's handle."""
    model = subject.model()
    handle = None if preset is None else recompute.apply(model, preset)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    with Recording(model, STEPS) as recording:
        for step in range(1, STEPS + 1):
            seed(step)
            loss_of(model(**subject.batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording, handle


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


def stands_in(preset: str, device: torch.device) -> bool:
    """Whether kernels compute a part of what a preset governs: on CPUs those alone that a rule insists on."""
    ways = {rule.via for rule in recompute.load_policy(preset).rules if rule.action == "recompute"}
    return "kernel" in ways or ("auto" in ways and device.type == "cuda")
