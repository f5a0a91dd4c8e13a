"""The recipes of the tensors that a policy's scope can drop, by storage. A saved tensor's recipe is found here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recompute.engine.bit_comparison import count_different
from recompute.engine.cut.layout import Layout
from recompute.engine.modes import has_foreign_modes, hidden_from_modes
from recompute.engine.numerics import Numerics
from recompute.engine.recipes import Handle, OpRecipe, Recipe, RecipeGroup, RecordedCall
from recompute.engine.region_statistics import DroppedOutput
from recompute.engine.saved_tensors import StorageKey, is_inside_checkpoint, pack_tensor, storage_key, version_of
from recompute.engine.thread_state import local, packing_for_recipe


@dataclass(slots=True)
class _Entry:
    storage: StorageWeakRef
    recipe: Recipe
    number: int
    version: int
    layout: Layout
    dropped_outputs: list[DroppedOutput]
    """The outputs of the same frame that were dropped."""
    counted: bool
    """Whether the statistics have it."""


@dataclass
class RecipeBook:
    """The recipes of one scope's tensors, by storage (invariant 3).

    A key is the address of a StorageImpl; the entry's weak reference keeps that address from being reused.
    """

    numerics: Numerics = field(default_factory=Numerics)
    """torch's settings in the scope."""
    entries: dict[StorageKey, _Entry] = field(default_factory=dict)

    def enter(
        self, output: Tensor, recipe: Recipe, number: int, whole: Layout | None = None, *, counted: bool = False
    ) -> None:
        """whole: the layout of the recipe's value, if ``output`` is a view of that. counted: in the statistics."""
        if (key := storage_key(output)) is not None and not output.is_conj() and not output.is_neg():
            reference = StorageWeakRef(output.untyped_storage())
            layout, dropped_outputs = whole or Layout.of(output), recipe.statistics.dropped_outputs
            self.entries[key] = _Entry(reference, recipe, number, version_of(output), layout, dropped_outputs, counted)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a recipe regenerates the memory that ``tensor`` is a view of."""
        entry = self.entries.get(tensor.untyped_storage()._cdata)
        return entry is not None and version_of(tensor) == entry.version

    def handle(self, tensor: Tensor) -> Handle | None:
        """A handle for ``tensor``; None where no recipe regenerates these very bytes."""
        key = storage_key(tensor)
        entry = None if key is None else self.entries.get(key)
        if entry is None or version_of(tensor) != entry.version:  # unknown, or mutated since (invariant 5)
            return None
        if not tensor.untyped_storage().resizable():  # it became an array, which may have been written to
            return None
        view = Layout.of(tensor)
        if view.dtype is not entry.layout.dtype or tensor.is_conj() or tensor.is_neg():  # the bytes mean other numbers
            return None
        if not entry.counted and not local.packing_for_recipe:
            self._count(entry, tensor)
        return entry.recipe.handle(entry.number, None if view == entry.layout else (view, entry.layout))

    def is_given_to_a_kernel(self, tensor: Tensor, *, is_eager: bool) -> bool:
        """Whether a recipe regenerates ``tensor``, which a kernel is about to save. is_eager: as for ``_count``."""
        if not self.knows(tensor):
            return False
        entry = self.entries[tensor.untyped_storage()._cdata]
        if not entry.counted and not is_eager:
            self._count(entry, tensor, is_eager=False)
        return True

    def _count(self, entry: _Entry, tensor: Tensor, *, is_eager: bool = True) -> None:
        """Add it to the statistics. is_eager: whether it is saved without the policy, too."""
        entry.counted = True
        statistics, nbytes = entry.recipe.statistics, tensor.untyped_storage().nbytes()
        statistics.dropped_tensors += 1
        statistics.dropped_nbytes += nbytes
        statistics.eager_nbytes += nbytes if is_eager else 0
        entry.dropped_outputs.append(DroppedOutput(entry.recipe.name, entry.layout, nbytes))

    def forget(self, tensor: Tensor) -> None:
        if (key := storage_key(tensor)) is not None:
            self.entries.pop(key, None)


def open_book() -> RecipeBook | None:
    if torch.compiler.is_compiling():  # a scope that is open meanwhile is for eager code
        return None
    book: RecipeBook | None = local.books[-1] if local.books else None
    return book


def record(output: Tensor, regenerate: Callable[..., Tensor], *inputs: Any) -> None:
    """Tell the enclosing policy scope that ``regenerate(*inputs)`` regenerates ``output``, bit for bit.

    Ops that know how to regenerate their output call it, as kernels do. In backward ``regenerate`` runs without
    gradients, on tensors bitwise equal to ``inputs``; other values are passed as they are. Its result must have the
    layout and dtype of ``output`` and depend on nothing else.

    Does nothing where no scope is open, gradients are off, or a foreign mode has changed the output. Nor does it under
    a checkpoint, which drops everything and counts by itself.
    """
    book = open_book()
    if book is not None and torch.is_grad_enabled() and not is_inside_checkpoint():
        if has_foreign_modes() and not _reproduces(output, regenerate, inputs):
            return
        with packing_for_recipe():
            args = tuple(
                pack_tensor(value, local.statistics.name) if isinstance(value, Tensor) else value for value in inputs
            )
        name = getattr(regenerate, "__qualname__", type(regenerate).__name__)
        call = RecordedCall(regenerate, args, {})
        book.enter(output, OpRecipe(local.statistics, call, name, RecipeGroup(book.numerics)), 0)


def _reproduces(output: Tensor, regenerate: Callable[..., Tensor], inputs: Sequence[Any]) -> bool:
    with hidden_from_modes(), torch.no_grad():
        value = regenerate(*inputs)
        return Layout.of(value) == Layout.of(output) and not count_different(value, output)
