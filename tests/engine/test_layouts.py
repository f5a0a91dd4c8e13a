"""What an op on fake tensors returned once, it returns again: of the same layout, in a storage of its own or a view."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from recompute.engine.cut.layout import Layout, are_apart
from recompute.engine.fake_mode import FakeMode

OPS = {
    "an add": lambda x, y: x + y,
    "an add of another number": lambda x, y: x + 1,
    "a product": lambda x, y: x @ y.mT,
    "a view": lambda x, y: x.unsqueeze(1),
    "a slice": lambda x, y: x[:, 1:3],
    "a transposed sum": lambda x, y: x.mT.sum(0, keepdim=True),
    "parts": lambda x, y: x.split(2, dim=-1),
    "a cast": lambda x, y: x.to(torch.float64),
    "what is there already": lambda x, y: x.to(torch.float32),
    "several outputs, some none": lambda x, y: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5),
    "a list of tensors": lambda x, y: torch.cat([x, y, x], dim=1),
    "complex numbers": lambda x, y: x.to(torch.complex64).conj(),
    "an addition in place": lambda x, y: x.clone().add_(y),
    "an addition to what is given": lambda x, y: x.add_(y),
    "a write into a part": lambda x, y: x.clone()[:, 1:].copy_(y[:, 1:]),
    "a sum into what is given": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "a sum into what is too small": lambda x, y: torch.add(x, y, out=torch.empty(0)),
    "a transposition in place": lambda x, y: x.clone().transpose_(0, 1),
    "another's storage": lambda x, y: torch.empty_like(x).set_(y),
    "a mask": lambda x, y: x.masked_fill(y > 0, -1.0),
}


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
@pytest.mark.parametrize("other", [lambda x: x, lambda x: x.mT.contiguous().mT], ids=["dense", "transposed"])
def test_what_an_op_returned_before_is_returned_as_torch_makes_it(op, other):
    def told(mode):
        with mode:
            x, y = (other(torch.empty(2, 3, 4)) for _ in range(2))
            op(x, y)  # its layouts are remembered
            found = tree_leaves(op(x, y))
        given = [each.untyped_storage()._cdata for each in (x, y)]
        return [_told(each, given) for each in found]

    assert told(FakeMode()) == told(FakeTensorMode())


def _told(tensor, given):
    storage = tensor.untyped_storage()
    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, storage.nbytes()
    shares = [storage._cdata == each for each in given]
    return *layout, shares, type(tensor), tensor.is_conj(), tensor._is_view(), tensor.requires_grad


def places(tensor):
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return {*torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()}


def is_known_to_be_apart(one, other):
    return are_apart(Layout.of(one), Layout.of(other))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_slices_along_any_dimension_are_apart(dim, order):
    parts = torch.zeros(4, 6, 5).permute(order).split([1, 2, 1], dim) if order[dim] == 0 else None
    parts = parts or torch.zeros(4, 6, 5).permute(order).chunk(3, dim)
    for number, part in enumerate(parts):
        assert [is_known_to_be_apart(part, other) for other in parts] == [each != number for each in range(len(parts))]


def test_tensors_that_are_said_to_be_apart_have_no_element_in_common():
    generator = random.Random(0)
    for _ in range(1000):
        strides = [generator.randint(0, 6) for _ in range(2)]
        storage = torch.zeros(60)
        one, other = (
            storage.as_strided([generator.randint(1, 4) for _ in strides], strides, generator.randint(0, 20))
            for _ in range(2)
        )
        assert not (is_known_to_be_apart(one, other) and places(one) & places(other))
