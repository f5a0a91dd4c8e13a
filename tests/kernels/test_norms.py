"""RMSNorm and LayerNorm: dtypes of inputs and weights, extreme values, heads, and what a pass does on request."""

import itertools

import kernel_testing
import pytest
import torch
from cases import NORMS, each_norm, eager_layer_norm, inputs_of
from kernel_testing import DTYPES, Work, assert_as_good_as, doubled, each_dtype, like, listed, make, relative_error, run
from torch import Tensor

from recompute.kernels import launch, norm_tiles
from recompute.kernels import norm_kernels as kernels
from recompute.kernels.layer_norm import add_layer_norm, layer_norm
from recompute.kernels.norm_ops import OPS, norm_reference
from recompute.kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6
BY_NAME = {case.name: case for case in NORMS}
RMS, LAYER, ADD_RMS, ADD_LAYER = (BY_NAME[name] for name in ("rms_norm-llama", "layer_norm", "add_rms_norm",
                                                             "add_layer_norm"))  # fmt: skip
GEMMA, TORCHS = BY_NAME["rms_norm-gemma"], BY_NAME["rms_norm-none"]
each_of_two = pytest.mark.parametrize("case", [RMS, LAYER], ids=str)
each_sum = pytest.mark.parametrize("case", [ADD_RMS, ADD_LAYER], ids=str)
each_of_four = pytest.mark.parametrize("case", [RMS, LAYER, ADD_RMS, ADD_LAYER], ids=str)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [9_000, 33_000])
@each_of_four
def test_rows_wider_than_a_program_holds(case, hidden, device):
    assert_as_good_as(case.op, case.eager, inputs_of(case, device, torch.float32, 2, hidden))


@each_norm
def test_one_column(case, device):
    """Where dx is nearly 0 and dweight one number: errors are measured against what they are summed from."""
    inputs = inputs_of(case, device, rows=37, columns=1)
    x = (make(37, 1).sign() * torch.linspace(1, 2, 37)[:, None]).to(device).requires_grad_()
    found, exact = run(case.op, [x, *inputs[1:]]), run(case.eager, doubled([x, *inputs[1:]]), torch.float32)
    scale = (1 + x.abs().max() + sum(each.abs().max() for each in inputs[1:])) ** 2
    for value, truth in zip(found, exact, strict=True):
        assert ((value - truth).abs() <= 4 * kernel_testing.FLOAT32_ROUNDING * scale * 37).all()
    if case is LAYER:  # a row of one number is its own mean
        assert torch.equal(found[0], inputs[2].detach().expand(37, 1))
        assert device == "cuda" or not found[1].any()  # which CUDA rounds, by a fused multiply-add
        assert not found[2].any()


@pytest.mark.parametrize("scale", [1e4, 1e-4])
@each_dtype
@each_of_two
def test_large_and_small_values_beside_rows_that_are_constant(case, dtype, scale, form, device):
    x, *parameters = inputs_of(case, device, dtype, 5, 300)
    x = x.detach().float().mul(scale).clamp(-6e4, 6e4).to(dtype)
    x[1] = 0
    if case is LAYER:
        x[2] = 3
    inputs = [x.requires_grad_(), *parameters]
    assert_as_good_as(case.op, case.eager, inputs)
    y, dx, *_ = run(case.op, inputs)
    constant = parameters[1] if case is LAYER else torch.zeros_like(y[1])
    assert torch.equal(y[1], constant)
    if case is LAYER:
        assert torch.equal(y[2], constant)
    else:
        assert relative_error(dx[1], run(case.eager, inputs)[1][1].double()) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("mean", [30.0, -1000.0])
def test_a_mean_that_is_large_beside_the_deviation(mean, form, device):
    x, *parameters = inputs_of(LAYER, device, rows=5, columns=300)
    assert_as_good_as(layer_norm, eager_layer_norm, [(x.detach() + mean).requires_grad_(), *parameters])


