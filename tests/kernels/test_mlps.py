"""MLPs, gated and not: their matrix products counted, what they hold and free, tiles, codes, and eager's bits."""

import contextlib
import gc
import itertools
from collections import Counter

import pytest
import torch
from cases import MLPS, TILES, each_case, inputs_of
from kernel_testing import Work, assert_as_good_as, flops, make, relative_error, run, same_bits
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GPT2Config, LlamaConfig, Phi3Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from recompute.counters import step_memory
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.scopes import RecipeScope
from recompute.engine.thread_state import local
from recompute.kernels import mlp_ops
from recompute.kernels.blockwise_8bit import dequantize_blockwise, quantize_blockwise
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.mlp import mlp
from recompute.kernels.rms_norm import rms_norm

BY_NAME = {case.name: case for case in (*MLPS, *TILES)}
GATED, PACKED, UNGATED = (BY_NAME[name] for name in ("gated_mlp", "gated_mlp-packed", "mlp-relu2"))
each_form = pytest.mark.parametrize("case", [GATED, PACKED, UNGATED], ids=str)
M, H, I = 40, 48, 80  # noqa: E741
PRODUCT = 2 * M * H * I
"""Flops of a matrix product."""


def form_of(case):
    """The kind of ops that run between its Linears."""
    return "activation" if case.name.startswith("mlp") else "glu"


@pytest.mark.parametrize("trained", [*itertools.product((True, False), repeat=4)][:-1], ids=str)
@each_form
def test_backward_does_what_is_needed_and_no_more(case, trained, device):
    """trained: of x, gate, up and down."""
    x_trains, gate_trains, up_trains, down_trains = trained
    is_one = case is not GATED  # gate and up are one weight, or there is one alone
    if is_one and gate_trains is not up_trains:
        return
    chosen = (x_trains, gate_trains, down_trains) if is_one else trained
    inputs = [each.detach().requires_grad_(trains)
              for each, trains in zip(inputs_of(case, device, rows=M, columns=H), chosen, strict=True)]  # fmt: skip
    found = flops(case.op, inputs)
    assert found == flops(case.eager, inputs)
    before = any(trained[:3])  # whether what comes before the product is trained
    firsts = 2 if case is not UNGATED else 1
    count = firsts * x_trains + (gate_trains + up_trains) / 2 * firsts + down_trains + before
    assert found == ((firsts + 1) * PRODUCT, count * PRODUCT)

    y = case.op(*inputs)
    with Work() as work:
        y.sum().backward()
    core = f"{form_of(case)}_{'forward' if not before else 'backward_' if down_trains else 'backward'}"
    if before:
        arguments = work.arguments_of(core)
        made = arguments[5:7] if down_trains else work.results_of(core)[:2]
        needed = (x_trains or gate_trains, case is GATED and (x_trains or up_trains))
        assert tuple(each is not None for each in made) == needed
    apart = int(x_trains and case is GATED)  # both products go into one dx
    weights = gate_trains + up_trains if case is GATED else gate_trains
    products = x_trains + apart + weights + down_trains + before
    assert work.counts == Counter({"mm": products - apart, "addmm": apart, core: 1}) - Counter()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])  # the interpreter makes cycles
@each_form
def test_what_is_held_is_freed_once_it_has_been_read(case, retain, device, monkeypatch):
    inputs = inputs_of(case, device)
    y = case.op(*inputs)
    node = y.grad_fn
    storages = [StorageWeakRef(t.untyped_storage()) for t in node.saved_tensors[-2:] if t is not None]
    assert len(storages) == (2 if case is GATED else 1)
    dead = []
    gradients = mlp_ops.linear_gradients

    def looking(*arguments, **options):
        dead.append([storage.expired() for storage in storages])
        return gradients(*arguments, **options)

    monkeypatch.setattr(mlp_ops, "linear_gradients", looking)
    gc.disable()
    try:
        first = torch.autograd.grad(y.sum(), inputs, retain_graph=retain)
    finally:
        gc.enable()
    assert dead == [[not retain] * len(storages)] * 3
    if retain:
        assert same_bits(first, torch.autograd.grad(y.sum(), inputs))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_case(*MLPS, default=tuple(map(str, MLPS)))
