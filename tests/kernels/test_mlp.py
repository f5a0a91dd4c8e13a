"""The ungated MLP: its activations against eager's, its matrix products counted, what it holds, transposed weights."""

from __future__ import annotations

import gc
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_testing import FLOAT32_ROUNDING, make, relative_error
from mlp_testing import EAGER_ACTIVATIONS, Work, assert_no_larger_error, assert_no_worse_than_eager, flops, make_weight
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from recompute.counters import step_memory
from recompute.errors import KernelError
from recompute.kernels import mlp_ops as mlp_module
from recompute.kernels.activation import ACTIVATION, ACTIVATIONS
from recompute.kernels.blockwise_8bit import dequantize_blockwise, quantize_blockwise
from recompute.kernels.mlp import mlp

B, S, H, I = 2, 20, 48, 40  # noqa: E741
GEMM_FLOPS = 2 * B * S * H * I


def make_inputs(
    biases: bool,
    device: str,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = (S, H, I),
    transposed: bool = False,
) -> list[Any]:
    """x, both weights, both biases or None; ``transposed``, the weights lie in memory as those of a Conv1D."""
    tokens, hidden, inner = sizes
    shapes: list[tuple[int, ...] | None] = [(B, tokens, hidden), (inner, hidden), (hidden, inner)]
    shapes += [(inner,), (hidden,)] if biases else [None] * 2
    made = [
        None if shape is None else maker(*shape, seed=seed, device=device, dtype=dtype)
        for seed, (shape, maker) in enumerate(zip(shapes, (make, make_weight, make_weight, make, make), strict=True))
    ]
    if transposed:
        made[1:3] = [each.t().contiguous().t() for each in made[1:3]]  # type: ignore[union-attr]
    return [None if each is None else each.requires_grad_() for each in made]


def ours(activation: str = "gelu", **options: Any) -> Callable[..., Tensor]:
    def function(x: Tensor, up: Tensor, down: Tensor, up_bias: Any = None, down_bias: Any = None) -> Tensor:
        return mlp(x, up, down, activation, up_bias=up_bias, down_bias=down_bias, **options)

    return function


def eager(activation: str = "gelu") -> Callable[..., Tensor]:
    def function(x: Tensor, up: Tensor, down: Tensor, up_bias: Any = None, down_bias: Any = None) -> Tensor:
        return F.linear(EAGER_ACTIVATIONS[activation](F.linear(x, up, up_bias)), down, down_bias)

    return function


each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
with_and_without_biases = pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])


@each_activation
@with_and_without_biases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_errors_are_no_larger_than_eagers(dtype: torch.dtype, biases: bool, activation: str, device: str) -> None:
    assert_no_worse_than_eager(ours(activation), eager(activation), make_inputs(biases, device, dtype))


@pytest.mark.slow
@each_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_errors_of_many_values_are_no_larger_than_eagers(dtype: torch.dtype, activation: str, device: str) -> None:
    inputs = make_inputs(True, device, dtype, sizes=(256, 96, 160))
    assert_no_worse_than_eager(ours(activation), eager(activation), inputs)


@each_activation
def test_gradients_of_every_order(activation: str) -> None:
    inputs = make_inputs(True, "cpu", torch.float64, sizes=(1, 3, 2))
    assert torch.autograd.gradcheck(ours(activation), inputs)
    assert torch.autograd.gradgradcheck(ours(activation), inputs)


EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 88.0, -88.0, 1e-30, -1e-30, 3.0, -3.0]


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_no_value_is_too_large_for_a_rectifier(activation: str, device: str) -> None:
    """Infinite values that it cuts off leave no NaN behind, and NaN stays what it is."""
    x = torch.tensor(EDGES, device=device, requires_grad=True)
    expected = EAGER_ACTIVATIONS[activation](x)
    dactive = torch.full_like(x, math.inf)
    (gradient,) = torch.autograd.grad(expected, x, dactive)
    assert torch.equal(
        ACTIVATION.forward(x.detach(), None, activation).nan_to_num(7.0), expected.detach().nan_to_num(7.0)
    )
    if activation == "relu":  # eager's relu2 multiplies infinite by zero before it cuts off
        found = ACTIVATION.backward(dactive, x.detach(), None, None, None, 0, activation, True, False, False)[0]
        assert torch.equal(found.nan_to_num(7.0), gradient.nan_to_num(7.0))


SUBSETS = [trained for trained in itertools.product((True, False), repeat=3) if any(trained)]


