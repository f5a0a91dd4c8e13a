"""When a region is captured, how often that is tried, and what regions that are alike share."""

import os
import textwrap
from types import FunctionType

import capture_testing
import pytest
import torch
import torch.nn.functional as F
from bodies.modules import counts_if_not_compiled
from capture_testing import SIZE, STEPS_TO_SETTLE, Around, Layers, Twins, body, linear, rule, stepping, tokens, train
from engine_testing import RMSNorm
from tiers import by_default, slow
from torch import Tensor, nn

import recompute
from recompute.compiled import captured_graph, captured_region
from recompute.compiled.calls import Call, Use
from recompute.compiled.region_record import WARMUP_FRAMES
from recompute.compiled.torch_functions import function_of
from recompute.engine.cut.layout import Layout
from recompute.kernels import launch, norm_ops  # noqa: F401  # registers ops


@pytest.fixture
def traced(monkeypatch):
    """The graphs that torch's frontend takes."""
    graphs = []
    compile_graph = captured_graph.GuardedGraphs._compile

    def count(self, module, given):
        graphs.append(module)
        return compile_graph(self, module, given)

    monkeypatch.setattr(captured_graph.GuardedGraphs, "_compile", count)
    return graphs


def test_equal_layers_are_traced_once_and_share_a_program(traced):
    twins = Twins(Layers(4), rule("layers.*")).settle(train(tokens()))
    assert len(traced) == 1
    assert len({id(program) for region in twins.regions for program in region.programs}) == 1


def test_a_region_goes_from_state_to_state_and_its_program_is_the_one_in_the_page():
    twins = Twins(Around(body(lambda self, x: torch.sin(x * 2))))
    (region,), states = twins.regions, []
    for _ in range(STEPS_TO_SETTLE):
        states.append(type(region.state).__name__)
        twins.step(train(tokens()))
    assert list(dict.fromkeys(states)) == ["Taping", "RecordingNext", "Observing", "Captured"]
    (program,) = region.programs
    page = textwrap.dedent(str(captured_region.__doc__).partition("whose backward reads ``x * 2``:\n\n")[2])
    assert page.strip() == f"{program.forward.source}\n\n{program.backward.source}"

    region.refuse("somebody says so")
    twins.step(train(tokens()))
    assert (type(region.state).__name__, region.failure) == ("Refused", "somebody says so")


def test_norms_in_captured_code_launch_by_plans(device, monkeypatch):
    """The implementation of a norm's kernel runs once for each call in the code: then that call has a plan."""
    runs = []
    for op, run in [each for each in launch.IMPLEMENTATIONS.items() if "_norm_" in str(each[0])]:
        counted = lambda *arguments, run=run: (runs.append(run), run(*arguments))[1]  # noqa: E731
        monkeypatch.setitem(launch.IMPLEMENTATIONS, op, counted)
    norms = {"rms": nn.RMSNorm(SIZE), "layer": nn.LayerNorm(SIZE)}
    block = body(lambda self, x: x + self.down(self.layer(self.up(self.rms(x)))), **norms, up=linear(), down=linear())
    net, step = Around(block, before=linear()).to(device), train(tokens().to(device))
    recompute.apply(net, rule(via="kernel"))
    for _ in range(STEPS_TO_SETTLE + capture_testing.WATCHED_STEPS):
        step(net)
    has_plans, before = launch.uses_triton(torch.empty(1, device=device)), len(runs)
    step(net)  # there are six: in forward, again in backward, and the backward of two norms
    assert (before, len(runs)) == ((6, 6) if has_plans else (before, before + 6))


def test_a_region_is_not_captured_before_it_has_settled(traced):
    twins, step = Twins(Around(nn.GELU(), before=linear())), train(tokens())
    twins.steps(step, WARMUP_FRAMES - 1)
    assert traced == []
    assert "captured" not in twins.handle.explain(wide=True)
    twins.settle(step)
    assert len(traced) == 1
    assert "inside: 1 of 1 run as captured code" in twins.handle.explain(wide=True)


def test_capture_false_stays_on_the_tape(traced):
    twins = Twins(Around(linear()), rule(capture=False))
    twins.steps(train(tokens()), 10)
    assert traced == []
    assert not twins.is_captured


def test_guards_that_always_fail_are_not_traced_for_ever(traced):
    def forward(self, x):
        self.count += 1
        return F.gelu(self.lin(x)) * self.count

    twins, step = Twins(Around(body(forward, lin=linear(), count=0))), train(tokens())
    twins.steps(step, captured_region.MAX_MISSES + 20)
    assert len(traced) <= 2 * captured_region.MAX_GRAPHS
    count = len(traced)
    twins.steps(step, 20)
    assert len(traced) == count
    assert not twins.is_captured
    assert "matched none of its captured graphs" in twins.why_not


def test_shapes_that_always_differ_are_not_traced_for_ever(traced):
    twins = Twins(Around(nn.Sequential(linear(), nn.GELU())))
    for rows in range(2, 40):
        twins.steps(train(tokens(rows, SIZE)), 2)
    assert len(traced) <= 2 * captured_region.MAX_GRAPHS


