"""Trains a model under one policy after another, and compares memory, time, losses and gradients.

Each training starts from the same weights and sees the same batches and random numbers.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from recompute import counters
from recompute.ablation.longest_sequence import is_out_of_memory
from recompute.ablation.peers import BASELINE, COMPILED, EXACT_PEERS, is_peer, under
from recompute.attach.apply import AppliedPolicy, PolicyLike
from recompute.diagnostics.comparing_runs import (
    COMPRESSION_TOLERANCE,
    Widened,
    deterministic,
    relative_error,
    same_bits,
)
from recompute.policy.loading import load_policy
from recompute.policy.meaning import Meaning, meaning_of

Progress = Callable[[str, int, int], None]
"""Called after each training step with what is running, the steps done and the steps in all."""


Timings = dict[str, tuple[float, ...]]
"""The seconds of each timed step, by what they are of: ``TIMED``."""

_PIECE = 1 << 26  # elements of a gradient that are compared at once
TIMED = ("step", "forward", "backward", "optimizer", "forward_cpu", "regenerating")
_REGENERATING_STEPS = 3
"""Steps in which regenerating is timed by itself. They come after the others, as on CUDA each of its parts costs two
events."""


@dataclass(frozen=True)
class AblationRow:
    """What training under one policy, or peer, took and gave. If it failed, ``error`` says how.

    What was not measured is None. ``sequence_length``, ``batch_size`` and ``model`` are None for a model of the
    caller's own.

    Bytes are those of tensors. ``activation_bytes_held`` are alive between forward and backward, and
    ``logits_bytes_held`` is by how many these are more than when the decoder returned: what head and loss hold, less
    the decoder's output where a policy drops it. It is not known under autocast. ``peak_bytes`` is the most alive at
    once in forward and backward. None of these count what is alive before the step: ``parameter_bytes``,
    ``gradient_bytes`` and ``optimizer_bytes``, its states.

    Times are medians over the timed steps of all repeats; their ``_quartiles`` are the first and the third. On CUDA
    ``step_seconds`` ends when the device has finished, and its parts are by the device's clock. ``forward_cpu_seconds``
    is the time that launching forward takes the CPU; it is None where the model itself runs on the CPU.
    ``backward_added_seconds`` is the backward's time minus that of the baseline's. That is what regenerating adds, less
    what the policy makes faster. ``regenerating_seconds`` is the part of backward in which it runs again what the
    policy has dropped; what a kernel regenerates in registers takes no time of its own. It is known of our policies in
    eager code alone. ``timings`` has the seconds of each timed step, for each repeat.

    ``longest_sequence`` is the longest of those that were tried whose whole step fits the budget; 0 if none does.

    The other fields compare with the baseline, and are None where the baseline failed. ``loss_error`` is the largest
    relative error of a step's loss. The error of a gradient g is ‖g - r‖ / ‖r‖, with the baseline's gradient r, over
    all parameters together. ``grad_error`` is that of the first step, in which the weights are still equal, and
    ``grad_error_last`` that of the last step.

    ``grads_match`` means one of two things. An ``exact`` policy promises the baseline's bits: then it says whether the
    gradients of the first and of the last step have them. Any other policy rounds in its own way: then it says whether
    ``grad_error`` is at most ``grad_tolerance``. That is twice the error of the baseline's own gradient, as compared
    with the same model's in float64 (float32 for a bfloat16 model), because the policy may be that far from it in one
    direction and the baseline in the other. Of a policy that compresses it is ``COMPRESSION_TOLERANCE``, if that is
    more. Where there is no memory for the model in the wider dtype, neither is known.
    """

    policy: str
    sequence_length: int | None = None
    model: str | None = None
    batch_size: int | None = None
    dtype: str | None = None
    exact: bool | None = None
    activation_bytes_held: int | None = None
    logits_bytes_held: int | None = None
    peak_bytes: int | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    bytes_per_token_layer_hidden: float | None = None
    step_seconds: float | None = None
    step_seconds_quartiles: tuple[float, float] | None = None
    forward_seconds: float | None = None
    forward_seconds_quartiles: tuple[float, float] | None = None
    backward_seconds: float | None = None
    backward_seconds_quartiles: tuple[float, float] | None = None
    optimizer_seconds: float | None = None
    optimizer_seconds_quartiles: tuple[float, float] | None = None
    forward_cpu_seconds: float | None = None
    forward_cpu_seconds_quartiles: tuple[float, float] | None = None
    backward_added_seconds: float | None = None
    regenerating_seconds: float | None = None
    regenerating_seconds_quartiles: tuple[float, float] | None = None
    losses: tuple[float, ...] | None = None
    losses_match: bool | None = None
    loss_error: float | None = None
    grads_match: bool | None = None
    grad_error: float | None = None
    grad_error_last: float | None = None
    grad_tolerance: float | None = None
    longest_sequence: int | None = None
    timings: tuple[Timings, ...] = ()
    error: str | None = None

    def timed(self, timings: Iterable[Timings]) -> AblationRow:
        """The same row with these timings, and the medians and quartiles over all of them."""
        repeats = tuple(timings)
        found: dict[str, Any] = {"timings": repeats}
        for name in TIMED:
            seconds = [each for repeat in repeats for each in repeat.get(name, ())]
            found[f"{name}_seconds"] = statistics.median(seconds) if seconds else None
            found[f"{name}_seconds_quartiles"] = tuple(np.percentile(seconds, (25, 75)).tolist()) if seconds else None
        return replace(self, **found)


@dataclass(frozen=True)
class Baseline:
    """What the baseline's training gave, with which the others are compared."""

    losses: tuple[float, ...]
    first_gradient: tuple[Tensor, ...]
    """A flat copy of each parameter's gradient in the first step, on the host."""
    last_gradient: tuple[Tensor, ...]


