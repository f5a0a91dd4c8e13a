"""Memory that is written to by no op: through arrays, capsules and addresses that the region's code was given."""

import copy
import ctypes
import operator
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from engine_testing import function_of, holding
from tiers import one_in, slow
from torch import Tensor, nn

import recompute
from recompute.engine.tape import exposed_memory

SIZE = 8


def _add_one(address):
    memory = (ctypes.c_float * SIZE).from_address(address)
    for index in range(SIZE):
        memory[index] += 1


def _add_to_array(array):
    array[:] += 1


def _through_an_address(tensor):
    _add_one(tensor.data_ptr())


WRITES = {
    "numpy": lambda tensor: _add_to_array(tensor.detach().numpy()),
    "asarray": lambda tensor: _add_to_array(np.asarray(tensor.detach())),
    "dlpack": lambda tensor: _add_one(np.from_dlpack(tensor.detach()).ctypes.data),
    "a_capsule": lambda tensor: torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.detach())).data.add_(1),
    "torch_from_dlpack": lambda tensor: torch.from_dlpack(tensor.detach()).data.add_(1),
    "an_address": _through_an_address,
    "a_storages_address": lambda tensor: _add_one(tensor.untyped_storage().data_ptr()),
    "a_storages_bytes": lambda tensor: tensor.untyped_storage().__setitem__(3, 64),
    "a_storages_fill": lambda tensor: tensor.untyped_storage().fill_(64),
}
every_write = pytest.mark.parametrize("write", one_in(2, WRITES))


def _saved_before_and_after(x, write):
    made = x.exp()
    y = made.sin() * x.cos()  # saves what is made of it before it is written to
    write(made)
    return y * made * made.cos()


def _written_between(x, write):
    made = x.detach().exp()
    write(made)
    return x * made * x.sin()


def _an_argument(x, write):
    y = x.sin().cos()
    write(x)
    return y * x.exp().sin()


def _a_view(x, write):
    made = x.exp()
    y = made * made.sin()
    write(made.view(2, -1))
    return y * made.cos()


def _written_in_place_afterwards(x, write):
    made = x.detach().exp()
    write(made)
    made.mul_(2)
    y = made.sin() * x
    write(made)
    return y.sin() * made


BODIES = [_saved_before_and_after, _written_between, _an_argument, _a_view, _written_in_place_afterwards]
every_body = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__[1:])


def gradients(function, *frames):
    """The gradients of x in frames that get these arguments beside it."""
    found = []
    for seed, argument in enumerate(frames):
        torch.manual_seed(seed)
        x = torch.randn(SIZE, requires_grad=True)
        function(x * 1, argument).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


def assert_as_without(function, *frames):
    expected = gradients(function, *frames)
    actual = gradients(recompute.recompute(function), *frames)
    assert [torch.equal(ours, plain) for ours, plain in zip(actual, expected, strict=True)] == [True] * len(frames)


@every_body
@every_write
def test_what_is_written_past_the_dispatcher_is_what_backward_sees(write, body):
    assert_as_without(body, *[write] * 3)


@pytest.mark.parametrize("body", [*BODIES[:1], *slow(*BODIES[1:])], ids=lambda body: body.__name__[1:])
@every_write
def test_a_frame_that_follows_a_plan_of_frames_in_which_nothing_was_handed_out(write, body):
    assert_as_without(body, _nothing, _nothing, _nothing, write, _nothing, write, write, _nothing)


def _nothing(tensor):
    pass


@pytest.mark.parametrize("action", ["recompute", "checkpoint"])
def test_an_array_made_before_the_region_that_has_the_memory_of_its_input(action):
    def gradient(policy):
        array = np.linspace(-1, 1, SIZE, dtype=np.float32)
        x = torch.from_numpy(array)
        w = torch.ones(SIZE, requires_grad=True)
        rules = {"rules": [{"match": "**", "action": action}]}
        region = recompute.recompute(_scales, policy=rules) if policy else _scales
        region(x, w, array).sum().backward()
        assert w.grad is not None
        return w.grad

    if action == "checkpoint":
        with pytest.warns(UserWarning, match="an argument, .* has been modified in place"):
            assert torch.equal(gradient(True), gradient(False))
    else:
        assert torch.equal(gradient(True), gradient(False))


def _scales(x, w, array):
    y = x.sin() * w
    array += 1
    return y * (x.cos() * w)


@pytest.mark.parametrize(
    "export", [operator.methodcaller("numpy"), np.asarray, np.from_dlpack], ids=["numpy", "asarray", "dlpack"]
)
def test_an_array_of_an_earlier_frame_that_a_later_one_writes_to(export):
    def run(policy):
        shared = torch.linspace(-1, 1, SIZE)
        arrays = []

        def first(x):
            arrays.append(export(shared))
            return x * shared.sin()

        def second(x):
            y = x * shared.sin() * x.cos()
            _add_one(arrays[0].ctypes.data)
            return y * shared.cos()

        regions = [recompute.recompute(each) if policy else each for each in (second_without, first, second, second)]
        found = []
        for region in regions:
            x = torch.ones(SIZE, requires_grad=True)
            region(x).sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    def second_without(x):
        return x.sin()

    for ours, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, plain)


