"""What every op of recompute.kernels promises, whichever way it runs."""

from __future__ import annotations

import gc
import importlib
import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo  # an op's first plan would load it, which leaves reference cycles that hold the call's tensors
from kernel_testing import FLOAT32_ROUNDING, each_dtype, relative_error, same_bits
from tiers import by_default, slow
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.kernels import launch
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.layer_norm import add_layer_norm, layer_norm
from recompute.kernels.mlp import mlp
from recompute.kernels.rms_norm import add_rms_norm, rms_norm
from recompute.kernels.swiglu import geglu, swiglu

M, H, I = 10, 257, 80  # noqa: E741
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    op: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    saved_elements: int
    """Of the dtype of the inputs."""
    saved_float32: int = 0
    saves_a_sum: bool = False
    """In the place of the inputs that are added."""
    has_linears: bool = False
    """Whether there are matrix products in it. Those ops record no recipe: it would run the products again."""

    def __str__(self) -> str:
        return self.name


def eager_rms_norm(casting: str) -> Callable[..., Tensor]:
    def llama(x: Tensor, weight: Tensor | None = None) -> Tensor:
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return h if weight is None else weight * h

    def gemma(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        h = x.to(wide) * torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + EPS)
        return (h * (1.0 + weight.to(wide))).type_as(x)

    def none(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    return {"llama": llama, "gemma": gemma, "none": none}[casting]


def rms_norm_case(casting: str) -> Case:
    return Case(
        f"rms_norm-{casting}",
        lambda x, weight: rms_norm(x, weight, EPS, casting),
        eager_rms_norm(casting),
        ((M, H), (H,)),
        saved_elements=M * H + H,
        saved_float32=M,
    )


def eager_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


CASES = [
    *map(rms_norm_case, ("llama", "gemma", "none")),
    Case(
        "add_rms_norm",
        lambda x, residual, weight: add_rms_norm(x, residual, weight)[0],
        lambda x, residual, weight: eager_rms_norm("llama")(x + residual, weight),
        ((M, H), (M, H), (H,)),
        saved_elements=M * H + H,
        saved_float32=M,
        saves_a_sum=True,
    ),
    Case(
        "add_rms_norm-without-residual",
        lambda x, weight: add_rms_norm(x, None, weight)[0],
        eager_rms_norm("llama"),
        ((M, H), (H,)),
        saved_elements=M * H + H,
        saved_float32=M,
    ),
    Case(
        "rms_norm-without-weight",
        rms_norm,
        eager_rms_norm("llama"),
        ((M, H),),
        saved_elements=M * H,
        saved_float32=M,
    ),
    Case(
        "layer_norm",
        layer_norm,
        eager_layer_norm,
        ((M, H), (H,), (H,)),
        saved_elements=M * H + 2 * H,
        saved_float32=2 * M,
    ),
    Case(
        "layer_norm-without-bias",
        layer_norm,
        eager_layer_norm,
        ((M, H), (H,)),
        saved_elements=M * H + H,
        saved_float32=2 * M,
    ),
    Case(
        "layer_norm-without-weight-and-bias",
        layer_norm,
        eager_layer_norm,
        ((M, H),),
        saved_elements=M * H,
        saved_float32=2 * M,
    ),
    Case(
        "add_layer_norm",
        lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias)[0],
        lambda x, residual, weight, bias: eager_layer_norm(x + residual, weight, bias),
        ((M, H), (M, H), (H,), (H,)),
        saved_elements=M * H + 2 * H,
        saved_float32=2 * M,
        saves_a_sum=True,
    ),
    Case(
        "add_layer_norm-without-residual",
        lambda x, weight, bias: add_layer_norm(x, None, weight, bias)[0],
        eager_layer_norm,
        ((M, H), (H,), (H,)),
        saved_elements=M * H + 2 * H,
        saved_float32=2 * M,
    ),
    Case(
        "swiglu",
        swiglu,
        lambda gate, up: F.silu(gate) * up,
        ((M, H), (M, H)),
        saved_elements=2 * M * H,
    ),
    Case(
        "swiglu-packed",
        swiglu,
        lambda packed: F.silu(packed.chunk(2, -1)[0]) * packed.chunk(2, -1)[1],
        ((M, 2 * H),),
        saved_elements=2 * M * H,
    ),
    Case(
        "geglu",
        geglu,
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        ((M, H), (M, H)),
        saved_elements=2 * M * H,
    ),
    Case(
        "geglu-exact",
        lambda gate, up: geglu(gate, up, "none"),
        lambda gate, up: F.gelu(gate) * up,
        ((M, H), (M, H)),
        saved_elements=2 * M * H,
    ),
    Case(
        "gated_mlp",
        gated_mlp,
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        ((M, H), (I, H), (I, H), (H, I)),
        saved_elements=M * H + 3 * I * H + 2 * M * I,
        has_linears=True,
    ),
    Case(
        "mlp",
        lambda x, up, down, up_bias, down_bias: mlp(x, up, down, "gelu", up_bias=up_bias, down_bias=down_bias),
        lambda x, up, down, up_bias, down_bias: F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias),
        ((M, H), (I, H), (H, I), (I,), (H,)),
        saved_elements=M * H + 2 * I * H + I + H + M * I,
        has_linears=True,
    ),
    Case(
        "mlp-without-biases",
        lambda x, up, down: mlp(x, up, down, "relu2"),
        lambda x, up, down: F.linear(torch.square(F.relu(F.linear(x, up))), down),
        ((M, H), (I, H), (H, I)),
        saved_elements=M * H + 2 * I * H + M * I,
        has_linears=True,
    ),
]

