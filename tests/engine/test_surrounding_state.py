"""What forward reads besides its arguments and its modules: backward finds it as forward did (invariant 11)."""

import contextvars
import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_testing import HIDDEN, bits, function_of, governing, in_threads, module_of, tokens, twins_of
from tiers import one_in
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import recompute
from recompute.errors import MutationError


class Settings:
    of_the_class = 1.0
    __slots__ = ("__dict__", "in_a_slot")


def _variable_of_a_closure():
    value = 1.0

    def put(new):
        nonlocal value
        value = new

    return lambda: value, put


VARIABLE = contextvars.ContextVar("scale", default=1.0)
LOCAL, SETTINGS = threading.local(), Settings()
SEALED = type("Sealed", (Settings,), {"in_a_slot": property(Settings.in_a_slot.__get__)})()
NUMBER, ENTRIES, ITEMS, NESTED = 1.0, {"scale": 1.0}, [1.0], {"inside": [1.0]}
CELL, PUT_IN_CELL = _variable_of_a_closure()
ARRAY = np.ones(())

READS = {
    "context variable": VARIABLE.get,
    "thread local": lambda: LOCAL.scale,
    "global": lambda: NUMBER,
    "entry of a dict": lambda: ENTRIES["scale"],
    "item of a list": lambda: ITEMS[0],
    "list inside of a dict": lambda: NESTED["inside"][0],
    "array without dimensions": lambda: float(ARRAY),
    "environment": lambda: float(os.environ["RECOMPUTE_TESTS_SCALE"]),
    "environment by getenv": lambda: float(os.getenv("RECOMPUTE_TESTS_SCALE", "1")),
    "closure": CELL,
    "attribute": lambda: SETTINGS.scale,
    "attribute by a constant name": lambda: getattr(SETTINGS, "scale"),  # noqa: B009
    "attribute in a slot": lambda: SETTINGS.in_a_slot,
    "slot behind a property": lambda: SEALED.in_a_slot,
    "attribute of a class": lambda: Settings.of_the_class,
    "attribute of a class by an instance": lambda: SETTINGS.of_the_class,
}


def put(value):
    global NUMBER
    NUMBER = ENTRIES["scale"] = ITEMS[0] = NESTED["inside"][0] = ARRAY[()] = value
    LOCAL.scale = SETTINGS.scale = SETTINGS.in_a_slot = Settings.of_the_class = value
    Settings.in_a_slot.__set__(SEALED, value)
    os.environ["RECOMPUTE_TESTS_SCALE"] = str(value)
    VARIABLE.set(value)
    PUT_IN_CELL(value)


def reader(read):
    forward = lambda self, x: x + (self.up(x.sin()) * self.read[0]()).tanh()  # noqa: E731
    return around(module_of(forward, read=[read], up=nn.Linear(HIDDEN, HIDDEN)))


def around(inside):
    return module_of(lambda self, *args: self.inside(*args).sin(), inside=inside)


def gradients(model, x, steps):
    """Those of steps in each of which forward reads a value, and backward would read another one."""
    found = []
    for value in steps:
        put(value)
        loss = model(x).sum()
        put(7.0)
        found += map(bits, torch.autograd.grad(loss, [x, *model.parameters()]))
        for read in READS.values():
            assert read() == 7.0, "a second run leaves all as it is"
    return found


@pytest.mark.parametrize("capture", [False, True], ids=["not captured", "captured"])
@pytest.mark.parametrize("place", one_in(2, list(READS)))
def test_a_region_that_runs_again_reads_what_forward_read(place, capture):
    (governed, plain), x = twins_of(reader(READS[place])), tokens()
    handle = recompute.apply(governed, governing({"action": "checkpoint", "capture": capture}))
    steps = (2.0,) * 7 + (3.0, 2.0) if capture else (2.0, 3.0)  # the last ones meet other code than was captured
    assert gradients(governed, x, steps) == gradients(plain, x, steps)
    assert handle.stats().dropped_tensors


