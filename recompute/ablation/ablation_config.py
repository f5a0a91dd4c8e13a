"""What an ablation trains, under what, and how long, as a configuration file says it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Strict,
    Tag,
    ValidationError,
    model_validator,
)

from recompute.ablation.peers import BASELINE, COMPILED, Peer
from recompute.ablation.results import AXES, place_of, varied
from recompute.counters import resolve_device
from recompute.errors import AblationError, BudgetError
from recompute.estimation.check_paths import names_factory
from recompute.estimation.llama import ModelShape
from recompute.policy.document import nearest, with_unit
from recompute.units import parse_budget

POLICIES = (BASELINE, "full", "hook", "elementwise", "kernel", "auto")
PEERS = ("torch-checkpoint",)
STEPS, WARMUP = 12, 6
Dtype = Literal["float32", "bfloat16", "autocast"]
SequenceLength = Annotated[int, Field(ge=2)]
DEVICE = "device"
"""The budget that is all memory of the device: whatever runs fits."""


class HuggingFaceFields(BaseModel):
    """A model of transformers: its ``model_type``, and any fields of that type's configuration."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model_type: str


def _kind_of_model(value: Any) -> str:
    if isinstance(value, str):
        return "source"
    is_hugging_face = isinstance(value, HuggingFaceFields) or (isinstance(value, Mapping) and "model_type" in value)
    return "hugging_face" if is_hugging_face else "llama"


ModelSource = Annotated[
    Annotated[ModelShape, Tag("llama")]
    | Annotated[HuggingFaceFields, Tag("hugging_face")]
    | Annotated[str, Tag("source")],
    Discriminator(_kind_of_model),
]
"""A byte-level Llama's shape; fields of a Hugging Face configuration; or the name of either a Hugging Face model, its
folder or its ``config.json``, or of a ``package.module:factory``."""


class LongestSequence(BaseModel):
    """How to search, for each policy and peer, for the longest sequence whose whole training step fits a budget.

    budget: bytes ("139GiB"), a share of the device ("80%"), or "device": whatever runs without an error fits.
    start: the first length that is tried. It is doubled until one does not fit.
    multiple: the answer is a multiple of it.
    most: no longer one is tried.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    budget: Annotated[str | PositiveInt, BeforeValidator(with_unit)]
    start: SequenceLength = 1024
    multiple: PositiveInt = 256
    most: SequenceLength = 1 << 20

    @model_validator(mode="after")
    def _can_be_searched(self) -> LongestSequence:
        if self.budget != DEVICE:
            try:
                parse_budget(self.budget, capacity_nbytes=1 << 40)
            except BudgetError as error:
                raise ValueError(f"budget: {error}, or '{DEVICE}'") from error
        if self.start > self.most:
            raise ValueError(f"start: expected at most {self.most}, the value of most; found {self.start}")
        return self

    def budget_nbytes(self, device: torch.device) -> int | None:
        """The bytes of the budget; None if it is the device itself.

        Raises ``AblationError`` for a share of a device whose size is not known, as the CPU's.
        """
        on_cuda = device.type == "cuda"
        if self.budget == DEVICE and on_cuda:
            return None
        is_share = isinstance(self.budget, str) and "%" in self.budget  # to look at a device takes some of its memory
        try:
            if self.budget == DEVICE:
                raise BudgetError(f"expected a size such as '4GiB' on {device.type}; '{DEVICE}' is for CUDA devices")
            return parse_budget(self.budget, torch.cuda.mem_get_info(device)[1] if is_share and on_cuda else None)
        except BudgetError as error:
            raise AblationError(f"longest_sequence.budget: {error}") from error

    def longest(self, fits: Callable[[int], bool], most: int) -> int:
        """The longest sequence that fits, of the multiples up to ``most``, too; 0 if none does.

        fits: whether a length does. Whatever is shorter than a length that fits has to fit, too.
        """
        step = self.multiple
        most = min(most, self.most) // step
        low, high = 0, most + 1  # multiples: low fits, and high does not
        guess = min(max(1, self.start // step), most)
        while high - low > 1:
            low, high = (guess, high) if fits(guess * step) else (low, guess)
            guess = 2 * guess if guess == low and high == most + 1 else (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
        return low * step


def _known_to_peft(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ``LoraConfig``, if PEFT is here to tell. Without it no adapters train."""
    try:
        from peft import LoraConfig  # it takes seconds to load
    except ModuleNotFoundError:
        return fields
    known = LoraConfig.__dataclass_fields__
    mistakes: list[Any] = [
        {
            "type": "value_error",
            "loc": (name,),
            "input": value,
            "ctx": {"error": ValueError(f"expected a field of PEFT's LoraConfig{nearest(name, known)}")},
        }
        for name, value in fields.items()
        if name not in known
    ]
    if mistakes:
        raise ValidationError.from_exception_data("LoraConfig", mistakes)
    return fields


