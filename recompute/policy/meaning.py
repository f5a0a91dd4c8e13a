"""Translates a rule into terms of the engine. This is decided here and nowhere else; the other folders ask.

A rule's keys are what users write; a ``Meaning`` is what the engine does. For example, ``action: checkpoint`` with a
``keep`` needs a tape of the ops, as ``action: recompute`` does. Without a ``keep``, forward's Python runs again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from recompute.policy.rules import MIN_BYTES, PRICE, REPEATABLE, Rule, Via
from recompute.units import humanize


class Mechanism(enum.Enum):
    """How the engine runs a module."""

    KEEP = "everything that autograd saves is kept, on the device or off it"
    CHECKPOINT = "everything is dropped, and forward's Python code runs again from its inputs"
    TAPE = "forward's ops are recorded, and a minimum cut chooses those that run again"


class Kernels(enum.Enum):
    """Where kernels may stand in for modules."""

    NEVER = "modules run as they are written"
    ON_CUDA = "kernels run on CUDA, and the modules themselves on other devices"
    EVERYWHERE = "kernels run everywhere; off CUDA they are the kernels' references in plain PyTorch"


_KERNELS: dict[Via, Kernels] = {"hook": Kernels.NEVER, "auto": Kernels.ON_CUDA, "kernel": Kernels.EVERYWHERE}


@dataclass(frozen=True)
class Offloading:
    """The part of a region's held tensors that travels to host memory and back."""

    fraction: float = 1.0
    """The share of their bytes: the largest travel."""
    min_bytes: int = MIN_BYTES
    """Smaller storages stay."""
    max_host_bytes: int | None = None
    """The most that this process may offload; None: a share of what is free."""


def travelling(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """The storages that travel, by position: the largest, as many as make up no more than ``fraction`` of the bytes.

    sizes: the bytes of each storage that could. Of equal ones the first travel.
    """
    found = []
    left = fraction * sum(sizes)
    for position in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if sizes[position] <= left:
            found.append(position)
            left -= sizes[position]
    return frozenset(found)


@dataclass(frozen=True)
class Meaning:
    """A rule in terms of the engine."""

    mechanism: Mechanism
    note: str = field(compare=False)
    """The sentence on backward for ``explain``."""
    rerun: frozenset[str] = frozenset()
    """The costly families whose ops may run again. Cheap ops always may."""
    keep: frozenset[str] = frozenset()
    """These are never dropped: costly families, names of ops ("aten.mm") and names given to ``recompute.keep``."""
    price: float = PRICE
    """The bytes that may be held to save a second of running ops again."""
    hold: int | None = None
    """The most bytes that a tape holds, if ops that may run again can bring back the rest. None: the price decides."""
    kernels: Kernels = Kernels.NEVER
    capture: bool = False
    """Whether a module that has run alike for some steps may go on as straight code."""
    compiled: bool = True
    """Whether captured code may run in generated kernels."""
    drops_outputs: bool = False
    """Whether outputs that can be regenerated cheaply are dropped, too, where later modules save them."""
    regenerates: bool = True
    """Whether a tape may run any op again; if not, it holds what autograd saves."""
    compresses: bool = False
    """Whether a tape, or a kernel, saves tensors as codes of 8 bits if their readers tolerate rounding."""
    tile: int | None = None
    """The tokens that a kernel computes of an MLP at a time; None: all."""
    offloading: Offloading | None = None
    """The part of what is held that leaves the device; None: nothing does."""
    extends_inward: bool = False
    """Whether a module inside that has the same rule is a part of this region, and not a region of its own."""

    @property
    def has_effect(self) -> bool:
        """Whether anything is to be dropped, or to leave the device."""
        return self.mechanism is not Mechanism.KEEP or self.offloading is not None

    @property
    def is_exact(self) -> bool:
        """Whether gradients are bitwise those without a policy. Kernels round in their own way, and codes do, too."""
        return self.kernels is Kernels.NEVER and not self.compresses

    @property
    def tapes_kernels(self) -> bool:
        """Whether a tape runs around a kernel that stands in for the whole module.

        By itself a kernel saves what it was written to save. A tape is needed if the rule names ops to keep or rerun.
        """
        return bool(self.rerun or self.keep or self.price != PRICE or self.hold is not None)


def meaning_of(rule: Rule) -> Meaning:
    """``rule`` in terms of the engine."""
    keep = frozenset(rule.keep)
    if rule.action == "keep":
        return Meaning(Mechanism.KEEP, "everything is kept")
    note, offloading = _note(rule), None
    if rule.offload or rule.action == "offload":
        offloading = Offloading(rule.fraction, rule.min_bytes, rule.max_host_bytes)
    if rule.action == "offload":
        return Meaning(Mechanism.KEEP, note, offloading=offloading, extends_inward=True)
    if rule.action == "compress":
        return Meaning(
            Mechanism.TAPE, note, regenerates=False, compresses=True, offloading=offloading, extends_inward=True
        )
    if rule.action == "checkpoint":
        mechanism = Mechanism.TAPE if keep else Mechanism.CHECKPOINT
        # Like torch's checkpoint, hold the fewest bytes, whatever it costs to run ops again.
        capture, compiled = rule.capture, rule.compiled
        return Meaning(
            mechanism, note, REPEATABLE, keep, price=0.0, capture=capture, compiled=compiled, offloading=offloading
        )
    return Meaning(
        Mechanism.TAPE,
        note,
        frozenset(rule.rerun),
        keep,
        rule.price,
        rule.hold,
        _KERNELS[rule.via],
        rule.capture,
        compiled=rule.compiled,
        drops_outputs=True,
        compresses=rule.compress,
        tile=rule.tile,
        offloading=offloading,
        extends_inward=True,
    )


def _note(rule: Rule) -> str:
    """The sentence on backward under a rule that does anything."""
    parts = []
    if rule.action == "checkpoint" and not rule.keep:
        parts.append("its Python runs again from its inputs")
    elif rule.action in ("recompute", "checkpoint"):
        note = "all ops run again" if rule.action == "checkpoint" else "cheap ops run again"
        if rule.rerun:
            note += f" and {', '.join(rule.rerun)}"
        if rule.price != PRICE:
            note += f", at {rule.price:.3g} bytes a second"
        if rule.hold is not None:
            note += f", so that at most {humanize(rule.hold)} are held"
        parts += [note, f"{', '.join(rule.keep)} kept"] if rule.keep else [note]
    if rule.compress or rule.action == "compress":
        parts.append("tensors whose readers tolerate rounding are held in 8 bits")
    if rule.offload or rule.action == "offload":
        share = "" if rule.fraction == 1 else f"{rule.fraction:.0%} of "
        parts.append(f"{share}what is held comes back from the host")
    return "; ".join(parts)
