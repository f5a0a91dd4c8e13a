"""How a module or a function under a policy runs its forward: the runners other than kernels, and which one it gets."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from recompute.compiled.captured_region import CaptureCache, CapturedRegion
from recompute.compiled.generated.switch import Generates, is_generating
from recompute.compiled.runner import Forward, Runner
from recompute.compiled.under_torch_compile import CompiledRegion, compiled_region, refuse_offloading
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.checkpoint.region import CheckpointRegion
from recompute.engine.cut.op_policy import op_policy
from recompute.engine.host.offload import OffloadRegion
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.scopes import KeepScope, RecipeScope, is_recording
from recompute.engine.tape.recorder import TapeRegion
from recompute.errors import warn
from recompute.policy.meaning import Kernels, Meaning, Mechanism
from recompute.substitution.adapted_mlp import is_adapted_mlp
from recompute.substitution.codec import Blockwise8Bit
from recompute.substitution.formulas import is_decorated
from recompute.substitution.head import KernelHeadRunner, is_head
from recompute.substitution.kernel_runner import KernelRunner
from recompute.substitution.recognition import find_kernel
from recompute.substitution.whole_heads import WholeHeads


class OuterRunner(Runner):
    """A runner around another one, or around the module's own forward."""

    inner: Runner | None = None
    compiled_region: CompiledRegion | None = None
    """Applies the rule in compiled code; None where nothing does, or the inner runner."""
    cache: CaptureCache | None = None
    """What the modules under one policy share; None of a runner that drops nothing itself."""

    def run_compiled(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.inner is not None:
            forward, args, kwargs = self.inner.run, (module, forward, args, kwargs), {}
        region = self.compiled_region
        return forward(*args, **kwargs) if region is None else region.run(forward, args, kwargs)

    def run_plain(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if module is not None and is_recording() and self.cache is not None and not self.cache.warned_of_evaluation:
            self._warn_of_evaluation(self.cache, (*module.parameters(), *args, *kwargs.values()))
        if self.inner is None:
            return forward(*args, **kwargs)
        return self.inner.run_plain(module, forward, args, kwargs)

    def _warn_of_evaluation(self, cache: CaptureCache, values: Iterable[Any]) -> None:
        if any(isinstance(each, Tensor) and each.requires_grad for each in values):
            cache.warned_of_evaluation = True
            warn(
                f"{self.statistics.name} runs in evaluation mode with gradients enabled. Its policy does nothing "
                "there, except that kernels stand in. Call model.train() to train, or evaluate under torch.no_grad()."
            )


class RootRunner(OuterRunner):
    """Opens the scope that lets outputs be dropped, around the model's forward, or around the runner of its rule."""

    def __init__(self, statistics: RegionStatistics, inner: Runner | None = None):
        self.statistics = statistics
        self.inner = inner
        scope = "outputs that come back are dropped wherever they are saved inside"
        self.note = scope if inner is None else f"{inner.note}; {scope}"

    def run_training(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with RecipeScope(self.statistics):
            if self.inner is None:
                return forward(*args, **kwargs)
            return self.inner.run_training(module, forward, args, kwargs)


def wrap_forward(inner: Callable[..., Any], module: nn.Module, runner: Runner) -> Callable[..., Any]:
    """Wrap a forward that another library has put on the model itself, so that ``runner`` runs it."""
    bearer = weakref.ref(module)

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        of_self = inner
        if isinstance(inner, MethodType) and inner.__self__ is bearer() and self is not bearer():  # a copy
            of_self = MethodType(inner.__func__, self)
        if self.__dict__.get(RUNNER) is not runner:
            return of_self(*args, **kwargs)
        return runner.run(self, of_self, args, kwargs)

    forward._recompute_inner = inner  # type: ignore[attr-defined]
    with suppress(ValueError, TypeError):  # of what has no signature
        signature, itself = inspect.signature(inner), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        whole = signature.replace(parameters=[itself, *signature.parameters.values()])
        forward.__signature__ = whole  # type: ignore[attr-defined]  # libraries look which arguments a model takes
    return MethodType(forward, module)


def unwrap_forward(forward: Any) -> Callable[..., Any] | None:
    """The forward inside of one that ``wrap_forward`` made; None for any other, even one that wraps ours."""
    inner = getattr(forward, "_recompute_inner", None)
    return inner if inner is not None and forward.__wrapped__ is inner else None


class PlainRunner(Runner):
    """Runs forward as it is: in the place of a kernel off CUDA, where the tape around sees the module's ops."""

    def __init__(self, statistics: RegionStatistics, note: str = "its ops are on the tape around it"):
        self.statistics = statistics
        self.note = note

    def run(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)

    run_training = run_compiled = run_plain = run


class KeepRunner(OuterRunner):
    """Keeps what autograd saves in the module, even inside of a region that drops."""

    def __init__(self, statistics: RegionStatistics, meaning: Meaning):
        self.statistics = statistics
        self.note = meaning.note
        self.compiled_region = compiled_region(op_policy(meaning))

    def run_training(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with KeepScope():
            return forward(*args, **kwargs)


class CheckpointRunner(OuterRunner):
    """Runs the whole forward of a module, or a decorated function, again from its inputs.

    A function is never captured.
    """

    def __init__(self, statistics: RegionStatistics, module: nn.Module | None, meaning: Meaning, cache: CaptureCache):
        self.statistics = statistics
        self.note = meaning.note
        self.compiled_region = compiled_region(op_policy(meaning))
        self.cache = cache
        self._checkpoint = CheckpointRegion(statistics, op_policy(meaning), state_hooks=cache.state_hooks)
        if module is not None:
            run = functools.partial(_again, self._checkpoint, weakref.ref(module))
            self.region = _region(statistics, meaning, cache, run)

    def run_training(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if module is None:
            return self._checkpoint.run(forward, (), args, kwargs)
        return self.region.run(forward, args, kwargs)


def _again(
    checkpoint: CheckpointRegion, module: weakref.ref[nn.Module], forward: Forward, args: tuple, kwargs: dict
) -> Any:
    # A library may have given another module this one's attributes, and so its runner (``higher``, a replica).
    itself: Any = forward.__self__ if isinstance(forward, MethodType) else module()
    return checkpoint.run(forward, (itself,), args, kwargs)


class TapeRunner(OuterRunner):
    """Writes down the ops of a module's or a function's forward, to run some of them again in backward.

    inner: runs the module inside of the tape. If kernels do, their ops are written down in the place of the module's.
    """

    def __init__(
        self, statistics: RegionStatistics, meaning: Meaning, cache: CaptureCache, inner: Runner | None = None
    ):
        self.statistics = statistics
        self.inner = inner
        self.cache = cache
        self.note = meaning.note if inner is None else f"{inner.note}; {meaning.note}"
        self.compiled_region = compiled_region(op_policy(meaning), compresses=meaning.compresses)
        self.region = _region(statistics, meaning, cache)

    def run_training(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.inner is None:
            return self.region.run(forward, args, kwargs)
        return self.region.run(self.inner.run, (module, forward, args, kwargs), {})


class OffloadRunner(OuterRunner):
    """Takes what is held for backward off the device, and back ahead of use: under every other runner, or none.

    inner: drops what need not be held.
    """

    def __init__(self, statistics: RegionStatistics, meaning: Meaning, cache: CaptureCache, inner: Runner | None):
        assert meaning.offloading is not None
        self.statistics = statistics
        self.cache = cache
        self.note = meaning.note
        self.inner = inner
        self.offload_region = OffloadRegion(statistics, meaning.offloading)
        """The region that decides what leaves the device."""

    def run_training(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.inner is None:
            return self.offload_region.run(forward, args, kwargs, counts=True)
        return self.offload_region.run(self.inner.run, (module, forward, args, kwargs), {}, counts=False)

    def run_compiled(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        refuse_offloading()
        return forward(*args, **kwargs)


def _region(
    statistics: RegionStatistics,
    meaning: Meaning,
    cache: CaptureCache,
    checkpoint: Callable[..., Any] | None = None,
) -> CapturedRegion:
    """checkpoint: as ``CapturedRegion`` takes it."""
    codec = Blockwise8Bit() if meaning.compresses else None
    rounds = meaning.kernels is not Kernels.NEVER
    tape = TapeRegion(
        statistics, op_policy(meaning), cache.plan_cache, codec, mode=WholeHeads if rounds else nullcontext
    )
    region = CapturedRegion(tape, cache if meaning.capture else None, checkpoint)
    if not meaning.compiled:
        region.generates = Generates.NOTHING
    elif rounds:
        region.generates = Generates.ROUNDED
    return region


def region_in(runner: Runner | None) -> CapturedRegion | None:
    """The region of a runner, or of one inside of it, that may be captured; None if there is none.

    Kernels and what runs off CUDA in their place may each have one: then it is the one that was tried.
    """
    regions = []
    while runner is not None:
        if isinstance(region := getattr(runner, "region", None), CapturedRegion):
            regions.append(region)
        runner = getattr(runner, "inner", None) or getattr(runner, "fallback", None)
    return next((region for region in regions if region.was_tried), regions[0] if regions else None)


def choose_runners(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str], cache: CaptureCache
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules that a rule on ``module`` makes run in another way, with their paths and runners.

    These are ``module`` itself and modules inside it. Kernels stand in for those inside that have no rule of their own.

    meaning: that of the rule.
    governed: the paths of all modules that have a rule.
    cache: what the modules under one policy share.
    """
    statistics = RegionStatistics(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    if meaning.tile is not None and any(map(is_adapted_mlp, module.modules())):
        meaning = replace(meaning, capture=False)  # no graph has the call that runs such an MLP's own code in tiles
    if meaning.mechanism is not Mechanism.TAPE or meaning.kernels is Kernels.NEVER:
        yield path, module, runner_without_kernels(statistics, module, meaning, cache)
        return
    is_on_cuda = meaning.kernels is Kernels.ON_CUDA
    kernel: KernelRunner | None
    if is_head(module):
        fallback = PlainRunner(statistics, "it runs as it is") if is_on_cuda else None
        kernel = KernelHeadRunner(statistics, fallback, meaning.hold)
    else:
        kernel = find_kernel(statistics, module, PlainRunner(statistics) if is_on_cuda else None, meaning)
    if kernel is None or kernel.wants_tape or (meaning.tapes_kernels and not is_head(module)):
        runner: Runner = TapeRunner(statistics, meaning, cache, kernel)
    else:
        if is_on_cuda and not is_head(module):
            kernel.fallback = TapeRunner(statistics, meaning, cache)
        kernel.compiled_region = compiled_region(op_policy(meaning), compresses=meaning.compresses)
        runner = kernel
    yield path, module, offloaded(runner, meaning, cache)
    if kernel is None:
        yield from _kernels_inside(path, module, meaning, governed)


def runner_without_kernels(
    statistics: RegionStatistics, module: nn.Module | None, meaning: Meaning, cache: CaptureCache
) -> Runner:
    """What runs a module, or a decorated function, under a rule without kernels. module: None of a function."""
    if meaning.mechanism is Mechanism.CHECKPOINT:
        return offloaded(CheckpointRunner(statistics, module, meaning, cache), meaning, cache)
    if meaning.mechanism is Mechanism.TAPE:
        return offloaded(TapeRunner(statistics, meaning, cache), meaning, cache)
    if meaning.offloading is None:
        return KeepRunner(statistics, meaning)
    return OffloadRunner(statistics, meaning, cache, None)


def offloaded(runner: Runner, meaning: Meaning, cache: CaptureCache) -> Runner:
    """``runner``; if the rule offloads, with what it holds taken off the device."""
    return runner if meaning.offloading is None else OffloadRunner(runner.statistics, meaning, cache, runner)


def _kernels_inside(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str]
) -> Iterator[tuple[str, nn.Module, Runner]]:
    # In captured code, generated kernels fuse what a norm or an MLP writes out in ops with more than these are.
    generates = meaning.capture and meaning.compiled and is_generating(torch.device("cuda"))
    written_out = meaning.kernels is Kernels.EVERYWHERE or not generates
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in governed or is_decorated(child):
            continue
        statistics = RegionStatistics(f"{child_path} ({type(child).__name__})")
        fallback = PlainRunner(statistics) if meaning.kernels is Kernels.ON_CUDA else None
        kernel = find_kernel(statistics, child, fallback, meaning, written_out=written_out)
        if kernel is None:
            yield from _kernels_inside(child_path, child, meaning, governed)
        else:
            yield child_path, child, kernel
