"""Tensors that are computed when somebody asks for their values, unless a kernel can do without them.

A kernel may fuse two operations that a model's Python calls one after the other, as a language model's head and its
loss. The first operation then returns a ``LazyTensor``, which knows its shape and how to compute its values. If the
second operation is one that the kernel fuses with the first, the lazy tensor among its arguments calls the kernel. For
any other operation the values are computed, once, and used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from recompute.engine.saved_tensors import describe, version_of
from recompute.engine.thread_state import local
from recompute.errors import MutationError, UnsupportedError
from recompute.kernels.linears import autocast_dtype
from recompute.substitution.known_functions import Rules, by_function

MOST_WORDS = 64
"""A gather of more than these, or a ``topk``, has whole logits."""

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


class _Deferred:
    """How the values of a lazy tensor are computed."""

    def __init__(self, shape: tuple[int, ...], compute: Callable[[], Tensor], operands: Sequence[Tensor]):
        self._shape, self.compute, self._device = shape, compute, operands[0].device
        self._operands = tuple([(each, version_of(each)) for each in operands])
        self.records, self.narrow = torch.is_grad_enabled(), autocast_dtype(self._device.type)
        self.observe: Callable[[str], None] = lambda name: None

    def value(self) -> Tensor:
        self.check()
        self.observe(_asking.name)
        with torch.set_grad_enabled(self.records), autocast_to(self.narrow, self._device):
            return self.compute()

    def check(self) -> None:
        """Refuse to compute from operands that have changed since, which would give other values."""
        for tensor, version in self._operands:
            if version_of(tensor) != version or not (tensor.untyped_storage().nbytes() or not tensor.numel()):
                raise MutationError(
                    f"a module's output of shape {self._shape} is computed by a kernel when it is first read, and it "
                    f"is read too late: a {describe(tensor)} that it is computed from was modified in place (an "
                    "optimizer step?) or freed by sharding. Read it before, or give the module a rule with `via: "
                    "hook` or `action: keep`."
                )


class _Node(Function):
    """The autograd node of a lazy tensor.

    Gradients come here from readers that got the tensor past torch's own functions, as a custom ``autograd.Function``
    does. All other readers got the values. Their backward frees the graph of the values, so this one makes another.
    """

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], deferred: _Deferred, *sources: Tensor) -> Tensor:
        ctx.deferred, ctx.sources = deferred, sources
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        wanted = list(compress(ctx.sources, needed))
        create = torch.is_grad_enabled()
        local.regenerating += 1
        try:
            value = ctx.deferred.value()
        finally:
            local.regenerating -= 1
        found = iter(torch.autograd.grad(value, wanted, gradient, create_graph=create, allow_unused=True))
        return None, None, *[next(found) if needs else None for needs in needed]


class _Asking(threading.local):
    name = "what is no function of torch's"


_asking = _Asking()
"""The function for which this thread computes values."""


class _OfFunction(Function):
    """Passes on the gradient of values that were made without one, of a lazy tensor that a custom Function returned."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, lazy: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient


def _unseen_by_compilers(function: Any) -> Any:
    """Compiled code that is given a lazy tensor breaks its graph where it calls this, and compiles nothing inside.

    ``torch.compiler.disable`` does this, too, but would load the compiler.
    """

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a head's output is computed when it is read"
    return function


