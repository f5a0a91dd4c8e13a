"""`recompute.verify` and the debug switch: what is right passes, what is wrong is named, nothing is left behind."""

import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
from engine_testing import function_of, module_of, no_tensors
from tiers import slow
from tiny import HIDDEN, TinyMLP, TinyRMSNorm, decoder, rule, rules, snapshot, token_ids
from torch import Tensor, nn

import recompute
from recompute import errors
from recompute.diagnostics import verify
from recompute.diagnostics.comparing_runs import deterministic, relative_error, same_bits, wider_dtype
from recompute.errors import GradientMismatch, ModelError, MutationError, NoEffectError, PolicyError, RegenerationError
from recompute.substitution import norm as kernel_module
from recompute.substitution.norm import find_norm

ROOT = Path(__file__).resolve().parents[2]
TAPED = rules(rule("Lying", "recompute", via="hook"))
CHECKPOINTED = rules(rule("Lying"))

KERNELS = rules(rule("TinyRMSNorm", "recompute", via="kernel"))

calls = itertools.count(1)


@torch.library.custom_op("recompute_tests::liar", mutates_args=())
def liar(x: Tensor) -> Tensor:
    """Functional by its word, yet it counts how often it is called, where nobody looks."""
    return x * next(calls)


liar.register_fake(torch.empty_like)
liar.register_autograd(lambda ctx, gradient: gradient)


class Lying(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return liar(x * self.weight).square().sum(-1, keepdim=True) * x


def liars():
    return nn.Sequential(Lying(), Lying())


Wrong = function_of(lambda x: x.clone(), lambda gradient: gradient * 1.01, saves=no_tensors)
"""Its forward is right and its gradient is not."""


def norms(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), TinyRMSNorm(), nn.Linear(HIDDEN, HIDDEN))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def stand_in(monkeypatch, kernel):
    """Have ``kernel`` take the place of the norm's kernel; it is given that one's output as well."""
    assert find_norm(TinyRMSNorm()) is not None  # what the kernel computes is found out once, of the right one
    right = kernel_module.rms_norm
    monkeypatch.setattr(kernel_module, "rms_norm", lambda x, weight, *rest: kernel(right(x, weight, *rest), x, weight))


@pytest.mark.parametrize("policy", ["none", "full", *slow("alternate"), "hook", *slow("elementwise", "auto")])
@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.bfloat16])
def test_what_hooks_regenerate_with_dropout_has_the_same_bits(policy, dtype):
    found = recompute.verify(decoder(dropout=0.2).to(dtype), token_ids(), policy=policy)
    assert found.policy == policy
    assert found.bitwise
    assert (found.max_difference, found.relative_error, found.tolerance) == (0.0, 0.0, 0.0)
    assert found.gradients == len(list(decoder().parameters()))
    assert (found.dropped_tensors > 0) == (found.dropped_nbytes > 0) == (policy != "none")
    said = "dropped: 0 tensors" if policy == "none" else f"tensors, {found.dropped_nbytes:,} bytes, all regenerated"
    assert f"policy {policy}: outputs and 21 gradients equal those without it, bit for bit\n" in str(found)
    assert said in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_right_within_the_rounding_that_the_model_has_without_them(dtype):
    found = recompute.verify(decoder().to(dtype), token_ids(), policy="kernel")
    assert not found.bitwise
    assert 0 < found.relative_error <= found.tolerance < 64 * torch.finfo(dtype).eps
    assert found.max_difference > 0
    assert f"relative error of all gradients: {found.relative_error:.1e} " in str(found)


def test_verify_takes_the_default_policy_that_apply_takes():
    assert recompute.verify(decoder(), token_ids()).policy == "elementwise"


