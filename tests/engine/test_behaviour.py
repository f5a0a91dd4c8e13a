"""What users of recomputation rely on: precision, memory, several backwards, keep, graphs of all shapes."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_testing import (
    BOTH,
    CPU,
    HIDDEN,
    INSIDE,
    ROW_NBYTES,
    TOKENS,
    Projections,
    RMSNorm,
    Stack,
    assert_as_plain,
    bits,
    both_actions,
    every_policy,
    holding,
    loss_of,
    no_garbage_collection,
    policed,
    policy,
    tokens,
    weak,
)
from torch import Tensor, nn

import recompute
from recompute.counters import memory_trace, step_memory
from recompute.errors import PolicyWarning

# Autocast


@every_policy
@pytest.mark.parametrize("backward_inside", [False, True])
def test_regeneration_runs_in_forwards_autocast_dtype_wherever_backward_runs(
    rules: dict[str, Any], backward_inside: bool
) -> None:
    model, x = Stack(p=0.0), tokens()

    def grads() -> list[Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(x))
            if backward_inside:
                return [bits(grad) for grad in torch.autograd.grad(loss, [x, *model.parameters()])]
        return [bits(grad) for grad in torch.autograd.grad(loss, [x, *model.parameters()])]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


# Memory


@every_policy
def test_a_step_holds_less_and_peaks_lower_than_without_the_policy(rules: dict[str, Any]) -> None:
    model, x = Stack(count=6), tokens(64, HIDDEN)
    plain = step_memory(lambda: loss_of(model(x)), CPU)
    recompute.apply(model, rules)
    found = step_memory(lambda: loss_of(model(x)), CPU)
    assert found.activation_bytes_held < plain.activation_bytes_held
    assert found.peak_bytes < plain.peak_bytes


def test_an_intermediate_dies_as_soon_as_its_region_ends() -> None:
    references = []

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = x.exp()
        references.append(weak(hidden))
        return hidden.sin()

    model = policed(holding(forward))
    references.clear()
    result = model(tokens())
    assert [reference.expired() for reference in references] == [True]
    result.sum().backward()


def test_a_dropped_norm_output_dies_when_its_last_consumer_has_run_and_comes_back_once_for_all_three() -> None:
    model = Projections()
    references: list[Any] = []
    model.norm.register_forward_hook(lambda module, args, result: references.append(weak(result)))
    handle = recompute.apply(model, policy(("norm", "recompute")))
    RMSNorm.runs = 0
    result = model(tokens())
    assert [reference.expired() for reference in references] == [True]
    for backwards in (1, 2):
        result.sum().backward(retain_graph=True)
        assert RMSNorm.runs == 1, "its ops run again, not its Python"
        assert handle.stats().regenerations == backwards * 6  # pow, mean, add, rsqrt, two products


def test_dropped_bytes_count_a_norms_output_once_however_many_save_it() -> None:
    model = Projections()
    handle = recompute.apply(model, policy(("norm", "recompute")))
    loss_of(model(tokens())).backward()
    # x * rsqrt and the norm's output; pow saves the input, which lives anyway; mean's rsqrt is a number a row
    assert handle.stats().dropped_nbytes == 2 * ROW_NBYTES + TOKENS * 4


def test_regenerated_values_are_freed_during_backward_when_their_last_consumer_had_them() -> None:
    seen: list[bool] = []
    values: list[Any] = []

    class Watch(torch.autograd.Function):
        """Its backward runs after that of all that comes later in forward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(all(value.expired() for value in values))
            return grad

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = x.exp()
        values.append(weak(hidden))
        return hidden.sin()

    model = policed(holding(forward))
    values.clear()
    x = tokens()
    model(Watch.apply(x)).sum().backward()
    assert len(values) == 2, "run in forward and in backward"
    assert seen == [True]


@both_actions
def test_a_region_that_is_not_dropped_holds_no_more_than_plain_eager_holds(action: str) -> None:
    model = holding(lambda self, x: (x.mul_(2.0) + 1.0).sin())
    x = tokens()

    def held() -> bool:
        hidden = x * 1.0
        reference = weak(hidden)
        result = model(hidden)
        del hidden
        alive = not reference.expired()
        result.sum().backward()
        return alive

    assert not held()
    policed(model, action)
    with pytest.warns(PolicyWarning) if action == "checkpoint" else nullcontext():
        assert not held()


