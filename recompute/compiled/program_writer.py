"""Writes a captured region's program, from an observed frame."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

from torch import Tag

from recompute.compiled.calls import Call, Use
from recompute.compiled.codegen import Code, GeneratedCode
from recompute.compiled.function_calls import FunctionBackward
from recompute.compiled.generated.row_ops import ROW_OPS
from recompute.compiled.held_inputs import held_of
from recompute.compiled.observed_frame import ObservedFrame
from recompute.compiled.program import ANY, DroppedOutputs, Program
from recompute.compiled.recording import NotCapturable, Recording
from recompute.compiled.updated_inputs import without_statistics
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import Kind, facts, facts_of_call
from recompute.engine.cut.save_plan import LARGEST_COPY
from recompute.engine.tape.functions import FunctionOp
from recompute.engine.tape.op_arguments import copied, generators_of

RETURNS_INPUT = "it returns one of its inputs, or a view of one"
SMALL = 8
"""Values that are left for the region's own backward are so many times smaller than the outputs that came back."""


class ProgramWriter:
    """Makes a program of an observed frame, whose backward has ended."""

    def __init__(self, frame: ObservedFrame):
        assert frame.plan is not None
        self.plan = frame.plan
        self.frame = frame
        self.recording = frame.recording
        self._forward = frame.recording.calls[: frame.steps]
        self._backward = frame.recording.calls[frame.steps :]
        self._kept: dict[int, None] = {}
        self._held: dict[int, None] = {}
        self._again: dict[int, None] = {}
        """The calls of forward that run again, in the order of backward."""

    def would_write(self, program: Program) -> bool:
        """Whether this would write the same program. It was made of the same graph, for inputs of the same kinds."""
        ours = self._given_facts
        return program.plan is self.plan and all([getattr(program, name) == ours[name] for name in ours])

    @cached_property
    def _given_facts(self) -> dict[str, Any]:
        """Programs of one graph, for inputs of the same kinds, may differ in these."""
        frame, buffers = self.frame, self.recording.buffers
        shared = [(buffer.given, buffers[buffer.root].given) for buffer in buffers]
        roots = [None if number is None else buffers[number].root for number in frame.gradients]
        twins = [(output, frame.gradients.index(root)) for output, root in enumerate(roots) if root is not None]
        return {
            "around": frame.around,
            "backward_autocast": frame.backward_autocast,
            "casts": tuple(frame.casts.values()),
            "edges": tuple([given for given, _ in frame.contributions]),
            "gradients": tuple([None if n is None else self._gradient_layout(n) for n in frame.gradients]),
            "shared": tuple([(one, root) for one, root in shared if None not in (one, root) and one != root]),
            "shared_gradients": tuple([(one, root) for one, root in twins if one != root]),
        }

    def _gradient_layout(self, number: int) -> Layout:
        layout = self.recording.buffers[number].layout
        return layout if number in self.recording.placed else layout._replace(offset=ANY)

    def program(self) -> Program:
        frame, buffers = self.frame, self.recording.buffers
        self.recording.stable = deciding(self._forward, self.plan.rerun_set, self.recording)
        self.recording.given_away = {use.buffer for _, use in [*enumerate(frame.results), *frame.contributions] if use}
        backward, again = self._write_backward(), self._write_outputs()
        ways = self._how_held(backward, again)
        positions = [buffer.given for buffer in buffers if buffer.given is not None]
        others = self._others(positions, {position for position, _, _ in ways})
        forward, drawn = self._write_forward(ways, others)
        held, kept = [name for _, _, name in ways], [f"t{number}" for number in self._kept]
        grads = ", ".join(["_" if number is None else f"t{number}" for number in frame.gradients])
        head = [*_unpacked(held=held, kept=kept, states=drawn), f"{grads}, = gradients"]
        head += ["held.clear()", "kept.clear()", "gradients.clear()"]
        # Whoever reads one that shares memory reads the first of these.
        doubles = [number for number in frame.gradients if number is not None and buffers[number].root != number]
        head += [f"del t{number}" for number in doubles]
        outputs = None if again is None else self._dropped_outputs(*again, held, kept, drawn, head)
        placed = [buffers[number] for number in self.recording.placed]
        compressible = set(map(self._made_by, self.plan.compressible))
        return Program(
            plan=self.plan,
            forward=forward,
            backward=self._compiled(backward, ["def run(held, kept, states, gradients):", *head], held + kept),
            outputs=outputs,
            held=tuple([(position, how) for position, how, _ in ways]),
            plain=tuple([position for position in positions if position not in frame.parameters]),
            others=others,
            offsets=tuple([(each.given, int(each.layout.offset)) for each in placed if each.given is not None]),
            updated=frame.updated_positions,
            shown=tuple([i for i, n in enumerate(self._kept) if self._is_output(n) and n not in self._copies]),
            compressible=tuple([index for index, number in enumerate(self._kept) if number in compressible]),
            reaches=tuple(frame.reaches),
            fixed=tuple(sorted(frame.fixed)),
            draws_from=_generators_of([call.op for call in self._forward if _may_draw(call)]),
            **self._given_facts,
        )

    def _compiled(self, backward: Code, head: Sequence[str], given: Sequence[str]) -> GeneratedCode:
        """A backward as a function, which returns the contributions."""
        names = self._contributions(backward)
        return backward.compiled(head, _tuple(names), names, given)

    def _contributions(self, backward: Code) -> list[str]:
        return ["None" if use is None else backward.tensor(use) for _, use in self.frame.contributions]

    def _dropped_outputs(
        self,
        code: Code,
        values: dict[int, int],
        held: Sequence[str],
        kept: Sequence[str],
        drawn: Sequence[str],
        backward_head: Sequence[str],
    ) -> DroppedOutputs:
        """values: of the plan, by the positions of the outputs that ``code`` brings back."""
        recording, results = self.recording, self.frame.results
        large = recording.nbytes([results[position].buffer for position in values]) // SMALL
        made = [number for number in recording.made(code.reruns) if not self._is_output(number)]
        left = [n for n in made if recording.buffers[n].nbytes <= large and code.tensors[n] == f"t{n}"]
        backward = self._write_backward(left)
        read = {*self._contributions(backward), *backward.reads()}
        left_names = [f"t{number}" for number in left if f"t{number}" in read]
        given_back = [code.tensors[results[position].buffer] for position in values]
        reads = {*given_back, *code.reads()}
        of_held, of_kept = ([i for i, name in enumerate(names) if name in reads] for names in (held, kept))
        parts = [held[index] for index in of_held], [kept[index] for index in of_kept]
        head = ["def run(held, kept, states):", *_unpacked(held=parts[0], kept=parts[1], states=drawn)]
        both = f"({_tuple(given_back)}, {_tuple(left_names)})"
        signature = "def run(held, kept, states, gradients, left):"
        backward_head = [signature, *backward_head, *_unpacked(left=left_names), "left.clear()"]
        return DroppedOutputs(
            run=code.compiled(head, both, [*given_back, *left_names], [*parts[0], *parts[1]]),
            values=tuple(values.items()),
            held=tuple(of_held),
            kept=tuple(of_kept),
            backward=self._compiled(backward, backward_head, [*held, *kept, *left_names]),
        )

    def _others(self, positions: Sequence[int], held: Collection[int]) -> tuple[tuple[int, str], ...]:
        how = "memory" if len(self.frame.results) - len(self.frame.fixed) > 1 else "weak"
        ways = dict.fromkeys(self.frame.parameters, "itself") | dict.fromkeys(self.frame.updated_positions, "updated")
        others = [(position, ways.get(position, how)) for position in positions]
        return tuple([(position, how) for position, how in others if how == "itself" or position not in held])

    def _how_held(self, backward: Code, again: tuple[Code, dict[int, int]] | None) -> list[tuple[int, str, str]]:
        """For each input that is held: its position, how it is held, and its variable."""
        buffers, contributions = self.recording.buffers, self.frame.contributions
        reads = {*self._contributions(backward), *backward.reads(), *(() if again is None else again[0].reads())}
        saved = {use.buffer for call in self._backward for use in call.uses()} | self.frame.updated
        held = []
        for number in self._held:
            position = buffers[number].given
            assert position is not None
            if position in self.frame.parameters:
                ways = {f"t{number}": "itself", f"m{number}": "memory"}
                held += [(position, how, name) for name, how in ways.items() if name in reads]
                continue
            is_small = buffers[number].nbytes <= LARGEST_COPY and position not in dict(contributions)
            is_alone = buffers[number].root == number
            how = "copy" if number not in saved and is_small and is_alone else "saved"  # as ``SavePlan.copyable`` says
            held.append((position, how, f"t{number}"))
        return held

    def _later(self) -> Code:
        """Code that runs after forward."""
        buffers = self.recording.buffers
        memories = {n: f"m{n}" for n, buffer in enumerate(buffers) if buffer.given in self.frame.parameters}
        return Code(self.recording, memories=memories, saved_views=self.frame.saved_views)

    def _write_backward(self, left: Iterable[int] = ()) -> Code:
        """left: the buffers that ran again before, and need not any more."""
        code = self._later()
        there = (*left, *self.frame.gradients)
        code.tensors |= {number: f"t{number}" for number in there if number is not None}
        for call in self._backward:
            for use in call.uses():
                self._bring(use.buffer, code)
            makers = [self.recording.buffers[before].call for before, _ in call.written]
            if any(index is None or index < len(self._forward) for index in makers):
                raise NotCapturable(f"its backward writes to a tensor of its forward, by {call.op}")
            if type(call.op) is FunctionBackward:
                code.function_backward(call)
            else:
                code.call(call)
        for _, contribution in self.frame.contributions:
            if contribution is not None:
                self._bring(contribution.buffer, code)
                code.tensor(contribution)
        return code

    def _write_outputs(self) -> tuple[Code, dict[int, int]] | None:
        """The code of the outputs that others may drop; their values in the plan, by their positions."""
        found: dict[int, int] = {}
        for value in self.plan.outputs:
            number = self._made_by(value)
            position = next((i for i, use in enumerate(self.frame.results) if use.buffer == number), None)
            if position is None:
                raise NotCapturable("code outside saves a part of one of its outputs, which it would drop")
            found[position] = value
        if not found:
            return None
        code = self._later()
        for position in found:
            self._bring(self.frame.results[position].buffer, code)
        return code, found

    def _made_by(self, value: int) -> int | None:
        """The buffer that is a value of the plan; None if no call has made it."""
        _, _, step, slot, *_ = self.plan.facts[value]
        if step is None:
            return None
        call = self._forward[step]
        if type(call.op) is FunctionOp:
            known = self.recording.functions[step]
            return known.reached[self.plan.steps[step].made.index(value)] if slot is None else known.returned[slot]
        if slot is None:
            return call.written[self.plan.steps[step].made.index(value)][1]
        return call.written[0][1] if call.results[slot] is None else call.results[slot]

    def _bring(self, number: int, code: Code) -> None:
        """Give a buffer that backward reads a variable, which forward has left, or which is made again."""
        pending = [number]
        while pending:
            number = pending[-1]
            buffer = self.recording.buffers[number]
            if number in code.tensors:
                pending.pop()
            elif buffer.root in self.frame.updated and number != buffer.root:
                self._bring(buffer.root, code)
                code.tensors[number] = code.tensors[buffer.root]
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
                call = without_statistics(self._forward[index])
                if index not in self.plan.rerun_set:
                    raise NotCapturable(f"its backward reads an output of {call.op}, neither kept nor recomputed")
                missing = [use.buffer for use in call.uses() if use.buffer not in code.tensors]
                if missing:
                    pending += missing
                    continue
                self._again[index] = None
                code.call(call, again=True, state=f"r{index}" if _is_watched(call) else None)

    @cached_property
    def _keeps(self) -> frozenset[int]:
        """The buffers of the values that the plan keeps."""
        plan = self.plan
        # A value that a custom Function may write to counts as overwritten. It is held if autograd had saved it before.
        made = {self._made_by(value) for value in (*plan.kept, *(plan.demanded & plan.overwritten))}
        return frozenset(number for number in made if number is not None)

    @cached_property
    def _copies(self) -> set[int]:
        """The kept buffers that are copied: others have them without gradients, and may write to them."""
        fixed = {self.frame.results[position].buffer for position in self.frame.fixed}
        return fixed.intersection(map(self._made_by, self.plan.copyable))

    def _write_forward(
        self, ways: Sequence[tuple[int, str, str]], others: Sequence[tuple[int, str]]
    ) -> tuple[GeneratedCode, list[str]]:
        """The code of forward, and the variables of the random states that it returns."""
        code, buffers, frame = Code(self.recording), self.recording.buffers, self.frame
        given = [number for number, buffer in enumerate(buffers) if buffer.given is not None]
        inputs = [f"t{number}" for number in given]
        code.tensors |= {number: f"t{number}" for number in (*given, *frame.casts)}
        code.tensors |= {n: code.constant(n) for n, buffer in enumerate(buffers) if buffer.constant is not None}
        differentiated = {call.op.call for call in self._backward if type(call.op) is FunctionBackward}
        states: dict[int, str] = {}
        for index, call in enumerate(self._forward):
            if frame.casts and call.results and call.results[0] in frame.casts:
                continue  # autocast has done so
            if index in self._again and _is_watched(call):
                states[index] = code.draw(call)
            if index in frame.functions:
                if index in differentiated:
                    states[index] = f"r{index}"
                code.function(call, frame.functions[index], states.get(index, "_"))
                continue
            code.call(call, state=states.get(index))
            if index in states and facts(call.op).is_foreign:
                code.drawn(states[index])
        outputs = [self._output(position, use, code) for position, use in enumerate(frame.results)]
        kept = [f"{code.tensors[n]}.detach()" if self._is_output(n) else code.tensors[n] for n in self._kept]
        pairs = zip(self._kept, kept, strict=True)
        kept = [f"{code.named(copied)}({each})" if number in self._copies else each for number, each in pairs]
        last = {code.tensors[n] for n in (*[use.buffer for use in frame.results], *self._kept)}
        last |= {*states.values(), *[output.split(".")[0] for output in outputs], *inputs}
        result = f"{_tuple(outputs)}, [{', '.join(kept)}], {_tuple(states.values())}, {held_of(ways, others)}"
        head = f"def run(name, objects, is_sure, {', '.join([*inputs, *[f't{n}' for n in frame.casts]])}):"
        return code.compiled([head], result, last), [f"r{index}" for index in states]

    def _is_output(self, number: int) -> bool:
        return any(use.buffer == number for use in self.frame.results)

    def _output(self, position: int, use: Use, code: Code) -> str:
        buffer = self.recording.buffers[use.buffer]
        root = self.recording.buffers[buffer.root]
        if root.given is not None or root.constant is not None:
            if position not in self.frame.fixed or root.given in dict(self.frame.contributions):
                raise NotCapturable(RETURNS_INPUT)
            return f"{code.tensor(use)}.detach()"
        if use.layout == buffer.layout:
            return code.tensors[use.buffer]
        if use.buffer in self._kept:
            return f"{code.tensor(use)}.detach()"  # it shares the version counter of the kept value
        return f"{code.tensor(use)}.data"  # autograd does not take it for a view


def deciding(calls: Sequence[Call], rerun: Collection[int], recording: Recording) -> set[int]:
    """The rows' sums and softmaxes that integers or flags are made of when both run again, as a token's expert.

    Those must be the same in forward and backward, so both take ATen's bits.
    """
    found: set[int] = set()
    sources: dict[int, set[int]] = {}
    for call in [calls[index] for index in sorted(rerun)]:
        own = set().union(*[sources.get(use.buffer, ()) for use in call.uses()])
        made = recording.made([call])
        if not all(recording.buffers[number].layout.dtype.is_floating_point for number in made):
            found |= own
        sources |= dict.fromkeys(made, own | set(made) if call.op in ROW_OPS else own)
    return found


def _is_watched(call: Call) -> bool:
    """Whether the random numbers that a call of an op draws are to be the same when it runs again."""
    return (known := facts(call.op)).kind is Kind.RANDOM or known.is_foreign


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
