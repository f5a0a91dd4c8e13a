"""Writes down the ops that a region ran below autograd, as calls, and the buffers that these read, make and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload

from recompute.compiled.calls import Buffer, Call, FunctionResult, ObjectUse, RecordedFunction, Started, Use
from recompute.compiled.generated.switch import Generates, is_generating
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import DATA_DEPENDENT, EFFECT, NO_TENSOR, Kind, facts, facts_of_call, tensors_in
from recompute.engine.cut.save_plan import LARGEST_COPY
from recompute.engine.numerics import Numerics
from recompute.engine.storage_numbers import StorageNumbers
from recompute.engine.tape.autocast import left_out
from recompute.engine.tape.functions import FunctionOp
from recompute.engine.tape.op_arguments import (
    LISTS,
    at,
    generators_of,
    is_constant,
    is_frozen,
    is_plain,
    not_plain,
    parameter_of,
)

_RESTRIDES = torch.ops.aten.as_strided_.default  # as pooling to one value does, for channels that are last
WRITES_GRADIENT = "it writes a value that takes a gradient to one of its inputs"
_DATA_DEPENDENT = {Tag.data_dependent_output, Tag.dynamic_output_shape}


class NotCapturable(Exception):
    """Why a region cannot run as code."""


class Departure(Exception):
    """Other calls run than expected."""

    def __init__(self, reason: str = "torch.compile's graph of it runs other ops than its eager forward"):
        super().__init__(reason)


@dataclass
class Recording:
    """Calls, and the buffers that they read and make. It holds no tensors but small constants."""

    objects: Sequence[Any] = ()
    """The objects that the graph is given beside tensors. Its custom Functions may be given these."""
    is_open: bool = False
    """Whether calls may read tensors that were not given before."""
    is_forward: bool = True
    """Whether calls are forward's so far."""
    numerics: Numerics = field(default_factory=Numerics)
    """torch's settings when it began."""
    generates: Generates = Generates.EXACT
    """The kernels that its code may run in."""
    stable: set[int] = field(default_factory=set)
    """The buffers that are to have the same bits in forward and when they come back."""
    given_away: set[int] = field(default_factory=set)
    """The buffers that others get: each is to have memory of its own."""
    buffers: list[Buffer] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    functions: dict[int, RecordedFunction] = field(default_factory=dict)
    """The calls of custom Functions."""
    _reached: Sequence[int] = ()
    """The storages that the last custom Function may have written to, by the addresses of the StorageImpls."""
    placed: set[int] = field(default_factory=set)
    """The buffers, of inputs and gradients, that were read at a place counted from the start of their storage."""
    current: StorageNumbers = field(default_factory=StorageNumbers)
    """The buffer in each storage."""

    @property
    def device(self) -> torch.device | None:
        """The one that generated kernels are for: that of the first tensor that is given."""
        return self.buffers[0].device if self.buffers else None

    @property
    def is_generated(self) -> bool:
        """Whether kernels are generated for it."""
        return bool(self.generates) and self.device is not None and is_generating(self.device)

    def maker(self, use: Use) -> Call | None:
        """The call that made, or wrote, all of a tensor."""
        index = self.buffers[use.buffer].call
        return None if index is None else self.calls[index]

    def made(self, calls: Iterable[Call]) -> list[int]:
        """The buffers that calls make."""
        return list(dict.fromkeys(number for call in calls for number in call.made if number is not None))

    def nbytes(self, numbers: Iterable[int]) -> int:
        return sum(self.buffers[number].nbytes for number in numbers)

    def give(self, tensor: Tensor, position: int) -> int:
        """Add a tensor that no call has made."""
        if not is_plain(tensor):
            raise NotCapturable(f"one of its inputs is {not_plain(tensor)}")
        return self._given(tensor, position)

    def receive(self, gradient: Tensor, call: int | None = None) -> int:
        """Add a gradient that backward is given, or that ``call``, a custom Function's backward, has given."""
        if not is_plain(gradient) or not torch._C._has_storage(gradient):  # a batch of gradients has none
            raise NotCapturable(f"its backward gets a gradient that is {not_plain(gradient)}")
        return self._given(gradient, None) if call is None else self._new(gradient, call=call)

    def _given(self, tensor: Tensor, position: int | None) -> int:
        """A buffer of its own for a tensor that no call has made.

        Where it shares memory with an earlier one, ops read that, at a place counted from the start of the storage.
        """
        root = self.current.of(tensor)
        number = self._new(tensor, given=position, root=root)
        self.placed |= set() if root is None else {root, number}
        return number

    def use(self, tensor: Tensor) -> Use:
        """A tensor that an op reads, as a ``Use`` of a buffer that has been seen before."""
        is_conjugate = tensor.is_conj()
        if is_conjugate:
            tensor = tensor.conj()  # the numbers in memory
        if not is_plain(tensor) and not is_frozen(tensor):
            raise NotCapturable(f"an op reads {not_plain(tensor)}")
        number = self.current.of(tensor)
        if number is None and self.is_open:
            number = self._new(tensor)
        if number is None:
            raise NotCapturable("an op reads a tensor that is neither an input nor made inside of it")
        if tensor.dtype is not self.buffers[number].layout.dtype:
            self._place(tensor)
        return Use(number, Layout.of(tensor), is_conjugate)

    def knows(self, tensor: Tensor) -> bool:
        return torch._C._has_storage(tensor) and self.current.of(tensor) is not None

    def bind(self, tensor: Tensor, buffer: int) -> None:
        """From now on the contents of the tensor's storage are known as ``buffer``."""
        self.current.bind(tensor.untyped_storage(), buffer)

    def run(self, op: Any, args: tuple, kwargs: dict, run: Callable[[], Any], give_up: Callable[..., None]) -> Any:
        """Run an op and record it. give_up: called with the reason if it cannot be recorded."""
        started = None
        try:
            started = self.start(op, args, kwargs)
        except NotCapturable as error:
            give_up(error)
        output = run()
        if op is torch.ops.aten.lift_fresh.default and self.knows(args[0]):  # on fake tensors it makes another one
            self.bind(output, self.current[args[0].untyped_storage()._cdata])
        if started is not None:
            try:
                self.end(started, output)
            except NotCapturable as error:
                give_up(error)
        return output

    def start(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Started | None:
        """An op is about to run. Returns None if it makes nothing new."""
        if type(op) is FunctionOp:  # the forward of a custom ``autograd.Function``: one call, whatever it does
            template = self._template(args, takes_objects=True), self._template(kwargs, takes_objects=True)
            reached = [(t, Layout.of(t)) for t in tensors_in((args, kwargs)) if parameter_of(t) is None]
            return Started(op, *template, reached)
        known = facts(op)
        if known.kind is Kind.VIEW:
            if isinstance(op, OpOverload) and _DATA_DEPENDENT.intersection(op.tags):
                raise NotCapturable(f"{known.name}: {DATA_DEPENDENT}")
            if op is torch.ops.aten.lift_fresh.default:
                self._see_constant(args[0])
            has_offset = op is torch.ops.aten.as_strided.default and kwargs.get("storage_offset", args[3:]) != ()
            if has_offset and self.is_forward:  # in backward our own hooks make such views
                self._place(args[0])
            return None
        if self.is_forward and not self.numerics.bear_on(is_costly=True):
            raise NotCapturable("its forward changes torch's settings")
        if not isinstance(op, OpOverload):
            raise NotCapturable(f"{op} is not an op of PyTorch's dispatcher")
        if known.is_foreign and known.reason in (EFFECT, NO_TENSOR):  # forward may have to run again
            raise NotCapturable(f"{known.name}: {known.reason}")
        if known.is_foreign and generators_of(op):
            raise NotCapturable(f"{known.name} may draw random numbers from its own generator")
        if (known.casts_inside or torch.is_inference_mode_enabled()) and left_out():
            raise NotCapturable(f"autocast casts inside of {known.name}")
        known = facts_of_call(op, args, kwargs)
        if _DATA_DEPENDENT.intersection(op.tags) and known.reason == DATA_DEPENDENT:
            raise NotCapturable(f"{known.name}: {DATA_DEPENDENT}")
        written = tensors_in(at(known.writes, args, kwargs))
        started = Started(op, self._template(args), self._template(kwargs), [(t, Layout.of(t)) for t in written])
        if self.is_forward:
            for tensor in written:  # before the op writes, which could not be taken back
                if tensor.is_conj():
                    raise NotCapturable(f"{known.name} writes to a lazy conjugate (Tensor.conj)")
                if self.is_given(tensor) and not (known.is_update and self._may_be_put_back(tensor)):
                    raise NotCapturable(f"it writes to one of its inputs, by {known.name}")
                if self.is_given(tensor) and known.kind is Kind.IN_PLACE and _is_differentiated((args, kwargs)):
                    raise NotCapturable(WRITES_GRADIENT)  # autograd would note the write, which stays if it is undone
        return started

    def is_given(self, tensor: Tensor) -> bool:
        """Whether no call has made the memory of a tensor that an op reads."""
        return self.buffers[self.buffers[self.use(tensor).buffer].root].call is None

    def _may_be_put_back(self, tensor: Tensor) -> bool:
        is_literal = self.buffers[self.use(tensor).buffer].constant is not None
        return not is_literal and tensor.untyped_storage().nbytes() <= LARGEST_COPY and parameter_of(tensor) is None

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """That Function has run, and its ops and kernels have reached these."""
        others = [tensor for tensor in tensors if parameter_of(tensor) is None]
        self._reached = [tensor.untyped_storage()._cdata for tensor in others]

    def end(self, started: Started, output: Any) -> None:
        """That op has run."""
        index, is_function = len(self.calls), type(started.op) is FunctionOp
        written: dict[int, tuple[int, int]] = {}
        for tensor, layout in started.written:
            key, now = tensor.untyped_storage()._cdata, Layout.of(tensor)
            is_whole = started.op is _RESTRIDES and layout == self.buffers[self.current[key]].layout
            if now != layout and not is_whole:
                raise NotCapturable(f"{started.op} changes the shape of an argument")
            if key not in written:
                written[key] = self._overwrite(key, index, may_not=is_function)
                if is_whole:
                    self.buffers[written[key][1]].layout = now
        if is_function:
            unseen = [key for key in self._reached if key in self.current and key not in written]
            written |= {key: self._overwrite(key, index, may_not=True) for key in unseen}
        is_sequence = type(output) in LISTS
        outputs, results = output if is_sequence else (output,), list[int | None]()
        for tensor in outputs:
            if not isinstance(tensor, Tensor):
                results.append(None)
            elif not is_plain(tensor):
                raise NotCapturable(f"{started.op} returns {not_plain(tensor)}")
            else:
                results.append(None if self.knows(tensor) else self._new(tensor, call=index))
        if is_function:
            results_of = [FunctionResult(Layout.of(o), o.device) if isinstance(o, Tensor) else o for o in outputs]
            keys = [o.untyped_storage()._cdata if isinstance(o, Tensor) else -1 for o in outputs]
            reached, returned = ([self.current.get(key) for key in each] for each in (self._reached, keys))
            self.functions[index] = RecordedFunction(results_of, reached, returned)
        self.calls.append(Call(*started[:3], tuple(results), tuple(written.values()), is_sequence))

    def _overwrite(self, key: int, call: int, *, may_not: bool) -> tuple[int, int]:
        """The buffers of a storage before and after a call has written there.

        may_not: the call may not have done so. Then a buffer from outside stays the same: its tensor has a version.
        """
        before = self.current[key]
        old = self.buffers[before]
        if may_not and (key not in self._reached or self.buffers[old.root].call is None):
            return before, before
        self.buffers.append(Buffer(old.layout, old.nbytes, old.root, call=call, device=old.device))
        self.current[key] = len(self.buffers) - 1
        return before, self.current[key]

    def add(self, first: Use, second: Use) -> Use:
        """Add autograd's sum of two gradients of one tensor, as a call. Nobody has seen the sum yet."""
        layout = Layout.of(first.layout.empty() + second.layout.empty())
        number = self.number_unseen(layout, self.buffers[first.buffer].device, len(self.calls))
        self.calls.append(Call(torch.ops.aten.add.Tensor, (first, second), {}, (number,), (), is_sequence=False))
        return Use(number, layout)

    def number_unseen(self, layout: Layout, device: torch.device | None, call: int | None = None) -> int:
        """A buffer for a tensor in memory of its own that nobody has seen yet."""
        number, nbytes = len(self.buffers), layout.shape.numel() * layout.dtype.itemsize
        self.buffers.append(Buffer(layout, nbytes, number, call=call, device=device))
        return number

    def _see_constant(self, tensor: Tensor) -> None:
        """Remember the tensor that ``torch.tensor`` makes from a literal."""
        if is_plain(tensor) and not self.knows(tensor) and tensor.untyped_storage().nbytes() <= LARGEST_COPY:
            self.buffers[self._new(tensor)].constant = tensor.clone()

    def _place(self, tensor: Tensor) -> None:
        """Note that the place of a tensor is counted from the start of its storage."""
        number = self.current.of(tensor)
        if number is not None and self.buffers[root := self.buffers[number].root].call is None:
            self.placed.add(root)

    def _new(
        self, tensor: Tensor, *, given: int | None = None, call: int | None = None, root: int | None = None
    ) -> int:
        number = len(self.buffers)
        nbytes, first = tensor.untyped_storage().nbytes(), number if root is None else root
        self.buffers.append(Buffer(Layout.of(tensor), nbytes, first, given, call, device=tensor.device))
        if root is None:
            self.bind(tensor, number)
        return number

    def _template(self, value: Any, *, takes_objects: bool = False) -> Any:
        if isinstance(value, Tensor):
            return self.use(value)
        if isinstance(value, dict):
            return {key: self._template(item, takes_objects=takes_objects) for key, item in value.items()}
        if type(value) in LISTS:
            return type(value)([self._template(item, takes_objects=takes_objects) for item in value])
        if is_constant(value):
            return value
        position = next((index for index, known in enumerate(self.objects) if known is value), None)
        if not takes_objects or (position is None and not self.is_open):
            raise NotCapturable(f"an op takes an argument of type {type(value).__name__}")
        return ObjectUse(position)


def _is_differentiated(arguments: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(arguments))
