"""Attaching a policy and taking it off: what it may be, what stays as it was, what is refused."""

import copy
import gc
import inspect
import weakref

import pytest
import tiny
import torch
from tiers import by_default, slow
from tiny import TinyDecoderLayer, TinyRMSNorm, assert_same, decoder, rule, rules, snapshot, token_ids, train
from torch import nn

import recompute
from recompute.errors import AlreadyAppliedError, PolicyError, PolicyWarning, UnsupportedError
from recompute.policy.loading import preset_names

PRESETS = sorted(preset_names(), key="none".__ne__)
"""The one that does nothing first."""
NORMS = rules(rule("TinyRMSNorm", "recompute", via="hook"))


def governed(model):
    """The names of the modules that are not of their own class now."""
    plain = snapshot(decoder())
    return [name for name, module in model.named_modules() if type(module) is not plain[name][0]]


def held(handle):
    stats = handle.stats()
    return stats.frames, stats.dropped_nbytes, stats.kept_nbytes


def test_without_a_policy_every_layer_gets_the_preset_that_changes_no_bit():
    model, named = decoder(dropout=0.3), decoder(dropout=0.3)
    with recompute.apply(model) as handle, recompute.apply(named, "elementwise") as other:
        assert handle.policy == other.policy == recompute.load_policy("elementwise")
        assert governed(model) == governed(named) == ["", "layers.0", "layers.1", "norm"]
        assert_same(train(model), train(decoder(dropout=0.3)))
        train(named)
        assert held(handle) == held(other)
        assert handle.stats().dropped_nbytes > 0


@pytest.mark.parametrize("model", [None, nn.Linear, "hook", [nn.Linear(1, 1)]], ids=repr)
def test_refuses_what_is_no_module(model):
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got"):
        recompute.apply(model, "hook")


def test_a_bad_policy_changes_nothing():
    model = decoder()
    before = snapshot(model)
    for policy in ("hok", {"rules": [{"type": "X", "action": "forget"}]}, {"rulez": []}, 3):
        with pytest.raises(PolicyError):
            recompute.apply(model, policy)
    assert snapshot(model) == before


@pytest.mark.parametrize("preset", by_default(PRESETS, "none", "full", "hook", "kernel"))
def test_nothing_that_others_look_at_changes(preset):
    model = decoder()
    modules = list(model.named_modules())
    classes = [type(module) for _, module in modules]
    signatures = [inspect.signature(module.forward) for _, module in modules]
    parameters, state, text = dict(model.named_parameters()), model.state_dict(), repr(model)
    recompute.apply(model, preset)
    loss = tiny.next_token_loss(model, token_ids())  # whose graph is alive
    assert list(model.named_modules()) == modules
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert all(value.data_ptr() == state[name].data_ptr() for name, value in model.state_dict().items())
    assert repr(model) == text
    for (_, module), cls, signature in zip(modules, classes, signatures, strict=True):
        assert isinstance(module, cls)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(module), name) == getattr(cls, name)
        assert inspect.signature(module.forward) == signature
        assert module.forward.__doc__ == cls.forward.__doc__
    loss.backward()


@pytest.mark.parametrize("second", by_default(PRESETS[1:], "hook"))
@pytest.mark.parametrize("first", by_default(PRESETS[1:], "full", "kernel"))
@pytest.mark.filterwarnings("error")  # what it would have warned of, it does not come to
def test_a_model_under_a_policy_refuses_another(first, second):
    model = decoder()
    handle = recompute.apply(model, first)
    before = snapshot(model)
    with pytest.raises(
        AlreadyAppliedError, match=r"(layers\.0|TinyDecoder\b).*recompute\.apply\(model, policy, replace=True"
    ):
        recompute.apply(model, second)
    assert snapshot(model) == before
    handle.remove()
    recompute.apply(model, second).remove()


def test_a_submodule_under_a_policy_is_named():
    model = decoder()
    handle = recompute.apply(model.layers[1], "hook")
    before = snapshot(model)
    with pytest.raises(AlreadyAppliedError, match=r"'layers\.1"):
        recompute.apply(model, "hook")
    with pytest.raises(AlreadyAppliedError, match=r"'layers\.1"):
        recompute.apply(model, rules(rule("TinyAttention")))
    assert snapshot(model) == before
    handle.remove()
    recompute.apply(model, "hook")
    with pytest.raises(AlreadyAppliedError, match="'input_layernorm'"):
        recompute.apply(model.layers[0], "hook")
    with pytest.raises(AlreadyAppliedError, match="TinyRMSNorm"):
        recompute.apply(model.norm, rules(rule("TinyRMSNorm")))


def test_disjoint_submodules_take_policies_of_their_own():
    model = decoder()
    before, expected = snapshot(model), train(decoder())
    handles = [recompute.apply(layer, preset) for layer, preset in zip(model.layers, ("full", "hook"), strict=True)]
    assert_same(train(model), expected)
    for handle in handles:
        handle.remove()
    assert snapshot(model) == before


