"""What a norm computes is read off its forward: the real classes get kernels that err no more, near misses get none."""

import copy

import norm_tables
import pytest
import torch
from models import BATCH, LENGTH, held
from norm_tables import HIDDEN, LAYER_NORMS, MISSES, NORMS, made, norm_of
from tiers import by_default, one_in, slow
from tiny import TinyDecoder, TinyRMSNorm, assert_same, counted_ops, gradients, rule, rules, token_ids
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nested import nested_tensor

import recompute
from recompute.estimation.cuda_semantics import as_on_cuda
from recompute.substitution import norm
from recompute.substitution.norm import KernelNorm, find_norm

TOKENS = 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Dtypes of a weight and of an input."""
each_dtype = pytest.mark.parametrize("dtype", DTYPES[:2])
each_x_dtype = pytest.mark.parametrize("x_dtype", DTYPES[:2])


def stood_in(module):
    found = copy.deepcopy(module)
    handle = recompute.apply(found, rules(rule(type(module).__name__, "recompute", via="kernel")))
    kind = "rms" if find_norm(module).is_rms else "layer"
    assert f"kernel: {kind}_norm" in handle.explain(wide=True)
    return found


def tokens(dtype=torch.float32, width=HIDDEN):
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("known", by_default({**NORMS, **norm_tables.ASKED}, *list(NORMS)[::12], *norm_tables.ASKED))
def test_a_norm_is_found_as_what_it_computes_and_is_as_it_was(known):
    module, expected = copy.deepcopy(known[0]).eval(), known[1]
    module.register_forward_hook(lambda *_: pytest.fail("it has been run"))
    before = {key: copy.copy(value) for key, value in vars(module).items()}
    with torch.device("cpu"):
        assert find_norm(module) == expected
    assert vars(module) == before
    assert not module.training
    assert find_norm(module.train()) == expected


def results(module, x, dy):
    """The output, and the gradients of the input and of the parameters that are used."""
    x = x.clone().requires_grad_()
    y = module(x)
    found = torch.autograd.grad(y, [x, *module.parameters()], dy.to(y.dtype), allow_unused=True)
    return [y.detach(), *(each for each in found if each is not None)]


class Exact(nn.Module):
    """The formula of an RMSNorm, in float64."""

    def __init__(self, module, found, dtype):
        super().__init__()
        self.weight = None if found.weight is None else nn.Parameter(module.weight.detach().double())
        self.found, self.eps = found, found.eps
        if found.eps is None:
            self.eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def forward(self, x):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return h
        return h * (1 + self.weight if self.found.casting == "gemma" else self.weight)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [*slow(*DTYPES[:1]), *DTYPES[1:2], *slow(*DTYPES[2:])])
@pytest.mark.parametrize("known", one_in(12, NORMS))
def test_its_kernel_errs_no_more_than_the_norm(known, dtype):
    module, expected = copy.deepcopy(known[0]).to(dtype), known[1]
    x, dy = torch.randn(2, 5, TOKENS // 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = Exact(module, expected, dtype) if expected.is_rms else copy.deepcopy(module).double()
    found, peers = results(stood_in(module), x, dy), results(module, x, dy)
    if expected.is_rms and expected.casting == "llama":
        assert torch.equal(found[0], peers[0])
    # OLMo's and others' doubles are rounded to float32 on their way.
    slack = torch.finfo(dtype).eps / 8 if expected.is_rms else 2**-20
    for value, peer, truth in zip(found, peers, results(exact, x.double(), dy.double()), strict=True):
        assert value.dtype is peer.dtype
        error, eagers = ((each.double() - truth).norm() for each in (value, peer))
        assert error <= 1.05 * eagers + slack * truth.norm()


@pytest.mark.parametrize(("weight", "x"), PAIRS)
@pytest.mark.parametrize(("cls", "casting"), norm_tables.RMS_NORMS)
def test_a_kernel_returns_the_dtype_that_the_norm_returns(cls, casting, weight, x):
    module, found = made(cls).to(weight), KernelNorm("weight", None, 1e-5, casting)
    result, reference = found.compute(tokens(x), module.weight), module(tokens(x))
    assert result.dtype is reference.dtype
    torch.testing.assert_close(result, reference)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_an_epsilon_that_nobody_gave_is_that_of_the_dtype_in_which_torch_computes(dtype):
    module = nn.RMSNorm(HIDDEN).to(dtype)
    found = find_norm(module)
    assert found == KernelNorm("weight", None, None, "none")
    # Numbers so small that the epsilon of any other dtype gives others.
    x = tokens(dtype) * (1e-8 if dtype is torch.float64 else 1e-4)
    torch.testing.assert_close(found.compute(x, module.weight), module(x))


@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize(
    "module", by_default(MISSES, *list(MISSES)[::10], *(each for each in MISSES if "asking" in each))
)
def test_what_is_nearly_a_norm_is_none(module, training):
    assert find_norm(module.train(training)) is None


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: norm_tables.llama(self, x),
        lambda self, x: norm_tables.llama(self, x, lambda self, h: norm_tables.root(self, h)),
        lambda self, x: self.weight * ((h := x.float()) * norm_tables.root(self, h)).to(x.dtype),
    ],
)
def test_what_the_misses_nearly_are_is_one(forward):
    assert find_norm(norm_of(forward)) == norm_tables.LLAMA_LIKE


@pytest.mark.parametrize(("module", "traces"), [(nn.Linear(8, 8), 0), (nn.Hardswish(), 1)])
def test_what_is_no_norm_takes_one_trace_or_none(module, traces, monkeypatch):
    taken = []
    formula_of = norm.formula_of
    monkeypatch.setattr(norm, "formula_of", lambda *given: taken.append(given) or formula_of(*given))
    assert find_norm(module) is None
    assert len(taken) == traces


# Norms that ask for the dtype of their weight


def kernels_run(module, x):
    with counted_ops() as ops:
        module(x)
    return ops.get("recompute.rms_norm_forward", 0)


@each_x_dtype
@each_dtype
def test_where_input_and_weight_have_two_dtypes_a_norm_that_asks_runs_as_it_is(dtype, x_dtype):
    """There it rounds elsewhere than any kernel does, and returns the dtype of its weight, or the wider one."""
    plain = made(norm_tables.ASKING[0]).to(dtype)
    module = stood_in(made(norm_tables.ASKING[0])).to(dtype)  # which is cast after the policy
    assert kernels_run(module, tokens(x_dtype)) == (dtype is x_dtype)
    assert_same([module(tokens(x_dtype))], [plain(tokens(x_dtype))])


def test_where_what_is_normalized_is_rounded_to_the_inputs_dtype_the_weight_may_have_any():
    module, found = norm_tables.ASKED["a weight of any dtype"]
    for dtype in DTYPES:
        assert torch.equal(found.compute(tokens(dtype), module.weight), module(tokens(dtype)))


class T5Like(TinyRMSNorm):
    def forward(self, hidden_states):
        return norm_tables.of_its_input(self, hidden_states)


def test_they_compile():
    model = TinyDecoder(1)
    model.layers[0].input_layernorm, model.layers[0].post_attention_layernorm = T5Like(), T5Like()
    recompute.apply(model, rules(rule("T5Like", "recompute", via="kernel")))
    expected = model(token_ids())
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(token_ids()), expected)


# LayerNorms

LAYER_NORM_POLICY = rules(rule("*LayerNorm*", "recompute", via="kernel"))


@pytest.mark.parametrize("affine", [True, False])
def test_an_input_that_the_module_refuses_is_refused(affine):
    module = nn.LayerNorm(HIDDEN, elementwise_affine=affine)
    for x in (tokens(width=HIDDEN + 1), torch.tensor(1.0)):
        for each in (module, stood_in(module)):
            with pytest.raises(RuntimeError, match=r"normalized_shape=\[32\]"):
                each(x)


def test_parameters_of_another_dtype_are_the_modules_own_business():
    module, x = nn.LayerNorm(HIDDEN), tokens(torch.bfloat16)
    with counted_ops() as ops:
        found = gradients(stood_in(module), x)
    assert ops["aten.native_layer_norm"] == 1  # which takes float32 beside bfloat16 on the CPU, and not on CUDA
    assert_same(found, gradients(module, x))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        stood_in(module.bfloat16())(x.float())


def test_a_nested_tensor_is_the_modules_own_business():
    module, rows = nn.LayerNorm(HIDDEN), [torch.randn(count, HIDDEN) for count in (3, 5)]
    with pytest.warns(UserWarning, match="gets DTensors or nested tensors, which no kernel takes"):
        found = stood_in(module)(nested_tensor(rows, layout=torch.jagged))
    assert_same(list(found.unbind()), [module(each) for each in rows])


def test_a_weight_for_each_head_is_broadcast_by_the_module():
    module = type(LAYER_NORMS["Cohere"][0])((4, HIDDEN))
    x, stand_in = torch.randn(5, 4, HIDDEN), copy.deepcopy(module)
    recompute.apply(stand_in, LAYER_NORM_POLICY)
    assert_same(gradients(stand_in, x), gradients(module, x))


@each_x_dtype
@each_dtype
@pytest.mark.parametrize("kind", ["torch", *slow("in float32"), "Cohere", *slow("OLMo")])
def test_dtypes_under_the_autocast_of_cuda(kind, dtype, x_dtype):
    module = copy.deepcopy(LAYER_NORMS[kind][0]).to(dtype)
    stand_in = stood_in(module)
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(autocast=torch.bfloat16):
        x = torch.empty(5, HIDDEN, dtype=x_dtype)
        with counted_ops() as ops:
            found = stand_in(x)
        assert found.dtype is module(x).dtype
    assert ops["recompute.layer_norm_forward"] == 1


@pytest.mark.gpu
@each_x_dtype
@each_dtype
@pytest.mark.parametrize("kind", ["torch", "in float32", "Cohere", "OLMo"])
def test_autocast_casts_as_it_does_without_a_policy(kind, dtype, x_dtype):
    module = copy.deepcopy(LAYER_NORMS[kind][0]).to("cuda", dtype)
    x = tokens(x_dtype).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = gradients(stood_in(module), x), gradients(module, x)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    torch.testing.assert_close(found, expected)


def test_a_norms_output_that_a_linear_saves_is_dropped():
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    plain, x = copy.deepcopy(model), torch.randn(BATCH * LENGTH, HIDDEN)
    assert held(plain, lambda: plain(x)) == 3 * x.nbytes + 2 * len(x) * 4  # x, and the norm's input and output
    handle = recompute.apply(model, LAYER_NORM_POLICY)
    assert held(model, lambda: model(x)) == 2 * x.nbytes + 2 * len(x) * 4
    assert handle.stats().dropped_nbytes == x.nbytes
    torch.testing.assert_close(gradients(model, x), gradients(plain, x))