@each_norm
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
def test_infinities_and_nans_go_where_eagers_go_and_nowhere_else(case, form, device):
    inputs = inputs_of(case, device, rows=6, columns=300)
    clean = run(case.op, inputs)
    with torch.no_grad():
        inputs[0][1, 3], inputs[0][3, 5], inputs[0][4, 70] = torch.inf, -torch.inf, torch.nan
    found = run(case.op, inputs)
    with pytest.MonkeyPatch.context() as patch:  # the references
        patch.setattr(launch, "uses_triton", lambda *tensors: False)
        expected = run(case.op, inputs)
    for value, peer in zip(found, expected, strict=True):
        assert torch.equal(value.isnan(), peer.isnan())
        assert torch.equal(value.isinf(), peer.isinf())
    assert found[0].isnan().any(-1).tolist() == [False, True, False, True, True, False]
    for value, was in zip(found[: case.outputs + 1], clean, strict=False):
        assert torch.equal(value[[0, 2, 5]], was[[0, 2, 5]])


@each_of_four
def test_many_rows_a_program_and_many_programs(case, multiprocessors, form, device):
    inputs = inputs_of(case, device, rows=75, columns=300)
    assert_as_good_as(case.op, case.eager, inputs)
    first = run(case.op, inputs)
    assert all(kernel_testing.same_bits(run(case.op, inputs), first) for _ in range(3 if device == "cuda" else 1))


@pytest.mark.parametrize("hidden", [1, 64, 1000, 16384, 131072])
@pytest.mark.parametrize("nbytes", [2, 4, 8, 12])
@pytest.mark.parametrize(("is_forward", "is_layer_norm"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("kibibytes", [100, 164, 228], ids=["Ada", "Ampere", "Hopper"])
def test_tiles_fit_into_shared_memory(kibibytes, is_forward, is_layer_norm, nbytes, hidden, monkeypatch):
    monkeypatch.setattr(norm_tiles, "_shared_memory", lambda device: kibibytes * 1024)
    tiles = norm_tiles.tiles_of.__wrapped__(is_forward, hidden, nbytes, torch.device("cpu"), is_layer_norm)
    ahead = tiles.constants["STAGES"] - 1
    assert ahead >= 0
    assert ahead * tiles.rows * tiles.columns * nbytes * max(tiles.resident, 1) <= kibibytes * 1024


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [RMS, GEMMA, TORCHS], ids=str)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_dtypes_and_values_are_eagers_whatever_the_dtypes_of_input_and_weight(case, dtype, weight_dtype, device):
    x, weight = (each.detach() for each in inputs_of(case, device, rows=6, columns=100))
    inputs = [x.to(dtype).requires_grad_(), weight.to(weight_dtype).requires_grad_()]
    found, wanted = run(case.op, inputs), run(case.eager, inputs)
    exact = run(case.op, doubled(inputs), wanted[0].dtype)
    for value, peer, truth in zip(found, wanted, exact, strict=True):
        assert value.dtype is peer.dtype
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + 2 * kernel_testing.FLOAT32_ROUNDING
    if dtype is not torch.float32:  # rounded in the same places: only near-ties may fall to the other side
        assert (found[0] == wanted[0]).float().mean() >= 0.99
    if case is not TORCHS and dtype is weight_dtype and not launch.uses_triton(inputs[0]):
        assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES[:2], repeat=3)], ids=str)
@each_sum
def test_dtypes_are_promoted(case, dtypes, device):
    inputs = inputs_of(case, device, rows=6, columns=100)
    inputs = [each.detach().to(to).requires_grad_() for each, to in zip(inputs, (*dtypes, dtypes[2]), strict=False)]
    y, h, *gradients = found = run(case.op, inputs)
    assert h.dtype is torch.promote_types(*dtypes[:2])
    assert y.dtype is (torch.promote_types(h.dtype, dtypes[2]) if case is ADD_RMS else h.dtype)
    assert [each.dtype for each in gradients] == [each.dtype for each in inputs]
    eps = torch.finfo(torch.bfloat16 if torch.bfloat16 in dtypes else y.dtype).eps
    for value, truth in zip(found, run(case.eager, doubled(inputs), y.dtype), strict=True):
        assert relative_error(value, truth) <= eps


def test_a_weight_of_zero_gets_its_gradient(device):
    for case in (RMS, LAYER):
        x, weight, *bias = inputs_of(case, device, rows=8, columns=10)
        weights = (torch.full_like(weight, value).requires_grad_() for value in (0.0, 1.0))
        of_zeros, of_ones = (run(case.op, [x, each, *bias])[2] for each in weights)
        assert of_zeros.abs().min() > 0
        assert torch.equal(of_zeros, of_ones)


TRAINED = [(True, True, True), (True, False, False), (False, True, False), (False, False, True), (True, None, True)]


