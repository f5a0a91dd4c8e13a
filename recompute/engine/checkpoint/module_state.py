"""The state of modules. A frame's result depends on it, besides its code and its arguments.

It is captured when the frame begins, and put back while it runs again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase

from recompute.engine.checkpoint.copies import StateCopies
from recompute.engine.cut.save_plan import LARGEST_COPY
from recompute.engine.dtensors import has_layout, is_managed_elsewhere
from recompute.engine.saved_tensors import describe, storage_of, version_of
from recompute.engine.wrapper_tensors import inner_tensors
from recompute.errors import MutationError

_NOTHING: AbstractContextManager[None] = nullcontext()

RUNNER = "_recompute_runner"
"""The key of a module's runner in the ``__dict__`` of a module under a policy. The runner runs its forward.

It is there because a DataParallel replica gets a copy of the ``__dict__``.
"""


HeldModule = tuple[nn.Module, type, dict[str, Any], bool]
"""A module, its class, a copy of its attributes, and whether these hold more than numbers, functions and objects."""


_ScriptModule = torch.jit.ScriptModule


class ModuleState:
    """The classes, attributes, parameters and buffers of the modules that a frame runs."""

    __slots__ = ("_are_plain", "_bare", "_buffers", "_versions", "adorned", "held")

    def __init__(self, roots: Iterable[nn.Module], learned: LearnedBuffers, copies: StateCopies):
        """copies: copies the attributes; the tensors in them are then to be passed to ``watch``."""
        modules = list(roots)
        seen = set(modules)
        parameters: list[Tensor | None] = []
        buffers: list[Tensor] = []
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
                self.held.append((module, type(module), *_copied(module.__dict__, copies)))
                if module._forward_hooks or module._forward_pre_hooks:
                    copies.found += (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        self._are_plain = _PLAIN.issuperset(map(type, parameters))
        self.adorned: list[Tensor] = []
        """The parameters and buffers that code has given attributes, which ``Places`` looks at."""
        self._bare: list[Tensor] = []
        for tensor in (*parameters, *buffers):
            if tensor is not None:
                (self._bare if tensor.__dict__ in _BARE else self.adorned).append(tensor)
        if not _PLAIN.issuperset(map(type, buffers)):  # the tensors inside of wrappers are copied and compared
            buffers = [each for buffer in buffers for each in inner_tensors(buffer) or (buffer,)]
        self._buffers = HeldBuffers(buffers, modules, learned) if buffers else None
        parameters += () if self._buffers is None else self._buffers.uncopied()
        self._versions: list[tuple[Tensor, int, bool, StorageWeakRef | None]] = []
        self.watch([t for t in parameters if t is not None])

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Have ``changed`` look at these tensors, too, and at the tensors that they wrap."""
        if not _PLAIN.issuperset(map(type, tensors)):
            tensors = [*tensors, *[inner for tensor in tensors for inner in inner_tensors(tensor)]]
        self._versions += [(t, version_of(t), t.requires_grad, storage_of(t)) for t in tensors]

    def settle(self) -> None:
        """The frame has ended: note which buffers it has changed, and watch only the ones that are not copied."""
        if self._buffers is not None and self._buffers.settle(self.modules()):
            copied = set(map(id, self._buffers.all)).difference(map(id, self._buffers.uncopied()))
            self._versions = [version for version in self._versions if id(version[0]) not in copied]

    def modules(self) -> list[nn.Module]:
        return [module for module, _, _, _ in self.held]

    def unlearn(self) -> None:
        if self._buffers is not None:
            self._buffers.unlearn()

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers, which all live anyway (invariant 7)."""
        return [tensor for tensor, _, _, _ in self._versions] + ([] if self._buffers is None else self._buffers.all)

    def changed(self) -> str | None:
        """Describes a parameter or buffer that has been modified since, or has got other memory; None if none has."""
        for tensor, version, _, storage in self._versions:
            has_another = storage is not None and tensor.untyped_storage()._cdata != storage.cdata
            if has_another and not self._is_gathered(tensor):
                name = self._name(tensor)
                return f"{name}, a {describe(tensor)}, got other data (parameter.data = ...)"
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
        return "a tensor that its function refers to"

    @contextmanager
    def replayed(self, name: str, copies: StateCopies) -> Iterator[None]:
        """Inside, the modules are as they were when the frame began. Afterwards they are as they are now."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {name}: {what} between forward and backward (an optimizer step?), so the module cannot run again "
                "as it did. Call backward first, or leave this module out of the policy."
            )
        with ExitStack() as stack:
            stack.enter_context(_NOTHING if self._buffers is None else self._buffers.replayed())
            for tensor, _, requires_grad, _ in self._versions:
                if tensor.requires_grad is not requires_grad and tensor.is_leaf:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(requires_grad)
            for tensor in self._bare:
                if (given := tensor.__dict__) not in _BARE:  # since then, say by forward
                    stack.callback(given.update, given.copy())
                    given.clear()
            present = [(module, type(module), module.__dict__) for module in self.modules()]
            stack.callback(_swap_attributes, present)
            again = [(module, kind, _copied(then, copies, has_parts)[0]) for module, kind, then, has_parts in self.held]
            for module, _, attributes in again:
                are_plain = self._are_plain and _PLAIN.issuperset(map(type, module._parameters.values()))
                if not are_plain or attributes["_modules"]:
                    _take_present_parts(attributes, module, are_plain)
            _swap_attributes(again)
            yield


