"""The tapes by which a region is captured: one records its forward, and one shows its graph's ops to an observation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from recompute.compiled.observation import Observation
from recompute.compiled.recording import NotCapturable, Recording
from recompute.engine.saved_tensors import PackedTensor, top_hooks
from recompute.engine.tape.functions import FunctionOp
from recompute.engine.tape.recorder import Tape, TapeRegion
from recompute.engine.thread_state import local


class _ShowingTape(Tape):
    """A tape that shows each op, and each custom Function, to ``step``."""

    def step(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run an op of forward, or the forward of a Function, by ``run``."""
        raise NotImplementedError

    def see(self, op: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if local.regenerating or self.reached is not None:
            return super().see(op, types, args, kwargs)
        return self.step(op, args, kwargs, partial(super().see, op, types, args, kwargs))

    def run_function(self, op: FunctionOp, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        run = partial(super().run_function, op, forward, args, kwargs)
        if self.reached is not None or not self.is_in_force():
            return run()
        return self.step(op, args, kwargs, run)


class RecordingTape(_ShowingTape):
    """A tape that also records the calls of forward."""

    def __init__(self, region: TapeRegion, variant: Any):
        super().__init__(region, variant)
        self.variant = variant
        self.recording: Recording | None = Recording(is_open=True)
        self.reason = ""
        """Why the recording was given up; "" if it was not."""
        self.has_rules_inside = False
        """Whether other rules than the region's said what becomes of an op, or of what is saved for it."""
        self._own_policy = region.op_policy

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        if name is not None and self.op_policy.keeps_tensor(name) is not self._own_policy.keeps_tensor(name):
            self.has_rules_inside = True
        return super().pin(tensor, name)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.recording is not None:
            self.recording.close()

    def step(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        if self.recording is None:
            return run()
        policy, own, hooks = self.op_policy, self._own_policy, top_hooks()
        is_ruled = policy is not own and type(op) is not FunctionOp and policy.decide(op) != own.decide(op)
        if is_ruled or hooks is None or getattr(hooks[0], "__self__", None) is not self:
            self.has_rules_inside = True
        return self.recording.run(op, args, kwargs, run, self._give_up)

    def _give_up(self, reason: NotCapturable) -> None:
        self.recording, self.reason = None, str(reason)

    def see_reached(self, tensors: Iterable[Tensor]) -> None:
        if self.recording is not None:
            self.recording.reach(tensors)


class GraphTape(_ShowingTape):
    """The tape of a region's graph, whose ops are recorded."""

    def __init__(self, region: TapeRegion, variant: Any, seen: Observation):
        super().__init__(region, variant)
        self._seen = seen
        self._is_in_function = False
        """Whether what is saved now is a custom Function's, which holds it by itself."""

    def step(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        self._is_in_function = self._is_in_function or type(op) is FunctionOp
        return self._seen.run(op, args, kwargs, run)

    def see_reached(self, tensors: Iterable[Tensor]) -> None:
        self._seen.see_reached(tensors)

    def see_function(self, args: tuple, output: Any, *, is_changed: bool) -> None:
        """A custom Function that the graph calls has returned."""
        self._is_in_function = False
        self._seen.see_function(args, output, is_changed=is_changed)

    def pack(self, tensor: Tensor) -> PackedTensor:
        saved = super().pack(tensor)
        return saved if self._is_in_function else self._seen.saved(tensor, saved)

    def abandon(self) -> None:
        """The graph is given up. Its module runs in its place, and that is the frame that counts."""
        self.frame.discard()
