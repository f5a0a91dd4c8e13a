"""A language model's head and its loss, without the logits as a whole.

With hidden: (M, H), weight: (V, H), and the loss and dlogits that ``cross_entropy`` defines of the

    logits  = hidden @ weightᵀ + bias     (M, V)

    dhidden = dlogits @ weight            (M, H)
    dweight = dlogitsᵀ @ hidden           (V, H)
    dbias   = sum(dlogits, over M)        (V,)

The logits are made one block of columns at a time, rounded to their dtype as eager's are. Forward keeps a few numbers
for each token. Backward makes each block again and turns it into its gradient in place. One matrix product over all
tokens then gives that block's rows of dweight, which are so rounded once. dhidden is summed over the blocks in float32.

That makes four matrix products, where eager runs three. Blocks that forward holds for backward need not be made again,
and some of them cost no memory: dweight, (V, H), which backward would allocate, is allocated in forward and holds
logits until backward writes it.

    dweight    | rows written | rows to write … | block i | block i + 1 | … |

Backward writes it from its beginning. The blocks that it holds end where it ends, so that each is used before it is
written over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.kernels import launch
from recompute.kernels.cross_entropy import (
    CrossEntropy,
    cross_entropy_reference,
    loss_outputs,
    losses_of,
    reduced,
    row_gradients,
    with_extras,
)
from recompute.kernels.cross_entropy_rows import conclude, differentiate, observe
from recompute.kernels.linears import (
    autocast_dtype,
    cast,
    check_head,
    head_operands,
    in_dtypes_of,
    without_autocast,
)
from recompute.kernels.logit_blocks import Head, logits_nbytes, may_hold
from recompute.kernels.loss_settings import (
    LOSS_SCHEMA,
    LossSettings,
    Targets,
    check_target,
    checked_settings,
    wide_dtype,
)
from recompute.kernels.row_statistics import new_statistics


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weights: Tensor | None = None,
    reduction: str = "mean",
    return_token_accuracy: bool = False,
    return_argmax: bool = False,
    return_max_logit: bool = False,
    return_logits: bool = False,
    logits_bytes: float | None = None,
    hold_logits: bool = True,
) -> Tensor | CrossEntropy:
    """``cross_entropy(linear(hidden, weight, bias).float(), target)`` without holding the logits.

    Gradients are rounded once, however the logits are made: no sum is held in less than float32. An input that is
    frozen costs no matrix product. Nothing waits for the device. Under autocast the matrix products run in its dtype,
    as those of ``torch.nn.Linear`` do.

    Args:
        hidden: (..., H), float16, bfloat16, float32 or float64, of any strides.
        weight: (V, H), of the dtype of ``hidden`` (any of these under autocast).
        target: (...), int64: classes, or ``ignore_index`` for what has no loss and no gradient.
        bias: (V,), of the dtype of ``hidden``.
        ignore_index, label_smoothing, z_loss, softcap, class_weights: as of ``cross_entropy``.
        reduction: ``mean``, ``sum`` or ``none``. You may divide a sum by any number: gradients stay as exact.
        return_token_accuracy, return_argmax, return_max_logit: what to return beside the loss.
        return_logits: also return the logits, (..., V), which may have gradients, too. This makes and holds them as a
            whole, so that ``logits_bytes`` and ``hold_logits`` have no effect.
        logits_bytes: the most memory for logits, in bytes; ``math.inf`` to hold all of them. None is one block of 8448
            columns, 17 KB a token in bfloat16. What is held need not be made again: the more, the faster. Unless all
            are held, backward takes further memory to sum the gradient of ``hidden`` in float32.
        hold_logits: False to hold no logits from forward to backward, neither in those bytes nor in the memory of the
            weight's gradient, which is then allocated in backward. That takes the least memory in between, and makes
            all logits twice. Compiled code always does so.

    Returns:
        The loss, or a ``CrossEntropy`` where an extra was asked for. Saved for backward are ``hidden``, ``weight``,
        ``bias``, ``target``, ``class_weights`` and two float32 a token; and held, until the first backward, the logits
        that it need not make again. A second backward makes them again: the same bits.

    Raises:
        KernelError: for other shapes, dtypes or options, mixed dtypes, or tensors on several devices.
        IndexError: for a target that is neither a class nor ``ignore_index``, on the CPU. On CUDA an assertion on the
            device fails, as PyTorch's own does, which the next wait for the device reports.
    """
    _check(hidden, weight, target, bias, class_weights)
    settings = checked_settings(
        *("linear_cross_entropy", ignore_index, label_smoothing, z_loss, softcap, reduction),
        *(return_max_logit, return_argmax or return_token_accuracy),
    )
    logits = None
    if return_logits:
        narrow = autocast_dtype(hidden.device.type)
        logits = F.linear(*cast(head_operands("linear_cross_entropy", "", hidden, weight, bias, narrow), narrow))
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        results = losses_of(logits, target, class_weights, settings._replace(softcap=0.0))
    else:
        operands = (hidden, weight, bias, target, class_weights)
        results = head_losses("linear_cross_entropy", *operands, settings, logits_bytes, hold_logits)[:-1]
    return with_extras(*results, target, settings, return_token_accuracy, return_argmax, logits)


def head_losses(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    settings: LossSettings,
    logits_bytes: float | None,
    hold_logits: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, max logit, arg-max and entropy, of arguments of ``op`` whose shapes were checked.

    target: (...), or (..., K) for K losses of each token.
    """
    narrow = autocast_dtype(hidden.device.type)
    head = Head(*head_operands(op, "", hidden, weight, bias, narrow))
    nbytes = logits_nbytes(op, logits_bytes, head.tokens, len(weight), head.hidden.dtype.itemsize)
    hold = hold_logits and may_hold(head)
    return _LinearCrossEntropy.apply(*head, target, class_weights, settings, narrow, nbytes, hold)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weights: Tensor | None) -> None:
    op = "linear_cross_entropy"
    launch.check(op, hidden=hidden, weight=weight, bias=bias, class_weights=class_weights)
    check_head(op, "", hidden, weight, bias)
    check_target(op, target, class_weights, hidden.shape[:-1], len(weight), hidden.device)


