"""Graphs of a region's forward: the guards that choose among them, and the programs that are made of them.

torch's frontend takes a graph of a call, and makes guards on all that the graph depends on in Python. The first call
of a graph runs by the tape. It is observed, and so is its backward. A program is made of all ops that ran. It runs in
all later calls that the guards accept.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recompute.compiled.autocast_settings import CallSettings, GlobalState, cast_of, leaving_vmaps
from recompute.compiled.captured_function import CapturedFrame, apply_captured
from recompute.compiled.following import FollowingRecording
from recompute.compiled.frontend import ASKS, last_trace, names_read, objects_of
from recompute.compiled.function_calls import CHANGES
from recompute.compiled.guards import MISSED, GuardedCalls
from recompute.compiled.observation import Observation
from recompute.compiled.program import Program
from recompute.compiled.recording import Departure, NotCapturable, Recording
from recompute.compiled.region_record import MAX_FAILURES, RegionRecord
from recompute.compiled.region_tapes import GraphTape
from recompute.compiled.unguarded_calls import UnguardedCalls, kind_of, modules_in
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.rng import RngState
from recompute.engine.tape.exposed_memory import expose_arrays, is_shared
from recompute.engine.tape.op_arguments import PLAIN, is_frozen
from recompute.engine.thread_state import is_fake, is_in_cuda_graph
from recompute.engine.wrapper_tensors import inner_tensors


class RecordedFrame(NamedTuple):
    """A frame by the tape, whose calls a graph must make, too."""

    recording: Recording
    variant: Hashable
    around: CallSettings

    @property
    def is_current(self) -> bool:
        """Whether torch's settings are those of the frame. Others may lead to other ops, as those of attention do."""
        return self.around == CallSettings.of()


@dataclass
class Attempt:
    """A call that runs by a graph, if there is one for it."""

    region: RegionRecord
    recorded: RecordedFrame | None = None
    """A frame that the call is expected to be like, if it is the first of its graph. None as soon as it has served."""
    has_begun: bool = False
    """Whether something of the call has run."""
    waits: bool = False
    """Whether it missed only because another call is being traced or observed."""
    departed: Caller | None = None
    """The caller whose graph took other steps than expected, and so missed it."""


class CachedGraphs:
    """Equal regions share this: those that run the same function under the same rule, as the layers of a model do."""

    def __init__(self) -> None:
        self.failures = 0
        self.failure = ""
        """Why torch's frontend took no graph when it failed last."""
        self.draws = False
        """Whether a call drew from Python's or NumPy's generator while it was traced: the trace itself draws then."""
        self.programs: dict[Hashable, list[Program]] = {}
        """The programs, by the code of the graph and the kinds of its inputs."""
        self.graphs = GuardedGraphs(self)


