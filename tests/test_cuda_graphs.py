"""CUDA graphs under a policy: of compiled code, of a module, of a whole step, and what is refused in them."""

from contextlib import contextmanager

import pytest
import torch
from corpus import counting
from tiny import rule, rules
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.compiled.generated.generated_kernel import wait_for_kernels
from recompute.engine import rng
from recompute.errors import RngError

WIDTH = 64


class Block(nn.Module):
    def __init__(self, noise=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.noise = noise

    def forward(self, x):
        if self.noise:
            x = x * (1 + self.noise * torch.rand_like(x))
        return x + self.down(F.gelu(self.up(self.norm(x))).exp().sin())


def blocks(device="cuda", noise=0.0):
    torch.manual_seed(0)
    return nn.Sequential(Block(noise), Block(noise)).to(device)


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, WIDTH, generator=generator).cuda().requires_grad_()


def step(model, x, parameters):
    """The loss and the gradients, copies of them."""
    loss = model(x).square().mean()
    return [each.detach().clone() for each in (loss, *torch.autograd.grad(loss, [x, *parameters]))]


DRAWS_NOTHING = {
    "hooks": rules(rule("Block", "recompute", via="hook")),
    "gemms again": rules(rule("Block", "recompute", via="hook", rerun="gemm", price=1e12)),
}


class GeneratorInAGraph:
    device = "cuda:0"

    def initial_seed(self):
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")


@contextmanager
def in_a_graph(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(rng.CpuSource, "state", lambda _: rng.CudaSource(GeneratorInAGraph()).state())
        yield


@pytest.mark.parametrize("steps_before", [1, 8])
@pytest.mark.parametrize("action", ["checkpoint", "recompute"])
def test_what_a_captured_graph_refuses_names_the_module_and_what_to_do(action, steps_before, monkeypatch):
    model = blocks("cpu", noise=0.5)
    handle = recompute.apply(model, rules(rule("Block", action)))
    for _ in range(steps_before):
        model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    assert ("2 of 2 run as captured code" in handle.explain(wide=True)) == (steps_before > 1)
    with (
        in_a_graph(monkeypatch),
        pytest.raises(RngError, match=r'^0 \(Block\): .* CUDA graph .*\(mode="reduce-overhead"\).* no dropout'),
    ):
        model(torch.randn(4, WIDTH, requires_grad=True))


def test_code_that_draws_nothing_runs_in_a_graph(monkeypatch):
    """To take the code, states of generators would be read. That happens outside of graphs alone."""
    model, x = blocks("cpu"), torch.randn(4, WIDTH, requires_grad=True)

    def frames_as_code(steps=1):
        with counting() as frames:
            for _ in range(steps):
                model(x).sum().backward()
        return frames()

    with recompute.apply(model, DRAWS_NOTHING["hooks"]):
        assert frames_as_code(3) == 0
        with in_a_graph(monkeypatch):
            assert frames_as_code(4) == 0
        assert frames_as_code(4) > 0
        with in_a_graph(monkeypatch):
            assert frames_as_code() == 2


def test_what_runs_again_in_a_graph_is_not_timed(monkeypatch):
    """Events that are recorded while a graph is captured measure no time."""
    model, x = blocks("cpu"), torch.randn(4, WIDTH, requires_grad=True)
    with recompute.apply(model, DRAWS_NOTHING["hooks"]) as handle:
        handle.time_regeneration()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        model(x).sum().backward()
    assert handle.stats().regenerations > 0
    assert handle.stats().regenerating_seconds == 0


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [*DRAWS_NOTHING.values(), rules(rule("Block"))], ids=[*DRAWS_NOTHING, "checkpoint"])
def test_compiled_code_has_cuda_graphs_under_a_policy(policy):
    torch.compiler.reset()
    skips = torch._dynamo.utils.counters["inductor"]
    skips.clear()
    outcomes = []
    for given in (None, policy):
        model = blocks()
        if given is not None:
            recompute.apply(model, given)
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        found = []
        for seed in range(5):  # it warms up, captures, and replays
            torch.compiler.cudagraph_mark_step_begin()
            found.append(step(compiled, inputs(seed), list(model.parameters())))
        outcomes.append(found)
    torch.testing.assert_close(*outcomes)
    assert skips["cudagraph_skips"] == 0
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", DRAWS_NOTHING.values(), ids=DRAWS_NOTHING)
def test_a_graphed_module_regenerates_in_its_graph(policy):
    plain, model = blocks(), blocks()
    recompute.apply(model, policy)
    graphed = torch.cuda.make_graphed_callables(model[0], (inputs(9),))
    for seed in range(3):
        found = step(graphed, inputs(seed), list(model[0].parameters()))
        torch.testing.assert_close(found, step(plain[0], inputs(seed), list(plain[0].parameters())), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("steps_before", [3, 8], ids=["by the tape", "as code"])
@pytest.mark.parametrize("policy", DRAWS_NOTHING.values(), ids=DRAWS_NOTHING)
def test_a_captured_step_regenerates_in_its_graph(policy, steps_before):
    plain, model, x = blocks(), blocks(), inputs(9)
    recompute.apply(model, policy)
    parameters = list(model.parameters())
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(steps_before):
            step(model, x, parameters)
            wait_for_kernels()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with counting() as frames, torch.cuda.graph(graph):
        found = step(model, x, parameters)
    assert frames() == (2 if steps_before > 3 else 0)
    for seed in range(3):
        with torch.no_grad():
            x.copy_(inputs(seed))
        graph.replay()
        torch.testing.assert_close(found, step(plain, inputs(seed), list(plain.parameters())), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("action", ["checkpoint", "recompute"])
def test_a_region_that_would_draw_again_is_refused_by_name_in_a_capture(action):
    model, x = blocks(noise=0.5), inputs(9)
    recompute.apply(model, rules(rule("Block", action)))
    step(model, x, list(model.parameters()))
    with pytest.raises(RngError, match=r"^0 \(Block\): .*captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)
