"""``compress``: what tolerates rounding is held in 8 bits; everything else as it is, and outputs are not touched."""

import copy
import gc

import pytest
import torch
from engine_testing import Boom, bits, function_of, holding, loss_of, module_of, no_garbage_collection, outcome
from models import batch as batch_of
from models import make
from tiers import by_default, one_in
from torch import nn
from torch.nn import functional as F

import recompute
from recompute import load_policy
from recompute.counters import step_memory
from recompute.diagnostics.comparing_runs import COMPRESSION_TOLERANCE, relative_error
from recompute.engine.compression import CompressedTensor
from recompute.errors import GradientMismatch, MutationError
from recompute.kernels.blockwise_8bit import Blockwise8Bit

SIZE = 64
NBYTES = 4 * SIZE * SIZE
CODES_NBYTES = SIZE * SIZE * (1 + 4 / 128)
WAYS = {
    "compress": {"action": "compress"},
    "recompute": {"action": "recompute", "via": "hook", "compress": True},
    "compress and offload": {"action": "compress", "offload": True, "min_bytes": 0},
    "recompute and offload": {"action": "recompute", "via": "hook", "compress": True, "offload": True, "min_bytes": 0},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def rules(match="inside", **way):
    return {"rules": [{"match": match, **(way or WAYS["compress"])}]}


def square(grad=True):
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), requires_grad=grad)


class MLP(nn.Module):
    """A gated MLP with a norm before it."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.norm = nn.RMSNorm(SIZE)
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=SIZE**-0.5, generator=generator)

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


def policed(**way):
    """A model, and its handle under a rule."""
    model = module_of(lambda self, x: self.inside(x * 1.0), inside=MLP())
    return model, recompute.apply(model, rules(**way))


def fates(handle):
    """What the tensors that were held in 8 bits were made by, and saved by."""
    rows = [line.split() for line in handle.explain(wide=True).splitlines() if "kept in 8 bits" in line]
    return [(row[0], row[1]) for row in rows if row[0].startswith("aten.")]


def compressed(forward, *args, way="compress", **parts):
    """What is held in 8 bits of a module that runs ``forward``, which must run backward as well."""
    model = holding(forward, **parts)
    with recompute.apply(model, rules(**WAYS[way])) as handle:
        loss_of(model(*(args or (square(),)))).backward()
        found = fates(handle)
        assert handle.stats().compressed_tensors == len(found)
        return found


GATES = [("aten.mm", "aten.silu"), ("aten.mm", "aten.mul")]
IN_8_BITS = {
    "compress": [
        *(("aten.mul", "aten.mul"), ("aten.mul", "aten.mm")),  # the first for the gradient of the norm's weight
        *(GATES[0], ("aten.silu", "aten.mul"), GATES[1], ("aten.mul", "aten.mm")),
    ],
    "recompute": GATES,
}


@pytest.mark.parametrize("way", IN_8_BITS)
def test_gates_products_and_inputs_of_gemms_are_held_in_8_bits_but_for_what_comes_back_by_running_ops_again(way):
    model, handle = policed(**WAYS[way])
    loss_of(model(square())).backward()
    assert fates(handle) == IN_8_BITS[way]


def attention(self, x):
    weights = self.weight, self.weight.t(), self.weight
    q, k, v = ((x @ weight).view(1, 1, SIZE, SIZE) for weight in weights)
    return F.scaled_dot_product_attention(q, k, v).view(SIZE, SIZE) @ self.weight


NEVER = {
    "attention": attention,
    "what a layer norm reads": lambda self, x: F.layer_norm(x @ x, (SIZE,)),
    "what a norm squares": lambda self, x: (h := x @ x) * h.pow(2).mean(-1, keepdim=True),
    "what is multiplied by itself": lambda self, x: (h := x @ x) * h,
    "what is divided by": lambda self, x: 1.0 / (x @ x),
    "probabilities": lambda self, x: (x @ x).softmax(-1) * 2.0,
    "what is routed by": lambda self, x: (x @ x).sigmoid() @ x.detach(),
    "what is chosen": lambda self, x: (x @ x).topk(SIZE).values.exp(),
    "masks": lambda self, x: (x @ x).masked_fill((x > 0), 0.0),
    "where to": lambda self, x: (x @ x).relu(),
    "a region's own input": lambda self, x: x @ self.weight,
    "what is kept by name": lambda self, x: recompute.keep(x @ self.weight) @ self.weight,
    "wider numbers": lambda self, x: (x.double() @ self.weight.double()) @ self.weight.double(),
    "small tensors": lambda self, x: (x @ self.weight)[:8].clone() @ self.weight,
}


@pytest.mark.parametrize("way", ["compress", "recompute"])
@pytest.mark.parametrize("what", one_in(2, list(NEVER)))
def test_what_does_not_bear_it_is_held_as_it_is(what, way):
    assert compressed(NEVER[what], way=way, weight=nn.Parameter(square(grad=False))) == []


def test_captured_code_holds_the_codes_that_a_tape_holds():
    def steps(*, capture):
        model, handle = policed(**WAYS["recompute"], capture=capture)
        found = []
        for _ in range(8):
            before = handle.stats()
            model.zero_grad()
            loss_of(model(square())).backward()
            found.append(([bits(each.grad) for each in model.parameters()], handle.stats() - before))
        return found, handle

    (captured, handle), (taped, _) = steps(capture=True), steps(capture=False)
    assert "1 of 1 run as captured code" in handle.explain()
    for (gradients, counted), (expected, counted_by_tape) in zip(captured, taped, strict=True):
        assert gradients == expected
        for name in ("compressed_tensors", "compressed_nbytes", "codes_nbytes", "kept_nbytes", "eager_nbytes"):
            assert getattr(counted, name) == getattr(counted_by_tape, name)
        assert counted.compressed_tensors == len(GATES)


def test_what_a_custom_function_saves_is_exact():
    saves = function_of(lambda x: x.clone(), lambda gradient, x: gradient / x)

    def forward(self, x):
        h = x @ self.weight
        return saves.apply(h) * (h @ self.weight)  # a GEMM tolerates an h that is off, and the Function does not

    found = compressed(forward, weight=nn.Parameter(square(grad=False)))
    assert found == [("aten.mm", "aten.mul")]


def test_no_norm_runs_again_on_what_is_off():
    """The sum would bear it, but the norm's input comes back by adding it up again."""

    def forward(self, x):
        h = x + self.linear(x.sin())
        return F.layer_norm(h, (SIZE,)).cos()

    assert compressed(forward, way="recompute", linear=nn.Linear(SIZE, SIZE)) == []


