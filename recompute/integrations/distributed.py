"""Several processes: policies under DDP, FSDP2, tensor, pipeline and expert parallelism; plans that ranks agree on.

``recompute.apply`` may come before or after the wrapper (``DistributedDataParallel``, ``fully_shard``,
``parallelize_module``), whose hooks stay around the modules. Give each rank the same policy.

- Gradients are those without the policy, bit for bit where the policy says so, also with ``no_sync``, with gradient
  accumulation and with weights that stay gathered. Bytes are those of the rank.
- ``recompute``, and ``checkpoint`` with a ``keep``, never run a collective again: they keep its output.
- ``checkpoint`` without a ``keep`` runs a module's Python again. FSDP2 gathers nothing more for that. Under tensor,
  context or expert parallelism the module's forward collectives run once more, on all ranks in the same order.
- Weights that FSDP2 has gathered are read and not held. An op that reads one runs again only if the weight is still
  there when the region ends: then it is there again when the region's backward begins.
- A DTensor is regenerated as the rank's part of it. No kernel takes DTensors: under ``via: auto`` hooks serve; under
  ``via: kernel`` a warning says that the module runs as it is written.
- Each rank decides by itself which tensors to keep, from its ops and shapes. No decision moves a collective.
- Random numbers of a region are drawn again from each rank's own state.

Measured times differ from rank to rank: ``agree`` makes one profile of them, and ``verify_plan`` runs the plan.

Pipelines (``torch.distributed.pipelining``): put a policy on the module of each stage, before or after the
``PipelineStage`` is made. Stages differ in the microbatches between forward and backward, so each gets a plan of its
own: ``microbatches_in_flight`` tells the number. Zero-bubble schedules run backward for inputs first and for weights
later. Gradients are equal there, too, but captured code goes back to the tape, and tensors regenerated for weights may
live from the first part of backward to the second.

DeepSpeed: put the policy on the model before ``deepspeed.initialize``. Losses under ZeRO-1, 2 and 3 are those without
the policy (tried with DeepSpeed 0.19 on CPUs; its pipelines, offloading and activation checkpointing were not).
ZeRO-3 frees weights when it likes. So ``recompute`` never runs an op again that reads a weight: it keeps a norm's
output, for example, and saves less memory than under FSDP2. ``checkpoint`` drops the same there as elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from recompute.errors import PlanError
from recompute.planning import plan_verification
from recompute.planning.plan import Plan
from recompute.planning.plan_verification import MeasuredStep
from recompute.profiling.cost_table import Profile
from recompute.profiling.step_trace import StepPart

if TYPE_CHECKING:
    from torch import nn

    from recompute.estimation.optimizer_step import OptimizerFactory
    from recompute.profiling.model_run import Loss

_OF_THE_RANK = ("model", "machine")
_LEAST = ("capacity_nbytes", "link")
"""Keys of a profile. The least value over all ranks counts, and None where one rank has None."""


def agree(profile: Profile, group: dist.ProcessGroup | None = None) -> Profile:
    """One profile for all ranks, with the most of each time and each number of bytes that any of them has measured.

    The slowest link to the host, the least room there and the fewest bytes to offload count. A plan made from it is the
    same on every rank, and fits each of them. Call this on all ranks of ``group`` (by default all there are), each with
    its own profile::

        plan = recompute.plan(agree(recompute.profile(model, batch)), budget="40GiB")

    Returns ``profile`` itself if there is only one process. Raises ``PlanError`` on every rank if the ranks' models
    differ in their regions, or in the ways to run them.
    """
    tables = _gathered(profile.model_dump(), group)
    if len(tables) == 1:
        return profile
    for rank, table in enumerate(tables):
        table.update({key: tables[0][key] for key in _OF_THE_RANK})
        if (where := _difference(tables[0], table, "profile")) is not None:
            raise PlanError(
                f"expected profiles that differ only in times and bytes; rank {rank} of the group has another {where} "
                "than rank 0. Profile the same model, with batches of one shape, on all ranks."
            )
    least = {key: _least([table.pop(key) for table in tables]) for key in _LEAST}
    return Profile(**{**_most(tables), **least})


def verify_plan(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    *,
    group: dist.ProcessGroup | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    steps: int = 3,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Run the plan on all ranks, and plan again while its peak is over the budget on one of them or off by 2%.

    ``recompute.plan(..., verify=True)`` does the same on one rank. The highest peak and the longest time of any rank
    count, so that all ranks end with the same plan, and it fits each of them. Call this on all ranks of ``group``, with
    the plan of an agreed profile, the wrapped model, and the rank's own batch, which may be larger than others'::

        profile = agree(recompute.profile(model, batch))
        plan = verify_plan(recompute.plan(profile, budget="40GiB"), model, batch)

    Returns the plan with ``rounds``, the same on every rank; the model is afterwards as before.

    model, batch, loss, optimizer: as ``recompute.profile`` took them.
    steps: how many steps of each policy are timed.
    progress: called with the name of a task, how much of it is done, and how much there is.

    Raises ``PlanError`` on every rank if the ranks' plans differ, and ``BudgetError`` on every rank if the measured
    profile leaves no plan.
    """
    profile = plan.profile.model_dump(exclude=set(_OF_THE_RANK))
    parts = {"budget": plan.budget_nbytes, "choices": plan.assignment, "profile": profile}
    of_ranks = _gathered(parts, group)
    for rank, found in enumerate(of_ranks):
        for part in parts:
            if found[part] != of_ranks[0][part]:
                raise PlanError(
                    f"expected one plan on all ranks; rank {rank} of the group has a plan with another {part} than "
                    "rank 0. Plan with the profile of agree(), and with the same budget, on all ranks."
                )
    return plan_verification.verify_plan(
        plan,
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        steps=steps,
        progress=progress,
        agree=lambda measured: _most_measured(_gathered(measured, group)),
    )


