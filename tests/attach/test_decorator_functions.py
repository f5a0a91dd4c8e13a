"""``@recompute.recompute`` on functions of every kind, and on what is none."""

import functools
import inspect
import itertools
from contextlib import nullcontext

import pytest
import torch
from tiny import TinyRMSNorm, assert_same, counted_ops, gradients, rule, rules
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import recompute
from recompute.errors import NoEffectError, PolicyWarning, UnsupportedError

HIDDEN = 8


def inputs():
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))


LINEAR = nn.Linear(HIDDEN, HIDDEN)
SCALE = torch.full((HIDDEN,), 0.7)
STORAGES = []
NOTE_STORAGE = STORAGES.append
"""By this a checkpoint does not see the list: it would have it appended to but once."""


def noted(x):
    NOTE_STORAGE(StorageWeakRef(x.untyped_storage()))
    return x


def function(x, *, scale=1.0):
    """A function."""
    return noted(F.dropout(x.tanh() * scale, 0.5).exp()).square()


class Methods:
    def __init__(self):
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.generator = torch.Generator()

    def method(self, x):
        return noted(self.linear(x.tanh()).sin().exp()).square()

    def noisy(self, x):
        return noted((x.tanh() * torch.rand(x.shape, generator=self.generator)).exp()).square()

    def __call__(self, x):
        return self.noisy(x)

    @staticmethod
    def static(x):
        return noted(x.tanh().exp()).square()


def closing_over_a_module():
    linear = LINEAR
    return lambda x: noted(linear(x.tanh()).sin().exp()).square(), []


def closing_over_a_tensor():
    scale = SCALE
    return lambda x: noted((x.tanh() * scale).exp()).square(), []


METHODS = Methods()
FUNCTIONS = {
    "function": lambda: (function, []),
    "lambda": lambda: (lambda x: noted(x.tanh().exp()).square(), []),
    "partial": lambda: (functools.partial(function, scale=0.5), []),
    "bound method": lambda: (METHODS.method, []),
    "bound method with a generator": lambda: (METHODS.noisy, [METHODS.generator]),
    "callable object": lambda: (METHODS, [METHODS.generator]),
    "static method": lambda: (Methods.static, []),
    "module's method": lambda: (LINEAR.forward, []),
    **{make.__name__.replace("_", " "): make for make in (closing_over_a_module, closing_over_a_tensor)},
}


CHECKPOINT = rules({"match": "**", "action": "checkpoint"})
"""Of a function whatever its name."""
every_policy = pytest.mark.parametrize("policy", [None, CHECKPOINT], ids=["bare", "checkpoint"])


@every_policy
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_of_any_kind_runs_as_without(kind, policy):
    run, generators = FUNCTIONS[kind]()
    decorated = recompute.recompute(policy=policy)(run)
    results = []
    for each in (run, decorated):
        for generator in generators:
            generator.manual_seed(0)
        results.append(gradients(each, inputs()))
        results[-1] += [torch.rand(1), *(torch.rand(1, generator=generator) for generator in generators)]
    assert_same(results[1], results[0])


@every_policy
@pytest.mark.parametrize("kind", [kind for kind in FUNCTIONS if kind != "module's method"])
def test_a_function_of_any_kind_drops_what_comes_back(kind, policy):
    run, _ = FUNCTIONS[kind]()
    for each, dropped in ((run, False), (recompute.recompute(policy=policy)(run), True)):
        STORAGES.clear()
        output = each(inputs().requires_grad_())
        assert STORAGES[0].expired() is dropped
        output.sum().backward()
        assert len(STORAGES) == (2 if dropped and policy is not None else 1)  # only a checkpoint runs Python again


def test_without_a_policy_all_is_dropped_that_comes_back_without_a_product():
    def run(x):
        # Autograd saves the input, what the first exp returns, the product's input and what the second exp returns.
        x = noted(noted(noted(x.sin()).exp()).cos())
        return noted(noted(noted(x @ x.T).exp()).sin()).sum()

    decorated = recompute.recompute(run)
    for each, alive in ((run, [1, 2, 4]), (decorated, [4])):
        for _ in range(2):
            STORAGES.clear()
            output = each(inputs().requires_grad_())
            assert [index for index, storage in enumerate(STORAGES) if not storage.expired()] == alive
            with counted_ops() as counts:
                output.backward()
            assert counts.get("aten.exp", 0) == (1 if each is decorated else 0)
            assert counts["aten.mm"] == 2  # the gradients'
    assert_same(gradients(decorated, inputs()), gradients(run, inputs()))


