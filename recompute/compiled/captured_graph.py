"""Graphs of a region's forward: the guards that choose among them, and the programs that are made of them.

torch's frontend takes a graph of a call, and makes guards on all that the graph depends on in Python. The first call
of a graph runs by the tape. It is observed, and so is its backward. From what ran a program is made, which runs in all
later calls that the guards accept.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from recompute.compiled.autocast_settings import Autocast, autocast_in_force, cast_of
from recompute.compiled.captured_function import CapturedFrame, FrameOwner, apply_captured
from recompute.compiled.function_calls import objects_of
from recompute.compiled.generated.switch import Generates
from recompute.compiled.guards import MISSED, GuardedCalls, asks_about_tracing, meets_function
from recompute.compiled.observation import Observation
from recompute.compiled.program import Program
from recompute.compiled.recording import Departure, Recording
from recompute.compiled.region_tapes import GraphTape
from recompute.compiled.unfinished_code import GlobalState, leaving_vmaps
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.numerics import Numerics
from recompute.engine.rng import RngState
from recompute.engine.tape.exposed_memory import expose_arrays, is_shared
from recompute.engine.tape.op_arguments import PLAIN
from recompute.engine.tape.recorder import TapeRegion

MAX_FAILURES = 3
"""How many calls of equal regions torch's frontend may fail on, and how often a region may observe a graph in vain."""


class RecordedFrame(NamedTuple):
    """A frame by the tape, whose calls a graph must make, too."""

    recording: Recording
    variant: Hashable
    numerics: Numerics
    autocast: Autocast | None
    is_sure: bool
    """Whether the frame ran a call that the graph's guards had accepted. Else it may be of another kind of calls."""

    @property
    def is_current(self) -> bool:
        """Whether torch's settings are those of the frame. Others may lead to other ops, as those of attention do."""
        return self.numerics.are_in_force() and self.autocast == autocast_in_force()


class GraphCaller(FrameOwner, Protocol):
    """What a graph needs of the region that calls it."""

    tape: TapeRegion
    generates: Generates
    """The generated kernels that its code may run in."""
    recorded: RecordedFrame | None
    departed: CapturedGraph | None
    """The graph that has just refused a call because it took other steps than expected."""

    def recorded_for(self, graph: CapturedGraph) -> RecordedFrame | None: ...
    def forget_recorded(self, graph: CapturedGraph) -> None: ...
    def knows(self, plan: SavePlan) -> bool: ...
    def count(self, plan: SavePlan | None) -> None: ...
    def count_frame(self, plan: SavePlan) -> None: ...
    def deoptimize(self, reason: str) -> None: ...


class CachedGraphs:
    """What equal regions share: those that run the same function under the same rule, as the layers of a model do."""

    def __init__(self) -> None:
        self.failures = 0
        self.failure = ""
        """Why torch's frontend took no graph when it failed last."""
        self.draws = False
        """Whether a call drew from Python's or NumPy's generator while it was traced: the trace itself draws then."""
        self.programs: dict[Hashable, list[Program]] = {}
        """The programs by the code of the graph, and by what it is given."""
        self.graphs = GuardedGraphs(self)

    @property
    def has_failed(self) -> bool:
        return self.failures >= MAX_FAILURES


