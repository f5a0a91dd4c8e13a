"""Models run under a policy as they run without: hooks, modes, adapters, swapped parts, shared parts, odd forwards."""

import copy
import functools
import inspect
import warnings
from collections import Counter
from contextlib import nullcontext
from types import MethodType

import pytest
import tiny
import torch
from tiers import by_default, slow
from tiny import HIDDEN, TOKENS, TinyMLP, assert_same, counted_ops, decoder, gradients, rule, rules, token_ids, train
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.counters import step_memory
from recompute.errors import PolicyWarning, UnsupportedError

TAPES = ["hook", "elementwise", "auto"]
POLICIES = ["none", "full", "alternate", *TAPES, "kernel"]


def mlp_policy(via):
    return rules(rule("TinyMLP", "recompute", via=via))


REGISTERED = {
    **{"register_forward_pre_hook": {"with_kwargs": True}, "register_forward_hook": {}},
    **{"register_full_backward_pre_hook": {}, "register_full_backward_hook": {}},
}


def hooked(model, names):
    """Counts the calls of hooks of each kind on these modules."""
    seen = Counter()
    for name in names:
        for register, options in REGISTERED.items():
            count = functools.partial(lambda key, *_: seen.update([key]), (name, register))
            getattr(model.get_submodule(name), register)(count, **options)
    return seen


LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
HOOKED = {
    "full": ["", "layers.0", "layers.1", "norm"],
    "hook": ["", "layers.0", "norm", *(f"layers.0.{name}" for name in ("input_layernorm", "mlp", *LINEARS))],
}
HOOKED["elementwise"] = HOOKED["auto"] = HOOKED["kernel"] = HOOKED["hook"]


@pytest.mark.parametrize("attached", [*slow("before"), "after"])
@pytest.mark.parametrize("preset", by_default(list(HOOKED), "full", "hook", "kernel"))
def test_hooks_of_the_user_run_once_a_forward_and_not_again(preset, attached):
    model, plain = decoder(), decoder()
    expected = hooked(plain, HOOKED[preset])
    if attached == "before":
        calls = hooked(model, HOOKED[preset])
    recompute.apply(model, preset)
    if attached == "after":
        calls = hooked(model, HOOKED[preset])
    found, without = train(model, steps=3), train(plain, steps=3)
    assert calls == expected
    assert set(calls.values()) == {3}
    if preset != "kernel":
        assert_same(found, without)


def adapted(projection):
    def change(model):
        torch.manual_seed(3)
        for layer in model.layers:
            setattr(layer.mlp, projection, tiny.Adapter(getattr(layer.mlp, projection)))

    return change


def hook_on(model, name, hook):
    model.get_submodule(name).register_forward_hook(hook)


HOOKS = {"another tensor": lambda _, __, output: output * 1.5, "in place": lambda _, __, output: output.mul_(1.5)}
CHANGES = {
    **{
        f"a hook on {name}: {what}": lambda model, name=name, hook=hook: hook_on(model, name, hook)
        for name in ("layers.1.mlp.gate_proj", "layers.0.input_layernorm", "norm", "layers.1")
        for what, hook in HOOKS.items()
    },
    **{f"adapters around {name}": adapted(name) for name in ("gate_proj", "up_proj", "down_proj")},
    "a layer thrice": lambda model: model.layers.extend([model.layers[0]] * 2),
}
BY_DEFAULT = ("a hook on layers.1.mlp.gate_proj: another tensor", "a hook on layers.1.mlp.gate_proj: in place")


@pytest.mark.parametrize("is_late", [*slow(False), True], ids=["before", "after"])
@pytest.mark.parametrize("change", by_default(CHANGES, *BY_DEFAULT, "adapters around gate_proj", "a layer thrice"))
@pytest.mark.parametrize("preset", by_default(POLICIES, "full", "elementwise", "kernel"))
def test_a_model_that_is_changed_before_or_after_it_gets_a_policy_trains_as_without(preset, change, is_late):
    model, plain = decoder(), decoder()
    change(plain)
    if not is_late:
        change(model)
    handle = recompute.apply(model, preset)
    if is_late:
        change(model)
    tiny.assert_as_under(preset, train(model), train(plain))
    handle.remove()


@pytest.mark.parametrize("via", ["hook", "kernel"])
def test_global_hooks_see_every_projection(via):
    mlp = TinyMLP()
    recompute.apply(mlp, mlp_policy(via))
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__)):
        mlp(torch.randn(2, HIDDEN))
    assert sorted(seen) == ["Linear", "Linear", "Linear", "SiLU", "TinyMLP"]


