"""Says what a policy does to a model: which rule each module got, what is dropped, and why the rest is kept."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from tabulate import tabulate
from torch import nn

from recompute.attach.runners import region_in
from recompute.compiled.captured_region import CapturedRegion
from recompute.compiled.runner import Runner
from recompute.engine.cut.save_plan import SavedTensorRow, SavePlan
from recompute.engine.saved_tensors import DroppedOutput, RegionStatistics
from recompute.engine.stopwatch import Stopwatch
from recompute.policy.rules import Policy


class Attachment:
    """A module under a policy, the index of its rule, and the runner that runs it in place of its forward.

    It does not keep the module alive, so that a module may lead to its own.

    module: None of a decorated function.
    class_name: by default that of the module's class.
    """

    def __init__(
        self, path: str, module: nn.Module | None, rule: int | None, runner: Runner, class_name: str | None = None
    ):
        self.path, self.rule, self.runner = path, rule, runner
        self.class_name = class_name or type(module).__name__
        self._module = None if module is None else weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, while it lives."""
        return None if self._module is None else self._module()


@dataclass(frozen=True)
class Stats:
    """Totals over the modules that a policy governs. ``later - earlier`` has those of the time between the two.

    What is held anyway counts nowhere: parameters, and the inputs of a checkpoint.
    """

    frames: int = 0
    """Forward runs of modules under a rule that keeps, drops or has kernels compute something."""
    eager_nbytes: int = 0
    """Bytes that these runs would hold for backward without the policy. ``kept_nbytes`` is what they hold with it."""
    dropped_tensors: int = 0
    """Saved tensors that were dropped, each storage counted once."""
    dropped_nbytes: int = 0
    """Bytes of these. What kernels do not save in the first place is not among them."""
    kept_nbytes: int = 0
    """Bytes held for backward: saved tensors that are not dropped, what recipes read, and what kernels save."""
    offloaded_tensors: int = 0
    """Storages that were copied off the device."""
    offloaded_nbytes: int = 0
    """Bytes of these. They are among those kept, except for the inputs of a checkpoint."""
    compressed_tensors: int = 0
    """Tensors that are held as codes of 8 bits."""
    compressed_nbytes: int = 0
    """Bytes that these had."""
    codes_nbytes: int = 0
    """Bytes of their codes and scales. They are among those kept."""
    worst_code_error: float = 0.0
    """The largest error of a number that came back from codes since the policy was applied, relative to the largest
    number of its block of 128."""
    regenerations: int = 0
    """Times that backward ran something again: an op of a tape, a checkpoint, or what a kernel recorded."""
    regenerated_nbytes: int = 0
    """Bytes that these runs made, intermediate results among them, but not what kernels regenerate in registers.

    Of a checkpoint these are the bytes of what autograd had saved, and not of all that its Python makes again.
    """
    regenerating_seconds: float | None = None
    """Seconds that these runs took, on CUDA by the device's clock; None unless ``time_regeneration()`` was called."""
    removed: bool = field(default=False, compare=False)
    """Whether the policy is no longer on the model. Two of these are equal if their numbers are."""

    def __sub__(self, earlier: Stats) -> Stats:
        seconds = self.regenerating_seconds
        totals = {name: getattr(self, name) - getattr(earlier, name) for name in _TOTALS}
        return Stats(
            **totals,
            worst_code_error=self.worst_code_error,
            regenerating_seconds=None if seconds is None else seconds - (earlier.regenerating_seconds or 0.0),
            removed=self.removed,
        )


_TOTALS = [each.name for each in fields(Stats) if each.type == "int"]


def stats(attachments: Iterable[Attachment], stopwatch: Stopwatch | None, *, removed: bool) -> Stats:
    """The totals over ``attachments``.

    stopwatch: the one that times their regenerations; None if none does.
    """
    counted = [attachment.runner.statistics for attachment in attachments]
    return Stats(
        **_totals(counted),
        worst_code_error=_worst_code_error(counted),
        regenerating_seconds=None if stopwatch is None else stopwatch.seconds(),
        removed=removed,
    )


def _worst_code_error(counted: Iterable[RegionStatistics]) -> float:
    return max((each.worst_code_error.item() for each in counted if each.worst_code_error is not None), default=0.0)


def _totals(counted: Sequence[RegionStatistics]) -> dict[str, int]:
    return {name: sum(getattr(statistics, name) for statistics in counted) for name in _TOTALS}


_BYTES = {"eager_nbytes": "eager", "dropped_nbytes": "dropped", "kept_nbytes": "kept"}
_OFFLOADED = {"offloaded_nbytes": "offloaded"}
_COMPRESSED = {"compressed_nbytes": "compressed", "codes_nbytes": "to codes of"}
_HEADERS = ("module", "count", "class", "rule", "in backward", "forwards")
_LEGEND = (
    "Bytes. eager: what a module holds for backward without the policy. a forward: of one module. in all: of all "
    "forwards of all modules, as stats() counts."
)


