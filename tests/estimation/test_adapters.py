"""Estimates of models that PEFT adapts, whose base is frozen and may be quantized, as PEFT and bitsandbytes have it."""

import json
import sys

import models
import peft
import pytest
import torch
import transformers
from test_cli import recompute as command
from test_cli_estimate import printed
from tiers import slow
from torch import Tensor, nn

import recompute
from recompute import counters
from recompute.engine.wrapper_tensors import nbytes_held
from recompute.errors import EstimateError, ModelError
from recompute.estimation import model_estimator
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.factories import make
from recompute.estimation.model_and_batch import fake_model_and_batch
from recompute.estimation.model_estimator import ModelEstimator
from recompute.estimation.quantized_linear import QuantizedLinear

CONFIG = transformers.LlamaConfig(**{**models.SHAPE, "hidden_size": 128, "intermediate_size": 320, "head_dim": 32})
LENGTH = 32
SAME = {"advise": False, "seq_len": LENGTH, "lora": 4, "base": "nf4"}
BATCH = dict.fromkeys(("input_ids", "labels"), torch.zeros(2, LENGTH, dtype=torch.long))


def estimate(**options):
    return recompute.estimate(CONFIG, **{"advise": False, "seq_len": LENGTH, "lora": 4, **options})


@pytest.fixture(scope="module")
def plain():
    return estimate()


