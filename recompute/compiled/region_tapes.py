"""The tapes of a capture: one records a region's forward, and one shows its graph's ops to an observation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recompute.compiled.function_calls import CHANGES, changed, found_by, shared_names, takes_gradient
from recompute.compiled.observation import Observation
from recompute.compiled.recording import Departure, NotCapturable, Recording
from recompute.engine.cut.ops import Kind, facts, tensors_in
from recompute.engine.dtensors import are_sharded
from recompute.engine.saved_tensors import PackedTensor, top_hooks, version_of
from recompute.engine.tape.functions import FunctionOp, caller_of_function
from recompute.engine.tape.op_arguments import is_plain
from recompute.engine.tape.recorder import Tape, TapeRegion
from recompute.engine.thread_state import local


class _ShowingTape(Tape):
    """A tape that shows each op, and each custom Function, to ``step``."""

    def step(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run an op of forward, or the forward of a Function, by ``run``."""
        raise NotImplementedError

    def see(self, op: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if local.regenerating or self.reached is not None or (types and are_sharded(types)):
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
        """Whether other rules than the region's were in force for an op, or for a tensor saved for it."""
        self._own_policy = region.op_policy

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        if name is not None and self.op_policy.keeps_tensor(name) is not self._own_policy.keeps_tensor(name):
            self.has_rules_inside = True
        return super().pin(tensor, name)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.recording is not None:
            self.recording.current.clear()

    def step(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        if self.recording is not None and forward_ad._current_level >= 0:  # traces that fail in there end badly
            self._give_up(NotCapturable("it uses forward-mode differentiation"))
        if self.recording is None:
            return run()
        policy, own, hooks = self.op_policy, self._own_policy, top_hooks()
        is_ruled = policy is not own and type(op) is not FunctionOp and policy.decide(op) != own.decide(op)
        if is_ruled or hooks is None or getattr(hooks[0], "__self__", None) is not self:
            self.has_rules_inside = True
        if type(op) is not FunctionOp:
            return self.recording.run(op, args, kwargs, run, self._give_up)
        before = found_by(op, args)
        output = self.recording.run(op, args, kwargs, run, self._give_up)
        if self.recording is not None:
            index, known = self.recording.functions.popitem()
            self.recording.functions[index] = known._replace(changed=changed(before, found_by(op, args)))
        return output

    def _give_up(self, reason: NotCapturable) -> None:
        self.recording, self.reason = None, str(reason)

    def see_reached(self, tensors: Iterable[Tensor]) -> None:
        if self.recording is not None:
            self.recording.reach(tensors)


class _RunningFunction:
    """A call of a custom Function, from its forward until its outputs have their graphs."""

    def __init__(self, op: FunctionOp, args: tuple, read: frozenset[str]):
        """read: the names that the code around it has read."""
        self._op, self._names = op, shared_names(op, read)
        self._found = found_by(op, args, self._names)
        self._args = args
        self._versions = self._versions_now()
        self._output: Any = None
        self._has_run = False
        self._saved: set[int] = set()
        """The storages that it has saved after its forward, by the addresses of the StorageImpls."""
        self._caller = caller_of_function()

    def _versions_now(self) -> list[int]:
        return list(map(version_of, tensors_in(self._args)))

    def forward(self, run: Callable[[], Any]) -> Any:
        self._output = run()
        self._has_run = True
        return self._output

    def saves(self, tensor: Tensor, caller: FrameType) -> bool:
        """Whether autograd saves ``tensor`` for the Function, which holds it by itself.

        caller: the frame that called autograd. A Function saves tensors in the call that ran its forward.
        """
        if self._has_run and (caller, caller.f_lasti) != self._caller:
            return False
        if self._has_run and torch._C._has_storage(tensor):
            self._saved.add(tensor.untyped_storage()._cdata)
        return True

    def end(self, seen: Observation, returned: Any) -> None:
        """returned: the result that its caller got; None if that is not known."""
        if changed(self._found, found_by(self._op, self._args, self._names)):
            raise Departure(CHANGES.format(self._op))
        is_changed, takes_gradients = self._versions_now() != self._versions, torch.is_grad_enabled()
        if returned is None:
            given, made = (tensors_in(each) for each in (self._args, self._output))
            if not {id(tensor) for tensor in given}.isdisjoint([id(tensor) for tensor in made]):
                raise Departure("a custom Function inside of another op returns what it was given")
            returned, takes_gradients = self._output, any(map(takes_gradient, made))
        tensors = [each for each in enumerate(self._args) if isinstance(each[1], Tensor) and is_plain(each[1])]
        saved = {position for position, tensor in tensors if tensor.untyped_storage()._cdata in self._saved}
        seen.see_function(self._args, returned, saved, is_changed=is_changed, takes_gradients=takes_gradients)


class GraphTape(_ShowingTape):
    """The tape of a region's graph. It shows the ops to an observation."""

    def __init__(self, region: TapeRegion, variant: Any, seen: Observation):
        super().__init__(region, variant)
        self._seen = seen
        self._function: _RunningFunction | None = None

    def step(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        if type(op) is FunctionOp:
            self.end_function()
            self._function = _RunningFunction(op, args, self._seen.recording.read)
            run = partial(self._function.forward, run)
        elif facts(op).kind is not Kind.VIEW:  # autograd may view a Function's results
            self.end_function()
        return self._seen.run(op, args, kwargs, run)

    def see_reached(self, tensors: Iterable[Tensor]) -> None:
        self._seen.recording.reach(tensors)

    def end_function(self, returned: Any = None) -> None:
        """The custom Function that ran last, if any, has returned: the graph says so, or something else runs.

        No graph says so of a Function that another op calls.
        """
        function, self._function = self._function, None
        if function is not None:
            function.end(self._seen, returned)

    def end_forward(self) -> None:
        self.end_function()
        self._seen.recording.end_forward()

    def pack(self, tensor: Tensor) -> PackedTensor:
        saved = super().pack(tensor)
        if self._function is not None and self._function.saves(tensor, sys._getframe(1)):
            return saved
        return self._seen.saved(tensor, saved)

    def abandon(self) -> None:
        """The graph is given up. Its module runs in its place, and that is the frame that counts."""
        self._function = None
        self.frame.discard()
