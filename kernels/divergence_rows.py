"""The Triton kernels of divergences between two rows of logits, which read both one block of columns at a time.

``linear_divergence`` has the formulas. ``add_up`` reads a block of the student's and of the teacher's logits and adds
up their divergence. ``differentiate`` writes the gradient of the student's block over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.cross_entropy_rows import launch_settings
from recompute.kernels.launch import jit, tl
from recompute.kernels.loss_settings import LossSettings
from recompute.kernels.row_statistics import Statistics
from recompute.kernels.scores import Scores, finite_gap, gap, score, scored, unscore, unscored

KINDS = ("forward_kl", "reverse_kl", "jsd", "total_variation")
FORWARD_KL, REVERSE_KL, JSD, TOTAL_VARIATION = range(4)


class DivergenceSettings(NamedTuple):
    kind: int
    """An index of ``KINDS``."""
    beta: float
    temperature: float
    student_scale: float
    student_softcap: float
    """0 for none."""
    teacher_scale: float
    teacher_softcap: float

    def losses(self, teacher: bool) -> LossSettings:
        """The settings that ``observe`` takes, for the logits of the teacher or the student."""
        scale, softcap = self[5:] if teacher else self[3:5]
        return LossSettings(-100, 0.0, 0.0, softcap, "none", False, False, scale, self.temperature)

    @property
    def scores(self) -> tuple[Scores, Scores]:
        """The student's and the teacher's."""
        return self.losses(False).scores, self.losses(True).scores


DIVERGENCE_SCHEMA = (
    "int kind, float beta, float temperature, float student_scale, float student_softcap, float teacher_scale,"
    " float teacher_softcap"
)


class Normalizers(NamedTuple):
    """These numbers turn scores into probabilities: (M,) each, as ``cross_entropy_rows`` keeps them."""

    student_maxima: Tensor
    student_sums: Tensor
    """At least 1; 0 for a block whose logits are all -inf, so that its probabilities are 0."""
    teacher_maxima: Tensor
    teacher_sums: Tensor


@jit
def _over_mixture(log_p, log_q, beta):
    """log(p / m) and log(q / m), of the mixture m = (1 - beta) · p + beta · q: see ``_over_mixture_reference``."""
    r = log_q - log_p
    e = tl.exp(-tl.abs(r))
    log = tl.log(tl.where(r > 0.0, beta + (1.0 - beta) * e, 1.0 - beta + beta * e))
    return tl.minimum(-r, 0.0) - log, tl.minimum(r, 0.0) - log


@jit
def _normalizer(maxima, sums, row):
    """A row's maximum, and the inverse and the logarithm of its sum: see ``Normalizers``."""
    z = tl.maximum(tl.load(sums + row), 1.0)
    return tl.load(maxima + row), 1.0 / z, tl.log(z)


@jit
def _probabilities(logits, columns, mask, normalizer, outer, inner, FORM: tl.constexpr):
    """p, log(p) and the tanh of a cap, for some columns of a row."""
    m, inverse, log_z = normalizer
    s, tanh = score(tl.load(logits + columns, mask=mask, other=0.0).to(tl.float32), outer, inner, FORM)
    return tl.exp(s - m) * inverse, gap(s, m) - log_z, tanh


@jit
def _sums_kernel(
    student, teacher, student_maxima, student_sums, teacher_maxima, teacher_sums, values, means,
    width, student_stride, teacher_stride, student_outer, student_inner, teacher_outer, teacher_inner, beta,
    KIND: tl.constexpr, STUDENT: tl.constexpr, TEACHER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program r adds up row r of both."""
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    of_p, of_q = _normalizer(student_maxima, student_sums, row), _normalizer(teacher_maxima, teacher_sums, row)
    lanes = tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        columns = start + lanes
        mask = columns < width
        p, log_p, _ = _probabilities(student, columns, mask, of_p, student_outer, student_inner, STUDENT)
        q, log_q, _ = _probabilities(teacher, columns, mask, of_q, teacher_outer, teacher_inner, TEACHER)
        if KIND == 0:
            term = q * (log_q - log_p)
        if KIND == 1:
            term = p * (log_p - log_q)
        if KIND == 2:
            mixed_p, mixed_q = _over_mixture(log_p, log_q, beta)
            part = p * mixed_p
            term = beta * q * mixed_q + (1.0 - beta) * part
        if KIND == 3:
            term = tl.where(p == q, 0.0, 0.5 * tl.abs(p - q))  # a fused p - q is the rounding error of equal ones
            part = tl.where(p > q, 0.5 * p, tl.where(p < q, -0.5 * p, 0.0))
        value += tl.where(mask, term, 0.0)
        if means is not None:
            mean += tl.where(mask, part, 0.0)
    tl.store(values + row, tl.sum(value, axis=0))
    if means is not None:
        tl.store(means + row, tl.sum(mean, axis=0))


@jit
def _divergence_gradient_kernel(
    student, teacher, student_maxima, student_sums, teacher_maxima, teacher_sums, means, ddivergence,
    width, student_stride, teacher_stride, student_outer, student_inner, slope, teacher_outer, teacher_inner, beta,
    KIND: tl.constexpr, STUDENT: tl.constexpr, TEACHER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program r writes the gradient of row r of the student over it."""
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    of_p, of_q = _normalizer(student_maxima, student_sums, row), _normalizer(teacher_maxima, teacher_sums, row)
    mean, scale = tl.load(means + row), tl.load(ddivergence + row)
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        columns = start + lanes
        mask = columns < width
        p, log_p, tanh = _probabilities(student, columns, mask, of_p, student_outer, student_inner, STUDENT)
        q, log_q, _ = _probabilities(teacher, columns, mask, of_q, teacher_outer, teacher_inner, TEACHER)
        if KIND == 0:
            d = p - q
        if KIND == 1:
            d = p * (log_p - log_q - mean)
        if KIND == 2:
            d = (1.0 - beta) * p * (_over_mixture(log_p, log_q, beta)[0] - mean)
        if KIND == 3:
            d = p * (tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0)) - mean)
        d = unscore(scale * d, tanh, slope, STUDENT)
        tl.store(student + columns, d.to(student.dtype.element_ty), mask=mask)