def test_a_decorated_instance_inside_is_named():
    @recompute.recompute
    class Decorated(TinyDecoderLayer):
        pass

    model = decoder()
    model.layers[1] = Decorated()
    before = snapshot(model)
    with pytest.raises(AlreadyAppliedError, match=r"'layers\.1' \(Decorated\)"):
        recompute.apply(model, rules(rule(["TinyDecoderLayer", "Decorated"])))
    assert snapshot(model) == before
    with pytest.raises(AlreadyAppliedError, match="Decorated"):
        recompute.recompute(model.layers[1])


class RefusesSubclasses(nn.Tanh):
    def __init_subclass__(cls, **options):
        raise RuntimeError("final")


class RefusesAnotherClass(nn.Tanh):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise RuntimeError("frozen")
        super().__setattr__(name, value)


def with_own_forward():
    module = TinyRMSNorm()
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("culprit", "error"), [(with_own_forward, UnsupportedError), (RefusesSubclasses, None), (RefusesAnotherClass, None)]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_half_applied_never(culprit, error, place):
    children = [nn.Linear(4, 4), nn.Linear(4, 4)]
    children.insert(place, culprit())
    model = nn.Sequential(*children)
    before = snapshot(model)
    names = [type(child).__name__ for child in children]
    policy = rules(*(rule(name) for name in names))
    # Where a class cannot be had, it is this package's error or the class's own; either way nothing is left behind.
    with pytest.raises(error or (UnsupportedError, RuntimeError), match=r"'[012]'|final|frozen"):
        recompute.apply(model, policy)
    assert snapshot(model) == before
    recompute.apply(model, rules(rule("Linear"))).remove()
    assert snapshot(model) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("action", ["checkpoint", "recompute", "keep"])
def test_a_scripted_module_is_refused_by_name(action):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh()))
    before = {key: type(module) for key, module in model.named_modules()}
    with pytest.raises(UnsupportedError, match="'1'"):
        recompute.apply(model, rules({"match": "*", "action": action}))
    assert {key: type(module) for key, module in model.named_modules()} == before
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*ScriptModule")
@pytest.mark.parametrize("action", ["checkpoint", "recompute", "offload"])
def test_a_scripted_module_without_a_rule_runs_in_its_parent_as_it_is(action):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid()))
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(4), scripted, nn.Tanh()), scripted)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def gradients():
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    for _ in range(3):
        expected = gradients()  # TorchScript's first two runs have other ops than later ones
    with recompute.apply(model, rules({"match": "0", "action": action})):
        assert model[0][1] is model[1] is scripted
        for _ in range(5):
            assert all(map(torch.equal, gradients(), expected))


@pytest.mark.filterwarnings("error")
def test_a_warning_made_an_error_leaves_the_model_alone():
    model = decoder()
    before = snapshot(model)
    with pytest.raises(PolicyWarning):
        recompute.apply(model, rules(rule("TinyRMSNorm", "recompute"), rule("Nothing")))
    assert snapshot(model) == before


@pytest.mark.parametrize("preset", by_default(PRESETS, "none", "full", "hook", "kernel"))
def test_remove_leaves_the_model_exactly_as_it_was(preset):
    model = decoder()
    model.norm.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    handle = recompute.apply(model, preset)
    handle.remove()
    assert snapshot(model) == before
    handle.remove()
    assert snapshot(model) == before
    again = recompute.apply(model, preset)
    handle.remove()  # a handle whose policy is off does not touch another's
    assert (governed(model) == []) is (preset == "none")
    again.remove()
    assert snapshot(model) == before


def test_a_handle_is_a_context_manager():
    model = decoder()
    before = snapshot(model)
    with recompute.apply(model, "hook") as handle:
        assert type(handle).__name__ == "AppliedPolicy"
        assert governed(model)
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), recompute.apply(model, "hook"):
        raise ZeroDivisionError
    assert snapshot(model) == before


@pytest.mark.parametrize("preset", by_default(PRESETS, "full", "hook", "kernel"))
def test_a_graph_built_under_the_policy_outlives_it(preset):
    model, plain = decoder(), decoder()
    with recompute.apply(model, preset):
        output = model(token_ids())
    found = torch.autograd.grad(output.sum(), list(model.parameters()))
    expected = torch.autograd.grad(plain(token_ids()).sum(), list(plain.parameters()))
    tiny.assert_as_under(preset, found, expected)


def test_removes_itself_from_under_a_class_that_came_later():
    model = decoder()
    expected = train(decoder())
    handle = recompute.apply(model, "hook")
    theirs = type("Theirs", (type(model.norm),), {})
    model.norm.__class__ = theirs  # as fully_shard and parametrizations do
    assert_same(train(copy.deepcopy(model)), expected)
    handle.remove()
    assert type(model.norm) is theirs
    assert vars(model.norm).keys() == vars(TinyRMSNorm()).keys()
    frames = handle.stats().frames
    assert_same(train(model), expected)
    assert handle.stats().frames == frames


