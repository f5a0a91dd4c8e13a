"""Captured regions: how a region goes on as straight code once its tape has settled.

A region is in one of five states. Each handles a call and says the next state:

    Taping ──> RecordingNext ──> Observing <──> Captured          Refused
      runs by    so, and           a call takes     runs graphs      runs as under
      its tape,  writes down       a graph, which   whose guards     ``Taping``,
      or as a    its calls         must make the    accept the       for good
      checkpoint                   calls            call

- ``Taping``, until some frames have had the same plan.
- ``RecordingNext``: one more frame runs by the tape, which writes down its calls.
- ``Observing``: torch's frontend takes the graph of a call. It must make the calls that were written down. The call
  runs by the tape, and a program is made of the ops of its forward and its backward.
- ``Captured``: a call that the guards of a graph accept runs the graph's program. Any other call is recorded, as long
  as there is a point in that, and the next such call is observed.
- ``Refused``, with the reason: the region cannot be captured, or misses too often, or is used in a way that its code
  could not follow exactly. Any state may lead here, also while backward runs.

In a CUDA graph the states of generators cannot be read. So the tape runs what no program runs there.

The program of ``torch.sin(x * 2)``, whose backward reads ``x * 2``:

    def run(name, objects, is_sure, t0):
        t1 = aten_mul_Tensor(t0, 2)
        t2 = aten_sin_default(t1)
        return (t2, ), [t1], (), [], [], [(weak(t0), None if is_sure else t0.detach(), (t0._version, address(t0)))]

    def run(held, kept, states, gradients):
        () = held
        t1, = kept
        () = states
        t3, = gradients
        held.clear()
        kept.clear()
        gradients.clear()
        t4 = aten_cos_default(t1)
        del t1
        t5 = aten_mul_Tensor(t3, t4)
        del t3, t4
        t6 = aten_mul_Tensor(t5, 2)
        del t5
        return (t6, )
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from recompute.compiled.autocast_settings import CallSettings, is_undisturbed
from recompute.compiled.capture_cache import CaptureCache, RegionGraphs
from recompute.compiled.captured_graph import (
    Attempt,
    CachedGraphs,
    Caller,
    GuardedGraphs,
    RecordedFrame,
    runners_in,
)
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.guards import MISSED
from recompute.compiled.program import Program
from recompute.compiled.recording import NotCapturable
from recompute.compiled.region_record import DIFFERENTIATED, MAX_FAILURES, WARMUP_FRAMES, RegionRecord
from recompute.compiled.region_tapes import RecordingTape
from recompute.compiled.unguarded_calls import modules_in
from recompute.engine.cut.save_plan import LARGEST_COPY, SavePlan
from recompute.engine.reachable_objects import find_generators
from recompute.engine.rng import RngState
from recompute.engine.tape.recorder import TapeRegion, kinds_of
from recompute.engine.thread_state import is_in_cuda_graph, local

MAX_HITS = 32
"""After more captured calls than this a recorded frame is thrown away. As many kinds of calls may take turns."""
MAX_GRAPHS = 24
"""Frames that a region records, and graphs that it tries for a call: one for each of 15 lengths, and some in vain.

