"""Divergences from a teacher without logits: every kind against its formula, and a teacher that lists a few words."""

import pytest
import torch
from kernel_testing import assert_as_good_as, each_dtype, eager_divergence, eager_scores, make
from loss_testing import M, V, make_inputs
from torch.nn import functional as F

from recompute.kernels import launch, logit_blocks
from recompute.kernels.linear_divergence import linear_divergence

KINDS = ("forward_kl", "reverse_kl", "jsd", "total_variation")
each_kind_of_divergence = pytest.mark.parametrize("kind", KINDS)


def make_teacher(device, dtype=torch.float32, tokens=M):
    """Hidden states, weight and bias, in digits that every dtype has."""
    made = [make(tokens, 40, seed=5), make(V, 40, seed=6) * 0.3, make(V, seed=7)]
    return [tensor.bfloat16().to(device, dtype) for tensor in made]


@each_dtype
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, None), (0.7, 1.5, None), (2.0, 1.0, 5.0)])
@each_kind_of_divergence
def test_errors_are_no_larger_than_eagers(kind, temperature, scale, softcap, dtype, device):
    tokens = 2000 if device == "cuda" else M if launch.uses_triton(torch.empty(0)) else 200
    inputs, _ = make_inputs(device, dtype, tokens)
    teacher, head, teacher_bias = make_teacher(device, dtype, len(inputs[0]))
    options = {"scale": scale, "softcap": softcap}
    beside = {f"{who}_{key}": value for key, value in options.items() for who in ("student", "teacher")}

    def ours(hidden, weight, bias):
        given = {"kind": kind, "beta": 0.3, "temperature": temperature, "logits_bytes": 0}
        biases = {"student_bias": bias, "teacher_bias": teacher_bias}
        return linear_divergence(hidden, weight, teacher, head, **given, **biases, **beside)

    def eager(hidden, weight, bias):
        frozen = (each.to(hidden.dtype) for each in (teacher, head, teacher_bias))
        logits = F.linear(hidden, weight, bias), F.linear(*frozen)
        return eager_divergence(*(eager_scores(each, temperature=temperature, **options) for each in logits), kind, 0.3)

    assert_as_good_as(ours, eager, inputs, "head")


@each_kind_of_divergence
def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient(kind, device):
    inputs, _ = make_inputs(device)
    frozen = [each.detach() for each in inputs]
    biases = {"student_bias": inputs[2], "teacher_bias": frozen[2]}
    found = linear_divergence(*inputs[:2], *frozen[:2], kind=kind, **biases, logits_bytes=0)
    assert not found.any()
    assert all(gradient.abs().max() < 1e-6 for gradient in torch.autograd.grad(found.sum(), inputs))


@pytest.mark.parametrize("device", ["reference"], indirect=True)  # which kind it is, is told before kernels run
def test_the_ends_of_beta_are_the_divergences_of_kullback_and_leibler(device):
    inputs, _ = make_inputs(device)
    teacher = make_teacher(device)[:2]
    for beta, kind in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        found, expected = (
            linear_divergence(*inputs[:2], *teacher, kind=each, beta=beta, logits_bytes=0) for each in ("jsd", kind)
        )
        assert torch.equal(found, expected)


def test_a_teacher_gets_no_gradient_and_costs_none(device):
    inputs, _ = make_inputs(device)
    teacher = [each.requires_grad_() for each in make_teacher(device)]
    found = linear_divergence(*inputs[:2], *teacher[:2], teacher_bias=teacher[2])
    assert torch.autograd.grad(found.sum(), teacher, allow_unused=True) == (None,) * 3
    frozen = linear_divergence(*(each.detach() for each in inputs[:2]), *teacher[:2], teacher_bias=teacher[2])
    assert not frozen.requires_grad


