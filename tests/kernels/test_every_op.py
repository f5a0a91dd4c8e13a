"""What every op of recompute.kernels promises, whichever way it runs: each claim once, over the table of cases."""

import gc
import importlib
import inspect
import itertools
import weakref

import cases
import pytest
import torch
import torch._dynamo  # an op's first plan would load it, which leaves reference cycles that hold the call's tensors
from cases import CASES, HEADS, KINDS, MLPS, NORMS, PRODUCTS, ROPES, TILES, each_case, each_linear, each_norm, inputs_of
from kernel_testing import (
    CAN_INTERPRET,
    FLOAT32_ROUNDING,
    LAYOUTS,
    NoGradient,
    Work,
    assert_as_good_as,
    doubled,
    each_device_of_compiled_code,
    each_dtype,
    like,
    listed,
    relative_error,
    run,
    same_bits,
)
from tiers import slow
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recompute.kernels import launch, launch_plan


@each_dtype
@each_case(*NORMS, *PRODUCTS, *MLPS, *ROPES)
def test_errors_are_no_larger_than_eagers(case, dtype, device):
    assert_as_good_as(case.op, case.eager, inputs_of(case, device, dtype, 40), case.kind)


ROWS, COLUMNS = 3, 40
"""Of what is no claim about numbers."""


def few(case, device="cpu", dtype=torch.float32):
    return inputs_of(case, device, dtype, ROWS, COLUMNS)


