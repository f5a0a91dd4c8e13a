"""Tensors that are computed when somebody asks for their values, unless a kernel computes with what they are made of.

Between an activation and its product, a norm and the Linears behind it, a language model's head and its loss there is
plain Python, of any model: a runner cannot replace the pair. So what the first of them returns is a stand-in that knows
its shape and how to be computed. The second, if it is what a kernel fuses with the first, finds the stand-in among its
arguments. To everything else the stand-in is the tensor: it is computed then, once, by what it stands for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from recompute.engine.saved_tensors import describe, version_of
from recompute.errors import MutationError, UnsupportedError

Operands = tuple[Tensor, Tensor | None]
"""A Linear's weight and bias."""

_PLAIN = (Tensor, nn.Parameter, FakeTensor)

_METADATA = frozenset(
    {
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point", "is_complex")),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "requires_grad")
        ),
    }
)


class Deferred(Tensor):
    """A stand-in for the result of ``compute()``, a tensor of ``shape`` and of the device and dtype of ``like``."""

    _compute: Callable[[], Tensor]
    _value: Tensor | None
    _operands: tuple[tuple[Tensor, int], ...]
    """With their versions."""
    _mode: tuple[bool, bool]
    """Whether gradients, and autocast, were on."""

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        operands: Sequence[Tensor | None],
        compute: Callable[[], Tensor],
        dtype: torch.dtype | None = None,
    ) -> Any:
        """operands: what ``compute`` reads; the first is like the result."""
        given = [each for each in operands if each is not None]
        like = given[0]
        mode = _mode(like.device)
        trains = mode[0] and any(each.requires_grad for each in given)
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or like.dtype, device=like.device, requires_grad=trains
        )
        made._compute, made._value, made._mode = compute, None, mode
        made._operands = tuple([(each, version_of(each)) for each in given])
        if trains:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        return made

    def __init__(self, *_: Any, **__: Any):
        pass

    @property
    def is_deferred(self) -> bool:
        """Whether nobody has asked for the values."""
        return self._value is None

    def value(self) -> Tensor:
        """What this stands for, computed when first asked for."""
        if self._value is None:
            self.check()
            with torch.set_grad_enabled(self._mode[0]):
                self._value = self._compute()
            self._operands = ()
        return self._value

    def settle(self) -> None:
        """Before something changes this in place."""
        self.value()

    def check(self) -> None:
        """Refuse to compute from what has changed meanwhile: by now these would be other values."""
        for tensor, version in self._operands:
            if version_of(tensor) != version or not (tensor.untyped_storage().nbytes() or not tensor.numel()):
                raise MutationError(
                    f"{self!r} is first asked for its values after what it is made of, a {describe(tensor)}, has been "
                    "changed in place, as by an optimizer's step, or sharded away. Ask before, or give the module that "
                    "made it a rule of its own, with `via: hook` or `action: keep`."
                )

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``function(*args, **kwargs)`` gives where a kernel computes it without this; else NotImplemented."""
        return NotImplemented

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if _changes(function, kwargs):
            tree_map_only(Deferred, lambda deferred: deferred.settle(), (args, kwargs))
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Deferred) and argument.is_deferred:
                argument.check()
                result = argument.fused(function, args, kwargs)
                if result is not NotImplemented:
                    return result
        args, kwargs = tree_map_only(Deferred, lambda deferred: deferred.value(), (args, kwargs))
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


def _mode(device: torch.device) -> tuple[bool, bool]:
    return torch.is_grad_enabled(), device.type != "meta" and torch.is_autocast_enabled(device.type)


def _changes(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes its first argument, or another, in place."""
    name = getattr(function, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))
    return in_place or kwargs.get("out") is not None or kwargs.get("inplace") is True


def _refuse_gradient(gradient: Tensor | None) -> None:
    if gradient is not None:  # a node that passes nothing on gives None
        _refuse(gradient)


def _refuse(what: object) -> None:
    """For what gets hold of the stand-in itself: ops below autograd, and the gradient of a custom function."""
    raise UnsupportedError(
        f"{what if callable(what) else 'a custom function'} was given the output of a module for which a kernel stands "
        "in, past torch's own functions, as by an autograd.Function or a compiled extension. Give that module a rule "
        "of its own, with `via: hook` or `action: keep`."
    )


