"""``@recompute.recompute`` on classes, on their instances, on functions of every kind, and on what is none."""

import copy
import functools
import inspect
import itertools
import pickle
from contextlib import nullcontext

import models
import numpy as np
import pytest
import torch
from engine_testing import module_of
from tiny import TinyDecoderLayer, TinyMLP, TinyRMSNorm, assert_same, counted_ops, gradients, rule, rules
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import recompute
from recompute.errors import AlreadyAppliedError, NoEffectError, PolicyError, PolicyWarning, UnsupportedError
from recompute.policy.loading import preset_names
from recompute.policy.rules import BLOCK

HIDDEN = 8


class Plain(nn.Module):
    """A Linear and two nonlinearities. Counts its runs, and remembers a storage from inside the last."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.tally = np.zeros(1 << 14, int)  # what a smaller array has would be put back after a second run
        self.inside = None

    def forward(self, x, *, scale=1.0):
        """What it does."""
        self.tally[0] += 1
        middle = F.dropout(self.linear(x).tanh() * scale, 0.3, self.training).exp()
        self.inside = StorageWeakRef(middle.untyped_storage())
        return middle.square().sum(-1)


def fresh():
    """A class of its own to decorate: decorating is in place."""
    return type("Plain", (Plain,), {"forward": Plain.forward, "__module__": __name__, "__qualname__": "Plain"})


def made(cls):
    torch.manual_seed(0)
    return cls()


def inputs():
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))


def outcome(module, **arguments):
    """Output and every gradient, of parameters too."""
    module.zero_grad()
    found = gradients(functools.partial(module, **arguments), inputs())
    torch.manual_seed(0)
    module(inputs(), **arguments).sum().backward()
    return [*found, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def is_dropped(module):
    """Whether the storage from inside is dead between forward and backward; also runs that backward."""
    output = module(inputs().requires_grad_())
    dead = module.inside.expired()
    output.sum().backward()
    return dead


CHECKPOINT = rules(rule("Plain"))
ALL_CHECKPOINTED = rules({"match": "**", "action": "checkpoint"})
every_policy = pytest.mark.parametrize("policy", [None, ALL_CHECKPOINTED], ids=["bare", "checkpoint"])
DECORATORS = {
    "bare": (recompute.recompute, 1),
    "called": (recompute.recompute(), 1),
    "recompute": (recompute.recompute(policy=rules(rule("Plain", "recompute"))), 1),
    "checkpoint": (recompute.recompute(policy=CHECKPOINT), 2),
}
"""Each with how often what it decorates runs in a training step."""


@pytest.mark.parametrize(("decorate", "runs"), DECORATORS.values(), ids=DECORATORS)
class TestAClass:
    def test_is_decorated_in_place_and_runs_as_without(self, decorate, runs):
        cls = fresh()
        earlier = made(cls)
        assert decorate(cls) is cls
        for module in (earlier, made(cls)):
            for arguments in ({}, {"scale": 0.5}):
                assert_same(outcome(module, **arguments), outcome(made(Plain), **arguments))
            assert is_dropped(module)
        assert not is_dropped(made(Plain))

    def test_keeps_what_describes_it(self, decorate, runs):
        cls = decorate(fresh())
        assert cls.__name__ == "Plain"
        assert cls.forward.__doc__ == "What it does."
        assert cls.forward.__name__ == "forward"
        assert inspect.signature(cls.forward) == inspect.signature(Plain.forward)
        assert repr(made(cls)) == repr(made(Plain))
        assert made(cls).state_dict().keys() == made(Plain).state_dict().keys()

    def test_runs_again_in_backward_only_as_a_checkpoint(self, decorate, runs):
        module = made(decorate(fresh()))
        for step in (1, 2, 3):
            module(inputs()).sum().backward()
            assert module.tally[0] == step * runs

    def test_runs_plainly_where_it_is_not_trained(self, decorate, runs):
        module = made(decorate(fresh())).eval()
        assert_same(outcome(module), outcome(made(Plain).eval()))
        assert module.tally[0] == 2  # each with its backward
        assert not is_dropped(module)
        with torch.no_grad():
            module.train()(inputs())
        with torch.inference_mode():
            module(inputs())
        assert module.tally[0] == 5


@recompute.recompute
class Importable(Plain):
    """Decorated where pickle can find it."""


@recompute.recompute(policy="hook")
class Governing(TinyDecoderLayer):
    """Decorated with a policy for what is inside."""


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("cls", [Importable, Governing])
def test_instances_of_a_decorated_class_are_copied_clean(cls, ran):
    module, plain = made(cls), made(cls.__base__)
    x = torch.randn(2, 3, HIDDEN if cls is Importable else 16)
    if ran:
        module(x).sum().backward()
        module.zero_grad()
        if cls is Importable:
            module.inside = None
    copies = [copy.deepcopy(module), *(pickle.loads(pickle.dumps(module, p)) for p in range(6))]
    for copied in copies:
        assert type(copied) is cls
        for inside, original in zip(copied.modules(), plain.modules(), strict=True):
            assert vars(inside).keys() == vars(original).keys()
            assert inside is copied or type(inside) is type(original)
        assert_same(gradients(copied, x), gradients(plain, x))  # and it is under its class's policy


class TestSubclasses:
    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("calls_super", [False, True], ids=["inherits forward", "calls super"])
    def test_one_that_runs_the_forward_of_its_base_is_under_the_policy_there(self, calls_super):
        def sub(cls):
            own = {"forward": lambda self, x: cls.forward(self, x.cos()).sin()} if calls_super else {}
            return type("Sub", (cls,), own)

        module = made(sub(recompute.recompute(fresh())))
        assert_same(outcome(module), outcome(made(sub(Plain))))
        assert is_dropped(module)

    def test_one_with_a_forward_of_its_own_is_left_alone(self):
        module = made(type("Sub", (recompute.recompute(fresh()),), {"forward": Plain.forward}))
        assert_same(outcome(module), outcome(made(Plain)))
        assert not is_dropped(module)

    @pytest.mark.parametrize(("policy", "runs"), [(None, 1), (ALL_CHECKPOINTED, 2)], ids=["bare", "checkpoint"])
    def test_one_that_is_decorated_too_runs_as_often_as_one_that_is_not(self, policy, runs):
        cls = recompute.recompute(policy=policy)(fresh())

        @recompute.recompute(policy=policy)
        class Sub(cls):
            def forward(self, x):
                return super().forward(x).cos()

        module = made(Sub)
        module(inputs()).sum().backward()
        assert module.tally[0] == runs

    def test_the_base_class_is_not_touched(self):
        recompute.recompute(type("Sub", (Plain,), {}))
        assert not is_dropped(made(Plain))


def test_a_class_takes_one_policy():
    cls = recompute.recompute(policy=ALL_CHECKPOINTED)(fresh())
    forward = cls.forward
    with pytest.raises(AlreadyAppliedError, match="the class Plain is already decorated"):
        recompute.recompute(policy=rules(rule("Plain", "recompute")))(cls)
    assert cls.forward is forward
    recompute.recompute(type("Sub", (cls,), {}))


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.before, self.inner = nn.Linear(HIDDEN, HIDDEN), inner()

    def forward(self, x):
        return self.inner(self.before(x).tanh()).sin()


@pytest.mark.parametrize("inside", [None, ALL_CHECKPOINTED], ids=["bare", "checkpoint"])
@pytest.mark.parametrize("around", [None, ALL_CHECKPOINTED], ids=["bare", "checkpoint"])
def test_a_decorated_class_inside_a_decorated_class(around, inside):
    inner = recompute.recompute(policy=inside)(fresh())
    outer = recompute.recompute(policy=around)(type("Outer", (Outer,), {"forward": Outer.forward}))
    module = made(lambda: outer(inner))
    assert_same(outcome(module), outcome(made(lambda: Outer(Plain))))
    assert bool(module.inner.tally[0] == 2) is (around is inside is None)


@every_policy
def test_a_decorated_class_inside_itself(policy):
    def tree_class():
        class Tree(nn.Module):
            def __init__(self, depth=3):
                super().__init__()
                self.linear = nn.Linear(HIDDEN, HIDDEN)
                self.below = Tree(depth - 1) if depth else None

            def forward(self, x):
                x = F.dropout(self.linear(x).tanh(), 0.2, self.training)
                return x if self.below is None else x + self.below(x)

        return Tree

    assert_same(outcome(made(recompute.recompute(policy=policy)(tree_class()))), outcome(made(tree_class())))


def test_paths_in_a_class_policy_start_at_the_class():
    policy = {"rules": [{"match": "mlp", "action": "recompute", "via": "hook"}]}
    cls = recompute.recompute(policy=policy)(type("Layer", (TinyDecoderLayer,), {}))
    x = torch.randn(2, 3, 16)
    module = made(cls)
    assert_same(gradients(module, x), gradients(made(TinyDecoderLayer), x))
    assert type(module.mlp) is not TinyMLP
    assert type(module.input_layernorm) is TinyRMSNorm


class TestAnInstance:
    def test_is_itself_and_runs_as_without(self):
        module = made(Plain)
        assert recompute.recompute(module) is module
        assert isinstance(module, Plain)
        assert_same(outcome(module), outcome(made(Plain)))
        assert is_dropped(module)
        assert not is_dropped(made(Plain))

    def test_is_refused_twice(self):
        module = recompute.recompute(made(Plain))
        for again in (recompute.recompute, lambda module: recompute.apply(module, CHECKPOINT)):
            with pytest.raises(AlreadyAppliedError, match="Plain"):
                again(module)

    @pytest.mark.parametrize(("policy", "runs"), [(None, 1), (rules(rule("Container")), 2)], ids=["bare", "checkpoint"])
    def test_of_a_container_runs_its_parts_again_only_as_a_checkpoint(self, policy, runs):
        class Container(nn.Sequential):
            pass

        inside = made(Plain)
        model = recompute.recompute(Container(nn.Tanh(), nn.Sequential(inside)), policy=policy)
        assert type(model[1]) is nn.Sequential  # all is one region
        model(inputs()).sum().backward()
        assert inside.tally[0] == runs

    def test_warns_where_the_user_stands(self):
        with pytest.warns(PolicyWarning, match=r"rules\[1\]") as messages:
            recompute.recompute(made(Plain), policy=rules(rule("Plain"), rule("Other")))
        assert [message.filename for message in messages] == [__file__]


def test_a_bad_policy_is_refused_when_decorating():
    for target in (fresh(), made(Plain), torch.tanh):
        with pytest.raises(PolicyError):
            recompute.recompute(policy={"rules": [{"type": "X", "action": "forget"}]})(target)


def test_a_policy_that_governs_nothing_is_refused_when_it_is_put_on():
    nothing = rules(rule("Other"))
    with pytest.raises(NoEffectError, match=r"governs no module of Plain: rules\[0\].*'Other'"):
        recompute.recompute(made(Plain), policy=nothing)
    module = made(recompute.recompute(policy=nothing)(fresh()))
    for _ in range(2):  # also not silently the second time
        with pytest.raises(NoEffectError, match=r"rules\[0\].*'Other'"):
            outcome(module)


def test_hugging_faces_checkpointing_runs_around_a_decorated_layer():
    @recompute.recompute(policy="elementwise")
    class Decorated(LlamaDecoderLayer):
        pass

    plain, model = models.make("llama"), models.make("llama")
    for index, layer in enumerate(plain.model.layers):
        model.model.layers[index] = Decorated(model.config, index).train()
        model.model.layers[index].load_state_dict(layer.state_dict())
    batch = models.batch("llama") | {"use_cache": False}
    for each in (plain, model):
        each.gradient_checkpointing_enable()
    assert models.held(model, lambda: model(**batch)) <= models.held(plain, lambda: plain(**batch))
    for each in (plain, model):
        each.zero_grad()
        each(**batch).loss.backward()
    assert_same([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])


class Mixer(nn.Module):
    """A block, which no name says."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


