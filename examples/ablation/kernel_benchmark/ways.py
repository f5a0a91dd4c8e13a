"""The ways to compute each op: ours, the formula of Hugging Face's modules, and the peers'."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = tuple[Tensor, ...]
Function = Callable[..., Any]
Load = Callable[[], Function]
"""Imports an op and returns it, so that a missing package fails only the rows of the ways that need it."""

EPS = 1e-6

OURS, OURS_GIB, OURS_ALL = "recompute", "recompute, 1 GiB of logits", "recompute, all logits"
OURS_8_BITS, OURS_UP_8_BITS = "recompute, gate and up in 8 bits", "recompute, up in 8 bits"
EAGER, FUSED, COMPILED, COPY = "eager", "aten fused", "torch.compile", "copy"
LIGER, LIGER_FLOAT32, QUACK, CCE = "Liger", "Liger, float32 sums", "quack", "cut-cross-entropy"
TRL, TORCH = "TRL", "torch, in chunks"
BARS = (
    *(OURS, OURS_8_BITS, OURS_UP_8_BITS, OURS_GIB, OURS_ALL, EAGER, FUSED, COMPILED),
    *(LIGER, LIGER_FLOAT32, QUACK, CCE, TRL, TORCH),
)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as Hugging Face computes it. The other eager formulas here are Hugging Face's, too."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(x.dtype)


def aten_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, norm: Function = rms_norm) -> Tensors:
    h = x + residual
    return norm(h, weight), h


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's own, which Hugging Face's models use. It is one kernel."""
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, norm: Function = layer_norm) -> Tensors:
    h = x + residual
    return norm(h, weight, bias), h


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-high, low), dim=-1) * sin.unsqueeze(1)

    return rotated(q), rotated(k)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, product: Function = swiglu) -> Tensor:
    return F.linear(product(F.linear(x, gate), F.linear(x, up)), down)


