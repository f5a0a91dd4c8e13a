"""A lazy tensor is the tensor to all but the kernel that goes without it."""

import copy
import functools
import pickle

import pytest
import torch
from engine_testing import function_of
from tiny import through_torch_save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from recompute.errors import MutationError, UnsupportedError
from recompute.substitution import lazy_logits, lazy_rows
from recompute.substitution.lazy_logits import LazyLogits
from recompute.substitution.lazy_tensors import LazyTensor

HIDDEN, VOCABULARY = 8, 11


def make(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def lazy_sin(x):
    calls = []

    def compute():
        calls.append(1)
        return x.sin()

    return LazyTensor(tuple(x.shape), (x,), compute), calls


def test_asking_for_its_shape_computes_nothing():
    x = make(2, 3)
    tensor, calls = lazy_sin(x)
    assert isinstance(tensor, Tensor)
    assert (tensor.shape, tensor.size(-1), tensor.dim(), tensor.ndim, len(tensor)) == (x.shape, 3, 2, 2, 2)
    assert (tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_cuda) == (x.dtype, x.device, True, False)
    assert repr(tensor) == "LazyTensor(shape=(2, 3), dtype=torch.float64, device='cpu')"
    assert not calls


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: 2 - t,
        lambda t: t.transpose(0, 1),
        lambda t: t[0],
        lambda t: torch.cat([t, t]),
        lambda t: torch.where(t > 0, t, t * 2),
        lambda t: F.linear(t, torch.ones(4, 3, dtype=t.dtype)),
        lambda t: F.layer_norm(t, t.shape[-1:]),
        lambda t: t.detach().requires_grad_().exp(),
        lambda t: torch.stack(list(t)),
        lambda t: t.data,
        lambda t: t.contiguous().view(-1),
    ],
)
def test_to_everything_else_it_is_the_tensor(use):
    x = make(2, 3)
    tensor, calls = lazy_sin(x)
    found, expected = use(tensor), use(x.sin())
    assert type(found) is Tensor
    assert torch.equal(found, expected)
    use(tensor)
    assert len(calls) == 1
    if expected.requires_grad and expected.grad_fn is not None:
        gradients = torch.autograd.grad(found.sum(), x, allow_unused=True)
        assert str(gradients) == str(torch.autograd.grad(expected.sum(), x, allow_unused=True))


def test_copies_and_pickles_are_the_tensors():
    x = make(3).detach()
    for copied in (copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), through_torch_save):
        found = copied(lazy_sin(x)[0])
        assert type(found) is Tensor
        assert torch.equal(found, x.sin())


def test_gradients_off_where_it_is_used_do_not_cut_its_graph():
    x = make(3)
    tensor, _ = lazy_sin(x)
    with torch.no_grad():
        tensor + 1
    assert torch.autograd.grad((tensor * 1).sum(), x)[0].equal(x.cos())


Double = function_of(lambda x: x * 2, lambda gradient: gradient * 2, saves=lambda *_: ())
Triples = function_of(lambda x: x * 2.0, lambda gradient: gradient * 3, saves=lambda *_: ())
"""Gives what is lazy again."""
Multiplies = function_of(lambda x, y: x * y, lambda gradient, x, y: (gradient * y, gradient * x))
"""Holds what it is given, and takes two."""


