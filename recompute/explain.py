"""What a policy does to a model, as tables: which module got which rule, what is dropped, and why the rest is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate
from torch import nn

from recompute.engine.plan import Plan, Row
from recompute.engine.saved import Owner
from recompute.policy.model import Policy
from recompute.runners import Runner


@dataclass(frozen=True)
class Attachment:
    """A module under a policy: the index of its rule, and what runs its forward."""

    path: str
    module: nn.Module
    rule: int | None
    runner: Runner


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