def halves(self, x):
    """Views of what is held come back as those views."""
    gate, up = (self.norm(x) @ torch.cat([self.up.weight.t(), self.gate.weight.t()], 1)).chunk(2, dim=-1)
    return x + self.down(F.silu(gate) * up)


WITHIN = {
    "an MLP": MLP,
    "an MLP of halves": lambda: module_of(halves, **dict(MLP().named_children())),
    "dropout": lambda: module_of(
        lambda self, x: self.linear(F.dropout(F.gelu(self.linear(x)), 0.5)), linear=nn.Linear(SIZE, SIZE)
    ),
}


@every_way
@pytest.mark.parametrize("inside", WITHIN.values(), ids=WITHIN)
def test_outputs_and_draws_are_exact_and_gradients_within_the_tolerance(inside, way):
    model, x = module_of(lambda self, x: self.inside(x * 1.0), inside=inside()), square()
    plain, handle = copy.deepcopy(model), recompute.apply(model, rules(**way))
    for _ in range(3):  # the later steps follow the plan of the first
        found, expected = outcome(model, x), outcome(plain, x)
        gradients = [name for name in expected if name.startswith("gradient")]
        exact = found.keys() - gradients
        assert {name: bits(found[name]) for name in exact} == {name: bits(expected[name]) for name in exact}
        errors = [relative_error([found[name]], [expected[name]]) for name in gradients]
        assert 0 < max(errors) <= COMPRESSION_TOLERANCE
    assert handle.stats().compressed_tensors > 0


