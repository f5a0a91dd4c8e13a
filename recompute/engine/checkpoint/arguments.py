"""A frame's arguments: taken apart, held for backward, compared, and put together again as they were."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recompute.engine.bit_comparison import count_different
from recompute.engine.checkpoint.copies import NUMBERS, OBJECT, RECORD, Copier, contents_of, fingerprint
from recompute.engine.rng import GENERATORS
from recompute.engine.saved_tensors import (
    Hooks,
    KeptTensor,
    PackedByOuterHook,
    describe,
    laid_out,
    pack_through,
    storage_key,
    top_hooks,
    version_of,
)
from recompute.engine.tape.exposed_memory import is_shared
from recompute.engine.wrapper_tensors import inner_tensors
from recompute.errors import MutationError


class _HeldTensor:
    """A tensor among a frame's arguments, held for backward, and its state when the frame began."""

    __slots__ = ("attributes", "before", "inner", "original", "requires_grad", "saved", "stride", "version")

    def __init__(self, tensor: Tensor, name: str, hooks: Hooks | None):
        """hooks: the saved-tensor hooks in force, which hold it (invariant 9)."""
        # A parameter is held as the object itself, for code may ask for that. Others become leaves of a new graph.
        is_plain = type(tensor) is Tensor
        is_parameter = not is_plain and isinstance(tensor, nn.Parameter)
        self.saved = KeptTensor(tensor, name) if is_parameter else pack_through(hooks, tensor.detach(), name)
        self.attributes = tensor.__dict__.copy() if tensor.__dict__ else None
        is_foreign = type(self.saved) is PackedByOuterHook
        self.stride = tensor.stride() if is_foreign and tensor.layout is torch.strided else None
        self.requires_grad = tensor.requires_grad
        self.original: Tensor | None = tensor
        self.version = version_of(tensor)
        self.inner = () if is_plain else [(inner, version_of(inner)) for inner in inner_tensors(tensor)]
        self.before: Tensor | None = None
        """A copy, if an array has the same memory: writing to the array changes no version."""
        if is_shared(tensor):
            self.expose()

    def expose(self) -> None:
        """Others may write to it unseen from now on: take a copy to compare with."""
        if self.before is None and type(self.saved) is KeptTensor:
            self.before = self.saved.tensor.detach().clone()

    def changed(self) -> bool:
        """Whether it has been modified in place since."""
        if self.original is not None and version_of(self.original) != self.version:
            return True
        if any(version_of(inner) != version for inner, version in self.inner):
            return True
        return self.before is not None and count_different(self.saved.tensor, self.before) > 0  # type: ignore[attr-defined]

    def restore(self) -> Tensor:
        tensor = self.saved.get()
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return tensor
        if self.stride is not None:
            tensor = laid_out(tensor, self.stride)
        tensor = tensor.detach()
        if self.requires_grad:
            tensor.requires_grad_()
        if self.attributes:  # it is of a subclass, whose ``detach`` may not copy them
            vars(tensor).update({**self.attributes, **vars(tensor)})
        return tensor


class _HeldObject(Copier):
    """An object with state that forward may change, such as a key/value cache, and a copy of its state before."""

    def __init__(self, value: Any, others: list[Any]):
        """others: the random generators in ``value`` are added to it."""
        super().__init__(OBJECT)
        # Weakly, because forward puts tensors into a cache whose graph this is a part of (invariant 8).
        self.value = weakref.ref(value) if type(value).__weakrefoffset__ else lambda: None
        self._others, self._versions = others, list[tuple[Tensor, int]]()
        self.before = self.copy(value)
        del self._made
        self.fingerprint = fingerprint(value)
        self.was_changed = False

    def leaf(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._versions.append((value, version_of(value)))
        elif isinstance(value, GENERATORS):  # ``RngState`` captures their states
            self._others.append(value)
        return value

    def settle(self) -> None:
        """The frame has ended: note whether it changed the object, as it would again."""
        self.was_changed = fingerprint(self.value()) != self.fingerprint

    def changed(self) -> bool:
        """Whether a tensor in it has been modified in place: that state cannot be put back."""
        return any(version_of(tensor) != version for tensor, version in self._versions)

    def restore(self) -> Any:
        """The object as it was when the frame began: itself if nobody has changed it since, else a copy."""
        value = self.value()
        as_it_was = not self.was_changed and fingerprint(value) == self.fingerprint
        return value if as_it_was else Copier(OBJECT).copy(self.before)


class HeldArguments(Copier):
    """A frame's arguments, with every tensor in tuples, lists, dicts and dataclasses held for backward."""

    def __init__(self, arguments: tuple[tuple, dict], name: str):
        super().__init__(RECORD)
        self._name = name
        self._hooks: Hooks | None = top_hooks()
        self._tensors: dict[int, _HeldTensor] = {}  # by id: one tensor passed twice is one tensor again
        self._opaque: list[_HeldObject] = []
        self.others: list[Any] = []
        """The arguments that are no tensors or objects with state, generators in such, parameters with attributes."""
        self._arguments = self.copy(arguments)
        del self._made
        self._hooks = None  # hooks refer to the scopes around

    def leaf(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if (held := self._tensors.get(id(value))) is None:
                held = self._tensors[id(value)] = _HeldTensor(value, self._name, self._hooks)
                if held.attributes and isinstance(value, nn.Parameter):
                    self.others.append(value)
            return held
        kind: Any = type(value)
        if kind in NUMBERS:
            return value
        if contents_of(kind) is not None:
            opaque = self._made[id(value)] = _HeldObject(value, self.others)
            self._opaque.append(opaque)
            return opaque
        self.others.append(value)
        return value

    def hand_out(self, tensor: Tensor) -> None:
        """The memory of a tensor is about to become an array."""
        key = storage_key(tensor)
        for held in self._tensors.values():
            if key is not None and held.original is not None and storage_key(held.original) == key:
                held.expose()

    def changed(self) -> str | None:
        """Names an argument that has been modified in place since, or that can be used only once, if there is one."""
        for held in self._tensors.values():
            if held.changed():
                known = (held.original, held.before, *[tensor for tensor, _ in held.inner])
                tensor = next(each for each in known if each is not None)
                return f"an argument, a {describe(tensor)}, has been modified in place"
        for opaque in self._opaque:
            if opaque.changed():
                return f"a tensor in an argument, a {type(opaque.before).__name__}, has been modified in place"
        for value in self.others:
            if isinstance(value, Iterator):
                return f"an argument, a {type(value).__name__}, may have been consumed"
        return None

    def settle(self) -> tuple[list[Tensor], list[Tensor]]:
        """The frame has ended: forget the arguments' graph.

        Returns the tensors that were given, and the held ones that are as they were given.
        """
        for opaque in self._opaque:
            opaque.settle()
        given, kept = [], []
        for held in self._tensors.values():
            if held.original is not None:
                given.append(held.original)
                held.original = None
            if type(held.saved) is KeptTensor:
                kept.append(held.saved.tensor)
        return given, kept

    def restored(self) -> tuple[tuple, dict]:
        """The same arguments, their tensors leaves of a new graph."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {self._name}: {what} between forward and backward, so the module cannot run again as it did. Pass "
                "a clone, or leave this module out of the policy."
            )
        parts: list[Any] = [*self._tensors.values(), *self._opaque]
        return Copier(RECORD, {id(part): part.restore() for part in parts}).copy(self._arguments)
