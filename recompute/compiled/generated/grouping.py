"""Groups the statements of a program that become one kernel, and orders all of them.

Statements are looked at from the last to the first. A statement joins a group that reads its result. Where nothing else
reads the result, it never reaches memory. Else the group writes it, and it has to have as many elements as the other
tensors that the group writes. A value that is cheap to make from tensors in memory, such as a cast, is made in each
group that reads it. Last, groups over as many elements that read the same tensor become one.

Any order is right that keeps reads behind writes, and writes behind reads before them. Groups are contracted only if
there still is such an order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import torch
from torch._ops import OpOverload

from recompute.compiled.generated.dropout import DropoutMask
from recompute.compiled.generated.groupable import NotOneKernel, can_be_generated, elements_of, space_of
from recompute.compiled.generated.kernel_source import KernelSource
from recompute.compiled.generated.pointwise_ops import COPIES
from recompute.compiled.generated.row_ops import ROW_OPS
from recompute.compiled.recording import Recording
from recompute.compiled.statements import Statement
from recompute.engine.cut.filled_memory import ALLOCATE
from recompute.engine.cut.ops import FACTORY, Kind, facts, facts_of_call

MAX_CALLS = 48
"""Of one kernel."""
MAX_TENSORS = 24
"""Of one kernel, read and written."""
MAX_WAIT = 4
"""Costly ops between two terms of a sum that one kernel adds. Terms that come later are added up as they come, as the
gradients of a weight that several tiles give: else all of them would be in memory together.
"""
MAX_DISTANCE = 60
"""Statements between groups that are joined because they read the same: the outputs of either live until then."""


@dataclass(eq=False)
class Unit:
    """Statements that run as one."""

    members: set[int]


@dataclass
class Grouping:
    """Groups the statements. last: the variables that are read when all of them have run."""

    statements: Sequence[Statement]
    last: Collection[str]
    recording: Recording
    units: dict[int, list[Unit]] = field(default_factory=dict)
    """For each statement the units that it is in; where there are several, each makes the value for itself."""

    def __post_init__(self) -> None:
        self.fits = [self._fits(statement) for statement in self.statements]
        self._depends()
        for index, statement in enumerate(self.statements):
            if self.fits[index] and statement.call is not None and statement.call.op in ALLOCATE:
                self.fits[index] = self._is_filled(index)
        unread = self._leave_out_unread()
        for index in reversed(range(len(self.statements))):
            if self.statements[index].view_of is None and index not in unread:
                self._place(index)
        self._extend_rows()
        self._join_readers()

    def _fits(self, statement: Statement) -> bool:
        call = statement.call
        if call is None or not can_be_generated(call, self.recording):
            return False
        return call.op not in ROW_OPS or call.results[0] not in self.recording.stable

    def _leave_out_unread(self) -> set[int]:
        """The statements whose values nobody reads, as a dropout's output where backward needs its mask alone."""
        unread: set[int] = set()
        for index in reversed(range(len(self.statements))):
            is_unread = index not in self.at_end and unread.issuperset(self.readers[index])
            if is_unread and (self.fits[index] or self._only_gives(self.statements[index])):
                unread.add(index)
                self.fits[index] = False
        for readers in self.readers:
            readers[:] = [reader for reader in readers if reader not in unread]
        return unread

    def _only_gives(self, statement: Statement) -> bool:
        """Whether a statement does no more than to make, or to change, tensors of statements."""
        call = statement.call
        if call is None or not self.own.issuperset((*statement.writes, *statement.makes)):
            return False
        known = facts_of_call(call.op, call.args, call.kwargs) if call.op in COPIES else facts(call.op)
        return not known.is_foreign and (known.kind in (Kind.PURE, Kind.IN_PLACE) or known.reason == FACTORY)

    def _is_filled(self, index: int) -> bool:
        """Whether generated kernels fill a statement's output, part by part, before anybody reads it."""
        missing = elements_of(self.statements[index].call, self.recording)
        while missing > 0:
            readers = set(self.readers[index])
            if index in self.at_end or len(readers) != 1 or not self.fits[index := readers.pop()]:
                return False
            call = self.statements[index].call
            if call is None or call.op is not torch.ops.aten.as_strided_scatter.default:
                return False
            missing -= math.prod(call.args[2])
        return True

    def _depends(self) -> None:
        """Find the statements that each one has to follow, and its result's readers. A view is part of a reader."""
        made: dict[str, int] = {}
        reading: dict[str, list[int]] = {}
        self.before: list[set[int]] = [set() for _ in self.statements]
        self.readers: list[list[int]] = [[] for _ in self.statements]
        self.roots: dict[str, str] = {}
        """For the variable of a view, that of the tensor."""
        self.outdated: set[int] = set()
        """The statements that read tensors which others overwrite afterwards."""
        last_ordered: int | None = None
        for index, statement in enumerate(self.statements):
            if statement.view_of is not None:
                self.roots[statement.makes[0]] = statement.view_of
                continue
            before = self.before[index]
            reads = {self.roots.get(name, name) for name in statement.reads}
            for name in reads & made.keys():
                before.add(made[name])
                self.readers[made[name]].append(index)
            for name in statement.writes:
                earlier = reading.pop(name, ())
                before.update(earlier)
                self.outdated.update(earlier)
                made[name] = index
            for name in reads.difference(statement.writes):
                reading.setdefault(name, []).append(index)
            made.update(dict.fromkeys(statement.makes, index))
            if statement.is_ordered and not self.fits[index]:
                if last_ordered is not None:
                    before.add(last_ordered)
                last_ordered = index
        roots = {self.roots.get(name, name) for name in self.last}
        held = {name for statement in self.statements for name in statement.holds}
        self.own = {name for statement in self.statements for name in statement.makes} - roots - held
        """The variables that statements have made, whose memory nobody has when all have run."""
        self.at_end = {made[name] for name in roots & made.keys()}

    def _results(self, index: int) -> list[int]:
        """The buffers that a statement's call makes."""
        call = self.statements[index].call
        return [] if call is None else [number for number in call.results if number is not None]

    def _goes_over_rows(self, members: Collection[int]) -> bool:
        return any(self.fits[i] and (call := self.statements[i].call) and call.op in ROW_OPS for i in members)

    def _draws(self, members: Collection[int]) -> bool:
        return any((call := self.statements[i].call) and isinstance(call.op, DropoutMask) for i in members)

    def source_of(self, members: Collection[int], units: Collection[Unit]) -> KernelSource:
        """The kernel of a group's calls. units: those that the group is made of. Raises ``NotOneKernel``."""
        group = {number: self.statements[index] for index in sorted(members) for number in self._results(index)}
        stored = [number for index in self.stored(members, units) for number in self._results(index)]
        return KernelSource(self.recording, group, stored)

    def _place(self, index: int) -> None:
        statement = self.statements[index]
        if not self.fits[index]:
            self.units[index] = [Unit({index})]
            return
        readers = self.readers[index]
        near = [reader for reader in readers if self.fits[reader] and not self._waits_long(index, reader)]
        groups = list(dict.fromkeys(unit for reader in near for unit in self.units[reader]))
        is_seen = index in self.at_end or not all(self.fits[reader] for reader in readers) or not readers
        own = Unit({index})
        self.units[index] = [own]
        if not is_seen and len(groups) > 1 and self._contract([own, *groups]):
            return
        has_room = all(len(unit.members) < MAX_CALLS and self._takes(unit, index) for unit in groups)
        if not is_seen and groups and has_room and self._is_cheap(statement, index):
            self.units[index] = groups
            for unit in groups:
                unit.members.add(index)
            return
        for unit in groups:
            self._contract([self.units[index][0], unit])

    def _waits_long(self, index: int, reader: int) -> bool:
        """Whether a statement and its only reader, far behind, add to one sum that leaves the program."""
        between = [each.call.op for each in self.statements[index + 1 : reader] if each.call is not None]
        costly = [op for op in between if isinstance(op, OpOverload) and facts(op).family]
        if self.readers[index] != [reader] or len(costly) <= MAX_WAIT:
            return False
        ops = set()
        while index not in self.at_end and len(self.readers[index]) == 1:
            (index,) = self.readers[index]
            ops.add((call := self.statements[index].call) and call.op)
        return index in self.at_end and ops - set(COPIES) == {torch.ops.aten.add.Tensor}

    def _takes(self, unit: Unit, index: int) -> bool:
        """Whether a unit's kernel can make a value for itself.

        It cannot make a mask that it reads in another order, nor a value from a tensor that is overwritten before.
        """
        if index in self.outdated and not self._is_acyclic(unit.members | {index}):
            return False
        if not self._draws([index]):
            return True
        try:
            self.source_of(unit.members | {index}, [unit])
        except NotOneKernel:
            return False
        return True

    def _is_cheap(self, statement: Statement, index: int) -> bool:
        """Whether to make a value again reads no more than to read it, and computes no element again and again."""
        assert statement.call is not None
        if statement.call.op in ROW_OPS:
            return False
        if statement.call.op not in COPIES and len(self.readers[index]) > 1:
            count = elements_of(statement.call, self.recording)
            if any(elements_of(self.statements[each].call, self.recording) > count for each in self.readers[index]):
                return False
        buffers, sources = self.recording.buffers, {use.buffer for use in statement.call.uses()}
        made = sum(buffers[number].nbytes for number in self._results(index))
        return sum(buffers[number].nbytes for number in sources) <= made

    def stored(self, members: Collection[int], units: Collection[Unit]) -> list[int]:
        """Those of a group's calls whose values are read outside of it. units: those that the group is made of."""

        def is_read_outside(index: int) -> bool:
            readers = [unit for reader in self.readers[index] for unit in self.units[reader]]
            return any(unit not in units and index not in unit.members for unit in readers)

        return sorted(index for index in members if index in self.at_end or is_read_outside(index))

    def inputs(self, members: Collection[int]) -> set[str]:
        """The variables that a group reads and others make."""
        made = {name for index in members for name in self.statements[index].makes}
        return {self.roots.get(name, name) for index in members for name in self.statements[index].reads} - made

    def _contract(self, units: Sequence[Unit]) -> bool:
        """Make one of several units, if one kernel can do their work."""
        units = list(dict.fromkeys(units))
        members = set().union(*[unit.members for unit in units])
        if len(units) < 2 or len(members) > MAX_CALLS:
            return False
        stored = self.stored(members, units)
        if not stored or len(stored) + len(self.inputs(members)) > MAX_TENSORS or not self._is_acyclic(members):
            return False
        try:
            if self._goes_over_rows(members) or self._draws(members):
                self.source_of(members, units)
            else:
                calls = [call for index in members if (call := self.statements[index].call) is not None]
                space_of(calls, [number for index in stored for number in self._results(index)], self.recording)
        except NotOneKernel:
            return False
        joined = Unit(members)
        for index in members:
            kept = [unit for unit in self.units[index] if unit not in units]
            self.units[index] = [*kept, joined]
        return True

    def _is_acyclic(self, members: Collection[int]) -> bool:
        """Whether nothing outside of ``members`` both reads of them and is read by them."""
        pending = [before for index in members for before in self.before[index] if before not in members]
        seen: set[int] = set()
        while pending:
            index = pending.pop()
            if index in seen:
                continue
            inside = set().union(*[unit.members for unit in self.units[index]]) if index in self.units else {index}
            seen |= inside
            for each in inside:
                for before in self.before[each]:
                    if before in members and before not in inside:
                        return False
                    if before not in seen:
                        pending.append(before)
        return True

    def _extend_rows(self) -> None:
        """Let groups that go over rows take their readers in: only they can write parts of rows."""
        for unit in dict.fromkeys(unit for units in self.units.values() for unit in units):
            if unit not in self.units[min(unit.members)] or not self._goes_over_rows(unit.members):
                continue
            stored = self.stored(unit.members, [unit])
            readers = [self.units[reader][0] for index in stored for reader in self.readers[index] if self.fits[reader]]
            if readers and not self._contract([unit, *readers]):
                for reader in readers:
                    self._contract([self.units[min(unit.members)][-1], reader])

    def _join_readers(self) -> None:
        """Make one of groups over as many elements that read the same tensor."""
        by_input: dict[str, list[int]] = {}
        for index in range(len(self.statements)):
            if self.fits[index]:
                for name in self.inputs({index}):
                    by_input.setdefault(name, []).append(index)
        for indices in by_input.values():
            for first, second in itertools.pairwise(indices):
                if second - first <= MAX_DISTANCE and len(self.units[first]) == len(self.units[second]) == 1:
                    one, other = self.units[first][0], self.units[second][0]
                    if not self._goes_over_rows(one.members | other.members):
                        self._contract([one, other])

    def order(self) -> list[Unit]:
        """The units in a right order, as near to that of the statements as it can be."""
        units = dict.fromkeys(unit for each in self.units.values() for unit in each)
        waits = {
            unit: {o for i in unit.members for b in self.before[i] - unit.members for o in self.units.get(b, ())}
            for unit in units
        }
        sorter = TopologicalSorter(waits)
        sorter.prepare()  # it raises if groups wait for each other
        ready: list[tuple[int, int, Unit]] = []
        ordered = []
        while sorter.is_active():
            for unit in sorter.get_ready():
                heapq.heappush(ready, (max(unit.members), id(unit), unit))
            ordered.append(heapq.heappop(ready)[-1])
            sorter.done(ordered[-1])
        return ordered