@every_way
def test_backward_may_run_again_and_gives_the_same_bits(way):
    (model, _), x = policed(**way), square()
    loss = loss_of(model(x))
    first, second = (torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True) for _ in range(2))
    assert [bits(each) for each in first] == [bits(each) for each in second]
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gradients_are_those_of_the_numbers_that_come_back():
    """The only error there is, is the codes': the gradient of a weight is that of the input as it comes back."""
    weight = nn.Parameter(square(grad=False))
    model = holding(lambda self, x: (x @ self.before) @ self.weight, weight=weight, before=square(grad=False).t())
    x = square(grad=False)
    recompute.apply(model, rules())
    gradient = square(grad=False)
    model(x).backward(gradient)
    codec = Blockwise8Bit()
    h = x @ model.inside.before
    codes, scales, error = codec.encode(h)
    assert bits(weight.grad) == bits(codec.decode(codes, scales, h.dtype).t() @ gradient)
    assert 0 < error.item() <= 2**-4


@pytest.mark.parametrize("way", ["compress", "recompute"])
def test_what_is_held_falls_by_what_stats_say(way):
    model, x = module_of(lambda self, x: self.inside(x * 1.0), inside=MLP()), square()
    model(x).sum().backward()

    def held():
        return step_memory(lambda: model(x).sum(), torch.device("cpu")).activation_bytes_held

    exact = held()
    if way == "recompute":
        with recompute.apply(model, rules(action="recompute", via="hook")):
            exact = held()
    with recompute.apply(model, rules(**WAYS[way])) as handle:
        lean = held()
        stats = handle.stats()
    assert stats.compressed_nbytes == stats.compressed_tensors * NBYTES > 0
    assert stats.codes_nbytes == stats.compressed_tensors * CODES_NBYTES
    assert exact - lean == stats.compressed_nbytes - stats.codes_nbytes - 4  # the worst error, a float32
    assert 0 < stats.worst_code_error <= 2**-4


@every_way
def test_memory_is_released_by_reference_count(way):
    model, _ = policed(**way)
    loss_of(model(square())).backward()
    with no_garbage_collection():
        loss = loss_of(model(square()))
        assert any(isinstance(each, CompressedTensor) for each in gc.get_objects())
        del loss
        assert not any(isinstance(each, CompressedTensor) for each in gc.get_objects())


@pytest.mark.slow
def test_an_estimate_knows_of_it():
    batch = {"batch_size": 2, "seq_len": 64}
    config = make("llama")
    rule = {"type": "block", "action": "recompute", "via": "hook", "keep": "gemm"}  # this small, GEMMs are thin
    plain, lossy = (
        recompute.estimate(config, **batch, advise=False, policy={"rules": [{**rule, "compress": compress}]})
        for compress in (False, True)
    )
    assert lossy.peak_bytes < plain.peak_bytes


def test_stats_and_explain_say_what_is_off():
    model, handle = policed(**WAYS["recompute"])
    loss_of(model(square())).backward()
    explained, stats = handle.explain(wide=True), handle.stats()
    assert "cheap ops run again; tensors whose readers tolerate rounding are held in 8 bits" in explained
    assert "compressed in all" in explained
    assert f"Worst error of what comes back from codes: {stats.worst_code_error:.1%} of the largest number" in explained
    assert f"kept in 8 bits {2 * NBYTES:,} bytes" in explained


def test_verify_reports_errors_and_refuses_those_beyond_the_tolerance(monkeypatch):
    model, x = module_of(lambda self, x: self.inside(x * 1.0), inside=MLP()), square(grad=False)
    found = recompute.verify(model, (x,), policy=rules())
    assert not found.bitwise
    assert found.tolerance == COMPRESSION_TOLERANCE
    assert found.compressed_tensors == 6
    assert set(found.errors) >= {name for name, _ in model.named_parameters()}
    assert 0 < max(found.errors.values()) <= COMPRESSION_TOLERANCE
    assert "held in 8 bits: 6 tensors" in str(found)
    decode = Blockwise8Bit.decode
    monkeypatch.setattr(Blockwise8Bit, "decode", lambda *args: decode(*args) * 1.5)
    with pytest.raises(GradientMismatch, match=r"and gradients whose relative error is at most 1\.2e-01"):
        recompute.verify(model, (x,), policy=rules())


