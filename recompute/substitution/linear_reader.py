"""Finds the Linear that alone reads what a module gives, in the same forward or in that of another module.

``torch.fx`` traces the forwards on the way. A trace that fails has told of what came before: the layers of BART, for
one, end with a question about values.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from recompute.substitution.kernel_runner import has_backward_hooks, is_plain_linear
from recompute.substitution.layer_formula import LayerTracer
from recompute.substitution.module_formula import trace_of


@dataclass(frozen=True)
class LinearReader:
    owner: weakref.ref[nn.Module]
    """The module that has the Linear."""
    name: str
    through: tuple[weakref.ref[nn.Module], ...]
    """The modules that return what the Linear reads, or are given it."""

    def is_as_found(self) -> bool:
        """Whether it is still a Linear, and calling it does nothing else."""
        owner = self.owner()
        return owner is not None and is_plain_linear(owner._modules.get(self.name))

    def has_backward_hooks(self) -> bool:
        """Whether a module on the way has hooks of its backward."""
        return any((module := reference()) is not None and has_backward_hooks(module) for reference in self.through)


def find_linear_reader(module: nn.Module, root: nn.Module) -> LinearReader | None:
    """The Linear in ``root`` that alone reads what ``module``, a part of it, gives in training; None if none does."""
    path = next((path for path, each in root.named_modules() if each is module), "")
    through: list[nn.Module] = []
    while path:
        around, _, name = path.rpartition(".")
        parent = root.get_submodule(around)
        calls = [node for node in _trace(parent) if node.op == "call_module" and node.target == name]
        user = _only_user(calls[0]) if len(calls) == 1 else None
        if user is None or user.op != "output":
            return None if user is None else _find_in(parent, calls[0], through)
        through.append(parent)
        path = around
    return None  # it leaves ``root``


def _find_in(parent: nn.Module, node: fx.Node, through: list[nn.Module]) -> LinearReader | None:
    """The same for what ``node`` gives in the forward of ``parent``."""
    while (user := _only_user(node)) is not None and user.op == "call_module":
        name = str(user.target)
        child = parent.get_submodule(name)
        if is_plain_linear(child):
            return None if "." in name else LinearReader(weakref.ref(parent), name, tuple(map(weakref.ref, through)))
        through.append(child)
        taken = _as_taken(child, user, node)
        if taken is None:
            return None
        parent, node = child, taken
    return None


def _as_taken(module: nn.Module, call: fx.Node, argument: fx.Node) -> fx.Node | None:
    """The parameter of the module's forward for which ``call`` gives ``argument``."""
    parameters = [node for node in _trace(module) if node.op == "placeholder"]
    given = dict(zip([str(each.target) for each in parameters], call.args, strict=False)) | call.kwargs
    return next((each for each in parameters if given.get(str(each.target)) is argument), None)


def _trace(module: nn.Module) -> list[fx.Node]:
    return trace_of(module, LayerTracer(None))


def _only_user(node: fx.Node) -> fx.Node | None:
    """What alone reads what a node gives, or what a dropout gives of it that drops nothing."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    if user.op == "output":
        return user if user.args[0] is node else None
    if user.target is F.dropout and user.args[:1] == (node,):
        operands, options = _arguments(user)
        return _only_user(user) if dropout_gives_its_input(*operands[1:], **options) else None
    return user


def dropout_gives_its_input(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Whether ``torch.nn.functional.dropout`` with these arguments gives what it is given."""
    return (p == 0 or not training) and not inplace


def _arguments(node: fx.Node) -> Any:
    return node.args, node.kwargs
