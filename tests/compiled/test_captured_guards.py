"""What changes after a region was captured: code that no longer fits does not run, and what runs gives the same."""

import functools
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import capture_testing
import pytest
import torch
import torch.nn.functional as F
from capture_testing import ROWS, SIZE, Around, DroppingBlock, Twins, body, linear, rule, stepping, tokens, train
from engine_testing import RMSNorm, set_by
from tiers import by_default, one_in, slow
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as all_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.compiled.captured_region import Observing
from recompute.engine.bit_comparison import verifying
from recompute.engine.numerics import Numerics


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(1)
    return train(tokens())


@pytest.fixture
def twins(step):
    return Twins(Around(DroppingBlock())).settle(step)


# Modules, and what they have


class Change(NamedTuple):
    """What happens to a captured module, and whether its code runs then."""

    change: Callable[[Any], Any]
    inside: Callable[[], nn.Module] = DroppingBlock
    runs: int = 0


def double_output(module, args, output):
    return output * 2


def forward_of_its_own(module):
    up = module.inside.up
    up.forward = lambda x: F.linear(x, up.weight) * 3


def seeded(make, put):
    return lambda module: (torch.manual_seed(5), put(module, make()))


Table, Row = type("Table", (dict,), {}), type("Row", (tuple,), {})


class Configured(nn.Module):
    def __init__(self, kind, grows=False):
        super().__init__()
        self.linear, self.config, self.grows = linear(), kind(), grows
        self.config.scale = 0.5
        if grows:
            self.config.rows = []

    def forward(self, x):
        if self.grows:
            self.config.rows.append(0)
        return self.linear(x).sin() * (len(self.config.rows) if self.grows else self.config.scale)


def of_a_class(list_of):
    kind = type("Kind", (), {})

    def make():
        kind.numbers = list_of([2.0])
        return body(lambda self, x: self.linear(x).sin() * sum(kind.numbers), linear=linear())

    return Change(lambda m: setattr(kind, "numbers", list_of([3.0])), make)


CHANGES = {
    "attribute": Change(lambda m: setattr(m.inside, "scale", 2.5)),
    "flag": Change(lambda m: setattr(m.inside, "is_scaled", False)),
    "dropout rate": Change(lambda m: setattr(m.inside.dropout, "p", 0.5)),
    "dropout off": Change(lambda m: setattr(m.inside.dropout, "p", 0.0)),
    "module of another class": Change(lambda m: setattr(m.inside, "norm", nn.Identity())),
    "module without bias": Change(
        seeded(lambda: nn.Linear(SIZE, 2 * SIZE, bias=False), lambda m, new: setattr(m.inside, "up", new))
    ),
    "frozen weight": Change(lambda m: m.inside.up.weight.requires_grad_(False)),
    "frozen norm": Change(lambda m: m.inside.norm.requires_grad_(False)),
    "forward hook": Change(lambda m: m.inside.up.register_forward_hook(double_output)),
    "forward pre-hook": Change(lambda m: m.inside.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))),
    "backward hook": Change(lambda m: m.inside.up.register_full_backward_hook(lambda _, given, __: (given[0] * 2,))),
    "forward on the instance": Change(forward_of_its_own),
    "evaluation": Change(lambda m: m.eval()),
    "part in evaluation": Change(lambda m: m.inside.dropout.eval()),
    # No guard of torch's tells of these
    **{
        f"attribute of a {kind.__name__.lower()}": Change(
            lambda m: setattr(m.inside.config, "scale", 2.0), functools.partial(Configured, kind)
        )
        for kind in (Table, Row)
    },
    **{f"numbers of a class in a {each.__name__}": of_a_class(each) for each in (list, tuple, set)},
    "another weight, for the same code": Change(
        seeded(lambda: nn.Parameter(torch.randn(2 * SIZE, SIZE)), lambda m, new: setattr(m.inside.up, "weight", new)),
        runs=1,
    ),
    "another module, for the same code": Change(
        seeded(lambda: nn.Linear(SIZE, 2 * SIZE), lambda m, new: setattr(m.inside, "up", new)), runs=1
    ),
    "other data, for the same code": Change(
        seeded(lambda: torch.randn(2 * SIZE, SIZE), lambda m, new: setattr(m.inside.up.weight, "data", new)), runs=1
    ),
}
SELDOM = ("dropout off", "frozen norm", "part in evaluation", "module without bias")


