"""The Triton source of a kernel that computes a group of calls.

The kernel counts the elements that it writes, as they lie in memory. A value is computed for an index: a form (see
``index_forms``) for each dimension of the buffer. Where a call reads a buffer of another call of the group, it asks for
that value at the index that its view leads to. Only values that are read outside of the group are written to memory.

A group with a call that goes over rows, such as softmax, counts rows instead, and has a whole row of each value. One
that turns a matrix counts rows and columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from recompute.compiled.calls import Buffer, Call, Use
from recompute.compiled.generated.dropout import DropoutMask
from recompute.compiled.generated.groupable import MAX_ADDRESS, NotOneKernel, equal_parts, parts_of, space_of, turned_by
from recompute.compiled.generated.index_forms import Form
from recompute.compiled.generated.pointwise_ops import (
    COPIES,
    FLOATS,
    FLOATS8,
    PLACED,
    REPLACED,
    ROWS,
    TRITON_DTYPES,
    Promotion,
    arguments_of,
    cast_to_float8,
    operand_dtypes,
    text_of,
)
from recompute.compiled.generated.row_ops import ROW_OPS, RowWriter, operands_of, row_dim, row_width
from recompute.compiled.generated.spaces import BLOCK, Elements, Tiles
from recompute.compiled.recording import Recording
from recompute.compiled.statements import Statement
from recompute.engine.cut.layout import Layout

_ATEN = torch.ops.aten

Index = tuple[Form, ...]
"""Of an element: a form for each dimension."""


@dataclass
class KernelSource:
    """Writes the kernel of the calls in ``group``, which fill the buffers ``stored``.

    group: the statements of these calls, by the buffers that each makes. Raises ``NotOneKernel`` if there is none.
    """

    recording: Recording
    group: Mapping[int, Statement]
    stored: Sequence[int]
    inputs: dict[str, int] = field(default_factory=dict)
    """The variables that it reads, and the buffer that each has."""
    templates: dict[str, int] = field(default_factory=dict)
    """The variables that ATen's calls read and the kernel does not, and their buffers."""
    elsewhere: set[str] = field(default_factory=set)
    """Those whose elements a program reads elsewhere than it writes."""
    states: dict[str, int] = field(default_factory=dict)
    """The variables of the states that dropouts have taken, and the place of each among these."""
    lines: list[str] = field(default_factory=list)
    _values: dict[Any, str] = field(default_factory=dict)
    _counter: itertools.count = field(default_factory=itertools.count)
    _conditions: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    """The conditions for the value that is being computed, and the variables that these count by."""
    _width: int = 0
    """How many elements of each row are wanted now."""
    _variables: dict[str, frozenset[str]] = field(default_factory=dict)
    """For a variable that is a digit of others, the variables that it counts by."""

    def __post_init__(self) -> None:
        calls = [statement.call for statement in self.group.values() if statement.call is not None]
        self.space = space_of(calls, self.stored, self.recording)
        self.stores: list[str] = []
        for number in self.stored:
            self._store(number)
        for statement in self.group.values():
            others = {name: number for number, name in statement.variables.items() if number not in self.group}
            self.templates |= {name: number for name, number in others.items() if name not in self.inputs}

    @property
    def given(self) -> dict[str, int]:
        """The variables that it takes, and their buffers."""
        return self.inputs | self.templates

    @property
    def name(self) -> str:
        """Its ops, for a profiler."""
        calls = {id(statement): statement.call for statement in self.group.values()}
        ops = [str(call.op).split(".")[1].lstrip("_") for call in calls.values() if call is not None]
        counted = {op: ops.count(op) for op in ops if op != "to_copy"}
        kind = {Elements: "pointwise", Tiles: "turned"}.get(type(self.space), "by_rows")
        return "_".join([kind, *[f"{op}{count if count > 1 else ''}" for op, count in counted.items()]])[:80]

    def is_stored_after(self, number: int, variable: str) -> bool:
        """Whether no thread stores an element of a buffer before that of ``variable`` at its place is loaded.

        Triton may give an element to another thread where it is stored than where it is loaded. Then that thread waits
        for the values that it computes the element from, and for nothing else.
        """
        seen: set[int] = set()
        pending = [number]
        while pending:
            statement = self.group[pending.pop()]
            assert statement.call is not None
            row = ROWS.get(statement.call.op)
            uses = () if row is not None and not row.operands else statement.call.uses()
            for buffer in {use.buffer for use in uses} - seen:
                seen.add(buffer)
                if buffer in self.group:
                    pending.append(buffer)
        loads = sum(f"tl.load(in_{variable} + " in line for line in self.lines)
        return self.inputs[variable] in seen and loads == 1

    def text(self, *, waits: bool = False) -> str:
        """The kernel. waits: whether the threads of a program wait for all loads before they store."""
        buffers = self.recording.buffers
        used = [*self.given.values(), *self.stored]
        is_long = max(_end(buffers[number]) for number in used) > MAX_ADDRESS
        parameters = [*[f"in_{name}" for name in self.given], *[f"out{number}" for number in self.stored]]
        names = {name: f"p{index}" for index, name in enumerate(parameters)}
        first = self.space.lines(".to(tl.int64)" if is_long else "")
        states = [f"{part}{place}: tl.int64" for place in self.states.values() for part in ("seed", "offset")]
        lines = [f"def {self.name}({', '.join([*names.values(), *states])}):", *first]
        for line in [*self.lines, *["tl.debug_barrier()"] * waits, *self.stores]:
            for name, short in names.items():
                line = line.replace(f"({name} + ", f"({short} + ")
            lines.append(line)
        return "\n    ".join(lines) + "\n"

    def _store(self, number: int) -> None:
        """Write a value to memory. Each part of a ``cat`` is written to its place."""
        statement, layout = self.group[number], self.recording.buffers[number].layout
        count = layout.shape.numel()
        parts = equal_parts(statement.call) if isinstance(self.space, Elements) else []
        if not parts or statement.call is None:
            address = self.space.address(count)
            if isinstance(self.space, Tiles) and turned_by(statement.call) is not None:
                address = self.space.turned()
            self._width = self.space.width_of(count)
            value = self._value(number, self._index_in(address, layout))
            self.stores.append(f"tl.store(out{number} + ({address}), {value}{self._mask(address)})")
            return
        dim = arguments_of(statement.call)["dim"] % len(layout.shape)
        order = sorted(range(len(layout.shape)), key=lambda each: layout.stride[each])
        strides, stride = [0] * len(order), 1
        for each in order:
            strides[each], stride = stride, stride * parts[0].layout.shape[each]
        shape = parts[0].layout.shape
        counter = self.space.address(shape.numel())
        index = self._index_in(counter, Layout(shape, tuple(strides), 0, layout.dtype))
        for place, part in enumerate(parts):
            value = self._cast(self._read(statement, part, index), part.layout.dtype, layout.dtype)
            address = Form.total(zip(index, layout.stride, strict=True), place * shape[dim] * layout.stride[dim])
            self.stores.append(f"tl.store(out{number} + ({address}), {value}{self._mask(address)})")

    def _index_in(self, address: Form, layout: Layout) -> Index:
        """The index of the element of a dense tensor at an address."""
        index = []
        for size, stride in zip(layout.shape, layout.stride, strict=True):
            if size == 1:
                index.append(Form())
                continue
            digit = address.digit(stride, size)
            if digit is None:
                text = f"({self._fresh('i', str(address))} // {stride}) % {size}"
                digit = self._variable(text, size, address)
            index.append(digit)
        return tuple(index)

    def _variable(self, text: str, size: int, form: Form) -> Form:
        """A variable of its own, below ``size``, for a number that is computed from ``form``."""
        name = self._fresh("i", text)
        self._variables[name] = self._counts_by(form)
        return Form.of_variable(name, size)

    def _counts_by(self, *forms: Form) -> frozenset[str]:
        """The variables of the space that forms are made of."""
        names = {term.variable for form in forms for term in form.terms}
        return frozenset().union(*[self._variables.get(name, {name}) for name in names])

    def _mask(self, address: Form) -> str:
        """The argument of a load, or a store, that tells where ``address`` is inside of the tensor."""
        variables = self._counts_by(address)
        wanted = [text for text, own in self._conditions if own & variables]
        guards = [*wanted, *self.space.guards(variables, self._width)]
        return f", {' & '.join(guards)}" if guards else ""

    def _fresh(self, prefix: str, text: str) -> str:
        key = prefix, text
        if key not in self._values:
            name = f"{prefix}{next(self._counter)}"
            self.lines.append(f"{name} = {text}")
            self._values[key] = name
        return self._values[key]

    def _read(self, statement: Statement, use: Use, index: Index) -> str:
        """The value of a tensor at an index, which may have more dimensions than the tensor, as broadcasting has."""
        layout, whole = use.layout, self.recording.buffers[use.buffer].layout
        index = index[len(index) - len(layout.shape) :]
        index = tuple([Form() if size == 1 else form for form, size in zip(index, layout.shape, strict=True)])
        if use.buffer in self.group and layout == whole:
            return self._value(use.buffer, index)
        distance = int(layout.offset) - int(whole.offset)
        address = Form.total(zip(index, layout.stride, strict=True), distance)
        if use.buffer in self.group:
            return self._value(use.buffer, self._index_in(address, whole))
        pointer = f"in_{statement.variables[use.buffer]}"
        self.inputs[statement.variables[use.buffer]] = use.buffer
        if str(address) != str(self.space.address(layout.shape.numel())):
            self.elsewhere.add(statement.variables[use.buffer])
        if not address.terms:
            return self._fresh("x", f"tl.load({pointer} + ({address}))")
        text = str(address)
        variables = self._counts_by(address)
        for missing in frozenset().union(*[own for _, own in self._conditions if own & variables]) - variables:
            text += f" + {missing} * 0"  # a mask has the shape of the tensor that it masks
        return self._fresh("x", f"tl.load({pointer} + ({text}){self._mask(address)})")

    def _value(self, number: int, index: Index) -> str:
        """The value that a call of the group gives, at an index."""
        key = number, index, tuple(self._conditions), self._width
        if key not in self._values:
            self._values[key] = self._computed(number, index)
        return self._values[key]

    def _computed(self, number: int, index: Index) -> str:
        statement, output = self.group[number], self.recording.buffers[number].layout
        call = statement.call
        assert call is not None
        if call.op in ROW_OPS:
            return self._by_rows(statement, call, number, index)
        if isinstance(call.op, DropoutMask):
            return self._kept(statement, call.op, index)
        values = arguments_of(call)
        if call.op in COPIES:
            use = values["self"]
            return self._cast(self._read(statement, use, index), use.layout.dtype, output.dtype)
        if call.op in REPLACED:
            return self._replaced(statement, values, index)
        if call.op in PLACED:
            return self._placed(statement, call, index, output)
        row = ROWS[call.op]
        common, dtype = operand_dtypes(row, values, output.dtype)
        operands: dict[str, Any] = dict(values, dtype=TRITON_DTYPES[output.dtype])
        for name in row.operands:
            value = values[name]
            if type(value) is Use:
                operands[name] = self._read(statement, value, index)
                if name not in row.masks:
                    operands[name] = self._cast(operands[name], value.layout.dtype, dtype)
                    if value.layout.dtype not in (common, torch.bool):  # ATen rounds it as it reads it
                        operands[name] = self._cast(self._cast(operands[name], dtype, common), common, dtype)
            elif not callable(row.expression):
                if row.promotion is Promotion.ALWAYS_BOOL and dtype in FLOATS:  # a number is rounded as the tensor is
                    value = torch.tensor(value, dtype=common).item()
                operands[name] = text_of(value, TRITON_DTYPES[dtype]) if dtype.is_floating_point else repr(value)
        text = row.expression(operands) if callable(row.expression) else row.expression.format(**operands)
        assert text is not None
        computed = torch.bool if row.promotion is not None and output.dtype is torch.bool else dtype
        if row.promotion is None:  # a number takes the dtype of the operand beside it
            return self._fresh("x", f"({text}).to({TRITON_DTYPES[output.dtype]})")
        return self._cast(self._fresh("x", text), computed, output.dtype)

    def _cast(self, value: str, source: torch.dtype, target: torch.dtype) -> str:
        if target is torch.bool and source is not target:
            return self._fresh("x", f"{value} != 0")
        if target in FLOATS8 and source is not target:
            return self._fresh("x", cast_to_float8(self._cast(value, source, torch.float32), target))
        return value if source is target else self._fresh("x", f"{value}.to({TRITON_DTYPES[target]})")

    def _kept(self, statement: Statement, op: DropoutMask, index: Index) -> str:
        """Whether a dropout keeps an element. A program draws for elements that lie side by side."""
        address = Form.total(zip(index, op.layout.stride, strict=True))
        if not isinstance(self.space, Elements) or address != self.space.address(op.layout.shape.numel()):
            raise NotOneKernel
        place = self.states.setdefault(statement.reads[0], len(self.states))
        settings = f"{text_of(op.kept)}, {op.vector}, {op.threads}, {BLOCK}"
        return self._fresh("b", f"functions.is_kept(seed{place}, offset{place}, tl.program_id(0), {settings})")

    def _placed(self, statement: Statement, call: Call, index: Index, output: Layout) -> str:
        """The elements of parts at their places, and zeros or another tensor's elements around these."""
        found = parts_of(call, output.shape)
        assert found is not None
        around, parts = found
        result = "" if around is None else self._read(statement, around, index)
        if around is None and call.op not in (_ATEN.cat.default, _ATEN.stack.default):  # whose parts are all there is
            result = f"tl.full((), 0, {TRITON_DTYPES[output.dtype]})"
        for use, spans in reversed(parts):
            inner, conditions, variables = [Form()] * len(use.layout.shape), [], frozenset[str]()
            for form, (start, stop, dimension, step), size in zip(index, spans, output.shape, strict=True):
                own = Form.total([(form, 1)], -start)
                if (start, stop, step) != (0, size, 1):
                    place = self._fresh("i", str(form))
                    conditions.append(f"({place} >= {start}) & ({place} < {stop})")
                    variables |= self._counts_by(form)
                    if step > 1:
                        conditions.append(f"(({place} - {start}) % {step} == 0)")
                        own = self._variable(f"({place} - {start}) // {step}", use.layout.shape[dimension or 0], form)
                if dimension is not None:
                    inner[dimension] = own
            condition = self._fresh("b", " & ".join(conditions)) if conditions else ""
            value = self._under(condition, variables, statement, use, tuple(inner))
            value = self._cast(value, use.layout.dtype, output.dtype)
            result = self._fresh("x", f"tl.where({condition}, {value}, {result})") if condition and result else value
        return result

    def _replaced(self, statement: Statement, values: dict[str, Any], index: Index) -> str:
        """The elements of a tensor, with others at one place of each row."""
        dim = values["dim"] % len(index)
        one = (*index[:dim], Form(), *index[dim + 1 :])
        target, new = (self._read(statement, values[name], one) for name in ("index", "src"))
        place, old = self._fresh("i", str(index[dim])), self._read(statement, values["self"], index)
        return self._fresh("x", f"tl.where({place} == {target}, {new}, {old})")

    def _under(self, condition: str, variables: frozenset[str], statement: Statement, use: Use, index: Index) -> str:
        """The value of a tensor at an index that is inside of it under a condition, which counts by ``variables``."""
        outer = self._conditions
        self._conditions = [*outer, (condition, variables)] if condition else outer
        value = self._read(statement, use, index)
        self._conditions = outer
        return value

    def _by_rows(self, statement: Statement, call: Call, number: int, index: Index) -> str:
        """The value of a call that goes over rows, at an index."""
        operands, width, dim = operands_of(call), row_width(call), row_dim(call)
        shape, column = operands[0].layout.shape, Form.of_variable("c", width)
        lead = *index[:dim], *index[dim + (len(index) == len(shape)) :]
        is_whole = self.recording.buffers[number].layout.shape == shape
        place = index[dim] if is_whole else column
        is_column = [(term.factor, term.variable, term.divisor) for term in place.terms] == [(1, "c", 1)]
        if (
            any("c" in self._counts_by(form) for form in lead)
            or any(own != {"c"} for _, own in self._conditions)
            or (place.terms and (not is_column or place.constant))
        ):
            raise NotOneKernel
        outer, self._conditions, self._width = (self._conditions, self._width), [], width
        given = [
            self._cast(self._read(statement, use, (*lead[:dim], column, *lead[dim:])), use.layout.dtype, torch.float32)
            for use in operands
        ]
        self._conditions, self._width = outer
        found = ROW_OPS[call.op][1](*given, RowWriter(width, lambda text: self._fresh("x", text)))
        computed = torch.int32 if call.results.index(number) else torch.float32
        found = found[call.results.index(number)] if isinstance(found, tuple) else found
        if not place.terms:  # one element of each row
            found = self._fresh("x", f"tl.sum(tl.where(c == {place.constant}, {found}, 0.0), 1, keep_dims=True)")
        return self._cast(found, computed, self.recording.buffers[number].layout.dtype)


def _end(buffer: Buffer) -> int:
    """One more than the last place in a buffer that its tensor reaches."""
    return 1 + sum((size - 1) * stride for size, stride in zip(buffer.layout.shape, buffer.layout.stride, strict=True))
