"""The state of modules, and autocast: what a frame's result depends on besides its code and its arguments.

Both are captured when the frame begins, and put back while it runs again.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase

from recompute.engine.dtensors import has_layout
from recompute.engine.parameter_memory import is_managed_elsewhere
from recompute.engine.saved_tensors import describe, storage_of, version_of
from recompute.engine.wrapper_tensors import inner_tensors
from recompute.errors import MutationError

_NOTHING: AbstractContextManager[None] = nullcontext()

RUNNER = "_recompute_runner"
"""The key in the ``__dict__`` of a module under a policy, of what runs its forward.

It is there because a DataParallel replica gets a copy of the ``__dict__``.
"""


HeldModule = tuple[nn.Module, type, dict[str, Any], bool]
"""A module, its class, a copy of its attributes, and whether there are containers or tensors among these."""


class LearnedBuffers:
    """What a region's frames have found out about its buffers, for later frames.

    Buffers are numbered. The keys are the training flags of the modules, because forward may change other buffers in
    training.
    """

    __slots__ = ("changing", "copies", "may_change_unseen")

    def __init__(self) -> None:
        self.may_change_unseen = False
        """Whether its code names a batch norm, whose kernels write to statistics without a new version."""
        self.changing: dict[tuple[bool, ...], frozenset[int]] = {}
        """The buffers that a frame has changed."""
        self.copies: dict[tuple[bool, ...], _Copies] = {}
        """Copies of the small buffers that no frame has changed."""


class _Copies:
    """Buffers, and copies of them. All frames share the copies until one of the buffers is changed."""

    __slots__ = ("buffers", "values", "versions")

    def __init__(self, buffers: list[Tensor], values: list[Tensor]):
        self.buffers = buffers
        self.values = values
        self.versions = [version_of(buffer) for buffer in buffers]

    def moved(self) -> list[int]:
        """The numbers of the buffers that have been changed in place since, as far as versions tell."""
        pairs = zip(self.buffers, self.versions, strict=True)
        return [number for number, (buffer, version) in enumerate(pairs) if version_of(buffer) != version]

    def changed(self) -> list[int]:
        """The numbers of the buffers that have been changed. This compares values too."""
        moved = self.moved()
        pairs = zip(self.values, self.buffers, strict=True)
        return [number for number, pair in enumerate(pairs) if number in moved or _differ(*pair)]

    def are_of(self, buffers: list[Tensor]) -> bool:
        return len(buffers) == len(self.buffers) and all(map(operator.is_, buffers, self.buffers)) and not self.moved()


_ScriptModule = torch.jit.ScriptModule
_SMALL = 1 << 16
"""In bytes: copying a buffer of this size takes no longer than launching a kernel."""


def _is_small(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.nbytes <= _SMALL


class ModuleState:
    """The classes, attributes, parameters and buffers of the modules that a frame runs.

    Buffers are of three kinds:

    - Those that forward itself changes in place, such as batch-norm statistics. They are copied before each frame. The
      first frame with the same training flags finds out which these are. It compares values and not only versions,
      because kernels write to some buffers without a new version. Those of a batch norm count as changed anyway: it
      may write the same value at first.
    - Small ones that forward does not change. All frames share one copy of them, as long as nobody changes them.
    - Large ones that forward does not change. They are not copied; the replay is refused if somebody changes them.
    """

    __slots__ = ("_are_plain", "_before", "_buffers", "_copies", "_flags", "_learned", "_versions", "held")

    def __init__(self, roots: Iterable[nn.Module], learned: LearnedBuffers):
        modules = list(roots)
        seen = set(modules)
        parameters: list[Tensor | None] = []
        buffers: list[Tensor] = []
        loose: list[Tensor] = []
        self.held: list[HeldModule] = []
        for module in modules:  # the loop appends to it
            parameters += module._parameters.values()
            if module._buffers:
                buffers += [buffer for buffer in module._buffers.values() if buffer is not None]
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    modules.append(child)
            if not isinstance(module, _ScriptModule):  # its attributes are not kept in Python
                attributes, has_parts = _attributes_of(module.__dict__)
                self.held.append((module, type(module), attributes, has_parts))
                if has_parts:
                    loose += [value for value in attributes.values() if type(value) is Tensor]
        self._flags = tuple([module.training for module in modules]) if buffers else ()
        self._are_plain = _PLAIN.issuperset(map(type, parameters))
        if not _PLAIN.issuperset(map(type, buffers)):  # of wrappers, what they hold is copied and compared
            buffers = [each for buffer in buffers for each in inner_tensors(buffer) or (buffer,)]
        self._buffers = buffers
        self._learned = learned
        self._before: dict[int, Tensor] = {}
        self._copies: _Copies | None = None
        if buffers:
            parameters += self._capture_buffers()
        parameters += loose
        self._versions: list[tuple[Tensor, int, bool, StorageWeakRef | None]] = []
        self.watch([t for t in parameters if t is not None])

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Have ``changed`` tell whether these, or what they wrap, are modified, too."""
        if not _PLAIN.issuperset(map(type, tensors)):
            tensors = [*tensors, *[inner for tensor in tensors for inner in inner_tensors(tensor)]]
        self._versions += [(t, version_of(t), t.requires_grad, storage_of(t)) for t in tensors]

    def _capture_buffers(self) -> list[Tensor]:
        """Copy the buffers that may have to be put back. Returns those whose versions have to be checked."""
        buffers, changing = self._buffers, self._learned.changing.get(self._flags)
        indices = range(len(buffers)) if changing is None else changing
        self._before = {index: buffers[index].detach().clone() for index in indices}
        if changing is None:
            return buffers
        steady = [buffer for index, buffer in enumerate(buffers) if index not in changing]
        small = [buffer for buffer in steady if _is_small(buffer)]
        if small:
            copies = self._learned.copies.get(self._flags)
            if copies is None or not copies.are_of(small):
                copies = _Copies(small, [buffer.detach().clone() for buffer in small])
                self._learned.copies[self._flags] = copies
            self._copies = copies
        return [buffer for buffer in steady if not _is_small(buffer)]

    def settle(self) -> None:
        """The frame has ended: of its copies keep those of buffers that it changed, and share those of small ones."""
        if self._buffers and self._flags not in self._learned.changing:
            versions = {id(tensor): version for tensor, version, _, _ in self._versions}
            copies, self._before = self._before, {}
            unseen = self._statistics()
            small = []
            for index, before in copies.items():
                buffer = self._buffers[index]
                if id(buffer) in unseen or version_of(buffer) != versions[id(buffer)] or _differ(before, buffer):
                    self._before[index] = before
                elif _is_small(buffer):
                    small.append(index)
            self._copies = _Copies([self._buffers[index] for index in small], [copies[index] for index in small])
            self._learned.changing[self._flags] = frozenset(self._before)
            self._learned.copies[self._flags] = self._copies
            self._unwatch([*self._before, *small])
        elif self._copies is not None and (self._learned.may_change_unseen or self._copies.moved()):
            # This frame changed some that none before it did.
            numbers = {id(buffer): index for index, buffer in enumerate(self._buffers)}
            everything = range(len(self._copies.buffers))
            for number in everything if self._learned.may_change_unseen else self._copies.changed():
                self._before[numbers[id(self._copies.buffers[number])]] = self._copies.values[number]
            self._learned.changing[self._flags] = frozenset(self._before)
            self._learned.copies.pop(self._flags, None)

    def _statistics(self) -> set[int]:
        """The ids of the buffers to which a batch norm may write, though neither version nor value may tell."""
        if self._learned.may_change_unseen:
            return {id(buffer) for buffer in self._buffers if _is_small(buffer)}
        norms = [module for module, _, _, _ in self.held if isinstance(module, _NormBase) and module.training]
        return {id(buffer) for norm in norms for buffer in norm._buffers.values()}

    def _unwatch(self, indices: Iterable[int]) -> None:
        ours = {id(self._buffers[index]) for index in indices}
        self._versions = [version for version in self._versions if id(version[0]) not in ours]

    def modules(self) -> list[nn.Module]:
        return [module for module, _, _, _ in self.held]

    def unlearn(self) -> None:
        """The frame changed something that earlier ones with these flags did not: let the next one learn anew."""
        self._learned.changing.pop(self._flags, None)

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers, which all live anyway (invariant 7)."""
        return [tensor for tensor, _, _, _ in self._versions] + self._buffers

    def changed(self) -> str | None:
        """Describes a parameter or buffer that has been modified since, or has got other memory; None if none has."""
        for tensor, version, _, storage in self._versions:
            has_another = storage is not None and tensor.untyped_storage()._cdata != storage.cdata
            if has_another and not self._is_gathered(tensor):
                name = self._name(tensor)
                return f"{name}, a {describe(tensor)}, has been given other data (parameter.data = ...)"
            if version_of(tensor) != version:
                return f"{self._name(tensor)}, a {describe(tensor)}, has been modified in place"
        return None

    def _is_gathered(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` may get new memory for each run, from a library or from a forward pre-hook."""
        if is_managed_elsewhere(tensor):
            return True
        hooked = [module for module in self.modules() if module._forward_pre_hooks]
        return any(tensor is value for module in hooked for value in (*module.parameters(), *module.buffers()))

    def _name(self, tensor: Tensor) -> str:
        for module in self.modules():
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                if value is tensor:
                    return name
        return "what it refers to"

    @contextmanager
    def replayed(self, name: str) -> Iterator[None]:
        """The span in which the modules are as they were when the frame began. Afterwards they are as they are now."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {name}: {what} between forward and backward (an optimizer step?), so the region cannot be run "
                "again as it ran. Call backward first, or leave this module out of the policy."
            )
        buffers = [self._buffers[index] for index in self._before]
        values = list(self._before.values())
        if self._copies is not None:
            moved = [number for number in self._copies.moved() if not _is_among(self._copies.buffers[number], buffers)]
            buffers += [self._copies.buffers[number] for number in moved]
            values += [self._copies.values[number] for number in moved]
        with ExitStack() as stack:
            if buffers:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tuple(buffers)))
                stack.callback(_assign, buffers, [buffer.detach().clone() for buffer in buffers])
                _assign(buffers, values)
            for tensor, _, requires_grad, _ in self._versions:
                if tensor.requires_grad is not requires_grad and tensor.is_leaf:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(requires_grad)
            present = [(module, type(module), module.__dict__) for module in self.modules()]
            stack.callback(_swap_attributes, present)
            plain = self._are_plain
            _swap_attributes(
                [
                    (module, kind, _attributes_for_replay(module, then, parts, plain))
                    for module, kind, then, parts in self.held
                ]
            )
            yield


_DICTS = (dict, OrderedDict)
_PLAIN = frozenset((nn.Parameter, Tensor, type(None)))
PARTS = frozenset((Tensor, list, dict, set, deque, OrderedDict, defaultdict, Counter))
TORCHS_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has: training flags, hooks, and the dicts of its parts."""