_BARE: tuple[dict[str, str], ...] = ({}, *({"_dynamo_static_input_type": kind} for kind in ("guarded", "unguarded")))
"""The attributes of a tensor that has none, or none but a note of torch's frontend."""
_DICTS = (dict, OrderedDict)
_PLAIN = frozenset((nn.Parameter, Tensor, type(None)))
TORCHS_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has: training flags, hooks, and the dicts of its parts."""


def _copied(attributes: dict[str, Any], copies: StateCopies, has_parts: bool = True) -> tuple[dict[str, Any], bool]:
    """A copy of a module's attributes, and of the containers in it, for code may change these; and whether it has any.

    has_parts: whether it may have some.
    """
    copied = attributes.copy()
    # torch's own ``_parameters`` is a dict. A library may have put an object in its place that gathers weights, say. A
    # copy of that might gather them into a place of its own, so the object itself is used.
    parameters, modules = attributes["_parameters"], attributes["_modules"]
    copied["_parameters"] = parameters.copy() if type(parameters) in _DICTS else parameters
    copied["_buffers"] = attributes["_buffers"].copy()
    copied["_modules"] = modules.copy() if modules and type(modules) is dict else modules
    if not has_parts or not (names := attributes.keys() - TORCHS_OWN):
        return copied, False
    values = [*map(attributes.get, names)]
    found = copies.all(values)
    if found is not values:
        copied.update(zip(names, found, strict=True))
    return copied, found is not values


def _take_present_parts(again: dict[str, Any], module: nn.Module, are_plain: bool) -> None:
    """Put the present parts of a module into a copy of its attributes. are_plain: no parameter can be a DTensor."""
    if again["_modules"] and type(again["_modules"]) is dict:
        # Modules that forward itself has made are there, too: a run that made others would have other parameters.
        again["_modules"] = {**module._modules, **again["_modules"]}
    now, then = module._parameters, again["_parameters"]
    if not are_plain and any(has_layout(each) for each in (*now.values(), *then.values()) if each is not None):
        again["_parameters"] = now  # the library that gathers and frees them has them as they should be now


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


class _Copy(NamedTuple):
    buffer: Tensor
    value: Tensor
    version: int

    @property
    def has_moved(self) -> bool:
        """Whether the buffer has been changed in place since, as far as its version tells."""
        return version_of(self.buffer) != self.version


@dataclass(slots=True)
class LearnedBuffers:
    """The facts that a region's frames have learned of its buffers, by their numbers, for later frames."""

    may_change_unseen: bool = False
    """Whether its code names a batch norm, whose kernels write to statistics without a new version."""
    changing: dict[tuple[bool, ...], frozenset[int]] = field(default_factory=dict)
    """The buffers that a frame has changed, by the modules' training flags: training may change others."""
    copies: dict[int, _Copy] = field(default_factory=dict)
    """Copies of the small buffers that no frame has changed. All frames share them until somebody does."""


