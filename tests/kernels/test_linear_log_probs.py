"""Log-probabilities of given words, and entropies, without logits: every option against PyTorch's functions."""

import pytest
import torch
from kernel_testing import IGNORED, assert_as_good_as, each_dtype, eager_log_probs, make, same_bits
from loss_testing import ON_CPU, H, M, V, assert_every_two_meet, make_inputs
from torch.nn import functional as F

from recompute.kernels import linear_cross_entropy as linear_cross_entropy_module
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.linear_log_probs import linear_log_probs

OPTIONS = [
    # words, entropy, temperature, scale, softcap, bias, logits_bytes
    (None, False, 1.0, 1.0, None, False, None), (None, True, 0.7, 1.5, 5.0, True, 0),
    (3, False, 0.7, 1.0, None, True, 0), (3, True, 1.0, 1.5, 5.0, False, None), (4, False, 1.0, 1.5, 5.0, True, 0),
    (4, True, 0.7, 1.0, None, False, None), (None, True, 0.7, 1.0, None, True, None),
    (3, True, 0.7, 1.5, None, False, 0), (4, True, 1.0, 1.0, 5.0, False, 0), (None, False, 1.0, 1.5, 5.0, False, 0),
    (None, False, 0.7, 1.0, 5.0, True, None), (4, False, 0.7, 1.5, None, True, None),
    (3, False, 1.0, 1.0, 5.0, True, None), (None, True, 1.0, 1.5, None, True, 0),
]  # fmt: skip
NAMES = ("words", "entropy", "temperature", "scale", "softcap", "bias", "logits_bytes")


def test_every_two_options_meet():
    assert_every_two_meet(NAMES, OPTIONS)


def words_of(words, device, tokens=M, vocabulary=V):
    """Targets with ignored ones among them; a token without any; and one that asks for a word twice."""
    shape = (tokens,) if words is None else (tokens, words)
    target = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(3))
    target.view(-1)[::5] = IGNORED
    target[1] = IGNORED
    if words is not None:
        target[2] = target[2, -1]
    return target.to(device)


@each_dtype
@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: "-".join(map(str, row)))
def test_errors_are_no_larger_than_eagers(row, dtype, device):
    words, entropy, temperature, scale, softcap, bias, logits_bytes = row
    # Of few values on CUDA, whose products sum in other orders, two samples of errors say little of each other.
    tokens, hidden, vocabulary = (40, H, V) if device == "cpu" else (512, 256, 8000)
    inputs, _ = make_inputs(device, dtype, tokens, hidden, vocabulary)
    target = words_of(words, device, tokens, vocabulary)
    options = {"entropy": entropy, "temperature": temperature, "scale": scale, "softcap": softcap}

    def ours(hidden, weight, bias=None):
        return linear_log_probs(hidden, weight, target, bias, **options, logits_bytes=logits_bytes)

    def eager(hidden, weight, bias=None):
        return eager_log_probs(F.linear(hidden, weight, bias), target, **options)

    assert_as_good_as(ours, eager, inputs if bias else inputs[:2], "head")


def test_a_log_probability_is_a_cross_entropy_with_another_sign(device):
    (hidden, weight, bias), target = make_inputs(device, torch.bfloat16)
    results, gradient = [], make(M, seed=9).to(device)
    for log_probs in (
        linear_log_probs(hidden, weight, target, bias, logits_bytes=0),
        -linear_cross_entropy(hidden, weight, target, bias, reduction="none", logits_bytes=0),
        linear_log_probs(hidden, weight, target[:, None], bias, logits_bytes=0)[:, 0],
    ):
        results.append([log_probs, *torch.autograd.grad(log_probs, (hidden, weight, bias), gradient)])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    assert not results[0][0][target == IGNORED].signbit().any()


def test_entropies_of_certain_and_of_uniform_tokens(device):
    hidden = torch.eye(2, device=device).requires_grad_()
    weight = torch.zeros(V, 2, device=device)
    weight[3, 1] = 1e3
    _, entropy = linear_log_probs(hidden, weight, torch.tensor([7, 3], device=device), entropy=True, logits_bytes=0)
    torch.testing.assert_close(entropy.detach().cpu(), torch.tensor([float(V), 1.0]).log())
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    assert gradient.abs().max() < 1e-4


def test_words_that_a_model_cannot_say_count_nothing(device):
    (hidden, weight, bias), target = make_inputs(device)
    with torch.no_grad():
        bias[100:400] = -torch.inf  # a whole block of columns among them
        target[target >= 100] = 5
    kept = torch.cat([torch.arange(100), torch.arange(400, V)]).to(device)
    for words in (target, target[:, None].repeat(1, 2)):
        found = linear_log_probs(hidden, weight, words, bias, entropy=True, logits_bytes=0)
        expected = linear_log_probs(hidden, weight[kept], words, bias[kept], entropy=True)
        gradients = [torch.autograd.grad(one, hidden, [make(*x.shape).to(x) for x in one]) for one in (found, expected)]
        for value, other in zip([*found, *gradients[0]], [*expected, *gradients[1]], strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


@ON_CPU
def test_an_entropy_that_is_only_looked_at_costs_backward_nothing(device, monkeypatch):
    inputs, target = make_inputs(device)
    seen = []
    differentiate = linear_cross_entropy_module.differentiate

    def noted(*arguments):
        seen.append((arguments[4].shape[1], arguments[6] is None))
        differentiate(*arguments)

    monkeypatch.setattr(linear_cross_entropy_module, "differentiate", noted)
    log_probs, _ = linear_log_probs(*inputs[:2], target, inputs[2], entropy=True)
    found = torch.autograd.grad(log_probs.sum(), inputs)
    assert {*seen} == {(2, True)}
    expected = torch.autograd.grad(linear_log_probs(*inputs[:2], target, inputs[2]).sum(), inputs)
    assert same_bits(found, expected)
