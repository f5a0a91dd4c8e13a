"""Which layers a rule's ``layers`` names: numbers, ranges, every n-th, the first or the last few."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LAYERS = "a layer number, or '0-15', 'every 2', 'every 2 from 1', 'first 4' or 'last 4', or a list of these"
"""How layers may be written."""


@dataclass(frozen=True)
class LayerSpan:
    """Some indices of a ModuleList. ``spelling`` is the policy's text for them, ``span`` the indices."""

    spelling: int | str
    span: slice = field(compare=False, repr=False)

    @classmethod
    def parse(cls, spelling: object) -> LayerSpan:
        """Read ``7``, ``"0-15"``, ``"every 2"``, ``"every 2 from 1"``, ``"first 4"`` or ``"last 4"``.

        Raises ``ValueError``, also where the selector could never select a layer.
        """
        if isinstance(spelling, LayerSpan):
            return spelling
        if isinstance(spelling, bool) or not isinstance(spelling, (int, str)):
            raise ValueError(f"expected {LAYERS}")
        return cls(spelling, _parse_span(str(spelling).strip()))

    def selects(self, index: int, count: int) -> bool:
        """Whether this names layer ``index`` of ``count``. What lies beyond ``count`` names nothing."""
        return index in range(count)[self.span]

    def exceeds(self, count: int) -> bool:
        """Whether this names a layer, or a number of layers, beyond ``count``."""
        start, stop, _ = self.span.start, self.span.stop, self.span.step
        return max(stop or 0, -(start or 0), (start or 0) + 1) > count


def _parse_span(text: str) -> slice:
    if match := re.fullmatch(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?", text):
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"expected a range from low to high, such as '{last}-{first}'")
        return slice(first, last + 1)
    if match := re.fullmatch(r"every\s+([0-9]{1,9})(?:\s+from\s+([0-9]{1,9}))?", text):
        if int(match[1]) == 0:
            raise ValueError("expected a step of at least 1")
        return slice(int(match[2] or 0), None, int(match[1]))
    if match := re.fullmatch(r"(first|last)\s+([0-9]{1,9})", text):
        count = int(match[2])
        if count == 0:
            raise ValueError(f"expected at least 1 layer, such as '{match[1]} 1'")
        return slice(count) if match[1] == "first" else slice(-count, None)
    if text.startswith("-"):
        raise ValueError("expected layer numbers from 0 up ('last 1' is the last layer)")
    raise ValueError(f"expected {LAYERS}")
