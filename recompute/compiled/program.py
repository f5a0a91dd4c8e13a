"""A captured region: its forward and its backward as code, what the one leaves for the other, and how it is written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tag, Tensor

from recompute.compiled.autocast_settings import Autocast
from recompute.compiled.codegen import Code, GeneratedCode, code_that_holds
from recompute.compiled.function_calls import FunctionBackward, FunctionCall
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.row_ops import ROW_OPS
from recompute.compiled.recording import Call, NotCapturable, Recording, Use
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import Kind, facts, facts_of_call
from recompute.engine.cut.save_plan import LARGEST_COPY, SavePlan
from recompute.engine.numerics import Numerics
from recompute.engine.saved_tensors import RegionStatistics
from recompute.engine.tape.functions import FunctionOp
from recompute.engine.tape.op_arguments import generators_of

SMALL = 8
"""What is left for the region's own backward is at least so many times smaller than the outputs that came back."""

ANY = -1
"""The offset of a gradient that may begin anywhere in its storage: the code counts from where it begins."""


class Counts(NamedTuple):
    """What a frame adds to the totals of its region; see ``RegionStatistics``."""

    frames: int
    dropped_tensors: int
    dropped_nbytes: int
    kept_nbytes: int
    eager_nbytes: int

    @staticmethod
    def of(plan: SavePlan) -> Counts:
        return Counts(1, len(plan.dropped), plan.dropped_nbytes, plan.kept_nbytes, plan.eager_nbytes)

    @staticmethod
    def of_checkpoint(plan: SavePlan) -> Counts:
        """As a checkpoint counts, for which a region's inputs never count.

        Its code may keep what cannot run again, if that is small: the mask of a dropout, say.
        """
        made = {number: known.nbytes for number, known in enumerate(plan.facts) if known.step is not None}
        saved, kept = ({n: made[n] for n in each if n in made} for each in (plan.demanded, plan.kept))
        dropped = [nbytes for number, nbytes in saved.items() if number not in kept]
        return Counts(1, len(dropped), sum(dropped), sum(kept.values()), sum(saved.values()))

    @staticmethod
    def so_far(statistics: RegionStatistics) -> Counts:
        """The totals themselves."""
        return Counts(*[getattr(statistics, name) for name in Counts._fields])

    def since(self, earlier: Counts) -> Counts:
        return Counts(*map(operator.sub, self, earlier))

    def add_to(self, statistics: RegionStatistics) -> None:
        statistics.frames += self.frames
        statistics.dropped_tensors += self.dropped_tensors
        statistics.dropped_nbytes += self.dropped_nbytes
        statistics.kept_nbytes += self.kept_nbytes
        statistics.eager_nbytes += self.eager_nbytes
        statistics.dropped_outputs = []


@dataclass(frozen=True, eq=False)
class DroppedOutputs:
    """What gives back the outputs of a region that others have saved and dropped.

    The backward of those others comes before the region's own, which reads some of what gave the outputs. What is small
    is left for it: the statistics of a norm's rows, say. The rest would wait through backwards of others, where memory
    is at its peak, and runs again.
    """

    run: GeneratedCode
    """``(held, kept, states) -> (outputs, left)``."""
    values: tuple[tuple[int, int], ...]
    """The positions of the outputs that it gives back, and their values in the plan."""
    held: tuple[int, ...]
    """The indices of what it takes of what is held."""
    kept: tuple[int, ...]
    """The indices of what it takes of what is kept."""
    reruns: int
    """How many ops it runs."""
    rerun_nbytes: int
    """The bytes that these give."""
    backward: GeneratedCode
    """``(held, kept, states, gradients, left) -> contributions``: the region's backward after it."""
    backward_reruns: int
    backward_nbytes: int


