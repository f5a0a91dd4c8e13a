"""Policies in code that ``torch.compile`` compiles: what it holds, what it gives, and what is refused."""

import functools
import re
import shutil
import warnings

import models
import pytest
import torch
from bodies.library import EFFECTS, NOISE, RUNS, registered
from engine_testing import bits, module_of
from models import held
from tiers import by_default, slow
from tiny import counted_ops, decoder, next_token_loss, rule, rules, token_ids, train
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import recompute
from recompute.engine.cut.frontier import finer_frontier, frontier
from recompute.errors import PolicyWarning, UnsupportedError
from recompute.planning.solver import floor

BACKEND = "aot_eager_decomp_partition"  # inductor's cut between forward and backward, without its code
LAYER = "TinyDecoderLayer"
MLP_KEPT = (rule("TinyMLP", "keep"), rule(LAYER))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_layers(model, backend=BACKEND, **options):
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend, **options)
    return model


def held_in_a_step(model):
    ids = token_ids()
    next_token_loss(model, ids)  # what is made by the first run, in compiling
    return held(model, lambda: next_token_loss(model, ids))


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


POLICIES = {
    "checkpoint": rules(rule(LAYER)),
    "checkpoint but attention": rules(rule(LAYER, keep="attention")),
    "checkpoint but an op": rules(rule(LAYER, keep="aten.silu")),
    "hooks": rules(rule(LAYER, "recompute", via="hook")),
    "hooks, gemms again": rules(rule(LAYER, "recompute", via="hook", rerun="gemm")),
    "norms and MLPs": rules(rule(["TinyRMSNorm", "TinyMLP"], "recompute", via="hook")),
    "kernels": rules(rule(["TinyRMSNorm", "TinyMLP"], "recompute", via="kernel")),
    "kernels, gemms again": rules(rule(LAYER, "recompute", via="kernel", rerun="gemm")),
    "layers by kernels": rules(rule(LAYER, "recompute", via="kernel")),
    "auto": rules(rule(LAYER, "recompute")),
    "an MLP kept": rules(*MLP_KEPT),
    "a region in another": rules(rule("TinyMLP", "recompute"), rule(LAYER)),
}


@functools.cache
def held_without_a_policy():
    return held_in_a_step(compile_layers(decoder(layers=2)))


@pytest.mark.parametrize("policy", by_default(POLICIES, "layers by kernels"))
def test_compiled_layers_hold_less_and_give_the_same(policy):
    expected = train(decoder(layers=2))
    without = held_without_a_policy()
    torch.compiler.reset()
    model, counter = decoder(layers=2), CompileCounterWithBackend(BACKEND)
    recompute.apply(model, policy)
    eager = held_in_a_step(model)
    close(train(compile_layers(model, counter)), expected)
    assert counter.frame_count == 1  # of all layers
    assert held_in_a_step(model) < without
    assert held_in_a_step(model) < 1.5 * eager  # torch 2.11 holds what attention gives where nothing need be held


NEIGHBOURS = {  # of which one gives to the next what comes back
    "norms and MLPs": POLICIES["norms and MLPs"],
    "norms before a checkpoint": rules(rule("TinyRMSNorm", "recompute", via="hook"), rule("TinyMLP")),
    "attention before norms": rules(
        rule("TinyAttention", keep="attention"), rule(["TinyRMSNorm", "TinyMLP"], "recompute", via="hook")
    ),
    "layers before checkpoints": rules(rule(LAYER, "recompute", via="hook") | {"layers": "0-1"}, rule(LAYER)),
    "checkpoints before layers": rules(rule(LAYER) | {"layers": "0-1"}, rule(LAYER, "recompute", via="hook")),
}


@pytest.mark.parametrize(
    "policy",
    by_default({**{name: POLICIES[name] for name in ("hooks", "checkpoint but attention")}, **NEIGHBOURS}, "hooks"),
)
def test_no_more_is_held_than_in_eager_code_and_no_more_gemms_run_again(policy):
    found = []
    for compiling in (compile_layers, whole_in_place, lambda model: model):
        torch.compiler.reset()
        model = decoder(layers=1)
        recompute.apply(model, policy)
        compiling(model)
        held_nbytes = held_in_a_step(model)
        loss = next_token_loss(model, token_ids())
        with counted_ops() as counts:
            loss.backward()
        found.append((held_nbytes, counts["aten.mm"]))
    *compiled, (eager_nbytes, eager_gemms) = found
    for held_nbytes, gemms in compiled:
        assert held_nbytes <= eager_nbytes
        assert gemms <= eager_gemms + 1  # a checkpoint's last one, which torch stops before in eager code


