"""Backward of captured regions, in all the ways in which autograd is asked for it."""

import functools

import engine_testing
import pytest
import torch
import torch.nn.functional as F
from bodies.runs import RUNS
from capture_testing import NODE, SIZE, STEPS_TO_SETTLE, Around, Twins, a_block, body, linear, rule, tokens, train
from engine_testing import RMSNorm, fresh, leaves, loss_of
from tiers import by_default, slow
from torch import nn
from torch.autograd import grad

from recompute.errors import PolicyWarning, UnsupportedError


@pytest.fixture
def twins(x):
    return Twins.captured(a_block(), x)


def on(x, backward):
    return lambda module: backward(module, fresh(x))


NEVER_AS_CODE = (
    *("under_anomaly_detection", "functional", "on_other_weights", "vmapped", "by_replicas", "in torch's checkpoint"),
)
CAPTURED = {name: each for name, each in RUNS.items() if each.captured}
LAYERS = {"rules": [{"match": "layers.*", "action": "recompute", "via": "hook"}]}


def running(run, x):
    return lambda module: (torch.manual_seed(3), leaves(run.run(module, fresh(x))))[1]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "run",
    by_default(
        CAPTURED, "of_parts", "batched", "read_outside_too", "update_in_a_hook", "functional", "in torch's checkpoint"
    ),
)  # fmt: skip
def test_a_run_of_captured_layers_is_that_of_plain_pytorch(run):
    x = stack_input()
    twins = Twins(run.make(), LAYERS).settle(train(x))
    runs = [twins.runs_code(running(run, x)) for _ in range(2)]
    assert max(runs) > 0 or run in [RUNS[name] for name in NEVER_AS_CODE]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("run", by_default(CAPTURED, "several_times", "with_hooks"))
def test_so_is_one_that_is_captured_meanwhile(run):
    x = stack_input()
    twins = Twins(run.make(), LAYERS)
    twins.steps(running(run, x), STEPS_TO_SETTLE)


def stack_input():
    torch.manual_seed(1)
    return engine_testing.tokens()


def test_the_output_comes_from_the_node_and_a_second_backward_is_refused(twins, x):
    for loss in (torch.sum, loss_of):
        y = twins.under.inside(x)
        assert y.grad_fn.name() == NODE
        loss(y).backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss(y).backward()


def of_a_gradient(m, x):
    (gradient,) = grad(loss_of(m(x)), x, create_graph=True)
    gradient.pow(2).sum().backward()
    return [gradient.detach(), x.grad]


def test_a_gradient_that_is_differentiated_is_right_and_the_region_goes_back_to_the_tape(twins, x):
    found, plain = fresh(x), fresh(x)
    with pytest.warns(PolicyWarning, match=r"last bits.*capture: false"):
        first, second = of_a_gradient(twins.under, found)
    expected, of_it = of_a_gradient(twins.plain, plain)
    assert torch.equal(first, expected)
    torch.testing.assert_close(second, of_it)
    assert not twins.is_captured
    assert "differentiated" in twins.why_not
    assert "differentiated" in twins.handle.explain(wide=True)
    for _ in range(2):
        assert twins.runs_code(on(x, of_a_gradient)) == 0  # where it is exact


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("action", ["recompute", "checkpoint"])
def test_a_gradient_penalty_from_the_first_step_on_is_exact_in_every_step(x, action):
    """As in a WGAN, whose other backwards are those of any training: nothing is captured in between."""
    options = {"via": "hook"} if action == "recompute" else {}
    rules = {"rules": [{"match": "inside", "action": action, **options}]}
    twins = Twins(Around(a_block(), before=linear()), rules)
    for _ in range(STEPS_TO_SETTLE):
        for step in on(x, of_a_gradient), train(x), train(x):
            twins.step(step)
    assert not twins.is_captured
    assert "differentiated" in twins.handle.explain(wide=True)


def test_a_chain_of_regions_is_differentiated_twice(x):
    """The input of the second region is an output of the first, which has been dropped."""
    blocks = nn.Sequential(RMSNorm(), RMSNorm(), linear())
    twins = Twins(Around(blocks), rule(["inside.0", "inside.1"])).settle(train(x))
    with pytest.warns(PolicyWarning, match="last bits"):
        found = of_a_gradient(twins.under, fresh(x))
    expected = of_a_gradient(twins.plain, fresh(x))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def of_a_sum(m, x):
    m.inside(x).sum().backward()  # whose gradient is one number, expanded
    return [x.grad]


def test_a_region_whose_backward_often_differs_goes_back_to_the_tape(twins, x):
    for step in range(40):
        twins.step(on(x, of_a_sum) if step % 2 else train(x))
    assert not twins.is_captured
    assert "differs from step to step" in twins.why_not
    assert twins.runs_code(on(x, of_a_sum)) == 0


def timed():
    """A block that is given a tensor which backward does not read, if the block is frozen."""
    forward = lambda self, x, time: x + F.gelu(self.norm(x) + self.time(time.sigmoid()))  # noqa: E731
    return body(forward, norm=nn.LayerNorm(SIZE), time=linear())


