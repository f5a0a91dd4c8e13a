"""`recompute doctor` says what is in the way of a run, and what to type against it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from recompute.errors import EstimateError, ModelError
from recompute.estimation.check_paths import check_source, names_factory
from recompute.estimation.estimate import estimator_of
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Estimate, table
from recompute.estimation.gpus import GPUS, Gpu, find_gpu, read_size
from recompute.planning.longest_sequences import NO_LENGTH, SequencesThatFit, longest_sequences
from recompute.policy.loading import load_policy
from recompute.policy.rules import Policy
from recompute.units import humanize

if TYPE_CHECKING:
    from recompute.estimation.model_estimator import ModelEstimator

Progress = Callable[[str, int, int], None]

_BEST = 3
PRESETS = ("elementwise", "auto", "alternate", "full")
"""The policies to try."""
_DEVICES = [2**exponent for exponent in range(11)]
_RANK = 16


class Remedy(NamedTuple):
    """Changes that make a step fit, and its peak and calculated seconds with them."""

    changes: tuple[str, ...]
    """() for the step as it is."""
    devices: int
    peak_nbytes: int
    seconds: float


@dataclass(frozen=True)
class Diagnosis:
    """The memory of a step as it is, and the fastest ways to make it fit, on as few devices as it needs."""

    gpu: Gpu
    now: Estimate
    seconds: float
    """Of a step as it is, on a device that has room for it."""
    remedies: tuple[Remedy, ...]
    """The fastest first."""
    by_adapters: Remedy | None = None
    """Where it takes several devices: how adapters alone fit one."""

    @property
    def fits(self) -> bool:
        return self.now.peak_bytes <= self.gpu.capacity_nbytes

    @property
    def static(self) -> dict[str, int]:
        """The bytes that depend neither on the batch nor on the policy."""
        static = self.now.static_bytes
        named = {"parameters": static.parameters, "gradients": static.gradients, "optimizer states": static.optimizer}
        return {name: nbytes for name, nbytes in named.items() if nbytes}

    @property
    def beside(self) -> dict[str, int]:
        """The other bytes at the peak: logits, activations …"""
        return {part: nbytes for part, nbytes in self.now.parts.items() if part not in self.static}

    @property
    def in_the_way(self) -> str:
        """The largest obstacle: "static memory", "logits", "activations" …"""
        if sum(self.static.values()) > self.gpu.capacity_nbytes:
            return "static memory"
        parts = {"static memory": sum(self.now.parts.get(part, 0) for part in self.static), **self.beside}
        return max(parts, key=lambda part: parts[part])

    def to_json(self) -> str:
        document = {
            "gpu": self.gpu.name,
            "capacity_bytes": self.gpu.capacity_nbytes,
            "fits": self.fits,
            "in_the_way": self.in_the_way,
            "static_bytes": sum(self.static.values()),
            "step_seconds": self.seconds,
            "remedies": [each._asdict() for each in self.remedies],
            "by_adapters": self.by_adapters and self.by_adapters._asdict(),
            "estimate": self.now.as_dict(),
        }
        return json.dumps(document, indent=2)

    def __str__(self) -> str:
        settings, room = self.now.settings, humanize(self.gpu.capacity_nbytes)
        what = "; ".join(filter(None, (settings.model, settings.batch, settings.adapters)))
        verb = "fits" if self.fits else "does not fit"
        is_static = sum(self.static.values()) > self.gpu.capacity_nbytes
        start = "The largest part" if self.fits else "The largest obstacle"
        return "\n".join(
            [
                f"{what}; {settings.dtype}, {settings.optimizer}.",
                "",
                f"Without changes, a step {verb} one {self.gpu.name}: its peak is {humanize(self.now.peak_bytes)} "
                f"({self.now.peak_moment}), and the GPU has {room}.",
                f"Static memory: {humanize(sum(self.static.values()))} ({_listed(self.static)}).",
                f"Also held at the peak: {_listed(self.beside)}.",
                f"{start}: {self.in_the_way}{', which alone is too much' * is_static}.",
                *self._advice(),
            ]
        )

    def _advice(self) -> list[str]:
        lines = []
        if not self.remedies:
            lines.append("No policy, no other optimizer and no sharding makes it fit. Shorten the sequence.")
        elif self.remedies[0].devices > 1:
            lines.append(
                f"No policy makes it fit one GPU. Sharding does: it takes {self.remedies[0].devices} GPUs under FSDP2, "
                "with the same batch on each."
            )
        elif all(any("optimizer" in change for change in each.changes) for each in self.remedies):
            lines.append("No policy alone makes it fit. Another optimizer does.")
        if self.by_adapters is not None:
            changes = " and ".join(self.by_adapters.changes)
            lines.append(f"Adapters fit one GPU: {changes} take {humanize(self.by_adapters.peak_nbytes)}.")
        if self.remedies:
            rows = [
                (
                    ", ".join(each.changes) or "no change",
                    humanize(each.peak_nbytes),
                    f"{each.seconds * 1e3:,.{0 if each.seconds > 0.1 else 2}f}",
                    f"{each.seconds / self.seconds:.2f}x",
                )
                for each in self.remedies
            ]
            lines += ["", table("what to change, fastest first", rows, "peak", "ms a step", "time against now"), ""]
            lines += self._how_to_type([change for each in self.remedies for change in each.changes])
        return lines

    def _how_to_type(self, changes: list[str]) -> list[str]:
        lines = []
        policy = next((each.removeprefix("policy ") for each in changes if each.startswith("policy ")), None)
        if policy is not None:
            trainer = f'recompute_policy="{policy}"'
            lines.append(f'To use a policy: recompute.apply(model, "{policy}"), or {trainer} for a Trainer.')
        if "a chunked cross-entropy" in changes:
            lines.append(
                "To use a chunked cross-entropy: the rule {type: head, action: recompute, via: kernel} in a policy."
            )
        return [
            *lines,
            f"Times are calculated for the {self.gpu.name} by its data sheet, without communication between GPUs.",
            "To choose a policy for each layer: recompute plan --budget 100% with the same options.",
        ]


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {humanize(nbytes)}" for name, nbytes in parts.items()) or "nothing"


def diagnose(
    model: str,
    options: EstimateOptions,
    *,
    batch_size: int,
    seq_len: int,
    gpu: Gpu | None,
    longest: bool = False,
    host: str | None = None,
    progress: Progress,
) -> Diagnosis | SequencesThatFit:
    """Diagnose a run on a GPU, or, if ``longest``, find the longest sequences that fit it.

    model: names it, as ``recompute.estimate`` takes a name.
    gpu: None: this machine's.
    host: the host's memory; None: what this machine has free.

    Raises ``EstimateError`` or ``ModelError`` before it imports torch where it can.
    """
    host_nbytes = None if host is None else read_size("--host", host, "128GiB")
    options = options.read()
    check_source(model)
    if host is not None and not longest:
        raise EstimateError("--host has an effect only with --longest. Pass both, or neither")
    if longest and names_factory(model):
        raise ModelError(NO_LENGTH)
    progress("loading torch and transformers", 0, 0)
    from recompute.profiling.roofline import op_seconds  # which imports torch

    card = gpu or _gpu_here()

    def estimator(options: EstimateOptions, seq_len: int = seq_len) -> Any:
        timed = partial(op_seconds, figures=card)
        return estimator_of(model, options, batch_size, seq_len, None, card.name if card.name in GPUS else None, timed)

    if longest:
        from recompute.engine.host.host_memory import free_host_nbytes  # which imports torch

        room = free_host_nbytes() if host_nbytes is None else host_nbytes
        return longest_sequences(partial(estimator, options), options, card, room, progress)
    with estimator(options) as of_model:
        progress("estimating the step as it is", 0, 0)
        now, seconds = of_model.estimate(options, None), of_model.seconds(options, None)
        remedies = _remedies(of_model, options, card, progress)
    adapted = None
    if options.lora is None and (not remedies or remedies[0].devices > 1):
        progress("estimating adapters", 0, 0)
        tried = (_by_adapters(estimator, options._replace(lora=_RANK, base=base), card) for base in ("", "nf4"))
        adapted = next(filter(None, tried), None)
    return Diagnosis(card, now, seconds, tuple(remedies), adapted)


def _gpu_here() -> Gpu:
    import torch

    if not torch.cuda.is_available():
        raise ModelError("gpu: this machine has no CUDA device. Name one, as in --gpu 'RTX 4090'")
    return find_gpu(torch.cuda.get_device_name())._replace(capacity_nbytes=torch.cuda.mem_get_info()[1])


def _remedies(estimator: ModelEstimator, options: EstimateOptions, gpu: Gpu, progress: Progress) -> list[Remedy]:
    """The fastest ways to fit, each under another policy or loss, on as few devices as any needs."""
    found: dict[Any, Remedy] = {}
    tried = list(_combinations(estimator, options))
    for done, (told, changed, policy) in enumerate(tried):
        if found and changed.devices > next(iter(found.values())).devices:
            break
        progress("looking for changes that fit", done, len(tried))
        if (remedy := _tried(estimator, told, changed, policy, gpu)) is not None:
            key = policy and policy.name, changed.loss
            known = found.setdefault(key, remedy)
            if (len(remedy.changes), remedy.seconds) < (len(known.changes), known.seconds):
                found[key] = remedy

    def is_needless(remedy: Remedy) -> bool:
        return any({*each.changes} < {*remedy.changes} and each.seconds <= remedy.seconds for each in found.values())

    return sorted((each for each in found.values() if not is_needless(each)), key=lambda each: each.seconds)[:_BEST]


def _combinations(
    estimator: ModelEstimator, options: EstimateOptions
) -> Iterator[tuple[tuple[str, ...], EstimateOptions, Policy | None]]:
    """All combinations of changes to try, with their names: from none to the most devices."""
    losses = ["full", *(["chunked"] if estimator.head() is not None else [])]
    others = ["adamw-fused", "adamw-8bit"] if options.optimizer in ("adamw", "adamw-loop") else ["adamw-8bit"]
    optimizers = dict.fromkeys([options.optimizer, *(others if options.optimizer.startswith("adamw") else [])])
    for devices, optimizer, policy, loss in product(_DEVICES, optimizers, (None, *map(load_policy, PRESETS)), losses):
        if loss == "chunked" and policy is not None and policy.name == "auto":
            continue  # it makes no logits anyway
        told = ["a chunked cross-entropy"] if loss == "chunked" else []
        told += [] if policy is None else [f"policy {policy.name}"]
        told += [] if optimizer == options.optimizer else [f"optimizer {optimizer}"]
        changed = options._replace(optimizer=optimizer, loss=loss)
        if devices > 1:
            told.append(f"fsdp2 over {devices} devices")
            changed = changed._replace(sharding="fsdp2", devices=devices)
        yield tuple(told), changed, policy


def _by_adapters(estimator: Any, options: EstimateOptions, gpu: Gpu) -> Remedy | None:
    """LoRA under a checkpoint of each layer, if that fits, and if PEFT is here."""
    told = (f"--lora {_RANK}{options.base and f' --base {options.base}'}", "policy full")
    try:
        with estimator(options) as of_adapters:
            return _tried(of_adapters, told, options, load_policy("full"), gpu)
    except ModelError:
        return None


def _tried(estimator: ModelEstimator, told: tuple[str, ...], options: EstimateOptions, policy: Any, gpu: Gpu) -> Any:
    """The remedy; None where it does not fit, or the policy governs nothing."""
    peak = estimator.fitting_peak(options, policy, gpu.capacity_nbytes)
    return None if peak is None else Remedy(told, options.devices, peak, estimator.seconds(options, policy))