@pytest.mark.slow
def test_a_rule_that_keeps_holds_more_than_the_one_around_it():
    inside, around = decoder(), decoder()
    recompute.apply(inside, rules(*MLP_KEPT))
    recompute.apply(around, rules(rule(LAYER)))
    assert held_in_a_step(compile_layers(inside)) > held_in_a_step(compile_layers(around))


def whole_in_place(model):
    model.compile(fullgraph=True, backend=BACKEND)
    return model


def whole(model):
    return torch.compile(model, fullgraph=True, backend=BACKEND)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiling", "first"),
    [
        (compile_layers, True),
        *slow((whole, True), (whole, False), (whole_in_place, True), (whole_in_place, False), (compile_layers, False)),
    ],
)
def test_before_or_after_compiling(compiling, first):
    expected = train(decoder())
    plain, model = decoder(), decoder()
    compiled_plain = compiling(plain)
    without = held(plain, lambda: next_token_loss(compiled_plain, token_ids()))
    torch.compiler.reset()
    if first:
        recompute.apply(model, rules(rule(LAYER)))
        compiled = compiling(model)
    else:
        compiled = compiling(model)
        next_token_loss(compiled, token_ids()).backward()  # compiles it without the policy
        model.zero_grad()
        recompute.apply(compiled, rules(rule(LAYER)))  # which may be a wrapper
    close(train(model, lambda: next_token_loss(compiled, token_ids())), expected)
    assert held(model, lambda: next_token_loss(compiled, token_ids())) < without


@pytest.mark.slow
def test_layers_that_are_wrapped_keep_their_paths():
    model = decoder()
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=BACKEND)
    handle = recompute.apply(model, {"rules": [{"match": "layers.*.mlp", "layers": 0, "action": "checkpoint"}]})
    assert re.search(r"^layers\.\*\.mlp +1 ", handle.explain(wide=True), re.MULTILINE)
    close(train(model), train(decoder()))


@pytest.mark.slow
def test_taken_off_compiled_code_is_what_it_was():
    model = compile_layers(decoder())
    without = held_in_a_step(model)
    handle = recompute.apply(model, rules(rule(LAYER)))
    assert held_in_a_step(model) < without
    handle.remove()
    assert held_in_a_step(model) == without


@pytest.mark.slow
def test_evaluation_and_inference_hold_nothing():
    model, plain = compile_layers(decoder()), decoder()
    recompute.apply(model, rules(rule(LAYER)))
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids()), plain(token_ids()))
    close(train(model), train(plain))
    compile_layers(plain)
    assert held_in_a_step(model) == held_in_a_step(plain)


def drops(self, x):
    """What dropout drops of ones, and so its mask, is what it gives and its gradient."""
    return F.dropout(x.sin().exp(), 0.5).sin()


WITH_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        (BACKEND, "cpu"),
        pytest.param("inductor", "cpu", marks=[WITH_COMPILER, pytest.mark.slow]),
        pytest.param("inductor", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("action", ["checkpoint", *slow("recompute")])
def test_dropout_draws_one_mask(backend, device, action):
    module = nn.Sequential(module_of(drops), module_of(drops))
    recompute.apply(module, {"rules": [{"match": "*", "action": action}]})
    compiled = torch.compile(module[0], fullgraph=True, backend=backend)
    x = torch.rand(64, 32, device=device, requires_grad=True)
    for _ in range(3):
        y = compiled(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert 0.3 < (y == 0).float().mean() < 0.7
        assert torch.equal(y == 0, gradient == 0)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.25, *slow(0.0)])
def test_attentions_dropout_is_drawn_once(dropout):
    torch.manual_seed(0)
    model, plain = decoder(layers=1, dropout=dropout), compile_layers(decoder(layers=1, dropout=dropout))
    recompute.apply(model, rules(rule(LAYER, "recompute")))
    close(train(compile_layers(model), steps=1), train(plain, steps=1))