def of_complex_numbers():
    """A block whose backward sees its gradient as another dtype."""

    def forward(self, x, time):
        pairs = F.gelu(self.linear(x)).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(pairs).tanh()).flatten(1)

    return body(forward, linear=linear())


class Skip(nn.Module):
    """As the middle of a UNet: the gradient of the last call is a slice, and those of the calls before it are not."""

    def __init__(self, blocks, calls, dim):
        super().__init__()
        self.blocks, self.calls, self.dim = nn.ModuleList(blocks), calls, dim
        self.time = linear()

    def forward(self, x):
        time, skip, found = self.time(x.detach()), x * 2, x
        for call in range(self.calls):
            found = self.blocks[call % len(self.blocks)](found, time)
        del time
        return torch.cat([skip, found], self.dim).sigmoid()


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("is_frozen", [*slow(False), True])
@pytest.mark.parametrize(("block", "count", "dim"), [(timed, 2, 1), (timed, 1, 1), (of_complex_numbers, 2, 0)])
def test_each_region_runs_code_for_the_gradients_that_it_gets(x, block, count, dim, is_frozen, action):
    """Code that was made of another region alike may be for other gradients, and never makes backward fail."""
    model = Skip([block() for _ in range(count)], 2, dim)
    model.blocks.requires_grad_(not is_frozen)
    options = {"via": "hook"} if action == "recompute" else {}
    twins = Twins(model, {"rules": [{"match": "blocks.*", "action": action, **options}]})
    for seed in range(3 * STEPS_TO_SETTLE):
        twins.step(train(x, seed=seed))
    is_called_twice = count == 1
    assert twins.is_captured is not is_called_twice
    assert bool(twins.why_not) is is_called_twice
    assert twins.runs_code(train(x)) == (0 if is_called_twice else count)


def test_forward_does_not_run_again_on_what_has_changed_since(x):
    """Plain PyTorch would not mind: it does not read the bias in backward."""
    twins = Twins.captured(a_block(), x)
    y = twins.under.inside(x)
    with torch.no_grad():
        twins.under.inside.up.bias.add_(1)
    with pytest.raises(UnsupportedError, match=r"has changed since.*capture: false"):
        y.sum().backward()


def outputs(self, x):
    return self.a(x) * self.b(x), self.b(torch.tanh(x)) + self.a(x)


@pytest.mark.parametrize("wanted", [[0], *slow([1]), [1, 0], *slow([0, 1])])
def test_gradients_of_some_outputs_in_any_order(x, wanted):
    twins = Twins(Around(body(outputs, a=linear(), b=linear()))).settle(train(x))

    def backward(m, x):
        z = x * 2
        before, found, after = z.exp(), m(z), z.cos()
        (loss_of(found[wanted[0]]) + loss_of(before) / 7 + loss_of(after)).backward(retain_graph=True)
        for index in wanted[1:]:
            loss_of(found[index]).backward()
        return [x.grad]

    for _ in range(2):
        assert twins.runs_code(on(x, backward)) == 1


def apart(self, x, z):
    return F.gelu(self.a(x)), F.gelu(self.b(z))


def test_a_state_that_the_last_call_hands_to_nobody(x):
    def forward(self, x):
        self.state = torch.tanh(self.linear(x) + self.state)
        return self.state * 2

    def step(module):
        module.inside.state = torch.zeros(SIZE)
        given = fresh(x)
        loss_of([module(given) for _ in range(3)]).backward()
        return [given.grad]

    twins = Twins(Around(body(forward, linear=linear(), state=None)))
    replays = 0
    for _ in range(2 * STEPS_TO_SETTLE):
        twins.step(step)
        replays = max(replays, twins.regions[0]._replays)
    assert replays > 0


def streams(self, x, z):
    """Gives two streams, as the blocks of Flux do: each depends on the other one only where they are mixed."""
    mixed = F.gelu(self.mixer(x + z))
    return x + F.gelu(self.first(mixed)), z + F.gelu(self.second(mixed))


def of_streams(self, x, z):
    """Nobody reads the second stream that the last of four calls gives."""
    for call in range(4):
        x, z = self.blocks[call % len(self.blocks)](x, z)
    return x


@pytest.mark.parametrize(
    ("blocks", "captured", "reason"),
    [
        (4, 3, "its backward returns no gradient for some inputs that require one"),
        (1, 0, "its outputs depend on different inputs, and it runs several times in each step"),
    ],
)
def test_blocks_of_several_streams_are_captured_where_all_streams_are_read(x, blocks, captured, reason):
    """Where one is not, a hook of a weight that no gradient reaches must not be called, nor the weight get zeros."""
    made = [body(streams, first=linear(), second=linear(), mixer=linear()) for _ in range(blocks)]
    twins = Twins(body(of_streams, blocks=nn.ModuleList(made)), rule("blocks.*"))
    called = []
    twins.under.blocks[-1].second.weight.register_hook(lambda gradient: called.append(1))
    for seed in range(2 * STEPS_TO_SETTLE):
        twins.step(train(x, tokens(), seed=seed))
    assert sum(region.is_captured for region in twins.regions) == captured
    assert reason in twins.why_not
    assert bool(called) is (blocks < 4)


