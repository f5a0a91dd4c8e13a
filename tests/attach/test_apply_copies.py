"""Copies and pickles of a model under a policy are of the model without it."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from tiers import by_default, slow
from tiny import TinyDecoderLayer, decoder, next_token_loss, rule, rules, through_torch_save, token_ids, train
from torch import nn

import recompute

COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda model: through_torch_save(model, weights_only=False),
    **{
        f"pickle {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("how", by_default(list(COPIES), "torch.save"))
@pytest.mark.parametrize("preset", ["full", "kernel", *slow("hook", "elementwise", "auto")])
def test_copies_are_of_the_model_without_the_policy(how, preset):
    model, plain = decoder(), decoder()
    handle = recompute.apply(model, preset)
    train(model, steps=1)
    train(plain, steps=1)
    if preset == "kernel":  # within rounding only
        plain.load_state_dict(model.state_dict())
    loss = next_token_loss(model, token_ids())  # whose graph is alive
    copied = COPIES[how](model)
    assert_clean(copied, plain)
    frames = handle.stats().frames
    tiny.assert_same(train(copied), train(plain))
    assert handle.stats().frames == frames
    loss.backward()
    train(model, steps=1)
    assert handle.stats().frames > frames
    recompute.apply(copied, preset)


def assert_clean(copied, plain):
    for (name, module), original in zip(copied.named_modules(), plain.modules(), strict=True):
        assert type(module) is type(original), name
        assert vars(module).keys() == vars(original).keys(), name


def test_a_shallow_copy_is_clean_and_shares_what_it_would_share():
    layer = decoder().layers[0]
    recompute.apply(layer, rules(rule("TinyDecoderLayer")))
    copied = copy.copy(layer)
    assert_clean(copied, TinyDecoderLayer())
    assert copied.mlp is layer.mlp


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


class ReducesItself(nn.Linear):
    def __reduce__(self):
        return _rebuild, (type(self), dict(self.__dict__))


class KeepsState(nn.Linear):
    def __getstate__(self):
        return {"inner": dict(self.__dict__)}

    def __setstate__(self, state):
        self.__dict__.update(state["inner"])


def _rebuild(cls, attributes):
    module = cls.__new__(cls)
    module.__dict__.update(attributes)
    return module


@pytest.mark.parametrize("how", ["deepcopy", "pickle 2", f"pickle {pickle.HIGHEST_PROTOCOL}"])
@pytest.mark.parametrize("cls", [CopiesItself, ReducesItself, KeepsState])
def test_modules_that_copy_in_their_own_way_are_copied_clean(cls, how):
    module = cls(2, 2)
    handle = recompute.apply(module, rules(rule(cls.__name__)))
    copied = COPIES[how](module)
    assert_clean(copied, cls(2, 2))
    assert torch.equal(copied.weight, module.weight)
    module(torch.ones(2)).sum().backward()
    assert handle.stats().frames == 1  # the original is still under its policy


LOAD_WITHOUT_US = """
import pickle, sys
sys.modules["recompute"] = None
import torch
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        loads = (lambda: torch.load(file, weights_only=False)) if path.endswith(".pt") else (lambda: pickle.load(file))
        model = loads()
    assert not [key for module in model.modules() for key in vars(module) if "recompute" in key]
    model(torch.zeros(2, 6, dtype=torch.long)).sum().backward()
assert sys.modules["recompute"] is None
"""


@pytest.mark.slow
def test_what_is_saved_loads_where_this_package_is_not_installed(tmp_path):
    model = decoder()
    recompute.apply(model, "hook")
    paths = [tmp_path / f"{protocol}.pickle" for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)]
    for path in paths:
        path.write_bytes(pickle.dumps(model, int(path.stem)))
    torch.save(model, tmp_path / "model.pt")
    subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_US, *map(str, paths), str(tmp_path / "model.pt")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        cwd=tmp_path,
        check=True,
    )
