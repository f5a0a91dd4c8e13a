"""The result of an estimate: static bytes, activations, the peak and advice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tabulate import tabulate

from recompute.estimation.static_memory import StaticBytes
from recompute.units import humanize


class Advice(NamedTuple):
    """One change, and by how much it lowers the peak, which an estimate with that change tells."""

    what: str
    saves_nbytes: int


class ModuleActivations(NamedTuple):
    """What modules whose paths differ in numbers alone hold together after forward."""

    path: str
    """The path, with "*" for numbers; "" is outside of all modules, as the loss is."""
    modules: int
    nbytes: int


@dataclass(frozen=True)
class EstimateSettings:
    """The model and the options of an estimate."""

    model: str
    batch: str
    dtype: str
    optimizer: str
    sharding: str
    devices: int
    policy: str
    loss: str
    microbatches: int = 1
    microbatches_in_flight: int = 1
    adapters: str = ""
    """ "LoRA of rank 16 on all-linear, base nf4"; "" where all parameters train."""
    assumed: tuple[str, ...] = ()
    """Assumptions beside the caller's options: the kernels of attention, inputs that were made, dtypes …"""


@dataclass(frozen=True)
class Estimate:
    """Bytes that a training step takes on each device."""

    settings: EstimateSettings
    static_bytes: StaticBytes
    activation_bytes: int
    """Bytes held after forward."""
    activation_bytes_per_layer: int
    """The bytes of the layer that holds most; 0 for a model without layers."""
    activations: tuple[ModuleActivations, ...]
    """Bytes held after forward, by the modules that made them."""
    logits_peak_bytes: int
    """The most that logits, their copies and gradients take at once, in a loop that keeps the model's output."""
    moments: Mapping[str, int]
    """The most alive at each moment, static bytes included, in the order of the step."""
    parts: Mapping[str, int]
    """The bytes of "parameters", "activations" … that are alive at the peak."""
    advice: tuple[Advice, ...]
    """Changes that would lower the peak, the most helpful first."""
    host_bytes: int = 0
    """The bytes that the policy carries to the host's memory in a step."""
    first_steps_peak_bytes: int = 0
    """The most alive at once in the first steps, which run on tapes until layers are captured."""

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def peak_bytes(self) -> int:
        return self.moments[self.peak_moment]

    @property
    def most_bytes(self) -> int:
        """The most alive at once in any step, also in the first ones."""
        return max(self.peak_bytes, self.first_steps_peak_bytes)

    @property
    def dominates(self) -> str:
        """The largest part of the peak."""
        return max(self.parts, key=lambda name: self.parts[name])

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        static = self.static_bytes
        return {
            **vars(self.settings),
            "static_bytes": {
                **vars(static),
                "buffers": {name: buffer.nbytes for name, buffer in static.buffers.items()},
                "total": static.total,
            },
            "activation_bytes": self.activation_bytes,
            "activation_bytes_per_layer": self.activation_bytes_per_layer,
            "activations": [each._asdict() for each in self.activations],
            "logits_peak_bytes": self.logits_peak_bytes,
            "peak_bytes": self.peak_bytes,
            "peak_moment": self.peak_moment,
            "first_steps_peak_bytes": self.first_steps_peak_bytes,
            "moments": dict(self.moments),
            "parts": dict(self.parts),
            "host_bytes": self.host_bytes,
            "dominates": self.dominates,
            "advice": [each._asdict() for each in self.advice],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return _described(self)


_MOMENTS = 6
"""So many of the highest ones are shown."""


def _described(estimate: Estimate) -> str:
    settings, static = estimate.settings, estimate.static_bytes
    on = f"{settings.sharding} over {settings.devices} devices" if settings.devices > 1 else "one device"
    if settings.microbatches > 1:
        on += f", {settings.microbatches} microbatches a step, {settings.microbatches_in_flight} in flight"
    title = (
        f"{settings.model}; {settings.batch}\n{settings.dtype}, {settings.optimizer}, {on}, policy {settings.policy}, "
        f"{settings.loss} loss{settings.adapters and f'; {settings.adapters}'}"
    )
    if settings.assumed:
        title += f"\nassumed: {'; '.join(settings.assumed)}"
    kept = [("parameters", static.parameters), ("gradients", static.gradients), ("optimizer states", static.optimizer)]
    kept += [(name, buffer.nbytes) for name, buffer in static.buffers.items()]
    held = [
        (each.path or "the loss, and code outside of modules", each.modules, humanize(each.nbytes))
        for each in sorted(estimate.activations, key=lambda each: -each.nbytes)
    ]
    highest = sorted(estimate.moments.items(), key=lambda item: -item[1])[:_MOMENTS]
    peak, logits = humanize(estimate.peak_bytes), ""
    if estimate.logits_peak_bytes:
        logits = f"; logits take up to {humanize(estimate.logits_peak_bytes)}"
    parts = ", ".join(f"{part} {humanize(nbytes)}" for part, nbytes in estimate.parts.items())
    blocks = [
        title,
        table("static memory", [(name, humanize(nbytes)) for name, nbytes in kept]),
        table("held after forward, by", [*held, ("total", "", humanize(estimate.activation_bytes))], "modules"),
        f"One layer holds {humanize(estimate.activation_bytes_per_layer)}{logits}.",
        table("highest moments", [(name, humanize(nbytes)) for name, nbytes in highest]),
        f"Peak: {peak}, during: {estimate.peak_moment}. The largest part: {estimate.dominates}.\nAll parts: {parts}.",
    ]
    if estimate.most_bytes > estimate.peak_bytes:
        blocks.append(f"In the first steps, until layers are captured, it is {humanize(estimate.most_bytes)}.")
    if estimate.host_bytes:
        blocks.append(f"The policy offloads {humanize(estimate.host_bytes)} to host memory.")
    if estimate.advice:
        lower = [(each.what, humanize(each.saves_nbytes)) for each in estimate.advice]
        blocks.append(table("a single change", lower, "lowers the peak by"))
    return "\n\n".join(blocks)


def table(title: str, rows: Sequence[tuple[object, ...]], *columns: str) -> str:
    """Rows as text, with the title above the first column."""
    width = len(rows[0]) if rows else 1 + len(columns)
    headers = [title, *columns, *([""] * (width - 1 - len(columns)))]
    align = ["left", *["right"] * (width - 1)]
    return tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)
