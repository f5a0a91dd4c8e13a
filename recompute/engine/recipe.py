"""How a dropped tensor comes back: recipes, the handles autograd holds in their stead, and the book of recipes."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recompute.errors import MutationError, RegenerationError

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass
class Owner:
    """Whose tensors these are: a name for messages, and totals since the policy was applied."""

    name: str
    frames: int = 0
    """Times it ran forward under the policy."""
    dropped_tensors: int = 0
    """Saved tensors dropped, each storage counted once a frame."""
    dropped_nbytes: int = 0
    kept_nbytes: int = 0
    """Bytes saved in its frames that were not dropped and do not live anyway."""
    regenerations: int = 0
    """Times backward made it run again."""


class Saved(Protocol):
    """What stands for a tensor until backward wants it."""

    def get(self) -> Tensor: ...


class Kept:
    """A tensor held as it is. Autograd checks no versions under saved-tensor hooks, so this does (invariant 5)."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, tensor: Tensor, name: str):
        self.tensor = tensor
        self.version = version_of(tensor)
        self.name = name

    def get(self) -> Tensor:
        return checked(self.tensor, self.version, self.name)


class Alive:
    """A parameter, or a view of one, by the object that it is: whoever gathers weights may swap the memory under it."""

    __slots__ = ("layout", "name", "parameter", "version")

    def __init__(self, parameter: Tensor, saved: Tensor, name: str):
        self.parameter = parameter
        self.layout = Layout.of(saved)
        self.version = version_of(saved)
        self.name = name

    def get(self) -> Tensor:
        tensor = checked(self.parameter, self.version, self.name).detach()
        if Layout.of(tensor) == self.layout:
            return tensor
        return tensor.as_strided(self.layout.shape, self.layout.stride, self.layout.offset)


class Foreign:
    """A tensor given to saved-tensor hooks that are not ours, and what they made of it."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]):
        self.packed = packed
        self.unpack = unpack

    def get(self) -> Tensor:
        return self.unpack(self.packed)


class Layout(NamedTuple):
    """All there is to a strided tensor but its bytes."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


class Handle:
    """Stands for one saved tensor: which value of which recipe, seen through which view.

    ``tensor``, at ``version``, is the saved tensor itself until it is decided whether to drop it; ``kept`` is what
    holds it if it is not. ``view`` is None where it has the layout of the recipe's value, else its own layout and that
    of the value.
    """

    __slots__ = ("__weakref__", "due", "kept", "recipe", "slot", "tensor", "version", "view")

    def __init__(self, recipe: Recipe, slot: int, tensor: Tensor | None, view: tuple[Layout, Layout] | None = None):
        self.recipe = recipe
        self.slot = slot
        self.tensor = tensor
        self.version = 0 if tensor is None else tensor._version
        self.kept: Saved | None = None
        self.view = view
        self.due = False  # the recipe has a value that this handle has not had yet

    def keep(self, kept: Saved) -> None:
        """Not to drop the tensor."""
        self.kept = kept
        self.tensor = None

    def get(self) -> Tensor:
        if self.tensor is not None:
            return checked(self.tensor, self.version, self.recipe.owner.name)
        if self.kept is not None:
            return self.kept.get()
        value = self.recipe.take(self)
        if self.view is None:
            return value
        view, whole = self.view
        if (found := Layout.of(value)) != whole:
            raise RegenerationError(f"in {self.recipe.owner.name}: {whole} was dropped, and {found} came back.")
        return value.as_strided(view.shape, view.stride, view.offset)


class Recipe(ABC):
    """Regenerates a group of values, numbered by slot, and shares them among the handles that stand for them.

    The first handle that asks makes the recipe run; every other live handle then finds its value ready. A value is
    freed when the last handle that stands for it has had it, at the latest when the backward pass ends. A second
    backward pass runs the recipe again.
    """

    __slots__ = ("__weakref__", "_lock", "_values", "handles", "owner")

    def __init__(self, owner: Owner):
        self.owner = owner
        self.handles: list[weakref.ref[Handle]] = []
        self._values: dict[int, tuple[Saved, int]] = {}
        self._lock = threading.RLock()  # backward runs on one thread a device (invariant 9)

    def dropped(self) -> list[Handle]:
        """The handles, still alive, of tensors that are not kept."""
        alive = [handle for ref in self.handles if (handle := ref()) is not None]
        return [handle for handle in alive if handle.tensor is None and handle.kept is None]

    def take(self, handle: Handle) -> Tensor:
        with self._lock:
            if not handle.due:
                self._fill()
            handle.due = False
            saved, claims = self._values.pop(handle.slot)
            if claims > 1:
                self._values[handle.slot] = (saved, claims - 1)
            if not _in_backward():  # somebody looks at a saved tensor: nobody else is about to ask
                self.release()
            return saved.get()

    def release(self) -> None:
        """Free the values that nobody came for."""
        with self._lock:
            self._values = {}
            for handle in self.dropped():
                handle.due = False

    def _fill(self) -> None:
        dropped = self.dropped()
        claims = Counter(handle.slot for handle in dropped)
        values = self.regenerate(claims.keys())
        self._values = {slot: (values[slot], count) for slot, count in claims.items()}
        for handle in dropped:
            handle.due = True
        self.owner.regenerations += 1
        if _in_backward():
            release = weakref.WeakMethod(self.release)  # a strong one would hold every region's inputs to the end
            torch.autograd.Variable._execution_engine.queue_callback(lambda: (method := release()) and method())

    @abstractmethod
    def regenerate(self, wanted: Collection[int]) -> dict[int, Saved]:
        """The values of the slots in ``wanted``."""


