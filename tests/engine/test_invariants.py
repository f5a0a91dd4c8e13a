"""The eleven invariants of ``recompute/engine/README.md``: of each, the shortest tests. The other files hold more.

1. Exact: test_bodies, test_random_models, test_ops, test_backwards, test_modes.
2. Never written: test_what_is_given.
3. Storages held weakly: test_recipe.
4. What is not regenerable is kept: test_bodies, test_exposed, test_ops_review, test_changes.
5. Versions: test_bodies, test_changes, test_module_state.
6. Random state: test_bodies, test_rng.
7. and 8. What is held, and when it dies: test_memory.
9. Composition: test_bodies, test_composition, test_faults.
10. Cost: test_memory, test_what_runs_again.
11. What forward read: test_bodies, test_surrounding_state.
"""

import functools
import gc
import threading

import pytest
import torch
from engine_testing import (
    HIDDEN,
    POLICIES,
    ROW_NBYTES,
    TOKENS,
    Holder,
    Projections,
    RMSNorm,
    Stack,
    assert_step_as_without,
    bits,
    calls,
    every_policy,
    every_policy_of_a_stack,
    holding,
    in_threads,
    loss_of,
    module_of,
    no_garbage_collection,
    policed,
    policy,
    tokens,
    watched,
    weak,
)
from tiers import by_default, slow
from tiny import counted_ops
from torch import nn
from torch.utils.checkpoint import checkpoint

import recompute
from recompute.errors import MutationError


@every_policy
def test_2_backward_writes_into_no_tensor_that_it_did_not_make(rules):
    model, x = Stack(), tokens()
    recompute.apply(model, rules)
    hidden = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, result: hidden.extend([*args, result]))
    loss = loss_of(model(x))
    saved = [x, *hidden, *model.parameters()]
    before = [(bits(tensor), tensor._version) for tensor in saved]
    wanted = [x, *model.parameters()]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert [(bits(tensor), tensor._version) for tensor in saved] == before
    second = torch.autograd.grad(loss, wanted)
    assert [bits(grad) for grad in second] == [bits(grad) for grad in first]


def test_3_a_storage_at_the_address_of_a_dead_one_does_not_get_its_recipe():
    addresses, reused = set(), []

    def forward(self, x):
        total = x.new_zeros(())
        for index in range(40):
            addresses.add(self.norm(x).data_ptr())
            fresh = x * (index + 2.0)
            reused.append(fresh.data_ptr() in addresses)
            total = total + self.linear(fresh).sum()
        return total

    norm, linear = RMSNorm().requires_grad_(False), nn.Linear(HIDDEN, HIDDEN)
    model, x = module_of(forward, norm=norm, linear=linear), tokens(grad=False)
    expected = torch.autograd.grad(model(x), linear.weight)
    recompute.apply(model, policy(("norm", "recompute")))
    reused.clear()
    found = torch.autograd.grad(model(x), linear.weight)
    assert any(reused), "this test tests nothing if no address is used twice"
    assert bits(found[0]) == bits(expected[0])


def test_3_knowing_a_storage_keeps_it_not_alive():
    alive = []

    def forward(self, x):
        y = self.norm(x)
        reference = weak(y)
        del y
        alive.append(not reference.expired())
        return x + 1

    model = holding(forward, norm=RMSNorm())
    recompute.apply(model, policy(("inside.norm", "recompute")))
    model(tokens())
    assert alive == [False]


def test_5_an_input_mutated_after_the_region_is_refused_by_its_name():
    model, x = policed(holding(lambda self, x: x.exp().sin())), tokens()
    given = x * 1.0
    result = model(given)
    with torch.no_grad():
        given.add_(1.0)
    with pytest.raises(MutationError, match=r"inside \(Body\).*shape \(6, 8\).*modified in place"):
        result.sum().backward()


@pytest.mark.parametrize("updated", ["weight", "bias"])
def test_5_a_parameter_updated_before_backward_is_refused_by_its_name(updated):
    model = policed(holding(lambda self, x: self.linear(x).sin(), linear=nn.Linear(HIDDEN, HIDDEN)))
    loss, parameter = loss_of(model(tokens())), getattr(model.inside.linear, updated)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()
    with pytest.raises(MutationError, match=rf"inside \(Body\).*linear\.{updated}.*modified in place"):
        loss.backward()


def test_5_a_parameter_that_autograd_saved_outside_of_regions_is_checked_too():
    model = Projections()
    recompute.apply(model, policy(("norm", "recompute")))
    loss = loss_of(model(tokens()))
    with torch.no_grad():
        model.q.weight.add_(1.0)
    with pytest.raises(MutationError, match=r"Backward0 needs a tensor of shape \(8, 8\).*modified in place"):
        loss.backward()


# 7. What lives anyway is neither copied nor counted


def test_7_dropped_bytes_are_those_of_the_intermediates_and_nothing_else():
    def forward(self, x):
        return ((x * self.scale).exp() * self.table).sin()  # saves x, scale; exp; table; the product

    model = holding(forward, scale=nn.Parameter(torch.rand(HIDDEN)))
    model.inside.register_buffer("table", torch.rand(HIDDEN))
    with recompute.apply(model, policy(("inside", "checkpoint"))) as handle:
        loss_of(model(tokens())).backward()
        stats = handle.stats()
    assert stats.dropped_nbytes == 2 * ROW_NBYTES
    assert stats.dropped_tensors == 2
    assert stats.kept_nbytes == 0


