"""How a module or a function under a policy runs its forward: the runners other than kernels, and which one it gets."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch import Tensor, nn

from recompute.compiled.capture_cache import CaptureCache
from recompute.compiled.captured_region import CapturedRegion
from recompute.compiled.generated.switch import Generates
from recompute.compiled.runner import Forward, Runner
from recompute.compiled.under_torch_compile import CompiledRegion, compiled_region
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.checkpoint.region import CheckpointRegion
from recompute.engine.cut.op_policy import op_policy
from recompute.engine.host.offload import OffloadRegion
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.scopes import KeepScope, RecipeScope, is_recording
from recompute.engine.tape.recorder import TapeRegion
from recompute.errors import warn
from recompute.kernels.blockwise_8bit import Blockwise8Bit
from recompute.policy.meaning import Kernels, Meaning, Mechanism
from recompute.substitution.adapted_mlp import drops, is_adapted_mlp
from recompute.substitution.head import KernelHeadRunner
from recompute.substitution.recognition import find_kernel, kernels_inside
from recompute.substitution.whole_heads import WholeHeads


class OuterRunner(Runner):
    """A runner around another one, or around the module's own forward."""

    inner: Runner | None = None
    compiled_region: CompiledRegion | None = None
    """Applies the rule in compiled code; None where nothing does, or the inner runner."""
    cache: CaptureCache | None = None
    """The cache that the modules under one policy share; None if this runner drops nothing itself."""

    def run_compiled(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.inner is not None:
            forward, args, kwargs = self.inner.run, (module, forward, args, kwargs), {}
        region = self.compiled_region
        return forward(*args, **kwargs) if region is None else region.run(forward, args, kwargs)

    def run_plain(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if module is not None and is_recording() and self.cache is not None and not self.cache.warned_of_evaluation:
            self._warn_of_evaluation(self.cache, (*module.parameters(), *args, *kwargs.values()))
        return forward(*args, **kwargs) if self.inner is None else self.inner.run(module, forward, args, kwargs)

    def _warn_of_evaluation(self, cache: CaptureCache, values: Iterable[Any]) -> None:
        if any(isinstance(each, Tensor) and each.requires_grad for each in values):
            cache.warned_of_evaluation = True
            warn(
                f"{self.statistics.name} runs in evaluation mode with gradients enabled. In evaluation mode a policy "
                "drops nothing; only its kernels run. Call model.train() to train, or evaluate under torch.no_grad()."
            )


class RootRunner(OuterRunner):
    """Opens the scope that lets outputs be dropped, around the model's forward, or around the runner of its rule."""

    def __init__(self, statistics: RegionStatistics, inner: Runner | None = None):
        self.statistics = statistics
        self.inner = inner
        scope = "outputs of modules inside are dropped if they can be recomputed"
        self.note = scope if inner is None else f"{inner.note}; {scope}"

    def run_training(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with RecipeScope(self.statistics):
            return forward(*args, **kwargs) if self.inner is None else self.inner.run(module, forward, args, kwargs)


def wrap_forward(inner: Callable[..., Any], module: nn.Module, runner: Runner) -> Callable[..., Any]:
    """Wrap a forward that another library has put on the model itself, so that ``runner`` runs it."""
    bearer = weakref.ref(module)

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        of_self = inner
        if isinstance(inner, MethodType) and inner.__self__ is bearer() and self is not bearer():  # a copy
            of_self = MethodType(inner.__func__, self)
        if self.__dict__.get(RUNNER) is not runner:
            return of_self(*args, **kwargs)
        return runner.run(self, of_self, args, kwargs)

    forward._recompute_inner = inner  # type: ignore[attr-defined]
    with suppress(ValueError, TypeError):  # some callables have no signature
        signature, itself = inspect.signature(inner), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        whole = signature.replace(parameters=[itself, *signature.parameters.values()])
        forward.__signature__ = whole  # type: ignore[attr-defined]  # libraries look which arguments a model takes
    return MethodType(forward, module)


def unwrap_forward(forward: Any) -> Callable[..., Any] | None:
    """The forward inside of one that ``wrap_forward`` made; None for any other, even one that wraps ours."""
    inner = getattr(forward, "_recompute_inner", None)
    return inner if inner is not None and forward.__wrapped__ is inner else None


class RegionRunner(OuterRunner):
    """Runs a module, or a decorated function, in the regions that its rule asks for.

    inner: kernels that run in the place of the module. A tape around them writes their ops down.
    """

    def __init__(
        self,
        statistics: RegionStatistics,
        meaning: Meaning,
        cache: CaptureCache,
        module: nn.Module | None,
        inner: Runner | None = None,
    ):
        """module: None for a decorated function."""
        self.statistics = statistics
        self.inner = inner
        self.cache = cache if meaning.has_effect else None
        self.note = meaning.note if inner is None else f"{inner.note}; {meaning.note}"
        self.regions = _regions(statistics, meaning, cache, module, inner)
        self.compiled_region = compiled_region(meaning)

    def run_training(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.inner is not None:
            forward, args, kwargs = self.inner.run, (module, forward, args, kwargs), {}
        for region in self.regions:
            forward, args, kwargs = region.run, (forward, args, kwargs), {}
        return forward(*args)


class _KeepRegion:
    """Keeps what autograd saves in the module, even inside of a region that drops."""

    def run(self, function: Forward, args: tuple, kwargs: dict) -> Any:
        with KeepScope():
            return function(*args, **kwargs)


def _regions(
    statistics: RegionStatistics,
    meaning: Meaning,
    cache: CaptureCache,
    module: nn.Module | None,
    inner: Runner | None,
) -> list[CapturedRegion | OffloadRegion | _KeepRegion]:
    """The regions that a rule asks for, the innermost first: the one way from a rule to the engine in eager code.

    A function under ``action: checkpoint`` is never captured.
    """
    regions: list[Any] = []
    if meaning.mechanism is not Mechanism.KEEP:
        ops, rounds = op_policy(meaning), meaning.kernels is not Kernels.NEVER
        checkpoint = None
        if meaning.mechanism is Mechanism.CHECKPOINT:
            itself = None if module is None else weakref.ref(module)
            checkpoint = partial(_again, CheckpointRegion(statistics, ops, state_hooks=cache.state_hooks), itself)
        codec, mode = Blockwise8Bit() if meaning.compresses else None, WholeHeads if rounds else nullcontext
        tape = TapeRegion(statistics, ops, cache.plan_cache, codec, mode)
        captures = meaning.capture and (checkpoint is None or module is not None)
        region = CapturedRegion(tape, cache if captures else None, checkpoint)
        if not meaning.compiled:
            region.generates = Generates.NOTHING
        elif rounds:
            region.generates = Generates.ROUNDED
        inside = module.modules() if meaning.tile is not None and module is not None else ()
        if any(is_adapted_mlp(each) and not drops(each, is_training=True) for each in inside):
            region.refuse("no graph has the call that runs an MLP with adapters in tiles")
        regions.append(region)
    if meaning.offloading is not None:
        regions.append(OffloadRegion(statistics, meaning.offloading, counts=inner is None and not regions))
    return regions or [_KeepRegion()]


def _again(
    checkpoint: CheckpointRegion,
    module: weakref.ref[nn.Module] | None,
    forward: Forward,
    args: tuple,
    kwargs: dict,
) -> Any:
    if module is None:
        return checkpoint.run(forward, (), args, kwargs)
    # A library may have given another module this one's attributes, and so its runner (``higher``, a replica).
    itself: Any = forward.__self__ if isinstance(forward, MethodType) else module()
    return checkpoint.run(forward, (itself,), args, kwargs)


def region_in(runner: Runner | None) -> CapturedRegion | None:
    """The region of a runner, or of one inside of it, that may be captured; None if there is none.

    Kernels and what runs off CUDA in their place may each have one: then it is the one that was tried.
    """
    regions = list(regions_in(runner))
    return next((region for region in regions if region.was_tried), regions[0] if regions else None)


def regions_in(runner: Runner | None) -> Iterator[CapturedRegion]:
    """All such regions of a runner, and of those inside of it."""
    while runner is not None:
        yield from [each for each in getattr(runner, "regions", ()) if isinstance(each, CapturedRegion)]
        runner = getattr(runner, "inner", None) or getattr(runner, "fallback", None)


def choose_runners(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str], cache: CaptureCache
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules that run in another way because of a rule on ``module``, with their paths and runners.

    These are ``module`` itself and modules inside it. Kernels stand in for those inside that have no rule of their own.

    meaning: the rule's.
    governed: the paths of all modules that have a rule.
    cache: the one that the modules under one policy share.
    """
    statistics = RegionStatistics(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    kernel = find_kernel(statistics, module, meaning)
    inside = list(kernels_inside(path, module, meaning, governed)) if kernel is None else []
    is_head = isinstance(kernel, KernelHeadRunner)
    if kernel is None or kernel.wants_tape or (meaning.tapes_kernels and not is_head):
        runner = RegionRunner(statistics, meaning, cache, module, kernel)
        has_parts = kernel is None and any(module.children())
        if meaning.tile is not None and has_parts and not any(each.has_mlp for _, _, each in inside):
            runner.note += "; this rule finds no MLP to run in tiles"
        yield path, module, runner
    else:
        taped = RegionRunner(statistics, replace(meaning, offloading=None), cache, module)
        kernel.compiled_region = taped.compiled_region
        if kernel.fallback is not None and not is_head:
            kernel.fallback = taped  # off CUDA, the module's own ops are taped
        alone = replace(meaning, mechanism=Mechanism.KEEP)  # no tape around it, only what offloads
        offloads = meaning.offloading is not None
        yield path, module, RegionRunner(statistics, alone, cache, module, kernel) if offloads else kernel
    yield from inside
