"""Estimates one model under different options. Simulated steps take time, so estimates that need the same share it."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from recompute.attach.apply import AppliedPolicy, apply
from recompute.attach.module_entries import module_entries
from recompute.compiled.settle import refuse_all, settle
from recompute.engine.thread_state import local, swapped
from recompute.errors import EstimateError, ModelError, NoEffectError, PolicyWarning, RecomputeError
from recompute.estimation.attention_choice import Platform
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Advice, Estimate, EstimateSettings, ModuleActivations
from recompute.estimation.fake_tensors import shapes_chosen_in_turn
from recompute.estimation.layer_extrapolation import Growth, extrapolated_step
from recompute.estimation.layer_stacks import find_stacks
from recompute.estimation.model_and_batch import ModelAndBatch
from recompute.estimation.module_tracker import LOSS, layer_of, parameter_shapes, unit_of
from recompute.estimation.optimizer_step import OptimizerStep, simulate_by_shape
from recompute.estimation.simulation import SimulatedStep, Surroundings, run_step, simulate
from recompute.estimation.static_memory import (
    DTYPE_RECIPES,
    OPTIMIZERS,
    ExtraBuffer,
    StaticBytes,
    shard_shapes,
    share_of,
    static_nbytes,
)
from recompute.estimation.storage_tracker import OpClock
from recompute.estimation.workspaces import cublas_nbytes
from recompute.policy.loading import load_policy
from recompute.policy.matching import pattern_of
from recompute.policy.rules import Policy, Rule

OPTIMIZER_STEP = "optimizer step"
_FUSED = "a fused optimizer"
_WORTH_TELLING = 1e-3  # advice must lower the peak by this share of it at least
ADVISED = ("elementwise", "auto", "full")
"""The policies to try for a lower peak."""


class ModelEstimator:
    """Makes estimates of one model under different options, and keeps the simulated steps, which take time."""

    def __init__(
        self,
        subject: ModelAndBatch,
        platform: Platform | None,
        *,
        strict: bool = True,
        timed: OpClock | None = None,
    ):
        """platform: count as on this CUDA device; None: as on the CPU.

        strict: as ``recompute.apply`` takes it. timed: as ``simulate`` takes it, for ``seconds``.
        """
        self._strict, self._timed = strict, timed
        self._subject = subject
        self._platform = platform
        self._steps: dict[Any, Sequence[SimulatedStep]] = {}
        self._growth: dict[Any, Growth] = {}
        self._updates: dict[Any, OptimizerStep] = {}
        self._parameters = parameter_shapes(subject.model)
        if not any(each.trains for each in self._parameters):
            raise ModelError(f"{subject.name}: expected a model with parameters to train; found none")

    def estimate(self, options: EstimateOptions, policy: Policy | None, *, offloads: bool = False) -> Estimate:
        static = self._static(options)
        governing, autocast = self._governing(options, policy), DTYPE_RECIPES[options.dtype].autocast
        steps = self.steps(governing, autocast)
        if options.microbatches > 1:
            steps = [each.beside_others(options.microbatches_in_flight) for each in steps]
        step = steps[0]
        optimizer_peak = self._update(options).peak_nbytes
        if offloads:
            static, optimizer_peak = replace(static, optimizer=0), 0
        share = share_of(options.sharding, options.devices)
        moments, *in_first = (
            {moment.name: static.in_phase(_phase(moment.name)) + moment.peak_nbytes(share) for moment in each.moments}
            for each in steps
        )
        moments[OPTIMIZER_STEP] = static.in_phase("optimizer") + static.gradients + optimizer_peak
        found = Estimate(
            settings=self._settings(options, policy, step),
            static_bytes=static,
            activation_bytes=sum(step.held.values()),
            activation_bytes_per_layer=_per_layer(step.held),
            activations=by_module(step.held),
            logits_peak_bytes=step.logits_peak_nbytes,
            moments=moments,
            parts={},
            advice=(),
            host_bytes=sum(step.host.values()),
            first_steps_peak_bytes=max(max(each.values()) for each in in_first or [moments]),
        )
        return replace(found, parts=_parts(found, step, share, optimizer_peak))

    def fitting_peak(self, options: EstimateOptions, policy: Policy | None, capacity: int) -> int | None:
        """The peak, if every step is within ``capacity``; None if not, or if the policy governs nothing."""
        if self.static_nbytes(options) > capacity:
            return None
        try:
            found = self.estimate(options, policy)
        except NoEffectError:
            return None
        return found.peak_bytes if found.most_bytes <= capacity else None

    def seconds(self, options: EstimateOptions, policy: Policy | None) -> float:
        """The seconds of a step, as ``timed`` tells them of each op. Communication between devices takes none."""
        assert self._timed is not None, "the estimator is made with a clock"
        step = self.step(self._governing(options, policy), DTYPE_RECIPES[options.dtype].autocast)
        return options.microbatches * sum(step.seconds.values()) + self._update(options).seconds

    def _governing(self, options: EstimateOptions, policy: Policy | None) -> Policy | None:
        return self._with_chunked_loss(policy) if options.loss == "chunked" else policy

    def advice(self, options: EstimateOptions, policy: Policy | None, now: Estimate) -> Iterator[Advice]:
        """Each change that lowers the peak, and by how much; two together if they lower it more than either alone."""
        found: dict[str, int] = {}

        def try_out(
            what: str, changed: EstimateOptions, under: Policy | None = policy, *, offloads: bool = False
        ) -> None:
            try:
                found[what] = now.peak_bytes - self.estimate(changed, under, offloads=offloads).peak_bytes
            except NoEffectError:  # nothing for that preset to govern
                return

        def with_fused(what: str, changed: EstimateOptions, under: Policy | None = policy) -> None:
            try_out(what, changed, under)
            if can_fuse and what in found:
                both = f"{what} and {_FUSED}"
                try_out(both, changed._replace(optimizer="adamw-fused"), under)
                if found[both] <= max(found[what], found[_FUSED]):
                    del found[both]

        can_fuse = options.optimizer in ("adamw", "adamw-loop")
        if can_fuse:
            try_out(_FUSED, options._replace(optimizer="adamw-fused"))
        for name in ADVISED:
            if policy is None or policy.name != name:
                with_fused(f"policy {name}", options, load_policy(name))
        if options.loss == "full" and self.head() is not None:
            with_fused("a chunked cross-entropy", options._replace(loss="chunked"))
        devices = 2 * options.devices
        kind = "fsdp2" if options.sharding in ("none", "ddp") else options.sharding
        try_out(f"{kind} over {devices} devices", options._replace(sharding=kind, devices=devices))
        try_out("the optimizer's states and step on the CPU or NVMe", options, offloads=True)
        told = [Advice(what, saved) for what, saved in found.items() if saved >= _WORTH_TELLING * now.peak_bytes]
        return iter(sorted(told, key=lambda each: -each.saves_nbytes))

    def _settings(self, options: EstimateOptions, policy: Policy | None, step: SimulatedStep) -> EstimateSettings:
        batch = self._subject.batch
        given = batch if isinstance(batch, (Mapping, tuple)) else {"batch": batch}
        named = given.items() if isinstance(given, Mapping) else enumerate(given)
        shapes = [f"{name} {'x'.join(map(str, each.shape))}" for name, each in named if isinstance(each, Tensor)]
        return EstimateSettings(
            self._subject.name.partition(";")[0].removesuffix(" on cpu"),
            ", ".join(shapes),
            *options[:4],
            "none" if policy is None else policy.name,
            options.loss,
            options.microbatches,
            options.microbatches_in_flight,
            str(options.adapters or ""),
            (*self._subject.assumed, *self._assumed(step)),
        )

    def _assumed(self, step: SimulatedStep) -> Iterator[str]:
        if shapes_chosen_in_turn():
            yield "tokens divided evenly among experts"
        if self._platform is not None and step.attention:
            kernels = " and ".join(step.attention)
            yield f"scaled_dot_product_attention by {kernels}, as torch {torch.__version__} on {self._platform.name}"

    def static_nbytes(self, options: EstimateOptions) -> int:
        """The bytes that are there all through forward, whatever the policy is."""
        return self._static(options).in_phase("forward")

    def _static(self, options: EstimateOptions) -> StaticBytes:
        recipe, optimizer = DTYPE_RECIPES[options.dtype], OPTIMIZERS[options.optimizer]
        found = static_nbytes(
            self._parameters, recipe=recipe, optimizer=optimizer, sharding=options.sharding, devices=options.devices
        )
        given = sum(each.nbytes for each in tree_leaves(self._subject.batch) if isinstance(each, Tensor))
        given *= options.microbatches
        buffers = {
            **found.buffers,
            "the model's buffers": ExtraBuffer(sum(each.nbytes for each in self._subject.model.buffers())),
            "the batch": ExtraBuffer(given),
            "cuBLAS workspaces": ExtraBuffer(0 if self._platform is None else cublas_nbytes(self._platform.capability)),
        }
        return replace(found, buffers={name: buffer for name, buffer in buffers.items() if buffer.nbytes})

    def step(self, policy: Policy | None, autocast: bool) -> SimulatedStep:
        """A step under ``policy``. autocast: whether forward and loss run under bfloat16's autocast."""
        return self.steps(policy, autocast)[0]

    def steps(self, policy: Policy | None, autocast: bool) -> Sequence[SimulatedStep]:
        """A step as ``step`` has it, and, where layers are captured, first ones: on tapes, and with ATen's kernels."""
        if (policy, autocast) not in self._steps:
            governed = partial(self._governed, policy, autocast)
            model = self._subject.model
            stacks = find_stacks(model, policy)
            steps = extrapolated_step(stacks, governed, self._growth)
            if steps is None and (finer := find_stacks(model, policy, tells_first=True)) != [
                stack._replace(tells_first=True) for stack in stacks
            ]:
                steps = extrapolated_step(finer, governed, self._growth)
            if steps is None:
                with governed() as simulate_all:
                    steps = simulate_all()
            self._steps[policy, autocast] = steps
        return self._steps[policy, autocast]

    @contextmanager
    def _governed(self, policy: Policy | None, autocast: bool) -> Iterator[Callable[[], list[SimulatedStep]]]:
        """Inside, the model is under the policy, which has learned from steps before.

        Yields a function that runs the steps of ``steps`` with the layers that the model then has.
        """
        subject, handle = self._subject, None
        if policy is not None:
            with swapped(local, "simulates_cuda", self._platform is not None), warnings.catch_warnings():
                if policy.name == _CHUNKED:  # its rule for the head comes before any other
                    warnings.simplefilter("ignore", PolicyWarning)
                handle = apply(subject.model, policy, strict=self._strict)
        surroundings = Surroundings(self._platform, torch.bfloat16 if autocast else None)
        try:
            regions = [] if handle is None else handle._regions
            settle_regions = partial(settle, regions, partial(run_step, subject.model, subject.run, surroundings))
            if handle is not None:
                settle_regions()
            logits: dict[str, Any] = {"tokens": self._tokens(), "classes": self._classes()}

            def run(until_captured: str | None = None) -> SimulatedStep:
                before = _carried(handle)
                try:
                    with swapped(local, "until_captured", until_captured):
                        step = simulate(subject.model, subject.run, surroundings, **logits, timed=self._timed)
                except RecomputeError:
                    if not refuse_all(regions):
                        raise
                    settle_regions()
                    return run(until_captured)
                return replace(step, host=dict(_carried(handle) - before))

            first = ("tapes", "ATen") if any(region.is_captured for region in regions) else ()
            yield lambda: [run(), *map(run, first)]
        finally:
            if handle is not None:
                handle.remove()

    def _update(self, options: EstimateOptions) -> OptimizerStep:
        """The optimizer's step."""
        recipe, kind = DTYPE_RECIPES[options.dtype], OPTIMIZERS[options.optimizer]
        shapes = tuple(shard_shapes(self._parameters, options.sharding, options.devices))
        key = options.optimizer, shapes, recipe
        if key not in self._updates:
            dtype = torch.float32 if recipe.state == 4 else torch.bfloat16
            # One of 8 bits reads and writes about as much as the same one fused, less half of the states.
            name, given = (kind.torch_class, kind.options) if kind.torch_class else ("AdamW", {"fused": True})
            make = partial(getattr(torch.optim, name), **given)
            step = simulate_by_shape(make, [(shape, dtype) for shape in shapes], self._timed)
            # With master weights there are the gradients once more, in their dtype.
            more = sum(map(math.prod, shapes)) * recipe.master
            self._updates[key] = step._replace(peak_nbytes=step.peak_nbytes + more)
        return self._updates[key]

    def _tokens(self) -> int:
        """The number of tokens. The ids for a model of the caller's own are the first whole numbers in its batch."""
        batch = self._subject.batch
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if ids is None and self.head() is not None:
            whole = (each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dtype in _WHOLE)
            ids = next(whole, None)
        return ids.numel() if isinstance(ids, Tensor) else 0

    def _classes(self) -> int | None:
        config = getattr(self._subject.model, "config", None)
        if not self._tokens():
            return None
        if isinstance(config, PretrainedConfig):
            return getattr(config.get_text_config(), "vocab_size", None)
        head = self.head()
        return None if head is None else getattr(self._subject.model.get_submodule(head), "out_features", None)

    def head(self) -> str | None:
        """The path of the Linear that makes logits, by transformers or else by ``type: head``. Of several, none."""
        model = self._subject.model
        find = getattr(model, "get_output_embeddings", None)
        if find is not None:
            head = find()
            return next((path for path, module in model.named_modules() if module is head and head), None)
        heads = [each.path for each in module_entries(model, type(model).__name__)[0] if each.is_head]
        return heads[0] if len(heads) == 1 else None

    def _with_chunked_loss(self, policy: Policy | None) -> Policy:
        head = self.head()
        if head is None:
            raise EstimateError(f"loss: chunked needs a language model with one head; {self._subject.name} has none")
        rule = Rule(match=[head], action="recompute", via="kernel")
        rules = () if policy is None else policy.rules
        return Policy(name=_CHUNKED, rules=[rule, *rules])