Look = Callable[[nn.Module], Any]
"""Called with a model that has gradients; returns what is to be known of them."""


@dataclass(frozen=True)
class Training:
    """What a training gave."""

    losses: tuple[float, ...]
    looks: tuple[Any, ...]
    """What was seen of the gradients: in the first step, and in the last."""
    timings: Timings


@dataclass
class Experiment:
    """What the trainings under all policies have in common, and the baseline's training once it has run.

    make: makes the model in training mode, on ``device``, with the same weights each time it is called.
    loss: computes a scalar from a model and a batch.
    batches: one for each step; tensors of floats in them have the model's dtype.
    optimizer: makes one of the parameters.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    device: torch.device
    progress: Progress
    wider: torch.dtype
    """A dtype in which gradients are exact enough to judge the model's own by."""
    autocast: torch.dtype | None = None
    """The dtype that forward runs in by ``torch.autocast``; None to leave it as it is."""
    warmup: int = 0
    """How many of the first steps are not timed."""
    updates: bool = True
    """Whether the optimizer takes its step."""
    seed: int = 0
    """The seed of the random numbers that training draws."""
    policies: Mapping[str, PolicyLike] = field(default_factory=dict)
    """Policies by names of their own. Other names are those of peers, presets or files."""
    layers: str | Sequence[str] | None = None
    """Globs over the paths of the modules that peers take for layers; None: by the names of their classes."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The fields of a row that say what is trained, and at which sizes."""
    place: str = ""
    """What follows the policy's name where progress is told."""
    token_elements: int | None = None
    """Tokens times layers times the hidden size of a step, for bytes by these."""
    baseline: Baseline | None = None
    known_tolerance: float | None = None
    has_sought_tolerance: bool = False

    @property
    def grad_tolerance(self) -> float | None:
        """Twice the relative error of the baseline's first gradient, as compared with that in a wider dtype.

        None if there is no room for that. It takes twice the memory, and more where attention has no kernel for it.
        """
        if not self.has_sought_tolerance:
            gc.collect()
            try:
                self.known_tolerance = self._grad_tolerance()
            except Exception as error:
                if not is_out_of_memory(f"{type(error).__name__}: {error}"):
                    raise
            self.has_sought_tolerance = True
        return self.known_tolerance

    def _grad_tolerance(self) -> float:
        assert self.baseline is not None, "a tolerance is earned by the baseline's error"
        wider = self.wider
        model = self.make()
        nn.Module.to(model, wider)
        batch = tree_map_only(
            Tensor, lambda each: each.to(wider) if each.is_floating_point() else each, self.batches[0]
        )
        with Widened(wider), seeded(self.seed, self.device):
            self.loss(model, batch).backward()
        return 2 * relative_error(*_in_pieces(self.baseline.first_gradient, _gradients(model)))

    @property
    def has_baseline(self) -> bool:
        return self.baseline is not None

    def row(self, policy: str) -> AblationRow:
        """Train under a policy or peer, and compare with the baseline if that ran before. A failure is in the row."""
        row, error = attempted(lambda: _measure(self, policy))
        return row or AblationRow(policy, **self.facts, error=error)

    def timings(self, policy: str) -> tuple[Timings | None, str | None]:
        """Train under a policy or peer once more, for the time that it takes. Returns that, or an error."""

        def train() -> Timings:
            model = self.make()
            with under(policy, model, self.policies, self.layers) as handle:
                timings = _train(self, model, self.optimizer(model.parameters()), policy).timings
                return timings | _regenerating(self, model, handle)

        return attempted(train)

    def step_peak(self, policy: str) -> tuple[int | None, str | None]:
        """The most bytes of tensors alive at once in a step, of what lives all through training, too; or an error.

        The step is the second one, in which the optimizer has its states. On the CPU what the optimizer itself
        allocates for a moment does not count.
        """
        return attempted(lambda: _step_peak(replace(self, batches=self.batches[:1], warmup=0), policy))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, under autocast if that is asked for."""
        if self.autocast is None:
            return self.loss(model, batch)
        with torch.autocast(self.device.type, dtype=self.autocast):
            return self.loss(model, batch)


Result = TypeVar("Result")


def attempted(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """What ``work`` returns, or the error that it raises."""
    gc.collect()  # Hugging Face modules form reference cycles, and no model may outlive its row
    try:
        return work(), None
    except Exception as error:
        # What fails may be the user's policy file, our code, Triton or memory. Whatever it is belongs in the row
        # of its policy, because the others still deserve theirs. Ctrl-C is not an Exception: it ends the run.
        return None, f"{type(error).__name__}: {error}"


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of torch, Python and NumPy inside; afterwards put back the states of before."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def _measure(experiment: Experiment, policy: str) -> AblationRow:
    device = experiment.device
    exact = _is_exact(policy, experiment.policies)
    tolerance = 0.0 if exact else experiment.grad_tolerance if experiment.baseline else None
    if tolerance is not None and _compresses(policy, experiment.policies):
        tolerance = max(tolerance, COMPRESSION_TOLERANCE)
    model = experiment.make()
    with under(policy, model, experiment.policies, experiment.layers) as handle:
        optimizer = experiment.optimizer(model.parameters())
        with deterministic(device.type == "cuda"):
            trained = _train(experiment, model, optimizer, policy, _looks(experiment.baseline, policy))
        timed = _train(experiment, model, optimizer, policy) if device.type == "cuda" else trained
        with seeded(experiment.seed, device):
            forward = partial(experiment.forward, model, experiment.batches[-1])
            memory = counters.step_memory(forward, device, _decoder_in(model))
        static_bytes = _static_bytes(model, optimizer)
        timings = timed.timings | _regenerating(experiment, model, handle)
    if policy == BASELINE:
        experiment.baseline = Baseline(trained.losses, *trained.looks)
    held, elements = memory.activation_bytes_held, experiment.token_elements
    row = AblationRow(
        policy,
        **experiment.facts,
        exact=exact,
        activation_bytes_held=held,
        logits_bytes_held=_after_decoder(experiment, memory),
        peak_bytes=memory.peak_bytes,
        **static_bytes,
        bytes_per_token_layer_hidden=None if elements is None else held / elements,
        losses=trained.losses,
    ).timed([timings])
    return _compared(row, trained, experiment.baseline, tolerance) if experiment.baseline else row


def _looks(baseline: Baseline | None, policy: str) -> tuple[Look, ...]:
    """What to see of the gradients in the first step and in the last. The baseline's are copied for the others."""
    if policy == BASELINE:
        return _copied, _copied
    if baseline is None:
        return ()
    return partial(_compare, expected=baseline.first_gradient), partial(_compare, expected=baseline.last_gradient)


