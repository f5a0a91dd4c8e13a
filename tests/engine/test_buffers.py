"""Buffers that change between a region's forward and its backward, as averages and counters do."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from engine_testing import HIDDEN, SETTINGS, TAPES, Census, bits, governing, holding, module_of, tokens
from tiers import by_default
from torch import nn

import recompute
from recompute.engine.bit_comparison import verifying
from recompute.engine.cut.save_plan import LARGEST_COPY
from recompute.errors import MutationError


def _average(self, y):
    self.average.mul_(0.9).add_(0.1 * y.detach().mean(0))


def _count(self, y):
    self.count += 1
    self.average.add_(self.count)


def _first_of_a_view(self, y):
    self.average[: HIDDEN // 2].add_(y.detach().mean())
    self.average.view(2, -1)[1].mul_(0.5)


def _lazily(self, y):
    if self.lazy is None:
        self.lazy = torch.zeros(HIDDEN)
    self.lazy.add_(y.detach().mean(0))
    self.average = self.lazy


UPDATES = {
    "mul_ and add_": _average,
    "a counter": _count,
    "copy_": lambda self, y: self.average.copy_(y.detach().mean(0)),
    "views": _first_of_a_view,
    "lerp_": lambda self, y: self.average.lerp_(y.detach().mean(0), 0.1),
    "index_put_": lambda self, y: self.average.index_put_((torch.tensor([0, 3]),), y.detach()[0, 2:4]),
    ".data": lambda self, y: self.average.data.mul_(0.5).add_(y.detach().mean(0)),
    "_foreach_add_": lambda self, y: torch._foreach_add_([self.average, self.other], 1.0),
    "made by the first frame": _lazily,
    "a new tensor": lambda self, y: setattr(self, "average", self.average * 0.9 + 0.1 * y.detach().mean(0)),
    # Written by a kernel whose schema does not say so, and that counts no version.
    "running statistics": lambda self, y: F.batch_norm(y.detach(), self.average, self.other, training=True),
    "zero_ and fill_": lambda self, y: (self.average.zero_(), self.average.fill_(0.5)),
    "out=": lambda self, y: torch.mul(self.average, 0.5, out=self.average),
}


def _use(self, y):
    """Saves nothing of the buffer, and much that comes back from it."""
    z = ((y - self.average) / 2).exp() + self.count
    return z.sin() * y.sin() + z.tanh() * z.sigmoid()


def _use_a_part(self, y):
    z = (y[:, 1:] - self.average[1:]).exp() + self.count
    return z.sin() * z.tanh() + z.sigmoid()


def _use_and_save(self, y):
    z = (y * self.average).exp()
    return z.sin() * z.tanh()


USES = {"reads": _use, "reads a part": _use_a_part, "saves": _use_and_save}


def _forward(update, use, order):
    def forward(self, x):
        y = self.linear(x)
        if order == "before" and self.training:
            update(self, y)
        result = use(self, y)
        if order == "after" and self.training:
            update(self, y)
        return result

    return forward


def _model(forward, dtype=torch.float32, size=1):
    model = holding(forward, linear=nn.Linear(HIDDEN, HIDDEN)).to(dtype)
    memory = torch.rand(size, HIDDEN, dtype=dtype)
    model.inside.register_buffer("average", memory[0])
    model.inside.register_buffer("other", torch.ones(HIDDEN, dtype=dtype))
    model.inside.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.inside.lazy = None
    return model


def _gradients(model, result, **options):
    return [bits(grad) for grad in torch.autograd.grad(result.sum(), list(model.parameters()), **options)]


def _one_by_one(model, inputs):
    return [_gradients(model, model(x)) for x in inputs]


def _all_at_once(model, inputs):
    total = torch.stack([model(x).sum() for x in inputs])
    return _gradients(model, total)


def _last_first(model, inputs):
    results = [model(x) for x in inputs]
    return [_gradients(model, result) for result in reversed(results)]


def _interleaved(model, inputs):
    before, found = model(inputs[0]), []
    for x in inputs[1:]:
        result = model(x)
        found += [_gradients(model, before, retain_graph=True), _gradients(model, before)]
        before = result
    return [*found, _gradients(model, before)]


def _changed_outside(model, inputs):
    found = []
    for x in inputs:
        result = model(x)
        with torch.no_grad():
            model.inside.average.mul_(0.5)
            model.inside.average.numpy()[:] *= 0.5  # which no version counts
            model.inside.count.add_(1)
        found.append(_gradients(model, result))
    return found


def _evaluated_between(model, inputs):
    results = [model.train()(inputs[0]), model.eval()(inputs[1]), model.train()(inputs[2])]
    return [_gradients(model, result) for result in results]


STEPS = {
    "one by one": _one_by_one,
    "all at once": _all_at_once,
    "the last first": _last_first,
    "interleaved": _interleaved,
    "changed outside": _changed_outside,
    "evaluated between": _evaluated_between,
}


def assert_as_plain_or_refused_as_plain(plain, rules, step, dtype=torch.float32):
    """Whether the plain model runs; the same model under ``rules`` runs too then, bit for bit, and raises if not."""
    model, inputs = copy.deepcopy(plain), [tokens(dtype=dtype) for _ in range(4)]
    recompute.apply(model, rules)
    for _ in range(2):  # the second time by the plan of the first
        try:
            expected = step(plain, inputs)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            with pytest.raises(RuntimeError, match="modified"):  # of frames in eval mode, which are plain, by autograd
                step(model, inputs)
            return False
        assert step(model, inputs) == expected
        assert [bits(buffer) for buffer in model.buffers()] == [bits(buffer) for buffer in plain.buffers()]
    return True


@pytest.mark.parametrize("tape", by_default(TAPES, "recompute"))
@pytest.mark.parametrize("update", by_default(UPDATES, "a counter", "views", ".data", "out="))
@pytest.mark.parametrize("use", by_default(USES, "reads"))
def test_a_buffer_that_a_region_changes_does_what_it_does_in_plain_eager(tape, update, use):
    for order in ("before", "after"):
        for step in STEPS.values():
            assert_as_plain_or_refused_as_plain(_model(_forward(update, use, order)), governing(tape), step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_a_buffer_of_any_dtype_that_is_a_view_of_others_memory(dtype, verify):
    with verifying() if verify else nullcontext():
        for use in USES.values():
            plain = _model(_forward(_average, use, "before"), dtype, size=3)
            assert_as_plain_or_refused_as_plain(plain, governing(SETTINGS["recompute"]), _last_first, dtype)


@pytest.mark.parametrize("kind", ["list", "attribute", "argument", "of another module"])
def test_tensors_without_gradients_may_change_wherever_they_live(kind):
    tensors = [torch.ones(HIDDEN), torch.zeros(HIDDEN)]

    def forward(self, x, given):
        first, second = given if kind == "argument" else self.lookup()
        first.add_(1.0)
        z = ((self.linear(x) - first) / 3).exp() + second
        second.sub_(0.5)
        return z.sin() * z.tanh() + (first - z).sigmoid()

    def outer():
        torch.manual_seed(3)
        own = [tensor.clone() for tensor in tensors]
        inside = module_of(forward, linear=nn.Linear(HIDDEN, HIDDEN), tensors=own)
        other = module_of(lambda self: None, tensors=own)
        made = module_of(lambda self, x: self.inside(x, self.tensors), inside=inside, other=other, tensors=own)
        owners = {"list": made, "attribute": inside, "argument": made, "of another module": other}
        inside.lookup = lambda: owners[kind].tensors
        return made

    def step(model):
        results = [model(x) for x in inputs]
        return [_gradients(model, result) for result in results]

    plain, model, inputs = outer(), outer(), [tokens() for _ in range(3)]
    expected = [step(plain), step(plain)]
    recompute.apply(model, governing(SETTINGS["recompute"]))
    assert [step(model), step(model)] == expected


def test_one_buffer_of_two_regions_and_of_what_is_between_them():
    buffer = torch.zeros(HIDDEN)

    def forward(self, x):
        buffer.lerp_(x.detach().mean(0), 0.5)
        z = (self.linear(x) - buffer).exp()
        return z.sin() * z.tanh()

    def step(model):
        buffer.zero_()
        total = torch.stack([model(x).sum() for x in inputs])
        return _gradients(model, total)

    def between_forward(self, x):
        buffer.mul_(0.5)
        return x + buffer

    parts = [module_of(forward, linear=nn.Linear(HIDDEN, HIDDEN)) for _ in range(2)]
    plain = nn.Sequential(parts[0], module_of(between_forward), parts[1])
    model, inputs = copy.deepcopy(plain), [tokens() for _ in range(3)]
    expected = step(plain)
    recompute.apply(model, governing(SETTINGS["recompute"], "0", "2"))
    assert step(model) == expected
    assert step(model) == expected


def test_a_tensor_that_is_too_large_to_copy_is_refused_if_it_changes_and_held_without_a_copy():
    def forward(self, x):
        y = self.linear(x)
        return y.sin() + ((y - self.table).exp() + (y + self.table).exp()).tanh()

    plain = holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))
    most = LARGEST_COPY // (HIDDEN * 4)
    for rows in (most, most + 1):
        plain.inside.register_buffer("table", torch.rand(rows, HIDDEN))
        model, x = copy.deepcopy(plain), tokens(rows, HIDDEN)
        expected = _gradients(plain, plain(x))
        recompute.apply(model, governing(SETTINGS["recompute"]))
        with Census() as census:
            result = model(x)
        fits = rows == most
        assert census.alive_nbytes() == (3 if fits else 2) * x.nbytes, (
            "the projection, the result, and a copy if it fits"
        )
        model.inside.table.mul_(2.0)
        if fits:
            assert _gradients(model, result) == expected
        else:
            with pytest.raises(MutationError, match=rf"^in .*\({rows}, 8\).*modified in place after it was saved"):
                _gradients(model, result)


def test_what_autograd_saved_is_refused_though_a_copy_is_held_for_what_runs_again():
    def forward(self, x):
        z = (self.linear(x) - self.average).exp()
        return z.sin() * z.tanh() + x * self.average

    def step(model):
        x = tokens()
        result = model(x)
        model.inside.average.add_(1.0)
        found = _gradients(model, result, retain_graph=True)  # for which the average is not needed
        with pytest.raises(RuntimeError, match=r"modified"):
            torch.autograd.grad(result.sum(), x)
        return found

    plain = _model(forward)
    model = copy.deepcopy(plain)
    recompute.apply(model, governing(SETTINGS["recompute"]))
    for _ in range(2):
        state = torch.get_rng_state()
        expected = step(plain)
        torch.set_rng_state(state)
        assert step(model) == expected