@every_policy
def test_memory_does_not_grow_over_100_steps(rules: dict[str, Any]) -> None:
    model, x = Stack(count=2), tokens()
    handle = recompute.apply(model, rules)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    objects = []
    with no_garbage_collection() as engine_objects:
        for step in range(100):
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (20, 99):  # by the first one what can be captured is
                objects.append(len(gc.get_objects()))
        assert engine_objects() == {}
    assert abs(objects[1] - objects[0]) < 20
    assert handle.stats().regenerations > 0


@every_policy
@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_without_training_no_frame_is_built_and_nothing_is_held(rules: dict[str, Any], how: str) -> None:
    model, x = Stack(p=0.0), tokens(grad=False)
    expected = bits(model(x))
    handle = recompute.apply(model, rules)
    model.train(how != "eval")
    context = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[how]()
    with no_garbage_collection() as engine_objects, context:
        result = model(x)
        assert engine_objects() == {}
    assert handle.stats().frames == 0
    assert bits(result) == expected


# Several backwards


@every_policy
def test_disjoint_backwards_of_one_graph_and_subsets_of_gradients(rules: dict[str, Any]) -> None:
    model, x = Stack(), tokens()

    def grads() -> list[Any]:
        torch.manual_seed(1)
        result = model(x)
        some = torch.autograd.grad(result[:2].sum(), [model.layers[1].mlp.up_proj.weight], retain_graph=True)
        other = torch.autograd.grad(result[2:].sum(), [x, model.norm.weight], retain_graph=True)
        rest = torch.autograd.grad(result.sum(), list(model.parameters()))
        return [bits(grad) for grad in (*some, *other, *rest)]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


@every_policy
def test_several_graphs_alive_at_once_run_backward_in_any_order(rules: dict[str, Any]) -> None:
    model, inputs = Stack(), [tokens() for _ in range(4)]

    def grads() -> list[Any]:
        torch.manual_seed(2)
        losses = [loss_of(model(x)) for x in inputs]
        found = {i: torch.autograd.grad(losses[i], [inputs[i], *model.parameters()]) for i in (2, 0, 3, 1)}
        return [bits(grad) for i in range(4) for grad in found[i]]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


