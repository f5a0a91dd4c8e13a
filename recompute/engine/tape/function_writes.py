"""The arguments that custom Functions write to. One that overwrites nothing in its first runs is believed not to.

Versions show the writes of its ops. A kernel may write unseen, so in the first runs the bytes are compared, too: the
arguments' in forward, and the saved tensors' in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recompute.engine.cut.ops import tensors_in
from recompute.engine.modes import hidden_from_any_modes
from recompute.engine.saved_tensors import version_of
from recompute.engine.tape.exposed_memory import bytes_of
from recompute.engine.tape.op_arguments import LISTS, parameter_of
from recompute.engine.thread_state import is_fake, is_in_cuda_graph, unseen_by_tapes

FIRST_RUNS = 4
"""After so many runs of a kind that have overwritten nothing, bytes are not compared any more."""
FIRST_BACKWARDS = 2
"""The same of backward. A region settles after one more frame than that."""
MOST_KINDS = 64
"""Kinds of runs that are known. In any other, all memory that a Function reaches counts as overwritten."""

_CONSTANTS = (bool, int, str, type(None))
_WORDS = 1 << 18
"""How many words ``checksum`` adds up at a time, so that it takes no memory to speak of."""
_ODD = -7046029254386353131
"""A factor by which numbers look random. No power of 2 divides it, so nothing is lost."""


@dataclass
class LearnedWrites:
    """The findings of the runs of one kind."""

    runs: int = 0
    backwards: int = 0
    """Runs whose backward left the saved tensors as they were."""
    written: set[int] = field(default_factory=set)
    """The arguments, by their positions among its tensors, that some run has overwritten."""


def checksum(memory: Tensor) -> int:
    """A number that is another one if a word of these bytes is, and almost surely if several are."""
    end = memory.numel() // 8 * 8
    words, rest = memory[:end].view(torch.int64), memory[end:].to(torch.int64)
    weights = _weights(memory.device)
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    for part in (*words.split(_WORDS), rest):
        total = total * _ODD + (part * weights[: part.numel()]).sum()
    return int(total)


@functools.lru_cache(8)
def _weights(device: torch.device) -> Tensor:
    return (torch.arange(_WORDS, device=device) * _ODD) | 1


class WatchedArguments:
    """The tensors that a Function is given, and which of them its forward leaves as they are."""

    def __init__(
        self,
        learned: dict[Any, LearnedWrites],
        context: Any,
        given: Sequence[Tensor],
        arguments: Any,
        *,
        is_saved_as_it_is: bool,
    ):
        """learned: of the Function. context: its ctx; None if it has none yet. given: the plain tensors it is given.

        arguments: all of them. is_saved_as_it_is: whether backward gets the very tensors that it saves.
        """
        self._context = context
        self._is_saved_as_it_is = is_saved_as_it_is
        self._given = [tensor for tensor in given if parameter_of(tensor) is None] if context is not None else []
        self._versions = list(map(version_of, self._given))
        kind = _kind(arguments)
        self._learned = learned.setdefault(kind, LearnedWrites()) if len(learned) < MOST_KINDS else learned.get(kind)
        self._checksums: list[int] | None = None
        if self._learned is None or (self._compares and is_in_cuda_graph()):
            self._given = []
        elif self._compares:
            self._checksums = self._checksums_now()

    @property
    def _compares(self) -> bool:
        assert self._learned is not None
        return self._learned.runs < FIRST_RUNS and not is_fake()

    def _checksums_now(self) -> list[int]:
        return [_checksum_of(tensor.untyped_storage()) for tensor in self._given]

    def left(self, handed_out: Collection[int]) -> set[int]:
        """The addresses of the StorageImpls whose content is unchanged, once forward has run.

        A storage that the Function holds for its backward is not among these, as long as that may write there. Nor is
        one of ``handed_out``: somebody has an array of it.
        """
        if not self._given:
            return set()
        now, learned = list(map(version_of, self._given)), self._learned
        assert learned is not None
        differs = [one != other for one, other in zip(self._versions, now, strict=True)]
        if self._checksums is not None:
            pairs = zip(self._checksums, self._checksums_now(), strict=True)
            differs = [each or one != other for each, (one, other) in zip(differs, pairs, strict=True)]
            learned.runs += 1
        learned.written.update(position for position, differ in enumerate(differs) if differ)
        written = [self._given[position] for position in learned.written if position < len(self._given)]
        taken = _storages([*written, *tensors_in(vars(self._context))]).union(handed_out)
        saved = _storages(tensors_in(getattr(self._context, "to_save", None))) - taken
        if not self._is_saved_as_it_is:  # backward may change it unseen, and it may not come back a little off
            taken |= saved
        elif learned.backwards < FIRST_BACKWARDS and saved and not is_fake():
            taken |= saved
            self._watch_backward(learned, saved)
        return _storages(self._given) - taken

    def _watch_backward(self, learned: LearnedWrites, saved: Collection[int]) -> None:
        """Look whether backward writes to saved storages. saved: the addresses of their StorageImpls."""
        watched = [
            (position, StorageWeakRef(storage))
            for position, tensor in enumerate(self._given)
            if (storage := tensor.untyped_storage())._cdata in saved
        ]
        before: list[int | None] = []

        def checksums() -> list[int | None]:
            if is_in_cuda_graph():
                return [None] * len(watched)
            alive = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for _, reference in watched]
            return [None if storage is None else _checksum_of(storage) for storage in alive]

        def end(*_: Any) -> None:
            differs = [one != other for one, other in zip(before, checksums(), strict=True)]
            learned.written.update(position for (position, _), each in zip(watched, differs, strict=True) if each)
            learned.backwards += not any(differs) and None not in before

        self._context.register_prehook(lambda _: before.__setitem__(slice(None), checksums()))
        self._context.register_hook(end)


def _checksum_of(storage: torch.UntypedStorage) -> int:
    with unseen_by_tapes, hidden_from_any_modes(), torch.no_grad():
        return checksum(bytes_of(storage))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if torch._C._has_storage(tensor)}


def _kind(value: Any) -> Any:
    """The facts of its arguments that a Function's behaviour may depend on."""
    if isinstance(value, Tensor):
        return value.dtype, value.device.type, value.requires_grad
    if type(value) in LISTS:
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple([(key, _kind(item)) for key, item in value.items()])
    return value if isinstance(value, _CONSTANTS) else type(value)
