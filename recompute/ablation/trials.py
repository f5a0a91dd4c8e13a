"""Trains a model under one policy after another, and compares memory, time, losses and gradients.

Each training starts from the same weights and sees the same batches and random numbers.
"""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from recompute import counters
from recompute.ablation.ablation_config import Comparison
from recompute.ablation.peers import BASELINE, COMPILED, EXACT_PEERS, Match, decoder_of, is_peer, under
from recompute.ablation.results import TIMED, AblationRow, Timings
from recompute.attach.apply import AppliedPolicy, PolicyLike
from recompute.diagnostics.comparing_runs import (
    COMPRESSION_TOLERANCE,
    Widened,
    deterministic,
    relative_error,
    same_bits,
)
from recompute.engine.rng import RngState
from recompute.estimation.factories import placed
from recompute.policy.loading import load_policy
from recompute.policy.meaning import meaning_of
from recompute.profiling.dry_run import nbytes_of

Progress = Callable[[str, int, int], None]
"""Called after each training step with what is running, the steps done and the steps in all."""

Ask = Callable[[str, str], tuple[Any, str | None]]
"""As ``Experiment.ask``, in this process or in one of its own."""

_PIECE = 1 << 26  # elements of a gradient that are compared at once
_REGENERATING_STEPS = 3
"""Steps in which regenerating is timed by itself. They come after the others, as on CUDA each of its parts costs two
events."""


@dataclass(frozen=True)
class Baseline:
    """The baseline's training. The others are compared with it."""

    losses: tuple[float, ...]
    gradients: dict[int, tuple[Tensor, ...]]
    """For the first step and the last, by number: a flat copy of each parameter's gradient, on the host."""


class Training(NamedTuple):
    """The results of a training. looks: those at the gradients of the first step and of the last, by number."""

    losses: tuple[float, ...]
    looks: dict[int, Any]
    timings: Timings


