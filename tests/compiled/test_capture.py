"""When a region is captured, how often that is tried, and what regions that are alike share."""

import os
import textwrap
import threading
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from capture_testing import (
    SIZE,
    STEPS_TO_SETTLE,
    Around,
    Layers,
    Norm,
    Twins,
    body,
    captured_twins,
    rule,
    stepping,
    tokens,
    train,
)
from tiers import slow
from torch import nn

import recompute
from recompute.compiled import captured_graph, captured_region


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


def test_a_region_is_not_captured_before_it_has_settled(traced):
    twins, step = Twins(Around(nn.GELU(), before=nn.Linear(SIZE, SIZE))), train(tokens())
    for _ in range(captured_region.WARMUP_FRAMES - 1):
        twins.step(step)
    assert traced == []
    assert "captured" not in twins.handle.explain(wide=True)
    twins.settle(step)
    assert len(traced) == 1
    assert "inside: 1 of 1 run as captured code" in twins.handle.explain(wide=True)


def test_capture_false_stays_on_the_tape(traced):
    twins = Twins(Around(nn.Linear(SIZE, SIZE)), rule(capture=False))
    for _ in range(10):
        twins.step(train(tokens()))
    assert traced == []
    assert not twins.is_captured


def test_guards_that_always_fail_are_not_traced_for_ever(traced):
    def forward(self, x):
        self.count += 1
        return F.gelu(self.lin(x)) * self.count

    twins, step = Twins(Around(body(forward, lin=nn.Linear(SIZE, SIZE), count=0))), train(tokens())
    for _ in range(captured_region.MAX_MISSES + 20):
        twins.step(step)
    assert len(traced) <= captured_region.MAX_SHARED_GRAPHS + captured_region.MAX_GRAPHS
    count = len(traced)
    for _ in range(20):
        twins.step(step)
    assert len(traced) == count
    assert not twins.is_captured
    assert "none of its last" in twins.why_not


def test_shapes_that_always_differ_are_not_traced_for_ever(traced):
    twins = Twins(Around(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())))
    for rows in range(2, 40):
        for _ in range(2):
            twins.step(train(tokens(rows, SIZE)))
    assert len(traced) <= captured_region.MAX_SHARED_GRAPHS + captured_region.MAX_GRAPHS


def test_two_shapes_in_turn_are_both_captured():
    twins = captured_twins(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()), tokens())
    other = train(tokens(7, SIZE))
    for _ in range(6):
        twins.step(other)
    assert twins.runs_code(other) == 1
    assert twins.runs_code(train(tokens())) == 1


def on_some_rows(module, x, is_masked):
    return module(x[:3] if is_masked else x)


def with_a_flag(module, x, is_masked):
    return module(x, is_masked=is_masked)


def on_transposed(module, x, is_masked):
    return module(x.t().contiguous().t() if is_masked else x * 1)


def with_what_takes_no_gradient(module, x, is_masked):
    return module(x.detach() if is_masked else x)


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("call", [on_some_rows, with_a_flag, *slow(on_transposed), with_what_takes_no_gradient])
def test_two_kinds_of_calls_that_take_turns_are_both_captured(call, action):
    def forward(self, x, is_masked=False):
        y = F.gelu(self.linear(self.norm(x)))
        return y.masked_fill(y > 1, 0.5) if is_masked else y * torch.sigmoid(y)

    step = stepping(tokens(), lambda module, x: [call(module, x, False), call(module, x, True)])
    inside = body(forward, norm=nn.LayerNorm(SIZE), linear=nn.Linear(SIZE, SIZE))
    twins = Twins(Around(inside), {"rules": [{"match": "inside", "action": action}]})
    for _ in range(8):
        twins.step(step)
    assert twins.runs_code(step) == 2


class Adapted(nn.Module):
    """A frozen Linear with adapters, one of which is active."""

    def __init__(self, names):
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)
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


def test_an_output_whose_graph_reaches_no_input():
    def forward(self, x):
        y = F.gelu(self.linear(x))
        with torch.no_grad():
            view = y.view(x.shape)
        return view * 2 + 1  # torch gives it a graph, which goes nowhere

    step = train(tokens())
    twins = Twins(Around(body(forward, linear=nn.Linear(SIZE, SIZE)))).settle(step, captured=False)
    assert "reach none of its inputs" in twins.why_not


def test_an_output_that_is_a_view_made_without_gradients():
    def forward(self, x):
        y, z = F.gelu(self.linear(x)), self.linear(x * 2)
        with torch.no_grad():
            view = z.view(x.shape)
        return [y, view]

    step = train(tokens())
    twins = Twins(Around(body(forward, linear=nn.Linear(SIZE, SIZE))))
    for _ in range(2 * STEPS_TO_SETTLE):
        twins.step(step)


