"""Rotary position embedding: eager's values and layouts, what one launch does, and what is saved."""

import itertools
from functools import partial

import kernel_testing
import pytest
import torch
from cases import eager_rope as eager
from kernel_testing import Work, assert_as_good_as, each_dtype, run, same_bits

from recompute.kernels import launch
from recompute.kernels.rope import rope


def make(device, dtype=torch.float32, *, sizes=(2, 4, 2, 5, 16), rotated=None, angles=1, unsqueeze_dim=1):
    """q and k as projections give them, and a cos and a sin whose halves are not equal.

    sizes: of the batch, heads, heads of keys, tokens and columns.
    """
    batch, heads, kv_heads, tokens, width = sizes
    of_angles = (angles, tokens, width if rotated is None else rotated)
    shapes = (batch, tokens, heads, width), (batch, tokens, kv_heads, width), of_angles, of_angles
    q, k, cos, sin = (kernel_testing.make(*s, seed=n, device=device, dtype=dtype) for n, s in enumerate(shapes))
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return [q.requires_grad_(), k.requires_grad_(), cos, sin]


def like(tensors, seed=1):
    """Gradients that lie in memory as the tensors do."""
    drawn = kernel_testing.like(tensors, seed)
    return [torch.empty_like(t).copy_(each) for t, each in zip(tensors, drawn, strict=True)]


@each_dtype
@pytest.mark.parametrize("unsqueeze_dim", [1, 2, -2, -3])
@pytest.mark.parametrize("rotated", [16, 12])
def test_errors_are_no_larger_than_eagers(rotated, unsqueeze_dim, dtype, device):
    inputs = make(device, dtype, rotated=rotated, sizes=(2, 4, 2, 40, 16), unsqueeze_dim=unsqueeze_dim % 4)
    assert_as_good_as(*(partial(each, unsqueeze_dim=unsqueeze_dim) for each in (rope, eager)), inputs, "rope")


SIZES = [
    *(((2, 4, 2, 5, width), None, 1) for width in (2, 6, 64, 80, 96, 128, 256)),
    *(((2, 4, 2, 5, width), rotated, 1) for width, rotated in ((128, 96), (96, 38), (20, 2))),
    *((sizes, None, 1) for sizes in ((2, 7, 1, 5, 16), (2, 1, 1, 5, 16), (2, 33, 3, 5, 128), (1, 4, 2, 1, 16))),
    *(((3, 4, 2, 5, 16), None, 3), ((2, 4, 2, 67, 8), None, 1)),
    *((sizes, None, 1) for sizes in ((0, 4, 2, 5, 16), (2, 4, 2, 0, 16), (2, 0, 2, 5, 16), (2, 4, 0, 5, 16))),
]


@pytest.mark.parametrize(("sizes", "rotated", "angles"), SIZES, ids=str)
def test_any_sizes(sizes, rotated, angles, device):
    assert_as_good_as(rope, eager, make(device, torch.bfloat16, sizes=sizes, rotated=rotated, angles=angles), "rope")


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "contiguous": lambda x: x.contiguous(),
    "half of a packed projection": lambda x: torch.cat([x.transpose(1, 2)] * 2, 2)[:, :, : x.shape[1]].transpose(1, 2),
    "columns not adjacent": kernel_testing.LAYOUTS["transposed"],
    "unaligned": kernel_testing.LAYOUTS["unaligned"],
    "one head for all": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten()[:40].as_strided(x.shape, (16, 1, 1, 1)),
    "one number": kernel_testing.LAYOUTS["expanded scalar"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_a_bit(layout, device):
    q, k, cos, sin = make(device, torch.bfloat16)
    laid_out = [LAYOUTS[layout](x.detach()).requires_grad_() for x in (q, k)]
    directions = [LAYOUTS[layout](d) for d in like(laid_out)]
    dense = [x.detach().contiguous().requires_grad_() for x in laid_out]
    results = []
    for inputs, given, angles in (
        (laid_out, directions, (cos.mT.contiguous().mT, sin)),
        (dense, [each.contiguous() for each in directions], (cos, sin.mT.contiguous().mT)),
    ):
        outputs = rope(*inputs, *angles)
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, given)])
    assert same_bits(*results)
    assert all(value.stride(3) == 1 for value in results[0])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("layout", ["transposed", "contiguous", "half of a packed projection"])