def slices(self, x, z):
    """Reads and gives two slices of one tensor, as the blocks of Flux do that have one stream."""
    both = F.gelu(self.linear(torch.cat([x.sin(), z.cos()], 1)))
    return both[:, : SIZE // 2], both[:, SIZE // 2 :]


def of_slices(count):
    def forward(self, x):
        parts = (x * 2).split(SIZE // 2, 1)
        for block in self.blocks:
            parts = block(*parts)
        return torch.cat(parts, 1)

    return Twins(
        body(forward, blocks=nn.ModuleList(body(slices, linear=linear()) for _ in range(count))), rule("blocks.*")
    )


def test_regions_are_captured_whose_inputs_outputs_and_gradients_share_memory(x):
    twins = of_slices(3).settle(train(x))

    def of_other_memory(offset):
        def step(m, x):
            wide = torch.cat([x, x], 1) * 2
            loss_of(m.blocks[0](wide[:, : SIZE // 2], wide[:, offset : offset + SIZE // 2])).backward()
            return [x.grad]

        return on(x, step)

    def apart(m, x):
        loss_of(m.blocks[0](*[part.clone() for part in (x * 2).split(SIZE // 2, 1)])).backward()
        return [x.grad]

    for step in of_other_memory(SIZE // 2), of_other_memory(SIZE), on(x, apart), train(x):
        twins.step(step)
        twins.step(step)
    assert twins.runs_code(train(x)) == 3


@pytest.mark.parametrize("position", [0, 1])
def test_a_write_to_one_of_two_inputs_that_share_memory_is_noticed(x, position):
    twins = of_slices(2).settle(train(x))
    for model in (twins.plain, twins.under):
        parts = model.blocks[0](*(x * 2).split(SIZE // 2, 1))
        loss = loss_of(model.blocks[1](*parts))
        with torch.no_grad():
            parts[position].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def two_towers(x, other):
    return Twins(Around(body(apart, a=linear(), b=linear()))).settle(train(x, other))


def of_one_tower(m, x):
    loss_of(m(x * 3, x.detach())[0]).backward()
    return [x.grad]


def test_weights_of_an_output_without_gradient_get_none(x):
    twins = two_towers(x, tokens(grad=False))
    for _ in range(3):
        found = twins.step(on(x, of_one_tower))
    assert found["gradient of inside.b.weight"] is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_of_an_output_without_gradient_are_not_called(x, register):
    """A node has all its inputs behind it, also those that the output in use does not depend on."""
    twins = two_towers(x, tokens(grad=False))
    getattr(twins.under.inside.b.weight, register)(lambda _: pytest.fail("the hook is called"))
    with pytest.raises(UnsupportedError, match=r"depend on fewer inputs.*capture: false"):
        of_one_tower(twins.under, fresh(x))


def test_hooks_upstream_of_an_output_without_gradient_are_not_called(x):
    twins, z = two_towers(x, tokens()), fresh(x) * 2
    z.register_hook(lambda _: pytest.fail("the hook is called"))
    with pytest.raises(UnsupportedError, match=r"depend on fewer inputs.*capture: false"):
        loss_of(twins.under(x * 3, z)[0]).backward()


def test_a_weight_that_regions_share(x):
    def forward(self, x):
        weight = self.inside[0][0].weight
        y = F.linear(self.inside[0](F.linear(x, weight)) * 2, weight)
        return F.linear(self.inside[1](y) + y, weight)

    inside = nn.ModuleList(nn.Sequential(linear(), nn.GELU()) for _ in range(2))
    inside[1][0].weight = inside[0][0].weight
    Twins(body(forward, inside=inside), rule("inside.*")).settle(train(x))


def test_an_error_in_forward_leaves_all_in_order(x):
    def forward(self, x):
        y = F.gelu(self.lin(x))
        if self.fails:
            raise ValueError("as asked")
        return y

    twins = Twins.captured(body(forward, lin=linear(), fails=False), x)
    twins.both(lambda m: setattr(m.inside, "fails", True))
    with pytest.raises(ValueError, match="as asked"):
        twins.under(x)
    twins.both(lambda m: setattr(m.inside, "fails", False))
    assert twins.runs_code(train(x)) == 1


def test_a_consumer_of_a_dropped_output_may_go_backward_after_the_region(x):
    def forward(self, x):
        y = self.inside(x)
        return self.a(y), self.b(y.detach())

    def backward(order, m, x):
        found = m(x)
        for index in order:
            loss_of(found[index]).backward()
        return [x.grad]

    twins = Twins(body(forward, inside=RMSNorm(), a=linear(), b=linear())).settle(train(x))
    for order in ((0, 1), (1, 0)):
        before = twins.handle.stats()
        assert twins.runs_code(on(x, functools.partial(backward, order))) == 1
        assert (twins.handle.stats() - before).dropped_nbytes > 0