def mlp(x: Tensor, up: Tensor, down: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
    """GPT-NeoX's. GPT-2's has the approximate GELU, and its weights transposed."""
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def linear_log_probs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def linear_log_probs_and_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensors:
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def linear_divergence(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, kind: str = "jsd"
) -> Tensor:
    """Its mean, which is what Liger's returns."""
    log_p = F.linear(student, student_weight).float().log_softmax(-1)
    log_q = F.linear(teacher, teacher_weight).float().log_softmax(-1)
    if kind == "forward_kl":
        return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
    if kind == "reverse_kl":
        return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    if kind == "total_variation":
        return (log_p.exp() - log_q.exp()).abs().sum(-1).mean() / 2
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return sum(F.kl_div(log_m, each, reduction="batchmean", log_target=True) for each in (log_p, log_q)) / 2


def op(module: str, name: str, *last: Any, **options: Any) -> Load:
    """The op of that name, to which these arguments are given after its inputs."""

    def load() -> Function:
        function = attrgetter(name)(import_module(module))
        return lambda *inputs: function(*inputs, *last, **options)

    return load


def formula(function: Function, **parts: Load) -> Load:
    """A formula of ours, in which a peer's op stands in for a part."""
    return lambda: partial(function, **{name: load() for name, load in parts.items()})


def compiled(function: Function) -> Load:
    return lambda: torch.compile(function, dynamic=False)


def first_of(load: Load) -> Load:
    def load_it() -> Function:
        function = load()
        return lambda *inputs: function(*inputs)[0]

    return load_it


def quack_add_rms_norm() -> Function:
    norm = import_module("quack").rmsnorm
    return lambda x, residual, weight: norm(x, weight, residual=residual, eps=EPS, prenorm=True)


def trl_log_probs(*outputs: str) -> Load:
    """With ``entropy``, the entropies too."""

    def load() -> Function:
        compute = import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction.apply

        def call(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
            found = compute(hidden, weight, None, target, 1.0, TRL_WIDTH, None, 1.0, outputs)
            return found[: 1 + len(outputs)]

        return call

    return load


def trl_divergence(beta: float) -> Load:
    def load() -> Function:
        compute = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction.apply
        return lambda *student_and_teacher: compute(*given(*student_and_teacher), beta)[0].mean()

    def given(student: Tensor, weight: Tensor, teacher: Tensor, head: Tensor) -> tuple[Any, ...]:
        return student, weight, None, teacher, head, None

    return load


def torch_linear_cross_entropy(reduction: str = "mean") -> Load:
    """Of torch 2.14."""

    def load() -> Function:
        options = import_module("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions()
        return partial(F.linear_cross_entropy, reduction=reduction, options=options)

    return load


def negative(load: Load) -> Load:
    def load_it() -> Function:
        function = load()
        return lambda *inputs: -function(*inputs)

    return load_it


def mean_of(load: Load) -> Load:
    def load_it() -> Function:
        function = load()
        return lambda *inputs: function(*inputs).mean()

    return load_it


def our_mlp(**options: Any) -> Load:
    def load() -> Function:
        function = import_module("recompute.kernels.mlp").mlp

        def call(x: Tensor, up: Tensor, down: Tensor, up_bias: Tensor, down_bias: Tensor) -> Tensor:
            return function(x, up, down, "gelu", up_bias=up_bias, down_bias=down_bias, **options)

        return call

    return load


LIGER_NORM = op("liger_kernel.ops", "LigerRMSNormFunction.apply", EPS)
LIGER_ADD_NORM = op("liger_kernel.ops", "LigerFusedAddRMSNormFunction.apply", EPS)
LIGER_LAYER_NORM = op("liger_kernel.ops", "LigerLayerNormFunction.apply", EPS)
LIGER_SWIGLU = op("liger_kernel.ops", "LigerSiLUMulFunction.apply")
LIGER_CROSS_ENTROPY = partial(op, "liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction.apply")
# bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype
FLOAT32_SUMS = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
TRL_WIDTH = 32768  # the columns of a block, as TRL sets it
OUR_LOG_PROBS = partial(op, "recompute.kernels.linear_log_probs", "linear_log_probs")
OUR_DIVERGENCE = partial(op, "recompute.kernels.linear_divergence", "linear_divergence")
KINDS = {"jsd": 0.5, "forward_kl": 0.0, "reverse_kl": 1.0, "total_variation": None}
"""Kinds of divergences, and the beta that peers call them by; None where they have none of that kind."""


def divergence_ways(kind: str, beta: float | None) -> dict[str, Load]:
    eager = partial(linear_divergence, kind=kind)
    ways = {
        OURS: mean_of(OUR_DIVERGENCE(kind=kind)),
        OURS_GIB: mean_of(OUR_DIVERGENCE(kind=kind, logits_bytes=1 << 30)),
        OURS_ALL: mean_of(OUR_DIVERGENCE(kind=kind, logits_bytes=math.inf)),
        EAGER: formula(eager),
        COMPILED: compiled(eager),
    }
    if beta is not None:
        ways[LIGER] = op("liger_kernel.ops.fused_linear_jsd", "LigerFusedLinearJSDFunction.apply", None, beta)
        ways[TRL] = trl_divergence(beta)
    return ways


OUR_CROSS_ENTROPY = partial(op, "recompute.kernels.linear_cross_entropy", "linear_cross_entropy")

WAYS: dict[str, dict[str, Load]] = {
    "rms_norm": {
        OURS: op("recompute.kernels.rms_norm", "rms_norm", EPS, "llama"),
        EAGER: formula(rms_norm),
        FUSED: formula(aten_rms_norm),
        COMPILED: compiled(rms_norm),
        LIGER: LIGER_NORM,
        QUACK: op("quack", "rmsnorm", eps=EPS),
    },
    "add_rms_norm": {
        OURS: op("recompute.kernels.rms_norm", "add_rms_norm", EPS, "llama"),
        EAGER: formula(add_rms_norm),
        FUSED: formula(add_rms_norm, norm=formula(aten_rms_norm)),
        COMPILED: compiled(add_rms_norm),
        LIGER: LIGER_ADD_NORM,
        QUACK: quack_add_rms_norm,
    },
    "layer_norm": {
        OURS: op("recompute.kernels.layer_norm", "layer_norm", EPS),
        EAGER: formula(layer_norm),
        COMPILED: compiled(layer_norm),
        LIGER: LIGER_LAYER_NORM,
    },
    "add_layer_norm": {
        OURS: op("recompute.kernels.layer_norm", "add_layer_norm", EPS),
        EAGER: formula(add_layer_norm),
        COMPILED: compiled(add_layer_norm),
        LIGER: formula(add_layer_norm, norm=LIGER_LAYER_NORM),
    },
    "swiglu": {
        OURS: op("recompute.kernels.swiglu", "swiglu"),
        EAGER: formula(swiglu),
        COMPILED: compiled(swiglu),
        LIGER: LIGER_SWIGLU,
    },
    "geglu": {
        OURS: op("recompute.kernels.swiglu", "geglu"),
        EAGER: formula(geglu),
        COMPILED: compiled(geglu),
        LIGER: op("liger_kernel.ops", "LigerGELUMulFunction.apply"),
    },
    "rope": {
        OURS: op("recompute.kernels.rope", "rope"),
        EAGER: formula(rope),
        COMPILED: compiled(rope),
        LIGER: op("liger_kernel.ops", "LigerRopeFunction.apply"),
    },
    "gated_mlp": {
        OURS: op("recompute.kernels.gated_mlp", "gated_mlp"),
        OURS_8_BITS: op("recompute.kernels.gated_mlp", "gated_mlp", compress=True),
        EAGER: formula(gated_mlp),
        COMPILED: compiled(gated_mlp),
        LIGER: formula(gated_mlp, product=LIGER_SWIGLU),
    },
    "mlp": {
        OURS: our_mlp(),
        OURS_UP_8_BITS: our_mlp(compress=True),
        EAGER: formula(mlp),
        COMPILED: compiled(mlp),
    },
    "linear_cross_entropy": {
        OURS: OUR_CROSS_ENTROPY(),
        OURS_GIB: OUR_CROSS_ENTROPY(logits_bytes=1 << 30),
        OURS_ALL: OUR_CROSS_ENTROPY(logits_bytes=math.inf),
        EAGER: formula(linear_cross_entropy),
        COMPILED: compiled(linear_cross_entropy),
        LIGER: first_of(LIGER_CROSS_ENTROPY()),
        LIGER_FLOAT32: first_of(LIGER_CROSS_ENTROPY(*FLOAT32_SUMS)),
        CCE: op("cut_cross_entropy", "linear_cross_entropy"),
        TORCH: torch_linear_cross_entropy(),
    },
    "linear_log_probs": {
        OURS: OUR_LOG_PROBS(),
        OURS_GIB: OUR_LOG_PROBS(logits_bytes=1 << 30),
        OURS_ALL: OUR_LOG_PROBS(logits_bytes=math.inf),
        EAGER: formula(linear_log_probs),
        COMPILED: compiled(linear_log_probs),
        TRL: first_of(trl_log_probs()),
        TORCH: negative(torch_linear_cross_entropy("none")),
    },
    "linear_log_probs_and_entropy": {
        OURS: OUR_LOG_PROBS(entropy=True),
        OURS_ALL: OUR_LOG_PROBS(entropy=True, logits_bytes=math.inf),
        EAGER: formula(linear_log_probs_and_entropy),
        COMPILED: compiled(linear_log_probs_and_entropy),
        TRL: trl_log_probs("entropy"),
    },
    **{f"linear_{kind}": divergence_ways(kind, beta) for kind, beta in KINDS.items()},
}
