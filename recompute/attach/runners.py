"""How a module under a policy runs its forward by hooks: one runner a module."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

from torch import nn

from recompute.compiled.captured_region import CaptureCache, CapturedRegion
from recompute.compiled.lowering import CHECKPOINTS, KEEPS, is_lowered, lowering_of
from recompute.compiled.runner import Forward, Runner, is_active
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.checkpoint.reachable_objects import references_of_modules
from recompute.engine.checkpoint.region import CheckpointRegion
from recompute.engine.cut.save_plan import PlanCache
from recompute.engine.saved_tensors import RegionStatistics
from recompute.engine.scopes import KeepScope, RecipeScope
from recompute.engine.tape.recorder import TapeRegion
from recompute.engine.tape.setting import Setting
from recompute.policy.rules import FAMILIES, PRICE, Rule


class InnerRunner(Runner, Protocol):
    """One that runs inside of a tape."""

    @property
    def variant(self) -> Hashable:
        """Differs from the last run's where it is going to run other ops."""


@dataclass
class RootRunner:
    """Opens the scope in which outputs are dropped, around the model or around what its own rule says."""

    statistics: RegionStatistics
    inner: Runner | None = None
    note: str = field(init=False)

    def __post_init__(self) -> None:
        scope = "outputs that come back are dropped wherever they are saved inside"
        self.note = scope if self.inner is None else f"{self.inner.note}; {scope}"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return self._inside(module, forward, args, kwargs)
        with RecipeScope(self.statistics):
            return self._inside(module, forward, args, kwargs)

    def _inside(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.inner is None:
            return forward(*args, **kwargs)
        return self.inner.run(module, forward, args, kwargs)


def around(inner: Callable[..., Any], module: nn.Module, runner: Runner) -> Callable[..., Any]:
    """The forward that a model bears on the instance, run by ``runner`` as long as that is the model's."""
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


def inside_of(forward: Any) -> Callable[..., Any] | None:
    """What ``around`` was given to make ``forward``; None of what others made, also around that."""
    inner = getattr(forward, "_recompute_inner", None)
    return inner if inner is not None and forward.__wrapped__ is inner else None


@dataclass
class PlainRunner:
    """Runs forward as it is: where a kernel stands in on CUDA alone, and a tape around sees the ops elsewhere."""

    statistics: RegionStatistics
    note: str = "its ops are on the tape around it"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)


@dataclass
class KeepRunner:
    """``action: keep``: what autograd saves is kept, also inside a region that drops."""

    statistics: RegionStatistics
    note: str = "everything is kept"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if is_lowered(module):
            return KEEPS.run(forward, args, kwargs)
        if not is_active(module):
            return forward(*args, **kwargs)
        with KeepScope():
            return forward(*args, **kwargs)


class CheckpointRunner:
    """``action: checkpoint``: the whole forward is run again from its inputs."""

    note = "its Python runs again from its inputs"

    def __init__(self, statistics: RegionStatistics, module: nn.Module, rule: Rule, shared: CaptureCache):
        self.statistics = statistics
        self._checkpoint = CheckpointRegion(statistics, beyond=references_of_modules(module.modules()))
        itself = weakref.ref(module)

        def run(forward: Forward, args: tuple, kwargs: dict) -> Any:
            module = itself()
            assert module is not None
            return self._checkpoint.run(forward, (module,), args, kwargs)

        self.region = region_of(statistics, rule, shared, run)

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if is_lowered(module):
            return CHECKPOINTS.run(forward, args, kwargs)
        if not is_active(module):
            return forward(*args, **kwargs)
        return self.region.run(forward, args, kwargs)


class TapeRunner:
    """``action: recompute``, or ``checkpoint`` with a ``keep``: ops run again, by a tape of the whole forward.

    inner: runs it there, as kernels do, in whose place their ops run again.
    """

    def __init__(
        self, statistics: RegionStatistics, rule: Rule, shared: CaptureCache, inner: InnerRunner | None = None
    ):
        self.statistics = statistics
        self.inner = inner
        self.lowering = lowering_of(rule)
        self.region = region_of(statistics, rule, shared)
        what = "all ops run again" if rule.action == "checkpoint" else "cheap ops run again"
        if rule.rerun:
            what += f" and {', '.join(rule.rerun)}"
        if rule.price != PRICE:
            what += f", at {rule.price:.3g} bytes a second"
        self.note = f"{what}; {', '.join(rule.keep)} kept" if rule.keep else what
        if inner is not None:
            self.note = f"{inner.note}; {self.note}"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if is_lowered(module):
            if self.inner is None:
                return self.lowering.run(forward, args, kwargs)
            return self.lowering.run(self.inner.run, (module, forward, args, kwargs), {})
        if self.inner is None:
            return self.region.run(forward, args, kwargs) if is_active(module) else forward(*args, **kwargs)
        if not is_active(module):
            return self.inner.run(module, forward, args, kwargs)
        return self.region.run(self.inner.run, (module, forward, args, kwargs), {}, self.inner.variant)


def region_of(
    statistics: RegionStatistics, rule: Rule, shared: CaptureCache, checkpoint: Callable[..., Any] | None = None
) -> CapturedRegion:
    """checkpoint: as ``CapturedRegion`` takes it."""
    tape = TapeRegion(setting_of(statistics, rule, shared.plan_cache))
    return CapturedRegion(tape, shared if rule.capture else None, checkpoint)


def region_in(runner: Runner | None) -> CapturedRegion | None:
    """The region that a runner has, or one inside of it, if it has one that may be captured."""
    while runner is not None and not isinstance(runner, (TapeRunner, CheckpointRunner)):
        runner = getattr(runner, "inner", None) or getattr(runner, "fallback", None)
    return None if runner is None else runner.region


def setting_of(statistics: RegionStatistics, rule: Rule, plan_cache: PlanCache | None = None) -> Setting:
    """What a rule says of each op."""
    if rule.action == "checkpoint":  # fewest bytes, whatever it costs
        return Setting(statistics, rerun=set(FAMILIES) - {"collective"}, keep=rule.keep, price=0, plan_cache=plan_cache)
    return Setting(statistics, rerun=rule.rerun, keep=rule.keep, price=rule.price, plan_cache=plan_cache)