class Mixers(nn.Module):
    """A model of blocks, which no name says."""

    def __init__(self):
        super().__init__()
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, x):
        return self.mixers[1](self.mixers[0](x))


def decorated(kind, policy, base=Mixer):
    """What to run, and what it was decorated as."""
    if kind == "class":
        cls = recompute.recompute(policy=policy)(type("Mine", (base,), {"forward": base.forward}))
        return made(cls), cls
    module = made(base)
    target = recompute.recompute(module if kind == "module" else lambda x: module(x), policy=policy)
    return target, target


BLOCKS = [name for name in preset_names() if any(BLOCK in each.type for each in recompute.load_policy(name).rules)]
KINDS = ["class", "module", "function"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [*BLOCKS, rules(rule("block", "recompute", via="hook"))], ids=str)
def test_what_is_decorated_is_the_block_whatever_it_is_called(policy, kind):
    if policy == "alternate":
        with pytest.raises(NoEffectError, match=r"in no list of layers\n.*the model that has the layers"):
            decorated(kind, policy)[0](inputs())
        return
    run, target = decorated(kind, policy)
    assert_same(gradients(run, inputs()), gradients(made(Mixer), inputs()))
    handle = target.recompute_handle
    assert handle.stats().frames == 1
    assert handle.stats().dropped_nbytes > 0
    assert "rules[0]" in handle.explain()
    assert not handle.removed


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("policy", ["elementwise", "full", "alternate"])
def test_in_a_decorated_model_its_layers_are_the_blocks(policy, kind):
    run, target = decorated(kind, policy, Mixers)
    assert_same(gradients(run, inputs()), gradients(made(Mixers), inputs()))
    governed = [each.path for each in target.recompute_handle._attachments if each.rule is not None]
    assert governed == ["mixers.0", "mixers.1"][: 1 if policy == "alternate" else 2]