@pytest.mark.parametrize("trained", SUBSETS)
def test_backward_does_what_is_needed_and_no_more(trained: tuple[bool, ...], device: str) -> None:
    x_trains, up_trains, down_trains = trained
    inputs = make_inputs(False, device)[:3]
    for tensor, trains in zip(inputs, trained, strict=True):
        tensor.requires_grad_(trains)
    found = flops(ours(), inputs)
    assert found == flops(eager(), inputs)
    needs_up = x_trains or up_trains
    products = x_trains + up_trains + down_trains + needs_up
    assert found == (2 * GEMM_FLOPS, products * GEMM_FLOPS)

    y = ours()(*inputs)
    with Work() as work:
        y.sum().backward()
    core = "activation_forward" if not needs_up else "activation_backward_" if down_trains else "activation_backward"
    assert work.counts == Counter({"mm": products, core: 1})


def test_what_is_frozen_changes_no_other_gradient(device: str) -> None:
    inputs = make_inputs(True, device)
    expected = torch.autograd.grad(ours()(*inputs).sum(), inputs)
    for index, alone in itertools.product(range(5), (True, False)):
        trained = [(other == index) is alone for other in range(5)]
        chosen = [t.detach().requires_grad_(trains) for t, trains in zip(inputs, trained, strict=True)]
        ours()(*chosen).sum().backward()
        for tensor, trains, gradient in zip(chosen, trained, expected, strict=True):
            assert torch.equal(tensor.grad, gradient) if trains else tensor.grad is None