def test_a_decorated_function_and_a_backward_on_another_thread_read_what_forward_read():
    scale = recompute.recompute(
        lambda x: (x.sin() * VARIABLE.get() * LOCAL.scale * ENTRIES["scale"]).exp(),
        policy={"rules": [{"match": "**", "action": "checkpoint"}]},
    )
    x = tokens()
    put(2.0)
    expected = torch.autograd.grad((x.sin() * 8.0).exp().sum(), x)[0]
    loss, found = scale(x).sum(), []
    in_threads(lambda: found.append(torch.autograd.grad(loss, x)[0]))
    torch.testing.assert_close(found[0], expected)


def test_what_forward_changes_in_its_surroundings_it_changes_once():
    log = []
    counts = {"runs": 0}

    def forward(x):
        counts["runs"] += 1
        log.append(counts["runs"])
        return (x * counts["runs"]).exp().sin()

    run = recompute.recompute(forward, policy={"rules": [{"match": "**", "action": "checkpoint"}]})
    x = tokens()
    for number in (1, 2, 3):
        assert torch.equal(torch.autograd.grad(run(x).sum(), x)[0], _gradient_of(x, number))
    assert (counts, log) == ({"runs": 3}, [1, 2, 3])


def _gradient_of(x, number):
    return torch.autograd.grad((x * number).exp().sin().sum(), x)[0]


def test_a_function_and_an_object_that_come_in_later_runs_are_looked_into():
    class Box(SimpleNamespace):
        def read(self):
            return self.value

    model, x = reader(lambda: 1.0), tokens()
    recompute.apply(model, governing({"action": "checkpoint", "capture": False}))
    model(x).sum().backward()
    for value in (2.0, 3.0):
        box = Box(value=value)
        model.inside.read[0] = box.read
        expected = torch.autograd.grad(model.eval()(x).sum(), x)[0]
        loss = model.train()(x).sum()
        box.value = 5.0
        assert bits(torch.autograd.grad(loss, x)[0]) == bits(expected)


