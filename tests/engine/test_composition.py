"""Regions among other machinery: user hooks, torch's checkpoint, replicas, threads, functional transforms, decorators, tracing."""

from __future__ import annotations

import copy
import threading
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
    Layer,
    RMSNorm,
    Stack,
    assert_as_plain,
    assert_same,
    bits,
    holding,
    loss_of,
    no_garbage_collection,
    outcome,
    policed,
    policy,
    tokens,
    weak,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import recompute
from recompute.errors import MutationError

POLICIES = {"checkpoint": CHECKPOINT, "recompute": RECOMPUTE, "both": BOTH}
INSIDE = policy(("inside", "checkpoint"))
NESTED = policy(("layers.*", "checkpoint"), ("**.norm*", "recompute"), ("**.mlp", "recompute"))
every_policy = pytest.mark.parametrize("rules", POLICIES.values(), ids=POLICIES)
both_actions = pytest.mark.parametrize("action", ["checkpoint", "recompute"])


# Hooks on saved tensors


@both_actions
def test_saved_tensor_hooks_of_the_user_inside_a_region(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = y.exp().sin()
        return y.cos()

    assert_as_plain(holding(forward, norm=RMSNorm()), policy(("inside", action), ("inside.norm", "recompute")), tokens())


@every_policy
def test_the_users_hooks_around_see_the_tensors_that_are_held_and_give_them_back(rules: dict[str, Any]) -> None:
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    def unpack(index: int) -> Tensor:
        unpacked.append(index)
        return packed[index]

    model, x = Stack(p=0.0), tokens()
    recompute.apply(model, rules)
    held = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = loss_of(model(x))
        held = len(packed)
    loss.backward()
    assert 0 < held
    assert set(unpacked) <= set(range(held))
    assert len(packed) == held, "backward packs nothing"


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_in_the_middle_of_a_region(reentrant: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: F.dropout(self.norm(x), 0.5).exp(), x * 2, use_reentrant=reentrant)
        return F.dropout(y, 0.5).sin()

    model, x = holding(forward, norm=RMSNorm()), tokens()

    def grads() -> list[Any]:
        torch.manual_seed(1)
        model.zero_grad()
        x.grad = None
        loss_of(model(x)).backward()
        return [bits(tensor.grad) for tensor in (x, *model.parameters())]

    expected = grads()
    recompute.apply(model, policy(("inside", "checkpoint"), ("inside.norm", "recompute")))
    assert grads() == expected


# Threads and replicas


@every_policy
def test_backward_on_another_thread(rules: dict[str, Any]) -> None:
    model, x = Stack(), tokens()

    def grads() -> list[Any]:
        torch.manual_seed(1)
        loss, found = loss_of(model(x)), []
        wanted = [x, *model.parameters()]
        thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, wanted)))
        thread.start()
        thread.join()
        return [bits(grad) for grad in found]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


@every_policy
def test_a_forward_on_one_thread_does_not_see_the_scope_of_another(rules: dict[str, Any]) -> None:
    model, x = Stack(p=0.0), tokens()
    expected = bits(torch.autograd.grad(loss_of(model(x)), x)[0])
    recompute.apply(model, rules)
    found: list[Any] = []
    other: list[threading.Thread] = []

    def run() -> None:
        found.append(bits(torch.autograd.grad(loss_of(model(x)), x)[0]))

    def run_meanwhile(module: nn.Module, args: Any) -> None:
        if not other:
            other.append(thread := threading.Thread(target=run))
            thread.start()
            thread.join()

    model.layers[1].mlp.register_forward_pre_hook(run_meanwhile)
    run()
    assert found == [expected, expected]