@pytest.mark.parametrize("projection", ["gate_proj", *slow("up_proj"), "down_proj"])
def test_a_bias_that_comes_later_is_respected(projection):
    mlp = TinyMLP()
    recompute.apply(mlp, mlp_policy("kernel"))
    linear = getattr(mlp, projection)
    linear.bias = nn.Parameter(torch.ones(linear.out_features))
    plain = copy.deepcopy(mlp)
    x = torch.randn(TOKENS, HIDDEN)
    assert_same(gradients(mlp, x), gradients(plain, x))


class BranchesOnTraining(nn.Module):
    """Draws only in training, by a branch that a trace in ``eval()`` mode does not see."""

    def forward(self, x):
        x = x.tanh()
        return F.dropout(x, 0.5).sigmoid() if self.training else x.sigmoid()


class LightGating(TinyMLP):
    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(hidden, 0.5) if self.training else hidden)


@pytest.mark.parametrize("via", ["hook", "kernel", "auto"])
@pytest.mark.parametrize("action", ["checkpoint", "recompute"])
@pytest.mark.parametrize("cls", [BranchesOnTraining, LightGating])
def test_a_policy_applied_in_eval_mode_knows_nothing_of_training(cls, action, via):
    torch.manual_seed(0)
    module = cls().eval()  # from_pretrained returns models like this
    plain = copy.deepcopy(module).train()
    options = {"via": via} if action == "recompute" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        recompute.apply(module, rules(rule(cls.__name__, action, **options)))
    x = torch.randn(TOKENS, HIDDEN)
    assert_same(gradients(module.train(), x), gradients(plain, x))


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_kernels_stand_in_in_every_mode(mode):
    model = decoder()
    trained = decoder()
    recompute.apply(trained, "kernel")
    expected = trained(token_ids())
    handle = recompute.apply(model, "kernel")
    with mode(), counted_ops() as counts:
        output = model.train(mode is not nullcontext)(token_ids())
    assert torch.equal(output, expected)  # what trains and what infers is one function
    assert counts["recompute.rms_norm_forward"] == 5
    assert counts["recompute.glu_forward"] == 2
    assert handle.stats().dropped_nbytes == 0


def test_parts_in_eval_mode_are_left_alone():
    model, plain = decoder(dropout=0.3), decoder(dropout=0.3)
    handle = recompute.apply(model, "full")
    for each in (model, plain):
        each.layers[0].eval()
    with pytest.warns(PolicyWarning, match=r"layers\.0 \(TinyDecoderLayer\) runs in evaluation mode"):
        assert_same(train(model), train(plain))
    assert handle.stats().frames == 2


def warnings_of_evaluation(*modules):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in modules:
            module(torch.ones(TOKENS, HIDDEN))
    return ["evaluation mode" in str(each.message) and "model.train()" in str(each.message) for each in caught]


@pytest.mark.parametrize("policy", ["elementwise", "auto", "full", rules(rule("TinyMLP", "offload"))], ids=str)
def test_a_model_in_eval_mode_is_warned_of_once(policy):
    model = nn.Sequential(*[TinyMLP() for _ in range(2)]).eval()
    for _ in range(2):
        recompute.apply(model, policy, replace=True)
        for quiet in (torch.no_grad(), torch.inference_mode()):
            with quiet:
                assert warnings_of_evaluation(model) == []
        assert warnings_of_evaluation(model.train(), model.eval(), model) == [True]


def test_what_no_policy_would_drop_in_training_is_not_warned_of():
    frozen, kept = TinyMLP().eval().requires_grad_(False), TinyMLP().eval()
    recompute.apply(frozen, mlp_policy("hook"))
    recompute.apply(kept, rules(rule("TinyMLP", "keep")))
    assert warnings_of_evaluation(frozen, kept) == []


def test_instances_of_a_decorated_class_in_eval_mode_are_warned_of_once():
    cls = recompute.recompute(type("Decorated", (TinyMLP,), {"forward": TinyMLP.forward}))
    assert warnings_of_evaluation(cls().eval(), cls().eval()) == [True]


@pytest.mark.parametrize("preset", by_default(POLICIES, "full", "elementwise", "kernel"))
def test_arguments_by_name(preset):
    model, plain = decoder(), decoder()
    recompute.apply(model, preset)
    with torch.no_grad():
        for call in (lambda m: m(ids=token_ids(), scale=0.5), lambda m: m.norm(hidden_states=torch.ones(1, 16))):
            torch.testing.assert_close(call(model), call(plain))
    layer, same = model.layers[0], plain.layers[0]
    x = torch.randn(2, 3, HIDDEN)
    found = gradients(lambda x: layer(hidden_states=x), x)
    torch.testing.assert_close(found, gradients(lambda x: same(hidden_states=x), x))


