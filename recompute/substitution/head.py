"""A language model's head and the cross-entropy of its logits, computed together by ``kernels.linear_cross_entropy``.

The head returns ``LazyLogits``. A cross-entropy that gets these computes its loss from the head's input and weight, and
the logits are never made as a whole. For anything else that reads the logits they are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recompute.compiled.runner import Forward
from recompute.engine.thread_state import is_fake, local
from recompute.errors import warn
from recompute.substitution.held_memory import HeldMemory
from recompute.substitution.kernel_runner import KernelRunner, is_plain_linear, only_argument
from recompute.substitution.lazy_probabilities import SOFTMAXES, LazyProbabilities
from recompute.substitution.lazy_tensors import PRODUCTS, ROWS, LazyTensor, mode_of, rows_of
from recompute.units import humanize

LossCounter = Callable[[Tensor, Tensor, int], None]
"""Called after each loss with the Linear's input, its weight, and the bytes that the loss did not need to hold."""

LossObserver = Callable[[Tensor, Tensor, int], None]
"""Called with the arg-max of each token, (tokens,), its target, (tokens,), and ``ignore_index``."""


@dataclass
class KernelHeadRunner(KernelRunner):
    """Runs a Linear that a rule names. In training its output is lazy."""

    logits_bytes: int | None = None
    """The memory for logits, as ``linear_cross_entropy`` takes it."""
    observe: LossObserver | None = field(default=None, init=False)
    observe_logits: Callable[[], None] | None = field(default=None, init=False)
    """Called whenever logits are computed because something other than a loss reads them."""

    def _what(self) -> str:
        room = "" if self.logits_bytes is None else f", with {humanize(self.logits_bytes)} for logits"
        return f"linear_cross_entropy{room} (if nothing else reads the logits)"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.linears import autocast_dtype, cast, check_dtypes

        if (is_fake() and not local.simulates_cuda) or not is_plain_linear(module):
            return forward(*args, **kwargs)
        x = only_argument(args, kwargs)
        weight, bias, narrow = module.weight, module.bias, autocast_dtype(x.device.type)
        check_dtypes("linear_cross_entropy", {"hidden": x.dtype}, {"weight": weight, "bias": bias}, narrow)
        (hidden,) = cast((x,), narrow)  # the logits have its dtype
        made = LazyLogits.of(hidden, weight, bias, self.observe, self._count, self.logits_bytes)
        if self.observe_logits is not None:
            made.tell(self.observe_logits)
        return made

    def run_kernel_compiled(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        _warn_of_logits(self.statistics.name)
        return forward(*args, **kwargs)

    def run_plain(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)  # outside of training, no loss needs a gradient

    def _count(self, hidden: Tensor, weight: Tensor, logits_nbytes: int) -> None:
        """Count a loss that was computed without logits. With them it would hold ``logits_nbytes``."""
        from recompute.kernels.linear_cross_entropy import held_nbytes

        kernels = HeldMemory(held_nbytes(hidden, weight, self.logits_bytes), 0, holds_input=True)
        self.held.count_known(hidden, kernels, HeldMemory(logits_nbytes, 0, holds_input=weight.requires_grad))


def held_by_loss(logits: Tensor, weight: Tensor, logits_bytes: float | None = None) -> int:
    """The bytes that the loss of a head holds until backward without its logits, beside what it is given.

    logits: those of the head, (..., V), on any device. weight: (V, H).
    logits_bytes: the memory for logits, as ``linear_cross_entropy`` takes it.
    """
    from recompute.kernels.linear_cross_entropy import held_nbytes

    hidden = torch.empty((*logits.shape[:-1], weight.shape[1]), dtype=logits.dtype, device="meta")
    return held_nbytes(hidden, weight, logits_bytes)


def _warn_of_logits(name: str) -> None:
    warn(
        f"{name} is compiled: logits are made, and held for backward, though its rule has a kernel compute the loss "
        "without them. Compile the layers alone (`layer.compile()` for each), so that head and loss run as they are; "
        "or give the head no rule, or `action: keep`."
    )


# As torch._dynamo.assume_constant_result does, which would load the compiler: it is called when code is compiled.
_warn_of_logits._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Head:
    """What logits are computed from: a Linear's operands, the scale of its output, and a cap on that, if any."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    observe: LossObserver | None = None
    count: LossCounter | None = None
    logits_bytes: int | None = None
    scale: float = 1.0
    cap: float | None = None
    cap_steps: int = 0
    """How many of the three steps of ``cap * tanh(logits / cap)`` were taken: the division, the tanh, the product."""
    tanh_nbytes: int = 0
    """The bytes that the tanh would hold for backward."""
    temperature: float = 1.0
    """What capped logits are divided by."""


class LazyLogits(LazyTensor):
    """A head's output, which a cross-entropy can do without.

    Before the loss, a model may reshape and index leading dimensions, cast to float32, multiply and divide by numbers,
    as Cohere and Granite do, and cap the logits by ``cap * tanh(logits / cap)``. The results of these operations are
    lazy, too.
    """

    _head: _Head
    _family: list[weakref.ref[LazyTensor]]
    """All that is lazy and was made from the output of one run of the head."""

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        observe: LossObserver | None = None,
        count: LossCounter | None = None,
        logits_bytes: int | None = None,
    ) -> LazyLogits:
        """observe, count: called for each loss that is computed without the logits. logits_bytes: what it may hold."""
        head = _Head(hidden, weight, bias, observe=observe, count=count, logits_bytes=logits_bytes)
        return LazyLogits._of(head, hidden.dtype, lambda: F.linear(hidden, weight, bias), [])

    @staticmethod
    def _of(
        head: _Head,
        dtype: torch.dtype,
        compute: Callable[[], Tensor],
        family: list[weakref.ref[LazyTensor]],
        sources: Sequence[Tensor] | None = None,
    ) -> LazyLogits:
        shape = (*head.hidden.shape[:-1], head.weight.shape[0])
        made = LazyLogits(shape, (head.hidden, head.weight, head.bias), compute, dtype, sources)
        made._head, made._family = head, family
        family.append(weakref.ref(made))
        return made

    def pass_by(self) -> None:
        for reference in self._family:
            if (member := reference()) is not None:
                member._is_passed_by = True

    def before_change(self) -> None:
        for reference in self._family:  # some are copies of this, and have to keep the values from before the change
            if (member := reference()) is not None:
                member.value()

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is F.cross_entropy:
            return self._loss(*args, **kwargs)
        if not args or args[0] is not self:
            return NotImplemented
        if function in _RESHAPES:
            return self._reshaped(function, args[1:], kwargs)
        if function in _FLATTENS:
            return self._flattened(*args[1:], **kwargs)
        if function is Tensor.__getitem__:
            return self._indexed(args[1])
        if function in ROWS:
            return rows_of(self, function, args[1:], kwargs)
        if function is Tensor.float or (function is Tensor.to and args[1:] == (torch.float32,) and not kwargs):
            if self.dtype is torch.float32:
                return self
            return self._then(Tensor.float, self._head, torch.float32)
        if function is Tensor.contiguous and not kwargs:
            return self._then(Tensor.contiguous, self._head)
        if function in SOFTMAXES:
            return LazyProbabilities.of_softmax(self, function, args[1:], kwargs)
        return NotImplemented if kwargs else self._scaled(function, args[1:])

    def _then(self, function: Callable[[Tensor], Tensor], head: _Head, dtype: torch.dtype | None = None) -> LazyLogits:
        """``function(self)``, still lazy. A loss of it is computed from ``head``, under the autocast of this."""
        made = LazyLogits._of(head, dtype or self.dtype, lambda: function(self.value()), self._family, self._sources)
        made.set_mode((made._mode[0], *self._mode[1:]))
        return made

    def _reshaped(self, function: Any, shape: tuple, kwargs: dict[str, Any]) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if kwargs or len(sizes) < 2 or sizes[-1] != self.shape[-1] or not all(isinstance(size, int) for size in sizes):
            return NotImplemented
        hidden = self._head.hidden
        hidden = hidden.reshape(*sizes[:-1], hidden.shape[-1])
        return self._then(lambda value: function(value, *shape), replace(self._head, hidden=hidden))

    def _flattened(self, start_dim: Any = 0, end_dim: Any = -1, *names: Any, **named: Any) -> Any:
        """Lazy only where the last dimension stays by itself."""
        dims = [dim + self.dim() if isinstance(dim, int) and dim < 0 else dim for dim in (start_dim, end_dim)]
        if names or named or not all(isinstance(dim, int) for dim in dims):
            return NotImplemented
        if not 0 <= dims[0] <= dims[1] < self.dim() - 1:
            return NotImplemented
        sizes = (*self.shape[: dims[0]], self.shape[dims[0] : dims[1] + 1].numel(), *self.shape[dims[1] + 1 :])
        return self._reshaped(Tensor.reshape, sizes, {})

    def _indexed(self, index: Any) -> Any:
        """Lazy only where indexing gives a view and leaves the last dimension whole."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if not all(part is ... or isinstance(part, (int, slice)) for part in parts) or parts.count(...) > 1:
            return NotImplemented
        if ... in parts:
            at = parts.index(...)
            parts[at : at + 1] = [slice(None)] * (self.dim() - len(parts) + 1)
        if len(parts) == self.dim() and parts.pop() != slice(None):
            return NotImplemented
        return self._then(lambda value: value[index], replace(self._head, hidden=self._head.hidden[tuple(parts)]))

    def _scaled(self, function: Any, rest: tuple) -> Any:
        """A product with a number, or one step of ``cap * tanh(logits / cap)``."""
        head = self._head
        if torch.is_grad_enabled() is not self._mode[0]:  # as in a custom Function's forward, which gives values
            return NotImplemented
        number = rest[0] if len(rest) == 1 and isinstance(rest[0], (int, float)) and rest[0] > 0 else None
        if head.cap_steps < 2 and number is not None and function in (_DIVISIONS | PRODUCTS):
            if head.cap is not None:  # so far it was none, but a divisor
                head = replace(head, cap_steps=0, cap=None, scale=head.scale / head.cap)
            is_product = function in PRODUCTS
            head = replace(head, scale=head.scale * number) if is_product else replace(head, cap_steps=1, cap=number)
        elif head.cap_steps == 1 and function in _TANHS and not rest:
            head = replace(head, cap_steps=2, tanh_nbytes=self.numel() * self.dtype.itemsize)
        elif head.cap_steps == 2 and function in PRODUCTS and number == head.cap:
            head = replace(head, cap_steps=3)
        elif head.cap_steps == 3 and number is not None and function in _DIVISIONS:
            head = replace(head, temperature=head.temperature * number)
        else:
            return NotImplemented
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
        settings = self.score_settings()
        if input is not self or settings is None or size_average is not None or reduce is not None:
            return NotImplemented
        if settings["temperature"] != 1:
            return NotImplemented
        if self.dim() != 2 or not isinstance(target, Tensor) or target.shape != self.shape[:1]:
            return NotImplemented  # classes are in another dimension than the last
        if target.dtype is not torch.int64 or (weight is not None and weight.requires_grad):
            return NotImplemented  # targets are probabilities, or PyTorch has an error to raise
        from recompute.kernels.linear_cross_entropy import linear_cross_entropy

        head = self._head
        hidden, bias, scale = head.hidden, head.bias, settings["scale"]
        if scale != 1:  # of the tokens, which are smaller than their logits
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        with self.autocast_as_made():
            loss = linear_cross_entropy(
                hidden,
                head.weight,
                target,
                bias,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                softcap=settings["softcap"],
                class_weights=weight,
                reduction=reduction,
                return_argmax=head.observe is not None,
                logits_bytes=head.logits_bytes,
            )
        if not isinstance(loss, Tensor):
            if head.observe is not None and loss.argmax is not None:
                head.observe(loss.argmax, target, ignore_index)
            loss = loss.loss
        dtype = self.dtype
        if mode_of(self.device)[1] and dtype is not torch.float64:
            dtype = torch.float32  # of PyTorch's log-probabilities and loss under autocast
        self._count(hidden, dtype)
        return loss.to(dtype)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The head's input, weight and bias."""
        return self._head.hidden, self._head.weight, self._head.bias

    def score_settings(self) -> dict[str, Any] | None:
        """``scale``, ``softcap`` and ``temperature`` as ``linear_log_probs`` takes them; None within a cap's steps."""
        head = self._head
        if head.cap_steps == 2:
            return None
        if head.cap_steps == 1 and head.cap is not None:  # it was a divisor
            return {"scale": head.scale / head.cap, "softcap": None, "temperature": 1.0}
        return {"scale": head.scale, "softcap": head.cap, "temperature": head.temperature}

    def log_probs(self, target: Tensor, *, entropy: bool = False, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
        """The log-probabilities of targets, (...) or (..., K); and the entropies, (...), where ``entropy`` asks."""
        from recompute.kernels.linear_log_probs import linear_log_probs

        settings = self.score_settings()
        assert settings is not None, "nothing lazy is made within a cap's steps"
        hidden, weight, bias = self.operands
        with self.autocast_as_made():
            found = linear_log_probs(
                *(hidden, weight, target, bias),
                **settings,
                entropy=entropy,
                ignore_index=ignore_index,
                logits_bytes=self._head.logits_bytes,
            )
        self._count(hidden, self.dtype)
        return (found, found) if isinstance(found, Tensor) else found

    def _count(self, hidden: Tensor, dtype: torch.dtype) -> None:
        head = self._head
        if head.count is not None:
            head.count(hidden, head.weight, self.shape.numel() * dtype.itemsize + head.tanh_nbytes)


_RESHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape})
_FLATTENS = frozenset({Tensor.flatten, torch.flatten})
_DIVISIONS = frozenset({Tensor.div, Tensor.__truediv__, torch.div})
_TANHS = frozenset({Tensor.tanh, torch.tanh})
