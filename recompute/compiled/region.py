"""Captured regions: how a region whose tape has settled goes on without one, as a node that runs straight code.

torch's frontend takes a graph of the region's forward, with guards on all of the Python world that it depends on. One
frame of that graph is run by the tape, as the region itself was before, and watched, and so is its backward. What ran
is written as code: forward, the cut's way back, and backward, op by op. From then on a call that the guards accept runs
that code. Any other call runs by the tape, and so does a region that cannot be captured.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recompute.compiled.captured import CapturedFunction, Frame
from recompute.compiled.guards import MISSED, GuardedCalls
from recompute.compiled.observation import GraphTape, Observation, RecordingTape
from recompute.compiled.program import Program
from recompute.compiled.recording import Departure, Recording
from recompute.engine.exposed import expose_arrays, is_shared
from recompute.engine.modes import count_dispatch_modes, count_function_modes
from recompute.engine.plan import Plan, PlanCache
from recompute.engine.recipe import is_verifying, local
from recompute.engine.rng import RngState
from recompute.engine.saved import Layout, top_hooks, unpack_saved
from recompute.engine.setting import Setting
from recompute.engine.tape import TapeRegion

SETTLED = 3
"""Frames of one plan after which a region is captured."""
TRIES = 3
"""Calls of regions alike that torch's frontend may fail on, and frames of one graph that may be watched in vain; and
frames of one plan that may be recorded, as the call after may be another one."""
MOST = 8
"""Plans that a region remembers, and graphs that are looked through for a call."""
SHARED = 4
"""Graphs that regions alike share; one that none of them fits has graphs of its own."""
MISSES = 32
"""Calls in a row without a graph after which a region is not captured any more: each costs a look at the guards."""


class Shared:
    """What the regions under one policy share, as layers are alike: plans, and graphs that were captured."""

    def __init__(self) -> None:
        self.openings = PlanCache()
        self._alike: dict[Hashable, Alike] = {}

    def alike(self, key: Hashable) -> Alike:
        """What is shared by the regions that run the same function under the same rule."""
        found = self._alike.get(key)
        if found is None:
            found = self._alike.setdefault(key, Alike())
        return found


class Alike:
    """What regions that run the same function share."""

    def __init__(self) -> None:
        self.failures = 0
        self.failure = ""
        """Why torch's frontend took no graph when it failed last."""
        self.programs: dict[Hashable, Program] = {}
        """By the graph, by what it is given, and by the plan."""
        self.graphs = Graphs(self)

    @property
    def is_given_up(self) -> bool:
        return self.failures >= TRIES


