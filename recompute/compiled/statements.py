"""Lines of generated code, with the variables that they read and make."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from recompute.compiled.calls import Call


@dataclass
class Statement:
    """A line of code: the variables that it reads, and those that it makes."""

    text: str
    reads: list[str]
    makes: list[str]
    again: bool = False
    """Whether it runs an op of forward again, in backward."""
    call: Call | None = None
    """The call that it is, if that is all that it is."""
    variables: Mapping[int, str] = field(default_factory=dict)
    """The variable of each buffer that the call reads."""
    view_of: str | None = None
    """The variable that it only views."""
    writes: tuple[str, ...] = ()
    """The variables whose memory it writes to, beside those that it makes."""
    holds: tuple[str, ...] = ()
    """The variables whose memory others may hold from then on, unseen: a custom Function keeps any tensor."""
    is_ordered: bool = False
    """Whether it keeps its order among others that do so, too: it draws random numbers, or may have an effect."""


def lines_of(statements: Sequence[Statement], last: Collection[str], lasting: Collection[str]) -> list[list[str]]:
    """For each statement its lines. A variable is deleted after the last statement that reads it.

    last: the variables that are read when all have run. lasting: names that are no variables.
    """
    uses = {v: index for index, s in enumerate(statements) for v in (*s.reads, *s.makes)}
    found = []
    for index, statement in enumerate(statements):
        lines = statement.text.split("\n")
        used = dict.fromkeys((*statement.reads, *statement.makes))
        gone = [v for v in used if uses[v] == index and v not in last and v not in lasting]
        found.append([*lines, f"del {', '.join(gone)}"] if gone else lines)
    return found
