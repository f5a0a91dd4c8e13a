"""What one of several devices holds of a model, where they share it."""

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
    """The parameters of a model, as one device holds them. Bytes are of the dtype that they have."""

    parameter_nbytes: int
    buffers: tuple[ExtraBuffer, ...]
    """What is gathered and reduced in."""
    shapes: tuple[tuple[int, ...], ...] | None
    """Of what the device's optimizer updates; None: the parameters themselves."""
    share: Callable[[int], int] | None
    """What the device keeps of so many bytes of gradients, once they have been reduced; None: all."""

    @staticmethod
    def of(model: nn.Module, sharding: str, devices: int) -> Shards:
        """Of a model whose parameters have one dtype, under a sharding that ``check_sharding`` lets pass."""
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

    def updated(self, parameters: Sequence[nn.Parameter], device: str) -> list[nn.Parameter]:
        """What the device's optimizer is given, with gradients: new tensors on ``device``, "meta" or fakes' "cpu"."""
        shapes = [parameter.shape for parameter in parameters] if self.shapes is None else self.shapes
        dtypes = [parameter.dtype for parameter in parameters] + [parameters[0].dtype] * len(shapes)
        given = []
        for shape, dtype in zip(shapes, dtypes, strict=False):
            given.append(nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
            given[-1].grad = torch.empty(shape, dtype=dtype, device=device)
        return given

    def buffer_nbytes(self, phase: str) -> int:
        """Alive in this part of a step: "forward", "backward" or "optimizer"."""
        return sum(buffer.nbytes for buffer in self.buffers if phase in buffer.phases)

    def with_buffers(self, regions: Sequence[RegionCosts]) -> tuple[RegionCosts, ...]:
        """The regions with what is gathered and reduced in while they run."""
        forward, backward = self.buffer_nbytes("forward"), self.buffer_nbytes("backward")

        def of(choice: Choice) -> Choice:
            peaks = {
                "forward_peak_nbytes": choice.forward_peak_nbytes + forward,
                "backward_peak_nbytes": choice.backward_peak_nbytes + backward,
            }
            return choice.model_copy(update=peaks)

        return tuple([each.model_copy(update={"choices": tuple(map(of, each.choices))}) for each in regions])
