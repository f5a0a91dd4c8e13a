"""Derives choices that offload from measured ones: a region's costs if a share of its saved bytes leaves the device.

Nothing is measured for them, as that would multiply the steps of a profile. The copies out run beside the forward of a
region, the copies back beside its backward. So each of the two takes as long as its ops or as long as its copies,
whichever is longer:

    forward    max(forward_seconds + 0.05 · copy, copy)    with copy = moved bytes / bandwidth to the host
    backward   max(backward_seconds + 0.05 · copy, copy)   with copy = moved bytes / bandwidth from the host

Ops run a little slower beside copies. The 0.05 is for that: without it, a plan with memory to spare would offload for
nothing. Measured on an H200 (8 layers of Llama-8B, sequence 8192, 50 GB/s each way, 0.6 GiB a layer): a step of 162 ms
takes 166 ms with a share of 0.3 and 167 ms with 0.5, which hide the copies, and 241 ms with all.

The formula is for a region among equal ones. In truth copies may run on until forward of the next offloading region has
ended. So a plan with few offloading regions may be faster than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from recompute.policy.meaning import travelling
from recompute.profiling.cost_table import Choice, HostLink, Profile, RegionCosts

SHARES = {
    1.0: "offloaded",
    0.75: "three quarters offloaded",
    0.625: "five eighths offloaded",
    0.5: "half offloaded",
    0.375: "three eighths offloaded",
    0.25: "a quarter offloaded",
}
"""The shares to choose from, and how the names of choices spell them."""

_SLOWED = 0.05  # ops beside a copy take longer by this share of the copy's time
_CLOSE = 0.03  # of the most that a choice of the region holds: shares whose moved bytes are closer count as one


def offloading_rule(rule: Mapping[str, Any] | None, share: float) -> dict[str, Any]:
    """The fields of a rule that offloads this share of the bytes that ``rule`` holds; None is a region as it is."""
    fields = {"action": "offload"} if rule is None else {**rule, "offload": True}
    return fields if share == 1 else {**fields, "fraction": share}


def with_offloading(profile: Profile) -> Profile:
    """The profile with the choices that offload; as it is if the link to the host is not known."""
    return profile if profile.link is None else profile.with_choices(partial(_with_offloading, profile.link))


def _with_offloading(link: HostLink, region: RegionCosts) -> list[Choice]:
    measured = [choice for choice in region.choices if not choice.moved_nbytes]
    least = _CLOSE * max((choice.held_nbytes for choice in measured), default=0)
    derived = {one.name: one for choice in measured for one in _shares_of(choice, link, least)}
    derived |= {choice.name: choice for choice in region.choices}  # a profile may have some of them already
    names = dict.fromkeys([*(choice.name for choice in region.choices), *derived])
    return [derived[name] for name in names]


def _shares_of(choice: Choice, link: HostLink, least_nbytes: float) -> Iterator[Choice]:
    """The choices that offload a share of the bytes of ``choice``, each at least ``least_nbytes`` fewer than the last.

    Bytes that other regions hold as well, such as masks, are copied, and that frees nothing. It is not known which
    storages these are, so every share counts as copying them.
    """
    not_its_own = max(0, sum(choice.storages) - choice.held_nbytes)
    last = math.inf
    for share, name in SHARES.items():
        copied = sum(choice.storages[position] for position in travelling(choice.storages, share))
        moved = max(0, copied - not_its_own)
        if moved and moved >= least_nbytes and last - moved >= least_nbytes:
            last = moved
            out, back = copied / link.out_bandwidth, copied / link.back_bandwidth
            changes = {
                "name": f"{choice.name}, {name}",
                "rule": offloading_rule(choice.rule, share),
                "forward_seconds": max(choice.forward_seconds + _SLOWED * out, out),
                "backward_seconds": max(choice.backward_seconds + _SLOWED * back, back),
                "moved_nbytes": moved,
                "storages": (),
            }
            yield choice.model_copy(update=changes)