def _doubles(x, other):
    """Doubles its argument by its address, and what it returns, as a kernel launched by hand may."""
    memory = (ctypes.c_float * SIZE).from_address(other.data_ptr())
    for index in range(SIZE):
        memory[index] *= 2
    return x * other


Doubles = function_of(_doubles, lambda gradient: (gradient, None), saves=lambda *_: ())


def _kernel_in_a_function(x, write):
    made = x.exp()
    y = made.sin() * x.cos()
    write(made)
    return Doubles.apply(y, made.detach()).sin() * made * made.cos()


def test_what_a_custom_function_is_given_the_address_of_counts_as_overwritten():
    assert_as_without(_kernel_in_a_function, *[_nothing] * 3, _through_an_address, _nothing)


@triton.jit
def _add_one_kernel(pointer, size: tl.constexpr):
    offsets = tl.arange(0, size)
    tl.store(pointer + offsets, tl.load(pointer + offsets) + 1)


def _through_triton(tensor):
    _add_one_kernel[(1,)](tensor.detach(), SIZE)


@every_body
def test_an_array_made_inside_that_nobody_else_has_costs_no_bytes(body):
    def region(self, x):
        noise = (
            torch.from_numpy(np.linspace(0, 1, SIZE, dtype=np.float32)) if self.of_numpy else torch.linspace(0, 1, SIZE)
        )
        return body((x.sin() * noise).exp(), _nothing)

    ours, theirs = (_dropped_nbytes(holding(region, of_numpy=of_numpy)) for of_numpy in (True, False))
    assert ours == theirs > 0


@every_body
def test_a_triton_kernel_launched_by_hand(body):
    assert_as_without(body, _nothing, _nothing, _through_triton, _through_triton)


def _dropped_nbytes(module):
    handle = recompute.apply(module, {"rules": [{"match": "inside", "action": "recompute", "via": "hook"}]})
    for _ in range(3):
        module(torch.ones(SIZE, requires_grad=True)).sum().backward()
    return handle.stats().dropped_nbytes


def _asks(self, x):
    if self.asks:
        assert self.weight.data_ptr() % 4 == 0
        assert x.untyped_storage().nbytes() > 0
        copy.deepcopy(x.detach())
        x.tolist()
    y = (x * self.weight).sin()
    return torch.ops.exposed_test.reads(y).exp().cos()


@torch.library.custom_op("exposed_test::reads", mutates_args=())
def reads(x: Tensor) -> Tensor:
    """An op that asks for addresses, as those of kernels do."""
    made = torch.empty_like(x)
    assert x.data_ptr() != made.data_ptr()
    made.numpy()[:] = x.numpy() * 2
    return made


reads.register_autograd(lambda ctx, gradient: gradient * 2)


def test_who_only_asks_and_what_ops_do_inside_costs_no_bytes():
    weight = nn.Parameter(torch.ones(SIZE))
    asked, silent = (_dropped_nbytes(holding(_asks, weight=weight, asks=asks)) for asks in (True, False))
    assert asked == silent > 0


def test_explain_says_that_memory_was_handed_out():
    def body(self, x):
        made = x.detach().exp()
        made.numpy()
        return x * made

    module = holding(body)
    handle = recompute.apply(module, {"rules": [{"match": "inside", "action": "recompute", "via": "hook"}]})
    module(torch.ones(SIZE, requires_grad=True))
    assert "its memory was exposed" in handle.explain(wide=True)


def test_what_was_handed_out_is_forgotten_when_it_dies():
    def body(x):
        made = x.exp()
        made.data_ptr()
        return x * made

    region = recompute.recompute(body)
    for _ in range(2000):
        region(torch.ones(SIZE, requires_grad=True))
    assert len(exposed_memory._exposed) <= 600


@pytest.mark.slow
def test_methods_are_wrapped_only_once_a_region_is_made_and_go_on_as_before():
    code = (
        "import torch, recompute; before = torch.Tensor.numpy\n"
        "assert not hasattr(before, '__wrapped__')\n"
        "recompute.recompute(torch.sin); after = torch.Tensor.numpy; assert after.__wrapped__ is before\n"
        "recompute.recompute(torch.cos); assert torch.Tensor.numpy is after\n"
        "from torch.overrides import get_testing_overrides, resolve_name\n"
        "assert after in get_testing_overrides() and resolve_name(after) == 'torch.Tensor.numpy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiled_code_that_makes_arrays_and_asks_for_addresses():
    recompute.recompute(torch.sin)  # which wraps the methods
    whole = torch.compile(lambda x: torch.from_numpy(x.numpy() * 2), backend="eager", fullgraph=True)
    assert torch.equal(whole(torch.ones(3)), torch.full((3,), 2.0))
    broken = torch.compile(lambda x: (x * 2) * (x.data_ptr() % 4 + 1), backend="aot_eager")
    assert torch.equal(broken(torch.ones(3)), torch.full((3,), 2.0))