def _step_peak(experiment: Experiment, policy: str) -> int:
    device = experiment.device
    model = experiment.make()
    with under(policy, model, experiment.policies, experiment.layers):
        optimizer = experiment.optimizer(model.parameters())
        _train(experiment, model, optimizer, policy)
        counters.start_peak(device)
        _train(experiment, model, optimizer, policy)
        if (counted := counters.allocated_nbytes(device)) is not None:
            return counted[1]
        memory = counters.step_memory(partial(experiment.forward, model, experiment.batches[0]), device)
    return memory.peak_bytes + sum(_static_bytes(model, optimizer).values())


def _after_decoder(experiment: Experiment, memory: counters.StepMemory) -> int | None:
    if memory.bytes_held_after_inner is None or experiment.autocast is not None:
        return None  # autocast's copies of the weights live until forward has ended, not until the decoder has
    return memory.activation_bytes_held - memory.bytes_held_after_inner


def _decoder_in(model: nn.Module) -> nn.Module | None:
    """What a model of transformers runs below its head; None for any other model, and for one without a head."""
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


def _static_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What lives all through training, by the names of a row's fields."""
    parameters = list(model.parameters())
    tensors: dict[str, list[Any]] = {
        "parameter_bytes": parameters,
        "gradient_bytes": [each.grad for each in parameters],
        "optimizer_bytes": tree_leaves(list(optimizer.state.values())),
    }
    return {name: sum(each.nbytes for each in kept if isinstance(each, Tensor)) for name, kept in tensors.items()}


