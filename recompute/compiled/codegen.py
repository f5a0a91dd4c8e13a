"""Straight Python code over ATen ops, made of a recording.

A variable is deleted right after the last call that reads it, so that memory is freed as early as in eager code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tag
from torch._subclasses.fake_tensor import unset_fake_temporarily

from recompute.compiled.calls import Call, ObjectUse, Use
from recompute.compiled.earlier_calls import EarlierCalls
from recompute.compiled.function_calls import FunctionCall
from recompute.compiled.generated.dropout import DropoutMask, mask_of
from recompute.compiled.generated.fusing import fused
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.rewritten_calls import READERS, largest_size, out_of_place, part_of_rows
from recompute.compiled.generated.row_sums import by_kernel
from recompute.compiled.generated.switch import Generates
from recompute.compiled.held_inputs import HELPERS
from recompute.compiled.recording import Recording
from recompute.compiled.statements import Statement, lines_of
from recompute.compiled.torch_functions import function_of
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import Kind, facts
from recompute.engine.rng import RngState, WatchedDraws
from recompute.engine.saved_tensors import seen_as
from recompute.engine.tape.op_arguments import capture, generators_of
from recompute.engine.thread_state import is_fake
from recompute.kernels.launch import IMPLEMENTATIONS
from recompute.kernels.launch_plan import PlannedCall

_LITERALS = frozenset((type(None), bool, int, str))


@dataclass
class Code:
    """A function that is being written."""

    recording: Recording
    statements: list[Statement] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=lambda: dict(_HELPERS))
    """The objects that the code refers to by name."""
    tensors: dict[int, str] = field(default_factory=dict)
    """The variable of each buffer that has been made so far."""
    memories: dict[int, str] = field(default_factory=dict)
    """For each parameter's buffer, the variable of the memory that it had in forward.

    A parameter's ``data`` may be replaced before backward. Ops that run again read the memory of forward, and so does
    backward where autograd has saved a view. Elsewhere backward reads the new memory.
    """
    saved_views: Collection[int] = ()
    """The buffers of the parameters whose views autograd has saved."""
    reruns: list[Call] = field(default_factory=list)
    """The calls in it that run again."""
    _overwritten: set[int] = field(default_factory=set)
    """The buffers whose memory has something else by now."""
    _earlier: EarlierCalls = field(init=False)
    _parts: dict[Use, int] = field(default_factory=dict)
    """The buffers of copies of parts of rows."""
    _views: dict[tuple[str, tuple[Any, ...], bool], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._earlier = EarlierCalls(self.recording)
        if is_fake():
            self.names["address"] = id

    def call(self, call: Call, *, again: bool = False, state: str | None = None) -> None:
        """Write a call of an op whose arguments have variables.

        again: it runs on copies of the tensors that it writes to. state: the variable of the state that ``draw`` has
        captured for the call.
        """
        call = call.with_uses(self._earlier.resolved)
        if (twin := self._earlier.twin(call, lambda use: self._memory(use, again), len(self.statements))) is not None:
            pairs = zip(call.results, twin.results, strict=True)
            self.tensors |= {one: self.tensors[other] for one, other in pairs if one is not None and other is not None}
            return
        is_ours = self.recording.is_generated and (again or all(self._makes(before) for before, _ in call.written))
        if is_ours and call.written and (calls := out_of_place(call, self.recording)):
            for each in calls:
                self.call(each, again=again)
            return
        if again:
            self.reruns.append(call)
        if self.recording.is_generated:
            call = largest_size(call, self.recording, self._has).with_uses(self._earlier.resolved)
        if (mask := mask_of(call, self.recording)) is not None:
            self._dropout(call, mask, again, state)
            return
        rounds = self.recording.is_generated and self.recording.generates is Generates.ROUNDED
        if rounds and call.op in READERS:
            call = call.with_uses(lambda use: self._part(use, again))
        call, ours = by_kernel(call, self.recording, self._has) if is_ours else (call, None)
        if again and call.written:
            for before, after in call.written:
                name = self.tensors[after] = f"t{after}"
                text = f"{name} = {self.tensors[before]}.clone()"
                self._write(Statement(text, [self.tensors[before]], [name], again))
            moved = {before: after for before, after in call.written}
            call = call.with_uses(lambda use: use._replace(buffer=moved.get(use.buffer, use.buffer)))
        reads: list[str] = []
        arguments = [self._value(value, reads, again) for value in call.args]
        arguments += [f"{key}={self._value(value, reads, again)}" for key, value in call.kwargs.items()]
        targets, makes = self._results(call)
        if not again:
            for before, after in call.written:
                self.tensors[after] = self.tensors[before]
                self._overwritten.add(before)
        variables = {use.buffer: self._memory(use, again) for use in call.uses()}
        writes = tuple([self.tensors[after] for _, after in call.written])
        function = self._function(call) if ours is None else self.named(ours)
        text = f"{function}({', '.join(arguments)})"
        if makes:
            text = f"{', '.join(targets)}{',' if call.is_sequence and len(targets) == 1 else ''} = {text}"
        if again and state is not None and not is_fake():
            text = f"with {state}.replayed():\n    {text}"
            reads.append(state)
        known = facts(call.op)
        may_draw = Tag.nondeterministic_seeded in call.op.tags or known.is_foreign
        is_ordered = may_draw or known.kind is Kind.OPAQUE
        holds = (*variables.values(), *makes) if known.is_foreign else ()
        others: dict[str, Any] = {"writes": writes, "holds": holds, "is_ordered": is_ordered}
        self._write(Statement(text, reads, makes, again, call, variables, **others))

    def _dropout(self, call: Call, op: DropoutMask, again: bool, state: str | None) -> None:
        """Write a dropout as two calls: one makes the mask from the numbers in ``state``, one applies it."""
        (out, mask), use = call.results, next(call.uses())
        assert out is not None
        assert mask is not None
        if state is None:
            state = self._state(f"{self.named(op.taken)}()")
        made = self.tensors[mask] = f"t{mask}"
        drawn = Call(op, (), {}, (mask,), (), is_sequence=False)
        self._write(Statement(f"{made} = {self.named(op)}({state})", [state], [made], again, drawn))
        apply, seen = torch.ops.aten.native_dropout_backward.default, Use(mask, self.recording.buffers[mask].layout)
        reads: list[str] = []
        arguments = ", ".join([self._value(value, reads, again) for value in (use, seen, op.scale)])
        applied, name = Call(apply, (use, seen, op.scale), {}, (out,), (), is_sequence=False), f"t{out}"
        self.tensors[out] = name
        variables = {each.buffer: self._memory(each, again) for each in (use, seen)}
        text = f"{name} = {self._function(applied)}({arguments})"
        self._write(Statement(text, reads, [name], again, applied, variables))

    def _state(self, text: str, reads: Sequence[str] = ()) -> str:
        """Write the expression of a generator's state. Returns the state's variable."""
        state = f"r{len(self.recording.calls)}_{len(self.statements)}"
        self._write(Statement(f"{state} = {text}", [*reads], [state], is_ordered=True))
        return state

    def _part(self, use: Use, again: bool) -> Use:
        """A copy of the part of rows that ``use`` is, where a generated kernel can write just that; else ``use``."""
        found = part_of_rows(use, self.recording) if self._makes(use.buffer) else None
        if found is None:
            return use
        part, moved = found
        if part not in self._parts:
            dense = part.layout._replace(stride=(part.layout.shape[1], 1), offset=0)
            number = self._parts[part] = self.recording.number_unseen(dense, self.recording.device)
            copy = {"memory_format": torch.contiguous_format}
            self.call(Call(torch.ops.aten.clone.default, (part,), copy, (number,), (), is_sequence=False), again=again)
        return Use(self._parts[part], moved)

    def _has(self, buffer: int) -> bool:
        """Whether a buffer can be read now: nothing has been written over it."""
        return buffer in self.tensors and buffer not in self._overwritten

    def _makes(self, buffer: int) -> bool:
        """Whether a call makes a buffer, and nobody holds its memory unseen."""
        made = any(s.call is not None and buffer in s.call.results for s in self.statements)
        return made and not any(self.tensors[buffer] in s.holds for s in self.statements)

    def _results(self, call: Call) -> tuple[list[str], list[str]]:
        """The targets of a call's outputs, and the variables among these."""
        targets = ["_" if number is None else f"t{number}" for number in call.results]
        self.tensors |= {number: f"t{number}" for number in call.results if number is not None}
        return targets, [target for target in targets if target != "_"]

    def function(self, call: Call, function: FunctionCall, after: str) -> None:
        """Write a call of a custom Function. after: the variable for its backward, or "_"."""
        reads: list[str] = []
        arguments = [self._value(value, reads, False) for value in call.args]
        targets, makes = self._results(call)
        makes += [] if after == "_" else [after]
        text = f"{', '.join([*targets, after])} = {self.named(function)}({', '.join(arguments)})"
        self.tensors |= {after: self.tensors[before] for before, after in call.written}
        writes = tuple([self.tensors[after] for _, after in call.written])
        self._write(Statement(text, reads, makes, writes=writes, holds=(*writes, *makes), is_ordered=True))

    def function_backward(self, call: Call) -> None:
        """Write the backward of a custom Function."""
        reads = [f"r{call.op.call}"]
        arguments = [*reads, *[self._value(value, reads, False) for value in call.args]]
        targets, makes = self._results(call)
        text = f"{''.join([f'{target}, ' for target in targets])}= {self.named(call.op)}({', '.join(arguments)})"
        writes = tuple([self._memory(use, False) for use in call.uses()])
        self._write(Statement(text, reads, makes, writes=writes, holds=(*writes, *makes), is_ordered=True))

    def _memory(self, use: Use, again: bool) -> str:
        """The variable of the buffer that a tensor is, or views."""
        name = self.tensors[use.buffer]
        return self.memories.get(use.buffer, name) if again or use.buffer in self.saved_views else name

    def tensor(self, use: Use, *, again: bool = False) -> str:
        """The variable of a tensor, which is its buffer or a view of that."""
        whole, name = self.recording.buffers[use.buffer].layout, self._memory(use, again)
        if use.layout == whole and not use.is_conjugate:
            return name
        key = name, use[1:], again
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = f"v{len(self._views)}"
            seen = name if use.layout == whole else self._view(name, use, whole)
            text = f"{view} = {seen}{'.conj()' if use.is_conjugate else ''}"
            self._write(Statement(text, [name], [view], again, view_of=name))
        return view

    def _view(self, name: str, use: Use, whole: Layout) -> str:
        shape, stride, offset, dtype = use.layout
        if dtype is not whole.dtype:
            return f"seen_as({name}, {self.named(use.layout)})"
        offset -= whole.offset
        if not offset:
            return f"{name}.as_strided({tuple(shape)}, {stride})"
        return f"{name}.as_strided({tuple(shape)}, {stride}, {name}.storage_offset() + {offset})"

    def constant(self, number: int) -> str:
        """The variable of a constant, whose tensor the code refers to."""
        name = f"constant{number}"
        self.names[name] = self.recording.buffers[number].constant
        return name

    def named(self, value: Any) -> str:
        """A name in the code for a value that has no literal."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _function(self, call: Call) -> str:
        """The name of a function that makes a call.

        One of our kernels is called without the dispatcher, which takes longer than the launch. Each call of a kernel
        has a plan of its own.
        """
        name = f"{call.op._schema.name.replace('::', '_')}_{call.op._overloadname}"
        implementation = IMPLEMENTATIONS.get(call.op)
        function = function_of(call) if implementation is None else PlannedCall(implementation)
        if self.names.setdefault(name, function) is not function:
            name = f"{name}_{len(self.names)}"
            self.names[name] = function
        return name

    def _value(self, value: Any, reads: list[str], again: bool) -> str:
        if type(value) is Use:
            name = self.tensor(value, again=again)
            reads.append(name)
            return name
        if type(value) is ObjectUse:
            return f"objects[{value.position}]"
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            items = ", ".join([self._value(item, reads, again) for item in value])
            if isinstance(value, list):
                return f"[{items}]"
            return f"({items},)" if value else "()"
        if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self.named(value)

    def _write(self, statement: Statement) -> None:
        self.statements.append(statement)

    def reads(self) -> set[str]:
        return {name for statement in self.statements for name in statement.reads}

    def draw(self, call: Call) -> str:
        """Capture the state of the generator that a call is going to draw from. Returns the state's variable.

        An op of another library may draw from any.
        """
        if (mask := mask_of(call, self.recording)) is not None:
            return self._state(f"{self.named(mask.taken)}()")
        if facts(call.op).is_foreign:
            return self._state(f"RngState({self.named(generators_of(call.op))}, name=name, only_torch=True)")
        reads: list[str] = []
        first = next(call.uses(), None)
        tensors = "()" if first is None else f"({self._value(first, reads, False)},)"
        constants = {key: value for key, value in call.kwargs.items() if type(value) is not Use}
        return self._state(f"capture({tensors}, {self.named(constants)}, name)", reads)

    def drawn(self, state: str) -> None:
        """Find the generators that the call has drawn from. state: the variable of the states of all of them."""
        self._write(Statement(f"{state} = WatchedDraws({state})", [state], [state], is_ordered=True))

    def compiled(
        self, head: Sequence[str], result: str, last: Collection[str], given: Collection[str] = ()
    ) -> GeneratedCode:
        """The function that begins with ``head``, goes on with the statements and returns ``result``.

        head: its first lines, and first its signature. last: the variables that ``result`` reads. given: those that
        ``head`` makes.
        """
        is_generated = self.recording.is_generated
        with unset_fake_temporarily():  # the text of some kernels has numbers that torch computes
            fast = fused(self.statements, last, self.recording, self.names) if is_generated else self.statements

        def written(statements: Sequence[Statement], around: bool = False) -> Any:
            used = {name for statement in statements for name in (*statement.reads, *statement.makes)}
            lines = [head[0].replace("run(", "run(around, ", 1) if around else head[0], *head[1:]]
            if unused := [variable for variable in given if variable not in used and variable not in last]:
                lines.append(f"del {', '.join(unused)}")
            each = zip(statements, lines_of(statements, last, self.names), strict=True)
            for again, group in groupby(each, key=lambda pair: pair[0].again):
                block = [line for _, own in group for line in own]
                lines += ["with around():", *[f"    {line}" for line in block]] if again and around else block
            return _function([*lines, f"return {result}"], self.names)

        function = written(fast)
        function.reruns = len(self.reruns)
        function.rerun_nbytes = self.recording.nbytes(self.recording.made(self.reruns))
        function.kernels = tuple([value for value in self.names.values() if isinstance(value, GeneratedKernel)])
        function.within = cache(lambda fuses: written(fast if fuses else self.statements, around=True))
        return function


class GeneratedCode(Protocol):
    """A function that was made of statements."""

    source: str
    kernels: tuple[GeneratedKernel, ...]
    """The generated kernels that it calls."""
    reruns: int
    """How many ops of forward it runs again."""
    rerun_nbytes: int
    """The bytes of their outputs."""

    def __call__(self, *args: Any) -> Any: ...

    def within(self, fuses: bool) -> Callable[..., Any]:
        """The same function with one argument more in front: a context around all that runs again.

        fuses: whether it calls generated kernels.
        """


def _function(lines: Sequence[str], names: dict[str, Any]) -> Any:
    """The function ``run`` of these lines, which refer to objects by these names."""
    source = "\n    ".join(lines)
    names = dict(names)
    exec(compile(source, "<a captured region>", "exec"), names)
    function = names["run"]
    function.source = source
    return function


_HELPERS: dict[str, Any] = {
    "seen_as": seen_as,
    "capture": capture,
    "RngState": RngState,
    "WatchedDraws": WatchedDraws,
    **HELPERS,
}