@pytest.mark.parametrize("trains", TRAINED, ids=str)
@each_of_two
def test_frozen_inputs_cost_no_work(case, trains, form, device, launched):
    """Of x, weight and bias; None: there is none."""
    trains = (*trains[:2], None) if case is RMS else trains
    if not any(trains):
        return
    made = (make(*shape, device=device) for shape in ((5, 300), (300,), (300,)))
    given = [None if train is None else each.requires_grad_(train) for each, train in zip(made, trains, strict=True)]
    y = case.op(*given[: 2 if case is RMS else 3])
    uses_kernels = bool(launched)
    assert uses_kernels == launch.uses_triton(y)
    launched.clear()
    with Work() as work:
        y.backward(make(5, 300, device=device, seed=2))
    ((_, _, results),) = work.calls
    assert [each is not None for each in results] == [bool(train) for train in trains]
    if uses_kernels:
        dots = [kernels._dots_kernel] if form == "columns" and trains[0] else []
        sums = [kernels._sum_kernel] if trains[1] or trains[2] else []
        assert [kernel for kernel, _ in launched] == [*dots, kernels._backward_kernel, *sums]
        arguments = launched[len(dots)][1]
        assert [arguments[name] is not None for name in ("dx", "weight_parts", "bias_parts")] == [*map(bool, trains)]
        assert (arguments["mean"] is not None) is (case is LAYER)
        assert arguments["dresidual"] is None


@pytest.mark.parametrize("casting", OPS)
@each_dtype
def test_what_is_regenerated_has_the_bits_of_forward(dtype, casting, form, device):
    x, third = make(5, 300, device=device, dtype=dtype), make(5, 300, device=device, seed=3)
    narrow, wide = (make(300, device=device, dtype=each, seed=seed) for seed, each in ((1, dtype), (2, torch.float32)))
    forward, _, regenerate = OPS[casting]
    for (weight, bias), residual in itertools.product(
        ((None, None), (narrow, wide), (wide, None), (None, narrow)), (None, third)
    ):
        bias = bias if casting == "layer_norm" else None
        y, h, mean, rstd = forward(x, residual, weight, bias, EPS, casting)
        assert (h is None) is (residual is None)
        assert rstd.dtype is torch.float32
        assert (mean is None) is (casting != "layer_norm")
        h = x if h is None else h  # of x alone, the kernel reads fewer bytes a row than of x and a residual
        assert torch.equal(regenerate(h, weight, bias, mean, rstd, casting), y)


