"""Captured regions: how a region whose tape has settled goes on without one, as a node that runs straight code.

torch's frontend takes a graph of the region's forward, with guards on all of the Python world that it depends on. One
frame of that graph is run by the tape, as the region itself was before, and watched, and so is its backward. What ran
is written as code: forward, the cut's way back, and backward, op by op. From then on a call that the guards accept runs
that code. Any other call runs by the tape, and so does a region that cannot be captured.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from recompute.compiled.captured_function import CapturedFunction, Frame
from recompute.compiled.guards import MISSED, GuardedCalls, asks_about_tracing
from recompute.compiled.observation import GraphTape, Observation, RecordingTape
from recompute.compiled.program import Counts, Program
from recompute.compiled.recording import Departure, Recording
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.checkpoint.reach import behind
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.save_plan import LARGEST_COPY, Plan, PlanCache
from recompute.engine.modes import count_dispatch_modes, count_function_modes
from recompute.engine.numerics import Numerics
from recompute.engine.recipes import is_verifying, local
from recompute.engine.rng import RngState, is_source
from recompute.engine.saved_tensors import Owner, top_hooks, unpack_saved
from recompute.engine.tape.exposed import expose_arrays, is_shared
from recompute.engine.tape.recorder import TapeRegion
from recompute.errors import warn

SETTLED = 3
"""Frames of one plan after which a region is captured."""
TRIES = 3
"""Calls of regions alike that torch's frontend may fail on, and frames of one graph that may be watched in vain."""
MOST = 8
"""Plans that a region remembers, and graphs that are looked through for a call."""
SHARED = 4
"""Graphs that regions alike share; one that none of them fits has graphs of its own."""
UNUSED = 2
"""Graphs that a region may take one after the other without running any of them again: its guards hold for once."""
MISSES = 32
"""Calls in a row without a graph after which a region is not captured any more: each costs a look at the guards."""
REPLAYS = 8
"""Backwards that were not as recorded after which a region stays on the tape: each costs another forward."""


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
        self.draws = False
        """Whether what a graph was taken of draws from Python's generator or NumPy's."""
        self.programs: dict[Hashable, list[Program]] = {}
        """By the graph, and by what it is given."""
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
        self._traces = 0
        """Traces that are going on."""
        self._substitutes: dict[Any, Any] = {}
        """What the graph is to call in the place of functions, as kernels stand in for them."""
        self.graphs: list[CapturedGraph] = []

    def trace(self, region: CapturedRegion, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run a call whose graph is taken first, or say ``MISSED``, and nothing has run."""
        generators = RngState()
        result = self._run(self._trace, region, function, args, kwargs)
        if result is MISSED and (drawn := generators.drawn()) is not None:  # before it came to the graph
            drawn.restore()
            self._alike.draws = True
        return result

    def _trace(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        with self._lock:
            if self._calls is None:
                self._calls = GuardedCalls(self._compile)
            self._substitutes = {
                original: ours
                for runner in _runners_in(function, args)
                for original, ours in getattr(runner, "substitutes", {}).items()
            }
            self._traces += 1
        try:
            return self._calls.trace(function, args, kwargs, self._substitutes)
        finally:
            self._traces -= 1

    def run(self, region: CapturedRegion, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run a call by the graph that its guards accept, or say ``MISSED``, and nothing has run."""
        if self._calls is None:
            _running.waits = self._traces > 0
            return MISSED
        result = self._run(self._calls.run, region, function, args, kwargs)
        _running.waits = _running.waits or self._traces > 0  # on another thread
        return result

    def _run(self, call: Callable[..., Any], region: CapturedRegion, *arguments: Any) -> Any:
        _running.region, _running.has_begun, _running.waits = region, False, False
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
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.target = self._substitutes.get(node.target, node.target)
        module.recompile()
        unfit = "it asks whether it is compiled" if asks_about_tracing() else _unfit_node(module)
        graph = CapturedGraph(self._alike, module, unfit or "")
        self.graphs.append(graph)
        return graph.run


class _Running(threading.local):
    region: CapturedRegion | None = None
    has_begun = False
    waits = False
    """Whether a call has no code because another one is traced or watched."""


_running = _Running()


class Refusal(Exception):
    """A graph does not run this call; nothing of it has run."""


class CapturedGraph:
    """A graph of a region, and the programs that were made of it: one for each plan."""

    def __init__(self, alike: Alike, module: torch.fx.GraphModule, failure: str):
        """failure: why no program can be made of it, if so."""
        self._alike = alike
        self._graph = module.forward
        self._code = module.code
        self._programs: list[Program] = []
        self._watched: weakref.ref[Observation] | None = None
        self._failures = 0
        self.failure = failure
        """Why no program was made of it when that was tried last."""
        self.is_given_up = bool(failure)

    def program(self, region: CapturedRegion) -> Program | None:
        """The one that does in the region what a frame of its own has done."""
        return next((program for program in self._programs if region.can_run(program)), None)

    def run(self, *given: Any) -> Any:
        """The outputs of the graph on the inputs that torch's frontend has found for it."""
        region = _running.region
        assert region is not None
        numerics = Numerics()
        program = _fitting(self._programs, region, numerics)
        if program is None and not self.is_given_up and region.recording is not None:
            program = self._known(region, given, numerics)
            if program is None:
                return self._watch(region, given, region.recording)
        if program is None or any(map(is_shared, given)):
            _running.waits = program is None and self._is_watched()
            raise Refusal
        for position, offset in program.offsets:
            if given[position].storage_offset() != offset:
                raise Refusal
        _running.has_begun = True
        region.count_inside()
        frame = Frame(
            program,
            self._graph,
            region.owner,
            given,
            numerics,
            region.count_replay,
            is_checkpoint=region.is_checkpoint,
        )
        return CapturedFunction.apply(frame, program.fixed, *[given[position] for position in program.edges])

    def _known(self, region: CapturedRegion, given: Sequence[Any], numerics: Numerics) -> Program | None:
        """The program that was made of the same graph of another region."""
        program = _fitting(self._alike.programs.get(self._key(given), ()), region, numerics)
        if program is not None:
            self._programs.append(program)
        return program

    def _key(self, given: Sequence[Any]) -> Hashable:
        return self._code, tuple([_kind(value) for value in given])

    def _watch(self, region: CapturedRegion, given: Sequence[Any], expected: Recording) -> Any:
        """Run the graph by the tape, which records what runs; it must be what the region itself does."""
        if self._is_watched():
            _running.waits = True
            raise Refusal
        region.recording = None  # it serves for one frame: who never runs backward is not to be watched for ever
        learn = functools.partial(self._learn, self._key(given))
        expose_arrays(given)
        state = _GlobalState()
        try:
            if not all(isinstance(value, Tensor) for value in given):
                raise Departure("its graph is given what is no tensor")
            seen = Observation(given, expected, learn)
            self._watched = weakref.ref(seen)
            tape = GraphTape(region.tape, None, seen)
            with tape:
                outputs = self._graph(*given)
                seen.end_forward()
                if not all(isinstance(output, Tensor) for output in outputs):
                    raise Departure("its graph gives what is no tensor")
        except Exception as error:  # of the code itself, too: by the tape it is raised again
            state.put_back()
            learn(_first_line(error))
            raise Refusal from None
        _running.has_begun = True
        plan = tape.record.finish(tape.plain(tree_leaves(outputs)))
        region.count(plan)
        if plan is None or not region.knows(plan):
            learn("its graph saves other tensors than its forward does")
            return outputs
        return seen.finish(plan, given, outputs)

    def _is_watched(self) -> bool:
        """Whether a frame of it is, until its backward has run or its graph has died."""
        return self._watched is not None and self._watched() is not None

    def _learn(self, key: Hashable, result: Program | str) -> None:
        """What was watched has ended."""
        self._watched = None
        if isinstance(result, Program):
            self._programs.append(result)
            self._alike.programs.setdefault(key, []).append(result)
            self.failure = ""
            return
        self._failures += 1
        self.failure = result
        self.is_given_up = self._failures >= TRIES


_DRAWS = "it draws from a random generator of Python's or of NumPy's"


class _GlobalState:
    """What code that is left in its middle may leave behind: random states, and switches of torch."""

    def __init__(self) -> None:
        self._rng = RngState()
        self._numerics = Numerics()
        self._grad = torch.is_grad_enabled()
        self._autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
        self._cache = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()

    def put_back(self) -> None:
        self._rng.restore()
        self._numerics.put()
        torch.set_grad_enabled(self._grad)
        for device, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()


_DEVICES = ("cpu", "cuda")


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


class CapturedRegion:
    """A region that runs by a tape until that has settled, and is captured then.

    A checkpoint has no tape. It is run by one, in which all runs again, only to be captured.
    """

    def __init__(self, tape: TapeRegion, shared: Shared | None, checkpoint: Callable[..., Any] | None = None):
        """shared: what it shares with other regions under the same policy; None: it is never captured.

        checkpoint: runs ``(function, args, kwargs)`` as a checkpoint, as long as it is not captured.
        """
        self.tape = tape
        self.owner = tape.owner
        self.is_checkpoint = checkpoint is not None
        if checkpoint is not None:
            tape.owner = Owner(self.owner.name)  # whose totals are a tape's, and concern nobody
        self._checkpoint = checkpoint
        self._frames = 0
        self.recording: Recording | None = None
        """What the last frame's forward did, where that has just settled."""
        self._shared = shared
        self._alike: Alike | None = None
        self._own: Graphs | None = None
        """Graphs of this region alone, if none of those that it shares fits."""
        self._settled: dict[int, tuple[Plan, int]] = {}
        self._misses = 0
        self._recorded = 0
        self._unused = 0
        self._unfit = self._unrecorded = ""
        self._replays = 0
        self._differing: dict[Program, tuple[int, int]] = {}
        """Programs whose backward was not as recorded: the first frame of which it was not, and how many."""
        self._unlike: set[Program] = set()
        """Those of which it mostly is not, in this region."""
        self._inside: list[tuple[Owner, int]] = []

    def count(self, plan: Plan | None) -> None:
        """A frame by the tape, other than the region's own, has ended."""
        self.count_inside()
        if not self.is_checkpoint:
            self.owner.frames += 1
        elif plan is not None:
            Counts.of(plan, is_checkpoint=True).add_to(self.owner)

    def count_inside(self) -> None:
        """What kernels inside count in a frame, beside what the tape does."""
        for owner, nbytes in self._inside:
            owner.eager_nbytes += nbytes

    def can_run(self, program: Program) -> bool:
        """Whether it does what a frame of the region's own has done, and knows the gradients that come."""
        return program not in self._unlike and self.knows(program.plan)

    def knows(self, plan: Plan) -> bool:
        """Whether the region's own frames have had this plan."""
        return id(plan) in self._settled

    @property
    def was_tried(self) -> bool:
        """Whether it had settled, so that it was to be captured."""
        return self._alike is not None or bool(self._unfit or self._unrecorded)

    @property
    def is_captured(self) -> bool:
        """Whether there is code that runs in its place."""
        return any(graph.program(self) is not None for graph in self._graphs())

    def _give_up(self, reason: str) -> None:
        """Run by the tape, or as a checkpoint, from now on."""
        self._unfit = self._unfit or reason
        self._shared = self._alike = self._own = None

    def count_replay(self, program: Program, is_differentiated: bool) -> None:
        """A backward of a program was not as recorded. By a tape it is what it is in plain PyTorch.

        is_differentiated: here that is no matter of time alone. The gradients of gradients are sums of other parts than
        there, as the region's node is one, and so rounded otherwise.
        """
        if is_differentiated and self._replays < REPLAYS:
            _warn_of_rounding(self.owner.name)
        self._replays += REPLAYS if is_differentiated else 1
        if self._replays >= REPLAYS:
            self._give_up("its backward is differentiated in its turn, or differs from time to time")
            return
        first, count = self._differing.get(program, (self.owner.frames, 0))
        self._differing[program] = first, count + 1
        if count + 1 == TRIES and self.owner.frames - first < 2 * TRIES:  # as a rule: it is of a region alike
            self._unlike.add(program)
            self._recorded = self._unused = 0

    @property
    def failure(self) -> str:
        """Why it is not captured, though that was tried; "" if it is."""
        if reason := self._unfit or self._unrecorded:
            return reason
        if self.is_captured or self._alike is None:
            return ""
        failures = [graph.failure for graph in self._graphs() if graph.failure]
        return failures[-1] if failures else self._alike.failure or "it has not run backward since"

    def _graphs(self) -> list[CapturedGraph]:
        own, alike = self._own, self._alike
        return [*(own.graphs if own else ()), *(alike.graphs.graphs if alike else ())]

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict, variant: Hashable = None) -> Any:
        """``function(*args, **kwargs)``; ``variant`` as for a ``TapeRegion``."""
        alike = self._alike  # which another thread may let go of
        if alike is None or not is_undisturbed():
            return self._by_tape(function, args, kwargs, variant)
        result = self._by_graph(alike, function, args, kwargs)
        if result is MISSED:
            self._misses += not _running.waits
            if self._misses >= MISSES:
                reason = self.failure and f" ({self.failure})"
                self._give_up(f"none of its last {MISSES} calls was like one whose graph was taken{reason}")
            return self._by_tape(function, args, kwargs, variant)
        self._misses = 0
        return result

    def _by_graph(self, alike: Alike, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        if alike.draws:
            self._give_up(_DRAWS)
            return MISSED
        graphs = self._own or alike.graphs
        result = graphs.run(self, function, args, kwargs)
        if result is not MISSED:
            self._unused = 0
        elif self.recording is not None and not alike.is_given_up and self._unused < UNUSED:
            self._unused += 1
            if graphs is alike.graphs and len(graphs.graphs) >= SHARED:
                graphs = self._own = Graphs(alike)
            if len(graphs.graphs) < MOST:
                result = graphs.trace(self, function, args, kwargs)
        return result

    def _by_tape(self, function: Callable[..., Any], args: tuple, kwargs: dict, variant: Hashable) -> Any:
        self.recording = None
        shared = self._shared
        if self._checkpoint is not None:
            self._frames += 1
            if shared is None or self._frames <= SETTLED or self._recorded >= TRIES or not is_undisturbed():
                return self._checkpoint(function, args, kwargs)
            return self._checkpoint_by_tape(shared, function, args, kwargs)
        if shared is None or self._recorded >= MOST or not self._has_settled(self.tape.plan):
            result = self.tape.run(function, args, kwargs, variant)
        else:
            result = self._by_recording_tape(shared, function, args, kwargs, variant)
        if (plan := self.tape.plan) is not None:
            _, count = self._settled.get(id(plan), (plan, 0))
            self._settled[id(plan)] = plan, count + 1
            if len(self._settled) > MOST:
                del self._settled[next(iter(self._settled))]
        return result

    def _has_settled(self, plan: Plan | None) -> bool:
        """Whether frames have had a plan often enough; of a frame without one, any plan."""
        counts = [count for known, count in self._settled.values() if plan is None or known is plan]
        return max(counts, default=0) >= SETTLED - 1

    def _checkpoint_by_tape(self, shared: Shared, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        assert self._checkpoint is not None
        if any(runner.owner is not self.owner for runner in _runners_in(function, args)):
            self._unfit, self._recorded = "modules inside of it have rules of their own", TRIES
            return self._checkpoint(function, args, kwargs)
        result = self._by_recording_tape(shared, function, args, kwargs, None)
        if (plan := self.tape.plan) is not None:
            self.count(plan)
            self._settled = {id(plan): (plan, 1)}
            made = [plan.facts[number] for number in plan.kept if plan.facts[number].step is not None]
            if sum(known.nbytes for known in made) > LARGEST_COPY:
                reasons = [plan.steps[known.step].reason for known in made if known.step is not None]
                self._unfit = f"a checkpoint holds less: {next(filter(None, reasons), 'some ops do not run again')}"
                self.recording, self._recorded = None, TRIES
        return result

    def _by_recording_tape(
        self,
        shared: Shared,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        variant: Hashable,
    ) -> Any:
        """A last time by the tape, which records what a graph of the region must do."""
        self._recorded += 1
        reached = behind((function, *_modules_in(function, args), *tree_leaves((args, kwargs))))
        generators = RngState({id(value): value for value in reached if is_source(value)}.values())
        owners = [runner.owner for runner in _runners_in(function, args)]
        before = [owner.eager_nbytes for owner in owners]
        tapes: list[RecordingTape] = []

        def start(region: TapeRegion, variant: Hashable) -> RecordingTape:
            tapes.append(RecordingTape(region, variant))
            return tapes[0]

        result = self.tape.run(function, args, kwargs, variant, start)
        counted = [(owner, owner.eager_nbytes - start) for owner, start in zip(owners, before, strict=True)]
        self._inside = [(owner, nbytes) for owner, nbytes in counted if nbytes and owner is not self.owner]
        plan = self.tape.plan
        if tapes and plan is not None and (self.is_checkpoint or self._has_settled(plan)):
            self.recording, self._unrecorded = tapes[0].recording, tapes[0].reason
            if (drawn := generators.drawn()) is not None and drawn.is_beyond_torch():
                self.recording, self._unrecorded = None, _DRAWS
            if self.recording is None:
                self._recorded = MOST
                return result
            if self._alike is None:
                self._alike = shared.alike((getattr(function, "__func__", function), self.tape.op_policy))
        return result


def _modules_in(function: Callable[..., Any], args: tuple) -> Iterable[nn.Module]:
    """The module whose forward ``function`` is, or is given, and those inside of it."""
    module = next((m for m in (getattr(function, "__self__", None), *args[:1]) if isinstance(m, nn.Module)), None)
    return () if module is None else module.modules()


def _runners_in(function: Callable[..., Any], args: tuple) -> Iterator[Any]:
    """What runs the modules inside of the one whose forward ``function`` is, or is given."""
    for inside in _modules_in(function, args):
        runner = vars(inside).get(RUNNER)
        while getattr(runner, "owner", None) is not None:
            yield runner
            runner = getattr(runner, "inner", None)


def _warn_of_rounding(name: str) -> None:
    warn(
        f"in {name}: gradients are differentiated in their turn, of a forward that has run as captured code. The "
        "gradients of gradients are right, but may differ in the last bits from those of plain PyTorch. From now on "
        "the module stays on the tape, where they do not differ; with `capture: false` in its rule it does from the "
        "first step."
    )


def _fitting(programs: Iterable[Program], region: CapturedRegion, numerics: Numerics) -> Program | None:
    """The program that does in the region what its own frames do, and was made under such settings of torch."""
    return next((each for each in programs if region.can_run(each) and numerics.are(each.numerics)), None)


def _kind(value: Any) -> Hashable:
    """All of a tensor that code which was made for it depends on."""
    layout = Layout.of(value)
    return layout, value.device, value.requires_grad, isinstance(value, nn.Parameter)


def is_undisturbed() -> bool:
    """Whether nothing around a region has a say in how its ops run or what becomes of what they save."""
    if local.spans or count_dispatch_modes() or count_function_modes() or is_verifying() or _has_any_global_hook():
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