def test_what_backward_regenerates_has_forwards_bits(case, dtype, device):
    with Work() as work:
        case.op(*inputs_of(case, device, dtype)).sum().backward()
    overwritten = work.arguments_of(f"{form_of(case)}_backward_")[0]
    assert torch.equal(overwritten, work.results_of(f"{form_of(case)}_forward").view_as(overwritten))


@pytest.mark.gpu
@each_form
def test_the_peak_of_backward_is_known(case, monkeypatch):
    inputs = inputs_of(case, "cuda", torch.bfloat16, 65536, 256)
    for _ in range(2):  # the first time cuBLAS takes its workspace
        torch.cuda.synchronize()
        y = case.op(*inputs)
        dy = torch.ones_like(y)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(y, inputs, dy)
        extra = torch.cuda.max_memory_allocated() - before
        del gradients
    token = 2 * 65536 * I
    # dproduct, dgate, dup; then the product, dgate, dup and the gradients of x and of weights, without gate and up
    whole = 2 * 65536 * 256 + sum(2 * each.numel() for each in inputs[1:])
    assert extra <= (3 if case is not UNGATED else 2) * token + whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_weights_get_transposed_gradients(dtype, device):
    """As those of a Conv1D, so that autograd does not copy the gradient of its weight."""
    for case in (BY_NAME["mlp"], BY_NAME["mlp-tiles"], BY_NAME["gated_mlp-biases"]):
        x, *parameters = inputs_of(case, device, dtype, M, H)
        inputs = [x, *(each.detach().t().contiguous().t().requires_grad_() for each in parameters)]
        if case.kind == "mlp":
            assert_as_good_as(case.op, case.eager, inputs, "mlp")
        gradients = torch.autograd.grad(case.op(*inputs).sum(), inputs)
        assert all(each.stride(0) == 1 for each in gradients[1:3])


@pytest.mark.parametrize("options", [{}, {"tile": 8}, {"compress": True}], ids=repr)
@pytest.mark.parametrize("biases", [False, True])
def test_what_comes_out_may_be_changed_in_place(biases, options):
    """As Falcon's layers do: autograd refuses that of a view that a Function gives."""
    x, weight = make(2, 20, 8).requires_grad_(), make(8, 8, seed=1).requires_grad_()
    bias = make(8, seed=2) if biases else None
    for compute in (
        lambda: gated_mlp(x, weight, weight, weight, gate_bias=bias, up_bias=bias, down_bias=bias, **options),
        lambda: mlp(x, weight, weight, up_bias=bias, down_bias=bias, **options),
    ):
        expected = torch.autograd.grad((compute() * 2).sum(), (x, weight))
        y = compute()
        y *= 2
        assert same_bits(torch.autograd.grad(y.sum(), (x, weight)), expected)