@every_policy
def test_gradients_accumulate_over_micro_batches_and_steps(rules: dict[str, Any]) -> None:
    def train(model: nn.Module) -> list[Any]:
        torch.manual_seed(4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            for _ in range(2):
                loss_of(model(tokens(grad=False))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [bits(parameter) for parameter in model.parameters()]

    plain = Stack()
    under = Stack()
    under.load_state_dict(plain.state_dict())
    recompute.apply(under, rules)
    assert train(under) == train(plain)


@every_policy
def test_a_gradient_penalty_through_the_whole_model(rules: dict[str, Any]) -> None:
    model, x = Stack(p=0.0), tokens()
    for layer in model.layers:
        layer.attention = layer.attention.q  # the CPU's fused attention has no second derivative

    def grads() -> list[Any]:
        (first,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        second = torch.autograd.grad(first.pow(2).sum(), list(model.parameters()), allow_unused=True)
        return [bits(grad) for grad in second]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


def test_looking_at_a_saved_tensor_outside_of_backward_gives_its_value_and_holds_nothing() -> None:
    model = policed(holding(lambda self, x: x.exp().sin()))
    x = tokens()
    result = model(x)
    with no_garbage_collection():
        for _ in range(2):
            saved = result.grad_fn._saved_self
            assert bits(saved) == bits(x.exp())
            reference = weak(saved)
            del saved
            assert reference.expired()


# Keep


def test_a_kept_tensor_stays_alive_in_checkpoint_and_among_dropped_outputs() -> None:
    references: list[Any] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        y = recompute.keep(self.norm(x))
        references.append(weak(y))
        return y.sin()

    for rules in (INSIDE, policy(("inside.norm", "recompute"))):
        model = holding(forward, norm=RMSNorm())
        recompute.apply(model, rules)
        references.clear()
        result = model(tokens())
        assert not references[0].expired()
        result.sum().backward()


def test_a_kept_module_inside_a_checkpointed_one_keeps_what_it_saves() -> None:
    references: list[Any] = []

    class Kept(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            references.append(weak(hidden))
            return hidden.sin()

    model = holding(lambda self, x: self.kept(x.cos()).tan(), kept=Kept())
    recompute.apply(model, policy(("inside.kept", "keep"), ("inside", "checkpoint")))
    result = model(tokens())
    assert not references[0].expired()
    result.sum().backward()
    assert_as_plain(model, {"rules": "none"}, tokens())


def test_keep_passes_gradients_to_an_inner_autograd_grad() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = recompute.keep(x.exp())
        (slope,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return slope.cos()

    assert_as_plain(holding(forward), INSIDE, tokens())


def test_keep_returns_the_tensor_itself_outside_of_regions_and_takes_nothing_else() -> None:
    x = tokens()
    assert recompute.keep(x) is x
    with pytest.raises(TypeError, match="takes a tensor, got list"):
        recompute.keep([x])


# Graphs


def test_regions_in_recursion_siblings_and_a_shared_instance() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), RMSNorm()

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.linear(self.norm(x)).sin()
            return x if depth == 0 else self(x, depth - 1) + self(x * 2, depth=depth - 1)

    model = holding(lambda self, x: self.shared(self.shared(x).exp()), shared=Recursive())
    for rules in (
        policy(("inside.shared", "checkpoint")),
        policy(("inside", "checkpoint"), ("inside.shared.norm", "recompute")),
    ):
        assert_as_plain(model, rules, tokens())


@every_policy
def test_backward_inside_a_hook_of_a_backward(rules: dict[str, Any]) -> None:
    model, x = Stack(count=1, p=0.0), tokens()

    def grads() -> list[Any]:
        inner: list[Any] = []
        given = x.detach().requires_grad_()
        hidden = given * 1.0

        def run_backward(grad: Tensor) -> None:
            with torch.enable_grad():
                inner.extend(torch.autograd.grad(loss_of(model(x * 2.0)), [x, *model.parameters()]))

        hidden.register_hook(run_backward)
        outer = torch.autograd.grad(loss_of(model(hidden)), [given, *model.parameters()])
        return [bits(grad) for grad in (*outer, *inner)]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


def test_a_module_called_in_two_graphs_that_share_an_input_region() -> None:
    model, x = Stack(count=2, p=0.0), tokens()
    recompute.apply(model, policy(("layers.*", "checkpoint")))
    hidden = model.layers[0](x)
    one, two = model.layers[1](hidden), model.layers[1](hidden * 2)
    found = torch.autograd.grad(two.sum(), x, retain_graph=True), torch.autograd.grad(one.sum(), x)
    plain = Stack(count=2, p=0.0)
    plain.load_state_dict(model.state_dict())
    hidden = plain.layers[0](x)
    one, two = plain.layers[1](hidden), plain.layers[1](hidden * 2)
    expected = torch.autograd.grad(two.sum(), x, retain_graph=True), torch.autograd.grad(one.sum(), x)
    assert [bits(grad) for (grad,) in found] == [bits(grad) for (grad,) in expected]


def test_a_module_that_a_graph_outlives_dies_when_the_graph_does() -> None:
    model = policed(holding(lambda self, x: x.exp().sin()))
    reference = weakref.ref(model.inside)
    with no_garbage_collection():
        result = model(tokens())
        del model
        result.sum().backward()
        del result
        assert reference() is None


def test_memory_trace_sees_nothing_held_after_the_graph_is_gone() -> None:
    model, x = Stack(), tokens()
    recompute.apply(model, BOTH)
    loss_of(model(x)).backward()
    model.zero_grad()
    with memory_trace(CPU) as trace:
        loss = loss_of(model(x))
        del loss
        trace.mark("gone")
    assert trace.held_nbytes["gone"] == 0