@pytest.mark.parametrize("device", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("trains", [True, False])
@each_kind_of_divergence
def test_of_many_tokens_forward_makes_each_logit_once(kind, trains, device, monkeypatch):
    tokens, made, make_block = 600, [], logit_blocks.Blocks.make

    def noted(self, block):
        made.append(make_block(self, block))
        return made[-1]

    monkeypatch.setattr(logit_blocks.Blocks, "make", noted)
    inputs, _ = make_inputs(device, tokens=tokens)
    teacher = make_teacher(device, tokens=tokens)
    results = []
    for logits_bytes in (300 * V * 2 * 4, float("inf")):
        made.clear()
        with torch.set_grad_enabled(trains):
            options = {
                "student_bias": inputs[2], "teacher_bias": teacher[2], "kind": kind, "logits_bytes": logits_bytes,
            }  # fmt: skip
            found = linear_divergence(*inputs[:2], *teacher[:2], **options)
        assert sum(each.numel() for each in made) == 2 * tokens * V
        results.append([found, *(torch.autograd.grad(found.sum(), inputs) if trains else [])])
        assert sum(each.numel() for each in made) <= 4 * tokens * V
    for value, other in zip(*results, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


def few_words(device, words=20):
    """What a teacher lists: its logits, and the words that they are of, different ones for each token."""
    order = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i)) for i in range(M)])
    return (make(M, words, seed=5) * 2).to(device), order[:, :words].to(device)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd", "total_variation"])
def test_a_teacher_that_lists_a_few_words_gives_the_others_no_probability(kind, device):
    inputs, _ = make_inputs(device)
    values, indices = few_words(device)
    found = linear_divergence(*inputs[:2], values, student_bias=inputs[2], teacher_indices=indices, kind=kind)
    teacher = torch.full((M, V), -1e4, dtype=torch.float64, device=device).scatter(1, indices, values.double())
    expected = eager_divergence(F.linear(*inputs).double(), teacher, kind)
    gradient = make(M, seed=9).to(device)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    for value, other in zip(
        torch.autograd.grad(found, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient.double()),
        strict=True,
    ):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


@each_kind_of_divergence
def test_words_that_a_teacher_does_not_list_are_one_word_with_the_rest_of_its_probability(kind, device):
    inputs, _ = make_inputs(device)
    hidden, weight, _ = make_teacher(device)
    logits, indices = F.linear(hidden, weight) / 0.7, few_words(device)[1]
    values, logsumexp = logits.gather(1, indices) * 0.7, logits.logsumexp(-1)
    options = {"kind": kind, "beta": 0.3, "temperature": 0.7}
    found = linear_divergence(*inputs[:2], values, teacher_indices=indices, teacher_logsumexp=logsumexp, **options)
    log_p = (F.linear(*inputs[:2]) / 0.7).log_softmax(-1)
    both = [torch.cat([x.gather(1, indices), rest(x, indices)], 1) for x in (log_p, logits.log_softmax(-1))]
    expected = eager_divergence(*both, kind, 0.3)  # whose softmax changes nothing, as they add up to 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    whole = linear_divergence(*inputs[:2], hidden, weight, **options)
    assert (found <= whole + 1e-5).all()


def rest(log_p, indices):
    """The logarithm of the probability of all other words."""
    return log_p.scatter(1, indices, -torch.inf).logsumexp(1, keepdim=True)


def test_a_teacher_may_list_fewer_words_of_some_tokens(device):
    inputs, _ = make_inputs(device)
    values, indices = few_words(device)
    fewer = indices.clone()
    fewer[0, 5:] = -100
    fewer[1] = -100
    found = linear_divergence(*inputs[:2], values, teacher_indices=fewer)
    expected = linear_divergence(*inputs[:2], values, teacher_indices=indices)
    first = linear_divergence(inputs[0][:1], inputs[1], values[:1, :5], teacher_indices=indices[:1, :5])
    torch.testing.assert_close(found, torch.cat([first, torch.zeros_like(first), expected[2:]]))
    assert not torch.autograd.grad(found[1], inputs[0])[0].any()