def test_on_the_cpu_in_float32_the_output_has_the_bits_of_the_models():
    x, config = make(2, 20, H), {"hidden_size": H, "intermediate_size": I, "num_attention_heads": 2, "pad_token_id": 0}
    llama, phi = LlamaMLP(LlamaConfig(**config, mlp_bias=True)), Phi3MLP(Phi3Config(**config))
    gpt = GPT2MLP(I, GPT2Config(n_embd=H, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0))
    for module in (llama, phi, gpt):
        for seed, parameter in enumerate(module.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    gate, up, down = llama.gate_proj, llama.up_proj, llama.down_proj
    biases = {"gate_bias": gate.bias, "up_bias": up.bias, "down_bias": down.bias}
    assert torch.equal(gated_mlp(x, gate.weight, up.weight, down.weight, **biases), llama(x))
    torch.testing.assert_close(gated_mlp(x, phi.gate_up_proj.weight, None, phi.down_proj.weight), phi(x))
    biases = {"up_bias": gpt.c_fc.bias, "down_bias": gpt.c_proj.bias}
    assert torch.equal(mlp(x, gpt.c_fc.weight.t(), gpt.c_proj.weight.t(), "gelu_tanh", **biases), gpt(x))


def test_an_input_that_a_norm_gives_is_dropped_and_comes_back(device):
    x, *weights = inputs_of(GATED, device)
    norm_weight = make(x.shape[-1], seed=7, device=device).requires_grad_()
    results, dropped = [], []
    for scope in (contextlib.nullcontext(), RecipeScope(RegionStatistics("a model"))):
        before = local.statistics.dropped_nbytes
        with scope:
            y = GATED.op(rms_norm(x, norm_weight), *weights)
        dropped.append(local.statistics.dropped_nbytes - before)
        results.append(torch.autograd.grad(y.sum(), (x, norm_weight, *weights)))
    assert dropped == [0, x.nbytes]
    assert same_bits(*results)


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [256, 200])  # of 200, blocks cross rows, and one is short
@each_form
def test_gradients_from_codes_are_those_of_what_codes_stand_for(case, inner, dtype, trained, device):
    """trained: x with the first weights, and the last."""
    width = 2 * inner if case is PACKED else inner
    shapes = [(M, H), (width, H), *([(inner, H)] if case is GATED else []), (H, inner)]
    made = [make(*s, seed=n, device=device, dtype=dtype).mul(0.3) for n, s in enumerate(shapes)]
    inputs = [each.requires_grad_(trained[each is made[-1]]) for each in made]
    wanted = [each for each in inputs if each.requires_grad]

    def compute(**options):
        x, first, *up, down = inputs
        if case is UNGATED:
            return mlp(x, first, down, "gelu", **options)
        return gated_mlp(x, first, up[0] if up else None, down, **options)

    def rounded(tensor):
        is_held = tensor.shape == (M, width)
        return dequantize_blockwise(*quantize_blockwise(tensor), tensor.dtype) if is_held else tensor

    saved = []
    with saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        y = compute(compress=True)
    numbers = M * (2 * inner if case is not UNGATED else inner)
    codes = [each for each in saved if not any(each is given for given in inputs)]
    assert sum(each.nbytes for each in codes) == pytest.approx(numbers + numbers / 32, abs=8)
    found = torch.autograd.grad(y.sum(), wanted)
    with saved_tensors_hooks(rounded, lambda each: each):
        expected_y = compute()
    assert torch.equal(y, expected_y)
    assert same_bits(found, torch.autograd.grad(expected_y.sum(), wanted))
    assert not same_bits(found, torch.autograd.grad(compute().sum(), wanted))


def test_float64_has_no_codes():
    inputs = [each.detach().double().requires_grad_() for each in inputs_of(GATED)]
    found, expected = (
        torch.autograd.grad(gated_mlp(*inputs, compress=compress).sum(), inputs) for compress in (True, False)
    )
    assert same_bits(found, expected)


TILE = 16
each_tiled = pytest.mark.parametrize("op", [gated_mlp, mlp])


def operands(op, dtype=torch.float32, device="cpu"):
    case = GATED if op is gated_mlp else UNGATED
    x, *weights = inputs_of(case, device, dtype, 100, H)
    return x.detach().view(2, 50, H).requires_grad_(), weights


@each_tiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_give_what_all_tokens_give_at_once(dtype, op, device):
    x, weights = operands(op, dtype, device)
    whole, tiled = (run(lambda *given, t=tile: op(*given, tile=t), [x, *weights]) for tile in (None, TILE))
    for one, other in zip(tiled, whole, strict=True):
        assert relative_error(one, other) <= 4 * torch.finfo(dtype).eps


@each_tiled
def test_tiles_run_products_again_but_the_last_and_hold_the_input_alone(op):
    x, weights = operands(op)
    product, firsts = 2 * 100 * H * I, len(weights) - 1
    again = flops(lambda *given: op(*given, tile=TILE), [x, *weights])
    assert again == ((firsts + 1) * product, (firsts + 2 * firsts + 2) * product)
    for each in (x, *weights):
        each.grad = torch.zeros_like(each)
    whole, tiled = (
        step_memory(lambda tile=tile: op(x, *weights, tile=tile).sum(), torch.device("cpu")) for tile in (None, TILE)
    )
    stream, intermediate = (100 * width * 4 for width in (H, I))
    assert tiled.activation_bytes_held == 4  # the loss: x itself lives anyway
    assert whole.activation_bytes_held == 4 + firsts * intermediate
    parameters = len(weights) * H * I * 4
    assert tiled.peak_bytes <= 3 * stream + 2 * parameters + 6 * intermediate * TILE / 100 + 1024
    assert tiled.peak_bytes < whole.peak_bytes
