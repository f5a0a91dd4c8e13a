"""Calculates the bytes alive all through training: parameters, gradients, optimizer states, and sharding's buffers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recompute.errors import EstimateError, RecomputeError
from recompute.policy.document import nearest


class ParameterShape(NamedTuple):
    """One parameter. Modules that share one share one of these."""

    shape: tuple[int, ...]
    trains: bool = True
    unit: str = ""
    """Its layer, whose parameters are gathered together; "" if it is in no layer."""
    element_nbytes: int | None = None
    """For a frozen one, whatever the recipe says; None: as the recipe says."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class DtypeRecipe(NamedTuple):
    """The bytes of an element of parameters, gradients and optimizer states."""

    parameter: int
    gradient: int
    master: int
    """For a second copy of the parameters that the optimizer updates; 0: there is none."""
    state: int
    autocast: bool = False


DTYPE_RECIPES: Mapping[str, DtypeRecipe] = {
    "bfloat16": DtypeRecipe(2, 2, 0, 2),
    "bfloat16-autocast": DtypeRecipe(4, 4, 0, 4, autocast=True),
    "bfloat16-mixed": DtypeRecipe(2, 2, 4, 4),
    "float32": DtypeRecipe(4, 4, 0, 4),
}
"""In this order:

- all in bfloat16,
- float32 weights and bfloat16 matrix products, by ``torch.autocast``,
- bfloat16 weights and gradients, and an optimizer that keeps float32 weights, as DeepSpeed and Megatron have it: 16
  bytes a parameter with AdamW, 12 of them the optimizer's (Rajbhandari et al., ZeRO, 2020, section 3.1),
- all in float32.
"""


class OptimizerKind(NamedTuple):
    """An optimizer's states, and how to make it."""

    states: int
    """How many numbers it keeps for each element of a parameter."""
    torch_class: str = ""
    """Its name in ``torch.optim``; "" for bitsandbytes' optimizers of 8 bits."""
    options: Mapping[str, Any] = {}

    @property
    def is_8bit(self) -> bool:
        return not self.torch_class


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(2, "AdamW"),
    "adamw-fused": OptimizerKind(2, "AdamW", {"fused": True}),
    "adamw-loop": OptimizerKind(2, "AdamW", {"foreach": False}),
    "adamw-8bit": OptimizerKind(2),
    "sgd": OptimizerKind(0, "SGD"),
    "sgd-momentum": OptimizerKind(1, "SGD", {"momentum": 0.9}),
}
"""Torch's own choice on CUDA is ``foreach=True``."""

_SMALLEST_8BIT, _BLOCK_8BIT = 4096, 256
"""In bitsandbytes' ``Optimizer2State`` (0.45), smaller parameters keep float32 states, and each block has a scale."""


class Sharding(NamedTuple):
    """The memory that devices divide among them. Each holds all of the rest."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False


SHARDINGS: Mapping[str, Sharding] = {
    "none": Sharding(),
    "ddp": Sharding(),
    "zero1": Sharding(optimizer=True),
    "zero2": Sharding(optimizer=True, gradients=True),
    "zero3": Sharding(True, True, True),
    "fsdp2": Sharding(True, True, True),
}
"""``ddp`` and ``fsdp2`` are torch's, the others DeepSpeed's stages."""

_BUCKET_ELEMENTS = 500_000_000
"""``reduce_bucket_size`` and ``allgather_bucket_size`` of DeepSpeed's ZeRO, by default."""
_LIVE_ELEMENTS = 1_000_000_000
"""``stage3_max_live_parameters``, by default: how many parameters ZeRO-3 gathers at a time."""


class ExtraBuffer(NamedTuple):
    """Memory that is neither a model's nor an optimizer's own."""

    nbytes: int
    phases: tuple[str, ...] = ("forward", "backward", "optimizer")
    """The parts of a step in which it lives."""


