"""Records one frame of a region: its tape shows the calls of forward, and hooks record those of its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _pop_mode, _push_mode

from recompute.compiled.autocast_settings import CallSettings, cast_of
from recompute.compiled.calls import Call, Use
from recompute.compiled.following import FollowingRecording
from recompute.compiled.function_calls import (
    Around,
    FunctionBackward,
    FunctionCall,
    as_autograd_does,
    shared_names,
    takes_gradient,
    unseen,
)
from recompute.compiled.observed_frame import ObservedFrame
from recompute.compiled.program import Program
from recompute.compiled.program_writer import RETURNS_INPUT, ProgramWriter
from recompute.compiled.recording import Departure, NotCapturable, Recording
from recompute.compiled.region_graph import (
    INPUT,
    MODE_DEPENDENT,
    OTHER,
    BackwardOps,
    Edge,
    ends_of,
    numbered_nodes,
    reached_from,
)
from recompute.compiled.region_record import DIFFERENTIATED
from recompute.compiled.updated_inputs import updated_by
from recompute.engine.cut.layout import Layout, are_alike, are_apart
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.numerics import Autocast, autocast_in_force
from recompute.engine.saved_tensors import PackedTensor
from recompute.engine.tape.functions import FunctionOp
from recompute.engine.tape.op_arguments import LISTS


class _Seen(PackedTensor):
    """A saved tensor as it is held, and its buffer."""

    __slots__ = ("_buffer", "_recording", "_saved")

    def __init__(self, saved: PackedTensor, recording: Recording, buffer: int):
        self._saved = saved
        self._recording = recording
        self._buffer = buffer

    def get(self) -> Tensor:
        tensor = self._saved.get()
        self._recording.bind(tensor, self._buffer)
        return tensor


_ATEN = torch.ops.aten


class Observation:
    """Records a frame, until its backward has ended.

    recording: a new one, which follows the calls that forward made by the tape. around: the settings that it runs
    under. done: called with the program that was made, or with the reason why there is none. name: the region's, for
    errors. known: the programs that were made of frames of equal regions; a new one is added.
    """

    def __init__(
        self,
        given: Sequence[Tensor],
        recording: FollowingRecording,
        around: CallSettings,
        done: Callable[[Program | str], None],
        name: str,
        known: list[Program],
    ):
        self.name = name
        self.is_called_again = False
        """Whether the region has run another frame before this one's backward."""
        self._known = known
        self.reason: str | None = None
        self.recording = recording
        self._done: Callable[[Program | str], None] | None = done
        parameters = {i for i, tensor in enumerate(given) if isinstance(tensor, nn.Parameter)}
        self._frame = ObservedFrame(self.recording, parameters, around)
        self._saved_whole: set[int] = set()
        """The buffers of the parameters that autograd has saved as they are."""
        self._outputs: dict[Edge, int] = {}
        """The position of the output whose gradient comes to a node and a slot of it."""
        self._edges: list[list[Edge]] = []
        self._pending: dict[Edge, Use] = {}
        self._sums: set[int] = set()
        self._nodes: dict[Any, int] = {}
        """The calls of custom Functions by their nodes in autograd's graph, or by the nodes' numbers after forward."""
        self._given: Sequence[Use | None] = ()
        """The gradients that a custom Function's node is given while it runs."""
        self._given_back: set[int] = set()
        """The buffers of the gradients that custom Functions have given."""
        self._mode = BackwardOps(self.run, name)
        self._is_running = False
        try:
            for position, tensor in enumerate(given):
                number = self.recording.give(tensor, position)
                root = self.recording.buffers[self.recording.buffers[number].root]
                if root.given != position and parameters & {root.given, position}:
                    raise NotCapturable("one of its parameters shares memory with another of its inputs")
        except NotCapturable as error:
            raise Departure(str(error)) from error

    def _fail(self, reason: object) -> None:
        if self._frame.plan is None:  # forward still runs, and nobody knows that the rest of it would be right
            raise Departure(str(reason))
        if self.reason is None:
            self.reason = str(reason)
        self._end_with(self.reason)

    def _end_with(self, result: Program | str) -> None:
        self.recording.current.clear()
        done, self._done = self._done, None
        if done is not None:
            done(result)

    def run(self, op: Any, args: tuple, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        if self.reason is not None:
            return run()
        return self.recording.run(op, args, kwargs, run, self._fail)

    def see_function(
        self, args: tuple, output: Any, saved: Collection[int], *, is_changed: bool, takes_gradients: bool
    ) -> None:
        """The custom Function whose forward was the last call has returned, so that its outputs have their graphs.

        saved: the positions of the arguments that it has saved.
        """
        index, buffers = len(self.recording.calls) - 1, self.recording.buffers
        op, given, _, _, written, _ = self.recording.calls[index]
        if type(op) is not FunctionOp or is_changed:
            self._fail(f"{op} writes to one of its arguments")
            return
        outputs = output if type(output) in LISTS else (output,)
        around = _again(self._frame.around.autocast)
        uses = {position: use.buffer for position, use in enumerate(given) if type(use) is Use}
        made = [position for position, number in uses.items() if buffers[buffers[number].root].call is not None]
        saves = [position for position in made if position in saved and (uses[position],) * 2 in written]
        options: dict[str, Any] = {"takes_gradients": takes_gradients, "names": shared_names(op, self.recording.read)}
        self._frame.functions[index] = FunctionCall(op, args, outputs, around, made=made, saves=saves, **options)
        for tensor in filter(takes_gradient, outputs):
            self._nodes[tensor.grad_fn] = index

    def saved(self, tensor: Tensor, saved: PackedTensor) -> PackedTensor:
        if self.reason is not None or not self.recording.knows(tensor):
            return saved
        buffer = self.recording.use(tensor).buffer
        if self.recording.buffers[buffer].given in self._frame.parameters:
            (self._saved_whole if isinstance(tensor, nn.Parameter) else self._frame.saved_views).add(buffer)
        return _Seen(saved, self.recording, buffer)

    def finish(self, plan: SavePlan, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Forward has ended, by ``plan``: have backward recorded. Returns the outputs that the region is to return."""
        frame = self._frame
        try:
            frame.plan, frame.steps = plan, len(self.recording.calls)
            if frame.steps != len(plan.steps):
                raise NotCapturable("it passes tensors to recompute.keep, or exposes their memory")
            if self._saved_whole & frame.saved_views:
                raise NotCapturable("autograd saves one of its parameters twice: as it is, and as a view")
            frame.results = [self.recording.use(tensor) for tensor in outputs]
            frame.updated = updated_by(self.recording, given, frame.results)
            for one, other in combinations(frame.results, 2):
                if one.buffer == other.buffer and not are_apart(one.layout, other.layout):
                    raise NotCapturable("two of its outputs overlap in memory")
            if any(use.is_conjugate for use in frame.results):
                raise NotCapturable("it returns a lazy conjugate (Tensor.conj)")
            frame.gradients = [None] * len(outputs)
            frame.fixed = {position for position, tensor in enumerate(outputs) if not tensor.requires_grad}
            return self._walk([*given, *self._find_casts(given)], outputs)
        except NotCapturable as error:
            self._fail(error)
            return outputs

    def _find_casts(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The casts of parameters in autocast's cache. To the region these are further inputs."""
        casts: list[Tensor] = []
        for call in self.recording.calls:
            if call.op is not _ATEN._to_copy.default:
                continue
            (source,) = call.uses()
            position, (result,) = self.recording.buffers[source.buffer].given, call.results
            if position is None or result is None or position not in self._frame.around.cached:
                continue
            if not 1 <= given[position].dim() <= 5:
                raise NotCapturable("autocast casts a parameter that has 0 dimensions, or more than 5")
            cast = cast_of(given[position])
            if self.recording.knows(cast) and self.recording.use(cast).buffer == result:
                self._frame.casts[result] = position
                casts.append(cast)
        return casts

    def _walk(self, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Put hooks on the nodes of the region's graph; returns the outputs.

        An output that the region itself reads gets another node. So gradients from outside come to other nodes than
        those from inside.
        """
        ends, roots = ends_of(given), {}
        for position, output in enumerate(outputs):
            if output.requires_grad:
                if output.grad_fn is None and output._is_view():
                    raise NotCapturable("it returns a view that was made under torch.no_grad()")
                edge = torch.autograd.graph.get_gradient_edge(output)
                if edge.node in ends:
                    raise NotCapturable(RETURNS_INPUT)
                roots[position] = edge
        if not roots:
            raise NotCapturable("none of its outputs requires a gradient")
        nodes = [root.node for root in roots.values()]
        numbers, self._edges = numbered_nodes(nodes, ends)
        if any(not node.next_functions for node in numbers if node not in nodes):
            raise NotCapturable("its autograd graph reaches a leaf that is not among its inputs")
        if reason := next(filter(None, [unseen(node) for node in numbers if node not in self._nodes]), ""):
            raise NotCapturable(reason)
        for name in MODE_DEPENDENT.intersection(node.name() for node in numbers):
            raise NotCapturable(f"{name} computes differently while it is recorded")
        if any((INPUT, OTHER) in edges for edges in self._edges):
            raise NotCapturable("its autograd graph reaches a tensor that is not among its inputs")
        self._frame.reaches = [
            reached_from(numbers[roots[position].node], self._edges) if position in roots else frozenset()
            for position in range(len(outputs))
        ]
        if not any(self._frame.reaches):
            raise NotCapturable("none of its outputs depends on an input that requires a gradient")
        read = {edge for edges in self._edges for edge in edges}
        outputs = list(outputs)
        for position, root in roots.items():
            place = numbers[root.node], root.output_nr
            if place in read:
                outputs[position] = alias = outputs[position].view_as(outputs[position])
                self._edges.append([place])
                place = numbers.setdefault(alias.grad_fn, len(numbers)), 0
            self._outputs[place] = position
        self._nodes = {numbers[node]: index for node, index in self._nodes.items() if node in numbers}
        for node, number in numbers.items():
            node.register_prehook(partial(self._before, number))
            node.register_hook(partial(self._after, number))
        return outputs

    def _before(self, number: int, gradients: tuple[Tensor | None, ...]) -> None:
        """A node of the graph is about to run."""
        if not self._is_running:
            self._is_running, self._frame.backward_autocast = True, autocast_in_force()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self.reason is not None:
            return
        if torch.is_grad_enabled():
            self._fail(DIFFERENTIATED)
            return
        try:
            given = [None if g is None else self._take(g, number, slot) for slot, g in enumerate(gradients)]
        except NotCapturable as error:
            self._fail(error)
            return
        if number in self._nodes:
            self._given = given
        else:
            _push_mode(self._mode)

    def _take(self, gradient: Tensor, number: int, slot: int) -> Use:
        """A gradient has come to a node."""
        use, gradients = self._pending.pop((number, slot), None), self._frame.gradients
        if use is not None:
            self._see(gradient, use)
        elif (position := self._outputs.get((number, slot))) is not None:
            if gradients[position] is not None:  # as when a hook runs backward of the graph that it is called by
                raise NotCapturable("its backward starts again before it has ended")
            gradients[position] = buffer = self.recording.receive(gradient)
            if self.recording.buffers[buffer].root not in gradients:
                raise NotCapturable("the gradient of an output shares memory with one of the module's tensors")
        else:
            raise NotCapturable("a gradient enters in the middle of its autograd graph")
        return self.recording.use(gradient)

    def _see(self, gradient: Tensor, use: Use) -> None:
        """A gradient inside of the region has come: the output of one call, or the sum of several."""
        if use.buffer in self._sums:
            self._sums.remove(use.buffer)  # from now on it is a tensor like others, and may have views
            self.recording.bind(gradient, use.buffer)
            if not are_alike(Layout.of(gradient), use.layout):
                raise NotCapturable("autograd adds gradients that have different strides")
        elif (found := self.recording.use(gradient))[1:] == use[1:] and found.buffer in self._given_back:
            self.recording.bind(gradient, use.buffer)  # a Function has given back the memory of a gradient
        elif found != use:
            raise NotCapturable("a tensor hook inside of it replaces a gradient")

    def _after(self, number: int, gradients: tuple[Tensor | None, ...], _: Any) -> Sequence[Tensor | None] | None:
        """A node of the graph has run. Returns its gradients, if autograd would make other tensors of them."""
        if (call := self._nodes.get(number)) is not None:
            return self._after_function(number, call, gradients)
        modes = torch._C._len_torch_dispatch_stack()
        if modes and torch._C._get_dispatch_stack_at(modes - 1) is self._mode:  # else it failed before the node ran
            _pop_mode()
        if self.reason is None:
            try:
                pairs = zip(gradients, self._edges[number], strict=True)
                self._pass_on(number, [None if g is None or e is None else self.recording.use(g) for g, e in pairs])
            except NotCapturable as error:
                self._fail(error)
        return None

    def _after_function(
        self, number: int, call: int, gradients: tuple[Tensor | None, ...]
    ) -> Sequence[Tensor | None] | None:
        """The node of a custom Function has run, which is one call. Its gradients are tensors of their own.

        Their memory may be that of a gradient that it was given, or of a tensor that it has saved.
        """
        if self.reason is not None:
            return None
        forward, index = self.recording.calls[call], len(self.recording.calls)
        layouts, edges = [use.layout for use in forward.args if type(use) is Use], self._edges[number]
        each = zip(gradients, edges, layouts, strict=True)
        passed = [None if g is None or edge is None else as_autograd_does(g, layout) for g, edge, layout in each]
        try:
            uses = [None if g is None else Use(self.recording.receive(g, index), Layout.of(g)) for g in passed]
            made = [use for use, edge in zip(uses, edges, strict=True) if edge is not None]
            found = [None if use is None else use.layout for use in made]
            results = tuple([None if use is None else use.buffer for use in made])
            op = FunctionBackward(forward.op, call, len(self._given), found, _again(self._frame.backward_autocast))
            saved = [forward.args[position] for position in self._frame.functions[call].saves]
            self.recording.calls.append(Call(op, (*self._given, *saved), {}, results, (), is_sequence=True))
            self._given_back.update(filter(None, results))
            self._pass_on(number, uses)
        except NotCapturable as error:
            self._fail(error)
            return None
        return tuple(passed)

    def _pass_on(self, number: int, uses: Sequence[Use | None]) -> None:
        """A node gives these gradients."""
        for use, edge in zip(uses, self._edges[number], strict=True):
            if use is None or edge is None:
                continue
            if edge[0] == INPUT:
                self._frame.contributions.append((edge[1], use))
            elif (before := self._pending.get(edge)) is None:
                self._pending[edge] = use
            else:
                self._pending[edge] = total = self.recording.add(before, use)
                self._sums.add(total.buffer)

    def _end(self) -> None:
        """Backward has ended."""
        if self.reason is not None or self._done is None:
            return
        contributions = self._frame.contributions
        come = [position for position, _ in contributions]
        leading = [edge[1] for edges in self._edges for edge in edges if edge is not None and edge[0] == INPUT]
        try:
            # The captured node gives gradients only to the inputs that got one while it was recorded.
            if set(leading) != set(come):
                raise NotCapturable("its backward returns no gradient for some inputs that require one")
            if self.is_called_again and frozenset(come) not in self._frame.reaches:
                raise NotCapturable("its outputs depend on different inputs, and it runs several times in each step")
            missing = Counter(leading) - Counter(come)  # because outputs had no gradient
            contributions += [(position, None) for position in missing.elements()]
            writer = ProgramWriter(self._frame)
            program = next(filter(writer.would_write, self._known), None)
            if program is None:
                self._known.append(program := writer.program())
        except NotCapturable as error:
            self._fail(error)
            return
        self._end_with(program)


def _again(autocast: Autocast | None) -> Around:
    return nullcontext if autocast is None else autocast.again
