"""What the tests of cross-entropies share: inputs, what Hugging Face's models compute, and how errors are judged."""

import itertools

import pytest
import torch
from kernel_testing import CAN_INTERPRET, FLOAT32_ROUNDING, IGNORED, doubled, eager_cross_entropy, make, relative_error
from torch.nn import functional as F

from recompute.kernels.cross_entropy import CrossEntropy
from recompute.kernels.linear_cross_entropy import linear_cross_entropy

M, H, V = 12, 24, 600

ON_CPU = pytest.mark.parametrize("device", ["reference", *(["interpreter"] if CAN_INTERPRET else [])], indirect=True)


def make_inputs(device, dtype=torch.float32, tokens=M, hidden=H, vocabulary=V):
    """hidden, weight and bias; and a target, every fifth of which is ignored."""
    made = [make(tokens, hidden), make(vocabulary, hidden, seed=1) * (4 / hidden) ** 0.5, make(vocabulary, seed=2)]
    target = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(3))
    target[::5] = IGNORED
    return [tensor.to(device, dtype).requires_grad_() for tensor in made], target.to(device)


def assert_every_two_meet(names, rows):
    """Every two values of two options are in one row at least."""
    for a, b in itertools.combinations(range(len(names)), 2):
        values = [{row[index] for row in rows} for index in (a, b)]
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(*values)), (names[a], names[b])


def eager(hidden, weight, target, bias=None, **options):
    """As in Hugging Face's models, in float32 (or float64) from the logits on."""
    return eager_cross_entropy(F.linear(hidden, weight, bias), target, **options)


def run(function, inputs, target, bias=True, scale=1.0, **options):
    """The loss, and the gradients of hidden, weight and bias, of the loss scaled."""
    hidden, weight, bias_ = inputs
    loss = function(hidden, weight, target, bias_ if bias else None, **options)
    loss = loss.loss if isinstance(loss, CrossEntropy) else loss
    gradient = make(*loss.shape, seed=9).to(loss) * scale
    return [loss.detach(), *torch.autograd.grad(loss, inputs if bias else inputs[:2], gradient)]


def assert_as_good_as_eager(inputs, target, ours=linear_cross_entropy, **options):
    settings = {key: options.pop(key) for key in ("logits_bytes", "hold_logits", "return_logits") if key in options}
    if options.get("reduction", "mean") == "mean":  # scaled as float16 needs: its gradients are subnormal otherwise
        options["scale"] = target.numel()
    found, peer = run(ours, inputs, target, **options, **settings), run(eager, inputs, target, **options)
    exact = run(eager, doubled(inputs), target, **options)
    # A sum's errors may cancel in one and not in the other: measured by what each token adds.
    tokens = {**options, "reduction": "none"}
    peers, truths = run(eager, inputs, target, **tokens)[0], run(eager, doubled(inputs), target, **tokens)[0]
    bound = 1.05 * relative_error(peers, truths) + 2 * FLOAT32_ROUNDING
    assert relative_error(found[0], exact[0]) <= bound
    for value, other, truth in zip(found[1:], peer[1:], exact[1:], strict=True):
        assert value.dtype is other.dtype
        # In float32 the matrix products err more than all else, and in another order of sums by other amounts. On CUDA
        # they sum in other orders in few bits too: the ratio of two samples of n errors strays by about 1 / sqrt(n).
        strays = 3 / max(value.numel(), 1) ** 0.5 if value.is_cuda else 0.0
        factor = 1.5 if inputs[0].dtype is torch.float32 else 1.05 + strays
        assert relative_error(value, truth) <= factor * relative_error(other, truth) + FLOAT32_ROUNDING
