"""Spans of forward that decide how the tensors are held that autograd saves in them, and ``recompute.keep``.

A ``RecipeScope`` is around a whole model. A ``KeepScope`` makes an exception inside of it. ``keep`` makes one for a
tensor. In eager code it tells the regions around it. In compiled code it is an op, and a rule that names it keeps its
output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from recompute.engine.dtensors import has_layout, local_of
from recompute.engine.modes import (
    count_dispatch_modes,
    count_function_modes,
    has_foreign_modes,
    hidden_from_any_modes,
    hidden_from_modes,
)
from recompute.engine.recipe_book import RecipeBook, open_book
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import Hooks, PackedDTensor, PackedTensor, pack_through, top_hooks, unpack_saved
from recompute.engine.thread_state import local
from recompute.errors import warn
from recompute.policy.rules import is_tensor_name

push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_has_hooks = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def is_recording() -> bool:
    """Whether autograd records here, in a way that saved-tensor hooks can follow.

    It does not where a compiler, a functional transform or forward-mode differentiation is at work, nor where hooks are
    disabled.
    """
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and (_has_hooks() or _goes_without())
    )


@functools.cache
def _goes_without() -> bool:
    """Always False. The first time it warns."""
    warn(
        "saved-tensor hooks are disabled here (torch.autograd.graph.disable_saved_tensors_hooks), and a policy needs "
        "them, so nothing is dropped. Run the modules outside of that context, or leave them out of the policy."
    )
    return False


class Scope:
    """A span of forward where our hooks choose what autograd holds for each tensor that it saves."""

    is_checkpoint = False
    holds_elsewhere = False
    """Whether it may take tensors off the device."""
    is_frame = False
    """Whether it is a frame: it gets the calls of ``recompute.keep``, and those that hand memory out."""
    book: RecipeBook | None = None
    """The recipes of tensors that are made inside, if there are any."""
    outer: Hooks | None = None
    """The hooks around it."""

    def __enter__(self) -> Any:
        push_hooks(self.pack, unpack_saved)
        local.books.append(self.book)
        if self.is_frame:
            local.active_frames.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self.is_frame:
            local.active_frames.pop()
        local.books.pop()
        pop_hooks()
        if self.book is not None:
            self.book = None  # autograd keeps the pack hook, and with it this scope, as long as the graph lives

    def pack(self, tensor: Tensor) -> PackedTensor:
        """The pack hook: what autograd holds in the place of a tensor."""
        raise NotImplementedError

    def pack_hidden(self, tensor: Tensor) -> PackedTensor:
        """``pack``, where there are modes of others."""
        with hidden_from_modes():
            return self.pack(tensor)


class RecipeScope(Scope):
    """Inside, outputs that recipes give back are dropped, whichever module saves them.

    Scopes inside of another one share its book, so that a module in any of them finds the recipe.
    """

    def __init__(self, statistics: RegionStatistics):
        let_transforms_in()
        self._statistics = statistics
        self.outer = top_hooks()
        self.book = open_book() or RecipeBook()

    def pack(self, tensor: Tensor) -> PackedTensor:
        if (count_dispatch_modes() or count_function_modes()) and has_foreign_modes():
            return self.pack_hidden(tensor)
        handle = self.book.handle(local_of(tensor)) if self.book is not None else None
        if handle is not None:
            return PackedDTensor(tensor.detach(), handle, self._statistics.name) if has_layout(tensor) else handle
        return pack_through(self.outer, tensor.detach(), self._statistics.name)


class KeepScope:
    """Inside, everything that autograd saves is kept: ``action: keep``, also inside a region that drops.

    Our hooks are taken off for this span. ``torch.func.grad``, which refuses hooks, runs in one.
    """

    def __enter__(self) -> None:
        self._hooks: list[Hooks] = []
        while (top := top_hooks()) is not None and top[1] is unpack_saved:
            self._hooks.append(top)
            pop_hooks()
        local.books.append(None)

    def __exit__(self, *error: object) -> None:
        local.books.pop()
        while self._hooks:
            push_hooks(*self._hooks.pop())


@functools.cache
def let_transforms_in() -> None:
    """Have ``torch.func.grad``, ``vjp``, ``jacrev`` and ``hessian`` run in a ``KeepScope`` of their own, from now on.

    torch refuses them where there are saved-tensor hooks.
    """
    for name in ("grad_and_value_impl", "_vjp_with_argnums"):
        setattr(eager_transforms, name, _without_our_hooks(getattr(eager_transforms, name)))


def _without_our_hooks(transform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(transform)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (top := top_hooks()) is None or top[1] is not unpack_saved:
            return transform(*args, **kwargs)
        with KeepScope():
            return transform(*args, **kwargs)

    return run


_LIBRARY = torch.library.Library("recompute", "FRAGMENT")
_LIBRARY.define("kept(Tensor tensor, str? name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("kept", lambda tensor, name: tensor.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("recompute::kept", lambda tensor, name: torch.empty_like(tensor), lib=_LIBRARY)
torch.library.register_autograd("recompute::kept", lambda ctx, gradient: (gradient, None), lib=_LIBRARY)

keep_op = torch.ops.recompute.kept.default
"""``(tensor, name) -> tensor``: a copy, which costs its bytes, because an op may not return its input."""


def keep(tensor: Tensor, name: str | None = None) -> Tensor:
    """Pin ``tensor``: it is kept, and code that runs again in backward uses it instead of calculating it anew.

    Call it inside a module's forward, on a tensor that must not come out differently the second time, such as a
    router's logits; returns ``tensor``. Outside of every region it does nothing.

    name: pin it only where the rule that governs the module lists this name in its ``keep``.

    >>> recompute.keep(torch.ones(2), "router_logits")
    tensor([1., 1.])
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"recompute.keep takes a tensor, got {type(tensor).__name__}")
    if name is not None and not (isinstance(name, str) and is_tensor_name(name)):
        raise ValueError(
            f"recompute.keep takes a name of letters, digits and '_', such as 'router_logits', got {name!r}"
        )
    if torch.compiler.is_compiling():
        return keep_op(tensor, name) if torch.is_grad_enabled() and not torch.compiler._is_exporting_flag else tensor
    with hidden_from_any_modes():
        for frame in local.active_frames:
            tensor = frame.pin(tensor, name)
    if name is None and (book := open_book()) is not None:
        book.forget(tensor)
    return tensor
