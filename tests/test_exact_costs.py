"""What each policy costs two small decoder layers, exactly: the bytes held after forward, and what runs again."""

import pytest
import torch
from tiers import by_default
from tiny import BATCH, HIDDEN, LENGTH, TinyAttention, TinyDecoderLayer, counted_ops
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import recompute
from recompute.counters import memory_trace


def each_layer(**rule):
    return {"rules": [{"type": "TinyDecoderLayer", **rule}]}


RECOMPUTE = {"action": "recompute", "via": "hook"}
MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
FORWARD_FLOPS = 104_448
"""Of the matrix products of both layers."""

# fmt: off
COSTS = {
    # policy, bytes held (768 of them are the output), FLOPs of matrix products that run again, attentions that do
    "none":              ("none",                                                      24_960,      0, 0),
    "elementwise":       ("elementwise",                                               14_016,      0, 0),
    "auto":              ("auto",                                                      14_016,      0, 0),
    "hook":              ("hook",                                                      14_016,      0, 0),
    "kernel":            ("kernel",                                                    14_208,      0, 0),
    "alternate":         ("alternate",                                                 13_248, 43_008, 1),
    "full":              ("full",                                                       1_536, 86_016, 2),
    "keep":              (each_layer(action="keep"),                                   24_960,      0, 0),
    "gemms run again":   (each_layer(**RECOMPUTE, rerun="gemm"),                        3_264, 86_016, 0),
    "all runs again":    (each_layer(**RECOMPUTE, rerun=["gemm", "attention"]),         1_536, 86_016, 2),
    "gemms are kept":    (each_layer(action="checkpoint", keep="gemm"),                12_288,      0, 2),
    "attention is kept": (each_layer(action="checkpoint", keep="attention"),            3_264, 86_016, 0),
    "dear seconds":      (each_layer(**RECOMPUTE, rerun="gemm", price=1e11),            3_456, 86_016, 0),
    "dearer seconds":    (each_layer(**RECOMPUTE, rerun="gemm", price=1e13),           24_960,      0, 0),
    "within a limit":    (each_layer(**RECOMPUTE, rerun="gemm", hold=6_500),           11_904, 18_432, 0),
    "a lower limit":     (each_layer(**RECOMPUTE, rerun="gemm", hold=4_500),            7_296, 55_296, 0),
}
# fmt: on
SOME_COSTS = ("none", "elementwise", "kernel", "full", "gemms run again", "attention is kept", "within a limit")
"""Each way to decide what is held; the other rows are between these."""


class TwoHeads(TinyAttention):
    """Attention is one op here, as on CUDA; of a single head, PyTorch makes matrix products on the CPU."""

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class TwoLayers(nn.Sequential):
    def __init__(self):
        super().__init__(TinyDecoderLayer(), TinyDecoderLayer())
        for layer in self:
            layer.self_attn = TwoHeads()


def held_nbytes(model, x):
    with memory_trace(torch.device("cpu")) as trace:
        result = model(x)
        trace.mark("after forward")
    result.sum().backward()
    return trace.held_nbytes["after forward"]


def work_of_a_step(model, x):
    with counted_ops() as ops, FlopCounterMode(display=False) as flops:
        model(x).sum().backward()
    of_all = flops.get_flop_counts()["Global"]
    return sum(of_all.get(op, 0) for op in MATRIX_PRODUCTS), ops["aten._scaled_dot_product_flash_attention_for_cpu"]


@pytest.mark.parametrize("costs", by_default(COSTS, *SOME_COSTS))
def test_costs_of_each_policy(costs):
    policy, held, flops_again, attentions_again = costs
    torch.manual_seed(0)
    model, x = TwoLayers(), torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
    recompute.apply(model, policy)
    held_nbytes(model, x)  # what is best to hold is known after the first step
    assert held_nbytes(model, x) == held
    assert work_of_a_step(model, x) == (3 * FORWARD_FLOPS + flops_again, 2 + attentions_again)
    for _ in range(5):
        model(x).sum().backward()
    assert held_nbytes(model, x) == held, "as straight code, after some steps that were alike"
