"""A model as Meta's Llama and torchtitan write it, with functions in forward: kernels compute its norms and MLPs."""

import pytest
import torch
from tiers import slow
from tiny import rule, rules
from torch import nn
from torch.nn import functional as F

import recompute

WIDTH, HEADS, VOCABULARY = 32, 2, 50


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, frequencies):
        q, k, v = (linear(x).unflatten(-1, (HEADS, -1)) for linear in (self.wq, self.wk, self.wv))
        q, k = (rotated(each, frequencies).transpose(1, 2) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


def rotated(x, frequencies):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * frequencies[: x.shape[1], None]).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH)

    def forward(self, x, frequencies):
        h = x + self.attention(self.attention_norm(x), frequencies)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.outer(torch.arange(16.0, dtype=torch.float64), torch.logspace(0, -3, WIDTH // HEADS // 2))
        self.register_buffer("frequencies", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.layers = nn.ModuleDict({str(index): TransformerBlock() for index in range(2)})
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.frequencies)
        return self.output(self.norm(x))


@pytest.mark.parametrize("layers", [*slow("alone"), "with the head"])
def test_layers_have_kernels_and_are_captured(layers):
    plain, model = Transformer().double(), Transformer().double()
    found = [rule("block", "recompute", via="kernel")]
    if layers == "with the head":
        found.append(rule("head", "recompute", via="kernel"))
    handle = recompute.apply(model, rules(*found))
    for step in range(7):
        tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(step))
        for each in (plain, model):
            each.zero_grad()
            F.cross_entropy(each(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=lambda told, name=name: f"{name}: {told}")
    said = str(handle.explain(wide=True))
    assert ("linear_cross_entropy" in said) == (layers == "with the head")
    assert "kernel: rms_norm (none casting)" in said
    assert "kernel: gated_mlp (silu)" in said
    assert "layers.*: 2 of 2 run as captured code" in said
