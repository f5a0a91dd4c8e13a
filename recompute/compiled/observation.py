"""Records one frame of a region: a tape records the calls of forward, and hooks record those of its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from recompute.compiled.autocast_settings import Autocast, autocast_in_force, cast_of
from recompute.compiled.program import Program, ProgramWriter
from recompute.compiled.recording import Departure, NotCapturable, Recording, Use
from recompute.engine.cut.layout import Layout, are_apart
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.numerics import Numerics
from recompute.engine.saved_tensors import PackedTensor, top_hooks
from recompute.engine.tape.autocast import run_as_called
from recompute.engine.tape.recorder import Tape, TapeRegion
from recompute.engine.thread_state import local

Edge = tuple[int, int] | None
"""Where a gradient goes: a node of the region, and which of its inputs; or -1, and the position of a region's input."""


class RecordingTape(Tape):
    """A tape that also records the calls of forward."""

    def __init__(self, region: TapeRegion, variant: Any, *, kernels_count: bool = False):
        """kernels_count: whether kernels inside count what they hold, as without a tape."""
        super().__init__(region, variant)
        self.variant = variant
        self.kernels_count = kernels_count
        self.recording: Recording | None = Recording(is_open=True)
        self.reason = ""
        """Why the recording was given up; "" if it was not."""
        self.has_rules_inside = False
        """Whether other rules than the region's said what becomes of an op, or of what is saved for it."""
        self._own_policy = region.op_policy

    def _is_ruled_inside(self, op: Any) -> bool:
        """Whether a module that runs now has a rule by which ``op`` is treated in another way."""
        policy, own = self.op_policy, self._own_policy
        if policy is not own and policy.decide(op) != own.decide(op):
            return True
        hooks = top_hooks()
        return hooks is None or getattr(hooks[0], "__self__", None) is not self

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        if name is not None and self.op_policy.keeps_tensor(name) is not self._own_policy.keeps_tensor(name):
            self.has_rules_inside = True
        return super().pin(tensor, name)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.recording is not None:
            self.recording.close()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if local.regenerating or self.recording is None:
            return super().__torch_dispatch__(op, types, args, kwargs)
        self.has_rules_inside = self.has_rules_inside or self._is_ruled_inside(op)
        started = None
        try:
            started = self.recording.start(op, args, kwargs or {})
        except NotCapturable as error:
            self.recording, self.reason = None, str(error)
        output = super().__torch_dispatch__(op, types, args, kwargs)
        if started is not None and self.recording is not None:
            try:
                self.recording.end(started, output)
            except NotCapturable as error:
                self.recording, self.reason = None, str(error)
        return output


class GraphTape(Tape):
    """The tape of a region's graph, whose ops are recorded."""

    def __init__(self, region: TapeRegion, variant: Any, seen: Observation):
        super().__init__(region, variant)
        self._seen = seen

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if local.regenerating:
            return op(*args, **(kwargs or {}))
        return self._seen.run(op, args, kwargs or {}, partial(super().__torch_dispatch__, op, types, args, kwargs))

    def pack(self, tensor: Tensor) -> PackedTensor:
        return self._seen.saved(tensor, super().pack(tensor))

    def abandon(self) -> None:
        """The graph is given up. Its module runs in its place, and that is the frame that counts."""
        self.frame.discard()


class _Seen(PackedTensor):
    """What is held for a saved tensor, and the buffer as which it was recorded."""

    __slots__ = ("_buffer", "_recording", "_saved")

    def __init__(self, saved: PackedTensor, recording: Recording, buffer: int):
        self._saved = saved
        self._recording = recording
        self._buffer = buffer

    def get(self) -> Tensor:
        tensor = self._saved.get()
        self._recording.bind(tensor, self._buffer)
        return tensor


class _BackwardOps(TorchDispatchMode):
    """Records the calls of a node of the graph."""

    supports_higher_order_operators = True

    def __init__(self, seen: Observation):
        super().__init__()
        self._seen = weakref.ref(seen)  # weakly, because that holds this

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seen = self._seen()
        if local.regenerating or seen is None:
            return op(*args, **kwargs)
        return seen.run(op, args, kwargs, partial(run_as_called, op, args, kwargs, seen.name))