def _compared(row: AblationRow, trained: Training, baseline: Baseline, tolerance: float | None) -> AblationRow:
    (first_matches, first_error), (last_matches, last_error) = (
        ((True, 0.0), (True, 0.0)) if row.policy == BASELINE else trained.looks
    )
    matches: bool | None = first_matches and last_matches
    if not row.exact:
        matches = None if tolerance is None else first_error <= tolerance
    return replace(
        row,
        losses_match=trained.losses == baseline.losses,
        loss_error=max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(trained.losses, baseline.losses, strict=True)),
        grads_match=matches,
        grad_error=first_error,
        grad_error_last=last_error,
        grad_tolerance=tolerance,
    )


def _train(
    experiment: Experiment, model: nn.Module, optimizer: Optimizer, policy: str, looks: Sequence[Look] = ()
) -> Training:
    """looks: at the gradients of the first step, and of the last; none to look at no gradient."""
    device, steps = experiment.device, len(experiment.batches)
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    losses, seen = [], []
    with seeded(experiment.seed, device):
        for step, batch in enumerate(experiment.batches):
            optimizer.zero_grad()
            with counters.clock(device) as clock:  # the device is idle now
                start, cpu_start = counters.host_seconds(), counters.thread_seconds()
                loss = experiment.forward(model, batch)
                seconds["forward_cpu"].append(counters.thread_seconds() - cpu_start)
                clock.mark("forward")
                loss.backward()
                clock.mark("backward")
                if experiment.updates:
                    optimizer.step()
                    clock.mark("optimizer")
                seconds["step"].append(counters.wall_seconds(device) - start)
            for name, spent in clock.seconds.items():
                seconds[name].append(spent)
            losses.append(loss.item())
            seen += [look(model) for look, at in zip(looks, (0, steps - 1), strict=False) if at == step]
            experiment.progress(f"{policy}{experiment.place}", step + 1, steps)
    if device.type != "cuda":
        del seconds["forward_cpu"]
    warmup = min(experiment.warmup, steps - 1)
    return Training(
        losses=tuple(losses),
        looks=tuple(seen),
        timings={name: tuple(each[warmup:]) for name, each in seconds.items() if each},
    )


def _regenerating(experiment: Experiment, model: nn.Module, handle: AppliedPolicy | None) -> Timings:
    """The seconds of each of some steps that go to running again what the policy has dropped, by the name of that."""
    if handle is None:
        return {}
    handle.time_regeneration()
    seconds = []
    with seeded(experiment.seed, experiment.device):
        for batch in experiment.batches[-_REGENERATING_STEPS:]:
            model.zero_grad()
            before = handle.stats()
            experiment.forward(model, batch).backward()
            spent = (handle.stats() - before).regenerating_seconds
            assert spent is not None, "it was asked for"
            seconds.append(spent)
    return {"regenerating": tuple(seconds)}


def _is_exact(policy: str, policies: Mapping[str, PolicyLike]) -> bool:
    """Whether the policy promises the baseline's bits. Kernels that stand in, and compilers, round in other ways."""
    if policy.endswith(COMPILED):
        return False
    if policy not in policies and is_peer(policy):
        return policy in EXACT_PEERS
    return all(meaning.is_exact for meaning in _meanings(policy, policies))


def _compresses(policy: str, policies: Mapping[str, PolicyLike]) -> bool:
    return any(meaning.compresses for meaning in _meanings(policy.removesuffix(COMPILED), policies))


def _meanings(policy: str, policies: Mapping[str, PolicyLike]) -> list[Meaning]:
    """Those of the policy's rules; a peer has none."""
    if policy not in policies and is_peer(policy):
        return []
    return [meaning_of(rule) for rule in load_policy(policies.get(policy, policy)).rules]


def _gradients(model: nn.Module) -> list[Tensor]:
    """Each parameter's gradient, flat; zeros where a policy left none."""
    return [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]


def _copied(model: nn.Module) -> tuple[Tensor, ...]:
    """The gradients, on the host."""
    return tuple(each.to("cpu", copy=True) for each in _gradients(model))


def _compare(model: nn.Module, expected: Sequence[Tensor]) -> tuple[bool, float]:
    """Whether all bits of the gradients are as expected, and the relative error."""
    if all(map(same_bits, *_in_pieces(_gradients(model), expected))):
        return True, 0.0
    return False, relative_error(*_in_pieces(_gradients(model), expected))


def _in_pieces(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
    """Flat tensors in pieces, for a comparison: on the device of any of them, which has little memory to spare."""
    device = next((each.device for each in (*tensors, *others) if each.device.type != "cpu"), torch.device("cpu"))

    def pieces(each: Sequence[Tensor]) -> Iterator[Tensor]:
        return (piece.to(device) for tensor in each for piece in tensor.split(_PIECE))

    return pieces(tensors), pieces(others)
