"""A head whose words the ranks of a group share: losses without logits, and without gathering any."""

import itertools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine_testing import module_of
from tiers import slow
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from two_processes import TwoProcesses

import recompute
from recompute.errors import KernelError
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.linear_log_probs import linear_log_probs

TOKENS, HIDDEN, WORDS = 12, 24, 601
OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "scale": 1.5, "temperature": 0.7},
    "weights": {"class_weights": torch.arange(WORDS) / WORDS, "label_smoothing": 0.1, "logits_bytes": 0},
    "extras": {"return_argmax": True, "return_max_logit": True, "reduction": "none", "logits_bytes": 0},
}


def operands(words=WORDS):
    """hidden, weight, bias, and an adapter; and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, HIDDEN), (words, HIDDEN), (words,), (TOKENS, 4), (words, 4)]
    target = torch.randint(0, words, (TOKENS,), generator=generator)
    target[::5] = -100
    return [0.5 * torch.randn(shape, generator=generator) for shape in shapes], target


def shards(tensors):
    """Those of this rank, to be trained."""
    rank, of_words = dist.get_rank(), (1, 2, 4)
    parts = [each.chunk(2)[rank] if place in of_words else each for place, each in enumerate(tensors)]
    return [each.clone().requires_grad_() for each in parts]


def results(function, operands, target, **options):
    """What an op returns, and the gradients of all operands."""
    hidden, weight, bias, *adapter = operands
    found = function(hidden, weight, target, bias, adapter=tuple(adapter) or None, **options)
    found = [each for each in found if each is not None] if isinstance(found, tuple) else [found]
    gradients = [torch.linspace(0.5, 2.0, each.numel()).view(each.shape) for each in found]
    pairs = [(each, gradient) for each, gradient in zip(found, gradients, strict=True) if each.requires_grad]
    return [*found, *torch.autograd.grad([one for one, _ in pairs], operands, [other for _, other in pairs])]


def assert_as_whole(found, whole):
    """Outputs are those of all words, and gradients this rank's part."""
    for one, other in zip(found, whole, strict=True):
        expected = other if one.shape == other.shape else other.chunk(2)[dist.get_rank()]
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


def cross_entropy_is_as_whole(option, words):
    """Returns the elements of each of the sums between ranks."""
    (tensors, target), sums = operands(words), []
    options = {key: value[:words] if key == "class_weights" else value for key, value in OPTIONS[option].items()}
    whole = results(linear_cross_entropy, [each.requires_grad_() for each in tensors], target, **options)
    own = shards([each.detach() for each in tensors])
    reduce = dist.all_reduce

    def noted(tensor, *args, **kwargs):
        sums.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted):
        found = results(linear_cross_entropy, own, target, group=dist.group.WORLD, vocabulary=words, **options)
    assert_as_whole(found, whole)
    return sums


def log_probs_are_as_whole(several, entropy):
    tensors, target = operands()
    if several:
        target = torch.stack([target, target.roll(1), target.flip(0)], -1)
    options = {"entropy": entropy, "temperature": 0.7}
    whole = results(linear_log_probs, [each.requires_grad_() for each in tensors], target, **options)
    own = shards([each.detach() for each in tensors])
    found = results(linear_log_probs, own, target, group=dist.group.WORLD, vocabulary=WORDS, **options)
    assert_as_whole(found, whole)


def dtensors_are_as_whole(shares_tokens):
    """Their own placement says which words a rank has."""
    mesh = init_device_mesh("cpu", (2,))
    (hidden, weight, bias, *_), target = operands()
    whole = results(linear_log_probs, [each.requires_grad_() for each in (hidden, weight, bias)], target, entropy=True)
    given = [distribute_tensor(each.detach(), mesh, [Shard(0)]).requires_grad_() for each in (hidden, weight, bias)]
    if not shares_tokens:
        given[0] = hidden.detach().clone().requires_grad_()
    found = results(linear_log_probs, given, target, entropy=True)
    found = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    assert_as_whole(found, whole)
    replicated = distribute_tensor(weight.detach(), mesh, [Replicate()])
    torch.testing.assert_close(linear_log_probs(hidden, replicated, target), linear_log_probs(hidden, weight, target))


def trains_under_fsdp(parts):
    """With weights shared by words, and by FSDP2 among ranks that have ``parts`` parts of the tokens."""

    def forward(self, hidden, target):
        return linear_cross_entropy(self.body(hidden), self.head.weight, target, reduction="sum")

    (hidden, *_), target = operands()
    models = []
    for of_mean in (1, parts):  # FSDP takes the mean of the parts' gradients
        torch.manual_seed(0)
        model = module_of(forward, body=nn.Linear(HIDDEN, HIDDEN), head=nn.Linear(HIDDEN, WORDS, bias=False))
        if models:
            mesh = init_device_mesh("cpu", (parts, 2), mesh_dim_names=("data", "words"))
            parallelize_module(model, mesh["words"], {"head": ColwiseParallel()})
            fully_shard(model, mesh=mesh["data"])
            hidden, target = (each.chunk(parts)[mesh.get_local_rank("data")] for each in (hidden, target))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            (of_mean * model(hidden, target)).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append([each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()])
    torch.testing.assert_close(*models)


