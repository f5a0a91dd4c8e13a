"""Makes the profile of a model: measures it in training steps, or calculates it for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recompute.counters import describe_machine
from recompute.errors import EstimateError
from recompute.estimation.factories import describe
from recompute.estimation.gpus import Gpu
from recompute.estimation.optimizer_step import OptimizerFactory
from recompute.estimation.static_memory import check_sharding
from recompute.profiling.cost_table import Profile
from recompute.profiling.dry_run import dry_run
from recompute.profiling.measure_link import measure_link
from recompute.profiling.measure_regions import Progress, measure_regions
from recompute.profiling.model_run import Loss
from recompute.profiling.roofline import roofline


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    match: str | Sequence[str] | None = None,
    kernels: bool | None = None,
    compress: bool = False,
    device: str | Gpu | None = None,
    sharding: str = "none",
    devices: int = 1,
    steps: int = 3,
    progress: Progress | None = None,
) -> Profile:
    """Measure, in training steps of ``model`` on ``batch``, the costs of each way to run each distinct region.

    The ways are: as it is; under ``recompute`` by hooks, and by kernels where they can stand in, at some points of the
    region's frontier of bytes and seconds; and under ``checkpoint``, with attention kept and without. A head is a
    region, too, if a kernel can do without its logits. On CUDA the link to the host is measured as well, for plans that
    offload. A way that runs out of memory, or cannot be used, is left out with a ``PolicyWarning``.

    Weights, gradients, buffers, random state and training flags are afterwards as before, also if this raises.

    batch, loss: as ``recompute.verify`` takes them.
    optimizer: makes one of a list of parameters; by default ``torch.optim.AdamW``. Its step is part of the profile.
    match: globs over the paths of the modules to choose for; by default the outermost layers and blocks.
    kernels: whether to consider them; by default on CUDA alone.
    compress: whether to consider ways that hold codes of 8 bits, too, whose gradients are not exact.
    device: a GPU that is not here ("H200", or a ``recompute.estimation.gpus.Gpu``). Nothing is measured then: each op's
        time is calculated from its arithmetic and its traffic, and bytes are counted on tensors without values.
    sharding, devices: beside ``device``, as ``recompute.estimate`` takes them: how several such GPUs share the model.
    steps: how many training steps are timed for each assignment of ways to regions, and as many again without marks at
        regions, which slow a step down. Where a step takes longer than a second, one is timed.

    Raises ``ModelError`` where there are no regions, nothing requires a gradient or nothing fits the device;
    ``AlreadyAppliedError`` for a model under a policy; ``ValueError`` for steps below 1.

    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2)]
    >>> found = recompute.profile(torch.nn.Sequential(*layers), torch.randn(512, 64), device="H100")
    >>> [place.path for place in found.places]  # "": what runs before the first, and after the last
    ['', '0', '1', '']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recompute.profile takes a torch.nn.Module, got {type(model).__name__}")
    if steps < 1:
        raise ValueError(f"expected at least 1 step to time; got steps={steps}")
    if device is not None:
        options: dict[str, Any] = {"match": match, "kernels": kernels is None or kernels, "compress": compress}
        options |= {"sharding": sharding, "devices": devices}
        return roofline(model, batch, device, loss=loss, optimizer=optimizer, progress=progress, **options)
    sharding = check_sharding(sharding, devices)
    if sharding != "none":
        raise EstimateError(
            f"sharding: {sharding} is calculated for a device that is named, and cannot be measured in one process. "
            "Pass device, or profile on all ranks and use agree() of recompute.integrations.distributed"
        )
    with dry_run(model, batch, loss=loss, optimizer=optimizer) as run:
        capacity = torch.cuda.get_device_properties(run.device).total_memory if run.device.type == "cuda" else None
        link, kernels = measure_link(run.device), capacity is not None if kernels is None else kernels
        table = measure_regions(run, match, kernels, steps, progress, link is not None, compress)
        facts: dict[str, Any] = {"model": describe(model, batch), "machine": describe_machine(run.device)}
        return Profile(source="measured", capacity_nbytes=capacity, link=link, **facts, **table)
