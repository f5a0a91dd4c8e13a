"""Rotary position embedding: eager's values and layouts, what one launch does, what is saved and what is refused."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import eager_rope as eager
from kernel_testing import FLOAT32_ROUNDING, Work, each_dtype, relative_error, same_bits
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.scopes import RecipeScope
from recompute.kernels import launch
from recompute.kernels.rms_norm import rms_norm
from recompute.kernels.rope import rope


def make(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tokens: int = 5,
    width: int = 16,
    rotated: int | None = None,
    angles: int = 1,
    unsqueeze_dim: int = 1,
) -> list[Tensor]:
    """q and k as projections give them, and a cos and a sin whose halves are not equal."""
    generator = torch.Generator().manual_seed(0)
    rotated = width if rotated is None else rotated
    shapes = [(batch, tokens, heads, width), (batch, tokens, kv_heads, width), *[(angles, tokens, rotated)] * 2]
    q, k, cos, sin = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return [q.requires_grad_(), k.requires_grad_(), cos, sin]


def like(tensors: Any, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty_like(t).copy_(torch.randn(t.shape, generator=generator)) for t in tensors]


def run(function: Callable[..., Any], inputs: list[Tensor], *options: Any, directions: Any = None) -> list[Tensor]:
    """Both outputs, and the gradients of all inputs that take one."""
    outputs = function(*inputs, *options)
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    directions = like(outputs) if directions is None else directions
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, trained, directions)]


def assert_as_exact_as_eager(inputs: list[Tensor], *options: Any) -> None:
    found, peers = run(rope, inputs, *options), run(eager, inputs, *options)
    doubles = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    exact = run(eager, doubles, *options, directions=[d.double() for d in like(found[:2])])
    for value, peer, truth in zip(found, peers, exact, strict=True):
        assert (value.shape, value.dtype) == (peer.shape, peer.dtype)
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + FLOAT32_ROUNDING


@each_dtype
@pytest.mark.parametrize("unsqueeze_dim", [1, 2, -2, -3])
@pytest.mark.parametrize("rotated", [16, 12])
def test_errors_are_no_larger_than_eagers(rotated: int, unsqueeze_dim: int, dtype: torch.dtype, device: str):
    inputs = make(device, dtype, rotated=rotated, tokens=40, unsqueeze_dim=unsqueeze_dim % 4)
    assert_as_exact_as_eager(inputs, unsqueeze_dim)


@pytest.mark.parametrize(
    "sizes",
    [
        *({"width": width} for width in (2, 6, 64, 80, 96, 128, 256)),
        {"width": 128, "rotated": 96},
        {"width": 96, "rotated": 38},
        {"width": 20, "rotated": 2},
        {"heads": 7, "kv_heads": 1},
        {"heads": 1, "kv_heads": 1},
        {"heads": 33, "kv_heads": 3, "width": 128},
        {"batch": 3, "angles": 3},
        {"batch": 1, "tokens": 1},
        {"tokens": 67, "width": 8},
    ],
    ids=str,
)
def test_any_sizes(sizes: dict[str, int], device: str):
    assert_as_exact_as_eager(make(device, torch.bfloat16, **sizes))


@pytest.mark.parametrize("nothing", ["batch", "tokens", "heads", "kv_heads"])
def test_nothing_is_rotated_too(nothing: str, device: str):
    inputs = make(device, **{nothing: 0})
    for value, expected in zip(run(rope, inputs), run(eager, inputs), strict=True):
        torch.testing.assert_close(value, expected)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "contiguous": lambda x: x.contiguous(),
    "half of a packed projection": lambda x: torch.cat([x.transpose(1, 2)] * 2, 2)[:, :, : x.shape[1]].transpose(1, 2),
    "columns not adjacent": lambda x: x.mT.contiguous().mT,
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "one head for all": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten()[:40].as_strided(x.shape, (16, 1, 1, 1)),
    "one number": lambda x: x.flatten()[0].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_a_bit(layout: str, device: str):
    q, k, cos, sin = make(device, torch.bfloat16)
    laid_out = [LAYOUTS[layout](x.detach()) for x in (q, k)]
    directions = [LAYOUTS[layout](d) for d in like(laid_out)]
    angles = [angle.mT.contiguous().mT for angle in (cos, sin)]
    found = run(rope, [*(x.requires_grad_() for x in laid_out), angles[0], sin], directions=directions)
    dense = [x.detach().contiguous().requires_grad_() for x in laid_out]
    assert same_bits(found, run(rope, [*dense, cos, angles[1]], directions=[d.contiguous() for d in directions]))
    assert all(value.stride(3) == 1 for value in found)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("layout", ["transposed", "contiguous", "half of a packed projection"])
def test_results_lie_in_memory_as_eagers_do(layout: str, unsqueeze_dim: int, device: str):
    q, k, cos, sin = make(device)
    inputs = [LAYOUTS[layout](x.detach()).requires_grad_() for x in (q, k)]
    if unsqueeze_dim == 2:
        inputs = [x.transpose(1, 2) for x in inputs]
    outputs = rope(*inputs, cos, sin, unsqueeze_dim)
    peers = eager(*inputs, cos, sin, unsqueeze_dim)
    assert [y.stride() for y in outputs] == [y.stride() for y in peers]
    directions = like(outputs)
    gradients = torch.autograd.grad(outputs, inputs, directions)
    assert [g.stride() for g in gradients] == [d.stride() for d in directions]


@pytest.mark.parametrize(
    ("states", "angles", "expected"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("rotated", [16, 12])
def test_mixed_dtypes_promote(
    states: torch.dtype, angles: torch.dtype, expected: torch.dtype, rotated: int, device: str
):
    q, k, cos, sin = make(device, states, rotated=rotated)
    inputs = [q, k, cos.to(angles), sin.to(angles)]
    assert_as_exact_as_eager(inputs)
    outputs = rope(*inputs)
    assert [output.dtype for output in outputs] == [expected] * 2
    assert [g.dtype for g in torch.autograd.grad(outputs, (q, k), outputs)] == [states] * 2


def test_one_op_and_one_launch_each_way(device: str, launched: list[Any]):
    inputs = make(device)
    with Work() as seen:
        outputs = rope(*inputs)
        directions = like(outputs)
        torch.autograd.grad(outputs, inputs[:2], directions)
    (_, forward, _), (_, backward, _) = seen.calls
    assert forward[6] is False
    assert backward[6] is True
    assert len(launched) == (2 if launch.uses_triton(*inputs) else 0)


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_what_is_frozen_costs_nothing(trained: tuple[bool, bool], device: str):
    inputs = make(device)
    expected = run(rope, inputs)
    chosen = [x.detach().requires_grad_(train) for x, train in zip(inputs, trained, strict=False)]
    outputs = rope(*chosen, *inputs[2:])
    with Work() as seen:
        torch.autograd.backward(outputs, like(outputs))
    ((_, arguments, _),) = seen.calls
    assert [argument is not None for argument in arguments[:2]] == list(trained)
    for x, train, gradient in zip(chosen, trained, expected[2:], strict=True):
        assert torch.equal(x.grad, gradient) if train else x.grad is None


@pytest.mark.parametrize("of_angles", [False, True])
def test_gradients_in_float64_are_those_of_finite_differences(of_angles: bool):
    inputs = make("cpu", torch.float64, tokens=2, width=6, rotated=4)
    inputs[2:] = [angle.requires_grad_(of_angles) for angle in inputs[2:]]
    assert torch.autograd.gradcheck(rope, inputs)
    assert torch.autograd.gradgradcheck(rope, inputs)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_gradients_of_gradients_are_eagers(used: tuple[int, ...], device: str):
    def thrice(function: Callable[..., Any]) -> list[Tensor]:
        inputs = make(device)
        chosen = [inputs[index] for index in used]
        results: list[Tensor] = []
        value = sum((function(*inputs)[index] ** 3).sum() for index in used)
        for _ in range(3):
            gradients = torch.autograd.grad(value, chosen, create_graph=True)
            value = sum((gradient**2).sum() for gradient in gradients)
            results += gradients
        return results

    for value, expected in zip(thrice(rope), thrice(eager), strict=True):
        assert value.requires_grad
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_angles_that_are_trained_get_their_gradients(device: str):
    inputs = make(device, rotated=12)
    inputs[2:] = [angle.requires_grad_() for angle in inputs[2:]]
    for value, expected in zip(run(rope, inputs), run(eager, inputs), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-5)
    with torch.no_grad(), Work() as seen:
        rope(*inputs)
    assert len(seen.calls) == 1


def test_inf_and_nan_stay_where_eager_has_them(device: str):
    q, k, cos, sin = make(device)
    with torch.no_grad():
        q[0, 0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    for value, expected in zip(rope(q, k, cos, sin), eager(q, k, cos, sin), strict=True):
        torch.testing.assert_close(value, expected, equal_nan=True)


def test_ops_pass_opcheck(device: str):
    with Work() as seen:
        for unsqueeze_dim, layout in itertools.product((1, 2), ("transposed", "columns not adjacent", "overlapping")):
            q, k, cos, sin = make(device, torch.bfloat16, unsqueeze_dim=unsqueeze_dim)
            q, k = (LAYOUTS[layout](x.detach()).requires_grad_() for x in (q, k))
            outputs = rope(q, k, cos, sin.float(), unsqueeze_dim)
            torch.autograd.grad(outputs[0], q, like(outputs)[0])
    assert len(seen.calls) == 12
    for op, arguments, _ in seen.calls:
        arguments = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@each_dtype
def test_what_comes_of_a_norm_comes_back_itself(dtype: torch.dtype, device: str):
    """As the queries of Qwen3; what another op gave would be held in the place of what was rotated."""
    q, k, cos, sin = make(device, dtype)
    weight = like([cos[0, 0]])[0].requires_grad_()

    def attend() -> tuple[list[Tensor], list[StorageWeakRef]]:
        rotated = rope(rms_norm(q.transpose(1, 2), weight).transpose(1, 2), k * 2, cos, sin)
        outputs = [x.sin() for x in rotated]  # which saves what it is given
        return outputs, [StorageWeakRef(x.untyped_storage()) for x in rotated]

    expected, _ = attend()
    with RecipeScope(RegionStatistics("attention")):
        outputs, storages = attend()
    gc.collect()  # Triton's interpreter leaves its arguments to the garbage collector
    assert [storage.expired() for storage in storages] == [True, False]
    inputs, directions = (q, k, weight), like(outputs)
    gradients = torch.autograd.grad(outputs, inputs, directions, retain_graph=True)
    assert same_bits(gradients, torch.autograd.grad(expected, inputs, directions))
    assert same_bits(gradients, torch.autograd.grad(outputs, inputs, directions))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["transposed", "contiguous"])
def test_more_than_2_to_the_31_elements(layout: str):
    tokens, heads, last = 2**21 + 3, 8, slice(-9, None)
    q = torch.zeros(1, tokens, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.zeros(1, tokens, 1, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    cos, sin = torch.zeros(2, 1, tokens, 128, device="cuda", dtype=torch.bfloat16)
    if layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    assert q.numel() > 2**31
    few = make("cuda", torch.bfloat16, batch=1, heads=heads, kv_heads=1, tokens=9, width=128)
    with torch.no_grad():
        for whole, part in zip(
            (q, k, cos[:, None], sin[:, None]), (*few[:2], few[2][:, None], few[3][:, None]), strict=True
        ):
            whole[:, :, last] = part
    q_rot, k_rot = rope(q, k, cos, sin)
    expected = rope(*few)
    assert torch.equal(q_rot[:, :, last], expected[0])
    assert torch.equal(k_rot[:, :, last], expected[1])
    assert not q_rot[:, :, :-9].any()
