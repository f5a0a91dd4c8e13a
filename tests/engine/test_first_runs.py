"""A first run that leaves things elsewhere than it found them: where it runs again, they are where it found them."""

import pytest
import torch
from engine_testing import HIDDEN, bits, holding, policed, tokens
from torch import Tensor, nn


class Codes:
    """What has codes, as a quantized weight does, or will have them once it has run."""

    codes: Tensor | None = None


def move(owner, target):
    """Move the codes in the first run, as an int8 layer of bitsandbytes does, and calibrate them in later ones."""
    if owner.codes is not None:
        target.codes, owner.codes = owner.codes, None
    else:
        target.codes = target.codes + 1.0
    return target.codes


def move_and_delete(owner, target):
    if hasattr(owner, "codes"):
        target.codes = owner.codes
        del owner.codes
    else:
        target.codes = target.codes + 1.0
    return target.codes


def count(owner):
    owner.runs = getattr(owner, "runs", 0.0) + 1.0
    return owner.runs


def count_by_name(owner):
    setattr(owner, "runs", getattr(owner, "runs", 0.0) + 1.0)  # noqa: B010
    return owner.runs


def count_in_place(owner):
    owner.codes += 1.0
    return owner.codes.clone()


def quantized(tensor):
    tensor.codes, tensor.inner = torch.tensor(3.0), Codes()
    tensor.inner.codes = torch.tensor(4.0)
    return tensor


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, store):
        return x * count(store)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


FIRST_RUNS = {
    "moved from a parameter to an object": lambda self, x: move(self.weight, self.store),
    "moved from a parameter to the module": lambda self, x: move(self.weight, self),
    "moved from a buffer": lambda self, x: move(self.buffer, self.store),
    "moved from a tensor": lambda self, x: move(self.tensor, self.store),
    "moved from a tensor in a list": lambda self, x: move(self.tensors[0], self.store),
    "moved from an object on a parameter": lambda self, x: move(self.weight.inner, self.store),
    "moved from a parameter that is given": lambda self, x: move(self.given, self.store),
    "moved from a tensor that is given": lambda self, x: move(x, self),
    "deleted from a parameter": lambda self, x: move_and_delete(self.weight, self.store),
    "deleted from a tensor": lambda self, x: move_and_delete(self.tensor, self.store),
    "made on an object": lambda self, x: count(self.store),
    "made on an object by its name": lambda self, x: count_by_name(self.store),
    "made by a custom Function": lambda self, x: Counts.apply(x, self.store),
    "made on a parameter": lambda self, x: count(self.bare),
    "changed in place on a parameter": lambda self, x: count_in_place(self.weight),
}


def frozen():
    return nn.Parameter(torch.ones(()), requires_grad=False)


def gradients(scale, govern):
    """Those of some steps. In between, other parameters come in the places of the first."""
    torch.manual_seed(0)

    def forward(self, x, given):
        self.given = given
        return (self.up(x) * scale(self, x)).tanh()

    parts = {"tensor": quantized(torch.ones(())), "tensors": [quantized(torch.ones(()))], "store": Codes()}
    model = holding(forward, up=nn.Linear(HIDDEN, HIDDEN), codes=None, **parts)
    model.inside.register_buffer("buffer", quantized(torch.ones(())))
    x, found = tokens(), []
    govern(model)
    for step in range(4):
        if step in (0, 2):
            model.inside.weight, model.inside.bare, given = quantized(frozen()), frozen(), quantized(frozen())
        result = model(quantized(x * 1.0), given)
        found += map(bits, torch.autograd.grad(result.sum(), [x, *model.inside.up.parameters()]))
    return found


@pytest.mark.filterwarnings("ignore:.*nothing is dropped there.*modified in place")
@pytest.mark.parametrize("place", list(FIRST_RUNS))
def test_what_a_run_moves_makes_or_deletes_is_where_it_was_when_it_runs_again(place):
    assert gradients(FIRST_RUNS[place], policed) == gradients(FIRST_RUNS[place], lambda model: None)


def test_a_function_that_a_tape_was_told_of_before_finds_it_there_too():
    scale = FIRST_RUNS["made by a custom Function"]
    gradients(scale, lambda model: policed(model, "recompute"))
    assert gradients(scale, policed) == gradients(scale, lambda model: None)


def test_what_a_library_notes_on_a_parameter_whose_memory_it_swaps_stays_after_the_second_run():
    def forward(self, x):
        count(self.weight)
        return x.sin().exp()

    model = policed(holding(forward, weight=frozen()))
    model.inside.weight.ds_id = 0  # as DeepSpeed marks it
    model(tokens()).sum().backward()
    assert model.inside.weight.runs == 2.0


class IntoMainGrad(torch.autograd.Function):
    """As Transformer Engine's Linears, which find where to add in forward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.total = w.main_grad
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        ctx.total.add_((gradient * x).sum(0))
        return gradient * w, None


def test_backward_adds_to_a_sum_of_gradients_before_another_frame_runs_again():
    def forward(self, x):
        return IntoMainGrad.apply(x.sin(), self.weight).exp()

    model = holding(forward, weight=nn.Parameter(torch.rand(HIDDEN)))
    weight, totals, batches = model.inside.weight, [], [tokens(), tokens()]
    for under in (False, True):
        if under:
            policed(model, "checkpoint")
        weight.main_grad = torch.zeros(HIDDEN)
        for out in [model(x).sum() for x in batches]:  # as in a pipeline
            out.backward()
        totals.append(weight.main_grad)
    assert bits(totals[0]) == bits(totals[1])