def two_experts(self, x, order):
    """To which 9 and 5 tokens go: no multiple of 16 bytes."""
    ends = torch.tensor([9, 14], dtype=torch.int32, device=x.device)
    return F.grouped_mm(x.abs()[order], self.weights, offs=ends).square()


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=[WITH_COMPILER, pytest.mark.slow]), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("action", ["checkpoint", "recompute"])
def test_what_runs_again_reaches_a_grouped_gemm_in_the_layout_that_it_needs(action, device):
    weights = nn.Parameter(torch.randn(2, 32, 16, dtype=torch.bfloat16))
    module = module_of(two_experts, weights=weights).to(device)
    x = torch.randn(14, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    order = torch.randperm(14, device=device)
    module(x, order).sum().backward()
    expected, module.weights.grad = module.weights.grad, None
    recompute.apply(module, {"rules": [{"type": "Body", "action": action}]})
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(module, fullgraph=True)(x, order).sum().backward()
    torch.testing.assert_close(module.weights.grad, expected)


@pytest.mark.parametrize(
    ("name", "keep", "more"), [(None, (), 1), ("logits", (), 0), ("logits", "logits", 1), ("other", "logits", 0)]
)
def test_tensors_that_are_pinned_are_held(name, keep, more):
    forward = lambda self, x: recompute.keep(self.linear(x), name).sin().exp()  # noqa: E731
    module, x = nn.Sequential(module_of(forward, linear=nn.Linear(32, 32))), torch.rand(16, 32)
    recompute.apply(module, {"rules": [{"match": "0", "action": "checkpoint", "keep": keep}]})
    module[0].compile(fullgraph=True, backend=BACKEND)
    assert held(module, lambda: module(x)) == (1 + more) * 16 * 32 * 4
    reference = module[0].linear(x).sin().exp()
    torch.testing.assert_close(module(x), reference)


def test_decorated_functions_are_regions_too():
    def gelu(x):
        return x * torch.sigmoid(1.702 * x).exp().sin()

    x = torch.rand(8, 32, requires_grad=True)
    policies = (None, {"rules": [{"match": "**", "type": "gelu", "action": "checkpoint"}]})
    for policy in policies:
        torch.compiler.reset()
        decorated = recompute.recompute(gelu, policy=policy)
        compiled = torch.compile(lambda x, f=decorated: f(x.sin()), fullgraph=True, backend=BACKEND)
        assert held(nn.Module(), lambda f=compiled: f(x)) <= 2 * 8 * 32 * 4
        (found,), (expected,) = (torch.autograd.grad(f(x).sum(), x) for f in (compiled, lambda x: gelu(x.sin())))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("op", [NOISE["torch"], EFFECTS["registered"]], ids=["a draw", "an effect"])
def test_no_op_of_a_library_runs_again(op, action):
    """Nobody sees in compiled code what it draws."""
    forward = lambda self, x: (op(h := self.up(x).sigmoid()).exp() * h).tanh()  # noqa: E731
    module, x = nn.Sequential(*(module_of(forward, up=nn.Linear(8, 8)) for _ in range(2))), torch.rand(4, 8)
    found = []
    with registered():
        for rule in ({"action": "keep"}, {"action": action}):
            with recompute.apply(module, rules({"match": "*", **rule})):
                torch.manual_seed(1)
                RUNS.clear()
                module.zero_grad()
                torch.compile(module, backend="aot_eager", fullgraph=True)(x).sum().backward()
                found.append(([bits(each.grad) for each in module.parameters()], len(RUNS)))
            torch.compiler.reset()
    assert found[0] == found[1]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_decorated_class_runs_once_before_it_is_compiled(fullgraph):
    @recompute.recompute(policy={"rules": [{"match": "**", "type": "Late", "action": "checkpoint"}]})
    class Late(nn.Module):
        def forward(self, x):
            return x.sin().exp().sin()

    module, x = Late(), torch.rand(8, 32, requires_grad=True)
    compiled = torch.compile(module, fullgraph=fullgraph, backend=BACKEND)
    with pytest.raises(
        torch._dynamo.exc.Unsupported if fullgraph else UnsupportedError, match="it once before you compile it"
    ):
        compiled(x)
    torch.compiler.reset()
    module(x)
    assert held(module, lambda: compiled(x)) == 8 * 32 * 4


def writes(self, x):
    y = self.first(x)
    y.relu_()
    y = y * 1.5
    y += x
    z = self.second(y).mul_(2)
    return z.sin_() * torch.zeros_like(z).copy_(y)


@pytest.mark.parametrize(
    "options",
    [*slow({"action": "checkpoint"}), {"action": "recompute"}, *slow({"action": "checkpoint", "keep": "gemm"})],
)
def test_what_is_written_in_place_comes_back_as_it_was(options):
    torch.manual_seed(0)
    module = nn.Sequential(module_of(writes, first=nn.Linear(32, 32), second=nn.Linear(32, 32)))
    x = torch.rand(8, 32)
    module(x).sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    recompute.apply(module, {"rules": [{"match": "0", **options}]})
    module[0].compile(fullgraph=True, backend=BACKEND)
    module(x).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], expected)