@pytest.mark.parametrize("steps", [2, *slow(7)], ids=["", "and is made anew"])
@pytest.mark.parametrize("row", by_default(CHANGES, *[name for name in CHANGES if name not in SELDOM][::2]))
def test_code_runs_where_what_it_was_made_for_has_not_changed(step, row, steps):
    twins = Twins(Around(row.inside())).settle(step)
    twins.both(row.change)
    assert twins.runs_code(step) == row.runs
    twins.steps(step, steps)


@pytest.mark.parametrize("kind", [Table, Row])
def test_what_forward_puts_into_an_attribute_of_a_dict_or_a_tuple_is_there_at_each_step(step, kind):
    twins = Twins(Around(Configured(kind, grows=True)))
    twins.steps(step, 9)
    assert len(twins.under.inside.config.rows) == len(twins.plain.inside.config.rows) == 9


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


# What is around forward


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
    """Reads torch's default dtype, too."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift, self.scale = linear(), Shift(), Scale()

    def scaled(self, x):
        return Scale.by_class(self.scale.of(x)) * self.scale.factor

    def forward(self, x):
        return F.gelu(self.scaled(self.shift(self.linear(x)))) * torch.ones(SIZE) * torch.tensor(0.1)


class ScaledTwice(Scaled):
    def scaled(self, x):
        return super().scaled(super().scaled(x))


def tripled(self, x):
    return x * 3


def called_twice(self, *args, **kwargs):
    return self._call_impl(*args, **kwargs) + self._call_impl(*args, **kwargs)


class PlusOne(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        output = op(*args, **(kwargs or {}))
        return output + 1 if op is torch.ops.aten.mul.Tensor else output


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output * 2 if getattr(function, "__name__", "") == "gelu" else output


doubles = functools.partial(set_by, torch.set_default_dtype, torch.float64, torch.float32)
deterministic = functools.partial(set_by, torch.use_deterministic_algorithms, True, False)
bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
SETTINGS = {"default dtype": doubles, "determinism": deterministic, "autocast": bfloat16}
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


SPANS = {
    **SETTINGS,
    "a dispatch mode": PlusOne,
    "a function mode": Doubled,
    "on the CPU": torch.autograd.graph.save_on_cpu,
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * 1),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "verifying": verifying,
    "hooks of all modules": lambda: all_modules.register_module_forward_hook(double_output),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("span", one_in(2, SPANS))
def test_code_does_not_run_under_what_it_was_not_made_for_and_runs_afterwards_and_in_backward(x, span):
    twins = Twins(Around(Scaled())).settle(stepping(x))
    assert twins.runs_code(stepping(x, forward=span)) == 0
    assert twins.runs_code(stepping(x)) == 1
    assert twins.runs_code(stepping(x, backward=span)) == 1
    assert twins.runs_code(stepping(x, forward=span, backward=span)) == 0


@pytest.mark.parametrize("replaced", by_default(METHODS, "method in a subclass", "property"))
def test_code_does_not_run_where_a_method_has_been_replaced(monkeypatch, step, replaced):
    twins = Twins(Around(ScaledTwice())).settle(step)
    monkeypatch.setattr(*replaced)
    assert twins.runs_code(step) == 0
    twins.settle(step)
    monkeypatch.undo()
    assert twins.runs_code(step) == 0


def test_code_does_not_run_where_the_call_of_every_module_has_been_replaced(monkeypatch, twins, step):
    monkeypatch.setattr(nn.Module, "__call__", called_twice)
    for _ in range(3):
        assert twins.runs_code(step) == 0


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
    twins = Twins.captured(RMSNorm(), x)
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


def evaluated(mode):
    def evaluate(module):
        torch.manual_seed(0)
        with mode():
            return module(tokens(grad=False))

    return evaluate


def forward_mode(module):
    torch.manual_seed(0)
    x = tokens(grad=False)
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))))


@pytest.mark.parametrize("other", [evaluated(torch.no_grad), evaluated(torch.inference_mode), forward_mode])
def test_without_gradients_and_in_forward_mode(twins, step, other):
    assert twins.runs_code(other) == 0
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
    model = capture_testing.Layers(3)
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