def _attributes_of(attributes: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A copy of a module's attributes, for a replay, and whether there are containers or tensors among them."""
    copied = attributes.copy()
    has_parts = not PARTS.isdisjoint(map(type, map(copied.get, copied.keys() - TORCHS_OWN)))
    # torch's own ``_parameters`` is a dict. A library may have put an object in its place that gathers weights, say. A
    # copy of that might gather them into a place of its own, so the object itself is used.
    parameters = attributes["_parameters"]
    copied["_parameters"] = parameters.copy() if type(parameters) in _DICTS else parameters
    copied["_buffers"] = attributes["_buffers"].copy()
    modules = attributes["_modules"]
    copied["_modules"] = modules.copy() if modules and type(modules) is dict else modules
    return _with_parts_copied(copied) if has_parts else copied, has_parts


def _attributes_for_replay(
    module: nn.Module, attributes: dict[str, Any], has_parts: bool, are_plain: bool
) -> dict[str, Any]:
    """Another copy of what ``_attributes_of`` gave. A replay may change it, and the next one finds the same again.

    are_plain: whether none of the parameters was a DTensor when the frame began.
    """
    again = _with_parts_copied(attributes) if has_parts else attributes.copy()
    now, then = module._parameters, again["_parameters"]
    again["_buffers"] = again["_buffers"].copy()
    if type(then) in _DICTS:
        again["_parameters"] = then.copy()
    if again["_modules"] and type(again["_modules"]) is dict:
        # Modules that forward itself has made are there, too: a run that made others would have other parameters.
        again["_modules"] = {**module._modules, **again["_modules"]}
    if not (are_plain and _PLAIN.issuperset(map(type, now.values()))) and any(
        has_layout(each) for each in (*now.values(), *then.values()) if each is not None
    ):
        again["_parameters"] = now  # the library that gathers and frees them has them as they should be now
    return again


def _with_parts_copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy in which containers are copies too, so that code which adds to one does not change the copy."""
    copied = attributes.copy()
    copies: dict[int, Any] = {}
    for name, value in attributes.items():
        if type(value) in PARTS and name not in TORCHS_OWN:
            copied[name] = copy_of(value, copies)
    return copied


def copy_of(part: Any, copies: dict[int, Any]) -> Any:
    """A copy of a container and of all containers and tensors in it. copies: those that were made, by ``id``."""
    if (known := copies.get(id(part))) is not None:
        return known
    if type(part) is Tensor:
        copies[id(part)] = alias = _without_graph(part)
        return alias
    copied = copies[id(part)] = part.copy()
    if not isinstance(part, set) and not PARTS.isdisjoint(map(type, part.values() if isinstance(part, dict) else part)):
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            if type(item) in PARTS:
                copied[key] = copy_of(item, copies)
    return copied


def _without_graph(tensor: Tensor) -> Tensor:
    """The tensor without its graph. Else the graph of an auxiliary loss, say, would be held from step to step."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


_set = object.__setattr__  # the module's own would first look at what kind of value it is


def _swap_attributes(states: Iterable[tuple[nn.Module, type, dict[str, Any]]]) -> None:
    """Give each module a class and a ``__dict__``.

    The dict itself is replaced and not its items. So all attributes change at once, and the dict from before can be put
    back as it was.
    """
    for module, kind, attributes in states:
        if type(module) is not kind:
            module.__class__ = kind
        _set(module, "__dict__", attributes)


def _differ(before: Tensor, now: Tensor) -> bool:
    if before.is_meta or isinstance(before, FakeTensor):
        return False
    if before.layout is not torch.strided:
        before, now = before.to_dense(), now.to_dense()
    return not torch.equal(before, now)


def _is_among(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _assign(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


class AutocastState:
    """Autocast as it is when this is made: mostly off."""

    __slots__ = ("_settings",)

    def __init__(self) -> None:
        self._settings: list[tuple[Any, ...]] = []
        if torch._C._is_any_autocast_enabled():
            cache = torch.is_autocast_cache_enabled()
            self._settings = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d), cache) for d in _DEVICES]

    def replayed(self) -> AbstractContextManager[Any]:
        if not self._settings and not torch._C._is_any_autocast_enabled():
            return _NOTHING
        stack = ExitStack()
        for device, dtype, is_enabled, cache in self._settings or [(d, None, False, None) for d in _DEVICES]:
            stack.enter_context(torch.autocast(device, dtype, is_enabled, cache))
        return stack


_DEVICES = ("cpu", "cuda")
