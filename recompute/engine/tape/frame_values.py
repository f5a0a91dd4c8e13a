"""The values of one frame: the contents of each storage, from one write to the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from recompute.engine.cut.layout import Layout
from recompute.engine.cut.save_plan import SavePlan, ValueFacts
from recompute.engine.dtensors import has_layout, is_managed_elsewhere, local_of
from recompute.engine.numerics import Numerics
from recompute.engine.recipe_book import RecipeBook
from recompute.engine.saved_tensors import ParameterReference, version_of, without_graph
from recompute.engine.storage_numbers import StorageNumbers
from recompute.engine.tape.exposed_memory import is_exposed
from recompute.engine.tape.op_arguments import PLAIN, is_plain, not_regenerable, parameter_of

_STRIDED = torch.strided


class PlanMismatch(Exception):
    """The frame does something else than the plan that it follows."""


class FrameValues:
    """The value in each storage, and its facts. A value is known by its number.

    While the frame follows a plan, the plan's numbers count, and only the values that the plan needs are here.
    """

    def __init__(self, name: str, book: RecipeBook | None, *, compares: bool):
        """name: of the region, for errors. book: the recipes of the scope around. compares: copy every value."""
        self.name = name
        self.numerics = Numerics()
        """torch's settings when the frame began."""
        self._book = book
        self.plan: SavePlan | None = None
        """The plan that the frame has followed so far."""
        self.facts: list[ValueFacts] = []
        """The facts of the values, by number: the plan's, as long as one is followed."""
        self.current = StorageNumbers()
        """The number of the value in each storage."""
        self.versions: dict[int, int | None] = {}
        """The version of each value's storage; None if an op has just written it, and autograd has not counted that."""
        self.overwritten: set[int] = set()
        self.exposed: set[int] = set()
        """The storages, by the addresses of their StorageImpls, that others may write to unseen."""
        self.held: dict[int, Tensor] = {}
        """Tensors with their graphs, until the frame ends."""
        self.parameters: dict[int, Tensor] = {}
        self.sharded_parameters: dict[int, Tensor] = {}
        """The parameters that are DTensors, by the storages of this rank's parts."""
        self._dtensors: dict[int, weakref.ref[Tensor]] = {}
        """Other DTensors, likewise."""
        self.originals: dict[int, Tensor] | None = {} if compares else None
        """Copies, to compare with the regenerated values."""

    def follow(self, plan: SavePlan) -> None:
        self.plan, self.facts = plan, list(plan.facts)

    def number_of(self, tensor: Tensor, foreseen: int | None = None) -> tuple[int, Tensor | None]:
        """The number of the value in a tensor, and the parameter that the tensor is, or is a view of.

        foreseen: the number that the plan expects, if one is followed.
        """
        kind = type(tensor)
        if kind not in PLAIN or tensor.layout is not _STRIDED or tensor.is_neg() or tensor.is_conj():
            raise not_regenerable(tensor)
        parameter = None if kind is Tensor and tensor._base is None else parameter_of(tensor)
        number = self.current.get(tensor.untyped_storage()._cdata)
        if number is not None and (parameter is None or number in self.parameters):  # else it was gathered just now
            version, known = version_of(tensor), self.versions[number]
            if version == known:
                return number, parameter
            if parameter is not None and parameter is not self.parameters[number]:
                return number, parameter  # ZeRO lays out several parameters in one storage
            if known is None:
                self.versions[number] = version
                return number, parameter
            foreseen = None  # something has written to it that the tape does not see
        return self._add_given(tensor, parameter, foreseen), parameter

    def _add_given(self, tensor: Tensor, parameter: Tensor | None, foreseen: int | None) -> int:
        """Add a value that no step has made."""
        if tensor.is_nested:
            raise not_regenerable(tensor)
        storage = tensor.untyped_storage()
        if parameter is None and self.sharded_parameters:
            parameter = self.sharded_parameters.get(storage._cdata)
        part = tensor if parameter is None else local_of(parameter)
        layout = Layout.of(part)
        # Holding a tensor that a recipe of the scope around regenerates costs nothing.
        alive = parameter is not None or (self._book is not None and self._book.knows(tensor))
        if parameter is None and is_exposed(storage):
            self.exposed.add(storage._cdata)
        exposed, plan = storage._cdata in self.exposed, self.plan
        if plan is None:
            number = len(self.facts)
            self.facts.append(ValueFacts(layout, storage.nbytes(), None, None, alive, parameter is not None, exposed))
        elif foreseen is None or foreseen in self.versions:  # another tensor has that number
            raise PlanMismatch
        else:
            number, known = foreseen, plan.facts[foreseen]
            if known.step is not None or known.alive is not alive or known.is_exposed is not exposed:
                raise PlanMismatch
            if not _see_the_same(known.layout, layout):
                raise PlanMismatch
        is_held = parameter is not None or plan is None or number in plan.kept
        self.bind(number, tensor, part if is_held else None, parameter)
        return number

    def add(
        self,
        tensor: Tensor,
        layout: Layout,
        *,
        step: int,
        slot: int | None,
        held: Tensor | None,
        parameter: Tensor | None = None,
        written: bool = False,
    ) -> int:
        """Add the value that ``step`` has put into the tensor's storage. ``layout`` sees all of it.

        The rest is as in ``bind``.
        """
        number, storage, is_parameter = len(self.facts), tensor.untyped_storage(), parameter is not None
        exposed = storage._cdata in self.exposed
        self.facts.append(ValueFacts(layout, storage.nbytes(), step, slot, is_parameter, is_parameter, exposed))
        self.bind(number, tensor, held, parameter, written=written)
        return number

    def bind(
        self,
        number: int,
        tensor: Tensor,
        held: Tensor | None,
        parameter: Tensor | None = None,
        *,
        written: bool = False,
    ) -> None:
        """From now on the tensor's storage holds the value ``number``.

        held: held until the frame ends, in the place of the value. parameter: the one that the storage belongs to.
        written: by an op, and autograd has not counted that yet.
        """
        storage = tensor.untyped_storage()
        if (old := self.current.bind(storage, number)) is not None:
            self.overwritten.add(old)
            self.held.pop(old, None)
        self.versions[number] = None if written else version_of(tensor)
        if storage._cdata in self.exposed:
            self.overwritten.add(number)
        if parameter is not None:
            self.parameters[number] = parameter
        if held is not None:
            self.held[number] = held
        if self.originals is not None:
            self.originals[number] = without_graph(tensor, copy=True)

    def bind_new(self, number: int, tensor: Tensor, storage: torch.UntypedStorage, *, holds: bool) -> None:
        """``bind`` for a storage that has held no value yet."""
        self.current.bind(storage, number)
        self.versions[number] = version_of(tensor)
        if holds:
            self.held[number] = tensor
        if self.originals is not None:
            self.originals[number] = without_graph(tensor, copy=True)

    def note_counter(self, tensor: Tensor) -> None:
        """From now on this tensor counts the writes to its storage, and the tensor seen there before does not.

        It is matmul's output: an unsafe view of the product, with a version counter of its own.
        """
        number = self.current.of(tensor)
        if number in self.held and number not in self.parameters:
            self.held[number], self.versions[number] = tensor, version_of(tensor)

    def note_unseen_writes(self) -> None:
        """Count values as overwritten if something that the tape does not see has written to them."""
        for number, tensor in self.held.items():
            version = self.versions[number]
            if version is not None and version != version_of(tensor):
                self.overwritten.add(number)

    def released_parameters(self) -> set[int]:
        """The parameters whose memory is gone by now, or may be at any time.

        FSDP, for one, gathers the weights of an inner module only while that runs.
        """
        return {
            number
            for number, parameter in self.parameters.items()
            if (memory := self.held.get(number)) is not None  # it is None if a backward inside has written to it
            and (memory.untyped_storage().nbytes() == 0 or is_managed_elsewhere(parameter))
        }

    def note_dtensors(self, tensors: Iterable[Tensor]) -> None:
        """Remember the DTensors whose parts the tape sees."""
        for tensor in tensors:
            if has_layout(tensor):
                key = tensor._local_tensor.untyped_storage()._cdata  # type: ignore[attr-defined]
                parameter = parameter_of(tensor)
                if parameter is not None:
                    self.sharded_parameters[key] = parameter
                elif key not in self._dtensors or self._dtensors[key]() is None:
                    self._dtensors[key] = weakref.ref(tensor)

    def dtensor_of(self, part: Tensor) -> Tensor | None:
        """The DTensor whose part on this rank this is; None if it is gone, or is a parameter."""
        reference = self._dtensors.get(part.untyped_storage()._cdata) if self._dtensors else None
        return None if reference is None else reference()

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor, or the tensor itself if it is plain."""
        if type(tensor) in PLAIN:
            return tensor
        self.note_dtensors((tensor,))
        return local_of(tensor)

    def plain_parts(self, values: Iterable[Any]) -> list[Tensor]:
        """The tensors among ``values``, or this rank's parts of them, that are views of storages and nothing else."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [tensor for tensor in map(self.part_of, tensors) if is_plain(tensor)]

    def parameter_in(self, storage: torch.UntypedStorage, tensor: Tensor | None) -> Tensor | None:
        """The parameter in the storage that ``tensor`` may be a view of."""
        number = self.current.get(storage._cdata)
        parameter = self.sharded_parameters.get(storage._cdata) if number is None else self.parameters.get(number)
        return parameter_of(tensor) if parameter is None and tensor is not None else parameter

    def parameter_reference(
        self, number: int, layout: Layout, parameter: Tensor | None = None, memory: torch.UntypedStorage | None = None
    ) -> ParameterReference:
        """parameter: which one it is, of several in one storage. memory: as ``ParameterReference`` takes it."""
        parameter = self.parameters[number] if parameter is None else parameter
        is_known = parameter is self.parameters[number] and not has_layout(parameter)
        version = self.versions[number] or 0 if is_known else version_of(parameter)
        return ParameterReference(parameter, layout, version, self.name, memory)

    def clear(self) -> None:
        """Let go of everything."""
        vars(self).clear()


def _see_the_same(one: Layout, other: Layout) -> bool:
    """Whether two tensors in one storage see the same elements, in the same order, as a tensor and its rows do.

    A kernel may save the tensor, and show the ops inside of it the rows.
    """
    if one == other:
        return True
    are_alike = (one.offset, one.dtype, one.shape.numel()) == (other.offset, other.dtype, other.shape.numel())
    return are_alike and one.is_contiguous and other.is_contiguous
