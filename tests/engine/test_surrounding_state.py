"""What forward reads besides its arguments and its modules (invariant 11): bodies.around and first_runs have more."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from bodies.around import ENTRIES, LOCAL, VARIABLE, put
from bodies.first_runs import Counts, count, frozen
from engine_testing import HIDDEN, INSIDE, Holder, bits, governing, holding, in_threads, policed, tokens
from torch import nn

import recompute

checkpointed = recompute.recompute(policy=governing({"action": "checkpoint"}, "**"))


def test_a_decorated_function_and_a_backward_on_another_thread_read_what_forward_read():
    scale = checkpointed(lambda x: (x.sin() * VARIABLE.get() * LOCAL.scale * ENTRIES["scale"]).exp())
    x = tokens()
    put(2.0)
    expected = torch.autograd.grad((x.sin() * 8.0).exp().sum(), x)[0]
    loss, found = scale(x).sum(), []
    in_threads(lambda: found.append(torch.autograd.grad(loss, x)[0]))
    torch.testing.assert_close(found[0], expected)


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
    assert fast_weights(checkpointed) == fast_weights(lambda forward: forward)


def test_a_module_to_which_a_library_copies_anothers_attributes_is_itself_what_runs_again():
    model, x = Holder(nn.Linear(HIDDEN, HIDDEN)), tokens()
    recompute.apply(model, {"rules": [{"match": "inside", "action": "checkpoint", "capture": False}]})
    clone = object.__new__(type(model.inside))
    vars(clone).update(vars(model.inside))
    weight = (model.inside.weight * 2.0).detach().requires_grad_()
    clone._parameters = {**model.inside._parameters, "weight": weight}
    expected = torch.autograd.grad(F.linear(x, weight, model.inside.bias).sum(), x)[0]
    loss = clone(x).sum()
    clone._parameters["weight"] = model.inside.weight
    assert bits(torch.autograd.grad(loss, x)[0]) == bits(expected)


def test_state_hooks_note_in_forward_what_is_in_force_again_in_backward():
    now = [2.0]  # as a setting of a library in C
    read, note, spans = now.__getitem__, now.__setitem__, []  # a checkpoint does not see what these lead to

    @contextmanager
    def restored(value):
        before = read(0)
        note(0, value)
        spans.append(value)
        yield
        note(0, before)

    model, x = holding(lambda self, x: (x.sin() * read(0)).tanh()), tokens()
    expected = bits(torch.autograd.grad(model(x).sum(), x)[0])
    recompute.apply(model, INSIDE, state_hooks=[(lambda: read(0), restored)])
    loss = model(x).sum()
    note(0, 5.0)
    assert bits(torch.autograd.grad(loss, x)[0]) == expected
    assert (now, spans) == ([5.0], [2.0])


def test_state_hooks_that_are_no_pairs_of_functions_are_refused():
    with pytest.raises(TypeError, match=r"pairs of functions, \(snapshot, restored\)"):
        recompute.apply(nn.Linear(2, 2), "none", state_hooks=[lambda: None])


def test_a_function_that_a_tape_was_told_of_before_finds_an_object_as_it_was_too():
    class Store:
        pass

    def gradients(govern):
        torch.manual_seed(0)
        model, x = holding(lambda self, x: Counts.apply(x.sin(), self.store).tanh(), store=Store()), tokens()
        govern(model)
        return [bits(torch.autograd.grad(model(x).sum(), x)[0]) for _ in range(3)]

    gradients(lambda model: policed(model, "recompute"))
    assert gradients(policed) == gradients(lambda model: None)


def test_what_a_library_notes_on_a_parameter_whose_memory_it_swaps_stays_after_the_second_run():
    def forward(self, x):
        count(self.weight)
        return x.sin().exp()

    model = policed(holding(forward, weight=frozen()))
    model.inside.weight.ds_id = 0  # as DeepSpeed marks it
    model(tokens()).sum().backward()
    assert model.inside.weight.runs == 2.0