_BY_DEFAULT = ("rms_norm-llama", "add_rms_norm", "layer_norm", "add_layer_norm", "swiglu",
               "swiglu-packed", "geglu", "gated_mlp", "mlp")  # fmt: skip
"""Each op once; the others differ in a convention or an argument."""
each_case = pytest.mark.parametrize("case", by_default({str(case): case for case in CASES}, *_BY_DEFAULT))
_KINDS = ("rms_norm-llama", "add_layer_norm", "swiglu", "gated_mlp")
each_kind_of_case = pytest.mark.parametrize("case", by_default({str(case): case for case in CASES}, *_KINDS))
"""A norm, a sum with its norm, an activation, and an op with Linears."""


def make_inputs(case: Case, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = [1.0, *(H**-0.5 if case.has_linears and len(shape) == 2 else 1.0 for shape in case.shapes[1:])]
    made = [torch.randn(shape, generator=generator) * scale for shape, scale in zip(case.shapes, scales, strict=True)]
    return [tensor.to(device, dtype).requires_grad_() for tensor in made]


def like_output(output: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)


def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, like_output(output))]


@each_dtype
@each_case
def test_errors_are_no_larger_than_eagers(case: Case, dtype: torch.dtype, device: str):
    inputs = make_inputs(case, device, dtype)
    ours, eager = run(case.op, inputs), run(case.eager, inputs)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = case.eager(*doubles)
    gradient = like_output(ours[0]).double()
    exact = [output.detach(), *torch.autograd.grad(output, doubles, gradient)]
    for index, (value, peer, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        assert value.dtype is peer.dtype
        bound = 1.05 * relative_error(peer, truth) + FLOAT32_ROUNDING
        assert relative_error(value, truth) <= bound, "output" if index == 0 else f"gradient {index - 1}"


@each_case
def test_gradients_in_float64_are_those_of_finite_differences(case: Case):
    small = [tensor.detach()[..., :4][:4].double().requires_grad_() for tensor in make_inputs(case, "cpu")]
    assert torch.autograd.gradcheck(case.op, small)
    assert torch.autograd.gradgradcheck(case.op, small)


@each_dtype
@each_case
def test_a_second_backward_gives_the_same_bits_and_writes_nowhere(case: Case, dtype: torch.dtype, device: str):
    inputs = make_inputs(case, device, dtype)
    output = case.op(*inputs)
    gradient = like_output(output)
    saved: list[Tensor] = list(output.grad_fn.saved_tensors)  # type: ignore[union-attr]
    watched = [tensor for tensor in (*inputs, output, gradient, *saved) if tensor is not None]
    before = [(tensor.detach().clone(), tensor._version) for tensor in watched]
    first = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
    second = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
    assert same_bits(first, second)
    for tensor, (value, version) in zip(watched, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


@each_dtype
@each_case
def test_what_is_saved_is_known_to_the_byte(case: Case, dtype: torch.dtype, device: str):
    inputs = make_inputs(case, device, dtype)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: unpacked.append(t) or t):
        output = case.op(*inputs)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in packed)
    assert nbytes == case.saved_elements * dtype.itemsize + case.saved_float32 * 4
    addresses = {tensor.data_ptr() for tensor in packed}
    assert len(addresses) == len(packed)
    assert output.data_ptr() not in addresses
    assert case.saves_a_sum or {tensor.data_ptr() for tensor in inputs} <= addresses
    output.backward(like_output(output))
    assert len(unpacked) == len(packed)