FAMILIES_OF_PAGES = ["llama", "gpt2", "gemma2", "gemma3", "phi3", "mixtral", "bert", "vit", "whisper", "t5"]
FAMILIES = by_default(["llama", "gpt2", "gemma2", "phi3", "mixtral", "bert", "vit", "whisper", "t5"], "llama")


@pytest.mark.parametrize("action", ["compress", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_stay_within_the_tolerance(family, action):
    model, batch = make(family), batch_of(family, length=64, size=4)
    # The GEMMs of models this small are thin, and would run again.
    way = {"action": action} if action == "compress" else {**WAYS["recompute"], "keep": "gemm"}
    found = recompute.verify(model, batch, policy={"rules": [{"type": ["block", "*Layer", "*Block"], **way}]})
    assert found.compressed_tensors > 0


@pytest.mark.parametrize("dtype", by_default(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("family", by_default([*FAMILIES_OF_PAGES], "llama"))
def test_gradients_are_off_by_what_the_pages_say(family, dtype):
    kind = getattr(torch, dtype)
    model, batch = make(family, kind).train(), batch_of(family, length=32, size=8)
    batch = {name: value.to(kind) if value.is_floating_point() else value for name, value in batch.items()}
    found = []
    preset = load_policy("compress")  # the GEMMs of models this small are thin, and would run again
    kept = [rule.model_copy(update={"keep": ("gemm",)}) if rule.compress else rule for rule in preset.rules]
    for policy in ("none", preset.model_copy(update={"rules": kept})):
        model.zero_grad()
        with recompute.apply(model, policy):
            torch.manual_seed(0)
            model(**batch).loss.backward()
        found.append([each.grad.double() for each in model.parameters() if each.grad is not None])
    exact, lossy = found
    norms = torch.stack([each.norm() for each in exact])
    errors = torch.stack([(one - other).norm() for one, other in zip(lossy, exact, strict=True)])
    assert 0 < errors.norm() / norms.norm() < 0.035
    worst = (errors / norms)[norms > 1e-6].max()  # what is 0 but for rounding is off by anything
    assert 0.015 < worst < 0.065


def test_a_tensor_that_changes_after_it_was_saved_is_held_as_it_was():
    """Plain PyTorch refuses this. The codes are of what autograd saved."""

    def forward(self, x):
        hidden = x @ self.weight
        return hidden @ self.weight, hidden

    weight = nn.Parameter(square(grad=False))
    model, x = holding(forward, weight=weight), square()
    recompute.apply(model, rules())
    result, hidden = model(x)
    with torch.no_grad():
        hidden.mul_(2)
    (changed,) = torch.autograd.grad(result.sum(), weight)
    (expected,) = torch.autograd.grad(model(x)[0].sum(), weight)
    assert bits(changed) == bits(expected)


def test_a_weight_that_changes_before_backward_is_refused():
    model, _ = policed()
    loss = loss_of(model(square()))
    with torch.no_grad():
        model.inside.down.weight.mul_(2)
    with pytest.raises(MutationError, match="modified in place"):
        loss.backward()


def test_an_error_in_forward_leaves_nothing_behind():
    fails = [Boom()]

    def forward(self, x):
        hidden = self.linear(F.gelu(self.linear(x)))
        if fails:
            raise fails.pop()
        return hidden

    model = holding(forward, linear=nn.Linear(SIZE, SIZE))
    recompute.apply(model, rules())
    with pytest.raises(Boom):
        model(square())
    gc.collect()
    assert not any(isinstance(each, CompressedTensor) for each in gc.get_objects())
    loss_of(model(square())).backward()


def test_inside_of_a_checkpoint_nothing_is_compressed():
    model = module_of(lambda self, x: self.inside(x * 1.0), inside=MLP())
    plain = copy.deepcopy(model)
    policy = {"rules": [{"match": "inside", "action": "checkpoint"}, {"match": "inside.*", "action": "compress"}]}
    with recompute.apply(model, policy) as handle:
        x = square()
        loss_of(model(x)).backward()
        loss_of(plain(x)).backward()
        assert handle.stats().compressed_tensors == 0
    assert [bits(each.grad) for each in model.parameters()] == [bits(each.grad) for each in plain.parameters()]
