"""Calculates a profile for a GPU that is not here: training steps on fake tensors, with each op timed by its roofline.

The roofline of an op is the time that its arithmetic or its memory traffic takes on the device, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from recompute.engine.cut.op_costs import work
from recompute.engine.cut.ops import Kind, facts, tensors_in
from recompute.errors import ModelError
from recompute.estimation.attention_choice import Platform
from recompute.estimation.cuda_semantics import as_on_cuda
from recompute.estimation.factories import describe
from recompute.estimation.gpus import Gpu, find_gpu
from recompute.estimation.model_and_batch import on_fake_tensors
from recompute.estimation.module_tracker import parameter_shapes
from recompute.estimation.optimizer_step import OptimizerFactory, simulate_optimizer
from recompute.estimation.static_memory import (
    DtypeRecipe,
    OptimizerKind,
    StaticBytes,
    check_sharding,
    shard_shapes,
    share_of,
    static_nbytes,
)
from recompute.estimation.storage_tracker import BLOCK_NBYTES, StorageTrace, gradients_apart
from recompute.estimation.workspaces import cublas_nbytes
from recompute.profiling.cost_table import Choice, FirstSteps, HostLink, Profile, RegionCosts
from recompute.profiling.dry_run import DryRun, nbytes_of
from recompute.profiling.measure_regions import Progress, measure_regions
from recompute.profiling.model_run import Loss, arguments_of
from recompute.profiling.step_trace import StepTrace
from recompute.substitution.formulas import looking_once

# The shares of a device's peak that large GEMMs and large copies reach: on an H200, GEMMs reach 690 to 790 TFLOP/s.
_OF_FLOPS, _OF_BANDWIDTH = 0.75, 0.85
# The share of its link that copies in both directions reach: on an H200, 50 of 64 GB/s each way.
_OF_LINK = 0.75


def roofline(
    model: nn.Module,
    batch: Any,
    device: str | Gpu,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    match: str | Sequence[str] | None = None,
    kernels: bool = True,
    compress: bool = False,
    sharding: str = "none",
    devices: int = 1,
    progress: Progress | None = None,
) -> Profile:
    """Calculate a profile as ``recompute.profile`` would measure it on ``device``, which need not be here.

    Each op takes the time of its arithmetic at 0.75 of the device's peak, or of its traffic at 0.85 of the memory's
    bandwidth, whichever is longer. Copies to the host and back run at 0.75 of the link's bandwidth. A Triton
    kernel moves each of its arguments once. Launches, 8-bit codes and communication between devices take no time here.
    For 8 layers of Llama-8B at sequence 8192 a step under ``auto`` takes 0.86 of the time without a policy, and under
    ``elementwise`` 0.92. On an H200 they took 0.87 and 0.90.
    """
    gpu = device if isinstance(device, Gpu) else find_gpu(device, "device", "a recompute.estimation.gpus.Gpu")
    sharding = check_sharding(sharding, devices)
    if not (parameters := [parameter for parameter in model.parameters() if parameter.requires_grad]):
        raise ModelError(f"expected a model to train; none of {type(model).__name__}'s parameters requires a gradient")
    with (
        on_fake_tensors(model, batch, parameters[0].dtype) as (fake, given),
        as_on_cuda(Platform.of(gpu)),
        torch.inference_mode(False),
        torch.enable_grad(),
        looking_once(),
    ):
        args, kwargs = arguments_of(given)
        trained = [parameter for parameter in fake.parameters() if parameter.requires_grad]
        static, shapes = _static(fake, sharding, devices)
        updated = [(shape, trained[0].dtype) for shape in shapes]
        updating = simulate_optimizer(optimizer or AdamW, updated, partial(op_seconds, figures=gpu))
        share = share_of(sharding, devices)
        run = _FakeDryRun(fake, args, kwargs, loss, SGD(trained, lr=0.0), figures=gpu, share=share)
        table = measure_regions(run, match, kernels, 1, progress, gpu.link is not None, compress)
        held_nbytes = static.parameters + nbytes_of(list(fake.buffers())) + updating.state_nbytes
    table["regions"] = _with_buffers(table["regions"], static)
    table["static_nbytes"] = held_nbytes + table["microbatch_nbytes"] + cublas_nbytes(gpu.capability)
    table["optimizer_seconds"] = updating.seconds
    table["optimizer_peak_nbytes"] = updating.peak_nbytes + static.buffer_nbytes("optimizer")
    machine: dict[str, Any] = {**gpu._asdict(), "torch": torch.__version__}
    where = machine["gpu"] = machine.pop("name")
    if devices > 1:
        machine |= {"sharding": sharding, "devices": devices}
        where = f"each of {devices} {gpu.name} under {sharding}"
    return Profile(
        model=describe(model, batch, f"calculated for {where}"),
        machine=machine,
        source="roofline",
        capacity_nbytes=gpu.capacity_nbytes,
        link=_link(gpu),
        **table,
    )


def _static(model: nn.Module, sharding: str, devices: int) -> tuple[StaticBytes, list[tuple[int, ...]]]:
    """The bytes of a model on each device, without an optimizer's states, and the shapes that its optimizer updates.

    All parameters of floats have one dtype; where several devices share the model, all parameters do.
    """
    sharding, shapes = (sharding if devices > 1 else "none"), parameter_shapes(model)
    size = next(model.parameters()).element_size()
    recipe, kind = DtypeRecipe(size, size, 0, size), OptimizerKind(0)
    static = static_nbytes(shapes, recipe=recipe, optimizer=kind, sharding=sharding, devices=devices)
    if devices == 1:
        static = replace(static, parameters=nbytes_of(list(model.parameters())))
    return static, shard_shapes(shapes, sharding, devices)


def _with_buffers(regions: Sequence[RegionCosts], static: StaticBytes) -> tuple[RegionCosts, ...]:
    """The regions. Their peaks include the buffers to gather parameters and to reduce gradients in."""

    def raised(costs: Choice | FirstSteps) -> dict[str, Any]:
        names = {phase: f"{phase}_peak_nbytes" for phase in ("forward", "backward")}
        return {name: getattr(costs, name) + static.buffer_nbytes(phase) for phase, name in names.items()}

    def of(choice: Choice) -> Choice:
        first = choice.first_steps and choice.first_steps.model_copy(update=raised(choice.first_steps))
        return choice.model_copy(update={**raised(choice), "first_steps": first})

    return tuple([each.model_copy(update={"choices": tuple(map(of, each.choices))}) for each in regions])


def _link(gpu: Gpu) -> HostLink | None:
    """A GPU's link to its host. Nothing is known of the host: it counts as having as much memory as the GPU."""
    if gpu.link is None:
        return None
    bandwidth = gpu.link * _OF_LINK
    return HostLink(out_bandwidth=bandwidth, back_bandwidth=bandwidth, host_nbytes=gpu.capacity_nbytes)


