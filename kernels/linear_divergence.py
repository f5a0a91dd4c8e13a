"""Distillation: the divergence of a student's words from a teacher's, without the logits of either as a whole.

With hidden: (M, H), weight: (V, H) of the student, and (M, H'), (V, H') of the teacher, computed in float32 from the
logits on, with p the student's softmax and q the teacher's, of logits as ``linear_log_probs`` scales them:

    forward_kl       sum(q · log(q / p), over V)
                     ds = p - q
    reverse_kl       sum(p · log(p / q), over V)
                     ds = p · (log(p / q) - reverse_kl)
    jsd              beta · sum(q · log(q / m)) + (1 - beta) · sum(p · log(p / m)), m = (1 - beta) · p + beta · q
                     ds = (1 - beta) · p · (log(p / m) - sum(p · log(p / m)))
    total_variation  sum(|p - q|) / 2
                     ds = p · (g - sum(p · g)), g = sign(p - q) / 2

Logits are made, held and turned into gradients one block of columns at a time, as ``linear_cross_entropy`` does; the
teacher's have no gradient. The two KLs are added up as blocks are first read, by the chain rule: with P and Q the
probabilities of a block, and p, q within it,

    KL = sum(Q · (KL within the block + log(Q / P)), over blocks)

The other two need all probabilities of a token first. Unless all logits are held, forward makes whole rows of a few
tokens at a time, and holds none. So all take at most six matrix products. Where the memory for logits has no room for
enough rows, forward reads each block a second time, and makes what is not held again, which takes up to eight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.cross_entropy import row_gradients
from recompute.kernels.divergence_logits import BothHeads, divergence_by_blocks, divergence_by_rows
from recompute.kernels.divergence_rows import (
    DIVERGENCE_SCHEMA,
    FORWARD_KL,
    KINDS,
    REVERSE_KL,
    DivergenceSettings,
    Normalizers,
    differentiate,
    divergence_terms,
)
from recompute.kernels.linear_cross_entropy import head_losses
from recompute.kernels.linears import autocast_dtype, check_head, head_operands, in_dtypes_of, without_autocast
from recompute.kernels.logit_blocks import Head, HeadBackward, logits_nbytes, may_hold
from recompute.kernels.loss_settings import Targets, wide_dtype
from recompute.kernels.scores import check_scores, scored


def linear_divergence(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_indices: Tensor | None = None,
    teacher_logsumexp: Tensor | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    logits_bytes: float | None = None,
    hold_logits: bool = True,
) -> Tensor:
    """The divergence of each token's student distribution from the teacher's, without the logits of either.

    The teacher gets no gradient. Gradients of the student, autocast, determinism and second derivatives are as of
    ``linear_cross_entropy``. A temperature does not scale the result: multiply by its square if you want that.

    Args:
        student: hidden states (..., H), float16, bfloat16, float32 or float64, of any strides.
        student_weight: (V, H), of the dtype of ``student`` (any of these under autocast).
        teacher: hidden states (..., H'); or, with ``teacher_indices``, logits (..., K) of some words, as a top-k.
        teacher_weight: (V, H'), of the dtype of ``teacher``. Of a head that is padded further, give the first V rows.
        kind: ``forward_kl``, KL(teacher, student); ``reverse_kl``, KL(student, teacher); ``jsd``; ``total_variation``.
        beta: of ``jsd``, from 0 to 1: the teacher's part in the mixture. 0 is ``forward_kl`` and 1 is ``reverse_kl``.
        temperature: divides what either softmax is taken of.
        student_bias, teacher_bias: (V,).
        teacher_indices: (..., K), int64: the words that the teacher's logits are of, each once; -100 for none. A token
            without any has the divergence 0.
        teacher_logsumexp: (...), the logsumexp of all the teacher's logits over the temperature, zeros if ``teacher``
            has log-probabilities. All words that it does not list are then one word. If it is not given, the teacher
            gives them no probability, and ``reverse_kl`` is refused, being infinite.
        student_scale, teacher_scale, student_softcap, teacher_softcap: as of ``linear_log_probs``.
        logits_bytes: the most memory for logits of both, in bytes. None is one block of 8448 columns of each.
        hold_logits: as of ``linear_cross_entropy``.

    Returns:
        (...), float32 (float64 of a float64 student): one number a token. Saved for backward are the arguments and
        five float32 a token; and held, until the first backward, the logits that it need not make again.

    Raises:
        KernelError: for other shapes, dtypes or options, mixed dtypes, or tensors on several devices.

    >>> linear_divergence(torch.ones(2, 8), torch.zeros(4, 8), torch.ones(2, 8), torch.zeros(4, 8))
    tensor([0., 0.])
    """
    op = "linear_divergence"
    scores = {"student_scale": student_scale, "teacher_scale": teacher_scale}
    softcaps = {"student_softcap": student_softcap, "teacher_softcap": teacher_softcap}
    check_scores(op, temperature=temperature, **scores, **softcaps)
    code, beta = _checked_kind(kind, beta)
    numbers = (student_scale, student_softcap or 0.0, teacher_scale, teacher_softcap or 0.0)
    settings = DivergenceSettings(code, beta, float(temperature), *map(float, numbers))
    launch.check(op, student=student, student_weight=student_weight, student_bias=student_bias, teacher=teacher)
    check_head(op, "student", student, student_weight, student_bias)
    teacher = teacher.detach()
    if teacher_indices is not None:
        _check_words(student, teacher, teacher_indices, teacher_logsumexp, teacher_weight, code)
        operands = (student, student_weight, student_bias, None, teacher_indices, None, settings.losses(False))
        log_p = -head_losses(op, *operands, logits_bytes, hold_logits)[0]
        return _divergence_of_words(log_p, teacher, teacher_indices, teacher_logsumexp, settings)
    if teacher_weight is None:
        raise KernelError(f"{op}: expected teacher_weight or teacher_indices; found neither.")
    launch.check(op, student=student, teacher=teacher, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
    check_head(op, "teacher", teacher, teacher_weight, teacher_bias)
    if teacher.shape[:-1] != student.shape[:-1] or len(teacher_weight) != len(student_weight):
        raise KernelError(
            f"{op}: student {tuple(student.shape)} has {len(student_weight)} words, and teacher "
            f"{tuple(teacher.shape)} has {len(teacher_weight)}; expected the same tokens and words for both."
        )
    narrow = autocast_dtype(student.device.type)
    ours = Head(*head_operands(op, "student", student, student_weight, student_bias, narrow))
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    theirs = Head(*head_operands(op, "teacher", teacher, teacher_weight.detach(), teacher_bias, narrow))
    itemsize = ours.hidden.dtype.itemsize + theirs.hidden.dtype.itemsize
    nbytes = logits_nbytes(op, logits_bytes, ours.tokens, len(student_weight), itemsize)
    hold = hold_logits and may_hold(ours)
    hold = hold and not BothHeads(ours, theirs).rows_at_a_time(code, nbytes, hold, student_weight.requires_grad)
    return _LinearDivergence.apply(*ours[:3], *theirs[:3], settings, narrow, nbytes, hold)


def _checked_kind(kind: str, beta: float) -> tuple[int, float]:
    launch.check_one_of("linear_divergence", "kind", kind, KINDS)
    if not 0.0 <= beta <= 1.0:
        raise KernelError(f"linear_divergence: beta is {beta}; expected a number from 0 to 1.")
    if kind == "jsd" and beta in (0.0, 1.0):
        return (REVERSE_KL if beta else FORWARD_KL), 0.5
    return KINDS.index(kind), float(beta)


def _check_words(
    student: Tensor, teacher: Tensor, indices: Tensor, logsumexp: Tensor | None, weight: Tensor | None, kind: int
) -> None:
    op, tokens = "linear_divergence", student.shape[:-1]
    if weight is not None:
        raise KernelError(f"{op}: expected teacher_weight or teacher_indices; found both.")
    if teacher.dim() != student.dim() or teacher.shape[:-1] != tokens or teacher.shape[-1] == 0:
        found = f"teacher {tuple(teacher.shape)} for student {tuple(student.shape)}"
        raise KernelError(f"{op}: expected teacher (..., K) with K > 0 for student (..., H); found {found}.")
    expected = torch.int64, teacher.shape, student.device
    if not isinstance(indices, Tensor) or (indices.dtype, indices.shape, indices.device) != expected:
        found = type(indices).__name__
        if isinstance(indices, Tensor):
            found = f"{indices.dtype} {tuple(indices.shape)} on {indices.device}"
        expects = f"torch.int64 {tuple(teacher.shape)} on {student.device}"
        raise KernelError(f"{op}: teacher_indices is {found}; expected {expects}.")
    if logsumexp is not None:
        launch.check(op, student=student, teacher_logsumexp=logsumexp)
        if logsumexp.shape != tokens:
            raise KernelError(f"{op}: teacher_logsumexp is {tuple(logsumexp.shape)}; expected {tuple(tokens)}.")
    elif kind == REVERSE_KL:
        raise KernelError(
            f"{op}: reverse_kl is infinite where the teacher's list leaves out words. Pass teacher_logsumexp, or "
            "choose another kind."
        )


def _divergence_of_words(
    log_p: Tensor, logits: Tensor, indices: Tensor, logsumexp: Tensor | None, settings: DivergenceSettings
) -> Tensor:
    """The divergence over a teacher's listed words, with all others as one, in plain PyTorch on (..., K + 1)."""
    counts, finest = indices != -100, torch.finfo(log_p.dtype)
    scores = scored(logits, settings.scores[1]).to(log_p.dtype).masked_fill(~counts, finest.min)
    log_q = scores.log_softmax(-1) if logsumexp is None else scores - logsumexp.detach().to(log_p.dtype)[..., None]
    log_p, log_q = (log.masked_fill(~counts, _NONE) for log in (log_p, log_q))
    rests = [(1.0 - log.exp().sum(-1, keepdim=True)).clamp_min(finest.eps / 2).log() for log in (log_p, log_q)]
    if logsumexp is None:
        rests[1] = torch.full_like(rests[1], _NONE)
    log_p, log_q = (torch.cat(pair, -1).clamp_min(_NONE) for pair in zip((log_p, log_q), rests, strict=True))
    terms, _ = divergence_terms(log_p, log_q, settings.kind, settings.beta)
    return terms.sum(-1).where(counts.any(-1), 0.0)


_NONE = -1e4
"""The logarithm of no probability: finite, so that 0 times it is 0."""


class _LinearDivergence(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """``_forward``'s tensors and settings; the dtype to cast weights and biases to; logits_bytes; hold."""
        operands, (settings, narrow, logits_bytes, hold) = arguments[:6], arguments[6:]
        memory = logits_bytes, hold, ctx.needs_input_grad[1]
        divergence, numbers, *held = _forward_op(*BothHeads.of(operands).narrowed(narrow), *settings, *memory)
        ctx.save_for_backward(*operands, numbers)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.narrow, ctx.logits_bytes = settings, narrow, logits_bytes
        ctx.held = held if hold else None
        return divergence

    @staticmethod
    def backward(ctx: Any, ddivergence: Tensor | None) -> tuple[Tensor | None, ...]:
        if ddivergence is None:
            return (None,) * 10
        *operands, numbers = ctx.saved_tensors
        needed, settings = ctx.needs_input_grad, ctx.settings
        with without_autocast(ddivergence.device.type):
            if torch.is_grad_enabled():
                inputs = (*operands, settings, ctx.narrow)
                found = launch.differentiable_gradients(
                    linear_divergence_reference, inputs, (*needed[:3], *(False,) * 5), ddivergence
                )
                return *found, None, None
            narrowed = BothHeads.of(operands).narrowed(ctx.narrow)
            arguments = (ddivergence, *narrowed, numbers, *settings, ctx.logits_bytes, *needed[:3])
            dhidden, *others = _BACKWARD.run(ctx, narrowed[1], arguments)
            del narrowed, arguments
            return dhidden, *in_dtypes_of(operands[1:3], others), *(None,) * 7


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    both, settings, memory = BothHeads.of(arguments), DivergenceSettings(*arguments[6:-3]), arguments[-3:]
    none, vocabulary = arguments[0].new_empty(0, dtype=torch.int64), len(both.student.weight)
    asked = [Targets(none, 0, None, vocabulary, settings.losses(teacher)) for teacher in (False, True)]
    numbers = both.numbers()
    held: list[Tensor | None] = [None] * 3
    if rows := both.rows_at_a_time(settings.kind, *memory):
        divergence = divergence_by_rows(both, settings, asked, numbers, rows)
    else:
        divergence, *held = divergence_by_blocks(both, settings, asked, numbers, memory)
    divergence = divergence.to(wide_dtype(both.student.hidden)).view(both.student.hidden.shape[:-1])
    return divergence, numbers, *held


def _forward_outputs(*arguments: Any) -> tuple[Tensor | None, ...]:
    both, memory, hidden = BothHeads.of(arguments), arguments[-3:], arguments[0]
    held = [head.held(plan) for head, plan in zip(both, both.plans(*memory), strict=True)]
    return hidden.new_empty(hidden.shape[:-1], dtype=wide_dtype(hidden)), both.numbers(), *held[0], held[1][1]


def _gradients(
    dweight: Tensor | None,
    kept: Tensor | None,
    teacher_kept: Tensor | None,
    ddivergence: Tensor,
    *arguments: Any,
    holds: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the student's hidden states and bias. That of its weight is written to ``dweight``."""
    both, numbers, settings = BothHeads.of(arguments), arguments[6], DivergenceSettings(*arguments[7:-4])
    logits_bytes, needs_hidden, needs_weight, needs_bias = arguments[-4:]
    plans = both.plans(logits_bytes, holds, dweight is not None)
    blocks = [both.student.blocks(plans[0], dweight, kept), both.teacher.blocks(plans[1], None, teacher_kept)]
    gradients = row_gradients(ddivergence, None, both.student.tokens)
    normalizers, means = Normalizers(*numbers[:4]), numbers[4]

    def turn(block: int, tile: Tensor) -> None:
        differentiate(tile, blocks[1].get(block), normalizers, means, gradients, settings)

    dhidden, _, dbias, _ = blocks[0].gradients(turn, dweight if needs_weight else None, needs_hidden, needs_bias)
    blocks.clear()  # frees memory before a second dhidden is made
    hidden = both.student.hidden
    return None if dhidden is None else dhidden.to(hidden.dtype).view(hidden.shape), dbias


def linear_divergence_reference(
    student: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    settings: DivergenceSettings,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """``linear_divergence`` in plain PyTorch, with the logits as a whole; differentiable any number of times."""
    heads = Head(student, student_weight, student_bias), Head(teacher, teacher_weight, teacher_bias)
    operands = BothHeads(*heads).narrowed(narrow)
    log_p, log_q = (
        torch.log_softmax(scored(F.linear(*each), scores), -1).clamp_min(_NONE)
        for each, scores in zip((operands[:3], operands[3:]), settings.scores, strict=True)
    )
    return divergence_terms(log_p, log_q, settings.kind, settings.beta)[0].sum(-1).to(wide_dtype(student))


_INPUTS = (
    "Tensor student, Tensor student_weight, Tensor? student_bias, Tensor teacher, Tensor teacher_weight,"
    " Tensor? teacher_bias"
)
_FOR_BACKWARD = (
    f"Tensor ddivergence, {_INPUTS}, Tensor numbers, {DIVERGENCE_SCHEMA}, SymInt logits_bytes,"
    " bool needs_hidden, bool needs_weight, bool needs_bias"
)
_forward_op = launch.register(
    f"linear_divergence_forward({_INPUTS}, {DIVERGENCE_SCHEMA}, SymInt logits_bytes, bool hold, bool trains_weight)"
    " -> (Tensor divergence, Tensor numbers, Tensor? dweight, Tensor? kept, Tensor? teacher_kept)",
    _forward,
    _forward_outputs,
)
_HELD = "Tensor(a!)? dweight, Tensor(b!)? kept, Tensor? teacher_kept"
_BACKWARD = HeadBackward("linear_divergence", slice(1, 4), _HELD, _FOR_BACKWARD, _gradients)
