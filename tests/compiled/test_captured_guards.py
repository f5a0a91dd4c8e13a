"""What changes after a region was captured: code that no longer fits does not run, and what runs gives the same."""

import functools
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from capture_testing import (
    ROWS,
    SIZE,
    Around,
    DroppingBlock,
    Layers,
    Twins,
    body,
    captured_twins,
    linear,
    rule,
    stepping,
    tokens,
    train,
)
from engine_testing import RMSNorm, set_by
from tiers import by_default, slow
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as all_modules

from recompute.compiled.captured_region import Observing
from recompute.engine.numerics import Numerics


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(1)
    return train(tokens())


@pytest.fixture
def twins(step):
    return Twins(Around(DroppingBlock())).settle(step)


def double_output(module, args, output):
    return output * 2


def forward_of_its_own(module):
    up = module.inside.up
    up.forward = lambda x: F.linear(x, up.weight) * 3


def seeded(make, put):
    return lambda module: (torch.manual_seed(5), put(module, make()))


CHANGES = {
    "attribute": lambda m: setattr(m.inside, "scale", 2.5),
    "flag": lambda m: setattr(m.inside, "is_scaled", False),
    "dropout rate": lambda m: setattr(m.inside.dropout, "p", 0.5),
    "dropout off": lambda m: setattr(m.inside.dropout, "p", 0.0),
    "module of another class": lambda m: setattr(m.inside, "norm", nn.Identity()),
    "module without bias": seeded(
        lambda: nn.Linear(SIZE, 2 * SIZE, bias=False), lambda m, new: setattr(m.inside, "up", new)
    ),
    "frozen weight": lambda m: m.inside.up.weight.requires_grad_(False),
    "frozen norm": lambda m: m.inside.norm.requires_grad_(False),
    "forward hook": lambda m: m.inside.up.register_forward_hook(double_output),
    "forward pre-hook": lambda m: m.inside.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "backward hook": lambda m: m.inside.up.register_full_backward_hook(lambda module, given, _: (given[0] * 2,)),
    "forward on the instance": forward_of_its_own,
    "evaluation": lambda m: m.eval(),
    "part in evaluation": lambda m: m.inside.dropout.eval(),
}


@pytest.mark.parametrize("steps", [2, *slow(7)], ids=["", "and is made anew"])
@pytest.mark.parametrize(
    "change",
    by_default(
        CHANGES, *(CHANGES.keys() - {"dropout off", "frozen norm", "part in evaluation", "module without bias"})
    ),
)
def test_code_does_not_run_where_what_it_was_made_for_has_changed(twins, step, change, steps):
    twins.both(change)
    assert twins.runs_code(step) == 0
    twins.steps(step, steps)


SAME_CODE = {
    "another weight": seeded(
        lambda: nn.Parameter(torch.randn(2 * SIZE, SIZE)), lambda m, new: setattr(m.inside.up, "weight", new)
    ),
    "another module": seeded(lambda: nn.Linear(SIZE, 2 * SIZE), lambda m, new: setattr(m.inside, "up", new)),
    "other data": seeded(lambda: torch.randn(2 * SIZE, SIZE), lambda m, new: setattr(m.inside.up.weight, "data", new)),
}


@pytest.mark.parametrize("change", SAME_CODE.values(), ids=SAME_CODE)
def test_code_runs_on_other_weights(twins, step, change):
    twins.both(change)
    assert twins.runs_code(step) == 1


class Scale:
    def of(self, x):
        return x * 1.5

    @classmethod
    def by_class(cls, x):
        return x * 2.5

    @property
    def factor(self):
        return self.half()

    def half(self):
        return 0.5


Shift = type("Shift", (nn.Module,), {"forward": lambda self, x: x + 1})


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.shift, self.scale = linear(), Shift(), Scale()

    def scaled(self, x):
        return Scale.by_class(self.scale.of(x)) * self.scale.factor

    def forward(self, x):
        return F.gelu(self.scaled(self.shift(self.linear(x))))


class ScaledTwice(Scaled):
    def scaled(self, x):
        return super().scaled(super().scaled(x))


def tripled(self, x):
    return x * 3