@dataclass(frozen=True)
class StaticBytes:
    """Bytes that each device holds all through training."""

    parameters: int
    gradients: int
    """These live from backward to the end of the step."""
    optimizer: int
    """States, and master weights where the recipe has them."""
    buffers: Mapping[str, ExtraBuffer]
    """Others, by name: sharding's buffers to gather and to reduce in, cuBLAS's workspaces …"""

    @property
    def total(self) -> int:
        """The sum of all of these, though not all of them live at the same moment."""
        return self.parameters + self.gradients + self.optimizer + sum(each.nbytes for each in self.buffers.values())

    def in_phase(self, phase: str) -> int:
        """The bytes alive all through "forward", "backward" or "optimizer", without gradients."""
        return self.parameters + self.optimizer + self.buffer_nbytes(phase)

    def buffer_nbytes(self, phase: str) -> int:
        return sum(each.nbytes for each in self.buffers.values() if phase in each.phases)


_ALSO_CALLED = {
    "bf16": "bfloat16",
    "bf16-autocast": "bfloat16-autocast",
    "amp": "bfloat16-autocast",
    "autocast": "bfloat16-autocast",
    "bf16-mixed": "bfloat16-mixed",
    "mixed": "bfloat16-mixed",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "adam": "adamw",
    "adamw-torch": "adamw",
    "adam-fused": "adamw-fused",
    "adamw-torch-fused": "adamw-fused",
    "fused-adamw": "adamw-fused",
    "adam-8bit": "adamw-8bit",
    "adam8bit": "adamw-8bit",
    "adamw8bit": "adamw-8bit",
    "adamw-bnb-8bit": "adamw-8bit",
    "momentum": "sgd-momentum",
    "fsdp": "fsdp2",
    "fully-shard": "fsdp2",
    "4bit": "nf4",
    "4-bit": "nf4",
    "8bit": "int8",
    "8-bit": "int8",
    "fp8": "float8",
}
"""Other words for dtypes, optimizers, shardings and bases. Adam holds what AdamW holds."""


def read_option(what: str, name: str, options: Iterable[str]) -> str:
    """The option that ``name`` spells: "bf16" is "bfloat16", "FSDP" is "fsdp2".

    Case does not matter, and "_" and a space are as "-". Raises ``EstimateError`` if it spells none of ``options``.
    """
    options = list(options)
    word = re.sub(r"[\s_]+", "-", str(name).strip().lower())
    plain = word.replace("-", "") if word.startswith(("zero", "fsdp")) else word
    for spelling in (word, _ALSO_CALLED.get(word), plain, _ALSO_CALLED.get(plain)):
        if spelling in options:
            return spelling
    raise EstimateError(f"{what}: expected one of {', '.join(options)}; found {name!r}{nearest(word, options)}")