def test_a_class_reports_on_all_instances_that_live_and_have_run():
    cls = recompute.recompute(policy="elementwise")(type("Mine", (Mixer,), {"forward": Mixer.forward}))
    handle = cls.recompute_handle
    idle, *ran = [cls() for _ in range(3)]
    for module in ran:
        module(inputs()).sum().backward()
    assert repr(handle) == "<policy 'elementwise' on 2 modules>"
    assert handle.stats().frames == 2
    del ran, module
    assert handle.stats().frames == 0
    assert idle.recompute_handle is handle


def test_a_decorated_modules_handle_is_what_apply_returns_and_copies_have_none():
    module = recompute.recompute(made(Mixer), policy="full")
    handle = module.recompute_handle
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not hasattr(copied, "recompute_handle")
    handle.remove()
    assert handle.removed
    assert not hasattr(module, "recompute_handle")


# Functions


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
        for run, policy in itertools.product((closing_over_a_module()[0], METHODS.method), (None, ALL_CHECKPOINTED)):
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
            torch.manual_seed(0)
            parts = {"norm": TinyRMSNorm(HIDDEN), "linear": nn.Linear(HIDDEN, HIDDEN), "function": each}
            model = module_of(lambda self, x: self.linear(self.function(self.norm(x))), **parts)
            recompute.apply(model, rules({"match": "**.norm", "action": "recompute", "via": "hook"}))
            STORAGES.clear()
            output = model(inputs())
            assert STORAGES[0].expired() is (each is scale)
            output.sum().backward()
            results.append([p.grad for p in model.parameters()])
        assert_same(*results)


def scaled(x):
    return noted(x.tanh() * 2.0)


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
