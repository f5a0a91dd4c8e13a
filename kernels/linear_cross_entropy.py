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

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recompute.errors import KernelError
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
from recompute.kernels.cross_entropy_rows import differentiate, observe
from recompute.kernels.linears import autocast_dtype, cast, check_head, head_operands, in_dtypes_of, without_autocast
from recompute.kernels.logit_blocks import Head, HeadBackward, logits_nbytes, may_hold
from recompute.kernels.loss_settings import (
    LOSS_SCHEMA,
    LossSettings,
    Targets,
    check_target,
    checked_settings,
    wide_dtype,
)
from recompute.kernels.row_statistics import conclude, new_statistics
from recompute.kernels.word_shards import any_dtensor, local_parts, over_ranks, sum_over_ranks, words_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    class_weights: Tensor | None = None,
    reduction: str = "mean",
    return_token_accuracy: bool = False,
    return_argmax: bool = False,
    return_max_logit: bool = False,
    return_logits: bool = False,
    adapter: tuple[Tensor, Tensor] | None = None,
    group: ProcessGroup | None = None,
    vocabulary: int | None = None,
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
        scale, temperature: the loss is that of ``softcap * tanh(scale * logits / softcap) / temperature``, or without a
            softcap of ``scale * logits / temperature``. Cohere's models scale; in Granite's it is 1 / their divisor.
        reduction: ``mean``, ``sum`` or ``none``. You may divide a sum by any number: gradients stay as exact.
        return_token_accuracy, return_argmax, return_max_logit: what to return beside the loss.
        return_logits: also return the logits, (..., V), which may have gradients, too. This makes and holds them as a
            whole, so that ``logits_bytes`` and ``hold_logits`` have no effect.
        adapter: ``thin``, (..., R), and ``up``, (V, R), whose product is added to the logits, as a LoRA adapter on the
            head does with ``scaling * lora_A(hidden)`` and the weight of ``lora_B``.
        group: the process group whose ranks share the words: each has all tokens, and its own rows of ``weight``,
            ``bias`` and ``up``, as ``torch.chunk`` cuts them. ``target`` and ``class_weights`` are of all words. Two
            small sums go between the ranks in forward (three with an arg-max), and the gradient of ``hidden`` in
            backward: every rank has the whole loss and gradient. A ``weight`` that is a DTensor, ``Shard(0)``, names
            its group itself.
        vocabulary: the words of all ranks of ``group``; None where each has as many.
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
        IndexError: as ``cross_entropy`` does.

    >>> linear_cross_entropy(torch.ones(2, 8), torch.zeros(4, 8), torch.tensor([1, 3]))  # log(4)
    tensor(1.3863)
    """
    op = "linear_cross_entropy"
    if any_dtensor(hidden, weight, target, bias):
        hidden, weight, target, bias, group, vocabulary = local_parts(op, hidden, weight, target, bias)
    launch.check(op, hidden=hidden, weight=weight, bias=bias, class_weights=class_weights)
    check_head(op, "", hidden, weight, bias, adapter)
    words = words_of(op, weight, group, vocabulary)
    check_target(op, target, class_weights, hidden.shape[:-1], words.vocabulary or len(weight), hidden.device)
    settings = checked_settings(
        *(op, ignore_index, label_smoothing, z_loss, softcap, reduction),
        *(return_max_logit, return_argmax or return_token_accuracy, scale, temperature),
    )._replace(**words._asdict())
    logits = None
    if return_logits:
        if words.group:
            raise KernelError(f"{op}: return_logits=True is not possible with group. Drop one of the two.")
        logits_nbytes(op, logits_bytes, 0, len(weight), 1)  # refuses what makes no sense
        logits = _scored_logits(Head(hidden, weight, bias, *(adapter or ())), settings)
        results = losses_of(logits, target, class_weights, settings._replace(scale=1.0, softcap=0.0, temperature=1.0))
    else:
        operands = (hidden, weight, bias, adapter, target, class_weights)
        results = head_losses(op, *operands, settings, logits_bytes, hold_logits)[:-1]
    return with_extras(*results, target, settings, return_token_accuracy, return_argmax, logits)


def head_losses(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: tuple[Tensor, Tensor] | None,
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
    head = Head(*head_operands(op, "", hidden, weight, bias, narrow, adapter))
    nbytes = logits_nbytes(op, logits_bytes, head.tokens, len(weight), head.hidden.dtype.itemsize)
    hold = hold_logits and may_hold(head)
    return _LinearCrossEntropy.apply(*head, target, class_weights, settings, narrow, nbytes, hold)


def _scored_logits(head: Head, settings: LossSettings) -> Tensor:
    """The logits as the loss takes them, in their own dtype."""
    narrow = autocast_dtype(head.hidden.device.type)
    logits = Head(*cast(head_operands("linear_cross_entropy", "", *head[:3], narrow, head.adapter), narrow)).logits()
    logits = logits if settings.scale == 1 else logits * settings.scale
    logits = settings.softcap * torch.tanh(logits / settings.softcap) if settings.softcap else logits
    return logits if settings.temperature == 1 else logits / settings.temperature


def held_nbytes(hidden: Tensor, weight: Tensor, logits_bytes: float | None = None) -> int:
    """Bytes that ``linear_cross_entropy(hidden, weight, …)`` holds beside its arguments until the first backward.

    logits_bytes: as ``linear_cross_entropy`` takes it.
    """
    head, itemsize = Head(hidden, weight, None), hidden.dtype.itemsize
    nbytes = logits_nbytes("held_nbytes", logits_bytes, head.tokens, len(weight), itemsize)
    plan = head.plan(nbytes, True, weight.requires_grad)
    elements = plan.beside * head.tokens * plan.stride + (weight.numel() if plan.in_gradient else 0)
    return elements * itemsize + 2 * head.tokens * wide_dtype(hidden).itemsize


class _LinearCrossEntropy(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        """``Head``'s tensors; target, class weights, settings; the dtype to cast parameters to; logits_bytes; hold."""
        operands, targets, (settings, narrow, logits_bytes, hold) = arguments[:5], arguments[5:7], arguments[7:]
        memory = logits_bytes, hold, ctx.needs_input_grad[1]
        outputs = _forward_op(*Head(*operands).narrowed(narrow), *targets, *settings, *memory)
        loss, normalizers, total, max_logit, argmax, entropy, *held = outputs
        ctx.save_for_backward(*operands, *targets, normalizers, total)
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
            return (None,) * 11
        saved, needed, settings = ctx.saved_tensors, ctx.needs_input_grad, ctx.settings
        if dloss is None:  # of an entropy alone
            dloss = saved[7].new_zeros(saved[5].shape)
        if settings.with_entropy and dentropy is None and torch.is_grad_enabled():
            dentropy = saved[7].new_zeros(saved[0].shape[:-1])
        with without_autocast(dloss.device.type):
            if torch.is_grad_enabled():
                if settings.group:
                    raise KernelError(
                        "linear_cross_entropy: group allows first derivatives alone; expected create_graph=False."
                    )
                inputs = (*saved[:7], settings, ctx.narrow)
                given = (dloss, dentropy) if settings.with_entropy else dloss
                found = launch.differentiable_gradients(linear_cross_entropy_reference, inputs, needed[:9], given)
                return *found, None, None
            inputs = (*Head(*saved[:5]).narrowed(ctx.narrow), *saved[5:])
            arguments = (dloss, dentropy, *inputs, *settings, ctx.logits_bytes, *needed[:5])
            dhidden, *others = _BACKWARD.run(ctx, inputs[1], arguments)
            del inputs, arguments
            return dhidden, *in_dtypes_of(saved[1:5], others), *(None,) * 6


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    head, (target, class_weights), flat, memory = Head(*arguments[:5]), arguments[5:7], arguments[7:-3], arguments[-3:]
    plan = head.plan(*memory)
    dweight, kept = head.held(plan)
    blocks = head.blocks(plan, dweight, kept)
    targets = Targets.of(target, class_weights, head.hidden, len(head.weight), flat)
    statistics = new_statistics(head.hidden, head.tokens, plan.blocks, targets.settings, targets.per_row)
    for block in range(plan.blocks):
        first = targets.settings.first + blocks.columns(block).start
        observe(statistics, block, first, blocks.make(block), targets)
    if targets.settings.group:
        statistics = over_ranks(statistics, targets, len(head.weight))
    losses = conclude(statistics, targets)
    return *reduced(losses, target.shape, head.hidden.shape[:-1], targets.settings.reduction), dweight, kept