def explanation(policy: Policy, attachments: Iterable[Attachment], notes: Sequence[str] = ()) -> str:
    """The text of ``PolicyReport.explain``.

    notes: lines on the policy as a whole.
    """
    attachments = list(attachments)
    groups: dict[tuple[str, ...], list[RegionStatistics]] = {}
    for attachment in attachments:
        pattern = _pattern(attachment)
        index = attachment.rule
        rule = "-" if index is None else f"rules[{index}]: {policy.rules[index].action}"
        key = pattern, attachment.class_name, rule, attachment.runner.note
        groups.setdefault(key, []).append(attachment.runner.statistics)
    every = [statistics for counted in groups.values() for statistics in counted]
    columns = dict(_BYTES)
    for more in (_OFFLOADED, _COMPRESSED):
        if any(getattr(statistics, name) for statistics in every for name in more):
            columns |= more
    rows = []
    details = []
    for (pattern, type_name, rule, note), counted in groups.items():
        rows.append((pattern, f"{len(counted):,}", type_name, rule, note, *_counts(_totals(counted), columns)))
        details += _details(f"{pattern} ({type_name})", counted)
    if any(statistics.frames for statistics in every):
        numbers = _counts(_totals(every), columns)
        each_is_the_same = [""] * len(columns)
        rows.append(
            ("total", f"{len(every):,}", "", "", "", numbers[0], *each_is_the_same, *numbers[1 + len(columns) :])
        )
    align = ("left", "right", "left", "left", "left", *["right"] * (1 + 2 * len(columns)))
    of_bytes = [f"{what} {span}" for span in ("a forward", "in all") for what in columns.values()]
    table = tabulate(rows, (*_HEADERS, *of_bytes), disable_numparse=True, colalign=align if rows else None)
    head = ["\n".join([f"policy {policy.name}", *notes, table, _LEGEND])]
    if worst := _worst_code_error(every):
        head.append(
            f"Worst error of what comes back from codes: {worst:.1%} of the largest number in its block of 128."
        )
    return "\n\n".join([*head, *_captures(attachments), *details])


def _pattern(attachment: Attachment) -> str:
    return re.sub(r"\d+", "*", attachment.path) or "(the model)"


def _captures(attachments: Iterable[Attachment]) -> list[str]:
    """A line for modules that are alike: how many of them run as captured code by now, and why the others do not."""
    regions: dict[str, list[CapturedRegion]] = {}
    for attachment in attachments:
        if (region := region_in(attachment.runner)) is not None and region.was_tried:
            regions.setdefault(_pattern(attachment), []).append(region)
    lines = []
    for pattern, alike in regions.items():
        captured = sum(region.is_captured for region in alike)
        line = f"{pattern}: {captured:,} of {len(alike):,} run as captured code"
        if failures := dict.fromkeys(region.failure for region in alike if not region.is_captured):
            others = "stay on the tape" if alike[0].has_tape or alike[0].is_checkpoint else "go on by their kernels"
            line += f"; the others {others}: {'; '.join(failures)}"
        lines.append(line)
    return ["\n".join(lines)] if lines else []


def _counts(totals: Mapping[str, int], columns: Collection[str]) -> list[str]:
    """The cells for the number of forwards, the bytes of one on average, and those of all; empty if there were none."""
    frames = totals["frames"]
    if not frames:
        return [""] * (1 + 2 * len(columns))
    each = [f"{totals[name] / frames:,.0f}" for name in columns]
    return [f"{frames:,}", *each, *(f"{totals[name]:,}" for name in columns)]


def _details(title: str, counted: Sequence[RegionStatistics]) -> list[str]:
    """A table of tensors for each set of regions whose last frames followed the same plan."""
    alike: dict[tuple[int, tuple[DroppedOutput, ...]], list[RegionStatistics]] = {}
    for statistics in counted:
        if statistics.plan is not None or statistics.dropped_outputs:
            alike.setdefault((id(statistics.plan), tuple(statistics.dropped_outputs)), []).append(statistics)
    return [_tensors(title if len(each) == 1 else f"{title}, each of {len(each)}", each[0]) for each in alike.values()]


def _tensors(title: str, statistics: RegionStatistics) -> str:
    """Each tensor that autograd saved or that recipes read, whether it is kept or dropped, and why; and the totals."""
    plan, dropped_outputs = statistics.plan, statistics.dropped_outputs
    compresses = statistics.compressed_tensors > 0
    rows = [] if plan is None else list(plan.rows(compresses=compresses))
    rows += [
        SavedTensorRow(
            each.made_by, "(outside)", each.layout, each.nbytes, "dropped", "an output, which another module saved"
        )
        for each in dropped_outputs
    ]
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
    fates = ["dropped", *(["kept"] if plan is not None else [])]  # what kernels save is not listed
    fates += ["kept in 8 bits"] if compresses and plan is not None else []
    totals = ", ".join(f"{name} {_total(rows, name):,} bytes{_per_token(rows, name, plan)}" for name in fates)
    return f"{title}: {totals}\n" + tabulate(lines, headers, disable_numparse=True)


def _total(rows: Sequence[SavedTensorRow], fate: str) -> int:
    return sum(row.nbytes for row in rows if row.fate == fate)


def _per_token(rows: Sequence[SavedTensorRow], fate: str, plan: SavePlan | None) -> str:
    shape = () if plan is None else plan.input_shape
    tokens = math.prod(shape[:-1]) if len(shape) in (2, 3) else 0  # images have no tokens
    return f" ({_total(rows, fate) / tokens:,.0f} a token, {tokens} tokens)" if tokens else ""