@each_dtype
@each_of_two
def test_the_gradient_of_the_stream_is_added_before_rounding(case, dtype, form, device):
    casting = "layer_norm" if case is LAYER else "llama"
    x, dy, dresidual = (make(9, 300, device=device, dtype=dtype, seed=seed) for seed in range(3))
    weight, bias = (make(300, device=device, dtype=dtype, seed=seed) for seed in (3, 4))
    forward, backward, _ = OPS[casting]

    def gradient(*tensors):
        x, dy, dresidual, weight, bias = tensors
        _, _, mean, rstd = forward(x, None, weight, bias if case is LAYER else None, EPS, casting)
        saved = (dy, x, weight, bias if case is LAYER else None, mean, rstd, casting, True, True, case is LAYER)
        dx, *others = backward(*saved, dresidual)
        _, *expected = backward(*saved, None)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(others, expected, strict=True))
        return dx

    tensors = (x, dy, dresidual, weight, bias)
    exact = gradient(*(tensor.double() for tensor in tensors))
    found = gradient(*tensors)
    assert found.dtype is dtype
    # What one rounding leaves, of each element that it rounds, and of float32's own error beside it.
    assert ((found - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("has_residual", [True, False])
@each_sum
def test_the_streams_gradient_joins_in_the_one_pass(case, has_residual, device):
    x, residual, *parameters = inputs_of(case, device, rows=5, columns=64)
    given = [x, residual if has_residual else None, *parameters]
    with Work() as forward:
        outputs = case.op(*given)
    kind = case.name.removeprefix("add_")
    assert [op._opname for op, *_ in forward.calls] == [f"{kind}_forward"]
    assert (outputs[1].data_ptr() == x.data_ptr()) is not has_residual
    gradients = like(outputs)
    trained = [each for each in given if each is not None]
    with Work() as backward:
        torch.autograd.grad(outputs, trained, gradients)
    assert backward.arguments_of(f"{kind}_backward")[-1].data_ptr() == gradients[1].data_ptr()
    assert not [name for name in backward.others if "add" in name]
    with Work() as alone:
        case.op(*(each if each is None else each.detach() for each in given[:2]), *parameters)[0].sum().backward()
    assert alone.arguments_of(f"{kind}_backward")[7:10] == (False, True, case is ADD_LAYER)


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("op", [add_rms_norm, add_layer_norm])
def test_a_stream_that_is_changed_in_place_is_refused(op, has_residual, device):
    x = make(3, 64, device=device).requires_grad_()
    y, h = op(x, x.detach() if has_residual else None)
    with pytest.raises(RuntimeError, match="modified"):  # at once where h is a view of x, else by backward
        (y.sum() + h.add_(1).sum()).backward()


HEADS = {
    "transposed": lambda packed: packed[..., :4, :].contiguous().transpose(1, 2),
    "sliced": lambda packed: packed[..., 1:5, :],
    "sliced and transposed": lambda packed: packed[..., 1:5, :].transpose(1, 2),
    "sequence first": lambda packed: packed[..., :4, :].contiguous().transpose(0, 1),
    "shared": lambda packed: packed[:1].expand(packed.shape),
}


@each_dtype
@pytest.mark.parametrize("view", HEADS)
@each_of_two
def test_heads_are_read_in_place(case, view, dtype, device, launched):
    heads = HEADS[view](make(2, 6, 7, 64, device=device, dtype=dtype)).requires_grad_()
    parameters = inputs_of(case, device, dtype, 1, 64)[1:]
    assert not heads.is_contiguous()
    found = run(case.op, [heads, *parameters])
    if launched:
        assert launched[0][1]["x"].data_ptr() == heads.data_ptr()
        x_in_backward = next(given["x"] for kernel, given in launched if kernel is kernels._backward_kernel)
        assert x_in_backward.data_ptr() == heads.data_ptr()
    copied = run(case.op, [heads.detach().contiguous().requires_grad_(), *parameters])
    laid_out = copied[0] if view == "shared" else norm_reference(heads, parameters[0], None, EPS, "llama")
    meta = run(case.op, [each.detach().to("meta").requires_grad_() for each in (heads, *parameters)])
    assert [value.stride() for value in found] == [value.stride() for value in meta]
    assert [value.stride() for value in found[:2]] == [laid_out.stride()] * 2
    assert kernel_testing.same_bits(found[:2], copied[:2])
    for value, expected in zip(found[2:], copied[2:], strict=True):
        assert relative_error(value, expected.double()) <= 2 * torch.finfo(dtype).eps  # summed in another order


@pytest.mark.parametrize("change", [Tensor.contiguous, lambda dy: dy[:, :, :1].expand(dy.shape)])
def test_gradients_of_heads_may_have_any_strides(change, device):
    heads = make(2, 5, 4, 64, device=device).transpose(1, 2).requires_grad_()
    plain, dy = heads.detach().contiguous().requires_grad_(), change(make(2, 4, 5, 64, device=device, seed=2))
    assert kernel_testing.same_bits(*(torch.autograd.grad(rms_norm(each), each, dy) for each in (heads, plain)))


@pytest.mark.gpu
@each_of_four
def test_more_than_2_to_the_31_elements(case):
    hidden = 4096
    rows = 2**31 // hidden + 2
    streams = [torch.ones(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(case.outputs)]
    for seed, stream in enumerate(streams):
        stream[-2:] = make(2, hidden, device="cuda", dtype=torch.bfloat16, seed=seed)
    parameters = [each.detach() for each in inputs_of(case, "cuda", torch.bfloat16, 1, hidden)[case.outputs :]]
    outputs = listed(case.op(streams[0].requires_grad_(), *streams[1:], *parameters))
    last = streams[0][-2:].detach().requires_grad_()
    of_last = listed(case.op(last, *(each[-2:] for each in streams[1:]), *parameters))
    assert all(torch.equal(whole[-2:], part) for whole, part in zip(outputs, of_last, strict=True))
    dy = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(outputs[0])
    (dx,) = torch.autograd.grad(outputs, streams[0], [dy] * len(outputs))
    (expected,) = torch.autograd.grad(of_last, last, [dy[-2:]] * len(outputs))
    assert torch.equal(dx[-2:], expected)
