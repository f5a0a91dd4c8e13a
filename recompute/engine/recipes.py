"""How a dropped tensor comes back: recipes, the handles autograd holds in their stead, and the book of recipes."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from recompute.engine.cut.layout import Layout
from recompute.engine.modes import are_modes_hidden, has_foreign_modes, hidden_from_modes, shown_to_modes
from recompute.engine.numerics import Numerics, default_dtype
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import (
    DroppedOutput,
    KeptTensor,
    PackedByOuterHook,
    PackedTensor,
    RegionStatistics,
    checked,
    describe,
    fetch,
    is_inside_checkpoint,
    pack_tensor,
    packed_in,
    seen_as,
    storage_key,
    version_of,
)
from recompute.errors import RegenerationError


class ValueSource(Protocol):
    """What gives a handle its value: a recipe, or a tape's frame that is still running."""

    statistics: RegionStatistics
    name: str

    def take(self, handle: Handle) -> Tensor: ...


class Handle(PackedTensor):
    """What autograd holds in the place of a saved tensor: a value of its ``source``, by its number there.

    ``tensor``, at ``version``, is the saved tensor itself, as long as it has not been dropped; ``kept`` is what holds
    it, if it has been decided to keep it. ``view`` is how the tensor saw the value, and how the value is seen whole;
    None where these are the same.

    A handle of a tape's frame has that as its source until the frame ends, and then a recipe. The handle itself holds
    the recipe, and the frame does not: so what the recipe holds is freed as soon as backward has passed by.
    """

    __slots__ = ("__weakref__", "is_ready", "kept", "number", "source", "tensor", "version", "view")

    def __init__(
        self, source: ValueSource, number: int, tensor: Tensor | None, view: tuple[Layout, Layout] | None = None
    ):
        self.source = source
        self.number = number
        self.tensor = tensor
        self.version = 0 if tensor is None else version_of(tensor)
        self.kept: PackedTensor | None = None
        self.view = view
        self.is_ready = False  # the recipe has a value that this handle has not had yet

    def another(self, view: tuple[Layout, Layout]) -> Handle:
        """Another handle of the same dropped value. ``view``: how it sees what this one sees, and what that is."""
        assert isinstance(self.source, Recipe)
        layout, whole = view
        return self.source.handle(self.number, (layout, whole if self.view is None else self.view[1]))

    def twin(self) -> Handle:
        """Another handle of the same dropped value, seen alike."""
        assert isinstance(self.source, Recipe)
        return self.source.handle(self.number, self.view)

    def keep(self, kept: PackedTensor) -> None:
        """Not to drop the tensor."""
        self.kept = kept
        self.tensor = None

    def drop(self) -> None:
        """Let go of the tensor, which the source gives back."""
        self.tensor = None

    def drop_for(self, recipe: Recipe) -> None:
        """Let go of the tensor, which a recipe gives back from now on."""
        self.tensor = None
        self.source = recipe
        recipe.handles.append(weakref.ref(self))

    def get(self) -> Tensor:
        if self.tensor is not None:
            return checked(self.tensor, self.version, self.source.statistics.name)
        if self.kept is not None:
            return self.kept.get()
        value = self.source.take(self)
        if self.view is not None:
            view, whole = self.view
            if (found := Layout.of(value)) != whole:
                name = self.source.statistics.name
                raise RegenerationError(f"in {name}: {whole} was dropped, and {found} came back.")
            value = seen_as(value, view)
        return value


_verifying = os.environ.get("RECOMPUTE_VERIFY", "0") not in ("", "0")


@contextmanager
def verifying() -> Iterator[None]:
    """Compare every regenerated tensor, bit for bit, with the dropped one, which is held for that: a debug switch.

    Holds for what forward drops inside; setting ``RECOMPUTE_VERIFY=1`` in the environment does it for the process.
    A difference raises ``RegenerationError`` that names the module and the op.
    """
    global _verifying
    before, _verifying = _verifying, True
    try:
        yield
    finally:
        _verifying = before


def is_verifying() -> bool:
    return _verifying


