"""Puts generated kernels in the place of the statements of a program that they compute."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from recompute.compiled.generated.generated_kernel import BLOCK, GeneratedKernel
from recompute.compiled.generated.grouping import Grouping, Unit
from recompute.compiled.generated.kernel_source import KernelSource
from recompute.compiled.recording import Recording
from recompute.compiled.statements import Statement, lines_of


def fused(
    statements: Sequence[Statement], last: Collection[str], recording: Recording, names: dict[str, Any]
) -> list[Statement]:
    """The statements, with a call of one kernel in the place of each group of pointwise calls.

    last: the variables that are read when all have run. names: the objects that statements refer to by name, to which
    the kernels are added.
    """
    grouping = Grouping(statements, last, recording)
    views = {statement.makes[0]: statement for statement in statements if statement.view_of is not None}
    found: list[Statement] = []
    for unit in grouping.order():
        members = [statements[index] for index in sorted(unit.members)]
        if len(members) > 1:
            members = [_generated(unit, members, grouping, views, names)]
        found += members
    return list(_with_views(found, views, last))


def _generated(
    unit: Unit,
    members: Sequence[Statement],
    grouping: Grouping,
    views: dict[str, Statement],
    names: dict[str, Any],
) -> Statement:
    """The statement that calls the kernel of a group."""
    buffers = grouping.recording.buffers
    stored = [grouping.statements[index] for index in grouping.stored(unit.members, [unit])]
    made = [statement.makes[0] for statement in stored]
    numbers = [_made_by(statement) for statement in stored]
    source = KernelSource(grouping.recording, {_made_by(each): each for each in members}, numbers)
    read = list(source.inputs)
    body = list(_with_views(members, views, made))
    lines = [line for own in lines_of(body, made, names) for line in own]
    name = f"kernel{len(names)}"
    aten = f"def {name}({', '.join(read)}):\n    " + "\n    ".join([*lines, f"return ({', '.join(made)},)"])
    found = dict(names)
    exec(compile(aten, "<what a generated kernel computes>", "exec"), found)
    layouts = [buffers[number].layout for number in numbers]
    names[name] = GeneratedKernel(source.text(BLOCK), found[name], source.size, layouts)
    text = f"{', '.join(made)}, = {name}({', '.join(read)})"
    return Statement(text, read, made, again=all(statement.again for statement in members))


def _made_by(statement: Statement) -> int:
    """The buffer that a statement's call makes."""
    assert statement.call is not None and statement.call.results[0] is not None
    return statement.call.results[0]


def _with_views(
    statements: Iterable[Statement], views: dict[str, Statement], last: Collection[str]
) -> Iterator[Statement]:
    """The statements, with the views that each reads in front of it, where these were not made before."""
    missing = dict(views)
    for statement in statements:
        for name in statement.reads:
            if name in missing:
                yield missing.pop(name)
        yield statement
    for name in last:
        if name in missing:
            yield missing.pop(name)
