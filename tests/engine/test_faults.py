"""What goes wrong goes wrong as in plain eager, or earlier and by name; and it leaves nothing behind."""

import copy
import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from engine_testing import SETTINGS, Boom, assert_same, bits, holding, module_of, no_garbage_collection, policed, tokens
from tiers import by_default
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import recompute
from recompute.engine import rng, saved_tensors
from recompute.engine.host import offload
from recompute.engine.thread_state import local
from recompute.errors import RegenerationError

RULES = {**SETTINGS, "offload": {"action": "offload", "min_bytes": 0}}


class Faults:
    """Counts the points that a step passes, and raises at number ``at``: an error, or an interruption."""

    def __init__(self, at=0):
        self.at = at
        self.passed = 0

    def point(self):
        self.passed += 1
        if self.passed == self.at:
            raise (Boom, KeyboardInterrupt)[self.at % 2]


@contextmanager
def in_ops(faults):
    """At every op below autograd, of forward, of regeneration and of backward."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            faults.point()
            return op(*args, **(kwargs or {}))

    with Mode():
        yield


@contextmanager
def in_hooks_around(faults):
    """At everything that saved-tensor hooks around the model pack and unpack."""

    def passed(tensor):
        faults.point()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(passed, passed):
        yield


@contextmanager
def in_hooks_on_modules(faults):
    """At every call of a module, before and after it, and at the gradient of what it returns."""

    def before(module, args):
        faults.point()

    def after(module, args, result):
        faults.point()
        result.register_hook(lambda gradient: faults.point())

    hooks = nn.modules.module.register_module_forward_pre_hook, nn.modules.module.register_module_forward_hook
    handles = [register(hook) for register, hook in zip(hooks, (before, after), strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_generators(faults):
    """Whenever the state of a random generator has been taken or put back."""

    def passing(original):
        def passed(*args):
            result = original(*args)
            faults.point()
            return result

        return passed

    with pytest.MonkeyPatch.context() as patch:
        for name in ("state", "restore"):
            patch.setattr(rng.CpuSource, name, passing(getattr(rng.CpuSource, name)))
        yield


POINTS = (in_ops, in_hooks_around, in_hooks_on_modules, in_generators)


def layer():
    def forward(self, x):
        self.calls += 1
        hidden = F.silu(self.up(self.norm(x)))
        hidden = F.dropout(hidden * torch.rand_like(hidden), 0.3).clone().mul_(2.0)
        return x + self.down(hidden.exp())

    return module_of(forward, norm=nn.BatchNorm1d(8), up=nn.Linear(8, 8), down=nn.Linear(8, 8, bias=False), calls=0)


class Trial:
    """One model, and what a step of it gives."""

    def __init__(self):
        self.model = nn.Sequential(layer(), layer())
        self.x = tokens()
        self._start = copy.deepcopy(self.model.state_dict())

    def step(self, around=None):
        self.model.train().load_state_dict(self._start)
        torch.manual_seed(3)
        with around or nullcontext():
            return self._step()

    def _step(self):
        result = self.model(self.x)
        self.model.eval()  # what runs again runs as in training, and leaves it so
        before = self._state()
        wanted = [self.x, *self.model.parameters()]
        loss, self.retried = result.sum(), None
        try:
            gradients = torch.autograd.grad(loss, wanted, retain_graph=True)
        except (Boom, KeyboardInterrupt):
            assert self._state() == before
            gradients = torch.autograd.grad(loss, wanted)
            self.retried = self._values(result, gradients)
            raise
        finally:
            assert self._state() == before
        return self._values(result, gradients)

    def _state(self):
        tensors = [torch.get_rng_state(), *self.model.buffers()]
        flags = [module.training for module in self.model.modules()]
        return [*map(bits, tensors), [layer.calls for layer in self.model], flags]

    def _values(self, result, gradients):
        values = [result, *gradients, *self.model.buffers()]
        return {str(index): value.detach().clone() for index, value in enumerate(values)}


@pytest.mark.parametrize("at_all_points", by_default({"some points": False, "all points": True}, "some points"))
@pytest.mark.parametrize("points", POINTS, ids=lambda points: points.__name__)
@pytest.mark.parametrize(
    "frames", by_default({"in the first frame": 0, "in the second frame": 1}, "in the second frame")
)
@pytest.mark.parametrize("rule", by_default(RULES, "recompute", "checkpoint"))
def test_an_exception_at_any_point_of_a_step_leaves_nothing_behind_and_a_retry_and_the_next_step_are_right(
    rule, frames, points, at_all_points
):
    trial = Trial()
    expected = trial.step()

    for count in (Faults(), Faults()):  # the first time, frames learn what later ones go by
        with recompute.apply(trial.model, {"rules": [{"match": "*", **rule}]}):
            for _ in range(frames):
                trial.step()
            trial.step(points(count))
    assert (count.passed > 0) is (rule["action"] != "offload" or points is not in_generators)  # it draws nothing again
    for at in {*range(1, count.passed + 1, 1 if at_all_points else max(count.passed // 8, 1)), count.passed} - {0}:
        under = recompute.apply(trial.model, {"rules": [{"match": "*", **rule}]})
        with under, no_garbage_collection() as engine_objects:
            for _ in range(frames):
                trial.step()
            with pytest.raises((Boom, KeyboardInterrupt)):
                trial.step(points(Faults(at)))
            assert engine_objects() == {}
            assert not offload._copies
            assert saved_tensors.top_hooks() is None
            assert (local.books, local.active_frames, local.regenerating) == ([], [], 0)
            assert _get_current_dispatch_mode_stack() == []
            assert torch.is_grad_enabled()
            assert trial.retried is None or assert_same(trial.retried, expected) is None, "a backward that runs again"
            assert_same(trial.step(), expected)


# What does not run the same way twice


def changing(forward):
    """A region whose ``forward`` is told how often it has run, by something that no engine can know of."""
    runs = itertools.count(1)  # its state is in C
    return policed(holding(lambda self, x: forward(x, next(runs))))


def _one_more(x, run):
    if run == 2:
        (x * 2).exp()
    return (x * 3).exp().sin().sum()


DRIFTS = {
    "shape": (lambda x, run: x[: 5 if run == 1 else 3].exp().sum(), r"\(5, 8\).*\(3, 8\).*exp"),
    "shape of a draw": (lambda x, run: F.dropout(x[: 5 if run == 1 else 3], 0.5).exp().sum(), r"\(5, 8\).*\(3, 8\)"),
    "dtype": (lambda x, run: x.to(torch.float64 if run == 1 else x.dtype).exp().sum(), r"float64.*float32.*exp"),
    "other tensor": (lambda x, run: (x if run == 1 else x * 1).cos().exp().sin().sum(), r"tensor 0 .*\(6, 8\).*cos"),
    "fewer": (lambda x, run: _repeat(torch.cos, 3 if run == 1 else 2, x.exp()).sum(), r"4 tensors in forward, 3 "),
    "one more ahead of the others, of the same shape": (_one_more, ""),
    "another op": (lambda x, run: (x * 3 if run == 1 else x[:, :1].exp() * x).exp().sum(), r"\(6, 8\).*\(6, 1\).*exp"),
}


def _repeat(function, times, x):
    for _ in range(times):
        x = function(x)
    return x


@pytest.mark.parametrize("kind", DRIFTS)
def test_checkpoint_refuses_a_region_that_saves_something_else_shows_both_and_goes_on(kind):
    forward, message = DRIFTS[kind]
    model = changing(forward)
    result = model(tokens())
    before = bits(torch.get_rng_state())
    with pytest.raises(RegenerationError, match=rf"(?s)inside.*{message}"):
        result.backward()
    assert bits(torch.get_rng_state()) == before
    model(tokens()).backward()