def count_different(value: Tensor, original: Tensor) -> int:
    """How many elements of two tensors of one shape and dtype differ in any bit."""
    if isinstance(value, FakeTensor):
        return 0
    found, expected = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (value, original))
    if torch.equal(found, expected):
        return 0
    return int((found != expected).view(-1, value.element_size()).any(1).sum())


_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
_ExcludeKeys = torch._C._ExcludeDispatchKeyGuard


def _is_plain_eager() -> bool:
    """Whether an op that is called now does what it says and no more, as in most backwards."""
    return not (
        torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_fake() -> bool:
    """Whether tensors have no values here, nor random numbers."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class RecipeGroup:
    """The recipes of one frame. They share a lock, as each device has its thread in backward (invariant 9).

    They also share one callback at the end of a backward, which frees what nobody came for.

    numerics: torch's settings in that frame, under which its ops run again.
    """

    __slots__ = ("__weakref__", "_filled", "_is_alike", "_task", "lock", "numerics")

    def __init__(self, numerics: Numerics | None = None) -> None:
        self.lock = threading.RLock()
        self.numerics = Numerics() if numerics is None else numerics
        self._filled: list[weakref.ref[Recipe]] = []
        self._task = -1
        self._is_alike = (-1, False)  # in which backward, and whether its settings are those of the frame

    def is_alike(self) -> bool:
        """Whether torch's settings are those of the frame: asked once a backward."""
        task = torch._C._current_graph_task_id()
        known, alike = self._is_alike
        if known != task or task == -1:
            alike = self.numerics.are_in_force()
            self._is_alike = task, alike
        return alike

    def filled(self, recipe: Recipe) -> None:
        """Have the recipe's values freed when the backward, or the span of ``sharing_values``, that runs ends."""
        self._filled.append(weakref.ref(recipe))
        task = torch._C._current_graph_task_id()
        if task == -1:
            assert local.sharing is not None, "a recipe ran in neither"
            local.sharing.add(self)
        elif task != self._task:
            self._task = task
            release = weakref.WeakMethod(self.release)  # a strong one would hold every region's inputs to the end
            torch.autograd.Variable._execution_engine.queue_callback(lambda: (method := release()) and method())

    def release(self) -> None:
        """Free the values that nobody came for."""
        with self.lock:
            filled, self._filled, self._task = self._filled, [], -1
            for reference in filled:
                if (recipe := reference()) is not None:
                    recipe.release()


class Recipe(ABC):
    """Regenerates a group of values, each known by a number, and shares them among the handles that stand for them.

    The first handle that asks makes the recipe run; every other live handle then finds its value ready. A value is
    freed when the last handle that stands for it has had it, at the latest when the backward pass ends, or the span of
    ``sharing_values``. A second backward pass runs the recipe again.
    """

    __slots__ = ("__weakref__", "_is_shared", "_values", "group", "handles", "name", "statistics")

    def __init__(self, statistics: RegionStatistics, name: str, group: RecipeGroup | None = None):
        self.statistics = statistics
        self.name = name
        self.handles: list[weakref.ref[Handle]] = []
        self._values: dict[int, PackedTensor] = {}
        self._is_shared = False  # several handles stand for one of the values
        self.group = group or RecipeGroup()

    def handle(self, number: int, view: tuple[Layout, Layout] | None = None) -> Handle:
        """A new handle, of a value that is dropped."""
        handle = Handle(self, number, None, view)
        self.handles.append(weakref.ref(handle))
        return handle

    def dropped(self) -> list[Handle]:
        """The handles, still alive, of tensors that are not kept."""
        alive = [handle for ref in self.handles if (handle := ref()) is not None]
        return [handle for handle in alive if handle.tensor is None and handle.kept is None]

    def take(self, handle: Handle) -> Tensor:
        if not in_backward() and local.sharing is None:  # somebody looks at a saved tensor
            with sharing_values():
                return self.take(handle)
        with self.group.lock:
            if not handle.is_ready:
                self._fill_all()
            handle.is_ready = False
            saved = self._values[handle.number]
            if not (self._is_shared and self._is_awaited(handle.number)):
                del self._values[handle.number]
            return saved.get()

    def _is_awaited(self, number: int) -> bool:
        """Whether a handle has not had the value yet that it stands for."""
        handles = (ref() for ref in self.handles)
        return any(handle is not None and handle.is_ready and handle.number == number for handle in handles)

    def _fill_all(self) -> None:
        """Run this, after the recipes it builds on: by a stack, as a chain of ops may be longer than Python's."""
        stopwatch = None if local.regenerating else self.statistics.stopwatch
        started = None if stopwatch is None else stopwatch.start()
        pending = [(self, self.missing_inputs())]
        while pending:
            recipe, missing_inputs = pending[-1]
            if (before := next(missing_inputs, None)) is not None:
                pending.append((before, before.missing_inputs()))
            else:
                recipe._fill()
                pending.pop()
        if stopwatch is not None:
            stopwatch.stop(started)

    def missing_inputs(self) -> Iterator[Recipe]:
        """The recipes that must run before this one can."""
        return iter(())

    def release(self) -> None:
        """Free the values that nobody came for."""
        self._values = {}
        for handle in self.dropped():
            handle.is_ready = False

    def _fill(self) -> None:
        with self.group.lock:
            dropped = self.dropped()
            local.regenerating += 1
            try:
                wanted = {handle.number for handle in dropped}
                self._is_shared = len(wanted) < len(dropped)
                self._values = self.regenerate(wanted)
            finally:
                local.regenerating -= 1
            for handle in dropped:
                handle.is_ready = True
            self.statistics.regenerations += 1
            self.statistics.regenerated_nbytes += nbytes_of(self._values.values())
            self.group.filled(self)

    @abstractmethod
    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        """The values whose numbers are in ``wanted``."""


def nbytes_of(values: Iterable[PackedTensor]) -> int:
    """The bytes of memory that hold these values."""
    storages = [value.tensor.untyped_storage() for value in values if isinstance(value, KeptTensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class OpRecipe(Recipe):
    """The outputs of a function, by running it again on its inputs.

    args, kwargs: as the function takes them, with a ``PackedTensor`` in the place of each tensor.
    dtype: the default dtype that it ran under, where that was not the frame's.
    rng: the states of the random generators that it draws from.
    writes: which arguments the function changes in place (positions or keywords): it is given copies, which are the
    outputs 0, 1, … then. ``None`` for a function that changes none.
    slots: which of its outputs each value is that it gives back, by the values' numbers; None: output n is value n.
    originals: values that it gave in forward, by their numbers, to compare with.
    """

    __slots__ = ("_args", "_dtype", "_function", "_kwargs", "_originals", "_rng", "_slots", "_writes")

    def __init__(
        self,
        statistics: RegionStatistics,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str,
        dtype: torch.dtype | None = None,
        rng: RngState | None = None,
        writes: Mapping[int | str, Layout] | None = None,
        group: RecipeGroup | None = None,
        slots: Mapping[int, int] | None = None,
        originals: Mapping[int, Tensor] | None = None,
    ):
        super().__init__(statistics, name, group)
        self._function = function
        self._args = args
        self._kwargs = kwargs or {}
        self._dtype = dtype
        self._rng = rng
        self._writes = writes
        self._slots = slots
        self._originals = originals

    def missing_inputs(self) -> Iterator[Recipe]:
        for value in packed_in((self._args, self._kwargs)):
            if isinstance(value, Handle) and value.kept is None and not value.is_ready:
                yield value.source  # type: ignore[misc]

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        if self._rng is None and self._dtype is None and _is_plain_eager() and self.group.is_alike():
            outputs = self._run()
        else:
            with (
                _ExcludeKeys(_AUTOCAST),
                torch.no_grad(),
                temporarily_clear_interpreter_stack(),  # a batched backward still wants the one forward
                self._rng.replayed() if self._rng else nullcontext(),
                self.group.numerics.replayed(),
                default_dtype(self._dtype) if self._dtype else nullcontext(),
            ):
                outputs = self._run()
        slots = self._slots
        for number, original in (self._originals or {}).items():
            if different := count_different(outputs[number if slots is None else slots[number]], original):
                raise RegenerationError(
                    f"in {self.statistics.name}: {self.name} gave back a {describe(original)} of which {different} of "
                    f"{original.numel()} elements differ from what was dropped. List {self.name} in the rule's keep, "
                    "or pass the tensor to recompute.keep."
                )
        name = self.statistics.name
        if slots is None:
            return {number: KeptTensor(outputs[number], name) for number in wanted}
        return {number: KeptTensor(outputs[slots[number]], name) for number in wanted}

    def _run(self) -> Sequence[Tensor]:
        args, kwargs = fetch(list(self._args)), fetch(self._kwargs)
        if are_modes_hidden():
            with self._undrawn(), shown_to_modes():  # to modes that count, say; what they make of it counts for nothing
                self._call(list(args), dict(kwargs))
        return self._call(args, kwargs)

    @staticmethod
    def _undrawn() -> AbstractContextManager[None]:
        """Random generators are afterwards where they were."""
        return nullcontext() if is_fake() else RngState().replayed()

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        if self._writes is None:
            output = self._function(*args, **kwargs)
            return output if isinstance(output, (tuple, list)) else (output,)
        copies = []
        for where, layout in self._writes.items():  # never into a tensor that somebody else has (invariant 2)
            arguments: Any = kwargs if isinstance(where, str) else args
            copies.append(arguments[where].clone())
            arguments[where] = seen_as(copies[-1], layout)
        self._function(*args, **kwargs)
        return copies


class OuterUnpackRecipe(Recipe):
    """A tensor that saved-tensor hooks of others hold, which may unpack it only once for all who want it."""

    __slots__ = ("_saved", "layout")

    def __init__(self, statistics: RegionStatistics, saved: PackedByOuterHook, layout: Layout, group: RecipeGroup):
        super().__init__(statistics, "an unpack hook", group)
        self._saved = saved
        self.layout = layout

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        tensor = self._saved.get()
        if tensor.stride() != self.layout.stride and 0 not in self.layout.stride:  # as from save_on_cpu
            plain = torch.empty_strided(self.layout.shape, self.layout.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = plain.copy_(tensor)
        return {0: KeptTensor(tensor, self.statistics.name)}


@dataclass(slots=True)
class _Entry:
    storage: StorageWeakRef
    recipe: Recipe
    number: int
    version: int
    layout: Layout
    dropped_outputs: list[DroppedOutput]
    """What was dropped of the same frame's outputs."""
    counted: bool


@dataclass
class RecipeBook:
    """The recipes of one scope's tensors, by storage (invariant 3).

    A key is the address of a StorageImpl; the entry's weak reference keeps that address from being reused.
    """

    numerics: Numerics = field(default_factory=Numerics)
    """torch's settings in the scope."""
    entries: dict[int, _Entry] = field(default_factory=dict)
    entered: int = 0
    """How many there have been."""

    def enter(
        self, output: Tensor, recipe: Recipe, number: int, whole: Layout | None = None, *, counted: bool = False
    ) -> None:
        """whole: the layout of what the recipe gives back, if ``output`` is a view of that."""
        if (key := storage_key(output)) is not None and not output.is_conj() and not output.is_neg():
            self.entered += 1
            reference = StorageWeakRef(output.untyped_storage())
            layout, dropped_outputs = whole or Layout.of(output), recipe.statistics.dropped_outputs
            self.entries[key] = _Entry(reference, recipe, number, version_of(output), layout, dropped_outputs, counted)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a recipe gives back the memory that ``tensor`` is a view of."""
        entry = self.entries.get(tensor.untyped_storage()._cdata)
        return entry is not None and version_of(tensor) == entry.version

    def handle(self, tensor: Tensor) -> Handle | None:
        """A handle for ``tensor``, or None where no recipe gives just these bytes back."""
        key = storage_key(tensor)
        entry = None if key is None else self.entries.get(key)
        if entry is None or version_of(tensor) != entry.version:  # unknown, or mutated since (invariant 5)
            return None
        if not tensor.untyped_storage().resizable():  # as of what became an array, which may have been written to
            return None
        view = Layout.of(tensor)
        if view.dtype is not entry.layout.dtype or tensor.is_conj() or tensor.is_neg():  # the bytes, read otherwise
            return None
        if not entry.counted and not local.packing_for_recipe:
            self._count(entry, tensor)
        return entry.recipe.handle(entry.number, None if view == entry.layout else (view, entry.layout))

    def is_given_to_a_kernel(self, tensor: Tensor, *, is_eager: bool) -> bool:
        """Whether a recipe gives back ``tensor``, which a kernel is about to save. is_eager: as for ``_count``."""
        if not self.knows(tensor):
            return False
        entry = self.entries[tensor.untyped_storage()._cdata]
        if not entry.counted and not is_eager:
            self._count(entry, tensor, is_eager=False)
        return True

    def _count(self, entry: _Entry, tensor: Tensor, *, is_eager: bool = True) -> None:
        """is_eager: whether it is saved without the policy, too."""
        entry.counted = True
        statistics, nbytes = entry.recipe.statistics, tensor.untyped_storage().nbytes()
        statistics.dropped_tensors += 1
        statistics.dropped_nbytes += nbytes
        statistics.eager_nbytes += nbytes if is_eager else 0
        entry.dropped_outputs.append(DroppedOutput(entry.recipe.name, entry.layout, nbytes))

    def forget(self, tensor: Tensor) -> None:
        if (key := storage_key(tensor)) is not None:
            self.entries.pop(key, None)


class _ThreadState(threading.local):
    """What this thread's forward is inside of."""

    def __init__(self) -> None:
        self.books: list[RecipeBook | None] = []
        """Of the scopes that are open, the innermost last. None: nothing is recorded there."""
        self.statistics = RegionStatistics("an op outside of any region")
        """Of the region that is credited with the recipes of ops that know themselves."""
        self.active_frames: list[Any] = []
        """The tapes, checkpoint frames and replays that are running, the innermost last."""
        self.regenerating = 0
        """How many recipes are running, one inside of the other."""
        self.sharing: set[RecipeGroup] | None = None
        """The groups of recipes that have run inside of ``sharing_values``; None outside of it."""
        self.packing_for_recipe = False
        """Whether a tensor is packed for a recipe, and not because autograd saves it."""
        self.simulates_cuda = False
        """Whether fake CPU tensors stand for CUDA's: backward of fake CUDA tensors needs a GPU."""


local = _ThreadState()


@contextmanager
def sharing_values() -> Iterator[None]:
    """The span in which values that are asked for outside of a backward are shared by all who ask, as in a backward.

    Without one each question is a span of its own.
    """
    sharing: set[RecipeGroup] = set()
    before, local.sharing = local.sharing, sharing
    try:
        yield
    finally:
        local.sharing = before
        for group in sharing:
            group.release()


@contextmanager
def packing_for_recipe() -> Iterator[None]:
    """While tensors are held for recipes, which autograd itself may not have saved: that drops nothing."""
    before, local.packing_for_recipe = local.packing_for_recipe, True
    try:
        yield
    finally:
        local.packing_for_recipe = before


def open_book() -> RecipeBook | None:
    if torch.compiler.is_compiling():  # a scope that is open meanwhile is for eager code
        return None
    return local.books[-1] if local.books else None


def record(output: Tensor, regenerate: Callable[..., Tensor], *inputs: Any) -> None:
    """Tell the enclosing policy scope that ``regenerate(*inputs)`` gives ``output`` back, bit for bit.

    For ops that know themselves. ``regenerate`` runs without gradients in backward, on tensors bitwise equal to
    ``inputs`` (other values are passed as they are); its result must have the layout and dtype of ``output`` and
    depend on nothing else. Does nothing where no scope is open or gradients are off, nor under a checkpoint, which
    drops everything and counts what is held, nor where a mode of others has made another output of it.
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
        book.enter(output, OpRecipe(local.statistics, regenerate, args, name=name, group=RecipeGroup(book.numerics)), 0)


def _reproduces(output: Tensor, regenerate: Callable[..., Tensor], inputs: Sequence[Any]) -> bool:
    with hidden_from_modes(), torch.no_grad():
        value = regenerate(*inputs)
        return Layout.of(value) == Layout.of(output) and not count_different(value, output)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