@pytest.mark.parametrize("preset", TAPES)
def test_a_tape_runs_no_python_again(preset, monkeypatch):
    model, plain = decoder(dropout=0.3), decoder(dropout=0.3)
    runs = Counter()
    for cls in {type(module) for module in model.modules()}:

        def counting(self, *args, forward=cls.forward, **kwargs):
            runs[type(self).__name__] += 1
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", counting, raising=cls is not nn.ModuleList)
    recompute.apply(model, preset)
    runs.clear()
    train(model, steps=1)
    under_a_policy = runs.copy()
    runs.clear()
    train(plain, steps=1)
    assert under_a_policy == runs
    assert runs["TinyRMSNorm"] == 5


# Models whose forward another library has replaced on the instance, as accelerate and TRL do


def as_a_function(model):
    original = model.forward
    model.forward = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs) * 1.5)


def as_a_method(model):
    """As accelerate's mixed precision: what it wraps knows no instance."""
    original = model.forward.__func__
    forward = functools.wraps(original)(lambda self, *args, **kwargs: original(self, *args, **kwargs) * 1.5)
    model.forward = MethodType(forward, model)


def replaced(replace, **options):
    model = decoder(**options)
    replace(model)
    return model


def held(model):
    ids = torch.zeros(2, 6, dtype=torch.long)
    memory = step_memory(lambda: model(ids).sum(), torch.device("cpu"))
    model.zero_grad()
    return memory.activation_bytes_held


BOTH = pytest.mark.parametrize("replace", [as_a_function, as_a_method])


@BOTH
@pytest.mark.parametrize("preset", ["elementwise", "full", "hook"])
def test_it_runs_under_the_policy_and_is_put_back(replace, preset):
    model, plain = replaced(replace), replaced(replace)
    before = vars(model)["forward"]
    signature = inspect.signature(model.forward)
    with recompute.apply(model, preset) as handle:
        assert inspect.signature(model.forward) == signature
        assert held(model) < held(plain)
        dropped = handle.stats().dropped_nbytes
        assert_same(train(model), train(plain))
        assert handle.stats().dropped_nbytes > dropped > 0
    assert vars(model)["forward"] is before
    assert held(model) == held(plain)
    recompute.apply(model, preset).remove()
    assert vars(model)["forward"] is before


@pytest.mark.parametrize(
    ("replace", "again"), [(as_a_function, as_a_function), (as_a_method, as_a_function), (as_a_method, as_a_method)]
)
def test_what_is_put_around_it_meanwhile_stays(replace, again):
    model, plain = replaced(replace), replaced(replace)
    handle = recompute.apply(model, "elementwise")
    for each in (model, plain):
        again(each)
    outer = vars(model)["forward"]
    assert_same(train(model, steps=1), train(plain, steps=1))
    handle.remove()
    assert vars(model)["forward"] is outer
    assert held(model) == held(plain)
    assert_same(train(model, steps=1), train(plain, steps=1))
    with recompute.apply(model, "elementwise"):
        assert held(model) < held(plain)


def test_a_replacement_of_a_policed_forward_outlives_the_policy():
    model, plain = decoder(), replaced(as_a_method)
    handle = recompute.apply(model, "elementwise")
    as_a_method(model)
    assert held(model) < held(plain)
    handle.remove()
    assert_same(train(model), train(plain))


def test_copies_run_by_themselves():
    model, plain = replaced(as_a_method), replaced(as_a_method)
    handle = recompute.apply(model, "elementwise")
    copied = copy.deepcopy(model)
    frames = handle.stats().frames
    weights = [parameter.clone() for parameter in model.parameters()]
    assert_same(train(copied), train(plain))
    assert handle.stats().frames == frames
    assert_same(list(model.parameters()), weights)


@pytest.mark.parametrize("which", ["", "lm_head"])
def test_one_that_a_rule_names_is_refused(which):
    model = decoder()
    as_a_function(model.get_submodule(which))
    with pytest.raises(UnsupportedError, match="has a forward that was set on the instance"):
        recompute.apply(model, rules(rule(["TinyDecoder", "Linear"])))


def test_the_classs_own_forward_on_the_instance_is_no_replacement():
    """As it is where accelerate's hooks were removed."""
    model, plain = decoder(), decoder()
    for module in model.modules():
        module.forward = module.forward
    with recompute.apply(model, "elementwise"):
        assert held(model) < held(plain)
        assert_same(train(model), train(plain))
