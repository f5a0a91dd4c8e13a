"""A runner runs a module under a rule, in place of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from recompute.compiled.under_torch_compile import is_compiling_training
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.scopes import is_recording

Forward = Callable[..., Any]


class Runner:
    """Runs ``forward(*args, **kwargs)``, a module's own, or code in its place.

    There are three situations for a call of a module, with a method of a subclass for each. ``module`` is None where a
    decorated function is run.
    """

    statistics: RegionStatistics
    note: str
    """For ``explain``."""
    handle: object = None
    """The result of ``apply`` for the module that this runs, if the policy was put on that module."""

    def run(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if is_compiling_training(module):
            return self.run_compiled(module, forward, args, kwargs)
        if (module is None or module.training) and is_recording():
            return self.run_training(module, forward, args, kwargs)
        return self.run_plain(module, forward, args, kwargs)

    def run_training(self, module: Any, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """The module trains in eager code, and autograd records. The rule is for this."""
        raise NotImplementedError

    def run_compiled(self, module: Any, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """``torch.compile`` is tracing a training forward."""
        return self.run_plain(module, forward, args, kwargs)

    def run_plain(self, module: Any, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Any other situation, such as evaluation: nothing is held for backward, or nothing may be dropped."""
        return forward(*args, **kwargs)