METHODS = {
    "forward of a part": (Shift, "forward", tripled),
    "forward of torch's": (nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
    "method": (Scaled, "scaled", tripled),
    "method in a subclass": (ScaledTwice, "scaled", tripled),
    "method of an object": (Scale, "of", tripled),
    "method of a class": (Scale, "by_class", classmethod(tripled)),
    "property": (Scale, "factor", property(lambda self: 3.0)),
    "method of a property": (Scale, "half", lambda self: 3.0),
    "code of a method": (Scale.of, "__code__", tripled.__code__),
    "code of a property": (Scale.factor.fget, "__code__", (lambda self: 3.0).__code__),
}


@pytest.mark.parametrize("replaced", by_default(METHODS, "method in a subclass", "property"))
def test_code_does_not_run_where_a_method_has_been_replaced(monkeypatch, step, replaced):
    twins = Twins(Around(ScaledTwice())).settle(step)
    monkeypatch.setattr(*replaced)
    assert twins.runs_code(step) == 0
    twins.settle(step)
    monkeypatch.undo()
    assert twins.runs_code(step) == 0


Table, Row = type("Table", (dict,), {}), type("Row", (tuple,), {})


class Configured(nn.Module):
    def __init__(self, kind, grows):
        super().__init__()
        self.linear, self.config, self.grows = linear(), kind(), grows
        self.config.scale = 0.5
        if grows:
            self.config.rows = []

    def forward(self, x):
        if self.grows:
            self.config.rows.append(0)
        return self.linear(x).sin() * (len(self.config.rows) if self.grows else self.config.scale)


@pytest.mark.parametrize("kind", [Table, Row])
def test_code_does_not_run_where_an_attribute_of_a_dict_or_a_tuple_has_changed(step, kind):
    """No guard of torch's tells."""
    twins = Twins(Around(Configured(kind, grows=False))).settle(step)
    assert twins.runs_code(step) == 1
    twins.both(lambda model: setattr(model.inside.config, "scale", 2.0))
    assert twins.runs_code(step) == 0


@pytest.mark.parametrize("kind", [Table, Row])
def test_what_forward_puts_into_an_attribute_of_a_dict_or_a_tuple_is_there_at_each_step(step, kind):
    twins = Twins(Around(Configured(kind, grows=True)))
    twins.steps(step, 9)
    assert len(twins.under.inside.config.rows) == len(twins.plain.inside.config.rows) == 9


class Number:
    pass


ONE, OTHER = Number(), Number()
COMPARED = {
    "objects": (lambda m: m.one is m.other, lambda m: (ONE, OTHER)),
    "objects, by equality": (lambda m: m.one == m.other, lambda m: (ONE, OTHER)),
    "objects in lists": (lambda m: m.one in [m.other], lambda m: (ONE, OTHER)),
    "lists": (lambda m: m.one is m.other, lambda m: ([1.0], [1.0])),
    "dicts": (lambda m: m.one is m.other, lambda m: ({}, {})),
    "modules": (lambda m: m.one is m.other, lambda m: (nn.Tanh(), nn.Tanh())),
    "parameters": (lambda m: m.one is m.other, lambda m: (m.linear.bias, nn.Parameter(torch.ones(SIZE)))),
}


@pytest.mark.parametrize("is_same", [*slow(True), False])
@pytest.mark.parametrize(("compare", "make"), COMPARED.values(), ids=COMPARED)
def test_code_does_not_run_where_two_that_it_compares_are_the_same_now_or_no_longer(step, compare, make, is_same):
    def put(model, is_same):
        one, other = pairs.setdefault(model, make(model.inside))
        model.inside.one, model.inside.other = one, one if is_same else other

    inside = body(lambda self, x: self.linear(x).sin() * (2.0 if compare(self) else 3.0), linear=linear())
    twins, pairs = Twins(Around(inside)), {}
    twins.both(lambda model: put(model, is_same))
    twins.settle(step)
    assert twins.runs_code(step) == 1
    twins.both(lambda model: put(model, not is_same))
    assert twins.runs_code(step) == 0


@pytest.mark.parametrize("list_of", [list, tuple, set])
def test_code_does_not_run_where_numbers_of_a_class_have_changed(step, list_of):
    kind = type("Kind", (), {"numbers": list_of([2.0])})
    inside = body(lambda self, x: self.linear(x).sin() * sum(kind.numbers), linear=linear())
    twins = Twins(Around(inside)).settle(step)
    assert twins.runs_code(step) == 1
    kind.numbers = list_of([3.0])
    assert twins.runs_code(step) == 0


def test_code_does_not_run_where_the_call_of_every_module_has_been_replaced(monkeypatch, twins, step):
    def called_twice(self, *args, **kwargs):
        return self._call_impl(*args, **kwargs) + self._call_impl(*args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", called_twice)
    for _ in range(3):
        assert twins.runs_code(step) == 0


def test_code_runs_again_when_all_is_as_it_was(twins, step):
    hooks = []
    twins.both(lambda m: hooks.append(m.inside.up.register_forward_hook(double_output)))
    assert twins.runs_code(step) == 0
    for hook in hooks:
        hook.remove()
    assert twins.runs_code(step) == 1
    twins.both(lambda m: m.inside.up.weight.requires_grad_(False))
    assert twins.runs_code(step) == 0
    twins.both(lambda m: m.inside.up.weight.requires_grad_(True))
    assert twins.runs_code(step) == 1


def test_code_does_not_run_while_modules_have_hooks_for_all(twins, step):
    with all_modules.register_module_forward_hook(lambda module, args, output: output * 2):
        assert twins.runs_code(step) == 0
    assert twins.runs_code(step) == 1


INPUTS = {
    "rows": lambda: (tokens(ROWS + 1, SIZE),),
    "dimensions": lambda: (tokens(2, ROWS, SIZE),),
    "strides": lambda: (tokens(SIZE, ROWS).detach().t().requires_grad_(),),
    "no gradient": lambda: (tokens(grad=False),),
    "a mask": lambda: (tokens(), tokens(grad=False)),
    "a mask with a gradient": lambda: (tokens(), tokens()),
}


@pytest.mark.parametrize("inputs", by_default(INPUTS, "strides", "a mask"))
def test_other_inputs(twins, step, inputs):
    other = train(*inputs())
    assert twins.runs_code(other) == 0
    twins.steps(other, 7)
    assert twins.runs_code(step) == 1


def test_keywords_and_none(twins):
    x, mask = tokens(), tokens(grad=False)
    twins.step(train(x, mask=mask))
    twins.step(train(x, mask=None))
    twins.step(train(x, None))


def test_another_dtype(twins, step):
    twins.both(lambda module: module.double())
    assert twins.runs_code(train(tokens(dtype=torch.float64))) == 0
    twins.both(lambda module: module.float())
    assert twins.runs_code(step) == 1


def sliced(offset):
    """A step on a part of a larger tensor."""
    torch.manual_seed(5)
    whole = torch.randn(3 * ROWS, SIZE, requires_grad=True)
    return stepping(whole, lambda module, x: module(x[offset : offset + ROWS]))


PLACES = {
    "itself": (lambda self, x: self.lin(x) * x, True),
    "a view": (lambda self, x: self.lin(x[1:]) * x[:-1].detach(), True),
    "in the same place": (lambda self, x: self.lin(x * x.detach().as_strided((ROWS, SIZE), (SIZE, 1))), True),
    "in a place of the storage": (
        lambda self, x: self.lin(x * x.detach().as_strided((ROWS, SIZE), (SIZE, 1), SIZE)),
        False,
    ),
    "as another dtype": (lambda self, x: self.lin(x * (x.view(torch.int32) % 2 == 0)), False),
}


@pytest.mark.parametrize(("forward", "runs"), PLACES.values(), ids=PLACES)
def test_an_input_that_starts_elsewhere_in_its_storage(forward, runs):
    twins = Twins(Around(body(forward, lin=linear()))).settle(sliced(0))
    assert twins.runs_code(sliced(2)) == runs
    assert twins.runs_code(sliced(0)) == 1


def test_inputs_that_share_memory_and_did_not_before():
    two = body(lambda self, x, y: self.lin(x) * torch.sigmoid(y) + x, lin=linear())
    twins = Twins(Around(two)).settle(train(tokens(), tokens()))
    for second in (lambda x: x, lambda x: x.view_as(x), lambda x: x.detach(), lambda x: x.flip(0)):
        twins.step(stepping(tokens(), lambda module, x: module(x, second(x))))  # noqa: B023


doubles = functools.partial(set_by, torch.set_default_dtype, torch.float64, torch.float32)
deterministic = functools.partial(set_by, torch.use_deterministic_algorithms, True, False)
bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
SETTINGS = {"default dtype": doubles, "determinism": deterministic, "autocast": bfloat16}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_around_forward_or_backward_alone_or_both(setting):
    x = tokens()

    def forward(self, x):
        return F.gelu(self.lin(x)) * torch.ones(SIZE) * torch.tensor(0.1)

    twins = Twins(Around(body(forward, lin=linear()))).settle(stepping(x))
    assert twins.runs_code(stepping(x, forward=setting)) == 0
    assert twins.runs_code(stepping(x, backward=setting)) == 1
    assert twins.runs_code(stepping(x, forward=setting, backward=setting)) == 0


@pytest.mark.parametrize("setting", [doubles, functools.partial(sdpa_kernel, SDPBackend.MATH)])
def test_a_forward_that_changes_a_setting_is_captured_if_that_only_chooses_attentions_ops(setting):
    def forward(self, x):
        with setting():
            y = F.scaled_dot_product_attention(x, x, x) * torch.rand(SIZE)
        return self.lin(x) * y.sin().to(x.dtype)

    twins = Twins(Around(body(forward, lin=linear()))).settle(train(tokens()), captured=setting is not doubles)
    assert twins.why_not == ("its forward changes torch's settings" if setting is doubles else "")


@pytest.mark.parametrize("setting", [nullcontext, *SETTINGS.values()], ids=["none", *SETTINGS])
def test_an_output_that_others_saved_comes_back_under_the_settings_of_forward(setting, monkeypatch):
    """Where these are in force, none is put in force again: that takes as long as a norm."""
    x, put, replayed = tokens(), [], Numerics.replayed
    twins = captured_twins(RMSNorm(), x)
    monkeypatch.setattr(Numerics, "replayed", lambda settings: put.append(settings) or replayed(settings))

    before = twins.handle.stats()
    assert twins.runs_code(stepping(x, backward=setting)) == 1
    assert (twins.handle.stats() - before).regenerations
    assert bool(put) is (setting is not nullcontext)


def test_settings_that_stay_have_code_of_their_own(twins, step):
    with deterministic():
        twins.settle(step)
        assert twins.runs_code(step) == 1
    assert twins.runs_code(step) == 1


def test_attention_that_takes_another_algorithm_now():
    def forward(self, x):
        heads = self.lin(x).view(1, 1, ROWS, SIZE)
        return F.scaled_dot_product_attention(heads, heads, heads)[0, 0]

    step = train(tokens())
    twins = Twins(Around(body(forward, lin=linear()))).settle(step)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert twins.runs_code(step) == 0
        twins.settle(step)
        assert twins.runs_code(step) == 1
    assert twins.runs_code(step) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(twins, step, mode):
    x = tokens(grad=False)

    def evaluate(module):
        torch.manual_seed(0)
        with mode():
            return module(x)

    assert twins.runs_code(evaluate) == 0
    assert twins.runs_code(step) == 1


def attention(self, x):
    q, k, v = (project(x).unflatten(-1, (2, -1)).transpose(0, 1)[None] for project in (self.q, self.k, self.v))
    return x + F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


@contextmanager
def another_attention():
    """Deterministic algorithms choose another backend on CUDA; here it is switched."""
    with deterministic(), set_by(torch.backends.cuda.enable_flash_sdp, False, True):  # the CPU's attention asks, too
        yield


@pytest.mark.parametrize("in_force", [*slow("for some frames"), "for the frame that is recorded"])
def test_equal_layers_are_captured_anew_under_settings_that_choose_other_ops(in_force):
    model = Layers(5)
    for layer in model.layers:
        layer.mixer = body(attention, q=linear(), k=linear(), v=linear())
    twins, step = Twins(model, rule("layers.*")), train(tokens())
    with another_attention():
        if in_force == "for some frames":
            twins.settle(step)
        else:
            while not any(isinstance(region.state, Observing) for region in twins.regions):
                twins.step(step)
    twins.settle(step)