def microbatches_in_flight(schedule: Any) -> dict[int, int]:
    """For each stage of this rank, by its index: how many microbatches are between forward and backward at once.

    schedule: one of ``torch.distributed.pipelining``, made for this rank's stages. ``recompute.plan`` needs the number,
        since each of these microbatches holds saved tensors::

            schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
            plan = recompute.plan(
                stage.submod,
                one_microbatch,
                budget="40GiB",
                microbatches=8,
                microbatches_in_flight=microbatches_in_flight(schedule)[stage.stage_index],
            )
            recompute.apply(stage.submod, plan.policy)

    A device that has several stages, as interleaved schedules give it, needs a budget for each: plan each stage for its
    share of the device. Where backward for inputs and for weights are apart, a microbatch lands with the latter.

    Raises ``PlanError`` for a schedule whose order is not known.
    """
    names = {kind.__name__ for kind in type(schedule).__mro__}
    if {"ScheduleGPipe", "Schedule1F1B"} & names:
        stage, count = schedule._stage, schedule._n_microbatches
        most = count if "ScheduleGPipe" in names else min(count, stage.num_stages - stage.stage_index)
        return {stage.stage_index: most}
    if "PipelineScheduleMulti" in names and schedule.pipeline_order:
        return _most_at_once(schedule.pipeline_order[schedule.rank])
    raise PlanError(
        "expected a schedule of torch.distributed.pipelining: ScheduleGPipe, Schedule1F1B, or one with an order of "
        f"actions; found {type(schedule).__name__}. Count the microbatches in flight yourself, and pass the number"
    )


def _most_at_once(actions: Iterable[Any]) -> dict[int, int]:
    """By the index of a stage, the most microbatches that have begun and not landed, of a rank's actions in order."""
    flying: Counter[int] = Counter()
    most: Counter[int] = Counter()
    pending = [action for action in actions if action is not None][::-1]
    while pending:
        action = pending.pop()
        kind = action.computation_type.name
        if getattr(action, "sub_actions", None):  # a forward beside a backward
            pending += reversed(action.sub_actions)
        elif kind == "FORWARD":
            flying[action.stage_index] += 1
            most[action.stage_index] = max(most[action.stage_index], flying[action.stage_index])
        elif kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            flying[action.stage_index] -= 1
    return dict(most)


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The ``value`` of each rank of the group, by rank; this one alone if there is only one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _most_measured(ranks: list[MeasuredStep]) -> MeasuredStep:
    """The most of each number over all ranks; no places if some rank could not tell them apart."""
    places = [one.places for one in ranks]
    return MeasuredStep(
        max(one.peak_nbytes for one in ranks),
        max(one.step_seconds for one in ranks),
        tuple(StepPart(*map(max, zip(*map(astuple, alike), strict=True))) for alike in zip(*places, strict=True))
        if len({len(each) for each in places}) == 1
        else (),
        max(one.first_steps_peak_nbytes for one in ranks),
    )


def _is_measured(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _difference(one: Any, other: Any, where: str) -> str | None:
    """Where two tables differ by more than measured numbers: "profile.regions[0].name"; None if they do not."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        parts = ((one[key], other[key], f"{where}.{key}") for key in one if key not in ("rule", "storages", *_LEAST))
        same = one.get("rule") == other.get("rule")
        return f"{where}.rule" if not same else next(filter(None, (_difference(*part) for part in parts)), None)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (_difference(*pair, f"{where}[{index}]") for index, pair in pairs)), None)
    if _is_measured(one) and _is_measured(other) and not where.endswith((".region", ".layer", ".version")):
        return None
    return None if one == other else where


def _most(values: list[Any]) -> Any:
    """One table with the largest of each number. Everything else is the same in all of them."""
    first = values[0]
    if isinstance(first, dict):
        found = {key: _most([value[key] for value in values]) for key in first if key not in ("rule", "storages")}
        storages = {"storages": min((value["storages"] for value in values), key=sum)} if "storages" in first else {}
        return found | storages | ({"rule": first["rule"]} if "rule" in first else {})
    if isinstance(first, (list, tuple)):
        return [_most(list(parts)) for parts in zip(*values, strict=True)]
    return max(values) if _is_measured(first) else first


def _least(values: list[Any]) -> Any:
    """The smallest of each number; None where one of the values is None."""
    if None in values:
        return None
    first = values[0]
    return {key: min(value[key] for value in values) for key in first} if isinstance(first, dict) else min(values)