def test_a_frozen_base_has_neither_gradients_nor_states():
    model = peft.get_peft_model(models.make("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    found = recompute.estimate(models.make("llama").config, lora=4, advise=False, seq_len=LENGTH)
    static = found.static_bytes
    assert (static.gradients, static.optimizer) == (2 * trained, 4 * trained)
    assert static.parameters == 2 * sum(each.numel() for each in model.parameters())
    assert found.settings.adapters == "LoRA of rank 4 on all-linear"
    assert f"{sum(each.numel() for each in model.parameters()):,} parameters" in found.settings.model


IN, OUT = 128, 192
NUMBERS = IN * OUT


@pytest.mark.parametrize(
    ("base", "nbytes"),
    [
        ("nf4", NUMBERS // 2 + NUMBERS // 64 * 4 + 16 * 4),
        ("nf4-double", NUMBERS // 2 + NUMBERS // 64 + 2 * 4 + 16 * 4 + 256 * 4 + 4),
        ("int8", NUMBERS + OUT * 4),
        ("float8", NUMBERS + OUT * 4),
    ],
)
def test_a_quantized_linear_has_its_codes_and_scales(base, nbytes):
    linear = QuantizedLinear((IN, OUT), None, base, torch.float32, "cpu")
    assert bytes_of_model(linear) == nbytes
    x = torch.randn(2, 3, IN, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_embeddings_norms_and_head_are_not_quantized(plain):
    packed = estimate(base="int8").static_bytes
    layer = sum(each.numel() for each in transformers.LlamaForCausalLM(CONFIG).model.layers.parameters())
    norms = 2 * CONFIG.num_hidden_layers * CONFIG.hidden_size
    assert plain.static_bytes.parameters - packed.parameters == layer - norms


@pytest.mark.parametrize(("base", "held_in_blocks"), [*slow(("bf16", 0)), ("nf4", 0), ("float8", 1)])
def test_a_weight_that_is_made_is_held_where_its_library_holds_it(plain, base, held_in_blocks):
    """torchao leaves a float8 weight's product to autograd, which holds the weight that was made for it."""
    of_mlp = 3 * CONFIG.hidden_size * CONFIG.intermediate_size * 2
    found = estimate(base=base)
    more = found.activation_bytes_per_layer - plain.activation_bytes_per_layer
    assert (more > of_mlp) == bool(held_in_blocks)
    under = estimate(base=base, policy="elementwise")
    assert under.activation_bytes_per_layer < plain.activation_bytes_per_layer


def test_trained_in_float32_beside_a_base_of_bfloat16_as_peft_makes_them_by_default(plain):
    found = estimate(dtype="bfloat16-autocast", base="bf16").static_bytes
    all_bf16 = plain.static_bytes
    assert found.gradients == 2 * all_bf16.gradients
    assert found.parameters == all_bf16.parameters + all_bf16.gradients


def test_any_adapter_of_peft_is_estimated():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True)
    found = estimate(lora=config)
    head = CONFIG.hidden_size * CONFIG.vocab_size
    assert found.static_bytes.gradients > 2 * head
    assert found.settings.adapters == "Lora adapters"


def test_layers_gather_and_reduce_what_they_have():
    """Of a frozen base that FSDP2 shards, codes are gathered, and adapters' gradients alone are reduced."""
    buffers = estimate(base="nf4", sharding="fsdp2", devices=2).static_bytes.buffers
    plain = estimate(sharding="fsdp2", devices=2).static_bytes.buffers
    assert buffers["gradients to reduce"].nbytes == plain["gradients to reduce"].nbytes
    assert buffers["gradients to reduce"].nbytes < buffers["gathered parameters"].nbytes / 4
    assert buffers["gathered parameters"].nbytes < plain["gathered parameters"].nbytes / 2


@pytest.fixture
def config(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    return tmp_path / "config.json"


LORA = ("--lora", 4, "--seq-len", LENGTH)


def test_the_command_says_what_it_adapted(config, monkeypatch):
    monkeypatch.setattr(model_estimator, "ADVISED", ())
    code, output = printed("--model", config, *LORA, "--lora-targets", "q_proj,v_proj", "--base", "nf4", "--json")
    assert code == 0, output
    found = json.loads(output)
    assert found["adapters"] == "LoRA of rank 4 on q_proj, v_proj, base nf4"
    assert any("no double quantization" in each for each in found["assumed"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("explain", "elementwise", "--device", "cuda"), "LoRA of rank 4 on all-linear, base nf4\n"),
        *slow((("plan", "--gpu", "rtx4090", "--budget", "50%"), "base_model.model.model.layers.")),
    ],
)
def test_plans_and_explain_know_adapters(arguments, told, config):
    code, output = command(*arguments, "--model", config, *LORA, "--base", "nf4")
    assert code == 0, output
    assert told in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimate", "--base", "nf4"), "recompute: base 'nf4' has an effect only with adapters"),
        (("estimate", *LORA, "--base", "nf5"), "base: expected one of bfloat16, int8, nf4, nf4-double, float8; found"),
        (("estimate", *LORA, "--lora-targets", "q_porj"), "names of modules of LlamaForCausalLM, as in q_proj,v_proj"),
        (("estimate", *LORA, "--lora-targets", "q_porj"), "found 'q_porj' (did you mean 'q_proj'?)"),
        (("plan", *LORA, "--base", "nf4", "--budget", "1GiB"), "--base nf4 is calculated for a GPU that --gpu names"),
        (("explain", "full", "--base", "int8"), "recompute: base 'int8' has an effect only with adapters"),
    ],
)
def test_mistakes_of_adapters_are_told(arguments, message, config):
    code, output = command(*arguments, "--model", config)
    assert (code, message in output) == (2, True), output


@pytest.mark.parametrize("lora", [0, True, 2.5, "q_proj"])
def test_what_is_no_rank_is_told(lora):
    with pytest.raises(EstimateError, match="lora: expected a rank, as 16, or a configuration of PEFT's; found"):
        estimate(lora=lora)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'torch-recompute\[peft\]'"):
        estimate()


def quantized_by_bitsandbytes(model, base):
    """The model with the Linears that ``BitsAndBytesConfig`` has, whose weights it would read from a file."""
    bnb = pytest.importorskip("bitsandbytes")
    from transformers.integrations import bitsandbytes as of_transformers
    from transformers.quantizers.base import get_keys_to_not_convert

    kept, nf4 = get_keys_to_not_convert(model), {"quant_type": "nf4", "compress_statistics": base == "nf4-double"}
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    four |= {"load_in_4bit": True, "bnb_4bit_use_double_quant": base == "nf4-double"}
    config = transformers.BitsAndBytesConfig(**({"load_in_8bit": True} if base == "int8" else four))
    weights = {path: module.weight.detach() for path, module in model.named_modules() if type(module) is nn.Linear}
    of_transformers.replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=config)
    for path, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            module.weight = bnb.nn.Int8Params(weights[path], requires_grad=False, has_fp16_weights=False).to("cpu")
        elif isinstance(module, bnb.nn.Linear4bit):
            module.weight = bnb.nn.Params4bit(weights[path], requires_grad=False, **nf4).to("cpu")
    return model


def bytes_of_model(model):
    """Of all storages that it has: parameters, and the scales that hang on those of bitsandbytes."""
    found = {}
    pending = [*model.parameters(), *model.buffers()]
    for value in pending:  # which grows
        if isinstance(value, Tensor):
            found[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            pending += [getattr(value, name, None) for name in ("quant_state", "SCB")]
        elif type(value).__name__ == "QuantState":
            pending += vars(value).values()
    return sum(found.values())


def quantized_by_torchao(model, base):
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    if "int8" in base:
        quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    for module in model.model.modules():
        if "nf4" in base and isinstance(module, nn.Linear):
            module.weight = nn.Parameter(to_nf4(module.weight.detach(), 64, 64), requires_grad=False)
    return model


def adapted_for_real(base):
    model = transformers.LlamaForCausalLM._from_config(CONFIG, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    quantized = quantized_by_torchao if "torchao" in base else quantized_by_bitsandbytes
    real = peft.get_peft_model(quantized(model, base), config, autocast_adapter_dtype=False)
    for each in real.parameters():  # of codes of 8 bits, PEFT makes float32 adapters
        each.data = each.data.bfloat16() if each.requires_grad else each.data
    return real.train()


@pytest.mark.parametrize("base", ["nf4", "nf4-double", "int8"])
def test_static_bytes_are_what_peft_and_bitsandbytes_allocate(base):
    real, found = adapted_for_real(base), estimate(base=base, batch_size=2)
    static = found.static_bytes
    assert static.parameters + static.buffers["the model's buffers"].nbytes == bytes_of_model(real)
    assert recompute.estimate(real, batch=BATCH, advise=False).peak_bytes == found.peak_bytes


def test_a_factory_may_make_codes_which_are_not_cast():
    made, _ = make(lambda: adapted_for_real("nf4 of torchao"), "mine:made", dtype=torch.float32)
    kinds = {type(each).__name__: each.dtype for each in made.parameters()}
    assert kinds == {"NF4Tensor": torch.bfloat16, "Parameter": torch.float32}


@pytest.mark.parametrize("base", ["nf4", "nf4 of torchao", "int8 of torchao"])
def test_a_loaded_model_takes_what_its_step_takes(base):
    """On the CPU, where both are measured; its nf4 kernel makes no whole weight, as forward on CUDA does."""
    real = adapted_for_real(base)
    real(**BATCH).loss.backward()
    real.zero_grad()
    no_scratch = torch.backends.mkldnn.flags(enabled=False)  # some CPUs' GEMMs have some, which is not the model's
    with no_scratch, counters.memory_trace(torch.device("cpu")) as trace:
        loss = real(**BATCH).loss
        trace.mark("forward")
        loss.backward()
    options = EstimateOptions("bfloat16", "adamw", "none", 1, "full")
    with fake_model_and_batch(real, options, 2, LENGTH, BATCH) as subject:
        estimator = ModelEstimator(subject, None)
        step = estimator.step(None, False)
    held = sum(nbytes_held(each) for each in real.parameters())
    assert "torchao" not in base or estimator.estimate(options, None).static_bytes.parameters == held
    assert sum(step.held.values()) == pytest.approx(trace.held_nbytes["forward"], rel=0.01)
    peak = max(moment.peak_nbytes(lambda gradients: gradients) for moment in step.moments)
    assert peak == pytest.approx(trace.peak_nbytes, rel=0.01)
