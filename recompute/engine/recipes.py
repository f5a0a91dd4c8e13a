"""How a dropped tensor comes back: the handles that autograd holds in its place, and the recipes behind them."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from recompute.engine.bit_comparison import count_different
from recompute.engine.cut.layout import Layout
from recompute.engine.modes import shown_to_modes
from recompute.engine.numerics import Autocast, Numerics, autocast_again, without_casts
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import (
    KeptTensor,
    PackedByOuterHook,
    PackedTensor,
    checked,
    describe,
    fetch,
    laid_out,
    packed_in,
    seen_as,
)
from recompute.engine.thread_state import alive, in_backward, is_fake, local, sharing_values, stopwatch_of
from recompute.errors import RegenerationError


class ValueSource(Protocol):
    """Gives a handle its value: a recipe, or the handles of a tape's frame that is still running."""

    statistics: RegionStatistics
    name: str

    def take(self, handle: Handle) -> Tensor: ...


class Handle(PackedTensor):
    """Autograd holds this in the place of a saved tensor: a value of its ``source``, by its number there.

    ``tensor``, at ``version``, is the saved tensor itself, until it is dropped or kept. ``kept`` holds it if it is
    kept. ``view`` has two layouts: the tensor saw the value through the first, and the second sees all of the value.
    It is None if they are the same.

    A tape's handle has its frame as the source until the frame ends, and then a recipe. The handle holds the recipe,
    and the frame does not. So the recipe is freed as soon as backward has passed the node that holds the handle.
    """

    __slots__ = ("__weakref__", "is_ready", "kept", "number", "source", "tensor", "version", "view")

    def __init__(
        self,
        source: ValueSource,
        number: int,
        tensor: Tensor | None,
        version: int,
        view: tuple[Layout, Layout] | None = None,
    ):
        self.source = source
        self.number = number
        self.tensor = tensor
        self.version = version
        self.kept: PackedTensor | None = None
        self.view = view
        self.is_ready = False  # whether the recipe has a value for this handle that it has not taken yet

    def another(self, view: tuple[Layout, Layout] | None = None) -> Handle:
        """Another handle of the same dropped value. view: its layout, and this handle's; None: they are the same."""
        assert isinstance(self.source, Recipe)
        if view is not None and self.view is not None:
            view = view[0], self.view[1]
        return self.source.handle(self.number, view or self.view)

    def keep(self, kept: PackedTensor) -> None:
        """Keep the tensor, which ``kept`` holds from now on."""
        self.kept = kept
        self.tensor = None

    def drop_for(self, recipe: Recipe) -> None:
        """Let go of the tensor, which a recipe regenerates from now on."""
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
                raise RegenerationError(f"in {name}: a tensor with {whole} was dropped, and {found} was regenerated.")
            value = seen_as(value, view)
        return value


