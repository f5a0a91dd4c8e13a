"""What is decided by layouts is decided once for them, and anew for others."""

import pytest
import torch
from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels import argument_layouts
from recompute.kernels.argument_layouts import once_by_layouts


def spied():
    calls = []

    def decide(x, setting=None):
        calls.append((x, setting))
        if setting == "wrong":
            raise KernelError("a wrong setting")
        return len(calls)

    return once_by_layouts(decide), calls


def test_the_same_layouts_get_the_same_result():
    decided, calls = spied()
    assert [decided(torch.zeros(2, 3)), decided(torch.ones(2, 3)), decided(torch.nn.Parameter(torch.ones(2, 3)))] == [
        *(1, 1, 1)
    ]
    assert len(calls) == 1


@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(3, 2),), (torch.ones(3, 2).t(),), (torch.ones(2, 3).double(),),
        (torch.ones(2, 3, device="meta"),), (torch.ones(2, 3), "setting"), (None,),
    ],
    ids=["shape", "strides", "dtype", "device", "setting", "no tensor"],
)  # fmt: skip
def test_other_layouts_get_their_own(other):
    decided, _ = spied()
    decided(torch.zeros(2, 3))
    assert decided(*other) == 2
    assert decided(*other) == 2


def test_what_is_raised_is_raised_each_time():
    decided, calls = spied()
    for _ in range(2):
        with pytest.raises(KernelError, match="a wrong setting"):
            decided(torch.zeros(2), "wrong")
    assert len(calls) == 2


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(2).as_subclass(Subclass),),
        (torch.zeros(2), ["no", "hash"]),
        (torch.eye(2).to_sparse_csr(),),
        (torch.zeros(2), object()),
    ],
    ids=["subclass", "list", "sparse", "object"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_has_no_layouts_is_decided_anew(arguments):
    decided, _ = spied()
    assert [decided(*arguments), decided(*arguments)] == [1, 2]


def test_layouts_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(argument_layouts, "MAX_LAYOUTS", 2)
    decided, calls = spied()
    for size in range(5):
        decided(torch.zeros(size))
        decided(torch.zeros(size))
    assert len(calls) == 5
    decided(torch.zeros(0))
    assert len(calls) == 6