def held_nbytes(hidden: Tensor, weight: Tensor, logits_bytes: float | None = None) -> int:
    """Bytes that ``linear_cross_entropy(hidden, weight, …)`` holds beside its arguments until the first backward.

    logits_bytes: as it is given.
    """
    head, itemsize = Head(hidden, weight, None), hidden.dtype.itemsize
    nbytes = logits_nbytes("held_nbytes", logits_bytes, head.tokens, len(weight), itemsize)
    plan = head.plan(nbytes, True, weight.requires_grad)
    elements = plan.beside * head.tokens * plan.stride + (weight.numel() if plan.in_gradient else 0)
    return elements * itemsize + 2 * head.tokens * wide_dtype(hidden).itemsize


class _LinearCrossEntropy(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weights: Tensor | None,
        settings: LossSettings,
        narrow: torch.dtype | None,
        logits_bytes: int,
        hold: bool,
    ) -> tuple[Tensor | None, ...]:
        """narrow: the dtype to cast weight and bias to, in forward and again in backward."""
        cast_weight, cast_bias = cast((weight, bias), narrow)
        inputs = (hidden, cast_weight, cast_bias, target, class_weights)
        memory = logits_bytes, hold, ctx.needs_input_grad[1]
        loss, normalizers, total, max_logit, argmax, entropy, *held = _forward_op(*inputs, *settings, *memory)
        ctx.save_for_backward(hidden, weight, bias, target, class_weights, normalizers, total)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(extra for extra in (max_logit, argmax) if extra is not None))
        ctx.settings, ctx.narrow, ctx.logits_bytes = settings, narrow, logits_bytes
        ctx.held = held if hold else None
        return loss, max_logit, argmax, entropy

    @staticmethod
    def backward(
        ctx: Any, dloss: Tensor | None, _: None, __: None, dentropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if dloss is None and dentropy is None:
            return (None,) * 9
        saved, needed, settings = ctx.saved_tensors, ctx.needs_input_grad, ctx.settings
        if dloss is None:  # of an entropy alone
            dloss = saved[5].new_zeros(saved[3].shape)
        if settings.with_entropy and dentropy is None:
            dentropy = saved[5].new_zeros(saved[0].shape[:-1])
        with without_autocast(dloss.device.type):
            if torch.is_grad_enabled():
                inputs = (*saved[:5], settings, ctx.narrow)
                given = (dloss, dentropy) if settings.with_entropy else dloss
                found = launch.differentiable_gradients(linear_cross_entropy_reference, inputs, needed[:7], given)
                return *found, None, None
            weight, bias = cast(saved[1:3], ctx.narrow)
            inputs = (saved[0], weight, bias, *saved[3:])
            arguments = (dloss, dentropy, *inputs, *settings, ctx.logits_bytes, *needed[:3])
            if ctx.held is None or torch.compiler.is_compiling():
                dhidden, dweight, dbias = _backward_op(*arguments)
            else:
                (dweight, kept), ctx.held = ctx.held, None  # this backward writes over them, so a second one has none
                if dweight is None and needed[1]:
                    dweight = weight.new_empty(weight.shape)
                dhidden, dbias = _backward_held_op(dweight, kept, *arguments)
                dweight = dweight if needed[1] else None
            del weight, bias, inputs, arguments
            return dhidden, *in_dtypes_of(saved[1:3], (dweight, dbias)), *(None,) * 6


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    head, (target, class_weights), flat, memory = Head(*arguments[:3]), arguments[3:5], arguments[5:-3], arguments[-3:]
    plan = head.plan(*memory)
    dweight, kept = head.held(plan)
    blocks = head.blocks(plan, dweight, kept)
    targets = Targets.of(target, class_weights, head.hidden, blocks.vocabulary, flat)
    statistics = new_statistics(blocks.hidden, head.tokens, plan.blocks, targets.settings, targets.per_row)
    for block in range(plan.blocks):
        observe(statistics, block, blocks.columns(block).start, blocks.make(block), targets)
    losses = conclude(statistics, targets)
    return *reduced(losses, target.shape, head.hidden.shape[:-1], targets.settings.reduction), dweight, kept


def _forward_outputs(*arguments: Any) -> tuple[Tensor | None, ...]:
    head, target, flat, memory = Head(*arguments[:3]), arguments[3], arguments[5:-3], arguments[-3:]
    return *loss_outputs(head.hidden, target, LossSettings(*flat)), *head.held(head.plan(*memory))


def _backward(*arguments: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight, needs_weight = arguments[3], arguments[-2]
    dweight = weight.new_empty(weight.shape) if needs_weight else None
    dhidden, dbias = _gradients(dweight, None, *arguments, holds=False)
    return dhidden, dweight, dbias


def _backward_outputs(*arguments: Any) -> tuple[Tensor | None, ...]:
    pairs = zip(arguments[2:5], arguments[-3:], strict=True)
    return tuple(None if like is None or not needed else like.new_empty(like.shape) for like, needed in pairs)


def _gradients(
    dweight: Tensor | None,
    kept: Tensor | None,
    dloss: Tensor,
    dentropy: Tensor | None,
    *arguments: Any,
    holds: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and bias. That of weight is written to ``dweight``.

    holds: whether forward has left logits in ``dweight`` and ``kept``, which are written over.
    """
    head, (target, class_weights, normalizers, total) = Head(*arguments[:3]), arguments[3:7]
    logits_bytes, needs_hidden, needs_weight, needs_bias = arguments[-4:]
    targets = Targets.of(target, class_weights, head.hidden, len(head.weight), arguments[7:-4])
    plan = head.plan(logits_bytes, holds, dweight is not None)
    blocks = head.blocks(plan, dweight, kept)
    dlosses = row_gradients(dloss, total, target.numel())
    dentropies = None if dentropy is None else row_gradients(dentropy, None, head.tokens)

    def turn(block: int, tile: Tensor) -> None:
        differentiate(tile, tile, block * plan.width, targets, normalizers, dlosses, dentropies)

    dhidden, dbias = blocks.gradients(turn, dweight if needs_weight else None, needs_hidden, needs_bias)
    del blocks  # frees memory before a second dhidden is made
    return None if dhidden is None else dhidden.to(head.hidden.dtype).view(head.hidden.shape), dbias


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    settings: LossSettings,
    narrow: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``linear_cross_entropy`` in plain PyTorch, with the logits as a whole; differentiable any number of times."""
    weight, bias = cast((weight, bias), narrow)
    return cross_entropy_reference(F.linear(hidden, weight, bias), target, class_weights, settings)


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weights"
_FOR_BACKWARD = (
    f"Tensor dloss, Tensor? dentropy, {_INPUTS}, Tensor normalizers, Tensor? total, {LOSS_SCHEMA}, SymInt logits_bytes,"
    " bool needs_hidden, bool needs_weight, bool needs_bias"
)
_forward_op = launch.register(
    f"linear_cross_entropy_forward({_INPUTS}, {LOSS_SCHEMA}, SymInt logits_bytes, bool hold,"
    " bool trains_weight) -> (Tensor loss, Tensor normalizers, Tensor? total, Tensor? max_logit, Tensor? argmax,"
    " Tensor? entropy, Tensor? dweight, Tensor? kept)",
    _forward,
    _forward_outputs,
)
_backward_op = launch.register(
    f"linear_cross_entropy_backward({_FOR_BACKWARD}) -> (Tensor? dhidden, Tensor? dweight, Tensor? dbias)",
    _backward,
    _backward_outputs,
)
_backward_held_op = launch.register(
    f"linear_cross_entropy_backward_held(Tensor(a!)? dweight, Tensor(b!)? kept, {_FOR_BACKWARD})"
    " -> (Tensor? dhidden, Tensor? dbias)",
    _gradients,
    lambda dweight, kept, *arguments: _backward_outputs(*arguments)[::2],
)