def test_only_what_up_gives_is_held(device: str) -> None:
    inputs = make_inputs(True, device, torch.bfloat16)
    y = ours()(*inputs)
    known = {tensor.data_ptr() for tensor in inputs}
    saved = [each for each in y.grad_fn.saved_tensors if each is not None]  # type: ignore[union-attr]
    (held,) = [tensor for tensor in saved if tensor.data_ptr() not in known]
    assert len(saved) == len(known) + 1
    assert held.untyped_storage().nbytes() == B * S * I * 2


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])  # the interpreter makes cycles
def test_it_is_freed_once_it_has_been_read(retain: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(False, device)[:3]
    y = ours()(*inputs)
    node: Any = y.grad_fn
    storage = StorageWeakRef(node.saved_tensors[-2].untyped_storage())
    dead = []
    gradients = mlp_module.linear_gradients

    def looking(*arguments: Any, **options: Any) -> Any:
        dead.append(storage.expired())
        return gradients(*arguments, **options)

    monkeypatch.setattr(mlp_module, "linear_gradients", looking)  # of up, and of down
    gc.disable()
    try:
        first = torch.autograd.grad(y.sum(), inputs, retain_graph=retain)
    finally:
        gc.enable()
    assert dead == [not retain] * 3
    if retain:
        assert all(map(torch.equal, first, torch.autograd.grad(y.sum(), inputs)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), inputs)


@each_activation
def test_what_backward_regenerates_has_forwards_bits(activation: str, device: str) -> None:
    with Work() as work:
        ours(activation)(*make_inputs(True, device, torch.bfloat16)).sum().backward()
    overwritten = work.arguments_of("activation_backward_")[0]
    assert torch.equal(overwritten, work.results_of("activation_forward"))


@pytest.mark.gpu
def test_the_peak_of_backward_is_known() -> None:
    M, H, I = 4096, 512, 2048  # noqa: E741
    x, dy = (make(M, H, seed=seed, device="cuda", dtype=torch.bfloat16) for seed in range(2))
    weights = [make_weight(*s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in ((I, H), (H, I))]
    for _ in range(2):  # the first time cuBLAS takes its workspace
        torch.cuda.synchronize()
        y = mlp(x.requires_grad_(), *weights)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(y, (x, *weights), dy)
        extra = torch.cuda.max_memory_allocated() - before
        del gradients
    assert extra <= 2 * 2 * M * I + 2 * I * H  # dactive and dup; then active, dup and a weight's, without up


@pytest.mark.parametrize("shape", [(H,), (0, H), (1, H), (B, S, H), (B, 1, S, H)])
@with_and_without_biases
def test_any_leading_dimensions(biases: bool, shape: tuple[int, ...], device: str) -> None:
    operands = make_inputs(biases, device, torch.float64)[1:]
    x = make(*shape).to(device).double().requires_grad_()
    inputs = [tensor for tensor in (x, *operands) if tensor is not None]
    y, expected = ours()(x, *operands), eager()(x, *operands)
    assert y.is_contiguous()
    dy = make(*shape, seed=9).to(y)
    found, wanted = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)
    for value, truth in zip((y, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("change", [lambda t: t.mT.contiguous().mT, lambda t: t[:, :1].expand(t.shape)])
def test_inputs_and_gradients_of_any_strides(change: Callable[[Tensor], Tensor], device: str) -> None:
    inputs = make_inputs(True, device)
    inputs[0] = change(inputs[0].detach()).requires_grad_()
    dy = change(make(B, S, H, seed=9, device=device))
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = torch.autograd.grad(eager()(*doubles), doubles, dy.double())
    for value, truth in zip(torch.autograd.grad(ours()(*inputs), inputs, dy), exact, strict=True):
        assert (value - truth).norm() <= 16 * FLOAT32_ROUNDING * truth.norm()


@with_and_without_biases
@pytest.mark.parametrize("options", [{}, {"tile": 8}, {"compress": True}], ids=repr)
def test_what_comes_out_may_be_changed_in_place(options: dict[str, Any], biases: bool) -> None:
    """As Falcon's layers do: autograd refuses that of a view that a Function gives."""
    inputs = make_inputs(biases, "cpu")
    given = [tensor for tensor in inputs if tensor is not None]
    y = ours(**options)(*inputs)
    y += 1
    expected = torch.autograd.grad(ours(**options)(*inputs).sum(), given)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), given), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_weights_get_transposed_gradients(dtype: torch.dtype, device: str) -> None:
    """So that autograd does not copy the gradient of a Conv1D's weight."""
    inputs = make_inputs(True, device, dtype, transposed=True)
    assert_no_worse_than_eager(ours(), eager(), inputs)
    gradients = torch.autograd.grad(ours()(*inputs).sum(), inputs)
    assert [each.stride() for each in gradients[1:3]] == [(1, I), (1, H)]
    again = torch.autograd.grad(ours(tile=8)(*inputs).sum(), inputs)
    assert [each.stride() for each in again[1:3]] == [(1, I), (1, H)]


def test_on_cpu_in_float32_the_output_has_the_bits_of_gpt_2s() -> None:
    module = GPT2MLP(I, GPT2Config(n_embd=H, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0))
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x, up, down = make(B, S, H), module.c_fc, module.c_proj
    found = mlp(x, up.weight.t(), down.weight.t(), "gelu_tanh", up_bias=up.bias, down_bias=down.bias)
    assert torch.equal(found, module(x))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_is_eagers(x_dtype: torch.dtype, backward_inside: bool, device: str) -> None:
    inputs = make_inputs(True, device)
    inputs[0] = inputs[0].detach().to(x_dtype).requires_grad_()
    results = []
    for function in (ours(), eager()):
        with torch.autocast(device, torch.bfloat16):
            y = function(*inputs)
            dy = make(*y.shape, seed=9).to(y)
            if backward_inside:
                gradients = torch.autograd.grad(y, inputs, dy)
        if not backward_inside:
            gradients = torch.autograd.grad(y, inputs, dy)
        results.append([y, *gradients])
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y64 = eager()(*doubles)
    exact = [y64, *torch.autograd.grad(y64, doubles, dy.double())]
    for value, peer, truth in zip(*results, exact, strict=True):
        assert_no_larger_error(value, peer, truth)


def test_float64_is_left_alone_by_autocast() -> None:
    inputs = make_inputs(True, "cpu", torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours()(*inputs).dtype is torch.float64


@pytest.mark.slow
@with_and_without_biases
def test_compiled_results_are_the_eager_ones(biases: bool, device: str) -> None:
    inputs = make_inputs(biases, device)
    given = [tensor for tensor in inputs if tensor is not None]
    torch.compiler.reset()
    compiled = torch.compile(lambda *inputs: ours()(*inputs) * 2, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), ours()(*inputs) * 2
    assert torch.equal(found, expected)
    pairs = zip(*(torch.autograd.grad(y.sum(), given) for y in (found, expected)), strict=True)
    assert all(torch.equal(value, truth) for value, truth in pairs)


@each_activation
@pytest.mark.parametrize("trained", [(True, True, True), (True, False, False), (False, False, True)])
def test_gradients_from_codes_are_those_of_what_codes_stand_for(
    trained: tuple[bool, ...], activation: str, device: str
) -> None:
    inputs = make_inputs(False, device, torch.bfloat16, sizes=(S, H, 200))[:3]  # blocks cross rows, and one is short
    for tensor, trains in zip(inputs, trained, strict=True):
        tensor.requires_grad_(trains)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]

    def rounded(tensor: Tensor) -> Tensor:
        is_up = tensor.shape == (B * S, 200)
        return dequantize_blockwise(*quantize_blockwise(tensor), tensor.dtype) if is_up else tensor

    y = ours(activation, compress=True)(*inputs)
    found = torch.autograd.grad(y.sum(), wanted)
    with torch.autograd.graph.saved_tensors_hooks(rounded, lambda tensor: tensor):
        expected_y = ours(activation)(*inputs)
    expected = torch.autograd.grad(expected_y.sum(), wanted)
    assert torch.equal(y, expected_y)
    assert all(map(torch.equal, found, expected))
    assert activation == "relu" or not all(
        map(torch.equal, found, torch.autograd.grad(ours(activation)(*inputs).sum(), wanted))
    )


def test_codes_are_all_that_is_held_of_it(device: str) -> None:
    inputs = make_inputs(True, device, torch.bfloat16, sizes=(S, H, 256))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ours(compress=True)(*inputs)
    held = [tensor for tensor in saved if not any(tensor is given for given in inputs)]
    numbers = B * S * 256
    assert sum(tensor.nbytes for tensor in held) == numbers + numbers // 128 * 4


TILE = 16


@with_and_without_biases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_give_the_gradients_of_all_tokens_at_once(dtype: torch.dtype, biases: bool, device: str) -> None:
    inputs = make_inputs(biases, device, dtype)
    given = [tensor for tensor in inputs if tensor is not None]
    whole, tiled = ours()(*inputs), ours(tile=TILE)(*inputs)
    dy = make(*whole.shape, seed=10, device=device, dtype=dtype)
    rounding = 4 * torch.finfo(dtype).eps
    assert relative_error(tiled, whole) <= rounding
    expected, found = (torch.autograd.grad(y, given, dy) for y in (whole, tiled))
    assert all(relative_error(one, other) <= rounding for one, other in zip(found, expected, strict=True))


def test_tiles_run_one_product_again_and_hold_the_input_alone() -> None:
    inputs = make_inputs(False, "cpu", sizes=(50, H, 2 * H))[:3]
    product = 2 * B * 50 * H * 2 * H
    assert flops(ours(tile=TILE), inputs) == (2 * product, (1 + 4) * product)
    for tensor in inputs:
        tensor.grad = torch.zeros_like(tensor)
    whole, tiled = (
        step_memory(lambda tile=tile: ours(tile=tile)(*inputs).sum(), torch.device("cpu"))  # type: ignore[misc]
        for tile in (None, TILE)
    )
    assert tiled.activation_bytes_held == 4  # the loss
    assert whole.activation_bytes_held == 4 + B * 50 * 2 * H * 4
    assert tiled.peak_bytes < whole.peak_bytes


def test_tiles_have_gradients_of_every_order() -> None:
    inputs = make_inputs(True, "cpu", torch.float64, sizes=(2, 3, 2))
    assert torch.autograd.gradcheck(ours(tile=3), inputs)
    assert torch.autograd.gradgradcheck(ours(tile=3), inputs)


SQUARE = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("arguments", "biases", "message"),
    [
        ((torch.ones(2, 4), SQUARE, SQUARE), {}, "found x (2, 4), up_weight (3, 3)"),
        ((SQUARE, torch.ones(2, 3), SQUARE), {}, "up_weight (2, 3)"),
        ((SQUARE, SQUARE, torch.ones(3, 2)), {}, "down_weight (3, 2)"),
        ((torch.tensor(1.0), SQUARE, SQUARE), {}, "found x ()"),
        ((SQUARE, SQUARE, SQUARE[0]), {}, "down_weight (3,)"),
        ((SQUARE, SQUARE, SQUARE), {"up_bias": SQUARE}, "up_bias (3, 3)"),
        ((SQUARE, SQUARE, SQUARE), {"down_bias": torch.ones(2)}, "down_bias (2,)"),
        ((SQUARE.to("meta"), SQUARE, SQUARE), {}, "x is on meta and up_weight on cpu"),
        ((SQUARE.long(), SQUARE, SQUARE), {}, "x is torch.int64"),
        ((SQUARE.half(), SQUARE, SQUARE), {}, "x torch.float16, up_weight torch.float32"),
        ((SQUARE, SQUARE, SQUARE, "tanh"), {}, "unknown activation 'tanh'; expected one of silu, gelu, gelu_tanh"),
        ((SQUARE, SQUARE, SQUARE), {"tile": 0}, "tile is 0; expected at least 1 token, or None"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], biases: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=re.escape(message)):
        mlp(*arguments, **biases)