def shared():
    """A body, and a loss of words that two ranks share."""

    def forward(self, hidden, target):
        given = self.body(hidden), self.weight, target
        return linear_cross_entropy(*given, group=dist.group.WORLD, vocabulary=WORDS).sin()  # needs it in backward

    layers = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
    return module_of(forward, body=layers, weight=nn.Parameter(operands()[0][1].chunk(2)[dist.get_rank()].clone()))


def runs_in_a_region(rule):
    """Gradients are those without one. Returns the sums between ranks in forward and in backward, of each step."""
    (hidden, *_), target = operands()
    reduce, counts, models = dist.all_reduce, [], []
    for is_region in (False, True):
        torch.manual_seed(0)
        model, sums, steps = nn.ModuleDict({"shared": shared()}), [], []
        if is_region:
            recompute.apply(model, {"rules": [{"match": "shared", **rule}]})

        def noted(*args, sums=sums, **kwargs):
            sums.append(1)
            return reduce(*args, **kwargs)

        with mock.patch.object(dist, "all_reduce", noted):
            for _ in range(6):
                loss = model["shared"](hidden, target)
                forward = len(sums)
                steps += [loss, *torch.autograd.grad(loss, list(model.parameters()))]
                counts.append((forward, len(sums) - forward))
                sums.clear()
        models.append(steps)
    torch.testing.assert_close(*models, rtol=0, atol=0)
    return counts[6:]


def assert_refusals():
    (hidden, weight, bias, *_), target = operands()
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (2,))
    half = weight.chunk(2)[dist.get_rank()].clone().requires_grad_()

    def twice():
        loss = linear_cross_entropy(hidden, half, target, group=group, vocabulary=WORDS)
        torch.autograd.grad(loss, half, create_graph=True)

    columns, rows = (distribute_tensor(weight, mesh, [Shard(dim)]) for dim in (1, 0))
    shared = {"group": group, "vocabulary": WORDS}
    wrong = {
        "weight has 100 rows on rank": lambda: linear_cross_entropy(hidden, weight[:100], target, **shared),
        "vocabulary is 7, but weight has 601 words": lambda: linear_log_probs(hidden, weight, target, vocabulary=7),
        "expected Shard(0) over a mesh of one dimension": lambda: linear_log_probs(hidden, columns, target),
        "weight is a DTensor, and bias is not": lambda: linear_log_probs(hidden, rows, target, bias),
        "expected a DTensor, too": lambda: linear_log_probs(
            distribute_tensor(hidden, mesh, [Shard(0)]), weight, target
        ),
        "return_logits=True is not possible with group": lambda: linear_cross_entropy(
            hidden, half, target, **shared, return_logits=True
        ),
        "expected create_graph=False": twice,
    }
    for words, call in wrong.items():
        with pytest.raises(KernelError, match=re.escape(words)):
            call()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        *(default := [("plain", 2), ("all", WORDS), ("weights", 600), ("extras", WORDS)]),
        *slow(*(each for each in itertools.product(OPTIONS, [WORDS, 600, 2]) if each not in default)),
    ],
)
def test_a_cross_entropy_is_that_of_all_words(two_processes, option, words):
    for sums in two_processes.run(cross_entropy_is_as_whole, option, words):
        forward, backward = sums[:-2], sums[-2:]
        assert len(forward) == (3 if option == "extras" else 2)
        assert max(forward) <= 3 * TOKENS
        assert backward == [TOKENS * HIDDEN, TOKENS * 4]  # gradients of hidden states and of an adapter's


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_log_probabilities_are_those_of_all_words(two_processes, several, entropy):
    two_processes.run(log_probs_are_as_whole, several, entropy)


@pytest.mark.parametrize("shares_tokens", [False, True])
def test_a_dtensor_says_itself_which_words_it_has(two_processes, shares_tokens):
    two_processes.run(dtensors_are_as_whole, shares_tokens)


def test_it_trains_under_fsdp2(two_processes):
    two_processes.run(trains_under_fsdp, 1)


@pytest.mark.slow
def test_it_trains_under_fsdp2_of_two_ranks_times_words_of_two(tmp_path):
    processes = TwoProcesses(tmp_path, count=4)
    try:
        processes.run(trains_under_fsdp, 2)
    finally:
        processes.close()


@pytest.mark.parametrize("rule", [{"action": "recompute"}, {"action": "recompute", "rerun": ["gemm"], "price": 0}])
def test_a_region_never_sums_between_ranks_again(two_processes, rule):
    for counts in two_processes.run(runs_in_a_region, rule):
        assert counts == [(2, 1)] * 6


def test_what_does_not_fit_is_refused(two_processes):
    two_processes.run(assert_refusals)