class Graphs:
    """Graphs of a function, and the guards that tell which one a call is of."""

    def __init__(self, alike: Alike):
        self._alike = alike
        self._calls: GuardedCalls | None = None
        self._lock = threading.Lock()
        self.graphs: list[CapturedGraph] = []

    def trace(self, region: CapturedRegion, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run a call whose graph is taken first, or say ``MISSED``, and nothing has run."""
        with self._lock:
            if self._calls is None:
                self._calls = GuardedCalls(self._compile)
        return self._run(self._calls.trace, region, function, args, kwargs)

    def run(self, region: CapturedRegion, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run a call by the graph that its guards accept, or say ``MISSED``, and nothing has run."""
        if self._calls is None:
            return MISSED
        return self._run(self._calls.run, region, function, args, kwargs)

    def _run(self, call: Callable[..., Any], region: CapturedRegion, *arguments: Any) -> Any:
        _running.region, _running.has_begun = region, False
        try:
            return call(*arguments)
        except Refusal:
            return MISSED
        except Exception as error:
            if _running.has_begun:
                raise
            self._alike.failures += 1
            self._alike.failure = _first_line(error)
            return MISSED
        finally:
            _running.region = None

    def _compile(self, module: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        graph = CapturedGraph(self._alike, module)
        self.graphs.append(graph)
        return graph.run


class _Running(threading.local):
    region: CapturedRegion | None = None
    has_begun = False


_running = _Running()


class Refusal(Exception):
    """A graph does not run this call; nothing of it has run."""


class CapturedGraph:
    """A graph of a region, and the programs that were made of it: one for each plan."""

    def __init__(self, alike: Alike, module: torch.fx.GraphModule):
        self._alike = alike
        self._graph = module.forward
        self._code = module.code
        self._programs: list[Program] = []
        self._is_watched = False
        self._failures = 0
        self.failure = _unfit_node(module) or ""
        """Why no program was made of it when that was tried last."""
        self.is_given_up = bool(self.failure)

    def program(self, region: CapturedRegion) -> Program | None:
        """The one that does in the region what a frame of its own has done."""
        return next((program for program in self._programs if region.can_run(program)), None)

    def run(self, *given: Any) -> Any:
        """The outputs of the graph on the inputs that torch's frontend has found for it."""
        region = _running.region
        assert region is not None
        program = self.program(region)
        if program is None and not self.is_given_up and region.recording is not None:
            program = self._known(region, given)
            if program is None:
                return self._watch(region, given, region.recording)
        if program is None or any(map(is_shared, given)):
            raise Refusal
        _running.has_begun = True
        frame = Frame(program, self._graph, region.tape.setting.owner, given, region.differs)
        return CapturedFunction.apply(frame, program.fixed, *[given[position] for position in program.edges])

    def _known(self, region: CapturedRegion, given: Sequence[Any]) -> Program | None:
        """The program that was made of the same graph of another region."""
        key = self._key(given)
        for plan in region.plans():
            program = self._alike.programs.get((key, id(plan)))
            if program is not None and region.can_run(program):
                self._programs.append(program)
                return program
        return None

    def _key(self, given: Sequence[Any]) -> Hashable:
        return self._code, tuple([_kind(value) for value in given])

    def _watch(self, region: CapturedRegion, given: Sequence[Any], expected: Recording) -> Any:
        """Run the graph by the tape, which records what runs; it must be what the region itself does."""
        if self._is_watched:
            raise Refusal
        self._is_watched = True
        learn = functools.partial(self._learn, self._key(given))
        states = RngState()
        expose_arrays(given)
        try:
            if not all(isinstance(value, Tensor) for value in given):
                raise Departure("its graph is given what is no tensor")
            seen = Observation(given, expected, learn)
            tape = GraphTape(region.tape, region.settings, None, seen)
            with tape:
                outputs = self._graph(*given)
                seen.end_forward()
                if not all(isinstance(output, Tensor) for output in outputs):
                    raise Departure("its graph gives what is no tensor")
        except Departure as departure:
            states.restore()
            learn(str(departure))
            raise Refusal from None
        _running.has_begun = True
        region.tape.setting.owner.frames += 1
        plan = tape.record.finish(tape.plain(tree_leaves(outputs)))
        if plan is None or not region.knows(plan):
            learn("its graph saves other tensors than its forward does")
            return outputs
        return seen.finish(plan, given, outputs)

    def _learn(self, key: Hashable, result: Program | str) -> None:
        """What was watched has ended."""
        self._is_watched = False
        if isinstance(result, Program):
            self._programs.append(result)
            self._alike.programs[key, id(result.plan)] = result
            self.failure = ""
            return
        self._failures += 1
        self.failure = result
        self.is_given_up = self._failures >= TRIES


class CapturedRegion:
    """A region that runs by a tape until that has settled, and is captured then."""

    def __init__(self, tape: TapeRegion, shared: Shared | None):
        """shared: what it shares with other regions under the same policy; None: it stays on the tape."""
        self.tape = tape
        self.settings: dict[Any, Setting] = {tape.setting.key: tape.setting}
        self.recording: Recording | None = None
        """What the last frame's forward did, where that has just settled."""
        self._shared = shared
        self._alike: Alike | None = None
        self._own: Graphs | None = None
        """Graphs of this region alone, if none of those that it shares fits."""
        self._settled: dict[int, tuple[Plan, int]] = {}
        """Plans, and how many frames have had each; from ``SETTLED - 1`` on, how many have been recorded."""
        self._reason = ""
        """Why the last frame that was to be recorded was not."""
        self._misses = 0
        self._differing: dict[Program, tuple[int, int]] = {}
        """Programs whose gradients differ from those that it gets: the first frame of which they did, and how many."""
        self._unfit: list[Program] = []
        """Those that mostly do."""

    def can_run(self, program: Program) -> bool:
        """Whether it does what a frame of the region's own has done, and knows the gradients that come."""
        return program not in self._unfit and id(program.plan) in self._settled

    def differs(self, program: Program) -> None:
        """Backward is given other gradients than those of the region alike that the program was made of.

        Where that is the rule, the region gets a program of its own, as all that else serves is to run forward again.
        """
        frames = self.tape.setting.owner.frames
        first, count = self._differing.get(program, (frames, 0))
        self._differing[program] = first, count + 1
        if count + 1 == TRIES and frames - first < 2 * TRIES:
            self._unfit.append(program)
            is_last = len(self._unfit) == TRIES  # after which it stays on the tape
            self._settled[id(program.plan)] = program.plan, SETTLED - 1 + (TRIES if is_last else 0)
            self._misses = 0

    def knows(self, plan: Plan) -> bool:
        """Whether the region's own frames have had this plan."""
        return id(plan) in self._settled

    def plans(self) -> list[Plan]:
        """Those that its own frames have had."""
        return [plan for plan, _ in self._settled.values()]

    @property
    def was_tried(self) -> bool:
        """Whether its tape had settled, so that it was to be captured."""
        return self._alike is not None or bool(self._reason)

    @property
    def is_captured(self) -> bool:
        """Whether there is code that runs in its place."""
        return any(graph.program(self) is not None for graph in self._graphs())

    @property
    def failure(self) -> str:
        """Why it is not captured, though that was tried; "" if it is."""
        if self.is_captured or not self.was_tried:
            return ""
        failures = [graph.failure for graph in self._graphs() if graph.failure]
        if self._reason or self._alike is None:
            return self._reason
        return failures[-1] if failures else self._alike.failure or "it has not run backward since"

    def _graphs(self) -> list[CapturedGraph]:
        own = [] if self._own is None else self._own.graphs
        return own if self._alike is None else [*own, *self._alike.graphs.graphs]

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict, variant: Hashable = None) -> Any:
        """``function(*args, **kwargs)``; ``variant`` as for a ``TapeRegion``."""
        if self._alike is None or self._misses >= MISSES or not is_undisturbed():
            return self._by_tape(function, args, kwargs, variant)
        result = self._by_graph(self._alike, function, args, kwargs)
        if result is MISSED:
            self._misses += 1
            return self._by_tape(function, args, kwargs, variant)
        self._misses = 0
        return result

    def _by_graph(self, alike: Alike, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        graphs = alike.graphs if self._own is None else self._own
        result = graphs.run(self, function, args, kwargs)
        if result is MISSED and self.recording is not None and not alike.is_given_up:
            if graphs is alike.graphs and len(graphs.graphs) >= SHARED:
                graphs = self._own = Graphs(alike)
            if len(graphs.graphs) < MOST:
                result = graphs.trace(self, function, args, kwargs)
        return result

    def _by_tape(self, function: Callable[..., Any], args: tuple, kwargs: dict, variant: Hashable) -> Any:
        self.recording = None
        shared, plan = self._shared, self.tape.plan
        if shared is not None and plan is not None and self._is_to_be_recorded(plan):
            return self._by_recording_tape(shared, function, args, kwargs, variant)
        result = self.tape.run(function, args, kwargs, variant)
        self._count()
        return result

    def _is_to_be_recorded(self, plan: Plan) -> bool:
        """Whether the next frame of a plan is."""
        return 0 <= self._settled.get(id(plan), (plan, 0))[1] - (SETTLED - 1) < TRIES

    def _count(self) -> None:
        """Count a frame by its plan."""
        if (plan := self.tape.plan) is not None:
            _, count = self._settled.get(id(plan), (plan, 0))
            if count < SETTLED - 1:
                self._settled[id(plan)] = plan, count + 1
            if len(self._settled) > MOST:
                del self._settled[next(iter(self._settled))]

    def _by_recording_tape(
        self, shared: Shared, function: Callable[..., Any], args: tuple, kwargs: dict, variant: Hashable
    ) -> Any:
        """By the tape, which records what a graph of the region must do, if the frame has a plan that has settled."""
        tapes: list[RecordingTape] = []

        def start(region: TapeRegion, variant: Hashable) -> RecordingTape:
            tapes.append(RecordingTape(region, variant))
            return tapes[0]

        result = self.tape.run(function, args, kwargs, variant, start)
        plan = self.tape.plan
        if not tapes or plan is None or not self._is_to_be_recorded(plan):
            self._count()
            return result
        self.recording, self._reason = tapes[0].recording, tapes[0].reason
        if self.recording is None:
            self._settled[id(plan)] = plan, SETTLED - 1 + TRIES
            return result
        self._settled[id(plan)] = plan, self._settled[id(plan)][1] + 1
        if self._alike is None:
            self._alike = shared.alike((getattr(function, "__func__", function), self.tape.setting.key))
        return result


def _kind(value: Any) -> Hashable:
    """All of a tensor that code which was made for it depends on."""
    layout = Layout.of(value)
    return layout, value.device, value.requires_grad, isinstance(value, nn.Parameter)


def is_undisturbed() -> bool:
    """Whether nothing around a region has a say in how its ops run or what becomes of what they save."""
    if local.spans or count_dispatch_modes() or count_function_modes() or is_verifying():
        return False
    hooks = top_hooks()
    while hooks is not None and hooks[1] is unpack_saved:
        hooks = hooks[0].__self__.outer  # type: ignore[attr-defined]
    return hooks is None and not torch.is_anomaly_enabled() and not torch._C._is_any_autocast_enabled()


_REFUSED_METHODS = frozenset(
    ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward")
)


def _unfit_node(module: torch.fx.GraphModule) -> str | None:
    """Why a graph is more than ops on tensors."""
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target in _REFUSED_METHODS:
            return f"it calls Tensor.{node.target}"
        if "functorch" in (getattr(node.target, "__module__", None) or ""):
            return "it calls a transform of torch.func"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it has a higher-order operator, {node.target}"
    return None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
