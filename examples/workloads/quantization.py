"""Quantized weights, fake quantization and 8-bit optimizers: torchao and bitsandbytes on a small Llama."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from small_models import llama, text
from torch import Tensor, nn
from workload import Run, workload


class Adapted(nn.Module):
    """A Linear that is frozen, quantized perhaps, beside a trained product of two thin ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def linears(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Each Linear of the layers, with the module that has it and its name there."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                yield module, name, child


def adapted_llama(quantize: Callable[[Any], object] | None = None, **changes: Any) -> Any:
    model = llama(**changes).requires_grad_(False)
    for parent, name, linear in linears(model):
        setattr(parent, name, Adapted(linear))
    if quantize is not None:
        quantize(model)
    return model


def is_base(module: nn.Module, name: str) -> bool:
    return name.endswith(".base")


def is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def fit(run: Run, model: Any, optimizer: Callable[[Any], Any] | None = None) -> None:
    run.govern(model)
    run.train(model, lambda: model(**text()).loss, None if optimizer is None else optimizer(model.parameters()))


def quantized(kind: str, *arguments: Any, **options: Any) -> Callable[[Any], object]:
    """Quantizes what is frozen by one of torchao's configurations."""
    import torchao.quantization

    config = getattr(torchao.quantization, kind)(*arguments, **options)
    return lambda model: torchao.quantization.quantize_(model, config, is_base)


@workload("torchao", "int8 weights beside LoRA")
def int8_weights(run: Run) -> None:
    fit(run, adapted_llama(quantized("Int8WeightOnlyConfig")))


@workload("torchao", "int8 weights by groups beside LoRA")
def int8_groups(run: Run) -> None:
    fit(run, adapted_llama(quantized("IntxWeightOnlyConfig", weight_dtype=torch.int8)))


@workload("torchao", "int4 weights by groups beside LoRA")
def int4_groups(run: Run) -> None:
    from torchao.quantization.granularity import PerGroup

    fit(run, adapted_llama(quantized("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32))))


@workload("torchao", "int8 weights and activations beside LoRA")
def int8_dynamic(run: Run) -> None:
    fit(run, adapted_llama(quantized("Int8DynamicActivationInt8WeightConfig")))


@workload("torchao", "float8 weights beside LoRA")
def float8_weights(run: Run) -> None:
    fit(run, adapted_llama(quantized("Float8WeightOnlyConfig")))


@workload("torchao", "NF4 weights beside LoRA")
def nf4_weights(run: Run) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class NF4Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return linear_nf4(x, self.weight)

    def quantize(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Adapted):
                module.base.__class__ = NF4Linear
                module.base.weight = nn.Parameter(to_nf4(module.base.weight.detach(), 64, 8), requires_grad=False)

    fit(run, adapted_llama(quantize, hidden_size=128, intermediate_size=256))


@workload("torchao", "int8 weights under PEFT's LoRA", "peft")
def int8_weights_peft(run: Run) -> None:
    import peft
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model, Int8WeightOnlyConfig(), is_linear)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    fit(run, peft.get_peft_model(model, config))


def uncompiled() -> Any:
    """torchao's optimizers compile each parameter's step, which takes 20 s of a CPU and is not what is compared."""
    return patch.object(torch, "compile", lambda function, **_: function)


def quantization_aware(activations: Any, weights: Any) -> Any:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = llama()
    config = QATConfig(activation_config=activations, weight_config=weights, step="prepare")
    quantize_(model, config, is_linear)
    return model


@workload("torchao", "quantization-aware training, int8 and int4")
def qat_int(run: Run) -> None:
    from torchao.quantization.qat import IntxFakeQuantizeConfig

    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    fit(run, quantization_aware(activations, IntxFakeQuantizeConfig(torch.int4, group_size=32)))


@workload("torchao", "quantization-aware training, float8")
def qat_float8(run: Run) -> None:
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.qat import Float8FakeQuantizeConfig

    each = Float8FakeQuantizeConfig(torch.float8_e4m3fn, PerRow())
    fit(run, quantization_aware(each, each))


@workload("torchao", "float8 training (emulated)")
def float8_training(run: Run) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = llama()
    fit(run, convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=is_linear))


@workload("torchao", "int8 training, weights alone")
def int8_training(run: Run) -> None:
    from torchao.optim import _AdamW
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    model = llama()
    quantize_(model, int8_weight_only_quantized_training(), is_linear)
    with uncompiled():
        fit(run, model, lambda parameters: _AdamW(parameters, lr=1e-3))


@workload("torchao", "int8 mixed-precision training")
def int8_mixed(run: Run) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    model = llama()
    quantize_(model, int8_mixed_precision_training(), is_linear)
    fit(run, model)


def define_optimizer(package: str, module: str, kind: str) -> None:
    @workload(package, f"optimizer {kind}")
    def train(run: Run) -> None:
        optimizer = getattr(importlib.import_module(module), kind)
        with uncompiled():
            fit(run, llama(), lambda parameters: optimizer(parameters, lr=1e-3))


for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
    define_optimizer("torchao", "torchao.optim", kind)
for kind in ("AdamW8bit", "Lion8bit", "AdEMAMix8bit", "PagedAdamW8bit"):
    define_optimizer("bitsandbytes", "bitsandbytes.optim", kind)


def bits4(kind: str, **options: Any) -> Callable[[Any], object]:
    """Replaces what is frozen by bitsandbytes' Linears of 4 bits."""
    import bitsandbytes

    def quantize(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Adapted):
                old = module.base
                new = bitsandbytes.nn.Linear4bit(
                    old.in_features,
                    old.out_features,
                    bias=False,
                    quant_type=kind,
                    compute_dtype=torch.float32,
                    **options,
                )
                new.weight = bitsandbytes.nn.Params4bit(
                    old.weight.data, requires_grad=False, quant_type=kind, compress_statistics=bool(options)
                )
                module.base = new.to("cpu")

    return quantize


@workload("bitsandbytes", "NF4 weights beside LoRA")
def nf4(run: Run) -> None:
    fit(run, adapted_llama(bits4("nf4")))


@workload("bitsandbytes", "NF4 weights with double quantization")
def nf4_double(run: Run) -> None:
    fit(run, adapted_llama(bits4("nf4", compress_statistics=True)))


@workload("bitsandbytes", "FP4 weights beside LoRA")
def fp4(run: Run) -> None:
    fit(run, adapted_llama(bits4("fp4")))


@workload("bitsandbytes", "int8 weights beside LoRA")
def int8(run: Run) -> None:
    import bitsandbytes

    def quantize(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Adapted):
                old = module.base
                new = bitsandbytes.nn.Linear8bitLt(
                    old.in_features, old.out_features, bias=False, has_fp16_weights=False, threshold=6.0
                )
                new.weight = bitsandbytes.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
                module.base = new.to("cpu")

    fit(run, adapted_llama(quantize))


@workload("bitsandbytes", "QLoRA under autocast", "peft")
def qlora(run: Run) -> None:
    import peft

    model = llama()
    import bitsandbytes

    for parent, name, old in linears(model):
        new = bitsandbytes.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16
        )
        new.weight = bitsandbytes.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        setattr(parent, name, new.to("cpu"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=0.05)
    model = run.govern(peft.get_peft_model(model, config))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**text()).loss

    run.train(model, loss)


@workload("bitsandbytes", "StableEmbedding")
def stable_embedding(run: Run) -> None:
    import bitsandbytes

    model = llama()
    model.model.embed_tokens = bitsandbytes.nn.StableEmbedding(model.config.vocab_size, model.config.hidden_size)
    fit(run, model)
