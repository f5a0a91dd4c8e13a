"""Frozen weights of codes: torchao's wrap them, and a captured region runs the ops on them; bitsandbytes' are them."""

import dataclasses
import gc
import weakref

import pytest
import torch
from capture_testing import STEPS_TO_SETTLE, Around, Twins, body, tokens, train
from engine_testing import function_of
from tiers import slow
from torch import nn

import recompute
from recompute.engine.tape.functions import FunctionOp
from recompute.engine.tape.op_arguments import generators_of

quantization = pytest.importorskip("torchao.quantization")
float8 = pytest.importorskip("torchao.float8")
nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
SIZE = 128


class Nf4Linear(nn.Linear):
    def forward(self, x):
        return nf4.linear_nf4(x, self.weight)


def adapted(kind):
    """A frozen Linear beside a trained product of two thin ones, with a norm before, as in a layer."""

    def forward(self, x):
        y = self.norm(x)
        return x + nn.functional.silu(self.base(y) + self.up(self.down(y)))

    torch.manual_seed(0)
    base, down, up = (nn.Linear(*sizes, bias=False) for sizes in ((SIZE, SIZE), (SIZE, 2), (2, SIZE)))
    module = body(forward, norm=nn.RMSNorm(SIZE), base=base.requires_grad_(False), down=down, up=up)
    if kind == "NF4":
        module.base.__class__ = Nf4Linear
        module.base.weight = nn.Parameter(nf4.to_nf4(module.base.weight.detach(), 64, 8), requires_grad=False)
    elif kind == "Linear8bitLt":
        layers = pytest.importorskip("bitsandbytes.nn")
        weight = layers.Int8Params(module.base.weight.detach(), requires_grad=False)
        module.base = layers.Linear8bitLt(SIZE, SIZE, bias=False, has_fp16_weights=False)
        module.base.weight = weight.to("cpu")
    elif kind:
        options = {} if kind == "Int8WeightOnlyConfig" else {"weight_dtype": torch.int4}
        config = getattr(quantization, kind)(**options)
        quantization.quantize_(module, config, lambda _, name: name == "base")
    return module


class Pair:
    """An adapted Linear in plain eager, and under a rule. Codes have no copies or views to compare."""

    def __init__(self, kind, action="recompute"):
        self.plain, self.under = (Around(adapted(kind), before=nn.Linear(SIZE, SIZE)) for _ in range(2))
        self.under.before.load_state_dict(self.plain.before.state_dict())
        self.handle = recompute.apply(self.under, {"rules": [{"match": "inside", "action": action}]})
        torch.manual_seed(1)
        self.x = torch.randn(SIZE // 4, SIZE)
        for _ in range(STEPS_TO_SETTLE):
            self.step()
        assert "inside: 1 of 1 run as captured code" in self.handle.explain()

    def step(self):
        """A step of both, which give the same bits; returns the output."""
        outputs, gradients = [], []
        for module in (self.plain, self.under):
            module.zero_grad()
            outputs.append(module(self.x))
            outputs[-1].square().sum().backward()
            gradients.append([each.grad for each in module.parameters() if each.requires_grad])
        assert torch.equal(*outputs)
        assert all(map(torch.equal, *gradients))
        return outputs[0].detach()

    def held_nbytes(self):
        """What is held of what the region has made."""
        plan = self.handle.plans()["inside"]
        return sum(plan.facts[number].nbytes for number in plan.kept if plan.facts[number].step is not None)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "NF4", *slow("IntxWeightOnlyConfig")])
def test_it_is_captured_and_holds_no_weight_that_was_made_of_codes(kind):
    assert Pair(kind).held_nbytes() == Pair("").held_nbytes()


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", *slow("NF4")])
def test_a_checkpoint_is_captured(kind):
    Pair(kind, "checkpoint")


def test_linears_of_8_bits_that_move_their_codes_are_captured_and_freed():
    """Their forward assigns attributes, and puts the codes in the place of the weight."""
    pair = Pair("Linear8bitLt")
    assert pair.held_nbytes() > 0
    codes = weakref.ref(pair.under.inside.base.state.CB)
    del pair
    for _ in range(2):  # torch's guards hide from the first what they hold
        gc.collect()
    assert codes() is None


