"""The record of one region: the plans of its frames, their counts, and how its backwards have gone."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from recompute.compiled.generated.switch import Generates
from recompute.compiled.program import Program
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.tape.recorder import TapeRegion
from recompute.engine.thread_state import is_fake, local
from recompute.errors import warn

WARMUP_FRAMES = 3
"""A region is captured after so many frames with the same plan; on tensors without values, after two."""
MAX_PLANS = 48
"""The plans that a region knows: two for each graph that it may have."""
MAX_REPLAYS = 8
"""A region is refused after so many backwards that were not as recorded: each costs another forward."""
MAX_FAILURES = 3
"""How many calls of equal regions torch's frontend may fail on, and how often a region may observe a graph in vain."""

DIFFERENTIATED = "its gradients are differentiated (create_graph=True)"


class Counts(NamedTuple):
    """A frame adds these to the totals of its region; see ``RegionStatistics``."""

    frames: int
    dropped_tensors: int
    dropped_nbytes: int
    kept_nbytes: int
    eager_nbytes: int

    @staticmethod
    def of(plan: SavePlan, *, is_checkpoint: bool = False) -> Counts:
        """A checkpoint counts no inputs. Its code may keep small values that cannot be made again, as masks."""
        if not is_checkpoint:
            return Counts(1, len(plan.dropped), plan.dropped_nbytes, plan.kept_nbytes, plan.eager_nbytes)
        made = {number: known.nbytes for number, known in enumerate(plan.facts) if known.step is not None}
        saved, kept = ({n: made[n] for n in each if n in made} for each in (plan.demanded, plan.kept))
        dropped = [nbytes for number, nbytes in saved.items() if number not in kept]
        return Counts(1, len(dropped), sum(dropped), sum(kept.values()), sum(saved.values()))

    def since(self, earlier: Counts) -> Counts:
        return Counts(*map(operator.sub, self, earlier))

    def add_to(self, statistics: RegionStatistics) -> None:
        statistics.frames += self.frames
        statistics.dropped_tensors += self.dropped_tensors
        statistics.dropped_nbytes += self.dropped_nbytes
        statistics.kept_nbytes += self.kept_nbytes
        statistics.eager_nbytes += self.eager_nbytes
        statistics.dropped_outputs = []