Equal regions share as many. A region gets graphs of its own if none of these fits.
"""
MAX_UNUSED_GRAPHS = 2
"""Graphs that a region may take in a row without running any of them again. Their guards may hold only once."""
MAX_MISSES = 32
"""A region is refused after so many calls in a row without a graph: each costs a look at the guards."""

_RULES_INSIDE = "modules inside of it have their own rules, or it runs under other saved-tensor hooks or torch.func"
_UNLIKE = "too few of its forwards have had the same shapes and ops"
_DRAWS = "it draws random numbers from Python's random or from NumPy"


Transition = tuple[Any, "State"]
"""The result of a call, and the state after it."""


class State:
    """Where a region is on its way to running as code."""

    graphs: RegionGraphs | None = None

    def call(self, region: CapturedRegion, *call: Any) -> Transition:
        """Run ``call``: a function, its arguments, and its keyword arguments."""
        raise NotImplementedError


class Taping(State):
    """It runs by a tape, or as a checkpoint, until its frames are alike."""

    def call(self, region: CapturedRegion, *call: Any) -> Transition:
        return region.run_by_tape(*call), RecordingNext() if region.is_settled(*call) else self


class RecordingNext(State):
    """The next call of a kind that has settled runs by a tape that also records its ops."""

    def __init__(self, graphs: RegionGraphs | None = None, departed: Caller | None = None):
        """departed: the caller whose graph has just refused the call, because it took other steps than expected."""
        self.graphs = graphs
        self._departed = departed

    def call(self, region: CapturedRegion, *call: Any) -> Transition:
        if is_in_cuda_graph() or (self._departed is None and not region.is_settled(*call)):
            return region.run_by_tape(*call), self
        if region.recordings >= MAX_GRAPHS:
            return region.run_by_tape(*call), Refused(f"it ran different ops in each of {MAX_GRAPHS} recorded calls")
        region.recordings += 1
        try:
            result, frame = region.record(*call)
        except NotCapturable as error:  # nothing has run
            return region.run_by_tape(*call), self._give_up(region, str(error))
        if isinstance(frame, str):
            return result, self._give_up(region, frame)
        if self._departed is not None:
            self._departed.recorded = frame
        if frame is None or self._departed is not None:
            if self.graphs is None:
                return result, RecordingNext() if region.is_settled(*call) else Taping()
            return result, Captured(self.graphs)
        return result, Observing(self.graphs or RegionGraphs(region.shared_graphs(call[0])), frame)

    def _give_up(self, region: CapturedRegion, reason: str) -> State:
        if self.graphs is None:
            return Refused(reason)
        region.recordings, self.graphs.failure = MAX_GRAPHS, reason
        return Captured(self.graphs)


class Captured(State):
    """It runs by its graphs. A call that none of them accepts is recorded."""

    frame: RecordedFrame | None = None

    def __init__(self, graphs: RegionGraphs):
        self.graphs: RegionGraphs = graphs

    def call(self, region: CapturedRegion, *call: Any) -> Transition:
        graphs = self.graphs
        if graphs.shared.draws:
            return region.run_by_tape(*call), Refused(_DRAWS)
        attempt = Attempt(region, self.frame)
        result = (graphs.own or graphs.shared.graphs).run(attempt, *call)
        if result is MISSED:
            return (region.run_by_tape(*call), self) if is_in_cuda_graph() else self._miss(region, attempt, call)
        graphs.misses = graphs.unused = 0
        return result, self._after_hit(attempt)

    def _after_hit(self, attempt: Attempt) -> State:
        return self

    def _miss(self, region: CapturedRegion, attempt: Attempt, call: Sequence[Any]) -> Transition:
        """No graph has run the call."""
        graphs = self.graphs
        graphs.misses += not attempt.waits
        if graphs.misses >= MAX_MISSES:
            reason = region.failure and f" ({region.failure})"
            refused = Refused(f"its last {MAX_MISSES} calls matched none of its captured graphs{reason}")
            return region.run_by_tape(*call), refused
        if region.recordings < MAX_GRAPHS and (attempt.departed or region.is_settled(*call)):
            return RecordingNext(graphs, attempt.departed).call(region, *call)
        return region.run_by_tape(*call), self if attempt.recorded is not None else Captured(graphs)


class Observing(Captured):
    """A frame was recorded. The next call without a graph, and like that frame, has its graph taken."""

    def __init__(self, graphs: RegionGraphs, frame: RecordedFrame):
        super().__init__(graphs)
        self.frame: RecordedFrame = frame
        self._hits = 0

    def _after_hit(self, attempt: Attempt) -> State:
        self._hits += 1
        is_over = attempt.recorded is None or self._hits > MAX_HITS  # the modules may be others by now
        return Captured(self.graphs) if is_over else self

    def _miss(self, region: CapturedRegion, attempt: Attempt, call: Sequence[Any]) -> Transition:
        graphs, shared = self.graphs, self.graphs.shared
        # Its graph would have other shapes than the frame. Wait for a call like the frame, but not for ever.
        if graphs.misses < MAX_MISSES // 2 and kinds_of(*call) != self.frame.variant:
            graphs.misses += not attempt.waits
            return region.run_by_tape(*call), self
        is_of_use = attempt.recorded is not None and attempt.recorded.is_current
        if is_of_use and shared.failures < MAX_FAILURES and graphs.unused < MAX_UNUSED_GRAPHS:
            graphs.unused += 1
            if graphs.own is None and len(shared.graphs.graphs) >= MAX_GRAPHS:
                graphs.own = GuardedGraphs(shared)
            guarded = graphs.own or shared.graphs
            if len(guarded.graphs) < MAX_GRAPHS:
                attempt = Attempt(region, self.frame)
                result = guarded.trace(attempt, *call)
                if result is not MISSED:
                    graphs.misses = 0
                    return result, self if attempt.recorded is not None else Captured(graphs)
        return super()._miss(region, attempt, call)


class Refused(State):
    """It is not captured, and will not be."""

    def __init__(self, reason: str = ""):
        """reason: "" if its rule does not have it captured."""
        self.reason = reason

    def call(self, region: CapturedRegion, *call: Any) -> Transition:
        return region.run_by_tape(*call), self


class CapturedRegion(RegionRecord):
    """A region that runs by a tape until its frames are alike, and then as a captured graph.

    A checkpoint has no tape of its own. One frame of it runs by a tape, to be captured. There everything runs again.
    """

    def __init__(self, tape: TapeRegion, cache: CaptureCache | None, checkpoint: Callable[..., Any] | None = None):
        """cache: shared with other regions under the same policy; None: it is never captured.

        checkpoint: runs ``(function, args, kwargs)`` as a checkpoint, as long as it is not captured.
        """
        super().__init__(tape, is_checkpoint=checkpoint is not None)
        self._run_uncaptured = tape.run if checkpoint is None else checkpoint
        self._cache = cache
        self._frames = 0
        """Its frames that did not run as code."""
        self.recordings = 0
        """Frames whose calls were recorded."""
        self.state: State = Refused() if cache is None or cache.state_hooks else Taping()

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """``function(*args, **kwargs)``."""
        state = self.state
        disturbed = isinstance(state, (RecordingNext, Captured)) and not is_undisturbed()
        if disturbed or local.until_captured == "tapes":
            return self.run_by_tape(function, args, kwargs)
        result, following = state.call(self, function, args, kwargs)
        if self.state is state:  # else it was refused meanwhile
            self.state = following
        return result

    def run_by_tape(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        self._frames += 1
        if self.statistics.regenerated.for_differentiated_gradients:
            self.refuse(DIFFERENTIATED)
        result = self._run_uncaptured(function, args, kwargs)
        if not self.is_checkpoint and (plan := self.tape.plan) is not None:
            self.note_plan(plan)
        return result

    def is_settled(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> bool:
        """Whether its frames that ran calls of this kind were alike so far."""
        if not self.is_checkpoint:
            return self.has_settled(kinds_of(function, args, kwargs))
        return self._frames >= WARMUP_FRAMES or (self._frames > 1 and local.is_settling)

    def record(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[Any, RecordedFrame | str | None]:
        """Run once more by the tape, which also records the calls that a graph of the region must make.

        Returns the result, and the frame; or the reason if it cannot be captured; or None if it was unlike those
        before. Raises ``NotCapturable`` if that is clear before anything runs.
        """
        if self.statistics.regenerated.for_differentiated_gradients:
            self.refuse(DIFFERENTIATED)
            raise NotCapturable(DIFFERENTIATED)
        around = CallSettings.of()
        generators = RngState(find_generators((function, *modules_in(function, args), args, kwargs)))
        counting = {id(runner.statistics): runner.statistics for runner in runners_in(function, args)}
        if self.is_checkpoint and any(each is not self.statistics for each in counting.values()):
            raise NotCapturable(_RULES_INSIDE)
        before = [(each, self.so_far(each)) for each in counting.values()]
        tapes: list[RecordingTape] = []

        def start(region: TapeRegion, variant: Hashable) -> RecordingTape:
            tapes.append(RecordingTape(region, variant))
            return tapes[0]

        result = self.tape.run(function, args, kwargs, start)
        plan, (tape,) = self.tape.plan, tapes
        self.note_kernels(before)
        had_settled = self.is_checkpoint or self.has_settled(self.tape.kind, plan)
        if self.is_checkpoint:
            self.count(plan)
        if plan is not None:
            self.note_plan(plan)
        drawn = generators.drawn()
        reason = _RULES_INSIDE if tape.has_rules_inside else self._holds_more(plan)
        if reason or plan is None or not had_settled:  # the graph has no modules, and so would not follow rules inside
            return result, reason or None
        if tape.recording is None or (drawn is not None and drawn.is_beyond_torch()):
            return result, tape.reason if tape.recording is None else _DRAWS
        return result, RecordedFrame(tape.recording, tape.variant, around)

    def _holds_more(self, plan: SavePlan | None) -> str:
        """Why a checkpoint that is captured would hold more than now, by over an eighth of its inputs; "" if not."""
        if plan is None or not self.is_checkpoint:
            return ""
        kept = [plan.facts[number] for number in plan.kept if not plan.facts[number].is_parameter]
        made, given = ([known for known in kept if (known.step is None) is is_given] for is_given in (False, True))
        if sum(known.nbytes for known in made) <= max(LARGEST_COPY, sum(known.nbytes for known in given) // 8):
            return ""
        reasons = filter(None, [plan.steps[known.step].reason for known in made if known.step is not None])
        return f"captured it would hold more than as a checkpoint: {next(reasons, 'some ops cannot rerun')}"

    def shared_graphs(self, function: Callable[..., Any]) -> CachedGraphs:
        assert self._cache is not None
        return self._cache.graphs_of(getattr(function, "__func__", function), (self.tape.op_policy, self.generates))

    def refuse(self, reason: str) -> None:
        if not isinstance(self.state, Refused):
            self.state = Refused(reason)

    def forget(self, program: Program) -> None:
        self.recordings = 0
        if (graphs := self.state.graphs) is not None:
            graphs.unused = 0
            for graph in graphs.all:
                graph.forget(self, program)

    @property
    def programs(self) -> list[Program]:
        """The programs that run in its place: one of each graph that it has run."""
        graphs = self.state.graphs.all if self.state.graphs is not None else ()
        return [program for graph in graphs if (program := graph.program(self)) is not None]

    @property
    def is_captured(self) -> bool:
        """Whether a program runs in its place."""
        return bool(self.programs)

    @property
    def kernels(self) -> list[GeneratedKernel]:
        return list(dict.fromkeys(kernel for program in self.programs for kernel in program.kernels))

    @property
    def was_tried(self) -> bool:
        """Whether its frames were alike, and so a capture was tried."""
        return self.state.graphs is not None or bool(self.failure)

    @property
    def failure(self) -> str:
        """Why it is not captured, though that was tried; "" if it is."""
        if isinstance(self.state, Refused):
            return self.state.reason
        if self.is_captured or (graphs := self.state.graphs) is None:
            return _UNLIKE if isinstance(self.state, (Taping, RecordingNext)) and self._frames >= MAX_MISSES else ""
        last = next((reason for graph in reversed(graphs.all) if (reason := graph.failure(self))), "")
        return graphs.failure or last or graphs.shared.failure or "its backward has not run yet"