class GuardedGraphs:
    """The graphs of a function, one for each kind of call, and the guards that tell these apart."""

    def __init__(self, cached: CachedGraphs):
        self._cached = cached
        self._calls: GuardedCalls | UnguardedCalls | None = None
        self._lock = threading.Lock()
        self._traces = 0
        """How many traces are going on."""
        self.graphs: list[CapturedGraph] = []

    def trace(self, attempt: Attempt, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Take the graph of a call and run it. If it returns ``MISSED``, there is no graph and nothing has run."""
        generators = RngState()
        result = self._run(self._trace, attempt, function, args, kwargs)
        if result is MISSED and (drawn := generators.drawn()) is not None:  # the trace drew
            drawn.restore()
            self._cached.draws = True
        return result

    def _trace(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        with self._lock:
            if self._calls is None:
                self._calls = UnguardedCalls(self._add) if is_fake() else GuardedCalls(self._compile)
            self._traces += 1
        try:
            recorded = None if _running.attempt is None else _running.attempt.recorded
            recording = Recording() if recorded is None else recorded.recording
            return self._calls.trace(function, args, kwargs, recording, (function, *modules_in(function, args)))
        finally:
            self._traces -= 1

    def run(self, attempt: Attempt, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run a call by the graph whose guards accept it. If it returns ``MISSED``, nothing has run."""
        calls = self._calls
        if calls is not None and not calls.are_current:
            with self._lock:  # the next trace makes new ones
                if self._calls is calls:
                    self._calls, self.graphs = None, []
            calls = None
        result = MISSED if calls is None else self._run(calls.run, attempt, function, args, kwargs)
        attempt.waits = attempt.waits or self._traces > 0  # on another thread
        return result

    def _run(self, call: Callable[..., Any], attempt: Attempt, *arguments: Any) -> Any:
        around, _running.attempt = _running.attempt, attempt
        try:
            return call(*arguments)
        except Refusal:
            return MISSED
        except Exception as error:
            if attempt.has_begun:
                raise
            if last_trace.meets:
                attempt.recorded = None  # the next tape sees that Function, and takes other steps
            else:
                self._cached.failures += 1
                self._cached.failure = _first_line(error)
            return MISSED
        finally:
            _running.attempt = around

    def _compile(self, module: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        unfit = ASKS if last_trace.asks else _unfit_node(module)
        return self._add(module, objects_of(module.graph), names_read(), unfit or "")

    def _add(self, *graph: Any) -> Callable[..., Any]:
        self.graphs.append(CapturedGraph(self._cached, *graph))
        weak = weakref.ref(self.graphs[-1])

        def run(*inputs: Any) -> Any:  # torch keeps it as a global until its guards are gone
            if (graph := weak()) is None:
                raise Refusal
            return graph.run(*inputs)

        return run


class _Running(threading.local):
    attempt: Attempt | None = None


_running = _Running()


class Refusal(Exception):
    """A graph does not run this call. Nothing of the call has run."""


@dataclass
class Caller:
    """One of the regions that call a graph, and all that the graph knows of it."""

    programs: list[Program] = field(default_factory=list)
    """They do the same as frames of this region did, in backward, too: equal regions may get other gradients."""
    observed: Callable[[], Observation | None] = lambda: None
    """The one that goes on: until the frame's backward has run, or autograd's graph of it is gone."""
    recorded: RecordedFrame | None = None
    """A frame that ran a call which the graph's guards had accepted. Other frames may be of other kinds of calls."""
    failures: int = 0
    failure: str = ""
    """Why no program was made for it when that was tried last."""

    def learn(self, result: Program | str, *, counts: bool = True) -> None:
        """An observation has ended: with a program, or with the reason why there is none.

        counts: whether it counts as a failure if there is none.
        """
        self.observed = lambda: None
        if isinstance(result, Program):
            self.programs.append(result)
            self.failure = ""
        else:
            self.failures += counts
            self.failure = result


class CapturedGraph:
    """A graph of a region, and the programs that were made of it: one for each plan, and way to go backward."""

    def __init__(
        self,
        cached: CachedGraphs,
        graph: Any,
        objects: Sequence[int],
        read: frozenset[str] = frozenset(),
        failure: str = "",
    ):
        """graph: has the function, ``forward``, and its ``code``.

        objects: the positions of the inputs that are no tensors, and go to custom Functions as they are.
        read: the names that its code reads in Python. failure: why no program can be made of it, or "".
        """
        self._cached = cached
        self._forward = leaving_vmaps(graph.forward)
        self._code = graph.code
        self._read = read
        self._objects = objects
        self._unfit = failure
        self._callers: weakref.WeakKeyDictionary[RegionRecord, Caller] = weakref.WeakKeyDictionary()

    def program(self, region: RegionRecord) -> Program | None:
        """A program that does the same as frames of this region did."""
        return next(iter(self._caller(region).programs), None)

    def forget(self, region: RegionRecord, program: Program) -> None:
        if program in (programs := self._caller(region).programs):
            programs.remove(program)

    def failure(self, region: RegionRecord) -> str:
        """Why there is no program for this region, if that was tried."""
        return self._unfit or self._caller(region).failure

    def _caller(self, region: RegionRecord) -> Caller:
        return self._callers.setdefault(region, Caller())

    def run(self, *inputs: Any) -> Any:
        """The outputs of the graph on the inputs that torch's frontend has found for it."""
        wrapped: dict[int, list[Tensor]] = {}
        if not PLAIN.issuperset(map(type, inputs)):
            inputs = tuple(map(_as_plain, inputs))
            wrappers = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
            wrapped = {place: inside for place in wrappers if (inside := inner_tensors(inputs[place]))}
        given, objects, graph = inputs, [inputs[position] for position in self._objects], self._forward
        if objects or wrapped:
            others = {place: value for place, value in enumerate(inputs) if place in wrapped or place in self._objects}
            plain = [value for place, value in enumerate(inputs) if place not in others]
            given = *plain, *itertools.chain(*wrapped.values())
            graph = functools.partial(self._with_others, others, len(plain))
        attempt = _running.attempt
        assert attempt is not None
        region, around = attempt.region, CallSettings.of(given)
        caller = self._caller(region)
        programs = [each for each in caller.programs if each.around == around and each.fits(given)]
        program = programs[0] if programs else None
        if is_in_cuda_graph() and (program is None or program.draws_from is not None):
            raise Refusal
        if program is None:
            if (observed := caller.observed()) is not None:
                observed.is_called_again = attempt.waits = True
                raise Refusal
            expected = caller.recorded or attempt.recorded
            if self._unfit or caller.failures >= MAX_FAILURES or expected is None or not expected.is_current:
                raise Refusal
            return self._observe(attempt, caller, expected, graph, given, objects)
        if any(map(is_shared, map(given.__getitem__, program.plain))):
            raise Refusal
        attempt.has_begun = True
        region.count_frame(program.plan)
        casts = [cast_of(given[position]) for position in program.casts]
        frame = CapturedFrame(program, graph, region)
        inputs = *given, *casts
        edges = [inputs[position] for position in program.edges]
        try:
            return apply_captured(frame, (given, casts, objects), program.fixed, *edges)
        except Departure as error:
            frame.put_back()
            region.refuse(str(error))
            raise Refusal from None

    def _with_others(self, others: Mapping[int, Any], count: int, *given: Tensor) -> Any:
        """The graph on ``others``, by their positions, and on the first ``count`` of the tensors that are given.

        The rest of these tensors is inside of some of the others.
        """
        inputs = list(given[:count])
        for position, value in others.items():
            inputs.insert(position, value)
        return self._forward(*inputs)

    def _observe(
        self,
        attempt: Attempt,
        caller: Caller,
        expected: RecordedFrame,
        graph: Callable[..., Any],
        given: Sequence[Any],
        objects: Sequence[Any],
    ) -> Any:
        """Run the graph by the tape, and record the ops. They must be those of the frame that was recorded."""
        region, is_sure = attempt.region, caller.recorded is not None
        if is_sure:  # it has served: else a region that never runs backward would be observed for ever
            caller.recorded = None
        else:
            attempt.recorded = None
        functions = tuple([expected.recording.calls[index].op for index in expected.recording.functions])
        key = self._code, functions, tuple([kind_of(value) for value in given])
        known = self._cached.programs.setdefault(key, [])
        expose_arrays(given)
        state = GlobalState()
        recording = FollowingRecording(
            objects, generates=region.generates, expected=expected.recording, read=self._read
        )
        try:
            if not all(isinstance(value, Tensor) for value in given):
                raise Departure("an input of its graph is not a tensor")
            if any(map(Tensor.is_inference, given)):  # the guards of a graph tell such tensors from others
                raise NotCapturable("one of its inputs was made under torch.inference_mode()")
            for index, function in expected.recording.functions.items():
                if function.changed & self._read:
                    raise Departure(CHANGES.format(expected.recording.calls[index].op))
            around, name = CallSettings.of(given), region.statistics.name
            seen = Observation(given, recording, around, caller.learn, name, known)
            caller.observed = weakref.ref(seen)
            tape = GraphTape(region.tape, expected.variant, seen)
            with tape, region.tape.mode():
                outputs = graph(*given)
                tape.end_forward()
                if not all(isinstance(output, Tensor) for output in outputs):
                    raise Departure("an output of its graph is not a tensor")
        except Exception as error:  # if it is the user's, the tape will raise it again
            state.put_back()
            recording.put_back()
            has_departed = isinstance(error, Departure)
            attempt.departed = caller if has_departed else None
            caller.learn(_first_line(error), counts=is_sure or not has_departed)
            raise Refusal from None
        attempt.has_begun = True
        plan = tape.finish(outputs)
        region.count(plan)
        if plan is None or not region.knows(plan):
            caller.learn("its graph saves other tensors for backward than its eager forward")
            return outputs
        return seen.finish(plan, given, outputs)


def runners_in(function: Callable[..., Any], args: tuple) -> Iterator[Any]:
    """The runners of ``modules_in(function, args)``."""
    for inside in modules_in(function, args):
        runner = vars(inside).get(RUNNER)
        while getattr(runner, "statistics", None) is not None:
            yield runner
            runner = getattr(runner, "inner", None)


def _as_plain(value: Any) -> Any:
    """A frozen parameter of a class of its own, such as one of 4 bits, as ops below autograd see it."""
    if not is_frozen(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return nn.Parameter(value.detach(), requires_grad=False)


_NUMBER = "it computes a Python number from a tensor"
_OTHER_TRANSFORMS = frozenset(
    ("_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting", "_enter_dual_level")
)
_REFUSED_METHODS = frozenset(
    ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward")
)


def _unfit_node(module: torch.fx.GraphModule) -> str | None:
    """Why a graph is more than ops on tensors; None if it is not."""
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target in _REFUSED_METHODS:
            return f"it calls Tensor.{node.target}"
        if getattr(node.target, "__name__", "") in _OTHER_TRANSFORMS:
            return "it uses a torch.func transform other than vmap, or forward-mode differentiation"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it uses the higher-order operator {node.target}"
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            # A program would be made for the number that it is now.
            return f"{_NUMBER}, by {node.target}"
    return None


def _first_line(error: Exception) -> str:
    if "data-dependent expression" in str(error):
        return f"{_NUMBER}, and branches on it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