@pytest.mark.parametrize("together", [1, *slow(99)], ids=["one or all others", "any"])
@each_case
def test_frozen_inputs_get_no_gradient_and_change_no_other(case: Case, device: str, together: int):
    """together: how many are trained, or frozen, beside the others."""
    inputs = make_inputs(case, device)
    expected = run(case.op, inputs)[1:]
    for trained in itertools.product((False, True), repeat=len(inputs)):
        if not any(trained) or min(trained.count(True), trained.count(False)) > together:
            continue
        chosen = [tensor.detach().requires_grad_(train) for tensor, train in zip(inputs, trained, strict=True)]
        output = case.op(*chosen)
        output.backward(like_output(output))
        for tensor, train, gradient in zip(chosen, trained, expected, strict=True):
            assert torch.equal(tensor.grad, gradient) if train else tensor.grad is None


@each_case
def test_gradients_of_gradients_are_as_good_as_eagers(case: Case, device: str):
    inputs = make_inputs(case, device)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]

    def twice(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        output = function(*inputs)
        gradient = like_output(output).requires_grad_()
        first = torch.autograd.grad(output, inputs, gradient, create_graph=True)
        directions = [like_output(value, seed) for seed, value in enumerate(first, 2)]
        # No gradient depends on a bias: its second derivative is zeros.
        return [*first, *torch.autograd.grad(first, [gradient, *inputs], directions, materialize_grads=True)]

    results = zip(twice(case.op, inputs), twice(case.eager, inputs), twice(case.eager, doubles), strict=True)
    for value, peer, truth in results:  # the same sums in another order: not the same bits
        assert relative_error(value, truth) <= 2 * relative_error(peer, truth) + FLOAT32_ROUNDING


@pytest.mark.parametrize("create_graph", [False, True])
def test_one_tensor_as_two_inputs(create_graph: bool, device: str):
    a = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    apart = [a.detach().requires_grad_(), a.detach().requires_grad_()]
    expected = sum(torch.autograd.grad(swiglu(*apart).sum(), apart, create_graph=create_graph))
    (gradient,) = torch.autograd.grad(swiglu(a, a).sum(), a, create_graph=create_graph)
    assert torch.equal(gradient, expected)
    assert gradient.requires_grad is create_graph


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "expanded": lambda t: t[..., :1, :].expand(t.shape),
    "expanded scalar": lambda t: t.flatten()[0].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each_case
def test_the_strides_of_inputs_and_gradients_do_not_matter(case: Case, layout: str, device: str):
    change = LAYOUTS[layout]
    inputs = [
        (change(tensor.detach()) if tensor.dim() > 1 else tensor.detach()).requires_grad_()
        for tensor in make_inputs(case, device)
    ]
    gradient = change(like_output(case.eager(*inputs)))

    def results(function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
        output = function(*inputs)
        return [output, *torch.autograd.grad(output, inputs, gradient)]

    found = results(case.op, inputs, gradient)
    assert found[0].is_contiguous()
    if not case.has_linears:
        contiguous = [tensor.detach().contiguous().requires_grad_() for tensor in inputs]
        assert same_bits(found, results(case.op, contiguous, gradient.contiguous()))
    else:  # PyTorch runs matrix products of other strides in other ways, for eager too

        def errors(function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[float]:
            doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
            exact = results(case.eager, doubles, gradient.double())
            return [relative_error(*pair) for pair in zip(results(function, inputs, gradient), exact, strict=True)]

        # Of expanded weights all products may be one number, which is rounded well or badly: eager's error of others
        # counts as well.
        others = [tensor.detach().requires_grad_() for tensor in make_inputs(case, device)]
        eager = zip(
            errors(case.eager, inputs, gradient), errors(case.eager, others, like_output(gradient)), strict=True
        )
        for error, peers in zip(errors(case.op, inputs, gradient), eager, strict=True):
            assert error <= 2 * max(peers) + FLOAT32_ROUNDING


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


@each_case
def test_an_output_without_a_gradient_gives_none(case: Case, device: str):
    inputs = make_inputs(case, device)
    output = case.op(*inputs)
    gradients = torch.autograd.grad(NoGradient.apply(output).sum(), inputs, allow_unused=True)
    assert gradients == (None,) * len(inputs)


@each_dtype
@each_case
def test_recorded_recipes_give_the_outputs_own_bits(
    case: Case, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
):
    recorded: list[tuple[Any, ...]] = []
    for name in ("norm_ops", "swiglu"):
        module = importlib.import_module(f"recompute.kernels.{name}")
        monkeypatch.setattr(module, "record", lambda *arguments: recorded.append(arguments))
    inputs = make_inputs(case, device, dtype)
    output = case.op(*inputs)
    recorded = [each for each in recorded if each[0] is output]
    assert len(recorded) == (not case.has_linears)
    for _, regenerate, *arguments in recorded:
        unaligned = [LAYOUTS["unaligned"](a.detach()) if isinstance(a, Tensor) else a for a in arguments]
        with torch.no_grad():
            for given in (arguments, unaligned):
                value = regenerate(*given)
                assert torch.equal(value, output)
                assert (value.dtype, value.stride()) == (output.dtype, output.stride())
                assert value.storage_offset() == output.storage_offset() == 0


@each_case
def test_the_graph_is_freed_without_the_garbage_collector(case: Case, device: str):
    class Box:
        def __init__(self, tensor: Tensor):
            self.tensor = tensor

    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor.detach())  # one that is an output would keep its own graph alive
        boxes.append(weakref.ref(box))
        return box

    inputs = make_inputs(case, device)
    gc.disable()
    try:
        with saved_tensors_hooks(pack, lambda box: box.tensor):
            output = case.op(*inputs)
        gradient = like_output(output)
        torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        torch.autograd.grad(output, inputs, gradient, create_graph=True)
        assert any(box() is not None for box in boxes)
        del output
        assert all(box() is None for box in boxes)
    finally:
        gc.enable()


class SeenOps(TorchDispatchMode):
    """The calls of our ops: name and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if function.namespace == "recompute":
            self.calls.append((function._opname, args, results))
        return results


@each_kind_of_case
def test_ops_pass_opcheck(case: Case, device: str):
    inputs = make_inputs(case, device, torch.bfloat16)
    with SeenOps() as seen:
        run(case.op, inputs)
        inputs[0].requires_grad_(False)
        if len(inputs) > 1:
            output = case.op(*inputs)
            output.backward(like_output(output))
    assert seen.calls
    for name, arguments, _ in seen.calls:
        arguments = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        op = getattr(torch.ops.recompute, name).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@each_case
def test_compiled_results_are_the_eager_ones(case: Case, device: str):
    inputs = make_inputs(case, device)

    class Block(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return case.op(*inputs) * 2

    torch.compiler.reset()
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert same_bits(run(compiled, inputs), run(block, inputs))


@each_dtype
@each_case
def test_meta_tensors_give_shapes_and_dtypes(case: Case, dtype: torch.dtype):
    inputs = make_inputs(case, "cpu", dtype)
    metas = [tensor.detach().to("meta").requires_grad_() for tensor in inputs]
    for meta, real in zip(run(case.op, metas), run(case.op, inputs), strict=True):
        assert meta.is_meta
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@each_case
def test_no_grad_and_inference_mode_save_nothing(case: Case, device: str):
    inputs = make_inputs(case, device)
    expected = case.op(*inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = case.op(*inputs)
        assert output.grad_fn is None
        assert torch.equal(output, expected)


def test_what_runs_where():
    cpu = torch.empty(2)
    assert not launch.uses_triton(cpu)
    assert not launch.uses_triton(cpu.to("meta"))


@pytest.mark.gpu
def test_what_runs_where_on_a_gpu():
    single, double = torch.empty(2, device="cuda"), torch.empty(2, device="cuda", dtype=torch.float64)
    assert launch.uses_triton(single, None)
    assert not launch.uses_triton(double)
    assert not launch.uses_triton(single, double)
    assert not launch.uses_triton(single, single.cpu())


def test_ops_run_where_triton_is_not_installed():
    program = """
import sys
sys.modules["triton"] = None
import torch
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.rms_norm import rms_norm
x = torch.ones(2, 4, requires_grad=True)
w = torch.ones(4, 4, requires_grad=True)
gated_mlp(rms_norm(x, w[0]), w, w, w).sum().backward()
assert x.grad.shape == x.shape
"""
    subprocess.run([sys.executable, "-c", program], check=True)