class AblationConfig(BaseModel):
    """What to train and how long. The defaults suit two CPU cores; `default_config` knows a GPU's.

    Each policy and peer runs with each model, batch size, dtype and sequence length. ``models``, ``batch_sizes`` and
    ``dtypes`` stand in the place of ``model``, ``batch_size`` and ``dtype`` where there are several.

    policies: preset names, and paths of policy files from the current folder; `none` always runs, first.
    lora: fields of PEFT's LoraConfig, as ``{r: 16, target_modules: all-linear}``: adapters in float32 train, and the
        model's own weights, in ``dtype``, do not.
    compile: whether each policy also runs, as `POLICY+compile`, with every layer compiled by torch.compile.
    step: what is trained and measured: "training" is forward, loss, backward and optimizer; "layers" is forward and
        backward of all but the head, the loss and the optimizer, whose weights stay as they are.
    dtype: of weights and arithmetic; "autocast" is float32 weights under bfloat16 autocast.
    steps: training steps a policy; the first `warmup` of them are not timed, except where no other is left.
    repeats: how often each policy is timed. All of them run once before any runs again.
    isolate: whether each policy's training has a process of its own, so that whatever ends it is an error in its row.
    cell_timeout_seconds: after which such a process is ended.
    text: the file to train on, as bytes; None is the source of Python's standard library.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: ModelShape = ModelShape()
    models: dict[str, ModelSource] = Field(default_factory=dict)
    lora: Annotated[dict[str, Any], AfterValidator(_known_to_peft)] | None = None
    policies: Annotated[tuple[str, ...], Strict(False)] = POLICIES
    compile: bool = False
    peers: Annotated[tuple[Peer, ...], Strict(False)] = PEERS
    sequence_lengths: Annotated[tuple[SequenceLength, ...], Strict(False), Field(min_length=1)] = (256,)
    batch_size: PositiveInt = 4
    batch_sizes: Annotated[tuple[PositiveInt, ...], Strict(False)] = ()
    step: Literal["training", "layers"] = "training"
    dtype: Dtype = "float32"
    dtypes: Annotated[tuple[Dtype, ...], Strict(False)] = ()
    steps: PositiveInt = STEPS
    warmup: Annotated[int, Field(ge=0)] = WARMUP
    repeats: PositiveInt = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    isolate: bool = False
    cell_timeout_seconds: PositiveFloat | None = None
    longest_sequence: LongestSequence | None = None
    text: Annotated[Path | None, Strict(False)] = None

    @model_validator(mode="after")
    def _keys_agree(self) -> AblationConfig:
        for one, several in {"model": "models", "batch_size": "batch_sizes", "dtype": "dtypes"}.items():
            if getattr(self, several) and one in self.model_fields_set:
                raise ValueError(f"expected {one} or {several}; found both")
        if self.cell_timeout_seconds is not None and not self.isolate:
            raise ValueError("cell_timeout_seconds needs isolate: true, because only a process of its own can be ended")
        if self.longest_sequence and self.longest_sequence.budget == DEVICE and not self.isolate:
            raise ValueError(
                f"longest_sequence: budget {DEVICE} needs isolate: true, so that a training that does not fit ends "
                "only its own process"
            )
        of_transformers = {"step: layers": self.step == "layers", "longest_sequence": self.longest_sequence}
        for key, is_asked in {**of_transformers, "lora": self.lora is not None}.items():
            for name, source in self.models.items():
                if is_asked and is_factory(source):
                    raise ValueError(
                        f"{key}: expected models of transformers; found models.{name}, the factory {source}"
                    )
        return self

    def treatments(self, policies: Iterable[str] | None = None) -> tuple[str, ...]:
        """What each model is trained under, once each: the baseline, the policies, and then the peers.

        policies: in the place of the configuration's own.
        """
        ways = ("", COMPILED) if self.compile else ("",)
        given = self.policies if policies is None else policies
        names = [policy + way for policy in (BASELINE, *given) for way in ways]
        return tuple(dict.fromkeys([*names, *self.peers]))

    def comparisons(self) -> tuple[Comparison, ...]:
        """One for each model, batch size, dtype and sequence length, in this order. A factory's sizes are its own."""
        of_all: Any = (self.batch_sizes or (self.batch_size,), self.dtypes or (self.dtype,), self.sequence_lengths)
        return tuple(
            Comparison(self, name, source, length, *others)
            for name, source in (self.models or {"llama": self.model}).items()
            for *others, length in product(*((None,), of_all[1], (None,)) if is_factory(source) else of_all)
        )

    def single(self) -> Comparison:
        """The only comparison. Raises ``AblationError`` if there are several models, sizes or dtypes."""
        found, *others = self.comparisons()
        if others:
            raise AblationError("expected one model, one sequence length, one batch size and one dtype; found several")
        return found


def is_factory(source: Any) -> bool:
    """Whether this names a function that makes a model. That model has sizes of its own."""
    return isinstance(source, str) and names_factory(source)


@dataclass(frozen=True)
class Comparison:
    """One model at one batch size, dtype and sequence length, which is trained under each policy and peer."""

    config: AblationConfig
    model: str | None = None
    """The name of ``source`` in the configuration. None, like all other fields, for a function that makes models."""
    source: ModelSource | None = None
    sequence_length: int | None = None
    """None for a factory, as is the batch size: it makes its own batches."""
    batch_size: int | None = None
    dtype: Dtype | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The values that tell the rows of this comparison from others."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def place(self) -> str:
        """The text that follows a policy's name in progress."""
        return place_of(self.facts, varied(each.facts for each in self.config.comparisons()))


LLAMA_1B = AblationConfig(
    model=ModelShape(hidden_size=2048, intermediate_size=8192, layers=16, heads=32, kv_heads=8),
    policies=POLICIES,
    peers=("torch-checkpoint", "torch-selective"),
    sequence_lengths=(4096,),
    batch_size=1,
    dtype="bfloat16",
    learning_rate=1e-4,
)


def default_config(device: str = "auto") -> AblationConfig:
    """A Llama-1B shape if `device` is a GPU or "auto" finds one; otherwise a small model that two cores can train."""
    config = LLAMA_1B if resolve_device(device).type == "cuda" else AblationConfig()
    return config.model_copy(update={"device": device})