def check_counts(error: type[RecomputeError] = EstimateError, **numbers: Any) -> None:
    """Raise ``error`` for a number, by its name, that is not a whole one of at least 1."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise error(f"{name}: expected a whole number, at least 1; found {number!r}")


def check_sharding(sharding: str, devices: int) -> str:
    """The sharding that ``sharding`` spells.

    Raises ``EstimateError`` for one that is not known, or does not fit the number of devices.
    """
    sharding = read_option("sharding", sharding, SHARDINGS)
    check_counts(devices=devices)
    if devices > 1 and sharding == "none":
        named = ", ".join(name for name in SHARDINGS if name != "none")
        raise EstimateError(
            f"devices: found {devices} devices with sharding none; expected sharding to be one of {named}, or 1 device"
        )
    return sharding


def share_of(sharding: str, devices: int) -> Callable[[int], int]:
    """A function from the bytes of gradients to one device's share once they are reduced."""
    divisor = devices if SHARDINGS[sharding].gradients else 1
    return lambda nbytes: -(-nbytes // divisor)


def shard_shapes(parameters: Iterable[ParameterShape], sharding: str, devices: int) -> list[tuple[int, ...]]:
    """The shapes that the optimizer of one device updates."""
    trained = [parameter for parameter in parameters if parameter.trains]
    return _shards(trained, sharding, devices, SHARDINGS[sharding].optimizer)


def _shards(
    parameters: Sequence[ParameterShape], sharding: str, devices: int, is_divided: bool
) -> list[tuple[int, ...]]:
    """The shapes of a device's share: under FSDP2 rows of each parameter, under ZeRO a part of all of them in a row."""
    if not is_divided:
        return [each.shape for each in parameters]
    if sharding == "fsdp2":
        return [(-(-each.shape[0] // devices), *each.shape[1:]) if each.shape else () for each in parameters]
    return [(-(-sum(each.numel for each in parameters) // devices),)]


def static_nbytes(
    parameters: Sequence[ParameterShape],
    *,
    recipe: DtypeRecipe,
    optimizer: OptimizerKind,
    sharding: str = "none",
    devices: int = 1,
) -> StaticBytes:
    """The bytes of a model with these parameters on each device. Frozen ones have neither gradients nor states."""
    divided = SHARDINGS[sharding]

    def held(of: Sequence[ParameterShape], is_divided: bool) -> list[int]:
        return [math.prod(shape) for shape in _shards(of, sharding, devices, is_divided)]

    by_size: dict[int, list[ParameterShape]] = {}
    for each in parameters:
        by_size.setdefault(each.element_nbytes or recipe.parameter, []).append(each)
    trained = [each for each in parameters if each.trains]
    counts = held(trained, divided.optimizer)
    states = sum(_states_nbytes(count, recipe, optimizer) + count * recipe.master for count in counts)
    return StaticBytes(
        parameters=sum(size * sum(held(those, divided.parameters)) for size, those in by_size.items()),
        gradients=sum(held(trained, divided.gradients)) * recipe.gradient,
        optimizer=states,
        buffers=_sharding_buffers(parameters, recipe, sharding) if devices > 1 else {},
    )


def _states_nbytes(count: int, recipe: DtypeRecipe, optimizer: OptimizerKind) -> int:
    if not optimizer.is_8bit:
        return count * optimizer.states * recipe.state
    if count < _SMALLEST_8BIT:
        return count * optimizer.states * 4
    return optimizer.states * (count + -(-count // _BLOCK_8BIT) * 4)


def _sharding_buffers(
    parameters: Sequence[ParameterShape], recipe: DtypeRecipe, sharding: str
) -> dict[str, ExtraBuffer]:
    """The buffers of a device to gather parameters and to reduce gradients in.

    ddp: buckets for all gradients, which torch allocates beside them (``gradient_as_bucket_view=False``, the default).
    fsdp2: parameters of a layer, of the next one, which is gathered ahead, and of no layer, which stay gathered.
        Gradients of the largest layer, and of parameters in no layer, which are reduced at the end.
    zero1, zero2: one bucket to reduce in, and one to gather updated parameters in.
    zero3: the parameters that are gathered at a time, and one bucket to reduce in.
    """
    running = ("forward", "backward")
    total = sum(each.numel for each in parameters)
    trained = sum(each.numel for each in parameters if each.trains)
    if sharding == "ddp":
        return {"DDP's buckets": ExtraBuffer(trained * recipe.gradient)}
    if sharding in ("zero1", "zero2"):
        return {
            "reduce bucket": ExtraBuffer(min(_BUCKET_ELEMENTS, trained) * recipe.gradient, ("backward",)),
            "gather bucket": ExtraBuffer(min(_BUCKET_ELEMENTS, trained) * recipe.parameter, ("optimizer",)),
        }
    if sharding == "zero3":
        return {
            "gathered parameters": ExtraBuffer(min(_LIVE_ELEMENTS, total) * recipe.parameter, running),
            "reduce bucket": ExtraBuffer(min(_BUCKET_ELEMENTS, trained) * recipe.gradient, ("backward",)),
        }
    if sharding == "fsdp2":
        cast = 2 if recipe.autocast else recipe.parameter  # MixedPrecisionPolicy casts parameters to gather them
        gathered, reduced = Counter[str](), Counter[str]()
        for each in parameters:
            gathered[each.unit] += each.numel * min(cast, each.element_nbytes or cast)
            reduced[each.unit] += each.numel * cast * each.trains
        outside, outside_reduced = gathered.pop("", 0), reduced.pop("", 0)
        largest = sorted(gathered.values())[-2:]
        return {
            "gathered parameters": ExtraBuffer(outside + sum(largest), running),
            "gradients to reduce": ExtraBuffer(outside_reduced + max(reduced.values(), default=0), ("backward",)),
        }
    return {}