def below_torchs_functions(tensor):
    """As a compiled extension reads a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.aten.mul.Tensor(tensor, tensor)


READERS = {
    "a function": Double.apply,
    "a function that holds it": lambda y: Multiplies.apply(y, y),
    "a function and others": lambda y: Multiplies.apply(y, y + 1) + Double.apply(y) * y,
    "others and a function": lambda y: y.exp() + Double.apply(y),
    "what is below torch's functions": below_torchs_functions,
    "that and others": lambda y: below_torchs_functions(y) + y,
    "others and that": lambda y: y + below_torchs_functions(y),
    "a function without gradients": lambda y: Double.apply(y.detach()) + y,
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_a_lazy_tensor_gets_its_values_and_gives_its_gradient(reader):
    read = READERS[reader]
    results = []
    for lazy in (True, False):
        x = make(3)
        tensor = lazy_sin(x)[0] if lazy else x.sin()
        y = read(tensor)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        second = torch.autograd.grad(gradient.sum(), x, retain_graph=True)[0]
        again = read(tensor)
        del tensor
        again.sum().backward(retain_graph=True)
        again.sum().backward()
        results.append((y, gradient, second, x.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def operands(tokens=(2, 3), bias=False, seed=0):
    made = [make(*tokens, HIDDEN, seed=seed), make(VOCABULARY, HIDDEN, seed=seed + 1)]
    return [*made, make(VOCABULARY, seed=seed + 2)] if bias else made


def head():
    given = operands(bias=True)
    return LazyLogits.of(*given), F.linear(*given)


def assert_as_plain(use, *inputs, lazy=True, taught=False):
    """``use`` gives the same, with the same gradients, of lazy logits and of plain ones.

    inputs: of each head. lazy: whether no logits are made. taught: whether the second head, a teacher's, is frozen.
    """
    results = []
    for of in (LazyLogits.of, F.linear):
        heads = [[each.detach().requires_grad_(not taught or not at) for each in own] for at, own in enumerate(inputs)]
        logits = [of(*own) for own in heads]
        value = use(*logits)
        assert type(value) is Tensor
        assert of is F.linear or not lazy or all(each.is_lazy for each in logits)
        gradient = (make(*value.shape, seed=4).detach() if value.dim() else torch.ones(())).to(value)
        trained = [each for own in heads[: 1 if taught else None] for each in own]
        results.append([value, *torch.autograd.grad(value, trained, gradient)])
    torch.testing.assert_close(*results)


def lazily_and_plainly(use, *inputs):
    """The results of ``use``, given a function that makes logits: lazy ones, and plain ones."""
    return [use(of, *[each.detach().requires_grad_() for each in inputs]) for of in (LazyLogits.of, F.linear)]


def test_what_is_made_of_changed_tensors_is_refused_and_not_another_value():
    x = make(2, 3).detach()
    tensor, _ = lazy_sin(x)
    asked, _ = lazy_sin(x)
    expected = asked + 0
    x.add_(1)
    with pytest.raises(MutationError, match=r"shape \(2, 3\).* modified in place \(an optimizer step\?\)"):
        tensor + 0
    assert torch.equal(asked + 0, expected)
    logits, _ = head()
    logits._head.own.weight.data.mul_(2)  # goes unseen by plain PyTorch, too
    with torch.no_grad():
        logits._head.own.weight.mul_(2)
    with pytest.raises(MutationError):
        F.cross_entropy(logits.view(-1, VOCABULARY), TARGET)


def test_it_trains_only_where_what_it_is_made_of_does():
    assert not LazyLogits.of(make(2, HIDDEN).detach(), make(VOCABULARY, HIDDEN).detach()).requires_grad
    with torch.no_grad():
        assert not LazyLogits.of(make(2, HIDDEN), make(VOCABULARY, HIDDEN)).requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.mul_(2),
        lambda logits: logits.__setitem__((..., slice(0, 4)), -10.0),
        lambda logits: torch.clamp(logits, max=0.5, out=logits),
        lambda logits: F.relu(logits, inplace=True),
    ],
)
def test_changes_in_place_reach_views_and_no_copies(change):
    logits, whole = head()
    found, expected = [], []
    for each, results in ((logits, found), (whole.clone(), expected)):
        with torch.no_grad():
            view, copy_, wide = each.view(-1, VOCABULARY), each[:, :-1].contiguous(), each.float()
            change(each)
            results += [each + 0, view + 0, copy_ + 0, wide + 0, F.cross_entropy(view, TARGET)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


SCALINGS = [
    # Cohere multiplies its logits by a number, and Granite divides them by one.
    lambda logits: logits * 0.0625,
    lambda logits: 3 * logits,
    lambda logits: logits / 8.0,
    lambda logits: logits / 8.0 / 3,
    lambda logits: logits.divide(2.0).multiply(3.0),
    lambda logits: torch.tanh(logits * 0.5 / 3.0) * 3.0,
    lambda logits: torch.tanh(logits / 0.5 / 3.0) * 3.0,
]


SHAPINGS = [
    lambda logits: logits.view(-1, VOCABULARY),
    lambda logits: logits.reshape((-1, VOCABULARY)),
    lambda logits: torch.reshape(logits, (6, VOCABULARY)),
    lambda logits: logits.flatten(0, 1),
    lambda logits: torch.flatten(logits, end_dim=-2),
    lambda logits: logits[:, 1:].flatten(-3, 1),
    lambda logits: logits[..., :-1, :],
    lambda logits: logits[:, 1:],
    lambda logits: logits[..., :-1, :].contiguous().view(-1, VOCABULARY),
    lambda logits: logits[1],
    lambda logits: logits[0, -1],
    lambda logits: logits.unsqueeze(1).squeeze(1),
    lambda logits: logits.unflatten(0, (1, 2)),
    lambda logits: logits.transpose(0, 1),
    lambda logits: logits.permute(0, 2, 1).movedim(1, -1),
    lambda logits: torch.swapaxes(logits.mT, -1, -2).type(torch.float64),
    lambda logits: torch.tanh(logits / 3.0) * 3.0,
    lambda logits: ((logits / 3.0).tanh() * 3.0).view(-1, VOCABULARY),
    lambda logits: logits.float(),
    lambda logits: logits.to(torch.float32),
    *SCALINGS,
]


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_logits_may_be_shaped_and_capped_on_the_way(shaping):
    logits, whole = head()
    found, expected = shaping(logits), shaping(whole)
    assert type(found) is LazyLogits
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found + 0, expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: logits[..., 0],
        lambda logits: logits[..., :5],
        lambda logits: logits[None],
        lambda logits: logits[logits.detach() > 0],
        lambda logits: logits.view(-1),
        lambda logits: logits.flatten(),
        lambda logits: logits.flatten(1, 2),
        lambda logits: logits.view(VOCABULARY, -1),
        lambda logits: logits / 3.0 + 1,
        lambda logits: torch.tanh(logits),
        lambda logits: torch.tanh(logits / 3.0) * 4.0,
        lambda logits: logits * -3.0,
        lambda logits: logits * logits.new_tensor(3.0),
        lambda logits: torch.tanh(logits / 3.0) * 3.0 * 2.0,
        lambda logits: logits.log_softmax(0),
        lambda logits: logits.softmax(-1, torch.float64).sum(-1),
        lambda logits: logits.log_softmax(-1).gather(0, torch.zeros(1, 3, 2, dtype=torch.int64)),
        lambda logits: logits.log_softmax(-1).gather(-1, torch.zeros(1, 3, 2, dtype=torch.int64)),
        lambda logits: F.log_softmax(torch.tanh(logits / 3.0), -1) * 1,
        lambda logits: logits.log_softmax(-1).tanh(),
        lambda logits: logits.log_softmax(-1) * torch.ones(3, VOCABULARY, dtype=logits.dtype),
        lambda logits: logits.transpose(1, 2).log_softmax(-1),
        lambda logits: logits.view(torch.int64).float(),
        lambda logits: torch.stack([logits.softmax(-1), logits.log_softmax(-1)]).logsumexp(1),
        lambda logits: logits.sum(0),
        lambda logits: logits.topk(1, 0).values,
        lambda logits: logits + logits.new_zeros(2, 3, 1),
        lambda logits: torch.stack(logits.split([1, 1])),
        lambda logits: logits.split(2, -1)[0],
        lambda logits: torch.div(logits, 0.5, rounding_mode="floor"),
        lambda logits: F.cross_entropy(logits, torch.zeros(2, VOCABULARY, dtype=torch.long)),  # classes come second
        lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY) / -2.0, TARGET),
    ],
)
def test_anything_else_sees_the_logits(use):
    logits, whole = head()
    found = use(logits)
    assert type(found) is Tensor
    assert torch.equal(found, use(whole))


def entropy(log_probs):
    return -(torch.exp(log_probs) * log_probs).sum(-1)


INDEX = torch.tensor([[1, 9, 3], [10, 0, 2]])
QUANTITIES = {
    "log-probabilities": lambda logits: F.log_softmax(logits, -1).gather(-1, INDEX[..., None]).squeeze(-1),
    "cast later": lambda logits: logits.log_softmax(-1).float().gather(-1, INDEX[..., None]),
    "of several words": lambda logits: torch.gather(
        logits.log_softmax(2), 2, torch.arange(12).view(2, 3, 2) % VOCABULARY
    ),
    "shifted": lambda logits: logits[:, :-1].log_softmax(-1).gather(-1, INDEX[:, 1:, None]),
    "shifted later": lambda logits: logits.log_softmax(-1)[:, :-1].gather(-1, INDEX[:, 1:, None]),
    "with a temperature": lambda logits: (logits / 0.7).log_softmax(-1).gather(-1, INDEX[..., None]),
    "capped, with a temperature": lambda logits: (
        (torch.tanh(logits / 3.0) * 3.0 / 0.7).log_softmax(-1).gather(-1, INDEX[..., None])
    ),
    "row by row, as TRL's": lambda logits: torch.stack(
        [F.log_softmax(row, -1).gather(-1, words[:, None]) for row, words in zip(logits, INDEX, strict=True)]
    ),
    "a sign": lambda logits: (-logits.log_softmax(-1)).gather(-1, INDEX[..., None]),
    "entropy": lambda logits: entropy(F.log_softmax(logits, -1)),
    "entropy of both": lambda logits: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(dim=-1),
    "entropy in chunks, as TRL's": lambda logits: torch.cat(
        [entropy(F.log_softmax(chunk, -1)) for chunk in logits.reshape(-1, VOCABULARY).split(4, dim=0)]
    ),
    "with a sign inside": lambda logits: (-logits.softmax(-1) * logits.log_softmax(-1)).sum(-1),
    "entropy, with its dimension": lambda logits: (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1, keepdim=True),
    "entropy in bits": lambda logits: (-logits.softmax(-1) * logits.log_softmax(-1) / 0.6931).sum(-1),
    "entropy of order 2": lambda logits: -torch.log(logits.softmax(-1).square().sum(-1)),
    "entropy across temperatures": lambda logits: (logits.softmax(-1) * (2 * logits).log_softmax(-1)).sum(-1),
    "of rows that a mask has": lambda logits: logits[INDEX > 1].log_softmax(-1).gather(-1, INDEX[INDEX > 1][:, None]),
    "of later rows of a mask": lambda logits: logits.log_softmax(-1)[INDEX > 1].gather(-1, INDEX[INDEX > 1][:, None]),
    "of rows by number": lambda logits: logits[torch.tensor([1, 0]), 1].log_softmax(-1).gather(-1, INDEX[:, :1]),
    "of halves": lambda logits: torch.cat([each.logsumexp(-1) for each in logits.chunk(2)]),
    "logsumexp": lambda logits: torch.special.logsumexp(logits / 0.7, -1),
    "logsumexp of capped": lambda logits: torch.logsumexp(torch.tanh(logits / 3.0) * 3.0, dim=-1, keepdim=True),
    "by logsumexp, as TRL's": lambda logits: (
        torch.gather(logits, dim=-1, index=INDEX[..., None]).squeeze(-1)
        - torch.stack([torch.logsumexp(row, -1) for row in logits])
    ),
    "the highest": lambda logits: logits.max(-1).values,
    "the highest few": lambda logits: logits.topk(3).values,
    "the most probable few": lambda logits: logits.log_softmax(-1).topk(3, dim=-1)[0],
    "the mean": lambda logits: logits[:, :-1].mean(),
    "sums": lambda logits: (2 * logits).sum(-1),
    "with a bias": lambda logits: (logits + torch.ones(VOCABULARY, dtype=logits.dtype)).logsumexp(-1),
    "with the mean of all": lambda logits: logits.log_softmax(-1).mean(),
}


FEW = {
    "argmax": lambda logits: logits.argmax(-1),
    "argmax of probabilities": lambda logits: logits.softmax(-1).argmax(dim=-1),
    "topk": lambda logits: logits.topk(3),
    "topk of the lowest": lambda logits: logits.float().topk(2, -1, largest=False),
    "max": lambda logits: logits.max(dim=-1),
    "without gradients": lambda logits: logits.detach().mean(),
}


@pytest.mark.parametrize("few", [*FEW.values(), *QUANTITIES.values()], ids=[*FEW, *QUANTITIES])
def test_without_gradients_a_few_numbers_go_without_the_logits(few):
    logits, whole = head()
    with torch.no_grad():
        found = few(logits)
    assert logits.is_lazy
    expected = few(whole.detach())
    torch.testing.assert_close(found, expected)
    assert type(found) is type(expected)
    assert not any(each.requires_grad for each in (found if isinstance(found, tuple) else [found]))


@pytest.mark.parametrize(("tokens", "products"), [(6, 1), (300, 4)])
def test_a_loop_that_evaluates_makes_few_logits_once_and_many_a_few_rows_at_a_time(tokens, products):
    hidden, weight = make(tokens, HIDDEN), make(12_000, HIDDEN, seed=1)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logits = LazyLogits.of(hidden, weight)
        found = logits.argmax(-1), logits.topk(3).indices, logits.softmax(-1).max(-1).values
    whole = F.linear(hidden, weight).detach()
    expected = whole.argmax(-1), whole.topk(3).indices, whole.softmax(-1).max(-1).values
    torch.testing.assert_close(found, expected)
    assert logits.is_lazy is (tokens > 6)
    assert counter.get_total_flops() // (2 * tokens * HIDDEN * len(weight)) == products


@pytest.mark.parametrize("use", ["exp", "cross_entropy", "argmax"])
def test_compiled_code_that_is_given_logits_breaks_its_graph_there(use):
    uses = {
        "exp": lambda x: x.exp().log() * 2,
        "cross_entropy": lambda x: F.cross_entropy(x.view(-1, VOCABULARY), TARGET) * 2,
        "argmax": lambda x: x.argmax(-1) * 2,
    }
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            logits, whole = head()
            found = torch.compile(uses[use], backend="eager")(logits)
            torch.testing.assert_close(found + 0, uses[use](whole))
        if found.requires_grad:
            found.sum().backward()
            assert logits._head.own.hidden.grad is not None
        assert logits.is_lazy is (use == "cross_entropy" or (use == "argmax" and trains))


def without_gradients(function):
    with torch.no_grad():
        return function()


def half_of_divergence(p, q):
    return p * (p.log() - ((p + q) / 2).log())


PARTLY_WITHOUT_GRADIENTS = {
    "probabilities": lambda logits: (
        without_gradients(lambda: logits.softmax(-1)) * (logits.log_softmax(-1) - 1.0)
    ).sum(-1),
    "both": lambda logits: (
        without_gradients(lambda: logits.softmax(-1) * logits.log_softmax(-1)) * logits.softmax(-1)
    ).sum(),
    "a sum": lambda logits: (
        half_of_divergence(logits.softmax(-1), (2 * logits).softmax(-1)).sum(-1)
        + without_gradients(lambda: half_of_divergence((2 * logits).softmax(-1), logits.softmax(-1)).sum(-1))
    ),
    "a sum of what has them": lambda logits: (
        (half := half_of_divergence(logits.softmax(-1), (2 * logits).softmax(-1)))
        .sum(-1)
        .add(without_gradients(lambda: 3 * half.sum(-1)))
    ),
    "a stack": lambda logits: (
        logits.log_softmax(-1)
        - without_gradients(lambda: torch.stack([logits.log_softmax(-1), (2 * logits).log_softmax(-1)])).logsumexp(0)
    ).sum(),
    "transposed": lambda logits: (
        F.cross_entropy(without_gradients(lambda: logits.mT), TARGET.view(2, 3))
        + F.cross_entropy(logits.mT, TARGET.view(2, 3))
    ),
}


def test_what_was_made_without_gradients_gives_none():
    logits, _ = head()
    with torch.no_grad():
        log_probs = logits.log_softmax(-1)
    assert not log_probs.requires_grad
    assert not log_probs.gather(-1, INDEX[..., None]).requires_grad
    assert not logits.detach().logsumexp(-1).requires_grad
    with torch.no_grad():
        of_a_reference, _ = head()
    assert not of_a_reference.log_softmax(-1).gather(-1, INDEX[..., None]).requires_grad
    assert of_a_reference.is_lazy


@pytest.mark.parametrize("quantity", QUANTITIES.values(), ids=QUANTITIES)
def test_under_autocast_they_round_as_its_matrix_products_do(quantity):
    def results(of, *given):
        with autocast(enabled=True):
            logits = of(*given) if of is F.linear else of(given[0].bfloat16(), *given[1:])
            value = quantity(logits)
            assert of is F.linear or logits.is_lazy
        return [value.float(), *torch.autograd.grad(value, given, make(*value.shape, seed=4).detach().to(value.dtype))]

    given = [each.float() for each in operands(bias=True)]
    torch.testing.assert_close(*lazily_and_plainly(results, *given), rtol=0.1, atol=0.15)


def jensen_shannon(p, q):
    both = (p + q) * 0.5
    return ((p * (p.log() - both.log())).sum(-1) + (q * (q.log() - both.log())).sum(-1)) / 2


DIVERGENCES = {
    "forward": lambda ours, theirs: F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="batchmean"),
    "of logarithms": lambda ours, theirs: F.kl_div(
        F.log_softmax(ours / 0.7, -1), F.log_softmax(theirs / 0.7, -1), reduction="sum", log_target=True
    ),
    "reverse": lambda ours, theirs: F.kl_div(theirs.log_softmax(-1), ours.softmax(-1), reduction="none").sum(-1),
    "of rows that a mask has": lambda ours, theirs: F.kl_div(
        ours.log_softmax(-1), theirs.softmax(-1), reduction="none"
    )[INDEX > 1].sum(),
    "written out": lambda ours, theirs: (theirs.softmax(-1) * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1),
    "capped": lambda ours, theirs: F.kl_div(
        (torch.tanh(ours / 3.0) * 3.0).log_softmax(-1), theirs.softmax(-1), reduction="mean"
    ),
    "of two temperatures": lambda ours, theirs: F.kl_div(
        (torch.tanh(ours / 3.0) * 3.0 / 0.7).log_softmax(-1), theirs.softmax(-1), reduction="batchmean"
    ),
    "Jensen and Shannon's": lambda ours, theirs: jensen_shannon(ours.softmax(-1), theirs.softmax(-1)),
    "of means of halves": lambda ours, theirs: sum(
        half_of_divergence(p.softmax(-1), q.softmax(-1)).sum(-1).mean() for p, q in ((ours, theirs), (theirs, ours))
    ),
    "as TRL's": lambda ours, theirs: generalized_jensen_shannon(ours / 0.7, theirs / 0.7, 0.1)[INDEX > 1].sum(),
    "by two losses": lambda ours, theirs: sum(
        0.5 * F.kl_div((0.5 * (ours.softmax(-1) + theirs.softmax(-1))).log(), p, reduction="batchmean")
        for p in (ours.softmax(-1), theirs.softmax(-1))
    ),
    "total variation": lambda ours, theirs: (theirs.log_softmax(-1).exp() - ours.softmax(-1)).abs().sum(-1) / 2,
    "of other weights": lambda ours, theirs: skewed(ours.log_softmax(-1), theirs.log_softmax(-1)),
}


def generalized_jensen_shannon(ours, theirs, weight):
    log_p, log_q = F.log_softmax(ours, dim=-1), F.log_softmax(theirs, dim=-1)
    beta = torch.tensor(weight, dtype=log_p.dtype, device=log_p.device)
    mixture = torch.logsumexp(torch.stack([log_p + torch.log1p(-beta), log_q + torch.log(beta)]), dim=0)
    of_p, of_q = (F.kl_div(mixture, each, reduction="none", log_target=True) for each in (log_p, log_q))
    return beta * of_q + (1 - beta) * of_p


def skewed(log_p, log_q):
    """No divergence that a kernel knows: the mixture has other weights."""
    log_both = torch.logaddexp(log_p - 1.0, log_q)
    return 0.9 * (log_p.exp() * (log_p - log_both)).sum(-1) + 0.1 * (log_q.exp() * (log_q - log_both)).sum(-1)


@pytest.mark.parametrize("trains", ["student", "both"])
@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_divergences_of_two_heads_go_without_the_logits_of_either(divergence, trains):
    assert_as_plain(divergence, operands(), operands(seed=5), taught=trains == "student")


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_divergence_is_a_kernels_however_it_is_written(divergence, monkeypatch):
    calls = []
    for module, name in ((lazy_logits, "linear_divergence"), (lazy_rows, "by_rows")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), calls))
    with torch.no_grad():
        taught = LazyLogits.of(make(2, 3, HIDDEN, seed=5), make(VOCABULARY, HIDDEN, seed=6))
    value = DIVERGENCES[divergence](LazyLogits.of(make(2, 3, HIDDEN), make(VOCABULARY, HIDDEN, seed=1)), taught)
    value.sum().backward()
    is_known = divergence not in ("of two temperatures", "of other weights")
    assert calls == (["linear_divergence"] if is_known else ["by_rows"])


def test_log_probabilities_and_the_entropy_of_them_are_made_at_once(monkeypatch):
    calls = []
    monkeypatch.setattr(lazy_logits, "linear_log_probs", counted(lazy_logits.linear_log_probs, calls))

    def use(logits):
        log_p = (logits / 0.9).log_softmax(-1)
        chosen = log_p.gather(-1, INDEX[..., None])
        seen = without_gradients(lambda: entropy(log_p))
        return chosen.sum() + (entropy(log_p) * seen).sum()

    assert_as_plain(use, operands())
    assert len(calls) == 1


def counted(function, calls):
    def call(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return call


PLAIN_TEACHERS = {
    **{name: divergence for name, divergence in DIVERGENCES.items() if name != "of rows that a mask has"},
    "of probabilities that are there": lambda ours, theirs: F.kl_div(
        F.log_softmax(ours / 2.0, dim=-1), F.softmax(theirs / 2.0, dim=-1), reduction="batchmean"
    ),
    "in a mean by a mask": lambda ours, theirs: (
        F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="none") * (INDEX > 1).unsqueeze(-1)
    ).sum(),
    "of rows that a mask has": lambda ours, theirs: F.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True
    )[INDEX > 1].sum(),
    "shifted, in one dimension": lambda ours, theirs: F.kl_div(
        ours.log_softmax(-1)[:, 1:].reshape(-1, VOCABULARY), theirs[:, 1:].flatten(0, 1).softmax(-1), reduction="sum"
    ),
    "reverse, later in one dimension": lambda ours, theirs: (
        (ours.softmax(-1) * (ours.log_softmax(-1) - theirs.log_softmax(-1))).view(-1, VOCABULARY).sum(-1)
    ),
    "cross-entropy": lambda ours, theirs: -(theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1).mean(),
    "cross-entropy of PyTorch": lambda ours, theirs: F.cross_entropy(
        ours.view(-1, VOCABULARY), theirs.softmax(-1).view(-1, VOCABULARY), CLASS_WEIGHTS, label_smoothing=0.1
    ),
    "cross-entropy in the second dimension": lambda ours, theirs: F.cross_entropy(
        ours.transpose(1, 2), theirs.softmax(-1).transpose(1, 2), reduction="none"
    ),
    "with a prior of words": lambda ours, theirs: (ours.log_softmax(-1) * theirs[0, 0].softmax(-1)).sum(-1),
}


@pytest.mark.parametrize("divergence", PLAIN_TEACHERS.values(), ids=PLAIN_TEACHERS)
def test_a_teacher_may_be_a_plain_tensor(divergence):
    taught = make(2, 3, VOCABULARY, seed=5).detach()
    assert_as_plain(lambda logits: divergence(logits, taught), operands())


def test_a_teacher_that_changes_before_backward_is_refused():
    logits, _ = head()
    taught = make(2, 3, VOCABULARY).detach().softmax(-1)
    loss = F.kl_div(logits.log_softmax(-1), taught, reduction="batchmean")
    taught.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rows_are_few_at_a_time_and_second_derivatives_are_there():
    def results(of, hidden, weight):
        logits = of(hidden, weight) if of is F.linear else of(hidden, weight, logits_bytes=1)
        value = logits.softmax(-1).square().sum(-1)
        assert of is F.linear or logits.is_lazy
        first = torch.autograd.grad(value.sum(), (hidden, weight), create_graph=True)
        once = torch.autograd.grad(value.sum(), (hidden, weight), retain_graph=True)
        return [value, *first, *once, *torch.autograd.grad(first[0].square().sum(), (hidden, weight))]

    torch.testing.assert_close(*lazily_and_plainly(results, make(700, HIDDEN), make(VOCABULARY, HIDDEN, seed=1)))


@pytest.mark.parametrize("adapters", [1, 2])
@pytest.mark.parametrize(
    "scaling", [lambda logits: logits, lambda logits: torch.tanh(logits / 3.0) * 3.0, lambda logits: logits * 2]
)
def test_an_adapter_adds_to_logits_that_stay_lazy(scaling, adapters):
    def results(of, hidden, weight, bias, offset, *thin):
        logits = of(hidden, weight, bias)
        for n in range(adapters):
            logits = logits + of(*thin[2 * n : 2 * n + 2]) * 1.5
        logits = scaling(offset + logits)
        losses = [
            F.cross_entropy(logits, TARGET),
            logits.log_softmax(-1).gather(-1, TARGET.clamp_min(0)[:, None]).sum(),
            logits.logsumexp(-1).sum(),
            logits.softmax(-1).square().sum(),
        ]
        assert of is F.linear or logits.is_lazy
        return [*losses, *torch.autograd.grad(sum(losses), [hidden, weight, bias, offset, *thin])]

    thin = [each for n in range(adapters) for each in (make(6, 2, seed=3 + n), make(VOCABULARY, 2, seed=7 + n))]
    offset = make(1, VOCABULARY, seed=11)
    torch.testing.assert_close(*lazily_and_plainly(results, *operands((6,), bias=True), offset, *thin))


def test_probabilities_of_logits_that_are_there_are_made_of_them():
    logits, whole = head()
    log_probs = logits.log_softmax(-1)
    logits + 0
    assert torch.equal(log_probs.gather(-1, INDEX[..., None]), whole.log_softmax(-1).gather(-1, INDEX[..., None]))
    logits, whole = head()
    log_probs = logits.log_softmax(-1)
    with torch.no_grad():
        logits.mul_(2)
    assert torch.equal(log_probs + 0, whole.log_softmax(-1))
    logits, whole = head()
    log_probs = logits.log_softmax(-1)
    probabilities = log_probs.exp()
    with torch.no_grad():
        log_probs.mul_(2)
    assert torch.equal(probabilities + 0, whole.log_softmax(-1).exp())


def test_an_index_out_of_bounds_is_refused_as_by_pytorch():
    for wrong in (-100, VOCABULARY):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            head()[0].log_softmax(-1).gather(-1, torch.full((2, 3, 1), wrong))


@pytest.mark.parametrize("casts", [False, True])
def test_log_probabilities_have_the_dtype_that_pytorch_gives_them(casts):
    hidden, weight = make(2, 3, HIDDEN).bfloat16(), make(VOCABULARY, HIDDEN, seed=1).bfloat16()
    with autocast(casts):
        for function in (F.log_softmax, lambda logits, dim: F.log_softmax(logits, dim, dtype=torch.float32)):
            found, expected = (
                function(logits, -1).gather(-1, INDEX[..., None])
                for logits in (LazyLogits.of(hidden, weight), F.linear(hidden, weight))
            )
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


TARGET = torch.tensor([1, -100, 3, 10, 0, 2])
CLASS_WEIGHTS = torch.arange(1.0, 12.0, dtype=torch.float64)
LOSSES = [
    lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY), TARGET),
    lambda logits: F.cross_entropy(logits.float().view(-1, VOCABULARY), TARGET, reduction="sum") / 3,
    lambda logits: F.cross_entropy(logits.flatten(0, 1).float(), TARGET),
    lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY), TARGET, label_smoothing=0.1),
    lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY), TARGET, CLASS_WEIGHTS),
    lambda logits: nn.CrossEntropyLoss(reduction="none")(
        (torch.tanh(logits / 3.0) * 3.0).view(-1, VOCABULARY), TARGET
    ).sum(),
    lambda logits: F.cross_entropy(logits[:, 1:].reshape(-1, VOCABULARY), TARGET[:4]),
    lambda logits: F.cross_entropy(logits.transpose(1, 2), TARGET.view(2, 3)),
    lambda logits: F.cross_entropy(logits.permute(0, 2, 1).to(dtype=torch.float32) / 0.7, TARGET.view(2, 3)),
    lambda logits: F.cross_entropy(logits.movedim(-1, 1), TARGET.view(2, 3), reduction="none", label_smoothing=0.1),
    lambda logits: F.cross_entropy(
        logits.view(2, 3, 1, VOCABULARY).permute(0, 3, 1, 2), TARGET.view(2, 3, 1), CLASS_WEIGHTS
    ),
    lambda logits: F.cross_entropy(logits.transpose(0, 1).transpose(1, 2), TARGET.view(2, 3).T),
    lambda logits: F.nll_loss(logits.log_softmax(-1).view(-1, VOCABULARY), TARGET),
    lambda logits: F.nll_loss(logits.log_softmax(-1).transpose(1, 2), TARGET.view(2, 3), reduction="sum"),
    lambda logits: F.nll_loss(F.log_softmax(logits.mT, dim=1), TARGET.view(2, 3), CLASS_WEIGHTS, ignore_index=-100),
    *(lambda logits, scaling=each: F.cross_entropy(scaling(logits).view(-1, VOCABULARY), TARGET) for each in SCALINGS),
]


GO_WITHOUT = {
    **{f"loss {number}": loss for number, loss in enumerate(LOSSES)}, **QUANTITIES,
    **{f"{part} without gradients": use for part, use in PARTLY_WITHOUT_GRADIENTS.items()},
}  # fmt: skip


@pytest.mark.parametrize("use", GO_WITHOUT.values(), ids=GO_WITHOUT)
def test_losses_log_probabilities_and_entropies_go_without_the_logits(use):
    assert_as_plain(use, operands(bias=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_whoever_observes_is_told_of_each_loss_and_changes_none(loss):
    seen = []
    hidden, weight, bias = make(2, 3, HIDDEN), make(VOCABULARY, HIDDEN, seed=1), make(VOCABULARY, seed=2)
    value = loss(LazyLogits.of(hidden, weight, bias, lambda *found: seen.append(found)))
    assert torch.equal(value, loss(LazyLogits.of(hidden, weight, bias)))
    ((argmax, target, ignored),) = seen
    assert ignored == -100
    rows = F.linear(hidden, weight, bias).argmax(-1)
    transposed = torch.equal(target, TARGET.view(2, 3).T.flatten())
    assert torch.equal(argmax, (rows[:, 1:] if len(target) == 4 else rows.T if transposed else rows).reshape(-1))
    assert transposed or torch.equal(target, TARGET[: len(target)])


def autocast(enabled):
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


USES = {
    "the values": lambda logits: logits.exp().sum(),
    "values of a view": lambda logits: logits.view(-1, VOCABULARY).exp().sum(),
    "a loss": lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY).float(), TARGET),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("casts", [False, True], ids=["made without", "made with"])
def test_autocast_where_it_is_used_does_not_cast_what_it_is_made_of(use, casts):
    def results(of, hidden, weight):
        with autocast(casts):
            given = (hidden, weight) if of is F.linear or not casts else (hidden.bfloat16(), weight.bfloat16())
            logits = of(*given)  # as the head's runner casts them
        with autocast(not casts):
            value = use(logits)
        return [value, *torch.autograd.grad(value, hidden)]

    outcomes = lazily_and_plainly(results, make(2, 3, HIDDEN).float(), make(VOCABULARY, HIDDEN).float())
    torch.testing.assert_close(*outcomes, rtol=1e-2 if casts else 1e-5, atol=1e-2 if casts else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_under_autocast_a_loss_has_the_dtype_that_pytorch_gives_it(dtype):
    """A sum over some thousand tokens has no place in float16, nor a loss that a GradScaler scales."""
    hidden, weight = make(4096, HIDDEN).to(dtype), make(VOCABULARY, HIDDEN, seed=1).to(dtype) * 100
    target = TARGET.repeat(4096)[:4096]
    losses = []
    for logits in (LazyLogits.of(hidden, weight), F.linear(hidden, weight)):
        with torch.autocast("cpu", torch.float16):
            losses.append([F.cross_entropy(logits, target, reduction=how) for how in ("none", "mean", "sum")])
    assert losses[1][2] > torch.finfo(torch.float16).max
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def cross_entropy_of_hooked(logits):
    view = logits.view(-1, VOCABULARY)
    logits.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(view, TARGET)


def halves_that_meet_no_other(logits):
    half = half_of_divergence(logits.softmax(-1), (2 * logits).softmax(-1)).sum(-1)
    return (half * torch.arange(3.0)).mean() + half.sum().exp() + half[0, 1]


MADE = {
    "a function reads them": lambda logits: Double.apply(logits.view(-1, VOCABULARY)[1:]).square().sum(),
    "of a function": lambda logits: F.cross_entropy(Triples.apply(logits).view(-1, VOCABULARY), TARGET),
    "a hook comes after a view": cross_entropy_of_hooked,
    "half of a divergence": halves_that_meet_no_other,
}


@pytest.mark.parametrize("use", MADE.values(), ids=MADE)
def test_logits_that_are_made_have_the_gradient_of_all_their_readers(use):
    assert_as_plain(use, operands(bias=True), lazy=False)


def test_a_hook_that_would_miss_a_gradient_is_refused():
    logits, _ = head()
    F.cross_entropy(logits.view(-1, VOCABULARY), TARGET)
    with pytest.raises(UnsupportedError, match=r"LazyLogits.* gets a hook after .*`via: hook` or `action: keep`"):
        logits.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize("wrap", [lambda hook: hook, functools.partial])
def test_fsdps_hook_on_what_a_model_returns_makes_no_logits_and_fires_if_they_are_made(wrap):
    """It waits for backward to begin. The loss beside the logits has it, too."""
    logits, _ = head()
    F.cross_entropy(logits.view(-1, VOCABULARY), TARGET)
    fired = []

    def pre_backward(gradient):
        fired.append(gradient)

    pre_backward.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    logits.register_hook(wrap(pre_backward))
    logits.register_hook(wrap(pre_backward)).remove()
    assert logits.is_lazy
    (logits + 1).sum().backward(retain_graph=True)
    assert len(fired) == 1
    logits.register_hook(wrap(pre_backward))
    (logits + 1).sum().backward()
    assert len(fired) == 3


def test_targets_are_those_that_pytorch_takes():
    logits, whole = head()
    bytes_ = torch.tensor([1, 2, 3, 10, 0, 2], dtype=torch.uint8)
    assert torch.equal(
        F.cross_entropy(logits.view(-1, VOCABULARY), bytes_), F.cross_entropy(whole.view(-1, VOCABULARY), bytes_)
    )
    for target in (TARGET[:4], TARGET.int()):
        for each in head():
            with pytest.raises((ValueError, RuntimeError), match=r"batch_size|Long"):
                F.cross_entropy(each.view(-1, VOCABULARY), target)
