"""Says what a policy does to a model: which rule each module got, what is dropped, and why the rest is kept."""

from __future__ import annotations

import math
import textwrap
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from tabulate import tabulate
from torch import nn

from recompute.attach.runners import region_in
from recompute.compiled.captured_region import CapturedRegion
from recompute.compiled.runner import Runner
from recompute.engine.cut.saved_rows import SavedTensorRow, input_shape, saved_rows
from recompute.engine.region_statistics import DroppedOutput, RegionStatistics, Stopwatch, Totals
from recompute.policy.matching import pattern_of
from recompute.policy.rules import Policy
from recompute.units import humanize


class Attachment:
    """A module under a policy, the index of its rule, and the runner that runs it in place of its forward.

    It does not keep the module alive, so that a module may lead to its own.

    module: None for a decorated function.
    class_name: by default, the name of the module's class.
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


@dataclass(kw_only=True)
class Stats(Totals):
    """Totals over the modules that a policy governs. ``later - earlier`` has those of the time between the two."""

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
WIDTH = 110
"""The columns that an explanation takes unless it is wide."""
_LEAST = 12
"""The columns that are left to a name, however little room there is."""


@dataclass(frozen=True)
class _Alike:
    """The modules of a line: their paths differ in indices alone, and they are treated alike."""

    pattern: str
    type_name: str
    rule: str
    note: str
    counted: list[RegionStatistics]

    @property
    def totals(self) -> dict[str, int]:
        return _totals(self.counted)


def explanation(
    policy: Policy,
    attachments: Iterable[Attachment],
    notes: Sequence[str] = (),
    *,
    wide: bool = False,
    width: int = WIDTH,
) -> str:
    """The text of ``PolicyReport.explain``.

    notes: lines on the policy as a whole.
    """
    attachments = list(attachments)
    groups = _groups(policy, attachments)
    every = _counted(groups)
    columns = dict(_BYTES)
    for more in (_OFFLOADED, _COMPRESSED):
        if any(getattr(statistics, name) for statistics in every for name in more):
            columns |= more
    table = _wide_modules(groups, columns) if wide else _modules(groups, columns, width)
    notes = notes if wide else [_wrapped(note, width) for note in notes]
    parts = ["\n".join([f"policy {policy.name}", *notes, table])]
    if worst := _worst_code_error(every):
        parts.append(
            f"Worst error of what comes back from codes: {worst:.1%} of the largest number in its block of 128."
        )
    if captured := _captures(attachments):
        parts.append("\n".join(captured if wide else (_wrapped(line, width) for line in captured)))
    for group in groups:
        title = f"{group.pattern} ({group.type_name})"
        for count, statistics in _with_plans(group.counted):
            each = title if count == 1 else f"{title}, each of {count}"
            parts.append(_tensors(each, statistics, None if wide else width))
    return "\n\n".join(parts)


def _groups(policy: Policy, attachments: Iterable[Attachment]) -> list[_Alike]:
    groups: dict[tuple[str, str, str, str], list[RegionStatistics]] = {}
    for attachment in attachments:
        index = attachment.rule
        rule = "-" if index is None else f"rules[{index}]: {policy.rules[index].action}"
        key = _pattern(attachment), attachment.class_name, rule, attachment.runner.note
        groups.setdefault(key, []).append(attachment.runner.statistics)
    return [_Alike(*key, counted) for key, counted in groups.items()]


def _modules(groups: Sequence[_Alike], columns: Mapping[str, str], width: int) -> str:
    """The table of modules, with the bytes of one forward of each, and in the last line those of all forwards."""
    rows, notes, unknown = [], [], [""] * (1 + len(columns))
    for group in groups:
        totals = group.totals
        frames = totals["frames"]
        numbers = [f"{frames:,}", *(humanize(round(totals[name] / frames)) for name in columns)] if frames else unknown
        rows.append((group.pattern, f"{len(group.counted):,}", *numbers))
        notes.append(f"{group.type_name}, {group.rule}; {group.note}".replace(", -; ", "; "))
    totals = _totals(every := _counted(groups))
    if totals["frames"]:
        rows.append(("total", f"{len(every):,}", f"{totals['frames']:,}", *(humanize(totals[n]) for n in columns)))
        notes.append("")
    headers = ("module", "count", "forwards", *columns.values())
    table = _fitted(headers, "class, rule; in backward", rows, notes, width, giving_way=1)
    return f"{table}\n{_wrapped(_LEGEND, width, indent='')}"


_LEGEND = (
    "Bytes of one forward of one module; in the last line, of all forwards of all modules. eager: what a module holds "
    "for backward without the policy. Below, (given) is an input or a parameter, and alive is held in any case, as "
    "parameters are. explain(wide=True), or --wide, has every byte."
)


def _wide_modules(groups: Sequence[_Alike], columns: Mapping[str, str]) -> str:
    """The same with every byte, for one forward and for all of them, in lines as long as that takes."""
    about = [(each.pattern, f"{len(each.counted):,}", each.type_name, each.rule, each.note) for each in groups]
    rows = [(*cells, *_counts(each.totals, columns)) for cells, each in zip(about, groups, strict=True)]
    totals = _totals(every := _counted(groups))
    if totals["frames"]:
        frames, *numbers = _counts(totals, columns)
        each_is_the_same = [""] * len(columns)
        rows.append(("total", f"{len(every):,}", "", "", "", frames, *each_is_the_same, *numbers[len(columns) :]))
    align = ("left", "right", "left", "left", "left", *["right"] * (1 + 2 * len(columns)))
    of_bytes = [f"{what} {span}" for span in ("a forward", "in all") for what in columns.values()]
    headers = ("module", "count", "class", "rule", "in backward", "forwards", *of_bytes)
    table = tabulate(rows, headers, disable_numparse=True, colalign=align if rows else None)
    return f"{table}\n{_WIDE_LEGEND}"


_WIDE_LEGEND = (
    "Bytes. eager: what a module holds for backward without the policy. a forward: of one module. in all: of all "
    "forwards of all modules, as stats() counts."
)


def _counted(groups: Iterable[_Alike]) -> list[RegionStatistics]:
    return [statistics for group in groups for statistics in group.counted]


def _counts(totals: Mapping[str, int], columns: Collection[str]) -> list[str]:
    """The cells for the number of forwards, the bytes of one on average, and those of all; empty if there were none."""
    frames = totals["frames"]
    if not frames:
        return [""] * (1 + 2 * len(columns))
    each = [f"{totals[name] / frames:,.0f}" for name in columns]
    return [f"{frames:,}", *each, *(f"{totals[name]:,}" for name in columns)]


def _pattern(attachment: Attachment) -> str:
    return pattern_of(attachment.path) or "(the model)"


def _captures(attachments: Iterable[Attachment]) -> list[str]:
    """For modules that are alike, how many are captured, their generated kernels, and why others are not captured."""
    regions: dict[str, list[CapturedRegion]] = {}
    for attachment in attachments:
        if (region := region_in(attachment.runner)) is not None and region.was_tried:
            regions.setdefault(_pattern(attachment), []).append(region)
    lines = []
    for pattern, alike in regions.items():
        captured = sum(region.is_captured for region in alike)
        line = f"{pattern}: {captured:,} of {len(alike):,} run as captured code"
        if failures := dict.fromkeys(region.failure for region in alike if not region.is_captured):
            line += f"; the others stay on the tape: {'; '.join(failures)}"
        lines.append(line)
        kernels = dict.fromkeys(kernel for region in alike for kernel in region.kernels)
        lines += [f"  {kernel}" for kernel in kernels]
    return lines


def _with_plans(counted: Sequence[RegionStatistics]) -> list[tuple[int, RegionStatistics]]:
    """One of each set of regions whose last frames followed the same plan, and how many they are."""
    alike: dict[tuple[int, tuple[DroppedOutput, ...]], list[RegionStatistics]] = {}
    for statistics in counted:
        if statistics.plan is not None or statistics.dropped_outputs:
            alike.setdefault((id(statistics.plan), tuple(statistics.dropped_outputs)), []).append(statistics)
    return [(len(each), each[0]) for each in alike.values()]


_TENSOR_HEADERS = ("made by", "saved by", "shape", "dtype", "bytes", "fate")


def _tensors(title: str, statistics: RegionStatistics, width: int | None) -> str:
    """Each tensor that autograd saved or that recipes read, whether it is kept or dropped, and why; and the totals.

    width: the most columns; None for every byte, in lines as long as that takes.
    """
    plan = statistics.plan
    rows = [] if plan is None else list(saved_rows(plan, compresses=statistics.compressed_tensors > 0))
    why = "an output that another module saved"
    rows += [
        SavedTensorRow(each.made_by, "(outside)", each.layout, each.nbytes, "dropped", why)
        for each in statistics.dropped_outputs
    ]
    cells = []
    for row in rows:
        shape, dtype = "x".join(map(str, row.layout.shape)), str(row.layout.dtype).removeprefix("torch.")
        nbytes = f"{row.nbytes:,}" if width is None else humanize(row.nbytes)
        cells.append((row.made_by, row.saved_by, shape, dtype, nbytes, row.fate))
    if width is None:
        totals = _tensor_totals(rows, statistics, lambda nbytes: f"{nbytes:,} bytes")
        lines = [(*of_row, row.reason) for of_row, row in zip(cells, rows, strict=True)]
        return f"{title}: {totals}\n{tabulate(lines, (*_TENSOR_HEADERS, 'because'), disable_numparse=True)}"
    reasons = ["" if row.fate == "alive" else row.reason for row in rows]  # "alive" says the same
    totals = _tensor_totals(rows, statistics, humanize)
    fits = len(title) + len(totals) + 2 <= width
    head = f"{title}: {totals}" if fits else f"{title}:\n{_wrapped('    ' + totals, width)}"
    return f"{head}\n{_fitted(_TENSOR_HEADERS, 'because', cells, reasons, width, giving_way=2)}"


def _tensor_totals(rows: Sequence[SavedTensorRow], statistics: RegionStatistics, show: Callable[[int], str]) -> str:
    """The bytes of each fate, and those of a token where the module is given tokens. What kernels save is not known."""
    plan = statistics.plan
    shape = () if plan is None else input_shape(plan)
    tokens = math.prod(shape[:-1]) if len(shape) in (2, 3) else 0  # images have no tokens
    fates = ["dropped"]
    if plan is not None:
        fates += ["kept", "kept in 8 bits"] if statistics.compressed_tensors > 0 else ["kept"]
    totals = []
    for fate in fates:
        nbytes = sum(row.nbytes for row in rows if row.fate == fate)
        each = show(round(nbytes / tokens)).removesuffix(" bytes") if tokens else ""
        totals.append(f"{fate} {show(nbytes)}" + (f" ({each} a token, {tokens} tokens)" if tokens else ""))
    return ", ".join(totals)


def _wrapped(text: str, width: int, indent: str = "    ") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _fitted(
    headers: Sequence[str],
    below: str,
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    width: int,
    *,
    giving_way: int,
) -> str:
    """A table of at most ``width`` columns. A row's note stands below it; ``below`` is the notes' header.

    giving_way: how many of the first columns are shortened where there is no room.
    """
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths[:giving_way]) > _LEAST:
        widths[widths.index(max(widths[:giving_way]))] -= 1
    is_text = [header in ("module", "made by", "saved by", "shape", "dtype", "fate") for header in headers]

    def line(cells: Sequence[str]) -> str:
        fitted = [_shortened(cell, room) for cell, room in zip(cells, widths, strict=True)]
        aligned = zip(fitted, widths, is_text, strict=True)
        return "  ".join(cell.ljust(room) if text else cell.rjust(room) for cell, room, text in aligned).rstrip()

    indent = "    "
    lines = [line(headers), indent + below, "  ".join("-" * room for room in widths)]
    for row, note in zip(rows, notes, strict=True):
        lines += [line(row), *([_wrapped(indent + note, width, indent)] if note else [])]
    return "\n".join(lines)


def _shortened(name: str, room: int) -> str:
    """``name`` with its middle left out where there is no room for all of it."""
    head = (room - 1) // 2
    return name if len(name) <= room else f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"