@dataclass(frozen=True, eq=False)
class Program:
    """What runs in the place of a region."""

    plan: SavePlan
    forward: GeneratedCode
    """``(name, objects, *given, *casts) -> (outputs, kept, states)``."""
    backward: GeneratedCode
    """``(held, kept, states, gradients) -> contributions``."""
    under_settings: GeneratedCode
    """``(settings, held, kept, states, gradients)``: ``backward``, with what runs again in the span of ``settings``."""
    outputs: DroppedOutputs | None
    """What gives back the outputs that others have saved and dropped; None if there can be none."""
    edges: tuple[int, ...]
    """The positions of the inputs that get a contribution to their gradient, in the order in which these come."""
    held: tuple[tuple[int, str], ...]
    """The positions of the inputs that backward reads, and how each is held.

    A parameter is held "itself", or the "memory" that it has now. Of another input a "copy" is held, or autograd has
    "saved" it.
    """
    hold: Callable[..., Any]
    """``(*given) -> (saved, held, others)``: what a frame keeps of the inputs."""
    plain: tuple[int, ...]
    """The positions of the inputs that are no parameters."""
    others: tuple[tuple[int, str], ...]
    """The positions of all parameters, and of other inputs that backward does not read, in case forward runs again.

    "itself": a parameter. "memory": its memory is held, as several outputs take gradients, and backward may come with
    those of others than before. "weak": it is held weakly, and if it is gone, backward is refused.
    """
    shared: tuple[tuple[int, int], ...]
    """Pairs of the positions of inputs that must share memory."""
    shared_gradients: tuple[tuple[int, int], ...]
    """Pairs of outputs whose gradients must."""
    offsets: tuple[tuple[int, int], ...]
    """The positions of inputs, and the offset in its storage that each must have, as the region counts from there."""
    shown: tuple[int, ...]
    """The indices of what is kept and shares memory with an output, so that others may write to it."""
    numerics: Numerics
    """torch's settings, which may decide which ops a function calls."""
    autocast: Autocast | None
    """The autocast that forward ran under. Its casts are ops of the program, which runs without it."""
    backward_autocast: Autocast | None
    """The one that backward ran under."""
    cached: tuple[int, ...]
    """The positions of the inputs that autocast casts but once, if it casts them."""
    casts: tuple[int, ...]
    """The positions of the parameters that are given as autocast has cast them, too. Their casts are further inputs."""
    gradients: tuple[Layout | None, ...]
    """The layout of each output's gradient, whose offset may be ``ANY``; None if it has none."""
    reaches: tuple[frozenset[int], ...]
    """For each output, the positions of the inputs that its gradient reaches."""
    fixed: tuple[int, ...]
    """Which outputs take no gradient."""
    draws_from: tuple[Any, ...] | None
    """The generators beside torch's own from which forward may draw random numbers; None if it draws none."""
    reruns: int
    rerun_nbytes: int
    kernels: tuple[GeneratedKernel, ...]
    """The generated kernels that run in it."""

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether the inputs lie in memory as the code expects."""
        return all([given[position].storage_offset() == offset for position, offset in self.offsets]) and all(
            [share_memory(given[one], given[other]) for one, other in self.shared]
        )


def share_memory(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.untyped_storage()._cdata == other.untyped_storage()._cdata


@dataclass
class ProgramWriter:
    """Makes a program of what was recorded."""

    plan: SavePlan
    recording: Recording
    steps: int
    """How many of the calls were forward's."""
    results: Sequence[Use]
    """The region's outputs."""
    gradients: Sequence[int | None]
    """The buffer of each output's gradient."""
    reaches: Sequence[frozenset[int]]
    """For each output, the positions of the inputs that its gradient reaches."""
    contributions: Sequence[tuple[int, Use | None]]
    """For each contribution, the input whose gradient it goes to, and the tensor; None if it has not come."""
    parameters: Collection[int]
    """The positions of the parameters among the inputs."""
    saved_views: Collection[int]
    """The buffers of the parameters whose views autograd has saved."""
    fixed: Collection[int]
    """The outputs that take no gradient."""
    numerics: Numerics
    autocast: Autocast | None
    backward_autocast: Autocast | None
    cached: tuple[int, ...]
    casts: Mapping[int, int]
    """The buffers of what autocast has cast and cached, and the positions of the parameters, in order."""
    functions: Mapping[int, FunctionCall]
    """The calls of forward that are of custom Functions."""

    def __post_init__(self) -> None:
        self._forward = self.recording.calls[: self.steps]
        self._backward = self.recording.calls[self.steps :]
        self._differentiable = {given for given, _ in self.contributions}
        self._kept: dict[int, None] = {}
        self._held: dict[int, None] = {}
        self._again: dict[int, None] = {}
        """The calls of forward that run again, in the order in which backward needs them."""
        self._differentiated = {call.op.call for call in self._backward if type(call.op) is FunctionBackward}
        """The calls of forward that are of custom Functions, and whose backward runs."""

    def would_write(self, program: Program) -> bool:
        """Whether a program is what this would write. It was made of the same graph, for inputs of the same kinds."""
        return (
            program.plan is self.plan
            and program.numerics.are(self.numerics)
            and (program.autocast, program.backward_autocast) == (self.autocast, self.backward_autocast)
            and (program.cached, program.casts) == (self.cached, tuple(self.casts.values()))
            and program.edges == self._edges
            and program.gradients == self._gradient_layouts
            and (program.shared, program.shared_gradients) == (self._shared, self._shared_gradients)
        )

    @property
    def _shared(self) -> tuple[tuple[int, int], ...]:
        pairs = [(buffer.given, self.recording.buffers[buffer.root].given) for buffer in self.recording.buffers]
        return tuple([(one, root) for one, root in pairs if one is not None and root is not None and one != root])

    @property
    def _shared_gradients(self) -> tuple[tuple[int, int], ...]:
        roots = [None if number is None else self.recording.buffers[number].root for number in self.gradients]
        pairs = [(output, self.gradients.index(root)) for output, root in enumerate(roots) if root is not None]
        return tuple([(one, root) for one, root in pairs if one != root])

    @property
    def _edges(self) -> tuple[int, ...]:
        return tuple([given for given, _ in self.contributions])

    @property
    def _gradient_layouts(self) -> tuple[Layout | None, ...]:
        return tuple([None if number is None else self._gradient_layout(number) for number in self.gradients])

    def _gradient_layout(self, number: int) -> Layout:
        layout = self.recording.buffers[number].layout
        return layout if number in self.recording.placed else layout._replace(offset=ANY)

    def _deciding(self) -> set[int]:
        """The rows' sums and softmaxes that decide something when both run again, as which expert takes a token.

        Forward and backward have to decide alike, so that both take ATen's bits.
        """
        found: set[int] = set()
        sources: dict[int, set[int]] = {}
        for index, call in enumerate(self._forward):
            if index not in self.plan.rerun_set:
                continue
            own = set().union(*[sources.get(use.buffer, ()) for use in call.uses()])
            made = self._made([call])
            if not all(self.recording.buffers[number].layout.dtype.is_floating_point for number in made):
                found |= own
            sources |= dict.fromkeys(made, own | set(made) if call.op in ROW_OPS else own)
        return found

    def program(self) -> Program:
        self.recording.stable = self._deciding()
        backward = self._write_backward()
        again = self._write_outputs()
        forward, states = self._write_forward()
        buffers = self.recording.buffers
        how = self._how_held(backward, again)
        held, kept = [name for _, _, name in how], [f"t{number}" for number in self._kept]
        drawn = list(states.values())
        grads = ", ".join(["_" if number is None else f"t{number}" for number in self.gradients])
        head = [*_unpacked(held=held, kept=kept, states=drawn), f"{grads}, = gradients"]
        head += ["held.clear()", "kept.clear()", "gradients.clear()"]
        # Whoever reads one that shares memory reads the first of these.
        head += [f"del t{number}" for number in self.gradients if number is not None and buffers[number].root != number]
        names, result = self._contributions(backward)
        ways = tuple([(position, how) for position, how, _ in how])
        others = self._others({position for position, _ in ways})
        positions = [buffer.given for buffer in buffers if buffer.given is not None]
        whole = backward.compiled(["def run(held, kept, states, gradients):", *head], result, names, held + kept)
        return Program(
            plan=self.plan,
            forward=forward,
            backward=whole,
            under_settings=backward.compiled(
                ["def run(settings, held, kept, states, gradients):", *head],
                result,
                names,
                held + kept,
                again_first=True,
            ),
            outputs=None if again is None else self._dropped_outputs(*again, held, kept, drawn, head),
            edges=self._edges,
            held=ways,
            hold=code_that_holds(len(positions), ways, others),
            plain=tuple([position for position in positions if position not in self.parameters]),
            others=others,
            shared=self._shared,
            shared_gradients=self._shared_gradients,
            offsets=self._offsets(),
            shown=tuple([index for index, number in enumerate(self._kept) if self._is_output(number)]),
            numerics=self.numerics,
            autocast=self.autocast,
            backward_autocast=self.backward_autocast,
            cached=self.cached,
            casts=tuple(self.casts.values()),
            gradients=self._gradient_layouts,
            reaches=tuple(self.reaches),
            fixed=tuple(sorted(self.fixed)),
            draws_from=_generators_of([call.op for call in self._forward if _may_draw(call)]),
            reruns=len(backward.reruns),
            rerun_nbytes=self._nbytes(backward.reruns),
            kernels=(*forward.kernels, *whole.kernels),
        )

    def _contributions(self, backward: Code) -> tuple[list[str], str]:
        """The variables that backward gives, and what it returns."""
        names = ["None" if use is None else backward.tensor(use) for _, use in self.contributions]
        return names, f"({', '.join(names)},)"

    def _dropped_outputs(
        self,
        code: Code,
        values: dict[int, int],
        held: Sequence[str],
        kept: Sequence[str],
        drawn: Sequence[str],
        backward_head: Sequence[str],
    ) -> DroppedOutputs:
        """values: of the plan, by the positions of the outputs that ``code`` gives back."""
        large = sum(self.recording.buffers[self.results[position].buffer].nbytes for position in values) // SMALL
        made = [number for number in self._made(code.reruns) if not self._is_output(number)]
        left = [number for number in made if self.recording.buffers[number].nbytes <= large]
        backward = self._write_backward(left)
        names, result = self._contributions(backward)
        read = {*names, *backward.reads()}
        left_names = [f"t{number}" for number in left if f"t{number}" in read]
        given_back = [code.tensors[self.results[position].buffer] for position in values]
        reads = {*given_back, *code.reads()}
        of_held, of_kept = ([i for i, name in enumerate(names) if name in reads] for names in (held, kept))
        parts = [held[index] for index in of_held], [kept[index] for index in of_kept]
        head = ["def run(held, kept, states):", *_unpacked(held=parts[0], kept=parts[1], states=drawn)]
        both = f"({_tuple(given_back)}, {_tuple(left_names)})"
        backward_head = [*backward_head, *_unpacked(left=left_names), "left.clear()"]
        return DroppedOutputs(
            run=code.compiled(head, both, [*given_back, *left_names], [*parts[0], *parts[1]]),
            values=tuple(values.items()),
            held=tuple(of_held),
            kept=tuple(of_kept),
            reruns=len(code.reruns),
            rerun_nbytes=self._nbytes(code.reruns),
            backward=backward.compiled(
                ["def run(held, kept, states, gradients, left):", *backward_head],
                result,
                names,
                [*held, *kept, *left_names],
            ),
            backward_reruns=len(backward.reruns),
            backward_nbytes=self._nbytes(backward.reruns),
        )

    def _offsets(self) -> tuple[tuple[int, int], ...]:
        placed = [self.recording.buffers[number] for number in self.recording.placed]
        return tuple([(buffer.given, int(buffer.layout.offset)) for buffer in placed if buffer.given is not None])

    def _nbytes(self, calls: Iterable[Call]) -> int:
        """The bytes that calls give."""
        return sum(self.recording.buffers[number].nbytes for number in self._made(calls))

    @staticmethod
    def _made(calls: Iterable[Call]) -> list[int]:
        """The buffers that calls give."""
        made = [number for call in calls for number in (*call.results, *(after for _, after in call.written))]
        return list(dict.fromkeys(number for number in made if number is not None))

    def _others(self, held: Collection[int]) -> tuple[tuple[int, str], ...]:
        how = "memory" if len(self.results) - len(self.fixed) > 1 else "weak"
        positions = [buffer.given for buffer in self.recording.buffers if buffer.given is not None]
        others = [(position, "itself" if position in self.parameters else how) for position in positions]
        return tuple([(position, how) for position, how in others if how == "itself" or position not in held])

    def _how_held(self, backward: Code, again: tuple[Code, dict[int, int]] | None) -> list[tuple[int, str, str]]:
        """For each input that is held: its position, how it is held, and its variable."""
        buffers = self.recording.buffers
        reads = {backward.tensors[use.buffer] for _, use in self.contributions if use is not None} | backward.reads()
        if again is not None:
            reads |= again[0].reads()
        saved = {use.buffer for call in self._backward for use in call.uses()}
        held = []
        for number in self._held:
            position = buffers[number].given
            assert position is not None
            if position in self.parameters:
                ways = {f"t{number}": "itself", f"m{number}": "memory"}
                held += [(position, how, name) for name, how in ways.items() if name in reads]
                continue
            is_small = buffers[number].nbytes <= LARGEST_COPY and position not in self._differentiable
            is_alone = buffers[number].root == number
            how = (
                "copy" if number not in saved and is_small and is_alone else "saved"
            )  # as ``SavePlan.copyable`` has it
            held.append((position, how, f"t{number}"))
        return held

    def _later(self) -> Code:
        """Code that runs after forward."""
        buffers = self.recording.buffers
        memories = {n: f"m{n}" for n, buffer in enumerate(buffers) if buffer.given in self.parameters}
        return Code(self.recording, memories=memories, saved_views=self.saved_views)

    def _write_backward(self, left: Iterable[int] = ()) -> Code:
        """left: the buffers that ran again before, and need not any more."""
        code = self._later()
        there = (*left, *self.gradients)
        code.tensors |= {number: f"t{number}" for number in there if number is not None}
        for call in self._backward:
            for use in call.uses():
                self._bring(use.buffer, code)
            if any(not self._is_backwards(before) for before, _ in call.written):
                raise NotCapturable(f"backward writes into a tensor of forward ({call.op})")
            if type(call.op) is FunctionBackward:
                code.function_backward(call)
            else:
                code.call(call)
        for _, contribution in self.contributions:
            if contribution is not None:
                self._bring(contribution.buffer, code)
                code.tensor(contribution)
        return code

    def _write_outputs(self) -> tuple[Code, dict[int, int]] | None:
        """The code that gives back the outputs that others may drop; their values in the plan, by their positions."""
        plan = self.plan
        found: dict[int, int] = {}
        for value in plan.outputs:
            number = self._made_by(value)
            position = next((i for i, use in enumerate(self.results) if use.buffer == number), None)
            if position is None:
                raise NotCapturable("a part of an output is dropped where others save it")
            found[position] = value
        if not found:
            return None
        code = self._later()
        for position in found:
            self._bring(self.results[position].buffer, code)
        return code, found

    def _made_by(self, value: int) -> int | None:
        """The buffer that is a value of the plan; None if no call has made it."""
        _, _, step, slot, *_ = self.plan.facts[value]
        if step is None:
            return None
        call = self._forward[step]
        if type(call.op) is FunctionOp:
            given = [number for number in call.results if number is not None]
            buffers = [*self.recording.functions[step].reached, *given]
            return buffers[self.plan.steps[step].made.index(value)]
        return call.written[0][1] if call.written and not slot else call.results[slot or 0]

    def _is_backwards(self, number: int) -> bool:
        """Whether a call of backward has made a buffer."""
        call = self.recording.buffers[number].call
        return call is not None and call >= len(self._forward)

    def _bring(self, number: int, code: Code) -> None:
        """Give a buffer that backward reads a variable: of what forward has left, or of what runs again."""
        pending = [number]
        while pending:
            number = pending[-1]
            buffer = self.recording.buffers[number]
            if number in code.tensors:
                pending.pop()
            elif buffer.given is not None:
                # With all that shares its memory, for each may have a version of its own.
                self._held |= {
                    n: None
                    for n, each in enumerate(self.recording.buffers)
                    if each.root == number and each.given is not None
                }
                code.tensors[number] = f"t{number}"
            elif buffer.constant is not None:
                code.tensors[number] = code.constant(number)
            elif number in self._keeps:
                self._kept[number] = None
                code.tensors[number] = f"t{number}"
            else:
                index = buffer.call
                assert index is not None
                call = self._forward[index]
                if index not in self.plan.rerun_set:
                    raise NotCapturable(f"backward reads what {call.op} gave, which is neither kept nor runs again")
                missing = [use.buffer for use in call.uses() if use.buffer not in code.tensors]
                if missing:
                    pending += missing
                    continue
                self._again[index] = None
                self._run_again(index, call, code)

    def _run_again(self, index: int, call: Call, code: Code) -> None:
        if not _is_watched(call):
            code.call(call, again=True)
            return
        start = len(code.statements)
        code.call(call, again=True)
        statement = code.statements[-1]
        assert len(code.statements) > start
        statement.text = f"with r{index}.replayed():\n    {statement.text}"
        statement.reads.append(f"r{index}")

    @cached_property
    def _keeps(self) -> frozenset[int]:
        """The buffers of the values that the plan keeps."""
        plan = self.plan
        # What a custom Function is given counts as overwritten. What autograd had saved of that before is held.
        made = {self._made_by(value) for value in (*plan.kept, *(plan.demanded & plan.overwritten))}
        return frozenset(number for number in made if number is not None)

    def _write_forward(self) -> tuple[GeneratedCode, dict[int, str]]:
        code = Code(self.recording)
        given = [number for number, buffer in enumerate(self.recording.buffers) if buffer.given is not None]
        given.sort(key=lambda number: self.recording.buffers[number].given or 0)
        given += self.casts
        for number in given:
            code.tensors[number] = f"t{number}"
        for number, buffer in enumerate(self.recording.buffers):
            if buffer.constant is not None:
                code.tensors[number] = code.constant(number)
        states: dict[int, str] = {}
        for index, call in enumerate(self._forward):
            for before, _ in call.written:
                root = self.recording.buffers[self.recording.buffers[before].root]
                if index not in self.functions and (root.given is not None or root.constant is not None):
                    raise NotCapturable(f"it writes to a tensor that it did not make ({call.op})")
            if self.casts and call.results and call.results[0] in self.casts:
                continue  # autocast has done so
            if index in self._again and _is_watched(call):
                states[index] = code.draw(call)
            if index in self.functions:
                if index in self._differentiated:
                    states[index] = f"r{index}"
                code.function(call, self.functions[index], states.get(index, "_"))
                continue
            code.call(call)
            if index in states and facts(call.op).is_foreign:
                code.drawn(states[index])
        outputs = [self._output(position, use, code) for position, use in enumerate(self.results)]
        views = {output.split(".")[0] for output in outputs}
        kept = [f"{code.tensors[n]}.detach()" if self._is_output(n) else code.tensors[n] for n in self._kept]
        last = {code.tensors[use.buffer] for use in self.results}
        last |= {code.tensors[n] for n in self._kept} | set(states.values()) | views
        result = f"({_tuple(outputs)}, [{', '.join(kept)}], {_tuple(states.values())})"
        head = [f"def run(name, objects{''.join(f', t{number}' for number in given)}):"]
        return code.compiled(head, result, last), {index: f"r{index}" for index in states}

    def _is_output(self, number: int) -> bool:
        return any(use.buffer == number for use in self.results)

    def _output(self, position: int, use: Use, code: Code) -> str:
        buffers = self.recording.buffers
        buffer = buffers[use.buffer]
        root = buffers[buffer.root]
        if root.given is not None or root.constant is not None:
            if position not in self.fixed or root.given in self._differentiable:
                raise NotCapturable("it returns a tensor, or a view of one, that it was given")
            return f"{code.tensor(use)}.detach()"
        if use.layout == buffer.layout:
            return code.tensors[use.buffer]
        if use.buffer in self._kept:
            return f"{code.tensor(use)}.detach()"  # it shares the version counter of what is kept
        return f"apart({code.tensors[use.buffer]}, {code.named(use.layout)})"


def _is_watched(call: Call) -> bool:
    """Whether the random numbers that a call of an op draws are to be the same when it runs again."""
    known = facts(call.op)
    return known.kind is Kind.RANDOM or known.is_foreign


def _generators_of(ops: Sequence[Any]) -> tuple[Any, ...] | None:
    """The generators that the names in the code of ops lead to; None where there are no ops."""
    code = [op.function.forward if type(op) is FunctionOp else op for op in ops]
    return tuple([generator for each in code for generator in generators_of(each)]) if ops else None


def _may_draw(call: Call) -> bool:
    """Whether a call may draw random numbers. Attention with a dropout of 0 does not."""
    if type(call.op) is FunctionOp or facts(call.op).is_foreign:
        return True
    draws = Tag.nondeterministic_seeded in call.op.tags
    return draws and facts_of_call(call.op, call.args, call.kwargs).kind is not Kind.PURE


def _unpacked(**parts: Sequence[str]) -> list[str]:
    """Lines that unpack each argument into variables."""
    return [f"{', '.join(names)}{',' if names else '()'} = {part}" for part, names in parts.items()]


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"
