"""Tensors that are computed when somebody asks for their values, unless a kernel can do without them.

A kernel may fuse two operations that a model's Python calls one after the other: an activation and a product, a norm
and its Linears, a language model's head and its loss. The first operation then returns a ``LazyTensor``, which knows
its shape and how to compute its values. If the second operation is one that the kernel fuses with the first, the lazy
tensor among its arguments calls the kernel. For any other operation the values are computed, once, and used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from recompute.engine.saved_tensors import describe, version_of
from recompute.errors import MutationError, UnsupportedError

PRODUCTS = frozenset({Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, torch.multiply})

_METADATA = frozenset(
    {
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point", "is_complex")),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "requires_grad")
        ),
    }
)
_GRAPH: Any = Tensor.grad_fn
_LEADS_TO_ITS_GRADIENT = frozenset({Tensor.register_hook, Tensor.retain_grad, _GRAPH.__get__})


class LazyTensor(Tensor):
    """Stands for the result of ``compute()``, a tensor of ``shape``, until somebody needs its values."""

    _compute: Callable[[], Tensor]
    _value: Tensor | None
    _operands: tuple[tuple[Tensor, int], ...]
    """The tensors that ``compute`` reads, and their versions."""
    _mode: tuple[bool, bool, torch.dtype | None]
    """What ``mode_of`` returned where this was made."""
    _is_passed_by: bool
    """Whether a kernel has computed something of this without its values: the gradient of that does not come by."""
    _waiting: OrderedDict[int, Callable[[Tensor], Any]]
    """Hooks that wait for backward to begin, and are the values' if there ever are any."""

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        operands: Sequence[Tensor | None],
        compute: Callable[[], Tensor],
        dtype: torch.dtype | None = None,
    ) -> Any:
        """operands: the tensors that ``compute`` reads. The result has the device of the first one.

        dtype: by default that of the first operand.
        """
        given = [each for each in operands if each is not None]
        like = given[0]
        mode = mode_of(like.device)
        trains = mode[0] and any(each.requires_grad for each in given)
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or like.dtype, device=like.device, requires_grad=trains
        )
        made._compute, made._value, made._mode = compute, None, mode
        made._is_passed_by, made._waiting = False, OrderedDict()
        made._operands = tuple([(each, version_of(each)) for each in given])
        if trains:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        return made

    def __init__(self, *_: Any, **__: Any):
        pass

    @property
    def is_lazy(self) -> bool:
        """Whether nobody has asked for the values yet."""
        return self._value is None

    def value(self) -> Tensor:
        """What this stands for, computed when first asked for."""
        if self._value is None:
            self.check()
            with torch.set_grad_enabled(self._mode[0]), self.autocast_as_made():
                self._value = self._compute()
            self._operands = ()
            if self._value.requires_grad:
                for hook in self._waiting.values():
                    self._value.register_hook(hook)
        return self._value

    def autocast_as_made(self) -> AbstractContextManager[Any]:
        """The span in which autocast is as it was where this was made."""
        _, is_on, dtype = self._mode
        if mode_of(self.device)[1:] == (is_on, dtype):
            return nullcontext()
        return torch.autocast(self.device.type, dtype, enabled=is_on)

    def tell(self, observe: Callable[[], None]) -> None:
        """Have ``observe`` called when the values are computed."""
        compute = self._compute

        def observed() -> Tensor:
            observe()
            return compute()

        self._compute = observed

    def pass_by(self) -> None:
        """Note that a kernel has computed something of this without its values."""
        self._is_passed_by = True

    def before_change(self) -> None:
        """Called when something is about to change this in place."""
        self.value()

    def _await(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Register a hook that waits for backward to begin, without asking for the values."""
        if self._value is not None:
            return self._value.register_hook(hook)
        handle = RemovableHandle(self._waiting)
        self._waiting[handle.id] = hook
        return handle

    def check(self) -> None:
        """Refuse to compute from operands that have changed since, which would give other values."""
        for tensor, version in self._operands:
            if version_of(tensor) != version or not (tensor.untyped_storage().nbytes() or not tensor.numel()):
                raise MutationError(
                    f"{self!r} is first asked for its values after what it is made of, a {describe(tensor)}, has been "
                    "changed in place, as by an optimizer's step, or sharded away. Ask before, or give the module that "
                    "made it a rule of its own, with `via: hook` or `action: keep`."
                )

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, computed by a kernel that does not need these values; or NotImplemented."""
        return NotImplemented

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if _changes(function, kwargs):
            tree_map_only(LazyTensor, lambda lazy: lazy.before_change(), (args, kwargs))
        if function in _LEADS_TO_ITS_GRADIENT:
            if function is Tensor.register_hook and args[0]._is_passed_by:
                if _waits_for_backward(*args[1:], **kwargs):
                    return args[0]._await(*args[1:], **kwargs)
                raise UnsupportedError(
                    f"{args[0]!r} gets a hook after a kernel has computed something of it without its values: the hook "
                    "would miss that gradient. Register the hook as soon as there is the tensor, or give the module "
                    "that made it a rule of its own, with `via: hook` or `action: keep`."
                )
            args[0].before_change()
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, LazyTensor) and argument.is_lazy:
                argument.check()
                result = argument.fused(function, args, kwargs)
                if result is not NotImplemented:
                    if argument._value is None and not isinstance(result, LazyTensor):
                        argument.pass_by()
                    return result
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.value(), (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(function)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.value().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)


def values_of(tensor: Tensor) -> Tensor:
    """The tensor, or what it stands for: a kernel that is given a lazy one has to have its values."""
    return tensor.value() if isinstance(tensor, LazyTensor) else tensor


def mode_of(device: torch.device) -> tuple[bool, bool, torch.dtype | None]:
    """Whether gradients are on, whether autocast is, and autocast's dtype if it is."""
    autocasts = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.is_grad_enabled(), autocasts, torch.get_autocast_dtype(device.type) if autocasts else None


def _waits_for_backward(hook: Any) -> bool:
    """Whether a hook only waits for backward to begin, as FSDP's does: it registers one on all that a model returns.

    What a kernel has computed of logits, a loss, has it as well.
    """
    function = getattr(hook, "func", hook)  # of a partial
    return (getattr(function, "__module__", None) or "").startswith("torch.distributed.")


def _changes(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes any of its arguments in place."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
    return in_place or kwargs.get("out") is not None or kwargs.get("inplace") is True


def _refuse_gradient(gradient: Tensor | None) -> None:
    if gradient is not None:  # None comes from a node that passes no gradient on
        _refuse(gradient)


def _refuse(what: object) -> None:
    """Raise where an op below autograd, or a custom function's gradient, needs values that the lazy tensor has not."""
    raise UnsupportedError(
        f"{what if callable(what) else 'a custom function'} was given the output of a module for which a kernel stands "
        "in, past torch's own functions, as by an autograd.Function or a compiled extension. Give that module a rule "
        "of its own, with `via: hook` or `action: keep`."
    )
