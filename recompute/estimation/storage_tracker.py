"""Counts the bytes of tensors, real or fake, by following each storage from the op that makes it until it is freed."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from recompute.counters import MemoryTrace
from recompute.engine.cut.ops import tensors_in
from recompute.engine.fake_mode import DEVICE, FakeMode, device_of
from recompute.engine.modes import count_dispatch_modes
from recompute.engine.thread_state import local
from recompute.estimation.workspaces import workspace_nbytes
from recompute.kernels.launch import IMPLEMENTATIONS

_aten = torch.ops.aten
_is_made_of_tensors = functools.cache(is_traceable_wrapper_subclass_type)
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_WRAPPERS = ("inner", "_fn")  # functions of torch._compile around a dispatch mode, which keep it from being compiled

BLOCK_NBYTES = 512
"""What CUDA's caching allocator rounds sizes up to."""
OpClock = Callable[[Any, Any, Any, Any], float]
"""The seconds of an op, from the op, its arguments, its keyword arguments and its output."""


class StorageTrace(MemoryTrace):
    """Storages that ops make in this thread during a ``with`` block, and when each is freed, in whichever thread.

    block_nbytes: each storage counts as a whole number of these; 1 counts to the byte, as the CPU's allocator does.
    timed: makes it a clock, too, of the ops' calculated seconds. An op of ours counts as those inside. A kernel that is
        launched on tensors that stand for CUDA's comes with None in the op's place.

    Storages from before the block never count, nor does freeing them. Views share the storage of their base. A tensor
    that is made of tensors, as a ``DTensor`` is, counts as those inside. Workspaces count for ops in ``workspaces.py``
    and for our own kernels.
    """

    def __init__(self, block_nbytes: int = 1, timed: OpClock | None = None) -> None:
        super().__init__()
        self.alive_nbytes = 0
        self.seconds: dict[str, float] = {}
        """The seconds of the ops from mark to mark, by the name of the mark that ends each span."""
        self.on_grown: Callable[[int], None] = lambda nbytes: None
        """Called after each op with the bytes that are alive."""
        self.label: Callable[[Tensor, int], Any] = lambda tensor, nbytes: None
        """Called with a tensor of each new storage, and the storage's bytes; returns a label for it."""
        self.on_freed: Callable[[Any, int], None] = lambda label, nbytes: None
        """Called with the label and the bytes of each storage that no longer counts."""
        self.on_timed: Callable[[float], None] = lambda seconds: None
        """Called with the seconds of each op that has run, where ops are timed."""
        self._block_nbytes, self._timed = block_nbytes, timed
        self._mode = _StorageMode(self)
        self._alive: dict[int, tuple[weakref.ref[Any], int, Any]] = {}
        self._span_peak_nbytes, self._span_seconds = 0, 0.0

    def __enter__(self) -> StorageTrace:
        self._mode.__enter__()
        local.on_simulated_launch = lambda arguments: self.ran(None, arguments, {}, None)
        return self

    def mark(self, name: str) -> None:
        self.held_nbytes[name], self.span_peak_nbytes[name] = self.alive_nbytes, self._span_peak_nbytes
        self.seconds[name], self._span_seconds = self._span_seconds, 0.0
        self._span_peak_nbytes = self.alive_nbytes

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._mode.__exit__(kind, *rest)
        local.on_simulated_launch = None
        self._alive.clear()
        if kind is not None:
            self.held_nbytes.clear()
            self.span_peak_nbytes.clear()
            self.peak_nbytes = 0

    def alive(self) -> list[tuple[Any, int]]:
        """The label and the bytes of each storage that is alive."""
        return [(label, nbytes) for _, nbytes, label in list(self._alive.values())]

    def forget(self, tensor: Tensor) -> int:
        """Stop counting the storage of ``tensor``, which the caller counts from now on. Returns its bytes."""
        return self._drop(tensor.untyped_storage()._cdata)

    def ran(self, op: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note the seconds of an op that has run."""
        if self._timed is not None:
            seconds = self._timed(op, args, kwargs, output)
            self._span_seconds += seconds
            self.on_timed(seconds)

    def made(self, output: Any, args: Any, extra_nbytes: int, *, replaces_input: bool = False) -> None:
        """Note that an op has run, and count its new storages from now on.

        replaces_input: whether the output takes an input's place, so that the two never take memory together.
        """
        tensors = tensors_in(output)
        if extra_nbytes:
            self._grown(self._rounded(extra_nbytes) + sum(self._rounded(_nbytes(tensor)) for tensor in tensors))
        given: set[int] | None = None
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._alive or not (nbytes := self._rounded(storage.nbytes())):
                continue
            if given is None:
                given = {each.untyped_storage()._cdata for each in tensors_in(args)}
            if key in given:  # a storage from before the block
                continue
            # The entry is removed when the storage dies. Only after that can another storage have the same address.
            self._alive[key] = weakref.ref(storage, partial(self._died, key)), nbytes, self.label(tensor, nbytes)
            self.alive_nbytes += nbytes
        if not replaces_input:
            self._grown(0)

    def _grown(self, for_a_moment: int) -> None:
        alive = self.alive_nbytes + for_a_moment
        self.on_grown(alive)
        self.peak_nbytes = max(self.peak_nbytes, alive)
        self._span_peak_nbytes = max(self._span_peak_nbytes, alive)

    def _died(self, key: int, reference: weakref.ref[Any]) -> None:
        known = self._alive.get(key)
        if known is not None and known[0] is reference:
            self._drop(key)

    def _drop(self, key: int) -> int:
        _, nbytes, label = self._alive.pop(key, (None, 0, None))
        self.alive_nbytes -= nbytes
        if nbytes:
            self.on_freed(label, nbytes)
        return nbytes

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._block_nbytes) * self._block_nbytes


@contextmanager
def gradients_apart(
    parameters: Iterable[Tensor], trace: StorageTrace, took: Callable[[Tensor, int], None]
) -> Iterator[None]:
    """Inside, a complete gradient no longer counts: ``took`` is called with its parameter and its bytes."""

    def take(parameter: Tensor) -> None:
        if parameter.grad is not None:
            took(parameter, trace.forget(parameter.grad))

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _StorageMode(TorchDispatchMode):
    def __init__(self, trace: StorageTrace) -> None:
        super().__init__()
        self._trace = trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in ``FakeMode``

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(_is_made_of_tensors, types)):
            return NotImplemented  # its own dispatch runs ops on the tensors inside, which come here
        if op is DEVICE:
            return device_of(args[0])
        if op.namespace == "recompute" and op in IMPLEMENTATIONS:
            # Called here, so that each tensor that it allocates inside is seen.
            with self:
                return IMPLEMENTATIONS[op](*args, **kwargs)
        if local.simulates_cuda and op is _aten.addmm.dtype_out:
            return self._add_product(args[1], args[2], kwargs["out"])
        with torch._C.DisableTorchFunction():  # modes for functions have seen the function that calls this op
            output = _run(op, types, args, kwargs)
        self._trace.ran(op, args, kwargs, output)
        extra = workspace_nbytes(op, args, output) if local.simulates_cuda else 0
        replaces_input = op is _aten.add.Tensor and local.simulates_cuda and _is_called_by_autograd()
        self._trace.made(output, (args, kwargs), extra, replaces_input=replaces_input)
        return output

    def _add_product(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """Run an ``addmm`` of the same sizes in the place of one whose sum has a wider dtype, which the CPU lacks.

        It allocates nothing, as it writes to a part of ``out``.
        """
        part = out.view(left.dtype)[:, : out.shape[1]]
        output = _aten.addmm.out(part, left, right, out=part)
        self._trace.ran(_aten.addmm.out, (part, left, right), {"out": part}, output)
        return out


def _run(op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """``op(*args, **kwargs)`` under the modes beneath. The one of fake tensors is called without torch's dispatcher."""
    if count_dispatch_modes() == 1:
        with unset_fake_temporarily() as mode:
            if isinstance(mode, FakeMode):
                return mode.run(op, types, args, kwargs)
    return op(*args, **kwargs)


def _is_called_by_autograd() -> bool:
    """Whether autograd itself calls the op: an addition that sums the gradients from a tensor's readers.

    ``accumulate`` in torch/csrc/autograd/input_buffer.cpp adds in place to the sum so far, if nobody else holds it. On
    fake tensors it makes a new sum and then frees the old one. If somebody does hold the old sum, it is still alive at
    the next op, and both count there.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name in _WRAPPERS and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is _RUN_BACKWARD


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if isinstance(tensor, FakeTensor) else tensor.nbytes