@dataclass
class Experiment:
    """Everything that trainings under all policies share, and the baseline's training once it has run.

    comparison: what is trained, at which sizes, and how.
    make: makes the model in training mode, on ``device``, with the same weights each time it is called.
    loss: computes a scalar from a model and a batch.
    batches: one for each step; tensors of floats in them have the model's dtype.
    wider: a dtype in which gradients are exact enough to judge the model's own by.
    policies: by names of their own. Other names are those of peers, presets or files. On a CPU the preset ``auto`` is
        what it is on a GPU, by the kernels' references in plain PyTorch.
    layers: globs over the paths of the modules that peers take for layers; None: by the names of their classes.
    token_elements: tokens times layers times the hidden size of a step, for bytes by these.
    description: a line on the model and the batch.
    known_tolerance: the ``grad_tolerance`` once it has been sought.
    """

    comparison: Comparison
    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any]
    device: torch.device
    wider: torch.dtype
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda parameters: AdamW(parameters, lr=1e-3)
    progress: Progress = lambda what, done, total: None
    policies: Mapping[str, PolicyLike] = field(default_factory=dict)
    layers: Match = None
    token_elements: int | None = None
    description: str = ""
    baseline: Baseline | None = None
    known_tolerance: tuple[float | None] | None = None

    def __post_init__(self) -> None:
        auto = load_policy("auto")
        if self.device.type == "cpu" and load_policy(self.policies.get("auto", auto)) == auto:
            rules = [rule.model_copy(update={"via": "kernel"}) for rule in auto.rules]
            self.policies = {**self.policies, "auto": auto.model_copy(update={"rules": rules})}

    @property
    def grad_tolerance(self) -> float | None:
        """Twice the relative error of the baseline's first gradient, as compared with that in a wider dtype.

        None if there is no room for that. It takes twice the memory, and more where attention has no kernel for it.
        """
        if self.known_tolerance is None:
            error, failure = attempted(self._error_of_baseline, only=is_out_of_memory)
            self.known_tolerance = (None if failure else 2 * error,)
        return self.known_tolerance[0]

    def _error_of_baseline(self) -> float:
        assert self.baseline is not None, "a tolerance is earned by the baseline's error"
        model = self.make()
        nn.Module.to(model, self.wider)
        batch = placed(self.batches[0], dtype=self.wider, device=self.device)
        with Widened(self.wider), seeded(self.comparison.config.seed, self.device):
            self.loss(model, batch).backward()
        return relative_error(*_in_pieces(self.baseline.gradients[0], _gradients(model)))

    def ask(self, task: str, policy: str) -> tuple[Any, str | None]:
        """The result of "row", "timings" or "step_peak" for a policy or peer, or the error that it raises."""
        return attempted(lambda: getattr(self, task)(policy))

    def row(self, policy: str) -> AblationRow:
        """Train under a policy or peer, and compare with the baseline if that ran before."""
        exact, tolerance = self._promise(policy)
        on_cuda, token_elements = self.device.type == "cuda", self.token_elements
        with self.model_under(policy) as (model, optimizer, handle):
            with deterministic(on_cuda):
                trained = self.train(model, optimizer, policy, look=self._look(policy))
            timed = self.train(model, optimizer, policy) if on_cuda else trained
            with seeded(self.comparison.config.seed, self.device):
                forward = partial(self.forward, model, self.batches[-1])
                memory = counters.step_memory(forward, self.device, decoder_of(model))
            static_bytes = _static_bytes(model, optimizer)
            timings = timed.timings | self._regenerating(model, handle)
        if policy == BASELINE:
            self.baseline = Baseline(trained.losses, trained.looks)
            trained = trained._replace(looks=dict.fromkeys(trained.looks, (True, 0.0)))
        held = memory.activation_bytes_held
        # Autocast's copies of the weights live until forward has ended, not until the decoder has.
        after_decoder = None if self.comparison.dtype == "autocast" else memory.bytes_held_after_inner
        return AblationRow(
            policy,
            **self.comparison.facts,
            exact=exact,
            activation_bytes_held=held,
            logits_bytes_held=None if after_decoder is None else held - after_decoder,
            peak_bytes=memory.peak_bytes,
            **static_bytes,
            bytes_per_token_layer_hidden=None if token_elements is None else held / token_elements,
            losses=trained.losses,
            **({} if self.baseline is None else _compared(trained, self.baseline, exact, tolerance)),
        ).timed([timings])

    def _promise(self, policy: str) -> tuple[bool, float | None]:
        """Whether it promises the baseline's bits, and by how much its first gradient may differ; None: not known.

        Kernels that stand in, and compilers, round in other ways.
        """
        if is_peer(policy):
            exact, compresses = policy in EXACT_PEERS, False
        else:
            name = policy.removesuffix(COMPILED)
            meanings = [meaning_of(rule) for rule in load_policy(self.policies.get(name, name)).rules]
            exact = name == policy and all(meaning.is_exact for meaning in meanings)
            compresses = any(meaning.compresses for meaning in meanings)
        tolerance = 0.0 if exact else self.grad_tolerance if self.baseline else None
        return exact, max(tolerance, COMPRESSION_TOLERANCE) if compresses and tolerance is not None else tolerance

    def _look(self, policy: str) -> Look | None:
        """How to look at gradients: copy the baseline's, compare the others with these."""
        if policy == BASELINE:
            return lambda step, model: tuple(each.to("cpu", copy=True) for each in _gradients(model))
        if self.baseline is None:
            return None
        expected = self.baseline.gradients
        return lambda step, model: _compare(_gradients(model), expected[step])

    def timings(self, policy: str) -> Timings:
        """Train under a policy or peer once more, for the time that it takes."""
        with self.model_under(policy) as (model, optimizer, handle):
            return self.train(model, optimizer, policy).timings | self._regenerating(model, handle)

    def _regenerating(self, model: nn.Module, handle: AppliedPolicy | None) -> Timings:
        """The seconds of each of some steps that go to running again what the policy has dropped."""
        if handle is None:
            return {}
        handle.time_regeneration()
        seconds = []
        with seeded(self.comparison.config.seed, self.device):
            for batch in self.batches[-_REGENERATING_STEPS:]:
                model.zero_grad()
                before = handle.stats()
                self.forward(model, batch).backward()
                spent = (handle.stats() - before).regenerating_seconds
                assert spent is not None, "it was asked for"
                seconds.append(spent)
        return {"regenerating": tuple(seconds)}

    def step_peak(self, policy: str) -> int:
        """The most bytes of tensors alive at once in a step, of what lives all through training, too.

        The step is the second one, in which the optimizer has its states. On the CPU what the optimizer itself
        allocates for a moment does not count.
        """
        one = replace(self, batches=self.batches[:1])
        with self.model_under(policy) as (model, optimizer, _):
            one.train(model, optimizer, policy)
            counters.start_peak(self.device)
            one.train(model, optimizer, policy)
            if (counted := counters.allocated_nbytes(self.device)) is not None:
                return counted[1]
            memory = counters.step_memory(partial(self.forward, model, self.batches[0]), self.device)
            return memory.peak_bytes + sum(_static_bytes(model, optimizer).values())

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, under autocast if that is asked for."""
        is_cast = self.comparison.dtype == "autocast"  # if not, it is whatever the caller's own is
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if is_cast else nullcontext():
            return self.loss(model, batch)

    @contextmanager
    def model_under(self, policy: str) -> Iterator[tuple[nn.Module, Optimizer, AppliedPolicy | None]]:
        """A new model under a policy or peer, its optimizer, and the policy's handle."""
        model = self.make()
        with under(policy, model, self.policies, self.layers) as handle:
            yield model, self.optimizer(model.parameters()), handle

    def train(self, model: nn.Module, optimizer: Optimizer, policy: str, look: Look | None = None) -> Training:
        """look: at the gradients of the first step, and of the last."""
        config, device, steps = self.comparison.config, self.device, len(self.batches)
        seconds: dict[str, list[float]] = {name: [] for name in TIMED}
        losses: list[float] = []
        looks: dict[int, Any] = {}
        with seeded(config.seed, device):
            for step, batch in enumerate(self.batches):
                optimizer.zero_grad()
                with counters.Clock(device) as clock:  # the device is idle now
                    start, cpu_start = counters.host_seconds(), counters.thread_seconds()
                    loss = self.forward(model, batch)
                    seconds["forward_cpu"].append(counters.thread_seconds() - cpu_start)
                    clock.mark("forward")
                    loss.backward()
                    clock.mark("backward")
                    if config.step == "training":
                        optimizer.step()
                        clock.mark("optimizer")
                    seconds["step"].append(counters.wall_seconds(device) - start)
                for name, spent in clock.seconds.items():
                    seconds[name].append(spent)
                losses.append(loss.item())
                if look is not None and step in (0, steps - 1):
                    looks[step] = look(step, model)
                self.progress(f"{policy}{self.comparison.place}", step + 1, steps)
        if device.type != "cuda":
            del seconds["forward_cpu"]
        warmup = min(config.warmup, steps - 1)
        return Training(tuple(losses), looks, {name: tuple(each[warmup:]) for name, each in seconds.items() if each})


