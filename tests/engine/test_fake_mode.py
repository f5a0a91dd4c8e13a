"""Tensors without values: ops give what they gave before, and what would launch a kernel is refused by name."""

import ctypes
import functools
import random

import numpy
import pytest
import torch
from engine_testing import function_of
from tiers import by_default
from tiny import decoder, rule, rules, token_ids
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import recompute
from recompute.engine.cut.layout import Layout, are_apart
from recompute.engine.fake_mode import FakeMode
from recompute.errors import ModelError
from recompute.estimation.build_model import build_fake
from recompute.profiling.roofline import roofline

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _double_kernel(x, y, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + places, 2 * tl.load(x + places, mask=places < size), mask=places < size)


_tuned_kernel = triton.heuristics({"BLOCK": lambda arguments: 64})(_double_kernel)


def _launch(x):
    y = torch.empty_like(x)
    _double_kernel[(1,)](x, y, x.numel(), BLOCK=64)
    return y


def _launch_tuned(x):
    y = torch.empty_like(x)
    _tuned_kernel[(1,)](x, y, x.numel())
    return y


Double = function_of(_launch, lambda gradient: 2 * gradient, saves=lambda *_: ())
"""As Liger's Functions are: a kernel in forward."""
DoubleBackward = function_of(lambda x: 2 * x, _launch, saves=lambda *_: ())


@torch.library.triton_op("recompute_tests::double", mutates_args=())
def _double(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.library.wrap_triton(_double_kernel)[(1,)](x, y, x.numel(), BLOCK=64)
    return y


_double.register_fake(torch.empty_like)
_double.register_autograd(lambda ctx, gradient: 2 * gradient)

KERNEL = "launches the kernel _double_kernel"
MEMORY = "asks for the memory of a tensor"
READERS = {
    "Triton": (_launch, KERNEL),
    "Triton with heuristics": (_launch_tuned, KERNEL),
    "a Function": (Double.apply, KERNEL),
    "a Function's backward": (DoubleBackward.apply, KERNEL),
    "an address": (lambda x: x * (x.data_ptr() % 16), MEMORY),
    "a storage's address": (lambda x: x * x.untyped_storage().data_ptr(), MEMORY),
    "a view's address": (lambda x: ctypes.string_at(x[1:].data_ptr(), 4), MEMORY),
    "a gradient's graph": (lambda x: x.detach().data_ptr(), MEMORY),
    "an array": (lambda x: x * float(x.detach().numpy().sum()), MEMORY),
    "an array of numpy": (lambda x: x * float(numpy.asarray(x.detach()).sum()), MEMORY),
    "DLPack": (lambda x: torch.from_dlpack(x.detach()), MEMORY),
    "a capsule": (lambda x: torch.utils.dlpack.to_dlpack(x.detach()), MEMORY),
}


class Reader(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        y = self.read(x)
        return x + y if isinstance(y, Tensor) else x


def model_of(read):
    last = Reader(8, 8)
    last.read = read
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), last))


BATCH, estimate = (torch.ones(4, 8),), functools.partial(recompute.estimate, advise=False)
RUNS = {
    "an estimate": lambda model: estimate(model, batch=BATCH),
    "an estimate of a policy": lambda model: estimate(model, batch=BATCH, policy=rules(rule("Reader"))),
    "a plan without a device": lambda model: roofline(model, BATCH, "H100", match="1.*"),
}


@pytest.mark.parametrize("run", by_default(list(RUNS), "an estimate"))
@pytest.mark.parametrize("reader", READERS)
def test_what_would_launch_is_refused_and_named(reader, run):
    with pytest.raises(ModelError) as refused:
        RUNS[run](model_of(READERS[reader][0]))
    # In a backward without a tracker of modules there is only the place.
    is_backward = reader == "a Function's backward"
    name = "the model" if is_backward and run in ("a plan without a device", "an estimate of a policy") else "Reader"
    for text in (name, READERS[reader][1], f"in {__file__}:", "torch.library.triton_op", "recompute.profile"):
        assert text in str(refused.value)
    knows_path = name == "Reader" and run != "a plan without a device"
    assert not knows_path or "module '1.1' (Reader)" in str(refused.value)


def test_an_operator_with_a_fake_implementation_is_estimated():
    assert estimate(model_of(lambda x: _double(x)), batch=BATCH).peak_bytes > 0


def test_our_own_kernels_are_not_launched(monkeypatch):
    def run(*_, **__):
        raise AssertionError("a kernel was launched")

    for kind in (type(_double_kernel), triton.runtime.JITFunction):
        monkeypatch.setattr(kind, "run", run)
    model = decoder(layers=1)
    assert estimate(model, batch=(token_ids(),), policy="kernel").peak_bytes > 0


class Steps(torch.optim.SGD):
    """An optimizer whose kernel it launches by hand."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = torch.zeros_like(parameter)
            assert not state.data_ptr(), "a kernel would write to address 0"


def test_an_optimizer_that_would_launch_is_refused():
    with pytest.raises(ModelError, match=rf"{MEMORY}.* in {__file__}:"):
        roofline(nn.Linear(8, 8), BATCH, "H100", optimizer=Steps)


def factory(**_):
    return model_of(_launch), BATCH


def test_explain_names_what_it_cannot_run():
    source = f"{__name__}:factory"
    options = {"sequence_length": 4, "batch_size": 4, "dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(ModelError, match=f"Reader {KERNEL}"), build_fake(source, **options) as (model, batch):
        model(*batch)


def test_other_errors_pass_as_they_are():
    with pytest.raises(ZeroDivisionError), FakeMode():
        F.relu(torch.ones(1)) / (1 // 0)


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