def priced(price, via="hook"):
    return rules(rule(LAYER, "recompute", via=via, rerun=["gemm", "attention"], price=price))


def held_under(policy, *, compiled, layers=1):
    torch.compiler.reset()
    model = decoder(layers=layers)
    recompute.apply(model, policy)
    return held_in_a_step(compile_layers(model) if compiled else model)


def points(via, of_plan=frontier):
    """Of a layer: all that a plan could choose from."""
    model = decoder(layers=1)
    handle = recompute.apply(model, priced(0, via))
    for _ in range(2):  # kernels learn which Linears read a norm
        next_token_loss(model, token_ids())
    (plan,) = handle.plans().values()
    return of_plan(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("of_plan", "every", "least"), [(frontier, 2, 4), (finer_frontier, 4, 3)])
def test_each_price_and_each_limit_holds_what_it_holds_in_eager_code(of_plan, every, least):
    found = []
    for point in points("hook", of_plan)[::every]:
        policy = rules(rule(LAYER, "recompute", via="hook", rerun=["gemm", "attention"], **point.rule))
        eager = held_under(policy, compiled=False)
        found.append(held_under(policy, compiled=True))
        assert 0.98 * eager <= found[-1] <= eager  # of rows' statistics, it holds less
    assert len(found) >= least
    assert found == sorted(set(found), reverse=True)


@pytest.mark.slow
def test_kernels_at_a_price_hold_about_what_they_hold_in_eager_code():
    _, *some, least = points("kernel")
    for point in (*some[::2], least):
        eager = held_under(priced(point.rule["price"], "kernel"), compiled=False)
        assert held_under(priced(point.rule["price"], "kernel"), compiled=True) <= 1.25 * eager


@pytest.mark.slow
def test_layers_have_prices_of_their_own_as_a_plan_gives_them():
    most, *_, middle, least = points("hook")[:-1]
    prices = [each.rule["price"] for each in (most, middle, least)]
    fields = [{**priced(price)["rules"][0], "layers": at} for at, price in enumerate(prices)]
    policy = rules(*fields, {"match": "layers.*", "action": "checkpoint"})
    eager = held_under(policy, compiled=False, layers=4)
    assert 0.98 * eager <= held_under(policy, compiled=True, layers=4) <= eager
    model = decoder(layers=4)
    recompute.apply(model, policy)
    close(train(compile_layers(model)), train(decoder(layers=4)))


@pytest.mark.slow
def test_a_plan_serves_compiled_layers():
    """Where it leaves layers as they are, the compiler holds less of them than eager code does."""
    model = decoder(layers=4)
    options = {"device": "H200", "kernels": False, "optimizer": torch.optim.SGD}  # estimated: no clock chooses
    profile = recompute.profile(model, token_ids(), loss=lambda logits: logits.square().mean(), **options)
    least = floor(profile).prediction.peak_nbytes
    for budget in (least + 4096, least):
        policy = recompute.plan(profile, budget=budget).policy.model_dump()
        compiled = held_under(policy, compiled=True, layers=4)
        assert compiled <= held_under(policy, compiled=False, layers=4)
    assert compiled < 0.8 * held_under({"name": "none", "rules": "none"}, compiled=True, layers=4)
    recompute.apply(model, policy)
    close(train(compile_layers(model)), train(decoder(layers=4)))


