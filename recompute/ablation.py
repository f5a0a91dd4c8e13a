"""Trains one model from one seed under each of several policies; compares memory, time, losses, gradients."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, Strict, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recompute.errors import AblationError
from recompute.peers import BASELINE, COMPILED, Peer, is_peer, under
from recompute.planning import profiling
from recompute.planning.sources import check_writable
from recompute.policy.loading import load_policy
from recompute.verification import Widened, deterministic, relative_error, same_bits

Progress = Callable[[str, int, int], None]
"""Called after each training step with what is running, the steps done and the steps in all."""

_VOCABULARY = 256  # byte-level
_TEXT_NBYTES = 4 << 20  # of the standard library: more than a run's batches can visit


SequenceLength = Annotated[int, Field(ge=2)]


class ModelShape(BaseModel):
    """The shape of a byte-level Llama."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt = 688
    layers: PositiveInt = 6
    heads: PositiveInt = 8
    kv_heads: PositiveInt = 4

    @model_validator(mode="after")
    def _divides(self) -> ModelShape:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"expected hidden_size to be a multiple of 2 * heads = {2 * self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"expected heads to be a multiple of kv_heads = {self.kv_heads}")
        return self


class AblationConfig(BaseModel):
    """What to train and how long. The defaults suit two CPU cores; `default_config` knows a GPU's.

    policies: preset names, and paths of policy files from the current folder; `none` always runs, first.
    compile: whether each policy also runs, as `POLICY+compile`, with every layer compiled by torch.compile.
    step: what is trained and measured: "training" is forward, loss, backward and optimizer; "layers" is forward and
        backward of all but the head, the loss and the optimizer, whose weights stay as they are.
    steps: training steps a policy; the first `warmup` of them are not timed, except where no other is left.
    text: the file to train on, as bytes; None is the source of Python's standard library.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    model: ModelShape = ModelShape()
    policies: Annotated[tuple[str, ...], Strict(False)] = (BASELINE, "full", "hook", "elementwise", "kernel")
    compile: bool = False
    peers: Annotated[tuple[Peer, ...], Strict(False)] = ("torch-checkpoint",)
    sequence_lengths: Annotated[tuple[SequenceLength, ...], Strict(False), Field(min_length=1)] = (256,)
    batch_size: PositiveInt = 4
    step: Literal["training", "layers"] = "training"
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: PositiveInt = 8
    warmup: Annotated[int, Field(ge=0)] = 2
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    text: Annotated[Path | None, Strict(False)] = None

    def treatments(self) -> tuple[str, ...]:
        """What each sequence length is trained under, in order and once each, beginning with the baseline."""
        policies = dict.fromkeys((BASELINE, *self.policies))
        ways = ("", COMPILED) if self.compile else ("",)
        return tuple(dict.fromkeys([*(policy + way for policy in policies for way in ways), *self.peers]))


LLAMA_1B = AblationConfig(
    model=ModelShape(hidden_size=2048, intermediate_size=8192, layers=16, heads=32, kv_heads=8),
    policies=("none", "full", "hook", "elementwise", "kernel", "auto"),
    peers=("torch-checkpoint", "torch-selective"),
    sequence_lengths=(4096,),
    batch_size=1,
    dtype="bfloat16",
    learning_rate=1e-4,
)


def default_config(device: str = "auto") -> AblationConfig:
    """A Llama-1B shape where `device` is or finds a GPU, otherwise a small model that two cores train."""
    config = LLAMA_1B if resolve_device(device).type == "cuda" else AblationConfig()
    return config.model_copy(update={"device": device})


def resolve_device(device: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here. Raises `AblationError` where there is no such."""
    if device == "cuda" and not torch.cuda.is_available():
        raise AblationError("device is cuda, but torch finds no CUDA device; use auto or cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Row:
    """What one policy (or peer) did at one sequence length. If it failed, `error` says how; the rest is None.

    `step_seconds` is the median of forward, backward and optimizer together. `forward_cpu_seconds` is the median
    of the time that launching forward takes the CPU, and None where the CPU runs it.

    Comparisons are with the baseline, and None where the baseline failed. An error is ‖g - r‖ / ‖r‖, over all
    parameters together, of a gradient g to the baseline's r; `loss_error` is the largest of all steps.

    An `exact` policy promises the baseline's bits: `grads_match` tells whether the gradients of the first
    and of the last step have them. Any other rounds in its own way: there it tells whether `grad_error` is at
    most `grad_tolerance`, twice the error of the baseline's own gradient to the same model's in float64 (in
    float32 for a bfloat16 model), for each of the two may be that far from it. `grad_error` is the first
    step's, whose weights are still equal.
    """

    policy: str
    sequence_length: int
    exact: bool | None = None
    activation_bytes_held: int | None = None
    peak_bytes: int | None = None
    bytes_per_token_layer_hidden: float | None = None
    step_seconds: float | None = None
    forward_cpu_seconds: float | None = None
    losses: tuple[float, ...] | None = None
    losses_match: bool | None = None
    loss_error: float | None = None
    grads_match: bool | None = None
    grad_error: float | None = None
    grad_error_last: float | None = None
    grad_tolerance: float | None = None
    error: str | None = None


def run(config: AblationConfig, out: Path, *, command: str, progress: Progress) -> Iterator[Row]:
    """Train under each policy at each sequence length, and yield each row once ``out/results.json`` holds it.

    Beside its ``rows`` it has ``machine``, ``config``, ``text`` and the `command` that led to it.
    The file is replaced whole, so an interrupted run leaves the rows that it has, with ``complete`` false.
    Raises `AblationError` for a text or a device that cannot be used; a policy that fails does so in its row.
    """
    device = resolve_device(config.device)
    source, text = load_text(config.text)
    results: dict[str, Any] = {
        "command": command,
        "complete": False,
        "machine": profiling.describe_machine(device),
        "config": config.model_dump(mode="json"),
        "text": {"source": source, "nbytes": len(text)},
        "rows": [],
    }
    if len(text) < (longest := max(config.sequence_lengths)):
        raise AblationError(f"{source}: expected a text of at least {longest} bytes; found {len(text)}")
    check_writable(out, error=AblationError, is_folder=True)
    _write(results, out / "results.json")
    for row in _rows(config, text, device, progress):
        results["rows"].append(asdict(row))
        _write(results, out / "results.json")
        yield row
    _write({**results, "complete": True}, out / "results.json")


def load_text(path: Path | None) -> tuple[str, bytes]:
    """A name for the text, and its bytes: the file's, or of the standard library's modules sorted by name."""
    if path is not None:
        try:
            return path.name, path.read_bytes()
        except OSError as error:
            raise AblationError(f"{path}: the text cannot be read: {error.strerror}") from error
    text = bytearray()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += module.read_bytes()
        if len(text) >= _TEXT_NBYTES:
            break
    return f"standard library of Python {sys.version.split()[0]}", bytes(text[:_TEXT_NBYTES])


def _write(results: dict[str, Any], path: Path) -> None:
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


@dataclass(frozen=True)
class _Training:
    losses: tuple[float, ...]
    step_seconds: float
    forward_cpu_seconds: float
    first_gradient: tuple[Tensor, ...]
    last_gradient: tuple[Tensor, ...]


@dataclass
class _Experiment:
    """What every policy has in common at one sequence length, and the baseline's training once it has run."""

    config: AblationConfig
    batches: Tensor  # (steps, batch, sequence), int64
    progress: Progress
    baseline: _Training | None = None

    @property
    def device(self) -> torch.device:
        return self.batches.device

    def loss(self, model: LlamaForCausalLM, batch: Tensor) -> Tensor:
        """The model's own; of the layers alone a sum of what the last one gives, which holds nothing for backward."""
        if self.config.step == "training":
            return model(input_ids=batch, labels=batch).loss
        hidden = model.get_decoder()(input_ids=batch).last_hidden_state
        weights = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
        return F.linear(hidden, weights[None]).mean()

    @cached_property
    def grad_tolerance(self) -> float:
        """Twice the relative error of the baseline's first gradient, to the same model's in a wider dtype."""
        assert self.baseline is not None, "a tolerance is earned by the baseline's error"
        # For bfloat16, float32 is exact enough, and has the fused attention without which memory runs out.
        wider = torch.float32 if self.config.dtype == "bfloat16" else torch.float64
        model = build_model(self.config, self.device)
        nn.Module.to(model, wider)
        with Widened(wider):
            self.loss(model, self.batches[0]).backward()
        return 2 * relative_error(self.baseline.first_gradient, _gradient(model))


def _rows(config: AblationConfig, text: bytes, device: torch.device, progress: Progress) -> Iterator[Row]:
    for length in config.sequence_lengths:
        experiment = _Experiment(config, sample_batches(config, text, length).to(device), progress)
        for policy in config.treatments():
            gc.collect()  # Hugging Face modules form reference cycles: no model may outlive its row
            yield _row(experiment, policy)


def _row(experiment: _Experiment, policy: str) -> Row:
    try:
        return _measure(experiment, policy)
    except Exception as error:
        # What fails may be the user's policy file, our code, Triton or memory. Whatever it is belongs in this
        # row, because the other policies still deserve theirs. Ctrl-C is not an Exception: it ends the run.
        length = experiment.batches.shape[-1]
        return Row(policy, length, error=f"{type(error).__name__}: {error}")


def _measure(experiment: _Experiment, policy: str) -> Row:
    config, device = experiment.config, experiment.device
    exact = _is_exact(policy)
    tolerance = 0.0 if exact else experiment.grad_tolerance if experiment.baseline else None
    model = build_model(config, device)
    with under(policy, model):
        optimizer = AdamW(model.parameters(), lr=config.learning_rate, fused=True)
        with deterministic(device.type == "cuda"):
            trained = _train(experiment, model, optimizer, policy)
        timed = _train(experiment, model, optimizer, policy) if device.type == "cuda" else trained
        memory = profiling.step_memory(partial(experiment.loss, model, experiment.batches[-1]), device)
    if policy == BASELINE:
        experiment.baseline = trained

    length = experiment.batches.shape[-1]
    elements = config.batch_size * length * config.model.layers * config.model.hidden_size
    row = Row(
        policy,
        length,
        exact=exact,
        activation_bytes_held=memory.activation_bytes_held,
        peak_bytes=memory.peak_bytes,
        bytes_per_token_layer_hidden=memory.activation_bytes_held / elements,
        step_seconds=timed.step_seconds,
        forward_cpu_seconds=timed.forward_cpu_seconds if device.type == "cuda" else None,
        losses=trained.losses,
    )
    return _compared(row, trained, experiment.baseline, tolerance) if experiment.baseline else row


def _compared(row: Row, trained: _Training, baseline: _Training, tolerance: float | None) -> Row:
    first_matches, first_error = _compare(trained.first_gradient, baseline.first_gradient)
    last_matches, last_error = _compare(trained.last_gradient, baseline.last_gradient)
    if not row.exact:
        first_matches, last_matches = tolerance is not None and first_error <= tolerance, True
    return replace(
        row,
        losses_match=trained.losses == baseline.losses,
        loss_error=max(abs(a - b) / abs(b) for a, b in zip(trained.losses, baseline.losses, strict=True)),
        grads_match=first_matches and last_matches,
        grad_error=first_error,
        grad_error_last=last_error,
        grad_tolerance=tolerance,
    )


def _train(experiment: _Experiment, model: LlamaForCausalLM, optimizer: Optimizer, policy: str) -> _Training:
    config, device = experiment.config, experiment.device
    losses, seconds, forward_seconds, gradients = [], [], [], []
    for step, batch in enumerate(experiment.batches):
        optimizer.zero_grad()
        start, cpu_start = profiling.wall_seconds(device), profiling.thread_seconds()
        loss = experiment.loss(model, batch)
        forward_seconds.append(profiling.thread_seconds() - cpu_start)
        loss.backward()
        if config.step == "training":
            optimizer.step()
        seconds.append(profiling.wall_seconds(device) - start)
        losses.append(loss.item())
        if step in (0, config.steps - 1):
            gradients.append(_gradient(model))
        experiment.progress(f"{policy}, sequence {batch.shape[-1]}", step + 1, config.steps)
    warmup = min(config.warmup, config.steps - 1)
    return _Training(
        losses=tuple(losses),
        step_seconds=statistics.median(seconds[warmup:]),
        forward_cpu_seconds=statistics.median(forward_seconds[warmup:]),
        first_gradient=gradients[0],
        last_gradient=gradients[-1],
    )


def build_model(config: AblationConfig, device: torch.device) -> LlamaForCausalLM:
    """A model in training mode, initialized on `device` from the seed; leaves the global RNG as it was."""
    shape = config.model
    llama = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=max(config.sequence_lengths),
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(config.seed)
        dtype = getattr(torch, config.dtype)
        return AutoModelForCausalLM.from_config(llama, dtype=dtype, attn_implementation="sdpa").train()


def sample_batches(config: AblationConfig, text: bytes, length: int) -> Tensor:
    """Windows of `text` at random places: (steps, batch, length) int64, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed)
    starts = torch.randint(len(text) - length + 1, (config.steps, config.batch_size), generator=generator)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[starts[..., None] + torch.arange(length)].long()


def _is_exact(policy: str) -> bool:
    """Whether the policy promises the baseline's bits; kernels in a module's place, and compilers, round otherwise."""
    if policy.endswith(COMPILED):
        return False
    if is_peer(policy):
        return policy in ("torch-checkpoint", "torch-selective")
    return all(rule.action != "recompute" or rule.via == "hook" for rule in load_policy(policy).rules)


def _gradient(model: nn.Module) -> tuple[Tensor, ...]:
    """A flat copy of each parameter's gradient, on the host; zeros where a policy left none."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return tuple(gradient.flatten().to("cpu", copy=True) for gradient in gradients)


def _compare(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[bool, float]:
    """Whether all bits are the same, and the relative error."""
    if all(map(same_bits, gradient, reference)):
        return True, 0.0
    return False, relative_error(gradient, reference)
