"""A model whose forward another library has replaced on the instance, as accelerate and TRL do."""

import copy
import functools
import inspect
from types import MethodType

import pytest
import torch
from tiny import assert_same, decoder, rule, rules, train

import recompute
from recompute.counters import step_memory
from recompute.errors import UnsupportedError


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