_CHUNKED = "chunked"
_WHOLE = (torch.int64, torch.int32)


def _carried(handle: AppliedPolicy | None) -> Counter[str]:
    """The bytes that have travelled to the host so far, by the layer or the module outside of layers."""
    found = Counter[str]()
    for each in () if handle is None else handle._attachments:
        found[unit_of(each.path)] += each.runner.statistics.offloaded_nbytes
    return found


def by_module(held: Mapping[str, int]) -> tuple[ModuleActivations, ...]:
    found: dict[str, ModuleActivations] = {}
    for path, nbytes in held.items():
        pattern = pattern_of(path)
        _, count, so_far = found.get(pattern, (pattern, 0, 0))
        found[pattern] = ModuleActivations(pattern, count + 1, so_far + nbytes)
    return tuple(found.values())


def _phase(moment: str) -> str:
    return "backward" if moment.startswith("backward") else "forward"


def _per_layer(held: Mapping[str, int]) -> int:
    layers: dict[str, int] = {}
    for path, nbytes in held.items():
        if layer := layer_of(path):
            layers[layer] = layers.get(layer, 0) + nbytes
    return max(layers.values(), default=0)


def _parts(found: Estimate, step: SimulatedStep, share: Callable[[int], int], optimizer_peak: int) -> dict[str, int]:
    """The bytes alive at the peak, part by part."""
    static, name = found.static_bytes, found.peak_moment
    parts = {"parameters": static.parameters, "optimizer states": static.optimizer}
    phase = "optimizer"
    if name == OPTIMIZER_STEP:
        parts |= {"gradients": static.gradients, "optimizer step": optimizer_peak}
    else:
        phase = _phase(name)
        moment = next(each for each in step.moments if each.name == name)
        gradients, alive = max(moment.alive.items(), key=lambda each: each[1] + share(each[0]))
        logits = min(alive, step.logits_peak_nbytes) if name.endswith(LOSS) else 0
        parts |= {"gradients": share(gradients), "logits": logits, "activations": alive - logits}
    parts["buffers"] = static.buffer_nbytes(phase)
    return {part: nbytes for part, nbytes in parts.items() if nbytes}