def test_other_codes_are_seen():
    pair = Pair("Int8WeightOnlyConfig")
    before = pair.step()
    for module in (pair.plain, pair.under):
        module.inside.base.weight.qdata.neg_()
    assert not torch.equal(before, pair.step())


def test_a_captured_model_goes_to_another_dtype():
    """torch swaps such weights then, and none that has weak references."""
    pair = Pair("Int8WeightOnlyConfig")
    for module in (pair.plain, pair.under):
        module.bfloat16()
    pair.x = pair.x.bfloat16()
    assert pair.step().dtype is torch.bfloat16


def test_scales_that_change_before_backward_are_refused():
    pair = Pair("Int8WeightOnlyConfig")
    loss = pair.under(pair.x).square().sum()
    pair.under.inside.base.weight.scale.neg_()
    with pytest.raises(RuntimeError, match="was modified in place"):
        loss.backward()


def test_ops_of_bitsandbytes_draw_no_random_numbers():
    """Where no input takes a gradient, no Function of its stands around its ops."""
    pytest.importorskip("bitsandbytes")
    assert generators_of(torch.ops.bitsandbytes.dequantize_4bit.default) == []


def mlp(self, x):
    return x + self.down(nn.functional.silu(self.gate(x.sin())) * self.up(x.sin()))


def around(linear, **options):
    torch.manual_seed(0)
    gate, up, down = (linear(*sizes, **options) for sizes in ((32, 64), (32, 64), (64, 32)))
    return Around(body(mlp, gate=gate, up=up, down=down).bfloat16())


def twins(recipe, action):
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    module = float8.convert_to_float8_training(around(nn.Linear), config=config)
    return Twins(module, {"rules": [{"match": "inside", "action": action}]}).settle(
        train(tokens(4, 32, dtype=torch.bfloat16))
    )


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("recipe", ["tensorwise", *slow("rowwise", "rowwise_with_gw_hp")])
def test_its_casts_are_calls_of_the_program(recipe, action):
    found = twins(recipe, action)
    (region,) = found.regions
    plan = region.tape.statistics.plan
    ops = [step.op for step in plan.steps]
    assert not any(isinstance(op, FunctionOp) for op in ops)
    assert ops.count(torch.ops.aten.clamp.default) == 6 * 2  # casts, each with a clamp of a scale and one of numbers


def test_equal_casts_run_once():
    (region,) = twins("tensorwise", "recompute").regions
    (program,) = [program for graph in region.state.graphs.all if (program := graph.program(region)) is not None]
    assert program.forward.source.count("aten_clamp") == 5 * 2  # two Linears read the same
    assert program.backward.source.count("aten_clamp") == 8 * 2  # and two GEMMs the same gradient


def to_nvfp4(x):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    scale = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
    return nvfp4.NVFP4Tensor.to_nvfp4(x.contiguous(), per_tensor_scale=scale)


Nvfp4Product = function_of(
    lambda x, w: torch.mm(to_nvfp4(x), to_nvfp4(w).t()),
    lambda gradient, x, w: (
        torch.mm(to_nvfp4(gradient), to_nvfp4(w.t()).t()),
        torch.mm(to_nvfp4(gradient.t()), to_nvfp4(x.t()).t()),
    ),
)


class Nvfp4Linear(nn.Linear):
    """torchao's own, which trains, has kernels for GPUs alone. This one casts the same three products."""

    def forward(self, x):
        return Nvfp4Product.apply(x, self.weight)


def of_blocks(kind):
    if kind == "NVFP4":
        return around(Nvfp4Linear, bias=False)
    mxfp8 = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    preference = mxfp8.KernelPreference.EMULATED
    return around(mxfp8.MXFP8Linear, kernel_preference=preference, wgrad_with_hp="hp" in kind)


def descend(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("kind", ["MXFP8", "NVFP4", *slow("MXFP8, wgrad_with_hp")])
def test_casts_to_blocks_with_scales_are_captured(kind, action):
    """A GPU without Blackwell's Tensor Cores, or a CPU, multiplies what the codes stand for."""
    found = Twins(of_blocks(kind), {"rules": [{"match": "inside", "action": action}]})
    step = train(tokens(32, 32, dtype=torch.bfloat16))
    for _ in range(8):
        found.step(step)
        found.both(descend)
    assert found.runs_code(step) == 1, found.why_not
