"""The costs of a training step as a table. A profile measures them, and a planner knows nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from recompute.files import write_file
from recompute.policy.document import load_document

NBytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bandwidth = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class HostLink(_Table):
    """The speed of a device's copies to its host's memory and back, and the room there."""

    out_bandwidth: Bandwidth
    """Bytes a second from the device to the host."""
    back_bandwidth: Bandwidth
    """Bytes a second from the host to the device."""
    host_nbytes: NBytes
    """The most bytes that may be off the device at once."""


class FirstSteps(_Table):
    """The bytes of a way in the steps in which its region is not captured yet, as ``Choice`` has them for later."""

    held_nbytes: NBytes
    forward_peak_nbytes: NBytes
    backward_peak_nbytes: NBytes


class Choice(_Table):
    """One way to run a region, and its costs.

    Bytes come on top of those allocated when the region's forward began. They include neither parameters and optimizer
    states nor the gradients of other regions. Offloaded bytes count as if they stayed: only the whole step tells when
    their memory is free.
    """

    name: str
    """Unique among the region's choices: "keep", "checkpoint", "kernel, holding 225.0 MiB" …"""
    rule: dict[str, Any] | None
    """The fields of a rule without match, type and layers; None: the region has no rule and runs as it is."""
    forward_seconds: Seconds
    backward_seconds: Seconds
    held_nbytes: NBytes
    """Held for backward once the region's forward has ended; its output counts, its input does not."""
    forward_peak_nbytes: NBytes
    """The most alive at once during its forward."""
    backward_peak_nbytes: NBytes
    """The most alive at once during its backward, with its held bytes and its own new gradients."""
    moved_nbytes: NBytes = 0
    """The bytes held that leave the device after forward and come back for backward; 0: it offloads nothing.

    They leave once forward of the next offloading region has ended. If there is none, they stay.
    """
    storages: Annotated[tuple[NBytes, ...], Strict(False)] = ()
    """The bytes of each held tensor that may leave the device; () where that is not known."""
    first_steps: FirstSteps | None = None
    """None where the first steps are as later ones, or where nobody has looked."""

    @model_validator(mode="after")
    def _moves_what_it_holds(self) -> Choice:
        if self.moved_nbytes > self.held_nbytes:
            raise ValueError(f"expected moved_nbytes of at most held_nbytes; found {self.moved_nbytes}")
        return self


class RegionCosts(_Table):
    """A region and all that run like it: the same ops on the same shapes."""

    name: str
    """The name of its class: "LlamaDecoderLayer"."""
    choices: Annotated[tuple[Choice, ...], Strict(False), Field(min_length=1)]
    gradient_nbytes: NBytes
    """Bytes of gradients that its backward leaves behind; 0 where it adds them to those of a step before."""


class Place(_Table):
    """A region at its place in the model."""

    path: str
    """The path of the module that a rule matches: "model.layers.3"; "" where there is no such module."""
    region: NBytes
    """The index of its region in ``Profile.regions``."""
    layer: NBytes | None = None
    """Its index in the list of layers around it, as a policy's ``layers`` counts; None: in no list, or not known."""
    also: Annotated[tuple[str, ...], Strict(False)] = ()
    """Paths of other modules that are measured with it, as the norm before the head. ``rule_beside_head`` is theirs."""


def rule_beside_head(rule: Mapping[str, Any]) -> dict[str, Any]:
    """The rule's fields for modules beside a head that has ``rule``: ``hold`` is for the head's logits."""
    return {key: value for key, value in rule.items() if key != "hold"}


class Profile(_Table):
    """The costs of a training step. The code before the first layer is a region, too, and so are head and loss."""

    version: Literal[1] = 1
    model: str
    """The model and the batch in a line, for people."""
    machine: dict[str, Any]
    source: Literal["measured", "roofline"]
    static_nbytes: NBytes
    """Alive all the time: parameters, buffers, optimizer states and the batch."""
    regions: Annotated[tuple[RegionCosts, ...], Strict(False), Field(min_length=1)]
    places: Annotated[tuple[Place, ...], Strict(False), Field(min_length=1)]
    microbatch_nbytes: NBytes = 0
    """The static bytes that each microbatch of a step has: its batch, and the gradients of outputs. 0 also in old
    profiles, which do not count it."""
    output_nbytes: NBytes = 0
    """The bytes of the model's output that only its caller holds, such as logits beside a loss. A profiled step frees
    them at once, and nothing counts them. A pipeline holds them for each microbatch in flight."""
    microbatches: Count = 1
    """Forwards and backwards in a step, whose gradients add up. A profile measures one; a plan may be for several."""
    microbatches_in_flight: Count = 1
    """The most that are between their forward and their backward at once; more than 1 in a pipeline."""
    optimizer_seconds: Seconds
    optimizer_peak_nbytes: NBytes
    """The most alive at once during the optimizer's step, above static bytes and all gradients."""
    capacity_nbytes: NBytes | None = None
    """The device's memory, for budgets such as "80%"; None where it is not known."""
    link: HostLink | None = None
    """None where it is not known, or there is none. Then nothing is offloaded."""

    @model_validator(mode="after")
    def _fits_together(self) -> Profile:
        for place in self.places:
            if place.region >= len(self.regions):
                raise ValueError(f"expected the number of one of {len(self.regions)} regions; found {place.region}")
            rules = [choice.name for choice in self.regions[place.region].choices if choice.rule is not None]
            if not place.path and rules:
                raise ValueError(f"expected no rules for a place without a path, which none may match; found {rules}")
        for region in self.regions:
            names = [choice.name for choice in region.choices]
            if len(set(names)) < len(names):
                raise ValueError(f"expected choices of {region.name} with different names; found {names}")
        if self.microbatches_in_flight > self.microbatches:
            raise ValueError(
                f"expected at most {self.microbatches} microbatches in flight, as many as a step has; found "
                f"{self.microbatches_in_flight}"
            )
        return self

    def from_the_start(self) -> Profile:
        """The same with the most bytes of any step, first ones included."""

        def of(choice: Choice) -> Choice:
            first = choice.first_steps.model_dump() if choice.first_steps else {}
            return choice.model_copy(update={name: max(n, getattr(choice, name)) for name, n in first.items()})

        return self.with_choices(lambda region: map(of, region.choices))

    def with_choices(self, of: Callable[[RegionCosts], Iterable[Choice]], **changes: Any) -> Profile:
        """The same with the choices that ``of`` gives each region, and with other fields changed."""
        regions = [each.model_copy(update={"choices": tuple(of(each))}) for each in self.regions]
        return self.model_copy(update={"regions": tuple(regions), **changes})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON. Raises ``WriteError`` if that fails."""
        write_file(path, self.model_dump_json(indent=2) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a file that ``save`` wrote. Raises ``PolicyError`` with file, line and key of a mistake."""
        return load_document(Profile, path, kind="profile")