class RegionRecord:
    """The part of a region that its graphs and frames use."""

    def __init__(self, tape: TapeRegion, *, is_checkpoint: bool):
        self.tape = tape
        self.statistics = tape.statistics
        self.is_checkpoint = is_checkpoint
        if is_checkpoint:  # the tape's own: only the regenerations in it are ever read
            tape.statistics = RegionStatistics(self.statistics.name, regenerated=self.statistics.regenerated)
        self.generates = Generates.EXACT
        """The generated kernels that its code may run in."""
        self._plans: dict[tuple[int, Hashable], tuple[SavePlan, int]] = {}
        """The plans that its last frames by the tape have had, and how many frames had each, by the plan's ``id`` and
        the kind of the call."""
        self._kernel_counts: list[tuple[RegionStatistics, Counts]] = []
        """For each kernel, its own counts in the last frame that was recorded, beside the tape's."""
        self._frame_counts: dict[int, list[tuple[RegionStatistics, Counts]]] = {}
        """The counts of each captured frame, by the ``id`` of its plan."""
        self._replays = 0
        """Backwards that were not as recorded."""
        self._first_replays: dict[Program, tuple[int, int]] = {}
        """Programs with such backwards: the number of the frame when that happened first, and how often it has."""
        self._trusted: set[Program] = set()
        """Programs whose backward has come, and has always been as it was recorded."""

    def refuse(self, reason: str) -> None:
        """Have the region run by the tape, or as a checkpoint, from now on."""
        raise NotImplementedError

    def forget(self, program: Program) -> None:
        """Have the region not run a program any more. Another one may be right now."""
        raise NotImplementedError

    def note_plan(self, plan: SavePlan) -> None:
        """A frame of the region's own has had this plan."""
        key = id(plan), self.tape.kind
        self._plans[key] = plan, self._plans.pop(key, (plan, 0))[1] + 1
        if len(self._plans) > MAX_PLANS:
            del self._plans[next(iter(self._plans))]

    def knows(self, plan: SavePlan) -> bool:
        """Whether the region's own frames have had this plan."""
        return any(known is plan for known, _ in self._plans.values())

    def has_settled(self, kind: Hashable, plan: SavePlan | None = None) -> bool:
        """Whether enough frames that ran calls of this kind have had this plan, or any one plan if ``plan`` is None."""
        of_kind = [each for (_, known), each in self._plans.items() if known == kind]
        most = max((count for known, count in of_kind if plan is None or known is plan), default=0)
        return most >= WARMUP_FRAMES - 1 or (most > 0 and local.is_settling)

    def count(self, plan: SavePlan | None) -> None:
        """A frame by the tape, other than the region's own, has ended."""
        for statistics, counts in self._kernel_counts:
            counts.add_to(statistics)
        if not self.is_checkpoint:
            self.statistics.frames += 1
        elif (plan := plan or self.tape.statistics.plan) is not None:  # the latter if the frame was deoptimized
            Counts.of(plan, is_checkpoint=True).add_to(self.statistics)

    def count_frame(self, plan: SavePlan) -> None:
        """A captured frame runs. This counts for its kernels, too: their own runners do not run, and cannot."""
        counted = self._frame_counts.get(id(plan))
        if counted is None:
            own = self.statistics, Counts.of(plan, is_checkpoint=self.is_checkpoint)
            counted = self._frame_counts[id(plan)] = [*self._kernel_counts, own]
        for statistics, counts in counted:
            counts.add_to(statistics)

    def so_far(self, statistics: RegionStatistics) -> Counts:
        """The totals of the region, or of a kernel inside."""
        counts = Counts(*[getattr(statistics, name) for name in Counts._fields])
        if statistics is not self.tape.statistics:
            return counts
        spared = statistics.compressed_nbytes - statistics.codes_nbytes  # each frame counts the codes that it makes
        return counts._replace(kept_nbytes=counts.kept_nbytes + spared)

    def note_kernels(self, before: Iterable[tuple[RegionStatistics, Counts]]) -> None:
        """A frame by the tape has ended. before: the totals of the region and of the kernels inside before it."""
        plan = self.tape.plan or self.tape.statistics.plan  # the latter if the frame was deoptimized
        self._kernel_counts = []
        for statistics, start in before:
            counts = self.so_far(statistics).since(start)
            if statistics is self.tape.statistics and plan is not None:
                counts = counts.since(Counts.of(plan))  # the tape has counted that
            if any(counts):
                self._kernel_counts.append((statistics, counts))
        self._frame_counts.pop(id(self.tape.plan), None)

    def trusts(self, program: Program) -> bool:
        """Whether backward of a program has come here, and has always been as it was recorded."""
        return is_fake() or program in self._trusted

    def count_backward(self, program: Program) -> None:
        """Backward of a program was as it was recorded."""
        if program not in self._first_replays:
            self._trusted.add(program)

    def count_replay(self, program: Program, is_differentiated: bool) -> None:
        """A backward of a program was not as it was recorded, so that forward ran again.

        is_differentiated: whether that backward is differentiated in its turn. Then the region is refused at once:
        as one node it adds up gradients of gradients in another order than plain PyTorch, and rounds otherwise.
        """
        if is_differentiated and self._replays < MAX_REPLAYS:
            warn(_ROUNDS.format(self.statistics.name))
        self._trusted.discard(program)
        self._replays += MAX_REPLAYS if is_differentiated else 1
        if self._replays >= MAX_REPLAYS:
            self.refuse(DIFFERENTIATED if is_differentiated else "its backward differs from step to step")
            return
        first, count = self._first_replays.get(program, (self.statistics.frames, 0))
        self._first_replays[program] = first, count + 1
        is_the_rule = self.statistics.frames - first < 2 * MAX_FAILURES
        if count + 1 == MAX_FAILURES and is_the_rule:
            self.forget(program)


_ROUNDS = (
    "in {}: a gradient is differentiated (create_graph=True) after forward ran as captured code. This second "
    "derivative is right, but its last bits may differ from plain PyTorch's. From now on the module runs uncaptured, "
    "where they do not differ. Add `capture: false` to its rule to have that from the first step on."
)
