"""``recompute.estimate``: the bytes of a training step, before there is a device to run it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recompute.estimation.adapters import ALL_LINEAR
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Estimate
from recompute.estimation.gpus import find_gpu
from recompute.estimation.static_memory import check_counts
from recompute.policy.loading import load_policy

if TYPE_CHECKING:
    from recompute.attach.apply import PolicyLike
    from recompute.estimation.model_estimator import ModelEstimator
    from recompute.estimation.storage_tracker import OpClock


def estimate(
    model: Any,
    *,
    batch_size: int = 1,
    seq_len: int = 4096,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    sharding: str = "none",
    devices: int = 1,
    policy: PolicyLike | None = None,
    loss: str = "full",
    microbatches: int = 1,
    microbatches_in_flight: int = 1,
    lora: Any = None,
    lora_targets: str | Sequence[str] = ALL_LINEAR,
    base: str = "",
    batch: Any = None,
    gpu: str | None = None,
    advise: bool = True,
) -> Estimate:
    """Estimate the memory of a training step of ``model`` on a CUDA device. Needs no GPU, and no memory for the model.

    It runs forward, backward and the optimizer's step on tensors without values, and counts the bytes alive at each
    moment. It assumes that gradients are freed between steps (``zero_grad``'s default), and that outputs beside the
    loss are freed before backward.

    model: an ``nn.Module`` on any device, also ``meta``, which is left as it is, and whose floating-point parameters
        are counted in ``dtype``; a Hugging Face configuration, its ``config.json`` or the folder of that, or a name
        that Hugging Face knows (no weights are fetched); or an ablation's .yaml file.
    batch_size, seq_len: of token ids, or images, for a model of Hugging Face's.
    batch: forward's arguments, otherwise: a mapping of keyword arguments, a tuple, or a tensor. Values do not matter.
        The loss is the output's ``loss``, or the sum of the output.
    dtype: "bfloat16", "bfloat16-autocast", "bfloat16-mixed", "float32": ``static_memory.DTYPE_RECIPES`` explains them.
    optimizer: "adamw" (``foreach``), "adamw-fused", "adamw-loop", "adamw-8bit", "sgd", "sgd-momentum".
    sharding: "none", "ddp", "zero1", "zero2", "zero3" or "fsdp2".
    devices: how many share the model. The batch is that of one of them.
    policy: as ``recompute.apply`` takes it.
    loss: "full" with whole logits, or "chunked" without them, by ``recompute.kernels.linear_cross_entropy``.
    microbatches, microbatches_in_flight: as ``recompute.plan`` takes them, for gradient accumulation and stages of
        pipelines. ``batch`` and ``batch_size`` are one microbatch's.
    lora: the rank of LoRA adapters, or any adapter's configuration of PEFT's. They train, in ``dtype``, and nothing
        else does.
    lora_targets: the modules that a LoRA of that rank adapts: "all-linear", or names.
    base: the frozen base's form: "bfloat16", or, for its Linears but the head, "int8", "nf4", "nf4-double" or "float8",
        which ``adapters.BASES`` explains. By default it is in ``dtype``.
    gpu: the device whose kernels are assumed, by a name that ``recompute.estimation.gpus`` knows; by default this
        machine's, or an H100.
    advise: whether to try changes for ``advice``, and each takes an estimate of its own.

    Raises ``EstimateError`` for an unknown option, ``PolicyError`` for a bad policy, and ``ModelError`` where there is
    no such model, or where it cannot run on tensors without values: then the error names the module.

    >>> model, batch = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()), torch.randn(512, 64)
    >>> recompute.estimate(model, batch=batch, dtype="float32", gpu="H100").activation_bytes  # GELU's input, the loss
    524800
    """
    check_counts(batch_size=batch_size, seq_len=seq_len)
    several = microbatches, microbatches_in_flight, lora, lora_targets, base
    options = EstimateOptions(dtype, optimizer, sharding, devices, loss, *several).read()
    loaded = None if policy is None else load_policy(policy)
    with estimator_of(model, options, batch_size, seq_len, batch, gpu) as estimator:
        found = estimator.estimate(options, loaded)
        return replace(found, advice=tuple(estimator.advice(options, loaded, found))) if advise else found


@contextmanager
def estimator_of(
    model: Any,
    options: EstimateOptions,
    batch_size: int,
    seq_len: int,
    batch: Any,
    gpu: str | None,
    timed: OpClock | None = None,
) -> Iterator[ModelEstimator]:
    """Inside, estimates the model under any options. ``ModelEstimator`` has ``timed``, ``estimate`` the others."""
    device = None if gpu is None else find_gpu(gpu)

    # These import torch and transformers.
    from recompute.estimation.attention_choice import Platform
    from recompute.estimation.model_and_batch import fake_model_and_batch
    from recompute.estimation.model_estimator import ModelEstimator
    from recompute.substitution.formulas import looking_once

    with fake_model_and_batch(model, options, batch_size, seq_len, batch) as subject, looking_once():
        yield ModelEstimator(subject, Platform.of(device), timed=timed)