def add_up(
    student: Tensor,
    teacher: Tensor,
    normalizers: Normalizers,
    values: Tensor,
    means: Tensor | None,
    settings: DivergenceSettings,
) -> None:
    """Write the divergence of a block of both to ``values``: (M,).

    means: what ``differentiate`` takes, of this block alone. It is the value of ``reverse_kl``, and ``forward_kl`` has
    none.
    """
    ours, theirs = settings.scores
    if not launch.uses_triton(student, teacher):
        log_p, log_q = _log_probabilities(student, teacher, normalizers, settings)
        terms, parts = divergence_terms(log_p, log_q, settings.kind, settings.beta)
        values.copy_(terms.sum(1))
        if means is not None:
            means.copy_(parts.sum(1))
        return
    launch.run(
        _sums_kernel,
        len(student),
        *(student, teacher, *normalizers, values, means),
        *(student.shape[1], student.stride(0), teacher.stride(0), *ours[:2], *theirs[:2], settings.beta),
        **{"KIND": settings.kind, "STUDENT": ours.form, "TEACHER": theirs.form, **launch_settings(student.shape[1])},
    )


def differentiate(
    student: Tensor,
    teacher: Tensor,
    normalizers: Normalizers,
    means: Tensor,
    ddivergence: Tensor,
    settings: DivergenceSettings,
) -> None:
    """Write the gradient of a block of the student's logits over it."""
    ours, theirs = settings.scores
    if not launch.uses_triton(student, teacher):
        log_p, log_q = _log_probabilities(student, teacher, normalizers, settings)
        ds = _gradient(log_p, log_q, means[:, None], settings.kind, settings.beta) * ddivergence[:, None]
        student.copy_(unscored(ds, student, ours))
        return
    launch.run(
        _divergence_gradient_kernel,
        len(student),
        *(student, teacher, *normalizers, means, ddivergence),
        *(student.shape[1], student.stride(0), teacher.stride(0), *ours[:3], *theirs[:2], settings.beta),
        **{"KIND": settings.kind, "STUDENT": ours.form, "TEACHER": theirs.form, **launch_settings(student.shape[1])},
    )


def _log_probabilities(
    student: Tensor, teacher: Tensor, normalizers: Normalizers, settings: DivergenceSettings
) -> tuple[Tensor, Tensor]:
    (ours, theirs), (m_p, z_p, m_q, z_q) = settings.scores, (each[:, None] for each in normalizers)
    log_p = finite_gap(scored(student, ours), m_p) - z_p.clamp_min(1.0).log()
    return log_p, finite_gap(scored(teacher, theirs), m_q) - z_q.clamp_min(1.0).log()


def conclude(statistics: Sequence[Statistics], kls: Tensor | None, kind: int) -> tuple[Normalizers, Tensor | None]:
    """The normalizers of whole rows, from those of their blocks; and the rows' KL, from those within blocks.

    statistics: the student's and the teacher's.
    """
    wholes = [each.of_rows() for each in statistics]
    normalizers = Normalizers(*(number[0] for whole in wholes for number in whole[:2]))
    if kls is None:
        return normalizers, None
    p, q = (
        finite_gap(each.maxima, whole.maxima) + each.sums.clamp_min(1.0).log() - whole.sums.log()
        for each, whole in zip(statistics, wholes, strict=True)
    )
    weight, log, other = (0, p, q) if kind == REVERSE_KL else (1, q, p)
    each, whole = statistics[weight], wholes[weight]
    shares = torch.exp(each.maxima - whole.maxima) * each.sums / whole.sums
    return normalizers, (shares * (kls + log - other)).sum(0)


def divergence_terms(log_p: Tensor, log_q: Tensor, kind: int, beta: float) -> tuple[Tensor, Tensor]:
    """Each word's term of the divergence of a student p and a teacher q, and of ``means``, in plain PyTorch."""
    p, q = log_p.exp(), log_q.exp()
    if kind == FORWARD_KL:
        terms = q * (log_q - log_p)
        return terms, terms
    if kind == REVERSE_KL:
        terms = p * (log_p - log_q)
        return terms, terms
    if kind == JSD:
        of_p, of_q = _over_mixture_reference(log_p, log_q, beta)
        return beta * q * of_q + (1.0 - beta) * p * of_p, p * of_p
    return 0.5 * (p - q).abs(), 0.5 * p * (p - q).sign()


def _gradient(log_p: Tensor, log_q: Tensor, means: Tensor, kind: int, beta: float) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    if kind == FORWARD_KL:
        return p - q
    if kind == REVERSE_KL:
        return p * (log_p - log_q - means)
    if kind == JSD:
        return (1.0 - beta) * p * (_over_mixture_reference(log_p, log_q, beta)[0] - means)
    return p * (0.5 * (p - q).sign() - means)


def _over_mixture_reference(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(p / m) and log(q / m), of the mixture m = (1 - beta) · p + beta · q.

    From the ratio of the two: where p and q are small and close, the difference of log(p) and log(m) has no digits.
    """
    r, of_p, of_q = log_q - log_p, math.log1p(-beta), math.log(beta)
    return -torch.logaddexp(r.new_full((), of_p), r + of_q), -torch.logaddexp(of_p - r, r.new_full((), of_q))
