"""torch's functions in the place of ATen's overloads, which they call: they parse arguments in half the time.

An overload converts its arguments by a schema in each call: that of ``clone`` with a format takes 13 µs, and
``torch.clone`` 3 µs (x86, torch 2.14). A GPU may wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tag, Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from recompute.compiled.calls import Call, Use

_C: Any = torch._C
_PLACES = (_C.TensorBase, _C._VariableFunctions, _C._nn)
_OTHER_NAMES = {"_to_copy": "to"}
_known: dict[Any, Callable[..., Any]] = {}


def function_of(call: Call) -> Callable[..., Any]:
    """A function that makes ``call``, given the same arguments: torch's of that name, if it makes just this call."""
    op, overload = call.op, call.op._op
    takes_tensors = any(True for _ in call.uses())  # else it is a factory, and function modes may look for that
    if op.namespace != "aten" or Tag.nondeterministic_seeded in op.tags or not takes_tensors:
        return cast(Callable[..., Any], overload)
    of_layouts = call.with_uses(lambda use: use[1:])
    if (key := (op, repr((of_layouts.args, of_layouts.kwargs)))) not in _known:
        with _disable_current_modes(), torch.no_grad():
            on_meta = call.with_uses(_on_meta)
            _known[key] = _found(op, on_meta.args, on_meta.kwargs)
    return _known[key]


def _on_meta(use: Use) -> Tensor:
    tensor = use.layout.empty()
    return tensor.conj() if use.is_conjugate else tensor


def _found(op: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    name = op._schema.name.removeprefix("aten::")
    functions = [getattr(place, _OTHER_NAMES.get(name, name), None) for place in _PLACES]
    expected = _calls_of(op._op, args, kwargs)
    found = (each for each in functions if each is not None and _calls_of(each, args, kwargs) == expected)
    return cast(Callable[..., Any], op._op if len(expected) != 1 else next(found, op._op))


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((op, repr(tree_map_only(Tensor, id, (args, kwargs or {})))))
        return op(*args, **(kwargs or {}))


def _calls_of(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    """The calls that a function makes of ATen's ops; none if it fails, as one that takes other arguments."""
    with _Noting() as noting:
        try:
            function(*args, **kwargs)
        except Exception:  # whatever a parser, or an op on tensors without values, may raise
            return []
    return noting.calls