LOCK, FACTORS = threading.Lock(), {"half": 0.5}


@torch.compiler.disable
def halved(x, factor=None):
    with LOCK:  # as where a table of implementations is read
        factor = FACTORS["half"] if factor is None else factor
    return F.gelu(x) * factor


class Disabled(nn.Module):
    """As some packages keep what they launch from compilers."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(SIZE, SIZE)

    @torch.compiler.disable(recursive=False)
    def inner(self, x):
        return F.silu(self.lin(x))

    @torch.compiler.disable
    def forward(self, x):
        return halved(halved(self.inner(x)), factor=0.25)


def test_what_is_kept_from_compilers_is_captured():
    twins = Twins(Around(nn.Sequential(nn.Linear(SIZE, SIZE), Disabled(), nn.GELU())))
    for _ in range(STEPS_TO_SETTLE):
        twins.step(train(tokens()))
    assert twins.is_captured, twins.why_not


def test_a_forward_that_asks_where_the_class_of_a_parameter_is_from_is_captured():
    """As PEFT's DoRA does."""

    def forward(self, x):
        is_quantized = type(self.lin.weight).__module__.startswith("torchao.")
        return x if is_quantized else F.gelu(self.lin(x))

    twins = Twins(Around(body(forward, lin=nn.Linear(SIZE, SIZE))))
    for _ in range(STEPS_TO_SETTLE):
        twins.step(train(tokens()))
    assert twins.is_captured, twins.why_not


def test_a_forward_that_the_frontend_cannot_take_is_tried_a_few_times(traced):
    def forward(self, x):
        torch._dynamo.graph_break()
        return F.gelu(self.lin(x))

    twins = Twins(Around(body(forward, lin=nn.Linear(SIZE, SIZE))))
    for _ in range(20):
        twins.step(train(tokens()))
    assert traced == []
    assert twins.why_not


def test_graphs_that_never_go_backward_leave_it_on_the_tape():
    x = tokens()
    twins = Twins(Around(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())))
    for _ in range(10):
        twins.step(lambda module: [module(x)])
    assert not twins.is_captured
    twins.step(train(x))


def test_the_settings_of_torchs_frontend_are_as_before():
    before = dict(torch._dynamo.config.get_config_copy()) if hasattr(torch, "_dynamo") else {}
    captured_twins(nn.Linear(SIZE, SIZE), tokens())
    assert torch._dynamo.config.get_config_copy() == before
    assert not torch.compiler.is_compiling()


def test_the_frontend_is_reset_afterwards():
    """Here, as it resets what tests of a file share, too: nothing in this one."""
    step = train(tokens())
    twins = Twins(Around(Norm())).settle(step)
    torch._dynamo.reset()
    assert twins.runs_code(step) == 0
    for _ in range(2):
        twins.step(step)
    assert twins.runs_code(step) == 1


def test_an_error_of_the_code_itself_while_it_is_watched_comes_as_without_a_policy():
    """What it drew until then is drawn again: the random stream goes on as in plain PyTorch."""

    def forward(self, x):
        return self.lin(F.dropout(x, 0.5)) @ self.other

    module = body(forward, lin=nn.Linear(SIZE, SIZE))
    module.other = torch.eye(SIZE)
    twins = Twins(Around(module))
    step = train(tokens())
    for _ in range(3):
        twins.step(step)
    for one in (twins.under, twins.plain):
        one.inside.other = torch.ones(SIZE + 1, 1)
        torch.manual_seed(3)
        with pytest.raises(RuntimeError, match="shape"):
            one(tokens())
    twins.under.inside.other = twins.plain.inside.other = torch.eye(SIZE)
    twins.settle(step)


def linear():
    return nn.Linear(SIZE, SIZE)


def counts_if_not_compiled(self, x):
    if not torch.compiler.is_compiling():
        self.seen.append(1)
    return F.gelu(self.lin(x))


@pytest.mark.parametrize("package", [torch, recompute], ids=["torch", "recompute"])
def test_code_in_a_folder_beside_torch_or_this_package_is_a_users(package):
    """The ops that torch and this package choose by the question are compared. What other code does is not."""
    folder = os.path.dirname(package.__file__)  # site-packages/torch, beside site-packages/torchvision
    code = counts_if_not_compiled.__code__.replace(co_filename=f"{folder}vision/model.py")
    twins = Twins(Around(body(FunctionType(code, globals()), lin=linear(), seen=[])))
    twins.settle(train(tokens()), captured=False)
    assert "whether it is compiled" in twins.why_not