@every_policy_of_a_stack
@pytest.mark.parametrize("backwards", [0, *slow(1), 2])
@pytest.mark.parametrize("retain_last", [False, True])
def test_8_the_graph_dies_without_garbage_collection(rules, backwards, retain_last):
    model, x = Stack(), tokens()
    recompute.apply(model, rules)
    activations = watched(model)
    with no_garbage_collection() as engine_objects:
        for step in range(2):
            loss = loss_of(model(x))
            for turn in range(backwards):
                loss.backward(retain_graph=retain_last or turn + 1 < backwards)
            del loss
            assert engine_objects() == {}
            assert [reference.expired() for reference in activations] == [True] * len(activations)
            left = gc.collect()
            assert left == 0 or step == 0, "nothing of the step is left to the garbage collector"


@every_policy
def test_9_the_users_own_saved_tensor_hooks_hold_all_that_is_held_until_the_graph_is_gone(rules):
    packed = []

    def pack(tensor):
        copied = tensor.clone()
        packed.append(weak(copied))
        return copied

    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    model, x = Stack(p=0.0), tokens()
    assert_step_as_without(model, rules, x, around=hooks)
    recompute.apply(model, rules)
    activations = watched(model)
    packed.clear()
    with hooks():
        result = model(x)
    assert packed
    assert [reference.expired() for reference in activations].count(False) == 2, "the head's result, the model's"
    loss_of(result).backward()
    del result
    assert all(reference.expired() for reference in packed)


@pytest.mark.parametrize("rules", by_default(POLICIES, "both"))
def test_9_several_threads_train_one_model_at_once(rules):
    model, x = Stack(count=2, p=0.0), tokens(grad=False)
    wanted = list(model.parameters())
    expected = [bits(grad) for grad in torch.autograd.grad(loss_of(model(x)), wanted)]
    recompute.apply(model, rules)
    found = []

    def train():
        for _ in range(3):
            found.append([bits(grad) for grad in torch.autograd.grad(loss_of(model(x)), wanted)])

    in_threads(*[train] * 3)
    assert found == [expected] * 9


def test_9_scopes_of_threads_that_overlap_do_not_see_each_other():
    """Both are in the middle of a region at once, and the one that came first leaves first."""
    first_is_inside, second_is_inside, first_is_out = (threading.Event() for _ in range(3))

    def forward(self, x):
        if threading.current_thread() is first:
            first_is_inside.set()
            assert second_is_inside.wait(100)
        else:
            second_is_inside.set()
            assert first_is_out.wait(100)
        return self.norm(x)

    def run_first():
        model(x)
        first_is_out.set()

    model, x = Projections(), tokens()
    model.norm = module_of(forward, norm=model.norm)
    handle, first = recompute.apply(model, policy(("norm", "recompute"))), threading.Thread(target=run_first)
    first.start()
    assert first_is_inside.wait(100)
    model(x).sum().backward()
    first.join()
    assert handle.stats().dropped_nbytes == 2 * (2 * ROW_NBYTES + TOKENS * 4)


@every_policy
def test_10_forward_runs_no_op_that_it_would_not_run_without_the_policy(rules):
    model, x = Stack(), tokens()

    def forward():
        with counted_ops() as counts:
            model(x)
        return {name: count for name, count in counts.items() if name not in ("aten.detach", "aten.alias")}

    expected = forward()
    recompute.apply(model, rules)
    assert forward() == expected


def chain(self, x):
    for _ in range(self.length):
        x = x.sin()
    return x


def test_10_a_region_costs_a_bounded_number_of_calls_and_a_saved_tensor_a_few():
    def extra(length):
        model, x = holding(chain, length=length), tokens()
        model(x)
        plain = calls(lambda: model(x))
        policed(model)
        model(x)
        return calls(lambda: model(x)) - plain

    short, long = extra(10), extra(110)
    assert (long - short) / 100 <= 14, "calls a saved tensor"
    assert short - (long - short) / 10 <= 225, "calls a region"


@pytest.mark.parametrize("is_step", [False, True], ids=["forward", "step"])
def test_10_a_saved_tensor_costs_no_more_calls_than_under_torchs_checkpoint(is_step):
    def of_a_tensor(attach):
        counts = []
        for length in (10, 110):
            run, x = attach(holding(chain, length=length)), tokens()
            function = (lambda run=run, x=x: run(x).sum().backward()) if is_step else (lambda run=run, x=x: run(x))
            function()
            counts.append(calls(function))
        return (counts[1] - counts[0]) / 100

    torchs = of_a_tensor(lambda model: functools.partial(checkpoint, model, use_reentrant=False))
    ours = of_a_tensor(policed)
    assert ours <= torchs + 1  # torch 2.11's checkpoint makes one fewer than later ones


def test_10_a_module_inside_of_a_checkpoint_costs_a_bounded_number_of_calls():
    def of_a_step(count):
        model, x = Holder(nn.Sequential(*(nn.Identity() for _ in range(count)), nn.Tanh())), tokens()
        plain = calls(lambda: model(x).sum().backward())
        policed(model)
        model(x).sum().backward()
        return calls(lambda: model(x).sum().backward()) - plain

    of_a_step(10)  # some calls are made once in a process
    a_module = (of_a_step(60) - of_a_step(10)) / 50
    assert a_module <= 24


@pytest.mark.parametrize("rules", by_default(POLICIES, "both"))
def test_10_a_region_that_is_never_captured_costs_what_its_second_run_did_in_the_end(rules):
    model, x = Stack(count=1), tokens()
    recompute.apply(model, rules)
    model(x)
    second = calls(lambda: model(x))
    for _ in range(150):
        model(x)
    assert min(calls(lambda: model(x)) for _ in range(3)) <= second  # one may meet the garbage collector