class Dropless(nn.Module):
    """Of a class that rules find, with nothing to drop: what autograd saves is its input."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), TinyRMSNorm(4)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        ("full", r"policy full governs no module of Dropless: .*rules\[0\]"),
        (
            rules(rule("Linear", "recompute", via="hook")),
            r"governs layer, but on this batch nothing was dropped, offloaded or compressed there",
        ),
        (rules(rule("TinyRMSNorm")), r"governs unused, but on this batch none of them ran with gradients"),
        (rules(rule("TinyRMSNorm", "recompute", via="kernel")), r"governs unused, but on this batch none of them ran"),
    ],
)
def test_a_policy_that_dropped_nothing_is_not_said_to_be_right(policy, complaint):
    model, x = Dropless(), numbers(3, 4)
    before = snapshot(model)
    with pytest.raises(NoEffectError, match=f"(?s){complaint}"):
        recompute.verify(model, (x,), policy=policy)
    assert snapshot(model) == before


@pytest.mark.parametrize("policy", ["none", rules(rule("Linear", "keep"))], ids=["none", "keep"])
def test_a_policy_that_is_to_drop_nothing_verifies(policy):
    found = recompute.verify(Dropless(), (numbers(3, 4),), policy=policy)
    assert found.bitwise
    assert str(found).endswith("\ndropped: 0 tensors")


def test_a_kernel_that_drops_nothing_but_saves_less_verifies():
    policy = rules(rule("TinyMLP", "recompute", via="kernel"))
    assert recompute.verify(TinyMLP(), (numbers(3, HIDDEN),), policy=policy).dropped_tensors == 0


def test_compiled_layers_of_which_nothing_is_counted_verify():
    model = decoder()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert recompute.verify(model, token_ids(), policy=rules(rule("block"))).bitwise


@pytest.mark.parametrize("name", ["convnet", "mixtral", "t5"])
def test_models_verify_and_are_left_as_they_were(name):
    """Batch norm's statistics, the hooks that Hugging Face puts on routers, shared embeddings."""
    model = models.make(name)
    before, buffers = snapshot(model), [buffer.clone() for buffer in model.buffers()]
    assert recompute.verify(model, models.batch(name), policy="elementwise").bitwise
    assert snapshot(model) == before
    assert all(map(same_bits, model.buffers(), buffers))


class Stateful(nn.Module):
    """Has everything that a run may leave changed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.count = torch.zeros(())
        self.steps = 0
        self.log = []
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x, fails=False):
        self.count += 1
        self.steps += 1
        self.log.append(self.steps)
        self.register_forward_hook(lambda *_: None)
        x.add_(1)
        noise = torch.rand(4, generator=self.generator) + random.random() + np.random.rand()
        y = self.layer(x) * noise
        if fails:
            raise ZeroDivisionError
        return y.exp()


def random_states(model):
    kind, keys, *rest = np.random.get_state()
    generators = torch.default_generator, model.generator
    return [random.getstate(), (kind, keys.tolist(), *rest), *(g.get_state().tolist() for g in generators)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("error", [None, ZeroDivisionError, AttributeError, GradientMismatch])
def test_everything_is_left_as_it_was(training, error, monkeypatch):
    torch.manual_seed(0)
    model = Stateful().train(training)
    model.layer[0].eval()
    model.layer[0].weight.grad = gradient = numbers(4, 4)
    batch = {"x": numbers(6, 4), "fails": error is ZeroDivisionError}
    tensors = [*model.buffers(), *model.parameters(), model.count, batch["x"], gradient]
    versions, values = [tensor._version for tensor in tensors], [tensor.clone() for tensor in tensors]
    before, states, environment = snapshot(model), random_states(model), dict(os.environ)

    def verified():
        loss = None if error is not AttributeError else lambda output: output.missing
        return recompute.verify(model, batch, policy=rules({"match": "layer", "action": "checkpoint"}), loss=loss)

    if error is None:
        found = verified()
        assert found.bitwise
        assert found.dropped_tensors > 0  # though it is not in training
    else:
        if error is GradientMismatch:
            monkeypatch.setattr(verify, "same_bits", lambda one, other: False)
        with pytest.raises(error):
            verified()
    assert snapshot(model) == before
    assert random_states(model) == states
    assert [tensor._version for tensor in tensors] == versions
    assert all(map(same_bits, tensors, values))
    assert model.layer[0].weight.grad is gradient
    assert model.layer[0].bias.grad is None
    assert (model.log, len(model._forward_hooks)) == ([], 0)
    assert dict(os.environ) == environment
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("policy", "op"), [(TAPED, "recompute_tests.liar"), (CHECKPOINTED, "torch.Tensor.square")])
def test_an_op_that_lies_is_named_with_its_module(policy, op):
    with pytest.raises(RegenerationError, match=r"\b[01] \(Lying\)") as caught:
        recompute.verify(liars(), numbers(3, 4), policy=policy)
    assert op in str(caught.value)
    assert "12 of 12 elements differ" in str(caught.value)


def test_an_op_that_lies_about_what_another_module_saves_is_named():
    class Last(nn.Module):
        def forward(self, x):
            return liar(x * x)

    model = nn.Sequential(nn.Linear(4, 4), Last(), nn.Linear(4, 4))
    with pytest.raises(RegenerationError, match=r"1 \(Last\).*recompute_tests\.liar"):
        recompute.verify(model, numbers(7, 4), policy=rules(rule("Last", "recompute", via="hook")))


LIAR = """
import torch, recompute
from test_verify import CHECKPOINTED, TAPED, liars, numbers
for policy in (TAPED, CHECKPOINTED):
    model = liars()
    recompute.apply(model, policy)
    try:
        model(numbers(3, 4)).sum().backward()
        print("silent")
    except recompute.errors.RegenerationError as error:
        print("Lying" in str(error))