class LazyTensor(Tensor):
    """Stands for the result of ``compute()``, a tensor of ``shape``, until somebody needs its values."""

    survives: ClassVar[Rules] = {}
    """What it survives: the rules by which kernels compute functions of it without its values.

    A rule is called with the tensor, the function, and the other arguments. It may return NotImplemented.
    """
    survives_among: ClassVar[Rules] = {}
    """The same for functions of several tensors, of which this may be any. These rules get all arguments."""

    def __init_subclass__(cls) -> None:
        cls.survives, cls.survives_among = map(by_function, (cls.survives, cls.survives_among))

    _deferred: _Deferred | None
    """None once there are the values."""
    _value: Tensor | None
    _records: bool
    """Whether gradients were on where this was made."""
    _narrow: torch.dtype | None
    """The dtype that autocast cast to there; None: it was off."""
    _sources: Sequence[Tensor]
    """The tensors from which the values have a gradient."""
    _parents: Sequence[LazyTensor]
    """The lazy tensors that it was made of."""
    _is_passed_by: bool
    """Whether a kernel has computed something of this without its values: its gradient does not come by here."""
    _waiting: OrderedDict[int, Callable[[Tensor], Any]]
    """Hooks that wait for backward to begin. If values are computed, they get these hooks."""

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        operands: Sequence[Tensor | None],
        compute: Callable[[], Tensor],
        dtype: torch.dtype | None = None,
        sources: Sequence[Tensor] | None = None,
        parents: Sequence[LazyTensor] = (),
    ) -> Any:
        """operands: the tensors that ``compute`` reads. The result has the device of the first one.

        dtype: by default that of the first operand.
        sources: the tensors from which the result has a gradient; by default the operands.
        parents: the lazy tensors that this is made of.
        """
        given = [each for each in operands if each is not None]
        like = given[0]
        sources = given if sources is None else sources
        deferred = _Deferred(shape, compute, given)

        def make() -> Any:
            return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or like.dtype, device=like.device)

        trains = torch.is_grad_enabled() and any(each.requires_grad for each in sources)
        made: Any = _Node.apply(make, deferred, *sources) if trains else make()
        made._deferred, made._value, made._sources = deferred, None, sources
        made._records, made._narrow = deferred.records, deferred.narrow
        made._is_passed_by, made._waiting, made._parents = False, OrderedDict(), parents
        for each in parents:
            each.join_family(made)
        return made

    def __init__(self, *_: Any, **__: Any):
        pass

    @property
    def trains(self) -> bool | None:
        """Whether it has a gradient from its operands; None where a custom ``autograd.Function`` returned it."""
        return None if self.requires_grad and not self._records else self.requires_grad

    @property
    def is_lazy(self) -> bool:
        """Whether nobody has asked for the values yet."""
        return self._value is None

    def value(self) -> Tensor:
        """The values, computed when they are first asked for."""
        if self._value is None:
            assert self._deferred is not None, "it is there until there are values"
            self._value, was, self._deferred = self._deferred.value(), self.trains, None
            if was is None:
                self._value = _OfFunction.apply(self._value, self)
            if self._value.requires_grad:
                for hook in self._waiting.values():
                    self._value.register_hook(hook)
        return self._value

    def autocast_as_made(self) -> AbstractContextManager[Any]:
        """Inside, autocast is as it was where this was made."""
        return autocast_to(self._narrow, self.device)

    def tell(self, observe: Callable[[str], None]) -> None:
        """Have ``observe`` called when the values are computed, with the name of the function that asked for them."""
        assert self._deferred is not None, "it has just been made"
        self._deferred.observe = observe

    def pass_by(self) -> None:
        """Note that a kernel has computed something of this without its values."""
        self._is_passed_by = True
        for each in self._parents:
            each.pass_by()

    def join_family(self, made: LazyTensor) -> None:
        """Have ``made``, which was made of this, computed before the logits change that both come from."""
        for each in self._parents:
            each.join_family(made)

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

    def _is_of_lazy(self) -> bool:
        return all(each.is_lazy and each._is_of_lazy() for each in self._parents)

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, computed by a kernel that does not need these values; or NotImplemented."""
        if not self._is_of_lazy():  # the values that it is made of are there, so use them
            return NotImplemented
        if (rule := self.survives_among.get(function)) is not None:
            return rule(self, function, args, kwargs)
        rule = self.survives.get(function) if args and args[0] is self else None
        return NotImplemented if rule is None else rule(self, function, args[1:], kwargs)

    @classmethod
    @_unseen_by_compilers
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
                    f"{args[0]!r} gets a hook after a kernel has used it, so the hook would miss that gradient. "
                    "Register the hook right after the module that made the tensor, or give that module a rule with "
                    "`via: hook` or `action: keep`."
                )
            args[0].before_change()
        given = [*(args[0] if args and isinstance(args[0], (list, tuple)) else ()), *args, *kwargs.values()]
        for argument in given:
            if isinstance(argument, LazyTensor) and argument.is_lazy:
                if argument._deferred is not None:
                    argument._deferred.check()
                trains = [each.trains for each in given if isinstance(each, LazyTensor)]
                if None in trains:
                    continue
                with torch.set_grad_enabled(torch.is_grad_enabled() and any(trains)):
                    result = argument.fused(function, args, kwargs)
                if result is not NotImplemented:
                    if argument._value is None and not isinstance(result, LazyTensor):
                        argument.pass_by()
                    return result
        before, _asking.name = _asking.name, getattr(function, "__name__", str(function))
        try:
            args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.value(), (args, kwargs))
        finally:
            _asking.name = before
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an op that came past torch's own functions, as a compiled extension's. ``_Node`` has its gradient."""
        if function._schema.is_mutable:
            raise UnsupportedError(
                f"{function} would change the output of a module in place, which a kernel has yet to compute. Give "
                "that module a rule with `via: hook` or `action: keep`."
            )
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: lazy.values_alone(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def values_alone(self) -> Tensor:
        """The values below autograd. There they get no graph, so nobody else is given them."""
        return (self._value if self._deferred is None else self._deferred.value()).detach()  # type: ignore[union-attr]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.value().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)


def outline(function: Any, shape: Sequence[int], rest: tuple, kwargs: dict[str, Any], dtype: Any = None) -> Tensor:
    """``function(tensor, *rest, **kwargs)`` of a tensor without memory, which no mode sees."""
    with _disable_current_modes():
        return function(torch.empty(tuple(shape), dtype=dtype, device="meta"), *rest, **kwargs)


def cast_dtype(function: Any, rest: tuple, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that ``function(tensor, *rest, **kwargs)`` casts to, if it only casts."""
    if function is Tensor.float:
        return None if rest or kwargs else torch.float32
    if function not in (Tensor.to, Tensor.type) or len(rest) + len(kwargs) != 1 or not (rest or "dtype" in kwargs):
        return None
    dtype = rest[0] if rest else kwargs["dtype"]
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def is_last(tensor: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether these are the arguments of a function over the last dimension alone."""
    dims = [*args, *([kwargs["dim"]] if "dim" in kwargs else [])]
    return len(args) + len(kwargs) == len(dims) == 1 and dims[0] in (-1, tensor.dim() - 1, (-1,), [-1])


def gathered_words(tensor: Tensor, dim: Any = None, index: Any = None, **others: Any) -> Tensor | None:
    """The index of a gather with these arguments, if it names a few words for each row."""
    fits = isinstance(index, Tensor) and index.dtype is torch.int64 and index.shape[:-1] == tensor.shape[:-1]
    fits = fits and dim in (-1, tensor.dim() - 1) and not others
    return index if fits and 0 < index.shape[-1] <= MOST_WORDS else None


def fixed(index: Any) -> Any:
    """A copy of an index, which stays the same if its tensors change."""
    if isinstance(index, tuple):
        return tuple(fixed(each) for each in index)
    return index.clone() if isinstance(index, Tensor) else index


def values_of(tensor: Tensor) -> Tensor:
    """``tensor``, or the values of a lazy one, for a kernel."""
    return tensor.value() if isinstance(tensor, LazyTensor) else tensor


def autocast_to(narrow: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, autocast casts to ``narrow``; None: it is off."""
    if autocast_dtype(device.type) is narrow:
        return nullcontext()
    return torch.autocast(device.type, narrow, enabled=narrow is not None)


def _waits_for_backward(hook: Any) -> bool:
    """Whether a hook only waits for backward to begin, as FSDP's does.

    FSDP registers it on all that a model returns, so the loss that a kernel computed of logits has it, too.
    """
    function = getattr(hook, "func", hook)  # of a partial
    return (getattr(function, "__module__", None) or "").startswith("torch.distributed.")


def _changes(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes any of its arguments in place."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
    return in_place or kwargs.get("out") is not None or kwargs.get("inplace") is True