def is_plain_eager() -> bool:
    """Whether an op that is called now runs without gradients, autocast and transforms, as in most backwards."""
    return not (
        torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


@contextmanager
def forward_again(numerics: Numerics, autocast: Autocast | None, rng: RngState | None) -> Iterator[None]:
    """Inside, a whole forward runs again, with gradients, under these settings and with these random states.

    No transform of torch.func is at work: a batched backward still needs one plain forward.
    """
    transform = torch._C._functorch.peek_interpreter_stack()
    with (
        nullcontext() if transform is None else temporarily_clear_interpreter_stack(),
        nullcontext() if rng is None else rng.replayed(),
        autocast_again(autocast),
        numerics.replayed(),
        torch.enable_grad(),
    ):
        yield


class RecipeGroup:
    """The recipes of one frame. They share a lock, because backward has a thread for each device (invariant 9).

    They also share one callback at the end of a backward, which frees the values that no handle has taken.

    numerics: torch's settings in that frame. Its ops run again under them.
    """

    __slots__ = ("__weakref__", "_filled", "_is_alike", "_task", "lock", "numerics")

    def __init__(self, numerics: Numerics | None = None) -> None:
        self.lock = threading.RLock()
        self.numerics = Numerics() if numerics is None else numerics
        self._filled: list[weakref.ref[Recipe]] = []
        self._task = -1
        self._is_alike = (-1, False)  # the last backward that asked, and its answer

    def is_alike(self) -> bool:
        """Whether torch's settings equal the frame's. They are compared once in each backward."""
        task = torch._C._current_graph_task_id()
        known, alike = self._is_alike
        if known != task or task == -1:
            alike = self.numerics.are_in_force()
            self._is_alike = task, alike
        return alike

    def filled(self, recipe: Recipe) -> None:
        """Have the recipe's values freed at the end of this backward, or of this span of ``sharing_values``."""
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
        """Free the values that no handle has taken."""
        with self.lock:
            filled, self._filled, self._task = self._filled, [], -1
            for recipe in alive(filled):
                recipe.release()


class Recipe(ABC):
    """Regenerates a group of values, each known by a number, and shares them among the handles that stand for them.

    The first handle that asks makes the recipe run. Every other live handle then finds its value ready. A value is
    freed when the last handle that stands for it has taken it, at the latest at the end of the backward pass or of the
    span of ``sharing_values``. A second backward pass runs the recipe again.
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
        """A new handle of a value that is dropped."""
        handle = Handle(self, number, None, 0, view)
        self.handles.append(weakref.ref(handle))
        return handle

    def dropped(self) -> list[Handle]:
        """The handles, still alive, of tensors that are not kept."""
        every = [reference() for reference in self.handles]
        return [each for each in every if each is not None and each.tensor is None and each.kept is None]

    def take(self, handle: Handle) -> Tensor:
        if not in_backward() and local.sharing is None:  # somebody looks at a saved tensor outside of backward
            with sharing_values():
                return self.take(handle)
        with self.group.lock:
            if not handle.is_ready:
                self._fill_all()
            handle.is_ready = False
            saved = self._values[handle.number]
            if not (self._is_shared and any(each.is_ready and each.number == handle.number for each in self.dropped())):
                del self._values[handle.number]
            return saved.get()

    def _fill_all(self) -> None:
        """Run this after the recipes that it needs. It does not recurse: a chain may be longer than Python's stack."""
        stopwatch = stopwatch_of(self.statistics)
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
        """Free the values that no handle has taken."""
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
            regenerated = self.statistics.regenerated
            regenerated.count += 1
            regenerated.nbytes += nbytes_of(self._values.values())
            if torch.is_grad_enabled() and in_backward() and not local.regenerating:  # a checkpoint turns them on, too
                regenerated.for_differentiated_gradients = True
            self.group.filled(self)

    @abstractmethod
    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        """The values whose numbers are in ``wanted``."""


def missing_in(values: Any) -> Iterator[Recipe]:
    """The recipes that must run before all tensors in ``values`` are there."""
    for value in packed_in(values):
        if isinstance(value, Handle) and value.kept is None and not value.is_ready:
            yield value.source  # type: ignore[misc]


def nbytes_of(values: Iterable[PackedTensor]) -> int:
    """The bytes of memory that hold these values."""
    storages = [value.tensor.untyped_storage() for value in values if isinstance(value, KeptTensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class RecordedCall(NamedTuple):
    """A call of a function, to be made again, with something else in the place of each tensor."""

    op: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    rng: RngState | None = None
    """The states of the random generators that it draws from."""
    writes: dict[int | str, Layout] | None = None
    """The arguments that it changes in place (positions or keywords), each with its layout.

    When it runs again it changes copies of their values, which then count as outputs 0, 1, …."""


class OpRecipe(Recipe):
    """The outputs of a function, by calling it again on its inputs: a ``PackedTensor`` in the place of each tensor.

    slots: which output each value is, by the value's number. None: output n is value n.
    originals: forward's values, by their numbers, to compare with.
    """

    __slots__ = ("_call", "_originals", "_slots")

    def __init__(
        self,
        statistics: RegionStatistics,
        call: RecordedCall,
        name: str,
        group: RecipeGroup | None = None,
        slots: Mapping[int, int] | None = None,
        originals: Mapping[int, Tensor] | None = None,
    ):
        super().__init__(statistics, name, group)
        self._call = call
        self._slots = slots
        self._originals = originals

    def missing_inputs(self) -> Iterator[Recipe]:
        return missing_in((self._call.args, self._call.kwargs))

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        call = self._call
        if call.rng is None and is_plain_eager() and self.group.is_alike():
            outputs = self._run()
        else:
            with (
                without_casts(),
                torch.no_grad(),
                temporarily_clear_interpreter_stack(),  # a batched backward still needs one plain forward
                call.rng.replayed() if call.rng else nullcontext(),
                self.group.numerics.replayed(),
            ):
                outputs = self._run()
        slots = self._slots
        for number, original in (self._originals or {}).items():
            if different := count_different(outputs[number if slots is None else slots[number]], original):
                raise RegenerationError(
                    f"in {self.statistics.name}: {self.name} regenerated a {describe(original)}, and {different} of "
                    f"{original.numel()} elements differ from the dropped ones. List {self.name} in the rule's "
                    "keep, or pass the tensor to recompute.keep."
                )
        name = self.statistics.name
        if slots is None:
            return {number: KeptTensor(outputs[number], name) for number in wanted}
        return {number: KeptTensor(outputs[slots[number]], name) for number in wanted}

    def _run(self) -> Sequence[Tensor]:
        args, kwargs = fetch(self._call.args), fetch(self._call.kwargs)
        if local.hidden_modes:
            # Modes that count, say, see it. Their result is not used, and generators are put back afterwards.
            with nullcontext() if is_fake() else RngState().replayed(), shown_to_modes():
                self._run_on(list(args), dict(kwargs))
        return self._run_on(args, kwargs)

    def _run_on(self, args: list[Any], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        if self._call.writes is None:
            output = self._call.op(*args, **kwargs)
            return output if isinstance(output, (tuple, list)) else (output,)
        copies = []
        for where, layout in self._call.writes.items():  # never into a tensor that somebody else has (invariant 2)
            arguments: Any = kwargs if isinstance(where, str) else args
            copies.append(arguments[where].clone())
            arguments[where] = seen_as(copies[-1], layout)
        self._call.op(*args, **kwargs)
        return copies


class OuterUnpackRecipe(Recipe):
    """A tensor that saved-tensor hooks of others hold. They are asked for it once, for all handles that want it."""

    __slots__ = ("_saved", "layout")

    def __init__(self, statistics: RegionStatistics, saved: PackedByOuterHook, layout: Layout, group: RecipeGroup):
        super().__init__(statistics, "an unpack hook", group)
        self._saved = saved
        self.layout = layout

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        tensor = laid_out(self._saved.get(), self.layout.stride)
        return {0: KeptTensor(tensor, self.statistics.name)}
