"""The tape: a dispatch mode that sees every op of a region below autograd, and hooks that see the saved tensors.

It shows both to a ``TapeFrame``, which writes them down and decides which tensors to drop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recompute.engine.compression import Codec
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.cut.ops import IN_FUNCTION, Kind, facts_of_call, tensors_in
from recompute.engine.cut.plan_cache import PlanCache, PlanChoice
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.dtensors import are_sharded, has_layout
from recompute.engine.modes import (
    SeesAllOps,
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    function_modes,
    has_foreign_modes,
    hidden_from_any_modes,
    put_beneath,
    put_on_top,
    under,
)
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import (
    PackedDTensor,
    PackedTensor,
    is_inside_checkpoint,
    top_hooks,
    unpack_saved,
    without_graph,
)
from recompute.engine.scopes import Scope, let_transforms_in, pop_hooks, push_hooks
from recompute.engine.tape.autocast import in_force, left_out, run_as_called
from recompute.engine.tape.exposed_memory import bytes_of, expose, expose_arrays, watch
from recompute.engine.tape.frame import TapeFrame
from recompute.engine.tape.function_writes import WatchedArguments
from recompute.engine.tape.functions import FunctionOp, Reached, context_of, is_in_function
from recompute.engine.tape.op_arguments import PLAIN, is_plain
from recompute.engine.tape.recorded_call import OpCall
from recompute.engine.thread_state import in_backward, local, swapped
from recompute.engine.wrapper_tensors import SEE, passed_on

_new = tuple.__new__  # takes a third of the time of a NamedTuple's own
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_LIFT = torch.ops.aten.lift_fresh.default
_compiling_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


class TapeRegion:
    """A module's forward or a function under ``action: recompute``, or ``checkpoint`` with a ``keep``."""

    def __init__(
        self,
        statistics: RegionStatistics,
        op_policy: OpPolicy,
        plan_cache: PlanCache | None = None,
        codec: Codec | None = None,
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        """plan_cache: of the regions that this one shares its plans with, as equal layers do.

        codec: makes codes of the tensors that tolerate it; None: all are held as they are. mode: the region runs in it,
        if functions that it calls are to differ from plain PyTorch.
        """
        watch()
        let_transforms_in()
        self.statistics = statistics
        self.op_policy = op_policy
        self.plan_cache = PlanCache() if plan_cache is None else plan_cache
        self.codec = codec
        self.mode = mode
        self.plan: SavePlan | None = None
        """The last frame's. The next frame follows it as far as it can."""
        self.kind: Hashable = None
        """The kind of the last frame's call."""

    def run(
        self,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        start: Callable[[TapeRegion, Hashable], Tape] | None = None,
    ) -> Any:
        """``function(*args, **kwargs)`` by a tape. Inside of another tape it is a part of that, with its own op policy.

        start: makes the tape, if not ``Tape``, of this region and the kind of the call.
        """
        if is_inside_checkpoint():  # a checkpoint drops everything anyway, and counts saved tensors
            return function(*args, **kwargs)
        self.statistics.frames += 1
        around = local.active_frames[-1] if local.active_frames else None
        if isinstance(around, Tape):
            with _nested_region(around, self.op_policy):
                return function(*args, **kwargs)
        expose_arrays((*args, *kwargs.values()))
        tape = (start or Tape)(self, kind := kinds_of(function, args, kwargs))
        with tape, self.mode():
            result = function(*args, **kwargs)
        self.plan, self.kind = tape.finish(result), kind
        return result


def kinds_of(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[Hashable, ...]:
    """The facts on which the ops of a call mostly depend. Kinds of calls that take turns have a plan each by them."""
    kinds: list[Any] = []
    for value in (function, *args, *kwargs.values()):
        if isinstance(value, Tensor) and is_plain(value):
            kinds.append((value.shape, value.stride(), value.dtype, value.requires_grad))
        elif value is None or type(value) is bool:
            kinds.append(value)
        elif type(value) is MethodType and isinstance(value.__self__, nn.Module):  # its adapters may take turns
            kinds.append(tuple([parameter.requires_grad for parameter in value.__self__.parameters()]))
        else:
            kinds.append(type(value))
    return tuple(kinds)


@contextmanager
def _nested_region(tape: Tape, op_policy: OpPolicy) -> Iterator[None]:
    """Inside, a region runs that is a part of another one's tape."""
    top = top_hooks()
    if is_pushed := top is None or top[1] is unpack_saved:  # an ``action: keep`` in between takes them off
        push_hooks(tape.pack, unpack_saved)
    try:
        with swapped(tape, "op_policy", op_policy):
            yield
    finally:
        if is_pushed:
            pop_hooks()


class Tape(Scope, SeesAllOps):
    """Shows a frame each op that runs in a region, and each tensor that autograd saves there."""

    is_frame = True

    def __init__(self, region: TapeRegion, variant: Hashable):
        TorchDispatchMode.__init__(self)
        self.op_policy = region.op_policy
        """The one in force: the innermost running region's."""
        self.statistics = region.statistics
        plans = PlanChoice(region.op_policy, region.plan_cache, variant, region.plan)
        self.frame = TapeFrame(region.statistics, plans, region.codec)
        self.outer = self.frame.handles.outer
        self.reached: Reached | None = None
        """The tensors that the custom Function that runs now has reached; None if none runs."""

    def __enter__(self) -> Tape:
        Scope.__enter__(self)
        self._regenerating, local.regenerating = local.regenerating, 0
        TorchDispatchMode.__enter__(self)
        if count_dispatch_modes() > 1:
            put_beneath(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if count_dispatch_modes() > 1:
            put_on_top(self)
        TorchDispatchMode.__exit__(self, kind, error, trace)
        local.regenerating = self._regenerating
        Scope.__exit__(self, kind, error, trace)
        if kind is not None:
            self.abandon()

    def abandon(self) -> None:
        """The region has raised an error."""
        self.frame.abandon()

    def finish(self, result: Any) -> SavePlan | None:
        """The region has returned ``result``. Returns the plan for its next frame, if there is one."""
        with hidden_from_any_modes():
            return self.frame.finish(self.frame.values.plain_parts(tree_leaves(result)))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pass_on, see = passed_on, self.see
        if _compiling_callback() is not None:
            pass_on, see = torch._dynamo.disable(pass_on), torch._dynamo.disable(see)
        if (passed := pass_on(self, op, types, args, kwargs)) is not SEE:
            return passed
        return see(op, types, args, kwargs)

    def see(self, op: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an op, and show it to the frame."""
        if local.regenerating:
            return op(*args, **kwargs)
        if self.reached is not None:
            return self._run_in_function(self.reached, op, args, kwargs)
        if types and are_sharded(types):  # they will call the op on this rank's parts, and that comes here
            self.frame.values.note_dtensors(tensors_in((args, kwargs)))
            return NotImplemented
        op_policy = self.op_policy
        known, reason = op_policy.decisions.get(op) or op_policy.decide(op)
        if (known.casts_inside or torch.is_inference_mode_enabled()) and (keys := left_out()):
            with in_force(keys, op, kwargs, self.statistics.name):
                return self.see(op, types, args, kwargs)
        unobserved = not torch.is_grad_enabled() and (in_backward() or is_in_function(_RUN))
        frame = self.frame
        if known.kind is Kind.VIEW and not unobserved:
            result = op(*args, **kwargs)
            if op is _UNSAFE_VIEW:
                frame.values.note_counter(result)
            return result
        instruction = frame.follow(op, args, unobserved, op_policy)
        if instruction is not None and not instruction.matters:
            return op(*args, **kwargs)
        if known.varies and (instruction is None or instruction.runs_again or known.kind is not Kind.PURE):
            known, reason = op_policy.decide_by(facts_of_call(op, args, kwargs))
        if unobserved:
            reason = IN_FUNCTION
        call = _new(OpCall, (op, known, reason, args, kwargs, unobserved, op_policy, None))
        if instruction is not None:
            return frame.run_planned(instruction, call)
        return frame.run(call)

    def run_function(self, op: FunctionOp, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the forward of a custom ``autograd.Function`` as one step."""
        if self.reached is not None or not self.is_in_force():
            return forward(*args, **kwargs)
        frame, known = self.frame, op.facts
        instruction = frame.follow(op, args, True, self.op_policy)
        every = args, kwargs
        watched = WatchedArguments(
            op.writes,
            context_of(forward),
            frame.values.plain_parts(tensors_in(every)),
            every,
            is_saved_as_it_is=frame.handles.are_held_as_they_are,
        )
        self.reached = Reached()
        reached = self.reached.tensors

        def run() -> Any:
            assert self.reached is not None
            output = forward(*args, **kwargs)
            left = watched.left(self.reached.handed_out)
            reached[:] = [tensor for tensor in reached if tensor.untyped_storage()._cdata not in left]
            self.see_reached(reached)
            return output

        call = OpCall(op, known, known.reason, (reached,), {}, True, self.op_policy, run)
        try:
            return frame.run(call) if instruction is None else frame.run_planned(instruction, call)
        finally:
            self.reached = None

    def see_reached(self, tensors: Iterable[Tensor]) -> None:
        """A custom Function's forward has run, and has reached these."""

    def _run_in_function(self, reached: Reached, op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if op is not _LIFT:  # its tensor is new: ``torch.tensor`` has made it, which is no op
            reached.add(self.frame.values.plain_parts(tensors_in((args, kwargs))))
        output = run_as_called(op, args, kwargs, self.statistics.name)
        reached.make(self.frame.values.plain_parts(tensors_in(output)))
        return output

    def pack(self, tensor: Tensor) -> PackedTensor:
        if (count_dispatch_modes() > 1 or count_function_modes()) and has_foreign_modes():
            return self.pack_hidden(tensor)
        if type(tensor) not in PLAIN:
            if has_layout(tensor):
                part = self.pack(self.frame.values.part_of(tensor))
                return PackedDTensor(without_graph(tensor), part, self.statistics.name)
            tensor = self.frame.values.part_of(tensor)
        return self.frame.save(tensor)

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        """Never regenerate ``tensor``, if it has no name or the rule in force lists its name."""
        part = self.frame.values.part_of(tensor)
        if self.op_policy.keeps_tensor(name) and is_plain(part):
            self.frame.pin(part, self.op_policy)
        return tensor

    def hand_out(self, memory: Any, is_array: bool) -> None:
        """Others are about to get the memory of a tensor, or a storage, as an array or by its address.

        In a custom ``autograd.Function`` the memory counts as overwritten, as by a kernel. Elsewhere it may change at
        any time from then on. The address of a parameter counts as neither: libraries ask for it for other reasons than
        to write to it.
        """
        if local.regenerating or not self.is_in_force():  # an op asks, and its schema names its writes
            return
        tensor = self.frame.values.part_of(memory) if isinstance(memory, Tensor) else None
        if tensor is not None and not is_plain(tensor):
            return
        storage = memory if tensor is None else tensor.untyped_storage()
        if self.reached is not None:
            self.reached.add((bytes_of(storage) if tensor is None else tensor,))
            self.reached.handed_out |= {storage._cdata} if is_array else set()
            return
        parameter = self.frame.values.parameter_in(storage, tensor)
        if parameter is not None and not is_array:
            return
        unobserved = not torch.is_grad_enabled() and (in_backward() or is_in_function(_RUN))
        if not unobserved:
            expose(storage)
        modes = dispatch_modes()
        beneath = modes[: next(index for index, mode in enumerate(modes) if mode is self)]
        with under(beneath, function_modes()):  # as for an op, so that this tape does not record the frame's own ops
            self.frame.hand_out(storage, tensor, parameter, unobserved, self.op_policy)

    def is_in_force(self) -> bool:
        """Whether an op that is called now would come to this tape."""
        modes = range(count_dispatch_modes())
        return any(torch._C._get_dispatch_stack_at(index) is self for index in modes)


_RUN = TapeRegion.run.__code__