class HeldBuffers:
    """Buffers are of three kinds:

    - Those that forward itself changes in place, such as batch-norm statistics. They are copied before each frame. The
      first frame with the same training flags finds out which these are. It compares values and not only versions,
      because kernels write to some buffers without a new version. Those of a batch norm count as changed anyway: it
      may write the same value at first.
    - Small ones that forward does not change. All frames share one copy of them, as long as nobody changes them.
    - Large ones that forward does not change. They are not copied; the replay is refused if somebody changes them.
    """

    __slots__ = ("_changing", "_copies", "_flags", "_is_first", "_learned", "all")

    def __init__(self, buffers: list[Tensor], modules: Sequence[nn.Module], learned: LearnedBuffers):
        self.all = buffers
        self._learned = learned
        self._flags = tuple([module.training for module in modules])
        known = learned.changing.get(self._flags)
        self._is_first = known is None
        self._changing = frozenset(range(len(buffers))) if known is None else known
        self._copies: dict[int, _Copy] = {}
        for index, buffer in enumerate(buffers):
            if index in self._changing:
                self._copies[index] = _copy_of_buffer(buffer)
            elif _is_small(buffer):
                shared = learned.copies.get(index)
                if shared is None or shared.buffer is not buffer or shared.has_moved:
                    shared = learned.copies[index] = _copy_of_buffer(buffer)
                self._copies[index] = shared

    def uncopied(self) -> list[Tensor]:
        """Those whose versions have to be checked: in the first frame, as long as it runs, all of them."""
        return [each for index, each in enumerate(self.all) if self._is_first or index not in self._copies]

    def settle(self, modules: Sequence[nn.Module]) -> bool:
        """The frame has ended: note which buffers it has changed. Returns whether others are ``uncopied`` now."""
        learned, was_first, self._is_first = self._learned, self._is_first, False
        before = frozenset() if was_first else self._changing
        norms = [each for each in modules if isinstance(each, _NormBase) and each.training] if was_first else []
        statistics = {id(buffer) for norm in norms for buffer in norm._buffers.values()}
        changing = before.union(
            index
            for index, copy in self._copies.items()
            if copy.has_moved
            or (learned.may_change_unseen and _is_small(copy.buffer))
            or (was_first and (id(copy.buffer) in statistics or _differ(copy.value, copy.buffer)))
        )
        if was_first or changing != before:
            self._changing = learned.changing[self._flags] = changing
            self._copies = {i: c for i, c in self._copies.items() if i in changing or _is_small(c.buffer)}
            learned.copies = {i: c for i, c in self._copies.items() if i not in changing}
        return was_first

    def unlearn(self) -> None:
        """The frame changed something that earlier ones with these flags did not: let the next one learn anew."""
        self._learned.changing.pop(self._flags, None)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the buffers are as they were when the frame began. Afterwards they are as they are now."""
        copies = [copy for index, copy in self._copies.items() if index in self._changing or copy.has_moved]
        buffers = [copy.buffer for copy in copies]
        if not buffers:
            yield
            return
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            present = [buffer.detach().clone() for buffer in buffers]
            _assign(buffers, [copy.value for copy in copies])
            try:
                yield
            finally:
                _assign(buffers, present)


def _copy_of_buffer(buffer: Tensor) -> _Copy:
    return _Copy(buffer, buffer.detach().clone(), version_of(buffer))


def _is_small(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.nbytes <= LARGEST_COPY


def _differ(before: Tensor, now: Tensor) -> bool:
    if before.is_meta or isinstance(before, FakeTensor):
        return False
    if before.layout is not torch.strided:
        before, now = before.to_dense(), now.to_dense()
    return not torch.equal(before, now)


def _assign(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            if buffer.shape != value.shape:  # forward resizes it, as fake quantization does
                buffer.resize_(value.shape)
            buffer.copy_(value)