class TestAFunction:
    def test_keeps_its_name_and_signature(self):
        for decorated in (recompute.recompute(function), recompute.recompute(policy=rules(rule("function")))(function)):
            assert decorated is not function
            assert decorated.__name__ == "function"
            assert decorated.__doc__ == "A function."
            assert inspect.signature(decorated) == inspect.signature(function)

    def test_refuses_a_weight_changed_before_backward(self):
        for run, policy in itertools.product((closing_over_a_module()[0], METHODS.method), (None, CHECKPOINT)):
            output = recompute.recompute(policy=policy)(run)(inputs().requires_grad_())
            linear = run.__self__.linear if hasattr(run, "__self__") else LINEAR
            with torch.no_grad():
                linear.weight.add_(0.0)
            with pytest.raises(RuntimeError, match="modified in place"):
                output.sum().backward()

    @pytest.mark.parametrize("policy", [rules(rule("function", "keep")), "none"])
    def test_is_left_as_it_is_by_a_policy_that_keeps_it(self, policy):
        assert recompute.recompute(function, policy=policy) is function

    @pytest.mark.parametrize("policy", [rules(rule("other")), "hook"])
    def test_that_no_rule_matches_is_refused(self, policy):
        with pytest.raises(NoEffectError, match="governs no module of the function function"):
            recompute.recompute(policy=policy)(function)

    def test_that_no_kernel_computes_is_refused(self):
        with pytest.raises(UnsupportedError, match=r"rules\[0\].*no kernel.*function"):
            recompute.recompute(policy=rules(rule("function", "recompute", via="kernel")))(function)

    def test_is_regenerated_for_its_consumer_under_an_applied_policy(self):
        scale = recompute.recompute(policy=rules(rule("scaled", "recompute")))(scaled)
        results = []
        for each in (scaled, scale):
            model = Consumer(each)
            recompute.apply(model, rules({"match": "**.norm", "action": "recompute", "via": "hook"}))
            STORAGES.clear()
            output = model(inputs())
            assert STORAGES[0].expired() is (each is scale)
            output.sum().backward()
            results.append([p.grad for p in model.parameters()])
        assert_same(*results)


def scaled(x):
    return noted(x.tanh() * 2.0)


class Consumer(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.function = TinyRMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), function

    def forward(self, x):
        return self.linear(self.function(self.norm(x)))


def generator_function(x):
    yield x


async def coroutine(x):
    return x


async def async_generator(x):
    yield x


@pytest.mark.parametrize("target", [generator_function, coroutine, async_generator], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["bare", "partial"])
def test_what_does_not_run_in_one_piece_is_refused(target, wrap):
    with pytest.raises(UnsupportedError, match="cannot run again as a whole"):
        recompute.recompute(wrap(target))


@pytest.mark.parametrize(
    "target", [3, "hook", {"rules": "none"}, recompute.load_policy("hook"), int, torch.ones(1), [nn.Tanh()]], ids=repr
)
def test_a_wrong_target_is_refused(target):
    with pytest.raises(TypeError, match=r"recompute decorates an nn\.Module class, a module or a function, got"):
        recompute.recompute(target)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("setting", [{"action": "checkpoint"}, {"action": "recompute", "via": "hook"}], ids=str)
@pytest.mark.parametrize("what", ["linear", "batch norm", "function"])
def test_torchscript_that_a_function_uses_is_run_as_it_is_without(what, setting):
    """A ScriptModule's state is not Python's; and errors that pass through TorchScript become others."""
    script = torch.jit.script
    parts = {
        "linear": lambda: script(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())),
        "batch norm": lambda: script(nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Tanh())),
        "function": lambda: script(scripted),
    }
    torch.manual_seed(0)
    part, x = parts[what](), inputs().requires_grad_()
    state = {name: tensor.clone() for name, tensor in getattr(part, "state_dict", dict)().items()}

    def block(x):
        return part(x.sin()).exp()

    def steps(block):
        if state:
            part.load_state_dict(state)
        weights = list(part.parameters()) if state else []
        found = [grad for _ in range(3) for grad in torch.autograd.grad(block(x).sum(), [x, *weights])]
        return [*found, *(tensor.clone() for tensor in getattr(part, "buffers", list)())]

    decorated = recompute.recompute(block, policy={"rules": [{"match": "**", **setting}]})
    steps(block)  # profiles it, which changes bits by itself
    is_module = what != "function"
    warns = pytest.warns(PolicyWarning, match=r"block .*nothing is dropped.*a ScriptModule")
    with warns if is_module and setting["action"] == "checkpoint" else nullcontext():
        found = steps(decorated)
    assert_same(found, steps(block))


def scripted(x):
    return (x * 2).sigmoid() * x.tanh()
