"""What a policy does to a model: which module got which rule, what is dropped, and why the rest is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from tabulate import tabulate
from torch import nn

from recompute.engine.plan import Plan, Row
from recompute.engine.saved import Owner
from recompute.engine.stopwatch import Stopwatch
from recompute.policy.model import Policy
from recompute.runners import Runner


@dataclass(frozen=True)
class Attachment:
    """A module under a policy: the index of its rule, and what runs its forward."""

    path: str
    module: nn.Module
    rule: int | None
    runner: Runner


@dataclass(frozen=True)
class Stats:
    """Totals over the modules that a policy governs. ``later - earlier``: of what was between."""

    frames: int = 0
    """Forward runs of a region."""
    dropped_tensors: int = 0
    """Saved tensors dropped, each storage counted once."""
    dropped_nbytes: int = 0
    kept_nbytes: int = 0
    """Bytes saved in regions that could not be dropped."""
    regenerations: int = 0
    """Times that backward ran something again: an op of a tape, a checkpoint, what a kernel recorded."""
    regenerated_nbytes: int = 0
    """Bytes that came back so, with what had to come back on the way; not what kernels regenerate in registers."""
    regenerating_seconds: float | None = None
    """How long that took, on CUDA the device; None where ``time_regeneration()`` was not asked for."""

    def __sub__(self, earlier: Stats) -> Stats:
        seconds = self.regenerating_seconds
        totals = {name: getattr(self, name) - getattr(earlier, name) for name in _TOTALS}
        return Stats(
            **totals, regenerating_seconds=None if seconds is None else seconds - (earlier.regenerating_seconds or 0.0)
        )


_TOTALS = [each.name for each in fields(Stats) if each.name != "regenerating_seconds"]


def stats(attachments: Iterable[Attachment], stopwatch: Stopwatch | None) -> Stats:
    """stopwatch: that of the attachments' owners, if they have one."""
    owners = [attachment.runner.owner for attachment in attachments]
    totals = {name: sum(getattr(owner, name) for owner in owners) for name in _TOTALS}
    return Stats(**totals, regenerating_seconds=None if stopwatch is None else stopwatch.seconds())


def explanation(policy: Policy, attachments: Iterable[Attachment]) -> str:
    """The text of ``AppliedPolicy.explain``."""
    groups: dict[tuple[str, ...], list[Owner]] = {}
    for attachment in attachments:
        pattern = re.sub(r"\d+", "*", attachment.path) or "(the model)"
        index = attachment.rule
        rule = "-" if index is None else f"rules[{index}]: {policy.rules[index].action}"
        key = pattern, type(attachment.module).__name__, rule, attachment.runner.note
        groups.setdefault(key, []).append(attachment.runner.owner)
    rows = []
    details = []
    for (pattern, type_name, rule, note), owners in groups.items():
        frames = sum(owner.frames for owner in owners)
        dropped, kept = (sum(getattr(owner, name) for owner in owners) for name in ("dropped_nbytes", "kept_nbytes"))
        per_forward = [f"{nbytes / frames:,.0f}" if frames else "" for nbytes in (dropped, kept)]
        rows.append((pattern, len(owners), type_name, rule, note, *per_forward))
        details += [_tensors(f"{pattern} ({type_name})", plan) for plan in _distinct(owners)]
    headers = ("module", "count", "class", "rule", "in backward", "bytes dropped", "bytes kept")
    return "\n\n".join([f"policy {policy.name}\n" + tabulate(rows, headers, disable_numparse=True), *details])


def _distinct(owners: Sequence[Owner]) -> list[Plan]:
    """The plans of the owners' last frames, each once."""
    return list({id(owner.plan): owner.plan for owner in owners if owner.plan is not None}.values())


def _tensors(title: str, plan: Plan) -> str:
    """Each tensor that autograd saved or that is held for others, its fate and why, and the totals."""
    rows = list(plan.rows())
    lines = [
        (
            row.made_by,
            row.saved_by,
            "x".join(map(str, row.layout.shape)),
            str(row.layout.dtype).removeprefix("torch."),
            f"{row.nbytes:,}",
            row.fate,
            row.reason,
        )
        for row in rows
    ]
    headers = ("made by", "saved by", "shape", "dtype", "bytes", "fate", "because")
    totals = ", ".join(
        f"{name} {_total(rows, name):,} bytes{_per_token(rows, name, plan)}" for name in ("dropped", "kept")
    )
    return f"{title}: {totals}\n" + tabulate(lines, headers, disable_numparse=True)


def _total(rows: Sequence[Row], fate: str) -> int:
    return sum(row.nbytes for row in rows if row.fate == fate)


def _per_token(rows: Sequence[Row], fate: str, plan: Plan) -> str:
    shape = plan.input_shape
    tokens = math.prod(shape[:-1]) if len(shape) in (2, 3) else 0  # not of images
    return f" ({_total(rows, fate) / tokens:,.0f} a token, {tokens} tokens)" if tokens else ""
