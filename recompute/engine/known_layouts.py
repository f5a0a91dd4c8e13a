"""Remembers the layouts of what ops on fake tensors return, by the layouts of what they are given.

Torch's own mode remembers them, too, but takes as long to look one up as to calculate it: most of an estimate's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_NEVER = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of ops whose output depends on values, or that give a tensor another layout or storage."""
_PLAIN = "_is_plain"
"""The name of an attribute of fake tensors that are known to be plain."""
_CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_META = torch.device("meta")


class _Layout(NamedTuple):
    """How to make an output anew."""

    source: int | None
    """Which of the op's tensors has the storage that it is a view of; None: it has one of its own."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]
    """``_PLAIN``, and those that the constructor gives it, which takes half as long as all else here."""


class KnownLayouts:
    """The layouts of what ops have returned under a mode of fake tensors."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._known: dict[int, dict[Any, Any] | None] = {}
        """By the ``id`` of an op, which lives for good: the outputs by what it is given; None: it is always run."""

    def run(self, op: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """What ``run``, which runs ``op`` on these arguments in the mode, returns or has returned."""
        number = id(op)
        if number not in self._known:
            depends_on_layouts = op.namespace == "aten" and not any(tag in op.tags for tag in _NEVER)
            self._known[number] = {} if depends_on_layouts else None
        known = self._known[number]
        if known is None:
            return run()
        parts: list[Any] = []
        tensors: list[FakeTensor] = []
        if not self._describe(args, parts, tensors) or not self._describe(kwargs.items(), parts, tensors):
            return run()
        key = tuple(parts)
        found = known.get(key) if tensors else None
        if found is None:
            output = run()
            layouts = _layouts(output, tensors, op._schema.is_mutable) if tensors else None
            after: list[Any] = []
            self._describe(args, after, [])
            self._describe(kwargs.items(), after, [])
            if layouts is not None and after == parts:  # an ``out`` may have been given another size
                known[key] = layouts
            return output
        if type(found) is int:
            return tensors[found]
        if isinstance(found, _Layout):
            return self._make(found, tensors)
        return type(found)([self._make(each, tensors) if isinstance(each, _Layout) else each for each in found])

    def _describe(self, values: Iterable[Any], parts: list[Any], tensors: list[FakeTensor]) -> bool:
        """Add what a layout may depend on; False where that is more than can be told."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or not _is_plain(value):
                    return False
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
                tensors.append(value)
            elif kind in (list, tuple):
                parts.append(len(value))
                if not self._describe(value, parts, tensors):
                    return False
            elif kind in _CONSTANTS:
                parts += (kind, value)
            else:
                return False
        return True

    def _make(self, layout: _Layout, tensors: list[FakeTensor]) -> FakeTensor:
        made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META)
        if layout.source is not None:
            made.set_(tensors[layout.source].untyped_storage(), layout.offset, layout.shape, layout.stride)
        fake: Any = Tensor._make_subclass(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=layout.device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(layout.attributes)
        return fake


def _layouts(output: Any, tensors: list[FakeTensor], writes: bool) -> Any:
    """How to make the output anew; None where it cannot be made so.

    An op that writes returns one of its own tensors: the index of it.
    """
    if writes:
        return next((index for index, each in enumerate(tensors) if each is output), None)
    storages = [each.untyped_storage()._cdata for each in tensors]
    if type(output) not in (list, tuple):
        return _layout(output, tensors, storages)
    found: list[Any] = []
    for each in output:
        layout = each if type(each) in (int, type(None)) else _layout(each, tensors, storages)
        if layout is None and each is not None:
            return None
        if isinstance(layout, _Layout) and layout.source is None:
            storages.append(each.untyped_storage()._cdata)  # another output that shares it cannot be made so
        found.append(layout)
    return type(output)(found)


def _layout(output: Any, tensors: list[FakeTensor], storages: list[int]) -> _Layout | None:
    if type(output) is not FakeTensor or not _is_plain(output) or any(output is each for each in tensors):
        return None
    device, storage = output.fake_device, output.untyped_storage()
    if device.type == "meta":
        return None
    source = storages.index(storage._cdata) if storage._cdata in storages else None
    offset, attributes = int(output.storage_offset()), {**vars(output), _PLAIN: True}
    layout = _Layout(source, output.shape, output.stride(), offset, output.dtype, device, attributes)
    if source is not None:
        return layout if source < len(tensors) else None
    own = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META).untyped_storage()
    return layout if not layout.offset and own.nbytes() == storage.nbytes() else None


def _is_plain(tensor: FakeTensor) -> bool:
    """Whether shape, strides, offset, dtype and device are all that there is to it."""
    if _PLAIN in vars(tensor):
        return True
    is_strided = tensor.constant is None and tensor.layout is torch.strided
    return is_strided and not tensor.dtype.is_complex and not tensor.is_neg()