def fast_weights(step):
    """Meta-gradients as ``higher`` takes them: a closure holds a list of weights, and each step makes others."""
    torch.manual_seed(2)
    start = [torch.randn(HIDDEN, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    box = [start]

    def forward(x):
        for weight in box[0]:
            x = (x @ weight).tanh()
        return x

    run, x = step(forward), tokens().double()
    for _ in range(3):
        gradients = torch.autograd.grad(run(x).square().mean(), box[0], create_graph=True)
        box[0] = [weight - 0.5 * gradient for weight, gradient in zip(box[0], gradients, strict=True)]
    return [bits(each) for each in torch.autograd.grad(run(x).square().mean(), start)]


def test_weights_that_a_closure_holds_and_each_step_replaces_give_the_meta_gradients_of_plain_pytorch():
    checkpointed = recompute.recompute(policy={"rules": [{"match": "**", "action": "checkpoint"}]})
    assert fast_weights(checkpointed) == fast_weights(lambda forward: forward)


def test_a_module_to_which_a_library_copies_anothers_attributes_is_itself_what_runs_again():
    model, x = around(nn.Linear(HIDDEN, HIDDEN)), tokens()
    recompute.apply(model, governing({"action": "checkpoint", "capture": False}))
    clone = object.__new__(type(model.inside))
    vars(clone).update(vars(model.inside))
    weight = (model.inside.weight * 2.0).detach().requires_grad_()
    clone._parameters = {**model.inside._parameters, "weight": weight}
    expected = torch.autograd.grad(F.linear(x, weight, model.inside.bias).sum(), x)[0]
    loss = clone(x).sum()
    clone._parameters["weight"] = model.inside.weight
    assert bits(torch.autograd.grad(loss, x)[0]) == bits(expected)


def test_a_tensor_in_a_list_of_a_closure_that_is_changed_in_place_is_refused():
    weights = [torch.randn(HIDDEN, HIDDEN, requires_grad=True)]
    run = recompute.recompute(
        lambda x: (x @ weights[0]).exp(), policy={"rules": [{"match": "**", "action": "checkpoint"}]}
    )
    loss = run(tokens()).sum()
    with torch.no_grad():
        weights[0].mul_(2.0)
    with pytest.raises(MutationError, match="modified in place between forward and backward"):
        loss.backward()


def test_state_hooks_note_in_forward_what_is_in_force_again_in_backward():
    hidden = iter([2.0, 5.0])  # as a setting of a library in C
    now = [next(hidden)]
    read = now.__getitem__  # a checkpoint does not see what this leads to
    note, spans = now.__setitem__, []

    @contextmanager
    def restored(value):
        before = read(0)
        note(0, value)
        spans.append(value)
        yield
        note(0, before)

    (model, plain), x = twins_of(reader(lambda: read(0))), tokens()
    expected = bits(torch.autograd.grad(plain(x).sum(), x)[0])
    recompute.apply(model, governing({"action": "checkpoint"}), state_hooks=[(lambda: read(0), restored)])
    loss = model(x).sum()
    note(0, next(hidden))
    assert bits(torch.autograd.grad(loss, x)[0]) == expected
    assert (now, spans) == ([5.0], [2.0])


def test_state_hooks_that_are_no_pairs_of_functions_are_refused():
    with pytest.raises(TypeError, match=r"pairs of functions, \(snapshot, restored\)"):
        recompute.apply(around(nn.Linear(2, 2)), "none", state_hooks=[lambda: None])


class Quantized(Tensor):
    """Codes and a scale, as a quantized weight has."""

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def plain(self):
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale)
        unwrap = lambda value: value.plain() if isinstance(value, Quantized) else value  # noqa: E731
        return op(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Flattened(Quantized):
    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Flattened(inner["codes"], inner["scale"])


ByWrapper = function_of(
    lambda x, weight: x @ weight.plain(),
    lambda gradient, weight: (gradient @ weight.plain().t(), None),
    saves=lambda result, x, weight: (weight,),
)


WHERE = {
    "parameter": lambda module, weight: setattr(module, "weight", nn.Parameter(weight, requires_grad=False)),
    "buffer": lambda module, weight: module.register_buffer("weight", weight),
    "attribute": lambda module, weight: setattr(module, "weight", weight),
    "argument": lambda module, weight: None,
}


def wraps(self, x, *weight):
    return x + ByWrapper.apply(self.norm(x), *(weight or (self.weight,))).tanh()


def wrapping(kind, where):
    """A model with a wrapper, its arguments, and the wrapper."""
    weight = kind(torch.randint(-3, 3, (HIDDEN, HIDDEN), dtype=torch.int8), torch.rand(HIDDEN, 1))
    model, x = around(module_of(wraps, norm=nn.LayerNorm(HIDDEN))), tokens()
    WHERE[where](model.inside, weight)
    return model, (x, weight) if where == "argument" else (x,), weight


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", [Quantized, Flattened], ids=["without a flatten", "with a flatten"])
def test_wrappers_are_the_same_if_they_hold_the_same(kind, where):
    model, args, _ = wrapping(kind, where)

    def step():
        return [*map(bits, torch.autograd.grad(model(*args).sum(), [args[0], *model.inside.norm.parameters()]))]

    expected = step()
    with recompute.apply(model, governing({"action": "checkpoint"})):
        for _ in range(6):
            assert step() == expected


@pytest.mark.parametrize("where", ["parameter", "attribute", "argument"])
@pytest.mark.parametrize("kind", [Quantized, Flattened], ids=["without a flatten", "with a flatten"])
def test_a_wrapper_whose_parts_are_changed_in_place_before_backward_is_refused(kind, where):
    model, args, weight = wrapping(kind, where)
    recompute.apply(model, governing({"action": "checkpoint", "capture": False}))
    loss = model(*args).sum()
    weight.scale.mul_(2.0)
    with pytest.raises(MutationError):
        loss.backward()