class OpRecipe(Recipe):
    """One value that a function gives back from its inputs."""

    __slots__ = ("_function", "_inputs")

    def __init__(self, owner: Owner, function: Callable[..., Tensor], inputs: tuple[Any, ...]):
        super().__init__(owner)
        self._function = function
        self._inputs = [hold(value, owner.name) if isinstance(value, Tensor) else value for value in inputs]

    def regenerate(self, wanted: Collection[int]) -> dict[int, Saved]:
        with torch.no_grad():
            value = self._function(*map(fetch, self._inputs))
        return {slot: Kept(value, self.owner.name) for slot in wanted}


@dataclass(slots=True)
class _Entry:
    storage: StorageWeakRef
    recipe: Recipe
    slot: int
    version: int
    layout: Layout
    counted: bool


@dataclass
class RecipeBook:
    """The recipes of one scope's tensors, by storage (invariant 3).

    A key is the address of a StorageImpl; the entry's weak reference keeps that address from being reused.
    """

    entries: dict[int, _Entry] = field(default_factory=dict)

    def enter(self, output: Tensor, recipe: Recipe, slot: int, *, counted: bool = False) -> None:
        if (key := storage_key(output)) is not None and not output.is_conj() and not output.is_neg():
            reference = StorageWeakRef(output.untyped_storage())
            self.entries[key] = _Entry(reference, recipe, slot, version_of(output), Layout.of(output), counted)

    def handle(self, tensor: Tensor) -> Handle | None:
        """A handle for ``tensor``, or None where no recipe gives just these bytes back."""
        key = storage_key(tensor)
        entry = None if key is None else self.entries.get(key)
        if entry is None or version_of(tensor) != entry.version:  # unknown, or mutated since (invariant 5)
            return None
        view = Layout.of(tensor)
        if view.dtype is not entry.layout.dtype or tensor.is_conj() or tensor.is_neg():  # the bytes, read otherwise
            return None
        if not entry.counted:
            entry.counted = True
            entry.recipe.owner.dropped_tensors += 1
            entry.recipe.owner.dropped_nbytes += tensor.untyped_storage().nbytes()
        handle = Handle(entry.recipe, entry.slot, None, None if view == entry.layout else (view, entry.layout))
        entry.recipe.handles.append(weakref.ref(handle))
        return handle

    def forget(self, tensor: Tensor) -> None:
        if (key := storage_key(tensor)) is not None:
            self.entries.pop(key, None)


class _Local(threading.local):
    """What this thread's forward is inside of."""

    def __init__(self) -> None:
        self.books: list[RecipeBook | None] = []  # innermost last; None: nothing is recorded here
        self.owner = Owner("an op outside of any region")


local = _Local()


def open_book() -> RecipeBook | None:
    return local.books[-1] if local.books else None


def record(output: Tensor, regenerate: Callable[..., Tensor], *inputs: Any) -> None:
    """Tell the enclosing policy scope that ``regenerate(*inputs)`` gives ``output`` back, bit for bit.

    For ops that know themselves. ``regenerate`` runs without gradients in backward, on tensors bitwise equal to
    ``inputs`` (other values are passed as they are); its result must have the layout and dtype of ``output`` and
    depend on nothing else. Does nothing where no scope is open or gradients are off.
    """
    book = open_book()
    if book is not None and torch.is_grad_enabled():
        book.enter(output, OpRecipe(local.owner, regenerate, inputs), 0)


def hold(tensor: Tensor, name: str) -> Saved:
    """Hold ``tensor`` for backward as autograd would: through the saved-tensor hooks in force (invariant 9)."""
    return hold_through(top_hooks(), tensor.detach(), name)


def hold_through(hooks: Hooks | None, tensor: Tensor, name: str) -> Saved:
    if hooks is None:
        return Kept(tensor, name)
    pack, unpack = hooks
    packed = pack(tensor)
    return packed if unpack is unpack_saved else Foreign(packed, unpack)


def fetch(value: Any) -> Any:
    """What ``hold`` held; any other value as it is."""
    return value.get() if isinstance(value, (Kept, Handle, Foreign)) else value


def unpack_saved(saved: Saved) -> Tensor:
    """The unpack hook of everything that this package packs."""
    return saved.get()


def top_hooks() -> Hooks | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def checked(tensor: Tensor, version: int, name: str) -> Tensor:
    """``tensor``, unless it has been modified in place since it was at ``version``."""
    if version_of(tensor) != version:
        raise MutationError(
            f"in {name}: a {describe(tensor)} that {_current_node()} needs has been modified in place since it was "
            f"saved: it is at version {version_of(tensor)}, expected version {version}. Replace the in-place "
            "operation, or let it modify a clone."
        )
    return tensor


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def storage_key(tensor: Tensor) -> int | None:
    """The address of the tensor's StorageImpl; None for a tensor with none of its own (sparse, say)."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.untyped_storage()._cdata


def describe(tensor: Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"


def _current_node() -> str:
    node = torch._C._current_autograd_node()
    return "backward" if node is None else node.name()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
