"""Adapts a model by PEFT, with its frozen base in the form that is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.quantizers.base import get_keys_to_not_convert

from recompute.engine.numerics import default_dtype
from recompute.errors import ModelError
from recompute.estimation.adapters import ALL_LINEAR, Adapters
from recompute.estimation.quantized_linear import QuantizedLinear
from recompute.policy.document import nearest


def adapting(adapters: Adapters | None, dtype: torch.dtype, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Options of ``build_model.build``: the model's dtype, and what makes it the model that trains, in ``dtype``."""
    if adapters is None:
        return {"dtype": dtype}
    adapt = partial(adapted, adapters=adapters, dtype=dtype, compute_dtype=compute_dtype)
    return {"dtype": torch.bfloat16 if adapters.base == "bfloat16" else dtype, "adapt": adapt}


def adapted(model: nn.Module, adapters: Adapters, dtype: torch.dtype, compute_dtype: torch.dtype) -> nn.Module:
    """The model as ``peft.get_peft_model`` returns it; it takes the place of ``model``, which it changes.

    dtype: of the adapters, which train; float32, as PEFT makes them, or that of the base. What is not quantized of
        the base stays in the dtype that it has.
    compute_dtype: in which a quantized Linear computes.

    Raises ``ModelError`` where PEFT is missing or refuses the model.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModelError(
            f"adapters need PEFT, and there is no module {error.name}. Run pip install 'torch-recompute[peft]'"
        ) from error
    name = type(model).__name__
    model.requires_grad_(False)
    if adapters.is_quantized:
        quantize(model, adapters.base, compute_dtype)
    config, targets = adapters.lora, adapters.targets
    if isinstance(config, int):
        _check_targets(model, targets, name)
        config = {"r": config, "target_modules": targets if isinstance(targets, str) else list(targets)}
    try:
        if isinstance(config, Mapping):
            config = peft.LoraConfig(**config)
        with default_dtype(dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads what transformers calls by another name now
            return peft.get_peft_model(model, config, autocast_adapter_dtype=dtype is torch.float32).train()
    except (ValueError, TypeError, RuntimeError) as error:
        raise ModelError(f"{name}: PEFT cannot add adapters to this model: {error}") from error


def quantize(model: nn.Module, base: str, compute_dtype: torch.dtype) -> None:
    """Replace the Linears that transformers' quantizers replace: all but heads, tied ones and the last module."""
    if isinstance(model, transformers.PreTrainedModel):
        kept = set(get_keys_to_not_convert(model))
    else:
        kept = {list(model.named_parameters())[-1][0].rpartition(".")[0]}
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path not in kept:
            features = module.in_features, module.out_features
            made = QuantizedLinear(features, module.bias, base, compute_dtype, module.weight.device)
            model.set_submodule(path, made)


def _check_targets(model: nn.Module, targets: str | Sequence[str], name: str) -> None:
    if targets == ALL_LINEAR:
        return
    paths = [path for path, _ in model.named_modules() if path]
    for each in targets:
        if not any(f".{path}".endswith(f".{each}") for path in paths):
            known = {path.rpartition(".")[2] for path in paths}
            raise ModelError(
                f"lora_targets: expected {ALL_LINEAR}, or names of modules of {name}, as in q_proj,v_proj; found "
                f"{each!r}{nearest(each, known)}"
            )