class Observation:
    """What is recorded of a frame, until its backward has ended.

    expected: the calls that forward made by the tape. autocast: the one that it runs under, or None. done: called with
    the program that was made, or with the reason why there is none. name: the region's, for errors. known: the programs
    that were made of frames of equal regions; a new one is added. generates: whether the program may run in generated
    kernels.
    """

    def __init__(
        self,
        given: Sequence[Tensor],
        expected: Recording,
        autocast: Autocast | None,
        done: Callable[[Program | str], None],
        name: str,
        known: list[Program],
        *,
        generates: bool,
    ):
        self.name = name
        self.is_called_again = False
        """Whether the region has run another frame before this one's backward."""
        self._known = known
        self.reason: str | None = None
        self._recording = Recording(expected=expected, generates=generates)
        self._done: Callable[[Program | str], None] | None = done
        self._steps = 0
        self._plan: SavePlan | None = None
        self._results: list[Use] = []
        self._fixed: set[int] = set()
        self._parameters = {i for i, tensor in enumerate(given) if isinstance(tensor, nn.Parameter)}
        self._saved_whole: set[int] = set()
        """The buffers of the parameters that autograd has saved as they are."""
        self._saved_views: set[int] = set()
        """The buffers of the parameters of which it has saved views."""
        self._gradients: list[int | None] = []
        self._reaches: list[frozenset[int]] = []
        """For each output, the positions of the inputs that its gradient reaches."""
        self._outputs: dict[tuple[int, int], int] = {}
        self._edges: list[list[Edge]] = []
        self._pending: dict[tuple[int, int], Use] = {}
        self._contributions: list[tuple[int, Use | None]] = []
        self._numerics = Numerics()
        self._autocast = autocast
        self._backward_autocast: Autocast | None = None
        self._cached = () if autocast is None else autocast.cached(given)
        self._casts: dict[int, int] = {}
        """The buffers of the parameters that autocast has cast and cached, and the positions of these parameters."""
        self._sums: set[int] = set()
        self._mode = _BackwardOps(self)
        self._is_running = False
        try:
            for position, tensor in enumerate(given):
                number = self._recording.give(tensor, position)
                root = self._recording.buffers[self._recording.buffers[number].root]
                if root.given != position and self._parameters & {root.given, position}:
                    raise NotCapturable("one of its parameters shares memory with another tensor that it is given")
        except NotCapturable as error:
            raise Departure(str(error)) from error

    def _fail(self, reason: object) -> None:
        if self._plan is None:  # forward still runs, and nobody knows that the rest of it would be right
            raise Departure(str(reason))
        if self.reason is None:
            self.reason = str(reason)
        self._recording.close()
        if self._done is not None:
            done, self._done = self._done, None
            done(self.reason)

    def run(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run an op, and record it."""
        if self.reason is not None:
            return run()
        try:
            started = self._recording.start(op, args, kwargs)
        except NotCapturable as error:
            self._fail(error)
            return run()
        output = run()
        if started is not None:
            try:
                self._recording.end(started, output)
            except NotCapturable as error:
                self._fail(error)
        return output

    def saved(self, tensor: Tensor, saved: PackedTensor) -> PackedTensor:
        if self.reason is not None or not self._recording.knows(tensor):
            return saved
        buffer = self._recording.use(tensor).buffer
        if self._recording.buffers[buffer].given in self._parameters:
            (self._saved_whole if isinstance(tensor, nn.Parameter) else self._saved_views).add(buffer)
        return _Seen(saved, self._recording, buffer)

    def end_forward(self) -> None:
        """Forward has made all of its calls. It is a departure if fewer were made than expected."""
        if not self._recording.is_as_expected():
            raise Departure
        self._recording.expected = None

    def finish(self, plan: SavePlan, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Forward has ended, by ``plan``: record what backward will do. Returns what the region is to return."""
        try:
            self._plan, self._steps = plan, len(self._recording.calls)
            if self._steps != len(plan.steps):
                raise NotCapturable("it passes tensors to recompute.keep, or their memory to others")
            if self._saved_whole & self._saved_views:
                raise NotCapturable("autograd saves one of its parameters both as it is and as a view")
            self._results = [self._recording.use(tensor) for tensor in outputs]
            for one, other in combinations(self._results, 2):
                if one.buffer == other.buffer and not are_apart(one.layout, other.layout):
                    raise NotCapturable("two of its outputs overlap in memory")
            if any(use.is_conjugate for use in self._results):
                raise NotCapturable("it gives conjugates that are not computed yet")
            self._gradients = [None] * len(outputs)
            self._reaches = [frozenset()] * len(outputs)
            self._fixed = {position for position, tensor in enumerate(outputs) if not tensor.requires_grad}
            return self._walk([*given, *self._find_casts(given)], outputs)
        except NotCapturable as error:
            self._fail(error)
            return outputs

    def _find_casts(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What autocast has cast of the parameters, and cached. To the region these are further inputs."""
        casts: list[Tensor] = []
        buffers = self._recording.buffers
        for call in self._recording.calls:
            if call.op is not torch.ops.aten._to_copy.default:
                continue
            (source,) = call.uses()
            position, (result,) = buffers[source.buffer].given, call.results
            if position is None or result is None or position not in self._cached:
                continue
            if not 1 <= given[position].dim() <= 5:
                raise NotCapturable("autocast casts a parameter of no dimension, or of more than five")
            cast = cast_of(given[position])
            if self._recording.knows(cast) and self._recording.use(cast).buffer == result:
                self._casts[result] = position
                casts.append(cast)
        return casts

    def _walk(self, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Put hooks on the nodes of the region's graph; returns the outputs.

        An output that the region itself reads gets another node, so that gradients from outside of the region are told
        apart from those inside.
        """
        ends: dict[Any, dict[int, int]] = {}
        for position, tensor in enumerate(given):
            if tensor.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                ends.setdefault(edge.node, {})[edge.output_nr] = position
        numbers: dict[Any, int] = {}
        pending: list[Any] = []

        def number_of(node: Any) -> int:
            if node not in numbers:
                numbers[node] = len(numbers)
                self._edges.append([])
                pending.append(node)
            return numbers[node]

        for position, output in enumerate(outputs):
            if output.requires_grad:
                if output.grad_fn is None and output._is_view():
                    raise NotCapturable("it returns a view that was made without gradients")
                edge = torch.autograd.graph.get_gradient_edge(output)
                if edge.node in ends:
                    raise NotCapturable("it returns a tensor, or a view of one, that it was given")
                self._outputs[number_of(edge.node), edge.output_nr] = position
        if not self._outputs:
            raise NotCapturable("none of its outputs takes a gradient")
        while pending:
            node = pending.pop()
            edges = self._edges[numbers[node]]
            for target, slot in node.next_functions:
                if target is None:
                    edges.append(None)
                elif target in ends:
                    if slot not in ends[target]:
                        raise NotCapturable("its graph reaches a tensor that it was not given")
                    edges.append((-1, ends[target][slot]))
                elif not target.next_functions:
                    raise NotCapturable("its graph reaches a leaf that it was not given")
                else:
                    edges.append((number_of(target), slot))
        for (number, _), position in self._outputs.items():
            self._reaches[position] = self._reached(number)
        if not any(self._reaches):
            raise NotCapturable("the gradients of its outputs reach none of its inputs")
        read = {edge for edges in self._edges for edge in edges}
        outputs = list(outputs)
        for place, position in list(self._outputs.items()):
            if place in read:
                del self._outputs[place]
                outputs[position] = alias = outputs[position].view_as(outputs[position])
                self._outputs[number_of(alias.grad_fn), 0] = position
                self._edges[-1].append(place)
        for node, number in numbers.items():
            node.register_prehook(partial(self._before, number))
            node.register_hook(partial(self._after, number))
        return outputs

    def _reached(self, number: int) -> frozenset[int]:
        """The positions of the inputs that the gradients of a node reach."""
        known, pending, positions = {number}, [number], set()
        while pending:
            for edge in filter(None, self._edges[pending.pop()]):
                if edge[0] == -1:
                    positions.add(edge[1])
                elif edge[0] not in known:
                    known.add(edge[0])
                    pending.append(edge[0])
        return frozenset(positions)

    def _before(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        """A node of the graph is about to run."""
        if not self._is_running:
            self._is_running, self._backward_autocast = True, autocast_in_force()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self.reason is not None:
            return
        if torch.is_grad_enabled():
            self._fail("its backward is differentiated in its turn")
            return
        try:
            for slot, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                use = self._pending.pop((number, slot), None)
                if use is not None:
                    self._see(gradient, use)
                elif (position := self._outputs.get((number, slot))) is not None:
                    self._gradients[position] = buffer = self._recording.receive(gradient)
                    if self._recording.buffers[buffer].root not in self._gradients:
                        raise NotCapturable("the gradient of an output shares memory with one of its tensors")
                else:
                    raise NotCapturable("a gradient comes from outside of its graph")
        except NotCapturable as error:
            self._fail(error)
            return
        _push_mode(self._mode)

    def _see(self, gradient: Tensor, use: Use) -> None:
        """A gradient inside of the region has come: what one call gave, or the sum of what several did."""
        if use.buffer in self._sums:
            self._sums.remove(use.buffer)  # from now on it is a tensor like others, of which there may be views
            self._recording.bind(gradient, use.buffer)
            if not _is_alike(Layout.of(gradient), use.layout):
                raise NotCapturable("autograd adds up gradients of several layouts")
        elif self._recording.use(gradient) != use:
            raise NotCapturable("a hook replaces a gradient inside of it")

    def _after(self, number: int, gradients: tuple[Tensor | None, ...], _: Any) -> None:
        """A node of the graph has run."""
        if self.reason is not None:
            modes = torch._C._len_torch_dispatch_stack()
            if modes and torch._C._get_dispatch_stack_at(modes - 1) is self._mode:
                _pop_mode()
            return
        _pop_mode()
        try:
            for gradient, edge in zip(gradients, self._edges[number], strict=True):
                if gradient is None or edge is None:
                    continue
                use = self._recording.use(gradient)
                if edge[0] == -1:
                    self._contributions.append((edge[1], use))
                elif (before := self._pending.get(edge)) is None:
                    self._pending[edge] = use
                else:
                    self._pending[edge] = total = self._recording.add(before, use)
                    self._sums.add(total.buffer)
        except NotCapturable as error:
            self._fail(error)

    def _end(self) -> None:
        """Backward has ended."""
        if self.reason is not None or self._done is None:
            return
        assert self._plan is not None
        try:
            # The captured node gives gradients only to the inputs that got one while it was recorded.
            reached = {edge[1] for edges in self._edges for edge in edges if edge is not None and edge[0] == -1}
            if reached != {position for position, _ in self._contributions}:
                raise NotCapturable("its backward gives no gradient to some of the tensors that take one")
            if self.is_called_again and reached not in self._reaches:
                raise NotCapturable("its outputs depend on different inputs, and it runs several times in a step")
            writer = ProgramWriter(
                self._plan,
                self._recording,
                self._steps,
                self._results,
                self._gradients,
                self._reaches,
                [*self._contributions, *self._missing()],
                self._parameters,
                self._saved_views,
                self._fixed,
                self._numerics,
                self._autocast,
                self._backward_autocast,
                self._cached,
                self._casts,
            )
            program = next(filter(writer.would_write, self._known), None)
            if program is None:
                self._known.append(program := writer.program())
        except NotCapturable as error:
            self._fail(error)
            return
        self._recording.close()
        done, self._done = self._done, None
        done(program)

    def _missing(self) -> list[tuple[int, None]]:
        """The contributions that have not come, because outputs had no gradient."""
        come = [position for position, _ in self._contributions]
        missing = []
        for position in [edge[1] for edges in self._edges for edge in edges if edge is not None and edge[0] == -1]:
            if position in come:
                come.remove(position)
            else:
                missing.append((position, None))
        return missing


def _is_alike(one: Layout, other: Layout) -> bool:
    """Whether two layouts are the same, except for strides of dimensions of size 1, which mean nothing."""
    strides = [
        [stride for size, stride in zip(layout.shape, layout.stride, strict=True) if size != 1]
        for layout in (one, other)
    ]
    return one.shape == other.shape and strides[0] == strides[1] and one.dtype is other.dtype and not one.offset
