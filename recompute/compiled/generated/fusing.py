"""Puts generated kernels in the place of the statements of a program that they compute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from recompute.compiled.generated.generated_kernel import GeneratedKernel, Traffic
from recompute.compiled.generated.groupable import is_slow_alone
from recompute.compiled.generated.grouping import Grouping
from recompute.compiled.generated.kernel_source import KernelSource
from recompute.compiled.recording import Recording
from recompute.compiled.statements import Statement, lines_of
from recompute.engine.cut.layout import Layout, is_dense


def fused(
    statements: Sequence[Statement], last: Collection[str], recording: Recording, names: dict[str, Any]
) -> list[Statement]:
    """The statements, with a call of one kernel in the place of each group of pointwise calls.

    last: the variables that are read when all have run. names: the objects that statements refer to by name; the
    kernels are added.
    """
    grouping = Grouping(statements, last, recording)
    views = {statement.makes[0]: statement for statement in statements if statement.view_of is not None}
    units = grouping.order()
    last_unit = {name: unit for unit in units for name in grouping.inputs(unit.members)}
    found: list[Statement] = []
    for unit in units:
        members = [statements[index] for index in sorted(unit.members)]
        if len(members) > 1 or (grouping.fits[min(unit.members)] and is_slow_alone(members[0].call, recording)):
            source = grouping.source_of(unit.members, [unit])
            if source.inputs:  # else it computes constants
                dying = {name for name, reader in last_unit.items() if reader is unit} & grouping.own
                members = [_generated(source, members, views, names, dying)]
        found += members
    return list(_with_views(found, views, last))


def _generated(
    source: KernelSource,
    members: Sequence[Statement],
    views: dict[str, Statement],
    names: dict[str, Any],
    dying: Collection[str],
) -> Statement:
    """The statement that calls the kernel of a group. dying: the variables whose memory nobody reads afterwards."""
    buffers = source.recording.buffers
    numbers = source.stored
    made = [f"t{number}" for number in numbers]
    read = [*source.given, *source.states]
    body = list(_with_views(members, views, made))
    lines = [line for own in lines_of(body, made, names) for line in own]
    name = f"kernel{len(names)}"
    aten = f"def {name}({', '.join(read)}):\n    " + "\n    ".join([*lines, f"return ({', '.join(made)},)"])
    found = dict(names)
    exec(compile(aten, "<what a generated kernel computes>", "exec"), found)
    layouts = [buffers[number].layout for number in numbers]
    reused = _reused(source, layouts, [variable for variable in source.inputs if variable in dying])
    waits = any(not source.is_stored_after(numbers[index], variable) for index, variable in reused.items())
    places = {index: read.index(variable) for index, variable in reused.items()}
    own = sum(buffers[number].nbytes for number in source.group)
    written = sum(buffers[number].nbytes for number in numbers)
    moved = Traffic(sum(buffers[number].nbytes for number in source.inputs.values()), written, own - written)
    names[name] = GeneratedKernel(
        source.text(waits=waits), found[name], source.space, layouts, places, moved, len(source.states)
    )
    text = f"{', '.join(made)}, = {name}({', '.join(read)})"
    for index, variable in reused.items():
        whole, layout = buffers[source.inputs[variable]].layout, layouts[index]
        if (whole.shape, whole.stride) != (layout.shape, layout.stride):
            text += f"\n{made[index]} = {made[index]}.as_strided({tuple(layout.shape)}, {layout.stride})"
    return Statement(text, read, made, again=all(statement.again for statement in members))


def _reused(source: KernelSource, layouts: Sequence[Layout], dying: Iterable[str]) -> dict[int, str]:
    """For some of the outputs, a variable: the output is written into its memory. Programs read only where they write.

    An output that is computed from the variable comes first: its threads need not wait for each other.
    """
    reused: dict[int, str] = {}
    for variable in dying:
        buffer = source.recording.buffers[source.inputs[variable]]
        if variable in source.elsewhere or not is_dense(buffer.layout, buffer.nbytes):
            continue
        fitting = [
            (not source.is_stored_after(source.stored[index], variable), index)
            for index, layout in enumerate(layouts)
            if layout.dtype is buffer.layout.dtype and layout.shape.numel() == buffer.layout.shape.numel()
            if index not in reused and source.space.writes(layout.shape.numel())
        ]
        if fitting:
            reused[min(fitting)[1]] = variable
    return reused


def _with_views(
    statements: Iterable[Statement], views: dict[str, Statement], last: Collection[str]
) -> Iterator[Statement]:
    """The statements, each behind the views that it reads and that were not made before."""
    missing = dict(views)
    for statement in statements:
        for name in statement.reads:
            if name in missing:
                yield missing.pop(name)
        yield statement
    for name in last:
        if name in missing:
            yield missing.pop(name)