@dataclass(frozen=True, kw_only=True)
class _FakeDryRun(DryRun):
    """Runs steps on fake CPU tensors that stand for tensors on CUDA."""

    figures: Gpu
    share: Callable[[int], int]
    """From a gradient's bytes to the share that one device keeps once it is reduced."""
    is_calculated = True

    @property
    def warmup(self) -> int:
        return 0  # nothing is launched

    @property
    def via(self) -> str:
        return "auto"

    def step(self, regions: Mapping[str, nn.Module] | None, *, counted: bool = False, timed: bool = False) -> StepTrace:
        trace = StorageTrace(BLOCK_NBYTES, partial(op_seconds, figures=self.figures))
        shards: list[Tensor] = []

        def reduce(parameter: Tensor, nbytes: int) -> None:
            parameter.grad = None
            shards.append(torch.empty(self.share(nbytes), dtype=torch.uint8))

        with gradients_apart(self.model.parameters(), trace, reduce):
            return self._traced(regions, trace, trace)


def op_seconds(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, figures: Gpu) -> float:
    """The seconds that ``output = op(*args, **kwargs)`` takes on a device, by its roofline.

    op: None for a kernel of ours, which moves each of its arguments once.
    """
    if op is None:
        return sum(each.nbytes for each in tensors_in(args)) / (figures.bandwidth * _OF_BANDWIDTH)
    known = facts(op)
    if known.kind is Kind.VIEW or op.namespace == "prim" or known.name.removeprefix("aten.") in _FREE:
        return 0.0
    flops, nbytes = work(op, args, kwargs, output)
    if known.name.endswith("backward"):
        flops = _backward_flops(known.name, args)
    if "attention" in known.name and _is_causal(op, args, kwargs):
        flops /= 2
    first = next((value for value in args if isinstance(value, Tensor)), None)
    rate = figures.float_flops if first is not None and first.dtype is torch.float32 else figures.half_flops
    return max(flops / (rate * _OF_FLOPS), nbytes / (figures.bandwidth * _OF_BANDWIDTH))


_FREE = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"])


def _backward_flops(name: str, args: tuple[Any, ...]) -> float:
    """The FLOPs of a backward op.

    Attention's backward has five GEMMs where its forward has two; a convolution's backward has two of forward's size.
    """
    operands = [value for value in args if isinstance(value, Tensor)]
    if "attention" in name and len(operands) > 2:
        _, query, key = operands[:3]
        return 10.0 * query.numel() * key.shape[-2 if "scaled_dot_product" in name else -3]
    if name == "aten.convolution_backward":
        gradient, _, weight = operands[:3]
        return 4.0 * gradient.numel() * weight[0].numel()
    return 0.0


def _is_causal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[place] if place < len(args) else kwargs.get("is_causal", argument.default_value))
    return False
