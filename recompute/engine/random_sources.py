"""Random generators whose states can be read, compared and put back: of torch, Python, NumPy, and trackers of such."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from recompute.errors import RngError


class RandomSource:
    """Something random whose state can be read, compared and put back."""

    def __init__(self, generator: Any, read: Callable[[], Any] | None = None, put: Callable[[Any], None] | None = None):
        """read, put: get and set the state, which ``==`` can compare; a subclass may do both in its own way."""
        self.generator = generator
        self._read, self._put = read, put

    def state(self) -> Any:
        assert self._read is not None
        return self._read()

    def restore(self, state: Any) -> None:
        assert self._put is not None
        self._put(state)

    def same(self, a: Any, b: Any) -> bool:
        return bool(a == b)


class CpuSource(RandomSource):
    """The CPU's default generator, or a ``torch.Generator`` on the CPU. Its state is 5 KB, held as bytes to compare."""

    def state(self) -> bytes:
        if not _count_modes():
            return _numpy(self.generator.get_state()).tobytes()
        with _disable_current_modes():  # a mode might make the state a fake tensor, say
            return _numpy(self.generator.get_state()).tobytes()

    def restore(self, state: bytes) -> None:
        with _disable_current_modes():
            self.generator.set_state(torch.from_numpy(np.frombuffer(bytearray(state), np.uint8)))


_count_modes = torch._C._len_torch_dispatch_stack
_numpy = torch._C.TensorBase.numpy  # ``Tensor.numpy`` would tell tapes that memory is handed out


class CudaSource(RandomSource):
    """A CUDA generator. Its algorithm is Philox, whose whole state is a seed and an offset."""

    def state(self) -> tuple[int, int]:
        try:
            return self.generator.initial_seed(), self.generator.get_offset()
        except RuntimeError as error:  # torch refuses to read a generator while a CUDA graph is captured
            raise RngError(
                f"the state of the random generator of {self.generator.device} cannot be read: the module ran under "
                "its rule while a CUDA graph was being captured, where what it draws cannot be drawn again. Compile "
                'it, with `mode="reduce-overhead"`, which has CUDA graphs of its own; or give it a rule with `action: '
                f"recompute` and no dropout; or capture the graph without the policy. ({error})"
            ) from error

    def restore(self, state: tuple[int, int]) -> None:
        seed, offset = state
        self.generator.manual_seed(seed)
        self.generator.set_offset(offset)


class _TrackerSource(RandomSource):
    """A tracker: it swaps the states of CUDA generators by name, as trainers with tensor parallelism do.

    Any object counts as one whose class has ``get_states() -> dict`` and ``set_states(dict)``, as those of several
    libraries have. So no library needs an adapter, and a user's own tracker works too.
    """

    def state(self) -> dict[str, Any]:
        return {
            name: state.clone() if isinstance(state, torch.Tensor) else state
            for name, state in self.generator.get_states().items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.generator.set_states(dict(state))

    def same(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a.keys() == b.keys() and all(
            torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name] for name in a
        )


GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
GLOBALS: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)
"""What the functions of Python's ``random`` and of ``numpy.random`` draw from. To read both takes 50 us."""
CPU = CpuSource(torch.default_generator)


def source_of(value: Any) -> RandomSource | None:
    """The source that ``value`` is, or whose method it is; None if it is neither."""
    if isinstance(value, torch.Generator):
        return CudaSource(value) if value.device.type == "cuda" else CpuSource(value)
    value = getattr(value, "__self__", value) if isinstance(value, (MethodType, BuiltinMethodType)) else value
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else RandomSource(value, value.getstate, value.setstate)
    # NumPy's states are pickled: a copy, as == cannot compare arrays in it.
    if isinstance(value, np.random.RandomState):  # it makes two normal numbers, and holds the second back
        legacy = value
        return RandomSource(
            value, lambda: pickle.dumps(legacy.get_state(legacy=False)), lambda s: legacy.set_state(pickle.loads(s))
        )
    if isinstance(value, np.random.Generator):
        own = value.bit_generator
        return RandomSource(value, lambda: pickle.dumps(own.state), lambda s: setattr(own, "state", pickle.loads(s)))
    kind = type(value)
    if callable(getattr(kind, "get_states", None)) and callable(getattr(kind, "set_states", None)):
        return _TrackerSource(value)
    return None


def is_random_source(value: Any) -> bool:
    """Whether ``value`` is a random generator of torch, Python or NumPy, a method of one, or a tracker of states."""
    return source_of(value) is not None
