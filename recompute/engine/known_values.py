"""Values of the few fake tensors that a model's shapes depend on: whole numbers, bools and tensors made of them.

They are calculated from the values of an op's inputs, and only when somebody asks for a shape or a number. Where an op
chooses by floats, as a router's ``topk`` does, the choices are taken in turn, so that all are chosen equally often.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from recompute.engine.cut.ops import tensors_in

_aten = torch.ops.aten
_MOST, _MOST_FLOATS = 2**27, 2**12  # elements of a tensor whose values are worth calculating
_CHOOSES = {
    _aten.topk.default: 1,
    _aten.argmax.default: None,
    _aten.max.dim: 1,
    _aten.sort.default: 1,
    _aten.multinomial.default: None,
}
"""Ops that choose, and which of their outputs has the indices of the choices; None: the only one."""
_SHAPED_BY_VALUES = {_aten.nonzero.default, _aten.bincount.default, _aten._unique2.default}
_SHAPED_BY_VALUES |= {_aten.repeat_interleave.Tensor, _aten.repeat_interleave.self_Tensor}
_LIFTS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_SOURCES = {id(op) for op in (*_CHOOSES, *_LIFTS)}
"""The ops whose outputs have known values though no input has. They live for good; to look one up by itself is slow."""
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Storage:
    """A tensor shares this with its views: whether the values are known, and the values that wait for them."""

    def __init__(self) -> None:
        self.is_known = True
        self.waiting: list[weakref.ref[_Value]] = []


class _Value:
    """A tensor's values, calculated when they are first asked for."""

    def __init__(self, make: Callable[[], Tensor], storage: _Storage | None = None) -> None:
        self._make, self.storage = make, storage or _Storage()
        self._found: Tensor | None = None

    def get(self) -> Tensor:
        """Raises ``_Unknown`` where they are not known any longer."""
        if self._found is None and self.storage.is_known:
            self._found = self._make()
        if self._found is None or not self.storage.is_known:
            raise _Unknown
        return self._found


class _Unknown(Exception):
    """A tensor was written to with unknown values."""