class Activated(Deferred):
    """``activation(gate)``, which multiplied by another tensor becomes a gated linear unit."""

    @staticmethod
    def of(gate: Tensor, compute: Callable[[], Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> Activated:
        """multiply: computes the product of ``activation(gate)``, given ``gate``, and of another tensor."""
        made = Activated(tuple(gate.shape), (gate,), compute)
        made._gate, made._multiply = gate, multiply
        return made

    _gate: Tensor
    _multiply: Callable[[Tensor, Tensor], Tensor]

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function not in _PRODUCTS or kwargs or len(args) != 2:
            return NotImplemented
        other = args[1] if args[0] is self else args[0]
        if not _is_like(other, self._gate):
            return NotImplemented
        return self._multiply(self._gate, other)


_PRODUCTS = frozenset({Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, torch.multiply})


def _is_like(tensor: Any, other: Tensor) -> bool:
    return (
        isinstance(tensor, Tensor)
        and not isinstance(tensor, Deferred)
        and (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
    )


class Linears:
    """The Linears that read a norm's output: learned in one run of a module, computed with the norm in the next."""

    def __init__(self) -> None:
        self._known: tuple[tuple[weakref.ref[Tensor], weakref.ref[Tensor] | None], ...] = ()

    @property
    def count(self) -> int:
        return len(self._known)

    def with_(self, weight: Tensor) -> list[Operands] | None:
        """Weight and bias of each, if ``weight`` is one of theirs, and all exist and are not sharded away."""
        found = [(reference(), None if bias is None else bias()) for reference, bias in self._known]
        known = [(each, bias) for each, bias in found if each is not None and each.untyped_storage().nbytes()]
        is_whole = len(known) == len(found) and any(each is weight for each, _ in known)
        return known if is_whole else None

    def learn(self, normed: Normed) -> None:
        """At the end of a run: what read its norm is expected to read the next one's."""
        read = [] if normed.is_needed_whole else normed.read
        is_as_known = len(read) == len(self._known) and all(
            [reference() is weight for (reference, _), (weight, _) in zip(self._known, read, strict=True)]
        )
        if not is_as_known:
            suited = read if all(map(normed.suits, read)) else []
            self._known = tuple(
                (weakref.ref(weight), None if bias is None else weakref.ref(bias)) for weight, bias in suited
            )


class Normed(Deferred):
    """A norm's output, for the Linears that read it: those known to are computed all at once, with the norm."""

    stream: Tensor
    """The norm's input as the rest of the model is to see it: through the node that the Linears are part of."""
    read: list[Operands]
    """Weight and bias of the Linears that were applied to this."""
    is_needed_whole: bool
    """Whether something else than Linears asked for it."""
    _linears: Linears
    _together: Callable[[Tensor, list[Operands]], tuple[Sequence[Tensor], Tensor]]
    _outputs: dict[tuple[int, int], Tensor] | None

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor | None,
        compute: Callable[[], Tensor],
        linears: Linears,
        together: Callable[[Tensor, list[Operands]], tuple[Sequence[Tensor], Tensor]],
    ) -> Normed:
        """weight: the norm's. together: gives the outputs of all Linears, and ``stream``."""
        made = Normed(tuple(x.shape), (x, weight), compute)
        made.stream, made.read, made.is_needed_whole = x, [], False
        made._linears, made._together, made._outputs = linears, together, None
        return made

    def suits(self, operands: Operands) -> bool:
        """Whether a Linear may be computed with the norm: of plain tensors of the norm's dtype."""
        return all(each is None or (type(each) in _PLAIN and each.dtype is self.dtype) for each in operands)

    @property
    def is_deferred(self) -> bool:
        return not self.is_needed_whole

    def value(self) -> Tensor:
        self.is_needed_whole = True
        return super().value()

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is not F.linear or not args or args[0] is not self:
            return NotImplemented
        weight, bias = _linear_operands(*args[1:], **kwargs)
        self.read.append((weight, bias))
        if _mode(self.device) != self._mode:  # as in a no_grad block inside: not for all of them
            return F.linear(super().value(), weight, bias)
        if self._outputs is None and (known := self._linears.with_(weight)) is not None:
            outputs, self.stream = self._together(self.stream, known)
            self._outputs = {_identity(*each): output for each, output in zip(known, outputs, strict=True)}
        output = None if self._outputs is None else self._outputs.pop(_identity(weight, bias), None)
        return F.linear(super().value(), weight, bias) if output is None else output


def _identity(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return id(weight), id(bias)


def _linear_operands(weight: Tensor, bias: Tensor | None = None) -> Operands:
    return weight, bias


LossCounter = Callable[[Tensor, Tensor, int], None]
"""Called after each loss with what the Linear was given, its weight, and the bytes that the loss did not hold."""

LossObserver = Callable[[Tensor, Tensor, int], None]
"""Called with the arg-max and the target of each token, (tokens,) each, and with the target that has no loss."""


@dataclass(frozen=True)
class _Head:
    """What logits are made of: a Linear, and what was done to its output, value by value."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    stages: tuple[float, ...] = ()
    """What logits were divided by, if anything; once more if a tanh came then, and once more if a product did."""
    observe: LossObserver | None = None
    count: LossCounter | None = None
    capped_nbytes: int = 0
    """What a tanh of the logits would hold."""


class Logits(Deferred):
    """What a language model's head gives, for a cross-entropy that goes without it.

    Leading dimensions may be reshaped and indexed, values cast to float32 and capped (``cap * tanh(logits / cap)``) on
    the way to the loss.
    """

    _head: _Head
    _family: list[weakref.ref[Logits]]
    """Those that were made of one head's output, one of another."""

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        observe: LossObserver | None = None,
        count: LossCounter | None = None,
    ) -> Logits:
        """observe, count: told of each loss that is computed without these."""
        head = _Head(hidden, weight, bias, observe=observe, count=count)
        return Logits._of(head, hidden.dtype, lambda: F.linear(hidden, weight, bias), [])

    @staticmethod
    def _of(
        head: _Head, dtype: torch.dtype, compute: Callable[[], Tensor], family: list[weakref.ref[Logits]]
    ) -> Logits:
        shape = (*head.hidden.shape[:-1], head.weight.shape[0])
        made = Logits(shape, (head.hidden, head.weight, head.bias), compute, dtype)
        made._head, made._family = head, family
        family.append(weakref.ref(made))
        return made

    def settle(self) -> None:
        for reference in self._family:  # copies among them are to be of what was there before
            if (member := reference()) is not None:
                member.value()

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is F.cross_entropy:
            return self._loss(*args, **kwargs)
        if not args or args[0] is not self:
            return NotImplemented
        if function in _RESHAPES:
            return self._reshaped(function, args[1:], kwargs)
        if function is Tensor.__getitem__:
            return self._indexed(args[1])
        if function in _CASTS or (function is Tensor.to and args[1:] == (torch.float32,) and not kwargs):
            return (
                self
                if self.dtype is torch.float32
                else Logits._of(self._head, torch.float32, lambda: self.value().float(), self._family)
            )
        if function is Tensor.contiguous and not kwargs:
            return self._then(Tensor.contiguous, self._head)
        return NotImplemented if kwargs else self._capped(function, args[1:])

    def _then(self, function: Callable[[Tensor], Tensor], head: _Head) -> Logits:
        """``function(self)``, made of ``head``."""
        return Logits._of(head, self.dtype, lambda: function(self.value()), self._family)

    def _reshaped(self, function: Any, shape: tuple, kwargs: dict[str, Any]) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if kwargs or len(sizes) < 2 or sizes[-1] != self.shape[-1] or not all(isinstance(size, int) for size in sizes):
            return NotImplemented
        hidden = self._head.hidden
        hidden = hidden.reshape(*sizes[:-1], hidden.shape[-1])
        return self._then(lambda value: function(value, *shape), replace(self._head, hidden=hidden))

    def _indexed(self, index: Any) -> Any:
        """Only what leaves the last dimension whole, and gives a view."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if not all(part is ... or isinstance(part, (int, slice)) for part in parts) or parts.count(...) > 1:
            return NotImplemented
        if ... in parts:
            at = parts.index(...)
            parts[at : at + 1] = [slice(None)] * (self.dim() - len(parts) + 1)
        if len(parts) == self.dim() and parts.pop() != slice(None):
            return NotImplemented
        return self._then(lambda value: value[index], replace(self._head, hidden=self._head.hidden[tuple(parts)]))

    def _capped(self, function: Any, rest: tuple) -> Any:
        number = rest[0] if len(rest) == 1 and isinstance(rest[0], (int, float)) and rest[0] > 0 else None
        stages = self._head.stages
        if number is not None and function in _DIVISIONS and not stages:
            then: tuple[float, ...] = (number,)
        elif not rest and function in _TANHS and len(stages) == 1:
            then = stages * 2
        elif number is not None and function in _PRODUCTS and len(stages) == 2 and number == stages[0]:
            then = (*stages, number)
        else:
            return NotImplemented
        capped_nbytes = self.numel() * self.dtype.itemsize if function in _TANHS else self._head.capped_nbytes
        head = replace(self._head, stages=then, capped_nbytes=capped_nbytes)
        return self._then(lambda value: function(value, *rest), head)

    def _loss(
        self,
        input: Any,
        target: Any,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if input is not self or len(self._head.stages) not in (0, 3) or size_average is not None or reduce is not None:
            return NotImplemented
        if self.dim() != 2 or not isinstance(target, Tensor) or target.dim() != 1 or target.is_floating_point():
            return NotImplemented  # classes in another dimension than the last, or probabilities
        from recompute.kernels.linear_cross_entropy import linear_cross_entropy

        head = self._head
        loss = linear_cross_entropy(
            head.hidden,
            head.weight,
            target,
            head.bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=head.stages[0] if head.stages else None,
            class_weights=weight,
            reduction=reduction,
            return_argmax=head.observe is not None,
        )
        if not isinstance(loss, Tensor):
            if head.observe is not None and loss.argmax is not None:
                head.observe(loss.argmax, target, ignore_index)
            loss = loss.loss
        if head.count is not None:  # of the logarithms of the probabilities, which autocast wants in float32
            itemsize = 4 if _mode(self.device)[1] else self.dtype.itemsize
            head.count(head.hidden, head.weight, self.shape.numel() * itemsize + head.capped_nbytes)
        return loss.to(self.dtype)


_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape})
_CASTS = frozenset({Tensor.float})
_DIVISIONS = frozenset({Tensor.div, Tensor.__truediv__, torch.div})
_TANHS = frozenset({Tensor.tanh, torch.tanh})
