"""What users of recomputation rely on or miss elsewhere, item by item: values, memory, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    BOTH,
    CHECKPOINT,
    HIDDEN,
    RECOMPUTE,
    TOKENS,
    Projections,
    RMSNorm,
    Stack,
    assert_as_plain,
    bits,
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
from recompute.errors import MutationError, PolicyWarning, RegenerationError
from recompute.planning.profiling import memory_trace, step_memory

CPU = torch.device("cpu")
POLICIES = {"checkpoint": CHECKPOINT, "recompute": RECOMPUTE, "both": BOTH}
INSIDE = policy(("inside", "checkpoint"))
ROW_NBYTES = TOKENS * HIDDEN * 4
every_policy = pytest.mark.parametrize("rules", POLICIES.values(), ids=POLICIES)
both_actions = pytest.mark.parametrize("action", ["checkpoint", "recompute"])


# Autocast


@every_policy
@pytest.mark.parametrize("backward_inside", [False, True])
def test_regeneration_runs_in_forwards_autocast_dtype_wherever_backward_runs(rules: dict[str, Any], backward_inside: bool) -> None:
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


@both_actions
def test_regeneration_outside_of_autocast_ignores_the_autocast_around_backward(action: str) -> None:
    model, x = holding(lambda self, x: torch.exp(x @ x.T)), tokens()

    def grad() -> Any:
        result = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return bits(torch.autograd.grad(result.sum(), x)[0])

    expected = grad()
    policed(model, action)
    assert grad() == expected


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
    model.norm.runs = 0
    result = model(tokens())
    assert [reference.expired() for reference in references] == [True]
    for backwards in (1, 2):
        result.sum().backward(retain_graph=True)
        assert model.norm.runs == 1 + backwards
        assert handle.stats().regenerations == backwards


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
    with pytest.warns(PolicyWarning):
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
            if step in (5, 99):
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


@both_actions
@pytest.mark.parametrize("order", [2, 3])
def test_gradients_of_gradients_are_those_of_the_plain_model(action: str, order: int) -> None:
    model, x = holding(lambda self, x: self.norm(x).exp().sin(), norm=RMSNorm().double()), tokens(dtype=torch.float64)

    def grads() -> list[Any]:
        value, found = model(x).pow(2).sum(), []
        for _ in range(order):
            (first, *others) = torch.autograd.grad(value, [x, *model.parameters()], create_graph=True)
            found += [first, *others]
            value = first.pow(2).sum() + sum(grad.sum() for grad in others)
        return [bits(grad) for grad in found]

    expected = grads()
    policed(model, action)
    assert grads() == expected


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


@both_actions
def test_a_custom_function_may_read_its_saved_tensors_twice(action: str) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, x.sin())
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, _ = ctx.saved_tensors
            _, sine = ctx.saved_tensors
            return grad * x * sine * ctx.saved_tensors[0]

    assert_as_plain(holding(lambda self, x: Twice.apply(x.cos()) * 2), policy(("inside", action)), tokens())


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


# What does not run the same way twice


def changing(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A region whose ``forward`` reads in ``self.run`` how often it has run."""

    def count(self: Any, x: Tensor) -> Tensor:
        self.run += 1
        return forward(self, x)

    model = policed(holding(count, run=0))
    model.inside.run = 0
    return model


def test_a_saved_tensor_of_another_shape_is_refused_with_region_op_and_both_shapes() -> None:
    model = changing(lambda self, x: x[: 5 if self.run == 1 else 3].exp().sum())
    result = model(tokens())
    with pytest.raises(RegenerationError, match=r"(?s)inside \(Body\).*shape \(5, 8\).*shape \(3, 8\), from .*exp"):
        result.backward()


def test_a_region_that_is_different_every_second_time_is_refused() -> None:
    model = changing(lambda self, x: x[: 5 if self.run % 2 else 3].exp().sum())
    result = model(tokens())
    with pytest.raises(RegenerationError):
        result.backward()