@pytest.mark.slow
def test_sizes_that_a_graph_is_not_bound_to_have_a_price_too():
    model, counter = decoder(layers=1), CompileCounterWithBackend(BACKEND)
    recompute.apply(model, priced(points("hook")[3].rule["price"]))
    compile_layers(model, counter, dynamic=True)
    next_token_loss(model, token_ids()).backward()
    count = counter.frame_count
    for length in (5, 4):
        next_token_loss(model, token_ids()[:, :length]).backward()
    assert counter.frame_count == count


HOOK = {"action": "recompute", "via": "hook"}


@pytest.mark.parametrize("compiling", [whole, *slow(whole_in_place, compile_layers)])
def test_a_head_that_makes_logits_in_compiled_code_says_so_and_one_beside_compiled_layers_nothing(compiling):
    model = decoder(layers=1)
    recompute.apply(model, rules(rule(LAYER), {"match": "lm_head", "action": "recompute", "via": "kernel"}))
    compiled = compiling(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(model, lambda: next_token_loss(compiled, token_ids()))
    said = [str(each.message) for each in caught if each.category is PolicyWarning]
    assert len(said) == (compiling is not compile_layers)
    says = r"(?s)lm_head \(Linear\) is compiled, so its logits are made.*Compile only the layers"
    assert all(re.search(says, each) for each in said)
    close(found, train(decoder(layers=1)))


NESTED = {
    "gemms again around": ({"rerun": "gemm"}, {}),
    "gemms again inside": ({}, {"rerun": "gemm"}),
    "a price around": ({"price": 1e16}, {}),
    "a price inside": ({}, {"price": 1e16}),
    "a checkpoint around": ({"action": "checkpoint", "keep": "attention"}, {}),
}


@pytest.mark.parametrize("nested", by_default(NESTED, "gemms again around"))
def test_rules_inside_of_rules_mean_what_they_mean_in_eager_code(nested):
    around, inside = nested
    policy = rules(rule("TinyMLP", **HOOK, **inside), rule(LAYER, **(around if "action" in around else HOOK | around)))
    eager = held_under(policy, compiled=False)
    assert (
        0.98 * eager <= held_under(policy, compiled=True) <= 1.15 * eager
    )  # torch 2.11 holds what the inner one gives


def test_a_backend_that_makes_no_backward_is_refused():
    model = compile_layers(decoder(), "eager")
    recompute.apply(model, rules(rule(LAYER)))
    with pytest.raises(UnsupportedError, match="'eager': 'inductor' or 'aot_eager'"):
        model(token_ids())


def test_a_region_whose_graph_breaks_is_refused():
    module = nn.Sequential(module_of(lambda self, x: (torch._dynamo.graph_break(), x.sin().exp())[1]))
    recompute.apply(module, {"rules": [{"match": "0", "action": "checkpoint"}]})
    module[0].compile(backend=BACKEND)
    with pytest.raises(UnsupportedError, match="says what breaks the graph"):
        module(torch.rand(4, requires_grad=True))


def outcome(model, name, **options):
    for module in model.modules():
        if type(module).__name__ in models.FAMILIES[name].layers:
            module.compile(backend=BACKEND)
    torch.manual_seed(0)
    loss = model(**models.batch(name), **options).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["elementwise", "full"])
