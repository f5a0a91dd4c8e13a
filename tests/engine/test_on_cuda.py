"""The behaviours that need a CUDA device to show: its allocator, its generators, its streams, its atomics."""

from contextlib import nullcontext

import engine_testing
import pytest
import torch
import torch.nn.functional as F
from engine_testing import HIDDEN, Layer, RMSNorm, Stack, assert_as_without, every_rule, every_tape, holding, loss_of
from torch import nn
from torch.autograd.graph import save_on_cpu

import recompute

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def tokens(*shape, grad=True):
    return torch.randn(*(shape or (64, HIDDEN)), device="cuda").requires_grad_(grad)


def stack(count=3, p=0.25):
    return Stack(count, p).cuda()


@every_tape
def test_the_tape_keeps_what_atomics_added_up_in_whatever_order(rules):
    torch.use_deterministic_algorithms(False)

    def forward(self, x):
        x = self.linear(self.norm(x))
        total = torch.zeros(2, HIDDEN, device="cuda").index_add(0, self.rows, x)
        return total, total.sin()

    model = holding(forward, norm=RMSNorm(), linear=nn.Linear(HIDDEN, HIDDEN)).cuda()
    model.inside.rows = torch.randint(0, 2, (1 << 16,), device="cuda")
    x = tokens(1 << 16, HIDDEN)
    recompute.apply(model, rules)
    for _ in range(3):
        total, result = model(x)
        (found,) = torch.autograd.grad(result.sum(), total)
        assert torch.equal(found, total.cos())


@every_rule
def test_the_graph_dies_on_cuda_without_garbage_collection(rules):
    model, x = stack(), tokens()
    recompute.apply(model, rules)
    loss_of(model(x)).backward()
    with engine_testing.no_garbage_collection():
        before = torch.cuda.memory_allocated()
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        del loss
        assert torch.cuda.memory_allocated() == before


DRAWS = {
    "dropout": lambda self, x: F.dropout(x, 0.5),
    "rand_like": lambda self, x: x * torch.rand_like(x),
    "generator": lambda self, x: x * torch.rand(x.shape, device="cuda", generator=self.generator),
    "both devices": lambda self, x: F.dropout(x, 0.5) * torch.rand(x.shape).cuda() + torch.randn_like(x),
    "attention": lambda self, x: F.scaled_dot_product_attention(*[x.view(1, 4, -1, HIDDEN)] * 3, dropout_p=0.5),
    "forked": lambda self, x: _forked(x),
}


def _forked(x):
    with torch.random.fork_rng(devices=[x.device]):
        torch.cuda.manual_seed(5)
        noise = torch.rand_like(x)
    return F.dropout(x, 0.5) * noise


@every_rule
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
def test_draws_on_two_devices_and_both_streams_go_on_where_they_were(rules, kind, by_name):
    generator, x = torch.Generator("cuda"), tokens()

    def forward(self, x):
        return DRAWS[kind](self, self.norm(x).sin()).exp().sin().reshape(-1, HIDDEN)

    model = holding(forward, norm=RMSNorm()).cuda()

    def run(model):
        model.inside.generator = generator
        generator.manual_seed(3)
        result = model(x=x) if by_name else model(x)
        between = [torch.rand(2), torch.rand(2, device="cuda")]
        grads = [torch.autograd.grad(result.sum(), x, retain_graph=True) for _ in range(2)]
        return result, between, grads, generator.get_state(), torch.rand(2, device="cuda")

    assert_as_without(model, rules, run, drops=kind != "attention")


@every_rule
def test_a_region_that_crosses_devices(rules):
    model = holding(lambda self, x: self.there(self.here(x).cuda()).cpu().sin(), here=Layer(), there=Layer().cuda())
    x = torch.randn(64, HIDDEN, requires_grad=True)

    def run(model):
        result = model(x)
        return [torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)]

    assert_as_without(model, rules, run)


@every_rule
def test_data_parallel_over_all_devices(rules):
    x = tokens()

    def run(model):
        replicated = nn.DataParallel(model)
        for _ in range(2):
            loss_of(replicated(x)).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_as_without(stack(p=0.0), rules, run)


@every_rule
@pytest.mark.parametrize("offloads", [False, True])
def test_streams_on_and_off_give_equal_bits(rules, offloads):
    model, x = stack(), tokens(1 << 11, 8, HIDDEN)

    def run(model, stream):
        torch.manual_seed(1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), save_on_cpu(pin_memory=True) if offloads else nullcontext():
            loss = loss_of(model(x))
        torch.cuda.current_stream().wait_stream(stream)
        grads = torch.autograd.grad(loss, [x, *model.parameters()])
        torch.cuda.synchronize()
        return [loss.detach(), *grads]

    expected = run(model, torch.cuda.current_stream())
    recompute.apply(model, rules)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        for _ in range(3):
            assert all(map(torch.equal, run(model, stream), expected))


@every_rule
@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients_nothing_is_held_on_cuda(rules, way):
    model, x = stack(p=0.0), tokens(grad=False)
    recompute.apply(model, rules)
    with way():
        model(x)
        with engine_testing.no_garbage_collection():
            before = torch.cuda.memory_allocated()
            result = model(x)
            assert torch.cuda.memory_allocated() - before == result.untyped_storage().nbytes()