Look = Callable[[int, nn.Module], Any]
"""Called with the number of a step and the model, which has gradients; returns a note on them."""


def is_out_of_memory(error: str) -> bool:
    """Whether a row's error says that there was no memory left."""
    of_torch = ("OutOfMemoryError", "MemoryError", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    signs = (*of_torch, "out of memory", signal.SIGKILL.name)  # of CUDA, and of the kernel that ends such a process
    return any(sign in error for sign in signs)


def attempted(work: Callable[[], Any], only: Callable[[str], bool] = lambda error: True) -> tuple[Any, str | None]:
    """The result of ``work``, or the error that it raises. only: which errors are returned; the others are raised."""
    gc.collect()  # Hugging Face modules form reference cycles, and no model may outlive its row
    torch.cuda.empty_cache()  # after a row without enough memory cuBLAS would find none for itself
    try:
        return work(), None
    except Exception as error:
        # What fails may be the user's policy file, our code, Triton or memory. Whatever it is belongs in the row
        # of its policy, because the others still deserve theirs. Ctrl-C is not an Exception: it ends the run.
        told = f"{type(error).__name__}: {error}"
        if not only(told):
            raise
        return None, told


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of torch, Python and NumPy inside; afterwards put back the states of before."""
    if device.type == "cuda":
        torch.cuda.init()  # so that its generators have states to put back
    with RngState():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


def _compared(trained: Training, baseline: Baseline, exact: bool, tolerance: float | None) -> dict[str, Any]:
    (first_matches, first_error), (last_matches, last_error) = trained.looks[0], trained.looks[max(trained.looks)]
    within = None if tolerance is None else first_error <= tolerance
    return {
        "losses_match": trained.losses == baseline.losses,
        "loss_error": max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(trained.losses, baseline.losses, strict=True)),
        "grads_match": first_matches and last_matches if exact else within,
        "grad_error": first_error,
        "grad_error_last": last_error,
        "grad_tolerance": tolerance,
    }


def _static_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The bytes that live all through training, by the names of a row's fields."""
    parameters = list(model.parameters())
    return {
        "parameter_bytes": nbytes_of(parameters),
        "gradient_bytes": nbytes_of([each.grad for each in parameters]),
        "optimizer_bytes": nbytes_of(list(optimizer.state.values())),
    }


def _gradients(model: nn.Module) -> list[Tensor]:
    """Each parameter's gradient, flat; zeros, which take no memory, where there is none."""
    every = model.parameters()
    return [each.new_zeros(()).expand(each.numel()) if each.grad is None else each.grad.flatten() for each in every]


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[bool, float]:
    """Whether all bits are as expected, and the relative error."""
    if all(map(same_bits, *_in_pieces(found, expected))):
        return True, 0.0
    return False, relative_error(*_in_pieces(found, expected))


def _in_pieces(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
    """Flat tensors in pieces, for a comparison: on the device of any of them, which has little memory to spare."""
    device = next((each.device for each in (*tensors, *others) if each.device.type != "cpu"), torch.device("cpu"))

    def pieces(each: Sequence[Tensor]) -> Iterator[Tensor]:
        return (piece.to(device) for tensor in each for piece in tensor.split(_PIECE))

    return pieces(tensors), pieces(others)
