"""What the tests of all ops have in common: dtypes, inputs, runs, errors against float64, and who sees which op."""

from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from engine_testing import function_of
from tiers import slow
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recompute.kernels import launch

FLOAT32_ROUNDING = 2**-24
INTERPRETERS_ROUNDING = 2**-23
"""NumPy adds rows one after the other, where the kernels that it interprets add them in a tree."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CAN_INTERPRET = not torch.cuda.is_available() and find_spec("triton") is not None
IGNORED = -100
CAPPED = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}

each_device_of_compiled_code = pytest.mark.parametrize(
    "device",
    ["reference", *(slow("interpreter") if CAN_INTERPRET else []), pytest.param("cuda", marks=pytest.mark.gpu)],
    indirect=True,
)
"""A compiler sees the same ops whatever runs in them: the interpreter is slow here, but for one op's test."""

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

EAGER_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
}
LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "expanded": lambda t: t[..., :1, :].expand(t.shape),
    "expanded scalar": lambda t: t.flatten()[0].expand(t.shape),
}


def make(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative_error(value, exact):
    return ((value.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def same_bits(left, right):
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(left, right, strict=True))


def doubled(inputs):
    return [None if each is None else each.detach().double().requires_grad_(each.requires_grad) for each in inputs]


def listed(output):
    return [output] if isinstance(output, Tensor) else list(output)


def like(outputs, seed=50):
    """Gradients for outputs."""
    return [make(*each.shape, seed=seed + index).to(each) for index, each in enumerate(outputs)]


def run(function, inputs, dtype=None):
    """The outputs, and the gradients of all inputs that are trained, for gradients that have ``dtype``'s precision."""
    outputs = listed(function(*inputs))
    given = [each.to(dtype or each.dtype).to(each) for each in like(outputs)]
    pairs = [pair for pair in zip(outputs, given, strict=True) if pair[0].requires_grad]
    differentiable, given = zip(*pairs, strict=True)
    trained = [each for each in inputs if each is not None and each.requires_grad]
    return [*(each.detach() for each in outputs), *torch.autograd.grad(differentiable, trained, given)]


def assert_as_good_as(op, eager, inputs, kind="norm"):
    """Outputs and gradients of ``op`` are as near to float64's as those of ``eager`` are.

    The error of n elements is a sample. Of matrix products, which sum in other orders, the ratio of two samples strays
    from the true one by about 1 / sqrt(n).
    """
    found, peers = run(op, inputs), run(eager, inputs)
    exact = run(eager, doubled(inputs), found[0].dtype)
    x = inputs[0]
    is_interpreted = launch.uses_triton(x) and not x.is_cuda
    is_one_sample = x.is_cuda and x.shape[:-1].numel() == 1  # all of a row errs with its rstd
    is_norm = kind == "norm" and (is_interpreted or is_one_sample)
    slack = INTERPRETERS_ROUNDING if is_norm else FLOAT32_ROUNDING
    for index, (value, peer, truth) in enumerate(zip(found, peers, exact, strict=True)):
        assert (value.dtype, value.shape) == (peer.dtype, truth.shape)
        factor = 1.05 + (3 / max(value.numel(), 1) ** 0.5 if kind in ("mlp", "head") else 0.0)
        if kind == "head" and x.dtype is torch.float32:
            factor = max(factor, 1.5)  # the matrix products err more than all else, and in another order of sums
        assert relative_error(value, truth) <= factor * relative_error(peer, truth) + slack, f"value {index}"


def eager_cross_entropy(
    logits,
    target,
    *,
    softcap=None,
    z_loss=0.0,
    class_weights=None,
    reduction="mean",
    ignore_index=IGNORED,
    label_smoothing=0.0,
):
    """As in Hugging Face's models, in float32 (or float64) from the logits on."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = None if class_weights is None else class_weights.to(logits.dtype)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, target, weights, reduction=reduction, **options)
    counts = target != ignore_index
    squares = z_loss * logits.logsumexp(-1).square() * counts
    if reduction == "none":
        return loss + squares
    divisor = 1
    if reduction == "mean":
        divisor = counts.sum() if weights is None else (weights[target.clamp_min(0)] * counts).sum()
    return loss + squares.sum() / divisor


def eager_scores(logits, scale=1.0, softcap=None, temperature=1.0):
    """What a softmax is taken of, in float32 (or float64) from the logits on."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return (scores if softcap is None else softcap * torch.tanh(scores / softcap)) / temperature


def eager_log_probs(logits, target, *, entropy=False, **scores):
    """As people write it; 0 where a target is ignored."""
    words = target if target.dim() == logits.dim() else target[..., None]
    counts, log_p = words != IGNORED, eager_scores(logits, **scores).log_softmax(-1)
    found = log_p.gather(-1, words.where(counts, 0)).where(counts, 0.0).view(target.shape)
    return (found, -(log_p.exp() * log_p).sum(-1).where(counts.any(-1), 0.0)) if entropy else found


def eager_divergence(student, teacher, kind, beta=0.5):
    """Of scores, as TRL and Liger define it."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "total_variation":
        return 0.5 * (p - q).abs().sum(-1)
    log_m = ((1 - beta) * p + beta * q).log()
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)


def flops(function, inputs):
    """Of forward and of backward."""
    with FlopCounterMode(display=False) as forward:
        outputs = listed(function(*inputs))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
    return forward.get_total_flops(), backward.get_total_flops()


class Work(TorchDispatchMode):
    """Counts matrix products and our own ops; of the latter it keeps arguments, as they were, and results too."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.calls = []
        self.others = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if function._opname in {"mm", "addmm", "bmm", "matmul"} or function.namespace == "recompute":
            self.counts[function._opname] += 1
        if function.namespace == "recompute":
            self.calls.append((function, args, results))
        else:
            self.others.append(str(function))
        return results

    def results_of(self, name):
        (results,) = (results for called, _, results in self.calls if called._opname == name)
        return results

    def check(self, *but):
        """``opcheck`` our ops that were called. but: checks to leave out."""
        utilities = [each for each in ("test_schema", "test_faketensor") if each not in but]
        for op, arguments, _ in self.calls:
            arguments = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
            torch.library.opcheck(op, arguments, test_utils=utilities)

    def arguments_of(self, name):
        (arguments,) = (arguments for called, arguments, _ in self.calls if called._opname == name)
        return arguments


class NoWholeLogits(TorchDispatchMode):
    """Sees the largest tensor that any op makes, within our own ops, too."""

    largest_nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        implementation = launch.IMPLEMENTATIONS.get(function)
        if implementation is None:
            results = function(*args, **(kwargs or {}))
        else:
            with self:
                results = implementation(*args)
        sizes = [each.untyped_storage().nbytes() for each in tree_leaves(results) if isinstance(each, Tensor)]
        self.largest_nbytes = max(self.largest_nbytes, *sizes, 0)
        return results


NoGradient = function_of(lambda x: x.clone(), lambda gradient: None, saves=lambda *_: ())