SIZES = [(0, 64), (1, 123), (3, 0), (37, 100), (7, 768), (199, 64), (1, 2048), (37, 7), (2, 1000)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@each_norm
def test_any_number_of_rows_and_columns(case, rows, columns, device):
    if device == "cuda" and columns == 7:
        columns = 57  # CUDA adds rows in another order: the error of a sum of 7 columns is too small a sample
    assert_as_good_as(case.op, case.eager, inputs_of(case, device, torch.float32, rows, columns))


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("columns", [64, 123, 768, 1600, 4096, 5120, 14336, 65536, 131072])
@pytest.mark.parametrize(
    ("case", "rows"),
    # The error of few elements is a sample, and that of a sum and its norm strays more.
    [(case, rows) for case in NORMS for rows in ((1, 7, 199, 8192) if case.outputs == 1 else (7, 8192))],
    ids=str,
)
def test_errors_at_real_sizes_are_no_larger_than_eagers(case, rows, columns, dtype):
    rows = min(rows, 2**26 // columns)
    assert_as_good_as(case.op, case.eager, inputs_of(case, "cuda", dtype, rows, columns))


@each_case()
def test_gradients_in_float64_are_those_of_finite_differences(case):
    small = [each.detach().double().requires_grad_() for each in inputs_of(case, rows=5, columns=4)]
    assert torch.autograd.gradcheck(case.op, small, fast_mode=True)
    assert torch.autograd.gradgradcheck(case.op, small, fast_mode=True)


@each_dtype
@each_case()
def test_a_second_backward_gives_the_same_bits_and_writes_nowhere(case, dtype, device):
    inputs = few(case, device, dtype)
    outputs = listed(case.op(*inputs))
    gradients = like(outputs)
    node = outputs[0].grad_fn
    while not hasattr(node, "saved_tensors"):  # as a change of sign
        node = node.next_functions[0][0]
    saved = list(node.saved_tensors)
    watched = [each for each in (*inputs, *outputs, *gradients, *saved) if each is not None]
    before = [(each.detach().clone(), each._version) for each in watched]
    first = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
    kept = [each.clone() for each in first]
    (alone,) = torch.autograd.grad(outputs, inputs[-1], gradients, retain_graph=True)
    second = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
    assert same_bits(first, second)
    assert same_bits(first, kept)
    assert torch.equal(alone, first[-1])
    for each, (value, version) in zip(watched, before, strict=True):
        assert torch.equal(each, value)
        assert each._version == version
    assert same_bits(run(case.op, inputs), [*outputs, *first])  # as every run does


@each_dtype
@each_case()
def test_what_is_saved_is_known_to_the_byte(case, dtype, device):
    inputs = few(case, device, dtype)
    packed = []
    unpacked = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: unpacked.append(t) or t):
        outputs = listed(case.op(*inputs))
    addresses = {each.data_ptr() for each in packed}
    assert len(addresses) == len(packed)
    assert outputs[0].data_ptr() not in addresses
    nbytes = sum(each.numel() * each.element_size() for each in packed if each.dtype is not torch.int64)  # of targets
    expected = case.saved(ROWS, COLUMNS) * dtype.itemsize + case.saved_float32 * ROWS * 4
    assert nbytes - expected in ((0, 4) if case in cases.LOSSES else (0,))  # what the mean of a loss divides by
    if case.kind != "rope":
        assert case.saves_a_sum or {each.data_ptr() for each in inputs} <= addresses
    torch.autograd.backward(outputs, like(outputs))
    assert len(unpacked) == len(packed)


@pytest.mark.parametrize("together", [1, *slow(99)], ids=["one or all others", "any"])
@each_case()
def test_frozen_inputs_get_no_gradient_and_change_no_other(case, device, together):
    """together: how many are trained, or frozen, beside the others."""
    inputs = few(case, device)
    expected = run(case.op, inputs)[case.outputs :]
    for trained in itertools.product((False, True), repeat=len(inputs)):
        if not any(trained) or min(trained.count(True), trained.count(False)) > together:
            continue
        chosen = [each.detach().requires_grad_(train) for each, train in zip(inputs, trained, strict=True)]
        outputs = listed(case.op(*chosen))
        pairs = [pair for pair in zip(outputs, like(outputs), strict=True) if pair[0].requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
        for each, train, gradient in zip(chosen, trained, expected, strict=True):
            assert torch.equal(each.grad, gradient) if train else each.grad is None


@each_case()
def test_gradients_of_gradients_are_as_good_as_eagers(case, device):
    inputs = few(case, device)

    def twice(function, inputs):
        outputs = listed(function(*inputs))
        given = [each.requires_grad_() for each in like(outputs)]
        first = torch.autograd.grad(outputs, inputs, given, create_graph=True)
        # No gradient depends on a bias: its second derivative is zeros.
        return [*first, *torch.autograd.grad(first, [*given, *inputs], like(first), materialize_grads=True)]

    results = zip(twice(case.op, inputs), twice(case.eager, inputs), twice(case.eager, doubled(inputs)), strict=True)
    for value, peer, truth in results:  # the same sums in another order: not the same bits
        assert relative_error(value, truth) <= 2 * relative_error(peer, truth) + 4 * FLOAT32_ROUNDING


@pytest.mark.parametrize("layout", LAYOUTS)
@each_case(*NORMS, *PRODUCTS, *MLPS)
def test_the_strides_of_inputs_and_gradients_do_not_matter(case, layout, device):
    change = LAYOUTS[layout]
    inputs = [(change(each.detach()) if each.dim() > 1 else each.detach()).requires_grad_()
              for each in inputs_of(case, device)]  # fmt: skip
    gradients = [change(each) for each in like(listed(case.eager(*inputs)))]

    def results(function, inputs, gradients):
        outputs = listed(function(*inputs))
        return [*outputs, *torch.autograd.grad(outputs, inputs, gradients)]

    found = results(case.op, inputs, gradients)
    assert found[0].is_contiguous()
    if not case.has_linears:
        contiguous = [each.detach().contiguous().requires_grad_() for each in inputs]
        expected = results(case.op, contiguous, [each.contiguous() for each in gradients])
        assert same_bits(found, expected)
        return

    # PyTorch runs matrix products of other strides in other ways, for eager too.
    def errors(function, inputs, gradients):
        exact = results(case.eager, doubled(inputs), [each.double() for each in gradients])
        return [relative_error(*pair) for pair in zip(results(function, inputs, gradients), exact, strict=True)]

    # Of expanded weights all products are one number, and its last bit decides whether their sum is rounded well or
    # badly. So eager's errors of several such numbers count.
    peers = [errors(case.eager, inputs_of(case, device), like(gradients))]
    for scale in (1.0, 1.1, 1.3, 1.7):
        scaled = [scale * each.detach() for each in inputs]
        of_layout = [(change(each) if each.dim() > 1 else each).requires_grad_() for each in scaled]
        peers.append(errors(case.eager, of_layout, gradients))
    for error, *eagers in zip(errors(case.op, inputs, gradients), *peers, strict=True):
        assert error <= 2 * max(eagers) + FLOAT32_ROUNDING


@pytest.mark.parametrize("shape", [(), (4,), (2, 2), (2, 1, 2)])
@each_case(*NORMS, *PRODUCTS, *MLPS)
def test_leading_dimensions_are_rows(case, shape, device):
    inputs = inputs_of(case, device, rows=torch.Size(shape).numel(), columns=60)
    of_rows = [each.dim() == 2 and each.shape == inputs[0].shape and index < 2 for index, each in enumerate(inputs)]
    if case.kind == "mlp":
        of_rows[1:] = [False] * (len(inputs) - 1)
    shaped = [
        each.detach().view(*shape, each.shape[-1]).requires_grad_() if is_rows else each
        for each, is_rows in zip(inputs, of_rows, strict=True)
    ]
    for value, expected in zip(run(case.op, shaped), run(case.op, inputs), strict=True):
        assert value.shape == (*shape, expected.shape[-1]) if expected.shape[:1] == inputs[0].shape[:1] else True
        torch.testing.assert_close(value, expected.view(value.shape), rtol=1e-5, atol=1e-6)


@each_case()
def test_an_output_without_a_gradient_gives_none(case, device):
    inputs = few(case, device)
    outputs = listed(case.op(*inputs))
    gradients = torch.autograd.grad(sum(NoGradient.apply(each).sum() for each in outputs), inputs, allow_unused=True)
    assert gradients == (None,) * len(inputs)
    if case.outputs == 1:
        return
    for used in (0, 1):
        found, expected = (
            torch.autograd.grad(function(*inputs)[used].square().sum(), inputs, allow_unused=True)
            for function in (case.op, case.eager)
        )
        for value, peer in zip(found, expected, strict=True):
            assert (value is None) == (peer is None)
            if value is not None:
                torch.testing.assert_close(value, peer, rtol=1e-4, atol=1e-5)


@each_dtype
@each_case(*NORMS, *PRODUCTS, *MLPS, *TILES)
def test_recorded_recipes_give_the_outputs_own_bits(case, dtype, device, monkeypatch):
    recorded = []
    for name in ("norm_ops", "swiglu"):
        module = importlib.import_module(f"recompute.kernels.{name}")
        monkeypatch.setattr(module, "record", lambda *arguments: recorded.append(arguments))
    inputs = inputs_of(case, device, dtype)
    output, *streams = listed(case.op(*inputs))
    recorded = [each for each in recorded if each[0] is output]
    assert len(recorded) == (not case.has_linears)
    for _, regenerate, *arguments in recorded:
        assert not streams or arguments[0] is streams[0]
        unaligned = [LAYOUTS["unaligned"](a.detach()) if isinstance(a, Tensor) else a for a in arguments]
        with torch.no_grad():
            for given in (arguments, unaligned):
                value = regenerate(*given)
                assert torch.equal(value, output)
                assert (value.dtype, value.stride()) == (output.dtype, output.stride())
                assert value.storage_offset() == output.storage_offset() == 0


@each_case()
def test_the_graph_is_freed_without_the_garbage_collector(case, device):
    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    boxes = []

    def pack(tensor):
        box = Box(tensor.detach())  # one that is an output would keep its own graph alive
        boxes.append(weakref.ref(box))
        return box

    inputs = few(case, device)
    gc.disable()
    try:
        with saved_tensors_hooks(pack, lambda box: box.tensor):
            outputs = listed(case.op(*inputs))
        gradients = like(outputs)
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
        torch.autograd.grad(outputs, inputs, gradients, create_graph=True)
        assert any(box() is not None for box in boxes)
        del outputs
        assert all(box() is None for box in boxes)
    finally:
        gc.enable()


@cases.each_kind
def test_ops_pass_opcheck(case, device):
    inputs = few(case, device, torch.bfloat16)
    with Work() as seen:
        run(case.op, inputs)
        inputs[0].requires_grad_(False)
        if len(inputs) > 1:
            run(case.op, inputs)
    assert seen.calls
    seen.check()


@pytest.mark.skipif(not CAN_INTERPRET, reason="only the interpreter's kernels are Python functions")
@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
@each_case()
def test_constants_of_kernels_are_given_by_name(case, device):
    """By place, the kernel that was compiled for another constant would be launched again: see ``launch.run``."""
    with launch_plan.noted_launches() as launches:
        run(case.op, few(case, device))
    assert launches
    for launched in launches:
        parameters = list(inspect.signature(launched.kernel.fn).parameters.values())
        of_arguments = parameters[: len(launched.arguments)]
        assert not [each.name for each in of_arguments if "constexpr" in str(each.annotation)]


@each_device_of_compiled_code
# Compiled code makes no tiles.
@each_case(*(case for case in CASES if case not in TILES), cases.WITH_LOGITS, default=KINDS)
def test_compiled_results_are_the_eager_ones(case, device):
    inputs = few(case, device)

    def block(*inputs):
        return [each * 2 for each in listed(case.op(*inputs))]

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert same_bits(run(compiled, inputs), run(block, inputs))


@each_dtype
@each_case()
def test_meta_tensors_give_shapes_and_dtypes(case, dtype):
    inputs = inputs_of(case, dtype=dtype)
    metas = [each.detach().to("meta").requires_grad_() for each in inputs]
    for meta, real in zip(run(case.op, metas), run(case.op, inputs), strict=True):
        assert meta.is_meta
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@each_case()
def test_no_grad_and_inference_mode_save_nothing(case, device):
    inputs = few(case, device)
    expected = listed(case.op(*inputs))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = listed(case.op(*inputs))
        assert all(each.grad_fn is None for each in outputs)
        assert same_bits(outputs, expected)


@pytest.fixture
def _sums_in_float32():
    """CUDA may sum a product in parts, and round each: where it does, the strides of operands decide."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@each_case(*MLPS, *HEADS)
@pytest.mark.usefixtures("_sums_in_float32")
def test_autocast_is_eagers(case, x_dtype, backward_inside, device):
    x, *parameters = inputs_of(case, device, rows=40, columns=48)
    inputs = [x.detach().to(x_dtype).requires_grad_(), *parameters]
    results = []
    for function in (case.op, case.eager):
        with torch.autocast(device, torch.bfloat16):
            output = function(*inputs)
            gradients = torch.autograd.grad(output, inputs, like([output])) if backward_inside else ()
        gradients = gradients or torch.autograd.grad(output, inputs, like([output]))
        results.append([output, *gradients])
    doubles = doubled(inputs)
    exact = case.eager(*doubles)
    truths = [exact, *torch.autograd.grad(exact, doubles, [each.double() for each in like(results[0][:1])])]
    for value, peer, truth in zip(*results, truths, strict=True):
        assert value.dtype is peer.dtype
        factor = 1.1 + 3 / max(value.numel(), 1) ** 0.5
        assert relative_error(value, truth) <= factor * relative_error(peer, truth) + FLOAT32_ROUNDING
    with torch.autocast(device, torch.bfloat16):
        assert case.op(*doubles).dtype is torch.float64  # which autocast leaves alone
        later = torch.autograd.grad(output := case.op(*doubles), doubles, torch.ones_like(output))
    assert same_bits(later, torch.autograd.grad(case.op(*doubles), doubles, torch.ones_like(output)))


def test_backward_under_autocast_is_that_of_a_forward_without(device):
    case = MLPS[1]
    inputs = inputs_of(case, device)
    for create_graph in (False, True):
        y = case.op(*inputs)
        expected = torch.autograd.grad(y.sum(), inputs, retain_graph=True, create_graph=create_graph)
        with torch.autocast(device, torch.bfloat16):
            found = torch.autograd.grad(y.sum(), inputs, create_graph=create_graph)
        assert same_bits(found, expected)


def under_autocast(case, inputs, device):
    """The output, and the tensors that are saved for backward."""
    saved = []
    with torch.autocast(device, torch.bfloat16), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        return case.op(*inputs), saved


@pytest.mark.parametrize("trains", [True, False])
@each_linear
def test_no_copy_of_a_parameter_is_held_and_of_what_is_made_the_smaller(case, trains, device):
    """Parameters are alive anyway, and cast again in backward."""
    x, *parameters = few(case, device)
    shapes = {each.shape for each in parameters if each.dim() == 2}
    alive = [nn.Parameter(each.detach(), requires_grad=trains) for each in parameters]
    y, saved = under_autocast(case, [x, *alive], device)
    assert {each.data_ptr() for each in saved}.issuperset(each.data_ptr() for each in alive if each.dim() == 2)
    assert not [each for each in saved if each.dtype is torch.bfloat16 and each.shape in shapes]
    y.float().sum().backward()
    assert all((each.grad is not None) is trains for each in alive)
    made = [2 * each.detach().requires_grad_(trains) for each in parameters]
    _, saved = under_autocast(case, [x, *made], device)
    assert {each.dtype for each in saved if each.shape in shapes} == {torch.bfloat16}


@each_linear
def test_under_autocast_gradients_are_those_of_copies_made_outside(case, device):
    first, second = [], []
    for cast in (lambda tensor: tensor, lambda tensor: tensor.to(torch.bfloat16)):
        x, *parameters = inputs = inputs_of(case, device, rows=6, columns=32)
        y, _ = under_autocast(case, [x, *map(cast, parameters)], device)
        gradients = torch.autograd.grad(y.float().square().sum(), inputs, retain_graph=True)
        assert {each.dtype for each in gradients} == {torch.float32}
        first.append([y, *gradients])
        again = torch.autograd.grad(y.float().square().sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(each.square().sum() for each in again), inputs))
    assert same_bits(*first)
    for found, expected in zip(*second, strict=True):
        assert relative_error(found, expected) < 0.02  # sums over both of a weight's uses are rounded apart


@pytest.mark.parametrize("create_graph", [False, True])
@each_case(PRODUCTS[0], ROPES[0])
def test_one_tensor_as_two_inputs(case, create_graph, device):
    a = inputs_of(case, device)[0]
    apart = [a.detach().requires_grad_(), a.detach().requires_grad_()]
    totals = [sum(each.square().sum() for each in listed(case.op(*given))) for given in (apart, (a, a))]
    expected = sum(torch.autograd.grad(totals[0], apart, create_graph=create_graph))
    (gradient,) = torch.autograd.grad(totals[1], a, create_graph=create_graph)
    assert torch.equal(gradient, expected)
    assert gradient.requires_grad is create_graph


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
