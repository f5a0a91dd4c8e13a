"""What a workload is: training by some package, which says where the policy goes on, and runs as it would elsewhere."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comparison import Recording, differences, outcome_of, said, seed, unhide
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import recompute

STEPS = 8  # the 6th and the 7th are timed, the last one's memory is counted: regions are captured by then

WORKLOADS: dict[str, Workload] = {}
"""All that the files beside this one define, by name."""


class Run:
    """Training once, under a preset or without one."""

    def __init__(self, preset: str | None):
        self.recording: Any = None
        """From ``govern`` on, a ``Recording``."""
        self.handle: Any = None
        self._preset = preset
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    def govern(self, model: nn.Module) -> Any:
        """Put the policy on a model in training mode, watch it from here on, and return it."""
        trained = (each for each in model.train().parameters() if each.requires_grad)
        unhide(each for each in trained if not is_traceable_wrapper_subclass(each))
        if self._preset is not None:
            self.handle = recompute.apply(model, self._preset)
        self.recording = self._stack.enter_context(Recording(model, STEPS))
        return model

    def train(self, model: nn.Module, loss: Callable[[], Tensor], optimizer: Optimizer | None = None) -> None:
        """The plain loop. ``loss`` may draw its batch at random: each step has its own seed."""
        optimizer = optimizer or adamw(model)
        for step in range(1, STEPS + 1):
            seed(step)
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()


def adamw(model: nn.Module, learning_rate: float = 1e-3) -> Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=learning_rate)


@dataclass(frozen=True)
class Workload:
    """Training that needs a package.

    package: what it is of; torch itself needs no other.
    needs: the modules to be imported, those of the package among them.
    """

    package: str
    needs: Sequence[str]
    train: Callable[[Run], None]

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(name.partition(".")[0]) is not None for name in self.needs)


def workload(package: str, name: str, *needs: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Define one: ``package: name`` is its row."""

    def define(train: Callable[[Run], None]) -> Callable[[Run], None]:
        assert f"{package}: {name}" not in WORKLOADS, f"{package}: {name} is there already"
        WORKLOADS[f"{package}: {name}"] = Workload(package, (package, *needs), train)
        return train

    return define


def examine(
    workload: Workload,
    presets: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> Iterator[dict[str, Any]]:
    """The row of the table as it grows, as plain data. Workloads choose dtypes by themselves."""
    row: dict[str, Any] = {"package": workload.package}
    try:
        plain, _ = train(workload, None)
        again, _ = train(workload, None)
    except Exception as error:  # whatever another library says of it
        on_error(error)
        yield {**row, "not built": said(error)}
        return
    names = {name for name in plain.trace if ": gradient of " in name}
    row |= {
        "gradients": len({name.partition(": ")[2] for name in names}),
        "finite": all(bool(value.double().isfinite().all()) for value in plain.trace.values()),
    }
    differing = differences(again.trace, plain.trace)
    if differing:
        yield {**row, "differs without a policy": differing[0]}
        return
    plain.seconds += again.seconds[-2:]
    row["outcomes"] = {}
    yield row
    for preset in presets:
        row["outcomes"][preset] = vars(outcome_of(functools.partial(train, workload, preset), plain, on_error))
        yield row


def train(workload: Workload, preset: str | None) -> tuple[Recording, Any]:
    seed(0)
    with Run(preset) as run:
        workload.train(run)
    assert run.recording is not None, "a workload governs a model"
    return run.recording, run.handle
