"""``apply`` on a model that is under a policy already, or has checkpointing of its own on; and how handles go."""

import gc
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import models
import pytest
import torch
from engine_testing import module_of, no_garbage_collection
from tiers import by_default
from tiny import HIDDEN, TinyDecoderLayer, assert_same, decoder, next_token_loss, rule, rules, snapshot, token_ids
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import recompute
from recompute.attach.apply import policy_on
from recompute.errors import AlreadyAppliedError, NoEffectError, PolicyError, PolicyWarning, UnsupportedError


def gradients(model):
    return list(torch.autograd.grad(next_token_loss(model, token_ids()), list(model.parameters())))


@pytest.mark.parametrize("policy", ["elementwise", "full", "none", "offload"])
def test_a_cell_of_a_notebook_runs_again(policy):
    model, before, expected = decoder(), snapshot(decoder()), gradients(decoder())
    handles = []
    for _ in range(3):
        handles.append(recompute.apply(model, policy, replace=True))
        assert_same(gradients(model), expected)
    assert [handle.removed for handle in handles] == [True, True, False]
    assert len({handle.stats().frames for handle in handles}) == 1  # of its own step each
    handles[0].remove()  # there is nothing of it to take off
    assert policy_on(model) is handles[2].policy
    handles[2].remove()
    assert snapshot(model).keys() == before.keys()
    assert all(vars(module).keys() == before[name][1].keys() for name, module in model.named_modules())
    assert all(type(module) is before[name][0] for name, module in model.named_modules())


def spoil(model):
    """Have ``apply`` find its mistake as late as it can."""
    model.model.layers[1].mlp.act_fn.forward = lambda x: x


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("nosuch", PolicyError),
        (rules(rule("Nothing")), NoEffectError),
        (rules(rule(["LlamaDecoderLayer", "SiLUActivation"], "keep")), UnsupportedError),
        (rules(rule("block"), rule("Nothing")), PolicyWarning),
    ],
    ids=["no policy", "no effect", "no forward", "a warning that is an error"],
)
def test_a_policy_stays_if_the_one_in_its_place_fails(policy, error):
    model = models.make("llama")
    model.gradient_checkpointing_enable()
    spoil(model)
    handle = recompute.apply(model, "full", replace_checkpointing=True)
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)
        with pytest.raises(error):
            recompute.apply(model, policy, replace=True, replace_checkpointing=True)
    assert snapshot(model) == before
    assert not handle.removed
    assert policy_on(model) is handle.policy
    handle.remove()
    assert model.model.layers[0].gradient_checkpointing is True


def test_replacing_takes_off_what_governs_modules_inside_but_no_decorator():
    model = decoder()
    inner = recompute.apply(model.layers[0], "full")
    outer = recompute.apply(model, replace=True)
    assert (inner.removed, outer.removed) == (True, False)
    model.layers[1] = recompute.recompute(type("Decorated", (TinyDecoderLayer,), {}))()
    with pytest.raises(AlreadyAppliedError, match=r"'layers\.1'.*its class is decorated"):
        recompute.apply(model, replace=True)
    assert not outer.removed


@pytest.mark.parametrize("way", ["apply", "instance", "class"])
def test_a_model_dies_with_its_last_reference_while_its_handle_lives(way):
    cls = type("Mine", (TinyDecoderLayer,), {"forward": TinyDecoderLayer.forward})
    if way == "class":
        recompute.recompute(cls)
    model = cls()
    if way == "apply":
        handle = recompute.apply(model)
    else:
        handle = cls.recompute_handle if way == "class" else recompute.recompute(model).recompute_handle
    for _ in range(5):  # until it is captured
        model(torch.randn(2, 3, HIDDEN)).sum().backward()
    assert "1 of 1 run as captured code" in handle.explain()
    with no_garbage_collection():
        reference = weakref.ref(model)
        del model
        assert reference() is None
    assert handle.explain().startswith("policy elementwise")


def test_so_does_one_that_its_state_hooks_read():
    model = decoder()
    recompute.apply(model, state_hooks=[(partial(getattr, model, "training"), nullcontext)])
    next_token_loss(model, token_ids()).backward()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def timms_way(self, x):
    """Checkpoints as timm's models do: its flag has it run its layers by torch's checkpoint."""
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False) if self.grad_checkpointing else layer(x)
    return x


def checkpointing(way):
    """A model that checkpoints, and how to run it."""
    torch.manual_seed(0)
    if way == "timm":
        layers = nn.ModuleList(TinyDecoderLayer() for _ in range(2))
        model, x = module_of(timms_way, grad_checkpointing=True, layers=layers), torch.randn(2, 8, HIDDEN)
        return model, lambda: model(x)
    model = models.make("llama")
    if way == "wrapper":
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = checkpoint_wrapper(layer)
    else:
        model.gradient_checkpointing_enable()
    batch = models.batch("llama") | {"use_cache": False}
    return model, lambda: model(**batch).loss


ADVICE = {
    "transformers": r"gradient_checkpointing in model, model\.layers\.0.*model\.gradient_checkpointing_disable\(\)",
    "wrapper": r"CheckpointWrapper in model\.layers\.0.*Remove checkpoint_wrapper",
    "timm": r"grad_checkpointing in the model.*Call model\.set_grad_checkpointing\(False\)",
}


@pytest.mark.parametrize("way", by_default([*ADVICE], "transformers", "wrapper", "timm"))
def test_a_models_own_checkpointing_is_told_or_turned_off_until_the_policy_goes(way):
    model, run = checkpointing(way)
    before = snapshot(model)
    with pytest.warns(PolicyWarning, match=f"its own checkpointing.*{ADVICE[way]}.*replace_checkpointing=True"):
        beside = recompute.apply(model)
    assert "its own checkpointing on" in beside.explain()
    by_itself = models.held(model, run)
    beside.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recompute.apply(model, "none").remove()  # does nothing in either case
        with recompute.apply(model, replace_checkpointing=True) as handle:
            assert models.held(model, run) > by_itself  # layers are no longer held as their inputs alone
            assert handle.stats().dropped_nbytes > 0
            assert "checkpointing on" not in handle.explain()
            recompute.apply(model, "full", replace=True, replace_checkpointing=True)
            recompute.apply(model, replace=True, replace_checkpointing=True).remove()
    assert snapshot(model) == before


def test_checkpointing_that_is_turned_on_later_stays_on():
    model, _ = checkpointing("transformers")
    handle = recompute.apply(model, replace_checkpointing=True)
    model.gradient_checkpointing_enable()
    assert "its own checkpointing on" in handle.explain()
    handle.remove()
    assert model.is_gradient_checkpointing
