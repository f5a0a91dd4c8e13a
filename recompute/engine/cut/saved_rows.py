"""The rows of ``explain``: each value that a plan keeps or drops, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import BANDWIDTH, EXPOSED
from recompute.engine.cut.save_plan import SavePlan, derivation, pinned_by
from recompute.units import humanize


class SavedTensorRow(NamedTuple):
    """A line of ``explain``: a tensor that autograd saved, or one that is held so that others come back."""

    made_by: str
    saved_by: str
    """The op whose backward needs it."""
    layout: Layout
    nbytes: int
    fate: str
    """"dropped", "kept", "kept in 8 bits", or "alive" for a value that lives anyway."""
    reason: str


def saved_rows(plan: SavePlan, *, compresses: bool = False) -> Iterator[SavedTensorRow]:
    """Each value that autograd saved or that is kept for others, in the order of their making.

    compresses: whether the plan's frames hold the ``compressible`` values as codes.
    """
    users = Counter(number for step in plan.rerun for number in set(plan.steps[step].inputs))
    savers = dict(reversed(plan.saves))
    for number in sorted(plan.demanded | plan.kept):
        known = plan.facts[number]
        if plan.lives_anyway(number):
            fate, why = "alive", "lives anyway"
        elif number in plan.dropped:
            fate, why = "dropped", _thin_gemms_for(plan, number)
        else:
            in_codes = compresses and number in plan.compressible
            fate = "kept in 8 bits" if in_codes else "kept"
            why = _why_kept(plan, number, users[number])
        made_by = "(given)" if known.step is None else plan.steps[known.step].name
        saved_by = _saver(plan, number, savers[number]) if number in savers else "-"
        yield SavedTensorRow(made_by, saved_by, known.layout, known.nbytes, fate, why)


def input_shape(plan: SavePlan) -> tuple[int, ...]:
    """The shape of the first tensor that was given, or found, and is no parameter."""
    given = (known for known in plan.facts if known.step is None and not known.is_parameter)
    return next((tuple(known.layout.shape) for known in given), ())


def _saver(plan: SavePlan, number: int, step: int) -> str:
    """The op that saved a value when ``step`` was next: that step's if it reads the value, else the one before."""
    if step < len(plan.steps) and number in plan.steps[step].inputs:
        return plan.steps[step].name
    return plan.steps[step - 1].name if step else "?"


def _why_kept(plan: SavePlan, number: int, users: int) -> str:
    known = plan.facts[number]
    if known.is_exposed or number in plan.handed_out:
        why = f"{EXPOSED}, and may change unnoticed"
    elif number in plan.overwritten:
        why = "overwritten after it was saved"
    elif known.step is None:
        why = "an input of the module"
    elif number in pinned_by(plan.steps):
        why = "passed to recompute.keep"
    else:
        why = plan.steps[known.step].reason or _why_held(plan, number)
    if users:
        why += "; 1 rerun op reads it" if users == 1 else f"; {users} rerun ops read it"
    return why if number in plan.demanded else f"{why}; autograd alone would not save it"


def _why_held(plan: SavePlan, number: int) -> str:
    """Why a value is kept that its step could bring back."""
    if plan.steps[plan.origin(number)].is_costly:
        return "cheaper to hold than to recompute"
    needed = _brings_back(plan, number)
    if needed is None:
        return "smaller than the tensors that recomputing it would need"
    moved = BANDWIDTH * sum(plan.steps[index].seconds for index in needed)
    return f"small, and recomputing it takes as long as moving {humanize(round(moved))}"


def _thin_gemms_for(plan: SavePlan, number: int) -> str:
    """Names the thin GEMMs that run again for a dropped value, and not for another saved one; "" if there are none."""
    needed = _brings_back(plan, number) or set()
    found = [step.name for index, step in enumerate(plan.steps) if step.is_thin and index in needed]
    return f"recomputing it reruns a thin (cheap) GEMM: {', '.join(found)}" if found else ""


def _brings_back(plan: SavePlan, number: int) -> set[int] | None:
    """The steps that make a value from others that are there; None if one is costly or may not run again."""
    return derivation(number, plan.steps, plan.facts, (plan.kept | plan.demanded) - {number})