def replica_of(module: nn.Module) -> nn.Module:
    """As ``torch.nn.parallel.replicate`` makes them: parameters are plain tensors with a graph of their own."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(replica, name, replica_of(child))
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter * 1.0)
    for name, buffer in module._buffers.items():
        setattr(replica, name, buffer)
    return replica


@every_policy
def test_replicas_as_data_parallel_makes_them_give_the_parameters_their_gradients(rules: dict[str, Any]) -> None:
    model, inputs = Stack(p=0.0), [tokens(), tokens()]

    def grads() -> list[Any]:
        model.zero_grad()
        replicas = [replica_of(model) for _ in inputs]
        results: list[Any] = [None, None]

        def run(index: int) -> None:
            with torch.enable_grad():
                results[index] = loss_of(replicas[index](inputs[index]))

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del replicas
        sum(results).backward()
        return [bits(parameter.grad) for parameter in model.parameters()]

    expected = grads()
    handle = recompute.apply(model, rules)
    assert grads() == expected
    assert handle.stats().regenerations > 0


# Functional transforms


@every_policy
def test_functional_gradients_of_a_module_under_a_policy(rules: dict[str, Any]) -> None:
    model, x = Stack(count=1, p=0.0), tokens()
    model.layers[0].attention = model.layers[0].attention.q
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sin().sum()

    def found() -> list[Any]:
        detached = {name: value.detach() for name, value in parameters.items()}
        grads = torch.func.grad(loss)(detached, x.detach())
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, torch.stack([x.detach()] * 2))
        _, tangent = torch.func.jvp(lambda x: loss(detached, x), (x.detach(),), (torch.ones_like(x),))
        return [bits(value) for value in (*grads.values(), *per_sample.values(), tangent)]

    expected = found()
    handle = recompute.apply(model, rules)
    assert found() == expected
    assert handle.stats().frames == 0


@every_policy
def test_vmap_over_a_module_that_trains(rules: dict[str, Any]) -> None:
    model, x = Stack(count=1, p=0.0), tokens(2, TOKENS, HIDDEN)

    def grads() -> list[Any]:
        loss = torch.func.vmap(model)(x).sum()
        return [bits(grad) for grad in torch.autograd.grad(loss, [x, *model.parameters()])]

    expected = grads()
    recompute.apply(model, rules)
    assert grads() == expected


@pytest.mark.parametrize("rules", [*POLICIES.values(), NESTED], ids=[*POLICIES, "nested"])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("way", ["is_grads_batched", "vmap"])
def test_a_vectorized_backward_gives_the_plain_gradients_or_is_refused(rules: dict[str, Any], p: float, way: str) -> None:
    model, x = Stack(count=1, p=p), tokens()
    model.layers[0].attention = model.layers[0].attention.q
    directions = torch.randn(3, TOKENS, HIDDEN)

    def grads() -> Any:
        torch.manual_seed(0)
        result = model(x)
        if way == "is_grads_batched":
            return bits(torch.autograd.grad(result, x, directions, is_grads_batched=True)[0])
        backward = lambda direction: torch.autograd.grad(result, x, direction, retain_graph=True)[0]  # noqa: E731
        return bits(torch.func.vmap(backward)(directions))

    expected = grads()
    recompute.apply(model, rules)
    try:
        found = grads()
    except RuntimeError as error:
        assert "vmap" in str(error) or "functorch" in str(error)
        assert way == "vmap" or p > 0
        return
    assert found == expected


@pytest.mark.parametrize("rules", [INSIDE, policy(("norm", "recompute"))], ids=["in a region", "beside a region"])
def test_a_forward_that_takes_functional_gradients_is_refused_by_torch_and_leaves_nothing_behind(rules: dict[str, Any]) -> None:
    """torch.func takes none while saved-tensor hooks are set, by whomever."""

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: x.sin().sum())(x) * x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.norm = Inner(), RMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(self.norm(x))

    model, x = Model(), tokens()
    expected = bits(torch.autograd.grad(model(x).sum(), x)[0])
    with recompute.apply(model, rules):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            model(x)
        with torch.no_grad():
            model(x)
    assert bits(torch.autograd.grad(model(x).sum(), x)[0]) == expected


@every_policy
def test_a_model_on_fake_tensors(rules: dict[str, Any]) -> None:
    with FakeTensorMode():
        model, x = Stack(count=1), tokens()
        model.layers[0].batch = nn.BatchNorm1d(HIDDEN)
        model.layers[0].register_forward_hook(lambda module, args, result: module.batch(result))
        recompute.apply(model, rules)
        loss_of(model(x)).backward()
        assert x.grad.shape == x.shape


# Decorated functions


def test_a_decorated_function_is_a_region_with_what_its_closure_holds() -> None:
    weight, norm = nn.Parameter(torch.rand(HIDDEN)), nn.BatchNorm1d(HIDDEN)
    generator = torch.Generator()

    def plain(x: Tensor, *, scale: float = 2.0) -> Tensor:
        mask = torch.rand(x.shape, generator=generator)
        return (F.dropout(norm(x * weight), 0.5) * mask).exp().sin() * scale

    decorated = recompute.recompute(plain)
    x, wanted = tokens(), [weight, *norm.parameters()]

    def run(function: Callable[..., Tensor]) -> list[Any]:
        torch.manual_seed(1)
        generator.manual_seed(1)
        norm.reset_running_stats()
        grads = torch.autograd.grad(function(x, scale=3.0).sum(), [x, *wanted])
        state = [*norm.buffers(), torch.get_rng_state(), generator.get_state()]
        return [bits(value) for value in (*grads, *state)]

    assert run(decorated) == run(plain)


def test_a_decorated_function_refuses_weights_of_its_closure_updated_before_backward() -> None:
    weight = nn.Parameter(torch.rand(HIDDEN))
    decorated = recompute.recompute(lambda x: (x + weight).exp().sin())
    result = decorated(tokens())
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(MutationError):
        result.sum().backward()


def test_a_decorated_function_drops_what_it_saves_and_dies_with_its_graph() -> None:
    references: list[Any] = []

    @recompute.recompute
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        references.append(weak(y))
        return y.sin()

    with no_garbage_collection() as engine_objects:
        result = function(tokens())
        assert references[0].expired()
        result.sum().backward()
        del result
        assert engine_objects() == {}


def test_a_decorated_class_and_its_instances_train_as_without() -> None:
    class Plain(Layer):
        pass

    class Decorated(Layer):
        pass

    plain = Plain()
    under = recompute.recompute(Decorated)()
    under.load_state_dict(plain.state_dict())
    x = tokens()
    assert_same(outcome(under, x, backwards=2), outcome(plain, x, backwards=2))


# Putting a policy on


class Stateful(nn.Module):
    """Its forward leaves traces on the module, as counters, caches and auxiliary losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[Any] = []
        self.last: Any = None
        self.register_buffer("average", torch.ones(()))
        self.table = {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.last = x
        self.average = 0.5 * self.average + x.mean()
        self.table["b"] = 2
        return torch.sigmoid(x) * self.average


OUTSIDE = torch.ones(HIDDEN)
SOURCE = torch.Generator()


class Outside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * OUTSIDE + torch.rand(HIDDEN, generator=SOURCE)


class Borrower(nn.Module):
    """Uses a parameter and a module that are not its own, as tied weights are."""

    def __init__(self, owner: nn.Linear):
        super().__init__()
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.owner[0](x)) * self.owner[0].bias


@both_actions
@pytest.mark.parametrize("make", [Stateful, Outside, lambda: Borrower(nn.Linear(HIDDEN, HIDDEN))], ids=["stateful", "outside", "borrower"])
def test_putting_a_policy_on_runs_no_forward_and_changes_no_attribute(make: Callable[[], nn.Module], action: str) -> None:
    model = holding(lambda self, x: x)
    model.inside = make()
    before = {name: copy.copy(value) for name, value in vars(model.inside).items()}
    state = list(model.state_dict())
    handle = recompute.apply(model, policy(("inside", action)))
    model(tokens())
    handle.remove()
    assert vars(model.inside).keys() == before.keys()
    assert list(model.state_dict()) == state
    if isinstance(model.inside, Stateful):
        assert (model.inside.calls, len(model.inside.seen), isinstance(model.inside.last, Tensor)) == (1, 1, True)
        assert isinstance(model.inside.average, Tensor)