def test_a_policy_that_comes_again_under_a_class_that_came_later_runs_each_module_once():
    model, plain = decoder(), decoder()
    first = recompute.apply(model)
    assert_same(train(model), train(plain))
    once, layer = first.stats(), model.layers[0]
    layer.__class__ = theirs = type("TheirDecoderLayer", (type(layer),), {})
    first.remove()
    with recompute.apply(model) as again:
        assert_same(train(model), train(plain))
        assert again.stats() == once
        assert_same(train(copy.deepcopy(model)), train(copy.deepcopy(plain)))
    assert governed(model) == ["layers.0"]
    assert type(layer) is theirs
    assert vars(layer).keys() == vars(plain.layers[0]).keys()
    assert_same(train(model), train(plain))
    assert again.stats() == once


def test_a_class_that_was_made_for_one_model_dies_with_it():
    model = decoder()
    made = type("MadeDecoderLayer", (type(model.layers[0]),), {})
    model.layers[0].__class__ = made
    reference = weakref.ref(made)
    handle = recompute.apply(model, "full")
    train(model)
    handle.remove()
    del model, made, handle
    for _ in range(2):  # first the class that the policy made of it, then this one
        gc.collect()
    assert reference() is None


def test_parametrizations_may_come_and_go_under_a_policy():
    model = decoder()
    handle = recompute.apply(model, "hook")
    nn.utils.parametrize.register_parametrization(model.norm, "weight", nn.Softplus())
    plain = decoder()
    nn.utils.parametrize.register_parametrization(plain.norm, "weight", nn.Softplus())
    assert_same(train(model), train(plain))
    nn.utils.parametrize.remove_parametrizations(model.norm, "weight")
    handle.remove()
    assert governed(model) == []


def test_a_module_shared_by_two_parents_is_attached_once_and_restored():
    model, plain = decoder(), decoder()
    for each in (model, plain):
        each.layers[1].input_layernorm = each.layers[0].input_layernorm
    before = snapshot(model)
    handle = recompute.apply(model, NORMS)
    assert_same(train(model, steps=1), train(plain, steps=1))
    frames = handle.stats().frames  # of four norms, one of which runs twice
    handle.remove()
    assert frames == 5
    assert {name: cls for name, (cls, _) in snapshot(model).items()} == {name: cls for name, (cls, _) in before.items()}
    assert [set(vars(module)) for module in model.modules()] == [set(vars(module)) for module in plain.modules()]


ALL_BELOW = [
    {"match": ["layers.*", "layers.*.**"]},
    {"match": "layers.**"},  # a ModuleList too, which has no forward
    {"type": ["ModuleList", "TinyDecoderLayer", "TinyMLP", "TinyRMSNorm"], "match": "layers.**"},
]


@pytest.mark.parametrize("pattern", ALL_BELOW, ids=str)
def test_what_a_rule_matches_inside_of_what_it_matches_joins_the_outermost_tape(pattern):
    model = decoder()
    handle = recompute.apply(model, rules({**pattern, "action": "recompute", "via": "hook"}))
    assert governed(model) == ["", "layers.0", "layers.1"]
    assert_same(train(model, steps=1), train(decoder(), steps=1))
    layers_alone = decoder()
    expected = recompute.apply(layers_alone, rules(rule("TinyDecoderLayer", "recompute", via="hook")))
    train(layers_alone, steps=1)
    assert held(handle) == held(expected)
    assert handle.stats().frames == 2


@pytest.mark.parametrize("pattern", [ALL_BELOW[0], *slow(*ALL_BELOW[1:])], ids=str)
def test_kernels_stand_in_for_what_the_same_rule_matches_inside(pattern):
    model, named = decoder(), decoder()
    recompute.apply(named, rules(rule("TinyDecoderLayer", "recompute", via="auto", capture=False)))
    recompute.apply(model, rules({**pattern, "action": "recompute", "via": "auto", "capture": False}))
    assert governed(model) == governed(named)
    assert {"layers.0", "layers.0.input_layernorm", "layers.1.post_attention_layernorm"} < {*governed(model)}


@pytest.mark.parametrize(
    ("setting", "has_kernels"),
    [({}, False), ({"compiled": False}, True), ({"capture": False}, True), ({"compress": True}, False)],
    ids=str,
)
def test_generated_kernels_compute_what_is_written_out_inside_of_a_layer(setting, has_kernels):
    """A norm that is one op of torch's has a kernel all the same."""
    model = decoder()
    model.layers[0].post_attention_layernorm = nn.LayerNorm(model.layers[0].input_layernorm.weight.shape[0])
    recompute.apply(model, rules(rule("TinyDecoderLayer", "recompute", via="auto", **setting)))
    assert ("layers.0.input_layernorm" in governed(model)) is has_kernels
    assert "layers.0.post_attention_layernorm" in governed(model)


def test_another_rule_inside_says_otherwise_for_its_part_of_the_tape():
    counts = []
    for inside in ([], [rule("TinyMLP", "recompute", rerun="gemm")], [rule("TinyMLP", "keep")]):
        model = decoder()
        handle = recompute.apply(model, rules(*inside, rule("TinyDecoderLayer", "recompute", via="hook")))
        assert_same(train(model, steps=1), train(decoder(), steps=1))
        assert handle.stats().frames == (2 if not inside or inside[0]["action"] == "keep" else 4)
        counts.append(handle.stats().dropped_nbytes)
    assert counts[2] < counts[0] < counts[1]
