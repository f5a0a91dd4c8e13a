"""Calculates what each of several devices holds of a model that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from recompute.estimation.module_tracker import parameter_shapes
from recompute.estimation.static_memory import (
    SHARDINGS,
    DtypeRecipe,
    OptimizerKind,
    StaticBytes,
    shard_shapes,
    share_of,
    static_nbytes,
)
from recompute.profiling.cost_table import Choice, RegionCosts
from recompute.profiling.dry_run import nbytes_of


class Shards(NamedTuple):
    """What one device holds of a model's parameters, counted in the dtype that they have."""

    static: StaticBytes
    """Parameters, and the buffers that parameters are gathered into and gradients are reduced in."""
    updated: list[tuple[tuple[int, ...], torch.dtype]]
    """The shapes and dtypes of what the device's optimizer updates."""
    share: Callable[[int], int] | None
    """From the bytes of gradients to those that the device keeps once they are reduced; None: it keeps all."""

    @staticmethod
    def of(model: nn.Module, sharding: str, devices: int) -> Shards:
        """The shards of a model.

        model: all parameters of floats have one dtype; where several devices share it, all parameters do.
        sharding: one that ``check_sharding`` lets pass.
        """
        sharding, shapes = (sharding if devices > 1 else "none"), parameter_shapes(model)
        size = next(model.parameters()).element_size()
        recipe, kind = DtypeRecipe(size, size, 0, size), OptimizerKind(0)
        static = static_nbytes(shapes, recipe=recipe, optimizer=kind, sharding=sharding, devices=devices)
        if devices == 1:
            static = replace(static, parameters=nbytes_of(list(model.parameters())))
        dtype = next(each.dtype for each in model.parameters() if each.requires_grad)
        updated = [(shape, dtype) for shape in shard_shapes(shapes, sharding, devices)]
        return Shards(static, updated, share_of(sharding, devices) if SHARDINGS[sharding].gradients else None)

    def buffer_nbytes(self, phase: str) -> int:
        """The bytes of buffers alive in this part of a step: "forward", "backward" or "optimizer"."""
        return self.static.in_phase(phase) - self.static.parameters

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
