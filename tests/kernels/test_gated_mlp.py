"""The gated MLP: its matrix products counted, what it holds and frees, autocast, and where it has eager's bits."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_testing import (
    FLOAT32_ROUNDING,
    each_device_of_compiled_code,
    make,
)
from mlp_testing import (
    Work,
    activate,
    assert_no_larger_error,
    assert_no_worse_than_eager,
    flops,
    make_weight,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from recompute.engine.saved_tensors import RegionStatistics
from recompute.engine.scopes import RecipeScope
from recompute.engine.thread_state import local
from recompute.errors import KernelError
from recompute.kernels import mlp_ops as gated_mlp_module
from recompute.kernels.activation import GATE_ACTIVATIONS as ACTIVATIONS
from recompute.kernels.blockwise_8bit import dequantize_blockwise, quantize_blockwise
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.rms_norm import rms_norm

B, S, H, I = 2, 20, 48, 40  # noqa: E741
GEMM_FLOPS = 2 * B * S * H * I


def make_mlp(device: str, dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Module:
    mlp = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=I, num_attention_heads=2, mlp_bias=bias))
    with torch.no_grad():
        for seed, parameter in enumerate(mlp.parameters(), 1):
            parameter.copy_(make_weight(*parameter.shape, seed=seed))
    return mlp.to(device, dtype)


def call(mlp: Any, x: Tensor) -> Tensor:
    biases = {f"{name}_bias": getattr(mlp, f"{name}_proj").bias for name in ("gate", "up", "down")}
    return gated_mlp(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, **biases)


def make_inputs(
    packed: bool,
    biases: bool,
    device: str,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = (S, H, I),
) -> list[Any]:
    """x, the three weights, the three biases; what a form has not is None."""
    tokens, hidden, inner = sizes
    shapes: list[tuple[int, ...] | None] = [(B, tokens, hidden), (inner, hidden), (inner, hidden), (hidden, inner)]
    shapes += [(inner,), (inner,), (hidden,)] if biases else [None] * 3
    if packed:
        shapes[1:3] = (2 * inner, hidden), None
        shapes[4:6] = (2 * inner,) if biases else None, None
    return [
        None if shape is None else maker(*shape, seed=seed, device=device, dtype=dtype).requires_grad_()
        for seed, (shape, maker) in enumerate(zip(shapes, (make, *[make_weight] * 3, *[make] * 3), strict=True))
    ]


def ours(activation: str = "silu") -> Callable[..., Tensor]:
    def function(x: Tensor, gate: Tensor, up: Any, down: Tensor, *biases: Any) -> Tensor:
        names = ("gate_bias", "up_bias", "down_bias")
        return gated_mlp(x, gate, up, down, activation, **dict(zip(names, biases, strict=True)))

    return function


def eager(activation: str = "silu") -> Callable[..., Tensor]:
    def function(
        x: Tensor, gate: Tensor, up: Any, down: Tensor, gate_bias: Any, up_bias: Any, down_bias: Any
    ) -> Tensor:
        g = F.linear(x, gate, gate_bias)
        g, u = g.chunk(2, -1) if up is None else (g, F.linear(x, up, up_bias))
        return F.linear(activate(g, activation) * u, down, down_bias)

    return function


each_form = pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
with_and_without_biases = pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])


@each_form
@with_and_without_biases
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_eagers(dtype: torch.dtype, activation: str, biases: bool, packed: bool, device: str):
    inputs = make_inputs(packed, biases, device, dtype)
    assert_no_worse_than_eager(ours(activation), eager(activation), inputs)


@each_form
@with_and_without_biases
def test_gradients_of_every_order(biases: bool, packed: bool):
    inputs = make_inputs(packed, biases, "cpu", torch.float64, sizes=(1, 3, 2))
    assert torch.autograd.gradcheck(ours("gelu"), inputs)
    assert torch.autograd.gradgradcheck(ours("gelu"), inputs)


SUBSETS = [trained for trained in itertools.product((False, True), repeat=4) if any(trained)]


@pytest.mark.parametrize(
    ("packed", "trained"),
    [*((False, t) for t in SUBSETS), *((True, t) for t in SUBSETS if t[1] is t[2])],  # packed, gate and up are one
)
def test_backward_does_what_is_needed_and_no_more(packed: bool, trained: tuple[bool, ...], device: str):
    x_trains, gate_trains, up_trains, down_trains = trained
    inputs = make_inputs(packed, False, device)
    for tensor, train in zip(inputs, trained, strict=False):
        if tensor is not None:
            tensor.requires_grad_(train)
    found = flops(ours(), inputs)
    assert found == flops(eager(), inputs)
    count = 2 * x_trains + gate_trains + up_trains + down_trains + any(trained[:3])
    assert found == (3 * GEMM_FLOPS, count * GEMM_FLOPS)

    y = ours()(*inputs)
    with Work() as work:
        y.sum().backward()
    if not any(trained[:3]):
        core = "glu_forward"
    else:
        core = "glu_backward_" if down_trains else "glu_backward"
        needed = (x_trains or gate_trains, not packed and (x_trains or up_trains))
        arguments = work.arguments_of(core)
        made = arguments[5:7] if down_trains else work.results_of(core)[:2]
        assert tuple(tensor is not None for tensor in made) == needed
    products = 2 * x_trains + gate_trains + up_trains if not packed else x_trains + gate_trains
    products += down_trains + any(trained[:3])
    apart = int(x_trains and not packed)
    assert work.counts == Counter({"mm": products - apart, "addmm": apart, core: 1}) - Counter()


def test_what_is_frozen_changes_no_other_gradient(device: str):
    inputs = make_inputs(False, True, device)
    expected = torch.autograd.grad(ours()(*inputs).sum(), inputs)
    for index, alone in itertools.product(range(7), (True, False)):
        trained = [(other == index) is alone for other in range(7)]
        chosen = [t.detach().requires_grad_(train) for t, train in zip(inputs, trained, strict=True)]
        ours()(*chosen).sum().backward()
        for tensor, train, gradient in zip(chosen, trained, expected, strict=True):
            assert torch.equal(tensor.grad, gradient) if train else tensor.grad is None


@each_form
def test_only_gate_and_up_are_held(packed: bool, device: str):
    inputs = make_inputs(packed, True, device, torch.bfloat16)
    y = ours()(*inputs)
    known = {tensor.data_ptr() for tensor in inputs if tensor is not None}
    saved = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None]  # type: ignore[union-attr]
    held = [tensor for tensor in saved if tensor.data_ptr() not in known]
    assert len(saved) - len(held) == len(known)
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == B * S * 2 * I * 2
    assert len(held) == 2 - packed


@each_form
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])  # the interpreter makes cycles
def test_gate_and_up_are_freed_once_they_have_been_read(
    retain: bool, packed: bool, device: str, monkeypatch: pytest.MonkeyPatch
):
    inputs = make_inputs(packed, False, device)
    y = ours()(*inputs)
    node: Any = y.grad_fn
    storages = [StorageWeakRef(t.untyped_storage()) for t in node.saved_tensors[-2:] if t is not None]
    dead = []
    gradients = gated_mlp_module.linear_gradients

    def looking(*arguments: Any, **options: Any) -> Any:
        dead.append([storage.expired() for storage in storages])
        return gradients(*arguments, **options)

    monkeypatch.setattr(gated_mlp_module, "linear_gradients", looking)
    wanted = [tensor for tensor in inputs if tensor is not None]
    gc.disable()
    try:
        first = torch.autograd.grad(y.sum(), wanted, retain_graph=retain)
    finally:
        gc.enable()
    assert dead == [[not retain] * len(storages)] * 3
    if retain:
        second = torch.autograd.grad(y.sum(), wanted)
        assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), wanted)


@each_form
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_the_product_that_backward_regenerates_has_forwards_bits(
    dtype: torch.dtype, activation: str, packed: bool, device: str
):
    with Work() as work:
        y = ours(activation)(*make_inputs(packed, False, device, dtype))
        y.sum().backward()
    overwritten = work.arguments_of("glu_backward_")[0]
    assert torch.equal(overwritten, work.results_of("glu_forward").view_as(overwritten))


@pytest.mark.gpu
def test_the_peak_of_backward_is_known():
    M, H, I = 4096, 512, 2048  # noqa: E741
    x, dy = (make(M, H, seed=seed, device="cuda", dtype=torch.bfloat16) for seed in range(2))
    shapes = ((I, H), (I, H), (H, I))
    weights = [make_weight(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    for _ in range(2):  # the first time cuBLAS takes its workspace
        torch.cuda.synchronize()
        y = gated_mlp(x.requires_grad_(), *weights)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(y, (x, *weights), dy)
        extra = torch.cuda.max_memory_allocated() - before
        del gradients
    token, weight = 2 * M * I, 2 * I * H
    # dproduct, dgate, dup; then the product, dgate, dup and the gradients of x and of weights, without gate and up
    assert extra <= 3 * token + weight


@pytest.mark.parametrize("shape", [(H,), (0, H), (1, H), (B, S, H), (B, 1, S, H)])
@with_and_without_biases
def test_any_leading_dimensions(biases: bool, shape: tuple[int, ...], device: str):
    mlp = make_mlp(device, torch.float64, biases)
    x = make(*shape).to(device).double().requires_grad_()
    inputs = (x, *mlp.parameters())
    y, expected = call(mlp, x), mlp(x)
    dy = make(*shape, seed=9).to(y)
    found, wanted = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)
    for value, truth in zip((y, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize("change", [lambda t: t.mT.contiguous().mT, lambda t: t[:, :1].expand(t.shape)])
@each_form
def test_gradients_of_any_strides(packed: bool, change: Callable[[Tensor], Tensor], device: str):
    inputs = [tensor for tensor in make_inputs(packed, True, device) if tensor is not None]
    full = [*inputs[:2], None, inputs[2], inputs[3], None, inputs[4]] if packed else inputs
    dy = change(make(B, S, H, seed=9, device=device))
    doubles = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in full]
    exact = torch.autograd.grad(eager()(*doubles), [d for d in doubles if d is not None], dy.double())
    for value, truth in zip(torch.autograd.grad(ours()(*full), inputs, dy), exact, strict=True):
        assert (value - truth).norm() <= 16 * FLOAT32_ROUNDING * truth.norm()


def test_on_cpu_in_float32_the_output_has_the_bits_of_hugging_faces():
    mlp, x = make_mlp("cpu"), make(B, S, H)
    assert torch.equal(call(mlp, x), mlp(x))


def test_packed_is_phi_3s():
    mlp = Phi3MLP(Phi3Config(hidden_size=H, intermediate_size=I, num_attention_heads=2, pad_token_id=0))
    x = make(B, S, H)
    torch.testing.assert_close(gated_mlp(x, mlp.gate_up_proj.weight, None, mlp.down_proj.weight), mlp(x))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
@with_and_without_biases
def test_autocast_is_eagers(biases: bool, x_dtype: torch.dtype, backward_inside: bool, device: str):
    mlp, x = make_mlp(device, bias=biases), make(B, S, H).to(device, x_dtype).requires_grad_()
    inputs = (x, *mlp.parameters())
    results = []
    for function in (lambda: call(mlp, x), lambda: mlp(x)):
        with torch.autocast(device, torch.bfloat16):
            y = function()
            dy = make(*y.shape, seed=9).to(y)
            if backward_inside:
                gradients = torch.autograd.grad(y, inputs, dy)
        if not backward_inside:
            gradients = torch.autograd.grad(y, inputs, dy)
        results.append([y, *gradients])

    double = make_mlp(device, torch.float64, biases)
    x64 = x.detach().double().requires_grad_()
    y64 = double(x64)
    exact = [y64, *torch.autograd.grad(y64, (x64, *double.parameters()), dy.double())]
    for value, peer, truth in zip(*results, exact, strict=True):
        assert_no_larger_error(value, peer, truth)


def test_matrix_products_under_autocast_run_in_its_dtype(device: str):
    mlp, x = make_mlp(device), make(B, S, H).to(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = call(mlp, x)
    gate, up = y.grad_fn.saved_tensors[-2:]  # type: ignore[union-attr]
    assert (gate.dtype, up.dtype, y.dtype) == (torch.bfloat16,) * 3
    y.sum().backward()
    assert {weight.grad.dtype for weight in mlp.parameters()} == {torch.float32}  # type: ignore[union-attr]


def test_backward_under_autocast_of_a_forward_without(device: str):
    mlp, x = make_mlp(device), make(B, S, H).to(device).requires_grad_()
    inputs = (x, *mlp.parameters())
    for create_graph in (False, True):
        y = call(mlp, x)
        expected = torch.autograd.grad(y.sum(), inputs, retain_graph=True, create_graph=create_graph)
        with torch.autocast(device, torch.bfloat16):
            found = torch.autograd.grad(y.sum(), inputs, create_graph=create_graph)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_float64_is_left_alone_by_autocast():
    mlp, x = make_mlp("cpu", torch.float64), make(B, S, H).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert call(mlp, x).dtype is mlp(x).dtype is torch.float64


@each_device_of_compiled_code
@each_form
def test_compiled_results_are_the_eager_ones(packed: bool, device: str):
    inputs = make_inputs(packed, packed, device)
    given = [tensor for tensor in inputs if tensor is not None]
    torch.compiler.reset()
    compiled = torch.compile(lambda *inputs: ours()(*inputs) * 2, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), ours()(*inputs) * 2
    assert torch.equal(found, expected)
    pairs = zip(*(torch.autograd.grad(y.sum(), given) for y in (found, expected)), strict=True)
    assert all(torch.equal(value, truth) for value, truth in pairs)


def test_an_input_that_a_norm_gives_is_dropped_and_comes_back(device: str):
    x, norm_weight = make(B, S, H, device=device).requires_grad_(), make(H, seed=7, device=device).requires_grad_()
    weights = make_inputs(False, False, device)[1:]
    results, dropped = [], []
    for scope in (contextlib.nullcontext(), RecipeScope(RegionStatistics("a model"))):
        before = local.statistics.dropped_nbytes
        with scope:
            y = ours()(rms_norm(x, norm_weight), *weights)
        dropped.append(local.statistics.dropped_nbytes - before)
        results.append(torch.autograd.grad(y.sum(), (x, norm_weight, *weights[:3])))
    assert dropped == [0, x.nbytes]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


SQUARE = torch.ones(3, 3)
ROW = torch.ones(3)


@each_form
@pytest.mark.parametrize(
    "trained", [(True, True, True, True), (True, False, False, False), (False, False, False, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_from_codes_are_those_of_the_gates_that_codes_give(
    dtype: torch.dtype, trained: tuple[bool, ...], packed: bool, device: str
):
    inputs = make_inputs(packed, False, device, dtype, sizes=(S, H, 256))
    for tensor, trains in zip(inputs, trained, strict=False):
        if tensor is not None:
            tensor.requires_grad_(trains)
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]

    def rounded(tensor: Tensor) -> Tensor:
        is_gate = tensor.shape[-1] in (256, 512) and tensor.dim() == 3
        return dequantize_blockwise(*quantize_blockwise(tensor), tensor.dtype) if is_gate else tensor

    y = gated_mlp(*inputs[:4], compress=True)
    found = torch.autograd.grad(y.sum(), wanted)
    with torch.autograd.graph.saved_tensors_hooks(rounded, lambda tensor: tensor):
        expected_y = gated_mlp(*inputs[:4])
    expected = torch.autograd.grad(expected_y.sum(), wanted)
    exact = torch.autograd.grad(gated_mlp(*inputs[:4]).sum(), wanted)
    assert torch.equal(y, expected_y)
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, found, exact))


@each_form
def test_codes_are_all_that_is_held_of_gate_and_up(packed: bool, device: str):
    inputs = make_inputs(packed, False, device, torch.bfloat16, sizes=(S, H, 256))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gated_mlp(*inputs[:4], compress=True)
    held = [tensor for tensor in saved if not any(tensor is given for given in inputs)]
    numbers = B * S * 2 * 256
    assert sum(tensor.nbytes for tensor in held) == numbers + numbers // 128 * 4


def test_float64_has_no_codes():
    inputs = make_inputs(False, False, "cpu", torch.float64)
    found, expected = (
        torch.autograd.grad(gated_mlp(*inputs[:4], compress=compress).sum(), inputs[:4]) for compress in (True, False)
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 4), SQUARE, SQUARE, SQUARE), "found x (2, 4), gate_weight (3, 3)"),
        ((SQUARE, SQUARE, torch.ones(2, 3), SQUARE), "up_weight (2, 3)"),
        ((SQUARE, SQUARE, SQUARE, torch.ones(3, 2)), "down_weight (3, 2)"),
        ((SQUARE, SQUARE, None, SQUARE), "or gate_weight (2 · I, H) and no up_weight"),
        ((torch.tensor(1.0), SQUARE, SQUARE, SQUARE), "found x ()"),
        ((SQUARE, SQUARE, SQUARE, SQUARE[0]), "down_weight (3,)"),
        ((SQUARE.to("meta"), SQUARE, SQUARE, SQUARE), "x is on meta and gate_weight on cpu"),
        ((SQUARE.long(), SQUARE, SQUARE, SQUARE), "x is torch.int64"),
        ((SQUARE.half(), SQUARE, SQUARE, SQUARE), "x torch.float16, gate_weight torch.float32"),
        ((SQUARE, SQUARE, SQUARE, SQUARE, "relu"), "unknown activation 'relu'; expected one of silu, gelu, gelu_tanh"),
        ((SQUARE, SQUARE, SQUARE, SQUARE, "silu", SQUARE), "gate_bias (3, 3)"),
        ((SQUARE, torch.ones(6, 3), None, SQUARE, "silu", ROW), "gate_bias (3,)"),
        ((SQUARE, torch.ones(6, 3), None, SQUARE, "silu", torch.ones(6), ROW), "up_bias (3,)"),
        ((SQUARE, SQUARE, SQUARE, SQUARE, "silu", ROW.double()), "gate_bias torch.float64"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    biases = dict(zip(("gate_bias", "up_bias"), arguments[5:], strict=False))
    with pytest.raises(KernelError, match=re.escape(message)):
        gated_mlp(*arguments[:5], **biases)
