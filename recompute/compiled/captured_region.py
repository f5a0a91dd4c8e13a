"""Captured regions: how a region goes on as straight code once its tape has settled.

A region runs by its tape, or as a checkpoint, until some frames were alike. One more frame by the tape
records its calls. ``captured_graph`` then takes the graph of a call, which must make the same calls, and makes a
program of it. A call that the graph's guards accept runs the program. Any other call runs as before. A region that
cannot be captured, or that misses too often, is deoptimized: all its calls run as before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import _has_any_global_hook

from recompute.compiled.autocast_settings import autocast_in_force
from recompute.compiled.captured_graph import (
    MAX_FAILURES,
    CachedGraphs,
    CapturedGraph,
    GuardedGraphs,
    RecordedFrame,
    modules_in,
    runners_in,
    waits_for_another,
)
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.switch import Generates
from recompute.compiled.guards import MISSED
from recompute.compiled.program import Counts, Program
from recompute.compiled.region_tapes import RecordingTape
from recompute.engine.bit_comparison import is_verifying
from recompute.engine.checkpoint.region import StateHook
from recompute.engine.cut.save_plan import LARGEST_COPY, PlanCache, SavePlan
from recompute.engine.modes import count_dispatch_modes, count_function_modes
from recompute.engine.numerics import Numerics
from recompute.engine.random_sources import is_random_source
from recompute.engine.reachable_objects import walk_references
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import RegionStatistics, has_only_our_hooks, top_hooks
from recompute.engine.tape.recorder import TapeRegion
from recompute.engine.thread_state import is_in_cuda_graph, local
from recompute.errors import warn

MAX_HITS = 1
"""After more captured calls than this a recorded frame is thrown away. Two kinds of calls that take turns need 1."""

WARMUP_FRAMES = 3
"""Frames with the same plan after which a region is captured."""
MAX_GRAPHS = 8
"""Plans that a region remembers, and graphs among which it looks for that of a call."""
MAX_SHARED_GRAPHS = 4
"""Graphs that equal regions share. A region that none of these fits gets graphs of its own."""
MAX_UNUSED_GRAPHS = 2
"""Graphs that a region may take in a row without running any of them again. Their guards may hold only once."""
MAX_MISSES = 32
"""Calls in a row without a graph after which a region is deoptimized: each costs a look at the guards."""
MAX_REPLAYS = 8
"""Backwards that were not as recorded after which a region is deoptimized: each costs another forward."""

_RULES_INSIDE = "modules inside of it have rules of their own, or hooks of others or torch.func take what it saves"
_DIFFERENTIATED = "its backward is differentiated in its turn"
_DRAWS = "it draws from a random generator of Python's or of NumPy's"


class CaptureCache:
    """What the regions under one policy share: plans of the cut, captured graphs, and hooks for state.

    With hooks nothing is captured: no guard would tell that the state which they note is another one.
    """

    def __init__(self, state_hooks: Sequence[StateHook] = ()) -> None:
        self.state_hooks = state_hooks
        self.plan_cache = PlanCache()
        self._graphs: dict[Hashable, CachedGraphs] = {}

    def graphs_of(self, function: Hashable, rule: Hashable) -> CachedGraphs:
        """What is shared by the regions that run ``function`` under ``rule``."""
        key = function, rule
        found = self._graphs.get(key)
        return self._graphs.setdefault(key, CachedGraphs()) if found is None else found


class CapturedRegion:
    """A region that runs by a tape until its frames are alike, and then as a captured graph.

    A checkpoint has no tape of its own. One frame of it runs by a tape, to be captured. There everything runs again.
    """

    def __init__(
        self,
        tape: TapeRegion,
        cache: CaptureCache | None,
        checkpoint: Callable[..., Any] | None = None,
    ):
        """cache: what it shares with other regions under the same policy; None: it is never captured.

        checkpoint: runs ``(function, args, kwargs)`` as a checkpoint, as long as it is not captured.
        """
        self.tape = tape
        self.statistics = tape.statistics
        self.is_checkpoint = checkpoint is not None
        self.generates = Generates.EXACT
        """The generated kernels that its code may run in."""
        self._checkpoint = checkpoint
        if checkpoint is not None:
            # The tape's own: nobody asks for more of it than what runs again.
            tape.statistics = RegionStatistics(self.statistics.name, regenerated=self.statistics.regenerated)
        self._frames = 0
        self.recorded: RecordedFrame | None = None
        """The last frame whose calls were recorded. A graph is to be taken of the next call that has none."""
        self._hits = 0
        """Calls since that frame that ran as captured code."""
        self._recorded_of: WeakKeyDictionary[CapturedGraph, RecordedFrame] = WeakKeyDictionary()
        """Frames of graphs whose calls are of another kind than that frame was, as where two kinds take turns."""
        self.departed: CapturedGraph | None = None
        self._cache = None if cache is None or cache.state_hooks else cache
        self._shared_graphs: CachedGraphs | None = None
        self._own_graphs: GuardedGraphs | None = None
        """Graphs of this region alone, if none of those that it shares fits."""
        self._plans: dict[int, tuple[SavePlan, int]] = {}
        """The plans that its frames by the tape have had, by their ``id``, and how many frames had each."""
        self._misses = 0
        """Calls in a row for which there was no graph."""
        self._recordings = 0
        """Frames whose calls were recorded."""
        self._unused = 0
        """Graphs taken since one was last run again."""
        self._refusal = ""
        """Why it is not captured, and will not be; "" as long as it may be."""
        self._not_recorded = ""
        """Why the calls of a frame could not be recorded when that was tried last."""
        self._replays = 0
        """Backwards that were not as recorded."""
        self._first_replays: dict[Program, tuple[int, int]] = {}
        """Programs with such backwards: in which frame that happened first, and how often it has."""
        self._trusted: set[Program] = set()
        """Programs whose backward has come, and has always been as it was recorded."""
        self._kernel_counts: list[tuple[RegionStatistics, Counts]] = []
        """For each kernel, what it has counted in the last frame that was recorded, beside what the tape counts."""
        self._frame_counts: dict[int, list[tuple[RegionStatistics, Counts]]] = {}
        """What each captured frame counts, by the ``id`` of its plan."""

    def count(self, plan: SavePlan | None) -> None:
        """A frame by the tape, other than the region's own, has ended."""
        for statistics, counts in self._kernel_counts:
            counts.add_to(statistics)
        if not self.is_checkpoint:
            self.statistics.frames += 1
        elif (plan := plan or self.tape.statistics.plan) is not None:  # the latter if the frame was deoptimized
            self._counts_of(plan).add_to(self.statistics)

    def count_frame(self, plan: SavePlan) -> None:
        """A captured frame runs. This counts what its kernels hold, too: their own runners do not run, and cannot."""
        counted = self._frame_counts.get(id(plan))
        if counted is None:
            counted = self._frame_counts[id(plan)] = [*self._kernel_counts, (self.statistics, self._counts_of(plan))]
        for statistics, counts in counted:
            counts.add_to(statistics)

    def _counts_of(self, plan: SavePlan) -> Counts:
        """What a frame counts, beside what its kernels do."""
        return Counts.of_checkpoint(plan) if self.is_checkpoint else Counts.of(plan)

    def recorded_for(self, graph: CapturedGraph) -> RecordedFrame | None:
        """A frame that did what a call of the graph is expected to do."""
        frame = self._recorded_of.get(graph, self.recorded)
        return frame if frame is not None and frame.is_current else None

    def forget_recorded(self, graph: CapturedGraph) -> None:
        if self._recorded_of.pop(graph, None) is None:
            self.recorded = None

    @property
    def has_tape(self) -> bool:
        """Whether it runs by a tape as long as it is not captured."""
        return not self.is_checkpoint

    def knows(self, plan: SavePlan) -> bool:
        """Whether the region's own frames have had this plan."""
        return id(plan) in self._plans

    @property
    def was_tried(self) -> bool:
        """Whether its frames were alike, so that it was to be captured."""
        return self._shared_graphs is not None or bool(self._refusal or self._not_recorded)

    @property
    def is_captured(self) -> bool:
        """Whether there is code that runs in its place."""
        return any(graph.program(self) is not None for graph in self._graphs())

    @property
    def kernels(self) -> list[GeneratedKernel]:
        """The generated kernels in which its code runs."""
        programs = [program for graph in self._graphs() if (program := graph.program(self)) is not None]
        return list(dict.fromkeys(kernel for program in programs for kernel in program.kernels))

    def deoptimize(self, reason: str) -> None:
        """Run by the tape, or as a checkpoint, from now on."""
        self._refusal = self._refusal or reason
        self._cache = self._shared_graphs = self._own_graphs = None

    def trusts(self, program: Program) -> bool:
        """Whether backward of a program has come here, and has always been as it was recorded."""
        return program in self._trusted

    def count_backward(self, program: Program) -> None:
        """Backward of a program was as it was recorded."""
        if program not in self._first_replays:
            self._trusted.add(program)

    def count_replay(self, program: Program, is_differentiated: bool) -> None:
        """A backward of a program was not as it was recorded, so that forward ran again.

        is_differentiated: whether that backward is differentiated in its turn. Then the region is deoptimized at once:
        as one node it adds up gradients of gradients in another order than plain PyTorch, and rounds otherwise.
        """
        if is_differentiated and self._replays < MAX_REPLAYS:
            _warn_of_rounding(self.statistics.name)
        self._trusted.discard(program)
        self._replays += MAX_REPLAYS if is_differentiated else 1
        if self._replays >= MAX_REPLAYS:
            self.deoptimize(_DIFFERENTIATED if is_differentiated else "its backward differs from time to time")
            return
        first, count = self._first_replays.get(program, (self.statistics.frames, 0))
        self._first_replays[program] = first, count + 1
        is_the_rule = self.statistics.frames - first < 2 * MAX_FAILURES
        if count + 1 == MAX_FAILURES and is_the_rule:
            for graph in self._graphs():  # another one may do what is done now
                graph.forget(self, program)
            self._recordings = self._unused = 0

    @property
    def failure(self) -> str:
        """Why it is not captured, though that was tried; "" if it is."""
        if reason := self._refusal or self._not_recorded:
            return reason
        if self.is_captured or self._shared_graphs is None:
            return ""
        failures = [reason for graph in self._graphs() if (reason := graph.failure(self))]
        return failures[-1] if failures else self._shared_graphs.failure or "it has not run backward since"

    def _graphs(self) -> list[CapturedGraph]:
        own, shared = self._own_graphs, self._shared_graphs
        return [*(own.graphs if own else ()), *(shared.graphs.graphs if shared else ())]

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """``function(*args, **kwargs)``."""
        shared = self._shared_graphs  # another thread may let go of them meanwhile
        if shared is None or not is_undisturbed():
            return self._by_tape(function, args, kwargs)
        result = self._by_graph(shared, function, args, kwargs)
        if result is MISSED:
            self._misses += not waits_for_another()
            if self._misses >= MAX_MISSES:
                reason = self.failure and f" ({self.failure})"
                self.deoptimize(f"none of its last {MAX_MISSES} calls was like one whose graph was taken{reason}")
            result = self._by_tape(function, args, kwargs)
            self.departed = None
            return result
        self._misses = 0
        return result

    def _by_graph(self, shared: CachedGraphs, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if shared.draws:
            self.deoptimize(_DRAWS)
            return MISSED
        graphs = self._own_graphs or shared.graphs
        result = graphs.run(self, function, args, kwargs)
        if result is not MISSED:
            self._unused = 0
            self._hits += 1
            if self._hits > MAX_HITS:
                self.recorded = None  # the modules may be others by now
        elif (
            (recorded := self.recorded) is not None
            and not shared.has_failed
            and self._unused < MAX_UNUSED_GRAPHS
            and recorded.is_current
        ):
            self._unused += 1
            if graphs is shared.graphs and len(graphs.graphs) >= MAX_SHARED_GRAPHS:
                graphs = self._own_graphs = GuardedGraphs(shared)
            if len(graphs.graphs) < MAX_GRAPHS:
                result = graphs.trace(self, function, args, kwargs)
        return result

    def _by_tape(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if self._cache is not None and self.statistics.regenerated.for_differentiated_gradients:
            self.deoptimize(_DIFFERENTIATED)
        cache = self._cache
        if self._checkpoint is not None:
            self._frames += 1
            if cache is None or self._frames <= WARMUP_FRAMES or self._recordings >= MAX_GRAPHS or not is_undisturbed():
                return self._checkpoint(function, args, kwargs)
            return self._checkpoint_by_tape(cache, function, args, kwargs)
        if (
            cache is None
            or self._recordings >= MAX_GRAPHS
            or not self._has_settled(self.tape.plan)
            or is_in_cuda_graph()
        ):
            result = self.tape.run(function, args, kwargs)
        else:
            result = self._by_recording_tape(cache, function, args, kwargs)
        if (plan := self.tape.plan) is not None:
            _, count = self._plans.get(id(plan), (plan, 0))
            self._plans[id(plan)] = plan, count + 1
            if len(self._plans) > MAX_GRAPHS:
                del self._plans[next(iter(self._plans))]
        return result

    def _has_settled(self, plan: SavePlan | None) -> bool:
        """Whether enough frames have had this plan, or any one plan if ``plan`` is None."""
        counts = [count for known, count in self._plans.values() if plan is None or known is plan]
        return max(counts, default=0) >= WARMUP_FRAMES - 1

    def _checkpoint_by_tape(self, cache: CaptureCache, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        assert self._checkpoint is not None
        if any(runner.statistics is not self.statistics for runner in runners_in(function, args)):
            self._refusal, self._recordings = _RULES_INSIDE, MAX_GRAPHS
            return self._checkpoint(function, args, kwargs)
        result = self._by_recording_tape(cache, function, args, kwargs)
        self.count(plan := self.tape.plan)
        if plan is not None:
            self._plans[id(plan)] = plan, 1
            made = [plan.facts[number] for number in plan.kept if plan.facts[number].step is not None]
            if sum(known.nbytes for known in made) > LARGEST_COPY:
                reasons = [plan.steps[known.step].reason for known in made if known.step is not None]
                self._refusal = f"a checkpoint holds less: {next(filter(None, reasons), 'some ops do not run again')}"
                self.recorded, self._recordings = None, MAX_GRAPHS
        return result

    def _by_recording_tape(
        self,
        cache: CaptureCache,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Run once more by the tape, which also records the calls that a graph of the region must make."""
        self._recordings += 1
        departed, self.recorded = self.departed, None
        numerics, autocast = Numerics(), autocast_in_force()
        reached = walk_references((function, *modules_in(function, args), args, kwargs))
        generators = RngState({id(value): value for value in reached if is_random_source(value)}.values())
        counting = {id(runner.statistics): runner.statistics for runner in runners_in(function, args)}
        before = [Counts.so_far(each) for each in counting.values()]
        tapes: list[RecordingTape] = []

        def start(region: TapeRegion, variant: Hashable) -> RecordingTape:
            tapes.append(RecordingTape(region, variant))
            return tapes[0]

        result = self.tape.run(function, args, kwargs, start)
        plan = self.tape.plan
        counted = (plan or self.tape.statistics.plan) if tapes else None  # the latter if the frame was deoptimized
        self._kernel_counts = []
        for each, start_of in zip(counting.values(), before, strict=True):
            counts = Counts.so_far(each).since(start_of)
            if each is self.tape.statistics and counted is not None:
                counts = counts.since(Counts.of(counted))  # the tape has counted that
            if any(counts):
                self._kernel_counts.append((each, counts))
        self._frame_counts.pop(id(plan), None)
        if tapes and tapes[0].has_rules_inside:  # the graph has no modules, and so would not follow these rules
            self._refusal, self._recordings = _RULES_INSIDE, MAX_GRAPHS
            return result
        if tapes and plan is not None and (self.is_checkpoint or self._has_settled(plan)):
            recording, self._not_recorded = tapes[0].recording, tapes[0].reason
            if (drawn := generators.drawn()) is not None and drawn.is_beyond_torch():
                recording, self._not_recorded = None, _DRAWS
            if recording is None:
                self._recordings = MAX_GRAPHS
                return result
            frame = RecordedFrame(recording, tapes[0].variant, numerics, autocast, is_sure=departed is not None)
            if departed is None:
                self.recorded, self._hits = frame, 0
            else:
                self._recorded_of[departed] = frame
            if self._shared_graphs is None:
                function = getattr(function, "__func__", function)
                self._shared_graphs = cache.graphs_of(function, (self.tape.op_policy, self.generates))
        return result


def _warn_of_rounding(name: str) -> None:
    warn(
        f"in {name}: gradients are differentiated in their turn, of a forward that has run as captured code. The "
        "gradients of gradients are right, but may differ in the last bits from those of plain PyTorch. From now on "
        "the module stays on the tape, where they do not differ; with `capture: false` in its rule it does from the "
        "first step."
    )


def is_undisturbed() -> bool:
    """Whether nothing around a region has a say in how its ops run or what becomes of what they save."""
    if (
        local.active_frames
        or count_dispatch_modes()
        or count_function_modes()
        or is_verifying()
        or _has_any_global_hook()
    ):
        return False
    return (
        has_only_our_hooks(top_hooks())
        and not torch.is_anomaly_enabled()
        and ((autocast := autocast_in_force()) is None or autocast.is_known)
        and not is_in_cuda_graph()  # in which no state of a generator can be read
    )