class KnownValues:
    """The values of the tensors that pass through a mode of fake tensors."""

    def __init__(self) -> None:
        self.chose_in_turn = False
        """Whether a shape or a number has depended on choices that were taken in turn."""

    def note(self, tensor: Tensor, values: Tensor) -> Tensor:
        """Remember the values of a fake tensor, and return it."""
        tensor._known = _Value(lambda: values)  # type: ignore[attr-defined]
        return tensor

    def run(self, op: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """The result of ``run``, which runs ``op`` on fake tensors; also where its shape depends on known values."""
        tensors = tensors_in((args, kwargs))
        known = [value for each in tensors if (value := getattr(each, "_known", None)) is not None]
        if not known:
            output = run(op, args, kwargs)
            if not tensors or id(op) in _SOURCES:
                self._begin(op, args, kwargs, output, tensors)
            return output
        is_all = len(known) == len(tensors)
        try:
            if op is _aten._local_scalar_dense.default:
                return known[0].get().item()
            if op in _SHAPED_BY_VALUES and is_all:
                found = op(*_values(args), **_values(kwargs))
                return tree_map_only(Tensor, lambda each: self.note(_like(args[0], each), each), found)
            if op in (_aten.index.Tensor, _aten.masked_select.default):
                chosen = args[1] if op is _aten.index.Tensor else [args[1]]
                op, args = _aten.index.Tensor, (args[0], [part for each in chosen for part in self._as_numbers(each)])
        except _Unknown:
            pass  # torch's own mode says what it misses
        if op._schema.is_mutable:
            return self._write(op, args, kwargs, is_all, run)
        output = run(op, args, kwargs)
        if is_all:
            self._derive(op, args, kwargs, output)
        return output

    def _begin(self, op: Any, args: Any, kwargs: Any, output: Any, tensors: list[Tensor]) -> None:
        """An op has run on tensors without known values."""
        if op in _CHOOSES:
            self._choose(op, args, kwargs, output)
        elif op in _LIFTS and tensors[0].dtype in _WHOLE:
            self.note(output, tensors[0].clone())
        elif op is _aten.rand.default and output.numel() == 1:  # a model may drop layers by it: it drops none
            self.note(output, torch.ones(output.shape))
        elif not tensors:
            self._derive(op, args, kwargs, output)

    def _as_numbers(self, index: Any) -> list[Any]:
        """A mask of bools as the indices that it selects."""
        value = getattr(index, "_known", None)
        if not isinstance(index, Tensor) or index.dtype is not torch.bool or value is None:
            return [index]
        return [self.note(_like(index, each), each) for each in value.get().nonzero(as_tuple=True)]

    def _derive(self, op: Any, args: Any, kwargs: Any, output: Any) -> None:
        outputs = [output] if isinstance(output, Tensor) else output if isinstance(output, (list, tuple)) else []
        has_none = torch.Tag.nondeterministic_seeded in op.tags or "empty" in op._opname
        if has_none or not any(map(_is_worth_it, outputs)):
            return
        given = tree_map_only(Tensor, lambda each: each._known, (args, kwargs))
        sources = [each for each in tree_iter(given) if isinstance(each, _Value)]
        is_view = any(each.alias_info is not None for each in op._schema.returns)
        for place, each in enumerate(outputs):
            if _is_worth_it(each):
                make = partial(_call, op, given, None if each is output else place)
                each._known = _Value(make, sources[0].storage if is_view and sources else None)
                for source in sources:
                    source.storage.waiting.append(weakref.ref(each._known))

    def _write(self, op: Any, args: Any, kwargs: Any, is_all: bool, run: Callable[..., Any]) -> Any:
        """Run an op that writes: first calculate all values that wait for the old ones, then write the values, too."""
        written: list[_Value] = [
            args[place]._known
            for place, each in enumerate(op._schema.arguments[: len(args)])
            if each.alias_info is not None
            and each.alias_info.is_write
            and getattr(args[place], "_known", None) is not None
        ]
        for value in written:
            try:
                for waiting in (found for each in value.storage.waiting if (found := each()) is not None):
                    waiting.get()
                if is_all:
                    _call(op, tree_map_only(Tensor, lambda each: each._known, (args, kwargs)))
            except _Unknown:
                is_all = False
            value.storage.is_known = is_all and value.storage.is_known
        return run(op, args, kwargs)

    def _choose(self, op: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Let indices of choices be 0, 1, 2 … along each row, and go on in the next row."""
        place = _CHOOSES[op]
        indices: Any = output if place is None else output[place]
        at = [each.name for each in op._schema.arguments].index("dim") if op is not _aten.multinomial.default else None
        dim = -1 if at is None else kwargs.get("dim", args[at] if at < len(args) else -1)
        dim = -1 if dim is None else dim
        choices = args[0].shape[dim] if args[0].dim() else 1
        shape, keeps_dim = tuple(indices.shape), indices.dim() == args[0].dim() > 0

        def in_turn() -> Tensor:
            self.chose_in_turn = True
            if not keeps_dim:
                return torch.arange(math.prod(shape)).remainder(choices).reshape(shape)
            rows = torch.empty(shape, device="meta").movedim(dim, -1).shape
            return torch.arange(math.prod(shape)).remainder(choices).reshape(rows).movedim(-1, dim).contiguous()

        indices._known = _Value(in_turn)


def _like(fake: Tensor, values: Tensor) -> Tensor:
    return fake.new_empty(values.shape, dtype=values.dtype)


def _values(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each._known.get(), arguments)


def _is_worth_it(output: Any) -> bool:
    return isinstance(output, Tensor) and output.numel() <= (_MOST if output.dtype in _WHOLE else _MOST_FLOATS)


def _call(op: Any, given: Any, place: int | None = None) -> Any:
    args, kwargs = tree_map(lambda each: each.get() if isinstance(each, _Value) else each, given)
    found = op(*args, **kwargs)
    return found if place is None else found[place]