def _forward_outputs(*arguments: Any) -> tuple[Tensor | None, ...]:
    head, target, flat, memory = Head(*arguments[:5]), arguments[5], arguments[7:-3], arguments[-3:]
    return *loss_outputs(head.hidden, target, LossSettings(*flat)), *head.held(head.plan(*memory))


def _gradients(
    dweight: Tensor | None,
    kept: Tensor | None,
    dloss: Tensor,
    dentropy: Tensor | None,
    *arguments: Any,
    holds: bool = True,
) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, bias and an adapter. That of weight is written to ``dweight``.

    holds: whether forward has left logits in ``dweight`` and ``kept``, which are written over.
    """
    head, (target, class_weights, normalizers, total) = Head(*arguments[:5]), arguments[5:9]
    logits_bytes, needs_hidden, needs_weight, *needed = arguments[-6:]
    needs_bias, needs_thin, needs_up = needed
    targets = Targets.of(target, class_weights, head.hidden, len(head.weight), arguments[9:-6])
    plan = head.plan(logits_bytes, holds, dweight is not None)
    blocks = head.blocks(plan, dweight, kept)
    dlosses = row_gradients(dloss, total, target.numel())
    if dentropy is None:  # if an entropy is only looked at, it costs nothing here
        normalizers = normalizers[:, :2].contiguous()
    dentropies = None if dentropy is None else row_gradients(dentropy, None, head.tokens)

    def turn(block: int, tile: Tensor) -> None:
        first = targets.settings.first + block * plan.width
        differentiate(tile, tile, first, targets, normalizers, dlosses, dentropies)

    written = dweight if needs_weight else None
    dhidden, dthin, dbias, dup = blocks.gradients(turn, written, needs_hidden, needs_bias, needs_thin, needs_up)
    del blocks  # frees memory before a second dhidden is made
    for each in (dhidden, dthin):
        sum_over_ranks(each, targets.settings.group)
    dhidden, dthin = (
        None if each is None or like is None else each.to(like.dtype).view(like.shape)
        for each, like in ((dhidden, head.hidden), (dthin, head.thin))
    )
    return dhidden, dbias, dthin, dup


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    thin: Tensor | None,
    up: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    settings: LossSettings,
    narrow: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``linear_cross_entropy`` in plain PyTorch, with the logits as a whole; differentiable any number of times."""
    head = Head(hidden, weight, bias, thin, up).narrowed(narrow)
    return cross_entropy_reference(head.logits(), target, class_weights, settings)


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? thin, Tensor? up, Tensor target, Tensor? class_weights"
_FOR_BACKWARD = (
    f"Tensor dloss, Tensor? dentropy, {_INPUTS}, Tensor normalizers, Tensor? total, {LOSS_SCHEMA}, SymInt logits_bytes,"
    " bool needs_hidden, bool needs_weight, bool needs_bias, bool needs_thin, bool needs_up"
)
_forward_op = launch.register(
    f"linear_cross_entropy_forward({_INPUTS}, {LOSS_SCHEMA}, SymInt logits_bytes, bool hold,"
    " bool trains_weight) -> (Tensor loss, Tensor normalizers, Tensor? total, Tensor? max_logit, Tensor? argmax,"
    " Tensor? entropy, Tensor? dweight, Tensor? kept)",
    _forward,
    _forward_outputs,
)
_BACKWARD = HeadBackward(
    "linear_cross_entropy", slice(2, 7), "Tensor(a!)? dweight, Tensor(b!)? kept", _FOR_BACKWARD, _gradients
)
