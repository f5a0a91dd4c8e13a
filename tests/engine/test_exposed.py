"""What it costs that a region's code is handed memory as arrays and addresses: bodies.unseen has what it then does."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from bodies.unseen import SIZE, WRITTEN
from corpus import nothing
from engine_testing import holding
from torch import Tensor, nn

import recompute
from recompute.engine.tape import exposed_memory

every_body = pytest.mark.parametrize("body", WRITTEN, ids=lambda body: body.__name__)


@every_body
def test_an_array_made_inside_that_nobody_else_has_costs_no_bytes(body):
    def region(self, x):
        noise = (
            torch.from_numpy(np.linspace(0, 1, SIZE, dtype=np.float32)) if self.of_numpy else torch.linspace(0, 1, SIZE)
        )
        return body((x.sin() * noise).exp(), nothing)

    ours, theirs = (_dropped_nbytes(holding(region, of_numpy=of_numpy)) for of_numpy in (True, False))
    assert ours == theirs > 0


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


def test_what_was_handed_out_is_forgotten_when_it_dies():
    def body(x):
        made = x.exp()
        made.data_ptr()
        return x * made

    region = recompute.recompute(body)
    for _ in range(900):
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