TURNS = {
    "some rows": lambda module, x, is_masked: module(x[:3] if is_masked else x),
    "a flag": lambda module, x, is_masked: module(x, is_masked=is_masked),
    "transposed": lambda module, x, is_masked: module(x.t().contiguous().t() if is_masked else x * 1),
    "what takes no gradient": lambda module, x, is_masked: module(x.detach() if is_masked else x),
}


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("call", by_default(TURNS, "some rows", "a flag", "what takes no gradient"))
def test_two_kinds_of_calls_that_take_turns_are_both_captured(call, action):
    def forward(self, x, is_masked=False):
        y = F.gelu(self.linear(self.norm(x)))
        return y.masked_fill(y > 1, 0.5) if is_masked else y * torch.sigmoid(y)

    step = stepping(tokens(), lambda module, x: [call(module, x, False), call(module, x, True)])
    inside = body(forward, norm=nn.LayerNorm(SIZE), linear=linear())
    twins = Twins(Around(inside), {"rules": [{"match": "inside", "action": action}]})
    twins.steps(step, 8)
    assert twins.runs_code(step) == 2


class Adapted(nn.Module):
    """A frozen Linear with adapters, one of which is active."""

    def __init__(self, names):
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.adapters = nn.ModuleDict({name: nn.Linear(SIZE, SIZE, bias=False) for name in names})
        self.active = ""

    def forward(self, x):
        return self.base(x) + self.adapters[self.active](x) if self.active in self.adapters else self.base(x)


def activate(model, name):
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = name
            for each, adapter in module.adapters.items():
                adapter.requires_grad_(each == name)


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("of_second", [*slow("ab"), "b"])
def test_adapters_that_take_turns_are_captured_in_each_layer(of_second, action):
    def forward(self, x):
        return x + self.second(F.gelu(self.first(self.norm(x))))

    def layer():
        return body(forward, norm=nn.LayerNorm(SIZE), first=Adapted("ab"), second=Adapted(of_second))

    layers = nn.Sequential(layer(), layer())
    twins = Twins(Around(layers), {"rules": [{"match": "inside.*", "action": action}]})
    for step in range(14):
        twins.both(lambda model, step=step: activate(model, "ab"[step % 2]))
        count = twins.runs_code(train(tokens()))
        assert count == 2 or step < 12


def test_a_forward_that_the_frontend_cannot_take_is_tried_a_few_times(traced):
    def forward(self, x):
        torch._dynamo.graph_break()
        return F.gelu(self.lin(x))

    twins = Twins(Around(body(forward, lin=linear())))
    twins.steps(train(tokens()), 20)
    assert traced == []
    assert twins.why_not


def test_graphs_that_never_go_backward_leave_it_on_the_tape():
    x = tokens()
    twins = Twins(Around(nn.Sequential(linear(), nn.GELU())))
    twins.steps(lambda module: [module(x)], 10)
    assert not twins.is_captured
    twins.step(train(x))


def test_the_settings_of_torchs_frontend_are_as_before():
    before = dict(torch._dynamo.config.get_config_copy()) if hasattr(torch, "_dynamo") else {}
    Twins.captured(linear(), tokens())
    assert torch._dynamo.config.get_config_copy() == before
    assert not torch.compiler.is_compiling()


def test_the_frontend_is_reset_afterwards():
    step = train(tokens())
    twins = Twins(Around(RMSNorm())).settle(step)
    torch._dynamo.reset()
    assert twins.runs_code(step) == 0
    twins.steps(step, 2)
    assert twins.runs_code(step) == 1


def test_an_error_of_the_code_itself_while_it_is_watched_comes_as_without_a_policy():
    """What it drew until then is drawn again: the random stream goes on as in plain PyTorch."""

    def forward(self, x):
        return self.lin(F.dropout(x, 0.5)) @ self.other

    module = body(forward, lin=linear())
    module.other = torch.eye(SIZE)
    twins = Twins(Around(module))
    step = train(tokens())
    twins.steps(step, 3)
    for one in (twins.under, twins.plain):
        one.inside.other = torch.ones(SIZE + 1, 1)
        torch.manual_seed(3)
        with pytest.raises(RuntimeError, match="shape"):
            one(tokens())
    twins.under.inside.other = twins.plain.inside.other = torch.eye(SIZE)
    twins.settle(step)


@pytest.mark.parametrize("package", [torch, recompute], ids=["torch", "recompute"])
def test_code_in_a_folder_beside_torch_or_this_package_is_a_users(package):
    """The ops that torch and this package choose by the question are compared. What other code does is not."""
    folder = os.path.dirname(package.__file__)  # site-packages/torch, beside site-packages/torchvision
    code = counts_if_not_compiled.__code__.replace(co_filename=f"{folder}vision/model.py")
    forward = FunctionType(code, counts_if_not_compiled.__globals__)
    twins = Twins(Around(body(forward, linear=linear(), seen=[])))
    twins.settle(train(tokens()), captured=False)
    assert "whether torch.compile traces it" in twins.why_not


aten, X = torch.ops.aten, Use(0, Layout.of(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("op", "arguments", "options", "function"),
    [
        (aten.mul.Tensor, (X, 2.0), {}, Tensor.mul),
        (aten.mul.Scalar, (X, 2.0), {}, aten.mul.Scalar._op),  # torch.mul would make a call of mul.Tensor
        (aten.silu.default, (X,), {}, torch._C._nn.silu),
        (aten._to_copy.default, (X,), {"dtype": torch.bfloat16}, Tensor.to),
        (aten._to_copy.default, (X,), {"dtype": torch.float32}, aten._to_copy.default._op),  # ``to`` makes no copy
        (aten.rand_like.default, (X,), {}, aten.rand_like.default._op),
    ],
)
def test_captured_code_calls_torchs_function_where_that_makes_the_recorded_call(op, arguments, options, function):
    assert function_of(Call(op, arguments, options, (1,), (), is_sequence=False)) == function