def test_results_lie_in_memory_as_eagers_do(layout, unsqueeze_dim, device):
    q, k, cos, sin = make(device)
    inputs = [LAYOUTS[layout](x.detach()).requires_grad_() for x in (q, k)]
    inputs = [x.transpose(1, 2) for x in inputs] if unsqueeze_dim == 2 else inputs
    outputs, peers = (function(*inputs, cos, sin, unsqueeze_dim) for function in (rope, eager))
    assert [y.stride() for y in outputs] == [y.stride() for y in peers]
    directions = like(outputs)
    gradients = torch.autograd.grad(outputs, inputs, directions)
    assert [g.stride() for g in gradients] == [d.stride() for d in directions]


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("dtypes", [(BF16, FP32, FP32), (FP32, BF16, FP32), (FP16, BF16, FP32), (FP32, FP64, FP64)])
@pytest.mark.parametrize("rotated", [16, 12])
def test_mixed_dtypes_promote(dtypes, rotated, device):
    """Of the states, of the angles, and of what they give."""
    q, k, cos, sin = make(device, dtypes[0], rotated=rotated)
    inputs = [q, k, cos.to(dtypes[1]), sin.to(dtypes[1])]
    assert_as_good_as(rope, eager, inputs, "rope")
    assert [each.dtype for each in run(rope, inputs)] == [dtypes[2]] * 2 + [dtypes[0]] * 2


def test_one_op_and_one_launch_each_way(device, launched):
    inputs = make(device)
    with Work() as seen:
        run(rope, inputs)
    assert [arguments[6] for _, arguments, _ in seen.calls] == [False, True]
    assert len(launched) == (2 if launch.uses_triton(*inputs) else 0)


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_what_is_frozen_is_not_rotated_back(trained, device):
    inputs = make(device)
    chosen = [x.detach().requires_grad_(train) for x, train in zip(inputs, trained, strict=False)]
    with Work() as seen:
        run(rope, [*chosen, *inputs[2:]])
    assert [argument is not None for argument in seen.calls[1][1][:2]] == list(trained)


def test_gradients_of_angles_in_float64_are_those_of_finite_differences():
    inputs = [each.detach().requires_grad_() for each in make("cpu", FP64, sizes=(2, 4, 2, 2, 6), rotated=4)]
    assert torch.autograd.gradcheck(rope, inputs)
    assert torch.autograd.gradgradcheck(rope, inputs)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_third_derivatives_are_eagers(used, device):
    def thrice(function):
        inputs = make(device)
        chosen, results = [inputs[index] for index in used], []
        value = sum((function(*inputs)[index] ** 3).sum() for index in used)
        for _ in range(3):
            gradients = torch.autograd.grad(value, chosen, create_graph=True)
            value = sum((gradient**2).sum() for gradient in gradients)
            results += gradients
        return results

    for value, expected in zip(thrice(rope), thrice(eager), strict=True):
        assert value.requires_grad
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_angles_that_are_trained_get_their_gradients(device):
    inputs = [each.detach().requires_grad_() for each in make(device, rotated=12)]
    torch.testing.assert_close(run(rope, inputs), run(eager, inputs), rtol=1e-6, atol=1e-5)
    with torch.no_grad(), Work() as seen:
        rope(*inputs)
    assert len(seen.calls) == 1


def test_inf_and_nan_stay_where_eager_has_them(device):
    inputs = make(device)
    with torch.no_grad():
        inputs[0][0, 0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    torch.testing.assert_close(rope(*inputs), eager(*inputs), equal_nan=True)


def test_ops_pass_opcheck(device):
    with Work() as seen:
        for unsqueeze_dim, layout in itertools.product((1, 2), ("transposed", "columns not adjacent", "overlapping")):
            q, k, cos, sin = make(device, torch.bfloat16, unsqueeze_dim=unsqueeze_dim)
            q, k = (LAYOUTS[layout](x.detach()).requires_grad_() for x in (q, k))
            outputs = rope(q, k, cos, sin.float(), unsqueeze_dim)
            torch.autograd.grad(outputs[0], q, like(outputs)[0])
    assert len(seen.calls) == 12
    seen.check()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["transposed", "contiguous"])
def test_more_than_2_to_the_31_elements(layout):
    tokens, heads, last = 2**21 + 3, 8, slice(-9, None)
    q, k = (
        LAYOUTS[layout](torch.zeros(1, tokens, count, 128, device="cuda", dtype=BF16).transpose(1, 2))
        for count in (heads, 1)
    )
    cos, sin = torch.zeros(2, 1, tokens, 128, device="cuda", dtype=BF16)
    assert q.numel() > 2**31
    few = make("cuda", BF16, sizes=(1, heads, 1, 9, 128))
    with torch.no_grad():
        for whole, part in zip((q, k, cos[:, None], sin[:, None]), few, strict=True):
            whole[:, :, last] = part
    rotated = rope(q, k, cos, sin)
    assert same_bits([each[:, :, last] for each in rotated], rope(*few))
    assert not rotated[0][:, :, :-9].any()