@pytest.mark.parametrize("name", ["llama", *slow("gemma2", "gpt2")])
def test_layers_of_hugging_face_compile_under_a_preset(name, preset):
    plain, model = models.make(name), models.make(name)
    recompute.apply(model, preset)
    found, expected = (outcome(each, name, use_cache=False) for each in (model, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    by_default({"hooks": "elementwise", "kernels": rules(rule("*Layer", "recompute", via="kernel"))}, "kernels"),
)
def test_layers_of_stacked_experts_are_one_graph(policy):
    plain, model = models.make("mixtral"), models.make("mixtral")
    recompute.apply(model, policy)
    found = []
    for each in (model, plain):
        each.config.output_router_logits = (
            False  # whose hooks break the graph, as other experts' code does on torch 2.11
        )
        each.set_experts_implementation("batched_mm")
        for layer in each.model.layers:
            layer.compile(fullgraph=True, backend=BACKEND)
        torch.manual_seed(0)
        loss = each(**models.batch("mixtral"), use_cache=False, output_router_logits=False).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in each.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_a_cache_that_a_layer_writes_to_is_refused_or_written_once():
    model, plain = models.make("llama"), models.make("llama")
    recompute.apply(model, "full")
    with pytest.raises(UnsupportedError, match="use_cache=False, or torch"):
        outcome(model, "llama", use_cache=True)
    model.zero_grad()
    torch.compiler.reset()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        found, expected = (outcome(each, "llama", use_cache=True) for each in (model, plain))
    torch.testing.assert_close(found, expected)


# Which ops each rule lets run again, in eager code and in compiled code


class Ops(nn.Module):
    """One op of each kind, whose output the op behind it saves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 16))
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        y = (x @ self.weight).sin()
        y = torch.bmm(y[None, :, :2], y[None, :2])[0].sin()
        y = self.convolution(y[None])[0].sin()
        heads = y.view(1, 16, 2, 8).transpose(1, 2)
        heads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]
        y = heads.transpose(1, 2).reshape(16, 16).sin()
        y = y.exp2().sin()
        y = recompute.keep((y + self.weight).erf(), "router").sin()
        return (torch.full_like(y, 2.0) * self.weight * y).sin()


GEMM, CONVOLUTION, ATTENTION = "aten.mm", "aten.convolution", "aten._scaled_dot_product_flash_attention_for_cpu"
CHEAP, THIN, NAMED, FACTORY = "aten.exp2", "aten.bmm", "aten.erf", "aten.full_like"
COSTLY = {GEMM, CONVOLUTION, ATTENTION}
ALL = {*COSTLY, CHEAP, THIN, NAMED, FACTORY}

# On purpose, eager and compiled code differ in one thing: a tape keeps what a factory makes, as something that it does
# not see may fill it (a Triton kernel, NumPy); in compiled code all that writes to it is an op of the graph.
TABLE = [
    # the rule, and what runs again in eager code, and in compiled code
    ({"action": "keep"}, set(), set()),
    ({"action": "checkpoint"}, ALL, ALL),
    ({"action": "checkpoint", "keep": "attention"}, ALL - {ATTENTION, FACTORY}, ALL - {ATTENTION}),
    ({"action": "checkpoint", "keep": ["aten.mm", "router"]}, ALL - {GEMM, NAMED, FACTORY}, ALL - {GEMM, NAMED}),
    (HOOK, {CHEAP, THIN, NAMED}, {CHEAP, THIN, NAMED, FACTORY}),
    ({**HOOK, "keep": ["gemm", "router"]}, {CHEAP}, {CHEAP, FACTORY}),
    ({**HOOK, "rerun": "gemm"}, {CHEAP, THIN, NAMED, GEMM}, {CHEAP, THIN, NAMED, GEMM, FACTORY}),
    ({**HOOK, "rerun": ["gemm", "convolution", "attention"], "price": 0.0}, ALL - {FACTORY}, ALL),
    (
        {**HOOK, "rerun": ["gemm", "attention"], "keep": ["convolution", "aten.exp2"], "price": 0.0},
        {GEMM, THIN, ATTENTION, NAMED},
        {GEMM, THIN, ATTENTION, NAMED, FACTORY},
    ),
    ({**HOOK, "rerun": ["gemm", "convolution", "attention"], "price": 1e20}, set(), set()),
]


def backward_ops(fields, *, compiled=False):
    """How often each op runs in a backward of ``Ops`` under a rule."""
    torch.manual_seed(0)
    model = nn.Sequential(Ops())
    recompute.apply(model, rules({"match": "0", **fields}))
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        loss = model(torch.rand(16, 16)).sum()
    with counted_ops() as counts:
        loss.backward()
    return counts


@functools.cache
def plain_ops():
    return backward_ops({"action": "keep"})


@pytest.mark.parametrize(
    ("fields", "eager", "compiled"),
    [*slow(TABLE[0]), TABLE[1], *slow(*TABLE[2:6]), TABLE[6], *slow(*TABLE[7:])],
    ids=[str(fields) for fields, *_ in TABLE],
)
def test_what_runs_again(fields, eager, compiled):
    plain = plain_ops()
    assert ALL & {*(backward_ops(fields) - plain)} == eager
    assert ALL & {*(backward_ops(fields, compiled=True) - plain)} == compiled
