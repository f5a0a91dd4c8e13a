"""Calculates what each of several devices holds of a model that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from recompute.estimation.module_tracker import parameter_shapes
from recompute.estimation.static_memory import (
    SHARDINGS,
    DtypeRecipe,
    ExtraBuffer,
    OptimizerKind,
    shard_shapes,
    share_of,
    static_nbytes,
)
from recompute.profiling.cost_table import Choice, RegionCosts
from recompute.profiling.dry_run import nbytes_of


@dataclass(frozen=True)
class Shards:
    """What one device holds of a model's parameters, counted in the dtype that they have."""

    parameter_nbytes: int
    buffers: tuple[ExtraBuffer, ...]
    """The buffers that parameters are gathered into and gradients are reduced in."""
    shapes: tuple[tuple[int, ...], ...] | None
    """The shapes of what the device's optimizer updates; None: it updates the parameters themselves."""
    share: Callable[[int], int] | None
    """From the bytes of gradients to those that the device keeps once they are reduced; None: it keeps all."""

    @staticmethod
    def of(model: nn.Module, sharding: str, devices: int) -> Shards:
        """The shards of a model.

        model: all of its parameters have one dtype.
        sharding: one that ``check_sharding`` lets pass.
        """
        if devices == 1:
            return Shards(nbytes_of(list(model.parameters())), (), None, None)
        size = next(model.parameters()).element_size()
        shapes, kind = parameter_shapes(model), SHARDINGS[sharding]
        found = static_nbytes(
            shapes,
            recipe=DtypeRecipe(size, size, 0, size),
            optimizer=OptimizerKind(0),
            sharding=sharding,
            devices=devices,
        )
        return Shards(
            found.parameters,
            tuple(found.buffers.values()),
            tuple(shard_shapes(shapes, sharding, devices)) if kind.optimizer else None,
            share_of(sharding, devices) if kind.gradients else None,
        )

    def updated(self, parameters: Sequence[nn.Parameter]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and dtypes of what the device's optimizer updates of these parameters."""
        if self.shapes is None:
            return [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
        return [(shape, parameters[0].dtype) for shape in self.shapes]

    def buffer_nbytes(self, phase: str) -> int:
        """The bytes of buffers alive in this part of a step: "forward", "backward" or "optimizer"."""
        return sum(buffer.nbytes for buffer in self.buffers if phase in buffer.phases)

    def with_buffers(self, regions: Sequence[RegionCosts]) -> tuple[RegionCosts, ...]:
        """The regions, with the buffers that are alive while they run added to their peaks."""
        forward, backward = self.buffer_nbytes("forward"), self.buffer_nbytes("backward")

        def of(choice: Choice) -> Choice:
            peaks = {
                "forward_peak_nbytes": choice.forward_peak_nbytes + forward,
                "backward_peak_nbytes": choice.backward_peak_nbytes + backward,
            }
            return choice.model_copy(update=peaks)

        return tuple([each.model_copy(update={"choices": tuple(map(of, each.choices))}) for each in regions])
