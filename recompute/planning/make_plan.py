"""Plans a model: profiles it, chooses how each region runs, and runs the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from recompute.errors import PlanError
from recompute.estimation.estimate_options import check_microbatches
from recompute.estimation.gpus import Gpu
from recompute.planning.allowed_ways import COMPRESS, check_allowed, only_allowed
from recompute.planning.microbatches import with_microbatches
from recompute.planning.plan import Plan, solve_plan, with_frontier
from recompute.policy.document import show
from recompute.profiling.cost_table import Profile
from recompute.profiling.offloaded_choices import with_offloading
from recompute.units import parse_budget

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def plan(
    model: nn.Module | Profile,
    example_batch: Any = None,
    *,
    budget: str | float,
    profile: Profile | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    allowed: Collection[str] | None = None,
    device: str | Gpu | None = None,
    sharding: str = "none",
    devices: int = 1,
    microbatches: int = 1,
    microbatches_in_flight: int = 1,
    frontier: bool = False,
    verify: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Choose how to run each region of a model: the fastest training step whose memory stays in ``budget``.

    model: what to train. It is profiled on ``example_batch``. The plan is run, and so is each uniform policy that fits
        and may be as fast; if one is faster, it is the plan. Or a ``Profile``: then nothing is run.
    example_batch, loss, optimizer: as ``recompute.profile`` takes them.
    profile: a profile of this model and batch, to be used instead of a new one.
    device, sharding, devices: as ``recompute.profile`` takes them, for GPUs that are not here.
    microbatches: how many such batches a step has, whose gradients add up: gradient accumulation, or a pipeline.
    microbatches_in_flight: of a pipeline's stage, how many of them are between forward and backward at once, as
        ``recompute.integrations.distributed.microbatches_in_flight`` tells. With more than 1, nothing is offloaded.
    budget: of the step, parameters and optimizer states: bytes, "40GiB", "40GB", or "80%" of the device. The first
        steps may take more, until layers are captured, but no more than the device has.
    allowed: some of "keep" (as it is), "hook", "kernel", "checkpoint", "offload" and "compress"; all but the last
        unless given. A region that has none of them stays as it is. "offload" lets saved tensors of the other ways
        leave the device, if the profile knows the link to the host. "compress" lets regions hold 8-bit codes, which are
        not exact, if the profile was made with ``compress=True``.
    frontier: solve for other budgets as well.
    verify: if the plan's peak is over the budget when it runs, or off by over 2%, correct the profile and plan again.
    progress: called with the name of a task, how much of it is done, and how much there is.

    Raises ``BudgetError`` for a budget that cannot be read or met, and ``PlanError`` for any other mistake.

    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2)]
    >>> plan = recompute.plan(torch.nn.Sequential(*layers), torch.randn(512, 64), budget="1GiB", device="H100")
    >>> plan.predicted_peak_bytes <= 2**30
    True
    """
    training: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "progress": progress}
    if isinstance(model, Profile):
        if verify:
            raise PlanError("verify=True runs the plan, which needs a model and a batch; found a profile")
        table = model
    else:
        check_request(budget, allowed)
        check_microbatches(microbatches, microbatches_in_flight, PlanError)
        if verify and device is not None:
            raise PlanError(f"verify=True runs the plan on this machine; drop it, or device={show(device)}")
        shared = {"device": device, "sharding": sharding, "devices": devices}
        table = _profiled(model, example_batch, profile, budget, allowed, training | shared)
    table = with_microbatches(table, microbatches, microbatches_in_flight)
    table = only_allowed(table if microbatches_in_flight > 1 else with_offloading(table), allowed)
    found = solve_plan(table, parse_budget(budget, table.capacity_nbytes))
    if not isinstance(model, Profile) and (verify or table.source == "measured"):
        from recompute.planning.plan_verification import verify_plan  # which imports torch

        found = verify_plan(found, model, example_batch, replan=verify, **training)
    return with_frontier(found, progress) if frontier else found


def _profiled(
    model: nn.Module,
    batch: Any,
    known: Profile | None,
    budget: str | float,
    allowed: Collection[str] | None,
    options: dict[str, Any],
) -> Profile:
    if batch is None:
        raise PlanError(f"example_batch: expected a batch on which {type(model).__name__} is profiled; found None")
    if known is not None:
        return known
    if options["device"] is None and not any(each.is_cuda for each in model.parameters()):
        parse_budget(budget)  # a share of no device is told before anything is measured
    from recompute.profiling.profile_model import profile  # which imports torch

    kernels = None if allowed is None or "kernel" in allowed else False
    return profile(model, batch, kernels=kernels, compress=COMPRESS in (allowed or ()), **options)


def check_request(budget: str | float, allowed: Collection[str] | None) -> None:
    """Raise for mistakes that can be found before anything is measured, which takes minutes."""
    check_allowed(allowed)
    is_share = isinstance(budget, str) and budget.rstrip().endswith("%")
    parse_budget(budget, 100 if is_share else None)