class GuardedGraphs:
    """The graphs of a function, one for each kind of call, and the guards that tell these apart."""

    def __init__(self, cached: CachedGraphs):
        self._cached = cached
        self._calls: GuardedCalls | None = None
        self._lock = threading.Lock()
        self._traces = 0
        """How many traces are going on."""
        self.graphs: list[CapturedGraph] = []

    def trace(self, region: GraphCaller, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Take the graph of a call and run it. If it returns ``MISSED``, there is no graph and nothing has run."""
        generators = RngState()
        result = self._run(self._trace, region, function, args, kwargs)
        if result is MISSED and (drawn := generators.drawn()) is not None:  # the trace drew
            drawn.restore()
            self._cached.draws = True
        return result

    def _trace(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        with self._lock:
            if self._calls is None:
                self._calls = GuardedCalls(self._compile)
            self._traces += 1
        try:
            recorded = None if _running.region is None else _running.region.recorded
            recording = Recording() if recorded is None else recorded.recording
            return self._calls.trace(function, args, kwargs, recording, (function, *modules_in(function, args)))
        finally:
            self._traces -= 1

    def run(self, region: GraphCaller, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run a call by the graph whose guards accept it. If it returns ``MISSED``, nothing has run."""
        calls = self._calls
        if calls is not None and not calls.are_current:
            with self._lock:  # the next trace makes new ones
                if self._calls is calls:
                    self._calls, self.graphs = None, []
            calls = None
        if calls is None:
            _running.waits = self._traces > 0
            return MISSED
        result = self._run(calls.run, region, function, args, kwargs)
        _running.waits = _running.waits or self._traces > 0  # on another thread
        return result

    def _run(self, call: Callable[..., Any], region: GraphCaller, *arguments: Any) -> Any:
        _running.region, _running.has_begun, _running.waits = region, False, False
        try:
            return call(*arguments)
        except Refusal:
            return MISSED
        except Exception as error:
            if _running.has_begun:
                raise
            if meets_function():
                region.recorded = None  # the next tape is told of that Function, and takes other steps
                return MISSED
            self._cached.failures += 1
            self._cached.failure = _first_line(error)
            return MISSED
        finally:
            _running.region = None

    def _compile(self, module: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        unfit = "it asks whether it is compiled" if asks_about_tracing() else _unfit_node(module)
        graph = CapturedGraph(self._cached, module, unfit or "")
        self.graphs.append(graph)
        return graph.run


class _Running(threading.local):
    region: GraphCaller | None = None
    has_begun = False
    waits = False
    """Whether the last call missed only because another one is being traced or observed."""


_running = _Running()


def waits_for_another() -> bool:
    """Whether the last call of this thread missed only because another call is being traced or observed."""
    return _running.waits


class Refusal(Exception):
    """A graph does not run this call. Nothing of the call has run."""


@dataclass
class _Caller:
    """What a graph has learned of one of the regions that call it."""

    programs: list[Program] = field(default_factory=list)
    """What was seen to do what the region does, in backward, too: equal regions may get other gradients."""
    observed: weakref.ref[Observation] | None = None
    failures: int = 0
    failure: str = ""
    """Why no program was made for it when that was tried last."""

    def observation(self) -> Observation | None:
        """The one that goes on: until the frame's backward has run, or autograd's graph of it is gone."""
        return None if self.observed is None else self.observed()

    def learn(self, result: Program | str, *, counts: bool = True) -> None:
        """An observation has ended: with a program, or with the reason why there is none.

        counts: whether it counts as a failure if there is none.
        """
        self.observed = None
        if isinstance(result, Program):
            self.programs.append(result)
            self.failure = ""
        else:
            self.failures += counts
            self.failure = result


class CapturedGraph:
    """A graph of a region, and the programs that were made of it: one for each plan, and way to go backward."""

    def __init__(self, cached: CachedGraphs, module: torch.fx.GraphModule, failure: str):
        """failure: why no program can be made of it; "" if one can."""
        self._cached = cached
        self._forward = leaving_vmaps(module.forward)
        self._code = module.code
        self._objects = objects_of(module.graph)
        """The positions of the inputs that are no tensors, and go to custom Functions as they are."""
        self._unfit = failure
        self._callers: weakref.WeakKeyDictionary[GraphCaller, _Caller] = weakref.WeakKeyDictionary()

    def program(self, region: GraphCaller) -> Program | None:
        """A program that does what frames of this region have done."""
        return next(iter(self._caller(region).programs), None)

    def forget(self, region: GraphCaller, program: Program) -> None:
        """Have a region not run a program any more."""
        if program in (programs := self._caller(region).programs):
            programs.remove(program)

    def failure(self, region: GraphCaller) -> str:
        """Why there is no program for this region, if that was tried."""
        return self._unfit or self._caller(region).failure

    def _caller(self, region: GraphCaller) -> _Caller:
        return self._callers.setdefault(region, _Caller())

    def run(self, *inputs: Any) -> Any:
        """The outputs of the graph on the inputs that torch's frontend has found for it."""
        if any(type(value) not in PLAIN for value in inputs):
            inputs = tuple(map(_as_plain, inputs))
        given, objects, graph = inputs, [inputs[position] for position in self._objects], self._forward
        if objects:
            given = tuple([value for position, value in enumerate(inputs) if position not in self._objects])
            graph = functools.partial(self._with_objects, objects)
        region = _running.region
        assert region is not None
        around, caller = _Surroundings.of(given), self._caller(region)
        program = next((each for each in caller.programs if around.are_those_of(each) and each.fits(given)), None)
        if program is None:
            if (observed := caller.observation()) is not None:
                observed.is_called_again = _running.waits = True
                raise Refusal
            may_observe = not self._unfit and caller.failures < MAX_FAILURES
            if may_observe and (expected := region.recorded_for(self)) is not None:
                return self._observe(region, caller, graph, given, objects, expected)
            _running.waits = False
            raise Refusal
        for position in program.plain:
            if is_shared(given[position]):
                _running.waits = False
                raise Refusal
        _running.has_begun = True
        region.count_frame(program.plan)
        casts = [cast_of(given[position]) for position in program.casts]
        frame = CapturedFrame(program, graph, region, given, casts, around.numerics, objects=objects)
        inputs = (*given, *casts) if casts else given
        try:
            return apply_captured(frame, program.fixed, *[inputs[position] for position in program.edges])
        except Departure as error:
            frame.put_back()
            region.deoptimize(str(error))
            raise Refusal from None

    def _with_objects(self, objects: Sequence[Any], *given: Tensor) -> Any:
        inputs = list(given)
        for position, value in zip(self._objects, objects, strict=True):
            inputs.insert(position, value)
        return self._forward(*inputs)

    def _observe(
        self,
        region: GraphCaller,
        caller: _Caller,
        graph: Callable[..., Any],
        given: Sequence[Any],
        objects: Sequence[Any],
        expected: RecordedFrame,
    ) -> Any:
        """Run the graph by the tape and record what runs. It must be what ran in the frame that was recorded."""
        region.forget_recorded(self)  # else a region that never runs backward would be observed for ever
        functions = tuple([expected.recording.calls[index].op for index in expected.recording.functions])
        key = self._code, functions, tuple([_kind(value) for value in given])
        known = self._cached.programs.setdefault(key, [])
        expose_arrays(given)
        state = GlobalState()
        try:
            if not all(isinstance(value, Tensor) for value in given):
                raise Departure("its graph is given what is no tensor")
            seen = Observation(
                given,
                expected.recording,
                expected.autocast,
                caller.learn,
                region.statistics.name,
                known,
                objects,
                generates=region.generates,
            )
            caller.observed = weakref.ref(seen)
            tape = GraphTape(region.tape, expected.variant, seen)
            with tape, region.tape.mode():
                outputs = graph(*given)
                seen.end_forward()
                if not all(isinstance(output, Tensor) for output in outputs):
                    raise Departure("its graph gives what is no tensor")
        except Exception as error:  # if it is the user's, the tape will raise it again
            state.put_back()
            has_departed = isinstance(error, Departure)
            if has_departed:
                region.departed = self
            caller.learn(_first_line(error), counts=expected.is_sure or not has_departed)
            raise Refusal from None
        _running.has_begun = True
        plan = tape.finish(outputs)
        region.count(plan)
        if plan is None or not region.knows(plan):
            caller.learn("its graph saves other tensors than its forward does")
            return outputs
        return seen.finish(plan, given, outputs)


def modules_in(function: Callable[..., Any], args: tuple) -> Iterable[nn.Module]:
    """The module whose forward ``function`` is, or which it is given, and those inside of it."""
    module = next((m for m in (getattr(function, "__self__", None), *args[:1]) if isinstance(m, nn.Module)), None)
    return () if module is None else module.modules()


def runners_in(function: Callable[..., Any], args: tuple) -> Iterator[Any]:
    """The runners of ``modules_in(function, args)``."""
    for inside in modules_in(function, args):
        runner = vars(inside).get(RUNNER)
        while getattr(runner, "statistics", None) is not None:
            yield runner
            runner = getattr(runner, "inner", None)


class _Surroundings(NamedTuple):
    """The settings of torch under which a graph is called."""

    numerics: Numerics
    autocast: Autocast | None
    cached: tuple[int, ...]
    """The positions of the inputs that autocast casts but once."""

    @staticmethod
    def of(given: Sequence[Any]) -> _Surroundings:
        autocast = autocast_in_force()
        return _Surroundings(Numerics(), autocast, () if autocast is None else autocast.cached(given))

    def are_those_of(self, program: Program) -> bool:
        return (
            self.numerics.are(program.numerics) and self.autocast == program.autocast and self.cached == program.cached
        )


def _as_plain(value: Any) -> Any:
    """A frozen parameter of a class of its own, such as one of 4 bits, as ops below autograd see it."""
    is_own = isinstance(value, nn.Parameter) and type(value) is not nn.Parameter and not value.requires_grad
    if not is_own or type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return nn.Parameter(value.detach(), requires_grad=False)


def _kind(value: Any) -> Hashable:
    """All that code which was made for a tensor depends on."""
    layout = Layout.of(value)
    return layout, value.device, value.requires_grad, isinstance(value, nn.Parameter)


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
            return "it calls a transform of torch.func other than vmap, or differentiates forward"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it has a higher-order operator, {node.target}"
    return None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