"""


@pytest.mark.slow
def test_the_debug_switch_watches_a_whole_process():
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    environment = {**os.environ, "RECOMPUTE_VERIFY": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", LIAR]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_watching_ends_with_verify():
    with pytest.raises(RegenerationError):
        recompute.verify(liars(), numbers(3, 4), policy=TAPED)
    model = liars()
    recompute.apply(model, TAPED)
    model(numbers(3, 4)).sum().backward()  # wrong, and not looked at


def test_a_wrong_gradient_is_named(monkeypatch):
    stand_in(monkeypatch, lambda y, x, weight: Wrong.apply(y))
    with pytest.raises(GradientMismatch) as caught:
        recompute.verify(norms(), numbers(2, 3, HIDDEN), policy=KERNELS)
    said = str(caught.value)
    assert said.startswith("under policy unnamed:\n3 of 5 gradients differ from those without it\n  0.weight: ")
    assert f"0.weight: shape ({HIDDEN}, {HIDDEN}), {HIDDEN**2} of {HIDDEN**2} elements differ, by at most " in said
    assert "; relative error 1.0e-02" in said
    assert "1.weight: " in said
    assert "2.weight" not in said
    assert "expected at most twice the rounding error; of all gradients together" in said


def test_a_wrong_output_is_named_and_so_is_a_missing_gradient(monkeypatch):
    stand_in(monkeypatch, lambda y, x, weight: y.detach() * 2)
    with pytest.raises(GradientMismatch) as caught:
        recompute.verify(norms(), numbers(3, HIDDEN), policy=KERNELS)
    assert "1 of 1 outputs differ from those without it\n  0: shape (3, 16), 48 of 48 elements" in str(caught.value)
    assert "  1.weight: missing under the policy\n" in str(caught.value)


def test_only_the_first_that_differ_are_listed(monkeypatch):
    stand_in(monkeypatch, lambda y, x, weight: Wrong.apply(y))
    with pytest.raises(GradientMismatch, match="and 15 more") as caught:
        recompute.verify(decoder(), token_ids(), policy="kernel")
    assert len(str(caught.value).splitlines()) == 1 + 1 + 5 + 1 + 1


def test_the_gradient_of_an_input_counts(monkeypatch):
    model = norms().requires_grad_(False)
    inputs = numbers(3, HIDDEN).requires_grad_()
    assert recompute.verify(model, inputs, policy=KERNELS).gradients == 1
    stand_in(monkeypatch, lambda y, x, weight: Wrong.apply(y))
    with pytest.raises(GradientMismatch, match="1 of 1 gradients differ from those without it\n  input 0: "):
        recompute.verify(model, inputs, policy=KERNELS)
    assert inputs.grad is None


def test_buffers_and_random_states_count(monkeypatch):
    model = nn.Sequential(nn.BatchNorm1d(HIDDEN), TinyRMSNorm())

    def counts_twice(y, *_):
        model[0].num_batches_tracked.add_(1)
        return y

    def draws(y, *_):
        torch.rand(1)
        return y

    with monkeypatch.context() as patch:
        stand_in(patch, counts_twice)
        with pytest.raises(GradientMismatch, match="1 of 3 buffers differ"):
            recompute.verify(model, numbers(3, HIDDEN), policy=KERNELS)
    assert model[0].num_batches_tracked == 0
    stand_in(monkeypatch, draws)
    with pytest.raises(GradientMismatch, match="random generators end in another state"):
        recompute.verify(model, numbers(3, HIDDEN), policy=KERNELS)


class Keyworded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y=None, *, parts=None):
        z = self.layer(x if y is None else x * y).tanh()
        return SimpleNamespace(loss=z.sum(), logits=z) if parts is None else {"z": z, "parts": [z * parts["p"], 3]}


@pytest.mark.parametrize(
    ("batch", "gradients"),
    [
        (numbers(2, 4), 2),
        ((numbers(2, 4).requires_grad_(), numbers(2, 4)), 3),
        ({"x": numbers(2, 4), "parts": {"p": numbers(2, 4).requires_grad_()}}, 3),
    ],
)
def test_batches_are_mappings_tuples_or_an_argument(batch, gradients):
    found = recompute.verify(Keyworded(), batch, policy=rules(rule("Keyworded")))
    assert (found.bitwise, found.gradients) == (True, gradients)


def test_a_tensor_given_twice_is_one_tensor():
    class Same(Keyworded):
        def forward(self, x, y):
            assert x is y
            return super().forward(x, y)

    inputs = numbers(2, 4).requires_grad_()
    assert recompute.verify(Same(), (inputs, inputs), policy=rules(rule("Same"))).bitwise


@pytest.mark.parametrize(
    ("gives", "loss", "gradients"),
    [
        (lambda one, other: {"one": one, "others": [other]}, None, 4),
        (lambda one, other: {"one": one, "others": [other]}, lambda output: output["one"].sum(), 2),
        (lambda one, other: SimpleNamespace(loss=one.sum(), logits=other), None, 2),
    ],
    ids=["every output", "a loss that is given", "the output's own"],
)
def test_backward_starts_from_the_loss_or_from_every_output(gives, loss, gradients):
    parts = {"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)}
    model = module_of(lambda self, x: gives(self.one(x).tanh(), self.other(x).tanh()), **parts)
    found = recompute.verify(model, numbers(2, 4), policy=rules(rule("Body")), loss=loss)
    assert (found.bitwise, found.gradients) == (True, gradients)


def test_a_model_without_a_gradient_is_refused():
    with pytest.raises(ModelError, match="nothing in the model's output requires a gradient"):
        recompute.verify(norms().requires_grad_(False), numbers(2, HIDDEN), policy="none")


def test_a_run_that_changes_parameters_is_refused():
    model = norms()
    model[2].bias.register_post_accumulate_grad_hook(_step)
    with pytest.raises(MutationError, match=r"^2\.bias, a tensor .* is changed by forward or backward"):
        recompute.verify(model, numbers(2, HIDDEN), policy="none")


@torch.no_grad()
def _step(parameter):
    parameter -= 0.1 * parameter.grad


def test_what_apply_refuses_verify_refuses_before_anything_runs():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].forward = None  # never called
    with pytest.raises(PolicyError, match="did you mean 'hook'"):
        recompute.verify(model, numbers(2, 4), policy="hok")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got function"):
        recompute.verify(lambda x: x, numbers(2, 4), policy="hook")
    governed = decoder()
    with recompute.apply(governed, "full"), pytest.raises(errors.AlreadyAppliedError):
        recompute.verify(governed.layers[0], token_ids(), policy="none")


def test_rounding_that_cannot_be_measured_is_said_so():
    class OnlyFloat32(nn.Module):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise RuntimeError("no kernel for Double")
            return x

    model = nn.Sequential(norms(), OnlyFloat32())
    with pytest.raises(errors.UnsupportedError, match=r"torch\.float64, which fails: no kernel for Double"):
        recompute.verify(model, numbers(8, HIDDEN), policy=KERNELS)


def test_the_wider_dtype_is_that_in_which_rounding_shows():
    assert wider_dtype(norms()) is torch.float64
    assert wider_dtype(norms().bfloat16()) is torch.float32
    with torch.autocast("cpu"):
        assert wider_dtype(norms()) is torch.float32
        assert not recompute.verify(norms(), numbers(64, HIDDEN), policy=KERNELS).bitwise


def test_sparse_shared_and_unused_parameters_compare():
    one = nn.Linear(4, 4)
    parts = {"embedding": nn.Embedding(8, 4, sparse=True), "unused": nn.Linear(4, 4), "one": one, "other": one}
    model = module_of(lambda self, ids: self.other(self.one(self.embedding(ids)).relu()), **parts)
    found = recompute.verify(model, torch.tensor([[1, 2, 2]]), policy=rules(rule("Body")))
    assert (found.bitwise, found.gradients) == (True, 3)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([math.nan, 1]), torch.tensor([math.nan, 1]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(2), torch.zeros(1), False),
        (torch.zeros(()), torch.zeros(()), True),
        (numbers(2, 3).t(), numbers(2, 3).t().contiguous(), True),
        (None, torch.zeros(1), False),
        (None, None, True),
    ],
)
def test_same_bits(one, other, same):
    assert same_bits(one, other) is same


def test_relative_error_is_of_all_tensors_together():
    assert relative_error([torch.tensor([3.0]), torch.tensor([0.0])], [torch.tensor([3.0]), torch.tensor([4.0])]) == 0.8
    assert relative_error([torch.zeros(2)], [torch.zeros(2)]) == 0
    assert relative_error([torch.ones(2)], [torch.zeros(2)]) == math.inf


def test_runs_are_comparable_where_a_library_has_frozen_the_flags_of_cudnn(monkeypatch):
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)  # as torch.testing does
    torch._C._set_cudnn_benchmark(True)
    try:
        with deterministic(on_cuda=True):
            assert not torch.backends.cudnn.benchmark
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark
    finally:
        torch._C._set_cudnn_benchmark(False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["full", "hook", "elementwise", "kernel", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_presets_verify_on_cuda(policy, dtype):
    model = models.make("llama", dtype, attention_dropout=0.1).cuda()
    batch = {name: tensor.cuda() for name, tensor in models.batch("llama").items()}
    found = recompute.verify(model, batch, policy=policy)
    assert found.bitwise == (policy not in ("kernel", "auto"))
    assert found.dropped_tensors > 0
    assert not torch.are_deterministic_algorithms_enabled()