def test_fewer_saved_tensors_are_refused_with_both_numbers() -> None:
    model = changing(lambda self, x: x.exp().sin().cos() if self.run == 1 else x.exp().sin())
    result = model(tokens())
    with pytest.raises(RegenerationError, match="saved 3 tensors in forward, 2 when run again"):
        result.sum().backward()


def test_an_extra_saved_tensor_of_the_same_shape_ahead_of_the_others_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.run == 2:
            (x * 2).exp()
        return (x * 3).exp().sin()

    model = changing(forward)
    result = model(tokens())
    with pytest.raises(RegenerationError):
        result.sum().backward()


# Errors and interruptions


class Boom(Exception):
    pass


@both_actions
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_forward_leaves_nothing_behind(action: str, error: type[BaseException]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.norm(x).exp()
        if self.fails:
            raise error
        return hidden.sin()

    model, x = holding(forward, norm=RMSNorm(), fails=False), tokens()
    expected = bits(torch.autograd.grad(model(x).sum(), x)[0])
    recompute.apply(model, policy(("inside", action), ("inside.norm", "recompute")))
    model.inside.fails = True
    with no_garbage_collection() as engine_objects:
        with pytest.raises(error):
            model(x)
        model.inside.fails = False
        assert bits(torch.autograd.grad(model(x).sum(), x)[0]) == expected
        assert engine_objects() == {}


@both_actions
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_regeneration_leaves_all_as_it_was_and_a_retry_succeeds(action: str, error: type[BaseException]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = F.dropout(self.norm(x), 0.5)
        self.mean.mul_(0.5).add_(hidden.detach().mean())
        if self.fails:
            raise error
        return hidden.exp() * self.mean

    model, x = holding(forward, norm=RMSNorm(), fails=False), tokens()
    model.inside.register_buffer("mean", torch.zeros(()))

    def grad() -> Any:
        torch.manual_seed(5)
        model.inside.mean.zero_()
        result = model(x)
        for attempt in ("fails", "succeeds") if policed_now else ("succeeds",):
            model.inside.fails = attempt == "fails"
            model.eval()
            before = [bits(torch.get_rng_state()), bits(model.inside.mean)]
            if attempt == "fails":
                with pytest.raises(error):
                    result.sum().backward(retain_graph=True)
            else:
                found = torch.autograd.grad(result.sum(), [x, *model.parameters()])
            assert [bits(torch.get_rng_state()), bits(model.inside.mean)] == before
            assert not any(module.training for module in model.modules())
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            model.train()
        return [bits(value) for value in found]

    policed_now = False
    expected = grad()
    policed(model, action)
    policed_now = True
    model.inside.fails = False
    assert grad() == expected


def test_a_backward_that_fails_elsewhere_is_retried_with_the_right_gradients_and_holds_nothing_afterwards() -> None:
    class Fails(torch.autograd.Function):
        broken = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if Fails.broken:
                raise Boom
            return grad

    def forward(self: Any, x: Tensor) -> Tensor:
        return Fails.apply(x.exp()).exp().sin()

    model, x = policed(holding(forward)), tokens()
    with no_garbage_collection() as engine_objects:
        result = model(x)
        with pytest.raises(Boom):
            result.sum().backward(retain_graph=True)
        Fails.broken = False
        (found,) = torch.autograd.grad(result.sum(), x)
        del result
        assert engine_objects() == {}
    (expected,) = torch.autograd.grad(x.exp().exp().sin().sum(), x)
    assert bits(found) == bits(expected)


def test_saved_tensor_hooks_switched_off_by_the_user_leave_no_scope_open() -> None:
    model, x = Projections(), tokens()
    recompute.apply(model, policy(("norm", "recompute")))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        try:
            model(x)
        except RuntimeError as error:
            assert "not here" in str(error)
    assert recompute.engine.recipe.local.books == []


# In-place


@both_actions
def test_in_place_operations_on_a_regions_own_intermediates(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(x).mul_(2.0).add_(x)
        y[1:].clamp_(max=1.5)
        return y.sigmoid_().sin()

    assert_as_plain(holding(forward, norm=RMSNorm()), policy(("inside", action)), tokens())


@both_actions
def test_a_regions_result_mutated_before_a_consumer_saves_it(action: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = RMSNorm(), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y.mul_(2.0)
            y[0] += 1.0
            return self.linear(y)

    assert_as_plain(Model(), policy(("norm", action)), tokens())


@both_actions
def test_a_regions_result_mutated_after_a_consumer_saved_it_never_gives_a_wrong_gradient(action: str) -> None:
    model, x = Projections(), tokens()
    result_of_norm = []
    (expected,) = torch.autograd.grad(loss_of(model(x)), model.q.weight)
    recompute.apply(model, policy(("norm", action)))
    model.norm.register_forward_hook(lambda module, args, result: result_of_norm.append(result))
    loss = loss_of(model(x))
    with torch.no_grad():
        result_of_norm[0].zero_()
    try:
        (found,) = torch.autograd.grad(loss, model.q.weight)
    except RuntimeError as error:  # torch's own, where autograd holds the tensor
        assert "modified" in str(error)
        return
    assert bits(found) == bits(expected)


def test_a_kept_tensor_that_was_mutated_raises_and_names_the_op_that_wants_it() -> None:
    model, x = Projections(), tokens()
    recompute.apply(model, policy(("norm", "recompute")))
    given = x * 1.0
    hidden = given.exp()

    class Outside(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return y.exp()

    model.q = nn.Sequential(model.q, Outside())
    saved = []
    model.q.register_forward_hook(lambda module, args, result: saved.append(result))
    loss = loss_of(model(hidden))
    with torch.no_grad():
        saved[0].add_(1.0)
    with pytest.raises(MutationError, match=r"Projections.*ExpBackward"):
        loss.backward()


# Module state


def test_batch_and_instance_norm_statistics_and_gradients_are_those_of_plain_training() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3, padding=1)
            self.batch = nn.BatchNorm1d(4)
            self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
            self.average = nn.BatchNorm1d(4, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.average(self.instance(self.batch(self.conv(x)).relu()).exp())

    def train(model: nn.Module) -> list[Any]:
        torch.manual_seed(6)
        found = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            losses = [loss_of(model(torch.randn(3, 4, 5))) for _ in range(2)]
            for loss in reversed(losses):
                loss.backward()
            found += [bits(parameter.grad) for parameter in model.parameters()]
            found += [bits(buffer) for buffer in model.buffers()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    plain, under = Stacked(Block), Stacked(Block)
    under.load_state_dict(plain.state_dict())
    handle = recompute.apply(under, policy(("blocks.*", "checkpoint")))
    assert train(under) == train(plain)
    assert handle.stats().dropped_tensors > 0


class Stacked(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_statistics_that_are_updated_in_some_runs_only_are_updated_once() -> None:
    def forward(self: Any, x: Tensor, updates: bool) -> Tensor:
        return (self.norm(x) if updates else x).exp()

    def train(model: nn.Module) -> list[Any]:
        torch.manual_seed(6)
        for updates in (False, True, False, True):
            loss_of(model(torch.randn(2, 4, 5, requires_grad=True), updates)).backward()
        return [bits(buffer) for buffer in model.buffers()]

    make = lambda: holding(forward, norm=nn.InstanceNorm1d(4, track_running_stats=True))  # noqa: E731
    expected = train(make())
    assert train(policed(make())) == expected


def test_a_buffer_that_forward_replaces_is_the_old_one_again_when_the_region_runs_again() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + x.detach().mean()
        return (x * self.average).exp()

    model = holding(forward)
    model.inside.register_buffer("average", torch.ones(()))
    assert_as_plain(model, INSIDE, tokens())


def test_spectral_norm_iterates_once_a_step() -> None:
    linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN))
    assert_as_plain(holding(lambda self, x: self.linear(x).sin(), linear=linear), INSIDE, tokens())


@every_policy
def test_eval_between_forward_and_backward_changes_nothing(rules: dict[str, Any]) -> None:
    model, x = Stack(p=0.5), tokens()

    def grads() -> list[Any]:
        torch.manual_seed(0)
        model.train()
        loss = loss_of(model(x))
        model.eval()
        found = torch.autograd.grad(loss, [x, *model.parameters()])
        assert not any(module.training for module in model.modules())
        return [bits(grad) for grad in found]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


@pytest.mark.parametrize(
    "rules",
    [*POLICIES.values(), policy(("layers.*", "checkpoint"), ("**.norm*", "recompute"), ("**.mlp", "recompute"))],
    ids=[*POLICIES, "nested"],
)
def test_removing_the_policy_between_forward_and_backward_changes_nothing(rules: dict[str, Any]) -> None:
    model, x = Stack(), tokens()

    def grads(remove: Callable[[], None] = lambda: None) -> list[Any]:
        torch.manual_seed(0)
        loss = loss_of(model(x))
        remove()
        return [bits(grad) for grad in torch.autograd.grad(loss, [x, *model.parameters()])]

    expected = grads()
    assert grads(recompute.apply(model, rules).remove) == expected


def test_freezing_a_weight_between_forward_and_backward_changes_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.second(self.first(x).exp())

    model = holding(forward, first=nn.Linear(HIDDEN, HIDDEN), second=nn.Linear(HIDDEN, HIDDEN))
    x = tokens(HIDDEN, HIDDEN)

    def grad() -> Any:
        loss = loss_of(model(x))
        model.inside.first.weight.requires_grad_(False)
        found = torch.autograd.grad(loss, [x, *model.inside.second.parameters()])
        model.inside.first.weight.requires_grad_(True)
        return [bits(value) for value in found]

    expected = grad()
    policed(model)
    assert grad() == expected


@both_actions
def test_weights_swapped_in_by_functional_call_are_those_that_run_again(action: str) -> None:
    model, x = holding(lambda self, x: (x * self.scale).exp().sin(), scale=nn.Parameter(torch.rand(HIDDEN))), tokens()
    other = torch.rand(HIDDEN, requires_grad=True)

    def grads() -> list[Any]:
        result = torch.func.functional_call(model, {"inside.scale": other * 2}, (x,))
        return [bits(grad) for grad in torch.autograd.grad(result.sum(), [x, other])]

    expected = grads()
    policed(model, action)
    assert grads() == expected


def test_a_parameter_replaced_before_backward_is_refused_or_does_what_eager_does() -> None:
    model, x = holding(lambda self, x: (x * self.scale).exp().sin(), scale=nn.Parameter(torch.rand(HIDDEN))), tokens()
    old = model.inside.scale

    def grads() -> list[Any]:
        model.inside.scale = old
        result = model(x)
        model.inside.scale = nn.Parameter(torch.rand(HIDDEN))
        return [bits(grad) for grad in torch.autograd.grad(result.sum(), [x, old])]

    expected = grads()
    policed(model)
    try:
        found = grads()
    except MutationError:
        return
    assert found == expected


def late_change(target: Tensor) -> None:
    with torch.no_grad():
        target.add_(1.0)


@pytest.mark.parametrize("where", ["attribute", "list of modules", "parameter argument", "module argument", "closure", "default"])
def test_a_tensor_that_the_region_reaches_in_any_way_is_checked_for_updates(where: str) -> None:
    """Plain eager runs these, as autograd saves none of the tensors that change; so right or refused will do."""
    weight = nn.Parameter(torch.rand(HIDDEN))
    plain = torch.rand(HIDDEN)
    linear = nn.Linear(HIDDEN, HIDDEN)
    others: tuple[Any, ...] = ()
    if where == "attribute":
        model, changed = holding(lambda self, x: (x + self.plain).exp().sin(), plain=plain), plain
    elif where == "list of modules":
        model, changed = holding(lambda self, x: self.unseen[0](x).exp().sin(), unseen=[linear]), linear.bias
    elif where == "parameter argument":
        model, changed, others = holding(lambda self, x, w: (x + w).exp().sin()), weight, (weight,)
    elif where == "module argument":
        model, changed, others = holding(lambda self, x, m: m(x).exp().sin()), linear.bias, (linear,)
    elif where == "closure":
        model, changed = holding(lambda self, x: (x + plain).exp().sin()), plain
    else:
        model, changed = holding(lambda self, x, w=plain: (x + w).exp().sin()), plain
    x = tokens()
    (expected,) = torch.autograd.grad(model(x, *others).sum(), x)
    policed(model)
    result = model(x, *others)
    late_change(changed)
    try:
        (found,) = torch.autograd.grad(result.sum(), x)
    except MutationError:
        return
    assert bits(found) == bits(expected)


# Parameters


def test_a_parameter_used_inside_and_outside_of_a_region_has_its_hooks_called_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)
            self.inside = nn.Sequential(self.linear, nn.SiLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(self.linear(x)) @ self.linear.weight

    fired: list[str] = []
    model = Model()
    model.linear.weight.register_hook(lambda grad: fired.append("tensor"))
    model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
    recompute.apply(model, policy(("inside", "checkpoint")))
    loss_of(model(tokens())).backward()
    assert sorted(fired) == ["accumulated", "tensor"]


@pytest.mark.parametrize("frozen", ["none", "norms", "projections", "all"])
@pytest.mark.parametrize("grad", [True, False])
@every_policy
def test_frozen_parameters_and_inputs_that_require_no_gradient(rules: dict[str, Any], frozen: str, grad: bool) -> None:
    model = Stack()
    for name, parameter in model.named_parameters():
        wanted = {"none": False, "norms": "norm" in name, "projections": "proj" in name, "all": name != "head.bias"}[frozen]
        parameter.requires_grad_(not wanted)
    assert_as_plain(model, rules, tokens(grad=grad))


@both_actions
def test_inner_no_grad_and_detach(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.norm(x).mean()
        y = self.norm(x) * scale + x.detach().exp()
        with torch.no_grad(), torch.enable_grad():
            return y.exp().detach() * y.sin()

    assert_as_plain(holding(forward, norm=RMSNorm()), policy(("inside", action), ("inside.norm", "recompute")), tokens())


def test_rrelu_whose_noise_is_filled_after_it_was_saved() -> None:
    model = holding(lambda self, x: F.rrelu(x * 1.0, training=True))
    stats = assert_as_plain(model, INSIDE, tokens())
    assert stats.regenerations == 2
    assert_as_plain(holding(lambda self, x: self.act(self.act(x)).sin(), act=nn.RReLU()), INSIDE, tokens())


# keep


def test_a_kept_router_decision_is_not_made_again() -> None:
    decided: list[Tensor] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        logits = recompute.keep(self.router(x) + self.jitter)
        self.jitter = -self.jitter  # a router that is not deterministic
        choice = logits.argmax(-1)
        decided.append(choice)
        return torch.stack([self.experts[index](row) for index, row in zip(choice.tolist(), x, strict=True)]).sin()

    parts = {"router": nn.Linear(HIDDEN, 2), "experts": nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))}
    model, x = holding(forward, **parts, jitter=torch.tensor([3.0, 0.0])), tokens()

    def grads() -> list[Any]:
        model.inside.jitter = torch.tensor([3.0, 0.0])
        wanted = [x, *model.inside.experts.parameters()]
        return [bits(grad) for grad in torch.autograd.grad(loss_of(model(x)), wanted, allow_unused=True)]

    expected = grads()
    policed(model)
    decided.clear()
    assert grads() == expected
    assert len(decided) == 2, "in forward and in backward"
    assert torch.equal(*decided)


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
    assert_as_plain(model, {"rules": []}, tokens())


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
    for rules in (policy(("inside.shared", "checkpoint")), policy(("inside", "checkpoint"), ("inside.shared.norm", "recompute"))):
        assert_as_plain(model, rules, tokens())


@both_actions
def test_autograd_grad_inside_a_regions_forward(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.norm(x).exp()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * slope.sin()

    assert_as_plain(holding(forward, norm=RMSNorm()), policy(("inside", action), ("inside.norm", "recompute")), tokens())


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
