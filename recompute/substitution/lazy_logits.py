"""A head's output. Losses, and other results of a few numbers a row, are computed without making it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.kernels.linear_divergence import linear_divergence
from recompute.kernels.linear_log_probs import linear_log_probs
from recompute.kernels.linears import autocasts
from recompute.kernels.logit_blocks import Head
from recompute.kernels.loss_settings import wide_dtype
from recompute.kernels.scores import scored
from recompute.substitution import known_functions as torchs
from recompute.substitution.by_rows import by_rows
from recompute.substitution.class_loss import class_loss
from recompute.substitution.head_operands import HeadOperands, LossCounter, LossObserver
from recompute.substitution.lazy_moved import permuted, rows_of
from recompute.substitution.lazy_rows import LazyRows, highest_of
from recompute.substitution.lazy_tensors import (
    LazyTensor,
    cast_dtype,
    fixed,
    gathered_words,
    is_last,
    outline,
    values_of,
)


class LazyLogits(LazyTensor):
    """A head's output, which a cross-entropy can do without.

    Before the loss, a model may reshape and index leading dimensions, cast to float32, multiply and divide by numbers,
    as Cohere and Granite do, and cap the logits by ``cap * tanh(logits / cap)``. The results of these operations are
    lazy, too.
    """

    _head: HeadOperands
    _family: list[weakref.ref[LazyTensor]]
    """All lazy tensors that were made from the output of one run of the head."""
    _entropies: Tensor | None
    """The entropies that came with log-probabilities."""
    _detached: Callable[[], LazyLogits | None]
    """Returns the result of ``constant``, as long as somebody has it."""

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
        head = HeadOperands(Head(hidden, weight, bias), observe=observe, count=count, logits_bytes=logits_bytes)
        return LazyLogits._of(head, hidden.dtype, lambda: F.linear(hidden, weight, bias), [])

    @staticmethod
    def _of(
        head: HeadOperands,
        dtype: torch.dtype,
        compute: Callable[[], Tensor],
        family: list[weakref.ref[LazyTensor]],
        sources: Sequence[Tensor] | None = None,
    ) -> LazyLogits:
        shape = (*head.own.hidden.shape[:-1], head.own.weight.shape[0])
        made = LazyLogits(shape, head.own, compute, dtype, sources)
        made._head, made._family, made._entropies, made._detached = head, family, None, lambda: None
        made.join_family(made)
        return made

    @property
    def family_trains(self) -> bool:
        """Whether a backward may come to this or to a tensor that it was made from."""
        members = [reference() for reference in self._family]
        return any(each is not None and each.requires_grad for each in members)

    def join_family(self, made: LazyTensor) -> None:
        self._family.append(weakref.ref(made))

    def pass_by(self) -> None:
        for reference in self._family:
            if (member := reference()) is not None:
                member._is_passed_by = True

    def before_change(self) -> None:
        for reference in self._family:  # some are copies of this, and have to keep the values from before the change
            if (member := reference()) is not None:
                member.value()

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function in torchs.OF_SCORES and self.score_settings() is None:
            return NotImplemented
        return super().fused(function, args, kwargs)

    def _cast(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        dtype = cast_dtype(function, rest, kwargs)
        if dtype in (None, self.dtype):
            return NotImplemented if dtype is None else self
        return self._then(lambda value: value.to(dtype), self._head, dtype)

    def _gathered(self, _: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        words = gathered_words(self, *rest, **kwargs)
        return NotImplemented if words is None else self._picked(words).to(self.dtype)

    def _reduced(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        """A number of each row, or all logits' sum or mean; or NotImplemented."""
        is_total = not rest and not kwargs and function in torchs.TOTALS
        kwargs = dict(kwargs)
        keepdim = kwargs.pop("keepdim", False)
        if not is_total and not is_last(self, rest, kwargs):
            return NotImplemented
        if function in torchs.LOGSUMEXPS:  # of any word
            word = torch.zeros((*self.shape[:-1], 1), dtype=torch.int64, device=self.device)
            found = (self._picked(word) - self.log_probs(word)).squeeze(-1)
        elif function in torchs.TOTALS and self._head.settled().cap is None:
            found = self._sums() / (self.shape[-1] if function in (Tensor.mean, torch.mean) else 1)
        else:
            found = by_rows((self,), lambda rows: function(rows[0], -1))
        found = function(found) if is_total else found.unsqueeze(-1) if keepdim else found
        return found.to(self.dtype) if found.is_floating_point() else found

    def _sums(self) -> Tensor:
        """The sum of each row's logits, in float32: the sum of a product is a product with a sum."""
        wide = wide_dtype(self._head.own.hidden)
        hidden, weight, bias, *_ = head = self.operands
        pairs = [(hidden, weight), *([] if head.adapter is None else [head.adapter])]
        with torch.autocast(self.device.type, enabled=False):
            found: Any = sum(rows.to(wide) @ columns.sum(0, dtype=wide) for rows, columns in pairs)
            return scored(found if bias is None else found + bias.sum(dtype=wide), self._head.scores)

    def _picked(self, words: Tensor) -> Tensor:
        """The logits of some words, (..., K), in float32, as a softmax takes them."""
        wrong = (words < 0) | (words >= self.shape[-1])
        if words.device.type == "cpu" and wrong.any():  # CUDA refuses it itself
            raise IndexError(f"index {words[wrong][0]} is out of bounds for {self.shape[-1]} words")
        head, words_ = self.operands.of_rows(), words.reshape(-1, words.shape[-1])

        def products(rows: Tensor, table: Tensor) -> Tensor:
            columns = [F.embedding(each, table).to(rows.dtype)[..., None] for each in words_.t()]
            return torch.cat([(rows[:, None] @ each)[..., 0] for each in columns], -1)

        logits = products(head.hidden, head.weight)
        logits = logits if head.bias is None else logits + head.bias[words_]
        logits = logits if head.adapter is None else logits + products(*head.adapter)
        return scored(logits, self._head.scores).reshape(words.shape)

    def _plus(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Logits plus a vector, as BART adds, or plus those of a thinner head, as a LoRA adapter has."""
        if len(args) != 2 or kwargs:
            return NotImplemented
        (one, other), head = args, self._head.settled()
        if head.cap_steps or not all(isinstance(each, Tensor) for each in (one, other)):
            return NotImplemented
        dtype = torch.promote_types(one.dtype, other.dtype)
        compute = lambda: function(values_of(one), values_of(other))  # noqa: E731
        if not isinstance(one, LazyLogits) or not isinstance(other, LazyLogits):
            vector = other if one is self else one
            if isinstance(vector, LazyTensor) or vector.shape.numel() != self.shape[-1] or vector.dim() > self.dim():
                return NotImplemented
            if vector.dim() == 0 or vector.shape[-1] != self.shape[-1]:
                return NotImplemented
            return self._joined(head.plus(vector), dtype, compute, [vector])
        is_wider = one._head.own.hidden.shape[-1] >= other._head.own.hidden.shape[-1]
        base, added = (one, other) if is_wider else (other, one)
        heads = base._head.settled(), added._head.settled()
        if one.shape != other.shape or any(each.cap_steps for each in heads) or heads[1].own.thin is not None:
            return NotImplemented
        if not (base.is_lazy and added.is_lazy):
            return NotImplemented
        if base._family is not added._family:
            base._family.extend(added._family)
            for reference in added._family:
                if isinstance(member := reference(), LazyLogits):
                    member._family = base._family
        return base._joined(heads[0].adapted(heads[1]), dtype, compute, added._sources)

    def _without_gradients(self, *_: Any) -> LazyLogits:
        with torch.no_grad():
            return self._then(Tensor.detach, self._head)

    def constant(self) -> LazyLogits:
        """These logits without a gradient, for what is made where gradients are off, wherever it is used."""
        found = self._detached() if self.requires_grad else self
        if found is None:
            found = self._without_gradients()
            found._entropies = None if self._entropies is None else self._entropies.detach()
            self._detached = weakref.ref(found)
        return found

    def _joined(
        self, head: HeadOperands, dtype: torch.dtype, compute: Callable[[], Tensor], others: Sequence[Tensor]
    ) -> Any:
        with self.autocast_as_made():
            return LazyLogits._of(head, dtype, compute, self._family, [*self._sources, *others])

    def _then(
        self, function: Callable[[Tensor], Tensor], head: HeadOperands, dtype: torch.dtype | None = None
    ) -> LazyLogits:
        """``function(self)``, still lazy. A loss of it is computed from ``head``, under the autocast of this."""
        return self._joined(head, dtype or self.dtype, lambda: function(self.value()), ())

    def _reshaped(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        """Lazy only where the last dimension stays whole: rows then keep their order."""
        found = outline(function, self.shape, rest, kwargs, self.dtype)
        shape, dtype = found.shape, found.dtype
        if not shape or shape[-1] != self.shape[-1] or dtype is not self.dtype:
            return NotImplemented
        head = self._head.moved(lambda rows: rows.reshape(*shape[:-1], rows.shape[-1]))
        return self._then(lambda value: function(value, *rest, **kwargs), head)

    def of_leading(self, order: list[int]) -> Any:
        """The same with its leading dimensions in another order."""
        if order == sorted(order):
            return self
        head = self._head.moved(lambda rows: rows.permute(*order, -1))
        return self._then(lambda value: value.permute(*order, -1), head)

    def _indexed(self, _: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        """Lazy only where indexing leaves the last dimension whole."""
        index = fixed(rest[0])
        parts = list(index) if isinstance(index, tuple) else [index]
        whole = [at for at, part in enumerate(parts) if part is ...]
        if len(whole) > 1 or not all(part is ... or isinstance(part, (int, slice, Tensor)) for part in parts):
            return NotImplemented
        dims = [part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1 for part in parts]
        if whole:
            parts[whole[0] : whole[0] + 1] = [slice(None)] * (self.dim() - sum(dims) + 1)
            dims = dims[: whole[0]] + [1] * (self.dim() - sum(dims) + 1) + dims[whole[0] + 1 :]
        if sum(dims) == self.dim() and not (isinstance(parts[-1], slice) and parts.pop() == slice(None)):
            return NotImplemented
        if sum(dims) > self.dim() or any(isinstance(part, Tensor) and part.dtype is torch.uint8 for part in parts):
            return NotImplemented
        return self._then(lambda value: value[index], self._head.moved(lambda rows: rows[tuple(parts)]))

    def _scaled(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        """A product with a number, or one step of ``cap * tanh(logits / cap)``."""
        if kwargs:
            return NotImplemented
        head = self._head
        number = rest[0] if len(rest) == 1 and isinstance(rest[0], (int, float)) and rest[0] > 0 else None
        if head.cap_steps < 2 and number is not None and function in (torchs.DIVISIONS | torchs.PRODUCTS):
            head = head.settled()
            is_product = function in torchs.PRODUCTS
            head = replace(head, scale=head.scale * number) if is_product else replace(head, cap_steps=1, cap=number)
        elif head.cap_steps == 1 and function in torchs.TANHS and not rest:
            head = replace(head, cap_steps=2, tanh_nbytes=self.numel() * self.dtype.itemsize)
        elif head.cap_steps == 2 and function in torchs.PRODUCTS and number == head.cap:
            head = replace(head, cap_steps=3)
        elif head.cap_steps == 3 and number is not None and function in torchs.DIVISIONS:
            head = replace(head, temperature=head.temperature * number)
        else:
            return NotImplemented
        return self._then(lambda value: function(value, *rest), head)

    def loss(self, function: Any, rest: tuple, kwargs: dict[str, Any], dim: int | None = None) -> Any:
        """``cross_entropy`` of logits. dim: that of the words to PyTorch; None: the last."""
        dtype = self.dtype
        if autocasts(self.device.type) and dtype is not torch.float64:
            dtype = torch.float32  # of PyTorch's log-probabilities and loss under autocast
        return class_loss(self, dim, dtype, *rest, **kwargs) if function is F.cross_entropy else NotImplemented

    @property
    def operands(self) -> Head:
        """The head's operands, which give no gradient where this has none."""
        detached: Any = [None if each is None else each.detach() for each in self._head.own]
        return self._head.own if self.requires_grad else Head(*detached)

    def divergence(self, other: LazyLogits, kind: str, beta: float) -> Any:
        """The divergence of the two, (...), as ``KnownSum`` defines it; NotImplemented if no kernel computes it."""
        student, teacher = (self, other) if self.requires_grad else (other, self)
        if kind == "kl":
            kind = "reverse_kl" if student is self else "forward_kl"
        ours, theirs = student.score_settings(), teacher.score_settings()
        if ours is None or theirs is None or student._head.own.thin is not None or teacher._head.own.thin is not None:
            return NotImplemented
        temperature = ours.pop("temperature")
        if teacher.requires_grad or theirs.pop("temperature") != temperature:
            return NotImplemented
        names = [{f"{who}_{key}": each[key] for key in each} for who, each in (("student", ours), ("teacher", theirs))]
        hidden, weight, bias, *_ = student.operands
        taught, teacher_weight, teacher_bias, *_ = teacher.operands
        with self.autocast_as_made():
            found = linear_divergence(
                *(hidden, weight, taught, teacher_weight),
                student_bias=bias,
                teacher_bias=teacher_bias,
                **(names[0] | names[1]),
                kind=kind,
                beta=beta if student is self else 1.0 - beta,
                temperature=temperature,
                logits_bytes=student._head.logits_bytes,
            )
        student.count(hidden, student.dtype)
        return found

    def score_settings(self) -> dict[str, Any] | None:
        """``scale``, ``softcap`` and ``temperature`` as ``linear_log_probs`` takes them; None within a cap's steps."""
        head = self._head
        if head.cap_steps == 2:
            return None
        head = head.settled()
        return {"scale": head.scale, "softcap": head.cap, "temperature": head.temperature}

    def log_probs(self, target: Tensor, *, ignore_index: int = -100) -> Tensor:
        """The log-probabilities of targets, (...) or (..., K). The entropies stay for whoever asks for them."""
        settings = self.score_settings()
        assert settings is not None, "nothing lazy is made within a cap's steps"
        head = self.operands
        with self.autocast_as_made():
            found: Any = linear_log_probs(
                *(head.hidden, head.weight, target, head.bias),
                **settings,
                adapter=head.adapter,
                entropy=True,
                ignore_index=ignore_index,
                logits_bytes=self._head.logits_bytes,
            )
        self.count(head.hidden, self.dtype)
        if self._head.observe is not None:
            self._head.observe(None, target, ignore_index)
        log_probs, entropies = found
        if self._entropies is None or entropies.requires_grad:
            self._entropies = entropies
        return log_probs

    def entropies(self) -> Tensor:
        """(...). They share a backward with the log-probabilities, if these were asked for."""
        trains = torch.is_grad_enabled() and self.requires_grad
        if self._entropies is None or (trains and not self._entropies.requires_grad):
            self.log_probs(torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device))
        assert self._entropies is not None, "they come with log-probabilities"
        return self._entropies if trains else self._entropies.detach()

    def count(self, hidden: Tensor, dtype: torch.dtype) -> None:
        head = self._head
        if head.count is not None and torch.is_grad_enabled():
            head.count(hidden, head.own.weight, self.shape.numel() * dtype.itemsize + head.tanh_nbytes)

    survives_among: ClassVar[torchs.Rules] = {torchs.ADDITIONS: _plus}
    survives: ClassVar[torchs.Rules] = {
        F.cross_entropy: loss,
        torchs.RESHAPES | {Tensor.contiguous}: _reshaped,
        Tensor.__getitem__: _indexed,
        torchs.PERMUTATIONS: permuted,
        torchs.ROWS: rows_of,
        torchs.CASTS: _cast,
        Tensor.detach: _without_gradients,
        torchs.SOFTMAXES: LazyRows.of_softmax,
        torchs.GATHERS: _gathered,
        torchs.TOPKS: highest_of,
        torchs.REDUCTIONS: _reduced,
        torchs.SCALINGS: _scaled,
    }
